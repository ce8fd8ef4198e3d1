"""DeepSpeed's Muon: real runs of every stage, converted to any other, loaded by real DeepSpeed, which goes on as if nothing had been."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_rlhf.convert import ConvertOptions, convert
from mcore_rlhf.demo.workers import WorkerPool
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.verify.checkpoint import Depth, verify
from tests.reference.deepspeed_live import Live, Seen
from tests.reference.deepspeed_matrix import Matrix, differences
from tests.reference.deepspeed_models import Setting

JOBS = "tests.reference.deepspeed_muon"
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}


TRAINED: dict[str, tuple[Path, Live, list[float]]] = {}
"""Runs that were done, by their settings: several tests begin with the same."""


@pytest.fixture(scope="module")
def matrix(deepspeed_pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix(deepspeed_pool, tmp_path_factory.mktemp("muon"))


def run(pool: WorkerPool, setting: Setting, root: Path, **options: object) -> list[Seen]:
    return pool.run(f"{JOBS}:muon", setting, str(root), world_size=setting.dp, timeout=150.0, **options)


def trained(
    matrix: Matrix, stage: int, dtype: str, dp: int, kind: str = "plain", **zero: object
) -> tuple[Path, Live, list[float]]:
    """A run of real DeepSpeed, the engine at its checkpoint and the losses of the steps after it."""
    setting = Setting(kind, dtype, stage, dp)
    key = repr((setting, zero))
    if key not in TRAINED:
        root = matrix.new_root()
        seen = run(matrix.pool, setting, root, **zero)
        TRAINED[key] = root, seen[0].start, seen[0].losses
    return TRAINED[key]


def goes_on(matrix: Matrix, root: Path, target: Setting, before: Live, losses: list[float], **options: object) -> None:
    """All that the run had, DeepSpeed has after loading, and its losses are those of the run."""
    seen = run(matrix.pool, target, root, load=True, **options)
    for one in seen:
        assert differences(before, one.start) == []
    assert seen[0].losses == pytest.approx(losses, rel=2e-3)
    assert losses[0] != losses[1]


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ((2, "bf16", 2), (2, 1)), ((2, "bf16", 2), (2, 4)), ((1, "bf16", 2), (2, 2)), ((2, "bf16", 4), (1, 2)),
        ((3, "bf16", 2), (2, 2)), ((2, "bf16", 2), (3, 4)), ((1, "bf16acc32", 2), (1, 4)), ((1, "fp32", 2), (3, 1)),
        ((0, "fp32", 1), (2, 2)), ((2, "bf16", 2), (0, 1)), ((0, "bf16", 1), (1, 2)),
    ],
    ids=str,
)  # fmt: skip
def test_deepspeed_goes_on(matrix: Matrix, source: tuple[int, str, int], target: tuple[int, int]) -> None:
    root, before, losses = trained(matrix, *source)
    assert len(before.states) == 7 * 3 - 3
    verdict = verify(root, ReadOptions(), Depth.DEEP)
    assert verdict.intact, verdict.problems
    (stage, dp), dtype = target, source[1]
    there = matrix.convert(root, "deepspeed", zero_stage=stage, dp=dp)
    goes_on(matrix, there, Setting("plain", dtype, stage, dp), before, losses)


@pytest.mark.parametrize("way", ["universal", "dcp", "hf"])
def test_there_and_back(matrix: Matrix, way: str) -> None:
    """By way of another format, with a tied and with a frozen parameter."""
    for kind in ("tied", "frozen"):
        root, before, losses = trained(matrix, 2, "bf16", 2, kind)
        between = matrix.convert(root, way, **({"with_optimizer": True} if way == "hf" else {}))
        there = matrix.convert(between, "deepspeed", zero_stage=2, dp=4)
        goes_on(matrix, there, Setting(kind, "bf16", 2, 4), before, losses)


def test_an_offloaded_optimizer_cuts_momenta_as_all_other_states(matrix: Matrix) -> None:
    root, before, losses = trained(matrix, 2, "bf16", 2, **OFFLOAD)
    assert verify(root, ReadOptions(), Depth.DEEP).intact
    there = matrix.convert(root, "deepspeed", dp=4)
    goes_on(matrix, there, Setting("plain", "bf16", 2, 4), before, losses, **OFFLOAD)


class TestUniversal:
    """What real DeepSpeed makes of a universal checkpoint with momenta: what the report says."""

    def note(self, matrix: Matrix, source: Path) -> Path:
        target = matrix.new_root()
        job = convert(source, target, ConvertOptions(to="universal", workers=1, fsync=False))
        assert any("momentum_buffer of DeepSpeed's Muon" in text for _, text in job.report.lines)
        return target

    def test_one_rank_and_bf16_optimizer_and_offload_take_it(self, matrix: Matrix) -> None:
        for dtype, stage, dp, zero in (("bf16", 2, 1, {}), ("bf16acc32", 1, 4, {}), ("bf16", 2, 4, OFFLOAD)):
            root, before, losses = trained(matrix, stage, dtype, 2, **zero)
            there = self.note(matrix, root)
            goes_on(matrix, there, Setting("plain", dtype, stage, dp), before, losses, universal=True, **zero)

    @pytest.mark.parametrize("stage", [2, 3])
    def test_others_do_not(self, matrix: Matrix, stage: int) -> None:
        root, *_ = trained(matrix, 2, "bf16", 2)
        there = self.note(matrix, root)
        with pytest.raises(Exception, match="rank"):
            run(matrix.pool, Setting("plain", "bf16", stage, 2), there, load=True, universal=True)


class TestEngine:
    """The manager saves and resumes it, at the same layout and at another."""

    @pytest.mark.parametrize(("stage", "dtype"), [(2, "bf16"), (1, "fp32"), (1, "bf16acc32"), (3, "bf16")])
    def test_the_same_layout_goes_on_bit_for_bit(self, matrix: Matrix, stage: int, dtype: str) -> None:
        setting, root = Setting("plain", dtype, stage, 2), matrix.new_root()
        before = resume(matrix, setting, root, None)[0]
        for one in resume(matrix, setting, matrix.new_root(), root / "global_step_2"):
            assert differences(before.start, one.start) == []
            assert before.losses == one.losses

    @pytest.mark.parametrize(("stage", "dp"), [(2, 4), (1, 1), (3, 2)])
    def test_another_layout_goes_on(self, matrix: Matrix, stage: int, dp: int) -> None:
        root = matrix.new_root()
        before = resume(matrix, Setting("plain", "bf16", 2, 2), root, None)[0]
        source = matrix.convert(root / "global_step_2", "universal") if dp == 2 else root / "global_step_2"
        for one in resume(matrix, Setting("plain", "bf16", stage, dp), matrix.new_root(), source):
            assert differences(before.start, one.start) == []
            assert one.losses == pytest.approx(before.losses, rel=2e-3)


def resume(matrix: Matrix, setting: Setting, root: Path, source: Path | None) -> list[Seen]:
    given = None if source is None else str(source)
    return matrix.pool.run(f"{JOBS}:resumed", setting, str(root), given, world_size=setting.dp, timeout=150.0)
