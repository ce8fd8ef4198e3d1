"""What users call a checkpoint: a path of this machine, a URL of an object store, or a path that a store gave."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ..errors import UsageError
from ..suggestions import hub_name
from .destination import Publication
from .links import enclose
from .paths import ReadablePath, local_path, real_path, storage_error, url_in
from .publish import MANIFEST_NAME, LocalPublication, make_folder_of, replace_text
from .reading import OpenFiles
from .settings import SCHEMES
from .store import FarFiles, StorePath


def _open_objects(url: str) -> StorePath:
    from .objects import open_url  # a store is seldom meant

    return open_url(url)


def _open_hub(url: str) -> StorePath:
    from .hub import open_hub

    return open_hub(url)


def _in_objects(
    target: StorePath, overwrite: bool, replaceable: Callable[[ReadablePath], bool], manifest_name: str, memory: int
) -> Publication:
    from .upload import StorePublication

    return StorePublication(target, overwrite, replaceable, manifest_name, memory)


def _removed_objects(folder: StorePath, manifest_name: str) -> bool:
    from .upload import remove

    return remove(folder, manifest_name)


class Backend(NamedTuple):
    """What answers to one kind of URL. What is left out is that of object stores, which refuses what is none.

    Args:
        open: Gives the path that a URL names.
        publication: How a folder is published there; it is given what :func:`publication` is, but what only disks know.
        remove: Deletes a published folder, whose manifest has that name; says whether there was one.
    """

    open: Callable[[str], StorePath]
    publication: Callable[[StorePath, bool, Callable[[ReadablePath], bool], str, int], Publication] = _in_objects
    remove: Callable[[StorePath, str], bool] = _removed_objects


BACKENDS: dict[str, Backend] = {**dict.fromkeys(SCHEMES, Backend(_open_objects)), "hf": Backend(_open_hub)}
"""What is no folder of a file system, by its scheme: a new one is a :class:`~.store.Store`, and one line here."""


def checkpoint_path(given: str | os.PathLike[str] | ReadablePath, *, follow_links: bool = False) -> ReadablePath:
    """A path to read from, out of which links of what lies there may not lead. The one place that knows which there are.

    Args:
        given: What a user named, or what a store gave.
        follow_links: Whether the user says that links may lead out of it; who does not say it changes nothing.

    Raises:
        UsageError: It is a URL of a kind that nobody reads, or of a store that cannot be opened.
    """
    if not isinstance(given, str | os.PathLike):
        return given
    url = url_in(given)
    if url is None or url.lower().startswith("file:"):
        enclose(path := local_path(given), follow=follow_links or None)
        return path
    backend = BACKENDS.get(url.partition(":")[0])
    if backend is not None:
        return backend.open(url)
    raise UsageError(
        f"{url}: is a URL of a kind that is not read; those that are: {', '.join(f'{scheme}://' for scheme in (*BACKENDS, 'file'))}\n"
        f"{hub_name(url).strip() or 'Copy it to a local folder first, or mount it.'}"
    )


def publication(
    target: ReadablePath,
    replaceable: Callable[[ReadablePath], bool],
    *,
    overwrite: bool = False,
    fsync: bool = True,
    memory: int = 64 << 20,
    manifest_name: str = MANIFEST_NAME,
    resumable: bool = False,
) -> Publication:
    """How a folder is published where it lies.

    Args:
        target: The folder.
        replaceable: Says whether an existing folder is one that may be deleted.
        overwrite: Whether an existing one may be replaced.
        fsync: Whether a disk has everything before it appears.
        memory: Bytes of one file that may be on their way to a store.
        manifest_name: Name of the manifest in the folder.
        resumable: Whether what a killed process left may be gone on with, where a folder can be.

    Raises:
        UsageError: Nothing can be written there.
    """
    if isinstance(target, StorePath):
        return _backend(target).publication(target, overwrite, replaceable, manifest_name, memory)
    assert isinstance(target, Path)
    return LocalPublication(target, overwrite, fsync, replaceable, manifest_name, resumable=resumable)


def _backend(path: StorePath) -> Backend:
    return BACKENDS.get(str(path).partition(":")[0], Backend(_open_objects))


def remove_stored(folder: ReadablePath, manifest_name: str = MANIFEST_NAME) -> bool:
    """Delete a published folder of a store.

    Returns:
        Whether there was one.

    Raises:
        UsageError: Nothing can be deleted there.
        StorageError: The store refuses.
    """
    assert isinstance(folder, StorePath)
    return _backend(folder).remove(folder, manifest_name)


def write_text(path: ReadablePath, text: str | bytes, *, fsync: bool = True) -> None:
    """Write a small text anew, or what is none, whatever was there: see :func:`.publish.replace_text`.

    Raises:
        StorageError: It cannot be written; what was there before is still there.
    """
    if isinstance(path, StorePath):
        from .upload import object_store

        object_store(path).put(str(path.path), text.encode() if isinstance(text, str) else text)
        object_store(path).forget()
        return
    assert isinstance(path, Path)
    make_folder_of(path)
    replace_text(path, text, fsync=fsync)


def remove_file(path: ReadablePath) -> None:
    """Delete a file.

    Raises:
        FileNotFoundError: There is none.
        StorageError: It cannot be deleted.
    """
    if isinstance(path, StorePath):
        from .upload import object_store

        path.stat()
        object_store(path).remove([str(path.path)])
        object_store(path).forget()
        return
    assert isinstance(path, Path)
    try:
        path.unlink()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise storage_error(error, path, "remove") from error


def open_files(root: ReadablePath) -> OpenFiles:
    """The files of a checkpoint, wherever it lies."""
    return FarFiles(root) if isinstance(root, StorePath) else OpenFiles(root)


def refuse_overlap(source: ReadablePath, target: ReadablePath) -> None:
    """Refuse a target that is the source, lies in it or holds it: links are followed.

    Raises:
        UsageError: They overlap.
    """
    if isinstance(source, StorePath) and isinstance(target, StorePath):
        if _bucket(source) != _bucket(target):
            return
        source = StorePath(target.store, source.path)
    elif isinstance(source, StorePath) or isinstance(target, StorePath):
        return
    real_source, real_target = real_path(source), real_path(target)
    if real_source == real_target:
        raise UsageError(f"{target}: source and target are the same folder.\nChoose another target.")
    if real_target.is_relative_to(real_source):
        raise UsageError(f"{target}: lies inside the source {source}.\nChoose a target outside it.")
    if real_source.is_relative_to(real_target):
        raise UsageError(f"{target}: holds the source {source}.\nChoose a target outside it.")


_ALIASES = {"s3a": "s3", "abfs": "az"}


def _bucket(path: StorePath) -> str:
    """A bucket by one name: two schemes may name the same one."""
    scheme, _, rest = str(path.store).partition(":")
    return f"{_ALIASES.get(scheme, scheme)}:{rest}"
