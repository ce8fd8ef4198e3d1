"""Real DeepSpeed loads what our conversions wrote, at another stage and on another number of ranks, and trains on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mcore_rlhf.demo.workers import WorkerPool
from tests.reference.deepspeed_cases import MATRIX, NATIVE, SOURCES, Case, cases_of, few
from tests.reference.deepspeed_live import Seen
from tests.reference.deepspeed_matrix import Matrix, differences
from tests.reference.deepspeed_models import Setting

FEW = few(12)
TOLERANCE = {"fp32": 5e-6, "bf16": 2e-3, "bf16acc32": 2e-3}
"""Relative difference of a loss on another number of ranks, where gradients are summed in another order."""


@pytest.fixture(scope="module")
def matrix(deepspeed_pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix(deepspeed_pool, tmp_path_factory.mktemp("matrix"))


def check(matrix: Matrix, case: Case) -> None:
    """All that DeepSpeed had when it saved, it has after loading; and goes on as if nothing had happened."""
    _, before = matrix.source(case.source)
    after = matrix.loaded(case)
    for rank, seen in enumerate(after):
        assert differences(before[0].start, seen.start) == [], f"{case.name}, rank {rank}"
        assert seen.client["epoch"] == 3
        assert torch.equal(seen.client["ema"], torch.arange(5.0))
        assert seen.losses == after[0].losses
    check_losses(case, before[0], after[0])


def check_losses(case: Case, before: Seen, after: Seen) -> None:
    source, target = case.source, case.target
    assert len(before.losses) == 2
    assert before.losses[0] != before.losses[1]
    assert after.losses == pytest.approx(before.losses, rel=TOLERANCE[source.dtype]), case.name
    if source.dp == target.dp:
        assert before.losses[0] == after.losses[0], case.name
    if same_arithmetic(source, target):
        assert before.losses == after.losses, case.name
    if source == target:
        assert differences(before.end, after.end) == [], case.name


def same_arithmetic(a: Setting, b: Setting) -> bool:
    """Whether a step gives the same loss bit for bit: stage 0 rounds gradients otherwise, and stage 3 adds those of more than
    two ranks in another order.
    """
    if a.dp != b.dp:
        return False
    return a.stage == b.stage or (0 not in (a.stage, b.stage) and (3 not in (a.stage, b.stage) or a.dp <= 2))


@pytest.mark.parametrize("case", FEW, ids=lambda case: case.name)
def test_deepspeed_goes_on_with_what_was_converted(matrix: Matrix, case: Case) -> None:
    check(matrix, case)


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES, ids=lambda s: f"{s.kind}-{s.dtype}-z{s.stage}dp{s.dp}")
def test_the_whole_matrix(matrix: Matrix, source: Setting) -> None:
    for case in cases_of(source):
        if case.exists:
            check(matrix, case)


def test_two_values_of_any_two_axes_meet_in_the_matrix() -> None:
    """4 kinds, 3 dtypes, 4 stages, 3 degrees, 4 stages, 3 degrees, 3 routes: 246 pairs, of which DeepSpeed has all but three."""
    assert (len(SOURCES), len(MATRIX)) == (132, 492)
    assert len(set().union(*(case.pairs() for case in MATRIX))) == 243
    assert len(set().union(*(case.pairs() for case in FEW))) >= 200


def test_one_flipped_bit_of_a_moment_is_noticed(matrix: Matrix) -> None:
    """The negative control: the comparison above sees what DeepSpeed loads, and not what it had before."""
    setting = Setting("plain", "bf16", 2, 2)
    case = Case(setting, 1, 1, NATIVE)
    root = matrix.converted(case)
    file = next(root.glob("*/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"))
    flip_lowest_bit(file, "exp_avg_sq")
    seen = matrix.run("load_and_train", case.target, str(root), dp=1)[0]
    (difference,) = differences(matrix.source(setting)[1][0].start, seen.start)
    assert difference == "state ('model.embed.weight', 'exp_avg_sq')"


def flip_lowest_bit(file: Path, state: str) -> None:
    tree = torch.load(file, weights_only=False)  # written a moment ago by our own conversion
    flat = tree["optimizer_state_dict"]["base_optimizer_state"]["state"][0][state]
    flat.view(torch.int32)[7] ^= 1
    torch.save(tree, file)
