"""Tolerance profiles: what they let pass, what they never do, and what is said of it."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from mcore_rlhf.errors import UsageError
from mcore_rlhf.manager.prove.check import CheckOptions, CheckOutcome, KilledRun, compare_outputs
from mcore_rlhf.manager.prove.facts import by_rank, facts_of
from mcore_rlhf.manager.prove.profiles import EXACT, PROFILES, MeasuredDifference, profile_named
from mcore_rlhf.storage.manifest import FileEntry, Manifest, crc_of_file

BF16 = profile_named("bf16-reduction")


def run(
    output: Path, state: object, lines: Sequence[dict[str, object]] = (), others: dict[int, str] | None = None
) -> Path:
    """A finished run: step 5 with one file, and metrics beside it."""
    folder = output / "global_step_5"
    (folder / "actor").mkdir(parents=True)
    torch.save(state, folder / "actor" / "state.pt")
    (folder / "rlhf").mkdir()
    (folder / "rlhf/rlhf_state.json").write_text(json.dumps({"kl": 0.1 if output.name == "A" else 0.1001, "seen": 7}))
    files = ["actor/state.pt", "rlhf/rlhf_state.json"]
    entries = {name: FileEntry((folder / name).stat().st_size, crc_of_file(folder / name)) for name in files}
    (folder / "manifest.json").write_text(Manifest(entries, step=5, transaction=output.name).to_json())
    said = "".join(json.dumps({"step": 5 - len(lines) + 1 + at, **line}) + "\n" for at, line in enumerate(lines))
    output.with_name(f"{output.name}.metrics.jsonl").write_text(said)
    for rank, text in (others or {}).items():
        output.with_name(f"{output.name}.metrics.jsonl.{rank}").write_text(text)
    return output


def compared(tmp_path: Path, a: object, b: object, profile: str = "bf16-reduction") -> list[str]:
    """Places of the state that differ, the manifest and the KL coefficient left out."""
    first, second = run(tmp_path / "A", a), run(tmp_path / "B", b)
    options = CheckOptions(3, 2, profile=profile_named(profile), ignore=("rlhf/*",))
    return [finding.key for finding in compare_outputs(first, second, 5, options).states.tally.findings]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_tensor_is_allowed_a_share_of_its_largest_magnitude(tmp_path: Path, dtype: torch.dtype) -> None:
    a = {"model": {"w": torch.tensor([4.0, 1e-3, -0.5], dtype=dtype)}}
    near = {"model": {"w": torch.tensor([4.0, 1e-3 + 0.9 * 4 * 2**-8, -0.5], dtype=dtype)}}
    far = {"model": {"w": torch.tensor([4.0, 1e-3 + 1.1 * 4 * 2**-8, -0.5], dtype=dtype)}}
    assert compared(tmp_path / "near", a, near) == []
    assert compared(tmp_path / "far", a, far) == ["model/w"]
    assert compared(tmp_path / "exact", a, near, "exact") == ["model/w"]


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ({"step": torch.tensor(5.0)}, {"step": torch.tensor(5.01)}),  # Adam's, which is a float
        ({"step": torch.tensor([5.0])}, {"step": torch.tensor([5.01])}),
        ({"w": torch.tensor([1.0])}, {"w": torch.tensor([math.nan])}),
        ({"w": torch.tensor([1.0])}, {"w": torch.tensor([math.inf])}),
        ({"w": torch.tensor([1.0])}, {"w": torch.tensor([[1.0001]])}),
        ({"w": torch.tensor([1.0])}, {"w": torch.tensor([1.0001], dtype=torch.float64)}),
        ({"w": torch.tensor([100])}, {"w": torch.tensor([101])}),
        ({"lr": 1e-3}, {"lr": 1.0001e-3}),
        ({"w": torch.tensor([1.0])}, {"v": torch.tensor([1.0])}),
        ({"grad_scaler": {"scale": torch.tensor([1024.0])}}, {"grad_scaler": {"scale": torch.tensor([1025.0])}}),
    ],
)
@pytest.mark.parametrize("profile", ["bf16-reduction", "loose"])
def test_what_no_noise_can_be_differs_under_every_profile(tmp_path: Path, a: object, b: object, profile: str) -> None:
    assert compared(tmp_path, a, b, profile)


def test_a_random_tensor_is_measured_as_numpy_measures_it(tmp_path: Path, rng: random.Random) -> None:
    draw = np.random.default_rng(rng.getrandbits(32))
    a = draw.standard_normal((7, 33)).astype(np.float32)
    b = a + draw.standard_normal(a.shape).astype(np.float32) * np.float32(1e-4)
    places = run(tmp_path / "A", {"w": torch.from_numpy(a).T}), run(tmp_path / "B", {"w": torch.from_numpy(b).T})
    found = compare_outputs(*places, 5, CheckOptions(3, 2, profile=BF16)).states.tally
    assert found.worst is not None
    tensor = MeasuredDifference(
        "actor/state.pt", "w", float(np.abs(a.astype(float) - b).max()), float(np.abs(a).max()) * 2**-8
    )
    kl = MeasuredDifference("rlhf/rlhf_state.json", "kl", 0.1001 - 0.1, 1e-4 + 0.1 * 2**-6)
    assert found.within == 2
    assert found.worst.key == max(tensor, kl, key=lambda off: off.share).key
    assert found.worst.off == pytest.approx(max(tensor, kl, key=lambda off: off.share).off)
    assert not found.differing


def test_metrics_have_room_where_they_have_a_point_and_nowhere_else(tmp_path: Path) -> None:
    lines = [{"loss": 1.0, "tokens": 100, "note": "a"}, {"loss": 0.5, "tokens": 100, "note": "a"}]
    a = run(tmp_path / "A", {"w": torch.ones(2)}, lines)
    near = run(tmp_path / "B", {"w": torch.ones(2)}, [{**lines[0], "loss": 1.01}, {**lines[1], "loss": 0.5001}])
    found = compare_outputs(a, near, 5, CheckOptions(3, 2, profile=BF16))
    assert found.equal
    assert found.metrics is not None
    assert (found.metrics.tally.within, found.metrics.tally.worst) == (
        2,
        MeasuredDifference("metrics", "step 4/loss", 1.01 - 1.0, 2**-6 + 1e-4),
    )
    far = run(
        tmp_path / "C", {"w": torch.ones(2)}, [{**lines[0], "loss": 1.1, "tokens": 101}, {**lines[1], "note": "b"}]
    )
    found = compare_outputs(a, far, 5, CheckOptions(3, 2, profile=BF16))
    assert found.metrics is not None
    assert [one.key for one in found.metrics.tally.findings] == ["step 4/loss", "step 4/tokens", "step 5/note"]
    assert found.metrics.tally.findings[0].detail == "off by 0.1, allowed 0.0157"


def test_a_skipped_line_is_named_under_every_profile(tmp_path: Path) -> None:
    lines = [{"loss": 1.0}, {"loss": 0.5}]
    a, b = run(tmp_path / "A", {"w": torch.ones(2)}, lines), run(tmp_path / "B", {"w": torch.ones(2)}, lines[1:])
    for profile in PROFILES:
        found = compare_outputs(a, b, 5, CheckOptions(3, 2, profile=profile))
        first = found.first()
        assert first is not None
        assert (first.key, first.first, first.second) == ("step 4", "there", "not there")


def test_ranks_are_compared_each_with_its_own_and_the_first_difference_is_theirs(tmp_path: Path) -> None:
    state, lines = {"w": torch.ones(2)}, [{"loss": 1.0}]
    rank1 = '{"step": 5, "loss": 2.0}\n'
    a = run(tmp_path / "A", state, lines, {1: rank1, 2: rank1})
    b = run(tmp_path / "B", state, lines, {1: rank1, 2: rank1.replace("2.0", "2.5")})
    found = compare_outputs(a, b, 5, CheckOptions(3, 2, ignore=("rlhf/*",)))
    assert not found.equal
    outcome = CheckOutcome(3, 2, [KilledRun(found)], None)
    ranks = by_rank(outcome)
    firsts = {rank: facts["runs"][0]["first_difference"] for rank, facts in ranks.items()}  # type: ignore[index]
    assert (firsts[0], firsts[1]) == (None, None)
    assert firsts[2] == {"where": "metrics", "key": "step 5/loss", "first": "2.0", "second": "2.5", "detail": ""}
    assert [facts["runs"][0]["equal"] for facts in ranks.values()] == [True, True, False]  # type: ignore[index]
    whole = facts_of(outcome)
    assert whole["first_difference"] == firsts[2]
    assert sorted(whole["runs"][0]["ranks"]) == ["1", "2"]  # type: ignore[index]
    json.dumps([whole, list(ranks.values())], allow_nan=False)


def test_an_unknown_profile_is_named_with_those_that_there_are() -> None:
    with pytest.raises(UsageError, match="expected one of exact, fp32-reduction, bf16-reduction, loose, found 'bf16'"):
        profile_named("bf16")


def test_every_row_has_a_reason_and_looser_profiles_are_looser() -> None:
    assert PROFILES[0] == EXACT
    assert all(row.why for profile in PROFILES for row in profile.rows)
    for stricter, looser in pairwise(PROFILES[1:]):
        for a, b in zip(stricter.rows, looser.rows, strict=True):
            assert a.where == b.where
            assert a.relative <= b.relative


def test_the_page_has_the_numbers_of_the_code() -> None:
    page = (Path(__file__).parents[3] / "docs/how-to/check-resume-in-ci.md").read_text(encoding="utf-8")
    places = {
        "metrics with a point": "metrics:loss",
        "momentum": "optimizer.pt:state/0/exp_avg",
        "other tensors": "model.safetensors:w",
    }
    for told, place in places.items():
        (line,) = re.findall(rf"^\| {told}.*$", page, re.MULTILINE)
        cells = [cell.strip() for cell in line.split("|")[2:5]]
        for cell, profile in zip(cells, PROFILES[1:], strict=True):
            row = profile.row(place)
            assert row is not None
            power = str(int(math.log2(row.relative))).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
            least = f"{row.absolute:.0e}".replace("e-0", "e-")
            assert cell == (f"2{power} + {least}" if row.absolute else f"2{power}")
