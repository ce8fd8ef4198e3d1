"""``mcore-rlhf diff``: whether two checkpoints hold the same, whatever their formats and layouts."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from pathlib import Path

import typer

from mcore_rlhf.core.names import PARAM
from mcore_rlhf.errors import UsageError
from mcore_rlhf.formats.adapters.merging import bytes_of
from mcore_rlhf.formats.base import ReadOptions, Source
from mcore_rlhf.formats.crossing import alike
from mcore_rlhf.formats.registry import open_checkpoint
from mcore_rlhf.manager.whole_step import WholeStep
from mcore_rlhf.verify.differ import Comparison, Differ, Tolerance

from .describe import source_facts
from .meaning import Single, meaning
from .output import Facts, emit_json
from .progress import Progress, shown_progress

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
    if isinstance(first, WholeStep) or isinstance(second, WholeStep):
        return _compare_steps(first, second, options, tolerance, states, json)
    with shown_progress() as progress:
        a, b = (open_checkpoint(meant.path, meant.options) for meant in (first, second))
        facts = compare_facts(a, b, tolerance, _chosen(states, a, b), progress)
    if json:
        emit_json(facts)
    else:
        from .render_verify import print_comparison

        print_comparison(facts)
    if not facts["equal"]:
        raise typer.Exit(1)
    return None


def _compare_steps(
    a: WholeStep | Single,
    b: WholeStep | Single,
    options: ReadOptions,
    tolerance: Tolerance,
    states: str | None,
    json: bool,
) -> None:
    if isinstance(a, WholeStep) and isinstance(b, WholeStep) and states is None:
        from .whole import compare_steps

        return compare_steps(a, b, options, tolerance, json)
    step = a if isinstance(a, WholeStep) else b
    assert isinstance(step, WholeStep)
    raise UsageError(
        f"{step.folder}: is a whole step; it is compared with another step, in all states\n"
        "Name one of its models with --role."
    )


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
