"""The shard map against the catalogue, element by element, and against the size of a mixture of experts."""

from __future__ import annotations

import json
from collections import Counter
from math import prod
from pathlib import Path

import numpy as np
import pytest

from mcore_rlhf.core.catalog import BFLOAT16, Chunk, Record, TensorEntry, TensorName
from mcore_rlhf.core.chunks import Chunks
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.families.source import Source
from mcore_rlhf.formats.registry import open_checkpoint
from mcore_rlhf.layouts.parallel import ParallelConfig
from mcore_rlhf.models.spec import ModelSpec
from mcore_rlhf.report.shards import Drawing, Members, pattern_of, places_of, shard_map, spans

GOLDENS = Path(__file__).parents[2] / "goldens"
SOURCES = [
    "megatron/tp2pp2dp2_bf16_do",
    "megatron/ep2dp2_moe_seq_bf16_do",
    "megatron_dist/tp2pp2dp2_dp_reshardable",
    "megatron_dist/experts_ep2",
    "deepspeed/z3_fp32_tied_subgroups_dp4",
    "dcp/fsdp2_ws3",
    "huggingface/llama_tied_bf16_sharded",
]


def _names(drawing: Drawing, members: Members) -> list[str]:
    """The names of a group, written out."""
    names = [drawing["pattern"]]
    for place in members["numbers"]:
        numbers = [number for first, last in place for number in range(first, last + 1)]
        names = [name.replace("{}", str(number), 1) for name in names for number in numbers]
    return names


@pytest.mark.parametrize("path", SOURCES)
def test_every_element_of_every_tensor_is_drawn_where_the_catalogue_has_it(path: str) -> None:
    source = open_checkpoint(GOLDENS / path, ReadOptions(), partial=True)
    found = shard_map(source)
    drawn: dict[tuple[str, str], tuple[Drawing, Members]] = {}
    for drawing in found["drawings"]:
        for held in drawing["held"]:
            for members in held["members"]:
                for name in _names(drawing, members):
                    for state in held["states"]:
                        assert drawn.setdefault((name, state), (drawing, members)) == (drawing, members)
            assert held["tensors"] == sum(len(_names(drawing, members)) for members in held["members"])
    assert {(name.param, name.state) for name in source.catalog} == drawn.keys()
    for name in source.catalog:
        _compare(source, name, *drawn[name.param, name.state], [file["path"] for file in found["files"]])


def _compare(source: Source, name: TensorName, drawing: Drawing, members: Members, files: list[str]) -> None:
    """Paint both: how often each element lies in each file."""
    entry = source.catalog.get(name)
    assert entry is not None
    assert drawing["shape"] == list(entry.global_shape)
    expected, shape = Counter[tuple[str, int]](), entry.global_shape
    index = np.arange(prod(shape)).reshape(shape)
    for chunk in entry.chunks:
        box = chunk.box
        where = tuple(slice(a, b, by) for a, b, by in zip(box.offset, box.stop, box.steps, strict=True))
        expected.update((chunk.record.file, int(at)) for at in index[where].flat)
    flat = index.reshape(-1, shape[-1]) if len(shape) > 1 else index.reshape(1, -1)
    painted = Counter[tuple[str, int]]()
    for r in drawing["rectangles"]:
        for slot in r["slots"]:
            part = flat[r["y"] : r["y"] + r["h"], r["x"] : r["x"] + r["w"]]
            painted.update((files[members["files"][slot]].replace("{param}", name.param), int(at)) for at in part.flat)
    assert painted == expected


def test_padding_fused_parts_and_replicas_are_said() -> None:
    found = shard_map(open_checkpoint(GOLDENS / "megatron/tp2pp2dp2_bf16_do", ReadOptions()))
    by_name = {drawing["pattern"]: drawing for drawing in found["drawings"]}
    assert by_name["embedding.word_embeddings.weight"]["padding"] == 132
    assert by_name["decoder.layers.{}.mlp.linear_fc1.weight"]["fused"] == [("gate", 96), ("up", 96)]
    qkv = by_name["decoder.layers.{}.self_attention.linear_qkv.weight"]
    assert (qkv["periods"], qkv["fused"], qkv["shape"][0]) == (2, [("q", 32), ("k", 16), ("v", 16)], 2 * 64)
    assert by_name["decoder.final_layernorm.weight"]["rectangles"][0]["slots"] == [0, 1]
    stages = by_name["decoder.layers.{}.mlp.linear_fc2.weight"]["held"][0]["members"]
    assert [members["numbers"] for members in stages] == [[[(0, 1)]], [[(2, 3)]]]


def test_numbers_are_found_in_names() -> None:
    assert pattern_of("decoder.layers.3.mlp.experts.linear_fc1.weight12") == (
        "decoder.layers.{}.mlp.experts.linear_fc1.weight{}",
        (3, 12),
    )
    assert pattern_of("model.embed_tokens.weight") == ("model.embed_tokens.weight", ())
    assert spans([5, 1, 2, 3, 9]) == [(1, 3), (5, 5), (9, 9)]


def test_what_is_cut_at_too_many_places_is_counted() -> None:
    entries = []
    for layer in range(40):  # no two of them have the same shape
        shape, record = (layer + 1, 2), Record("file", "key", BFLOAT16, 2 * (layer + 1), 0)
        name = TensorName("actor", f"layers.{layer}.weight")
        entries.append(TensorEntry(name, shape, BFLOAT16, (Chunk.whole(record, shape),)))
    model = ModelSpec((), 40, False)
    found = shard_map(Source("megatron", Path("/"), model, Chunks.of(entries), parallel=ParallelConfig()))
    assert len(found["drawings"]) == 32
    assert found["folded"] == [("layers.{}.weight", 8)]
    assert found["tensors"] == 40


@pytest.mark.slow
def test_a_mixture_of_235_billion_parameters_stays_small() -> None:
    from benchmarks import planning

    spec = planning.model()
    catalog = planning.source_catalog(spec, planning.SOURCE)
    source = Source("megatron", Path("/"), spec, catalog, parallel=planning.SOURCE, states=("master",))
    found = shard_map(source)
    assert found["tensors"] == len(catalog) > 90_000
    assert len(json.dumps(found)) < 100_000
    assert found["folded"] == []


@pytest.mark.parametrize(
    ("name", "places"),
    [
        ("decoder.layers.3.mlp.experts.local_experts.5.linear_fc1.weight", ["layer", "expert"]),
        ("decoder.layers.3.mlp.experts.linear_fc1.weight5", ["layer", "expert"]),
        ("model.layers.3.mlp.experts.5.gate_proj.weight", ["layer", "expert"]),
        ("transformer.h.3.attn.c_attn.weight", ["layer"]),
        ("decoder.layers.3.mlp.experts.weight1", ["layer", "number"]),
        ("0.weight", []),
        ("blocks.1.sub.2.weight", ["layer", "number"]),
    ],
)
def test_what_the_numbers_of_a_name_are(name: str, places: list[str]) -> None:
    assert places_of(pattern_of(name)[0]) == places
