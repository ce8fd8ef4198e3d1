"""``mcore-rlhf will-resume``: what a trainer would go on with, without starting it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click

from mcore_rlhf.errors import CheckpointError, headline
from mcore_rlhf.manager.will_resume import Forecast, forecast, forecast_for_its_writer, loader_named
from mcore_rlhf.storage.paths import ReadablePath
from mcore_rlhf.storage.urls import checkpoint_path
from mcore_rlhf.trainers.resuming import Outcome, Prospect, Settings
from mcore_rlhf.trainers.settings_file import read_settings

from .output import Column, Facts, emit_json, print_table, say

_SWITCHED = re.compile(r"([\w.]+)[= ](True|False|true|false)\b")


def run(path: Path, trainer: str, config: Path | None, world: int | None, json: bool) -> None:
    """Print what a trainer would restore, and why not.

    Args:
        path: The root of its run, or a step.
        trainer: ``NAME`` or ``NAME@VERSION``.
        config: Its configuration.
        world: Ranks that are to load.
        json: For machines.

    Raises:
        click.exceptions.Exit: With code 1, where something is lost, or it cannot resume.
    """
    loader, version = loader_named(trainer)
    settings = Settings() if config is None else read_settings(config)
    place = checkpoint_path(path)
    found = forecast(place, loader, settings, world)
    notes = list(found.notes)
    if version and version != loader.version:
        notes.append(
            f"rows are of {loader.trainer.title} {loader.version}; of {version} there are none, and it may do otherwise"
        )
    if config is None:
        notes.append("no configuration was given (--config): the trainer's own defaults are assumed")
    elif "defaults" in settings.values:
        notes.append(
            f"{config.name} takes further values from other files (defaults), which are not read: give the composed one, as a run keeps "
            "it (config.yaml in Hydra's .hydra/, or in NeMo-RL's step)"
        )
    if json:
        emit_json(_facts(place, found, version, config, notes))
    else:
        _print(place, found, notes)
    if not found.resumes:
        raise click.exceptions.Exit(1)


def after_conversion(root: ReadablePath, trainer: str, told: str = "") -> Facts:
    """What a trainer would restore of a run that was made for it; nothing where that cannot be said.

    Keys: ``resumes``: by role, outcome → things; ``stops``: why its loader would stop at the run, a text for each reason; none where it
    would not.

    Args:
        root: Of the run.
        trainer: Its name.
        told: How the trainer is told to go on: what is switched in it is taken to be so.
    """
    try:
        found = forecast(root, loader_named(trainer)[0], Settings(dict(_SWITCHED.findall(told))))
    except CheckpointError:  # the conversion is done, and this is a word about it
        return {}
    return {
        "resumes": {role: dict(_grouped(prospects)) for role, prospects in found.roles.items()},
        "stops": list(_stops(found)),
    }


def _stops(found: Forecast) -> Iterator[str]:
    """Why a loader stops, with the things that it stops at."""
    if found.taken.stops:
        yield found.taken.why
    for role, prospects in found.roles.items():
        refused: dict[str, list[str]] = {}
        for one in prospects:
            if one.row.outcome is Outcome.REFUSED:
                refused.setdefault(one.why, []).append(one.thing.value)
        whose = f"{role}: " if role and len(found.roles) > 1 else ""
        yield from (f"{whose}{', '.join(things)}: {why}" for why, things in refused.items())


def headed(done: str, facts: Facts) -> list[str]:
    """The first lines about a conversion: that it is done, and plainly where the trainer's own loader would stop at it.

    Args:
        done: The first word.
        facts: Its own, with those of :func:`after_conversion`.
    """
    stops = facts.get("stops", [])
    if not stops:
        return [done]
    return [
        f"{done}, but {facts['for']} stops when it loads this:",
        *(f"  {why}" for why in stops),
        "  mcore-rlhf will-resume says where in its code; another trainer, or a format of its own, may hold what this one does not.",
    ]


def of_a_run(root: ReadablePath) -> Facts | None:
    """What ``doctor`` says of a run; None where no trainer's is there.

    Keys: ``trainer``, ``rows_of``, ``step``, ``chosen``, ``resumes``, ``roles`` (outcome → things), ``why`` (of what is lost, by thing),
    ``problem``.

    Args:
        root: Any folder.
    """
    try:
        found = forecast_for_its_writer(root)
    except CheckpointError as error:
        return {"trainer": None, "resumes": False, "problem": headline(str(error))}
    if found is None:
        return None
    lost = {one.thing.value: one.why for of in found.roles.values() for one in of if one.row.outcome.is_loss}
    return {
        "trainer": found.loader.trainer.title,
        "rows_of": found.loader.version,
        "step": None if found.taken.folder is None else found.taken.folder.name,
        "chosen": found.taken.why,
        "resumes": found.resumes,
        "roles": {role: dict(_grouped(prospects)) for role, prospects in found.roles.items()},
        "why": lost,
        "problem": "" if found.resumes else f"{_last(found)}{''.join(f'; {note}' for note in found.notes)}",
    }


def _grouped(prospects: list[Prospect]) -> Iterator[tuple[str, list[str]]]:
    for outcome in Outcome:
        things = [one.thing.value for one in prospects if one.row.outcome is outcome]
        if things:
            yield outcome.value, things


def resumes_text(roles: Facts) -> str:
    """In one line: ``weights, optimizer; started anew: data``."""
    texts = []
    for role, outcomes in roles.items():
        said = [
            ", ".join(things) if outcome == Outcome.RESTORED.value else f"{outcome}: {', '.join(things)}"
            for outcome, things in outcomes.items()
        ]
        texts.append(f"{role}: {'; '.join(said)}" if role and len(roles) > 1 else "; ".join(said))
    return " | ".join(texts)


def _facts(path: ReadablePath, found: Forecast, version: str, config: Path | None, notes: list[str]) -> Facts:
    """What is printed with ``--json``."""
    return {
        "path": str(path),
        "trainer": found.loader.trainer.name,
        "rows_of": found.loader.version,
        "version": version or None,
        "config": None if config is None else str(config),
        "step": None if found.taken.folder is None else str(found.taken.folder),
        "chosen": found.taken.why,
        "resumes": found.resumes,
        "stops": found.stops,
        "doubtful": list(found.doubtful),
        "contradicts": list(found.contradicts),
        "roles": {
            role: [
                {
                    "thing": one.thing.value,
                    "outcome": one.row.outcome.value,
                    "why": one.why,
                    "source": one.row.source,
                    "ran": one.row.ran,
                }
                for one in prospects
            ]
            for role, prospects in found.roles.items()
        },
        "notes": notes,
    }


def _print(path: ReadablePath, found: Forecast, notes: list[str]) -> None:
    trainer, taken = found.loader.trainer, found.taken
    say(f"{path}: {trainer.title} {found.loader.version}")
    say(f"  takes {taken.folder.name if taken.folder is not None else 'no step'}: {taken.why}")
    for role, prospects in found.roles.items():
        say(f"\n{role}" if role else "")
        rows = [(one.thing.value, one.row.outcome.value, one.why) for one in prospects]
        print_table([Column("thing"), Column("outcome"), Column("why")], rows)
        for source, things in _sources(prospects).items():
            say(f"  {', '.join(things)}: {source}")
    say("")
    for text in found.contradicts:
        say(f"contradicts: {text}")
    for note in notes:
        say(f"note: {note}")
    say(_last(found))


def _sources(prospects: list[Prospect]) -> dict[str, list[str]]:
    """Where it is said in a loader's code that something is lost, and of what."""
    found: dict[str, list[str]] = {}
    for one in prospects:
        if one.row.outcome.is_loss:
            found.setdefault(one.row.source, []).append(one.thing.value)
    return found


def _last(found: Forecast) -> str:
    if found.taken.folder is None:
        return "it does not resume: training begins anew"
    if found.stops:
        return "it does not resume: the loader stops"
    if found.doubtful:
        return "it may not resume: no reader here can open the model"
    if found.contradicts:
        return "it resumes, by one of two places that say different things"
    return "everything resumes" if found.resumes else "it resumes, and something is lost"
