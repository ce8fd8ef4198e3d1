"""What each process of the DCP tests does: real FSDP trains, torch saves under the keys of several runs, torch loads ours."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.reference.fsdp_jobs import Whole, whole_of
from tests.reference.fsdp_models import Trainer, Wrapped, build


@dataclass
class Looked:
    """What one rank saw.

    Args:
        whole: All tensors of the model and its optimizer, put together by torch itself.
        losses: Of the steps after the save or the load.
    """

    whole: Whole
    losses: list[float]


def save_and_go_on(how: Wrapped, folder: str, style: str) -> Looked:
    """Train, save by torch, and go on."""
    trainer = build(how, dist.get_rank())
    trainer.train(0, 2)
    whole = whole_of(trainer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch.distributed.checkpoint as dcp

        dcp.save(_state(trainer, style), checkpoint_id=folder)
    return Looked(whole, _go_on(trainer))


def save_as_verl(how: Wrapped, folder: str) -> Looked:
    """Train, and save one file of each kind per rank, as verl's ``FSDPCheckpointManager`` does; put together anew from its code."""
    rank, world = dist.get_rank(), dist.get_world_size()
    trainer = build(how, rank)
    trainer.train(0, 2)
    assert trainer.optimizer is not None
    assert trainer.scheduler is not None
    extra = {"lr_scheduler": trainer.scheduler.state_dict(), "rng": {"cpu": torch.get_rng_state()}}
    for kind, state in (
        ("model", trainer.model.state_dict()),
        ("optim", trainer.optimizer.state_dict()),
        ("extra_state", extra),
    ):
        torch.save(state, Path(folder) / f"{kind}_world_size_{world}_rank_{rank}.pt")
    if rank == 0:
        (Path(folder) / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": world}))
    return Looked(whole_of(trainer), _go_on(trainer))


def load_as_verl(how: Wrapped, folder: str) -> Looked:
    """Load a rank's three files as verl's ``FSDPCheckpointManager`` does, look at what is there, and go on."""
    rank, world = dist.get_rank(), dist.get_world_size()
    trainer = build(how, rank)
    assert trainer.optimizer is not None
    assert trainer.scheduler is not None
    states = [
        torch.load(Path(folder) / f"{kind}_world_size_{world}_rank_{rank}.pt", weights_only=False)
        for kind in ("model", "optim", "extra_state")
    ]
    trainer.model.load_state_dict(states[0])
    trainer.optimizer.load_state_dict(states[1])
    trainer.scheduler.load_state_dict(states[2]["lr_scheduler"])
    return Looked(whole_of(trainer), _go_on(trainer))


def load_and_go_on(how: Wrapped, folder: str, style: str) -> Looked:
    """Load by torch into other weights, look at them, and go on."""
    trainer = _loaded(how, folder, style)
    return Looked(whole_of(trainer), _go_on(trainer))


def load_any(how: Wrapped, folder: str) -> Looked:
    """Load a checkpoint of any format through torch's ``dcp.load``, look at what is there, and go on; the schedule is put by hand."""
    trainer = build(how, dist.get_rank())
    trainer.train(5, 1)
    _load_any(trainer, folder)
    assert trainer.scheduler is not None
    trainer.scheduler.load_state_dict({**trainer.scheduler.state_dict(), "last_epoch": 2, "_step_count": 3})
    return Looked(whole_of(trainer), _go_on(trainer))


def _load_any(trainer: Trainer, folder: str) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    from mcore_rlhf.dcp import AnyReader

    assert trainer.optimizer is not None
    model, optimizer = get_state_dict(trainer.model, trainer.optimizer)
    state = {"model": model, "optimizer": optimizer}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as torch's own reader makes it warn
        dcp.load(state, storage_reader=AnyReader(folder))
    set_state_dict(
        trainer.model, trainer.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )


def ask_for_too_much(folder: str) -> str:
    """What ``dcp.load`` says where a state dict has a key that is not there."""
    import torch.distributed.checkpoint as dcp

    from mcore_rlhf.dcp import AnyReader

    try:
        dcp.load({"model": {"nowhere.weight": torch.zeros(2)}}, storage_reader=AnyReader(folder))
    except BaseException as error:  # torch gathers those of all ranks in a class that is no Exception
        return str(error)
    return ""


def load_and_save(how: Wrapped, folder: str, to: str, style: str) -> None:
    """Load by torch, and save by torch."""
    trainer = _loaded(how, folder, style)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch.distributed.checkpoint as dcp

        dcp.save(_state(trainer, style), checkpoint_id=to)


def _loaded(how: Wrapped, folder: str, style: str) -> Trainer:
    trainer = build(how, dist.get_rank())
    trainer.train(5, 1)  # a run that has all states, as RLinf makes them before it loads
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch.distributed.checkpoint as dcp

        state = _state(trainer, style)
        dcp.load(state, checkpoint_id=folder)
        _take(trainer, style, state)
    return trainer


def _go_on(trainer: Trainer) -> list[float]:
    torch.manual_seed(1000 + trainer.rank)  # random states are not what is looked at
    return trainer.train(2, 2)


def _state(trainer: Trainer, style: str) -> dict[str, Any]:
    """What such a run gives to ``dcp.save`` and ``dcp.load``."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    assert trainer.optimizer is not None
    assert trainer.scheduler is not None
    if style == "plain":
        return {"model": trainer.model.state_dict(), "optimizer": trainer.optimizer.state_dict()}
    options = StateDictOptions(flatten_optimizer_state_dict=style == "flat")
    model, optimizer = get_state_dict(trainer.model, trainer.optimizer, options=options)
    if style == "flat":
        step = {"step": torch.tensor(2, dtype=torch.int32)}
        return {**model, "optimizer": optimizer, "lr_scheduler": trainer.scheduler.state_dict(), "train_state": step}
    rest = {"lr_schedulers": [trainer.scheduler.state_dict()], "fsdp_version": "fsdp2"}
    return {"fsdp_checkpoint": {"model": model, "optimizers": optimizer, **rest}}


def _take(trainer: Trainer, style: str, state: Mapping[str, Any]) -> None:
    """Give what was loaded to model, optimizer and schedule."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

    assert trainer.optimizer is not None
    assert trainer.scheduler is not None
    if style == "plain":
        trainer.model.load_state_dict(state["model"])
        trainer.optimizer.load_state_dict(state["optimizer"])
        return
    options = StateDictOptions(flatten_optimizer_state_dict=style == "flat")
    own = state["fsdp_checkpoint"] if style == "rlinf" else state
    optimizer = own["optimizers"] if style == "rlinf" else own["optimizer"]
    model = own["model"] if style == "rlinf" else {k: v for k, v in own.items() if k not in _FLAT_REST}
    set_state_dict(
        trainer.model, trainer.optimizer, model_state_dict=model, optim_state_dict=optimizer, options=options
    )
    trainer.scheduler.load_state_dict(own["lr_schedulers"][0] if style == "rlinf" else own["lr_scheduler"])


_FLAT_REST = ("optimizer", "lr_scheduler", "train_state")


def load_llama(folder: str, config: dict[str, Any], of_any_format: bool = False) -> tuple[Whole, list[float]]:
    """Load into a Llama of transformers' under FSDP2, as RLinf's ``Checkpoint`` does, every key of its dictionary; and train on.

    Args:
        folder: A DCP folder, or a checkpoint of any format.
        config: Of the model.
        of_any_format: Whether it is read where it lies.

    Returns:
        All tensors and settings, put together by torch; losses of two steps.
    """
    import numpy as np
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(9)
    model: Any = LlamaForCausalLM(LlamaConfig(**config))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    named = list(model.named_parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for _, p in named if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for _, p in named if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=1.0,
    )
    trainer = Trainer(model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0), dist.get_rank())
    if of_any_format:
        _load_any(trainer, folder)
        return whole_of(trainer), [_llama_step(model, optimizer) for _ in range(2)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = _state(trainer, "rlinf")
        rng = {
            "cpu": torch.get_rng_state(),
            "numpy": np.random.get_state(),
            "random": (),
            "cuda": torch.zeros(16, dtype=torch.uint8),
        }
        state["fsdp_checkpoint"]["rng"] = rng
        dcp.load(state, checkpoint_id=folder)
        _take(trainer, "rlinf", state)
    torch.set_rng_state(state["fsdp_checkpoint"]["rng"]["cpu"])
    whole = whole_of(trainer)
    return whole, [_llama_step(model, optimizer) for _ in range(2)]


def _llama_step(model: Any, optimizer: torch.optim.Optimizer) -> float:
    words = (torch.arange(12) * 7 % 100).reshape(1, 12)
    loss = model(input_ids=words, labels=words).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def save_pieces(how: Wrapped, folder: str, files: Mapping[str, int] | None) -> Whole:
    """Train, and save the weights by torch twice: as pieces of Hugging Face's files, and as a DCP folder beside them."""
    import torch.distributed.checkpoint as dcp

    trainer = build(how, dist.get_rank())
    trainer.train(0, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = trainer.model.state_dict()
        where = None if files is None else dict(files)
        writer = dcp.HuggingFaceStorageWriter(f"{folder}/pieces", where, save_distributed=True)
        dcp.save(dict(state), storage_writer=writer)
        dcp.save({"model": state}, checkpoint_id=f"{folder}/dcp")
    return whole_of(trainer)


def load_pieces(how: Wrapped, folder: str) -> Whole:
    """Load pieces by torch into other weights."""
    import torch.distributed.checkpoint as dcp

    trainer = build(how, dist.get_rank())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = trainer.model.state_dict()
        dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(folder))
        trainer.model.load_state_dict(state)
    return whole_of(trainer)
