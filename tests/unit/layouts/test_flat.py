"""Flat buffers: against megatron-core's own _ParamAndGradBuffer, and the promises that reading a file relies on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rlhf.layouts.flat import PARAM_ALIGNMENT, BufferParam, BufferRules, bucket_rules, flat_buffer

CASES = json.loads((Path(__file__).parents[2] / "goldens/megatron_core/flat_buffers.json").read_text())["cases"]


@pytest.mark.parametrize("number", range(len(CASES)))
def test_parameters_lie_where_megatron_puts_them(number: int) -> None:
    case = CASES[number]
    params = [
        BufferParam(str(i), numel, shared)
        for i, (numel, shared) in enumerate(zip(case["numels"], case["shared"], strict=True))
    ]
    rules = bucket_rules(
        data_parallel=case["data_parallel"], high_nccl_busbw=case["busbw"], bucketed=case["bucket_size"] is not None,
        bucket_size=case["bucket_size"], num_buckets=None, numel=sum(case["numels"]), default_dp=case["data_parallel"],
    )  # fmt: skip
    flat = flat_buffer(params, rules)
    by_name = {place.name: place for place in flat.places}
    found = [[p.buffer_start, p.buffer_start + p.numel, p.bucket] for p in (by_name[q.name] for q in params)]
    assert found == case["index_map"]
    assert (flat.numel, flat.numel_unpadded) == (case["numel"], case["numel_unpadded"])
    # In the file, every bucket is cut to its unpadded length, and all are joined.
    joined = [sum(case["buckets_unpadded"][:bucket]) for *_, bucket in case["index_map"]]
    first = {}
    for start, _, bucket in case["index_map"]:
        first[bucket] = min(start, first.get(bucket, start))
    expected = [joined[i] + start - first[bucket] for i, (start, _, bucket) in enumerate(case["index_map"])]
    assert [by_name[p.name].file_start for p in params] == expected


PARAMS = st.lists(st.tuples(st.integers(1, 400), st.booleans()), min_size=1, max_size=8)


@settings(max_examples=50)
@given(PARAMS, st.one_of(st.none(), st.integers(1, 900)), st.sampled_from([128, 384]))
def test_places_are_aligned_disjoint_and_inside(
    sizes: list[tuple[int, bool]], bucket_size: int | None, divisor: int
) -> None:
    params = [BufferParam(str(i), n, shared) for i, (n, shared) in enumerate(sizes)]
    flat = flat_buffer(params, BufferRules(bucket_size, divisor))
    assert [p.name for p in flat.places] == [p.name for p in reversed(params)]
    assert all(p.buffer_start % PARAM_ALIGNMENT == 0 for p in flat.places)
    for start, end in ((lambda p: p.buffer_start, flat.numel), (lambda p: p.file_start, flat.numel_unpadded)):
        at = 0
        for place in flat.places:
            assert start(place) >= at
            at = start(place) + place.numel
        assert at <= end
    assert flat.numel % divisor == 0
    assert flat.numel_unpadded <= flat.numel


def test_no_parameters_no_buffer() -> None:
    flat = flat_buffer([], BufferRules(None, 128))
    assert (flat.places, flat.numel, flat.numel_unpadded) == ((), 0, 0)


@pytest.mark.parametrize(
    ("options", "bucket_size"),
    [
        ({}, 40_000_000),
        ({"default_dp": 64}, 64_000_000),
        ({"bucket_size": 7}, 7),
        ({"num_buckets": 4, "bucket_size": 7}, 250),
        ({"bucketed": False, "bucket_size": 7}, None),
    ],
)
def test_bucket_sizes(options: dict[str, int], bucket_size: int | None) -> None:
    usual = {
        "data_parallel": 2, "high_nccl_busbw": False, "bucketed": True, "bucket_size": None, "num_buckets": None,
        "numel": 1000, "default_dp": 2,
    }  # fmt: skip
    assert bucket_rules(**(usual | options)) == BufferRules(bucket_size, 128)  # type: ignore[arg-type]
