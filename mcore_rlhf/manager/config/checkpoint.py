"""The section ``checkpoint`` of a run's configuration: when to save, what to keep, how to resume."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from .values import duration, path, size


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


class CheckpointSection(Section):
    """How the run is saved and resumed."""

    asynchronous: bool = True
    fsync: bool = True
    on_busy: Literal["wait", "refuse"] = "wait"
    on_existing: Literal["refuse", "continue"] = "refuse"
    must_exist: bool = False
    rng: Literal["derive", "refuse", "ignore"] = "derive"
    check: Literal["bytes", "sizes"] = "bytes"
    timeout: Annotated[Seconds, Field(gt=0)] = 600.0
    tensorboard: PathText | None = None
    save: SaveSection = SaveSection()
    keep: KeepSection = KeepSection()
    export: ExportSection | None = None
