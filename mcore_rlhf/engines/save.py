"""What a rank saves: live tensors as places in a file and the segments that fill them, and the account of all that is alive.

An engine describes the files of a step; what it does not know of, it would leave out without a word. So the live objects are
counted by themselves, and each tensor has to be accounted for: its memory goes into a file that this rank writes, or another
rank, which holds the same, writes it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, TypeVar

import numpy as np
import torch

from mcore_rlhf.core.catalog import MASTER, PARAM, Record, dtype_of
from mcore_rlhf.errors import Incomplete, Problems, Unsupported, log_of
from mcore_rlhf.storage.stored import NAMESPACES, Namespace, StoredTensor

from .base import LiveFile, Segment, StateTensor
from .stateful import leaves

T = TypeVar("T")
LOG = log_of("mcore_rlhf")
SMALL_NBYTES = 1 << 16
"""Storages up to this size are copied at once and stay in the tree: a segment costs more than their bytes."""


@dataclass(slots=True)
class LiveTree:
    """Collects the tensors of one file. Tensors that share a storage share a record, so views and ties survive.

    Args:
        file: The file's path, relative to the role's folder.
    """

    file: str
    segments: list[Segment] = field(default_factory=list)
    _records: dict[int, Record] = field(default_factory=dict)
    _small: dict[int, torch.Tensor] = field(default_factory=dict)
    _count: int = 0
    _kept: list[torch.UntypedStorage] = field(default_factory=list)

    @property
    def storages(self) -> tuple[torch.UntypedStorage, ...]:
        """The live memory that is in the tree: adopted, or copied."""
        return tuple(self._kept)

    def placed(self, tree: T) -> T:
        """A copy of a nest of dictionaries, lists, tuples and Namespaces in which live tensors are places.

        Containers and arrays are new, so that the live ones may change; other values are taken as they are.
        """
        return self._placed(tree)  # type: ignore[return-value]

    def record(self, dtype: torch.dtype, numel: int) -> Record:
        """A record of its own, which other ranks may fill as well."""
        record = Record(self.file, f"data/{self._count}", dtype_of(dtype), numel, 0)
        self._count += 1
        return record

    def _placed(self, value: object) -> object:
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, dict) and type(value) in (dict, OrderedDict):
            items = ((key, self._placed(item)) for key, item in value.items())
            return OrderedDict(items) if isinstance(value, OrderedDict) else dict(items)
        if type(value) in (list, tuple):
            assert isinstance(value, list | tuple)
            return type(value)(self._placed(item) for item in value)
        if type(value) in NAMESPACES:
            return Namespace({key: self._placed(item) for key, item in vars(value).items()})
        return value.copy() if isinstance(value, np.ndarray) else value

    def _tensor(self, tensor: torch.Tensor) -> object:
        tensor = tensor.detach()
        storage = tensor.untyped_storage()
        if storage.nbytes() <= SMALL_NBYTES:
            return self._copied(tensor, storage)
        record = self._records.get(storage.data_ptr()) or self._adopt(tensor, storage)
        if record.dtype != dtype_of(tensor.dtype):
            record = Record(
                record.file, record.key, dtype_of(tensor.dtype), storage.nbytes() // tensor.element_size(), 0
            )
        return StoredTensor(record, int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride()))

    def _copied(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
        """A copy on the CPU; views of one small storage stay views of one."""
        known = self._small.get(storage.data_ptr())
        if known is None or storage.data_ptr() == 0:
            flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            known = self._small[storage.data_ptr()] = flat.to("cpu", copy=True)
            self._kept.append(storage)  # while it lives, nobody else gets its address
        typed = torch.empty(0, dtype=tensor.dtype, device=known.device).set_(known.untyped_storage())
        return typed.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def _adopt(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> Record:
        record = self.record(tensor.dtype, storage.nbytes() // tensor.element_size())
        self._records[storage.data_ptr()] = record
        self._kept.append(storage)
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        self.segments.append(Segment(record.key, 0, whole[: record.nbytes]))
        return record


BUFFER = "buffer"
_PLAIN = (str, bytes, int, float, complex, bool, type(None))


@dataclass(frozen=True, slots=True)
class Alive:
    """A tensor that is alive.

    Args:
        name: See :class:`~.account.StateTensor`.
        state: See there.
        tensor: This rank's memory of it.
    """

    name: str
    state: str
    tensor: torch.Tensor


def of_module(module: torch.nn.Module, prefix: str = "") -> Iterator[Alive]:
    """Parameters and persistent buffers, each once, whatever ``state_dict`` makes of them.

    Args:
        module: The model.
        prefix: Stands before its names.
    """
    seen: set[int] = set()
    for path, part in module.named_modules():
        transient = part._non_persistent_buffers_set
        kept = {name: buffer for name, buffer in part._buffers.items() if name not in transient}
        for state, tensors in ((PARAM, part._parameters), (BUFFER, kept)):
            for name, tensor in tensors.items():
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield Alive(f"{prefix}{path}.{name}" if path else f"{prefix}{name}", state, tensor)


def makes_its_state(module: torch.nn.Module) -> bool:
    """Whether a part of a module has code of its own that says what its state is."""
    own = torch.nn.Module
    return any(
        (type(part).state_dict, type(part)._save_to_state_dict) != (own.state_dict, own._save_to_state_dict)
        or part._state_dict_hooks
        or part._state_dict_pre_hooks
        for part in module.modules()
    )


def of_optimizer(
    optimizer: Any, name_of: Callable[[object], str], masters: Iterable[object] = (), *, own_form: bool = False
) -> Iterator[Alive]:
    """All tensors that a torch optimizer keeps, at any depth.

    Args:
        optimizer: Has ``state``, as torch's have.
        name_of: Names a tensor that it trains.
        masters: Those that it trains and that are no parameters of the model.
        own_form: Whether its own code says how objects are saved.

    Raises:
        Unsupported: It keeps objects that no file can hold; they are named.
    """
    problems = Problems()
    for param in masters:
        if isinstance(param, torch.Tensor):
            yield Alive(name_of(param), MASTER, param)
    for param, values in optimizer.state.items():
        for state, value in leaves(values):
            if isinstance(value, torch.Tensor):
                yield Alive(name_of(param), state, value)
            elif not isinstance(value, _PLAIN) and not own_form:
                text = f"{type(optimizer).__qualname__}: {state} of {name_of(param)} is a {type(value).__qualname__}"
                problems.add(Unsupported, f"{text}; only tensors and plain values can be saved")
    problems.raise_if_any()


def given_otherwise(alive: Iterable[Alive], given: object) -> list[torch.Tensor]:
    """The live tensors that somebody's own code gave in another form: the same values under the same name.

    Args:
        alive: What an optimizer keeps.
        given: The nest that its ``state_dict`` made.
    """
    left: dict[tuple[str, int], list[torch.Tensor]] = {}
    for path, leaf in leaves(given):
        if isinstance(leaf, torch.Tensor):
            left.setdefault((path.rpartition(".")[2], leaf.numel()), []).append(leaf)
    found, rounded = [], []
    for one in alive:
        among = left.get((one.state.rpartition(".")[2], one.tensor.numel()), [])
        at = next((at for at, tensor in enumerate(among) if _has_values_of(tensor, one.tensor)), None)
        if at is not None:
            found.append(one.tensor)
            rounded += (
                [f"{one.state} of {one.name}"] if among.pop(at).element_size() < one.tensor.element_size() else []
            )
    if rounded:
        text = "the optimizer's own code gives %d tensors with fewer bits than they have (the first: %s), and so they are saved"
        LOG.warning(text, len(rounded), rounded[0])
    return found


_UNSCALED = (torch.float32, torch.float64, torch.bfloat16)
"""Types whose numbers mean themselves; smaller ones, and integers, have a scale beside them, which only their own code knows."""


def _has_values_of(given: torch.Tensor, live: torch.Tensor) -> bool:
    """Whether a tensor holds what another does, as far as their types can be compared: to the bit, in the smaller of both."""
    if given.dtype != live.dtype and not {given.dtype, live.dtype} <= {*_UNSCALED}:
        return True
    dtype = min(given.dtype, live.dtype, key=lambda one: one.itemsize)
    mine, theirs = (
        one.detach().to(live.device, dtype).contiguous().flatten().view(torch.uint8) for one in (live, given)
    )
    return torch.equal(mine, theirs)


def torch_optimizers(optimizer: Any) -> Iterator[Any]:
    """The optimizers at the bottom of a nest of wrappers and chains, each once: those whose ``state`` is no wrapper's view."""
    if hasattr(optimizer, "chained_optimizers"):  # a chain of several has views of them too, which raise
        for one in optimizer.chained_optimizers:
            yield from torch_optimizers(one)
    elif getattr(optimizer, "optimizer", None) is not None:
        yield from torch_optimizers(optimizer.optimizer)
    elif hasattr(optimizer, "param_groups") and hasattr(optimizer, "state"):
        yield optimizer


@dataclass(slots=True)
class MemoryRanges:
    """The live memory that goes into files, as ranges of addresses by device."""

    _ranges: dict[torch.device, list[tuple[int, int]]] = field(default_factory=dict)
    _merged: dict[torch.device, tuple[list[int], list[int]]] = field(default_factory=dict)

    @classmethod
    def of(cls, files: Iterable[LiveFile], trees: Iterable[LiveTree] = ()) -> MemoryRanges:
        """What files are filled from.

        Args:
            files: Their segments are live tensors.
            trees: What their small tensors were copied from.
        """
        found = cls()
        for tensor in (segment.tensor for file in files for segment in file.segments):
            found.put(tensor)
        for storage in (storage for tree in trees for storage in tree.storages):
            found._add(storage.device, storage.data_ptr(), storage.nbytes())
        return found

    def put(self, tensor: torch.Tensor) -> None:
        """A tensor goes into a file, as it is or in another form."""
        self._add(tensor.device, tensor.data_ptr(), _extent(tensor))

    def _add(self, device: torch.device, start: int, nbytes: int) -> None:
        if nbytes:
            self._ranges.setdefault(device, []).append((start, start + nbytes))
            self._merged.clear()

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether all bytes of a tensor are among them."""
        if not tensor.numel():
            return True
        starts, stops = self._ends(tensor.device)
        at = bisect_right(starts, tensor.data_ptr()) - 1
        return at >= 0 and tensor.data_ptr() + _extent(tensor) <= stops[at]

    def _ends(self, device: torch.device) -> tuple[list[int], list[int]]:
        """Starts and ends of the ranges of a device, those that touch being one."""
        if device not in self._merged:
            starts, stops = list[int](), list[int]()
            for start, stop in sorted(self._ranges.get(device, ())):
                if stops and start <= stops[-1]:
                    stops[-1] = max(stops[-1], stop)
                else:
                    starts.append(start)
                    stops.append(stop)
            self._merged[device] = starts, stops
        return self._merged[device]

    def counted(self, alive: Iterable[Alive], among: str | None = None) -> Iterator[StateTensor]:
        """What is alive, and whether this rank writes it.

        Args:
            alive: The tensors.
            among: See :class:`~.account.StateTensor`.
        """
        for one in alive:
            tensor = one.tensor
            nbytes, what = tensor.numel() * tensor.element_size(), f"{tensor.dtype} {tuple(tensor.shape)}"
            yield StateTensor(one.name, one.state, what, nbytes, self.has(tensor), among)


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


_MOST_NAMES = 8
_UNWRITTEN = (
    "Nothing was saved: a step that lacks them would resume as another run. Save this role with an engine or an optimizer that is "
    "supported, or without its optimizer."
)


@dataclass(slots=True)
class Counted:
    """Tensors of one state.

    Args:
        tensors: How many.
        nbytes: Their length together.
    """

    tensors: int = 0
    nbytes: int = 0

    def add(self, tensors: int, nbytes: int) -> None:
        """Count some more."""
        self.tensors, self.nbytes = self.tensors + tensors, self.nbytes + nbytes


@dataclass(slots=True)
class Holding:
    """What a rank holds that a set of ranks hold alike, or that it holds alone: small enough to tell all others.

    Args:
        states: By state, how much.
        digest: Of all names, shapes and types, in any order.
        here: Whether this rank writes it.
    """

    states: dict[str, Counted] = field(default_factory=dict)
    digest: str = ""
    here: bool = True


RankAccount = dict[str | None, Holding]
"""A rank's holdings, by the set of ranks that hold the same; None: what it holds alone."""


def account_of(state_tensors: Iterable[StateTensor], rank: int, role: str, problems: Problems) -> RankAccount:
    """One rank's account.

    Args:
        state_tensors: All its state tensors of a role.
        rank: The rank, for messages.
        role: The role, for messages.
        problems: Told what would be lost: what this rank holds alone and does not write.
    """
    sets: dict[str | None, list[StateTensor]] = {}
    for one in state_tensors:
        sets.setdefault(one.among, []).append(one)
    if lost := [one for one in sets.get(None, []) if not one.here]:
        text = (
            f"{role}: rank {rank}: {len(lost)} live tensors ({_named(lost)}) would not be in the step: neither as they are, nor in a "
            "form that is known"
        )
        problems.add(Unsupported, text, _UNWRITTEN)
    return {among: _holding(tensors, f"{role}: rank {rank}: {among}", problems) for among, tensors in sets.items()}


def _holding(state_tensors: Sequence[StateTensor], where: str, problems: Problems) -> Holding:
    found = Holding(
        here=any(one.here for one in state_tensors if one.nbytes) or not any(one.nbytes for one in state_tensors)
    )
    lines = []
    for one in state_tensors:
        found.states.setdefault(one.state, Counted()).add(1, one.nbytes)
        lines.append(f"{one.name}\0{one.state}\0{one.what}")
    found.digest = sha256("\n".join(sorted(lines)).encode()).hexdigest()
    if state_tensors[0].among is not None and found.here and (lost := [one for one in state_tensors if not one.here]):
        text = f"{where}: this rank writes it, but not {len(lost)} of its live tensors ({_named(lost)})"
        problems.add(Unsupported, text, _UNWRITTEN)
    return found


def compare(accounts: Sequence[RankAccount]) -> tuple[dict[str, Counted], dict[str, int | None]]:
    """Compare what ranks hold alike with what is written of it.

    Args:
        accounts: Of every rank, in their order.

    Returns:
        By state, what the step holds; what several hold alike counts once. And the sets that some rank holds otherwise than
        they are written, with the rank that writes them: see :func:`explain`.
    """
    total: dict[str, Counted] = {}
    writers: dict[str, tuple[int, Holding]] = {}
    for rank, account in enumerate(accounts):
        for among, holding in account.items():
            if among is None or (holding.here and writers.setdefault(among, (rank, holding))[0] == rank):
                for state, count in holding.states.items():
                    total.setdefault(state, Counted()).add(count.tensors, count.nbytes)
    wrong: dict[str, int | None] = {}
    for account in accounts:
        for among, holding in account.items():
            writer = writers.get(among) if among is not None else None
            if among is not None and (writer is None or writer[1].digest != holding.digest):
                wrong[among] = writer[0] if writer is not None else None
    return dict(sorted(total.items())), wrong


Details = dict[str, list[StateTensor]]
"""By set of ranks, what a rank holds; told only where something is wrong, since all names of all ranks are many."""


def details(state_tensors: Iterable[StateTensor], sets: Iterable[str]) -> Details:
    """What a rank holds of some sets."""
    found: Details = {among: [] for among in sets}
    for one in state_tensors:
        if one.among in found:
            found[one.among].append(one)
    return found


def explain(wrong: Mapping[str, int | None], ranks: Sequence[Details], role: str, problems: Problems) -> None:
    """Say which ranks hold what nobody writes, by parameter and state.

    Args:
        wrong: What :func:`compare` found.
        ranks: Of every rank, in their order.
        role: The role, for messages.
        problems: Told.
    """
    for among, writer in wrong.items():
        theirs = ranks[writer][among] if writer is not None else []
        for rank, mine in ((rank, told[among]) for rank, told in enumerate(ranks)):
            only, gone = _without(mine, theirs), _without(theirs, mine) if mine else []
            if only or gone:
                text = f"{role}: rank {rank} holds {_counted(mine)} as a copy of {among}, and "
                text += f"rank {writer} writes {_counted(theirs)}" if writer is not None else "no rank writes it"
                text += f"; only rank {rank} has {_named(only)}" if only else ""
                problems.add(Incomplete, f"{text}; it lacks {_named(gone)}" if gone else text, _UNWRITTEN)


def _without(some: Iterable[StateTensor], others: Iterable[StateTensor]) -> list[StateTensor]:
    rest = Counter((one.name, one.state, one.what) for one in others)
    found = []
    for one in some:
        key = one.name, one.state, one.what
        found += [] if rest[key] > 0 else [one]
        rest[key] -= 1
    return found


def as_json(total: Mapping[str, Counted]) -> dict[str, object]:
    """For the manifest: how many tensors and bytes of live state, together and by state."""
    return {
        "tensors": sum(one.tensors for one in total.values()),
        "bytes": sum(one.nbytes for one in total.values()),
        "states": {state: [one.tensors, one.nbytes] for state, one in total.items()},
    }


def _counted(held: Iterable[StateTensor]) -> str:
    states: dict[str, Counted] = {}
    for one in held:
        states.setdefault(one.state, Counted()).add(1, one.nbytes)
    return ", ".join(f"{one.tensors} × {state} ({one.nbytes} bytes)" for state, one in sorted(states.items()))


def _named(state_tensors: Sequence[StateTensor]) -> str:
    """Some of them, every state among them."""
    nth, seen = list[int](), Counter[str]()
    for one in state_tensors:
        nth.append(seen[one.state])
        seen[one.state] += 1
    order = sorted(range(len(state_tensors)), key=nth.__getitem__)
    names = [f"{state_tensors[at].state} of {state_tensors[at].name}" for at in order[:_MOST_NAMES]]
    return ", ".join(names) + (f", … ({len(state_tensors)} together)" if len(state_tensors) > _MOST_NAMES else "")
