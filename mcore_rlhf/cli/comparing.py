"""``mcore-rlhf diff``: whether two checkpoints hold the same, whatever their formats and layouts."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from pathlib import Path

import typer

from mcore_rlhf.core.names import PARAM
from mcore_rlhf.errors import Unsupported, UsageError
from mcore_rlhf.families.crossing import alike
from mcore_rlhf.families.source import ReadOptions, Source
from mcore_rlhf.formats.merging import bytes_of
from mcore_rlhf.formats.registry import open_checkpoint
from mcore_rlhf.manager.whole_step import WholeStep
from mcore_rlhf.verify.differ import Comparison, Differ, Tolerance

from .describe import source_facts
from .meaning import Single, chosen_facts, meaning, only_model, print_choice
from .output import Facts, emit_json
from .progress import Progress, shown_progress
from .units import count

_STATE_NBYTES = 4  # optimizer states are fp32 nearly always; this is for the progress bar


def run(paths: tuple[Path, Path], options: ReadOptions, tolerance: Tolerance, states: str | None, json: bool) -> None:
    """Compare two checkpoints and print the differences.

    Args:
        paths: The two.
        options: How both are opened.
        tolerance: When values count as equal.
        states: Names of the states to compare, with commas, or None for everything.
        json: For machines.

    Raises:
        typer.Exit: With code 1, where something differs.
        UsageError: Neither checkpoint has a state of that name.
    """
    first, second = (meaning(path, options) for path in paths)
    if isinstance(first, WholeStep) and isinstance(second, WholeStep) and states is None:
        from .whole import compare_steps

        return compare_steps(first, second, options, tolerance, json)
    with shown_progress() as progress:
        singles, beside = _as_models(first, second, options)
        a, b = (_opened(meant, states) for meant in singles)
        facts = compare_facts(a, b, tolerance, _chosen(states, a, b), progress)
    facts["notes"] += beside
    for name, meant in zip("ab", singles, strict=True):
        facts[name]["chosen"] = chosen_facts(meant.chosen)
    if json:
        emit_json(facts)
    else:
        from .render_verify import print_comparison

        for meant in singles:
            print_choice(meant.chosen)
        print_comparison(facts)
    if not facts["equal"]:
        raise typer.Exit(1)
    return None


def _opened(meant: Single, states: str | None) -> Source:
    """A checkpoint; of one whose optimizer is not understood, the parameters, where only those are compared.

    Raises:
        Unsupported: Its optimizer is not understood, and is to be compared.
    """
    source = open_checkpoint(meant.path, meant.options, partial=True)
    if source.unread and (states is None or states.strip() != PARAM):
        raise Unsupported(f"{source.unread}\n--states {PARAM} compares the weights alone.")
    return source


def _as_models(
    first: WholeStep | Single, second: WholeStep | Single, options: ReadOptions
) -> tuple[list[Single], list[str]]:
    """Two models: the only one of a step, where there is a step; and what is said of everything beside it."""
    models, notes = [], []
    for meant in (first, second):
        if isinstance(meant, WholeStep):
            why = "a step is compared with another step, in all states"
            if meant.others:
                notes.append(f"{meant.folder}: not compared: {count(len(meant.others), 'file')} beside the model")
            meant = only_model(meant, options, why)
        models.append(meant)
    return models, notes


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
    a: Source, b: Source, tolerance: Tolerance, states: Sequence[str] | None, progress: Progress
) -> Facts:
    """Compare two opened checkpoints.

    Keys: ``a``, ``b`` (see :func:`~.describe.source_facts`); ``equal``; ``exact``, ``atol``, ``rtol``; ``states`` (null
    for everything); ``tensors``, ``elements`` compared; ``differences`` (``name``, ``what``, ``differing``,
    ``max_abs``); ``notes``.
    """
    progress.stage("comparing", _nbytes(a, states))
    seen_a, seen_b = alike(a, b)
    with bytes_of(seen_a) as bytes_a, bytes_of(seen_b) as bytes_b:
        result = Differ(seen_a, seen_b, bytes_a, bytes_b, tolerance, states, progress.advance).compare()
    return _facts(a, b, tolerance, states, result)


def _nbytes(source: Source, states: Sequence[str] | None) -> int:
    """About how many bytes will be compared."""
    total = 0
    for name in source.catalog:
        spec = source.model.get(name.param)
        if spec is not None and (states is None or name.state in states):
            total += prod(spec.global_shape) * (spec.dtype.itemsize if name.state == PARAM else _STATE_NBYTES)
    return total


def _facts(a: Source, b: Source, tolerance: Tolerance, states: Sequence[str] | None, result: Comparison) -> Facts:
    differences = [
        {"name": d.name, "what": d.what, "differing": d.differing, "max_abs": d.max_abs} for d in result.differences
    ]
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
        "differences": differences,
        "notes": result.notes,
    }
