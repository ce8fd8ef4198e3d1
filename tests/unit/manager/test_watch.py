"""What a watcher makes of a run's steps, with a conversion that copies."""

from __future__ import annotations

import errno
import multiprocessing
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from mcore_rlhf.cli import converting, watching
from mcore_rlhf.errors import LayoutMismatch, StorageError, UsageError
from mcore_rlhf.manager import watch, watched_results
from mcore_rlhf.manager.run import steps
from mcore_rlhf.manager.run.retention import KeepEvery, KeepLast, delete
from mcore_rlhf.manager.watch import Watcher, WatchEvent
from mcore_rlhf.manager.watched_results import FolderResults
from mcore_rlhf.storage.notes import FolderNotes
from tests.unit.cli.conftest import GOLDENS
from tests.unit.manager.roots import make_step


@dataclass
class Runs:
    """A run, its watcher, and what was said."""

    folder: Path
    events: list[WatchEvent] = field(default_factory=list)
    meanwhile: Callable[[int], None] = lambda step: None
    made: list[int] = field(default_factory=list)

    @property
    def root(self) -> Path:
        return self.folder / "run"

    @property
    def out(self) -> Path:
        return self.folder / "out"

    def convert(self, step: int, target: Path) -> None:
        self.made.append(step)
        if target.exists():
            shutil.rmtree(target)
        shutil.copytree(steps.step_folder(self.root, step), target)
        self.meanwhile(step)

    def watcher(self, **given: Any) -> Watcher:
        return Watcher(self.root, self.out, self.convert, **{"settle": 0.0, "say": self.events.append, **given})

    def all(self, **given: Any) -> list[str]:
        """Look until nothing is left; what was said."""
        self.events.clear()
        watcher = self.watcher(**given)
        try:
            while watcher.look():
                pass
        finally:
            watcher.close()
        return [f"{event.kind} {event.step}" for event in self.events]

    def replace(self, step: int) -> None:
        """The same step again, by another commit."""
        delete(self.root / f"global_step_{step}")
        manifest = make_step(self.root, step) / "manifest.json"
        manifest.write_text(manifest.read_text().replace("0badcafe", "00c0ffee"))

    def results(self) -> list[int]:
        return [step.step for step in steps.committed(self.out)]


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    found = Runs(tmp_path)
    for step in (1, 2, 3):
        make_step(found.root, step)
    return found


def test_the_newest_first_and_each_once(runs: Runs) -> None:
    assert runs.all() == ["converted 3", "converted 2", "converted 1"]
    assert runs.all() == []
    make_step(runs.root, 4)
    assert runs.all() == ["converted 4"]
    assert runs.results() == [1, 2, 3, 4]


def test_what_would_go_at_once_is_passed_over(runs: Runs) -> None:
    assert runs.all(keep=(KeepLast(1), KeepEvery(2))) == ["skipped 1", "converted 3", "converted 2"]
    make_step(runs.root, 5)
    assert runs.all(keep=(KeepLast(1), KeepEvery(2))) == ["skipped 1", "converted 5", "retired 3"]
    assert runs.results() == [2, 5]


def test_a_step_of_a_lower_number_comes_too(runs: Runs) -> None:
    delete(runs.root / "global_step_2")
    assert runs.all() == ["converted 3", "converted 1"]
    make_step(runs.root, 2)
    assert runs.all() == ["converted 2"]


def test_a_replaced_step_is_made_anew(runs: Runs) -> None:
    runs.all()
    runs.replace(2)
    assert runs.all() == ["converted 2"]
    now, then = (steps.read_manifest(folder / "global_step_2").transaction for folder in (runs.root, runs.out))
    assert now == then


def test_a_step_that_is_replaced_meanwhile_is_not_published(runs: Runs) -> None:
    def replace(step: int) -> None:
        runs.meanwhile = lambda step: None
        runs.replace(step)

    runs.meanwhile = replace
    assert runs.all() == ["failed 3", "converted 3", "converted 2", "converted 1"]
    assert "step 3 was replaced while it was converted" in runs.events[0].text


def test_a_step_that_a_pruner_takes_meanwhile(runs: Runs) -> None:
    runs.meanwhile = lambda step: delete(runs.root / f"global_step_{step}") and None
    assert runs.all() == ["failed 3", "failed 2", "failed 1"]
    assert "step 3 is gone" in runs.events[0].text
    assert runs.results() == []


def test_one_that_cannot_be_converted_is_not_tried_for_ever(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(watch.time, "monotonic", lambda: now[0])

    def refuse(step: int) -> None:
        if step == 3:
            raise LayoutMismatch("it has 3 layers")

    runs.meanwhile = refuse
    watcher = runs.watcher()
    for _ in range(20):
        watcher.look()
        now[0] += 100
    assert runs.made.count(3) == 3
    assert runs.results() == [1, 2]
    assert [event.text for event in runs.events if event.kind == "failed"][-1].endswith("when it changes")
    runs.replace(3)
    runs.meanwhile = lambda step: None
    assert watcher.look()
    assert runs.results() == [1, 2, 3]
    watcher.close()


def test_a_root_that_vanishes_is_waited_for(runs: Runs) -> None:
    watcher = runs.watcher()
    runs.root.rename(runs.folder / "away")
    assert not watcher.look()
    assert not watcher.look()
    assert [event.kind for event in runs.events] == ["waiting"]
    (runs.folder / "away").rename(runs.root)
    assert watcher.look()
    watcher.close()


def test_two_watchers(runs: Runs) -> None:
    watcher = runs.watcher()
    with pytest.raises(StorageError, match="another watcher, or a run, writes here"):
        runs.watcher()
    watcher.close()
    runs.watcher().close()


@pytest.mark.parametrize("out", ["run", "run/out", "."])
def test_the_run_itself_is_no_target(runs: Runs, out: str) -> None:
    with pytest.raises(UsageError, match="lies in the run that is watched, or holds it"):
        Watcher(runs.root, runs.folder / out, runs.convert)
    assert not (runs.root / "out").exists()


def test_another_trainers_step_counts_when_it_stays_as_it_is(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(watch.time, "monotonic", lambda: now[0])
    delete(runs.root / "global_step_3")
    shutil.copytree(GOLDENS / "tp1_bf16_do", runs.root / "global_step_3" / "actor")
    watcher = runs.watcher(settle=30.0)
    while watcher.look():
        pass
    assert runs.made == [2, 1]
    now[0] = 20.0
    (runs.root / "global_step_3" / "actor" / "more").write_bytes(b"more")
    assert not watcher.look()
    now[0] = 40.0
    assert not watcher.look()
    now[0] = 51.0
    assert watcher.look()
    assert runs.made == [2, 1, 3]
    watcher.close()


def test_the_command_runs_without_a_shell(runs: Runs) -> None:
    script = runs.folder / "say.py"
    script.write_text("import sys; open(sys.argv[1], 'a').write(repr(sys.argv[2:]) + '\\n')")
    command = f"{sys.executable} {script} {runs.folder / 'said'} '{{path}};{{step}}' $HOME"
    assert runs.all(command=command)[:2] == ["converted 3", "ran 3"]
    lines = (runs.folder / "said").read_text().splitlines()
    assert lines[0] == repr([f"{runs.out / 'global_step_3'};3", "$HOME"])
    assert len(lines) == 3
    assert runs.all(command=command) == [], "once on each"


def test_a_command_that_fails_or_hangs_ends_nothing(runs: Runs) -> None:
    assert runs.all(command="false")[:2] == ["converted 3", "failed 3"]
    assert "ended with 1" in runs.events[1].text
    make_step(runs.root, 4)
    assert runs.all(command="sleep 100", command_timeout=0.2) == ["converted 4", "failed 4"]
    assert "has not ended within 0.2 s" in runs.events[1].text
    make_step(runs.root, 5)
    assert runs.all(command="no-such-command") == ["converted 5", "failed 5"]
    with pytest.raises(UsageError, match="is no command line"):
        runs.watcher(command="'")


def test_a_command_that_a_kill_prevented_runs_later(runs: Runs) -> None:
    class Killed(BaseException):
        pass

    def kill(*given: object) -> str:
        raise Killed

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(watch, "_outcome", kill)
        with pytest.raises(Killed):
            runs.all(command="true")
    assert runs.all(command="true") == ["ran 3", "converted 2", "ran 2", "converted 1", "ran 1"]


def test_quarantined_steps_are_left_alone(runs: Runs) -> None:
    steps.quarantine(runs.root / "global_step_3", "reward collapsed")
    assert runs.all() == ["converted 2", "converted 1"]


def test_what_it_did_not_make_stays(runs: Runs) -> None:
    """Its target may be a run's root, whose steps are no results."""
    make_step(runs.out, 3, nbytes=7)
    before = (runs.out / "global_step_3" / "manifest.json").read_bytes()
    assert runs.all(keep=(KeepLast(1),))[-1] == "failed 3"
    assert runs.made == []
    assert "no watcher made it" in runs.events[-1].text
    assert (runs.out / "global_step_3" / "manifest.json").read_bytes() == before


@pytest.mark.parametrize("at", ["note", "move", "sync"])
def test_a_kill_while_it_publishes(runs: Runs, at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(BaseException):
        pass

    runs.all()
    runs.replace(3)

    def kill(*given: object) -> None:
        raise Killed

    owner, name = (FolderResults, "say") if at == "note" else (watched_results, "sync_folder" if at == "sync" else at)
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, kill)
        with pytest.raises(Killed):
            runs.all()
    runs.all()
    assert runs.results() == [1, 2, 3]
    now, then = (steps.read_manifest(folder / "global_step_3").transaction for folder in (runs.root, runs.out))
    assert now == then


def test_a_link_aside_is_not_followed(runs: Runs) -> None:
    (runs.folder / "elsewhere").mkdir()
    runs.out.mkdir()
    (runs.out / ".watch").symlink_to(runs.folder / "elsewhere")
    with pytest.raises(UsageError, match="is a symbolic link"):
        runs.watcher()


def test_a_full_disk_is_tried_again_for_ever(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(watch.time, "monotonic", lambda: now[0])

    def full(step: int) -> None:
        raise StorageError("No space left on device")

    runs.meanwhile = full
    watcher = runs.watcher()
    for _ in range(40):
        watcher.look()
        now[0] += 700
    assert len(runs.made) > 9
    runs.meanwhile = lambda step: None
    while watcher.look():
        pass
    assert runs.results() == [1, 2, 3]
    watcher.close()


def test_a_file_system_that_is_away_for_a_while_is_no_fault_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the child says that converts; after three tries, a fault of the step's would not be tried again."""

    def gone(job: object, quiet: bool) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), "run/global_step_1/actor")

    monkeypatch.setattr(converting, "run", gone)
    here, there = multiprocessing.Pipe(duplex=False)
    if (pid := os.fork()) == 0:
        watching._convert(there, {"source": "a", "target": "b", "to": "hf"}, None)
        os._exit(0)
    os.waitpid(pid, 0)
    assert here.poll(1), "it said nothing"
    assert (
        here.recv_bytes().decode()
        == f"{watching._OF_STORAGE}run/global_step_1/actor: cannot read or write: Stale file handle"
    )


def test_a_disk_that_is_full_when_a_command_has_run(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """That it has run is noted later; it is not run again, and the watcher does not end."""
    real, full = FolderNotes.put, [True]

    def put(notes: FolderNotes, name: str, data: bytes, *, once: bool = False) -> bool:
        if full[0] and b'"ran"' in data:
            raise StorageError(f"{notes}/{name}: cannot write: No space left on device")
        return real(notes, name, data, once=once)

    monkeypatch.setattr(FolderNotes, "put", put)
    said = runs.folder / "said"
    script = runs.folder / "say.py"
    script.write_text(f"import sys; open({str(said)!r}, 'a').write(sys.argv[1])")
    command = f"{sys.executable} {script} {{step}}"
    watcher = runs.watcher(command=command)
    for _ in range(3):
        assert not watcher.look()
    assert said.read_text() == "3"
    assert [(event.kind, event.step) for event in runs.events] == [("converted", 3), ("ran", 3), ("failed", None)]
    full[0] = False
    while watcher.look():
        pass
    watcher.close()
    assert said.read_text() == "321"
    assert runs.all(command=command) == []


def test_a_command_may_take_the_result_away(runs: Runs) -> None:
    assert runs.all(command="rm -r {path}") == [f"{kind} {step}" for step in (3, 2, 1) for kind in ("converted", "ran")]
    assert runs.events[1].text == "step 3: rm has run, and the result is there no more"
    assert runs.all(command="rm -r {path}", keep=(KeepLast(2),)) == []
    runs.replace(2)
    assert runs.all(command="rm -r {path}") == ["converted 2", "ran 2"]


@pytest.mark.parametrize("content", [b"", b"\0" * 60, b'{"step": 2, "source": 5}', b'{"step": 3, "source": "x"}'])
def test_a_note_that_a_power_failure_has_spoilt(runs: Runs, content: bytes) -> None:
    """Nobody knows what state of the step that result is of: it is made anew, and nothing is held up."""
    runs.all()
    (runs.out / ".watch" / "step-2.json").write_bytes(content)
    assert runs.all() == ["converted 2"]
    assert runs.results() == [1, 2, 3]
    assert runs.all() == []


def test_a_run_that_went_back_is_followed(runs: Runs) -> None:
    for step in (9, 10):
        make_step(runs.root, step)
    runs.all(keep=(KeepLast(2),))
    for step in (9, 10):
        delete(runs.root / f"global_step_{step}")
    make_step(runs.root, 4)
    assert runs.all(keep=(KeepLast(2),))[:2] == ["skipped 1", "skipped 2"]
    assert runs.results() == [3, 4, 9, 10]
    assert runs.all(keep=(KeepLast(2),)) == ["skipped 1", "skipped 2"]


def test_what_a_killed_conversion_left_goes(runs: Runs) -> None:
    (runs.out / ".watch" / "global_step_7").mkdir(parents=True)
    runs.all()
    assert not (runs.out / ".watch" / "global_step_7").exists()


def test_no_result_is_lost_where_the_next_cannot_be_published(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    runs.all()
    before = (runs.out / "global_step_3" / "manifest.json").read_bytes()
    runs.replace(3)
    real, moves = watched_results.move, list[Path]()

    def fail(path: Path, to: Path) -> None:
        moves.append(to)
        if len(moves) == 2:
            raise OSError(28, "No space left on device")
        real(path, to)

    with monkeypatch.context() as patched:
        patched.setattr(watched_results, "move", fail)
        assert runs.all() == ["failed 3"]
    assert (runs.out / "global_step_3" / "manifest.json").read_bytes() == before
    assert runs.all() == ["converted 3"]


@pytest.mark.parametrize("command", [" ", "''"])
def test_a_command_without_a_program_is_refused(runs: Runs, command: str) -> None:
    with pytest.raises(UsageError, match="names no program"):
        runs.watcher(command=command)


def test_only_results_are_retired(runs: Runs) -> None:
    """What lies beside them by the name of a step is somebody else's; a note that names no step is none."""
    beside = runs.out / "exports" / "global_step_1" / "hf"
    runs.all()
    beside.mkdir(parents=True)
    (runs.out / "global_step_-5").mkdir()
    (runs.out / ".watch" / "step--5.json").write_text('{"step": -5, "source": "x"}')
    assert [one for one in runs.all(keep=(KeepLast(2),)) if one.startswith("retired")] == []
    make_step(runs.root, 4)
    assert "retired 1" in runs.all(keep=(KeepLast(2),))
    assert beside.is_dir()
    assert (runs.out / "global_step_-5").is_dir()


def test_a_retired_result_is_not_made_again_while_the_newest_step_settles(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of another trainer's settles anew once it was converted; the run has not gone back behind it meanwhile."""
    real = watch.listed_steps
    monkeypatch.setattr(watch, "listed_steps", lambda root: [replace(step, state="foreign") for step in real(root)])
    clock = [0.0]
    monkeypatch.setattr(watch.time, "monotonic", lambda: clock[0])
    watcher = runs.watcher(settle=2.0, keep=(KeepLast(2),))
    delete(runs.root / "global_step_2")
    for _ in range(2):
        while watcher.look():
            pass
        clock[0] += 2.5
    make_step(runs.root, 2)
    make_step(runs.root, 4)
    for _ in range(20):
        watcher.look()
        clock[0] += 0.5
    watcher.close()
    assert sorted(runs.made) == [1, 3, 4]
    assert runs.results() == [3, 4]
