"""What a rank of the resident pool does with DeepSpeed's own Muon, as OpenRLHF trains with ``optim=muon``.

Whole momenta are put together here from what DeepSpeed itself says of its partitions, not by this package's layouts.
"""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
import torch.distributed as dist

from tests.reference.deepspeed_live import Live, Seen, inner, module_of
from tests.reference.deepspeed_models import Setting, build_model, config
from tests.reference.deepspeed_resident import CLIENT, END, FIRST, SAVED, after_loading_universal, begin, train

MOMENTUM = "momentum_buffer"
STATES = ("exp_avg", "exp_avg_sq", MOMENTUM)


def muon(setting: Setting, root: str, *, load: bool = False, universal: bool = False, **zero: Any) -> Seen:
    """Train and save, or load and train; matrices that are no embedding by Muon, all else by Adam.

    Args:
        setting: Of the engine.
        root: The checkpoint.
        load: Whether it is loaded, into other weights.
        universal: Whether it is a universal one.
        zero: Further values for ``zero_optimization``.
    """
    begin()
    engine = _engine(setting, 9 if load else 1, universal, zero)
    client: dict[str, Any] = {}
    if load:
        path, client = engine.load_checkpoint(root)
        assert path is not None, f"DeepSpeed found nothing in {root}"
        if universal:
            from pathlib import Path

            after_loading_universal(engine, setting, Path(root))
    else:
        train(engine, FIRST, SAVED)
        engine.save_checkpoint(root, client_state=CLIENT)
    start = look(engine, setting.stage)
    losses = train(engine, SAVED, END)
    return Seen(start, losses, look(engine, setting.stage), {key: client.get(key) for key in CLIENT})


def _engine(setting: Setting, seed: int, universal: bool, zero: dict[str, Any]) -> Any:
    settings = config(setting, universal=universal)
    settings["zero_optimization"] |= zero
    if setting.stage == 3:
        settings["zero_optimization"]["reduce_scatter"] = False
    params = {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1, "betas": [0.9, 0.95], "torch_adam": True}
    settings["optimizer"] = {"type": "Muon", "params": params}
    model = build_model(setting.kind, seed)
    return deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=settings)[0]


def look(engine: Any, stage: int) -> Live:
    """Weights, masters and states, whole; a momentum's type follows the gradients', so that only its values are compared."""
    states = dict(_states(engine, stage))
    steps = sorted({float(state["step"]) for state in inner(engine).state.values() if "step" in state})
    names = ("lr", "weight_decay", "betas", "momentum", "use_muon")
    settings = [{key: group.get(key) for key in names} for group in engine.optimizer.param_groups]
    counters = {"global_steps": engine.global_steps, "scheduler": engine.lr_scheduler.state_dict()}
    return Live(module_of(engine, stage), states, steps, settings, counters)


def _states(engine: Any, stage: int) -> Any:
    if hasattr(engine.optimizer, "_hp_optimizer_states_linked"):
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    for name, param in engine.module.named_parameters():
        if not param.requires_grad:
            continue
        if stage == 0:
            yield from _plain(engine, name, param)
            continue
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        yield (name, "fp32"), safe_get_full_fp32_param(param).detach().clone()
        if not param.use_muon:
            for state in ("exp_avg", "exp_avg_sq"):
                yield (name, state), safe_get_full_optimizer_state(param, state).detach().clone()
        elif hasattr(engine.optimizer, "params_in_partition") and not engine.optimizer.cpu_offload:
            yield (name, MOMENTUM), _whole_momentum(engine, param)
        else:
            yield (name, MOMENTUM), safe_get_full_optimizer_state(param, MOMENTUM).detach().clone().float()


def _plain(engine: Any, name: str, param: Any) -> Any:
    wrapper, optimizer = engine.optimizer, inner(engine)
    masters: dict[torch.Tensor, torch.Tensor] = {}
    if hasattr(wrapper, "fp32_groups"):
        for halves, wholes in zip(wrapper.fp16_groups, wrapper.fp32_groups, strict=True):
            masters |= dict(zip(halves, wholes, strict=True))
    held = masters.get(param, param)
    yield (name, "fp32"), held.detach().clone()
    for state in STATES:
        if state in optimizer.state[held]:
            yield (name, state), optimizer.state[held][state].detach().clone().float()


def _whole_momentum(engine: Any, param: Any) -> torch.Tensor:
    """Stages 1 and 2: every rank keeps whole parameters, in the order of its partition."""
    wrapper = engine.optimizer
    number = next(i for i, group in enumerate(wrapper.bit16_groups) if any(param is one for one in group))
    found, at = None, 0
    for one in wrapper.params_in_partition[number]:
        if one is param:
            held = wrapper.optimizer.param_groups[number]["params"][0]
            found = wrapper.optimizer.state[held][MOMENTUM].narrow(0, at, one.numel()).view(one.shape).float()
        at += one.numel()
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, found)
    having = [one for one in everywhere if one is not None]
    assert having
    assert all(torch.equal(one, having[0]) for one in having), "ranks disagree on a momentum"
    return having[0].clone()


def resumed(setting: Setting, folder: str, source: str | None, **zero: Any) -> Seen:
    """The manager: train and save, or load a step of it (or any checkpoint) into other weights and train."""
    from pathlib import Path

    from mcore_rlhf.engines.deepspeed import DeepSpeedEngine
    from mcore_rlhf.manager.run.manager import CheckpointManager

    begin()
    engine = _engine(setting, 1 if source is None else 9, False, zero)
    with CheckpointManager(Path(folder), {"actor": DeepSpeedEngine(engine)}) as manager:
        if source is None:
            train(engine, FIRST, SAVED)
            manager.save(SAVED, blocking=True)
        else:
            manager.load(source)
        start = look(engine, setting.stage)
        return Seen(start, train(engine, SAVED, END), Live({}, {}, []))
