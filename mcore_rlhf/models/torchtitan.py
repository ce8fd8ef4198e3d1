"""torchtitan's own names of Llama and Qwen3, and Hugging Face's: one table, read both ways.

Llama's queries and keys have another order of rows: torchtitan turns neighbours, as Meta's code does, Hugging Face's the two halves of a
head. Row ``2 i + half`` of a head here is row ``half * width / 2 + i`` there.
Source: torchtitan 0.2.2, ``models/llama3/model/state_dict_adapter.py`` (``Llama3StateDictAdapter``: ``from_hf_map``, ``_permute``),
``models/qwen3/model/state_dict_adapter.py`` (which permutes nothing), dense models; 0.3.0, ``models/llama3/state_dict_adapter.py`` and
``models/qwen3/state_dict_adapter.py``, which have queries, keys and values in a module of their own, and another word for the head.
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
"""Hugging Face's name, and torchtitan's up to 0.2."""
_RENAMED = {
    **{f"attention.w{one}.": f"attention.qkv_linear.w{one}." for one in "qkv"},
    "output.weight": "lm_head.weight",
}
OLDER, NEWER = "0.2", "0.3"
"""Releases that call some otherwise."""


def _newer(own: str) -> str:
    was = next((one for one in _RENAMED if one in own), "")
    return own.replace(was, _RENAMED[was]) if was else own


_TABLES: Mapping[str, Mapping[str, str]] = {OLDER: NAMES, NEWER: {name: _newer(own) for name, own in NAMES.items()}}
TURNS_NEIGHBOURS: Mapping[str, bool] = {"llama": True, "qwen3": False}
"""Whose names these are, by ``model_type``, and whether rows of queries and keys lie in torchtitan's own order."""
_OWN = {release: {own: name for name, own in names.items()} for release, names in _TABLES.items()}
_NUMBER = re.compile(r"(?<=layers\.)(\d{1,18})(?=\.)")
_TURNED = ("self_attn.q_proj.weight", "self_attn.k_proj.weight")
OWN_EMBEDDING, OWN_NAMES = "tok_embeddings.weight", "own_names"
"""The second is what the note of a DCP folder's layout calls the release whose names it has; True of the older, as it once was."""
_MARK = "layers.0.attention.wq.weight"
_MARKS = {_MARK: OLDER, _newer(_MARK): NEWER}


def release_of(names: Collection[str]) -> str:
    """The release of torchtitan whose own names a model's tensors have; empty where they have others."""
    found = (release for mark, release in _MARKS.items() if mark in names)
    return next(found, "") if OWN_EMBEDDING in names else ""


def release_noted(noted: object) -> str:
    """The release that the note of a DCP folder's layout names; empty where it names none."""
    return OLDER if noted is True else noted if isinstance(noted, str) and noted in _TABLES else ""


def own_name(name: str, release: str) -> str | None:
    """Torchtitan's name of a tensor of Hugging Face's; None where it has none."""
    return _other(name, _TABLES[release])


def huggingface_name(name: str, release: str) -> str | None:
    """Hugging Face's name of a tensor of torchtitan's; None where it has none."""
    return _other(name, _OWN[release])


def under_huggingface_names(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Shapes of a model's tensors, as a ``config.json`` speaks of them: under Hugging Face's names, where they have torchtitan's own."""
    release = release_of(shapes)
    return {(huggingface_name(name, release) if release else None) or name: shape for name, shape in shapes.items()}


def _other(name: str, names: Mapping[str, str]) -> str | None:
    found = _NUMBER.search(name)
    if found is None:
        return names.get(name)
    other = names.get(_NUMBER.sub(_LAYER, name, count=1))
    return None if other is None else other.replace(_LAYER, found[1])


def links_of(shapes: Mapping[str, Shape], model_type: str, sizes: Sizes, release: str) -> tuple[Link, ...]:
    """What the tensors of a model have in common under both names.

    Args:
        shapes: Of all its tensors, under either's names.
        model_type: What a ``config.json`` calls the model.
        sizes: Its heads; nothing else of them is asked for.
        release: Of torchtitan, whose names they have, or are to have.

    Raises:
        Unsupported: It is a model of which torchtitan's names are not known, or has tensors that have none; all of them.
        LayoutMismatch: Queries or keys are not as many rows as its heads make.
    """
    if model_type not in TURNS_NEIGHBOURS:
        known = " and ".join(sorted(TURNS_NEIGHBOURS))
        raise Unsupported(f"torchtitan's own names are known of {known}, and this is {model_type!r:.40}")
    own, problems, found = bool(release_of(shapes)), Problems(), list[Link]()
    for name, shape in shapes.items():
        other = huggingface_name(name, release) if own else own_name(name, release)
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
