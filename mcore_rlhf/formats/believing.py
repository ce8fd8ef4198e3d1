"""What any reader makes of a stranger's folder is looked at here: it surprises nobody, and promises no more than is there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import extract_tb

from mcore_rlhf.core.catalog import ADAMS, EXP_AVG, EXP_AVG_SQ, PARAM
from mcore_rlhf.errors import Incomplete, LayoutMismatch, Unforeseen, Untrusted, shown
from mcore_rlhf.families.megatron.groups import by_adam
from mcore_rlhf.families.megatron.state import MegatronState
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.families.source import Source
from mcore_rlhf.storage.paths import SURROGATE, ReadablePath, canonical, human

from .base import Format

SURPRISES = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
_FEW_RANKS, _BYTES_OF_A_RANK = 1024, 1 << 16
_FACTORED, _OF_AMSGRAD, _LR = "exp_avg_sq_row", "max_exp_avg_sq", "lr"
_WITH_RATE = frozenset({"weight_decay", "betas", "eps", "momentum"})
"""Where one of them is, so is the rate; an elastic checkpoint of DeepSpeed's has none of a group's settings."""
_ADVICE = "Copy the checkpoint again from where it came from, or take the weights alone with --no-optimizer."


def opened(known: Format, folder: ReadablePath, options: ReadOptions) -> Source:
    """What a reader makes of a folder, where it can be believed.

    A reader of few lines looks at nothing twice: what surprises it is told of the folder, which may be a stranger's.

    Args:
        known: The reader's format.
        folder: The checkpoint's own.
        options: Whether with the optimizer, which rules.

    Raises:
        Incomplete: A file that the reader takes for granted, a weight, a moment or a rate is missing.
        Unforeseen: Anything else that the reader takes for granted is otherwise.
        CheckpointError: What the reader says; names, lengths or ranks that nobody can have.
    """
    with _no_surprise(known, folder):
        source = known.read(folder, options)
        _check_model(source)
        _check_optimizer(source)
        _check_ranks(source)
        return source


def roles_of(known: Format, folder: ReadablePath) -> list[str]:
    """Whose models a folder holds, as its format says; none where the folder itself is one's.

    Args:
        known: The format.
        folder: The checkpoint's own.

    Raises:
        Incomplete, Unforeseen: See :func:`opened`.
        Untrusted: A role's name cannot be a folder's.
    """
    with _no_surprise(known, folder):
        return [canonical(role, folder, "role", parts=1) for role in known.roles(folder)]


@contextmanager
def _no_surprise(known: Format, folder: ReadablePath) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise Incomplete(
            f"{error.filename or folder}: is missing, and belongs to a checkpoint of format {known.name}"
        ) from error
    except SURPRISES as error:
        last = extract_tb(error.__traceback__)[-1]
        raise Unforeseen(
            f"{folder}: cannot be read as {known.name}: {type(error).__name__} at {Path(last.filename).name}:{last.lineno}: {error}\n"
            "It is damaged, or of a writer that is not known here. Where that loads it, report this, with what --debug shows."
        ) from error


def _check_model(source: Source) -> None:
    """Names are text, and no length is below 0.

    Raises:
        Untrusted: No format could hold it.
    """
    for spec in source.model.params:
        if spec.global_shape and min(spec.global_shape) < 0:
            raise Untrusted(
                f"{source.root}: {shown(spec.name)} has shape {spec.global_shape}: no tensor has a length below 0"
            )
        if not spec.name.isprintable() and SURROGATE.search(spec.name):
            raise Untrusted(
                f"{source.root}: the tensor {shown(spec.name)} has half a character in its name, which is no text"
            )


def _check_optimizer(source: Source) -> None:
    """States are of parameters that there are, groups have a rate, and Adam both moments.

    Raises:
        Incomplete: Something is missing.
    """
    params = {spec.name for spec in source.model.params}
    for state, param in ((name.state, name.param) for name in source.catalog):
        if state != PARAM and param not in params:
            raise Incomplete(
                f"{source.root}: has {state} of {shown(param)}, which no parameter of the model is called: its weight is "
                "missing, or one of the two has another name\nCopy the checkpoint again from where it came from."
            )
    theirs = source.states and MegatronState.of(source) is None  # Megatron's scheduler sets the rates
    for number, group in enumerate(source.state.groups if theirs else ()):
        if _LR not in group.fields and _WITH_RATE & group.fields.keys():
            text = f"param group {number} of the optimizer has no {_LR!r}, without which no optimizer makes a step"
            raise Incomplete(f"{source.root}: {text}\n{_ADVICE}")
    if lacking := _halves(source):
        name, gone = lacking[0]
        more = f" and of {len(lacking) - 1} more" if lacking[1:] else ""
        raise Incomplete(
            f"{source.root}: the optimizer has no {gone} of {name}{more}, but its other moment: it is incomplete\n{_ADVICE}"
        )


def _check_ranks(source: Source) -> None:
    """No more ranks wrote it than its files have bytes for: a new layout of as many would be made. Few are always believed.

    Raises:
        LayoutMismatch: It says so.
    """
    ranks, stored = source.parallel.world_size, sum(file.nbytes for file in source.files)
    if ranks > _FEW_RANKS + stored // _BYTES_OF_A_RANK:
        raise LayoutMismatch(
            f"{source.root}: says that {ranks:,} ranks wrote it ({source.parallel}), and all its files together have {human(stored)}\n"
            "The degrees in it are damaged or forged: take the files that belong together."
        )


def _halves(source: Source) -> list[tuple[str, str]]:
    """Parameters with one of Adam's two moments where others of their param group have both, each with the other one's name.

    Where none of a group has a second moment it was no Adam: Lion keeps one, also beside groups that Adam trains, as Megatron has it
    do, whose groups do not list their parameters. Adafactor keeps a second moment alone of vectors, and factors of it of matrices.
    Others keep something else in place of the first: a schedule-free Adam ``z``, AdEMAMix one fast and one slow.
    """
    if EXP_AVG_SQ not in source.states or _FACTORED in source.states:
        return []
    first, second = ({name.param for name in source.catalog if name.state == state} for state in (EXP_AVG, EXP_AVG_SQ))
    if first == second or (not first and {*source.states} - {*ADAMS, _OF_AMSGRAD}):
        return []
    group = {param: number for number, of in enumerate(source.state.groups) for param in of.params}
    adams = {group.get(param) for param in second}
    if by_adam(source.state.args) is False:
        adams.discard(None)
    return sorted(
        [(param, EXP_AVG) for param in second - first]
        + [(param, EXP_AVG_SQ) for param in first - second if group.get(param) in adams]
    )
