"""``mcore-rlhf doctor``: what this machine, this installation and a folder's file system are good for."""

from __future__ import annotations

import fcntl
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import click

from mcore_rlhf import __version__
from mcore_rlhf.errors import UsageError, clean
from mcore_rlhf.installation import to_install
from mcore_rlhf.storage.checksum import IMPLEMENTATION, crc32
from mcore_rlhf.storage.paths import local_path

from .options import default_workers
from .output import Column, Facts, emit_json, print_facts, print_table, rate, say, size
from .will_resume import of_a_run, resumes_text

_SLOW_CRC = 8 << 30
_BUFFER = 64 << 20
_NETWORK = {
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "fuse.sshfs",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "fuse.ceph",
    "9p",
    "virtiofs",
}


@dataclass(frozen=True, slots=True)
class OptionalPackage:
    """A package that is not needed, but brings something.

    Args:
        package: Its name.
        extra: The extra that installs it.
        brings: What it brings.
        imports: The statement with which what it brings begins.
    """

    package: str
    extra: str
    brings: str
    imports: str


_EXTRAS = (
    OptionalPackage(
        "torch", "torch", "the manager and the engines: saving and resuming runs; --merge-adapter",
        "from mcore_rlhf import CheckpointManager, FsdpEngine, TorchEngine",
    ),
    OptionalPackage(
        "megatron-core", "megatron", "MegatronEngine, the drop-in for Megatron-LM's scripts, mcore-rlhf demo",
        "from mcore_rlhf import MegatronEngine",
    ),
    OptionalPackage("deepspeed", "deepspeed", "DeepSpeedEngine", "from mcore_rlhf import DeepSpeedEngine"),
    OptionalPackage("obstore", "object", "checkpoints at s3://, gs:// and az://", "import obstore.store"),
    OptionalPackage("huggingface_hub", "object", "checkpoints at hf://ORG/MODEL", "import huggingface_hub"),
)  # fmt: skip
_IMPORTED_WITHIN = 120.0
"""Seconds for all imports; Megatron's takes six."""


def run(path: Path, json: bool) -> None:
    """Look, and say what was seen.

    Args:
        path: The folder in which checkpoints are to lie; nothing stays in it.
        json: For machines.

    Raises:
        click.exceptions.Exit: With code 1, where something will not work.
    """
    facts = _facts(Path(os.path.abspath(local_path(path))))
    if json:
        emit_json(facts)
    else:
        _print(facts)
    if facts["problems"]:
        raise click.exceptions.Exit(1)


def _facts(folder: Path) -> Facts:
    """Keys: ``versions`` by package (null: missing), ``crc32`` (``implementation``, ``bytes_per_second``), ``workers``,
    ``folder`` (``path``, ``kind``, ``mount``, ``options``, ``network``, ``writable``, ``locks``, ``free``, ``total``),
    ``extras`` (``package``, ``extra``, ``version`` or null, ``brings``, ``fails``: why it cannot be imported, or null),
    ``run``, of the run there or null (:func:`.will_resume.of_a_run`), ``problems`` and ``advice`` (texts).
    """
    if not folder.is_dir():
        raise UsageError(f"{folder}: is no folder\nGive the one in which checkpoints are to lie.")
    needed = {name: _version(name) for name in _needed()}
    place, speed = _place(folder), _crc_speed()
    problems = [
        f"{name} is not installed, and is needed: pip install {name}" for name, found in needed.items() if not found
    ]
    extras = _extras()
    problems += [
        f"{one['package']} {one['version']} is installed and cannot be imported: {one['fails']}\n"
        f"  Without it there is not: {one['brings']}. Install a release that fits the others here: {to_install(one['extra'])}"
        for one in extras
        if one["fails"]
    ]
    run_there = of_a_run(folder)
    problems += [f"{folder}: {run_there['problem']}"] if run_there and run_there["problem"] else []
    problems += [] if place["writable"] else [f"{folder}: nothing can be written there: {place['why']}"]
    return {
        "versions": {"mcore_rlhf": __version__, "python": platform.python_version(), **needed},
        "crc32": {"implementation": IMPLEMENTATION, "bytes_per_second": round(speed)},
        "workers": default_workers(),
        "folder": place,
        "extras": extras,
        "run": run_there,
        "problems": problems,
        "advice": list(_advice(place, speed)),
    }  # fmt: skip


def _needed() -> Iterator[str]:
    """What the package itself asks for, extras left out."""
    try:
        listed = requires("mcore_rlhf") or []
    except PackageNotFoundError:  # a clone that was not installed
        listed = ["numpy", "ml-dtypes", "pyyaml", "safetensors", "rich", "click", "pydantic", "omegaconf"]
    for line in listed:
        if "extra ==" not in line:
            yield re.split(r"[^\w.-]", line, maxsplit=1)[0]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _extras() -> list[Facts]:
    """Every extra; those that are installed are imported as the engines import them, each in a process of its own, all at once."""
    found = [(one, _version(one.package)) for one in _EXTRAS]
    started = {one.package: _importing(one.imports) for one, release in found if release}
    deadline = time.monotonic() + _IMPORTED_WITHIN
    why = {package: _outcome(process, deadline) for package, process in started.items()}
    return [
        {"package": one.package, "extra": one.extra, "version": release, "brings": one.brings, "fails": why.get(one.package)}
        for one, release in found
    ]  # fmt: skip


def _importing(statement: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONWARNINGS": "ignore"}
    quiet = subprocess.DEVNULL
    return subprocess.Popen(
        [sys.executable, "-c", statement], env=environment, stdin=quiet, stdout=quiet, stderr=subprocess.PIPE, text=True, errors="replace"
    )  # fmt: skip


def _outcome(process: subprocess.Popen[str], deadline: float) -> str | None:
    """Why an import failed, in the last words that it left; None where it did not."""
    try:
        _, said = process.communicate(timeout=max(deadline - time.monotonic(), 0.0))
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return f"not done within {_IMPORTED_WITHIN:.0f} s"
    if process.returncode == 0:
        return None
    lines = [line for line in said.splitlines() if line.strip()]
    return clean(lines[-1].strip()) if lines else f"its process ended with {process.returncode}"


def _crc_speed() -> float:
    """Bytes a second on one core, the best of three."""
    data, best = memoryview(b"sixteen letters." * (_BUFFER // 16)), 0.0
    for _ in range(3):
        began = time.perf_counter()
        crc32(data)
        best = max(best, _BUFFER / max(time.perf_counter() - began, 1e-9))
    return best


def _place(folder: Path) -> Facts:
    kind, mount, options = _mounted(folder)
    found: Facts = {"path": str(folder), "kind": kind, "mount": mount, "options": options, "network": kind in _NETWORK}
    room = os.statvfs(folder)
    found.update(free=room.f_bavail * room.f_frsize, total=room.f_blocks * room.f_frsize)
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".mcore-rlhf-doctor-") as file:
            found.update(writable=True, why="", locks=_locks(Path(file.name)))
    except OSError as error:
        found.update(writable=False, why=error.strerror or str(error), locks=None)
    return found


def _locks(path: Path) -> str:
    """What ``flock`` does: ``hold``; ``do nothing``, where two holders get the same; or why there are none."""
    with open(path, "rb") as one, open(path, "rb") as other:
        try:
            fcntl.flock(one, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return f"are refused: {error.strerror}"
        try:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return "hold"
        return "do nothing"


def _mounted(folder: Path) -> tuple[str, str, str]:
    """File system, mount point and options of a folder.

    Source: Linux ``Documentation/filesystems/proc.rst``, 3.5 ``/proc/<pid>/mountinfo``; octal escapes stand for blanks.
    """
    best, real = ("unknown", "", ""), os.path.realpath(folder)
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return best
    for line in lines:
        before, _, after = line.partition(" - ")
        mount = re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), before.split()[4])
        inside = real == mount or real.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best[1]):
            kind, _, options = after.split(" ", 2)
            best = (kind, mount, f"{before.split()[5]},{options}")
    return best


def _advice(place: Facts, speed: float) -> Iterator[str]:
    if speed < _SLOW_CRC and IMPLEMENTATION == "zlib":
        yield "pip install zlib-ng: checksums are computed by zlib, which is several times slower"
    if place["locks"] not in (None, "hold"):
        yield "locks do not hold here: give every run and every conversion a target of its own, and start one at a time"
    elif place["network"] and ("nolock" in place["options"] or "local_lock=flock" in place["options"]):
        yield "locks hold on this host alone, as the file system is mounted: other hosts do not see them"
    elif place["network"]:
        yield "locks hold on this host; whether other hosts see them is the server's business"


def _state(extra: Facts) -> str:
    if extra["version"] is None:
        return f"missing: {to_install(extra['extra'])}"
    return f"{extra['version']}, cannot be imported" if extra["fails"] else str(extra["version"])


def _print(facts: Facts) -> None:
    place, speed = facts["folder"], facts["crc32"]
    versions = facts["versions"]
    say(f"mcore_rlhf {versions['mcore_rlhf']} on Python {versions['python']}")
    print_facts(
        [
            ("needs", ", ".join(f"{name} {found or 'MISSING'}" for name, found in list(versions.items())[2:])),
            ("checksums", f"{speed['implementation']}, {rate(speed['bytes_per_second'], 1)} a core; {facts['workers']} workers by default"),
            ("folder", place["path"]),
            ("file system", f"{place['kind']} at {place['mount'] or '?'}{', over a network' if place['network'] else ''}"),
            ("free", f"{size(place['free'])} of {size(place['total'])}"),
            ("locks", place["locks"] or ""),
        ]
    )  # fmt: skip
    say("\nextras")
    rows = [(one["package"], _state(one), one["brings"]) for one in facts["extras"]]
    print_table([Column("package"), Column("version"), Column("brings")], rows)
    if (run_there := facts["run"]) and run_there["trainer"]:
        say(f"\nrun of {run_there['trainer']} {run_there['rows_of']}")
        print_facts(
            [
                ("takes", f"{run_there['step'] or 'no step'}: {run_there['chosen']}"),
                ("resumes", resumes_text(run_there["roles"])),
            ]
        )
        print_facts(list(run_there["why"].items()))
    for text in facts["problems"]:
        say(f"problem: {text}")
    for text in facts["advice"]:
        say(f"note: {text}")
