"""Other trainers' replay buffers as buffers of the RLHF state, and back: what their ``state_dict`` gives, in a file that is loaded safely.

NeMo-RL's ``ReplayBuffer`` has such a state (at 7ea279a, ``nemo_rl/algorithms/async_utils/replay_buffer.py``, ``state_dict``): lists of
groups of trajectories, whose batches are ``BatchedDataDict``; NeMo-RL itself pickles it. Its ``TQReplayBuffer`` gives objects of its data
plane, which are refused by name. verl 0.9.1 (``trainer/ppo/v1/replay_buffer.py``, trajectories lie in TransferQueue) and TRL 1.16.0
(``experimental/async_grpo``, rollouts lie in a queue) have none: there :class:`~.journal_writer.JournalWriter` keeps what is finished.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from ...errors import Corrupt, Problems, UsageError
from ...storage.records import shorten
from .pieces import Buffer

_TREE = "tree"
_NO_CLASSES: Mapping[str, Callable[[dict[Any, Any]], Any]] = MappingProxyType({})


def buffer_of(state: Mapping[str, Any], where: str = "replay buffer") -> Buffer:
    """A buffer for :attr:`RlhfState.buffers`.

    Args:
        state: What a replay buffer's ``state_dict`` gives: a nest of mappings, lists, tuples, tensors, arrays and plain values.
        where: Whose, for messages.

    Raises:
        UsageError: Something else is in it; all of it is named.
    """
    buffer, problems = Buffer(), Problems()
    buffer.meta[_TREE] = _told(state, where, buffer.tensors, problems)
    problems.raise_if_any()
    return buffer


def state_of(
    buffer: Buffer, classes: Mapping[str, Callable[[dict[Any, Any]], Any]] = _NO_CLASSES, where: str = "replay buffer"
) -> Any:
    """The inverse of :func:`buffer_of`.

    Args:
        buffer: As it was loaded.
        classes: What makes a mapping of a dict, by the name of its class: ``{"BatchedDataDict": BatchedDataDict}``; others stay dicts.
        where: Whose, for messages.

    Raises:
        Corrupt: It is no such buffer.
    """
    if buffer.meta.keys() != {_TREE}:
        raise Corrupt(f"{where}: was not made by buffer_of: its meta holds {shorten(sorted(buffer.meta))}")
    return _read(buffer.meta[_TREE], buffer.tensors, classes, where)


def _told(value: Any, place: str, tensors: dict[str, torch.Tensor], problems: Problems) -> object:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic)):
        return _told_tensor(value, place, tensors, problems)
    if isinstance(value, Mapping):
        pairs = [
            [_told(key, f"{place}: key", tensors, problems), _told(one, f"{place}[{shorten(key)}]", tensors, problems)]
            for key, one in value.items()
        ]
        return {"mapping": pairs, "class": "" if type(value) is dict else type(value).__name__}
    if isinstance(value, (list, tuple)):
        items = [_told(one, f"{place}[{at}]", tensors, problems) for at, one in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    problems.add(UsageError, f"{place} is a {type(value).__qualname__}, which cannot be loaded safely")
    return None


def _told_tensor(value: Any, place: str, tensors: dict[str, torch.Tensor], problems: Problems) -> object:
    kind = "tensor" if isinstance(value, torch.Tensor) else "array"
    name = f"{len(tensors):06d}"
    try:
        tensors[name] = value.detach() if isinstance(value, torch.Tensor) else torch.from_numpy(np.array(value))
    except TypeError:
        problems.add(UsageError, f"{place} is an array of {value.dtype}, which no tensor can hold")
    return {kind: name}


def _read(told: Any, tensors: Mapping[str, torch.Tensor], classes: Mapping[str, Callable[..., Any]], where: str) -> Any:
    if isinstance(told, list):
        return [_read(one, tensors, classes, where) for one in told]
    if not isinstance(told, Mapping):
        return told
    kind, content = next(iter(told.items()), ("", ""))
    if told.keys() == {"mapping", "class"} and isinstance(told["mapping"], list):
        pairs = [_read(pair, tensors, classes, where) for pair in told["mapping"]]
        if all(isinstance(pair, list) and len(pair) == 2 and _is_key(pair[0]) for pair in pairs):
            return classes.get(str(told["class"]), dict)(dict(pairs))
    elif told.keys() == {"tuple"} and isinstance(content, list):
        return tuple(_read(content, tensors, classes, where))
    elif len(told) == 1 and kind in ("tensor", "array") and isinstance(content, str) and content in tensors:
        return tensors[content] if kind == "tensor" else tensors[content].numpy()
    raise Corrupt(f"{where}: expected a value as buffer_of writes it, found {shorten(told)}")


def _is_key(value: object) -> bool:
    return all(map(_is_key, value)) if isinstance(value, tuple) else isinstance(value, (str, int, float, type(None)))
