"""What an FSDP run saves besides model and optimizer: schedulers, RNG states, the step."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from mcore_rlhf.core.account import Report
from mcore_rlhf.core.facts import Fate, Rule
from mcore_rlhf.families.source import ITERATION, ParamGroup, Source
from mcore_rlhf.storage.torch_values import SmallTensor, cpu_generator_state, cuda_generator_state

from .groups import STEP, completed

SCHEDULERS, SCHEDULER, RNG, VERSION = "lr_schedulers", "lr_scheduler", "rng", "fsdp_version"
IN_OPTIMIZER, _OPTIMIZER, BESIDE_OPTIMIZER = "optim.sched", "optim", "sched"
"""NeMo-RL's, beside the optimizer's state (7ea279a, ``nemo_rl/utils/native_checkpoint.py``, ``OptimizerState``), and its DTensor v2's
(nemo_automodel 0.4.0, ``components/checkpoint/stateful_wrappers.py``, ``OptimizerState``)."""
ONE_SCHEDULER = (SCHEDULER, "scheduler", BESIDE_OPTIMIZER)
"""Keys of a lone one: RLinf's and torchtitan's, and prime-rl's (047eeea, ``src/prime_rl/trainer/ckpt.py``, ``AppState``)."""
EPOCH = "last_epoch"
PARTS = "_schedulers"
"""Of a schedule that is made of several, one after the other: what a ``LambdaLR``, which other trainers have, could not take."""
MOST_STEPS = 10**15
"""No run comes so far; a folder's name has a place for more."""
COUNTED = ("train_state", "progress")
"""What torchtitan and prime-rl count in."""
_COUNTERS = (("train_state", "step"), ("train_state", "global_step"), ("global_step",), ("step",), ("iteration",))
"""Where runs keep their step; the first is torchtitan's (``torchtitan/train.py``, ``state_dict``)."""
_OF_FOLDER = (_COUNTERS[0], ("progress", "step"))
"""Those that are the number in the folder's name: torchtitan's, and prime-rl's (559b447, ``src/prime_rl/trainer/ckpt.py``, ``save``)."""
_OTHERWISE: Rule[list[dict[str, object]]] = Rule(
    Fate.NOTE,
    "{key} is {said}, and {where} says step {named}: the trainer goes on at the first",
    list,
    contradicts=True,
)


def scheduler_of(rest: Mapping[str, object]) -> tuple[dict[str, object] | None, dict[str, object]]:
    """The learning-rate scheduler's state, and everything else.

    Args:
        rest: What was saved besides model and optimizer.
    """
    other = dict(rest)
    listed = other.get(SCHEDULERS)
    if isinstance(listed, list) and len(listed) == 1 and isinstance(listed[0], dict):
        del other[SCHEDULERS]
        return dict(listed[0]), other
    for key in ONE_SCHEDULER:
        one = other.get(key)
        if isinstance(one, dict) and EPOCH in one:
            del other[key]
            return dict(one), other
    if (found := _in_optimizer(other)) is not None:
        left = {key: value for key, value in cast(Any, other.pop(_OPTIMIZER)).items() if key != BESIDE_OPTIMIZER}
        return found, {**other, **({_OPTIMIZER: left} if left else {})}
    return None, other


def _in_optimizer(rest: Mapping[str, object]) -> dict[str, object] | None:
    beside = rest.get(_OPTIMIZER)
    found = beside.get(BESIDE_OPTIMIZER) if isinstance(beside, Mapping) else None
    return dict(found) if isinstance(found, dict) and EPOCH in found else None


def placed(key: object, scheduler: dict[str, object]) -> dict[str, object]:
    """A scheduler's state where a run keeps it: the other way round of :func:`scheduler_of`.

    Args:
        key: What :func:`scheduler_key` said.
        scheduler: The state.
    """
    if key == IN_OPTIMIZER:
        return {_OPTIMIZER: {BESIDE_OPTIMIZER: scheduler}}
    return {str(key): scheduler} if key in ONE_SCHEDULER else {SCHEDULERS: [scheduler]}


def is_of_one(scheduler: Mapping[str, object] | None) -> bool:
    """Whether a state is that of one of torch's schedulers, and not of several that follow each other."""
    return scheduler is not None and EPOCH in scheduler and PARTS not in scheduler


def scheduler_key(rest: Mapping[str, object]) -> str:
    """Under which key a run keeps its scheduler: one, or a list of them."""
    found = next((key for key in ONE_SCHEDULER if key in rest), "")
    return found or (SCHEDULERS if SCHEDULERS in rest or _in_optimizer(rest) is None else IN_OPTIMIZER)


def iteration_of(
    named: int | None, rest: Mapping[str, object], scheduler: Mapping[str, object] | None, groups: tuple[ParamGroup, ...], notes: Report,
    where: str = "the folder's name",
) -> int:  # fmt: skip
    """The iteration, for which an FSDP run's files have no place of their own.

    Args:
        named: The step in the folders' names, or beside them.
        rest: May hold a counter.
        scheduler: Counts its steps.
        groups: Count the optimizer's.
        notes: Told where it comes from.
        where: Who names the step.
    """
    apart = [(".".join(path), said) for path in _OF_FOLDER if (said := _number(_at(rest, path))) not in (None, named)]
    if named is not None:
        notes.through([_OTHERWISE], [{"key": key, "said": said, "where": where, "named": named} for key, said in apart])
    unsaid = "since the folder does not say it"
    told = (
        (ITERATION, f"from {where}", named),
        *((ITERATION, f"from {'.'.join(path)}", _number(_at(rest, path))) for path in _COUNTERS),
        (_COUNTED, f"the scheduler's last_epoch, {unsaid}", _number((scheduler or {}).get(EPOCH))),
        (_COUNTED, f"the optimizer's step, {unsaid}",
         _number(next((group.fields[STEP] for group in groups if STEP in group.fields), None))),
    )  # fmt: skip
    for rule, how, found in told:
        if found is not None:
            notes.through([rule], {"at": found, "how": how})
            return found
    return 0


_COUNTED = replace(ITERATION, fate=Fate.DERIVED)


def _at(value: Any, path: tuple[str, ...]) -> object:
    for part in path:
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _number(value: object) -> int | None:
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    if not plain and not (isinstance(value, SmallTensor) and value.numel() == 1):
        return None
    found = float(cast(float, value))
    return int(cast(float, value)) if 0 <= found < MOST_STEPS else None  # neither is what is not a number


MADE: Rule[Source] = Rule(
    Fate.DERIVED,
    "lr_scheduler: torch's, at last_epoch {found.state.iteration}, with the learning rates of the param groups",
    lambda source: source if not is_of_one(source.state.scheduler) else None,
)
"""What is said of a scheduler that :func:`scheduler_state` makes."""


def scheduler_state(source: Source) -> dict[str, object]:
    """The scheduler's own state if it is torch's, otherwise that of a LambdaLR which has made as many steps.

    Args:
        source: A source under a module's names.
    """
    stored = source.state.scheduler
    if stored is not None and is_of_one(stored):
        return dict(stored)
    fields = [completed(group.fields, group.scalars) for group in source.state.groups]
    at = source.state.iteration
    return {
        "base_lrs": [group["initial_lr"] for group in fields], EPOCH: at, "verbose": False, "_step_count": at + 1,
        "_is_initial": False, "_get_lr_called_within_step": False, "_last_lr": [group["lr"] for group in fields],
        "lr_lambdas": [None] * len(fields),
    }  # fmt: skip


def random_states(known: bytes) -> dict[str, object]:
    """Fresh states of every generator that RLinf and verl restore.

    Args:
        known: What they are made from; 4 bytes at least.
    """
    import numpy as np

    seed = int.from_bytes(known[:4], "little")
    state = cast(tuple[object, ...], np.random.RandomState(seed).get_state())
    return {
        "cpu": cpu_generator_state(seed),
        "numpy": state,
        "random": random.Random(seed).getstate(),
        "cuda": cuda_generator_state(seed),
    }


def of_iteration(iteration: int) -> dict[str, object]:
    """The same for all ranks, made from the iteration.

    Args:
        iteration: Of the checkpoint.
    """
    from hashlib import sha256  # what only looks does not need it

    return random_states(sha256(f"mcore_rlhf rng {iteration}".encode()).digest())


def counted_at(values: Mapping[str, object], step: int) -> dict[str, object]:
    """What a run keeps, with its own counters at a step: they may have been carried through another's run, which went on.

    Args:
        values: Counters, data and all else.
        step: The steps that are done.
    """
    counters = {
        key: value
        for key in COUNTED
        if isinstance(value := values.get(key), Mapping) and type(value.get("step")) is int
    }
    return {**values, **{key: {**value, "step": step} for key, value in counters.items()}}
