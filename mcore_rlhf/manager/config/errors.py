"""What is wrong with a run's configuration, in the reader's words: file and line, key, expected, found, and a guess
at what was meant.
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from mcore_rlhf.errors import Problems, UsageError

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

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


@dataclass(frozen=True, slots=True)
class Origin:
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


def explain(error: ValidationError, model: type[BaseModel], origin: Origin) -> Problems:
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
    close = difflib.get_close_matches(name.replace("-", "_"), siblings, n=1)
    if close:
        return f"unknown key; did you mean {close[0]!r}?", ""
    homes = [ELSEWHERE[name]] if name in ELSEWHERE else [text(other) for other in known if other[-1] == name]
    if homes:
        return f"unknown key; did you mean {' or '.join(homes[:3])}?", ""
    if len(key) == 1 and name in _OTHER_PROGRAMS:
        return "this section is for another program", "Keep it in that program's own file, or put it under 'extra:'."
    section = text(key[:-1]) or "the whole"
    return "unknown key", f"Known keys of {section}: {', '.join(siblings) or 'none'}"
