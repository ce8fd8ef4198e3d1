"""A plain, synchronous writer of what engines describe: the tests' stand-in for the manager."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from mcore_rlhf.engines.base import LiveFile, LiveState
from mcore_rlhf.engines.save import Counted, account_of, compare
from mcore_rlhf.errors import Problems
from mcore_rlhf.storage.checksum import crc32
from mcore_rlhf.storage.destination import LocalFolder
from mcore_rlhf.storage.record_file import RecordFile


def write_live(state: LiveState, root: Path) -> None:
    """Write the files of all ranks; every rank calls. First writers create, everybody writes, first writers complete."""
    import torch.distributed as dist

    own = [file for file in state.files if file.writers[0] == dist.get_rank()]
    writers = {file.path: _create(file, root) for file in own}
    _check_writers(state)
    check_account(state)
    offsets = _shared({file.path: _offsets(file, writers[file.path]) for file in own})
    for file in state.files:
        assert dist.get_rank() in file.writers
        _write(file, root / file.path, offsets[file.path])
    dist.barrier()
    for path, writer in writers.items():
        writer.finish(_checksums(writer, root / path))
    for name, text in state.texts.items():
        (root / name).write_text(text)
    dist.barrier()


def check_account(state: LiveState) -> dict[str, Counted]:
    """Nothing that is alive on any rank is left out; what the step holds by state."""
    import torch.distributed as dist

    assert state.state_tensors, "every engine counts"
    problems = Problems()
    mine = account_of(state.state_tensors, dist.get_rank(), "actor", problems)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    found, wrong = compare(everyone)
    problems.raise_if_any()
    assert not wrong, wrong
    return found


def _check_writers(state: LiveState) -> None:
    """All contributors name the same ranks, and these are exactly the ranks that contribute."""
    import torch.distributed as dist

    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, {file.path: file.writers for file in state.files})
    for path in {path for files in said for path in files}:
        contributing = {rank for rank, files in enumerate(said) if path in files}
        named = {files[path] for files in said if path in files}
        assert len(named) == 1, f"{path}: {named}"
        assert set(named.pop()) == contributing, path


def _create(file: LiveFile, root: Path) -> RecordFile:
    assert file.container is not None
    (root / file.path).parent.mkdir(parents=True, exist_ok=True)
    return LocalFolder(root).writer(file.path, file.container.layout(file.path))


def _offsets(file: LiveFile, writer: RecordFile) -> dict[str, int]:
    keys = {key: key for key in writer.open_records} | dict(file.labels)
    return {label: writer.offset(key) for label, key in keys.items()}


def _shared(mine: dict[str, dict[str, int]]) -> dict[str, dict[str, int]]:
    import torch.distributed as dist

    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    merged: dict[str, dict[str, int]] = {}
    for part in gathered:
        assert not merged.keys() & part.keys(), "two ranks claim to be the first writer of one file"
        merged |= part
    return merged


def _write(file: LiveFile, path: Path, offsets: dict[str, int]) -> None:
    import torch

    fd = os.open(path, os.O_WRONLY)
    try:
        for segment in file.segments:
            data = segment.tensor.reshape(-1).view(torch.uint8).cpu().numpy().data
            assert os.pwrite(fd, data, offsets[segment.label] + segment.byte_offset) == segment.nbytes
    finally:
        os.close(fd)


def _checksums(writer: RecordFile, path: Path) -> dict[str, int]:
    data = path.read_bytes()
    places = {key: (writer.offset(key), writer.record_nbytes(key)) for key in writer.open_records}
    return {key: crc32(data[at : at + nbytes]) for key, (at, nbytes) in places.items()}
