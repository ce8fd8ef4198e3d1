"""One line of JSON per step, exact to the last bit, in a file that survives a kill at any moment.

The file is only ever appended to. A run that was killed after step 25 and resumed from step 20 writes the lines of
steps 21 to 25 again, after the old ones: repeated lines that are equal byte for byte are the proof that the resume was
exact, so both are kept (:func:`read_metrics` compares them). Only a last line that a kill cut short is removed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from mcore_rlhf.errors import Corrupt, NotACheckpoint
from mcore_rlhf.storage.paths import cannot_open, storage_error

Value = int | float | str | Sequence[int] | None


class MetricsLog:
    """The file of a run, open for appending; only rank 0 has one.

    Args:
        path: The file; made, with its folders, where it is missing.

    Raises:
        StorageError: The file system refuses.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _remove_torn_line(path)
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - closed by close()
        except OSError as error:
            raise storage_error(error, path, "write the metrics") from error

    def append(self, values: Mapping[str, Value]) -> None:
        """Write one line, and return when it is on the disk.

        Args:
            values: By name; floats are written as ``float.hex`` gives them, None is left out.

        Raises:
            StorageError: The file system refuses.
        """
        line = {name: value.hex() if isinstance(value, float) else value for name, value in values.items()}
        text = json.dumps({name: value for name, value in line.items() if value is not None}, separators=(",", ":"))
        try:
            self._file.write(text.encode() + b"\n")  # one write: a kill leaves the line, a part of it, or nothing
            os.fsync(self._file.fileno())
        except OSError as error:
            raise storage_error(error, self.path, "write the metrics") from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _remove_torn_line(path: Path) -> None:
    if not path.exists():
        return
    content = path.read_bytes()
    if not content.endswith(b"\n"):
        os.truncate(path, content.rfind(b"\n") + 1)


def read_metrics(path: Path) -> dict[int, str]:
    """The line of every step, and the proof that repeated steps came out the same.

    Args:
        path: What :class:`MetricsLog` wrote, over however many runs.

    Returns:
        Lines without their ends, by step, in the order of the steps. A last line without an end does not count.

    Raises:
        Corrupt: A step stands there twice, and differently; or a line is no metrics line.
        NotACheckpoint: The file cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise cannot_open(error, path) from error
    except UnicodeDecodeError as error:
        raise NotACheckpoint(f"{path} is no file of metrics: {error}") from error
    lines: dict[int, str] = {}
    for number, line in enumerate(text.split("\n")[:-1], start=1):
        step = _step(path, number, line)
        before = lines.setdefault(step, line)
        if before != line:
            names = ", ".join(differences(before, line))
            raise Corrupt(f"{path}:{number}: step {step} was repeated and is not what it was the first time: {names}")
    return dict(sorted(lines.items()))


def differences(a: str, b: str) -> list[str]:
    """The names in which two lines differ, or that only one of them has."""
    first, second = json.loads(a), json.loads(b)
    missing = object()
    names: Iterable[str] = dict.fromkeys([*first, *second])
    return [name for name in names if first.get(name, missing) != second.get(name, missing)]


def _step(path: Path, number: int, line: str) -> int:
    try:
        step = json.loads(line)["step"]
    except (ValueError, TypeError, KeyError):
        step = None
    if not isinstance(step, int):
        raise Corrupt(f"{path}:{number}: expected a JSON object with a step, found {line[:80]!r}")
    return step
