"""What a rank of the resident pool does in real DeepSpeed: train and save, or load and train on.

This module is imported once, before the ranks are forked from one another; DeepSpeed's globals are put back before a job.
"""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

# Nothing is compiled: the first optimizer of every rank imports Muon's kernels, and with them two seconds of torch's compiler.
os.environ.update(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1", TORCHDYNAMO_DISABLE="1")

import deepspeed
import torch
import torch.distributed as dist
from deepspeed import comm as deepspeed_comm
from deepspeed.comm import comm
from deepspeed.ops import __compatible_ops__
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.runtime.zero.partition_parameters import Init
from deepspeed.utils import groups

from tests.reference.deepspeed_live import Seen, inner, look
from tests.reference.deepspeed_models import Setting, batch, build_engine, trunks

__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled
torch.set_num_threads(1)
CLIENT = {"epoch": 3, "ema": torch.arange(5.0)}
FIRST, SAVED, END = 0, 2, 4


def _globals() -> dict[Any, dict[str, Any]]:
    """What modules of DeepSpeed keep of a process group: plain values and containers that a job may have changed."""
    kinds = (type(None), int, dict)
    return {
        module: {key: value for key, value in vars(module).items() if isinstance(value, kinds) and key[:2] != "__"}
        for module in (comm, groups)
    }


_AT_FIRST = copy.deepcopy({module.__name__: values for module, values in _globals().items()})


def begin() -> None:
    """As in a new process that has a process group of torch's."""
    for module in (comm, groups):
        vars(module).update(copy.deepcopy(_AT_FIRST[module.__name__]))
    Init.param_id = 0  # stage 3 numbers parameters and modules, and compares the numbers of all ranks
    DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__[0][0] = 0
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    assert deepspeed_comm.get_world_size() == dist.get_world_size()


def train(engine: Any, first: int, last: int) -> list[float]:
    """Train; buffers change as in models with running statistics."""
    losses = []
    for step in range(first, last):
        loss = engine(batch(step, dist.get_rank(), dist.get_world_size()))
        engine.backward(loss)
        engine.step()
        for trunk in trunks(engine.module):
            trunk.shift += 0.01 * step
            trunk.count += 1
        total = loss.detach().float().clone()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    return losses


def train_and_save(setting: Setting, root: str) -> Seen:
    """Two steps, ``save_checkpoint``, and two more without interruption."""
    begin()
    engine = build_engine(setting, seed=1)
    train(engine, FIRST, SAVED)
    engine.save_checkpoint(root, client_state=CLIENT)
    return _train_on(engine, setting, CLIENT)


def load_and_train(setting: Setting, root: str, *, universal: bool = False) -> Seen:
    """Other weights, ``load_checkpoint``, and two steps."""
    begin()
    engine = build_engine(setting, seed=9, universal=universal)
    path, client = engine.load_checkpoint(root)
    assert path is not None, f"DeepSpeed found nothing in {root}"
    if universal:
        after_loading_universal(engine, setting, Path(root))
    return _train_on(engine, setting, {key: client[key] for key in CLIENT})


def after_loading_universal(engine: Any, setting: Setting, root: Path) -> None:
    """What the reference page on the universal format tells a run to do, since DeepSpeed does not."""
    if setting.stage == 3:
        for state in inner(engine).state.values():
            state["step"] = state["step"].clone()
    tag = (root / "latest_universal").read_text()
    stored = torch.load(root / tag / "mp_rank_00_model_states.pt", weights_only=False)
    keep = {*(stored["frozen_param_shapes"] or ()), *stored["buffer_names"]}
    gathered = [param for name, param in engine.module.named_parameters() if name in keep]
    with deepspeed.zero.GatheredParameters(gathered, modifier_rank=0, enabled=setting.stage == 3):
        engine.module.load_state_dict({name: stored["module"][name] for name in keep}, strict=False)


def _train_on(engine: Any, setting: Setting, client: dict[str, Any]) -> Seen:
    start = look(engine, setting.stage)
    losses = train(engine, SAVED, END)
    return Seen(start, losses, look(engine, setting.stage), client)
