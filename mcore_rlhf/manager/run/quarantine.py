"""A step in quarantine: a note beside the manifest, not listed in it, tells resume to leave the step alone."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from mcore_rlhf.errors import NotACheckpoint
from mcore_rlhf.storage import regular
from mcore_rlhf.storage.paths import storage_error

from .atomic import write_text
from .step_names import step_of

NOTE = "quarantined.json"
_NO_REASON = "no reason given"


def quarantine(folder: Path, reason: str = "") -> None:
    """Tell resume to leave a step alone; the step itself stays as it is.

    Args:
        folder: The step's folder.
        reason: For whoever reads the list.

    Raises:
        NotACheckpoint: There is no such step.
        StorageError: The note cannot be written.
    """
    _require_step(folder)
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    note = {"reason": reason.strip() or _NO_REASON, "time": now}
    write_text(folder / NOTE, json.dumps(note, indent=1, ensure_ascii=False) + "\n")


def release(folder: Path) -> bool:
    """Take a step out of quarantine.

    Returns:
        Whether it was in it.

    Raises:
        NotACheckpoint: There is no such step.
        StorageError: The note cannot be removed.
    """
    _require_step(folder)
    try:
        (folder / NOTE).unlink()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise storage_error(error, folder / NOTE, "remove") from error
    return True


def reason_of(folder: Path) -> str:
    """Why a step is in quarantine; empty where it is not. A note that cannot be read still counts."""
    note = folder / NOTE
    if not os.path.lexists(note):
        return ""
    try:
        return str(regular.read_json(note)["reason"]) or _NO_REASON
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{NOTE} cannot be read: {type(error).__name__}"


def _require_step(folder: Path) -> None:
    if step_of(folder) is None or not folder.is_dir():
        raise NotACheckpoint(f"{folder}: there is no such step\nList them: mcore-rlhf steps {folder.parent}")
