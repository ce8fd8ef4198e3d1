"""What must be true of every command, whatever its source looks like."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mcore_rlhf.errors import CheckpointError
from mcore_rlhf.storage import manifest
from mcore_rlhf.storage.publish import MANIFEST_NAME

from .child import CANARY, Ended, Limits

TRACEBACK, HANG, MEMORY, SIGNAL = "traceback", "hang", "memory overrun", "crash by signal"
CODE, HALF, SILENT, DIRTY = "code run", "half target", "silent accept", "dirty output"
KINDS = (TRACEBACK, HANG, MEMORY, SIGNAL, CODE, HALF, SILENT, DIRTY)

EXIT_CODES = (0, 1, 2)
STEP_MANIFEST = "manifest.json"

_TELL_THE_TIME = ("convert", "verify", "steps", "prune", "interval")
_TRACES = (
    "Traceback (most recent call last)", "This is a bug in mcore_rlhf", "Exception ignored in",
    "or of a writer that is not known here",
)  # fmt: skip
_OUT_OF_MEMORY = ("out of memory", "MemoryError")
DAMAGE_SAID = ("damaged", "the manifest says", "the manifest lists", "the manifest is not", "a field of the manifest")
CONTRADICTION_SAID = ("contradicts", "not understood")
_MOST_OUTPUT = 1 << 20
_DIRT = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]|^frame #\d+:|\.py:\d+: \w*Warning: ",
    re.MULTILINE,
)
"""Control characters and marks that turn text around, stack frames of C++, warnings of Python."""


@dataclass(frozen=True)
class Fingerprint:
    """What a command made of its source, without what differs from run to run.

    Args:
        code: Its exit code.
        stdout: What it printed; nothing for commands that tell of time.
        files: CRC-32 of every file of the target but the manifest.
    """

    code: int | None
    stdout: str
    files: Mapping[str, int]


def fingerprint(command: str, ended: Ended, folder: Path) -> Fingerprint:
    """What a command in a folder has made."""
    target = folder / "out"
    files = {
        str(path.relative_to(target)): zlib.crc32(path.read_bytes())
        for path in sorted(target.rglob("*"))
        if path.is_file() and path.name not in (MANIFEST_NAME, STEP_MANIFEST)
    }
    stdout = "" if command.startswith(_TELL_THE_TIME) else ended.stdout.replace(str(folder), "")
    return Fingerprint(ended.code, stdout, files)


def judge(command: str, ended: Ended, folder: Path, before: Mapping[str, object], limits: Limits) -> dict[str, str]:
    """Every promise that was broken, by kind, with what shows it.

    Args:
        command: The command line.
        ended: How it ended.
        folder: Where it ran.
        before: :func:`listing` of the folder before.
        limits: What it was allowed.
    """
    found = dict(_of_process(ended, limits)) | dict(_of_output(ended))
    if not ended.hung and not ended.signal and (traces := _traces(command, ended, folder, before)):
        found[HALF] = traces
    return found


def listing(folder: Path) -> dict[str, object]:
    """Everything below a folder but the canary: kind and length, and when it was changed."""
    found: dict[str, object] = {}
    for parent, names, files in os.walk(folder):
        for name in (*names, *(file for file in files if file != CANARY)):
            stat = os.lstat(os.path.join(parent, name))
            path = os.path.relpath(os.path.join(parent, name), folder)
            found[path] = "folder" if name in names else (stat.st_mode, stat.st_size, stat.st_mtime_ns)
    return found


def _of_process(ended: Ended, limits: Limits) -> list[tuple[str, str]]:
    found = []
    if ended.hung:
        found.append((HANG, "had to be stopped"))
    if ended.signal:
        found.append((SIGNAL, f"signal {ended.signal}"))
    if ended.ran_code:
        found.append((CODE, "the canary is there"))
    if ended.peak > limits.resident:
        found.append((MEMORY, f"{ended.peak >> 20} MiB"))
    if ended.code is not None and ended.code not in EXIT_CODES:
        found.append((TRACEBACK, f"exit code {ended.code}"))
    return found


def _of_output(ended: Ended) -> list[tuple[str, str]]:
    found = []
    for kind, marks in ((TRACEBACK, _TRACES), (MEMORY, _OUT_OF_MEMORY)):
        if mark := next((mark for mark in marks if mark in ended.output), None):
            found.append((kind, _line_with(ended.output, mark)))
    dirt = _DIRT.search(ended.output)
    if dirt:
        found.append((DIRTY, f"{dirt.group()!r} in {_line_with(ended.output, dirt.group())!r}"))
    if ended.printed > _MOST_OUTPUT:
        found.append((DIRTY, f"{ended.printed} bytes of output"))
    return found


def _line_with(text: str, mark: str) -> str:
    at = text.index(mark)
    return text[text.rfind("\n", 0, max(at - 1, 0)) + 1 : at + 200].strip()


def _traces(command: str, ended: Ended, folder: Path, before: Mapping[str, object]) -> str:
    """What a command left that it should not have, or did not leave."""
    after = listing(folder)
    changed = sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))
    written = [path for path in changed if path != "out" and not path.startswith("out/")]
    if command.startswith("adopt") and ended.code == 0:
        written = [path for path in written if not path.endswith((STEP_MANIFEST, MANIFEST_NAME))]
    if written:
        return f"the source was changed: {written[:5]}"
    hidden = [path for path in changed if path.startswith("out/.")]
    if hidden:
        return f"left behind: {hidden[:5]}"
    if command.startswith("convert"):
        return _half(folder / "out" / "target", done=ended.code == 0)
    return ""


def _half(target: Path, *, done: bool) -> str:
    if not target.exists():
        return "done, and no target is there" if done else ""
    if not done:
        return f"exit code not 0, and a target is there: {sorted(os.listdir(target))[:5]}"
    wrong = [problem for path in _manifests(target) for problem in _broken(path)]
    return "; ".join(wrong[:3])


def _manifests(target: Path) -> list[Path]:
    """Where the target's manifests are: in its root, or in its steps."""
    found = [path for name in (MANIFEST_NAME, STEP_MANIFEST) for path in (target / name, *target.glob(f"*/{name}"))]
    return [path for path in found if path.is_file()] or [target / MANIFEST_NAME]


def _broken(path: Path) -> list[str]:
    try:
        read = manifest.Manifest.read(path)
    except CheckpointError as error:
        return [str(error)]
    return [problem.message for problem in manifest.check(path.parent, read).found]
