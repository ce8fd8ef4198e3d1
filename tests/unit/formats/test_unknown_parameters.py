"""Parameters that no table knows: found out by comparing, said by rules, and never guessed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mcore_rlhf.convert import Job, convert
from mcore_rlhf.errors import LayoutMismatch
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.models.spec import COLUMN, REPLICATED, ROW, ParamRule, Rules
from tests.helpers.conversions import GOLDENS, options
from tests.helpers.damage import ITERATION, MODEL, edited
from tests.helpers.plain_load import plain_load
from tests.unit.formats.refusal import refused

NAME = "value_head.weight"


def weights(tmp_path: Path, tp: int, values: dict[str, torch.Tensor]) -> Path:
    """A checkpoint without optimizer whose ranks have one parameter more each, behind the output layer."""
    source = tmp_path / "source"
    convert(GOLDENS / "tp1_bf16_do", source, options(tp=tp, no_optimizer=True))
    (source / "mcore_rlhf.json").unlink()
    for folder, value in values.items():
        with edited(source / ITERATION / folder / MODEL) as tree:
            tree["model"][NAME] = value
    return source


def head(*rows: float) -> torch.Tensor:
    return torch.tensor([rows] * 4, dtype=torch.bfloat16)


def found(job_target: Path) -> list[torch.Tensor]:
    return [plain_load(path)["model"][NAME] for path in sorted(job_target.rglob(MODEL))]


def with_rules(source: Path, target: Path, rules: Rules, **write: int) -> Job:
    chosen = options(**write)
    chosen = replace(chosen, read=ReadOptions(rules=rules), write=replace(chosen.write, rules=rules))
    return convert(source, target, chosen)


def test_equal_copies_are_replicated_and_that_is_said(tmp_path: Path) -> None:
    source = weights(tmp_path, 2, {"mp_rank_00": head(1, 2), "mp_rank_01": head(1, 2)})
    job = convert(source, tmp_path / "target", options(tp=4))
    assert all(torch.equal(value, head(1, 2)) for value in found(tmp_path / "target"))
    assert len(found(tmp_path / "target")) == 4
    assert any(NAME in line and "2 copies are equal" in line for _, line in job.report.lines)


def test_different_copies_need_a_rule(tmp_path: Path) -> None:
    source = weights(tmp_path, 2, {"mp_rank_00": head(1, 2), "mp_rank_01": head(3, 4)})
    refused(source, LayoutMismatch, NAME, "copies differ", "--rules", tp=1)
    refused(source, LayoutMismatch, NAME, "--rules")


@pytest.mark.parametrize(("partition", "dim"), [(COLUMN, 0), (ROW, 1)])
def test_a_rule_says_how_they_are_cut(tmp_path: Path, partition: object, dim: int) -> None:
    parts = [head(1, 2), head(3, 4)]
    source = weights(tmp_path, 2, dict(zip(("mp_rank_00", "mp_rank_01"), parts, strict=True)))
    rules = Rules((ParamRule("value_head.*", partition),))  # type: ignore[arg-type]
    with_rules(source, tmp_path / "one", rules, tp=1)
    (whole,) = found(tmp_path / "one")
    assert torch.equal(whole, torch.cat(parts, dim))
    with_rules(source, tmp_path / "four", rules, tp=4)
    assert torch.equal(torch.cat(found(tmp_path / "four"), dim), whole) or dim == 1
    assert [tuple(t.shape) for t in found(tmp_path / "four")] == [tuple(whole.chunk(4, dim)[0].shape)] * 4


def test_one_rank_has_nothing_to_compare(tmp_path: Path) -> None:
    source = weights(tmp_path, 1, {"mp_rank_00": head(1, 2)})
    refused(source, LayoutMismatch, NAME, "cannot be compared", "--rules", tp=2)
    with_rules(source, tmp_path / "cut", Rules((ParamRule(NAME, REPLICATED),)), tp=2)
    assert all(torch.equal(value, head(1, 2)) for value in found(tmp_path / "cut"))
    convert(source, tmp_path / "stages", options(pp=2))  # no cut is asked for
    behind = [NAME in plain_load(path)["model"] for path in sorted((tmp_path / "stages").rglob(MODEL))]
    assert behind == [False, True], "it was registered behind the layers, so the last stage has it"


def test_a_parameter_without_optimizer_state_is_frozen_and_that_is_said(tmp_path: Path) -> None:
    from tests.helpers.damage import copied

    source = copied("tp2pp2dp2_bf16_do", tmp_path)
    for folder in ("mp_rank_00_001", "mp_rank_01_001"):
        with edited(source / ITERATION / folder / MODEL) as tree:
            tree["model"][NAME] = head(5, 6)
    job = convert(source, tmp_path / "target", options(tp=1, pp=1))
    assert torch.equal(found(tmp_path / "target")[0], head(5, 6))
    assert any("frozen" in line and NAME in line for _, line in job.report.lines)
