"""A run's configuration: one YAML file, checked before anything is started.

Only who loads a configuration imports this module: it needs pydantic and OmegaConf, and the command line starts without.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, ValidationError, model_validator

from mcore_rlhf.errors import UsageError

from .checkpoint import CheckpointSection, Section
from .errors import explain
from .sections import AlgorithmSection, DataSection, RunnerSection, TrainerSection
from .source import read_source
from .values import path

if TYPE_CHECKING:
    from typing_extensions import Self

    from ..run.resume import Resume

CHECKPOINTS = "checkpoints"


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
    from ..run.resume import Resume

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
