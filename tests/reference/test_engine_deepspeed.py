"""The DeepSpeed engine in the manager, against real DeepSpeed: its files, its loads, its losses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mcore_rlhf.demo.workers import WorkerPool
from tests.helpers.zero_reader import MASTER, Merged, read_zero
from tests.reference.deepspeed_lab import Case, DeepSpeedLab

SAVED: dict[str, Case] = {
    "z0-fp32": {"stage": 0, "dtype": "fp32", "dirty": True, "waves": True},
    "z0-bf16": {"stage": 0, "dtype": "bf16"},
    "z1-fp32": {"stage": 1, "dtype": "fp32"},
    "z1-bf16": {"stage": 1, "dtype": "bf16", "dirty": True, "waves": True},
    "z1-acc32": {"stage": 1, "dtype": "bf16acc32"},
    "z2-fp32": {"stage": 2, "dtype": "fp32", "dirty": True, "waves": True},
    "z2-bf16": {"stage": 2, "dtype": "bf16"},
    "z3-fp32": {"stage": 3, "dtype": "fp32"},
    "z3-bf16": {"stage": 3, "dtype": "bf16", "dirty": True, "waves": True},
    "z2-robin": {"stage": 2, "dtype": "bf16", "zero": {"round_robin_gradients": True}},
    "z2-aligned": {"stage": 2, "dtype": "bf16", "zero": {"parameter_alignment": True}},
    "z1-elastic": {"stage": 1, "dtype": "bf16", "zero": {"elastic_checkpoint": True}},
    "z1-offload": {"stage": 1, "dtype": "bf16", "zero": {"offload_optimizer": {"device": "cpu"}}},
    "z3-offload": {"stage": 3, "dtype": "bf16", "zero": {"offload_optimizer": {"device": "cpu"}}},
    "z2-lean": {"stage": 2, "dtype": "bf16", "lean": True},
    "z3-lean": {"stage": 3, "dtype": "bf16", "lean": True},
}
ALONE: dict[str, Case] = {"z2-dp1": {"stage": 2, "dtype": "bf16"}}
CHANGED: dict[str, tuple[str, Case]] = {
    "z3-z2": ("z3-fp32", {"stage": 2, "dtype": "fp32"}),
    "z3-z2-bf16": ("z3-bf16", {"stage": 2, "dtype": "bf16", "dirty": True}),
    "z2-z3-bf16": ("z2-bf16", {"stage": 3, "dtype": "bf16"}),
    "z1-z3": ("z1-fp32", {"stage": 3, "dtype": "fp32", "dirty": True}),
    "z0-z2": ("z0-fp32", {"stage": 2, "dtype": "fp32"}),
    "z0-z3-bf16": ("z0-bf16", {"stage": 3, "dtype": "bf16"}),
    "z2-z0": ("z2-fp32", {"stage": 0, "dtype": "fp32"}),
    "z3-z0-bf16": ("z3-bf16", {"stage": 0, "dtype": "bf16"}),
    "z1-acc32": ("z1-bf16", {"stage": 1, "dtype": "bf16acc32"}),
    "robin-z3": ("z2-robin", {"stage": 3, "dtype": "bf16"}),
    "z3-robin": ("z3-bf16", {"stage": 2, "dtype": "bf16", "zero": {"round_robin_gradients": True}}),
    "z2-aligned": ("z2-bf16", {"stage": 2, "dtype": "bf16", "zero": {"parameter_alignment": True}}),
    "aligned-z3": ("z2-aligned", {"stage": 3, "dtype": "bf16"}),
    "elastic-z3": ("z1-elastic", {"stage": 3, "dtype": "bf16"}),
    "widened": ("z2-bf16", {"stage": 2, "dtype": "fp32"}),
    "narrowed": ("z3-fp32", {"stage": 1, "dtype": "bf16"}),
    "universal-z3": ("z2-fp32-universal", {"stage": 3, "dtype": "fp32"}),
    "universal-z1": ("z3-bf16-universal", {"stage": 1, "dtype": "bf16"}),
    "dp1-z3": ("z2-dp1", {"stage": 3, "dtype": "bf16"}),
}
CHANGED_ALONE: dict[str, tuple[str, Case]] = {
    "z2-z1-dp1": ("z2-fp32", {"stage": 1, "dtype": "fp32"}),
    "z3-z3-dp1": ("z3-bf16", {"stage": 3, "dtype": "bf16"}),
}
WEIGHTS: dict[str, tuple[str, Case]] = {
    "weights-z3-z3": ("z3-fp32", {"stage": 3, "dtype": "fp32", "optimizer": False, "dirty": True}),
    "weights-z2-z3": ("z2-bf16", {"stage": 3, "dtype": "bf16", "optimizer": False, "dirty": True}),
    "weights-z3-z1": ("z3-bf16", {"stage": 1, "dtype": "bf16", "optimizer": False, "dirty": True}),
    "weights-z2-z2": ("z2-bf16", {"stage": 2, "dtype": "bf16", "optimizer": False, "dirty": True}),
}
EVERY = {**CHANGED, **CHANGED_ALONE}
UNIVERSAL = ("z2-fp32", "z3-bf16")


@pytest.fixture(scope="module")
def lab(deepspeed_pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> DeepSpeedLab:
    lab = DeepSpeedLab(deepspeed_pool, tmp_path_factory.mktemp("deepspeed"))
    lab.run(1, {name: {"job": "save_and_resume", **case} for name, case in ALONE.items()})
    cases = {name: {"job": "save_and_resume", **case} for name, case in SAVED.items()}
    cases |= {f"{name}-universal": {"job": "to_universal", "source": str(lab.role(name))} for name in UNIVERSAL}
    cases |= {f"to-{name}": _change(lab, *case) for name, case in {**CHANGED, **WEIGHTS}.items()}
    cases["two-roles"] = {"job": "two_roles", "dtype": "bf16"}
    cases["refused"] = _change(lab, "z2-fp32", {"job": "refuse", "stage": 1, "dtype": "fp32"})
    lab.run(2, cases)
    lab.run(1, {f"to-{name}": _change(lab, *case) for name, case in CHANGED_ALONE.items()})
    return lab


def _change(lab: DeepSpeedLab, source: str, case: Case) -> Case:
    folder = lab.root / source if source.endswith("universal") else lab.role(source).parent
    return {"job": "change_layout", "source": str(folder), **case}


def _tag(role: Path) -> Path:
    return next(path for path in role.iterdir() if path.is_dir())


def _source(lab: DeepSpeedLab, name: str) -> Merged:
    return read_zero(_tag(lab.role(name.removesuffix("-universal"))))


def _whole(merged: Merged) -> dict[tuple[str, str], torch.Tensor]:
    """Masters and states; an fp32 weight of stage 0 is its own master."""
    found = {at: value.float() for at, value in merged.states.items()}
    for group in merged.groups:
        for name in group:
            if (name, MASTER) not in found:
                found[name, MASTER] = merged.param[name].float()
    return found


@pytest.mark.parametrize("name", [*SAVED, *ALONE])
def test_files_are_those_that_deepspeed_writes(lab: DeepSpeedLab, name: str) -> None:
    for seen in lab.seen[name]:
        assert seen["files"] == []
        lean = bool(SAVED.get(name, {}).get("lean"))
        assert seen["beside"] == (["mine"] if lean else ["global_step2", "latest"])


@pytest.mark.parametrize("name", [*SAVED, *ALONE])
def test_resumed_runs_go_on_bit_for_bit(lab: DeepSpeedLab, name: str) -> None:
    for seen in lab.seen[name]:
        assert seen["loaded"] == []
        assert seen["client"] == []
        assert seen["resumed"] == seen["straight"]
        assert len(set(seen["straight"])) == 2
        lost = [line for line in seen["report"] if line.startswith("lost")]
        assert bool(lost) == name.endswith("lean"), lost


@pytest.mark.parametrize("name", [*SAVED, *ALONE])
def test_deepspeed_loads_the_roles_folder(lab: DeepSpeedLab, name: str) -> None:
    for seen in lab.seen[name]:
        cannot = name == "z1-elastic"  # with torch's Adam, DeepSpeed 0.19.8 cannot load its own elastic files
        assert seen["by_deepspeed"] == (["AssertionError"] if cannot else [])


@pytest.mark.parametrize("name", EVERY)
def test_every_state_arrives_in_another_layout(lab: DeepSpeedLab, name: str) -> None:
    for seen in lab.seen[f"to-{name}"]:
        assert seen["files"] == []
        assert seen["client"] == []
        assert seen["own_steps"]
        assert not [line for line in seen["report"] if line.startswith("lost: actor")], seen["report"]
    before, after = _source(lab, EVERY[name][0]), read_zero(_tag(lab.role(f"to-{name}")))
    wanted, found = _whole(before), _whole(after)
    assert wanted.keys() == found.keys()
    assert [at for at in wanted if not torch.equal(wanted[at], found[at])] == []
    assert len(wanted) == 3 * 7
    assert after.step == before.step
    assert [set(group) for group in after.groups] == [set(group) for group in before.groups]
    assert [group["weight_decay"] for group in after.settings] == [0.1, 0.0, 0.01]
    if before.settings[0]:  # an elastic checkpoint has none
        assert after.settings == before.settings


@pytest.mark.parametrize("name", {**EVERY, **WEIGHTS})
def test_weights_buffers_and_frozen_parameters_arrive(lab: DeepSpeedLab, name: str) -> None:
    lab.seen[f"to-{name}"]
    source = {**EVERY, **WEIGHTS}[name][0]
    before, after = _source(lab, source), read_zero(_tag(lab.role(f"to-{name}")))
    for kept in ("frozen.weight", "frozen.bias", "shift", "count"):
        assert torch.equal(before.param[kept].to(after.param[kept].dtype), after.param[kept]), kept
    assert after.param["shift"].sum() == 3.0  # 0 + 1, three times
    masters = _whole(before)
    for at, param in _weights(before, after).items():
        assert torch.equal(param.float(), masters[at, MASTER].to(param.dtype).float()), at


def _weights(before: Merged, after: Merged) -> dict[str, torch.Tensor]:
    """Trained weights as stored; stage 3 stores none, and its masters are compared elsewhere."""
    return {name: after.param[name] for group in before.groups for name in group if name in after.param}


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_alone_begin_with_fresh_states(lab: DeepSpeedLab, name: str) -> None:
    source, case = WEIGHTS[name]
    for seen in lab.seen[f"to-{name}"]:
        assert any("begin at zero" in line for line in seen["report"])
    before, after = _whole(_source(lab, source)), _whole(read_zero(_tag(lab.role(f"to-{name}"))))
    dtype = torch.bfloat16 if case["dtype"] == "bf16" else torch.float32
    for (param, state), value in after.items():
        if state == MASTER:
            assert torch.equal(value, before[param, MASTER].to(dtype).float()), param
        else:
            assert not value.any(), (param, state)


@pytest.mark.parametrize(
    "name", [name for name, (source, _) in CHANGED.items() if source in SAVED and name not in ("widened", "narrowed")]
)
def test_losses_go_on_at_the_same_data_parallel_size(lab: DeepSpeedLab, name: str) -> None:
    """Random states of ranks are kept whatever the stage. Stages 1 to 3 differ in no bit of this model on a CPU; stage 0
    rounds its gradients otherwise, so with it the loss of the first step is equal.
    """
    source, case = CHANGED[name]
    after, straight = lab.seen[f"to-{name}"][0]["losses"], lab.seen[source][0]["straight"]
    if 0 in (SAVED[source]["stage"], case["stage"]):
        assert after[0] == straight[0]
    else:
        assert after == straight


def test_another_model_is_refused_before_anything_changes(lab: DeepSpeedLab) -> None:
    for seen in lab.seen["refused"]:
        assert "up.weight" in seen["said"]
        assert "down.weight" in seen["said"]
        assert "(256, 96)" in seen["said"]
        assert "(257, 96)" in seen["said"]
        assert seen["changed"] == []
        assert "unfuse_lora_weight" in seen["fused"]


def test_actor_critic_and_reference_of_different_stages_share_a_step(lab: DeepSpeedLab) -> None:
    for seen in lab.seen["two-roles"]:
        straight, resumed = seen["losses"]
        assert straight == resumed
        assert straight[0] != straight[1]
        assert seen["reference"] == []
        assert seen["clients"] == ["actor", "critic", "reference"]
        assert seen["shared"] == ["reference"], "it is one file of both steps"
        assert seen["theirs"] == [], "and DeepSpeed's own load takes it"
