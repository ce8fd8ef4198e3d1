"""Whether a ``config.json`` is that of given tensors: every size and every name that the architecture's class would make."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import cache

from mcore_rlhf.core.box import Shape
from mcore_rlhf.errors import CheckpointError

from . import ARCHITECTURES
from .config import architecture_of, sizes_of_config
from .expand import Filled, filled
from .kinds import SEQUENTIAL
from .sizes import Sizes
from .table import Architecture, Spelling

_EMBEDDING = "model.embed_tokens.weight"
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.\d+\.")
_PACKED = ".experts.gate_up_proj"
_BIAS = re.compile(r"model\.layers\.\d+\.self_attn\.[qkv]_proj\.bias")
_SAY_BIAS = ("llama", "qwen3", "qwen3_moe", "glm4_moe")
"""Those whose queries, keys and values have biases where ``attention_bias`` says so.

Source: transformers 5.23.0, ``models/{llama,qwen3,qwen3_moe,glm4_moe}/modeling_*.py``.
"""
_SHOWN = 3


def misfits(config: Mapping[str, object], shapes: Mapping[str, Shape]) -> Iterator[str]:
    """What speaks against a description, one line each; nothing where it is of an architecture in no table.

    Args:
        config: The description.
        shapes: The tensors as they are on disk, tied ones once.
    """
    try:
        (known,), sizes = architecture_of(config), sizes_of_config(config)
    except (CheckpointError, ValueError):
        return
    if _EMBEDDING not in shapes:
        return
    layers = max((int(match[1]) for name in shapes if (match := _LAYER.match(name))), default=-1) + 1
    rows = tuple(filled(known, replace(sizes, mtp=max(0, layers - sizes.layers)), Spelling(experts=SEQUENTIAL)))
    yield from _other_shapes(rows, shapes)
    if any(name.endswith(_PACKED) for name in shapes):  # named as in memory
        return
    yield from _told(known, "lacks", _missing(known, sizes, rows, shapes))
    if known.model_type in _SAY_BIAS and config.get("attention_bias") is not True:
        yield from _told(known, "has no place, where attention_bias is not true, for", _biases(shapes))
    expected = {tensor for row in rows for tensor in row.tensors}
    yield from _told(known, "has no place for", _strange(sizes, expected, shapes))


def _other_shapes(rows: Collection[Filled], shapes: Mapping[str, Shape]) -> Iterator[str]:
    for row in rows:
        for name, shape in row.tensors.items():
            found = shapes.get(name)
            if found is not None and found != shape and name != _EMBEDDING and not name.startswith("lm_head."):
                yield f"{name} is {list(found)}, but its sizes make {list(shape)}"


def _missing(known: Architecture, sizes: Sizes, rows: Collection[Filled], shapes: Mapping[str, Shape]) -> Iterator[str]:
    yield from (need for need in known.needs if need not in sizes.traits)
    yield from (name for row in rows if not row.row.optional for name in row.tensors if name not in shapes)


def _strange(sizes: Sizes, expected: Collection[str], shapes: Mapping[str, Shape]) -> Iterator[str]:
    """Tensors of a decoder's layer that only other architectures have; anybody's own additions are none of them."""
    for name in shapes:
        match = _LAYER.match(name)
        if match and name not in expected and int(match[1]) < sizes.layers and _pattern(name) in _patterns():
            yield name


def _biases(shapes: Mapping[str, Shape]) -> Iterator[str]:
    return (name for name in shapes if _BIAS.fullmatch(name))


def _told(known: Architecture, what: str, names: Iterator[str]) -> Iterator[str]:
    found = list(dict.fromkeys(names))
    if found:
        more = f", … ({len(found)})" if len(found) > _SHOWN else ""
        yield f"{known.class_name} {what} {', '.join(found[:_SHOWN])}{more}"


def _pattern(name: str) -> str:
    return _EXPERT.sub(".experts.{e}.", _LAYER.sub("model.layers.{i}.", name))


@cache
def _patterns() -> frozenset[str]:
    """The names of all tensors of all architectures."""
    rows = (row for known in ARCHITECTURES for row in known.rows)
    return frozenset(tensor.name for row in rows for tensor in row.huggingface)
