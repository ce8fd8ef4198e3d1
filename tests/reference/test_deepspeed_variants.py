"""Real DeepSpeed outside of the matrix: AutoTP in stage 0, its own experts, elastic files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from mcore_rlhf.consolidate import load_fp32_state_dict
from mcore_rlhf.convert import ConvertOptions, convert
from mcore_rlhf.demo.workers import WorkerPool
from mcore_rlhf.errors import Unsupported
from mcore_rlhf.families.options import ReadOptions, WriteOptions
from tests.reference.deepspeed_live import Live, Seen
from tests.reference.deepspeed_matrix import Matrix, differences, same
from tests.reference.deepspeed_models import Setting

JOBS = "tests.reference.deepspeed_variants"


@pytest.fixture
def matrix(deepspeed_pool: WorkerPool, tmp_path: Path) -> Matrix:
    return Matrix(deepspeed_pool, tmp_path)


def run(matrix: Matrix, job: str, *args: object, world: int, **options: object) -> list[Seen]:
    return matrix.pool.run(f"{JOBS}:{job}", *args, world_size=world, timeout=100.0, **options)


ACROSS = {"model.up.weight": 0, "model.up.bias": 0, "model.down.weight": 1}
"""Which dimension AutoTP cuts."""


def joined(ranks: list[Seen]) -> tuple[dict[str, torch.Tensor], dict[tuple[str, str], torch.Tensor]]:
    """Whole parameters and states of tensor-parallel ranks, by hand."""

    def whole(name: str, parts: list[torch.Tensor]) -> torch.Tensor:
        if name in ACROSS:
            return torch.cat(parts, ACROSS[name])
        assert all(torch.equal(part, parts[0]) for part in parts), name
        return parts[0]

    first = ranks[0].start
    params = {name: whole(name, [rank.start.param[name] for rank in ranks]) for name in first.param}
    return params, {key: whole(key[0], [rank.start.states[key] for rank in ranks]) for key in first.states}


class TestTensorParallelism:
    @pytest.mark.parametrize(
        ("dtype", "before", "after"), [("fp32", 0, 1), ("bf16", 0, 0), ("bf16", 0, 2), ("bf16", 1, 0)]
    )
    def test_stage_0_comes_and_goes(self, matrix: Matrix, dtype: str, before: int, after: int) -> None:
        root = matrix.new_root()
        ranks = run(matrix, "tensor_parallel", Setting("plain", dtype, before, 1), str(root), world=2, load=False)
        assert ranks[0].start.param["model.up.weight"].shape == (10, 12)
        target = matrix.convert(root, "deepspeed", zero_stage=after)
        again = run(matrix, "tensor_parallel", Setting("plain", dtype, after, 1), str(target), world=2, load=True)
        for one, other in zip(ranks, again, strict=True):
            assert differences(one.start, other.start) == []
            assert other.client["epoch"] == 3
            assert one.losses[0] == other.losses[0]
            assert one.losses == pytest.approx(other.losses, rel=2e-3)
            if before == after:
                assert one.losses == other.losses

    def test_stage_0_is_put_together(self, matrix: Matrix) -> None:
        root = matrix.new_root()
        ranks = run(matrix, "tensor_parallel", Setting("plain", "bf16", 0, 1), str(root), world=2, load=False)
        target = matrix.convert(root, "deepspeed", zero_stage=3, dp=2, tp=1)
        (seen, _) = matrix.run("load_and_train", Setting("plain", "bf16", 3, 2), str(target), dp=2)
        params, states = joined(ranks)
        assert [name for name, value in params.items() if not same(value, seen.start.param[name])] == []
        assert [key for key, value in states.items() if not same(value, seen.start.states[key])] == []
        assert params["model.up.weight"].shape == (20, 12)
        assert len(states) == 3 * 7


@pytest.mark.parametrize("before", [2, 3])
def test_a_scheduler_goes_on_in_stage_3_from_a_rate_and_not_from_zero(matrix: Matrix, before: int) -> None:
    """The first step takes the first group's rate in all groups; from the next on each has what it had without an interruption."""
    root = matrix.new_root()
    told = matrix.pool.run(
        f"{JOBS}:two_rates", Setting("plain", "bf16", before, 2), str(root), world_size=2, timeout=100.0
    )[0]
    assert told[0][0] != told[0][1]
    target = matrix.convert(root, "universal")
    for stage in (3, 2):
        job = Setting("plain", "bf16", stage, 2), str(target)
        found = matrix.pool.run(f"{JOBS}:two_rates", *job, world_size=2, timeout=100.0, universal=True)[0]
        assert found[0] == ([told[0][0]] * 2 if stage == 3 else told[0])
        assert found[1:] == told[1:]


class TestExperts:
    """DeepSpeed's own mixture of experts: global numbers and values told by the engine that trained them."""

    @pytest.mark.parametrize(
        ("stage", "dtype", "ep", "dp", "data_first"),
        [(2, "bf16", 2, 4, False), (1, "fp32", 2, 4, True), (1, "bf16", 4, 4, False), (2, "fp32", 1, 2, False)],
    )
    def test_every_expert_is_found(
        self, matrix: Matrix, stage: int, dtype: str, ep: int, dp: int, data_first: bool
    ) -> None:
        setting, root = Setting("experts", dtype, stage, dp), matrix.new_root()
        ranks = run(matrix, "experts", setting, ep, str(root), world=dp, data_first=data_first)
        expected = by_global_number(ranks, ep, data_first)
        assert len(expected) == 6 + 2 * 4 * 4
        whole = load_fp32_state_dict(root)
        assert expected.keys() == whole.keys()
        assert [name for name, live in expected.items() if not same(live["fp32"], whole[name])] == []
        zero = next(matrix.convert(root, "universal").glob("*/zero"))
        for name, live in expected.items():
            for state, value in live.items():
                stored = torch.load(zero / name / f"{state}.pt", weights_only=True)["param"]
                assert same(stored, value), (name, state)

    def test_deepspeed_loads_them_without_expert_parallelism(self, matrix: Matrix) -> None:
        """There local numbers are global ones; with expert parallelism its loader looks for the wrong ones."""
        root = matrix.new_root()
        ranks = run(matrix, "experts", Setting("experts", "bf16", 2, 4), 2, str(root), world=4)
        universal = matrix.convert(root, "universal")
        seen = run(matrix, "experts", Setting("experts", "bf16", 1, 2), 1, str(universal), world=2, load=True)[0]
        for name, live in by_global_number(ranks, 2, False).items():
            for state, value in live.items():
                assert same(seen.start.states[name, state], value), (name, state)
            assert same(seen.start.param[name], live["fp32"].bfloat16()), name

    def test_with_expert_parallelism_its_loader_takes_the_wrong_ones(self, matrix: Matrix) -> None:
        """What the report warns of: every rank takes the first experts."""
        root = matrix.new_root()
        ranks = run(matrix, "experts", Setting("experts", "bf16", 2, 2), 2, str(root), world=2)
        universal = matrix.convert(root, "universal")
        seen = run(matrix, "experts", Setting("experts", "bf16", 2, 2), 2, str(universal), world=2, load=True)
        experts = [key for key in ranks[0].start.states if "deepspeed_experts" in key[0]]
        assert len(experts) == 3 * 2 * 2 * 4
        for one in seen:
            assert [key for key in experts if not same(one.start.states[key], ranks[0].start.states[key])] == []

    def test_native_files_are_not_written(self, matrix: Matrix) -> None:
        root = matrix.new_root()
        run(matrix, "experts", Setting("experts", "bf16", 2, 2), 2, str(root), world=2)
        with pytest.raises(Unsupported, match="are read, and not written"):
            matrix.convert(root, "deepspeed", zero_stage=1)
        with pytest.raises(Unsupported, match="are read, and not written"):
            matrix.convert(matrix.convert(root, "universal"), "deepspeed", zero_stage=1)

    def test_stage_0_has_no_names_for_the_optimizer(self, matrix: Matrix) -> None:
        root = matrix.new_root()
        ranks = run(matrix, "experts", Setting("experts", "fp32", 0, 2), 2, str(root), world=2)
        with pytest.raises(Unsupported, match=r"expp_rank_0_mp_rank_00_optim_states\.pt: stage 0 stores no names"):
            matrix.convert(root, "universal")
        options = ConvertOptions(
            to="universal", fsync=False, read=ReadOptions(optimizer=False), write=WriteOptions(no_optimizer=True)
        )
        convert(root, matrix.folder / "weights", options)
        file = next((matrix.folder / "weights").glob("*/mp_rank_00_model_states.pt"))
        module = torch.load(file, weights_only=False)["module"]
        expected = by_global_number(ranks, 2, False)
        assert expected.keys() == module.keys()
        assert [name for name, live in expected.items() if not same(live["fp32"], module[name])] == []


def by_global_number(ranks: list[Seen], ep: int, data_first: bool) -> dict[str, dict[str, torch.Tensor]]:
    """Every parameter's states; an expert's from each of the ranks that have it, which have the same."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for number, seen in enumerate(ranks):
        ep_rank = number // (len(ranks) // ep) if data_first else number % ep
        live: Live = seen.start
        for (name, state), value in live.states.items():

            def renumbered(match: re.Match[str], ep_rank: int = ep_rank) -> str:
                return f"deepspeed_experts.{int(match[1]) + ep_rank * (4 // ep)}."

            known = found.setdefault(re.sub(r"deepspeed_experts\.(\d+)\.", renumbered, name), {})
            assert same(known.setdefault(state, value), value), f"{name}: rank {number} has another {state}"
    return found


class TestFrozenLeftOut:
    """``exclude_frozen_parameters``: where a file has an empty dictionary of them, DeepSpeed looks up every one that it has."""

    @pytest.mark.parametrize(
        ("before", "after", "dp", "route"),
        [(2, 2, 4, "native"), (1, 2, 1, "native"), (3, 3, 1, "native"), (2, 3, 2, "universal"), (2, 2, 1, "hf")],
    )
    def test_deepspeed_goes_on(self, matrix: Matrix, before: int, after: int, dp: int, route: str) -> None:
        root, target = matrix.new_root(), Setting("frozen", "bf16", after, dp)
        ranks = run(matrix, "excluded", Setting("frozen", "bf16", before, 2), str(root), world=2)
        if route == "hf":
            source, root = root, matrix.new_root()
            part = ReadOptions(exclude_frozen=True)  # what was trained alone: it is no whole model
            convert(source, root, ConvertOptions("hf", part, WriteOptions(with_optimizer=True), fsync=False))
        if route == "universal":
            there = matrix.convert(root, "universal")
            seen = run(matrix, "excluded", target, str(there), world=dp, universal=True, load=True)
            assert differences(ranks[0].start, seen[0].start) == []
            root = there
        there = matrix.convert(root, "deepspeed", zero_stage=after, dp=dp)
        for one in run(matrix, "excluded", target, str(there), world=dp, load=True):
            assert differences(ranks[0].start, one.start) == []
            assert one.losses == pytest.approx(ranks[0].losses, rel=2e-3)


class TestElastic:
    def test_a_run_goes_on_by_way_of_universal(self, matrix: Matrix) -> None:
        """Elastic files have no settings of param groups, so those of the new run stay."""
        setting, root = Setting("tied", "bf16", 1, 2), matrix.new_root()
        ranks = run(matrix, "elastic", setting, str(root), world=2)
        universal = matrix.convert(root, "universal")
        for stage in (1, 2, 3):
            target = Setting("tied", "bf16", stage, 2)
            seen = matrix.run("load_and_train", target, str(universal), dp=2, universal=True)
            for one in seen:
                assert [d for d in differences(ranks[0].start, one.start) if d != "settings"] == [], stage
                assert [group["weight_decay"] for group in one.start.settings] == [0.1, 0.01]
