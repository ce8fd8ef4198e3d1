"""torchtitan's own names of Llama and Qwen3, and Hugging Face's: one table, read both ways.

Llama's queries and keys have another order of rows: torchtitan turns neighbours, as Meta's code does, Hugging Face's the two halves of a
head. Row ``2 i + half`` of a head here is row ``half * width / 2 + i`` there.
Source: torchtitan 0.2.2, ``models/llama3/model/state_dict_adapter.py`` (``Llama3StateDictAdapter``: ``from_hf_map``, ``_permute``),
``models/qwen3/model/state_dict_adapter.py`` (which permutes nothing), dense models.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping

from mcore_rlhf.core.catalog import Box, Shape
from mcore_rlhf.errors import LayoutMismatch, Problems, Unsupported

from .huggingface.relation import Link
from .huggingface.table import Sizes

_LAYER = "{}"
NAMES = {
    "model.embed_tokens.weight": "tok_embeddings.weight",
    "model.layers.{}.self_attn.q_proj.weight": "layers.{}.attention.wq.weight",
    "model.layers.{}.self_attn.k_proj.weight": "layers.{}.attention.wk.weight",
    "model.layers.{}.self_attn.v_proj.weight": "layers.{}.attention.wv.weight",
    "model.layers.{}.self_attn.o_proj.weight": "layers.{}.attention.wo.weight",
    "model.layers.{}.self_attn.q_norm.weight": "layers.{}.attention.q_norm.weight",
    "model.layers.{}.self_attn.k_norm.weight": "layers.{}.attention.k_norm.weight",
    "model.layers.{}.mlp.gate_proj.weight": "layers.{}.feed_forward.w1.weight",
    "model.layers.{}.mlp.up_proj.weight": "layers.{}.feed_forward.w3.weight",
    "model.layers.{}.mlp.down_proj.weight": "layers.{}.feed_forward.w2.weight",
    "model.layers.{}.input_layernorm.weight": "layers.{}.attention_norm.weight",
    "model.layers.{}.post_attention_layernorm.weight": "layers.{}.ffn_norm.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "output.weight",
}
"""Hugging Face's name, and torchtitan's."""
TURNS_NEIGHBOURS: Mapping[str, bool] = {"llama": True, "qwen3": False}
"""Whose names these are, by ``model_type``, and whether rows of queries and keys lie in torchtitan's own order."""
_OWN = {own: name for name, own in NAMES.items()}
_NUMBER = re.compile(r"(?<=layers\.)(\d{1,18})(?=\.)")
_TURNED = ("self_attn.q_proj.weight", "self_attn.k_proj.weight")
OWN_EMBEDDING, OWN_NAMES = "tok_embeddings.weight", "own_names"
"""The second is what the note of a DCP folder's layout says where its names are these."""
_MARKS = (OWN_EMBEDDING, "layers.0.attention.wq.weight")


def is_own(names: Collection[str]) -> bool:
    """Whether a model's tensors have torchtitan's own names."""
    return all(mark in names for mark in _MARKS)


def own_name(name: str) -> str | None:
    """Torchtitan's name of a tensor of Hugging Face's; None where it has none."""
    return _other(name, NAMES)


def huggingface_name(name: str) -> str | None:
    """Hugging Face's name of a tensor of torchtitan's; None where it has none."""
    return _other(name, _OWN)


def _other(name: str, names: Mapping[str, str]) -> str | None:
    found = _NUMBER.search(name)
    if found is None:
        return names.get(name)
    other = names.get(_NUMBER.sub(_LAYER, name, count=1))
    return None if other is None else other.replace(_LAYER, found[1])


def links_of(shapes: Mapping[str, Shape], model_type: str, sizes: Sizes) -> tuple[Link, ...]:
    """What the tensors of a model have in common under both names.

    Args:
        shapes: Of all its tensors, under either's names.
        model_type: What a ``config.json`` calls the model.
        sizes: Its heads; nothing else of them is asked for.

    Raises:
        Unsupported: It is a model of which torchtitan's names are not known, or has tensors that have none; all of them.
        LayoutMismatch: Queries or keys are not as many rows as its heads make.
    """
    if model_type not in TURNS_NEIGHBOURS:
        known = " and ".join(sorted(TURNS_NEIGHBOURS))
        raise Unsupported(f"torchtitan's own names are known of {known}, and this is {model_type!r:.40}")
    own, problems, found = is_own(shapes), Problems(), list[Link]()
    for name, shape in shapes.items():
        other = huggingface_name(name) if own else own_name(name)
        if other is None:
            whose = "Hugging Face's" if own else "torchtitan's"
            problems.add(Unsupported, f"{name}: has no name among {whose} of {model_type}")
            continue
        pair = (other, name) if own else (name, other)
        if not (TURNS_NEIGHBOURS[model_type] and pair[0].endswith(_TURNED)):
            found.append(Link(pair[0], Box.whole(shape), pair[1], Box.whole(shape)))
            continue
        heads = sizes.heads if pair[0].endswith(_TURNED[0]) else sizes.groups
        if len(shape) != 2 or shape[0] != heads * sizes.head or sizes.head % 2:
            text = f"{name}: is {list(shape)}, expected {heads} heads of {sizes.head} rows, as the config has them"
            problems.add(
                LayoutMismatch, text, "The config is another model's: take the one that belongs to these weights."
            )
            continue
        found += _turned(*pair, shape, heads)
    problems.raise_if_any()
    return tuple(found)


def _turned(name: str, own: str, shape: Shape, heads: int) -> Iterator[Link]:
    """The rows of both halves of every head: one behind the other there, in turn here."""
    width, half = shape[0] // heads, shape[0] // heads // 2
    for head in range(heads):
        for second in (0, 1):
            there = Box((head * width + second * half, 0), (half, shape[1]))
            yield Link(name, there, own, Box((head * width + second, 0), (half, shape[1]), (2, 1)))
