"""``mcore-rlhf journal``: which finished rollouts lie beside the steps of a run, and what the newest step knows of them."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from mcore_rlhf.errors import NotACheckpoint, Unreadable, headline
from mcore_rlhf.manager.rlhf.consumed import Consumed, consumed_by
from mcore_rlhf.manager.rlhf.journal_files import FOLDER, JournalFolder, JournalSegment, has_journal, read_folder
from mcore_rlhf.manager.rlhf.rollouts import StoredPlace
from mcore_rlhf.manager.run import steps
from mcore_rlhf.manager.run.steps import Step
from mcore_rlhf.manager.runs import meant_below
from mcore_rlhf.storage.paths import ReadablePath
from mcore_rlhf.storage.reading import read_json

from .output import Column, Facts, count, emit_json, print_table, say, size
from .steps import require_root

_SHOWN = 50


@dataclass(frozen=True, slots=True)
class Newest:
    """The step that a resume begins with.

    Args:
        step: Its number; None where there is none.
        consumed: What it has trained on; None where nobody knows.
        version: Of its weights; None where it does not say.
        why: Why nobody knows what it has trained on.
    """

    step: int | None = None
    consumed: Consumed | None = None
    version: int | None = None
    why: str = ""

    @classmethod
    def of(cls, root: ReadablePath) -> Newest:
        """Of a root."""
        found: Step | None = steps.newest(root)
        if found is None:
            return cls()
        consumed, version = consumed_by(found.path), None
        with suppress(OSError, ValueError, AttributeError):
            value = read_json(found.path / "rlhf" / "rlhf_state.json").get("weight_version")
            version = value if type(value) is int else None
        if isinstance(consumed, str):
            return cls(found.step, None, version, headline(consumed))
        return cls(found.step, consumed, version)


def show_journal(given: Path, max_staleness: int | None, json: bool) -> None:
    """Read a journal, and say what is in it.

    Args:
        given: The run's root.
        max_staleness: Versions that a rollout may be older than the newest step's weights.
        json: For machines.

    Raises:
        click.exceptions.Exit: With code 1 where something is damaged or of another run; with 2 where something cannot be read.
    """
    root = require_root(given)
    if not has_journal(root) and (hint := meant_below(root, has_journal)):
        raise NotACheckpoint(f"{root / FOLDER}: there is no rollout journal\n{hint}")
    files, newest = read_folder(root), Newest.of(root)
    for _ in files.read():
        pass
    stranger = files.mark.stranger_in(root)
    facts = {
        **journal_facts(files, newest, max_staleness),
        "another_run": "" if stranger is None else headline(str(stranger)),
    }
    if json:
        emit_json(facts)
    else:
        _print_journal(root, facts, newest)
    problems = [one.problem for one in files.segments.values() if one.problem is not None]
    if any(isinstance(problem, Unreadable) for problem in problems):
        raise click.exceptions.Exit(2)
    if problems or facts["damaged"] or stranger:
        raise click.exceptions.Exit(1)


def journal_facts(files: JournalFolder, newest: Newest, max_staleness: int | None) -> Facts:
    """``run``, ``fingerprint``, ``step``, ``version``, and sums over ``segments``; of a rollout that lies there twice, one counts."""
    segments = [_segment(one, newest) for one in files.segments.values()]
    places = {place.key: place for one in files.segments.values() for place in one.held}.values()
    finished = [place for place in places if not _is_consumed(place, newest)]
    return {
        "run": files.mark.run,
        "fingerprint": dict(files.mark.fingerprint),
        "step": newest.step,
        "version": newest.version,
        "rollouts": len(places),
        "finished": len(finished),
        "consumed": len(places) - len(finished),
        "stale": _stale(finished, newest, max_staleness),
        "versions": sorted({place.version for place in finished}),
        "torn_bytes": sum(one["torn_bytes"] for one in segments),
        "damaged": sum(one["damaged"] for one in segments),
        "bytes": sum(one["bytes"] for one in segments),
        "note": newest.why,
        "segments": segments,
    }


def _stale(finished: Iterable[StoredPlace], newest: Newest, most: int | None) -> int | None:
    if most is None or newest.version is None:
        return None
    return sum(newest.version - place.version > most for place in finished)


def _is_consumed(place: StoredPlace, newest: Newest) -> bool:
    return newest.consumed is not None and place.key in newest.consumed


def _segment(segment: JournalSegment, newest: Newest) -> dict[str, Any]:
    consumed = sum(_is_consumed(place, newest) for place in segment.held)
    youngest = segment.held[-1] if segment.held else None
    return {
        "file": segment.path.name,
        "producer": segment.producer,
        "state": _state(segment),
        "bytes": segment.reader.at + segment.reader.torn,
        "rollouts": len(segment.held),
        "finished": len(segment.held) - consumed,
        "consumed": consumed,
        "torn_bytes": segment.reader.torn,
        "damaged": segment.reader.damaged + segment.strange,
        "youngest": None if youngest is None else {**youngest.key._asdict(), "version": youngest.version},
        "why": "" if segment.problem is None else headline(str(segment.problem)),
    }


def _state(segment: JournalSegment) -> str:
    if segment.problem is not None:
        return "unreadable" if isinstance(segment.problem, Unreadable) else "refused"
    return "closed" if segment.reader.closed else "open"


def _print_journal(root: ReadablePath, facts: Facts, newest: Newest) -> None:
    producers = {one["producer"] for one in facts["segments"]}
    say(f"{root}: {count(facts['rollouts'], 'rollout')} of {count(len(producers), 'producer')}, {size(facts['bytes'])}")
    where = "no step is committed" if newest.step is None else f"step {newest.step}"
    say(
        f"  {where}: {facts['consumed']:,} trained on, {facts['finished']:,} finished and to be given back{_more(facts)}"
    )
    if facts["another_run"]:
        say(f"  note: {facts['another_run']}")
    if facts["note"]:
        say(f"  note: what that step has trained on is not known: {facts['note']}")
    if facts["segments"]:
        names = ("rollouts", "finished", "torn", "damaged", "size")
        columns = [
            Column("producer"),
            Column("state"),
            *(Column(name, True) for name in names),
            Column("youngest"),
            Column(""),
        ]
        print_table(columns, map(_row, facts["segments"]), _SHOWN)


def _more(facts: Facts) -> str:
    versions, stale = facts["versions"], facts["stale"]
    made = f" (weights {versions[0]} to {versions[-1]})" if versions else ""
    return made + (f", {stale:,} of them stale" if stale is not None else "")


def _row(one: dict[str, Any]) -> tuple[str, ...]:
    last = one["youngest"]
    youngest = "" if last is None else f"epoch {last['epoch']}, position {last['position']}, sample {last['sample']}"
    numbers = (
        f"{one['rollouts']:,}",
        f"{one['finished']:,}",
        f"{one['torn_bytes']:,}",
        f"{one['damaged']:,}",
        size(one["bytes"]),
    )
    return (one["producer"], one["state"], *numbers, youngest, one["why"])
