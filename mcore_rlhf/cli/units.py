"""Numbers as people read and write them; JSON has plain integers instead."""

from __future__ import annotations

_BINARY = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")


def size(nbytes: int) -> str:
    """A number of bytes: ``3.21 GiB``."""
    value, unit = float(nbytes), _BINARY[0]
    for unit in _BINARY:
        if value < 1024 or unit == _BINARY[-1]:
            break
        value /= 1024
    return count(nbytes, "byte") if unit == "bytes" else f"{value:.2f} {unit}"


def count(number: int, thing: str = "") -> str:
    """A count with separators, and its noun in the right number: ``1,024 tensors``, ``1 file``."""
    if not thing:
        return f"{number:,}"
    if number != 1:
        thing = f"{thing[:-1]}ies" if thing.endswith("y") else f"{thing}s"
    return f"{number:,} {thing}"


def rate(nbytes: int, seconds: float) -> str:
    """A speed, in the decimal units in which disks are sold: ``1.25 GB/s``, ``0.8 MB/s``."""
    speed = nbytes / max(seconds, 1e-9)
    return f"{speed / 1e9:.2f} GB/s" if speed >= 1e8 else f"{speed / 1e6:.1f} MB/s"


def duration(seconds: float) -> str:
    """A time: ``0.4 s``, ``3 min 20 s``, ``2 h 05 min``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
