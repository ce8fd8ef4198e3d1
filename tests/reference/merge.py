"""A live model's tensors, made whole by plain concatenation: the tests' own witness.

Written from the facts about Megatron's names and shapes (``formats/megatron.md`` 1.3 and 1.6). It imports nothing of
the package's layouts or formats. Layer numbers are told by Megatron's own layers, not computed.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mcore_rlhf.demo.configs import TinyGPT
from tests.reference.observing import Observation

Key = tuple[str, str]
Merged = dict[Key, torch.Tensor]

SPLIT_ROWS = (
    "core_attention.softmax_offset",
    "word_embeddings.weight", "output_layer.weight", "linear_qkv.weight", "linear_qkv.bias", "linear_fc1.weight",
    "linear_fc1.bias", "linear_q_proj.weight", "linear_q_down_proj.weight", "linear_q_up_proj.weight",
    "linear_kv_down_proj.weight", "linear_kv_up_proj.weight", "eh_proj.weight",
)  # fmt: skip
SPLIT_COLUMNS = ("linear_proj.weight", "linear_fc2.weight")
VOCABULARY = ("word_embeddings.weight", "output_layer.weight")


@dataclass(frozen=True)
class Place:
    """Where a tensor of a rank belongs in the whole: its slot among the expert and tensor shards."""

    ep_rank: int
    tp_rank: int


def merged(ranks: Sequence[Observation], step: int, model: TinyGPT) -> Merged:
    """All whole tensors of a model by (state, global name); replicas are compared on the way."""
    shards: dict[Key, dict[Place, torch.Tensor]] = defaultdict(dict)
    for rank in ranks:
        for (state, local), tensor in rank.states[step].items():
            name, place = global_name(local, rank), place_of(local, rank)
            known = shards[state, name].setdefault(place, tensor)
            assert bits_equal(known, tensor), f"{state} of {name}: two data-parallel copies differ at {place}"
    whole = {key: joined(key[1], places, model) for key, places in shards.items()}
    return untied(whole, model)


def global_name(local: str, rank: Observation) -> str:
    """The name with global layer and expert numbers, without the chunk's prefix."""
    for prefix, number in rank.layers.items():
        if local.startswith(f"{prefix}."):
            local = f"decoder.layers.{number}{local.removeprefix(prefix)}"
            break
    local = re.sub(r"^model\d+\.", "", local)
    expert = re.search(r"local_experts\.(\d+)\.", local)
    if expert is None:
        return local
    number = rank.coordinates["ep_rank"] * rank.local_experts + int(expert[1])
    return local.replace(expert[0], f"local_experts.{number}.")


def place_of(local: str, rank: Observation) -> Place:
    if ".experts." not in local:
        return Place(0, rank.coordinates["tp_rank"])
    packed = ".experts.weight" in local
    return Place(rank.coordinates["ep_rank"] if packed else 0, rank.coordinates["etp_rank"])


def joined(name: str, places: dict[Place, torch.Tensor], model: TinyGPT) -> torch.Tensor:
    ordered = sorted(places, key=lambda place: (place.ep_rank, place.tp_rank))
    if ".experts.weight" not in name:
        return joined_tensor(name, [places[place] for place in ordered], model.gated)
    groups: dict[int, list[torch.Tensor]] = defaultdict(list)
    for place in ordered:
        groups[place.ep_rank].append(places[place])
    local_experts = (model.num_experts or 0) // len(groups)
    return torch.cat([joined_packed(name, group, local_experts, model) for group in groups.values()])


def joined_tensor(name: str, parts: list[torch.Tensor], gated: bool) -> torch.Tensor:
    if gated and "linear_fc1." in name:
        return joined_gated(parts, dim=0)
    if name.endswith(SPLIT_ROWS):
        return torch.cat(parts)
    if name.endswith(SPLIT_COLUMNS):
        return torch.cat(parts, dim=1)
    assert all(bits_equal(parts[0], part) for part in parts), f"{name}: tensor-parallel copies differ"
    return parts[0]


def joined_gated(parts: list[torch.Tensor], dim: int) -> torch.Tensor:
    """Every rank has [gate; up]: the whole has all gates, then all ups."""
    gates, ups = zip(*(part.chunk(2, dim=dim) for part in parts), strict=True)
    return torch.cat([*gates, *ups], dim=dim)


def joined_packed(name: str, parts: list[torch.Tensor], local_experts: int, model: TinyGPT) -> torch.Tensor:
    """GroupedMLP's two tensors hold all experts of a rank: as (experts, in, out)."""
    if name.endswith("weight2"):
        return torch.cat([part.view(local_experts, -1, model.hidden_size) for part in parts], dim=1)
    rows = [part.view(local_experts, model.hidden_size, -1) for part in parts]  # not a split of its columns
    return joined_gated(rows, dim=2) if model.gated else torch.cat(rows, dim=2)


def untied(whole: Merged, model: TinyGPT) -> Merged:
    """With tied embeddings, the last stage's copy must be the first stage's embedding, and is left out."""
    if not has_tied_copy(model):
        return whole
    for state, name in [key for key in whole if key[1] == "output_layer.weight"]:
        copy = whole.pop((state, name))
        assert bits_equal(copy, whole[state, "embedding.word_embeddings.weight"]), f"{state}: the tied copy differs"
    return whole


def has_tied_copy(model: TinyGPT) -> bool:
    """Whether ``output_layer.weight`` is a copy of the embedding; next to MTP layers, which have the embedding, it is
    a tensor of its own that Megatron allocates and never uses."""
    return not model.untie_embeddings_and_output_weights and model.mtp_num_layers is None


def bits_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in shape, type and every bit (NaN and signed zeros too)."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return (
        torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        if a.dim()
        else torch.equal(a, b)
    )


def differences(expected: Merged, found: Merged) -> list[str]:
    """What differs between two models, tensor by tensor; of vocabularies, the rows that both have are compared."""
    problems = [f"{key} only in one" for key in sorted(expected.keys() ^ found.keys())]
    for key in sorted(expected.keys() & found.keys()):
        ours, theirs = expected[key], found[key]
        if key[1].endswith(VOCABULARY):
            rows = min(len(ours), len(theirs))
            ours, theirs = ours[:rows], theirs[:rows]
        if not bits_equal(ours, theirs):
            problems.append(f"{key} differs: {tuple(ours.shape)} {ours.dtype}, {tuple(theirs.shape)} {theirs.dtype}")
    return problems


def merged_groups(ranks: Sequence[Observation], model: TinyGPT) -> dict[str, dict[str, object]]:
    """The optimizer group of every parameter by global name; all ranks that have a share agree on it.

    Whether experts are a group of their own is a matter of the layout, and so is the last stage's copy of a tied
    embedding: both are left out.
    """
    groups: dict[str, dict[str, object]] = {}
    for rank in ranks:
        for local, fields in rank.groups.items():
            own = {key: value for key, value in fields.items() if key != "is_expert_parallel"}
            name = global_name(local, rank)
            assert groups.setdefault(name, own) == own, f"{name}: ranks disagree on its optimizer group"
    if has_tied_copy(model):
        groups.pop("output_layer.weight", None)
    return groups
