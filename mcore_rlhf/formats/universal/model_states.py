"""The ``…model_states.pt`` files: the module, the client's state, counters, and which parameters there are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import cast

from mcore_rlhf.core.box import Shape
from mcore_rlhf.errors import CheckpointError, Incomplete, Problems, Unsupported
from mcore_rlhf.families.module import LAYOUT_KEYS
from mcore_rlhf.layouts.parallel import ParallelConfig
from mcore_rlhf.storage.ptfile import PtFile, StoredTensor, read_pt

from .folders import Located
from .names import MODEL_FILES, STAGE3_MODEL_FILES, natural


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
        for pt in self.per_mp_rank:
            tree = cast(Mapping[str, object], pt.tree)
            yield {key: pt.materialize(value) for key, value in tree.items() if key not in LAYOUT_KEYS}

    def _merged(self, key: str) -> dict[str, object]:
        merged: dict[str, object] = {}
        for pt in self.per_mp_rank:
            value = cast(Mapping[str, object], pt.tree).get(key)
            merged.update(value if isinstance(value, dict) else {})
        return merged


def read_model_states(located: Located, stubs: tuple[str, ...]) -> ModelStates:
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
    return ModelStates(found[STAGE3_MODEL_FILES if stage3 else MODEL_FILES], stage3, opened)


def _open(located: Located, name: str, stubs: tuple[str, ...]) -> PtFile:
    pt = read_pt(located.root, f"{located.name}/{name}", stubs=stubs)
    if not isinstance(pt.tree, dict) or "module" not in pt.tree:
        kind = (
            f"a dictionary with {', '.join(map(str, pt.tree))}" if isinstance(pt.tree, dict) else type(pt.tree).__name__
        )
        raise Unsupported(f"{pt.root / pt.file}: expected a dictionary with 'module', found {kind[:120]}")
    return pt


def _listed(value: object) -> list[dict[str, object]]:
    return [shapes for shapes in value if isinstance(shapes, dict)] if isinstance(value, list) else []


def _shape(pt: PtFile, name: str, value: object) -> Shape:
    if not isinstance(value, list | tuple) or not all(type(n) is int and n >= 0 for n in value):
        raise Unsupported(f"{pt.root / pt.file}: expected the shape of {name}, found {value!r:.80}")
    return tuple(value)
