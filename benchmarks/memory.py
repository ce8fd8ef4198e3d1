"""Row 7: memory high-water of a conversion, above that of a tiny one. Run as a module, it is the process that is watched.

Pages of mapped files belong to the page cache: the kernel takes them back when it needs them. ``VmHWM`` counts those that
were mapped at one time; what a process really occupies is its anonymous and shared memory.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from .measure import MIB, high_water, in_fresh_process
from .table import Row

_TINY = 0.02


def row_7(folder: Path, gigabytes: float) -> Iterator[Row]:
    tiny = _watched(folder, _TINY)
    for size in (gigabytes, 2 * gigabytes):
        large = _watched(folder, size)
        own, mapped = ((large[key] - tiny[key]) / MIB for key in ("own", "VmHWM"))
        text = f"VmHWM {mapped:+.0f} MiB, mapped pages of files included; tiny: {tiny['own'] / MIB:.0f} MiB"
        yield Row(7, f"extra memory of TP2→TP4, {size:g} GB", own, " MiB", 128, 64, text)


def _watched(folder: Path, gigabytes: float) -> dict[str, float]:
    from .checkpoints import make

    make(folder, gigabytes, 2)
    return in_fresh_process(__name__, folder, gigabytes)


def _main(folder: Path, gigabytes: float) -> None:
    from .checkpoints import make
    from .reshape import reshape

    target, result = folder / "out", dict[str, int]()
    with high_water(result):
        reshape(make(folder, gigabytes, 2), target, 4)
    shutil.rmtree(target)
    print(json.dumps(result))


if __name__ == "__main__":
    _main(Path(sys.argv[1]), float(sys.argv[2]))
