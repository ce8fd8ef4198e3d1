"""The rollout journal: what it gives back, what it drops and counts, what it removes, and what it refuses."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from mcore_rlhf import (
    CheckpointManager,
    JournalWriter,
    KeepLast,
    ManagerOptions,
    Prompt,
    PromptSampler,
    Retention,
    Rollout,
    RolloutJournal,
)
from mcore_rlhf.cli.app import app
from mcore_rlhf.errors import CheckpointError, LayoutMismatch, StorageError, UsageError
from mcore_rlhf.manager.rlhf import journal_files
from mcore_rlhf.manager.rlhf.consumed import Consumed
from mcore_rlhf.manager.rlhf.data_state import unpack
from mcore_rlhf.manager.rlhf.sampler import SamplerState
from mcore_rlhf.storage import patience
from mcore_rlhf.storage.appending import Pace
from mcore_rlhf.storage.framed import frame_head
from mcore_rlhf.storage.records import record_of
from tests.unit.manager.roots import make_step

QUICK = Pace(write_s=0.001, sync_s=0.005)


def sampler() -> PromptSampler:
    return PromptSampler(20, seed=3, group_size=2, epochs=2, batch_size=4)


def write(
    root: Path, prompts: Iterable[Prompt], samples: Iterable[int] = (0, 1), version: int = 1, producer: str = "w"
) -> None:
    with JournalWriter(root, producer, pace=QUICK) as writer:
        for prompt in prompts:
            for sample in samples:
                writer.add(Rollout.of(prompt, sample, version=version, reward=0.5, tokens=np.full(3, prompt.prompt_id)))


def saved(root: Path, step: int, loads: Path | None = None) -> None:
    """Save a step that says nothing of prompts, so that no file of the journal goes."""
    options = ManagerOptions(fsync=False, catch_signals=False, on_existing="continue")
    with CheckpointManager(root, torch.nn.Linear(2, 2), options=options) as manager:
        if loads is not None:
            assert manager.load(loads) is not None
        manager.save(step, blocking=True)


def segments(root: Path) -> list[Path]:
    return sorted((root / "journal").glob("*.seg"))


def command(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(word) for word in words])
    return result.exit_code, result.output


def facts(root: Path) -> dict[str, Any]:
    code, said = command("journal", root, "--json")
    assert code in (0, 1)
    found: dict[str, Any] = json.loads(said)
    return found


def test_a_crash_gives_finished_ones_back_and_asks_for_the_rest(tmp_path: Path) -> None:
    first, second = sampler().next_batch(2)
    write(tmp_path, [first])
    write(tmp_path, [second], samples=[1])
    journal, again = RolloutJournal(tmp_path), sampler()
    assert journal.counts.finished == 3
    taken = [journal.take(prompt, version=1) for prompt in again.next_batch(3)]
    assert [len(one.rollouts) for one in taken] == [2, 1, 0]
    assert [one.missing for one in taken] == [(), (0,), (0, 1)]
    for prompt, (rollouts, _) in zip((first, second), taken, strict=False):
        for rollout in rollouts:
            assert (rollout.prompt_id, rollout.reward) == (prompt.prompt_id, 0.5)
            assert rollout.seed == prompt.sample_seeds[rollout.sample]
            assert rollout.tensors["tokens"].tolist() == [prompt.prompt_id] * 3
    assert journal.take(first, version=1) == ((), (0, 1)), "each is given once"
    assert (journal.counts.given, journal.counts.finished) == (3, 0)


def test_only_samples_that_are_pending_are_given(tmp_path: Path) -> None:
    before = sampler()
    (prompt,) = before.next_batch(1)
    write(tmp_path, [prompt])
    before.acknowledge(prompt, 0)
    again = sampler()
    again.load_state_dict(before.state_dict())
    (prompt,) = again.next_batch(1)
    (rollout,), missing = RolloutJournal(tmp_path).take(prompt, version=1)
    assert (rollout.sample, missing) == (1, ())


@pytest.mark.parametrize(("version", "stale"), [(1, 0), (4, 0), (5, 2), (0, 0)])
def test_stale_ones_are_dropped_and_counted(tmp_path: Path, version: int, stale: int) -> None:
    (prompt,) = sampler().next_batch(1)
    write(tmp_path, [prompt], version=1)
    journal = RolloutJournal(tmp_path, max_staleness=3)
    rollouts, missing = journal.take(prompt, version)
    assert (len(rollouts), len(missing), journal.counts.stale) == (2 - stale, stale, stale)
    assert journal.counts.newer == 2 * (version < 1)


def test_of_two_the_one_of_newer_weights_counts(tmp_path: Path) -> None:
    (prompt,) = sampler().next_batch(1)
    for version in (2, 5, 3):
        write(tmp_path, [prompt], version=version, producer="w")
    assert len(segments(tmp_path)) == 3, "two producers of one name do not meet"
    journal = RolloutJournal(tmp_path)
    assert journal.counts.finished == 2
    assert [one.version for one in journal.take(prompt, 5).rollouts] == [5, 5]


def test_another_order_of_prompts_gets_none_of_them(tmp_path: Path) -> None:
    write(tmp_path, sampler().next_batch(4))
    journal = RolloutJournal(tmp_path)
    other = PromptSampler(20, seed=4, group_size=2).next_batch(4)
    moved = [
        prompt
        for prompt, mine in zip(other, sampler().next_batch(4), strict=True)
        if prompt.prompt_id != mine.prompt_id
    ]
    assert moved
    assert all(journal.take(prompt, 1).missing == (0, 1) for prompt in moved)
    assert journal.counts.other == 2 * len(moved)


def test_a_run_that_begins_here_with_another_seed_gets_none_of_them(tmp_path: Path) -> None:
    """Of few prompts many stand in the same place, and what was sampled of them is another run's all the same."""
    (mine,), (other,) = (PromptSampler(1, seed=seed, group_size=2).next_batch(1) for seed in (3, 4))
    write(tmp_path, [mine])
    assert (other.prompt_id, other.position) == (mine.prompt_id, mine.position)
    journal = RolloutJournal(tmp_path)
    assert journal.take(other, 1) == ((), (0, 1))
    assert (journal.counts.other, journal.counts.lost) == (2, 0)
    assert len(RolloutJournal(tmp_path).take(mine, 1).rollouts) == 2


def test_consumed_is_what_the_samplers_own_state_says() -> None:
    one = sampler()
    batch = one.next_batch(6)
    one.acknowledge(batch[0])
    one.acknowledge(batch[3], 1)
    state, _ = unpack(one.state_dict(), "prompt_sampler")
    told = record_of(SamplerState, state, "here")
    seen = Consumed.of(told.next, told.in_flight)
    keys = [Rollout.of(prompt, sample, version=0).key for prompt in [*batch, *one.next_batch(20)] for sample in (0, 1)]
    assert [key for key in keys if key in seen] == [keys[0], keys[1], keys[7]]


class Run:
    """A run that saves, with its journal."""

    def __init__(self, root: Path, keep: int) -> None:
        self.root, self.sampler = root, sampler()
        options = ManagerOptions(
            asynchronous=False, fsync=False, keep=Retention((KeepLast(keep),)), catch_signals=False
        )
        self.manager = CheckpointManager(root, torch.nn.Linear(2, 2), data=self.sampler, options=options)
        self.step = 0

    def train(self, prompts: Iterable[Prompt]) -> None:
        self.step += 1
        self.sampler.acknowledge_all(prompts)
        self.manager.save(self.step)


def test_only_what_the_oldest_step_has_trained_on_goes(tmp_path: Path) -> None:
    run = Run(tmp_path, keep=2)
    with run.manager:
        batches = [run.sampler.next_batch() for _ in range(4)]
        for number, batch in enumerate(batches):
            write(tmp_path, batch, producer=f"batch{number}")
        left = []
        for batch in batches:
            run.train(batch)
            left.append([path.name.partition("-")[0] for path in segments(tmp_path)])
    # Steps 1 and 2, then 2 and 3, then 3 and 4 are there: the oldest has trained on batches 0, 0 and 1, 0 to 2.
    assert left == [["batch1", "batch2", "batch3"], ["batch1", "batch2", "batch3"], ["batch2", "batch3"], ["batch3"]]
    again, journal = sampler(), RolloutJournal(tmp_path)
    reader = CheckpointManager(tmp_path, torch.nn.Linear(2, 2), data=again, options=ManagerOptions(read_only=True))
    with reader:
        assert reader.load(3) is not None
    assert [journal.take(prompt, 1).missing for prompt in again.next_batch()] == [()] * 4, (
        "an older step finds its rollouts"
    )


def test_a_file_that_is_written_stays(tmp_path: Path) -> None:
    run = Run(tmp_path, keep=1)
    with run.manager, JournalWriter(tmp_path, "alive", pace=QUICK) as writer:
        batch = run.sampler.next_batch()
        for prompt in batch:
            writer.add(Rollout.of(prompt, 0, version=1))
        writer.flush()
        run.train(batch)
        journal = RolloutJournal(tmp_path)
        assert (journal.trim(), len(segments(tmp_path))) == (0, 1), "all of it is consumed, but its producer lives"
        writer.close()
        assert (journal.trim(), segments(tmp_path)) == (1, [])


def test_without_a_step_nothing_goes_and_others_steps_say_it_themselves(tmp_path: Path) -> None:
    batch = sampler().next_batch()
    write(tmp_path, batch)
    journal = RolloutJournal(tmp_path)
    assert journal.trim() == 0
    assert journal.trim(lambda key: key.position < 3) == 0
    assert journal.trim(lambda key: key.position < 4) == 1
    assert journal.counts.finished == 0


def test_many_producers_at_once_are_of_one_run(tmp_path: Path) -> None:
    prompts = sampler().next_batch(8)
    threads = [threading.Thread(target=write, args=(tmp_path, [prompt])) for prompt in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert RolloutJournal(tmp_path).counts.finished == 16
    assert sorted(path.suffix for path in (tmp_path / "journal").iterdir()) == [".json", *[".seg"] * 8]


def test_a_journal_of_another_run_is_refused(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for root in (here, there):
        write(root, sampler().next_batch(1))
    (foreign,) = segments(there)
    shutil.copy(foreign, here / "journal" / foreign.name)
    with pytest.raises(
        LayoutMismatch, match=rf"(?s){foreign.name}: rollouts of another run.*expected .*, found .*Move it away"
    ):
        RolloutJournal(here)
    code, said = command("journal", here)
    assert (code, said.count("refused")) == (1, 1)
    foreign = here / "journal" / foreign.name
    foreign.unlink()
    assert RolloutJournal(here).counts.finished == 2


def test_a_folder_that_was_copied_from_a_run_with_the_same_data_and_seed_is_told(tmp_path: Path) -> None:
    """By the newest step, which says beside which journal it was saved; one that was begun anew beside it is its successor."""
    one, other = tmp_path / "one", tmp_path / "other"
    for root in (one, other):
        write(root, sampler().next_batch(2))
        saved(root, 1)
    write(one, sampler().next_batch(2))
    assert RolloutJournal(one).counts.finished
    shutil.rmtree(other / "journal")
    shutil.copytree(one / "journal", other / "journal")
    with pytest.raises(
        LayoutMismatch, match=r"journal: rollouts of another run: step 1 was saved beside the journal"
    ) as told:
        RolloutJournal(other)
    assert "remove the folder: what it holds is sampled again" in str(told.value)
    code, said = command("journal", other)
    assert (code, "note: " in said, "another run" in said) == (1, True, True), said
    shutil.rmtree(other / "journal")
    write(other, sampler().next_batch(2))  # a producer is the first
    assert RolloutJournal(other).counts.finished == 4
    saved(other, 2)
    shutil.rmtree(other / "global_step_1")
    assert RolloutJournal(other).counts.finished == 4
    assert command("journal", other)[0] == 0


def test_a_root_that_came_back_from_a_mirror_or_was_moved_keeps_its_journal(tmp_path: Path) -> None:
    write(tmp_path / "old", sampler().next_batch(2))
    saved(tmp_path / "old", 1)
    shutil.copytree(tmp_path / "old", tmp_path / "moved")
    assert RolloutJournal(tmp_path / "moved").counts.finished == 4
    write(tmp_path / "new", sampler().next_batch(2))  # nothing of the old root is left but what the mirror has
    assert RolloutJournal(tmp_path / "new").counts.finished == 4
    saved(tmp_path / "new", 2, loads=tmp_path / "old" / "global_step_1")
    assert RolloutJournal(tmp_path / "new").counts.finished == 4


def test_what_rollouts_were_made_with_must_agree(tmp_path: Path) -> None:
    with JournalWriter(tmp_path, "w", fingerprint={"tokenizer": "a"}, pace=QUICK):
        pass
    with pytest.raises(LayoutMismatch, match=r"tokenizer.*expected 'a', found 'b'"):
        RolloutJournal(tmp_path, fingerprint={"tokenizer": "b"})
    with pytest.raises(LayoutMismatch, match="tokenizer"):
        JournalWriter(tmp_path, "w", fingerprint={"tokenizer": "b"})
    RolloutJournal(tmp_path, fingerprint={"tokenizer": "a", "dataset": "c"})


def framed(number: int, payload: bytes) -> bytes:
    return frame_head(number, payload) + payload


def header(root: Path, **changed: object) -> bytes:
    mark = json.loads((root / "journal" / "journal.json").read_text())
    return framed(0, json.dumps({**mark, "producer": "x", **changed}).encode())


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"version": 2}, "version 2 of the rollout journal"), ({"version": None}, "version None"),
        ({"format": "else"}, "not of a rollout journal"),
        ({"run": "\x1b[2J"}, "another run"), ({"fingerprint": 3}, "fingerprint"), ({"more": 1}, "unknown fields"),
    ],
)  # fmt: skip
def test_segments_that_are_refused(tmp_path: Path, content: dict[str, object], expected: str) -> None:
    write(tmp_path, sampler().next_batch(1))
    (tmp_path / "journal" / "strange.seg").write_bytes(header(tmp_path, **content))
    with pytest.raises(CheckpointError, match=expected):
        RolloutJournal(tmp_path)
    code, said = command("journal", tmp_path)
    assert code == 1
    assert "\x1b" not in said


def test_segments_that_broke_off_at_once_are_none(tmp_path: Path) -> None:
    write(tmp_path, sampler().next_batch(1))
    for name, data in {"empty": b"", "half": header(tmp_path)[:20], "zeros": b"\0" * 100}.items():
        (tmp_path / "journal" / f"{name}.seg").write_bytes(data)
    journal = RolloutJournal(tmp_path)
    assert journal.counts.finished == 2
    assert journal.trim(lambda key: True) == 4, "and they go with the others"


def test_records_that_hold_something_else_are_passed_over(tmp_path: Path) -> None:
    write(tmp_path, sampler().next_batch(1))
    data = header(tmp_path) + framed(1, b"junk") + framed(2, b"\xff" * 40)
    (tmp_path / "journal" / "strange.seg").write_bytes(data)
    assert RolloutJournal(tmp_path).counts.finished == 2
    assert (command("journal", tmp_path)[0], facts(tmp_path)["damaged"]) == (1, 2)


@pytest.mark.parametrize("at", [0, 5, 8, 40])
def test_a_segment_whose_first_record_rots_costs_what_is_in_it(tmp_path: Path, at: int) -> None:
    """Of which run it is stands there alone: its rollouts are made again, and the run is not held up."""
    first, second = sampler().next_batch(2)
    write(tmp_path, [first])
    write(tmp_path, [second], producer="other")
    segment = next(path for path in segments(tmp_path) if path.name.startswith("w-"))
    data = bytearray(segment.read_bytes())
    data[at] ^= 0x10
    segment.write_bytes(data)
    journal = RolloutJournal(tmp_path)
    assert [journal.take(prompt, 1).missing for prompt in (first, second)] == [(0, 1), ()]
    assert (command("journal", tmp_path)[0], facts(tmp_path)["damaged"]) == (1, 3)
    assert journal.trim(lambda key: True) == 2, "and it goes with the others"


def test_a_segment_that_is_removed_while_it_is_looked_at_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, sampler().next_batch(1))
    real = journal_files.segment_files
    monkeypatch.setattr(journal_files, "segment_files", lambda folder: [*real(folder), (folder / "gone.seg", True)])
    assert RolloutJournal(tmp_path).counts.finished == 2


def test_links_are_not_followed(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    write(root, sampler().next_batch(1))
    (segment,) = segments(root)
    shutil.move(segment, outside)
    segment.symlink_to(outside)
    with pytest.raises(CheckpointError, match="is no regular file"):
        RolloutJournal(root)
    assert outside.exists()
    shutil.rmtree(root / "journal")
    (root / "journal").symlink_to(tmp_path)
    for opened in (lambda: RolloutJournal(root), lambda: JournalWriter(root, "w")):
        with pytest.raises(StorageError, match="symbolic link"):
            opened()


def test_the_mark_is_a_strangers_too(tmp_path: Path) -> None:
    (tmp_path / "journal").mkdir()
    mark = tmp_path / "journal" / "journal.json"
    for text in (
        "",
        "{",
        "[]",
        "{}",
        '{"format": "mcore_rlhf_rollouts", "version": 7}',
        '{"format": "mcore_rlhf_rollouts", "version": 1, "run": 3}',
    ):
        mark.write_text(text)
        with pytest.raises(CheckpointError, match=r"journal\.json"):
            RolloutJournal(tmp_path)
        assert command("journal", tmp_path)[0] in (1, 2)
    mark.unlink()
    os.mkfifo(mark)
    with pytest.raises(StorageError, match="pipe"):
        JournalWriter(tmp_path, "w")


def test_a_journal_that_a_full_disk_lets_nobody_begin_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, data: bytes, **_: object) -> None:
        path.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(journal_files, "write_new", full)
        with pytest.raises(StorageError, match="No space left"):
            JournalWriter(tmp_path, "w")
    assert list((tmp_path / "journal").iterdir()) == []
    write(tmp_path, sampler().next_batch(1))
    assert facts(tmp_path)["rollouts"] == 2


def test_a_frame_that_rots_between_reading_and_taking_is_sampled_again(tmp_path: Path) -> None:
    (prompt,) = sampler().next_batch(1)
    write(tmp_path, [prompt])
    journal = RolloutJournal(tmp_path)
    (segment,) = segments(tmp_path)
    data = bytearray(segment.read_bytes())
    data[-40] ^= 1  # in the second rollout's tokens
    segment.write_bytes(data)
    rollouts, missing = journal.take(prompt, 1)
    assert ([one.sample for one in rollouts], missing, journal.counts.lost) == ([0], (1,), 1)


def test_a_disk_that_does_not_answer_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = sampler().next_batch(2)
    write(tmp_path, [first])
    journal, real, fail = RolloutJournal(tmp_path), os.pread, [True]
    write(tmp_path, [second])
    monkeypatch.setattr(patience, "_PAUSES", (0.0,))

    def pread(fd: int, nbytes: int, offset: int) -> bytes:
        if fail[0]:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, nbytes, offset)

    monkeypatch.setattr(os, "pread", pread)
    with pytest.raises(StorageError, match="Input/output error"):
        RolloutJournal(tmp_path)
    assert journal.refresh() == 2
    assert journal.take(first, 1).missing == (0, 1), "it is sampled again; training goes on"
    fail[0] = False
    assert journal.refresh() == 2
    assert journal.take(second, 1).missing == ()
    assert (journal.counts.lost, journal.counts.given) == (2, 2)


def test_the_command(tmp_path: Path) -> None:
    run = Run(tmp_path, keep=2)
    with run.manager:
        first, second = run.sampler.next_batch(), run.sampler.next_batch()
        write(tmp_path, first, producer="a")
        write(tmp_path, second[:1], version=2, producer="b")
        run.train([])
        run.train(first)
    found = facts(tmp_path)
    assert (found["rollouts"], found["finished"], found["consumed"], found["step"], found["versions"]) == (
        10,
        2,
        8,
        2,
        [2],
    )
    assert [(one["producer"], one["state"], one["finished"], one["consumed"]) for one in found["segments"]] == [
        ("a", "closed", 0, 8),
        ("b", "closed", 2, 0),
    ]
    code, said = command("journal", tmp_path)
    assert code == 0
    assert "10 rollouts of 2 producers" in said
    assert "step 2: 8 trained on, 2 finished" in said


@pytest.mark.parametrize(
    "make",
    [
        lambda root: RolloutJournal(root, max_staleness=-1),
        lambda root: RolloutJournal(root, max_staleness="4"),
        lambda root: RolloutJournal(root, fingerprint={"tokenizer": 5}),
        lambda root: JournalWriter(root, "a", fingerprint={"tokenizer": 5}),
        lambda root: JournalWriter(root, "a", pace=5),
    ],
)
def test_a_mistake_leaves_no_journal_behind(tmp_path: Path, make: Any) -> None:
    """A number in a fingerprint was written, and nobody could open the journal from then on."""
    with pytest.raises(UsageError, match=r"max_staleness|fingerprint|pace"):
        make(tmp_path)
    assert not [*tmp_path.iterdir()]


def test_the_command_where_there_is_none(tmp_path: Path) -> None:
    code, said = command("journal", tmp_path)
    assert code == 2
    assert "there is no rollout journal" in said
    write(tmp_path, sampler().next_batch(1))
    assert command("journal", tmp_path)[0] == 0, "before the first step as well"
    assert command("steps", tmp_path)[0] == 1


def test_the_command_says_where_a_journal_is_that_is_not_here(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    make_step(root, 1)
    write(root, sampler().next_batch(1))
    code, said = command("journal", tmp_path)
    assert (code, said.endswith(f"Is {root} meant?\n")) == (2, True), said
    (root / "journal" / "journal.json").unlink()
    code, said = command("journal", root)
    assert code == 1
    assert "journal.json: is not there: nothing says of which run the journal is\nPut it back" in said


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
import numpy
from mcore_rlhf import JournalWriter, PromptSampler, Rollout, RolloutJournal
from mcore_rlhf.cli.app import app
(prompt,) = PromptSampler(4, seed=1).next_batch(1)
with JournalWriter(sys.argv[1], "w") as writer:
    writer.add(Rollout.of(prompt, 0, version=1, tokens=numpy.arange(3)))
assert len(RolloutJournal(sys.argv[1]).take(prompt, 1).rollouts) == 1
app(["journal", sys.argv[1]])
"""


def test_producers_and_the_command_need_no_torch(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "1 rollout of 1 producer" in done.stdout
