"""The files of the parameters to be written: ``zero/<name>/<state>.pt``, one tensor each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path

from mcore_rlhf.core.box import Box, Shape, row_major
from mcore_rlhf.core.catalog import Catalog, Chunk, Record, TensorEntry
from mcore_rlhf.core.dtype import FLOAT32, FLOATING, DType
from mcore_rlhf.core.names import MASTER, PARAM, TensorName
from mcore_rlhf.formats.base import FileLayout, FileWriter, TargetFile
from mcore_rlhf.models.spec import ParamSpec
from mcore_rlhf.storage.ptwriter import PtWriter
from mcore_rlhf.storage.stored import StoredTensor

from .names import PARAM_KEY, STEP, ZERO, state_key
from .tp_keys import TensorParallelKeys


@dataclass(frozen=True, slots=True)
class MasterView:
    """A catalogue in which what has no master is its own: frozen parameters, buffers, and all of an fp32 model without copies.

    Args:
        catalog: The source's.
    """

    catalog: Catalog

    def __iter__(self) -> Iterator[TensorName]:
        return iter(self.catalog)

    def __len__(self) -> int:
        return len(self.catalog)

    def get(self, name: TensorName, /) -> TensorEntry | None:
        """The entry of that name, or None."""
        entry = self.catalog.get(name)
        if entry is None and name.state == MASTER:
            return self.catalog.get(name._replace(state=PARAM))
        return entry


@dataclass(frozen=True, slots=True)
class StateFiles:
    """Describes the files of each parameter.

    Args:
        folder: The checkpoint's folder, relative to the target's root.
        role: Role of all tensors.
        catalog: Where the tensors come from.
        states: The optimizer's tensor states that are written, the master first.
        keys: What a file says beside its tensor.
        vocab_size: Rows that are kept of a padded vocabulary, where the user says it.
    """

    folder: str
    role: str
    catalog: Catalog
    states: tuple[str, ...]
    keys: TensorParallelKeys
    vocab_size: int | None

    def files(self, spec: ParamSpec, step: object | None) -> Iterator[TargetFile]:
        """The files of one parameter or buffer; none of a buffer that fp32 cannot hold."""
        states = self.states if spec.trainable else (MASTER,)
        if not spec.trainable and spec.dtype not in FLOATING:
            return
        for state in states:
            if state == MASTER or self.catalog.get(TensorName(self.role, spec.name, state)) is not None:
                yield TargetFile(self._path(spec, state_key(state)), partial(self._layout, spec, state))
        if step is not None and spec.trainable:
            yield TargetFile(self._path(spec, STEP), partial(self._step_layout, spec, step))

    def shape(self, spec: ParamSpec) -> Shape:
        """The shape as written: without the padding of a vocabulary."""
        rows = self.keys.vocabulary_rows(spec.name) if spec.trainable else None
        rows = self.vocab_size if rows is not None and self.vocab_size is not None else rows
        return spec.global_shape if rows is None else (min(rows, spec.global_shape[0]), *spec.global_shape[1:])

    def _path(self, spec: ParamSpec, key: str) -> str:
        return f"{self.folder}/{ZERO}/{spec.name}/{key}.pt"

    def _layout(self, spec: ParamSpec, state: str) -> FileLayout:
        file, shape = self._path(spec, state_key(state)), self.shape(spec)
        name = TensorName(self.role, spec.name, state)
        entry, stored = placed(
            name, spec.global_shape, shape, Record(file, "data/0", self._dtype(name), prod(shape), 0)
        )
        keys = self.keys.of_param(spec.name) if spec.trainable else {}
        return FileLayout([entry], [stored.record], partial(create, file, {**keys, PARAM_KEY: stored}))

    def _dtype(self, name: TensorName) -> DType:
        """States keep their type; what has no master becomes one."""
        entry = self.catalog.get(name)
        return entry.dtype if entry is not None else FLOAT32

    def _step_layout(self, spec: ParamSpec, step: object) -> FileLayout:
        return FileLayout([], [], partial(create, self._path(spec, STEP), step))


def placed(name: TensorName, global_shape: Shape, shape: Shape, record: Record) -> tuple[TensorEntry, StoredTensor]:
    """A tensor, or its first rows, as the whole of a record: the entry for the plan, and the tensor for the pickle."""
    chunk = Chunk(Box.whole(shape), record, 0, row_major(shape))
    return TensorEntry(name, global_shape, record.dtype, (chunk,)), StoredTensor(record, 0, shape, row_major(shape))


def create(file: str, tree: object, root: Path) -> FileWriter:
    """Create a ``.pt`` file below a folder, ready for its records."""
    path = root / file
    path.parent.mkdir(parents=True, exist_ok=True)
    return PtWriter.create(path, tree, file=file)
