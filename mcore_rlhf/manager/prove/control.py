"""The broken control: a copy of the step that the killed run resumes from, with one tensor off by the last bit.

All checksums are put right, so nothing but the training itself can notice. Where the resumed control still ends up equal to
the uninterrupted run, the check cannot see a wrong resume: the trainer does not use what it loads, or nothing was compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from mcore_rlhf.core.catalog import FLOATING, Record
from mcore_rlhf.errors import Unsupported
from mcore_rlhf.manager.run.steps import is_hidden
from mcore_rlhf.storage.beneath import Beneath, copy_file, copy_tree, new_folder, remove
from mcore_rlhf.storage.checksum import crc32
from mcore_rlhf.storage.manifest import FileEntry
from mcore_rlhf.storage.paths import storage_error
from mcore_rlhf.storage.pt import Pt, PtFile, read_pt
from mcore_rlhf.storage.publish import replace_text
from mcore_rlhf.storage.reading import opened
from mcore_rlhf.storage.record_file import RecordFile
from mcore_rlhf.storage.stored import StoredTensor

from .command import metrics_by_rank, metrics_of
from .compare import children
from .places import checked_files, manifest_in, number_of, read, require_committed, root_of

_NOT_MODELS = ("data/", "rlhf/", "rng/")
_PIECE_NBYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Broken:
    """What was broken.

    Args:
        file: The file, relative to the step.
        key: The tensor's place in it.
        record: The record that holds it: one bit of every element of it was flipped.
        coarse: Whether that is the sign, and not the lowest bit of the mantissa: what a check with tolerances has to see.
    """

    file: str
    key: str
    record: Record
    coarse: bool = False

    def __str__(self) -> str:
        """In words."""
        bit = "sign" if self.coarse else "lowest bit"
        return f"{self.file}: {self.key}, the {bit} of each of {self.record.numel} {self.record.dtype} elements"


def make_control(source: Path, target: Path, step: int, stubs: tuple[str, ...] = (), *, coarse: bool = False) -> Broken:
    """Copy a killed run's output and metrics, with one of its steps only, and break that.

    Args:
        source: The run's output folder.
        target: The copy's, which does not exist.
        step: The step to resume from.
        stubs: Pickled classes to load as inert stubs.
        coarse: See :class:`Broken`.

    Raises:
        NotACheckpoint: The step is not committed.
        Unsupported: There is no tensor of floating-point numbers in its models.
        StorageError: The file system refuses.
    """
    folder = copy_run(source, target, step)
    broken = replace(chosen(folder, stubs), coarse=coarse)
    _rewrite(folder, broken, stubs)
    return broken


def copy_run(source: Path, target: Path, step: int) -> Path:
    """Copy a run's output and metrics, with one of its steps only.

    Args:
        source: The run's output folder.
        target: The copy's, which does not exist.
        step: The step to copy.

    Returns:
        The copy's folder of the step.

    Raises:
        NotACheckpoint: The step is not committed.
        StorageError: The file system refuses.
    """
    root = root_of(source)
    folder = require_committed(root, step, str(source))
    try:
        copy_tree(source, target, _other_steps(root, step), frozenset({folder}))
        for rank, path in metrics_by_rank(
            source
        ).items():  # without the lines until the kill, a copy would differ by itself
            copy_file(path, metrics_of(target, rank))
    except OSError as error:
        raise storage_error(error, target, "copy to") from error
    return target / folder.relative_to(source)


def _other_steps(root: Path, step: int) -> frozenset[Path]:
    return frozenset(path for path in root.iterdir() if _is_other(path, step))


def _is_other(path: Path, step: int) -> bool:
    return path.is_dir() and (is_hidden(path) or number_of(path) not in (None, step))


def chosen(folder: Path, stubs: tuple[str, ...] = ()) -> Broken:
    """The tensor to break: the largest momentum of the optimizer; without one, any of the optimizer; without, of the model.

    Momentum, because a parameter may be overwritten by its master copy, and a master may be checked against its parameter.

    Raises:
        Unsupported: There is none.
    """
    found = [broken for file in _model_files(folder) for broken in _tensors(folder, file, stubs)]
    if not found:
        raise Unsupported(
            f"{folder}: no model in it has a .pt file with floating-point tensors: there is nothing to break for the control\n"
            "Without a control that is caught, equality proves nothing."
        )
    return min(found, key=lambda broken: (_rank(broken), -broken.record.numel, broken.file, broken.key))


def _model_files(folder: Path) -> list[str]:
    names = sorted(checked_files(folder))
    return [name for name in names if name.endswith(".pt") and not name.startswith(_NOT_MODELS)]


def _rank(broken: Broken) -> int:
    place = f"{broken.file}/{broken.key}".lower()
    if "exp_avg" in place and "exp_avg_sq" not in place:
        return 0
    return 1 if "momentum" in place else 2 if "optim" in broken.key.lower() else 3


def _tensors(folder: Path, file: str, stubs: tuple[str, ...]) -> Iterator[Broken]:
    for key, tensor in _walk(read_pt(folder, file, stubs=stubs).tree, ""):
        if tensor.record.dtype in FLOATING and tensor.record.dtype.itemsize > 1 and 0 not in tensor.shape:
            yield Broken(file, key, tensor.record)


def _walk(value: object, at: str) -> Iterator[tuple[str, StoredTensor]]:
    if isinstance(value, StoredTensor):
        yield at, value
    for name, item in (children(value) or {}).items():
        yield from _walk(item, f"{at}/{name}" if at else name)


def _rewrite(folder: Path, broken: Broken, stubs: tuple[str, ...]) -> None:
    path = folder / broken.file
    aside = path.with_name(".control")  # the archive's own root folder is named after the file, so that keeps its name
    new_folder(aside)
    pt = read_pt(folder, broken.file, stubs=stubs)
    with Pt.of(pt.tree).create(aside / path.name, broken.file) as writer:
        crcs = {key: _copy(pt, writer, key, broken) for key in writer.open_records}
        written = writer.finish(crcs)
    with Beneath(folder) as root:
        root.move((aside / path.name).relative_to(folder).as_posix(), broken.file)
    remove(aside)
    _update_manifest(folder, broken.file, written)


def _copy(pt: PtFile, writer: RecordFile, key: str, broken: Broken) -> int:
    """Copy a record, or its broken form; returns its CRC-32."""
    member, crc = pt.directory.members[key], 0
    with opened(pt.directory.path) as file:
        for at in range(0, member.nbytes, _PIECE_NBYTES):
            data = file.read(member.byte_offset + at, min(_PIECE_NBYTES, member.nbytes - at))
            if key == broken.record.key:
                data = flipped(data, broken.record.dtype.itemsize, coarse=broken.coarse)
            writer.write(key, at, data)
            crc = crc32(data, crc)
    return crc


def flipped(data: bytes, itemsize: int, *, coarse: bool = False) -> bytes:
    """Elements with their lowest bits flipped, or their signs.

    Args:
        data: Little-endian numbers.
        itemsize: Bytes of each.
        coarse: Whether it is the sign.
    """
    words = np.frombuffer(data, dtype=f"<u{itemsize}").copy()
    words ^= words.dtype.type(1 << (8 * itemsize - 1) if coarse else 1)
    return bytes(words.tobytes())


def _update_manifest(folder: Path, file: str, entry: FileEntry) -> None:
    manifest, name = read(folder), manifest_in(folder)
    if manifest is not None and name is not None:
        replace_text(folder / name, replace(manifest, files={**manifest.files, file: entry}).to_json())
