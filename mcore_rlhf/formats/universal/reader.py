"""Opening a universal checkpoint: the model's files, the parameters' files and the param groups become one Source."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import cast

from mcore_rlhf.core.account import Report
from mcore_rlhf.core.catalog import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    MASTER,
    PARAM,
    Box,
    Chunk,
    DType,
    Shape,
    TensorEntry,
    TensorName,
    flat_boxes,
    row_major,
)
from mcore_rlhf.core.chunks import Chunks
from mcore_rlhf.core.facts import Fate
from mcore_rlhf.errors import Incomplete, LayoutMismatch, Problems, Unsupported
from mcore_rlhf.families.inventory import state_dict_of
from mcore_rlhf.families.megatron.groups import of_matrices
from mcore_rlhf.families.module import SHARDED_KEYS, USE_MUON, ModuleState, leaves_out_frozen
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.families.source import ParamGroup, Source, TrainingState
from mcore_rlhf.families.universal_info import INFO, VOCAB_TENSOR
from mcore_rlhf.models.spec import REPLICATED, VOCABULARY, ModelSpec, ParamSpec
from mcore_rlhf.storage.paths import ReadablePath
from mcore_rlhf.storage.record_file import StoredFile
from mcore_rlhf.storage.stored import StoredTensor

from .files import FP32, STEP, WRITTEN_AGAIN, ZERO, UniversalFolder, locate, state_key
from .opened import ModelStates, ParamFiles, ZeroFolder, common_states, read_model_states, read_zero_folder

Fields = dict[str, object]


def param_groups(
    optimizer: Mapping[str, object],
    states: ModelStates,
    params: Mapping[str, ParamFiles],
    notes: Report,
    folder: ReadablePath,
) -> tuple[ParamGroup, ...]:
    """The optimizer's groups.

    Args:
        optimizer: What is in ``optimizer_state.pt``.
        states: The model's files, whose ``param_shapes`` name the members.
        params: The parameters' files, which have the steps.
        notes: Told where members are not known.
        folder: The checkpoint, for messages.

    Raises:
        Unsupported: There are no groups.
        LayoutMismatch: The parameters of a group are not at the same step.
    """
    listed = _listed(optimizer, folder)
    members = _members(listed, states, [name for name, files in params.items() if files.step is not None])
    if any(names is None for names in members):
        notes.add(Fate.NOTE, "the files do not say which parameters are in which param group")
    problems = Problems()
    groups = []
    for number, (fields, names) in enumerate(zip(listed, members, strict=True)):
        steps = _steps(optimizer, fields, names, params)
        _check_steps(f"{folder}: param group {number}", steps, problems)
        _check_all_step(folder, steps, [name for name in names or () if name in params], problems)
        kept = {key: value for key, value in fields.items() if key != "params"}
        scalars = {STEP: next(iter(steps.values()))} if steps else {}
        groups.append(ParamGroup(kept | scalars, params=names or (), scalars=tuple(scalars)))
    problems.raise_if_any()
    return tuple(groups)


def _listed(optimizer: Mapping[str, object], folder: ReadablePath) -> list[Fields]:
    inner = optimizer.get("optimizer_state_dict")
    groups = optimizer.get("param_groups") or (inner.get("param_groups") if isinstance(inner, dict) else None)
    if not isinstance(groups, list) or not groups or not all(isinstance(group, dict) for group in groups):
        raise Unsupported(
            f"{folder}/zero/optimizer_state.pt: expected a list of param groups under 'param_groups', found none"
        )
    return cast(list[Fields], groups)


def _members(listed: Sequence[Fields], states: ModelStates, stepping: list[str]) -> list[tuple[str, ...] | None]:
    """Names per group: a group's ``params`` are numbers of flat groups, which ``param_shapes`` lists (stage 3: sub-groups)."""
    shapes = states.group_shapes
    if not shapes:
        return [tuple(stepping)] if len(listed) == 1 else [None] * len(listed)
    numbers = [_numbers(fields) for fields in listed]
    if sorted(n for group in numbers for n in group) != list(range(len(shapes))):
        numbers = [[n] for n in range(len(shapes))]
    if len(numbers) != len(listed):
        return [None] * len(listed)
    return [tuple(name for n in group for name in shapes[n]) for group in numbers]


def _steps(
    optimizer: Mapping[str, object], fields: Fields, names: tuple[str, ...] | None, params: Mapping[str, ParamFiles]
) -> dict[str, object]:
    """The steps in a group: of its parameters' files, or, in the stage 3 flavour, of the state of its sub-groups."""
    held = params if names is None else {name: params[name] for name in names if name in params}
    steps = {name: files.step for name, files in held.items() if files.step is not None}
    counted = steps or fields.get(USE_MUON) is True  # Muon counts none
    return steps if counted else _stage3_steps(optimizer, fields)


def _check_steps(where: str, steps: Mapping[str, object], problems: Problems) -> None:
    first = next(iter(steps), "")
    for name, step in steps.items():
        if _number(step) != _number(steps[first]):
            problems.add(
                LayoutMismatch,
                f"{where}: {first} is at step {_number(steps[first])}, {name} at {_number(step)}",
                "DeepSpeed has one step per group: the files are not of one checkpoint.",
            )
            return


def _check_all_step(
    folder: ReadablePath, steps: Mapping[str, object], names: Iterable[str], problems: Problems
) -> None:
    """Where one parameter of a group has its step, all have: DeepSpeed compares them, and stops at one that has none.

    Source: DeepSpeed 0.19.8, ``runtime/base_optimizer.py:371``.
    """
    stepping = [name for name in names if name in steps]
    for name in names if stepping else ():
        if name not in steps:
            there = f"it is there for {stepping[0]} of the same param group"
            problems.add(Incomplete, f"{folder / ZERO / name}: expected {STEP}.pt, found none; {there}", WRITTEN_AGAIN)


def _stage3_steps(optimizer: Mapping[str, object], fields: Fields) -> dict[str, object]:
    inner = optimizer.get("optimizer_state_dict")
    states = inner.get("state") if isinstance(inner, dict) else None
    if not isinstance(states, dict):
        return {}
    mine = [n for n in _numbers(fields) if n in states] or list(states)
    return {f"sub-group {n}": states[n][STEP] for n in mine if states[n].get(STEP) is not None}


def _numbers(fields: Fields) -> list[int]:
    """The flat groups of a param group."""
    params = fields.get("params")
    return [n for n in params if type(n) is int] if isinstance(params, list) else []


def _number(step: object) -> float:
    return float(cast(float, step)) if step is not None else -1.0


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """Where a parameter's own bytes lie, as the model computes with it.

    Args:
        whole: Copies of the whole tensor; empty where only the ``fp32`` file has its value.
        slices: Flat slices of a frozen parameter, one per data-parallel rank (stage 3).
    """

    whole: tuple[StoredTensor, ...] = ()
    slices: tuple[StoredTensor, ...] = ()


@dataclass(slots=True)
class _Places:
    """Where the elements of every tensor lie.

    Args:
        role: Role of all tensors.
        model: Names and shapes.
        weights: Where the parameters themselves lie.
        params: The parameters' files.
        states: Names of the optimizer's tensor states; empty where the optimizer was not asked for.
    """

    role: str
    model: ModelSpec
    weights: Mapping[str, StoredWeights]
    params: Mapping[str, ParamFiles]
    states: tuple[str, ...]

    def table(self) -> Chunks:
        """All of them."""
        return Chunks.of(self._entries())

    def _entries(self) -> Iterator[TensorEntry]:
        for spec in self.model.params:
            for state in self._states_of(spec):
                of = self._weights(spec) if state == PARAM else self._state(spec.name, state, spec.global_shape)
                if of:
                    yield TensorEntry(
                        TensorName(self.role, spec.name, state), spec.global_shape, of[0].record.dtype, of
                    )

    def _states_of(self, spec: ParamSpec) -> tuple[str, ...]:
        """What of a parameter is stored: stage 3 and pipelines keep no weights but the masters of what they train."""
        weights = self.weights.get(spec.name, StoredWeights())
        files = self.params.get(spec.name) if spec.trainable else None
        states = tuple(s for s in self.states if s == MASTER or (files is not None and state_key(s) in files.tensors))
        states = states if spec.trainable else ()
        return (PARAM, *states) if weights.whole or weights.slices or not states else states

    def _state(self, param: str, state: str, shape: Shape) -> tuple[Chunk, ...]:
        files = self.params.get(param)
        stored = files.tensors.get(state_key(state)) if files is not None else None
        return (whole_chunk(stored, shape),) if stored is not None else ()

    def _weights(self, spec: ParamSpec) -> tuple[Chunk, ...]:
        weights, shape = self.weights.get(spec.name, StoredWeights()), spec.global_shape
        if weights.slices:
            return tuple(_slice_chunks(weights.slices, shape))
        if weights.whole:
            return tuple(whole_chunk(stored, shape) for stored in weights.whole)
        return self._state(spec.name, MASTER, shape)


def whole_chunk(stored: StoredTensor, shape: Shape) -> Chunk:
    """A stored tensor as the whole of a logical one; a flat one is seen in the other's shape."""
    strides = stored.strides if stored.shape == shape else row_major(shape)
    return Chunk(Box.whole(shape), stored.record, stored.start, strides)


def _slice_chunks(slices: tuple[StoredTensor, ...], shape: Shape) -> Iterator[Chunk]:
    """Equal flat slices, the last ones padded.

    Source: DeepSpeed 0.19.8, ``runtime/zero/partition_parameters.py``: ``ceil(numel / world)`` elements per rank.
    """
    numel, start, strides = Box.whole(shape).numel, 0, row_major(shape)
    for stored in slices:
        stop, at = min(numel, start + stored.shape[0]), stored.start
        for box in flat_boxes(shape, start, stop):
            yield Chunk(box, stored.record, at, strides)
            at += box.numel
        start += stored.shape[0]


_LAYER = re.compile(r"(?:^|.*?\.)(?:layers|h|blocks|block)\.(\d{1,18})\.|^(\d{1,18})\.")


def read_universal(path: ReadablePath, options: ReadOptions) -> Source:
    """Open a universal checkpoint.

    Args:
        path: A ``<tag>_uni`` folder, or a root with ``latest_universal``.
        options: Which step, which stubs.

    Raises:
        CheckpointError: It is incomplete, damaged, or contradicts itself.
    """
    located = locate(path, options.step)
    states = read_model_states(located, options.stubs)
    zero = read_zero_folder(located, options.stubs, optimizer=options.optimizer)
    return _OpenedUniversal(located, states, zero, options).source()


@dataclass(frozen=True, slots=True)
class _OpenedUniversal:
    """All files of a checkpoint, and what they say together of each parameter."""

    located: UniversalFolder
    states: ModelStates
    zero: ZeroFolder
    options: ReadOptions

    def source(self) -> Source:
        notes = Report()
        trained = self._trained()
        states: tuple[str, ...] = ()
        groups: tuple[ParamGroup, ...] = ()
        if self.zero.optimizer is not None:
            files = {name: self.zero.params[name] for name in trained}
            groups = param_groups(self.zero.optimizer, self.states, files, notes, self.located.folder)
            states = (MASTER, *common_states(self.zero.params, _alike(trained, groups), self.located.folder))
        specs, weights = self._specs(set(trained), notes)
        others = list(self.states.others())
        model = ModelSpec(
            params=tuple(specs),
            num_layers=_num_layers(specs),
            tied=bool(self.states.shared),
            vocab_size=self.options.vocab_size or _vocab_size(others[0]),
        )
        role = self.options.role or "actor"
        opened = (*self.states.opened, *self.zero.opened)
        self.states.look(self.zero.unplaced)
        return Source(
            format="universal",
            root=self.located.root,
            role=role,
            model=model,
            parallel=self.states.parallel,
            catalog=_Places(role, model, weights, self.zero.params, states).table(),
            state=self._training_state(groups, others[0], notes),
            files=tuple(StoredFile.of_zip(pt.file, pt.directory) for pt in opened),
            states=states,
            optimizer="universal" if self.zero.optimizer is not None else None,
            notes=notes,
            family=self._module_state(others, specs),
            unplaced=self.zero.unplaced.names,
        )

    def _trained(self) -> list[str]:
        """Names of the parameters that the optimizer has: those in ``param_shapes``, or whatever has an optimizer's state."""
        listed = list(dict.fromkeys(name for group in self.states.group_shapes for name in group))
        problems = Problems()
        for name in listed:
            if name not in self.zero.params:
                problems.add(
                    Incomplete,
                    f"{self.located.folder / ZERO / name}: there is no such folder, but the model is said to train {name}",
                    WRITTEN_AGAIN,
                )
        problems.raise_if_any()
        aside = {*self.states.buffers, *self.states.shared, *self.states.frozen_shapes}
        with_states = [
            name
            for name, files in self.zero.params.items()
            if name not in aside and (len(files.tensors) > 1 or not self.states.order)
        ]
        return list(dict.fromkeys([*listed, *with_states]))

    def _specs(self, trained: set[str], notes: Report) -> tuple[list[ParamSpec], dict[str, StoredWeights]]:
        """Every tensor of the model, in the module's order, and where its own bytes lie."""
        frozen = [name for name in self.states.frozen_shapes if name not in trained]
        names = dict.fromkeys([*self.states.order, *sorted(trained), *frozen, *self.zero.params])
        specs, weights, problems = [], {}, Problems()
        for name in names:
            if name in self.states.shared:
                continue
            shape = self._shape(name)
            if shape is None:
                what = (
                    "frozen and excluded from the checkpoint"
                    if name in self.states.frozen_shapes
                    else "nowhere in the checkpoint"
                )
                notes.add(Fate.LOST, f"{name}: {what}")
                continue
            self._check_shape(name, problems)
            weights[name] = self._weights(name, shape, name in trained)
            vocabulary = bool(self._keys(name).get(VOCAB_TENSOR))
            specs.append(
                ParamSpec(name, shape, self._dtype(name), VOCABULARY if vocabulary else REPLICATED, name in trained)
            )
        problems.raise_if_any()
        return specs, weights

    def _keys(self, name: str) -> Mapping[str, object]:
        files = self.zero.params.get(name)
        return files.keys if files is not None else {}

    def _listed(self, name: str) -> Shape | None:
        """The shape in ``param_shapes``: the whole one where there is no tensor parallelism."""
        listed = next((group[name] for group in self.states.group_shapes if name in group), None)
        return listed if listed is not None else self.states.frozen_shapes.get(name)

    def _shape(self, name: str) -> Shape | None:
        """The logical shape: a flat file of the stage 3 flavour does not have it, ``param_shapes`` do."""
        if name in self.states.buffers:
            return next((tensor.shape for tensor in self.states.tensors(name)), None)
        files = self.zero.params.get(name)
        if files is None:
            stored = [tensor.shape for tensor in self.states.tensors(name) if 0 not in tensor.shape]
            return self._listed(name) if self.states.fragments(name) else next(iter(stored), None)
        listed = self._listed(name)
        return listed if listed is not None and self._is_flat(files) else files.stored_shape

    def _is_flat(self, files: ParamFiles) -> bool:
        return files.keys == {} and len(files.stored_shape) == 1 and self.states.parallel.tp == 1

    def _check_shape(self, name: str, problems: Problems) -> None:
        """Without tensor parallelism, and without the padding of a vocabulary, the files have the model's shapes."""
        files, listed = self.zero.params.get(name), self._listed(name)
        if files is None or listed is None or self.states.parallel.tp > 1 or files.keys.get(VOCAB_TENSOR):
            return
        if files.stored_shape not in (listed, (prod(listed),)):
            problems.add(
                LayoutMismatch,
                f"{self.located.folder / ZERO / name / FP32}.pt: expected the shape {listed} of param_shapes, or "
                f"{prod(listed)} elements, found {files.stored_shape}",
            )

    def _weights(self, name: str, shape: Shape, trained: bool) -> StoredWeights:
        stored = [tensor for tensor in self.states.tensors(name) if 0 not in tensor.shape or tensor.shape == shape]
        whole = [tensor for tensor in stored if tensor.shape == shape]
        if len(whole) < len(stored):
            whole = []  # slices of tensor-parallel ranks: only the master is whole
        slices = [] if whole or trained else self.states.fragments(name)
        if slices and not self.states.stage3:
            return StoredWeights(tuple(tensor for tensor in slices if tensor.shape == shape)[:1])
        if not self.options.optimizer and trained:
            return StoredWeights()
        return StoredWeights(tuple(whole), tuple(slices))

    def _dtype(self, name: str) -> DType:
        """The parameter's own type: even an empty placeholder has it."""
        for tensor in (*self.states.tensors(name), *self.states.fragments(name)):
            return tensor.record.dtype
        config = self.states.first.get("ds_config")
        for key, dtype in (("bf16", BFLOAT16), ("bfloat16", BFLOAT16), ("fp16", FLOAT16)):
            section = config.get(key) if isinstance(config, dict) else None
            if isinstance(section, dict) and section.get("enabled") is True:
                return dtype
        return FLOAT32

    def _training_state(self, groups: tuple[ParamGroup, ...], other: dict[str, object], notes: Report) -> TrainingState:
        first = self.states.files[0]
        config = self.states.first.get("ds_config")
        scheduler = state_dict_of(self.states.first.get("lr_scheduler"), "lr_scheduler", notes)
        return TrainingState(
            iteration=self.states.integer("global_steps", 0),
            args=cast(dict[str, object], first.materialize(config)) if isinstance(config, dict) else {},
            groups=groups,
            scheduler=cast(dict[str, object], first.materialize(scheduler)) if scheduler is not None else None,
            grad_scaler=self.zero.optimizer.get("loss_scaler") if self.zero.optimizer is not None else None,
            other=other,
        )

    def _module_state(self, others: list[dict[str, object]], specs: list[ParamSpec]) -> ModuleState:
        frozen = any(not spec.trainable and spec.name not in self.states.buffers for spec in specs)
        optimizer = self.zero.optimizer or {}
        return ModuleState(
            tag=self.located.tag,
            order=self.states.order,
            buffers=self.states.buffers,
            shared=self.states.shared,
            optimizer={key: value for key, value in optimizer.items() if key not in SHARDED_KEYS},
            per_rank=tuple(others) if len(others) > 1 else (),
            keys={name: files.keys for name, files in self.zero.params.items() if files.keys},
            pipeline=self.states.first.get("module") is None,
            without_frozen=self.states.first.get("frozen_param_shapes") is None and not frozen,
            left_out=leaves_out_frozen(self.states.first) and not frozen,
        )


def _alike(trained: list[str], groups: tuple[ParamGroup, ...]) -> list[list[str]]:
    """Parameters that have the same states: those of a Muon, DeepSpeed's or Megatron's, and all others."""
    muons = [group.fields.get(USE_MUON) is True or of for group, of in zip(groups, of_matrices(groups), strict=True)]
    by_muon = {name for group, muon in zip(groups, muons, strict=True) if muon for name in group.params}
    return [[name for name in trained if (name in by_muon) == muon] for muon in (False, True)]


def _num_layers(specs: list[ParamSpec]) -> int:
    """Decoder layers, as far as the names tell: ``layers.11.`` or a pipeline's ``11.``."""
    found = (match for spec in specs if (match := _LAYER.match(spec.name)))
    return len({int(match.group(1) or match.group(2)) for match in found})


def _vocab_size(other: Mapping[str, object]) -> int | None:
    info = other.get(INFO)
    size = info.get("original_vocab_size") if isinstance(info, dict) else None
    return size if isinstance(size, int) else None
