"""A file that is byte for byte one that is there is another name of it, and never anything else."""

from __future__ import annotations

import errno
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from mcore_rlhf import CheckpointManager, KeepLast, ManagerOptions, Retention, TorchEngine
from mcore_rlhf.cli.app import app
from mcore_rlhf.manager.run import steps
from mcore_rlhf.storage import host_pool
from mcore_rlhf.storage.manifest import check
from mcore_rlhf.storage.objects import open_url
from mcore_rlhf.storage.record_file import RecordFile
from mcore_rlhf.storage.twins import _holds_the_same
from tests.helpers.object_store import S3, url

OPTIONS = ManagerOptions(link_unchanged=True, fsync=False, catch_signals=False, on_existing="continue")
REF = "ref/state.pt"


class Run:
    """An actor that is trained, and a reference that is not."""

    def __init__(self, root: Path, options: ManagerOptions = OPTIONS) -> None:
        torch.manual_seed(0)
        self.root, self.options = root, options
        self.actor, self.ref = (torch.nn.Linear(64, 600) for _ in range(2))
        self.optimizer = torch.optim.Adam(self.actor.parameters())
        self.roles = {"actor": TorchEngine(self.actor, self.optimizer), "ref": TorchEngine(self.ref)}

    def save(self, *numbers: int, blocking: bool | None = None) -> None:
        with CheckpointManager(self.root, self.roles, options=self.options) as manager:
            for number in numbers:
                self.optimizer.zero_grad()
                self.actor(torch.randn(2, 64)).sum().backward()
                self.optimizer.step()
                manager.save(number, blocking=blocking)
            assert self.options.mirror is None or manager.wait_for_mirror(60) == []

    def file(self, number: int, name: str = REF) -> Path:
        return self.root / f"global_step_{number}" / name

    def is_linked(self, number: int, other: int, name: str = REF) -> bool:
        return self.file(number, name).samefile(self.file(other, name))

    def linked(self, number: int) -> object:
        return steps.read_manifest(self.root / f"global_step_{number}").report.get("linked")

    def require_whole(self, number: int) -> None:
        """A step is sound, and holds what is alive."""
        step = self.root / f"global_step_{number}"
        assert not check(step, steps.read_manifest(step))
        held = torch.load(self.file(number))["model"]["weight"]
        assert torch.equal(held.view(torch.int32), self.ref.weight.detach().view(torch.int32))


@pytest.fixture(params=["as a whole", "in waves"])
def options(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ManagerOptions:
    """Waves can be read once only."""
    monkeypatch.setattr(host_pool, "LEAST", 64 << 10)
    return replace(OPTIONS, max_host_memory=1 if request.param == "in waves" else None)


@pytest.mark.parametrize("given", [{"asynchronous": False}, {}, {"lazy_snapshot": True}, {"fsync": True}])
def test_a_frozen_reference_is_written_once(tmp_path: Path, options: ManagerOptions, given: dict[str, Any]) -> None:
    run = Run(tmp_path, replace(options, **given))
    run.save(1, 2)
    run.save(3)  # another process
    assert run.is_linked(1, 2) and run.is_linked(2, 3)  # noqa: PT018
    assert not run.is_linked(1, 2, "actor/state.pt")
    assert run.linked(1) is None
    assert run.linked(3) == {REF: f"../global_step_2/{REF}"}
    run.require_whole(3)


def test_by_default_every_step_has_files_of_its_own(tmp_path: Path) -> None:
    run = Run(tmp_path, replace(OPTIONS, link_unchanged=False))
    run.save(1, 2)
    assert not run.is_linked(1, 2)
    assert run.linked(2) is None


def test_one_bit_is_enough_to_be_written_again(tmp_path: Path, options: ManagerOptions, rng: random.Random) -> None:
    run = Run(tmp_path, options)
    run.save(1)
    bits = run.ref.weight.detach().view(-1).view(torch.int32)
    bits[rng.randrange(bits.numel())] ^= 1 << rng.randrange(31)
    run.save(2)
    assert not run.is_linked(1, 2)
    run.require_whole(2)


def test_a_damaged_file_is_not_linked(tmp_path: Path, options: ManagerOptions, rng: random.Random) -> None:
    """Wherever the damage is: in a tensor, in the pickle, in the directory at the end."""
    run = Run(tmp_path, options)
    run.save(1)
    data = bytearray(run.file(1).read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    run.file(1).write_bytes(data)
    run.save(2)
    assert not run.is_linked(1, 2)
    run.require_whole(2)


@pytest.mark.parametrize("nbytes", range(18))
def test_no_byte_is_passed_over(nbytes: int, rng: random.Random) -> None:
    one = np.frombuffer(rng.randbytes(nbytes + 1), np.uint8)[1:]  # where no word begins
    assert _holds_the_same(one, one.copy())
    for at in range(nbytes):
        other = one.copy()
        other[at] ^= 1 << rng.randrange(8)
        assert not _holds_the_same(one, other)
        assert not _holds_the_same(other, one)


@pytest.mark.parametrize("how", ["link", "fifo", "gone", "short", "folder", "no_manifest"])
def test_what_is_no_plain_file_of_the_step_is_not_linked(tmp_path: Path, options: ManagerOptions, how: str) -> None:
    run = Run(tmp_path, options)
    run.save(1)
    path = run.file(1)
    if how == "no_manifest":
        (run.root / "global_step_1" / "manifest.json").write_text("{")
    else:
        data = path.read_bytes()
        path.unlink()
        if how == "link":
            (tmp_path / "elsewhere").write_bytes(data)
            path.symlink_to(tmp_path / "elsewhere")
        elif how == "fifo":
            os.mkfifo(path)
        elif how == "short":
            path.write_bytes(data[:-1])
        elif how == "folder":
            path.mkdir()
    run.save(2)
    assert run.file(2).stat().st_nlink == 1
    run.require_whole(2)


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EPERM, errno.EMLINK])
def test_it_is_written_where_there_are_no_hard_links(
    tmp_path: Path, options: ManagerOptions, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    run = Run(tmp_path, options)
    run.save(1)

    def refuse(*_paths: object, **_given: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", refuse)
        run.save(2)
    assert not run.is_linked(1, 2)
    run.require_whole(2)


def test_two_roles_of_one_model_are_one_file(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.roles["tied"] = TorchEngine(run.ref)
    run.save(1)
    assert run.file(1).samefile(run.file(1, "tied/state.pt"))
    assert run.linked(1) == {"tied/state.pt": REF}
    run.require_whole(1)


def test_a_step_outlives_the_one_that_it_is_linked_with(tmp_path: Path) -> None:
    run = Run(tmp_path, replace(OPTIONS, keep=Retention((KeepLast(1),))))
    run.save(1, 2, 3)
    assert [step.step for step in steps.listed(tmp_path)] == [3]
    assert run.file(3).stat().st_nlink == 1
    run.require_whole(3)


def test_a_step_that_goes_while_it_is_looked_at_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path)
    run.save(1)
    real = RecordFile.finish

    def gone(self: RecordFile, *given: object, **more: object) -> object:
        if type(self) is not RecordFile:
            run.file(1).unlink()
        return real(self, *given, **more)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(RecordFile, "finish", gone)
        run.save(2)
    run.require_whole(2)


def test_another_file_of_its_name_is_not_taken_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was compared is what is linked, whatever has its name by then."""
    run = Run(tmp_path)
    run.save(1)
    real = RecordFile.finish

    def replaced(self: RecordFile, *given: object, **more: object) -> object:
        if type(self) is not RecordFile:
            run.file(1).rename(tmp_path / "aside")
            run.file(1).write_bytes(b"something else")
        return real(self, *given, **more)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(RecordFile, "finish", replaced)
        run.save(2)
    run.require_whole(2)


def held(root: Path, but: int = 0) -> dict[Path, tuple[object, ...]]:
    """Every file of all steps but one: its inode, times, mode and bytes. The number of its names may change."""
    found = dict[Path, tuple[object, ...]]()
    for path in root.glob("global_step_*/**/*"):
        if path.is_file() and f"global_step_{but}" not in path.relative_to(root).parts:
            facts = path.stat()
            found[path] = facts.st_ino, facts.st_mtime_ns, facts.st_mode, path.read_bytes()
    return found


def test_nothing_that_is_done_to_a_step_touches_a_file_of_another(tmp_path: Path, s3: S3) -> None:
    """A file of several names is all steps': neither what it holds changes, nor which file it is."""
    root, control = tmp_path / "run", tmp_path / "control"
    run = Run(root)
    run.save(1, 2, 3, 4)
    assert run.is_linked(1, 4)
    for but, command in (
        (0, f"verify {root} --deep"),
        (0, f"convert {root}/global_step_3 {tmp_path}/out --to torch --no-fsync"),
        (2, f"steps {root} --quarantine 2 --reason strange"),
        (2, f"steps {root} --release 2"),
        (1, f"prune {root} --keep-last 3"),
        (3, f"adopt {root}/global_step_3"),
        (0, f"resume-check --make-control {root} {control}"),
    ):
        if "adopt" in command:
            run.file(3, "manifest.json").unlink()
            assert steps.listed(root)[1].state == "foreign", "nothing but its manifest is gone"
        before = held(root, but)
        result = CliRunner().invoke(app, command.split(), prog_name="mcore-rlhf")
        assert result.exit_code == 0, f"{command}: {result.output}"
        assert held(root, but) == before, command
    before = held(root)
    assert not {inode for inode, *_ in before.values()} & {inode for inode, *_ in held(control).values()}
    run.options = replace(OPTIONS, mirror=url("linked"))
    run.save(5, 6)  # linked as well, and sent
    assert run.is_linked(4, 6)
    assert before.items() <= held(root).items()
    sent = steps.committed(open_url(url("linked")))
    assert [step.step for step in sent][-2:] == [5, 6]
    assert not any(check(step.path, steps.read_manifest(step.path)).found for step in sent)
