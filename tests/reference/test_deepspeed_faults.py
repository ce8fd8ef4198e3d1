"""What real DeepSpeed gets wrong, seen: the claims of ``docs/explanation/what-deepspeed-gets-wrong.md``.

Where one of these fails, DeepSpeed has been mended: the page, and what goes around the fault, can be simpler.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rlhf.convert import ConvertOptions, convert
from mcore_rlhf.demo.workers import WorkerError, WorkerPool
from mcore_rlhf.families.options import ReadOptions, WriteOptions
from tests.reference.deepspeed_live import Seen
from tests.reference.deepspeed_matrix import Matrix, differences
from tests.reference.deepspeed_models import Setting

JOBS = "tests.reference.deepspeed_faults"
FROZEN = {"model.embed.weight", "model.up.bias"}
BUFFERS = {"model.shift", "model.count"}


@pytest.fixture(scope="module")
def matrix(deepspeed_pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix(deepspeed_pool, tmp_path_factory.mktemp("faults"))


def run(matrix: Matrix, job: str, *args: object, world: int = 1, **options: object) -> list[Any]:
    return matrix.pool.run(f"{JOBS}:{job}", *args, world_size=world, timeout=60.0, **options)


def trained(matrix: Matrix, stage: int, dtype: str = "bf16", kind: str = "frozen") -> tuple[Path, Seen]:
    root, seen = matrix.source(Setting(kind, dtype, stage, 2))
    return root, seen[0]


def universal_by_deepspeed(matrix: Matrix, root: Path) -> str:
    """DeepSpeed's own tool, and its error."""
    tag = (root / "latest").read_text()
    (error,) = run(matrix, "universal_by_deepspeed", str(root / tag), str(root / f"{tag}_uni"))
    (root / "latest_universal").write_text(f"{tag}_uni")
    return str(error)


def loaded(matrix: Matrix, root: Path, stage: int) -> dict[str, Any]:
    found: dict[str, Any] = run(matrix, "after_universal", Setting("frozen", "bf16", stage, 2), str(root), world=2)[0]
    return found


@pytest.mark.parametrize("stage", [2, 3])
def test_a_universal_load_restores_neither_buffers_nor_frozen_parameters(matrix: Matrix, stage: int) -> None:
    root, seen = trained(matrix, stage)
    assert universal_by_deepspeed(matrix, root) == ""
    found = loaded(matrix, root, stage)["param"]
    assert {name for name, value in seen.start.param.items() if not torch.equal(value, found[name])} == FROZEN | BUFFERS


def test_stage_3_counts_one_step_for_all_sub_groups(matrix: Matrix) -> None:
    root, _ = trained(matrix, 3)
    assert universal_by_deepspeed(matrix, root) == ""
    found = loaded(matrix, root, 3)
    assert (found["sub_groups"], found["step_tensors"]) == (2, 1)
    assert found["steps"] == ([2.0], [8.0])  # after three steps


def test_stage_3_gives_all_param_groups_the_first_ones_values(matrix: Matrix) -> None:
    root, _ = trained(matrix, 3)
    assert universal_by_deepspeed(matrix, root) == ""
    assert loaded(matrix, root, 3)["weight_decay"] == [0.1, 0.1]  # they were 0.1 and 0.01


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2), (3, 1)])
def test_universal_of_one_kind_of_stage_is_not_loaded_in_the_other(matrix: Matrix, before: int, after: int) -> None:
    root, seen = trained(matrix, before)
    assert universal_by_deepspeed(matrix, root) == ""
    assert loaded(matrix, root, after)["error"].strip() == "AssertionError:"
    ours = matrix.convert(root, "universal")  # the superset
    found = matrix.run("load_and_train", Setting("frozen", "bf16", after, 2), str(ours), dp=2, universal=True)[0]
    assert differences(seen.start, found.start) == []


@pytest.mark.parametrize("stage", [1, 2])
def test_a_rank_with_padding_only_cannot_load_universal(matrix: Matrix, stage: int) -> None:
    root = matrix.new_root()
    run(matrix, "tiny_group", stage, 2, str(root), load=False, world=2)
    assert universal_by_deepspeed(matrix, root) == ""
    with pytest.raises(WorkerError, match="IndexError: list index out of range"):
        run(matrix, "tiny_group", stage, 2, str(root), load=True, world=2)


def test_stages_1_and_2_load_no_universal_checkpoint_without_an_optimizer(matrix: Matrix) -> None:
    root, seen = trained(matrix, 2, kind="plain")
    uni = matrix.new_root()
    options = ConvertOptions(to="universal", read=ReadOptions(optimizer=False), write=WriteOptions(no_optimizer=True))
    convert(root, uni, options)
    for stage in (1, 2):
        (error, _) = run(matrix, "weights_alone", Setting("plain", "bf16", stage, 2), str(uni), world=2)
        assert "optimizer_state.pt containing optimizer global state is missing" in error
    for found in run(matrix, "weights_alone", Setting("plain", "bf16", 3, 2), str(uni), world=2):
        assert {n for n, value in seen.start.param.items() if not torch.equal(value, found[n])} == BUFFERS


@pytest.mark.parametrize(
    ("before", "after", "dp", "error"),
    [
        (2, 2, 4, "Automatic adjustment of ZeRO's optimizer state partitioning"), (2, 3, 2, "AssertionError"),
        (3, 2, 2, "AssertionError"), (2, 0, 2, "'NoneType' object is not subscriptable"), (3, 3, 1, "must match the size"),
    ],
)  # fmt: skip
def test_native_files_of_another_layout_are_not_loaded(
    matrix: Matrix, before: int, after: int, dp: int, error: str
) -> None:
    root, seen = trained(matrix, before)
    target = Setting("frozen", "bf16", after, dp)
    assert error in run(matrix, "after_native", target, str(root), world=dp)[0]
    ours = matrix.convert(root, "deepspeed", zero_stage=after, dp=dp)
    assert differences(seen.start, matrix.run("load_and_train", target, str(ours), dp=dp)[0].start) == []


def test_zero_to_fp32_drops_the_frozen_parameters_of_stage_1(matrix: Matrix) -> None:
    root, seen = trained(matrix, 1)
    (found,) = run(matrix, "fp32_by_deepspeed", str(root))
    assert seen.start.param.keys() - found.keys() == FROZEN
    (found,) = run(matrix, "fp32_by_deepspeed", str(trained(matrix, 2)[0]))
    assert {name for name, value in found.items() if value.dtype == torch.bfloat16} == FROZEN  # not in fp32


@pytest.mark.parametrize(("stage", "dtype"), [(0, "fp32"), (1, "bf16acc32")])
def test_zero_to_fp32_fails_on_its_own_files(matrix: Matrix, stage: int, dtype: str) -> None:
    root, _ = trained(matrix, stage, dtype, "plain")
    (found,) = run(matrix, "fp32_by_deepspeed", str(root))
    assert found.startswith(("TypeError", "ValueError"))


def test_stage_0_cannot_be_made_universal(matrix: Matrix) -> None:
    root, _ = trained(matrix, 0, "fp32", "plain")
    assert "can't find *_optim_states.pt" in universal_by_deepspeed(matrix, root)


def test_its_tools_fail_on_its_own_experts(matrix: Matrix) -> None:
    root = matrix.new_root()
    setting = Setting("experts", "bf16", 2, 2)
    matrix.pool.run("tests.reference.deepspeed_variants:experts", setting, 2, str(root), world_size=2, timeout=60.0)
    assert "RuntimeError" in universal_by_deepspeed(matrix, root)
    (found,) = run(matrix, "fp32_by_deepspeed", str(root))
    assert "is not a model state checkpoint" in found


def test_round_robin_gradients_mix_up_parameters(matrix: Matrix) -> None:
    """Its own accessor, and ``ds_to_universal``, go by mappings that are not those of the flat groups."""
    root = matrix.new_root()
    right, total = run(matrix, "round_robin", Setting("plain", "bf16", 2, 2), str(root), world=2)[0]
    assert (right, total) == (3, 7)
