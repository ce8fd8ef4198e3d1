"""The rows of multi-token prediction: Hugging Face's layers after the last, which transformers itself passes over.

The inner decoder layer has the rows of any other layer, under another prefix; embedding and output layer are the model's
own. The input of ``eh_proj`` is the embedding, then the hidden state, on both sides. All of this was read, not run.

Sources: megatron-core 0.16.1, ``transformer/multi_token_prediction.py``; NVIDIA-NeMo/Megatron-Bridge
``src/megatron/bridge/models/deepseek``; THUDM/slime ``slime/backends/megatron_utils/megatron_to_hf/deepseekv3.py``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from .table import MTP_LAYER, MTP_MODEL_LAYER, HfTensor, Row

_NEXT, _HF = "mtp.layers.{k}.", "model.layers.{i}."
_DECODER = "decoder.layers.{i}."


def _norm(megatron: str, huggingface: str) -> Row:
    return Row(f"{_NEXT}{megatron}.weight", (HfTensor(f"{_HF}{huggingface}.weight", ("hidden",)),))


def rows(layer: Iterable[Row]) -> tuple[Row, ...]:
    """The rows of a multi-token-prediction layer.

    Args:
        layer: Those of a decoder layer; others are passed over.
    """
    inner = [row for row in layer if row.megatron.startswith(_DECODER)]
    projection = HfTensor(f"{_HF}eh_proj.weight", ("hidden", "twice_hidden"))
    return (
        _norm("enorm", "enorm"),
        _norm("hnorm", "hnorm"),
        Row(f"{_NEXT}eh_proj.weight", (projection,)),
        *(_inside(row, name) for name in (MTP_LAYER, MTP_MODEL_LAYER) for row in inner),
        _norm("final_layernorm", "shared_head.norm"),
    )


def _inside(row: Row, name: str) -> Row:
    return replace(row, megatron=f"{_NEXT}{name}.{row.megatron.removeprefix(_DECODER)}", needs=(*row.needs, name))


ORDER = tuple(f"{_HF}{name}.weight" for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm"))

COPIES = ("embed_tokens.weight", "shared_head.head.weight")
"""What release files repeat in such a layer: the model's own embedding and output layer."""
