"""Verifying and comparing whole checkpoints: what is sound is called sound, at every depth and across layouts."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mcore_rlhf.convert import convert, prepare
from mcore_rlhf.core.catalog import FLOAT32, TensorEntry, TensorName
from mcore_rlhf.core.chunks import Chunks
from mcore_rlhf.errors import Corrupt, NotACheckpoint, Problems
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.formats.registry import open_checkpoint
from mcore_rlhf.storage.reading import OpenFiles
from mcore_rlhf.verify.audit import Audit, Ledger, pairs
from mcore_rlhf.verify.checkpoint import Depth, verify
from mcore_rlhf.verify.differ import Comparison, Differ, Tolerance, _gap
from tests.helpers.conversions import GOLDENS, NAMES, Conversions, options
from tests.helpers.damage import ITERATION, MODEL, OPTIMIZER, copied, edited, flip

MANY, ONE = "tp2pp2dp2_bf16_do", "tp1_bf16_do"


@pytest.mark.parametrize("name", NAMES)
def test_goldens_are_sound(name: str) -> None:
    verdict = verify(GOLDENS / name, ReadOptions(), Depth.DEEP)
    assert verdict.intact, verdict.problems.describe()
    assert not verdict.manifest
    assert verdict.nbytes > 0


@pytest.mark.parametrize("depth", list(Depth))
def test_our_own_files_are_sound(conversions: Conversions, depth: Depth) -> None:
    verdict = verify(conversions.of(GOLDENS / MANY, tp=1, pp=1), ReadOptions(), depth)
    assert verdict.intact, verdict.problems.describe()
    assert verdict.manifest


def test_every_byte_is_checked_once(tmp_path: Path) -> None:
    """The full depth reads each file's records once: as many bytes as they have."""
    verdict = verify(GOLDENS / ONE, ReadOptions(), Depth.FULL)
    assert verdict.source is not None
    assert verdict.nbytes == sum(n for file in verdict.source.files for _, _, n, _ in file.records)


def test_damage_to_our_own_files_is_found_by_the_manifest_too(conversions: Conversions, tmp_path: Path) -> None:
    root = tmp_path / "copy"
    shutil.copytree(conversions.of(GOLDENS / MANY, tp=1, pp=1), root)
    (root / ITERATION / "mp_rank_00" / OPTIMIZER).unlink()
    verdict = verify(root, ReadOptions(), Depth.QUICK)
    assert not verdict.intact
    assert f"mp_rank_00/{OPTIMIZER}" in verdict.problems.describe()


def test_nothing_to_verify(tmp_path: Path) -> None:
    with pytest.raises(NotACheckpoint):
        verify(tmp_path, ReadOptions())


def test_an_audit_can_leave_out_replicas_and_parity(tmp_path: Path) -> None:
    source = copied(MANY, tmp_path)
    with edited(source / ITERATION / "mp_rank_01_001" / OPTIMIZER) as tree:
        (states,) = tree[0].values()
        states["param"][:3] += 1.0
    opened = open_checkpoint(source, ReadOptions())
    for parity in (False, True):
        problems = Problems()
        with OpenFiles(opened.root) as files:
            for task in Audit(files, Ledger(opened.files), problems).tasks(
                opened.catalog, replicas=False, parity=parity
            ):
                task()
        assert bool(problems) == parity


def test_a_tensor_of_which_nothing_is_stored_is_named() -> None:
    problems = Problems()
    table = Chunks.of([TensorEntry(TensorName("actor", "weight"), (4,), FLOAT32, ())])
    assert not [*pairs(table, problems, replicas=True, parity=True)]
    assert [problem.message for problem in problems.found] == ["actor/weight (param): is stored nowhere"]


def compare(a: Path, b: Path, tolerance: Tolerance | None = None, states: list[str] | None = None) -> Comparison:
    left, right = open_checkpoint(a, ReadOptions()), open_checkpoint(b, ReadOptions())
    with OpenFiles(left.root) as files_a, OpenFiles(right.root) as files_b:
        return Differ(left, right, files_a, files_b, tolerance or Tolerance(), states).compare()


@pytest.mark.parametrize("write", [{"tp": 1, "pp": 1}, {"tp": 4, "pp": 1, "optimizer": "plain"}], ids=str)
def test_a_conversion_is_equal_to_its_source(conversions: Conversions, write: dict[str, int]) -> None:
    result = compare(GOLDENS / MANY, conversions.of(GOLDENS / MANY, **write))
    assert result.equal, result.differences[:3]
    assert result.tensors == 108
    if write.get("tp") == 1:
        assert any("144" in note and "160" in note for note in result.notes)


@pytest.mark.parametrize("to", ["megatron", "megatron-dist"])
def test_one_random_state_that_is_another_is_named(tmp_path: Path, to: str) -> None:
    """It lies in bytes of its own, below a tensor or inside a pickled object: where it lies says nothing."""
    source = copied(MANY, tmp_path)
    with edited(source / ITERATION / "mp_rank_01_001" / MODEL) as tree:
        tree["rng_state"][0]["torch_rng_state"][7] ^= 1
    for path, name in ((GOLDENS / MANY, "one"), (source, "other"), (source, "again")):
        convert(path, tmp_path / name, replace(options(), to=to))
    other, again = (compare(tmp_path / name, tmp_path / "other").notes for name in ("one", "again"))
    assert "other values that are not the same: rng rng_state" in other
    assert any(note.startswith("all other values are the same: RNG states") for note in again)


def test_arguments_and_client_state_that_are_others_are_named(conversions: Conversions, tmp_path: Path) -> None:
    reshaped = compare(GOLDENS / MANY, conversions.of(GOLDENS / MANY, tp=4, pp=1)).notes
    assert "RNG states, and what else belongs to ranks, were not compared: the ranks are not the same" in reshaped
    assert any("arguments tensor_model_parallel_size, " in note and "rng" not in note for note in reshaped)
    golden = GOLDEN_KINDS / "deepspeed/z1_fp32_tied_dp2"
    changed = Path(shutil.copytree(golden, tmp_path / "deepspeed", ignore=shutil.ignore_patterns("*_uni*")))
    for path in changed.rglob("*model_states.pt"):
        with edited(path) as tree:
            tree["reward_mean"] = 0.5
    assert "other values that are not the same: value reward_mean" in compare(golden, changed).notes


def test_a_tensor_inside_an_object_of_the_client_state_is_compared(tmp_path: Path) -> None:
    for name, value in (("one", 1.0), ("other", 2.0), ("again", 2.0)):
        shutil.copytree(
            GOLDEN_KINDS / "deepspeed/z1_fp32_tied_dp2", tmp_path / name, ignore=shutil.ignore_patterns("*_uni*")
        )
        for path in (tmp_path / name).rglob("*model_states.pt"):
            with edited(path) as tree:
                tree["reward_statistics"] = SimpleNamespace(mean=torch.full((3,), value))
    other, again = (compare(tmp_path / name, tmp_path / "other").notes for name in ("one", "again"))
    assert "other values that are not the same: value reward_statistics" in other
    assert not any("not the same" in note for note in again)


def test_two_models_differ_in_every_trained_tensor() -> None:
    result = compare(GOLDENS / ONE, GOLDENS / MANY)
    names = {difference.name for difference in result.differences}
    assert "decoder.layers.3.mlp.linear_fc2.weight (exp_avg)" in names
    assert all(d.differing > 0 and d.max_abs > 0 for d in result.differences if d.name.endswith("(exp_avg)"))


def test_one_element_is_found_and_a_tolerance_forgives_it(conversions: Conversions, tmp_path: Path) -> None:
    source = copied(MANY, tmp_path)
    with edited(source / ITERATION / "mp_rank_01_001" / OPTIMIZER) as tree:
        (states,) = tree[0].values()
        states["exp_avg"][77] += 0.5
    other = conversions.of(GOLDENS / MANY, tp=1, pp=1)
    (difference,) = compare(source, other).differences
    assert difference.name == "output_layer.weight (exp_avg)"
    assert difference.differing == 1
    assert difference.max_abs == pytest.approx(0.5)
    assert compare(source, other, Tolerance(atol=0.6)).equal
    assert not compare(source, other, Tolerance(atol=0.4)).equal
    assert compare(source, other, states=["param", "exp_avg_sq"]).equal


def test_what_only_one_has_is_said(conversions: Conversions) -> None:
    result = compare(GOLDENS / ONE, conversions.of(GOLDENS / ONE, no_optimizer=True))
    text = "\n".join(f"{d.name}: {d.what}" for d in result.differences)
    assert "decoder.final_layernorm.weight (exp_avg): only in the first" in text
    assert "(param): only" not in text


def test_progress_in_another_run_is_a_difference(tmp_path: Path) -> None:
    source = copied(ONE, tmp_path)
    with edited(source / ITERATION / "mp_rank_00" / MODEL) as tree:
        tree["opt_param_scheduler"]["num_steps"] += 8
        tree["args"].consumed_train_samples += 8
        tree["iteration"] = 3
        tree["optimizer"]["optimizer"]["param_groups"][0]["step"] = 3
    (source / ITERATION).rename(source / "iter_0000003")
    (source / "latest_checkpointed_iteration.txt").write_text("3")
    names = {difference.name for difference in compare(GOLDENS / ONE, source).differences}
    assert names == {"iteration", "scheduler", "param_groups", "consumed_train_samples"}


def test_damage_is_not_compared_away(tmp_path: Path) -> None:
    source = copied(ONE, tmp_path)
    flip(source / ITERATION / "mp_rank_00" / OPTIMIZER, "data/1", 5)
    verdict = verify(source, replace(ReadOptions(), role="actor"))
    assert not verdict.intact


def gap(x: list[float], y: list[float], **tolerance: float) -> int:
    a, b = np.array(x), np.array(y)
    return _gap(a, b, a.view(np.uint64) == b.view(np.uint64), Tolerance(**tolerance)).differing


def test_a_tolerance_is_for_numbers() -> None:
    """An infinity, and no number, are near to themselves alone."""
    inf, nan = float("inf"), float("nan")
    assert gap([-inf, nan, 1.0], [-inf, nan, 1.001], rtol=0.01) == 0
    assert gap([1.0, inf, nan, -inf], [inf, 1.0, 1.0, inf], rtol=0.01, atol=1e9) == 4


def test_groups_of_experts_are_compared(tmp_path: Path) -> None:
    source = copied("ep2dp2_moe_seq_bf16_do", tmp_path)
    for path in source.rglob(MODEL):
        with edited(path) as tree:
            tree["optimizer"][1]["optimizer"]["param_groups"][0]["lr"] = 7.0
    (difference,) = compare(GOLDENS / "ep2dp2_moe_seq_bf16_do", source).differences
    assert difference.name == "experts' param_groups"


def test_weights_in_fp8_are_not_their_masters_rounded(tmp_path: Path) -> None:
    """With ``--fp8-param-gather`` a run's files hold the values of fp8, and masters as exact as ever: nothing is damaged."""
    source = copied(ONE, tmp_path)
    with edited(source / ITERATION / "mp_rank_00" / MODEL) as tree:
        tree["args"].fp8_param_gather = True
        for name, weight in tree["model"].items():
            if "linear" in name and name.endswith("weight"):
                weight.copy_((weight.float() * 16).to(torch.float8_e4m3fn).float() / 16)
    for target, to, write in (("tp2", "megatron", {"tp": 2}), ("dist", "megatron-dist", {}), ("zero", "deepspeed", {})):
        job = convert(source, tmp_path / target, replace(options(**write), to=to))
        assert verify(tmp_path / target, ReadOptions(), Depth.DEEP).intact, to
        assert any("rounded from" in text for _, text in job.report.lines) == (to == "deepspeed")
    assert verify(source, ReadOptions(), Depth.DEEP).intact
    assert compare(source, tmp_path / "tp2").equal


def test_scales_of_chained_optimizers_that_went_apart_are_lost(tmp_path: Path) -> None:
    source = copied("ep2dp2_moe_seq_bf16_do", tmp_path)
    for path in source.rglob(MODEL):
        with edited(path) as tree:
            for member, scale in zip(tree["optimizer"], (1.0, 9.0), strict=True):
                member["grad_scaler"] = {"scale": torch.tensor([scale]), "growth_tracker": 1, "hysteresis_tracker": 2}
    job = prepare(source, replace(options(), to="megatron"))
    assert any("optimizer.1.grad_scaler" in text for text in job.account.lost)


GOLDEN_KINDS = GOLDENS.parent
COPIES = {
    "deepspeed/z3_bf16_frozen_dp2": ("step3/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", "pp_rank_0", "pp_rank_1"),
    "megatron_dist/tp2pp2dp2_fully_reshardable": ("iter_0000002/__1_1.distcp", "__1_", "__5_"),
}


@pytest.mark.parametrize("name", COPIES)
def test_a_file_of_one_rank_in_the_place_of_anothers_is_found(tmp_path: Path, name: str) -> None:
    """All lengths and checksums hold, and so do those of ``.metadata``; only that two ranks cannot have the same."""
    root = Path(shutil.copytree(GOLDEN_KINDS / name, tmp_path / "source", ignore=shutil.ignore_patterns("*_uni*")))
    path, rank, other = COPIES[name]
    shutil.copyfile(root / path, root / path.replace(rank, other))
    assert "byte for byte" in verify(root, ReadOptions()).problems.describe()
    with pytest.raises(Corrupt, match="One is a copy of the other"):
        convert(root, tmp_path / "target", replace(options(), to="dcp"))


def test_learning_rates_and_ranks_that_contradict_each_other_are_named(tmp_path: Path) -> None:
    """A loader takes one of them, without a word; where both are as saved, nothing is said."""
    step = Path(shutil.copytree(GOLDENS.parent / "trainers" / "ac_ds2" / "step_3", tmp_path / "step_3"))
    assert verify(step, ReadOptions()).contradicts == []
    with edited(step / "pytorch_model" / "zero_pp_rank_1_mp_rank_00_optim_states.pt") as tree:
        tree["optimizer_state_dict"]["base_optimizer_state"]["param_groups"][0]["lr"] *= 2
    with edited(step / "scheduler.bin") as tree:
        tree["base_lrs"] = [0.03, 0.03]
    verdict = verify(step, ReadOptions())
    assert verdict.intact
    rates, rank = verdict.contradicts
    assert "base_lrs is [0.03, 0.03], and initial_lr of the param groups is [0.01, 0.01]" in rates
    assert (
        "param_groups.0.lr in pytorch_model/zero_pp_rank_1_mp_rank_00_optim_states.pt, where the file that is taken has something else"
        in rank
    )
    assert any("base_lrs" in str(line) for line in open_checkpoint(step, ReadOptions()).notes.lines)


def test_arguments_that_contradict_each_other_are_named(tmp_path: Path) -> None:
    """Between ranks, and in one file that has no other beside it."""
    many, one = (copied(name, tmp_path / name) for name in (MANY, ONE))
    with edited(many / ITERATION / "mp_rank_01_001" / MODEL) as tree:
        tree["args"].seed = 99
    with edited(one / ITERATION / "mp_rank_00" / MODEL) as tree:
        tree["args"].world_size = 3
    (of_ranks,), (of_degrees,) = (verify(path, ReadOptions()).contradicts for path in (many, one))
    assert (
        of_ranks == "mp_rank_01_001: other arguments than those of mp_rank_00_000, which are taken: seed (99, not 1234)"
    )
    assert "args.world_size is 3, and tensor_model_parallel_size 1" in of_degrees
