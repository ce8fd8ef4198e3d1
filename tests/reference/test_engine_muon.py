"""Megatron's Muon, plain and layer-wise: whole, in Megatron's own files, bit for bit at the same layout, and never half."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mcore_rlhf.demo.configs import Parallel
from tests.reference import muon_jobs
from tests.reference.engine_lab import GPT, PLAIN
from tests.reference.lab import TIMEOUT, Lab
from tests.reference.merge import bits_equal
from tests.reference.muon_jobs import Seen
from tests.reference.observing import END, LOOK, Session

MODEL = replace(GPT, dropout=0.0, num_layers=2)
TWO = Parallel(dp=2)


def run(lab: Lab, job: Any, parallel: Parallel, *args: Any, **options: Any) -> list[Seen]:
    session = Session(MODEL, parallel, PLAIN)
    return lab.pool.run(job, session, *args, world_size=parallel.world_size, timeout=TIMEOUT, **options)


@pytest.fixture(scope="module", params=[True, False], ids=["layer_wise", "plain"])
def layer_wise(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(scope="module")
def saved(lab: Lab, layer_wise: bool) -> tuple[Path, list[Seen]]:
    root = lab.new_root()
    return root, run(lab, muon_jobs.save, TWO, str(root), layer_wise)


def same(a: Seen, b: Seen, step: int) -> bool:
    ours, theirs = a.states[step], b.states[step]
    return ours.keys() == theirs.keys() and all(bits_equal(ours[key], theirs[key]) for key in ours)


def test_it_resumes_bit_for_bit(lab: Lab, saved: tuple[Path, list[Seen]], layer_wise: bool) -> None:
    root, ranks = saved
    for rank, again in zip(ranks, run(lab, muon_jobs.load, TWO, str(root), layer_wise), strict=True):
        assert again.told == ("", "")
        assert any(key.endswith("momentum_buffer") for key in rank.states[LOOK])
        assert same(rank, again, LOOK)
        assert {step: again.losses[step] for step in (3, 4)} == {step: rank.losses[step] for step in (3, 4)}
        assert same(rank, again, END)
        assert any("momentum_buffer" in text and "whole" in text for text in again.report)


def test_it_is_named_when_the_engine_is_made(saved: tuple[Path, list[Seen]], layer_wise: bool) -> None:
    for rank in saved[1]:
        (said,) = [line for line in rank.said if "TensorParallelMuon" in line]
        assert ("rank by rank" in said) == layer_wise


def test_the_manifest_has_every_state_of_every_rank(saved: tuple[Path, list[Seen]], layer_wise: bool) -> None:
    """The test's own count of what the ranks hold: each their own where parameters are dealt out, otherwise the same."""
    root, ranks = saved
    live = json.loads((root / f"global_step_{LOOK}" / "manifest.json").read_text())["report"]["live"]["actor"]
    for state in ("momentum_buffer", "exp_avg", "exp_avg_sq", "held"):
        held = [
            t
            for rank in ranks[: 2 if layer_wise else 1]
            for key, t in rank.states[LOOK].items()
            if key.endswith(f" {state}")
        ]
        assert held
        expected = [len(held), sum(t.numel() * t.element_size() for t in held)]
        assert live["states"]["master" if state == "held" else state] == expected


def test_megatrons_own_loader_takes_it(lab: Lab, saved: tuple[Path, list[Seen]], layer_wise: bool) -> None:
    if not layer_wise:
        pytest.skip("a plain chain lies in the model file, as every plain optimizer does")
    for rank, again in zip(saved[1], run(lab, muon_jobs.load_with_megatron, TWO, str(saved[0])), strict=True):
        assert same(rank, again, LOOK)


@pytest.mark.parametrize("other", [Parallel(), Parallel(tp=2)], ids=["dp1", "tp2"])
def test_another_layout_is_refused_by_name(
    lab: Lab, saved: tuple[Path, list[Seen]], layer_wise: bool, other: Parallel
) -> None:
    """Plain, the data-parallel size may change: all ranks have the same."""
    root, _ = saved
    for rank in run(lab, muon_jobs.load, other, str(root), layer_wise):
        if other == Parallel() and not layer_wise:
            assert rank.told == ("", "")
            continue
        assert rank.told[0] in ("Unsupported", "LayoutMismatch")
        assert "optimizer=False" in rank.told[1]
        assert all(bits_equal(rank.states[0][key], rank.states[LOOK][key]) for key in rank.states[0]), "left alone"
    for rank in run(lab, muon_jobs.load, other, str(root), layer_wise, optimizer=False):
        assert rank.told == ("", "")


def test_a_step_that_lacks_half_of_it_is_not_committed(lab: Lab) -> None:
    for rank in run(lab, muon_jobs.forgetful, TWO, str(lab.new_root())):
        kind, text = rank.told
        assert kind == "Incomplete"
        assert "momentum_buffer" in text
        assert "rank 1 holds" in text
        assert rank.report == []
