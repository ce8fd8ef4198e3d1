"""Megatron-core's parameter names: how each is cut, in one table, and how its layer and expert numbers are found.

Sources: megatron-core 0.16.1, ``models/gpt/gpt_model.py``, ``transformer/attention.py``,
``transformer/multi_latent_attention.py``, ``transformer/mlp.py``, ``transformer/moe/{experts,router,shared_experts}.py``,
``transformer/multi_token_prediction.py``, ``extensions/transformer_engine.py``; 0.19.2, ``ssm/mamba_mixer.py``,
``ssm/gated_delta_net/common.py``, ``transformer/experimental_attention_variant/dsa.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache

from mcore_rlhf.errors import LayoutMismatch

from .hybrid import DELTA_CONV, DELTA_IN, LATENT_DOWN, MAMBA_CONV, MAMBA_IN, Fused
from .meaning.bounds import is_number
from .spec import COLUMN, GATED, REPLICATED, ROW, VOCABULARY, Partition

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"


@dataclass(frozen=True, slots=True)
class Traits:
    """What the table needs to know of a model beyond the names.

    Args:
        gated: The feed-forward's first matrix is ``[gate; up]`` (SwiGLU and its kin).
        transformer_engine: Whether the layers are Transformer Engine's; its latent down-projections are not cut.
        args: The run's arguments, of which the blocks of a hybrid model's mixers are made.
    """

    gated: bool
    transformer_engine: bool
    args: Mapping[str, object] = field(default_factory=dict)


_Row = tuple[str, Partition | dict[str, Partition] | Fused]

_FC1: dict[str, Partition] = {"gated": GATED, "plain": COLUMN}
_LATENT: dict[str, Partition] = {"transformer_engine": REPLICATED, "local": COLUMN}

# The end of a name → how it is cut. The first row that matches counts. A dictionary is a choice by trait.
TABLE: tuple[_Row, ...] = (
    # the mixers of hybrid models: Mamba, and the gated delta net; with Megatron-Bridge's LoRA (read, not run)
    (r"\.mixer\.in_proj\.(adapter\.linear_out\.)?weight", MAMBA_IN),
    (r"\.mixer\.conv1d[._](weight|bias)", MAMBA_CONV),  # a module of its own until 0.18
    (r"\.mixer\.norm\.weight", COLUMN),
    (r"\.self_attention\.in_proj\.(adapter\.linear_out\.)?(weight|bias)", DELTA_IN),
    (r"\.self_attention\.conv1d\.(weight|bias)", DELTA_CONV),
    (r"\.(mixer|self_attention)\.(A_log|D|dt_bias)", COLUMN),
    (r"\.(mixer|self_attention)\.out_proj\.(adapter\.linear_in\.)?weight", ROW),
    (r"\.(mixer|self_attention)\.out_proj\.bias", REPLICATED),
    # Megatron-Bridge's LoRA (read, not run): peft/utils.py; the rows of what comes out are cut like those of the base weight
    (r"linear_(proj|fc2)\.adapter\.(\w+\.)?linear_in\.weight", ROW),
    (r"\.adapter\.(\w+\.)?linear_in\.weight", COLUMN),
    (r"linear_fc1\.adapter\.linear_out\.weight", _FC1),
    (r"\.adapter\.(\w+\.)?linear_out\.weight", COLUMN),
    (r"embedding\.word_embeddings\.weight", VOCABULARY),
    (r"(?<!\w)output_layer\.(weight|bias)", VOCABULARY),
    (r"(position|tokentype)_embeddings\.weight", REPLICATED),
    # attention
    (r"linear_qkv\.(weight|bias)", COLUMN),  # whole query groups [q…q, k, v]; with TP > groups, parts of one
    (r"linear_(q|kv)\.(weight|bias)", COLUMN),  # cross attention
    (r"core_attention\.softmax_offset", COLUMN),  # one per head
    # multi-latent attention
    (r"linear_(q|kv)_down_proj\.weight", _LATENT),
    (r"linear_qkv_down_proj\.weight", LATENT_DOWN),  # --mla-down-proj-fusion, with Transformer Engine (read, not run)
    (r"linear_q_proj\.(weight|bias)", COLUMN),
    (r"linear_(q|kv)_up_proj\.(weight|bias)", COLUMN),
    (r"\.indexer\.linear_\w+\.weight", REPLICATED),  # sparse attention's (read, not run)
    (r"linear_proj\.weight", ROW),
    (r"linear_proj\.bias", REPLICATED),
    # routed experts, stacked (GroupedMLP): seen as (experts, hidden, ffn) and (experts, ffn, hidden)
    (r"\.experts\.weight1", {"gated": Partition(2, blocks=2, stacked=1), "plain": Partition(2, stacked=1)}),
    (r"\.experts\.weight2", Partition(1, stacked=0)),
    # feed-forward, shared experts, SequentialMLP, and TEGroupedMLP with the expert's number at the end
    (r"linear_fc1\.(weight|bias)\d*", _FC1),
    (r"linear_fc2\.weight\d*", ROW),
    (r"linear_fc2\.bias\d*", REPLICATED),
    (r"router\.(weight|bias|expert_bias|qb_beta)", REPLICATED),
    (r"shared_experts\.gate_(weight|bias)", REPLICATED),
    # multi-token prediction
    (r"\beh_proj\.weight", COLUMN),
    # every kind of norm, by itself or fused into the linear layer after it
    (r"(norm|layernorm|layer_norm)\d?\.(weight|bias)", REPLICATED),
    (r"layer_norm_(weight|bias)", REPLICATED),
    # Megatron-LM before megatron-core
    (r"query_key_value\.(weight|bias)", COLUMN),
    (r"dense_h_to_4h\.(weight|bias)", _FC1),
    (r"dense_4h_to_h\.weight", ROW),
    (r"dense_4h_to_h\.bias", REPLICATED),
    (r"(self_attention|attention|inter_attention)\.dense\.weight", ROW),
    (r"(self_attention|attention|inter_attention)\.dense\.bias", REPLICATED),
)
_COMPILED = tuple((re.compile(pattern + r"$"), partition) for pattern, partition in TABLE)

_BUFFERS = re.compile(r"(\.expert_bias|\.qb_beta|\.local_tokens_per_expert|\.inv_freq|\.num_batches_tracked)$")
_LAYER = re.compile(r"^(?:.*?\.)?(?:decoder|encoder|transformer)\.layers\.(\d{1,18})\.")
_SEQUENTIAL_EXPERT = re.compile(r"\.experts\.local_experts\.(\d{1,18})\.")
_GROUPED_EXPERT = re.compile(r"\.experts\.linear_fc[12]\.(?:weight|bias|_extra_state)(\d{1,18})$")


def partition_of(name: str, traits: Traits) -> Partition | None:
    """How the parameter of that name is cut, or None when the table does not know it.

    Raises:
        LayoutMismatch: It is made of blocks whose sizes the arguments do not say.
    """
    found = next((partition for pattern, partition in _COMPILED if pattern.search(name)), None)
    if isinstance(found, Fused):
        try:
            return found.partition(traits.args)
        except LayoutMismatch as error:
            raise LayoutMismatch(f"{name}: {error}") from None
    if isinstance(found, dict):
        by_trait = {
            "gated": traits.gated,
            "plain": not traits.gated,
            "transformer_engine": traits.transformer_engine,
            "local": not traits.transformer_engine,
        }
        return next(choice for trait, choice in found.items() if by_trait[trait])
    return found


def second_matrix(name: str) -> str | None:
    """The name of a feed-forward's second matrix, given that of its first; None for any other name."""
    for first, second in (("linear_fc1.weight", "linear_fc2.weight"), ("dense_h_to_4h.weight", "dense_4h_to_h.weight")):
        if first in name:
            return name.replace(first, second)
    return name[:-1] + "2" if name.endswith(".experts.weight1") else None


def is_buffer(name: str) -> bool:
    """Whether the name is a persistent buffer, which no optimizer owns."""
    return _BUFFERS.search(name) is not None


def is_routed_expert(name: str) -> bool:
    """Whether the name belongs to a routed expert, which expert parallelism deals out (shared experts are dense)."""
    return ".experts." in name


@cache
def layer_of(name: str) -> int | None:
    """The decoder layer number in a name, or None. Layers inside an MTP block are not decoder layers."""
    match = None if ".mtp." in f".{name}" else _LAYER.match(name)
    return int(match.group(1)) if match else None


def expert_of(name: str) -> int | None:
    """The expert number in a name (``local_experts.3.`` or ``weight3``), or None."""
    match = _SEQUENTIAL_EXPERT.search(name) or _GROUPED_EXPERT.search(name)
    return int(match.group(1)) if match else None


def renumbered(name: str, layers: int, experts: int) -> str:
    """Add to the layer and expert numbers of a name: global from local, or, with negative numbers, local from global."""
    if layers and (match := _LAYER.match(name)) and layer_of(name) is not None:
        name = _added(name, match, layers)
    if experts and (match := _SEQUENTIAL_EXPERT.search(name) or _GROUPED_EXPERT.search(name)):
        name = _added(name, match, experts)
    return name


def _added(name: str, match: re.Match[str], number: int) -> str:
    start, stop = match.span(1)
    return f"{name[:start]}{int(match.group(1)) + number}{name[stop:]}"


def in_registration_order(names: list[str]) -> list[str]:
    """Sort global names as one process that held the whole model would register them.

    Modules register as a tree, so names sort as paths in it: numbered children by number, others by when they first
    appear in ``names``. Experts of one grouped layer are registered expert by expert (``weight0, bias0, weight1, …``).
    """
    seen: dict[tuple[str, str], int] = {}

    def key(name: str) -> tuple[tuple[int, int, int], ...]:
        parts, prefix = [], ""
        for group, number, stem in _components(name):
            group_rank = seen.setdefault((prefix, group), len(seen))
            stem_rank = seen.setdefault((prefix, f"={stem}"), len(seen))
            parts.append((group_rank, number, stem_rank))
            prefix += f".{stem}{number}"
        return tuple(parts)

    keys = {name: key(name) for name in names}
    return sorted(keys, key=keys.__getitem__)


def _components(name: str) -> list[tuple[str, int, str]]:
    """(group, number, stem) of each part of a dotted name; parts of one group sort by number first."""
    grouped = _GROUPED_EXPERT.search(name)
    cut = name[: grouped.start(1)] if grouped else name
    parts = [("#", int(part), "#") if is_number(part) else (part, 0, part) for part in cut.split(".")]
    if grouped:
        parts[-1] = ("#expert", int(grouped.group(1)), parts[-1][2])
    return parts


_PARTS = (
    "embedding", "word_embeddings", "position_embeddings", "tokentype_embeddings", "decoder", "enorm", "hnorm", "eh_proj",
    "transformer_layer", "mtp_model_layer", "layers", "input_layernorm", "mixer", "self_attention",
    # mixers; until 0.18 Mamba's convolution was a module, and modules come behind a mixer's own parameters
    "conv1d_weight", "conv1d_bias", "dt_bias", "A_log", "D", "in_proj", "conv1d", "norm", "out_norm", "out_proj",
    # attention
    "core_attention", "softmax_offset", "linear_proj", "linear_qkv", "linear_q_proj", "linear_q_down_proj",
    "linear_qkv_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj", "q_layernorm", "k_layernorm", "kv_layernorm",
    "pre_cross_attn_layernorm", "cross_attention", "linear_q", "linear_kv", "pre_mlp_layernorm", "mlp",
    # feed-forward and experts; a module's own parameters come before those of the modules in it
    "router", "gate_weight", "gate_bias", "weight1", "weight2", "experts", "local_experts", "linear_fc1", "linear_fc2",
    "shared_experts", "final_layernorm", "final_norm", "mtp", "output_layer",
    # of one module
    "layer_norm_weight", "layer_norm_bias", "weight", "bias", "local_tokens_per_expert", "expert_bias", "_extra_state",
)  # fmt: skip
_RANK = {part: rank for rank, part in enumerate(_PARTS)}
_EXPERT_NUMBER = re.compile(r"(?<=[a-z])\d{1,18}$")
_BEHIND_ALL = len(_PARTS)


def registration_order(names: Iterable[str]) -> list[str]:
    """Global names, opaque ones included, as one process that held the whole model would register them.

    Names of which a part is in no table stand behind their neighbours, in alphabetical order.
    """
    return in_registration_order(sorted(names, key=_sort_key))


def _sort_key(name: str) -> tuple[tuple[int, int, str], ...]:
    return tuple(map(_rank, name.split(".")))


def _rank(part: str) -> tuple[int, int, str]:
    """(kind, number, text) of one part of a dotted name."""
    if is_number(part):
        return 0, int(part), ""
    known = _RANK.get(part)
    if known is None:
        number = _EXPERT_NUMBER.search(part)
        stem = part[: number.start()] if number else part
        known = _RANK.get(stem)
        if number is not None and known is not None:
            return known, int(number.group()), ""
    return (_BEHIND_ALL, 0, part) if known is None else (known, 0, "")
