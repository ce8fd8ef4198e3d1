"""Genuine DeepSpeed checkpoints: the catalogue against what DeepSpeed itself gathered, and against a naive merge."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from mcore_rlhf.core.catalog import PARAM
from mcore_rlhf.core.plan import check_tiles
from mcore_rlhf.families.module import ModuleState
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.formats.deepspeed import FORMAT
from mcore_rlhf.formats.registry import open_checkpoint
from mcore_rlhf.verify.checkpoint import Depth, verify
from tests.helpers.damage import edited
from tests.helpers.deepspeed_goldens import GOLDENS, NAMES, WITH_EXPECTATION, expected, opened, tag, tensor
from tests.helpers.zero_reader import MASTER, read_zero

STAGES = {"z0": "zero0", "z1": "zero1", "z2": "zero2", "z3": "zero3", "pp": "zero1", "au": "zero1"}
REPLICATED = ("layernorm", "norm.", "embed_tokens", "lm_head")


@pytest.mark.parametrize("name", WITH_EXPECTATION)
def test_every_state_is_what_deepspeed_gathered_from_the_running_engine(name: str) -> None:
    source = opened(name)
    for key, whole in expected(name)["state"].items():
        param, _, state = key.rpartition("/")
        found = tensor(source, param, MASTER if state == "fp32" else state)
        if found is None:  # stage 0 in fp32: the parameter is its own master
            assert (source.optimizer, state) == ("zero0", "fp32")
            found = tensor(source, param, PARAM)
        assert found is not None
        assert torch.equal(found.reshape(-1), whole.reshape(-1)), key


@pytest.mark.parametrize("name", WITH_EXPECTATION)
def test_groups_hold_the_parameters_that_they_held_in_the_engine(name: str) -> None:
    groups = opened(name).state.groups
    assert [list(group.params) for group in groups] == expected(name)["groups"]
    assert [group.fields["weight_decay"] for group in groups] == [0.1, 0.0]
    assert [group.scalars for group in groups] == [("step",), ("step",)]
    step = 4.0 if name == "z0_bf16_tied_dp2" else 3.0  # DeepSpeed takes one step more there, when it makes the states
    assert [float(group.fields["step"]) for group in groups] == [step, step]  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [name for name in WITH_EXPECTATION if not name.startswith("z0")])
def test_the_module_is_what_a_naive_merge_finds(name: str) -> None:
    merged, source = read_zero(tag(name)), opened(name)
    assert isinstance(source.family, ModuleState)
    stored = {n for n in merged.param if n not in source.family.shared}
    assert stored == {n.param for n in source.catalog if n.state == PARAM}
    for param in stored:
        found = tensor(source, param, PARAM)
        assert found is not None
        assert torch.equal(found, merged.param[param]), param
        assert found.dtype == merged.param[param].dtype
    for (param, state), whole in merged.states.items():
        assert torch.equal(tensor(source, param, state), whole), (param, state)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", NAMES)
def test_tensors_are_tiled_and_every_byte_copy_and_master_agrees(name: str) -> None:
    source = opened(name)
    assert [n for n in source.catalog if (e := source.catalog.get(n)) is None or check_tiles(e)] == []
    verdict = verify(tag(name), ReadOptions(), Depth.DEEP)
    assert verdict.intact, verdict.problems.describe()
    assert verdict.nbytes > 50_000


@pytest.mark.parametrize("name", NAMES)
def test_what_it_is(name: str) -> None:
    source, recipe = opened(name), json.loads((GOLDENS / name / "recipe.json").read_text())
    parallel = source.parallel
    assert (parallel.dp, parallel.pp, parallel.tp) == (recipe["dp"], recipe["pp"], recipe["tp"])
    assert source.optimizer == STAGES[name[:2]] == f"zero{recipe['stage']}"
    assert source.state.iteration == 3
    assert source.state.scheduler == (None if name.startswith("autotp") else {"last_batch_iteration": 2})
    assert source.state.other["ppo_iteration"] == 21
    assert source.state.other["nested"] == {"samples": [1, 2, 3], "name": "x", "means": (0.5, -1.25)}
    assert source.state.other["rng_state"].shape == (5056,)  # type: ignore[attr-defined]
    assert source.state.args["zero_optimization"]["stage"] == recipe["stage"]  # type: ignore[index]


def test_ties_are_one_parameter() -> None:
    for name in ("z0_bf16_tied_dp2", "z1_fp32_tied_dp2", "z3_fp32_tied_subgroups_dp4"):
        source = opened(name)
        assert isinstance(source.family, ModuleState)
        assert dict(source.family.shared) == {"lm_head.weight": "model.embed_tokens.weight"}
        assert source.model.tied
        assert source.model.get("lm_head.weight") is None
    assert not opened("z0_fp32_untied_dp1").model.tied


@pytest.mark.parametrize("name", ["z2_fp32_frozen_dp4", "z3_bf16_frozen_dp2"])
def test_frozen_parameters_and_buffers_are_not_trained(name: str) -> None:
    source = opened(name)
    assert isinstance(source.family, ModuleState)
    assert source.family.buffers == ("model.scale_buf", "model.step_buf")
    frozen = [s.name for s in source.model.params if not s.trainable and s.name not in source.family.buffers]
    assert len(frozen) == 15
    assert all("embed_tokens" in n or "layers.0." in n for n in frozen)
    step = tensor(source, "model.step_buf", PARAM)
    assert step is not None
    assert (step.shape, step.dtype, int(step)) == ((), torch.int64, 5)


def test_excluded_frozen_parameters_are_not_there() -> None:
    source = opened("z2_bf16_frozen_excluded_dp2")
    assert {s.name for s in source.model.params if not s.trainable} == {"model.scale_buf", "model.step_buf"}


def test_stage_3_weights_can_be_read_without_the_optimizer() -> None:
    source = FORMAT.read(tag("z3_bf16_frozen_dp2"), ReadOptions(optimizer=False))
    assert (source.optimizer, source.states, source.state.groups) == (None, (), ())
    assert {name.state for name in source.catalog} == {PARAM}
    for key, whole in expected("z3_bf16_frozen_dp2")["state"].items():
        param, _, state = key.rpartition("/")
        if state == "fp32":
            assert torch.equal(tensor(source, param, PARAM), whole.reshape(tensor(source, param, PARAM).shape))  # type: ignore[arg-type,union-attr]


def test_a_pipeline_has_its_layers_and_the_tied_embedding_twice() -> None:
    source = opened("pp2_z1_fp32_dp2")
    stages = [read_zero(tag("pp2_z1_fp32_dp2"), rank) for rank in range(2)]
    for stage in stages:
        for (param, state), whole in stage.states.items():
            assert torch.equal(tensor(source, param, state), whole), (param, state)  # type: ignore[arg-type]
    assert {n.param for n in source.catalog} == {param for stage in stages for param, _ in stage.states}
    tied = source.catalog.get(next(n for n in source.catalog if n.param.startswith("tied_modules.")))
    assert tied is not None
    assert source.model.num_layers == 0  # numbers of pipeline layers are no decoder layers
    assert "rng_state" in source.notes.lines[0][1]


def test_tensor_parallel_parts_are_put_together() -> None:
    source = opened("autotp2_z1_bf16_dp1")
    ranks = [read_zero(tag("autotp2_z1_bf16_dp1"), rank) for rank in range(2)]
    for param, state in ranks[0].states:
        parts = [rank.states[param, state] for rank in ranks]
        dim = 1 if "o_proj" in param or "down_proj" in param else 0
        whole = parts[0] if any(word in param for word in REPLICATED) else torch.cat(parts, dim)
        assert torch.equal(tensor(source, param, state), whole), (param, state)  # type: ignore[arg-type]


def test_a_root_a_tag_and_a_step_mean_the_same() -> None:
    root = GOLDENS / "z3_fp32_tied_subgroups_dp4"
    for path, options in ((root, ReadOptions()), (root / "step3", ReadOptions()), (root, ReadOptions(step=3))):
        source = open_checkpoint(path, options)
        assert (source.format, source.root) == ("deepspeed", root)


def test_a_transposed_view_is_no_second_name(tmp_path: Path) -> None:
    """It begins where the tensor begins and has its shape: only a tie is the same elements in the same order."""
    root = Path(shutil.copytree(tag("z0_fp32_untied_dp1"), tmp_path / "step3"))
    with edited(root / "mp_rank_00_model_states.pt") as tree:
        table = torch.arange(9.0).reshape(3, 3)
        views = {"table": table, "turned": table.t(), "again": table.view(3, 3)}
        tree["module"].update(views)
        tree["buffer_names"] += list(views)
    source = open_checkpoint(root, ReadOptions())
    assert source.family.shared == {"again": "table"}
    for name in ("table", "turned"):
        found = tensor(source, name, PARAM)
        assert found is not None
        assert found.dtype == views[name].dtype
        assert torch.equal(found, views[name]), name
