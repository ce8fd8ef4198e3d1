"""Lines of a plan that somebody wrote, digest and all: they are refused, or say what can be carried out."""

from __future__ import annotations

import base64
import errno
import hashlib
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from mcore_rlhf.convert import prepare
from mcore_rlhf.core.execute import WINDOW_BYTES, FileRun
from mcore_rlhf.errors import CheckpointError, Corrupt, StorageError
from mcore_rlhf.execution.spool import Spool, SpoolLine, Task, line_of, planned_file, value_of
from mcore_rlhf.families.source import open_bytes
from mcore_rlhf.storage.publish import LocalPublication
from mcore_rlhf.storage.record_file import StoredFile
from mcore_rlhf.verify.audit import Ledger, WatchedLedger
from tests.helpers.conversions import GOLDENS, options

SOURCE = GOLDENS.parent / "deepspeed" / "z2_bf16_ac_dp2"
NUMBERS = (0, 1, 2, 7, 1 << 31, 1 << 40, 1 << 62, (1 << 63) - 1, 1 << 63, 1 << 64, 10**30, -1)


class Planned(NamedTuple):
    files: tuple[StoredFile, ...]
    task: Task
    line: bytes

    def read(self, place: SpoolLine) -> bytes:
        del place
        return self.line

    def edited(self, edit: Callable[[dict[str, Any]], object]) -> Planned:
        value = value_of(self.line)
        edit(value)
        line = line_of(value)
        return self._replace(line=line, task=self.task._replace(digest=hashlib.sha256(line).hexdigest()))


@pytest.fixture(scope="module")
def lines() -> list[Planned]:
    jobs = [prepare(SOURCE, replace(options(), to=to)) for to in ("universal", "dcp", "hf")]
    return [Planned(job.source.files, task, job.spool.read(task.place)) for job in jobs for task in job.tasks]


def carried_out(planned: Planned, to: Path) -> None:
    file = planned_file(planned, planned.task)
    with LocalPublication(to, fsync=False) as out, open_bytes(SOURCE, None) as source:
        watched = WatchedLedger(Ledger(planned.files))
        with out.writer(planned.task.path, file.layout) as writer:
            records = sorted(file.records, key=lambda record: writer.offset(record.key))
            run = FileRun(file.plan, records, source, writer, watched, WINDOW_BYTES, lambda _: None, writer.offset)
            writer.finish(run.run(), fsync=False)


def _places(value: Any) -> list[tuple[Any, Any]]:
    keys = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, below in keys for place in ((value, key), *_places(below))]


def _changed(value: Any, rng: random.Random) -> Any:
    if isinstance(value, list):
        return rng.choice([value[:-1], value * 2, value[::-1], []])
    if isinstance(value, str) and rng.random() < 0.7:
        return rng.choice([value + "x", value[:-1], "", "../../x", "float64", base64.b64encode(b"x" * 100).decode()])
    return rng.choice([*NUMBERS, None, 1.5, True, "1", [], {}])


def _edit(value: dict[str, Any], rng: random.Random) -> None:
    """One number of a column, or anything else that is said."""
    if rng.random() < 0.3:
        name = rng.choice([*value["copies"]])
        column = np.frombuffer(base64.b64decode(value["copies"][name]), "<i8" if "start" in name else "<i4").copy()
        if len(column):
            most = np.iinfo(column.dtype).max
            column[rng.randrange(len(column))] = rng.choice([most, most - 8, most // 2, 1, 0, -1])
        value["copies"][name] = base64.b64encode(column.tobytes()).decode()
        return
    told = value[rng.choice(["records", "sources", "moves", "content"])]
    holder, key = rng.choice(_places(told) or _places(value))
    holder[key] = _changed(holder[key], rng)


@pytest.mark.parametrize("edits", [150, pytest.param(5000, marks=pytest.mark.slow)])
def test_whatever_a_line_says(lines: list[Planned], edits: int, rng: random.Random, tmp_path: Path) -> None:
    for number in range(edits):
        try:
            carried_out(rng.choice(lines).edited(lambda value: _edit(value, rng)), tmp_path / str(number))
        except CheckpointError:
            continue


def _first_start(value: dict[str, Any], start: int) -> None:
    starts = np.frombuffer(base64.b64decode(value["copies"]["source_start"]), "<i8").copy()
    starts[0] = start
    value["copies"]["source_start"] = base64.b64encode(starts.tobytes()).decode()


EDITS: dict[str, tuple[str, Callable[[dict[str, Any]], object]]] = {
    "a start from which a sum runs over": ("moves", lambda value: _first_start(value, (1 << 63) - 1)),
    "more elements than there is room for": (
        "moves",
        lambda value: value["moves"].__setitem__(0, [[1 << 50], [0], [0]]),
    ),
    "a step that nobody takes": ("moves", lambda value: value["moves"].__setitem__(0, [[1], [1 << 63], [1]])),
    "a value of another length": (".pt", lambda value: value["content"][3][0].__setitem__(1, "eA==")),
    "a chunk's value of another length": (".distcp", lambda value: _items(value)[0].__setitem__(4, "eA==")),
    "a chunk twice": (".distcp", lambda value: value["content"].append(_items(value, of_records=True)[0])),
    "a tensor twice": ("safetensors", lambda value: value["content"][1].append(value["content"][1][0])),
    "a file longer than any": (".pt", lambda value: _longer(value)),
}


def _items(value: dict[str, Any], *, of_records: bool = False) -> list[list[Any]]:
    """The tensors of a ``.distcp`` file whose bytes are known, or are those of a record."""
    return [item for item in value["content"][1:] if len(item) == 5 and (item[4] is None) is of_records]


def _longer(value: dict[str, Any]) -> None:
    value["records"][0][2] = 1 << 61
    value["content"][2][0][1] = 1 << 63


@pytest.mark.parametrize("what", EDITS)
def test_what_cannot_be_written(lines: list[Planned], what: str) -> None:
    where, edit = EDITS[what]
    tried = 0
    for one in lines:
        if where in ("moves", value_of(one.line)["content"][0]):
            try:
                edited = one.edited(edit)
            except IndexError:  # it has nothing of that kind
                continue
            tried += 1
            with pytest.raises(Corrupt, match="what the plan says of it cannot be read"):
                planned_file(edited, edited.task)
    assert tried


def test_a_spool_that_the_system_does_not_give_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def seek(at: int) -> None:
        raise OSError(errno.EIO, "not now")

    spool = Spool()
    place = spool.add(b"a line")
    monkeypatch.setattr(spool._lines._file, "seek", seek)
    with pytest.raises(StorageError, match="cannot read a plan"):
        spool.read(place)
