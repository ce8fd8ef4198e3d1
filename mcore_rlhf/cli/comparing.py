"""``mcore-rlhf diff``: whether two checkpoints hold the same, whatever their formats and layouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import TypeAlias

import click

from mcore_rlhf.core.catalog import PARAM
from mcore_rlhf.errors import UsageError
from mcore_rlhf.execution.run import Progress
from mcore_rlhf.families.crossing.alike import alike
from mcore_rlhf.families.module import read_config
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.families.source import Source, bytes_of
from mcore_rlhf.formats.registry import OF_ENGINES, detect, open_checkpoint
from mcore_rlhf.manager.subject import Subject, look
from mcore_rlhf.storage.paths import files_below
from mcore_rlhf.storage.reading import opened
from mcore_rlhf.verify.differ import Comparison, Differ, Tolerance

from .describe import chosen_facts, print_choice, source_facts, source_text, step_facts
from .output import Column, Facts, count, emit_json, print_facts, print_table, say
from .progress import shown_progress

_SHOWN = 20
_STATE_NBYTES = 4  # optimizer states are fp32 nearly always; this is for the progress bar

_PIECE = 4 << 20
_KEYS = ("name", "what", "differing", "max_abs", "max_rel", "max_ulps")

More: TypeAlias = Callable[[Comparison], Facts]
"""What else is said of a comparison."""


def _nothing(result: Comparison) -> Facts:
    return {}


def run(paths: tuple[Path, Path], options: ReadOptions, tolerance: Tolerance, states: str | None, json: bool) -> None:
    """Compare two checkpoints and print the differences: two steps model by model, anything else as two models.

    Args:
        paths: The two.
        options: How both are opened.
        tolerance: When values count as equal.
        states: Names of the states to compare, with commas, or None for everything.
        json: For machines.

    Raises:
        click.exceptions.Exit: With code 1, where something differs.
        UsageError: Neither checkpoint has a state of that name.
    """

    def compared(a: Subject, b: Subject) -> tuple[Subject, Subject, Facts]:
        with shown_progress(1 if a.alone or b.alone else len(a.models.keys() & b.models.keys())) as progress:
            return a, b, compare_subjects(a, b, tolerance, states, progress)

    a, b, facts = look(paths[0], options, lambda a: look(paths[1], options, partial(compared, a), _differ), _differ)
    steps = states is None and not (a.alone or b.alone)
    if json:
        emit_json(facts)
    else:
        for subject in (a, b):
            print_choice(subject.chosen)
        (_print_steps if steps else _print_models)(facts)
    if not facts["equal"]:
        raise click.exceptions.Exit(1)


def _differ(found: tuple[Subject, Subject, Facts]) -> bool:
    return not found[2]["equal"]


def compare_subjects(
    a: Subject, b: Subject, tolerance: Tolerance, states: str | None, progress: Progress, more: More = _nothing
) -> Facts:
    """Compare two steps model by model, anything else as two models; ``more`` is said of every model."""
    if states is None and not (a.alone or b.alone):
        return _compare_steps(a, b, tolerance, progress, more)
    return _compare(a, b, tolerance, states, progress, more)


def _compare(a: Subject, b: Subject, tolerance: Tolerance, states: str | None, progress: Progress, more: More) -> Facts:
    """Compare two models: the only one of a step, where there is a step; and say what is beside it."""
    beside = [
        f"{step.folder}: not compared: {count(len(step.others), 'file')} beside the model"
        for step in (a, b)
        if step.others
    ]
    lone = [subject.only("a step is compared with another step, in all states") for subject in (a, b)]
    first, second = (_open(subject, next(iter(subject.models)), states) for subject in lone)
    facts = compare_facts(first, second, tolerance, _chosen(states, first, second), progress, more)
    facts["notes"] += beside
    facts["a"]["chosen"], facts["b"]["chosen"] = (chosen_facts(subject.chosen) for subject in lone)
    return facts


def _compare_steps(a: Subject, b: Subject, tolerance: Tolerance, progress: Progress, more: More) -> Facts:
    """Compare every model that both have, and the content of all other files.

    Keys: ``a``, ``b`` (see :func:`~.describe.step_facts`); ``equal``; ``models`` by role (see :func:`compare_facts`);
    ``others`` by file: ``equal``, ``different``, or which step lacks it.
    """
    models, others = dict[str, Facts](), dict[str, str]()
    for role in sorted(a.models.keys() & b.models.keys()):
        kept = _of_engines(a, b, role)
        others |= {name: _compared(a, b, name) for name in kept}
        if not kept or not (_unread(a, role) or _unread(b, role)):
            models[role] = compare_facts(_open(a, role), _open(b, role), tolerance, None, progress, more)
    for role in sorted(a.models.keys() ^ b.models.keys()):
        others[role] = f"only {a.folder if role in a.models else b.folder} has it"
    for name in sorted({*a.others, *b.others}):
        others[name] = _compared(a, b, name)
    equal = all(facts["equal"] for facts in models.values()) and set(others.values()) <= {"equal"}
    return {"a": step_facts(a), "b": step_facts(b), "equal": equal, "models": models, "others": others}


def _of_engines(a: Subject, b: Subject, role: str) -> list[str]:
    """Files of a role that an engine wrote as it likes, in both: they may hold what nobody reads, and are held against each other whole."""
    folders = [step.models[role] for step in (a, b)]
    if not all(detect(folder) in OF_ENGINES for folder in folders):
        return []
    return sorted({f"{role}/{name}" for folder in folders for name in files_below(folder)})


def _unread(subject: Subject, role: str) -> str:
    return open_checkpoint(subject.models[role], subject.reading(role), partial=True).unread


def _open(subject: Subject, role: str, states: str | None = None) -> Source:
    """A model; of a lone one whose optimizer is not understood, the parameters, where only those are compared.

    Raises:
        CheckpointError: Its optimizer is not understood, and is to be compared.
    """
    source = open_checkpoint(subject.models[role], subject.reading(role), partial=subject.alone)
    if (given := subject.options.described_by) is not None:
        source = replace(source, told=read_config(given))
    if source.unread and (states is None or states.strip() != PARAM):
        raise source.refused(f"{source.unread}\n--states {PARAM} compares the weights alone.")
    return source


def _compared(a: Subject, b: Subject, name: str) -> str:
    """By bytes: ``.pt`` files of ours are the same bytes for the same values."""
    paths = [step.folder / name for step in (a, b)]
    there = [path.is_file() for path in paths]
    if not all(there):
        return f"only {paths[0 if there[0] else 1].parent.parent} has it"
    with opened(paths[0]) as one, opened(paths[1]) as other:
        same = one.nbytes == other.nbytes and all(
            left == right for left, right in zip(one.pieces(_PIECE), other.pieces(_PIECE), strict=True)
        )
    return "equal" if same else "different"


def _chosen(states: str | None, a: Source, b: Source) -> list[str] | None:
    if states is None:
        return None
    chosen = [state.strip() for state in states.split(",") if state.strip()]
    known = [PARAM, *dict.fromkeys((*a.states, *b.states))]
    unknown = [state for state in chosen if state not in known]
    if unknown or not chosen:
        raise UsageError(
            f"--states: neither checkpoint has {', '.join(unknown) or 'no state'}; they have {', '.join(known)}"
        )
    return chosen


def compare_facts(
    a: Source, b: Source, tolerance: Tolerance, states: Sequence[str] | None, progress: Progress, more: More = _nothing
) -> Facts:
    """Compare two opened checkpoints.

    Keys: ``a``, ``b`` (see :func:`~.describe.source_facts`); ``equal``; ``exact``, ``atol``, ``rtol``; ``states`` (null
    for everything); ``tensors``, ``elements`` compared; ``differences`` (``name``, ``what``, ``differing``,
    ``max_abs``, ``max_rel``, ``max_ulps``); ``notes``.

    Args:
        a, b: The checkpoints.
        tolerance: When values count as equal.
        states: Which states, or None for everything.
        progress: Is told how far it is.
        more: What else is to be said of what was found.
    """
    progress.stage("comparing", _nbytes(a, states))
    seen_a, seen_b = alike(a, b)
    with bytes_of(seen_a) as bytes_a, bytes_of(seen_b) as bytes_b:
        result = Differ(seen_a, seen_b, bytes_a, bytes_b, tolerance, states, progress.advance).compare()
    return {
        "a": source_facts(a),
        "b": source_facts(b),
        "equal": result.equal,
        "exact": tolerance.exact,
        "atol": tolerance.atol,
        "rtol": tolerance.rtol,
        "states": list(states) if states is not None else None,
        "tensors": result.tensors,
        "elements": result.elements,
        "differences": [{key: getattr(found, key) for key in _KEYS} for found in result.differences],
        "notes": result.notes,
        **more(result),
    }


def _nbytes(source: Source, states: Sequence[str] | None) -> int:
    """About how many bytes will be compared."""
    total = 0
    for name in source.catalog:
        spec = source.model.get(name.param)
        if spec is not None and (states is None or name.state in states):
            total += prod(spec.global_shape) * (spec.dtype.itemsize if name.state == PARAM else _STATE_NBYTES)
    return total


def _print_models(facts: Facts) -> None:
    print_facts([("first", source_text(facts["a"])), ("second", source_text(facts["b"]))])
    say(comparison_line(facts))
    print_differences(facts)


def _print_steps(facts: Facts) -> None:
    print_facts([("first", facts["a"]["path"]), ("second", facts["b"]["path"])])
    say("equal" if facts["equal"] else "different")
    for role, comparison in facts["models"].items():
        say(f"  {role}  {comparison_line(comparison)}")
        print_differences(comparison)
    for name, verdict in facts["others"].items():
        say(f"  {name}  {verdict}")


def comparison_line(facts: Facts) -> str:
    """``equal: 212 tensors, 853,504 elements, bit for bit``."""
    how = "bit for bit" if facts["exact"] else f"within atol {facts['atol']:g}, rtol {facts['rtol']:g}"
    what = f"{count(facts['tensors'], 'tensor')}, {count(facts['elements'], 'element')} compared {how}"
    return (
        f"equal: {what}" if facts["equal"] else f"different: {count(len(facts['differences']), 'difference')}; {what}"
    )


def print_differences(facts: Facts) -> None:
    """Print differences and notes."""
    if facts["differences"]:
        columns = [Column("what differs"), Column("how"), Column("largest |a − b|", True)]
        rows = [(d["name"], d["what"], f"{d['max_abs']:.3g}" if d["differing"] else "") for d in facts["differences"]]
        print_table(columns, rows, limit=_SHOWN)
    for note in facts["notes"]:
        say(f"  note: {note}")
