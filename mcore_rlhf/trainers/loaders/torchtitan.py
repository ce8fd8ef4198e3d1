"""What torchtitan's ``CheckpointManager.load`` restores.

Source: torchtitan 0.2.2, ``torchtitan/components/checkpoint.py`` (``load``, ``_states_to_load``, ``_find_load_step``); torch 2.13.0,
``distributed/checkpoint/default_planner.py``: a key that is asked for and not there is an error.
"""

from __future__ import annotations

from collections.abc import Callable

from mcore_rlhf.trainers.conditions import ADAM, OF_GROUP, OF_SCHEDULE, broken, incomplete, refused, unlisted
from mcore_rlhf.trainers.resuming import EVERYTHING, OF_OPTIMIZER, Habit, Loader, Outcome, Seen, Thing, rows_of
from mcore_rlhf.trainers.torchtitan import TRAINER

_RESTORED, _ANEW, _IGNORED, _REFUSED, _ABSENT = Outcome

_ASKED_FOR = (Thing.WEIGHTS, *OF_OPTIMIZER, Thing.SCHEDULER, Thing.COUNTERS, Thing.DATA)


def _excluded(key: str) -> Callable[[Seen], object]:
    return lambda seen: key in (seen.settings.listed("checkpoint.exclude_from_loading", "exclude_from_loading") or ())


def _lacks(value: str) -> Callable[[Seen], object]:
    return lambda seen: not seen.held.problem and value not in seen.held.values


def _missing(seen: Seen) -> object:
    """What is loaded is not all there: a moment is nothing to a run that loads no optimizer."""
    of_moment = "which others of its group have" in seen.held.problem and _excluded("optimizer")(seen)
    return None if of_moment else incomplete(seen)


def _unlisted(value: str, before: str, *names: str) -> Habit:
    """Whatever is not there of a value that is loaded, the one call that loads everything stops."""
    wanted = unlisted(".metadata", before, *names)
    return Habit(_ASKED_FOR, _REFUSED, "{file} has no {key}, and every key that is asked for must be there", "dcp_load",
        lambda seen: None if _excluded(value)(seen) else wanted(seen), True)  # fmt: skip


ROWS = rows_of(
    "torchtitan 0.2.2, torchtitan/components/checkpoint.py:",
    Habit(EVERYTHING, _ANEW, "{key} is off: nothing is loaded", "load", refused("checkpoint.enable", "checkpoint.enable_checkpoint")),
    Habit(OF_OPTIMIZER, _ANEW, "exclude_from_loading names optimizer", "_states_to_load", _excluded("optimizer"), True),
    Habit((Thing.SCHEDULER,), _ANEW, "exclude_from_loading names lr_scheduler", "_states_to_load", _excluded("lr_scheduler"), True),
    Habit((Thing.DATA,), _ANEW, "exclude_from_loading names dataloader", "_states_to_load", _excluded("dataloader"), True),
    Habit((Thing.COUNTERS,), _ANEW, "exclude_from_loading names train_state", "_states_to_load", _excluded("train_state"), True),
    Habit(_ASKED_FOR, _REFUSED, "{file} {wrong}: loading it fails", "dcp_load", broken(".metadata", "*.distcp"), True),
    Habit(_ASKED_FOR, _REFUSED, "a file is missing: {problem}", "dcp_load", _missing, True),
    _unlisted("optimizer", r"optimizer\.state\..+\.", *ADAM),
    _unlisted("optimizer", r"optimizer\.param_groups\..+\.", *OF_GROUP, "initial_lr"),
    _unlisted("lr_scheduler", r"lr_scheduler\.", *OF_SCHEDULE),
    _unlisted("train_state", r"train_state\.", "step", "ntokens_seen"),
    Habit(OF_OPTIMIZER, _REFUSED, "no optimizer is stored, and every key that is asked for must be there", "dcp_load",
        lambda seen: not seen.held.problem and not seen.held.optimizer),
    Habit((Thing.SCHEDULER,), _REFUSED, "no lr_scheduler is stored, and every key that is asked for must be there", "dcp_load",
        lambda seen: not seen.held.problem and not seen.held.scheduler),
    Habit((Thing.COUNTERS,), _REFUSED, "no train_state is stored, and every key that is asked for must be there", "dcp_load",
        _lacks("train_state")),
    Habit((Thing.DATA,), _REFUSED, "no dataloader is stored, and every key that is asked for must be there", "dcp_load",
        _lacks("dataloader")),
    Habit((Thing.WEIGHTS, *OF_OPTIMIZER, Thing.SCHEDULER), _RESTORED, "by name, whatever the ranks", "dcp_load", ran=True),
    Habit((Thing.COUNTERS,), _RESTORED, "train_state: step, tokens", "dcp_load", ran=True),
    Habit((Thing.DATA,), _RESTORED, "dataloader, of each data-parallel rank; other ranks than saved have no place in the data",
        "dcp_load", ran=True),
    Habit((Thing.RNG,), Outcome.ABSENT, "torchtitan stores no random states", "_states_to_load"),
)  # fmt: skip

LOADER = Loader(TRAINER, "0.2.2", ROWS, ("checkpoint.load_step",), ("titan",))
