"""The files of a universal checkpoint, each opened once, no tensor read: ``…model_states.pt``, and ``zero/<name>/<state>.pt``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import cast

from mcore_rlhf.core.catalog import Shape
from mcore_rlhf.errors import CheckpointError, Incomplete, LayoutMismatch, Problems, Unsupported
from mcore_rlhf.families.inventory import Unplaced
from mcore_rlhf.families.module import LAYOUT_KEYS
from mcore_rlhf.layouts.parallel import ParallelConfig
from mcore_rlhf.storage.paths import ReadablePath, refused, walk
from mcore_rlhf.storage.pt import PtFile, read_pt
from mcore_rlhf.storage.stored import StoredTensor

from .files import (
    FP32,
    MODEL_FILES,
    OPTIMIZER_FILE,
    PARAM_KEY,
    STAGE3_MODEL_FILES,
    STEP,
    WRITTEN_AGAIN,
    ZERO,
    UniversalFolder,
    model_file,
    natural,
    stage3_model_file,
)


@dataclass
class ModelStates:
    """The model's files.

    Args:
        files: One per model-parallel rank, or, in the stage 3 flavour, one per rank, data-parallel ranks fastest.
        stage3: Whether they are of the stage 3 flavour, with empty parameters and a slice of each frozen one.
        opened: All files that were opened.
    """

    files: list[PtFile]
    stage3: bool
    opened: list[PtFile]

    @property
    def first(self) -> Mapping[str, object]:
        """What the first file has at its top."""
        return cast(Mapping[str, object], self.files[0].tree)

    def integer(self, key: str, default: int) -> int:
        """A counter."""
        value = self.first.get(key)
        return int(value) if isinstance(value, int) else default

    @cached_property
    def parallel(self) -> ParallelConfig:
        """The degrees of the run that wrote it."""
        dims = self.first.get("checkpoint_parallel_dimensions")
        known = {key: n for key, n in dims.items() if type(n) is int and n > 0} if isinstance(dims, dict) else {}
        pp = known.get("pp_degree", 1)
        tp = known.get("tp_degree") or max(1, self.integer("mp_world_size", len(self.per_mp_rank)) // pp)
        return ParallelConfig(tp=tp, pp=pp, etp=tp, dp=max(1, self.integer("dp_world_size", 1)))

    @cached_property
    def per_mp_rank(self) -> list[PtFile]:
        """The first data-parallel rank's file of every model-parallel rank."""
        if not self.stage3:
            return self.files
        first: dict[str, PtFile] = {}
        for pt in self.files:
            first.setdefault(pt.file.rpartition("_mp_rank_")[2], pt)
        return list(first.values())

    def module(self, pt: PtFile) -> Mapping[str, object]:
        """The module's state dict in one file; a ``PipelineModule`` stores none there."""
        module = cast(Mapping[str, object], pt.tree).get("module")
        return module if isinstance(module, dict) else {}

    @cached_property
    def order(self) -> tuple[str, ...]:
        """All keys of the module, in its order."""
        return tuple(dict.fromkeys(name for pt in self.per_mp_rank for name in self.module(pt)))

    def tensors(self, name: str) -> list[StoredTensor]:
        """A module's tensor in every model-parallel rank's file that has it, empty placeholders included."""
        found = (self.module(pt).get(name) for pt in self.per_mp_rank)
        return [tensor for tensor in found if isinstance(tensor, StoredTensor)]

    def fragments(self, name: str) -> list[StoredTensor]:
        """A frozen parameter's slices, one per data-parallel rank, in order; of tensor-parallel rank 0."""
        dicts = (cast(Mapping[str, object], pt.tree).get("frozen_param_fragments") for pt in self.files)
        found = (held.get(name) for held in dicts if isinstance(held, dict))
        return [tensor for tensor in found if isinstance(tensor, StoredTensor)]

    @cached_property
    def group_shapes(self) -> list[dict[str, Shape]]:
        """Names and shapes in every list of ``param_shapes``, of all pipeline stages; shapes are those of one rank."""
        groups: list[dict[str, Shape]] = []
        for pt in self.per_mp_rank:
            for number, shapes in enumerate(_listed(cast(Mapping[str, object], pt.tree).get("param_shapes"))):
                if number == len(groups):
                    groups.append({})
                for name, shape in shapes.items():
                    groups[number].setdefault(name, _shape(pt, name, shape))
        return groups

    @cached_property
    def frozen_shapes(self) -> dict[str, Shape]:
        """Shapes of frozen parameters, where the stage stores them."""
        return {name: _shape(self.files[0], name, shape) for name, shape in self._merged("frozen_param_shapes").items()}

    @cached_property
    def buffers(self) -> tuple[str, ...]:
        """Names of the persistent buffers."""
        lists = (cast(Mapping[str, object], pt.tree).get("buffer_names") for pt in self.per_mp_rank)
        return tuple(dict.fromkeys(str(name) for names in lists if isinstance(names, list) for name in names))

    @cached_property
    def shared(self) -> dict[str, str]:
        """Tied parameters: ``{alias: owner}``."""
        return {str(alias): str(owner) for alias, owner in self._merged("shared_params").items()}

    def others(self) -> Iterator[dict[str, object]]:
        """For each model-parallel rank, what its file has besides the model and the layout."""
        yield from map(_others, self.per_mp_rank)

    def look(self, found: Unplaced) -> None:
        """Note what is not read: values of the module that are no tensors, and what further data-parallel ranks have of their own."""
        first = {pt.file.rpartition("_mp_rank_")[2]: pt for pt in self.per_mp_rank}
        for pt in self.files:
            opaque = {k: v for k, v in self.module(pt).items() if v is not None and not isinstance(v, StoredTensor)}
            found.look(pt.file, opaque, {}, "module")
            known = first[pt.file.rpartition("_mp_rank_")[2]]
            if pt is not known:
                found.compare(pt.file, _others(pt), _others(known))

    def _merged(self, key: str) -> dict[str, object]:
        merged: dict[str, object] = {}
        for pt in self.per_mp_rank:
            value = cast(Mapping[str, object], pt.tree).get(key)
            merged.update(value if isinstance(value, dict) else {})
        return merged


def read_model_states(located: UniversalFolder, stubs: tuple[str, ...]) -> ModelStates:
    """Open the model's files.

    Raises:
        CheckpointError: There is none, or one is damaged; all problems together.
    """
    problems = Problems()
    found: dict[str, list[PtFile]] = {}
    for pattern in (MODEL_FILES, STAGE3_MODEL_FILES):
        names = sorted((path.name for path in located.folder.glob(pattern)), key=natural)
        for name in names:
            try:
                found.setdefault(pattern, []).append(_open(located, name, stubs))
            except CheckpointError as error:
                problems.add_error(error)
    problems.raise_if_any()
    if not found:
        raise Incomplete(
            f"{located.folder}: expected {MODEL_FILES} (stages 1 and 2) or {STAGE3_MODEL_FILES} (stage 3), found neither\n"
            "The conversion that wrote it did not get to its end: convert again."
        )
    opened = [pt for files in found.values() for pt in files]
    stage3 = MODEL_FILES not in found
    states = ModelStates(found[STAGE3_MODEL_FILES if stage3 else MODEL_FILES], stage3, opened)
    _check_ranks(located, states)
    return states


_EQUAL = ("dp_world_size", "mp_world_size", "global_steps", "skipped_steps")


def _check_ranks(located: UniversalFolder, states: ModelStates) -> None:
    """The files are of all model-parallel ranks that they speak of, and of one run and step.

    Raises:
        Incomplete: One is missing.
        LayoutMismatch: They contradict each other.
    """
    problems, first = Problems(), states.files[0]
    for pt in states.files[1:]:
        other = cast(Mapping[str, object], pt.tree)
        for key in _EQUAL:
            if other.get(key) != states.first.get(key):
                text = f"{pt.root / pt.file}: {key} is {other.get(key)!r:.40}, but {states.first.get(key)!r:.40} in {first.file}"
                problems.add(LayoutMismatch, text, "Files of different steps or runs are mixed: " + WRITTEN_AGAIN)
    names = {pt.file.rpartition("/")[2] for pt in states.per_mp_rank}
    said = states.integer("mp_world_size", len(names))
    name_of = stage3_model_file if states.stage3 else model_file
    for rank in range(min(said, len(names) + 1)):
        if name_of(rank) not in names:
            text = f"{located.folder / name_of(rank)}: there is no such file, but {first.file} was written by {said} model-parallel ranks"
            problems.add(Incomplete, text, WRITTEN_AGAIN)
    problems.raise_if_any()


def _open(located: UniversalFolder, name: str, stubs: tuple[str, ...]) -> PtFile:
    pt = read_pt(located.root, f"{located.name}/{name}", stubs=stubs)
    if not isinstance(pt.tree, dict) or "module" not in pt.tree:
        kind = (
            f"a dictionary with {', '.join(map(str, pt.tree))}" if isinstance(pt.tree, dict) else type(pt.tree).__name__
        )
        raise Unsupported(f"{pt.root / pt.file}: expected a dictionary with 'module', found {kind[:120]}")
    return pt


def _others(pt: PtFile) -> dict[str, object]:
    tree = cast(Mapping[str, object], pt.tree)
    return {key: pt.materialize(value) for key, value in tree.items() if key not in LAYOUT_KEYS}


def _listed(value: object) -> list[dict[str, object]]:
    return [shapes for shapes in value if isinstance(shapes, dict)] if isinstance(value, list) else []


def _shape(pt: PtFile, name: str, value: object) -> Shape:
    if not isinstance(value, list | tuple) or not all(type(n) is int and n >= 0 for n in value):
        raise Unsupported(f"{pt.root / pt.file}: expected the shape of {name}, found {value!r:.80}")
    return tuple(value)


@dataclass(slots=True)
class ParamFiles:
    """The folder of one parameter.

    Args:
        name: The parameter's name.
        tensors: By state as the files call it (``fp32``, ``exp_avg``), the tensor.
        keys: What the ``fp32`` file says besides the tensor: ``cat_dim`` and the like.
        step: The optimizer's step, where there is one.
    """

    name: str
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    keys: dict[str, object] = field(default_factory=dict)
    step: object | None = None

    @property
    def stored_shape(self) -> Shape:
        """The shape of its master copy as stored: flat in the stage 3 flavour."""
        return self.tensors[FP32].shape


@dataclass(slots=True)
class ZeroFolder:
    """Everything in ``zero/``.

    Args:
        params: The parameters' folders, by name.
        opened: All files that were opened.
        optimizer: ``optimizer_state.pt``, where it was asked for; None too where there are weights alone.
        unplaced: What in it is not read.
    """

    params: dict[str, ParamFiles]
    opened: list[PtFile]
    optimizer: Mapping[str, object] | None
    unplaced: Unplaced = field(default_factory=Unplaced)


def read_zero_folder(located: UniversalFolder, stubs: tuple[str, ...], *, optimizer: bool) -> ZeroFolder:
    """Open the files in ``zero/``.

    Args:
        located: The checkpoint.
        stubs: Further pickled classes that may become inert stubs.
        optimizer: Whether anything but ``fp32`` is opened.

    Raises:
        CheckpointError: A file is damaged, missing or none that belongs there; all problems together.
    """
    folder = ZeroFolder({}, [], None)
    problems = Problems()
    for name, files in _folders(located.folder / ZERO, problems):
        try:
            folder.params[name] = _read_param(located, name, files, stubs, optimizer, folder)
        except CheckpointError as error:
            problems.add_error(error)
    if optimizer and not _weights_alone(located, folder):
        try:
            folder.optimizer = _read_optimizer(located, stubs, folder)
        except CheckpointError as error:
            problems.add_error(error)
    problems.raise_if_any()
    return folder


def _weights_alone(located: UniversalFolder, folder: ZeroFolder) -> bool:
    """Whether there never was an optimizer: then nothing of one is there, neither settings nor a single state."""
    states = any(len(files.tensors) > 1 or files.step is not None for files in folder.params.values())
    return not states and not (located.folder / ZERO / OPTIMIZER_FILE).is_file()


def _folders(zero: ReadablePath, problems: Problems) -> Iterator[tuple[str, list[str]]]:
    """Every folder that has files: ``(name, files)``; a module's name may hold a slash."""
    for parent, files in walk(zero, refused):
        name = parent.relative_to(zero).as_posix()
        if name == ".":
            files = [file for file in files if file != OPTIMIZER_FILE]
        stray = [file for file in files if name == "." or not file.endswith(".pt")]
        for file in stray:
            problems.add(
                LayoutMismatch,
                f"{parent / file}: not a file of a universal checkpoint",
                "DeepSpeed takes every file in a parameter's folder for an optimizer state: remove what does not belong there.",
            )
        if files and name != ".":
            yield name, sorted(set(files) - set(stray))


def _read_param(
    located: UniversalFolder, name: str, files: list[str], stubs: tuple[str, ...], optimizer: bool, zero: ZeroFolder
) -> ParamFiles:
    found, told = ParamFiles(name), dict[str, dict[str, object]]()
    if f"{FP32}.pt" not in files:
        have = ", ".join(files) or "nothing"
        raise Incomplete(
            f"{located.folder / ZERO / name}: expected {FP32}.pt, the master weights, found {have}\n{WRITTEN_AGAIN}"
        )
    for file in files:
        key = file.removesuffix(".pt")
        if key != FP32 and not optimizer:
            continue
        pt = read_pt(located.root, f"{located.name}/{ZERO}/{name}/{file}", stubs=stubs)
        zero.opened.append(pt)
        if key == STEP:
            found.step = _step(pt)
        else:
            found.tensors[key], keys = _tensor(pt)
            told[pt.file] = keys
            found.keys = keys if key == FP32 else found.keys
    for file, keys in told.items():
        zero.unplaced.compare(file, keys, found.keys)
    return found


def _step(pt: PtFile) -> object:
    """The bare step: a tensor of one element in torch's optimizers, a number in DeepSpeed's own."""
    whole = isinstance(pt.tree, StoredTensor) and prod(pt.tree.shape) == 1
    if not whole and type(pt.tree) not in (int, float):
        raise Unsupported(f"{pt.root / pt.file}: expected a number, or a tensor of one element, found {pt.tree!r:.80}")
    return pt.materialize(pt.tree)


def _tensor(pt: PtFile) -> tuple[StoredTensor, dict[str, object]]:
    """The tensor of a state's file: bare (stage 3), or under ``param`` with what belongs to it."""
    if isinstance(pt.tree, StoredTensor):
        return pt.tree, {}
    tensor = pt.tree.get(PARAM_KEY) if isinstance(pt.tree, dict) else None
    if not isinstance(tensor, StoredTensor):
        kind = (
            f"a dictionary with {', '.join(map(str, pt.tree))}" if isinstance(pt.tree, dict) else type(pt.tree).__name__
        )
        raise Unsupported(
            f"{pt.root / pt.file}: expected a tensor, or a dictionary with one under 'param', found {kind[:120]}"
        )
    return tensor, {key: value for key, value in pt.tree.items() if key != PARAM_KEY}


def _read_optimizer(located: UniversalFolder, stubs: tuple[str, ...], folder: ZeroFolder) -> Mapping[str, object]:
    file = f"{located.name}/{ZERO}/{OPTIMIZER_FILE}"
    if not (located.root / file).is_file():
        raise Incomplete(
            f"{located.root / file}: expected the optimizer's param groups, but there is no such file\n{WRITTEN_AGAIN}"
        )
    pt = read_pt(located.root, file, stubs=stubs)
    folder.opened.append(pt)
    if not isinstance(pt.tree, dict):
        raise Unsupported(f"{pt.root / file}: expected a dictionary, found {type(pt.tree).__name__}")
    inner = pt.tree.get("optimizer_state_dict")
    folder.unplaced.look(file, inner, {"state": None, "param_groups": None}, "optimizer_state_dict")
    return {key: _without_shard(pt, key, value) for key, value in pt.tree.items() if key != "fp32_flat_groups"}


def _without_shard(pt: PtFile, key: str, value: object) -> object:
    """A value with real tensors; of the shard of rank 0 that stage 3 carries along, only the steps and the like."""
    if key != "optimizer_state_dict" or not isinstance(value, dict):
        return pt.materialize(value)
    states = value.get("state")
    scalars = {
        number: {k: pt.materialize(v) for k, v in state.items() if not isinstance(v, StoredTensor) or v.shape == ()}
        for number, state in (states.items() if isinstance(states, dict) else ())
    }
    return {"state": scalars, "param_groups": pt.materialize(value.get("param_groups", []))}


def common_states(
    params: Mapping[str, ParamFiles], alike: Sequence[list[str]], folder: ReadablePath
) -> tuple[str, ...]:
    """The states that every trained parameter has.

    Args:
        params: The parameters' folders.
        alike: Names of parameters that should have the same states.
        folder: The checkpoint, for messages.

    Raises:
        Incomplete: A parameter lacks a state that others have.
        LayoutMismatch: A few have one that others lack, or a state does not have its parameter's elements.
    """
    problems, found = Problems(), set[str]()
    for trained in alike:
        counts = Counter(key for name in trained for key in params[name].tensors)
        del counts[FP32]
        found.update(counts)
        for key, count in counts.items():
            _check_state(params, trained, folder / ZERO, (key, count), problems)
    _check_lengths(params, folder, problems)
    problems.raise_if_any()
    return tuple(sorted(found))


def _check_state(
    params: Mapping[str, ParamFiles],
    trained: list[str],
    zero: ReadablePath,
    counted: tuple[str, int],
    problems: Problems,
) -> None:
    """A state that a few have is a stray file, and one that a few lack is missing."""
    key, count = counted
    few = count * 2 < len(trained)
    for name in trained:
        has = key in params[name].tensors
        if few and has:
            problems.add(
                LayoutMismatch,
                f"{zero / name / key}.pt: a stray file: only {count} of {len(trained)} parameters have {key!r}",
                "DeepSpeed takes every file in a parameter's folder for an optimizer state: remove what does not belong there.",
            )
        elif not few and not has:
            text = f"{zero / name}: {key}.pt is missing, which {count} parameters have"
            problems.add(Incomplete, text, WRITTEN_AGAIN)


def _check_lengths(params: Mapping[str, ParamFiles], folder: ReadablePath, problems: Problems) -> None:
    for name, files in params.items():
        for key, tensor in files.tensors.items():
            if tensor.shape != files.stored_shape:
                problems.add(
                    LayoutMismatch,
                    f"{folder / ZERO / name / key}.pt: expected the shape of {FP32}.pt, {files.stored_shape}, found {tensor.shape}",
                )
