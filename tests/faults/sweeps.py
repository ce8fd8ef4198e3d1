"""Fails one call of the file system after another, and looks each time at what came of it: ``python -m tests.faults.sweeps FOLDER SWEEP…``.

It runs in a process that ``shim.c`` is preloaded into. What is always true: a step that was committed is still there, a command
that succeeds has done what it says, and what fails says on which file and why.
"""

from __future__ import annotations

import argparse
import errno
import faulthandler
import json
import os
import re
import shutil
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from click.testing import CliRunner

from mcore_rlhf import iter_weights
from mcore_rlhf.cli.app import app
from mcore_rlhf.errors import CheckpointError
from mcore_rlhf.manager.run import commit, root, steps
from mcore_rlhf.manager.run.retention import KeepLast, Retention
from mcore_rlhf.storage import appending, host_pool, patience
from mcore_rlhf.storage.manifest import Manifest, check
from mcore_rlhf.storage.publish import MANIFEST_NAME
from tests.crash.scenes import QUIET, SURVIVORS, SingleRun
from tests.faults.disk import CHANGING, EVERY, READING, WRITING, Disk
from tests.faults.producing import Produce
from tests.faults.scene import Scene, complaints
from tests.faults.watching import Watch

GOLDENS = Path(__file__).parents[1] / "goldens"
SYNCED = replace(QUIET, fsync=True)
OLD, NEW, AGAIN, NEXT = (SingleRun(seed) for seed in (1, 2, 3, 4))
FROZEN = SingleRun(5)
FROZEN.module.load_state_dict(OLD.module.state_dict())
"""A critic that is as it was."""
_WAVE = 16 << 10
_ID = re.compile(r"\d{13}-[0-9a-f]{8}")
_HANGS_S = 120


@dataclass
class Save(Scene):
    """A save of step 2 beside step 1, and another one behind it, when the disk is well again."""

    number: int
    background: bool = False
    keep: bool = False
    again: bool = False
    linked: bool = False
    waves: bool = False
    _raised: str = field(init=False, default="")

    def lay_out(self) -> None:
        OLD.save(self.base, 1, SYNCED)

    @property
    def _step(self) -> int:
        return 1 if self.again else 2

    def renew(self) -> None:
        super().renew()
        options = replace(
            SYNCED,
            keep=Retention((KeepLast(1),)) if self.keep else None,
            link_unchanged=self.linked,
            max_host_memory=_WAVE if self.waves else None,
        )
        host_pool.LEAST = _WAVE  # by default, so little is copied as a whole
        self._run = SingleRun(9)
        self._manager = self._run.manager(self.live, options)
        self._manager.load()
        self._become(self._new)

    @property
    def _new(self) -> SingleRun:
        return FROZEN if self.linked else NEW

    def _become(self, other: SingleRun) -> None:
        self._run.sharded.values.update({name: value.clone() for name, value in other.sharded.values.items()})
        self._run.module.load_state_dict(other.module.state_dict())
        self._run.state.kl = other.state.kl

    def act(self) -> str:
        self._raised = ""
        try:
            self._manager.save(self._step, blocking=not self.background)
            self._manager.wait()
        except CheckpointError as error:
            self._raised = f"{error}"
            return "refused"
        return "saved"

    def judge(self, word: str) -> list[str]:
        wrong = [] if word == "saved" or not self.number else complaints(self._raised, self.number, self.live)
        expected = {self._new: self._step} if word == "saved" else {OLD: 1, self._new: self._step}
        wrong += [f"{word}, and {found}" for found in _not_found(self.live, expected)]
        wrong += self._next()
        wrong += [f"left for ever: {name}" for name in _leftovers_after_a_start(self.live)]
        states = {(step.path.name, step.state) for step in steps.listed(self.live)}
        return wrong + [f"{name} is {state}" for name, state in states if state != "committed"]

    def _next(self) -> list[str]:
        try:
            self._become(NEXT)
            self._manager.save(3, blocking=True)
            self._manager.close()
        except Exception as error:
            return [f"the next save: {type(error).__name__}: {error}"]
        return [f"the next save is well, and {found}" for found in _not_found(self.live, {NEXT: 3})]


def _not_found(root: Path, expected: dict[SingleRun, int]) -> list[str]:
    """What a reader finds instead of one of the expected steps, bit for bit."""
    reader = SingleRun(99)
    try:
        with reader.manager(root, replace(QUIET, read_only=True)) as manager:
            found = manager.load("auto")
    except CheckpointError as error:
        return [f"a reader is refused: {error}"]
    for run, step in expected.items():
        if found is not None and found.step == step and reader.bits() == run.bits():
            return []
    return [f"a reader finds {found and found.step}"]


def _leftovers_after_a_start(root: Path) -> list[str]:
    with SingleRun(5).manager(root):
        pass
    return [_ID.sub("ID", name) for name in sorted(os.listdir(root)) if name.startswith(".") and name not in SURVIVORS]


@dataclass
class Load(Scene):
    """An automatic resume, of two steps; by the run that saves there, or by one that only reads."""

    number: int
    read_only: bool = False
    _raised: str = field(init=False, default="")

    def lay_out(self) -> None:
        OLD.save(self.base, 1, SYNCED)
        NEW.save(self.base, 2, SYNCED)

    def act(self) -> str:
        self._reader, self._raised = SingleRun(99), ""
        try:
            with self._reader.manager(self.live, replace(QUIET, read_only=self.read_only)) as manager:
                found = manager.load("auto")
        except CheckpointError as error:
            self._raised = str(error)
            return f"stopped: {type(error).__name__}"
        if found is None:
            return "nothing"
        return "newest" if found.step == 2 else "older"

    def judge(self, word: str) -> list[str]:
        wrong = [f"an intact newest step was passed over: {word}"] if word in ("older", "nothing") else []
        if word.startswith("stopped"):
            wrong += complaints(self._raised, self.number, self.live)
            told = "live tensors hold something of both" in self._raised or self._reader.bits() == SingleRun(99).bits()
            wrong += [] if told else ["stopped, and the live state is another"]
        if word == "newest" and self._reader.bits() != NEW.bits():
            wrong.append("loaded, and not bit for bit")
        return wrong + _not_found(self.live, {NEW: 2})


@dataclass
class Command(Scene):
    """A command on a root with two steps. Nothing in it is damaged, and none may say so."""

    number: int
    words: tuple[str, ...]
    _said: str = field(init=False, default="")

    def lay_out(self) -> None:
        OLD.save(self.base, 1, SYNCED)
        NEW.save(self.base, 2, SYNCED)

    def act(self) -> str:
        code, self._said = called([word.format(root=self.live) for word in self.words])
        return f"exit {code}"

    def judge(self, word: str) -> list[str]:
        fine = word in ("exit 0", "exit 2") or "not deleted: " in self._said
        wrong = [f"{word}: {self._said}"] if not fine or "Traceback" in self._said else []
        wrong += [f"exit 2: {found}" for found in complaints(self._said, self.number, self.live) if word == "exit 2"]
        if "is damaged" in self._said:
            wrong.append(f"calls damaged what is sound: {self._said}")
        return wrong + _not_found(self.live, {NEW: 2})


@dataclass
class Convert(Scene):
    """A conversion that replaces another one's target."""

    number: int
    to: str = "dcp"

    def lay_out(self) -> None:
        shutil.copytree(GOLDENS / "huggingface" / "llama_tied_bf16_sharded", self.base / "source")
        code, said = called(self._words(self.base))
        assert code == 0, said

    def _words(self, folder: Path, *more: str) -> list[str]:
        return ["convert", str(folder / "source"), str(folder / "out"), "--to", self.to, *more]

    def act(self) -> str:
        code, self._said = called(self._words(self.live, "--overwrite"))
        return f"exit {code}"

    def judge(self, word: str) -> list[str]:
        wrong = [f"{word}: {self._said}"] if word not in ("exit 0", "exit 2") else []
        wrong += [f"exit 2: {found}" for found in complaints(self._said, self.number, self.live) if word == "exit 2"]
        out = self.live / "out"
        if (out / MANIFEST_NAME).is_file():
            wrong += [found.message for found in check(out, Manifest.read(out / MANIFEST_NAME)).found]
        elif not list(self.live.glob(".out.old-*")):
            wrong.append(f"{word}, and there is no target any more")
        code, said = called(self._words(self.live, "--overwrite"))
        wrong += [f"the next one: {said}"] if code else []
        left = [_ID.sub("ID", name) for name in sorted(os.listdir(self.live)) if name not in ("source", "out")]
        return wrong + [f"left for ever: {name}" for name in left]


@dataclass
class Weigh(Scene):
    """The weights of a folder, read by whoever serves them."""

    number: int

    def lay_out(self) -> None:
        shutil.copytree(GOLDENS / "huggingface" / "llama_tied_bf16_sharded", self.base / "source")
        self._expected = self._read(self.base)

    def _read(self, folder: Path) -> list[tuple[str, bytes]]:
        read = iter_weights(folder / "source", tp_rank=1, tp_size=2)
        return [(name, tensor.view(torch.uint8).numpy().tobytes()) for name, tensor in read]

    def act(self) -> str:
        self._raised, self._found = "", self._expected
        try:
            self._found = self._read(self.live)
        except CheckpointError as error:
            self._raised = f"{error}"
            return "refused"
        return "read"

    def judge(self, word: str) -> list[str]:
        wrong = complaints(self._raised, self.number, self.live) if word == "refused" else []
        return wrong + ([] if self._found == self._expected else ["read, and not bit for bit"])


def called(words: list[str]) -> tuple[int, str]:
    """A command's exit code, and all that it said."""
    result = CliRunner().invoke(app, words)
    return result.exit_code, result.output


@dataclass(frozen=True)
class Sweep:
    """Which calls of what fail, and how.

    Args:
        scene: What meets them, given its folder and the error's number.
        error: Its number.
        calls: The calls that count.
        many: How many fail, from each one on.
        mode: See :meth:`~.disk.Disk.arm`.
    """

    scene: Callable[[Path, int], Scene]
    error: int
    calls: str
    many: int = 1
    mode: str = "fail"

    def run(self, folder: Path, every: int, first: int = 1) -> dict[str, object]:
        """Fail every so manieth call in turn.

        Returns:
            ``faults``: how many; ``outcomes``: how many had which; ``wrong``: what was, each with the calls at which.
        """
        patience._PAUSES = (0.001, 0.001, 0.001)  # how often it is tried again counts, not when
        commit._REMOVAL_S = root._PATIENCE_S = 0.1
        scene = self.scene(folder, self.error if self.mode == "fail" else 0)
        disk, at = Disk(scene.live), first
        outcomes, wrong = Counter[str](), dict[str, list[str]]()
        while True:
            faulthandler.dump_traceback_later(_HANGS_S, exit=True)
            scene.renew()
            disk.arm(at, self.error, self.calls, many=self.many, mode=self.mode)
            try:
                word = scene.act()
            except Exception as error:
                word = f"{type(error).__name__}: {error}"
            hits, call = disk.mend()
            if not hits:
                break
            outcomes[_ID.sub("ID", word)] += 1
            foreign = [f"foreign: {word}"] if "Error: " in word else []
            for found in [*foreign, *scene.judge(word)]:
                wrong.setdefault(_ID.sub("ID", found), []).append(f"{at}: {_ID.sub('ID', call)}")
            at += every
        faulthandler.cancel_dump_traceback_later()
        return {"faults": sum(outcomes.values()), "outcomes": dict(outcomes), "wrong": wrong}


def _save(folder: Path, number: int, **how: bool) -> Save:
    return Save(folder, number, **how)


def _produce(folder: Path, number: int, on_error: Literal["continue", "raise"] = "continue") -> Produce:
    appending._FIRST_RETRY_S = appending._LONGEST_RETRY_S = 0.002
    return Produce(folder, number, on_error)


SWEEPS: dict[str, Sweep] = {
    f"save {where}, {name}{' from there on' if many < 0 else ''}": Sweep(
        partial(_save, background=where == "behind training"),
        getattr(errno, name),
        CHANGING if many > 0 else WRITING,
        many,
    )
    for where in ("at once", "behind training")
    for name in ("ENOSPC", "EIO")
    for many in (1, -1)
}
SWEEPS |= {
    "save and delete, ESTALE": Sweep(partial(_save, background=True, keep=True), errno.ESTALE, CHANGING),
    "save and delete, EIO": Sweep(partial(_save, background=True, keep=True), errno.EIO, CHANGING),
    "save again, EIO": Sweep(partial(_save, again=True), errno.EIO, CHANGING),
    "save again, ENOSPC from there on": Sweep(partial(_save, again=True), errno.ENOSPC, WRITING, -1),
    **{
        f"save linked, {name}{what}": Sweep(partial(_save, linked=True), getattr(errno, name), calls, many)
        for name, what, calls, many in (
            ("EIO", "", CHANGING, 1),
            ("EIO", " of reads", READING, 1),
            ("ENOSPC", " from there on", WRITING, -1),
            ("EMLINK", " of links", "link", -1),
            ("EPERM", " of links", "link", -1),
            ("EXDEV", " of links", "link", -1),
        )
    },
    "save linked and delete, EIO": Sweep(partial(_save, linked=True, keep=True, background=True), errno.EIO, CHANGING),
    "save in waves, EIO": Sweep(partial(_save, waves=True, background=True), errno.EIO, CHANGING),
    "save in waves, ENOSPC from there on": Sweep(
        partial(_save, waves=True, background=True), errno.ENOSPC, WRITING, -1
    ),
    **{
        f"save linked in waves, {name}{what}": Sweep(
            partial(_save, linked=True, waves=True, background=True), getattr(errno, name), calls
        )
        for name, what, calls in (("EIO", "", CHANGING), ("EIO", " of reads", READING), ("EMLINK", " of links", "link"))
    },
    "save, short writes": Sweep(partial(_save, background=True), 0, "write", mode="short"),
    "save, short writes from there on": Sweep(partial(_save, background=True), 0, "write", -1, "short"),
    "save, EIO of close": Sweep(partial(_save, background=True), errno.EIO, "close"),
    "save, EIO of reads": Sweep(partial(_save, background=True), errno.EIO, READING),
    "save and delete, EIO of reads": Sweep(partial(_save, background=True, keep=True), errno.EIO, READING),
    **{
        f"load, {name}{' from there on' if many < 0 else ''}{', read only' if read_only else ''}": Sweep(
            partial(Load, read_only=read_only), getattr(errno, name), READING, many
        )
        for name, read_only in (
            ("EIO", False),
            ("EIO", True),
            ("ESTALE", False),
            ("EACCES", False),
            ("ETIMEDOUT", False),
        )
        for many in (1, -1)
    },
    **{
        f"{command}, {name}{' from there on' if many < 0 else ''}": Sweep(
            partial(Command, words=words), getattr(errno, name), READING, many
        )
        for command, words in {
            "verify": ("verify", "{root}/global_step_2"),
            "verify the root": ("verify", "{root}"),
            "inspect": ("inspect", "{root}/global_step_2"),
            "steps": ("steps", "{root}"),
            "prune": ("prune", "{root}", "--keep-last", "1", "--include-damaged"),
            "diff": ("diff", "{root}/global_step_2", "{root}/global_step_2"),
        }.items()
        for name, many in (("EIO", 1), ("EIO", -1), ("EACCES", -1))
    },
    **{f"convert, {name}": Sweep(Convert, getattr(errno, name), CHANGING) for name in ("EIO", "ENOSPC", "ESTALE")},
    "weights, EIO of reads": Sweep(Weigh, errno.EIO, READING),
    "weights, ESTALE of reads from there on": Sweep(Weigh, errno.ESTALE, READING, -1),
    "convert, EIO of reads": Sweep(Convert, errno.EIO, READING),
    "convert to torch, EIO": Sweep(partial(Convert, to="torch"), errno.EIO, CHANGING),
    "convert to torch, ENOSPC from there on": Sweep(partial(Convert, to="torch"), errno.ENOSPC, WRITING, -1),
    "convert to torch, EIO of reads": Sweep(partial(Convert, to="torch"), errno.EIO, READING),
    **{
        f"rollouts, {name}{' from there on' if many < 0 else ''}{', raised' if how == 'raise' else ''}": Sweep(
            partial(_produce, on_error=how), getattr(errno, name), CHANGING if many > 0 else WRITING, many
        )
        for name, many, how in (
            ("ENOSPC", 1, "continue"),
            ("EIO", 1, "continue"),
            ("ESTALE", 1, "continue"),
            ("ENOSPC", -1, "continue"),
            ("EIO", -1, "continue"),
            ("EIO", 1, "raise"),
        )
    },
    **{
        f"watch, {name}{' from there on' if many < 0 else ''}": Sweep(
            Watch, getattr(errno, name), CHANGING if many > 0 else WRITING, many
        )
        for name, many in (("EIO", 1), ("ENOSPC", 1), ("ESTALE", 1), ("ENOSPC", -1))
    },
    "watch, EIO of reads": Sweep(Watch, errno.EIO, READING),
    "rollouts, EIO of reads": Sweep(_produce, errno.EIO, READING),
    "rollouts, EIO of everything from there on": Sweep(_produce, errno.EIO, EVERY, -1),
    "rollouts, short writes": Sweep(_produce, 0, "write", mode="short"),
    "rollouts, EIO of locks and close": Sweep(_produce, errno.EIO, "flock,close"),
}


def _forked(sweep: str, folder: Path, every: int, first: int) -> dict[str, object]:
    """In a child: a sweep changes how long this package waits, and importing takes longer than most sweeps."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with os.fdopen(write, "w") as answer:
                json.dump(SWEEPS[sweep].run(folder, every, first), answer)
            code = 0
        except BaseException:
            traceback.print_exc()
        os._exit(code)
    os.close(write)
    with os.fdopen(read) as told:
        text = told.read()
    os.waitpid(child, 0)
    if not text:
        raise SystemExit(f"{sweep}: it ended before its end")
    found: dict[str, object] = json.loads(text)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "sweeps", nargs="+", metavar="SWEEP[:EVERY[:FIRST]]", help="only every so manieth call, from one on"
    )
    given = parser.parse_args()
    asked = [(name, *map(int, more)) for name, *more in (word.split(":") for word in given.sweeps)]
    json.dump(
        {name: _forked(name, given.folder / str(at), *(*more, 1, 1)[:2]) for at, (name, *more) in enumerate(asked)},
        sys.stdout,
        indent=1,
    )
