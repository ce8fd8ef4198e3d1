"""Saves through :class:`mcore_rlhf.dcp.Writer` that are killed at every change of the file system, each in a fork of this process.

``python -m tests.crash.dcp_writer_kills FOLDER`` prints as JSON what lay there after each kill, before anything cleaned up and after.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from mcore_rlhf.dcp import Writer, clean_up
from mcore_rlhf.storage.manifest import Manifest, check

_CHANGES = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.link", "os.truncate"}
OLD, NEW = 1.0, 2.0


def save(folder: Path, value: float) -> None:
    """Save two tensors, over what is there."""
    state = {"model": {"weight": torch.full((64, 3), value), "bias": torch.full((5,), value)}, "step": int(value)}
    dcp.save(state, storage_writer=Writer(folder, overwrite=True, fsync=False), no_dist=True)


def loaded(folder: Path) -> float | None:
    """The value that torch loads; None where there is no folder. What is there is as its manifest says."""
    if not folder.exists():
        return None
    state = {"model": {"weight": torch.zeros(64, 3), "bias": torch.zeros(5)}, "step": 0}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    found = {*state["model"]["weight"].flatten().tolist(), *state["model"]["bias"].tolist(), float(state["step"])}  # type: ignore[index]
    manifest = Manifest.read(folder / "mcore_rlhf.json")
    assert len(found) == 1
    assert not check(folder, manifest)
    assert {path.name for path in folder.iterdir()} == {*manifest.files, "mcore_rlhf.json"}
    return float(found.pop())


class Killer:
    """Kills this process at one of its changes of the file system, or counts them."""

    def __init__(self, at: int) -> None:
        self.at, self.count = at, 0
        sys.addaudithook(self._heard)

    def _heard(self, event: str, args: tuple[Any, ...]) -> None:
        if event not in _CHANGES or (event == "open" and not args[2] & (os.O_WRONLY | os.O_RDWR)):
            return
        self.count += 1
        if self.count == self.at:
            os.kill(os.getpid(), signal.SIGKILL)


def forked(action: Callable[[], object]) -> tuple[int, Any]:
    """Do something in a child: how it ended, and what it returned."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(60)
            os.write(write, json.dumps(action()).encode())
            code = 0
        except BaseException:
            traceback.print_exc()
        os._exit(code)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        text = pipe.read()
    return os.waitpid(child, 0)[1], json.loads(text) if text else None


def killed(root: Path, at: int) -> dict[str, object]:
    """Replace a checkpoint, be killed at a change, look, clean up, look, and save the next one."""
    older, folder, following = root / "step_1", root / "step_2", root / "step_3"

    def run() -> object:
        save(older, OLD)
        save(folder, OLD)
        killer = Killer(at)
        save(folder, NEW)
        return killer.count

    status, changes = forked(run)
    at_once = forked(lambda: [loaded(older), loaded(folder)])
    if at % 2:
        forked(lambda: clean_up(root))
        after = forked(lambda: [loaded(older), loaded(folder)])
    else:  # the next save does it, whatever it is called
        after = forked(lambda: [save(following, NEW), loaded(older), loaded(folder)][1:])
    left = sorted(path.name for path in root.iterdir() if path.name.startswith("."))
    return {"at": at, "status": status, "changes": changes, "at_once": at_once, "after": after, "left": left}


def main(folder: Path) -> list[dict[str, object]]:
    """A save that is not killed, and one for each of its changes."""
    warnings.simplefilter("ignore")
    save(folder / "imported" / "step_1", OLD)  # what is imported late is so once, not in every child
    loaded(folder / "imported" / "step_1")
    gc.freeze()
    whole = killed(folder / "whole", -1)
    return [whole, *(killed(folder / f"at-{at}", at) for at in range(1, int(str(whole["changes"])) + 1))]


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
