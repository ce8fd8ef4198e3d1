"""Ways to break a copy of a checkpoint, as disks, copies and people do."""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tests.helpers.conversions import GOLDENS
from tests.helpers.plain_load import bits, plain_load, plain_save

ITERATION = "iter_0000002"
MODEL, OPTIMIZER = "model_optim_rng.pt", "distrib_optim.pt"


def copied(name: str, folder: Path) -> Path:
    """A golden to be damaged, as ``folder/source``."""
    return Path(shutil.copytree(GOLDENS / name, folder / "source"))


@contextmanager
def edited(path: Path) -> Iterator[Any]:
    """The tree of a ``.pt`` file; what is changed in it is saved, with valid checksums."""
    tree = plain_load(path)
    yield tree
    path.unlink()
    plain_save(tree, path)


def edit_args(root: Path, **values: object) -> None:
    """Change args in every rank's file."""
    for path in root.rglob(MODEL):
        with edited(path) as tree:
            vars(tree["args"]).update(values)


def record_of(path: Path, tensor: torch.Tensor) -> str:
    """The name of the record that holds a tensor's storage."""
    wanted = bits(torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()))
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            if "/data/" in info.filename and info.file_size == len(wanted) and archive.read(info) == wanted:
                return info.filename.partition("/")[2]
    raise LookupError(f"{path} does not hold that storage")


def flip(path: Path, record: str, byte: int) -> None:
    """Flip one bit in a record, as a bad disk would."""
    with zipfile.ZipFile(path) as archive:
        info = next(i for i in archive.infolist() if i.filename.partition("/")[2] == record)
    with path.open("r+b") as file:
        file.seek(info.header_offset + 26)
        name, extra = (int.from_bytes(file.read(2), "little") for _ in range(2))
        at = info.header_offset + 30 + name + extra + byte
        file.seek(at)
        (value,) = file.read(1)
        file.seek(at)
        file.write(bytes([value ^ 0x10]))


def flip_a_bit(path: Path) -> None:
    """Flip one bit in the middle of a file."""
    path.chmod(0o644)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def gone(pattern: str) -> Callable[[Path], object]:
    """Take the files away that are called so."""
    return lambda folder: [path.unlink() for path in folder.glob(pattern)]


def zeroed(pattern: str) -> Callable[[Path], object]:
    """Leave the files that are called so as long as they are, and nothing in them."""
    return lambda folder: [path.write_bytes(bytes(path.stat().st_size)) for path in folder.glob(pattern)]


def truncate(path: Path, fraction: float) -> None:
    """Cut a file off, as an interrupted copy would."""
    with path.open("r+b") as file:
        file.truncate(int(path.stat().st_size * fraction))


def wreck_directory(path: Path) -> None:
    """Overwrite the end of a zip, where its directory is."""
    with path.open("r+b") as file:
        file.seek(-200, 2)
        file.write(b"\0" * 200)


def snapshot(root: Path) -> dict[str, tuple[int, int]]:
    """Every file below a folder, with its length and time of change."""
    return {
        str(p.relative_to(root)): (p.stat().st_size, p.stat().st_mtime_ns)
        for p in sorted(root.rglob("*"))
        if p.is_file()
    }
