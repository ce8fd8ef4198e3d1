"""A run's configuration: one YAML file, with what the command line overrides, checked before anything is started."""

from __future__ import annotations

import hashlib
import json
import os
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, Field, ValidationError, model_validator

from mcore_rlhf.core.yaml_text import MAX_NBYTES, check_yaml, wrong_yaml
from mcore_rlhf.errors import Problems, UsageError, headline, shown
from mcore_rlhf.storage import reading
from mcore_rlhf.storage.paths import storage_error
from mcore_rlhf.suggestions import meant

from .sections import AlgorithmSection, CheckpointSection, DataSection, RunnerSection, Section, TrainerSection, path

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails
    from typing_extensions import Self

    from ..run.candidates import Resume


Key = tuple[str | int, ...]

# What RLinf, verl and Megatron call it → where it is here. Only for advice: nothing is renamed silently.
ELSEWHERE = {
    "tensor_model_parallel_size": "actor.parallel.tp", "pipeline_model_parallel_size": "actor.parallel.pp",
    "context_parallel_size": "actor.parallel.cp", "expert_model_parallel_size": "actor.parallel.ep",
    "kl_beta": "algorithm.kl.coefficient", "kl_coef": "algorithm.kl.coefficient", "target_kl": "algorithm.kl.target",
    "ratio_clip_eps": "algorithm.clip.low and algorithm.clip.high", "clip_ratio_low": "algorithm.clip.low",
    "clip_ratio_high": "algorithm.clip.high", "clip_ratio_c": "algorithm.clip.dual", "value_clip": "algorithm.clip.value",
    "adv_type": "algorithm.name", "save_freq": "runner.save_interval", "resume": "runner.resume_dir",
    "async_save": "checkpoint.asynchronous", "model_path": "actor.model_dir",
}  # fmt: skip
_EXPECTED = {"model_type": "expected a section of keys", "too_short": "expected at least one item"}
_OTHER_PROGRAMS = {"defaults", "hydra", "cluster", "rollout", "reward", "ray_kwargs", "env"}

_OVERRIDE = re.compile(r"([A-Za-z_]\w*(?:\.\w+|\[\d+\])*)=(.*)", re.DOTALL)

_REFERENCE = re.compile(r"\$\{\s*([\w.]+)\s*\}")

CHECKPOINTS = "checkpoints"


@dataclass(frozen=True, slots=True)
class ConfigOrigin:
    """Where the values of a configuration were written.

    Args:
        name: The file, or ``the configuration`` where it is a dictionary.
        lines: Line of every key, counted from 1.
        overrides: Keys that the command line set.
    """

    name: str
    lines: Mapping[Key, int] = field(default_factory=dict)
    overrides: frozenset[str] = frozenset()

    def where(self, key: Key) -> str:
        """``grpo.yaml:12: runner.save_interval``, or the line of what the key would stand in."""
        dotted = text(key)
        set_here = any(f"{dotted}.".startswith(f"{given}.") for given in self.overrides)
        if set_here or (key not in self.lines and any(given.startswith(f"{dotted}.") for given in self.overrides)):
            return f"override {dotted}"
        line = next((self.lines[key[:end]] for end in range(len(key), 0, -1) if key[:end] in self.lines), None)
        place = f"{self.name}:{line}" if line else self.name
        return f"{place}: {dotted}" if dotted else place


def text(key: Key) -> str:
    """``data.train_data_paths[0]``."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in key).lstrip(".")


def lines_of(document: str) -> dict[Key, int]:
    """The line of every key of a YAML text that can be parsed."""
    found: dict[Key, int] = {}
    root = yaml.compose(document)
    if root is not None:
        _note_lines(root, (), found)
    return found


def _note_lines(node: yaml.Node, at: Key, found: dict[Key, int]) -> None:
    children: list[tuple[str | int, yaml.Node, yaml.Node]] = []
    if isinstance(node, yaml.MappingNode):
        children = [(str(key.value), key, value) for key, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        children = [(index, value, value) for index, value in enumerate(node.value)]
    for name, key, value in children:
        inside = (*at, name)
        found[inside] = key.start_mark.line + 1
        _note_lines(value, inside, found)


def known_keys(model: type[BaseModel], at: Key = ()) -> Iterator[Key]:
    """Every key that a configuration may have: sections, and what is in them."""
    for name, info in model.model_fields.items():
        yield (*at, name)
        inner = _section(info.annotation)
        if inner is not None:
            yield from known_keys(inner, (*at, name))


def _section(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (Union, types.UnionType):
        return next((found for part in get_args(annotation) if (found := _section(part))), None)
    return None


def explain(error: ValidationError, model: type[BaseModel], origin: ConfigOrigin) -> Problems:
    """Every complaint of pydantic as one problem."""
    problems, known = Problems(), list(known_keys(model))
    for item in error.errors():
        key = tuple(item["loc"])
        where = origin.where(key)
        if item["type"] == "extra_forbidden":
            message, advice = _unknown(key, known)
            problems.add(UsageError, f"{where}: {message}", advice)
        else:
            problems.add(UsageError, f"{where}: {_complaint(item)}")
    return problems


def _complaint(item: ErrorDetails) -> str:
    if item["type"] == "missing":
        return "is missing"
    if item["type"] == "value_error":
        return item["msg"].removeprefix("Value error, ")
    said = _EXPECTED.get(item["type"]) or item["msg"].replace("Input should be", "expected", 1)
    return f"{said}, found {item['input']!r}"


def _unknown(key: Key, known: Sequence[Key]) -> tuple[str, str]:
    """What to say of a key that is not known: a near miss, its right place, or all that is known there."""
    name = str(key[-1])
    siblings = [str(other[-1]) for other in known if other[:-1] == key[:-1]]
    if near := meant(name, siblings):
        return f"unknown key; did you mean {near!r}?", ""
    homes = [ELSEWHERE[name]] if name in ELSEWHERE else [text(other) for other in known if other[-1] == name]
    if homes:
        return f"unknown key; did you mean {' or '.join(homes[:3])}?", ""
    if len(key) == 1 and name in _OTHER_PROGRAMS:
        return "this section is for another program", "Keep it in that program's own file, or put it under 'extra:'."
    section = text(key[:-1]) or "the whole"
    return "unknown key", f"Known keys of {section}: {', '.join(siblings) or 'none'}"


def read_source(source: Path | Mapping[str, Any], overrides: Sequence[str]) -> tuple[dict[str, Any], ConfigOrigin]:
    """The values of a configuration, and where each of them was written.

    Args:
        source: A YAML file, or the values.
        overrides: ``a.b=c``, with the value in YAML; the last one wins.

    Raises:
        UsageError: It cannot be parsed, or ``${…}`` leads nowhere; all such keys are named.
        StorageError: The file cannot be read.
    """
    config, origin = _opened(source)
    given = _checked(overrides)
    try:
        merged = OmegaConf.merge(config, OmegaConf.from_dotlist(list(overrides)))
    except (OmegaConfBaseException, yaml.YAMLError, ValueError, TypeError, IndexError) as error:
        raise UsageError(f"overrides {', '.join(overrides)}: {headline(str(error))}") from None
    if not isinstance(merged, DictConfig):
        raise UsageError(f"{origin.name}: expected sections such as 'runner:', found a list")
    origin = ConfigOrigin(origin.name, origin.lines, given)
    problems = Problems()
    for key, parent, name in _leaves(merged, ()):
        _check(key, parent, name, origin, problems)
    problems.raise_if_any()
    return _plain(merged), origin


def _opened(source: Path | Mapping[str, Any]) -> tuple[DictConfig, ConfigOrigin]:
    if isinstance(source, Mapping):
        return _created(dict(source), "the configuration"), ConfigOrigin("the configuration")
    name = str(source)
    try:
        document = reading.read_text(source, MAX_NBYTES)
    except OSError as error:
        raise storage_error(error, source, "read", "the run's configuration") from error
    except UnicodeDecodeError:
        raise UsageError(f"{name}: is not a YAML file: it is not UTF-8 text") from None
    return _created(document, name), ConfigOrigin(name, lines_of(document))


def _created(content: dict[str, Any] | str, name: str) -> DictConfig:
    try:
        if isinstance(content, str):
            check_yaml(content)
        config = OmegaConf.create(content)
    except yaml.YAMLError as error:
        raise UsageError(f"{name}: is not valid YAML: {wrong_yaml(error)}") from None
    except (OmegaConfBaseException, ValueError) as error:
        found = f"{getattr(error, 'full_key', None) or ''}: {headline(str(error))}"
        raise UsageError(f"{name}: {found.removeprefix(': ')}") from None
    if not isinstance(config, DictConfig) or not config:
        raise UsageError(f"{name}: expected sections such as 'runner:', found {str(content).strip()[:40]!r}")
    return config


def _checked(overrides: Sequence[str]) -> frozenset[str]:
    problems, names = Problems(), set[str]()
    for override in overrides:
        match = _OVERRIDE.fullmatch(override)
        if match is None:
            advice = "Write runner.save_interval=50: keys as in the file, without + and ~."
            problems.add(UsageError, f"override {shown(override)}: expected key=value", advice)
        else:
            names.add(match[1])
            _check_override(override, match[2], problems)
    problems.raise_if_any()
    return frozenset(names)


def _check_override(override: str, value: str, problems: Problems) -> None:
    try:
        check_yaml(value)
    except yaml.YAMLError as error:
        problems.add(UsageError, f"override {shown(override)}: {wrong_yaml(error)}")


def _leaves(node: DictConfig | ListConfig, at: Key) -> Iterator[tuple[Key, DictConfig | ListConfig, Any]]:
    """Every value and every reference, without following references."""
    if node._is_none() or node._is_missing():
        return
    names: list[Any] = list(range(len(node))) if isinstance(node, ListConfig) else list(node.keys())
    for name in names:
        key = (*at, name if isinstance(name, int) and isinstance(node, ListConfig) else str(name))
        child = node._get_node(name)
        if isinstance(child, (DictConfig, ListConfig)) and not OmegaConf.is_interpolation(node, name):
            yield from _leaves(child, key)
        else:
            yield key, node, name


def _check(key: Key, parent: DictConfig | ListConfig, name: Any, origin: ConfigOrigin, problems: Problems) -> None:
    if OmegaConf.is_missing(parent, name):
        problems.add(UsageError, f"{origin.where(key)}: has no value yet (???)", "Set it in the file, or by key=value.")
        return
    try:
        parent[name]
    except RecursionError:
        problems.add(UsageError, f"{origin.where(key)}: refers to itself: {_raw(parent, name)}")
    except OmegaConfBaseException as error:
        said = f"cannot fill in {_raw(parent, name)}: {headline(str(error))}{_near_miss(parent, _raw(parent, name))}"
        problems.add(UsageError, f"{origin.where(key)}: {said}", _advice(error))


def _raw(parent: DictConfig | ListConfig, name: Any) -> str:
    node = parent._get_node(name)
    return str(getattr(node, "_value", lambda: "")())


def _near_miss(parent: DictConfig | ListConfig, raw: str) -> str:
    known = [text(key) for key, _, _ in _leaves(parent._get_root(), ())]  # type: ignore[arg-type]
    for wanted in _REFERENCE.findall(raw):
        if wanted not in known and (near := meant(wanted, known)):
            return f"; did you mean ${{{near}}}?"
    return ""


def _advice(error: Exception) -> str:
    if "Unsupported interpolation type" in str(error):
        return "Only OmegaConf's own resolvers are there (oc.env, …): write the value itself."
    return (
        "Set it (export NAME=…), or give a default: ${oc.env:NAME,value}"
        if "Environment variable" in str(error)
        else ""
    )


def _plain(config: DictConfig) -> dict[str, Any]:
    plain = OmegaConf.to_container(config, resolve=True)
    return {str(name): value for name, value in plain.items()} if isinstance(plain, dict) else {}


class RunConfig(Section):
    """Everything about a run, typed and checked.

    Args:
        runner: The run as a whole: name, folders, how long, what to resume from.
        algorithm: GRPO or PPO.
        data: The prompts and their order.
        actor: The policy.
        critic: The value function, with PPO.
        checkpoint: When to save, what to keep, how to resume.
        extra: The user's own; not looked at.
    """

    runner: RunnerSection
    algorithm: AlgorithmSection
    data: DataSection
    actor: TrainerSection = TrainerSection()
    critic: TrainerSection | None = None
    checkpoint: CheckpointSection = CheckpointSection()
    extra: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _sections_fit_each_other(self) -> Self:
        wrong = [text for text in (self._about_critic(), self._about_saving(), self._about_batches()) if text]
        if wrong:
            raise ValueError("; ".join(wrong))
        return self

    def _about_critic(self) -> str:
        if self.algorithm.name == "ppo" and self.critic is None:
            return "algorithm.name: ppo needs a section 'critic'"
        if self.algorithm.name == "grpo" and self.critic is not None:
            return "algorithm.name: grpo has no critic; leave the section out, or set name: ppo"
        return ""

    def _about_saving(self) -> str:
        mine, theirs = self.checkpoint.save.every_steps, self.runner.save_interval
        if mine is not None and theirs not in (-1, mine):
            return f"runner.save_interval is {theirs}, and checkpoint.save.every_steps is {mine}: give one of them"
        return ""

    def _about_batches(self) -> str:
        samples = self.data.rollout_batch_size * self.algorithm.group_size
        if samples % self.algorithm.n_minibatches:
            return (
                f"data.rollout_batch_size × algorithm.group_size = {samples} samples cannot be divided into "
                f"algorithm.n_minibatches: {self.algorithm.n_minibatches}"
            )
        return ""

    @property
    def checkpoint_root(self) -> Path:
        """The folder of all steps, absolute, where RLinf has it: ``output_dir/experiment_name/checkpoints``.

        For FSDP it is ``log_path/experiment_name/checkpoints``, with the names of ``runner.logger`` where it has them.

        Source: RLinf, ``rlinf/runners/reasoning_runner.py`` at 081670e, and its runners of embodied policies.
        """
        runner, folder, name = self.runner, self.runner.output_dir, self.runner.experiment_name
        if self.actor.training_backend == "fsdp":
            folder, name = runner.logger.log_path or folder, runner.logger.experiment_name or name
        return Path(folder, name, CHECKPOINTS).absolute()

    @property
    def resume(self) -> Resume:
        """What ``runner.resume_dir`` asks to resume from."""
        return parse_resume(self.runner.resume_dir)

    @property
    def save_every(self) -> int | None:
        """The distance of saves in steps, from either of its two keys; None without."""
        interval = self.runner.save_interval
        return self.checkpoint.save.every_steps or (interval if interval > 0 else None)


def load_run_config(source: str | os.PathLike[str] | Mapping[str, Any], overrides: Sequence[str] = ()) -> RunConfig:
    """Read and check a run's configuration.

    Args:
        source: A YAML file, or its values. ``${runner.output_dir}`` refers to another key, ``${oc.env:NAME,default}`` to
            the environment.
        overrides: ``runner.save_interval=50``: wins over the file.

    Raises:
        UsageError: Keys are unknown, missing or impossible, or ``${…}`` leads nowhere; all are named, with file and line.
        StorageError: The file cannot be read.
    """
    values, origin = read_source(source if isinstance(source, Mapping) else Path(source).expanduser(), overrides)
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        raise UsageError(explain(error, RunConfig, origin).describe()) from None


def parse_resume(value: str | int | os.PathLike[str] | None) -> Resume:
    """What to resume from.

    Args:
        value: ``auto``: the newest committed step, if there is one. None, ``none`` or ``null``: nothing. A number: that
            step. Anything else: the path of a step, with ``~`` and ``$NAME`` filled in; a relative one counts from where
            the command runs.

    Raises:
        UsageError: It is none of these, or names a variable that is not set.
    """
    from ..run.candidates import Resume

    if value is None or (isinstance(value, str) and value.strip().lower() in ("", "none", "null", "auto")):
        return Resume.parse(value)
    if (type(value) is int and value >= 0) or (isinstance(value, str) and value.strip().isdecimal()):
        return Resume.parse(int(value))
    if not isinstance(value, (str, os.PathLike)) or (isinstance(value, str) and _is_number(value)):
        raise UsageError(f"resume: expected auto, none, the number of a step or a path, found {value!r}")
    try:
        return Resume.parse(Path(path(os.fspath(value).strip())))
    except ValueError as error:
        raise UsageError(f"resume: {error}") from None


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def config_hash(config: RunConfig | Mapping[str, Any]) -> str:
    """SHA-256 of a configuration as canonical JSON (keys sorted, no spaces, UTF-8), for a manifest's provenance.

    Of a :class:`RunConfig` it covers every value that holds, defaults and filled-in references included.

    Raises:
        UsageError: The mapping holds something that JSON has not.
    """
    values = config.model_dump(mode="json") if isinstance(config, RunConfig) else config
    try:
        canonical = json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UsageError(f"the configuration has no hash: {error}") from None
    return hashlib.sha256(canonical.encode("utf-8", "surrogatepass")).hexdigest()
