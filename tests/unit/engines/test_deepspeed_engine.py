"""What the DeepSpeed engine refuses and takes, without DeepSpeed; tests/reference runs the real one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mcore_rlhf.engines.base import LoadRequest
from mcore_rlhf.engines.deepspeed import DeepSpeedEngine
from mcore_rlhf.engines.deepspeed.engine import own_files
from mcore_rlhf.engines.deepspeed.model import Flat, LiveOptimizer
from mcore_rlhf.engines.deepspeed.own_files import StoredOptimizer
from mcore_rlhf.engines.deepspeed.restoring import client_state_of, load_groups, load_wrapper
from mcore_rlhf.engines.module_source import matched_groups
from mcore_rlhf.errors import Problems, Unsupported, UsageError
from mcore_rlhf.families.module import static_scaler
from mcore_rlhf.families.source import ParamGroup
from mcore_rlhf.layouts.zero import FlatGroup
from mcore_rlhf.manager.run.snapshot import components
from mcore_rlhf.storage.stored import new_stub

DYNAMIC = "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"


class FakeEngine:
    """As much of an engine as is looked at before anything is saved."""

    def __init__(self, **values: object) -> None:
        self.module: object = torch.nn.Linear(2, 2)
        self.optimizer: object = None
        self.checkpoint_engine = "DeepSpeed's own"
        self.save_zero_checkpoint = True
        self.mp_world_size, self.seq_dp_world_size = 1, 4
        vars(self).update(values)

    def zero_optimization_stage(self) -> int:
        return 1

    def zero_optimization_partition_weights(self) -> bool:
        return False

    def _save_checkpoint(
        self, folder: str, tag: str, client_state: dict[str, object], exclude_frozen_parameters: bool
    ) -> None:
        state = {"module": {"w": torch.ones(2)}, "global_steps": 3, "steps": [1, 2], "lean": exclude_frozen_parameters}
        self.checkpoint_engine.save(state_dict={**state, **client_state}, path=f"{tag}/mp_rank_00_model_states.pt")  # type: ignore[attr-defined]

    def _save_zero_checkpoint(self, folder: str, tag: str) -> None:
        self.checkpoint_engine.save({"scaler": SimpleNamespace(scale=2.0)}, f"{tag}/optim_states.pt")  # type: ignore[attr-defined]
        self._copy_recovery_script(folder)

    def _copy_recovery_script(self, folder: str) -> None:
        raise AssertionError("a script was copied")


class Mine(torch.nn.Module):
    pass


DeepSpeedZeRoOffload = type("DeepSpeedZeRoOffload", (), {})
PipelineModule = type("PipelineModule", (Mine,), {})


def adam(params: list[torch.Tensor], groups: int = 1, steps: int = 0) -> LiveOptimizer:
    per = len(params) // groups
    listed = [{"params": params[g * per : (g + 1) * per], "lr": 0.1, "weight_decay": 0.5} for g in range(groups)]
    inner = torch.optim.AdamW(listed)
    for _ in range(steps):
        for param in params:
            param.grad = torch.ones_like(param)
        inner.step()
    flats = tuple(
        Flat(n, n // per, (f"p{n}",), (tuple(p.shape),), FlatGroup((p.numel(),), 1, alignment=1), 0, p)
        for n, p in enumerate(params)
    )
    return LiveOptimizer(SimpleNamespace(optimizer=inner), 1, flats, True)


def test_components_take_the_engine_as_it_is() -> None:
    engine = DeepSpeedEngine(FakeEngine())
    parts = components({"actor": engine}, None, None)
    assert parts.roles["actor"] is engine
    assert parts.layout == "actor TP1×PP1×DP4"


@pytest.mark.parametrize(
    ("engine", "error", "said"),
    [
        (FakeEngine(module=PipelineModule()), Unsupported, "pipeline"),
        (FakeEngine(has_moe_layers=True), Unsupported, "MoE"),
        (FakeEngine(optimizer=DeepSpeedZeRoOffload()), Unsupported, "without an optimizer"),
        (torch.nn.Linear(2, 2), UsageError, "deepspeed.initialize"),
    ],
)
def test_what_it_does_not_know_is_refused_at_once(engine: object, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        DeepSpeedEngine(engine)


def test_fused_lora_is_refused_before_anything_is_looked_at(tmp_path: Any) -> None:
    engine = DeepSpeedEngine(FakeEngine(is_lora_fused=True))
    with pytest.raises(UsageError, match=r"cannot save.*\n.*unfuse_lora_weight"):
        engine.live(1)
    with pytest.raises(UsageError, match="cannot load"):
        engine.prepare_load(LoadRequest(tmp_path, "actor"))


@pytest.mark.parametrize("tag", ["", "a/b", "../x", ".hidden"])
def test_a_tag_that_is_no_folder_is_refused(tag: str) -> None:
    with pytest.raises(UsageError, match="tag"):
        DeepSpeedEngine(FakeEngine(), tag=tag)._tag_of(1)


def test_the_tag_is_the_managers_step_or_what_was_asked_for() -> None:
    assert DeepSpeedEngine(FakeEngine())._tag_of(12) == "global_step12"
    assert DeepSpeedEngine(FakeEngine(), tag="best")._tag_of(12) == "best"
    assert DeepSpeedEngine(FakeEngine(), tag=lambda step: f"epoch{step}")._tag_of(12) == "epoch12"


def test_deepspeeds_files_are_taken_and_it_is_left_as_it_was() -> None:
    engine = FakeEngine()
    steps = [9]
    found = own_files(engine, "t", {"mine": steps, "global_steps": 5}, True)
    assert list(found) == ["t/mp_rank_00_model_states.pt", "t/optim_states.pt"]
    model = found["t/mp_rank_00_model_states.pt"]
    assert (model["mine"], model["global_steps"], model["lean"]) == ([9], 5, True)
    steps.append(10)
    assert model["mine"] == [9]
    assert engine.checkpoint_engine == "DeepSpeed's own"
    assert "_copy_recovery_script" not in vars(engine)
    assert "_get_param_fragment_func" not in vars(engine)


def test_a_client_state_with_a_guarded_key_is_refused() -> None:
    with pytest.raises(Unsupported, match="checkpoint_parallel_dimensions"):
        own_files(FakeEngine(), "t", {"checkpoint_parallel_dimensions": 1}, False)


def test_client_state_is_what_is_not_deepspeeds() -> None:
    other = {"epoch": 3, "skipped_steps": 0, "global_samples": 8, "ds_version": "0.19.8", "data_sampler": None}
    assert client_state_of(other) == {"epoch": 3}


def test_each_flat_tensor_counts_its_own_steps_and_keeps_its_groups_settings() -> None:
    """Faults 1 and 2: one step for all, and the first group's weight decay for all."""
    live = adam([torch.zeros(3), torch.zeros(4)], groups=2)
    step = torch.tensor(3.0)
    groups = [
        ParamGroup({"weight_decay": decay, "lr": 0.2, "step": step}, params=(f"p{n}",), scalars=("step",))
        for n, decay in enumerate((0.1, 0.0))
    ]
    load_groups(live, groups, {flat.number: ("exp_avg", "exp_avg_sq") for flat in live.flats})
    states = [live.state_of(flat) for flat in live.flats]
    states[0]["step"] += 1
    assert (float(states[1]["step"]), float(step)) == (3.0, 3.0)
    assert [group["weight_decay"] for group in live.inner.param_groups] == [0.1, 0.0]
    assert [tuple(state["exp_avg"].shape) for state in states] == [(3,), (4,)]


def test_states_that_exist_are_filled_in_place() -> None:
    live = adam([torch.ones(3)], steps=2)
    before = live.state_of(live.flats[0])["exp_avg"]
    group = ParamGroup({"lr": 1.0, "step": torch.tensor(7.0)}, params=("p0",), scalars=("step",))
    load_groups(live, [group], {flat.number: ("exp_avg", "exp_avg_sq") for flat in live.flats})
    assert live.state_of(live.flats[0])["exp_avg"] is before
    assert float(live.state_of(live.flats[0])["step"]) == 7.0
    assert live.inner.param_groups[0]["weight_decay"] == 0.5  # what the checkpoint does not say stays


def test_groups_are_matched_by_what_they_hold() -> None:
    live = adam([torch.zeros(1), torch.zeros(1)], groups=2)
    names = [live.names_of(number) for number in range(live.groups)]
    first, second = ParamGroup({"lr": 1.0}, params=("p0",)), ParamGroup({"lr": 2.0}, params=("p1",))
    problems = Problems()
    assert matched_groups(names, [second, first], problems) == [first, second]
    assert matched_groups(names, [ParamGroup({"lr": 3.0}, params=("p1", "p0"))], problems)[1].fields["lr"] == 3.0
    assert not problems
    matched_groups(names, [first], problems)
    assert "param group 1 (p1" in str(problems.found[0])


def test_a_loss_scaler_is_restored_where_it_is_of_the_same_kind() -> None:
    own = SimpleNamespace(dynamic=True, cur_scale=1.0, cur_iter=0, dtype=torch.float16)
    live = LiveOptimizer(SimpleNamespace(loss_scaler=own, clip_grad=0.0), 1, (), True)
    load_wrapper(live, static_scaler(8.0), {"clip_grad": 1.0, "unknown": 5})
    assert (own.cur_scale, live.wrapper.clip_grad) == (1.0, 1.0)
    assert not hasattr(live.wrapper, "unknown")
    load_wrapper(live, new_stub(DYNAMIC, {"cur_scale": 32.0, "cur_iter": 4, "dynamic": True, "dtype": None}), {})
    assert (own.cur_scale, own.cur_iter, own.dtype) == (32.0, 4, torch.float16)


def test_an_elastic_checkpoint_has_no_param_groups_to_read() -> None:
    stored = StoredOptimizer.of(SimpleNamespace(), {"base_optimizer_state": [{"exp_avg": None}]})  # type: ignore[arg-type]
    assert (stored.param_groups, stored.states, stored.tensor_states()) == ([], [], {})


def test_an_optimizer_that_is_not_known_is_refused_when_the_engine_is_made() -> None:
    with pytest.raises(
        Unsupported, match="optimizer SimpleNamespace: the manager does not know how it keeps its states"
    ):
        DeepSpeedEngine(FakeEngine(optimizer=SimpleNamespace()))
