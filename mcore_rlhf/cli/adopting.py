"""``mcore-rlhf adopt``: verify another trainer's step, and commit it."""

from __future__ import annotations

from pathlib import Path

from mcore_rlhf.families.source import ReadOptions
from mcore_rlhf.manager.run import steps
from mcore_rlhf.manager.run.adopt import Adoption, adopt
from mcore_rlhf.storage.manifest import Manifest
from mcore_rlhf.verify.checkpoint import Depth

from .output import Facts, console, count, emit_json, size
from .progress import shown_progress


def run(folder: Path, options: ReadOptions, deep: bool, workers: int, json: bool) -> None:
    """Adopt a step, and say so.

    Args:
        folder: The step's folder.
        options: How its models are read.
        deep: Whether replicas and masters are compared as well.
        workers: Threads.
        json: For machines.
    """
    was_committed = steps.is_committed(folder)
    with shown_progress() as progress:
        progress.stage(f"verifying {folder}", 2 * steps.size_of(folder))
        how = Adoption(options, Depth.DEEP if deep else Depth.FULL, workers, progress.advance)
        manifest = adopt(folder, how)
    facts = _facts(folder, manifest, was_committed)
    if json:
        emit_json(facts)
    else:
        _print(facts)


def _facts(folder: Path, manifest: Manifest, was_committed: bool) -> Facts:
    """``path``; ``step``; ``adopted`` (false where it was committed before); ``parts``; ``files``; ``bytes``."""
    return {
        "path": str(folder),
        "step": manifest.step,
        "adopted": not was_committed,
        "parts": [dict(part) for part in manifest.parts],
        "files": len(manifest.files),
        "bytes": sum(entry.nbytes for entry in manifest.files.values()),
    }


def _print(facts: Facts) -> None:
    out = console()
    if not facts["adopted"]:
        out.print(f"{facts['path']}: is committed already; nothing to do")
        return
    out.print(f"{facts['path']}: adopted; {count(facts['files'], 'file')}, {size(facts['bytes'])}, all of them intact")
    for part in facts["parts"]:
        out.print(f"  {part['role']}  {part['format']}, {part['parallel']}")
        if "unread" in part:
            out.print(f"    not understood, and not to be resumed from  {part['unread']}")
