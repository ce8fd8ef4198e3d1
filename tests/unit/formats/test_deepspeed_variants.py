"""Variants of native files of which there is no golden, written by a naive writer: other optimizers, orders, wrappers and odd shapes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rlhf.convert import convert
from mcore_rlhf.core.catalog import PARAM, TensorName
from mcore_rlhf.core.plan import check_tiles
from mcore_rlhf.errors import Incomplete, LayoutMismatch, Unsupported
from mcore_rlhf.families.options import ReadOptions, WriteOptions
from mcore_rlhf.families.source import Source
from mcore_rlhf.formats.deepspeed import FORMAT
from mcore_rlhf.models.spec import ParamRule, Rules
from tests.helpers.conversions import options
from tests.helpers.damage import edited
from tests.helpers.deepspeed_goldens import assembled, tensor
from tests.helpers.plain_load import plain_load
from tests.helpers.zero_reader import MASTER, read_zero
from tests.helpers.zero_writer import Recipe, whole_tensors, write_zero
from tests.unit.formats.deepspeed_refusal import copied

SHAPES: dict[str, tuple[int, ...]] = {
    "embed.weight": (7, 5), "layers.0.w": (3, 4, 2), "layers.0.b": (4,), "layers.1.w": (3, 4, 2), "layers.1.b": (4,),
    "temperature": (), "head.bias": (1,),
}  # fmt: skip
GROUPS = [["embed.weight", "layers.0.w", "layers.1.w"], ["layers.0.b", "layers.1.b"], ["temperature", "head.bias"]]
ADAM = ("exp_avg", "exp_avg_sq")
BUFFERS = {"scale": torch.tensor([1.5, 2.5]), "count": torch.tensor(7)}
FROZEN = {
    "old.weight": torch.arange(12.0).reshape(3, 4),
    "old.scalar": torch.tensor(2.5),
    "old.empty": torch.empty(0, 3),
}


def recipe(keys: tuple[str, ...] = ADAM, **more: Any) -> Recipe:
    return Recipe(whole_tensors(SHAPES, keys), [list(group) for group in GROUPS], buffers=dict(BUFFERS), **more)


def read(root: Path) -> Source:
    return FORMAT.read(root, ReadOptions())


def rewritten(root: Path, stage: int, dp: int) -> Path:
    target = root.parent / f"target_{stage}_{dp}"
    convert(root, target, replace(options(zero_stage=stage, dp=dp), to="deepspeed"))
    return target


def assert_holds(source: Source, wanted: Recipe, *, masters: bool = True) -> None:
    for (param, state), whole in wanted.tensors.items():
        found = tensor(source, param, state)
        if state == MASTER and not masters and found is None:
            found = tensor(source, param, PARAM)
        assert found is not None, (param, state)
        assert torch.equal(found, whole), (param, state)
        entry = source.catalog.get(TensorName(source.role, param, state))
        assert entry is None or check_tiles(entry) is None
    assert [list(group.params) for group in source.state.groups] == wanted.groups
    for name, value in {**wanted.buffers, **wanted.frozen}.items():
        entry = source.catalog.get(TensorName(source.role, name, PARAM))
        assert entry is not None
        assert torch.equal(assembled(source.root, entry), value), name


VARIANTS: dict[str, dict[str, Any]] = {
    "every group has ranks with padding only": {"dp": 9},
    "stage 3, more ranks than elements": {"stage": 3, "dp": 9},
    "frozen, with a scalar and an empty one": {"frozen": FROZEN, "dp": 3},
    "frozen in stage 3": {"frozen": FROZEN, "stage": 3, "dp": 3},
    "tied": {"shared": {"lm_head.weight": "embed.weight"}},
    "round robin": {"round_robin": True, "dp": 2},
    "round robin, more ranks than parameters": {"round_robin": True, "dp": 5, "stage": 1},
    "aligned": {"align": 4, "dp": 3},
    "BF16_Optimizer": {"bf16_optimizer": True, "stage": 1, "dtype": torch.bfloat16, "dp": 3},
    "fp16": {"dtype": torch.float16},
    "Lion": {"keys": ("exp_avg",)},
    "SGD with momentum": {"keys": ("momentum_buffer",), "scalars": {}},
    "SGD, whose optimizer has no state": {"keys": (), "scalars": {}},
    "AMSGrad": {"keys": (*ADAM, "max_exp_avg_sq"), "stage": 3},
    "several scalars": {"scalars": {"step": 3, "mu": torch.tensor(0.5)}},
}


@pytest.mark.parametrize("what", VARIANTS)
def test_a_variant_is_read_and_written_to_other_stages(what: str, tmp_path: Path) -> None:
    wanted = recipe(**VARIANTS[what])
    root = write_zero(tmp_path / "source", wanted)
    assert_holds(read(root), wanted)
    for stage, dp in ((3, 2), (2, 4), (0, 1)):
        target = rewritten(root, stage, dp)
        assert_holds(read(target), wanted, masters=stage > 0)
        merged = read_zero(target / "global_step3")
        states = {key: whole for key, whole in merged.states.items() if key[1] not in wanted.scalars}
        for (param, state), whole in states.items():
            assert torch.equal(whole, wanted.tensors[param, state]), (param, state)
        assert set(states) == {
            key for key in wanted.tensors if stage > 0 or key[1] != MASTER or wanted.dtype != torch.float32
        }


def test_round_robin_is_dealt_anew_for_another_degree(tmp_path: Path) -> None:
    root = write_zero(tmp_path / "source", recipe(round_robin=True, dp=2))
    shapes = read_zero(rewritten(root, 2, 3) / "global_step3").top["param_shapes"]
    assert [list(group) for group in shapes] == GROUPS
    many = write_zero(
        tmp_path / "many",
        Recipe(whole_tensors(dict.fromkeys("abcde", (2,)), ADAM), [list("abcde")], dp=1, round_robin=True),
    )
    shapes = read_zero(rewritten(many, 2, 2) / "global_step3").top["param_shapes"]
    assert [list(group) for group in shapes] == [list("acebd")]


def test_alignment_is_kept_as_the_config_asks(tmp_path: Path) -> None:
    root = write_zero(tmp_path / "source", recipe(align=4, dp=1))
    osd = _optimizer(rewritten(root, 2, 2))
    assert osd["param_alignment_paddings"] == [[1, 0, 0], [0, 0], [3, 0]]


def _optimizer(root: Path) -> dict[str, Any]:
    from tests.helpers.plain_load import plain_load

    (first, *_) = sorted((root / "global_step3").glob("*zero_pp_rank_0_*optim_states.pt"))
    found: dict[str, Any] = plain_load(first)["optimizer_state_dict"]
    return found


def test_an_elastic_checkpoint_is_read(tmp_path: Path) -> None:
    wanted = recipe(elastic=True, dp=3)
    source = read(write_zero(tmp_path / "source", wanted))
    assert_holds(source, wanted)
    assert [dict(group.fields) for group in source.state.groups] == [{"step": 3}] * 3


def test_an_elastic_checkpoint_has_no_settings_to_write(tmp_path: Path) -> None:
    root = write_zero(tmp_path / "source", recipe(elastic=True))
    with pytest.raises(Incomplete, match="has no settings"):
        rewritten(root, 2, 1)


def test_sub_groups_follow_the_config(tmp_path: Path) -> None:
    root = write_zero(tmp_path / "source", recipe(stage=3, dp=2))
    for file in (root / "global_step3").glob("*model_states.pt"):
        with edited(file) as tree:
            tree["ds_config"]["zero_optimization"]["sub_group_size"] = 20
    merged = read_zero(rewritten(root, 3, 1) / "global_step3")
    names = [list(group) for group in merged.top["param_shapes"]]
    assert names == [["embed.weight"], ["layers.0.w"], ["layers.1.w"], *GROUPS[1:]]
    assert merged.groups == GROUPS


def test_the_fused_fp16_optimizer_of_stage_0_has_flat_groups(tmp_path: Path) -> None:
    source = recipe(dtype=torch.float16)
    root = write_zero(tmp_path / "source", source)
    with edited(root / "global_step3" / "mp_rank_00_model_states.pt") as tree:
        tree["ds_config"]["optimizer"] = {"type": "AdamW", "params": {}}
    target = rewritten(root, 0, 1)
    (target / "mcore_rlhf.json").unlink()  # edited() writes the file anew
    with edited(target / "global_step3" / "mp_rank_00_model_states.pt") as tree:
        optimizer = tree["optimizer"]
        assert [flat.shape for flat in optimizer["fp32_groups_flat"]] == [(83,), (8,), (2,)]
        assert optimizer["optimizer_state_dict"]["state"][2]["exp_avg"].shape == (2,)
        assert optimizer["clip_grad"] == 1.0
    assert_holds(read(target), source)
    assert_holds(read(rewritten(target, 2, 3)), source)


def test_dynamic_loss_scales_go_through_every_stage(tmp_path: Path) -> None:
    root = write_zero(tmp_path / "source", recipe(dtype=torch.float16))
    from tests.helpers.plain_load import Unknown

    state = {
        "cur_scale": 256.0,
        "cur_iter": 9,
        "last_overflow_iter": 4,
        "scale_factor": 2.0,
        "scale_window": 500,
        "dynamic": True,
    }
    name = "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"
    scaler = type("DynamicLossScaler", (Unknown,), {"full_name": name})()
    scaler.__setstate__(state)
    for file in (root / "global_step3").glob("*optim_states.pt"):
        with edited(file) as tree:
            tree["optimizer_state_dict"] |= {"loss_scaler": scaler, "dynamic_loss_scale": True}
    plain = rewritten(root, 0, 1)
    (plain / "mcore_rlhf.json").unlink()  # edited() writes the file anew
    with edited(plain / "global_step3" / "mp_rank_00_model_states.pt") as tree:
        assert tree["optimizer"]["dynamic_loss_scale"] is True
        assert {key: tree["optimizer"][key] for key in state if key != "dynamic"} == {
            k: v for k, v in state.items() if k != "dynamic"
        }
    back = _optimizer(rewritten(plain, 3, 2))
    assert back["dynamic_loss_scale"] is True
    assert back["loss_scaler"].full_name == name
    assert state.items() <= back["loss_scaler"].state.items()


Edit = Callable[[Any], None]


def _nameless(root: Path, edit: Edit = lambda tree: None) -> Path:
    """A stage-0 file as DeepSpeed writes it: without names."""
    with edited(root / "global_step3" / "mp_rank_00_model_states.pt") as tree:
        tree["param_shapes"] = None
        edit(tree)
    return root


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nameless_states_are_told_apart_by_shape(dtype: torch.dtype, tmp_path: Path) -> None:
    groups = [["embed.weight", "layers.0.w", "layers.1.w"], ["layers.0.b", "layers.1.b", "head.bias"]]
    shapes = {name: SHAPES[name] for group in groups for name in group}
    wanted = Recipe(whole_tensors(shapes, ADAM), groups, dtype=dtype)
    root = _nameless(rewritten(write_zero(tmp_path / "source", wanted), 0, 1))
    assert_holds(read(root), wanted, masters=False)


def test_nameless_states_are_told_apart_by_their_masters(tmp_path: Path) -> None:
    """Shapes leave it open which of two equal layers is frozen, and which is in which group; values do not."""
    shapes = {f"layers.{i}.w": (2, 3) for i in range(6)}
    groups = [["layers.1.w", "layers.4.w"], ["layers.2.w"]]
    wanted = Recipe(
        whole_tensors({n: shapes[n] for group in groups for n in group}, ADAM), groups, dtype=torch.bfloat16,
        frozen={n: torch.randn(2, 3).bfloat16() for n in shapes if n not in ("layers.1.w", "layers.4.w", "layers.2.w")},
    )  # fmt: skip
    root = _nameless(rewritten(write_zero(tmp_path / "source", wanted), 0, 1))
    assert_holds(read(root), wanted)


def test_nameless_states_that_nothing_tells_apart_are_refused_until_rules_do(tmp_path: Path) -> None:
    groups = [["layers.1.w"], ["layers.2.w"]]
    wanted = Recipe(
        whole_tensors({"layers.1.w": (2, 3), "layers.2.w": (2, 3)}, ADAM),
        groups,
        frozen={"layers.0.w": torch.randn(2, 3)},
    )
    root = _nameless(rewritten(write_zero(tmp_path / "source", wanted), 0, 1))
    with pytest.raises(Unsupported, match="more than one choice"):
        read(root)
    rules = Rules((ParamRule("layers.0.*", trainable=False), ParamRule("layers.1.*", wd_mult=0.0)))
    assert_holds(FORMAT.read(root, ReadOptions(rules=rules)), wanted, masters=False)


def test_nameless_states_that_fit_nothing_are_refused(tmp_path: Path) -> None:
    root = rewritten(write_zero(tmp_path / "source", recipe()), 0, 1)

    def shrink(tree: Any) -> None:
        for state in tree["optimizer"]["state"].values():
            if state["exp_avg"].shape == (7, 5):
                state.update(exp_avg=torch.zeros(6, 5), exp_avg_sq=torch.zeros(6, 5))

    with pytest.raises(Unsupported, match="no choice of parameters"):
        read(_nameless(root, shrink))


def test_torch_may_have_kept_the_names(tmp_path: Path) -> None:
    groups = [["layers.1.w"], ["layers.2.w"]]
    wanted = Recipe(
        whole_tensors({"layers.1.w": (2, 3), "layers.2.w": (2, 3)}, ADAM),
        groups,
        frozen={"layers.0.w": torch.randn(2, 3)},
    )
    root = rewritten(write_zero(tmp_path / "source", wanted), 0, 1)

    def name(tree: Any) -> None:
        for group, names in zip(tree["optimizer"]["param_groups"], groups, strict=True):
            group["param_names"] = names

    assert_holds(read(_nameless(root, name)), wanted, masters=False)


def test_different_steps_in_one_group_are_refused(tmp_path: Path) -> None:
    root = rewritten(write_zero(tmp_path / "source", recipe()), 0, 1)
    with edited(root / "global_step3" / "mp_rank_00_model_states.pt") as tree:
        tree["optimizer"]["state"][1]["step"] += 1
    with pytest.raises(LayoutMismatch, match=r"step of layers\.0\.w is tensor"):
        read(root)


def test_client_state_of_every_stage_3_rank_stays_with_its_rank_or_is_said_to_be_lost(tmp_path: Path) -> None:
    root = write_zero(tmp_path / "source", recipe(stage=3, dp=2, client={"rng": torch.zeros(4)}))
    with edited(root / "global_step3" / "zero_pp_rank_1_mp_rank_00_model_states.pt") as tree:
        tree["rng"] = torch.ones(4)
    kept = rewritten(root, 3, 2) / "global_step3"
    for rank in range(2):
        with edited(kept / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt") as tree:
            assert tree["rng"].tolist() == [rank] * 4
    assert FORMAT.target(read(root), WriteOptions()).report.lost == []
    (lost,) = FORMAT.target(read(root), WriteOptions(dp=3)).report.lost
    assert lost.endswith("only rank 0's: rng")


def test_other_values_in_a_layers_file_are_read_from_that_file(tmp_path: Path) -> None:
    """A layer's extra state may hold tensors of its own, whose records lie beside the layer's weights."""
    root, name = copied("pp2_z1_fp32_dp2", tmp_path / "source"), "layer_01-model_states.pt"
    with edited(root / "step3" / name) as tree:
        tree["self_attn._extra_state"] = {"scale": torch.arange(3.0)}
    convert(root, tmp_path / "out", replace(options(), to="deepspeed"))
    written = plain_load(tmp_path / "out" / "step3" / name)
    assert torch.equal(written["self_attn._extra_state"]["scale"], torch.arange(3.0))
