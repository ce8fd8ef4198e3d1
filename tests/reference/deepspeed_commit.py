"""What a rank does in real DeepSpeed whose checkpoints are committed: saves, saves while another rank fails or dies, and loads."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from mcore_rlhf.integrations.deepspeed_checkpoints import TagOptions, attach
from tests.reference import deepspeed_resident as resident
from tests.reference.deepspeed_live import Live, Seen, look
from tests.reference.deepspeed_models import Setting, build_engine

OPTIONS = TagOptions(fsync=False, timeout=30.0)


def save_twice(setting: Setting, root: str) -> Seen:
    """Two steps, a save, a save of another tag that is not named as the last one, and two more steps."""
    resident.begin()
    engine = build_engine(setting, seed=1)
    attach(engine, OPTIONS)
    resident.train(engine, resident.FIRST, resident.SAVED)
    assert engine.save_checkpoint(root, client_state=resident.CLIENT) is True
    engine.save_checkpoint(root, tag="best", client_state=resident.CLIENT, save_latest=False)
    return resident._train_on(engine, setting, resident.CLIENT)


def load_verified(setting: Setting, root: str, tag: str | None) -> Seen | str:
    """Other weights, a load that is verified, and two steps; or why there is no load."""
    resident.begin()
    engine = build_engine(setting, seed=9)
    attach(engine, OPTIONS)
    try:
        path, client = engine.load_checkpoint(root, tag)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return (
        "nothing"
        if path is None
        else resident._train_on(engine, setting, {key: client[key] for key in resident.CLIENT})
    )


def _where_it_writes(engine: Any, action: Callable[[], None]) -> None:
    """Do something in the middle of a file, as DeepSpeed's own checkpoint engine writes it."""
    inner = engine.checkpoint_engine._inner
    save = inner.save

    def failing(state_dict: Any, path: str) -> None:
        with open(path, "wb") as file:
            file.write(b"half")
        inner.save = save
        action()

    inner.save = failing


def _full_disk() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def save_with_one_that_fails(setting: Setting, root: str, rank: int) -> tuple[str, list[str], Live]:
    """Save a tag; save it again, which fails on one rank; save another.

    Returns:
        What was raised, what lay in the root then, and the engine as it was first saved.
    """
    resident.begin()
    engine = build_engine(setting, seed=1)
    attach(engine, OPTIONS)
    resident.train(engine, 0, 1)
    engine.save_checkpoint(root, "a", client_state=resident.CLIENT)
    before = look(engine, setting.stage)
    resident.train(engine, 1, 2)
    if dist.get_rank() == rank:
        _where_it_writes(engine, _full_disk)
    said = ""
    try:
        engine.save_checkpoint(root, "a", client_state=resident.CLIENT)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    dist.barrier()
    left = sorted(os.listdir(root))
    dist.barrier()
    engine.save_checkpoint(root, "b", client_state=resident.CLIENT)
    return said, left, before


def save_and_die(setting: Setting, root: str, rank: int) -> None:
    """Save a tag, and have a rank killed while it is saved again."""
    resident.begin()
    engine = build_engine(setting, seed=1)
    attach(engine, OPTIONS)
    resident.train(engine, 0, 1)
    engine.save_checkpoint(root, "a", client_state=resident.CLIENT)
    resident.train(engine, 1, 2)
    if dist.get_rank() == rank:
        _where_it_writes(engine, lambda: os.kill(os.getpid(), signal.SIGKILL))
    engine.save_checkpoint(root, "a", client_state=resident.CLIENT)


def trained(setting: Setting, steps: int) -> Live:
    """A run that saves nothing."""
    resident.begin()
    engine = build_engine(setting, seed=1)
    resident.train(engine, 0, steps)
    return look(engine, setting.stage)


def loaded_by_deepspeed(setting: Setting, root: str, tag: str | None = None) -> Live:
    """What DeepSpeed alone loads."""
    resident.begin()
    engine = build_engine(setting, seed=9)
    path, _ = engine.load_checkpoint(root, tag)
    assert path is not None
    return look(engine, setting.stage)


def refusals(setting: Setting) -> list[str]:
    """What is said of engines that write what cannot be published as a whole, and of tags that no folder can have."""
    resident.begin()
    engine = build_engine(setting, seed=1)
    said = []
    kind = type(engine)
    for name in ("is_decoupled", "use_node_local_storage"):
        owner = engine.checkpoint_engine if name == "is_decoupled" else engine
        setattr(owner, name, lambda: True)
        said.append(_said(lambda: attach(engine)))
        delattr(owner, name)
        assert type(engine) is kind
    attach(engine, OPTIONS)
    attach(engine, OPTIONS)  # a second time nothing is done
    assert type(engine).__mro__[1:3] == (type(engine).__mro__[1], kind)
    said += [_said(lambda tag=tag: engine.save_checkpoint("/nowhere", tag)) for tag in ("a/b", "..", "")]  # type: ignore[misc]
    return [*said, _said(lambda: engine.save_checkpoint("s3://bucket/run", "a"))]


def _said(action: Callable[[], object]) -> str:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
