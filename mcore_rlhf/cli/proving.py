"""``convert --verify``: the published target is verified deeply, opened anew, and compared with the source."""

from __future__ import annotations

from pathlib import Path

from mcore_rlhf.convert import Job
from mcore_rlhf.core.names import PARAM
from mcore_rlhf.families.source import ReadOptions, Source
from mcore_rlhf.formats.registry import open_checkpoint
from mcore_rlhf.verify.checkpoint import Depth
from mcore_rlhf.verify.differ import Tolerance

from .comparing import compare_facts
from .job import ConversionJob
from .output import Facts
from .progress import Progress
from .verifying import verify_facts

_HALF_UNITS = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}
"""Largest relative error of rounding to a type: half a unit in the last place."""
_SMALLEST_HALF = {"float16": 2.0**-25}  # below its smallest normal number, float16 rounds to a fixed step


def prove(job: ConversionJob, done: Job, target: Path, progress: Progress) -> Facts:
    """Verify the target and compare it with the source.

    Returns:
        ``verify``, ``diff`` (null where the target could not be opened) and ``proved``.
    """
    options = job.options.read
    reading = ReadOptions(options.role, None, options.rules, options.stubs, options.vocab_size)
    verdict = verify_facts(target, reading, Depth.DEEP, job.options.workers, progress)
    diff = (
        _compare(job, done.seen or done.source, open_checkpoint(target, reading), progress)
        if verdict["checkpoint"]
        else None
    )
    return {
        "verify": verdict,
        "diff": diff,
        "proved": verdict["intact"] and diff is not None and diff["equal"] and diff["tensors"] > 0,
    }


def _compare(job: ConversionJob, a: Source, b: Source, progress: Progress) -> Facts:
    """Compare all that both should have; parameters within their roundings, where their type was changed."""
    if a.states == b.states and _dtypes(a) == _dtypes(b):
        # What a folder has no place for was said before anything was written, and is no difference.
        alone = a.state.scheduler is not None and b.state.scheduler is None and not b.states
        return compare_facts(a, b, Tolerance(), [PARAM] if alone else None, progress)
    common = [state for state in a.states if state in b.states]
    if _dtypes(a) == _dtypes(b):
        facts = compare_facts(a, b, Tolerance(), [PARAM, *common], progress)
    else:
        facts = _both(
            compare_facts(a, b, _rounding(a, b), [PARAM], progress),
            compare_facts(a, b, Tolerance(), common, progress),
        )
    left_out = [state for state in (*a.states, *b.states) if state not in common]
    if left_out:
        facts["notes"].append(
            f"{', '.join(dict.fromkeys(left_out))}: only one of the two has it, and it was not compared"
        )
    return facts


def _both(params: Facts, states: Facts) -> Facts:
    return {
        **params,
        "equal": params["equal"] and states["equal"],
        "states": [*params["states"], *states["states"]],
        "tensors": params["tensors"] + states["tensors"],
        "elements": params["elements"] + states["elements"],
        "differences": params["differences"] + states["differences"],
        "notes": list(
            dict.fromkeys(
                [
                    "the parameters' type was changed: they were compared within their roundings, all other states bit for bit",
                    *params["notes"],
                    *states["notes"],
                ]
            )
        ),
    }


def _rounding(*sources: Source) -> Tolerance:
    """How far two roundings of the same value, one to each model's types, can lie apart."""
    kinds = [_dtypes(source) for source in sources]
    return Tolerance(
        sum(max(_SMALLEST_HALF.get(name, 0.0) for name in names) for names in kinds),
        sum(max(_HALF_UNITS.get(name, 0.0) for name in names) for names in kinds),
    )


def _dtypes(source: Source) -> set[str]:
    """Of the parameters as they are stored; of the model, where only masters are."""
    entries = (source.catalog.get(name) for name in source.catalog if name.state == PARAM)
    return {str(e.dtype) for e in entries if e is not None} or {str(spec.dtype) for spec in source.model.params}
