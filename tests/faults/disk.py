"""A disk that fails on demand: ``shim.c``, compiled with the compiler that is there, and what a preloaded process says to it."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

WRITING = "create,write,fsync,mkdir,truncate,link"
CHANGING = f"{WRITING},open,rename,unlink,rmdir"
READING = "open,read,opendir,readdir,stat,fstat,advise,map,readlink,seek,dup"
EVERY = f"{CHANGING},{READING},flock,close"
_MODES = {"fail": 0, "short": 1, "sleep": 2}


def compiled(folder: Path) -> Path | None:
    """The shim as a library that ``LD_PRELOAD`` takes; None where there is no compiler for it.

    Args:
        folder: Where it is put.
    """
    compiler = next(filter(None, map(shutil.which, ("gcc", "cc", "clang"))), None)
    library = folder / "shim.so"
    if compiler is None or os.uname().sysname != "Linux":
        return None
    source = Path(__file__).with_name("shim.c")
    command = [
        compiler,
        "-Wall",
        "-Wextra",
        "-Werror",
        "-O1",
        "-shared",
        "-fPIC",
        "-o",
        str(library),
        str(source),
        "-ldl",
    ]
    subprocess.run(command, check=True)
    return library


class Disk:
    """What lies below one folder, as this process sees it, which the shim is preloaded into.

    Args:
        root: The folder.
    """

    def __init__(self, root: Path) -> None:
        self._shim = ctypes.CDLL(None)
        self._shim.fault_last.restype = ctypes.c_char_p
        for name in ("fault_seen", "fault_hits"):
            getattr(self._shim, name).restype = ctypes.c_long
        number, text, size = ctypes.c_int, ctypes.c_char_p, ctypes.c_long
        self._shim.fault_arm.argtypes = [size, size, number, text, number, number]
        self._shim.fault_root(os.fsencode(root))

    def arm(
        self, first: int, error: int = 0, calls: str = EVERY, *, many: int = 1, mode: str = "fail", ms: int = 0
    ) -> None:
        """Have calls fail.

        Args:
            first: Which one is the first, from 1 on.
            error: Its number.
            calls: Their names, with commas.
            many: How many; -1: all from there on.
            mode: ``fail``; ``short``: writes write half; ``sleep``: they take longer.
            ms: How much longer.
        """
        self._shim.fault_arm(first, many, error, calls.encode(), _MODES[mode], ms)

    def mend(self) -> tuple[int, str]:
        """Have all calls go through.

        Returns:
            How many have failed, and the first of them: ``open /global_step_2/manifest.json``.
        """
        met = int(self._shim.fault_hits()), str(self._shim.fault_last().decode())
        self._shim.fault_arm(0, 0, 0, b"", 0, 0)
        return met
