"""``python -m benchmarks [--rows 3,4,…] [--gigabytes 4] [--rounds 5] [--folder DIR]``: measures, prints, writes RESULTS.md."""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from .journal import row_23
from .megatron_saving import row_14
from .memory import row_7
from .metadata import row_15
from .objects import row_17
from .planning import row_12
from .reading import row_9, row_11, row_13, row_16, row_22
from .reshape import row_3, row_4, row_5, row_18
from .saving import row_1, row_2, row_8, row_10, row_21, row_24, row_25, row_26, row_27
from .scale import row_20
from .table import RESULTS, Row, as_markdown, as_text
from .universal import row_6

Measure = Callable[[Path, float, int], Iterator[Row]]
ROWS: dict[int, Measure] = {
    1: row_1,
    2: row_2,
    3: row_3,
    4: row_4,
    5: row_5,
    6: row_6,
    7: lambda folder, gigabytes, rounds: row_7(folder, gigabytes),
    8: row_8,
    9: row_9,
    10: row_10,
    11: row_11,
    12: lambda folder, gigabytes, rounds: row_12(),
    13: lambda folder, gigabytes, rounds: row_13(folder, rounds),
    14: lambda folder, gigabytes, rounds: row_14(folder, rounds),
    15: lambda folder, gigabytes, rounds: row_15(folder),
    16: lambda folder, gigabytes, rounds: row_16(folder, rounds),
    17: row_17,
    18: lambda folder, gigabytes, rounds: row_18(folder, gigabytes),
    20: lambda folder, gigabytes, rounds: row_20(folder),
    21: row_21,
    22: row_22,
    23: lambda folder, gigabytes, rounds: row_23(folder, rounds),
    24: row_24,
    25: row_25,
    26: row_26,
    27: row_27,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    numbers = ",".join(map(str, ROWS))
    parser.add_argument("--rows", default=numbers, help=f"which rows, of {numbers}")
    parser.add_argument("--gigabytes", type=float, default=4.0, help="size of the checkpoint (10^9 bytes)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds, after one that warms up")
    parser.add_argument("--folder", type=Path, help="where checkpoints are made, and kept; default: a temporary folder")
    options = parser.parse_args()
    wanted = [int(number) for number in options.rows.split(",")]
    unknown = sorted(set(wanted) - set(ROWS))
    if unknown:
        parser.error(f"no row {unknown[0]}; there are {numbers}")
    folder = options.folder or Path(tempfile.mkdtemp(prefix="mcore-rlhf-bench-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        rows = _measure(wanted, folder, options.gigabytes, options.rounds)
    finally:
        if options.folder is None:
            shutil.rmtree(folder, ignore_errors=True)
    print("\n" + as_text(rows))
    if set(wanted) == set(ROWS):
        RESULTS.write_text(
            as_markdown(rows, [f"{options.rounds} rounds after one that warmed up, contenders interleaved"])
        )
        print(f"\nwritten to {RESULTS}")
    return 0 if all(row.passed for row in rows) else 1


def _measure(wanted: list[int], folder: Path, gigabytes: float, rounds: int) -> list[Row]:
    rows: list[Row] = []
    for number in wanted:
        start = time.perf_counter()
        rows += ROWS[number](folder, gigabytes, rounds)
        print(f"row {number}: {time.perf_counter() - start:.0f} s", flush=True)
    return rows


if __name__ == "__main__":
    raise SystemExit(main())
