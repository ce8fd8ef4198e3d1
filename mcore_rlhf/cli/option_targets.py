"""Options that mean something for some formats only: given for another, they would be passed over in silence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mcore_rlhf.errors import Problems, UsageError

if TYPE_CHECKING:
    from .job import ConversionJob

_MEANT_FOR = {
    "zero_stage": ("deepspeed",),
    "max_shard_size": ("hf",),
    "tokenizer": ("hf",),
    "generation_config": ("hf",),
    "eos_token_ids": ("hf",),
    "masters": ("hf", "peft"),
    "transformer_impl": ("megatron", "megatron-dist"),
}
"""Fields of a job, and the formats that look at them. Layout options are not here: each format says itself which it has."""


def refuse_meaningless(job: ConversionJob, known: tuple[str, ...]) -> None:
    """Refuse options that the target's format does not look at.

    Args:
        job: The job.
        known: All formats; one that is unknown is refused elsewhere, with a better message.

    Raises:
        UsageError: Some are given; all are named.
    """
    problems = Problems()
    for name, formats in _MEANT_FOR.items():
        if job.to in known and job.to not in formats and _is_given(getattr(job, name)):
            meant = " or ".join(f"--to {format}" for format in formats)
            text = f"--{name.replace('_', '-')}: means nothing with --to {job.to}; it is for {meant}"
            problems.add(UsageError, text, "Leave it out, or say which format is meant.")
    problems.raise_if_any()


def _is_given(value: object) -> bool:
    """Whether a field is not at its default; stage 0 is a stage."""
    return value is not None and value is not False and value != ()
