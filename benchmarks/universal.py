"""Row 6: ZeRO to universal against DeepSpeed's own tool, both as whole processes. Run as a module, it watches memory."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from .measure import MIB, Contest, high_water, in_fresh_process, warm
from .table import Row
from .zero_checkpoint import TAG, make_zero

_TINY = 0.02
_WORKERS = "2"


def row_6(folder: Path, gigabytes: float, rounds: int) -> Iterator[Row]:
    if importlib.util.find_spec("deepspeed") is None:
        print("row 6: left out, since DeepSpeed is not installed")
        return
    root, target = make_zero(folder, gigabytes), folder / "out"
    warm(path for path in root.rglob("*") if path.is_file())
    contest = Contest(
        {"ours": lambda: convert(root, target), "theirs": lambda: ds_to_universal(root, target)},
        before=lambda: shutil.rmtree(target, ignore_errors=True),
    ).run(rounds)
    what = f"ds_to_universal (2+2 workers) ÷ convert --to universal, ZeRO-2, DP2, {gigabytes:g} GB, whole process"
    for of, bar, stretch in (("wall", 5, 10), ("cpu", 6.5, 8)):
        ratio = contest.ratio("theirs", "ours", of)
        text = f"{ratio}; DeepSpeed {contest.spread('theirs', of).median:.3g} s, ours {contest.spread('ours', of).median:.3g} s"
        yield Row(6, f"{what}: {of}", ratio.median, "×", bar, stretch, text, at_least=True)
    yield _memory(folder, gigabytes)


def convert(root: Path, target: Path) -> None:
    """Our command line, with every check that is on by default; like DeepSpeed's tool, it waits for no disk."""
    command = [sys.executable, "-m", "mcore_rlhf", "convert", str(root), str(target), "--to", "universal"]
    _run([*command, "--workers", _WORKERS, "--no-fsync"])


def ds_to_universal(root: Path, target: Path) -> None:
    """DeepSpeed's."""
    target.mkdir()
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--input_folder", str(root / TAG)]
    workers = ["--num_extract_workers", _WORKERS, "--num_merge_workers", _WORKERS]
    _run([*command, "--output_folder", str(target / f"{TAG}_uni"), *workers])


def _run(command: list[str]) -> None:
    env = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout[-3000:]}")


def _memory(folder: Path, gigabytes: float) -> Row:
    tiny, large = (_watched(folder, size) for size in (_TINY, gigabytes))
    own, mapped = ((large[key] - tiny[key]) / MIB for key in ("own", "VmHWM"))
    text = f"VmHWM {mapped:+.0f} MiB, mapped pages of files included; tiny: {tiny['own'] / MIB:.0f} MiB"
    return Row(6, f"extra memory of ZeRO-2 → universal, {gigabytes:g} GB", own, " MiB", 128, 64, text)


def _watched(folder: Path, gigabytes: float) -> dict[str, float]:
    make_zero(folder, gigabytes)
    return in_fresh_process(__name__, folder, gigabytes)


def _main(folder: Path, gigabytes: float) -> None:
    from mcore_rlhf.convert import ConvertOptions
    from mcore_rlhf.convert import convert as convert_here

    target, result = folder / "out", dict[str, int]()
    with high_water(result):
        convert_here(make_zero(folder, gigabytes), target, ConvertOptions(to="universal", workers=2, fsync=False))
    shutil.rmtree(target)
    print(json.dumps(result))


if __name__ == "__main__":
    _main(Path(sys.argv[1]), float(sys.argv[2]))
