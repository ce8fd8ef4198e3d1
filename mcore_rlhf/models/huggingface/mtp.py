"""The rows of multi-token prediction: Hugging Face's layers after the last, which transformers itself passes over.

Qwen3-Next and Qwen3.5 have one such layer, beside the model and under names of its own. The inner decoder layer has the rows
of any other layer, under another prefix; embedding and output layer are the model's own. The input of ``eh_proj`` is the
embedding, then the hidden state, on both sides. What it computes was read, not run.

Sources: megatron-core 0.16.1, ``transformer/multi_token_prediction.py``; NVIDIA-NeMo/Megatron-Bridge
``src/megatron/bridge/models/{deepseek,qwen}``; THUDM/slime ``slime/backends/megatron_utils/megatron_to_hf/deepseekv3.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from .table import MTP_LAYER, MTP_MODEL_LAYER, NEXT, HfTensor, Packed, Row

_NEXT, _HF = f"mtp.layers.{NEXT}.", "model.layers.{i}."
_DECODER = "decoder.layers.{i}."


def _norm(megatron: str, huggingface: str) -> Row:
    return Row(f"{_NEXT}{megatron}.weight", (HfTensor(f"{huggingface}.weight", ("hidden",)),))


def rows(layer: Iterable[Row]) -> tuple[Row, ...]:
    """The rows of a multi-token-prediction layer.

    Args:
        layer: Those of a decoder layer; others are passed over.
    """
    return _rows(layer, _HF, "eh_proj", "enorm", "hnorm", "shared_head.norm")


def _rows(layer: Iterable[Row], prefix: str, *named: str) -> tuple[Row, ...]:
    projection, embedding, hidden, last = (f"{prefix}{name}" for name in named)
    inner = [row for row in layer if row.megatron.startswith(_DECODER)]
    return (
        _norm("enorm", embedding),
        _norm("hnorm", hidden),
        Row(f"{_NEXT}eh_proj.weight", (HfTensor(f"{projection}.weight", ("hidden", "twice_hidden")),)),
        *(_inside(row, name) for name in (MTP_LAYER, MTP_MODEL_LAYER) for row in inner),
        _norm("final_layernorm", last),
    )


def _inside(row: Row, name: str) -> Row:
    return replace(row, megatron=f"{_NEXT}{name}.{row.megatron.removeprefix(_DECODER)}", needs=(*row.needs, name))


ORDER = tuple(f"{_HF}{name}.weight" for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm"))


_BESIDE = "mtp."
_BESIDE_NAMES = ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")


def _beside(name: str) -> str:
    """A name in a layer, in one that stands beside the model."""
    return name.replace(_HF, _NEXT)


def rows_beside(layer: Iterable[Row]) -> tuple[Row, ...]:
    """The rows of a single layer of multi-token prediction that Hugging Face has beside the model.

    Args:
        layer: As of :func:`rows`.
    """
    moved = (
        replace(row, huggingface=tuple(replace(tensor, name=_beside(tensor.name)) for tensor in row.huggingface))
        for row in layer
    )
    return _rows(moved, _BESIDE, *_BESIDE_NAMES)


def order_beside(order: Sequence[str]) -> tuple[str, ...]:
    """Names in order, with those of such a layer behind them."""
    first = (f"{_BESIDE}{name}.weight" for name in _BESIDE_NAMES)
    return (*order, *first, *(_beside(name) for name in order if name.startswith(_HF)))


def packed_beside(packed: Iterable[Packed]) -> tuple[Packed, ...]:
    """Packed experts, of such a layer as well."""

    def there(name: str) -> str:
        return name.replace(_HF, "mtp.layers.{i}.")

    both = tuple(packed)
    return (*both, *(Packed(there(row.module), tuple(map(there, row.files))) for row in both))
