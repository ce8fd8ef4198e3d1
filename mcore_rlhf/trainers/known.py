"""The trainers that are known, those first whose marks say more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache

from mcore_rlhf.errors import CheckpointError, LayoutMismatch
from mcore_rlhf.storage.manifest import Manifest
from mcore_rlhf.storage.paths import ReadablePath
from mcore_rlhf.storage.publish import MANIFEST_NAME

from . import (
    accelerate,
    areal,
    lightning,
    megatron,
    ms_swift,
    nemo_rl,
    open_instruct,
    openrlhf,
    prime_rl,
    ray_train,
    rlinf,
    roll,
    skyrl,
    slime,
    torch_checkpointing,
    torchtitan,
    transformers,
    verl,
)
from .table import STEP, Trainer

TRAINERS: tuple[Trainer, ...] = (
    verl.TUNING, skyrl.TRAINER, verl.TRAINER, areal.TRAINER, areal.WEIGHTS, rlinf.TRAINER,
    open_instruct.TRAINER, openrlhf.TRAINER, roll.ADAPTER, roll.TRAINER, roll.FSDP, ms_swift.TRAINER, nemo_rl.TRAINER, prime_rl.TRAINER,
    transformers.TRAINER, open_instruct.TUNING, accelerate.TRAINER, torchtitan.TRAINER, torch_checkpointing.TRAINER, lightning.TRAINER,
    ray_train.TRAINER, slime.TRAINER, megatron.BRIDGE, megatron.LM,
)  # fmt: skip


OF_TRAINER = "trainer"
"""Whose a step is that was written for another trainer, in what its manifest reports."""


def trainer_named(name: str) -> Trainer | None:
    """The trainer of that name; None where there is none."""
    return next((one for one in TRAINERS if one.name == name), None)


_OF_FORMATS = ("*.safetensors", "*.distcp", "mp_rank_*", "*_model_states.pt", "latest_universal", "state.pt")
"""What frameworks leave in a model's folder, whatever trainer ran."""


@cache
def left_by_trainers() -> tuple[str, ...]:
    """What lies in a step, or in a model of one, that some trainer wrote: names and patterns."""
    named = (
        mark for one in TRAINERS for marks in (*one.marks, *filter(None, [one.tracker])) for mark in marks.split("&")
    )
    marks = (mark.removeprefix("*/") for mark in named)
    return tuple(dict.fromkeys([*marks, *_OF_FORMATS]))


@cache
def roles_by_folder(name: str) -> Mapping[str, str]:
    """The roles of models whose folders trainers call otherwise, in steps of such a name, by those folders' names."""
    named = ((role, places) for one in TRAINERS if one.step_of(name) is not None for role, places in one.roles.items())
    return {place: role for role, places in named for place in places if place and place != role}


def called_so(name: str) -> Iterator[tuple[Trainer, int]]:
    """The trainers whose steps' folders may be called so, and the step."""
    for one in TRAINERS:
        step = one.step_of(name)
        if step is not None:
            yield one, step


def counted_by(values: Mapping[str, object]) -> tuple[Trainer, int] | None:
    """The trainer that finds all that it asks for among a model's values, and the step that they are of; None where none does.

    Args:
        values: What a script saved beside a model.
    """
    for one in TRAINERS:
        said = next((values.get(key) for key, what in one.asks.items() if what == STEP), None)
        if type(said) is int and 0 <= said < 10**18 and one.asks.keys() <= values.keys():
            return one, said
    return None


def _said_by_us(step: ReadablePath) -> object:
    """Whose step a conversion made it, by the manifest in it: one that is its framework's own shows no trainer without files beside it."""
    with suppress(OSError, CheckpointError):
        return Manifest.read(step / MANIFEST_NAME).report.get(OF_TRAINER)
    return None


def writer_of(step: ReadablePath) -> tuple[Trainer, int] | None:
    """Which trainer wrote a step, by its folder's name and what lies in it, and the step's number; None where none is known to.

    Args:
        step: A folder.

    Raises:
        LayoutMismatch: It has files of two that share nothing.
        Corrupt: Whoever wrote it has the number in a file, which does not say one.
    """
    called = [*called_so(step.name)]
    found = [(one, number) for one, number in called if one.wrote(step)]
    if unmarked := [(one, number) for one, number in called if one.is_iteration and (one, number) not in found]:
        said = _said_by_us(step)
        found = [*((one, number) for one, number in unmarked if one.name == said), *found]
    found = found or [(one, one.numbered(step) or 0) for one in TRAINERS if one.in_place and one.wrote(step)]
    for one, _ in found[1:]:
        first = found[0][0]
        if one.name not in first.over or first.is_not_of(step, one):
            raise LayoutMismatch(
                f"{step}: holds files of {first.title} and of {one.title}, and is a step of one of them\nMove those of the other away."
            )
    return found[0] if found else None
