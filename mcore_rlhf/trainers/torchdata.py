"""What torchdata's ``StatefulDataLoader`` asks for in the state that it is given: most trainers store their place in the data so.

It takes any state, and looks into it when the first batch is asked for. Source: torchdata 0.11.0,
``torchdata/stateful_dataloader/stateful_dataloader.py`` (``load_state_dict`` of ``_StatefulSingleProcessDataLoaderIter``,
``_restore_main_state`` and ``__init__`` of ``_StatefulMultiProcessingDataLoaderIter``), ``worker.py`` (``_worker_loop``), ``sampler.py``
(``RandomSampler``, ``BatchSampler``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from fnmatch import fnmatchcase

from .resuming import INSIDE, Seen

_SAMPLING = (
    "_index_sampler_state",
    "_sampler_iter_state",
    "_sampler_iter_yielded",
    "_IterableDataset_len_called",
    "_shared_seed",
)
_ALONE = (*_SAMPLING, "_num_yielded", "dataset_state", "_iterator_finished")
_MAIN, _WORKERS = "_snapshot/_main_snapshot/", "_snapshot/_worker_snapshots/"
_WITH_WORKERS = (
    "_snapshot", "_steps_since_snapshot", "_iterator_finished", "_snapshot/_snapshot_step", "_snapshot/_last_yielded_worker_id",
    _MAIN[:-1], *(_MAIN + key for key in (*_SAMPLING, "_num_workers", "_base_seed")),
)  # fmt: skip
_OF_WORKER = ("worker_id", "dataset_state", "fetcher_state")
_OF_RANDOM = {"yielded", "generator"}
STOPS = "{file} has no {key}: it is loaded, and torchdata stops when the first batch is asked for"


def stops_at(*patterns: str, inside: str = "") -> Callable[[Seen], object]:
    """Files that fit hold such a state, of which something is gone: ``{file}`` and ``{key}``.

    Args:
        patterns: Of files, in the model's folder or the step's; see :meth:`.Seen.places`.
        inside: A key with a ``/`` behind it, in which the state lies.
    """

    def when(seen: Seen) -> object:
        beside = [name for name in sorted(seen.above) if any(fnmatchcase(name, pattern) for pattern in patterns)]
        for name in dict.fromkeys([*seen.places(*patterns), *beside]):
            there = {key.removeprefix(inside) for key in seen.keys(name) if key.startswith(inside)}
            if key := missing(there):
                return {"file": name.replace(INSIDE, ": "), "key": inside + key}
        return None

    return when


def astray(tree: object) -> str:
    """Where a state says two places in the data, in words; empty where none does.

    A loader asks its sampler for a batch and yields it, and counts both; a batch sampler counts what a random one counts, too. At the end
    of an epoch the last batch of an iterable dataset was asked for and never came.

    Args:
        tree: Anything in which such states may lie; what a file makes of it may hold one object many times, or itself.
    """
    seen, left = set[int](), [tree]
    while left:
        value = left.pop()
        if id(value) in seen or not isinstance(value, Mapping | list | tuple):
            continue
        seen.add(id(value))
        if isinstance(value, Mapping) and (found := _two_places(value)):
            return found
        left += value.values() if isinstance(value, Mapping) else value
    return ""


def _two_places(state: Mapping[object, object]) -> str:
    snapshot = _inside(state, "_snapshot")
    main, counted = (_inside(snapshot, "_main_snapshot"), "_snapshot_step") if snapshot else (state, "_num_yielded")
    yielded, asked = (snapshot or state).get(counted), main.get("_sampler_iter_yielded")
    if type(yielded) is type(asked) is int and yielded != asked and not state.get("_iterator_finished"):
        return f"{counted} is {yielded}, and _sampler_iter_yielded is {asked}"
    batches = _inside(main, "_sampler_iter_state")
    samples, inner = batches.get("samples_yielded"), _inside(batches, "sampler_iter_state")
    if inner.keys() == _OF_RANDOM and type(samples) is int and samples != inner["yielded"]:
        return f"samples_yielded is {samples}, and yielded of its random sampler is {inner['yielded']!r:.40}"
    return ""


def _inside(state: Mapping[object, object], key: str) -> Mapping[object, object]:
    found = state.get(key)
    return found if isinstance(found, Mapping) else {}


def missing(there: Collection[str]) -> str:
    """The first key of a state that it asks for and that is gone; empty where there is none, or that is no such state.

    Args:
        there: Its keys, each with those above it: ``_snapshot/_snapshot_step``.
    """
    several = any(key.startswith("_snapshot") or key == "_steps_since_snapshot" for key in there)
    asked = _WITH_WORKERS if several else _ALONE
    if not {*asked} & {*there}:
        return ""
    gone = [key for key in asked if key not in there]
    return next(iter([*gone, *_of_sampler(there, _MAIN if several else ""), *_of_workers(there)]), "")


def _of_sampler(there: Collection[str], at: str) -> list[str]:
    """Of a batch sampler's state, and of a random sampler's in it; a sampler of somebody else's has what it has."""
    state = f"{at}_sampler_iter_state/"
    inner = {key.removeprefix(state) for key in there if key.startswith(state)}
    of_random = {key.split("/")[1] for key in inner if key.startswith("sampler_iter_state/")}
    gone = {"samples_yielded"} - inner if inner else set[str]()
    gone |= (
        {f"sampler_iter_state/{key}" for key in _OF_RANDOM - of_random}
        if of_random and of_random < _OF_RANDOM
        else set()
    )
    return [state + key for key in sorted(gone)]


def _of_workers(there: Collection[str]) -> list[str]:
    names = {key.removeprefix(_WORKERS) for key in there if key.startswith(_WORKERS)}
    workers = {name for name in names if "/" not in name}
    wanted = [f"worker_{number}" for number in range(len(workers))]
    return [_WORKERS + one for one in wanted if one not in workers] + [
        f"{_WORKERS}{worker}/{key}"
        for worker in sorted(workers)
        for key in _OF_WORKER
        if f"{worker}/{key}" not in names
    ]
