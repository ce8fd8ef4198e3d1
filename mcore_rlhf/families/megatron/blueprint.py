"""The whole of a new checkpoint: every key of the model in registration order, and which model chunk has it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mcore_rlhf.core.dtype import DType
from mcore_rlhf.layouts.pipeline import ModelChunk
from mcore_rlhf.models.megatron import layer_of
from mcore_rlhf.models.spec import ModelSpec, ParamSpec

from .arguments import Arguments
from .buffers import EMBEDDING, OUTPUT
from .choices import Choices

_FINAL_NORM = ("final_layernorm.", "final_norm.")


@dataclass(frozen=True, slots=True)
class Item:
    """One key of the model, with global numbers.

    Args:
        name: The key.
        stored_as: The parameter that the catalogue has for it: the embedding, for a tied output layer.
        spec: The parameter with the target's shape and dtype, or None for an opaque value.
    """

    name: str
    stored_as: str
    spec: ParamSpec | None


@dataclass(slots=True)
class Blueprint:
    """A new Megatron checkpoint.

    Args:
        role: Role of its tensors.
        model: The model, as the source has it.
        args: The arguments of the new layout.
        choices: The new layout.
        chunks: Its model chunks.
        order: All keys of the model in registration order, opaque ones included.
        moments: Names of the optimizer's states, without the masters.
        state_dtypes: Their element types.
    """

    role: str
    model: ModelSpec
    args: Arguments
    choices: Choices
    chunks: Sequence[ModelChunk]
    order: Sequence[str]
    moments: tuple[str, ...]
    state_dtypes: Mapping[str, DType]
    _sections: dict[object, list[Item]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        seen_layers = False
        for name in self._keys():
            seen_layers = seen_layers or layer_of(name) is not None
            self._sections.setdefault(_section(name, seen_layers), []).append(self._item(name))

    @property
    def has_mtp(self) -> bool:
        """Whether the model has multi-token-prediction layers."""
        return any(chunk.mtp for chunk in self.chunks)

    def items_of(self, chunk: ModelChunk) -> Iterator[Item]:
        """The keys of one model chunk in registration order.

        Source: megatron-core 0.16.1, ``models/gpt/gpt_model.py``, ``transformer/transformer_block.py``
        (``has_final_layernorm_in_this_stage``).
        """
        wanted: list[object] = []
        wanted += ["embedding"] if chunk.embedding or chunk.mtp else []
        wanted += ["first"] if chunk.embedding else []
        wanted += range(chunk.first_layer, chunk.first_layer + chunk.num_layers)
        wanted += ["final_norm"] if (chunk.holds_last_layer if self.has_mtp else chunk.loss) else []
        wanted += ["mtp"] if chunk.mtp else []
        wanted += ["last"] if chunk.loss else []
        for section in wanted:
            for item in self._sections.get(section, []):
                if not self._is_tied_copy(item):
                    yield item
                elif not chunk.embedding:
                    yield item if chunk.mtp else self._copy_of_embedding

    def _is_tied_copy(self, item: Item) -> bool:
        """Whether a key is the output layer's copy of the embedding, and not a value head in its place."""
        return self.model.tied and item.name == OUTPUT and item.spec is not None and item.spec.partition.vocabulary

    @property
    def _copy_of_embedding(self) -> Item:
        """The output layer of a last stage without MTP, which uses a copy of the embedding."""
        spec = self.model.get(EMBEDDING)
        return Item(OUTPUT, EMBEDDING, None if spec is None else self._new_spec(spec))

    def _keys(self) -> Iterator[str]:
        """The source's keys, with the output layer that a tied model has only on a stage of its own."""
        has_output = any(name.startswith("output_layer.") for name in self.order)
        has_other_head = any(_section(name, True) == "last" for name in self.order)
        missing = self.model.tied and OUTPUT not in self.order and (has_output or not has_other_head)
        missing = missing and self.model.get(EMBEDDING) is not None
        for name in self.order:
            if missing and name.startswith("output_layer."):
                yield OUTPUT
                missing = False
            yield name
        if missing:
            yield OUTPUT

    def _item(self, name: str) -> Item:
        stored_as = name
        if name == OUTPUT and self.model.tied and self.model.get(OUTPUT) is None:
            stored_as = EMBEDDING
        spec = self.model.get(stored_as)
        return Item(name, stored_as, None if spec is None else self._new_spec(spec))

    def _new_spec(self, spec: ParamSpec) -> ParamSpec:
        rows, dtype = self.choices.padded_vocab_size, self.choices.dtype
        if spec.partition.vocabulary and rows is not None:
            spec = replace(spec, global_shape=(rows, *spec.global_shape[1:]))
        if dtype is not None and spec.trainable:
            spec = replace(spec, dtype=dtype)
        return spec


def _section(name: str, seen_layers: bool) -> object:
    """Which part of the model a key belongs to; keys that nobody knows go by where they are registered."""
    layer = layer_of(name)
    if layer is not None:
        return layer
    if name.startswith("mtp."):
        return "mtp"
    if name.startswith("embedding."):
        return "embedding"
    if any(norm in name for norm in _FINAL_NORM):
        return "final_norm"
    return "last" if seen_layers else "first"
