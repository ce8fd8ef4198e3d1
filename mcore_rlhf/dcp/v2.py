"""``CheckpointManager.Config(storage_config=CommittedStorageConfig())`` of torch_checkpointing, torch's "DCP v2".

The package writes every checkpoint under ``tmp_NAME`` and has the first rank rename that, once all have passed a barrier: this rename
is our commit. Source: torch_checkpointing 0.1.1, ``storage/base_storage.py`` (``Storage``), ``storage/torch_serialization.py``,
``checkpoint_writer.py`` (``CheckpointWriter.write``), ``checkpoint_reader.py``, ``barriers.py``.
"""

from __future__ import annotations

import io
import os
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store
from torch.utils._pytree import tree_leaves
from torch_checkpointing.storage.base_storage import ReadArgs, Storage, StorageConfig

from mcore_rlhf.errors import CheckpointError, Corrupt, StorageError, UsageError
from mcore_rlhf.storage.checksum import crc32
from mcore_rlhf.storage.manifest import FileEntry, Manifest
from mcore_rlhf.storage.paths import ReadablePath
from mcore_rlhf.storage.publish import MANIFEST_NAME
from mcore_rlhf.storage.reading import ByteSource, open_bytes
from mcore_rlhf.storage.settings import SETTINGS, stores_with
from mcore_rlhf.storage.store import StorePath
from mcore_rlhf.storage.transactions import new_transaction
from mcore_rlhf.storage.urls import checkpoint_path

from .savings import NotedStream, Ranks, Saving, begin
from .targets import target_of

if TYPE_CHECKING:
    from typing_extensions import Buffer

_KEY = "mcore_rlhf/dcp/v2"
_MOST_NBYTES = 16 << 20
"""Bytes of one read."""
_HEAD_NBYTES = 4096


@dataclass
class CommittedStorageConfig(StorageConfig):  # type: ignore[misc]  # a package that need not be there
    """Has a checkpoint of torch_checkpointing appear as a whole, with checksums, in a folder or in an object store.

    ``save`` and ``load`` of its ``CheckpointManager`` take a path, or a URL such as ``s3://bucket/runs/step_100``. The files are the
    package's own. Every file's length and CRC-32 stand in ``mcore_rlhf.json`` beside them: ``mcore-rlhf verify`` asks them, and a load that
    reads a file as a whole, as one without resharding does, refuses it where it is damaged.

    Stores are asked as :func:`~mcore_rlhf.storage.settings.stores_with` says when the object is made. Where several ranks save, the process
    group is there before a ``CheckpointManager`` is built, as the package wants it, too.

    Args:
        overwrite: Whether a checkpoint that is there is replaced, once the new one is whole; otherwise it is refused.
        fsync: Whether everything is on the disk before it appears; a store always has it.
        temp_dir_prefix: As ``CheckpointWriterConfig`` has it.
    """

    overwrite: bool = False
    fsync: bool = True
    temp_dir_prefix: str = "tmp_"

    def __post_init__(self) -> None:
        self.settings = SETTINGS.get()
        self._run: Ranks | None = None

    def create_storage(self) -> CommittedStorage:
        """The storage; one object reads and writes."""
        return CommittedStorage(self)

    @property
    def run(self) -> Ranks:
        """Who saves: agreed on by the store of the process group, without waiting for anybody."""
        if self._run is None:
            self._run = _agreed()
        return self._run

    def __getstate__(self) -> dict[str, object]:
        """For the process of an asynchronous save, which is in no process group."""
        return {**self.__dict__, "_run": self.run}


def _agreed() -> Ranks:
    own = new_transaction()
    if not (dist.is_available() and dist.is_initialized()):
        return Ranks(own)
    return Ranks(_get_default_store().compare_set(_KEY, "", own).decode(), dist.get_rank(), dist.get_world_size())


class CommittedStorage(Storage):  # type: ignore[misc]
    """See :class:`CommittedStorageConfig`."""

    def __init__(self, config: CommittedStorageConfig) -> None:
        self._config, self._run = config, config.run
        self._savings: dict[Path, Saving] = {}
        self._beginning = threading.Lock()
        self._targets: dict[Path, Path] = {}

    @property
    def mmap_fill_workers(self) -> int:
        """One: who reads a file in order knows its checksum."""
        return 1

    def _saving(self, path: Path) -> tuple[Saving, str] | None:
        """The save that a path is of, and what it is called in it."""
        for folder in (path, *path.parents):
            if folder in self._savings:
                return self._savings[folder], path.relative_to(folder).as_posix()
        return None

    def _file(self, path: Path) -> tuple[Saving, str]:
        found = self._saving(path)
        if found is None:
            raise UsageError(
                f"{path}: is in no folder that is being saved ({self._config.temp_dir_prefix}NAME)\n"
                "Leave write_to_temp_dir and temp_dir_prefix of CheckpointWriterConfig as they are, and barrier_config not None; a prefix "
                "of your own goes to CommittedStorageConfig, too."
            )
        return found

    def _there(self, path: Path) -> ReadablePath:
        with stores_with(self._config.settings):
            return checkpoint_path(path)

    def mkdir(self, path: Path, recursive: bool = True) -> None:
        """Begin a save, where it is the package's folder for one.

        Raises:
            StorageError: What is there may not be replaced, or nothing can be written there.
        """
        with self._beginning:
            begun = self._saving(path)
            if begun is None or begun[0].wrote:
                self._begin(path)

    def _begin(self, path: Path) -> None:
        prefix = self._config.temp_dir_prefix
        folder = next(
            (one for one in (path, *path.parents) if one.name.startswith(prefix) and one.name != prefix), None
        )
        if folder is None:
            return  # a store has none, and what is written below is refused
        final = folder.with_name(folder.name.removeprefix(prefix))
        with stores_with(self._config.settings):
            before = self._savings.get(folder)
            self._savings[folder] = begin(target_of(final), self._run, overwrite=self._config.overwrite, before=before)
        self._targets[folder] = final

    def stream_write(self, path: Path) -> NotedStream:
        """A file of the save that goes on."""
        saving, name = self._file(path)
        return saving.stream(name)

    def get_write_stream(self, path: Path, data: object) -> NotedStream:
        """The same, of which it is known how long it will be."""
        saving, name = self._file(path)
        return saving.stream(name, sum(map(_nbytes, tree_leaves(data))))

    def write(self, path: Path, data: Buffer) -> None:
        """Write a whole file."""
        with self.stream_write(path) as stream:
            stream.write(data)

    def rename(
        self, src_path: Path, dst_path: Path, is_directory: bool = False, background_cleanup: bool = False
    ) -> None:
        """Publish a save, on the first rank.

        Raises:
            CheckpointError: It cannot be; what was there before is still there.
        """
        if self._targets.get(src_path) != dst_path:
            raise UsageError(f"{src_path}: is no save that was begun here, of {dst_path}; nothing else is renamed")
        try:
            self._savings[src_path].publish(overwrite=self._config.overwrite, fsync=self._config.fsync)
        except StorageError as error:
            raise _Refused(str(error)) from error
        del self._savings[src_path], self._targets[src_path]

    def exists(self, path: Path) -> bool:
        """Whether something lies there, or is being saved so."""
        if path in self._savings:
            return True
        found = self._there(path)
        if isinstance(found, StorePath):
            found.store.forget()
        return found.exists()

    def isdir(self, path: Path) -> bool:
        """Whether it is a folder."""
        return self._there(path).is_dir()

    def ls(self, path: Path) -> list[str]:
        """The names in a folder."""
        return [one.name for one in self._there(path).iterdir()]

    def getsize(self, path: Path) -> int:
        """Bytes of a file."""
        found = self._there(path)
        if not found.is_file():
            raise FileNotFoundError(str(found))
        return found.stat().st_size

    def remap_path(self, path: Path) -> str:
        """The path, or the URL with both slashes."""
        return str(self._there(path))

    def stream_read(self, path: Path, read_args: ReadArgs | None = None) -> io.RawIOBase:
        """A file, held against its checksum as far as it is read in order.

        Raises:
            FileNotFoundError: It is not there.
            Corrupt: It has another length than its manifest says.
        """
        found = self._there(path)
        if not found.is_file():
            raise FileNotFoundError(str(found))
        return _Checked(open_bytes(found), _entry(found))

    def delete(self, path: Path) -> None:
        """Nothing of a checkpoint is deleted one by one."""
        raise UsageError(f"{path}: is not deleted\n{_WHOLE}")

    def rmdir(self, path: Path) -> None:
        """Which checkpoint goes is for the user to say."""
        raise UsageError(f"{path}: is not deleted\n{_WHOLE}")


_WHOLE = "A checkpoint goes as a whole: remove its folder, or its prefix of the store, once no run needs it."


class _Refused(StorageError, OSError):
    """What the package expects of a rename that cannot be done."""


def _nbytes(leaf: object) -> int:
    local = getattr(leaf, "_local_tensor", leaf)
    return local.untyped_storage().nbytes() + _HEAD_NBYTES if isinstance(local, torch.Tensor) else _HEAD_NBYTES


def _entry(path: ReadablePath) -> FileEntry | None:
    """What a manifest says of a file; None where there is none."""
    for folder in path.parents:
        with suppress(CheckpointError, OSError):
            if (folder / MANIFEST_NAME).is_file():
                return Manifest.read(folder / MANIFEST_NAME).files.get(path.relative_to(folder).as_posix())
    return None


class _Checked(io.RawIOBase):
    """The bytes of a file; what is read of it in order, from its front to its end, is held against its checksum."""

    def __init__(self, file: ByteSource, entry: FileEntry | None) -> None:
        super().__init__()
        self._file, self._entry, self._at = file, entry, 0
        self._summed = self._crc = 0
        if entry is not None and entry.nbytes != file.nbytes:
            raise Corrupt(f"{file.path}: has {file.nbytes} bytes, the manifest says {entry.nbytes}")

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def tell(self) -> int:
        """Where the next read begins."""
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go elsewhere."""
        self._at = max(0, {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._file.nbytes}[whence] + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Read what follows.

        Raises:
            Corrupt: It was the last of a file that was read in order, and is damaged.
        """
        with (
            memoryview(buffer) as whole,
            whole.cast("B") as view,
        ):  # let go before anything is raised: the caller closes what is below
            count = min(len(view), _MOST_NBYTES, max(0, self._file.nbytes - self._at))
            data = self._file.read(self._at, count)
            view[:count] = data
        if self._summed == self._at:
            self._crc, self._summed = crc32(data, self._crc), self._at + count
        self._at += count
        if self._entry is not None and self._summed == self._file.nbytes and self._crc != self._entry.crc32:
            raise Corrupt(
                f"{self._file.path}: is damaged: CRC-32 {self._crc:08x}, the manifest says {self._entry.crc32:08x}\n"
                "Load an older step, or copy the file again from where it came from."
            )
        return count

    def close(self) -> None:
        """Let the file go."""
        if not self.closed:
            self._file.close()
        super().close()
