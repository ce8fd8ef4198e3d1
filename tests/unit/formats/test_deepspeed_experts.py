"""DeepSpeed's own experts, and stage 0 in tensor-parallel parts: what is read of them, and what is refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mcore_rlhf.convert import convert
from mcore_rlhf.errors import Corrupt, Incomplete, LayoutMismatch, Unsupported
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.formats.deepspeed import FORMAT
from mcore_rlhf.formats.deepspeed.tag import ExpertLayout
from tests.helpers.conversions import options
from tests.helpers.damage import edited, truncate
from tests.unit.formats.deepspeed_refusal import copied, refused

Z2 = "z2_fp32_frozen_dp4"


@pytest.fixture
def bad(tmp_path: Path) -> Callable[[str], Path]:
    """Makes a copy of a golden, to be broken."""
    return lambda name: copied(name, tmp_path / "source")


class TestExperts:
    """Files of DeepSpeed's own experts: here of a model that is not one of experts, with their weights put beside it."""

    NAME = "model.layers.0.mlp.deepspeed_moe.experts.deepspeed_experts.{}.up.weight"

    @pytest.fixture
    def root(self, bad: Callable[[str], Path]) -> Path:
        """Two layers of two experts, without an optimizer's word on them."""
        root = bad("z0_fp32_untied_dp1")
        for layer in range(2):
            for expert in range(2):
                name = self.NAME.replace("0", str(layer)).format(expert)
                file = f"layer_{layer}_expert_{expert}_mp_rank_00_model_states.pt"
                torch.save({name: torch.zeros(2, 3)}, root / "step3" / file)
        with edited(root / "step3" / "mp_rank_00_model_states.pt") as tree:
            tree["num_experts"] = [2, 2]
        return root

    def test_they_are_read(self, root: Path) -> None:
        source = FORMAT.read(root, ReadOptions(optimizer=False))
        spec = source.model.get(self.NAME.replace("0", "1").format(1))
        assert spec is not None
        assert spec.global_shape == (2, 3)

    def test_one_is_missing(self, root: Path) -> None:
        (root / "step3" / "layer_1_expert_1_mp_rank_00_model_states.pt").unlink()
        refused(root, Incomplete, "layer_1_expert_1_mp_rank_00_model_states.pt is missing", "layer 1 has 2 experts")

    def test_the_first_is_missing(self, root: Path) -> None:
        (root / "step3" / "layer_0_expert_0_mp_rank_00_model_states.pt").unlink()
        message = refused(root, Incomplete, "layer_0_expert_0", "experts [0]")
        assert "Traceback" not in message

    def test_one_is_another(self, root: Path) -> None:
        folder = root / "step3"
        shutil.copy(
            folder / "layer_1_expert_0_mp_rank_00_model_states.pt",
            folder / "layer_1_expert_1_mp_rank_00_model_states.pt",
        )
        refused(root, Corrupt, "layer_1_expert_1", "expected parameters of expert 1")

    def test_one_is_cut_off(self, root: Path) -> None:
        truncate(root / "step3" / "layer_0_expert_1_mp_rank_00_model_states.pt", 0.5)
        refused(root, Incomplete, "layer_0_expert_1")

    def test_it_is_no_dictionary(self, root: Path) -> None:
        torch.save([1], root / "step3" / "layer_0_expert_1_mp_rank_00_model_states.pt")
        refused(root, Unsupported, "layer_0_expert_1", "found another object")

    def test_the_optimizer_has_others(self, bad: Callable[[str], Path]) -> None:
        root = bad(Z2)
        with edited(root / "step3" / "mp_rank_00_model_states.pt") as tree:
            tree["param_shapes"][0][self.NAME.format(0)] = torch.Size((2, 3))
        refused(root, Incomplete, "'param_shapes' has model.layers.0.mlp", "no files of its experts")

    @pytest.mark.parametrize(
        ("file", "words"),
        [
            ("expert_0_mp_rank_00_model_states.pt", "without a layer's number"),
            ("layer_0_expert_0_mp_rank_01_model_states.pt", "tensor or pipeline parallelism"),
        ],
    )
    def test_other_kinds(self, root: Path, file: str, words: str) -> None:
        (root / "step3" / file).write_bytes(b"")
        refused(root, Unsupported, file, words)

    def test_autoep(self, root: Path) -> None:
        with edited(root / "step3" / "mp_rank_00_model_states.pt") as tree:
            tree["ds_autoep_layers"] = [{"moe_layer_id": 0}]
        refused(root, Unsupported, "AutoEP", "ds_to_universal")


def test_stage_0_in_tensor_parallel_parts_of_two_runs(bad: Callable[[str], Path], tmp_path: Path) -> None:
    convert(bad("autotp2_z1_bf16_dp1"), tmp_path / "plain", replace(options(zero_stage=0), to="deepspeed"))
    root = tmp_path / "second" / "root"
    shutil.copytree(tmp_path / "plain", root)
    with edited(root / "step3" / "mp_rank_01_model_states.pt") as tree:
        for state in tree["optimizer"]["optimizer_state_dict"]["state"].values():
            state["step"] += 1
    refused(root, LayoutMismatch, "mp_rank_01", "not those of tensor-parallel rank 0")


class TestDealing:
    """Four experts on four ranks: which rank has which, and with whom it shares them.

    DeepSpeed's own example (``utils/groups.py``, ``_create_expert_and_data_parallel``): expert-parallel groups [0, 1], [2, 3],
    expert-data-parallel groups [0, 2], [1, 3].
    """

    LAYER = "moe.deepspeed_moe.experts.deepspeed_experts."

    def layout(self, *, data_first: bool) -> ExpertLayout:
        return ExpertLayout(4, data_first, {self.LAYER: 4}, {self.LAYER: 2})

    def test_neighbours_have_different_experts(self) -> None:
        owners = self.layout(data_first=False).owners((f"{self.LAYER}0.up.weight",))
        assert [list(ranks) for ranks in owners] == [[0, 2], [1, 3]]

    def test_neighbours_have_the_same_experts(self) -> None:
        owners = self.layout(data_first=True).owners((f"{self.LAYER}0.up.weight",))
        assert [list(ranks) for ranks in owners] == [[0, 1], [2, 3]]

    def test_all_ranks_share_what_is_no_expert(self) -> None:
        assert self.layout(data_first=False).owners(("norm.weight",)) == [range(4)]

    def test_names(self) -> None:
        layout = self.layout(data_first=False)
        assert layout.global_name(f"{self.LAYER}1.up.weight", 1) == f"{self.LAYER}3.up.weight"
        assert layout.local_name(f"{self.LAYER}3.up.weight") == f"{self.LAYER}1.up.weight"
        assert layout.global_name("norm.weight", 1) == layout.local_name("norm.weight") == "norm.weight"

    def test_a_group_of_experts_and_others_is_refused(self) -> None:
        with pytest.raises(LayoutMismatch, match="different expert-parallel degrees"):
            self.layout(data_first=False).owners((f"{self.LAYER}0.up.weight", "norm.weight"))


def test_stage_0_in_pipeline_stages(bad: Callable[[str], Path]) -> None:
    """Its optimizer's states have no names, and without ``param_shapes`` nothing says which stage has which layer."""
    root = bad("pp2_z1_fp32_dp2")
    for path in (root / "step3").glob("*optim_states.pt"):
        path.unlink()
    for path in (root / "step3").glob("mp_rank_*"):
        with edited(path) as tree:
            tree.update(param_shapes=None, optimizer={"state": {}, "param_groups": [{"params": []}]})
    refused(root, Unsupported, "stage 0 with PP 2", "ZeRO stage 1")
