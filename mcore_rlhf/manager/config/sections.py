"""The sections of a run's configuration that say what is trained; the keys of ``runner`` are RLinf's.

Source of the names: RLinf, ``examples/reasoning/config/math/qwen2.5-1.5b-grpo-megatron.yaml`` at 1b4bd69.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from mcore_rlhf.errors import UsageError
from mcore_rlhf.layouts.parallel import ParallelConfig

from .checkpoint import PathText, Positive, Section
from .values import data_path, folder_name

if TYPE_CHECKING:
    from typing_extensions import Self

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
