"""``python -m tests.fuzz``: mutate every golden, run a command on each, and count the promises that were broken."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from .case import Fuzzer, Result
from .child import warm_up
from .verdict import KINDS


def main() -> int:
    """Run the fuzzer; 0 where nothing was found."""
    options = _options()
    base = Path(options.dir) if options.dir else Path(tempfile.mkdtemp(prefix="mcore-rlhf-fuzz-"))
    warm_up()
    fuzzer = Fuzzer(options.seed, base, keep=options.only is not None)
    shutil.rmtree(fuzzer.corpus.folder, ignore_errors=True)
    shutil.rmtree(base / "expected", ignore_errors=True)
    fuzzer.corpus.make()
    began = time.monotonic()
    numbers = range(options.first, options.first + options.cases) if options.only is None else [options.only]
    results = _carry_out(fuzzer, numbers, options.workers)
    return _summary(fuzzer, results, time.monotonic() - began)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=1000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="number of the first, for a run in several parts")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(32), help="of everything")
    parser.add_argument("--only", type=int, help="one case, whose folder stays")
    parser.add_argument("--dir", help="where to work; folders of cases that fail stay there")
    parser.add_argument("--workers", type=int, default=min(8, len(os.sched_getaffinity(0))), help="cases at a time")
    return parser.parse_args()


def _carry_out(fuzzer: Fuzzer, numbers: Iterable[int], workers: int) -> list[Result]:
    """All cases, each in a child of one of a few warm processes; what breaks a promise is printed at once."""
    results = []
    with ProcessPoolExecutor(workers, multiprocessing.get_context("fork")) as pool:
        for result in pool.map(fuzzer.case, numbers, chunksize=4):
            results.append(result)
            if result.found or fuzzer.keep:
                _print(fuzzer, result)
    return results


def _print(fuzzer: Fuzzer, result: Result) -> None:
    kinds = ", ".join(sorted(result.found)) or "nothing found"
    print(f"case {result.number} (make fuzz ONLY={result.number} SEED={fuzzer.seed}): {kinds}, exit code {result.code}")
    print(f"  {result.specimen}: mcore-rlhf {result.command}")
    for change in result.changes:
        print(f"  {change.text}"[:300])
    for kind, shown in sorted(result.found.items()):
        print(f"  {kind}: {shown}"[:500])
    print(f"  {result.folder}", flush=True)


def _summary(fuzzer: Fuzzer, results: list[Result], seconds: float) -> int:
    counts = Counter(kind for result in results for kind in result.found)
    codes = Counter(result.code for result in results)
    ends = ", ".join(f"{codes[code]} with {code}" for code in sorted(codes, key=str))
    print(f"{len(results)} cases, seed {fuzzer.seed}, {seconds:.0f} s; exit codes: {ends}")
    print(", ".join(f"{kind}: {counts[kind]}" for kind in KINDS))
    failed = any(result.found for result in results)
    if not failed and not fuzzer.keep:
        shutil.rmtree(fuzzer.folder)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
