"""``mcore-rlhf prune``: delete the steps that no rule wants to keep."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, cast

import typer

from mcore_rlhf.errors import Corrupt, Problems, UsageError
from mcore_rlhf.manager.run import retention, steps
from mcore_rlhf.manager.run.retention import Deletion, KeepBest, KeepEvery, KeepLast, KeepRule, Retention, SizeCap
from mcore_rlhf.storage.sizes import parse_size

from .output import Column, Facts, console, count, emit_json, print_table, size
from .progress import shown_progress
from .steps import require_root
from .verifying import check_manifest

_BEST = re.compile(r"(?P<metric>.+?)(?::(?P<mode>min|max)(?::(?P<k>[1-9][0-9]*))?)?")


def rules(keep_last: int | None, keep_every: int | None, keep_best: Sequence[str], max_size: str | None) -> Retention:
    """What the options say.

    Raises:
        UsageError: They say nothing, or cannot be understood.
    """
    keep: list[KeepRule] = [_best(text) for text in keep_best]
    keep += [KeepLast(keep_last)] if keep_last is not None else []
    keep += [KeepEvery(keep_every)] if keep_every is not None else []
    if not keep and max_size is None:
        raise UsageError("nothing says what to keep\nGive --keep-last, --keep-every, --keep-best or --max-size.")
    try:
        cap = SizeCap(parse_size(max_size)) if max_size is not None else None
    except ValueError as error:
        raise UsageError(f"--max-size: {error}") from None
    return Retention(keep, cap)


def _best(text: str) -> KeepBest:
    match = _BEST.fullmatch(text)
    if match is None:
        raise UsageError(f"--keep-best: expected METRIC, METRIC:min or METRIC:max:3, found {text!r}")
    mode = cast(Literal["min", "max"], match["mode"] or "max")
    return KeepBest(match["metric"], mode, int(match["k"] or 1))


def run(
    root: Path, policy: Retention, include_damaged: bool, dry_run: bool, json: bool, *, verified: bool = True
) -> None:
    """Delete, and say what was.

    Args:
        root: The run's root.
        policy: What to keep.
        include_damaged: Whether damaged and partial steps go as well.
        dry_run: Whether to delete nothing.
        json: For machines.
        verified: Whether nothing goes before every byte of the newest step that stays was verified.

    Raises:
        Corrupt: That step is damaged; nothing was deleted.
        typer.Exit: With code 1, where something could not be deleted.
    """
    require_root(root)
    _require_metrics(root, policy)
    if verified and not dry_run and retention.plan_deletions(root, policy, include_damaged=include_damaged):
        _verify_newest(root)
    cleaned = [] if dry_run else retention.clean_up(root)
    planned = retention.plan_deletions(root, policy, include_damaged=include_damaged)
    deleted = planned if dry_run else retention.apply(root, planned)
    facts = _facts(root, planned, deleted, cleaned, dry_run)
    if json:
        emit_json(facts)
    else:
        _print(facts)
    if len(deleted) < len(planned):
        raise typer.Exit(1)


def _require_metrics(root: Path, policy: Retention) -> None:
    """A metric that no step has is a slip of the pen.

    Raises:
        UsageError: There is one; the known ones are named.
    """
    known = sorted({name for step in steps.committed(root) for name in step.metrics})
    for rule in policy.keep:
        if isinstance(rule, KeepBest) and rule.metric not in known:
            raise UsageError(
                f"{root}: no committed step has the metric {rule.metric!r}; known: {', '.join(known) or 'none'}"
            )


def _verify_newest(root: Path) -> None:
    """Sizes alone say that it is committed; the steps that would go may be the only ones that can be read.

    Raises:
        Corrupt: A byte of it is not what was written.
    """
    newest = steps.newest(root)
    if newest is None:
        return
    with shown_progress() as progress:
        found = check_manifest(newest.path, steps.read_manifest(newest.path), progress)
    if found:
        raise Corrupt(
            f"{newest.path}: the newest step that stays is damaged; nothing was deleted\n"
            f"{Problems(found).describe()}\n"
            f"Look at all of it with: mcore-rlhf verify {newest.path}\n"
            f"Put it aside with: mcore-rlhf steps {root} --quarantine {newest.step} --reason damaged\n"
            "Then prune again. --no-verify deletes without looking."
        )


def _facts(
    root: Path, planned: Sequence[Deletion], deleted: Sequence[Deletion], cleaned: Sequence[str], dry_run: bool
) -> Facts:
    """``root``; ``dry_run``; ``deleted`` and ``failed`` (``step``, ``path``, ``bytes``, ``reason``); ``kept`` (numbers of all
    other steps); ``bytes`` deleted; ``cleaned`` (what dead processes had left).
    """
    gone = {deletion.step for deletion in deleted}
    return {
        "root": str(root),
        "dry_run": dry_run,
        "deleted": [_deletion_facts(deletion) for deletion in deleted],
        "failed": [_deletion_facts(deletion) for deletion in planned if deletion.step not in gone],
        "kept": sorted({step.step for step in steps.listed(root)} - gone),
        "bytes": sum(deletion.nbytes for deletion in deleted),
        "cleaned": list(cleaned),
    }


def _deletion_facts(deletion: Deletion) -> Facts:
    return {
        "step": deletion.step,
        "path": str(deletion.path),
        "bytes": deletion.nbytes,
        "reason": deletion.reason,
    }


def _print(facts: Facts) -> None:
    out = console()
    for line in facts["cleaned"]:
        out.print(line)
    what = "would delete" if facts["dry_run"] else "deleted"
    out.print(f"{facts['root']}: {what} {count(len(facts['deleted']), 'step')}, {size(facts['bytes'])}")
    if facts["deleted"]:
        columns = [Column("step", True), Column("size", True), Column("why")]
        rows = [(str(gone["step"]), size(gone["bytes"]), gone["reason"]) for gone in facts["deleted"]]
        print_table(out, columns, rows)
    if facts["failed"]:
        out.print("not deleted: " + ", ".join(str(gone["step"]) for gone in facts["failed"]))
    out.print("kept: " + (", ".join(map(str, facts["kept"])) or "nothing"))
