"""What a single process loads, and what is refused before anything is changed."""

from __future__ import annotations

import copy
import errno
import io
import logging
import os
import random
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mcore_rlhf.engines.plain import TorchEngine
from mcore_rlhf.errors import CheckpointError, Incomplete, LayoutMismatch, NotACheckpoint, StorageError
from mcore_rlhf.manager.rlhf.controls import AdaptiveKL
from mcore_rlhf.manager.rlhf.sampler import PromptSampler
from mcore_rlhf.manager.rlhf.state import RlhfState
from mcore_rlhf.manager.run import steps
from mcore_rlhf.manager.run.load import StepLoad
from mcore_rlhf.manager.run.manager import CheckpointManager, ManagerOptions
from mcore_rlhf.manager.run.steps import quarantine, release
from mcore_rlhf.storage import patience

QUIET = ManagerOptions(catch_signals=False, fsync=False, asynchronous=False)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk's own patience is not under test."""
    monkeypatch.setattr(os, "fsync", os.fstat)


class Run:
    """Two roles, a sampler and an RLHF state with a buffer, all of which show their value."""

    def __init__(self, value: float, hidden: int = 3, *, prompts: int = 20, dtype: torch.dtype = torch.float32) -> None:
        self.actor = torch.nn.Sequential(torch.nn.Linear(4, hidden), torch.nn.Linear(hidden, 2)).to(dtype)
        self.critic = torch.nn.Linear(150, 120)
        with torch.no_grad():
            for parameter in [*self.actor.parameters(), *self.critic.parameters()]:
                parameter.fill_(value)
        self.optimizer = torch.optim.SGD(self.actor.parameters(), lr=value + 0.5, momentum=0.9)
        for parameter in self.actor.parameters():
            self.optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, value)
        self.sampler = PromptSampler(prompts, seed=3, batch_size=2)
        for _ in range(int(value)):
            self.sampler.acknowledge_all(self.sampler.next_batch())
        self.state = RlhfState(kl=AdaptiveKL(0.1 + value, 6.0, 100), iteration=int(value), extra={"value": value})

    def roles(self) -> dict[str, TorchEngine]:
        return {"actor": TorchEngine(self.actor, self.optimizer), "critic": TorchEngine(self.critic)}

    def manager(self, root: Path, options: ManagerOptions = QUIET) -> CheckpointManager:
        return CheckpointManager(root, self.roles(), data=self.sampler, state=self.state, options=options)

    def everything(self) -> list[object]:
        tensors = [*self.actor.state_dict().values(), *self.critic.state_dict().values()]
        moments = [state["momentum_buffer"] for state in self.optimizer.state_dict()["state"].values()]
        groups = copy.deepcopy(self.optimizer.state_dict()["param_groups"])
        return [*[t.tolist() for t in tensors + moments], groups, self.sampler.state_dict(), self.state.to_json()]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("saved")
    for step in (1, 2):
        with Run(step).manager(root) as manager:
            manager.save(step)
    return root


@pytest.fixture
def root(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "root"))


def random_numbers() -> tuple[list[int], float]:
    return torch.get_rng_state().tolist(), random.Random(0).random()


def test_everything_is_restored(root: Path) -> None:
    run = Run(7)
    with run.manager(root) as manager:
        found = manager.load()
    assert found is not None
    assert found.step == 2
    assert run.everything() == Run(2).everything()


FILES = [
    "manifest.json", "actor/state.pt", "critic/state.pt", "data/data.pt", "rlhf/rlhf_state.json", "rng/rng_state.pt"
]  # fmt: skip


@pytest.mark.parametrize("file", FILES)
def test_any_flipped_bit(root: Path, file: str, rng: random.Random, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever a flipped bit makes of a file, the step is skipped with a reason, and the one before is loaded.

    Only in the manifest may a bit be flipped that means nothing: then the step is loaded as it was saved.
    """
    path = root / "global_step_2" / file
    whole = path.read_bytes()
    for _ in range(12):
        data = bytearray(whole)
        data[at := rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        run = Run(7)
        caplog.clear()
        with caplog.at_level(logging.WARNING), run.manager(root) as manager:
            found = manager.load()
        assert found is not None, f"byte {at}"
        if file == "manifest.json" and found.step == 2:
            assert run.everything() == Run(2).everything()
            continue
        assert found.step == 1, f"byte {at}"
        assert run.everything() == Run(1).everything()
        assert "global_step_2 is not resumed from: " in caplog.text


@pytest.mark.parametrize("file", FILES)
def test_any_file_cut_off_or_gone(root: Path, file: str, rng: random.Random) -> None:
    path = root / "global_step_2" / file
    for length in (rng.randrange(path.stat().st_size), 0, None):
        os.truncate(path, length) if length is not None else path.unlink()
        run = Run(7)
        with run.manager(root) as manager:
            found = manager.load()
        assert found is not None
        assert found.step == 1
        assert run.everything() == Run(1).everything()


def refused(run: Run, root: Path, error: type[CheckpointError], which: str | int = "auto") -> str:
    """What it says; nothing may have changed by it."""
    before, numbers = run.everything(), random_numbers()
    with run.manager(root) as manager, pytest.raises(error) as failure:
        manager.load(which)
    assert run.everything() == before
    assert random_numbers() == numbers
    return str(failure.value)


@pytest.mark.parametrize("which", ["auto", 2])
def test_another_shape(root: Path, which: str | int) -> None:
    text = refused(Run(7, hidden=5), root, LayoutMismatch, which)
    for name, stored, live in (
        ("0.weight", (3, 4), (5, 4)), ("0.bias", (3,), (5,)), ("1.weight", (2, 3), (2, 5)),
    ):  # fmt: skip
        assert f"{name} has shape {stored}, the model's has {live}" in text


def test_another_dtype(root: Path) -> None:
    assert "0.weight is float32, the model's is torch.float64" in refused(
        Run(7, dtype=torch.float64), root, LayoutMismatch
    )


def test_a_parameter_more_and_one_less(root: Path) -> None:
    run = Run(7)
    run.actor = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2, bias=False), torch.nn.Linear(2, 1))
    run.optimizer = torch.optim.SGD(run.actor.parameters(), lr=1.0)
    text = refused(run, root, LayoutMismatch)
    assert "2.weight is missing; the model has it with shape (1, 2)" in text
    assert "1.bias (2,) is not a parameter of the model" in text


def test_another_dataset(root: Path) -> None:
    assert "expected 30 prompts" in refused(Run(7, prompts=30), root, LayoutMismatch)


def test_all_that_does_not_fit_is_told_at_once(root: Path) -> None:
    run = Run(7, hidden=5)
    run.critic = torch.nn.Linear(9, 9)
    text = refused(run, root, LayoutMismatch)
    assert "actor/state.pt" in text
    assert "critic/state.pt" in text


@pytest.mark.parametrize("which", ["auto", 2])
def test_a_role_that_the_step_lacks(root: Path, which: str | int) -> None:
    """It is not damaged, and older steps will not have it either: it is refused, not skipped."""
    run, reward = Run(7), TorchEngine(torch.nn.Linear(2, 2))
    run.roles = lambda: {**Run.roles(run), "reward": reward}  # type: ignore[method-assign]
    text = refused(run, root, Incomplete, which)
    assert "the run has the roles actor, critic, reward; the step lacks reward" in text
    assert "The step has: actor, critic" in text


def test_a_role_that_the_run_lacks(root: Path) -> None:
    run = Run(7)
    with CheckpointManager(root, {"actor": run.roles()["actor"]}, options=QUIET) as manager:
        found = manager.load()
    assert found is not None
    assert any("critic: is in the step, and the run has no such role" in text for _, text in found.report.lines)
    assert run.actor.state_dict()["0.weight"][0, 0].item() == 2.0
    assert run.critic.state_dict()["weight"][0, 0].item() == 7.0


def test_weights_only(root: Path) -> None:
    run = Run(7)
    with run.manager(root) as manager:
        manager.load(optimizer=False)
    assert run.actor.state_dict()["0.weight"][0, 0].item() == 2.0
    assert run.optimizer.param_groups[0]["lr"] == 7.5


def test_a_step_in_quarantine(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    quarantine(root / "global_step_2", "the reward exploded")
    for expected in (1, 2):
        run = Run(7)
        with run.manager(root) as manager:
            found = manager.load()
        assert found is not None
        assert found.step == expected
        release(root / "global_step_2")
    assert "global_step_2 is not resumed from: in quarantine: the reward exploded" in caplog.text


def test_a_step_in_quarantine_that_is_named(root: Path) -> None:
    quarantine(root / "global_step_2")
    run = Run(7)
    with run.manager(root) as manager:
        found = manager.load(2)
    assert found is not None
    assert found.step == 2


@pytest.mark.parametrize("which", [9, "9", "nowhere", Path("nowhere"), "$HOME_OF_NOBODY/x", "~/nowhere/at/all"])
def test_what_does_not_exist(root: Path, which: str | int) -> None:
    assert "does not exist" in refused(Run(7), root, NotACheckpoint, which)


@pytest.mark.parametrize("which", [None, "none", "NULL", ""])
def test_nothing_is_loaded(root: Path, which: str | None) -> None:
    run = Run(7)
    with run.manager(root) as manager:
        assert manager.load(which) is None
    assert run.everything() == Run(7).everything()


def test_an_empty_root(tmp_path: Path) -> None:
    run = Run(7)
    with run.manager(tmp_path / "root") as manager:
        assert manager.load() is None
        with pytest.raises(NotACheckpoint, match="no committed step"):
            manager.load(must_exist=True)


@pytest.mark.parametrize("number", [1, 2])
def test_by_path(root: Path, tmp_path: Path, number: int) -> None:
    other = Run(7)
    moved = (root / f"global_step_{number}").rename(tmp_path / f"best of {number}")
    with other.manager(tmp_path / "another root") as manager:
        found = manager.load(moved)
    assert found is not None
    assert (found.step, found.path) == (number, moved)
    assert other.everything() == Run(number).everything()


def test_a_copy_under_another_name_that_is_damaged(root: Path, tmp_path: Path) -> None:
    moved = (root / "global_step_2").rename(tmp_path / "best")
    os.truncate(moved / "actor" / "state.pt", 50)
    assert "state.pt: has 50 bytes" in refused(Run(7), root, Incomplete, str(moved))


class Failing:
    """A disk that fails under one file, or folder, some times, then no more."""

    def __init__(self, patch: pytest.MonkeyPatch, under: Path, number: int, times: int = 10**9) -> None:
        self._under, self._number, self._left = str(under), number, times
        for module, name in ((os, "open"), (io, "open"), (os, "stat"), (os, "lstat"), (os, "listdir"), (os, "scandir")):
            patch.setattr(module, name, self._instead(getattr(module, name)))
        patch.setattr(patience, "_PAUSES", (0.0, 0.0, 0.0))

    def _instead(self, real: Callable[..., object]) -> Callable[..., object]:
        def call(path: object = ".", *args: object, **kwargs: object) -> object:
            if f"{path}/".startswith(f"{self._under}/") and self._left:
                self._left -= 1
                raise OSError(self._number, os.strerror(self._number), str(path))
            return real(path, *args, **kwargs)

        return call


UNDER = ["", "manifest.json", "critic", "critic/state.pt", "quarantined.json"]


@pytest.mark.parametrize("under", UNDER)
@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES, errno.ETIMEDOUT, errno.ENXIO])
def test_a_step_that_cannot_be_read_is_not_passed_over(
    root: Path, monkeypatch: pytest.MonkeyPatch, number: int, under: str
) -> None:
    """It may be sound: going on from the one before would overwrite it later."""
    run = Run(7)
    before = run.everything()
    with monkeypatch.context() as patch, run.manager(root) as manager:
        Failing(patch, root / "global_step_2" / under if under else root / "global_step_2", number)
        with pytest.raises(StorageError, match=rf"global_step_2.*: {os.strerror(number)}(?s:.*)--quarantine 2"):
            manager.load()
    assert run.everything() == before
    with run.manager(root) as manager:
        found = manager.load()
    assert found is not None
    assert found.step == 2


@pytest.mark.parametrize("under", UNDER)
def test_an_error_that_passes_is_asked_again(root: Path, monkeypatch: pytest.MonkeyPatch, under: str) -> None:
    run = Run(7)
    with monkeypatch.context() as patch, run.manager(root) as manager:
        Failing(patch, root / "global_step_2" / under if under else root / "global_step_2", errno.EIO, times=2)
        found = manager.load()
    assert found is not None
    assert found.step == 2
    assert run.everything() == Run(2).everything()


def test_a_root_that_cannot_be_listed_is_not_an_empty_one(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(7)
    with monkeypatch.context() as patch, run.manager(root) as manager:
        Failing(patch, root, errno.ESTALE)
        with pytest.raises(StorageError, match=f"{root}: cannot list: {os.strerror(errno.ESTALE)}"):
            manager.load()


def test_a_step_that_cannot_be_read_and_is_older_hinders_nobody(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, Run(7).manager(root) as manager:
        Failing(patch, root / "global_step_1", errno.EACCES)
        found = manager.load()
    assert found is not None
    assert found.step == 2


def test_an_error_after_the_state_is_live_is_none(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(7)
    with monkeypatch.context() as patch, run.manager(root) as manager:
        patch.setattr("mcore_rlhf.manager.run.load.left_behind", lambda *_: os.open("/nowhere/at/all", os.O_RDONLY))
        found = manager.load()
    assert found is not None
    assert run.everything() == Run(2).everything()


def test_one_that_reads_while_the_step_it_reads_is_deleted(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run that writes has saved a newer one meanwhile: that is taken, and nothing is called damaged."""
    run, said = Run(7), list[str]()
    newer = (root / "global_step_2").rename(root / "not yet")
    prepare = StepLoad.prepare

    def pruned(self: StepLoad) -> None:
        if newer.is_dir():
            newer.rename(root / "global_step_2")
            shutil.rmtree(root / "global_step_1")
        prepare(self)

    monkeypatch.setattr(StepLoad, "prepare", pruned)
    with run.manager(root, replace(QUIET, on_event=lambda event: said.append(event.text), read_only=True)) as manager:
        found = manager.load()
    assert found is not None
    assert found.step == 2
    assert "it was deleted, or saved again, while it was read" in said[0]


def test_one_that_reads_does_not_pass_over_a_step_that_lies_aside(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "PAUSES", (0.0,))
    aside = (root / "global_step_2").rename(root / ".global_step_2.old-1")
    run = Run(7)
    with run.manager(root, replace(QUIET, read_only=True)) as manager:
        for which in ("auto", 2, root / "global_step_2"):
            with pytest.raises(StorageError, match="its replacement was interrupted"):
                manager.load(which)
        monkeypatch.setattr(time, "sleep", lambda _: aside.rename(root / "global_step_2"))  # it was going on
        found = manager.load()
    assert found is not None
    assert found.step == 2


def test_a_tensor_of_the_state(tmp_path: Path) -> None:
    run = Run(1)
    run.state.extra["tensor"] = torch.arange(50_000)
    with run.manager(tmp_path) as manager:
        manager.save(1)
    again = Run(7)
    again.state.extra["tensor"] = torch.zeros(1)
    with again.manager(tmp_path) as manager:
        manager.load()
    assert torch.equal(again.state.extra["tensor"], torch.arange(50_000))  # type: ignore[arg-type]


def test_roles_on_a_scratch_disk_are_loaded_where_the_run_says_so(tmp_path: Path) -> None:
    root, scratch = tmp_path / "root", tmp_path / "scratch"
    with Run(1.0).manager(root) as manager:
        manager.save(1)
    (root / "global_step_1" / "actor").rename(scratch)
    (root / "global_step_1" / "actor").symlink_to(scratch)
    run = Run(2.0)
    with run.manager(root) as manager, pytest.raises(CheckpointError, match=r"(?s)leads out of .*follow_links=True"):
        manager.load(1)
    with run.manager(root, replace(QUIET, follow_links=True)) as manager:
        assert manager.load(1) is not None
    assert run.actor[0].weight.detach()[0, 0].item() == 1.0
