"""Merging the local tensors of all ranks into global ones, for :mod:`tests.helpers.independent_reader`.

Facts: megatron-core 0.16.1 ``transformer/{attention,mlp,multi_latent_attention}.py``, ``transformer/moe/experts.py``,
``models/gpt/gpt_model.py``; 0.19.2 ``ssm/mamba_mixer.py``, ``ssm/gated_delta_net/{common,gdn}.py``. Imports nothing of mcore_rlhf.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
EXPERT = re.compile(r"(?<=\.experts\.local_experts\.)\d+|(?<=\.experts\.linear_fc[12]\.weight)\d+$")
Key = tuple[str, str]


@dataclass
class Rank:
    """One rank folder, as loaded."""

    folder: str
    tp: int
    pp: int
    ep: int
    model: dict[str, Any]
    distrib: Any
    local: dict[tuple[int, str], dict[str, torch.Tensor]] = field(default_factory=dict)
    """(chunk, local name) → state → local tensor."""

    def chunks(self) -> list[dict[str, Any]]:
        numbered = sorted((k for k in self.model if re.fullmatch(r"model\d+", k)), key=lambda k: int(k[5:]))
        return [self.model[k] for k in numbered] or [self.model["model"]]


def degrees(args: Namespace) -> tuple[int, int, int, int]:
    """TP, PP, EP, ETP."""
    tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    moe = args.num_experts is not None
    ep = args.expert_model_parallel_size if moe else 1
    return tp, pp, ep, (args.expert_tensor_parallel_size or tp) if moe else tp


def is_routed(name: str) -> bool:
    return ".experts." in name and ".shared_experts." not in name


def merged(ranks: Sequence[Rank], args: Namespace) -> dict[Key, torch.Tensor]:
    tp, _, ep, etp = degrees(args)
    first_layer, per_rank = _first_layers(ranks), (args.num_experts or 0) // ep
    parts: dict[Key, dict[tuple[int, int], torch.Tensor]] = defaultdict(dict)
    for rank in ranks:
        for (v, name), states in rank.local.items():
            routed = is_routed(name)
            whole = _global(name, first_layer[rank.pp, v], rank.ep * per_rank if routed else 0)
            mtp = any(key.startswith("mtp.") for key in rank.chunks()[v])
            if whole == OUTPUT and not args.untie_embeddings_and_output_weights and not mtp:
                whole = (
                    EMBEDDING  # beside MTP layers there is the embedding itself, and an output weight that is not used
                )
            stacked = name.endswith((".experts.weight1", ".experts.weight2"))
            place = ((rank.tp if etp == tp else 0) if routed else rank.tp, rank.ep if stacked else 0)
            for state, tensor in states.items():
                kept = parts[whole, state].setdefault(place, tensor)
                assert torch.equal(kept, tensor), f"{rank.folder}: {whole} {state} differs between copies"
    merged = {}
    for (name, state), pieces in parts.items():
        assert len({p for p, _ in pieces}) == (etp if is_routed(name) else tp), (name, state, sorted(pieces))
        if name.endswith((".experts.weight1", ".experts.weight2")):
            merged[name, state] = _merged_grouped(name, pieces, args, ep)
        else:
            merged[name, state] = _joined(name, [pieces[p] for p in sorted(pieces)], args)
    return merged


def _global(name: str, layers: int, experts: int) -> str:
    name = LAYER.sub(lambda m: f"decoder.layers.{int(m[1]) + layers}.", name)
    return EXPERT.sub(lambda m: str(int(m[0]) + experts), name) if experts else name


def _first_layers(ranks: Sequence[Rank]) -> dict[tuple[int, int], int]:
    """First global layer of each (stage, chunk): a token passes chunk 0 of all stages, then chunk 1 of all stages, …"""
    counts = {
        (rank.pp, v): len({m[1] for name in chunk if (m := LAYER.match(name))})
        for rank in ranks
        for v, chunk in enumerate(rank.chunks())
    }
    first, layer = {}, 0
    for pp, v in sorted(counts, key=lambda at: (at[1], at[0])):
        first[pp, v], layer = layer, layer + counts[pp, v]
    return first


def _joined(name: str, pieces: list[torch.Tensor], args: Namespace) -> torch.Tensor:
    tail = re.sub(r"\d+$", "", name)
    if ".mixer." in tail or re.search(r"self_attention\.(in_proj|conv1d|out_proj|out_norm|A_log|dt_bias)", tail):
        return _joined_mixer(tail, pieces, args)
    if tail.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return torch.cat(pieces, 1)
    if tail.endswith(("linear_fc1.weight", "linear_fc1.bias")) and args.swiglu:
        halves = [piece.chunk(2) for piece in pieces]
        return torch.cat([gate for gate, _ in halves] + [up for _, up in halves])
    if tail.endswith((EMBEDDING, OUTPUT)) or re.search(
        r"(linear_fc1|linear_qkv|linear_q_proj|linear_q_up_proj|linear_kv_up_proj|eh_proj)\.(weight|bias)$", tail
    ):
        return torch.cat(pieces)
    if "_down_proj." in tail and args.transformer_impl == "local":
        return torch.cat(pieces)
    assert all(torch.equal(pieces[0], piece) for piece in pieces), f"{name}: copies differ"
    return pieces[0]


def _joined_mixer(name: str, pieces: list[torch.Tensor], args: Namespace) -> torch.Tensor:
    """Mamba's and the gated delta net's parameters, as their forward passes split the local tensors of a rank."""
    tp = len(pieces)
    if name.endswith(("layer_norm_weight", "out_norm.weight")):
        assert all(torch.equal(pieces[0], piece) for piece in pieces), f"{name}: copies differ"
        return pieces[0]
    if name.endswith("out_proj.weight"):
        return torch.cat(pieces, 1)
    if ".mixer." in name:
        heads = args.mamba_num_heads or args.hidden_size * 2 // args.mamba_head_dim
        inner, state = heads * args.mamba_head_dim // tp, args.mamba_num_groups // tp * args.mamba_state_dim
        conv, into = [inner, state, state], [inner, inner, state, state, heads // tp]  # x B C; z x B C dt
    else:
        key = args.linear_num_key_heads * args.linear_key_head_dim // tp
        value = args.linear_num_value_heads * args.linear_value_head_dim // tp
        gates = args.linear_num_value_heads // tp
        conv, into = [key, key, value], [key, key, value, value, gates, gates]  # q k v; q k v z beta alpha
    sizes = into if "in_proj." in name else conv if "conv1d" in name else [len(pieces[0])]
    split = [torch.split(piece, sizes) for piece in pieces]
    return torch.cat([torch.cat(block) for block in zip(*split, strict=True)])


def _merged_grouped(name: str, pieces: dict[tuple[int, int], torch.Tensor], args: Namespace, ep: int) -> torch.Tensor:
    """GroupedMLP as (experts, rows, columns): what it stores is a reinterpretation of that."""
    local, hidden = args.num_experts // ep, args.hidden_size
    one = name.endswith("weight1")
    by_ep = []
    for e in range(ep):
        views = [
            t.view((local, hidden, -1) if one else (local, -1, hidden))
            for (_, at), t in sorted(pieces.items())
            if at == e
        ]
        if one and args.swiglu:
            halves = [view.chunk(2, 2) for view in views]
            views = [gate for gate, _ in halves] + [up for _, up in halves]
        by_ep.append(torch.cat(views, 2 if one else 1))
    return torch.cat(by_ep)
