"""``mcore-rlhf steps``, ``prune`` and ``adopt``: which steps lie in a root, which of them go, and which begin to count."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal, cast

import click

from mcore_rlhf.errors import Corrupt, NotACheckpoint, Problems, UsageError
from mcore_rlhf.families.megatron.folders import newer_non_persistent
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.formats.registry import is_model
from mcore_rlhf.manager.rlhf.journal_files import FOLDER as JOURNAL
from mcore_rlhf.manager.run import adopt, retention, steps
from mcore_rlhf.manager.run.adopt import Adoption
from mcore_rlhf.manager.run.events import EVENTS_NAME
from mcore_rlhf.manager.run.failed import FAILED, FailedSave
from mcore_rlhf.manager.run.mirror_status import STATUS, MirrorStatus
from mcore_rlhf.manager.run.naming import Naming
from mcore_rlhf.manager.run.retention import Deletion, KeepBest, KeepEvery, KeepLast, KeepRule, Retention, SizeCap
from mcore_rlhf.manager.run.steps import Step
from mcore_rlhf.manager.runs import listed_steps, meant_below, naming_of, step_at, tracked_in
from mcore_rlhf.storage.manifest import Manifest
from mcore_rlhf.storage.paths import ReadablePath, absolute, parse_size
from mcore_rlhf.storage.patience import is_there
from mcore_rlhf.storage.publish import MANIFEST_NAME
from mcore_rlhf.storage.store import StorePath
from mcore_rlhf.storage.urls import checkpoint_path
from mcore_rlhf.suggestions import did_you_mean
from mcore_rlhf.verify.checkpoint import Depth

from .output import Column, Facts, count, emit_json, print_table, say, size
from .progress import shown_progress
from .verifying import check_manifest

_TRIED = 5
_BEST = re.compile(r"(?P<metric>.+?)(?::(?P<mode>min|max)(?::(?P<k>[1-9][0-9]*))?)?")


def list_steps(given: Path, quarantine: int | None, reason: str, release: int | None, json: bool) -> None:
    """Change the quarantine where that is wanted, then list.

    Args:
        given: The run's root.
        quarantine: A step to put in quarantine.
        reason: Why.
        release: A step to take out.
        json: For machines.

    Raises:
        click.exceptions.Exit: With code 1, where no step is committed; with 2, where one that cannot be read may be.
    """
    root = require_root(given)
    if reason and quarantine is None:
        raise UsageError("--reason says why a step is put in quarantine\nGive --quarantine STEP as well.")
    if quarantine is not None and quarantine == release:
        raise UsageError(f"--quarantine {quarantine} and --release {release} contradict each other")
    for folder in naming_of(root).folders_of(root, release) if release is not None else ():
        steps.release(folder)
    for folder in naming_of(root).folders_of(root, quarantine) if quarantine is not None else ():
        steps.quarantine(folder, reason)
    found, mirror = _with_advice(listed_steps(root)), MirrorStatus.read(root) if isinstance(root, Path) else None
    if json:
        emit_json([step_facts(step, mirror) for step in found])
    else:
        _print_steps(root, found, mirror)
    newer = newer_non_persistent(root, max((step.step for step in found), default=None))
    if newer:
        say(f"note: {newer}", err=json)
    failed = FailedSave.read(root) if isinstance(root, Path) else None
    if failed is not None and all(failed.step > step.step for step in found if step.resumable):
        say(f"note: {failed}", err=json)
    if not any(step.state == "committed" for step in found):
        raise click.exceptions.Exit(2 if any(step.state == "unreadable" for step in found) else 1)


def _with_advice(found: list[Step]) -> list[Step]:
    """The steps, where those of other trainers say whether they can be adopted: as that takes opening them, the newest few."""
    tried = [step for step in found if step.state == "foreign"][-_TRIED:]
    return [replace(step, why=f"{step.why}; {_advice(step)}") if step in tried else step for step in found]


def _advice(step: Step) -> str:
    other = step_at(step.path)
    if steps.step_of(step.path) is None and (other is None or other.trainer.in_place):
        return "it has no folder of its own for one; it is read and converted as it is"
    why_not = adopt.why_not(step.path)
    if why_not:
        return f"it cannot be adopted: {why_not}"
    return f"check it and give it one: mcore-rlhf adopt {step.path}"


def require_root(given: Path) -> ReadablePath:
    """The root that a user named.

    Raises:
        NotACheckpoint: It does not exist, or is a file.
        UsageError: It is a step.
    """
    root = checkpoint_path(given)
    if not root.is_dir():
        raise NotACheckpoint(f"{root}: " + ("expected a folder, found a file" if root.exists() else "no such folder"))
    if steps.step_of(absolute(root)) is not None:
        raise UsageError(f"{root}: is one step, but the root of a run is wanted\nGive the folder above: {root.parent}")
    _require_steps(root)
    return root


_OF_A_ROOT = (EVENTS_NAME, STATUS, FAILED, JOURNAL)


def _require_steps(root: ReadablePath) -> None:
    """An empty folder is a run that has saved nothing yet; one that holds other things is no run's.

    Raises:
        NotACheckpoint: It is no run's.
    """
    inside = [*root.iterdir()]
    if not inside or any(one.name in _OF_A_ROOT or one.name.startswith(".") for one in inside):
        return
    if any(steps.step_of(one) is not None and one.is_dir() for one in inside) or listed_steps(root):
        return
    hint = meant_below(root) or "Give the folder that holds global_step_N folders."
    if is_model(root):
        newer = newer_non_persistent(root, None)
        hint = f"It is a checkpoint itself. Look at it: mcore-rlhf inspect {root}" + (
            f"\nBeside: {newer}" if newer else ""
        )
    raise NotACheckpoint(f"{root}: is no root of a run: it holds no step, such as a folder global_step_N\n{hint}")


def step_facts(step: Step, mirror: MirrorStatus | None = None) -> Facts:
    """``step``, ``path``, ``state``, ``bytes``, ``roles``, ``time``, ``why``, ``metrics``, ``quarantined`` (texts are empty
    where there is nothing to say); where the root has a mirror, also ``mirror`` (``mirrored``, ``waiting``, ``failed``) and
    ``mirror_why``.
    """
    told = {} if mirror is None else {"mirror": mirror.of(step), "mirror_why": _mirror_why(step, mirror)}
    return {
        "step": step.step,
        "path": str(step.path),
        "state": step.state,
        "bytes": step.nbytes,
        "roles": list(step.roles),
        "time": step.time,
        "why": step.why,
        "metrics": dict(step.metrics),
        "quarantined": step.quarantined,
        **told,
    }


def _mirror_why(step: Step, mirror: MirrorStatus) -> str:
    state = mirror.of(step)
    return mirror.failed[step.transaction] if state == "failed" else mirror.problem if state == "waiting" else ""


def _print_steps(root: ReadablePath, found: list[Step], mirror: MirrorStatus | None) -> None:
    committed = sum(step.state == "committed" for step in found)
    say(f"{root}: {count(len(found), 'step')}, {committed} committed")
    if mirror is not None:
        say(_mirror_line(found, mirror))
    if not found:
        return
    columns = [Column("step", True), Column("state"), Column("size", True), Column("roles"), Column("time"), Column("")]
    if mirror is not None:
        columns.insert(2, Column("mirror"))
    print_table(columns, [_step_row(step, mirror) for step in found])


def _mirror_line(found: list[Step], mirror: MirrorStatus) -> str:
    waiting = [step for step in found if mirror.of(step) == "waiting"]
    backlog = f", {len(waiting)} waiting ({size(sum(step.nbytes for step in waiting))})" if waiting else ""
    failed = sum(mirror.of(step) == "failed" for step in found)
    more = (f", {failed} failed" if failed else "") + (f"; {mirror.problem}" if mirror.problem else "")
    return f"mirror {mirror.url}: {count(len(mirror.mirrored), 'step')}{backlog}{more}"


def _step_row(step: Step, mirror: MirrorStatus | None) -> tuple[str, ...]:
    note = f"quarantined: {step.quarantined}" if step.quarantined else ""
    failed = mirror.failed.get(step.transaction, "") if mirror is not None else ""
    return (
        str(step.step),
        step.state,
        *(() if mirror is None else (mirror.of(step),)),
        size(step.nbytes),
        ", ".join(step.roles),
        step.time,
        "; ".join(text for text in (note, step.why, failed) if text),
    )


def rules_of(keep_last: int | None, keep_every: int | None) -> list[KeepRule]:
    """The rules of ``--keep-last`` and ``--keep-every``."""
    last: list[KeepRule] = [KeepLast(keep_last)] if keep_last is not None else []
    return [*last, *([KeepEvery(keep_every)] if keep_every is not None else [])]


def retention_of(
    keep_last: int | None, keep_every: int | None, keep_best: Sequence[str], max_size: str | None
) -> Retention:
    """What the options say.

    Raises:
        UsageError: They say nothing, or cannot be understood.
    """
    keep = [*map(_best, keep_best), *rules_of(keep_last, keep_every)]
    if not keep and max_size is None:
        raise UsageError("nothing says what to keep\nGive --keep-last, --keep-every, --keep-best or --max-size.")
    try:
        nbytes = parse_size(max_size) if max_size is not None else None
        if nbytes == 0:
            raise ValueError(f"should be greater than 0, found {max_size!r}")
        cap = SizeCap(nbytes) if nbytes is not None else None
    except ValueError as error:
        raise UsageError(f"--max-size: {error}") from None
    return Retention(keep, cap)


def _best(text: str) -> KeepBest:
    match = _BEST.fullmatch(text)
    if match is None:
        raise UsageError(f"--keep-best: expected METRIC, METRIC:min or METRIC:max:3, found {text!r}")
    mode = cast(Literal["min", "max"], match["mode"] or "max")
    return KeepBest(match["metric"], mode, int(match["k"] or 1))


def prune(
    given: Path, policy: Retention, include_damaged: bool, dry_run: bool, json: bool, *, verified: bool = True
) -> None:
    """Delete, and say what was.

    Args:
        given: The run's root.
        policy: What to keep.
        include_damaged: Whether damaged and partial steps go as well.
        dry_run: Whether to delete nothing.
        json: For machines.
        verified: Whether nothing goes before every byte of the newest step that stays was verified.

    Raises:
        Corrupt: That step is damaged; nothing was deleted.
        click.exceptions.Exit: With code 1, where something could not be deleted.
    """
    root = require_root(given)
    naming, tracked = naming_of(root), tracked_in(root)
    plan = partial(retention.plan_deletions, root, policy, tracked, include_damaged=include_damaged, naming=naming)
    _require_metrics(naming.listed(root), root, policy)
    if verified and not dry_run and plan():
        _verify_newest(root, naming)
    cleaned = [] if dry_run else retention.clean_up(root, naming=naming)
    planned = plan()
    deleted = planned if dry_run else retention.apply(root, planned, naming)
    facts = _pruned_facts(root, planned, deleted, cleaned, dry_run)
    if json:
        emit_json(facts)
    else:
        _print_pruned(facts)
    if len(deleted) < len(planned):
        raise click.exceptions.Exit(1)


def prune_dead(given: Path, dry_run: bool, json: bool) -> None:
    """Remove what dead writers left in a store, and say what it was.

    Args:
        given: A target, or a folder of targets.
        dry_run: Whether to remove nothing.
        json: For machines.

    Raises:
        UsageError: It is no folder of a store.
    """
    from mcore_rlhf.storage import upload

    root = checkpoint_path(given)
    if not isinstance(root, StorePath):
        raise UsageError(f"{root}: --dead is for object stores; in a local root, prune removes what is dead by itself")
    found = list(upload.dead(root))
    for one in () if dry_run else found:
        upload.object_store(root).remove(one.keys)
    if json:
        gone = [{"path": one.path, "bytes": one.nbytes, "objects": len(one.keys)} for one in found]
        emit_json({"root": str(root), "dry_run": dry_run, "dead": gone})
        return
    what = "would remove" if dry_run else "removed"
    say(f"{root}: {what} {count(len(found), 'folder')}, {size(sum(one.nbytes for one in found))}")
    for one in found:
        say(f"  {one}")


def _require_metrics(there: Sequence[Step], root: ReadablePath, policy: Retention) -> None:
    """A metric that no step has is a slip of the pen.

    Raises:
        UsageError: There is one; the known ones are named.
    """
    known = sorted({name for step in there if step.resumable for name in step.metrics})
    for rule in policy.keep:
        if isinstance(rule, KeepBest) and rule.metric not in known:
            hint = did_you_mean(rule.metric, known)
            forms = "\nIts forms are METRIC, METRIC:min and METRIC:max:3." if ":" in rule.metric else ""
            raise UsageError(
                f"{root}: no committed step has the metric {rule.metric!r}; known: {', '.join(known) or 'none'}{hint}{forms}"
            )


def _verify_newest(root: ReadablePath, naming: Naming) -> None:
    """Sizes alone say that it is committed; the steps that would go may be the only ones that can be read.

    Raises:
        Corrupt: A byte of it is not what was written.
        Unreadable: It cannot be read.
    """
    newest = naming.newest(root)
    if newest is None:
        return
    with shown_progress() as progress:
        found = check_manifest(newest.path, steps.read_manifest(newest.path, naming.manifest), progress)
    Problems(found).raise_if_unread()
    if found:
        raise Corrupt(
            f"{newest.path}: the newest step that stays is damaged; nothing was deleted\n"
            f"{Problems(found).describe()}\n"
            f"Look at all of it with: mcore-rlhf verify {newest.path}\n"
            f"Put it aside with: mcore-rlhf steps {root} --quarantine {newest.step} --reason damaged\n"
            "Then prune again. --no-verify deletes without looking."
        )


def _pruned_facts(
    root: ReadablePath, planned: Sequence[Deletion], deleted: Sequence[Deletion], cleaned: Sequence[str], dry_run: bool
) -> Facts:
    """``root``; ``dry_run``; ``deleted`` and ``failed`` (``step``, ``path``, ``bytes``, ``reason``); ``kept`` (numbers of all
    other steps); ``foreign`` (those of them that have no manifest, and go by no rule); ``bytes`` deleted; ``cleaned`` (what dead
    processes had left).
    """
    gone = {deletion.path for deletion in deleted}
    there = [step for step in naming_of(root).listed(root) if step.path not in gone]
    return {
        "root": str(root),
        "dry_run": dry_run,
        "deleted": [_deletion_facts(deletion) for deletion in deleted],
        "failed": [_deletion_facts(deletion) for deletion in planned if deletion.path not in gone],
        "kept": sorted({step.step for step in there}),
        "foreign": sorted({step.step for step in there if step.state == "foreign"}),
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


def _print_pruned(facts: Facts) -> None:
    for line in facts["cleaned"]:
        say(line)
    what = "would delete" if facts["dry_run"] else "deleted"
    say(f"{facts['root']}: {what} {count(len(facts['deleted']), 'step')}, {size(facts['bytes'])}")
    if facts["deleted"]:
        columns = [Column("step", True), Column("size", True), Column("why")]
        rows = [(str(gone["step"]), size(gone["bytes"]), gone["reason"]) for gone in facts["deleted"]]
        print_table(columns, rows)
    if facts["failed"]:
        say("not deleted: " + ", ".join(str(gone["step"]) for gone in facts["failed"]))
    say("kept: " + (", ".join(map(str, facts["kept"])) or "nothing"))
    if facts["foreign"]:
        listed = ", ".join(map(str, facts["foreign"]))
        say(f"without a manifest, so that no rule counts or deletes them: {listed}; mcore-rlhf adopt gives a step one")


def adopt_step(given: Path, options: ReadOptions, deep: bool, workers: int, json: bool) -> None:
    """Adopt a step, and say so.

    Args:
        given: The step's folder.
        options: How its models are read.
        deep: Whether replicas and masters are compared as well.
        workers: Threads.
        json: For machines.
    """
    folder = checkpoint_path(given)
    was_committed = any(
        is_there(folder / name) for name in (MANIFEST_NAME, steps.MANIFEST)
    )  # what is there and not whole is refused
    with shown_progress() as progress:
        progress.stage(f"verifying {folder}", 2 * steps.size_of(folder))
        how = Adoption(options, Depth.DEEP if deep else Depth.FULL, workers, progress.advance)
        manifest = adopt.adopt(folder, how)
    facts = _adopted_facts(folder, manifest, was_committed)
    if json:
        emit_json(facts)
    else:
        _print_adopted(facts)


def _adopted_facts(folder: ReadablePath, manifest: Manifest, was_committed: bool) -> Facts:
    """``path``; ``step``; ``adopted`` (false where it was committed before); ``parts``; ``missing`` (texts: files that its trainer
    writes and does without); ``files``; ``bytes``.
    """
    return {
        "path": str(folder),
        "step": manifest.step,
        "adopted": not was_committed,
        "parts": [dict(part) for part in manifest.parts],
        "missing": manifest.report.get(adopt.MISSING, []),
        "files": len(manifest.files),
        "bytes": sum(entry.nbytes for entry in manifest.files.values()),
    }


def _print_adopted(facts: Facts) -> None:
    if not facts["adopted"]:
        say(f"{facts['path']}: is committed already; nothing to do")
        return
    say(f"{facts['path']}: adopted; {count(facts['files'], 'file')}, {size(facts['bytes'])}, all of them intact")
    for part in facts["parts"]:
        say(f"  {part['role']}  {part['format']}, {part['parallel']}")
        if "unread" in part:
            say(f"    not understood, and not to be resumed from  {part['unread']}")
    for text in facts["missing"]:
        say(f"  missing  {text}")
