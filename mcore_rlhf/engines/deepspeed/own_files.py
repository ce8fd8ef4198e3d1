"""Loading where stage, data-parallel size and the optimizer's order are the stored ones: every rank opens its own files only.

Stages 1 and 2 have the same files. Padding is copied with the rest; DeepSpeed stores masters without it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mcore_rlhf.core.account import Report
from mcore_rlhf.core.catalog import MASTER, PARAM, dtype_of, row_major
from mcore_rlhf.core.facts import Fate
from mcore_rlhf.engines.stateful import torch_values
from mcore_rlhf.errors import Corrupt, Incomplete, Problem
from mcore_rlhf.families.module import LAYOUT_KEYS, scaler_of
from mcore_rlhf.families.source import ParamGroup, TrainingState
from mcore_rlhf.formats.deepspeed.files import TagFiles
from mcore_rlhf.layouts.zero import FlatGroup
from mcore_rlhf.storage.pt import PtFile, read_pt
from mcore_rlhf.storage.stored import StoredTensor

from ..load import Load, Slot, planned_locally
from ..optimizers import is_elementwise
from .load import LiveOwner, Restored, slots_of
from .model import Flat, LiveOptimizer, States, Weight
from .restoring import WRAPPER


@dataclass(frozen=True, slots=True)
class OwnRankFiles:
    """This rank's files of a checkpoint whose local tensors are the live ones.

    Args:
        files: The tag.
        model: The model file.
        stored: The optimizer in the rank's optimizer file, or in the model file in stage 0; None where there is none.
        live: The live optimizer.
        weights: The live module's tensors.
    """

    files: TagFiles
    model: PtFile
    stored: StoredOptimizer | None
    live: LiveOptimizer | None
    weights: Sequence[Weight]

    @classmethod
    def find(
        cls, engine: Any, files: TagFiles, live: LiveOptimizer | None, weights: Sequence[Weight], *, optimizer: bool
    ) -> OwnRankFiles | None:
        """The files, or None where the local tensors are others.

        Raises:
            CheckpointError: A file of this rank is damaged.
        """
        name = engine._get_ckpt_name("", "")
        if not (files.folder / name).is_file():
            return None
        model = read_pt(files.root, files.path(name))
        if not isinstance(model.tree, Mapping):
            raise Corrupt(f"{model.directory.path}: expected a dictionary, found {type(model.tree).__name__}")
        degrees = (engine.seq_dp_world_size, engine.mp_world_size)
        if (model.tree.get("dp_world_size"), model.tree.get("mp_world_size")) != degrees:
            return None
        needed = live is not None and (optimizer or live.stage == 3)
        found = cls(files, model, _stored_optimizer(engine, files, model, live) if needed else None, live, weights)
        return found if found._same_weights() and (not needed or found._same_flats()) else None

    def load(self, *, optimizer: bool) -> tuple[Load[LiveOwner], Restored]:
        """Plan the load.

        Args:
            optimizer: Whether the optimizer is restored.
        """
        stored = self.stored if optimizer else None
        states = stored.tensor_states() if stored is not None else {}
        found = slots_of(self.weights, self.live, states, optimizer=stored is not None)
        plan, report = planned_locally(found, self._place, self._missing), Report()
        report.add(Fate.KEPT, "this rank's own files, bit for bit")
        wrapper = stored.wrapper() if stored is not None else {}
        opened = [self.files.root / self.model.file]
        return (
            Load(self.files.root, found, plan, report, opened),
            Restored(self._state(stored), stored is not None, states, wrapper),
        )

    def _same_weights(self) -> bool:
        """Whether names, shapes and types of all weights are the live ones."""
        module = self.model.tree.get("module")
        fragments = self.model.tree.get("frozen_param_fragments") or {}
        if not isinstance(module, Mapping):
            return False
        for weight in self.weights:
            if weight.sliced is not None and weight.trained:
                continue
            stored = module.get(weight.name) if weight.sliced is None else fragments.get(weight.name)
            shape = weight.shape if weight.sliced is None else (weight.tensor.numel(),)
            if not isinstance(stored, StoredTensor) or not _same(stored, shape, weight.tensor):
                return False
        return True

    def _same_flats(self) -> bool:
        stored, live = self.stored, self.live
        if stored is None or live is None or stored.groups != [flat.param_group for flat in live.flats]:
            return False
        if live.masters and not (len(stored.masters) == len(live.flats) and self._same_order(stored, live.flats)):
            return False
        return all(self._same_flat(stored, live, flat) for flat in live.flats)

    def _same_order(self, stored: StoredOptimizer, flats: Sequence[Flat]) -> bool:
        """Whether each flat tensor holds the parameters that it did; stage 0 has one in each, in the optimizer's order."""
        if stored.pt is self.model:
            return True
        listed = self.model.tree.get("param_shapes") or []
        shapes = [[(name, tuple(map(int, shape))) for name, shape in group.items()] for group in listed]
        gaps = stored.tree.get("param_alignment_paddings") or [() for _ in flats]
        free = [tuple(one) if any(one) else () for one in gaps]
        return shapes == [list(zip(flat.names, flat.shapes, strict=True)) for flat in flats] and (
            free == [flat.geometry.gaps if isinstance(flat.geometry, FlatGroup) else () for flat in flats]
        )

    def _same_flat(self, stored: StoredOptimizer, live: LiveOptimizer, flat: Flat) -> bool:
        """Whether its tensors have its length, with padding or without; in stage 0 its parameter's shape."""
        state = stored.states[flat.number]
        tensors = [(name, state[name]) for name in stored.tensor_states()[flat.number]]
        if live.masters:
            tensors.append((MASTER, stored.masters[flat.number]))
        return all(
            isinstance(one, StoredTensor)
            and one.shape in self._shapes(stored, flat, name)
            and one.strides == row_major(one.shape)
            for name, one in tensors
        )

    def _shapes(self, stored: StoredOptimizer, flat: Flat, state: str) -> list[tuple[int, ...]]:
        if stored.pt is self.model:
            return [flat.shapes[0]]
        if state in flat.whole:
            return [(flat.numel(state),)]
        whole = flat.geometry.length()
        return [(whole,), (whole - flat.geometry.padding(flat.rank),)]

    def _missing(self, slot: Slot[LiveOwner]) -> Problem:
        text = f"{self.files.folder}: no {slot.state} of {slot.owner.label}"
        return Problem(Incomplete, text, "Load with optimizer=False to begin with fresh optimizer states.")

    def _place(self, slot: Slot[LiveOwner]) -> object:
        top, owner = self.model.tree, slot.owner
        if isinstance(owner, Weight):
            where = top["module"] if owner.sliced is None else top["frozen_param_fragments"]
            return where.get(owner.name)
        if self.stored is None:
            return None
        if slot.state in (MASTER, PARAM):
            return self.stored.masters[owner.number]
        return self.stored.states[owner.number].get(slot.state)

    def _state(self, stored: StoredOptimizer | None) -> TrainingState:
        top, scheduler = self.model.tree, self.model.tree.get("lr_scheduler")
        groups = self.live.groups if self.live is not None else 0
        names = {group: tuple(self.live.names_of(group)) for group in range(groups)} if self.live is not None else {}
        return TrainingState(
            iteration=int(top.get("global_steps") or 0),
            groups=stored.param_groups_of(names) if stored is not None else (),
            scheduler=torch_values(self.model.materialize(dict(scheduler))) if isinstance(scheduler, Mapping) else None,
            grad_scaler=torch_values(scaler_of(stored.tree)) if stored is not None else None,
            other={
                key: torch_values(self.model.materialize(value)) for key, value in top.items() if key not in LAYOUT_KEYS
            },
        )


def _stored_optimizer(
    engine: Any, files: TagFiles, model: PtFile, live: LiveOptimizer | None
) -> StoredOptimizer | None:
    if live is None:
        return None
    if live.stage == 0:
        tree = model.tree.get("optimizer")
        return StoredOptimizer.of(model, tree) if isinstance(tree, Mapping) and not files.optim else None
    name = engine._get_zero_ckpt_name("", "")
    if not (files.folder / name).is_file():
        return None
    pt = read_pt(files.root, files.path(name))
    tree = pt.tree.get("optimizer_state_dict") if isinstance(pt.tree, Mapping) else None
    return StoredOptimizer.of(pt, tree) if isinstance(tree, Mapping) else None


def _same(stored: StoredTensor, shape: tuple[int, ...], live: Any) -> bool:
    dense = stored.strides == row_major(shape) or 0 in shape
    return stored.shape == shape and dense and stored.record.dtype == dtype_of(live.dtype)


@dataclass(slots=True)
class StoredOptimizer:
    """An optimizer as one file has it, by the number of the flat tensor: what DeepSpeed's four stages store alike.

    Source: deepspeed 0.19.8, ``runtime/zero/stage_1_and_2.py``, ``runtime/zero/stage3.py``, ``runtime/bf16_optimizer.py``,
    ``runtime/fp16/unfused_optimizer.py`` (``state_dict``).

    Args:
        pt: The file.
        tree: The optimizer's state dict in it.
        param_groups: Torch's param groups; empty in an elastic checkpoint, which has none.
        groups: For every flat tensor, its param group.
        states: For every flat tensor, what torch's optimizer keeps of it.
        masters: For every flat tensor, its master; empty where there are none.
    """

    pt: PtFile
    tree: Mapping[str, Any]
    param_groups: list[Mapping[str, Any]] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    states: list[Mapping[str, Any]] = field(default_factory=list)
    masters: list[Any] = field(default_factory=list)

    @classmethod
    def of(cls, pt: PtFile, tree: Mapping[str, Any]) -> StoredOptimizer:
        """Read a state dict of any stage."""
        found = cls(pt, tree)
        inner = tree.get("optimizer_state_dict", tree.get("base_optimizer_state", tree))
        if isinstance(inner, Mapping) and isinstance(inner.get("param_groups"), list):
            found.param_groups = inner["param_groups"]
            stored = inner.get("state", {})
            for group, one in enumerate(found.param_groups):
                for number in one["params"]:
                    found.groups.append(group)
                    found.states.append(stored.get(number, {}))
        if "fp32_groups" in tree:
            found.masters = [one for group in tree["fp32_groups"] for one in group]
        else:
            found.masters = list(tree.get("fp32_flat_groups", tree.get("single_partition_of_fp32_groups", [])))
        return found

    def tensor_states(self) -> States:
        """Of every flat tensor, the names of the states that are one value per element, such as ``exp_avg``."""
        wide = (
            tuple(key for key, value in state.items() if is_elementwise(key, getattr(value, "shape", None)))
            for state in self.states
        )
        return dict(enumerate(wide))

    def param_groups_of(self, names: Mapping[int, tuple[str, ...]]) -> tuple[ParamGroup, ...]:
        """The param groups as every format takes them.

        Args:
            names: The parameters of each.
        """
        found = []
        for group, stored in enumerate(self.param_groups):
            fields = {key: torch_values(self.pt.materialize(value)) for key, value in stored.items() if key != "params"}
            scalars: dict[str, object] = {}
            for of, state in zip(self.groups, self.states, strict=True):
                if of == group:
                    values = ((k, v) for k, v in state.items() if not is_elementwise(k, getattr(v, "shape", None)))
                    scalars.update(
                        (key, torch_values(self.pt.materialize(value))) for key, value in values if key not in scalars
                    )
            found.append(ParamGroup({**fields, **scalars}, params=names.get(group, ()), scalars=tuple(scalars)))
        return tuple(found)

    def wrapper(self) -> dict[str, object]:
        """What DeepSpeed's own optimizer keeps besides."""
        return {key: value for key, value in self.tree.items() if key in WRAPPER}
