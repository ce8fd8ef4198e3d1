"""What a Hugging Face folder's files will hold: which tensors, of which type, under which names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mcore_rlhf.core.box import Shape
from mcore_rlhf.core.catalog import Catalog, TensorEntry
from mcore_rlhf.core.dtype import FLOAT32, FLOATING, DType, dtype_of
from mcore_rlhf.core.names import MASTER, PARAM, TensorName
from mcore_rlhf.core.views import FROM_MASTERS, Cast, StateOrder
from mcore_rlhf.errors import Incomplete, Problems
from mcore_rlhf.families.module import ModuleState
from mcore_rlhf.families.source import Source, WriteOptions
from mcore_rlhf.models.spec import ParamSpec

from .config import LM_HEAD
from .shards import Part

_FIXED_TYPE = ("e_score_correction_bias",)
"""Tensors that the model computes with in fp32 whatever its type is.

Source: transformers 5.23.0, ``models/deepseek_v3/modeling_deepseek_v3.py`` (``_keep_in_fp32_modules_strict``).
"""


@dataclass(frozen=True, slots=True)
class Weights:
    """Decides what is written of a source.

    Args:
        source: The checkpoint.
        native: Its own view of it.
        options: What the user asked for.
        described: Whether a ``config.json`` is written: then whoever loads the folder ties what is tied.
    """

    source: Source
    native: ModuleState
    options: WriteOptions
    described: bool

    @property
    def view(self) -> Catalog:
        """Where the tensors come from."""
        if self.options.masters:
            return StateOrder(self.source.catalog, FROM_MASTERS)
        return Cast(self.source.catalog, None if self.options.dtype is None else dtype_of(self.options.dtype))

    def parts(self) -> list[Part]:
        """The weights, in the module's order.

        Raises:
            Incomplete: Some are stored nowhere, or have no masters where those are asked for; all of them are named.
        """
        problems, found, view = Problems(), list[Part](), self.view
        for spec in self.source.model.params:
            name = TensorName(self.source.role, spec.name, PARAM)
            entry = view.get(name)
            if entry is None:
                problems.add(
                    Incomplete, f"{spec.name}: neither the weight nor its fp32 master is in {self.source.root}"
                )
            elif self.options.masters and spec.trainable and not self._is_master(name, entry):
                text = f"{spec.name}: --masters asks for its fp32 master, which is not in {self.source.root}"
                problems.add(Incomplete, text, "Leave out --masters to take the weights themselves.")
            else:
                found.append(Part(name, self.shape(spec), self._dtype(spec, entry), self._names(spec)))
        problems.raise_if_any()
        return found

    def _is_master(self, name: TensorName, entry: TensorEntry) -> bool:
        """Whether an entry is as exact as the run has it: an fp32 parameter is its own master where there is no other."""
        return entry.dtype == FLOAT32 or self.source.catalog.get(name._replace(state=MASTER)) is not None

    def state_parts(self, state: str) -> list[Part]:
        """One state of the optimizer, of every parameter that has it."""
        found = []
        for spec in self.source.model.params:
            name = TensorName(self.source.role, spec.name, state)
            entry = self.source.catalog.get(name) if spec.trainable else None
            if entry is not None:
                found.append(Part(name, self.shape(spec), entry.dtype, (spec.name,)))
        return found

    def shape(self, spec: ParamSpec) -> Shape:
        """The shape as written: without the padding of a vocabulary."""
        rows = self.options.vocab_size or self.source.model.vocab_size
        if not spec.partition.vocabulary or rows is None:
            return spec.global_shape
        return (min(rows, spec.global_shape[0]), *spec.global_shape[1:])

    def _names(self, spec: ParamSpec) -> tuple[str, ...]:
        """All names under which the tensor is written; a tied output layer is made by whoever loads the folder."""
        names = (spec.name, *(alias for alias, owner in self.native.shared.items() if owner == spec.name))
        kept = tuple(name for name in names if name != LM_HEAD)
        if spec.name == LM_HEAD and self.options.with_optimizer:  # whose states lie under its name
            return names
        return kept if self.described and kept else names

    def _dtype(self, spec: ParamSpec, entry: TensorEntry) -> DType:
        fixed = spec.name in self.native.buffers or spec.name.endswith(_FIXED_TYPE) or spec.dtype not in FLOATING
        if fixed:
            return spec.dtype
        if self.options.dtype is not None:
            return dtype_of(self.options.dtype)
        return entry.dtype if self.options.masters else spec.dtype


def main_dtype(parts: list[Part]) -> DType | None:
    """The type of most bytes of the floating-point weights, or None without any."""
    sizes: dict[DType, int] = {}
    for part in parts:
        if part.dtype in FLOATING:
            sizes[part.dtype] = sizes.get(part.dtype, 0) + part.nbytes
    return max(sizes, key=lambda dtype: sizes[dtype]) if sizes else None


def shapes_of(parts: list[Part]) -> Mapping[str, Shape]:
    """The tensors by name, as they will be written."""
    return {name: part.shape for part in parts for name in part.names}
