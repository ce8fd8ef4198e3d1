"""The manifest: which files a published folder holds, how long each one is, and its CRC-32. Written last,
read first.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from typing import Any

from .. import __version__
from ..errors import CheckpointError, Corrupt, Incomplete, NotACheckpoint, Problems, Unsupported, shown
from ..installation import to_upgrade
from . import reading
from .checksum import crc32
from .links import enclose, require_inside
from .paths import ReadablePath, beneath, cannot_open, canonical
from .patience import patiently

FORMAT = "mcore_rlhf"
VERSION = 2
"""Of manifests that name a prefix; without one they are of version 1."""
STEP_MANIFEST = "manifest.json"
"""Its file in a whole step, whose roles are folders in it."""
PREFIX = ".tx-"
"""What the names of such folders begin with; the transaction's id follows."""
CHECKSUM = "crc32"
"""Key of the manifest's checksum of itself; one without it is read, and not checked."""

_PIECE_NBYTES = 1 << 20
_PREFIX = re.compile(re.escape(PREFIX) + r"[0-9a-z-]+")

Progress = Callable[[str, int], None]
"""Called with a file and the number of its bytes that were just checked."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of a published folder.

    Args:
        nbytes: Its length.
        crc32: CRC-32 of all its bytes.
    """

    nbytes: int
    crc32: int


def _inside(report: Mapping[str, Any], key: str) -> Iterable[tuple[object, Any]]:
    found = report.get(key)
    return found.items() if isinstance(found, Mapping) else ()


def _is_figure(value: object) -> bool:
    if isinstance(value, str):
        return value in ("nan", "inf", "-inf")
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a published folder holds.

    Args:
        files: By path relative to the folder, with ``/``. The manifest itself is not among them.
        step: The training step, where there is one.
        transaction: Identity of the commit that published it; :class:`~.destination.Publication` fills it in.
        parts: Roles and ranks that make up the folder: ``{"role", "format", "parallel"}``.
        lossless: Whether everything that the source had is there bit for bit; None where that has no meaning.
        provenance: Versions and whatever else says where it comes from.
        report: What a conversion did.
        prefix: The folder beside the manifest that the files lie in, in a store, where nothing can be renamed; empty where they
            lie beside the manifest themselves.
    """

    files: Mapping[str, FileEntry]
    step: int | None = None
    transaction: str = ""
    parts: Sequence[Mapping[str, Any]] = ()
    lossless: bool | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)
    report: Mapping[str, Any] = field(default_factory=dict)
    prefix: str = ""

    @property
    def metrics(self) -> dict[str, float]:
        """What a step was saved with; infinities and NaN stand in the file as text."""
        return {str(name): float(value) for name, value in _inside(self.report, "metrics") if _is_figure(value)}

    @property
    def live(self) -> dict[str, dict[str, int]]:
        """How much state every role held when the step was saved: ``tensors`` and ``bytes``, by role; empty in older manifests."""
        return {
            str(role): {key: int(figures[key]) for key in ("tensors", "bytes")}
            for role, figures in _inside(self.report, "live")
            if isinstance(figures, Mapping) and all(type(figures.get(key)) is int for key in ("tensors", "bytes"))
        }

    def to_json(self) -> str:
        """The manifest as text; keys and files always in the same order.

        It is JSON that any reader takes, and never fails: infinities and NaN become ``"inf"``, ``"-inf"`` and ``"nan"``, and
        what JSON does not know becomes its text.
        """
        files = {path: {"bytes": entry.nbytes, "crc32": entry.crc32} for path, entry in sorted(self.files.items())}
        content = {
            "format": FORMAT,
            "version": VERSION if self.prefix else 1,
            "step": self.step,
            "transaction": self.transaction,
            "parts": [dict(part) for part in self.parts],
            "files": files,
            "lossless": self.lossless,
            "provenance": dict(self.provenance),
            "report": dict(self.report),
            **({"prefix": self.prefix} if self.prefix else {}),
        }
        plain = _plain(content)
        assert isinstance(plain, dict)
        return json.dumps({**plain, CHECKSUM: _own_crc(plain)}, indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, where: str) -> Manifest:
        """Read a manifest.

        Args:
            text: Its content.
            where: Its path, for messages.

        Raises:
            NotACheckpoint: It is JSON, but not a manifest of ours.
            Unsupported: A newer version wrote it, or it has fields that are not known; they are named.
            Incomplete: Fields are missing; they are named.
            Untrusted: A file in it has a name that is no canonical path.
            Corrupt: It is not JSON, it is not what its own checksum says, or it has none and a field has the wrong type.
        """
        try:
            content = reading.parse_json(text)
            _check_own(content, where)
        except ValueError as error:
            raise Corrupt(f"{where}: the manifest is not valid JSON: {error}.\nUse an older step.") from error
        _check_fields(content, where)
        try:
            files = {canonical(str(path), where): _entry(entry) for path, entry in content["files"].items()}
            parts = tuple({**part} for part in content["parts"])
            kept = {name: _typed(content, name, kinds) for name, kinds in _KINDS.items()}
            for part in parts:
                if "role" in part:  # it becomes a folder's name
                    canonical(_typed(part, "role", (str,)), where, "role", parts=1)
            report = {**content.get("report", {})}
            prefix = content.get("prefix", "")
            if prefix and not _PREFIX.fullmatch(prefix):
                raise TypeError(f"prefix must be {PREFIX} and a transaction, not {prefix!r}")
            return cls(files, parts=parts, provenance={**content["provenance"]}, report=report, prefix=prefix, **kept)
        except (TypeError, KeyError, AttributeError) as error:
            kind = Unsupported if CHECKSUM in content else Corrupt  # one that is as it was written is another release's
            raise kind(f"{where}: a field of the manifest has the wrong form: {error!r}.") from error

    @classmethod
    def read(cls, path: ReadablePath) -> Manifest:
        """Read a manifest file.

        Raises:
            NotACheckpoint: There is none.
            StorageError: It cannot be read.
            CheckpointError: See :meth:`from_json`.
        """
        try:
            text = reading.read_bytes(path)
        except OSError as error:
            raise cannot_open(error, path) from error
        return cls.from_json(text, str(path))


_KINDS: Mapping[str, tuple[type, ...]] = {
    "step": (int, type(None)),
    "transaction": (str,),
    "lossless": (bool, type(None)),
}


def _typed(content: Mapping[str, Any], name: str, kinds: tuple[type, ...]) -> Any:
    """A field whose value stands in names of files and messages."""
    value = content[name]
    if type(value) not in kinds or (type(value) is int and not 0 <= value < 10**18):
        raise TypeError(f"{name} must be {' or '.join(kind.__name__ for kind in kinds)}, not {shown(value)}")
    return value


def _own_crc(content: Mapping[str, object]) -> int:
    """CRC-32 of a manifest's content without its checksum: of compact JSON with sorted keys."""
    rest = {key: value for key, value in content.items() if key != CHECKSUM}
    return crc32(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode())


def _check_own(content: object, where: str) -> None:
    if not isinstance(content, dict) or CHECKSUM not in content:
        return  # written by hand, or by another program
    found = _own_crc(content)
    if found != content[CHECKSUM]:
        raise Corrupt(f"{where}: the manifest is damaged: its CRC-32 is {found}, it says {content[CHECKSUM]!r}")


def is_newer(path: ReadablePath) -> bool:
    """Whether a manifest is sound, and of a version that this release cannot read."""
    try:
        content = reading.read_json(path)
        _check_own(content, str(path))
    except (OSError, ValueError, Corrupt):
        return False
    version = content.get("version") if isinstance(content, dict) and content.get("format") == FORMAT else None
    return type(version) is int and version > VERSION


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def _check_fields(content: Any, where: str) -> None:
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise NotACheckpoint(f'{where}: not a manifest of {FORMAT} (it has no "format": "{FORMAT}").')
    version = content.get("version")
    if type(version) is not int or version > VERSION:
        raise Unsupported(
            f"{where}: version {version!r} of the manifest; this release reads up to {VERSION}.\n"
            f"Upgrade: {to_upgrade()}"
        )
    known = {"format", "version", CHECKSUM, *(item.name for item in fields(Manifest))}
    unknown, missing = sorted(content.keys() - known), sorted(known - {CHECKSUM, "report", "prefix"} - content.keys())
    if unknown:
        raise Unsupported(f"{where}: the manifest has fields that are not known: {', '.join(unknown)}.")
    if missing:
        kind = Unsupported if CHECKSUM in content else Incomplete
        raise kind(f"{where}: the manifest lacks the fields {', '.join(missing)}.")


def _entry(entry: Mapping[str, Any]) -> FileEntry:
    nbytes, crc = entry["bytes"], entry["crc32"]
    if type(nbytes) is not int or type(crc) is not int:
        raise TypeError(f"bytes and crc32 must be whole numbers, not {nbytes!r} and {crc!r}")
    return FileEntry(nbytes, crc)


JOB: ContextVar[str | None] = ContextVar("JOB", default=None)
"""What :func:`~.once.once` knows its own work by."""


def provenance(**more: Any) -> dict[str, Any]:
    """Versions of this library, torch and Python, and the time (UTC). ``more`` is added: a git revision, a
    config's hash.
    """
    import platform  # only who writes asks

    job = JOB.get()
    return {
        "mcore_rlhf": __version__,
        "torch": _version("torch"),
        "python": platform.python_version(),
        "time": utc_time(),
        **({} if job is None else {"job": job}),
        **more,
    }


def utc_time(seconds: float | None = None) -> str:
    """A moment as it is written down everywhere: UTC, ISO 8601.

    Args:
        seconds: Since 1970; None for now.
    """
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def _version(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)  # reads a file; importing torch takes a second
    except PackageNotFoundError:
        return "unknown"


def check(
    root: ReadablePath, manifest: Manifest, *, sizes_only: bool = False, progress: Progress | None = None
) -> Problems:
    """Compare a folder with its manifest.

    Args:
        root: The folder.
        manifest: What should be there.
        sizes_only: Whether lengths suffice: quick, and enough to say that the folder was committed.
        progress: Hears of every megabyte.

    Returns:
        Every file that is missing, too short, too long or damaged; nothing where the folder is intact.
    """
    problems = Problems()
    enclose(root)
    for name, entry in sorted(manifest.files.items()):
        try:
            _check_file(root, name, entry, sizes_only, progress or _ignore)
        except CheckpointError as error:
            problems.add_error(error)
    return problems


def _ignore(_file: str, _nbytes: int) -> None:
    pass


def _check_file(root: ReadablePath, name: str, entry: FileEntry, sizes_only: bool, progress: Progress) -> None:
    path = beneath(root, name)
    try:
        require_inside(path)
        nbytes = patiently(path.stat).st_size
    except FileNotFoundError:
        raise Incomplete(f"{path}: is missing; the manifest lists it with {entry.nbytes} bytes") from None
    except OSError as error:
        raise cannot_open(error, path) from error
    if nbytes != entry.nbytes:
        kind = Incomplete if nbytes < entry.nbytes else Corrupt
        raise kind(f"{path}: has {nbytes} bytes, the manifest says {entry.nbytes}")
    if not sizes_only:
        found = crc_of_file(path, lambda count: progress(name, count))
        if found != entry.crc32:
            raise Corrupt(f"{path}: is damaged: CRC-32 {found:08x}, the manifest says {entry.crc32:08x}")


def entry_of(path: ReadablePath) -> FileEntry:
    """Length and checksum of a file as it is read back: what is in the manifest is what the disk has.

    Raises:
        OSError: There is no such file.
        StorageError: It cannot be read.
    """
    return FileEntry(path.stat().st_size, crc_of_file(path))


def crc_of_file(path: ReadablePath, progress: Callable[[int], None] = lambda nbytes: None) -> int:
    """CRC-32 of a whole file, in pieces of 1 MiB.

    Raises:
        NotACheckpoint: There is no such file.
        StorageError: It cannot be read.
    """
    crc = 0
    with reading.opened(path) as file:
        for piece in file.pieces(_PIECE_NBYTES):
            crc = crc32(piece, crc)
            progress(len(piece))
    return crc
