"""Values as people write them in a run's YAML: sizes, times, paths."""

from __future__ import annotations

import os
import re

from mcore_rlhf.errors import UsageError
from mcore_rlhf.storage.paths import local_path
from mcore_rlhf.storage.sizes import parse_size

_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|min|h|d)?", re.IGNORECASE)
_SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_CLOCK = re.compile(r"(?:(\d+)-)?((?:\d+:)?\d+:\d\d)")
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")


def size(value: object) -> object:
    """Bytes from ``2TB`` (decimal), ``2TiB`` or ``2T`` (binary), ``500000`` (bytes); what is no text stays as it is.

    Raises:
        ValueError: It is none of these.
    """
    return parse_size(value) if isinstance(value, str) else value


def duration(value: object) -> object:
    """Seconds from ``90``, ``90s``, ``30m``, ``4h``, ``2d``, or SLURM's ``MM:SS``, ``HH:MM:SS``, ``D-HH:MM:SS``.

    YAML itself reads ``4:00:00`` as a number in base 60, which are the same seconds.

    Raises:
        ValueError: It is none of these.
    """
    if not isinstance(value, str):
        return float(value) if type(value) is int else value
    text = value.strip()
    if amount := _AMOUNT.fullmatch(text):
        return float(amount[1]) * _SECONDS[(amount[2] or "s").lower()]
    if clock := _CLOCK.fullmatch(text):
        seconds = 0
        for part in clock[2].split(":"):
            seconds = seconds * 60 + int(part)
        return float(int(clock[1] or 0) * _SECONDS["d"] + seconds)
    raise ValueError(f"expected a time such as 90s, 30m, 4h, 2d or 23:30:00, found {value!r}")


def path(value: str) -> str:
    """The path of a checkpoint, or of something beside one: as :func:`data_path`, and no URL.

    Raises:
        ValueError: It is empty, a URL, or names a variable that is not set.
    """
    filled = data_path(value)
    try:
        local_path(filled)
    except UsageError as error:
        raise ValueError(str(error)) from None
    return filled


def data_path(value: str) -> str:
    """A path with ``~`` and ``$NAME`` filled in; a relative one counts from where the command runs.

    Raises:
        ValueError: It is empty, or names a variable that is not set.
    """
    if not value.strip():
        raise ValueError("expected a path, found ''")
    unset = [name for match in _VARIABLE.finditer(value) if (name := match[1] or match[2]) not in os.environ]
    if unset:
        raise ValueError(f"the environment variable {', '.join(unset)} is not set (in {value!r})")
    return os.path.expanduser(os.path.expandvars(value))


def folder_name(value: str) -> str:
    """A name that becomes a folder, or folders in one another.

    Raises:
        ValueError: It is empty, absolute, or leads out of the folder that it is put in.
    """
    if not value.strip() or value.startswith(("/", "~")) or ".." in value.split("/") or "\0" in value:
        raise ValueError(f"expected the name of a folder, found {value!r}")
    return value
