"""Small text files that appear whole or not at all, and that are on the disk when the call returns."""

from __future__ import annotations

import os
from pathlib import Path

from mcore_rlhf.storage.paths import storage_error
from mcore_rlhf.storage.publish import sync_folder
from mcore_rlhf.storage.staging import new_transaction


def write_text(path: Path, text: str) -> None:
    """Write a file anew: aside, then synced, then renamed over what was there, then its folder synced.

    Args:
        path: The file; its folder exists.
        text: Its content, stored as UTF-8.

    Raises:
        StorageError: The file system refused; what was there before is still there.
    """
    aside = path.with_name(f".{path.name}.tmp-{new_transaction()}")
    try:
        _write_synced(aside, text.encode("utf-8"))
        os.replace(aside, path)
        sync_folder(path.parent)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise storage_error(error, path, "write") from error


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
