"""DeepSpeed folders that are incomplete, mixed up or damaged: one clear error, nothing written, the source untouched."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rlhf.errors import (
    Corrupt,
    Incomplete,
    LayoutMismatch,
    NotACheckpoint,
    Unsupported,
    Untrusted,
    UsageError,
)
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.formats.registry import detect
from mcore_rlhf.verify.checkpoint import Depth, verify
from tests.helpers.damage import edited, flip, truncate
from tests.helpers.deepspeed_goldens import GOLDENS
from tests.helpers.plain_load import plain_load, plain_save
from tests.unit.formats.deepspeed_refusal import copied, refused

Z2, Z3 = "z2_fp32_frozen_dp4", "z3_bf16_frozen_dp2"


@pytest.fixture
def bad(tmp_path: Path) -> Callable[[str], Path]:
    """Makes a copy of a golden, to be broken."""
    return lambda name: copied(name, tmp_path / "source")


class TestMissing:
    @pytest.mark.parametrize(
        ("name", "file"),
        [
            (Z2, "zero_pp_rank_2_mp_rank_00_optim_states.pt"),
            (Z3, "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"),
            (Z3, "zero_pp_rank_1_mp_rank_00_model_states.pt"),
            ("pp2_z1_fp32_dp2", "mp_rank_01_model_states.pt"),
        ],
    )
    def test_a_ranks_file(self, bad: Callable[[str], Path], name: str, file: str) -> None:
        root = bad(name)
        (root / "step3" / file).unlink()
        message = refused(root, Incomplete, file, "missing", "Copy the checkpoint again")
        assert "Traceback" not in message

    def test_all_optimizer_files(self, bad: Callable[[str], Path]) -> None:
        root = bad(Z2)
        for path in (root / "step3").glob("*optim_states.pt"):
            path.unlink()
        refused(root, Incomplete, "no …_optim_states.pt file", "Copy them as well", "--no-optimizer")
        path = root / "step3" / "mp_rank_00_model_states.pt"
        tree = torch.load(path, weights_only=False)
        tree["ds_config"]["zero_optimization"]["stage"] = 0
        torch.save(tree, path)
        refused(root, Incomplete, "DeepSpeed 0.17 never wrote them", "--no-optimizer")

    def test_all_layer_files(self, bad: Callable[[str], Path]) -> None:
        root = bad("pp2_z1_fp32_dp2")
        for path in (root / "step3").glob("layer_*"):
            path.unlink()
        refused(root, Incomplete, "layer_XX-model_states.pt")

    def test_one_layer_file(self, bad: Callable[[str], Path]) -> None:
        root = bad("pp2_z1_fp32_dp2")
        (root / "step3" / "layer_04-model_states.pt").unlink()
        refused(root, Incomplete, "4.self_attn.q_proj.weight", "'param_shapes' has")

    def test_the_tag_that_latest_names(self, bad: Callable[[str], Path]) -> None:
        root = bad(Z2)
        (root / "latest").write_text("global_step99\n")
        refused(root, NotACheckpoint, "'global_step99'", "found step3")
        refused(root, NotACheckpoint, "no tag ends in 7", read=ReadOptions(step=7))

    def test_latest_itself(self, bad: Callable[[str], Path]) -> None:
        root = bad(Z2)
        (root / "latest").unlink()
        refused(root, UsageError, "no file 'latest'", "found step3", "--step")

    def test_every_tag(self, tmp_path: Path) -> None:
        (tmp_path / "root").mkdir()
        (tmp_path / "root" / "latest").write_text("step3")
        with pytest.raises(NotACheckpoint):
            detect(tmp_path / "root")

    def test_a_state_of_one_rank(self, bad: Callable[[str], Path]) -> None:
        root = bad(Z2)
        with edited(root / "step3" / "zero_pp_rank_1_mp_rank_00_optim_states.pt") as tree:
            del tree["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["exp_avg"]
        refused(root, Incomplete, "zero_pp_rank_1", "has no exp_avg")

    def test_masters(self, bad: Callable[[str], Path]) -> None:
        root = bad(Z3)
        for path in (root / "step3").glob("*optim_states.pt"):
            with edited(path) as tree:
                tree["optimizer_state_dict"]["fp32_flat_groups"] = []
        refused(root, Unsupported, "has no fp32 masters")

    def test_a_slice_of_a_frozen_parameter(self, bad: Callable[[str], Path]) -> None:
        root = bad(Z3)
        with edited(root / "step3" / "zero_pp_rank_1_mp_rank_00_model_states.pt") as tree:
            del tree["frozen_param_fragments"]["model.embed_tokens.weight"]
        refused(root, Incomplete, "zero_pp_rank_1", "model.embed_tokens.weight", "670 elements, found none")

    def test_the_shapes(self, bad: Callable[[str], Path]) -> None:
        root = bad(Z2)
        with edited(root / "step3" / "mp_rank_00_model_states.pt") as tree:
            tree["param_shapes"] = None
        refused(root, Unsupported, "has no 'param_shapes'")


class TestMixed:
    def test_a_rank_too_many(self, bad: Callable[[str], Path]) -> None:
        root = bad(Z2)
        folder = root / "step3"
        shutil.copy(
            folder / "zero_pp_rank_3_mp_rank_00_optim_states.pt", folder / "zero_pp_rank_4_mp_rank_00_optim_states.pt"
        )
        refused(root, LayoutMismatch, "zero_pp_rank_4", "did not have")

    def test_optimizer_files_of_another_world_size(self, bad: Callable[[str], Path]) -> None:
        root = bad(Z2)
        with edited(root / "step3" / "zero_pp_rank_1_mp_rank_00_optim_states.pt") as tree:
            tree["optimizer_state_dict"]["partition_count"] = [8, 8]
        refused(root, LayoutMismatch, "zero_pp_rank_1", "cut for 8", "say 4")

    def test_model_files_of_different_steps(self, bad: Callable[[str], Path]) -> None:
        root = bad(Z3)
        with edited(root / "step3" / "zero_pp_rank_1_mp_rank_00_model_states.pt") as tree:
            tree["global_steps"] = 2
        refused(root, LayoutMismatch, "zero_pp_rank_1", "global_steps is 2, but 3")

    def test_optimizer_files_of_different_steps(self, bad: Callable[[str], Path]) -> None:
        root = bad(Z2)
        with edited(root / "step3" / "zero_pp_rank_3_mp_rank_00_optim_states.pt") as tree:
            tree["optimizer_state_dict"]["base_optimizer_state"]["state"][1]["step"] += 1
        refused(root, LayoutMismatch, "zero_pp_rank_3", "step of the flat group", "Files of different steps")

    def test_stages(self, bad: Callable[[str], Path]) -> None:
        root = bad(Z2)
        for path in (GOLDENS / Z3 / "step3").glob("zero_pp_rank_*model_states.pt"):
            shutil.copy(path, root / "step3")
        refused(root, LayoutMismatch, "(stages 0 to 2)", "(stage 3)")

    def test_dtypes(self, bad: Callable[[str], Path]) -> None:
        root = bad(Z2)
        for path in (GOLDENS / Z3 / "step3").glob("bf16_*"):
            shutil.copy(path, root / "step3")
        refused(root, LayoutMismatch, "holds both", "bf16_zero_pp_rank_0")

    def test_optimizers_of_another_model(self, bad: Callable[[str], Path]) -> None:
        root = bad("z2_bf16_ac_dp2")
        for path in (GOLDENS / "z2_bf16_frozen_excluded_dp2" / "step3").glob("*optim_states.pt"):
            shutil.copy(path, root / "step3")
        refused(root, LayoutMismatch, "zero_pp_rank_0", "elements; its 24 parameters over 2 ranks make")

    def test_mappings_that_contradict_the_order(self, bad: Callable[[str], Path]) -> None:
        root = bad(Z2)
        with edited(root / "step3" / "mp_rank_00_model_states.pt") as tree:
            tree["param_shapes"][0].move_to_end(next(iter(tree["param_shapes"][0])))
        refused(root, LayoutMismatch, "param_slice_mappings", "q_proj.weight")

    @pytest.mark.parametrize("numel", ["20", (), None])
    def test_mappings_of_another_form(self, bad: Callable[[str], Path], numel: Any) -> None:
        root = bad(Z2)
        with edited(root / "step3" / "zero_pp_rank_0_mp_rank_00_optim_states.pt") as tree:
            address = next(iter(tree["optimizer_state_dict"]["param_slice_mappings"][0].values()))
            address.state["numel"] = numel
        refused(
            root, Unsupported, "zero_pp_rank_0", "param_slice_mappings of group 0", "expected the start and the length"
        )

    def test_a_module_of_another_model(self, bad: Callable[[str], Path]) -> None:
        root = bad(Z2)
        with edited(root / "step3" / "mp_rank_00_model_states.pt") as tree:
            tree["module"]["lm_head.weight"] = torch.zeros(68, 20)
        refused(root, Corrupt, "lm_head.weight", "(68, 20)", "(67, 20)")


class TestDamaged:
    @pytest.mark.parametrize("fraction", [0.0, 0.3, 0.95])
    def test_a_file_that_is_cut_off(self, bad: Callable[[str], Path], fraction: float) -> None:
        root = bad(Z2)
        truncate(root / "step3" / "zero_pp_rank_2_mp_rank_00_optim_states.pt", fraction)
        refused(root, Incomplete, "zero_pp_rank_2_mp_rank_00_optim_states.pt")

    def test_a_flipped_bit_in_a_moment(self, bad: Callable[[str], Path]) -> None:
        root = bad(Z2)
        flip(root / "step3" / "zero_pp_rank_2_mp_rank_00_optim_states.pt", "data/1", 17)
        refused(root, Corrupt, "zero_pp_rank_2", "data/1")

    def test_a_master_that_is_not_its_weight(self, bad: Callable[[str], Path]) -> None:
        root = bad("z2_bf16_ac_dp2")
        with edited(root / "step3" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt") as tree:
            tree["optimizer_state_dict"]["single_partition_of_fp32_groups"][0].data[0] += 1
        refused(root, Corrupt, "not their fp32 master")

    def test_another_object(self, bad: Callable[[str], Path]) -> None:
        root = bad(Z2)
        path = root / "step3" / "mp_rank_00_model_states.pt"
        path.unlink()
        torch.save([1, 2], path)
        refused(root, Unsupported, "mp_rank_00_model_states.pt", "found another object")

    @pytest.mark.parametrize("value", [None, 0, "2", 1 << 40])
    def test_no_world_size(self, bad: Callable[[str], Path], value: Any) -> None:
        root = bad(Z2)
        with edited(root / "step3" / "mp_rank_00_model_states.pt") as tree:
            tree["dp_world_size"] = value
        refused(root, Unsupported, "dp_world_size")

    @pytest.mark.parametrize(
        ("key", "value", "said"),
        [
            ("module", {2.5: None}, "a key of module should be a text, found 2.5"),
            ("param_shapes", [{"w": [None]}], "param_shapes[0].w[0] should be a whole number, found None"),
            ("buffer_names", [()], "buffer_names[0] should be a text"),
            ("shared_params", {"a": 1}, "shared_params.a should be a text"),
            ("universal_checkpoint_info", {"affine_map": {"params": {"w": {}}}}, "a dictionary with 'logical_shape'"),
        ],
    )
    def test_values_of_other_types_in_a_model_file(
        self, bad: Callable[[str], Path], key: str, value: Any, said: str
    ) -> None:
        root = bad(Z2)
        with edited(root / "step3" / "mp_rank_00_model_states.pt") as tree:
            tree[key] = value
        refused(root, Unsupported, "mp_rank_00_model_states.pt", said)

    @pytest.mark.parametrize(
        ("key", "value", "said"),
        [
            ("param_alignment_paddings", [[None]], "param_alignment_paddings[0][0] should be a whole number"),
            ("single_partition_of_fp32_groups", [3], "single_partition_of_fp32_groups[0] should be a tensor"),
            (
                "base_optimizer_state",
                {"state": {}, "param_groups": [{}]},
                "param_groups[0] should be a dictionary with 'params'",
            ),
        ],
    )
    def test_values_of_other_types_in_an_optimizer_file(
        self, bad: Callable[[str], Path], key: str, value: Any, said: str
    ) -> None:
        root = bad(Z2)
        with edited(root / "step3" / "zero_pp_rank_1_mp_rank_00_optim_states.pt") as tree:
            tree["optimizer_state_dict"][key] = value
        refused(root, Unsupported, "zero_pp_rank_1_mp_rank_00_optim_states.pt", said)

    def test_a_pickle_that_wants_to_run_code(self, bad: Callable[[str], Path]) -> None:
        root = bad(Z2)
        path = root / "step3" / "mp_rank_00_model_states.pt"
        tree = plain_load(path)
        path.unlink()
        plain_save({**tree, "hook": print}, path)
        refused(root, Untrusted, "print")


def test_tensor_parallel_files_without_a_word_on_how_they_are_cut(bad: Callable[[str], Path]) -> None:
    root = bad("autotp2_z1_bf16_dp1")
    for path in (root / "step3").glob("*model_states.pt"):
        with edited(path) as tree:
            del tree["universal_checkpoint_info"]
    refused(root, LayoutMismatch, "TP 2", "--rules")


def test_a_parameter_that_autotp_itself_gives_up(bad: Callable[[str], Path]) -> None:
    root = bad("autotp2_z1_bf16_dp1")
    for path in (root / "step3").glob("*model_states.pt"):
        with edited(path) as tree:
            tree["universal_checkpoint_info"]["autotp_unsupported_parameter_patterns"] = {r"^lm_head\.weight$": "odd"}
    refused(root, Unsupported, "lm_head.weight", "AutoTP itself")


def test_mics_is_refused_by_name(bad: Callable[[str], Path]) -> None:
    root = bad(Z3)
    for path in (root / "step3").glob("*model_states.pt"):
        with edited(path) as tree:
            tree["ds_config"]["zero_optimization"]["mics_shard_size"] = 1
    refused(root, Unsupported, "MiCS", "mics_shard_size 1")


@pytest.mark.parametrize("kind", ["model", "optim"])
def test_two_ranks_whose_files_were_swapped(bad: Callable[[str], Path], kind: str) -> None:
    """Stage 3 has no parameters against which slices of masters could be held."""
    root = bad(Z3)
    first, second = sorted((root / "step3").glob(f"*zero_pp_rank_*_{kind}_states.pt"))
    aside = first.rename(first.with_suffix(".aside"))
    second.rename(first)
    aside.rename(second)
    problems = verify(root, ReadOptions(), Depth.DEEP).problems.describe()
    assert f"{first.name}: was written as step3/{second.name}" in problems
    assert f"{second.name}: was written as step3/{first.name}" in problems
