"""The sections of a run's configuration; the keys of ``runner`` are RLinf's."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from mcore_rlhf.errors import UsageError
from mcore_rlhf.layouts.parallel import ParallelConfig
from mcore_rlhf.storage.paths import local_path, parse_size

if TYPE_CHECKING:
    from typing_extensions import Self


_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|min|h|d)?", re.IGNORECASE)
_SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_CLOCK = re.compile(r"(?:(\d+)-)?((?:\d+:)?\d+:\d\d)")
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")


def size(value: object) -> object:
    """Bytes from ``2TB`` (decimal), ``2TiB`` or ``2T`` (binary), ``500000`` (bytes); what is no text stays as it is.

    Raises:
        ValueError: It is none of these.
    """
    return parse_size(value) if isinstance(value, str) else value


def duration(value: object) -> object:
    """Seconds from ``90``, ``90s``, ``30m``, ``4h``, ``2d``, or SLURM's ``MM:SS``, ``HH:MM:SS``, ``D-HH:MM:SS``.

    YAML itself reads ``4:00:00`` as a number in base 60, which are the same seconds.

    Raises:
        ValueError: It is none of these.
    """
    if not isinstance(value, str):
        return float(value) if type(value) is int else value
    text = value.strip()
    if amount := _AMOUNT.fullmatch(text):
        return float(amount[1]) * _SECONDS[(amount[2] or "s").lower()]
    if clock := _CLOCK.fullmatch(text):
        seconds = 0
        for part in clock[2].split(":"):
            seconds = seconds * 60 + int(part)
        return float(int(clock[1] or 0) * _SECONDS["d"] + seconds)
    raise ValueError(f"expected a time such as 90s, 30m, 4h, 2d or 23:30:00, found {value!r}")


def path(value: str) -> str:
    """The path of a checkpoint, or of something beside one: as :func:`data_path`, and no URL.

    Raises:
        ValueError: It is empty, a URL, or names a variable that is not set.
    """
    filled = data_path(value)
    try:
        local_path(filled)
    except UsageError as error:
        raise ValueError(str(error)) from None
    return filled


def data_path(value: str) -> str:
    """A path with ``~`` and ``$NAME`` filled in; a relative one counts from where the command runs.

    Raises:
        ValueError: It is empty, or names a variable that is not set.
    """
    if not value.strip():
        raise ValueError("expected a path, found ''")
    unset = [name for match in _VARIABLE.finditer(value) if (name := match[1] or match[2]) not in os.environ]
    if unset:
        raise ValueError(f"the environment variable {', '.join(unset)} is not set (in {value!r})")
    return os.path.expanduser(os.path.expandvars(value))


def folder_name(value: str) -> str:
    """A name that becomes a folder, or folders in one another.

    Raises:
        ValueError: It is empty, absolute, or leads out of the folder that it is put in.
    """
    if not value.strip() or value.startswith(("/", "~")) or ".." in value.split("/") or "\0" in value:
        raise ValueError(f"expected the name of a folder, found {value!r}")
    return value


class Section(BaseModel):
    """A part of the configuration: no unknown keys, no silent conversions, not changed after it was loaded."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


Positive = Annotated[int, Field(ge=1)]
PathText = Annotated[str, AfterValidator(path)]
Seconds = Annotated[float, BeforeValidator(duration), Field(ge=0)]
Size = Annotated[int, BeforeValidator(size), Field(ge=1)]


class KeepBestSection(Section):
    """The best steps by a metric that is given to ``save``."""

    metric: Annotated[str, Field(min_length=1)]
    mode: Literal["max", "min"] = "max"
    k: Positive = 1


class KeepSection(Section):
    """A step is kept that any of the rules wants; without rules, all are."""

    last: Positive | None = None
    best: KeepBestSection | None = None
    every: Positive | None = None
    max_size: Size | None = None


class SaveSection(Section):
    """When to save; whatever comes first."""

    every_steps: Positive | None = None
    every_minutes: Annotated[float, Field(gt=0)] | None = None
    before_deadline: bool = True
    time_limit: Seconds | None = None
    margin: Seconds = 60.0
    on_signal: bool = True
    at_end: bool = True


class ExportSection(Section):
    """A by-product of saved steps, made behind the training."""

    format: Annotated[str, Field(min_length=1)]
    every: Positive = 1
    role: str = "actor"
    dtype: Literal["bf16", "fp16", "fp32"] | None = None
    reference_config: PathText | None = None
    tokenizer: PathText | None = None
    generation_config: PathText | None = None


class MirrorSection(Section):
    """An object store that committed steps are sent to, behind the training."""

    url: Annotated[str, Field(min_length=1)]
    keep: KeepSection = KeepSection()
    most_waiting: Positive = 4
    on_error: Literal["continue", "raise"] = "continue"
    connections: Positive = 8
    memory: Size = 256 << 20
    store: dict[str, str] = Field(default_factory=dict)


class CheckpointSection(Section):
    """How the run is saved and resumed."""

    asynchronous: bool = True
    fsync: bool = True
    on_busy: Literal["wait", "refuse"] = "wait"
    on_error: Literal["raise", "continue"] = "raise"
    save_retries: Annotated[int, Field(ge=0)] = 0
    save_timeout: Annotated[Seconds, Field(gt=0)] | None = None
    lazy_snapshot: bool = False
    max_host_memory: Size | None = None
    link_unchanged: bool = False
    on_existing: Literal["refuse", "continue"] = "refuse"
    must_exist: bool = False
    rng: Literal["derive", "refuse", "ignore"] = "derive"
    check: Literal["bytes", "sizes"] = "bytes"
    follow_links: bool = False
    timeout: Annotated[Seconds, Field(gt=0)] = 600.0
    tensorboard: PathText | None = None
    save: SaveSection = SaveSection()
    keep: KeepSection = KeepSection()
    export: ExportSection | None = None
    mirror: MirrorSection | None = None


Fraction = Annotated[float, Field(ge=0, le=1)]
NotNegative = Annotated[float, Field(ge=0)]
AboveZero = Annotated[float, Field(gt=0)]
FolderName = Annotated[str, AfterValidator(folder_name)]


def _never_or_positive(value: int) -> int:
    if value != -1 and value < 1:
        raise ValueError(f"expected -1 (never), or at least 1, found {value}")
    return value


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _checked_resume(value: object) -> object:
    if value is None or isinstance(value, str) or (type(value) is int and value >= 0):
        return value
    raise ValueError(f"expected null, auto, a path or the number of a step, found {value!r}")


NeverOrPositive = Annotated[int, AfterValidator(_never_or_positive)]
Paths = Annotated[list[Annotated[str, AfterValidator(data_path)]], BeforeValidator(_listed)]
"""Of datasets, which the run's own code reads, from wherever it can."""


class LoggerSection(Section):
    """Where metrics go. For FSDP, checkpoints go there, too, as RLinf has it."""

    log_path: PathText | None = None
    project_name: str | None = None
    experiment_name: FolderName | None = None
    logger_backends: Annotated[list[str], BeforeValidator(_listed)] = Field(default_factory=list)


class RunnerSection(Section):
    """The run as a whole."""

    task_type: Annotated[str, Field(min_length=1)]
    output_dir: PathText
    experiment_name: FolderName
    resume_dir: Annotated[str | int | None, BeforeValidator(_checked_resume)] = None
    save_interval: NeverOrPositive = -1
    val_check_interval: NeverOrPositive = -1
    max_epochs: Positive | None = None
    max_steps: NeverOrPositive = -1
    seq_length: Positive | None = None
    logger: LoggerSection = LoggerSection()


class KLSection(Section):
    """The penalty for leaving the reference policy."""

    kind: Literal["fixed", "adaptive"] = "fixed"
    coefficient: NotNegative = 0.0
    target: AboveZero | None = None
    horizon: AboveZero | None = None

    @model_validator(mode="after")
    def _has_what_its_kind_needs(self) -> Self:
        given = {"target": self.target, "horizon": self.horizon}
        wrong = [name for name, value in given.items() if (value is None) == (self.kind == "adaptive")]
        if wrong:
            does = "needs" if self.kind == "adaptive" else "does not take"
            raise ValueError(f"kind: {self.kind} {does} {' and '.join(wrong)}")
        return self


class ClipSection(Section):
    """How far one update may go."""

    low: AboveZero = 0.2
    high: AboveZero = 0.2
    dual: Annotated[float, Field(gt=1)] | None = None
    value: AboveZero | None = None


class SamplingSection(Section):
    """How rollouts are sampled."""

    temperature: NotNegative = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: NeverOrPositive = -1
    max_new_tokens: Positive | None = None
    min_new_tokens: Annotated[int, Field(ge=0)] = 0


class AlgorithmSection(Section):
    """GRPO or PPO."""

    name: Literal["grpo", "ppo"]
    group_size: Positive = 1
    n_minibatches: Positive = 1
    kl: KLSection = KLSection()
    clip: ClipSection = ClipSection()
    entropy_bonus: NotNegative = 0.0
    normalize_advantages: bool = True
    gamma: Fraction | None = None
    gae_lambda: Fraction | None = None
    sampling_params: SamplingSection = SamplingSection()

    @model_validator(mode="after")
    def _fits_its_name(self) -> Self:
        if self.name == "grpo" and self.group_size < 2:
            raise ValueError(f"group_size: GRPO compares samples, expected at least 2, found {self.group_size}")
        of_values = {"gamma": self.gamma, "gae_lambda": self.gae_lambda, "clip.value": self.clip.value}
        given = [name for name, value in of_values.items() if value is not None]
        if self.name == "grpo" and given:
            raise ValueError(f"{', '.join(given)}: GRPO has no value function; leave it out, or set name: ppo")
        return self


class DataSection(Section):
    """The prompts, and the order in which they are taken."""

    train_data_paths: Annotated[Paths, Field(min_length=1)]
    val_data_paths: Paths = Field(default_factory=list)
    prompt_key: str = "prompt"
    answer_key: str = "answer"
    max_prompt_length: Positive | None = None
    rollout_batch_size: Positive
    shuffle: bool = True
    seed: int = 1234
    last_batch: Literal["carry", "short", "drop", "pad"] = "carry"
    on_dataset_change: Literal["refuse", "restart"] = "refuse"


class ParallelSection(Section):
    """Degrees of parallelism, except the data-parallel one, which follows from the number of GPUs."""

    tp: Positive = 1
    pp: Positive = 1
    vpp: Positive = 1
    cp: Positive = 1
    ep: Positive = 1
    etp: Positive = 1
    pipeline_layout: str | None = None

    def on(self, world_size: int) -> ParallelConfig:
        """The whole layout on so many ranks.

        Raises:
            UsageError: They cannot be divided so.
            LayoutMismatch: The experts do not fit.
        """
        ranks = self.tp * self.pp * self.cp
        if world_size < 1 or world_size % ranks:
            raise UsageError(
                f"parallel: {world_size} GPUs cannot be divided into TP {self.tp} × PP {self.pp} × CP {self.cp} = {ranks}"
            )
        return ParallelConfig(
            self.tp, self.pp, self.vpp, self.cp, self.ep, self.etp, world_size // ranks, self.pipeline_layout
        )


class OptimizerSection(Section):
    """Adam and its schedule; steps are optimizer steps."""

    lr: AboveZero = 1e-6
    min_lr: NotNegative = 0.0
    lr_warmup_iters: Annotated[int, Field(ge=0)] = 0
    lr_decay_iters: Positive | None = None
    lr_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    adam_beta1: Fraction = 0.9
    adam_beta2: Fraction = 0.999
    adam_eps: AboveZero = 1e-8
    weight_decay: NotNegative = 0.0
    clip_grad: NotNegative = 1.0


class TrainerSection(Section):
    """A role that is trained: the actor or the critic."""

    training_backend: Literal["megatron", "fsdp", "deepspeed", "torch"] = "megatron"
    model_dir: PathText | None = None
    checkpoint_load_path: PathText | None = None
    precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    micro_batch_size: Positive = 1
    seed: int = 1234
    parallel: ParallelSection = ParallelSection()
    optim: OptimizerSection = OptimizerSection()

    @model_validator(mode="after")
    def _only_megatron_is_cut(self) -> Self:
        cut = list(_more_than_one(self.parallel, ("tp", "pp", "vpp", "ep", "etp")))
        if cut and self.training_backend != "megatron":
            raise ValueError(f"parallel: {self.training_backend} has data parallelism only, found {', '.join(cut)}")
        return self


def _more_than_one(parallel: ParallelSection, names: Iterable[str]) -> Iterator[str]:
    for name in names:
        if getattr(parallel, name) > 1:
            yield f"{name}: {getattr(parallel, name)}"
