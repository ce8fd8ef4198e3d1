"""What torchtitan's ``CheckpointManager.load`` restores.

Source: torchtitan 0.2.2, ``torchtitan/components/checkpoint.py`` (``load``, ``_states_to_load``, ``_find_load_step``); torch 2.13.0,
``distributed/checkpoint/default_planner.py``: a key that is asked for and not there is an error. 0.3.0's ``components/checkpointer/dcp.py``
does the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from math import prod

from mcore_rlhf.trainers.conditions import (
    ADAM,
    OF_GROUP,
    OF_SCHEDULE,
    OTHER_CLASS,
    broken,
    incomplete,
    other_dtype,
    other_optimizer,
    refused,
    undealt,
    unlisted,
)
from mcore_rlhf.trainers.resuming import (
    EVERYTHING,
    MOST_RANKS,
    OF_OPTIMIZER,
    Habit,
    Loader,
    Outcome,
    Seen,
    Thing,
    rows_of,
)
from mcore_rlhf.trainers.torchdata import STOPS, stops_at
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
    return _asks(value, unlisted(".metadata", before, *names))


def _asks(value: str, wanted: Callable[[Seen], object]) -> Habit:
    """Whatever is not there of a value that is loaded, the one call that loads everything stops."""
    return Habit(_ASKED_FOR, _REFUSED, "{file} has no {key}, and every key that is asked for must be there", "dcp_load",
        lambda seen: None if _excluded(value)(seen) else wanted(seen), True)  # fmt: skip


_LOADER = "dataloader."
_OF_A_RANK = re.compile(r"dataloader\.dp_rank_(\d{1,6})")
_OF_TORCHDATA = {
    "_index_sampler_state", "_sampler_iter_state", "_sampler_iter_yielded", "_num_yielded", "_IterableDataset_len_called", "_shared_seed",
    "fetcher_state", "dataset_state", "_iterator_finished",
}  # fmt: skip
"""What a loader of torchdata keeps by itself; torchtitan's own packs that into one value for each data-parallel rank.

Source: torchtitan 0.2.2 and 0.3.0, ``components/dataloader.py`` (``ParallelAwareDataloader.state_dict``); torchdata 0.11.0,
``stateful_dataloader/stateful_dataloader.py`` (``_StatefulSingleProcessDataLoaderIter``).
"""
_MODEL_DEGREES = ("tensor_parallel_degree", "pipeline_parallel_degree", "context_parallel_degree")


def _ranks(seen: Seen) -> tuple[int, int]:
    """Data-parallel ranks that saved, and that are to load; as many where nobody says."""
    there = [int(found[1]) for key in seen.keys(".metadata") if (found := _OF_A_RANK.fullmatch(key))]
    was = max(there, default=-1) + 1
    degrees = prod(seen.settings.number(f"parallelism.{name}") or 1 for name in _MODEL_DEGREES)
    return was, was if seen.world is None else max(1, seen.world // degrees)


def _loader_gone(seen: Seen) -> object:
    """Of the place in the data something is gone that is asked for: ``{file}`` and ``{key}``."""
    there = {key.removeprefix(_LOADER).partition(".")[0] for key in seen.keys(".metadata") if key.startswith(_LOADER)}
    was, now = _ranks(seen)
    wanted = {f"dp_rank_{rank}" for rank in range(min(now, MOST_RANKS))} | {"world_size"} if was else _OF_TORCHDATA
    is_known = was or 2 * len(there & _OF_TORCHDATA) >= len(_OF_TORCHDATA)
    gone = sorted(wanted - there)
    return is_known and gone and {"file": ".metadata", "key": _LOADER + gone[0]}


def _fewer_ranks(seen: Seen) -> object:
    """Fewer data-parallel ranks load than saved."""
    was, now = _ranks(seen)
    return now < was and {"was": was, "now": now}


def _of_hf(seen: Seen) -> bool:
    """The last step of a run with ``last_save_in_hf``: weights in Hugging Face's files."""
    return seen.has("model.safetensors.index.json") and not seen.has(".metadata")


def _taken_for(name: str) -> int | None:
    """Torchtitan looks for the pattern anywhere in a name."""
    found = re.search(r"step-(\d{1,18})", name, re.ASCII)
    return int(found[1]) if found else None


ROWS = rows_of(
    "torchtitan 0.2.2, torchtitan/components/checkpoint.py:",
    Habit(EVERYTHING, _ANEW, "{key} is off: nothing is loaded", "load", refused("checkpoint.enable", "checkpoint.enable_checkpoint")),
    Habit(_ASKED_FOR, _REFUSED, "a Hugging Face folder, as last_save_in_hf leaves it: it is taken for a step, and has no .metadata, which "
        "is read", "_find_load_step", _of_hf, True),
    Habit((*OF_OPTIMIZER, Thing.SCHEDULER, Thing.COUNTERS, Thing.DATA), _ANEW, "step 0 is what training began with: the model alone is "
        "loaded", "load", lambda seen: seen.step == 0, True),
    Habit(OF_OPTIMIZER, _ANEW, "exclude_from_loading names optimizer", "_states_to_load", _excluded("optimizer"), True),
    Habit((Thing.SCHEDULER,), _ANEW, "exclude_from_loading names lr_scheduler", "_states_to_load", _excluded("lr_scheduler"), True),
    Habit((Thing.DATA,), _ANEW, "exclude_from_loading names dataloader", "_states_to_load", _excluded("dataloader"), True),
    Habit((Thing.COUNTERS,), _ANEW, "exclude_from_loading names train_state", "_states_to_load", _excluded("train_state"), True),
    Habit(_ASKED_FOR, _REFUSED, "{file} {wrong}: loading it fails", "dcp_load", broken(".metadata", "*.distcp"), True),
    Habit(_ASKED_FOR, _REFUSED, "a file is missing: {problem}", "dcp_load", _missing, True),
    _unlisted("optimizer", r"optimizer\.state\..+\.", *ADAM),
    _unlisted("optimizer", r"optimizer\.param_groups\..+\.", *OF_GROUP, "initial_lr"),
    _asks("optimizer", undealt(".metadata", r"optimizer\.")),
    _unlisted("lr_scheduler", r"lr_scheduler\.", *OF_SCHEDULE, "lr_lambdas"),
    _unlisted("dataloader", r"dataloader\._sampler_iter_state\.", "samples_yielded"),
    _unlisted("dataloader", r"dataloader\._sampler_iter_state\.sampler_iter_state\.", "yielded", "generator"),
    Habit(_ASKED_FOR, _REFUSED, "{file} has no {key}, and every key that is asked for must be there", "dcp_load",
        lambda seen: not _excluded("dataloader")(seen) and _loader_gone(seen), True),
    Habit((Thing.DATA,), _REFUSED, "saved by {was} data-parallel ranks, loaded by {now}: an AssertionError, “dataloader resharding is not "
        "supported yet”", "torchtitan/components/dataloader.py:90 (load_state_dict)",
        lambda seen: not _excluded("dataloader")(seen) and _fewer_ranks(seen)),
    _unlisted("train_state", r"train_state\.", "step", "ntokens_seen"),
    Habit(OF_OPTIMIZER, _REFUSED, "no optimizer is stored, and every key that is asked for must be there", "dcp_load",
        lambda seen: not seen.held.problem and not seen.held.optimizer),
    Habit((Thing.SCHEDULER,), _REFUSED, "no lr_scheduler is stored, and every key that is asked for must be there", "dcp_load",
        lambda seen: not seen.held.problem and not seen.held.scheduler),
    Habit((Thing.COUNTERS,), _REFUSED, "no train_state is stored, and every key that is asked for must be there", "dcp_load",
        _lacks("train_state")),
    Habit((Thing.DATA,), _REFUSED, "no dataloader is stored, and every key that is asked for must be there", "dcp_load",
        _lacks("dataloader")),
    Habit(OF_OPTIMIZER, _REFUSED, OTHER_CLASS, "dcp_load", other_optimizer("optimizer.name", ".metadata")),
    Habit((Thing.WEIGHTS, *OF_OPTIMIZER, Thing.SCHEDULER), _RESTORED, "by name, whatever the ranks", "dcp_load", ran=True),
    Habit((Thing.DTYPE,), _IGNORED, "stored as {was}, cast to the {now} of training.dtype, moments too; nothing is said", "dcp_load",
        other_dtype("training.dtype"), True),
    Habit((Thing.COUNTERS,), _RESTORED, "train_state: step, tokens", "dcp_load", ran=True),
    Habit((Thing.DATA,), _REFUSED, STOPS, "torchtitan/components/dataloader.py:142 (load_state_dict)",
        lambda seen: not _excluded("dataloader")(seen) and stops_at(".metadata//dataloader.dp_rank_*")(seen)),
    Habit((Thing.DATA,), _RESTORED, "dataloader, of each data-parallel rank", "dcp_load", ran=True),
    Habit((Thing.RNG,), Outcome.ABSENT, "torchtitan stores no random states", "_states_to_load"),
)  # fmt: skip

LOADER = Loader(TRAINER, "0.2.2", ROWS, ("checkpoint.load_step",), ("titan",), reads=_taken_for)
