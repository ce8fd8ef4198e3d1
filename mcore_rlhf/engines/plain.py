"""Plain PyTorch: a module, its optimizer and its scheduler, in one process or as equal replicas (DDP).

Everything lies in one file, ``state.pt``, as ``torch.save`` would write it; ``torch.load(…, weights_only=True)`` reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist

from mcore_rlhf.core.account import Report
from mcore_rlhf.core.facts import Fate
from mcore_rlhf.core.plan import FilePlan
from mcore_rlhf.engines.stateful import torch_values
from mcore_rlhf.errors import Incomplete, LayoutMismatch, Problems, UsageError
from mcore_rlhf.formats.torch_file import FILE as FILE
from mcore_rlhf.storage.paths import ReadablePath
from mcore_rlhf.storage.pt import Pt, PtFile, read_pt
from mcore_rlhf.storage.stored import StoredTensor

from .base import LiveFile, LiveState, LoadRequest, PreparedLoad, StateTensor
from .load import Load, Pair, fill_places, naming
from .optimizers import (
    RECORD,
    OptimizerLoad,
    OwnLoad,
    SavedOptimizer,
    StockLoad,
    described,
    is_stock,
    matched,
    say_what_is_unknown,
)
from .save import Alive, LiveTree, MemoryRanges, given_otherwise, makes_its_state, of_module, of_optimizer
from .stateful import Stateful as Stateful
from .stateful import Undo, copied, no_bytes, refuse_unsavable, refuse_unwritable, tensors_in
from .until_step import UntilStep


class TorchEngine:
    """A module and what trains it, equal on all ranks. Rank 0 writes.

    Args:
        module: The model, or None; DDP's wrapper is looked through.
        optimizer: Any ``torch.optim.Optimizer``, or None.
        scheduler: Any learning-rate scheduler, or None.
        others: Further things with ``state_dict``, by name: a gradient scaler, a tokenizer's counters. They and the
            scheduler are loaded before the model's tensors change, and copied first, to be put back if one refuses.

    Raises:
        UsageError: One of the others has the name of a part of the file: model, optimizer.
    """

    def __init__(
        self,
        module: torch.nn.Module | None,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: Stateful | None = None,
        **others: Stateful,
    ) -> None:
        if taken := sorted({"model", "optimizer", RECORD} & others.keys()):
            raise UsageError(f"TorchEngine: {', '.join(taken)} cannot be the name of a further part; choose another")
        self.module = _unwrapped(module)
        self.optimizer = optimizer
        self.others: dict[str, Stateful] = {**({"scheduler": scheduler} if scheduler is not None else {}), **others}
        if optimizer is not None:
            say_what_is_unknown("TorchEngine", optimizer, self.module.parameters() if self.module is not None else None)
        self.ranks = tuple(range(dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1))

    @property
    def layout(self) -> str:
        """How the model is cut: not at all."""
        return f"DP{len(self.ranks)}"

    def live(self, step: int) -> LiveState:
        """Describe what is to be saved: all on rank 0, nothing on the others.

        Raises:
            Unsupported: Tensors have no bytes to save: meta, sparse or lazy ones; all are named.
        """
        del step
        if len(self.ranks) > 1 and dist.get_rank() != self.ranks[0]:
            return LiveState("torch", self.layout, (), state_tensors=tuple(self._state_tensors(MemoryRanges())))
        parts = self._parts()
        refuse_unsavable(parts)
        live = LiveTree(FILE)
        tree: dict[str, object] = {name: live.placed(part) for name, part in parts.items()}
        if self.optimizer is not None:
            tree[RECORD] = described(self.optimizer, self.module)
        files = (LiveFile(FILE, self.ranks[:1], tuple(live.segments), Pt.of(tree)),)
        memory = MemoryRanges.of(files, (live,))
        given = (Alive(name, part, tensor) for part in self._given() for name, tensor in tensors_in(parts[part]))
        alive = (*self._state_tensors(memory), *memory.counted(given), *self._left_out(memory, parts))
        return LiveState("torch", self.layout, files, state_tensors=alive)

    def _left_out(self, memory: MemoryRanges, parts: Mapping[str, object]) -> Iterator[StateTensor]:
        """What an optimizer with code of its own keeps, and gave neither as it is nor in another form: under the same name."""
        if "optimizer" in self._given() and isinstance(getattr(self.optimizer, "state", None), Mapping):
            for tensor in given_otherwise(self._kept(own_form=True), parts["optimizer"]):
                memory.put(tensor)
            yield from (one for one in memory.counted(self._kept(own_form=True)) if not one.here)

    def _kept(self, *, own_form: bool = False) -> Iterator[Alive]:
        """What the optimizer itself has."""
        names = {id(param): name for name, param in self.module.named_parameters()} if self.module is not None else {}
        return of_optimizer(
            self.optimizer, lambda held: names.get(id(held), "a parameter of no name"), own_form=own_form
        )

    def _state_tensors(self, memory: MemoryRanges) -> Iterator[StateTensor]:
        """What the model and the optimizer hold, the same on all ranks."""
        given, module = self._given(), self.module
        if module is not None and "model" not in given:
            yield from memory.counted(of_module(module), self.layout)
        if self.optimizer is not None and "optimizer" not in given:
            yield from memory.counted(self._kept(), self.layout)

    def _given(self) -> list[str]:
        """Parts whose own code decides what is their state: there is nothing to compare it with."""
        own = [*self.others]
        if self.module is not None and makes_its_state(self.module):
            own.append("model")
        return [*own, *(["optimizer"] if self.optimizer is not None and not is_stock(self.optimizer) else [])]

    def _parts(self) -> dict[str, object]:
        parts: dict[str, object] = {}
        if self.module is not None:
            parts["model"] = self.module.state_dict()
        if self.optimizer is not None:
            parts["optimizer"] = self.optimizer.state_dict()
        return parts | {name: other.state_dict() for name, other in self.others.items()}

    def until_step(self) -> UntilStep | None:
        """See :class:`~.until_step.Steps`."""
        return UntilStep.of([self.module] if self.module is not None else [], self.optimizer)

    def prepare_load(self, request: LoadRequest) -> PreparedLoad:
        """Open ``state.pt`` and compare it with what is live.

        Raises:
            CheckpointError: It is missing, damaged, or another model's or optimizer's; all differences are listed.
        """
        pt = read_pt(request.folder, FILE)
        where = request.folder / FILE
        if not isinstance(pt.tree, dict):
            raise LayoutMismatch(f"{where}: expected a dictionary with the model and its optimizer")
        wanted = [name for name in self._parts() if name == "model" or request.optimizer]
        load = Load[None](pt.root, (), FilePlan(FILE), Report(), [pt.root / pt.file])
        return load.checked(_Hooks(self, pt, where, wanted, load.report, request.optimizer))


@dataclass(slots=True)
class _Hooks:
    """What a module, its optimizer and the other parts take.

    Args:
        engine: The live ones.
        pt: The file.
        where: Its path, for messages.
        parts: What of it is loaded.
        report: Takes what is kept.
        optimizer: Whether the optimizer is restored.
    """

    engine: TorchEngine
    pt: PtFile
    where: ReadablePath
    parts: Sequence[str]
    report: Report
    optimizer: bool
    _optimizer: OptimizerLoad | None = None
    _places: list[Pair] = field(default_factory=list)

    def check(self, problems: Problems) -> None:
        """Compare names, shapes and types of the module, and the optimizer with the stored one."""
        tree, engine = self.pt.tree, self.engine
        for name in self.parts:
            if name not in tree:
                problems.add(Incomplete, f"{self.where}: has no {name!r}; it has {', '.join(map(str, tree))}")
        if engine.module is not None and "model" in tree:
            compare_model(engine.module, tree["model"], str(self.where), problems)
        if self.optimizer and engine.optimizer is not None and "optimizer" in tree:
            self._optimizer = self._matched(engine.optimizer, tree["optimizer"], problems)
        for name in sorted(set(map(str, tree)) - {*self.parts, RECORD}):
            self.report.add(Fate.NOTE, f"{name}: is in the checkpoint, and not loaded")
        self.report.add(Fate.KEPT, ", ".join(self.parts))

    def _matched(self, optimizer: torch.optim.Optimizer, stored: object, problems: Problems) -> OptimizerLoad | None:
        if not is_stock(optimizer):
            return OwnLoad(optimizer, self.pt, stored)
        try:
            saved = SavedOptimizer.parse(stored, self.pt.tree.get(RECORD), str(self.where))
        except LayoutMismatch as error:
            problems.add_error(error)
            return None
        order = matched(optimizer, self.engine.module, saved, str(self.where), problems)
        if any(indices != sorted(indices) for indices in order):
            text = "optimizer: its parameters are in another order than in the checkpoint; taken by name"
            self.report.add(Fate.DERIVED, text)
        return StockLoad(optimizer, self.pt, saved, order)

    def install(self, undo: Undo) -> None:
        """All that may refuse: the optimizer, the other parts, what the module's own code takes back."""
        engine, tree, self._places = self.engine, self.pt.tree, []
        others = {name: torch_values(self.pt.materialize(tree[name])) for name in self.parts if name in engine.others}
        if self._optimizer is not None:
            with naming("optimizer", self.where):
                self._places += self._optimizer.install(undo)
        for name, state in others.items():
            with naming(name, self.where):
                undo.handed(engine.others[name], state)
        if engine.module is not None and "model" in self.parts:  # one of no layers is false
            with naming("model", self.where):
                self._places += install_model(engine.module, self.pt, undo)

    def fill(self, copy: Callable[[], None]) -> None:
        """The tensors, each where it lies: there is nothing to cut, and no plan."""
        del copy
        fill_places(self.pt.root, self._places)


def install_model(module: torch.nn.Module, pt: PtFile, undo: Undo) -> list[Pair]:
    """Hand a module what is no tensor of its own: extra state, and what its hooks made for saving.

    Args:
        module: The live one.
        pt: The file.
        undo: Told how it is put back.

    Returns:
        Where the module's own tensors lie.
    """
    stored = pt.tree["model"]
    own = _own_tensors(module, module.state_dict())
    places = {name: (stored[name], own[name]) for name in own if isinstance(stored[name], StoredTensor)}
    if handed := torch_values(pt.materialize({name: value for name, value in stored.items() if name not in places})):
        before = {name: value for name, value in module.state_dict().items() if name in handed}
        undo.note(partial(module.load_state_dict, copied(before), strict=False))
        module.load_state_dict(handed, strict=False)
    return list(places.values())


def compare_model(module: torch.nn.Module, stored: object, where: str, problems: Problems) -> None:
    """Compare a stored module with the live one, name by name.

    Args:
        module: The live one.
        stored: Name → place or value, as the file holds it.
        where: The file.
        problems: Takes every difference, and every live tensor that cannot be overwritten.
    """
    if not isinstance(stored, Mapping):
        problems.add(LayoutMismatch, f"{where}: 'model' is a {type(stored).__name__}, not a dictionary of tensors")
        return
    live = module.state_dict()
    refuse_unwritable(_own_tensors(module, live), where, problems)
    _compare(stored, live, where, problems)


def _own_tensors(module: torch.nn.Module, live: Mapping[str, object]) -> dict[str, torch.Tensor]:
    """Those of a state dictionary that lie in the module's own memory, and are no copies that its code has made."""
    tensors = {name: value for name, value in live.items() if isinstance(value, torch.Tensor)}
    held = {_address(tensor) for tensor in (*module.parameters(), *module.buffers()) if not no_bytes(tensor)}
    return {name: tensor for name, tensor in tensors.items() if no_bytes(tensor) or _address(tensor) in held}


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _compare(stored: Mapping[str, object], live: Mapping[str, object], where: str, problems: Problems) -> None:
    for name, target in live.items():
        if name not in stored:
            problems.add(LayoutMismatch, f"{where}: {name} is missing; the model has it with shape {_shape(target)}")
        elif isinstance(target, torch.Tensor) and not _is_extra(name) and not no_bytes(target):
            _compare_one(name, stored[name], target, where, problems)
    for name in stored:
        if name not in live:
            problems.add(LayoutMismatch, f"{where}: {name} {_shape(stored[name])} is not a parameter of the model")


def _compare_one(name: str, place: object, target: torch.Tensor, where: str, problems: Problems) -> None:
    if not isinstance(place, StoredTensor):
        problems.add(LayoutMismatch, f"{where}: {name} is a {type(place).__name__}, the model's is a tensor")
    elif place.shape != tuple(target.shape):
        problems.add(LayoutMismatch, f"{where}: {name} has shape {place.shape}, the model's has {_shape(target)}")
    elif place.record.dtype.name != str(target.dtype).removeprefix("torch."):
        problems.add(LayoutMismatch, f"{where}: {name} is {place.record.dtype.name}, the model's is {target.dtype}")


def _is_extra(name: str) -> bool:
    """Whether it is what ``get_extra_state`` gave, which may be anything, at any time."""
    return name.rpartition(".")[2] == "_extra_state"


def _shape(value: object) -> tuple[int, ...] | None:
    if isinstance(value, torch.Tensor) and torch.nn.parameter.is_lazy(value):
        return None
    return tuple(value.shape) if isinstance(value, torch.Tensor | StoredTensor) else None


def _unwrapped(module: torch.nn.Module | None) -> torch.nn.Module | None:
    wrapped = isinstance(module, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel)
    return module.module if wrapped else module  # type: ignore[union-attr, return-value]
