"""What is read of universal checkpoints: DeepSpeed's own in both flavours, and the smallest that its loaders take."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mcore_rlhf.core.catalog import MASTER, PARAM, TensorName
from mcore_rlhf.core.facts import same
from mcore_rlhf.errors import UsageError
from mcore_rlhf.families.module import ModuleState
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.families.source import Source
from mcore_rlhf.formats.registry import detect, open_checkpoint
from mcore_rlhf.storage.torch_values import SmallTensor
from tests.helpers.catalog_values import tensor_of
from tests.helpers.universal_by_hand import FIELDS, adam, write

GOLDENS = Path(__file__).parents[2] / "goldens" / "deepspeed"
WITH_UNIVERSAL = sorted(path.parent.name for path in GOLDENS.glob("*/step3_uni"))
GATHERED = [name for name in WITH_UNIVERSAL if not name.startswith(("pp", "autotp"))]


def _open(name: str) -> Source:
    return open_checkpoint(GOLDENS / name / "step3_uni", ReadOptions())


@pytest.mark.parametrize("name", GATHERED)
def test_every_state_is_what_deepspeed_gathered_from_the_engine(name: str) -> None:
    source = _open(name)
    expected = torch.load(GOLDENS / name / "expected.pt", weights_only=True)["state"]
    assert len(expected) == sum(spec.trainable for spec in source.model.params) * 3
    for key, tensor in expected.items():
        param, _, state = key.rpartition("/")
        found = tensor_of(source, param, MASTER if state == "fp32" else state)
        assert torch.equal(found.reshape(-1), tensor.reshape(-1)), key


@pytest.mark.parametrize("name", WITH_UNIVERSAL)
def test_it_is_found_to_be_universal_and_its_neighbour_is_not(name: str) -> None:
    assert detect(GOLDENS / name / "step3_uni").name == "universal"
    assert detect(GOLDENS / name).name == "deepspeed"  # `latest` is the run's own
    assert detect(GOLDENS / name / "step3").name == "deepspeed"


@pytest.mark.parametrize("name", [name for name in GATHERED if name != "z3_bf16_frozen_dp2"])
def test_param_groups_have_the_members_that_the_optimizer_had(name: str) -> None:
    groups = torch.load(GOLDENS / name / "expected.pt", weights_only=True)["groups"]
    found = _open(name).state.groups
    assert [list(group.params) for group in found] == groups
    assert [group.fields["weight_decay"] for group in found] == [0.1, 0.0]
    assert [float(group.fields["step"]) for group in found] == [3.0, 3.0]  # type: ignore[arg-type]
    assert {group.scalars for group in found} == {("step",)}


def test_the_module_has_weights_buffers_and_aliases_in_its_order() -> None:
    source = _open("z2_bf16_ac_dp2")
    native = source.family
    assert isinstance(native, ModuleState)
    assert native.shared == {"actor.lm_head.weight": "actor.model.embed_tokens.weight"}
    assert "actor.lm_head.weight" not in {
        spec.name for spec in source.model.params
    }  # though there is a folder of that name
    assert native.order[:3] == ("actor.model.scale_buf", "actor.model.step_buf", "actor.model.embed_tokens.weight")
    assert tensor_of(source, "actor.model.step_buf", PARAM).tolist() == 5
    weight = source.model.get("critic.value_head.bias")
    assert weight is not None
    assert (weight.global_shape, weight.dtype.name, weight.trainable) == ((1,), "bfloat16", True)
    master = tensor_of(source, "critic.value_head.bias", MASTER)
    assert torch.equal(tensor_of(source, "critic.value_head.bias", PARAM), master.to(torch.bfloat16))


def test_what_is_no_tensor_comes_along() -> None:
    state = _open("z2_bf16_ac_dp2").state
    assert (state.iteration, state.scheduler) == (3, {"last_batch_iteration": 2})
    assert (state.other["ppo_iteration"], state.other["nested"]) == (
        21,
        {"samples": [1, 2, 3], "name": "x", "means": (0.5, -1.25)},
    )
    assert isinstance(state.other["rng_state"], SmallTensor)
    assert state.args["zero_optimization"] == {"stage": 2}
    assert "module" not in state.other


def test_the_stage_3_flavour_has_flat_files_and_frozen_slices() -> None:
    source = _open("z3_bf16_frozen_dp2")
    assert (
        source.catalog.get(TensorName("actor", "lm_head.weight", PARAM)) is None
    )  # stage 3 keeps no weights of what it trains
    entry = source.catalog.get(TensorName("actor", "lm_head.weight", MASTER))
    assert entry is not None
    assert entry.global_shape == (67, 20)
    frozen = tensor_of(source, "model.embed_tokens.weight", PARAM)
    slices = [
        torch.load(path, weights_only=True)["frozen_param_fragments"]["model.embed_tokens.weight"]
        for path in sorted((GOLDENS / "z3_bf16_frozen_dp2" / "step3_uni").glob("zero_pp_rank_*"))
    ]
    assert torch.equal(frozen.reshape(-1), torch.cat(slices)[: 67 * 20])
    assert frozen.dtype == torch.bfloat16


def test_tensor_parallel_ranks_have_whole_masters() -> None:
    source = _open("autotp2_z1_bf16_dp1")
    assert str(source.parallel) == "TP2×PP1×DP1"
    assert (
        source.catalog.get(TensorName("actor", "model.layers.0.self_attn.q_proj.weight", PARAM)) is None
    )  # cut in two
    assert tensor_of(source, "model.layers.0.self_attn.q_proj.weight", MASTER).shape == (20, 20)
    norm = source.catalog.get(TensorName("actor", "model.norm.weight", PARAM))
    assert norm is not None
    assert len(norm.chunks) == 2  # both ranks hold it, and are compared


def test_pipeline_stages_are_put_together() -> None:
    source = _open("pp2_z1_fp32_dp2")
    assert isinstance(source.family, ModuleState)
    assert source.family.pipeline
    assert len(source.family.per_rank) == 2
    assert not same(source.family.per_rank[0]["rng_state"], source.family.per_rank[1]["rng_state"])
    assert [len(group.params) for group in source.state.groups] == [29, 30]  # the tied embedding once


def test_the_smallest_that_deepspeed_loads(tmp_path: Path) -> None:
    groups = [{**FIELDS, "weight_decay": 0.1, "params": [0]}, {**FIELDS, "weight_decay": 0.0, "params": [1]}]
    params = {"a.weight": adam(3, 2), "scale": adam(), "b/c.bias": adam(4)}
    write(tmp_path, params, groups=groups)
    source = open_checkpoint(tmp_path, ReadOptions())
    assert [spec.name for spec in source.model.params] == ["a.weight", "b/c.bias", "scale"]
    for name, states in params.items():
        assert torch.equal(tensor_of(source, name, "exp_avg_sq"), states["exp_avg_sq"])
    assert [group.params for group in source.state.groups] == [(), ()]
    assert any("which param group" in text for _, text in source.notes.lines)
    assert source.state.other["skipped_steps"] == 1


@pytest.mark.parametrize(
    ("states", "step"), [(("momentum_buffer",), None), (("exp_avg",), 7), (("mu", "nu", "ema"), 7.0)]
)
def test_any_optimizers_states(tmp_path: Path, states: tuple[str, ...], step: float | None) -> None:
    made = {"w": {state: torch.full((2, 2), float(i)) for i, state in enumerate(("fp32", *states))}}
    write(tmp_path, made, step=step)
    source = open_checkpoint(tmp_path, ReadOptions())
    assert source.states == (MASTER, *sorted(states))
    (group,) = source.state.groups
    assert group.scalars == (() if step is None else ("step",))


def test_without_the_optimizer_only_masters_are_opened(tmp_path: Path) -> None:
    folder = write(tmp_path, {"w": adam(5)})
    (folder / "zero" / "w" / "exp_avg.pt").write_bytes(b"broken")
    (folder / "zero" / "optimizer_state.pt").unlink()
    source = open_checkpoint(tmp_path, ReadOptions(optimizer=False))
    assert source.states == ()
    assert [name.state for name in source.catalog] == [PARAM]
    assert tensor_of(source, "w", PARAM).shape == (5,)


def test_a_step_of_a_root_with_several(tmp_path: Path) -> None:
    for step in (7, 17, 20):
        write(tmp_path, {"w": torch_states(step)}, tag=f"global_step{step}")
    assert open_checkpoint(tmp_path, ReadOptions()).state.iteration == 7
    found = open_checkpoint(tmp_path, ReadOptions(step=17))
    assert float(tensor_of(found, "w", MASTER)) == 17
    with pytest.raises(UsageError, match=r"no universal checkpoint has step 9 \(there are: global_step17_uni, "):
        open_checkpoint(tmp_path, ReadOptions(step=9))


def torch_states(step: int) -> dict[str, torch.Tensor]:
    return {"fp32": torch.tensor(float(step)), "exp_avg": torch.tensor(0.0)}
