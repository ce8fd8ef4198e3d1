"""What RLinf's loader asks for and other formats do not have: a scheduler's state, random states, FSDP's version.

``dcp.load`` stops at a key that its caller has and the folder lacks, so a folder without them could not be loaded.
Source: RLinf, ``hybrid_engines/fsdp/strategy/checkpoint.py`` (``Checkpoint.state_dict``), ``utils/utils.py`` (``get_rng_state``);
torch 2.13.0, ``optim/lr_scheduler.py`` (``LambdaLR.state_dict``).
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from typing import cast

from mcore_rlhf.core.account import Fate, Item, Kind, Report
from mcore_rlhf.families.source import Source

from .choices import Choices
from .groups import completed
from .native import DcpState
from .rest import EPOCH, RNG, SCHEDULERS, VERSION

_FSDP2 = "fsdp2"


def rest_of(source: Source, choices: Choices, report: Report) -> dict[str, object]:
    """Everything beside model and optimizer, as the nest that is saved.

    Args:
        source: The source.
        choices: What the target is to be.
        report: Told what was derived.
    """
    native = source.family
    if isinstance(native, DcpState):
        return _with_rng(dict(native.rest), source.state.iteration, choices.rng or "keep", report)
    rest: dict[str, object] = {}
    if choices.optimizer:
        rest[SCHEDULERS] = [_scheduler(source, report)]
    rest[VERSION] = source.state.other.get(VERSION, _FSDP2)
    stored = source.state.other.get(RNG)
    if isinstance(stored, Mapping):
        rest[RNG] = dict(stored)
    return _with_rng(rest, source.state.iteration, choices.rng or ("keep" if RNG in rest else "derive"), report)


def _with_rng(rest: dict[str, object], iteration: int, wanted: str, report: Report) -> dict[str, object]:
    if wanted == "drop":
        if rest.pop(RNG, None) is not None:
            report.add(Fate.LOST, "rng: left out, as --rng drop asks", Item(Kind.RNG))
    elif wanted == "derive":
        rest[RNG] = random_states(iteration)
        text = f"rng: new states, the same on every rank, from iteration {iteration}"
        report.add(Fate.DERIVED, text, Item(Kind.RNG))
    return rest


def _scheduler(source: Source, report: Report) -> dict[str, object]:
    """The scheduler's own state if it is torch's, otherwise that of a LambdaLR which has made as many steps."""
    stored = source.state.scheduler
    if stored is not None and EPOCH in stored:
        return dict(stored)
    fields = [completed(group.fields, group.scalars) for group in source.state.groups]
    at = source.state.iteration
    report.add(Fate.DERIVED, f"lr_scheduler: torch's, at last_epoch {at}, with the learning rates of the param groups")
    return {
        "base_lrs": [group["initial_lr"] for group in fields], EPOCH: at, "verbose": False, "_step_count": at + 1,
        "_is_initial": False, "_get_lr_called_within_step": False, "_last_lr": [group["lr"] for group in fields],
        "lr_lambdas": [None] * len(fields),
    }  # fmt: skip


def random_states(iteration: int) -> dict[str, object]:
    """Fresh states of every generator that RLinf restores, made from the iteration.

    Args:
        iteration: Of the checkpoint.
    """
    import numpy as np
    import torch

    digest = hashlib.sha256(f"mcore_rlhf rng {iteration}".encode()).digest()
    seed = int.from_bytes(digest[:4], "little")
    state = cast(tuple[object, ...], np.random.RandomState(seed).get_state())
    return {
        "cpu": torch.Generator().manual_seed(seed).get_state(),
        "numpy": state,
        "random": random.Random(seed).getstate(),
        "cuda": torch.frombuffer(bytearray(seed.to_bytes(8, "little") + bytes(8)), dtype=torch.uint8),
    }
