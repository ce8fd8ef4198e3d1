"""The owner's end of the nursery: it starts the process that imports once, and asks it for workers."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from mcore_rlhf.demo import worker_process
from mcore_rlhf.demo.worker_reports import Reports, WorkerError

_START_TIMEOUT = 240.0


@dataclass(frozen=True, slots=True)
class Workers:
    """Processes that were forked together and end together.

    Args:
        connections: One per worker, in the order of their ranks.
        lifeline: Write end of the pipe that they watch.
        pids: Of the processes.
    """

    connections: list[Connection]
    lifeline: int
    pids: list[int]

    def end(self) -> None:
        """Kill them, whatever they are doing."""
        os.close(self.lifeline)
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for connection in self.connections:
            connection.close()


class Nursery:
    """A process with everything imported, from which workers are forked in no time.

    Args:
        preload: Module to import.
    """

    def __init__(self, preload: str) -> None:
        self.reports = Reports(Path(tempfile.mkdtemp(prefix="workers-")))
        self._control, theirs = socket.socketpair()
        with theirs, (self.folder / "nursery.log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", worker_process.__name__, preload, str(self.folder), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,  # a Ctrl-C is the owner's to handle
            )
        self._end = weakref.finalize(self, _end, self._control, self._process, self.folder)

    @property
    def folder(self) -> Path:
        """Where logs, stacks and rendezvous files go."""
        return self.reports.folder

    def fork(self, count: int) -> Workers:
        """Get new workers.

        Args:
            count: How many.

        Raises:
            WorkerError: If they do not come up, for example because the import failed.
        """
        theirs_lifeline, lifeline = os.pipe()
        pairs = [socket.socketpair() for _ in range(count)]
        with contextlib.suppress(BrokenPipeError):
            socket.send_fds(self._control, [b"f"], [theirs_lifeline, *(theirs.fileno() for _, theirs in pairs)])
        os.close(theirs_lifeline)
        for _, theirs in pairs:
            theirs.close()
        workers = Workers([Connection(ours.detach()) for ours, _ in pairs], lifeline, [])
        self._await(workers)
        return workers

    def _await(self, workers: Workers) -> None:
        deadline = time.monotonic() + _START_TIMEOUT
        for rank, connection in enumerate(workers.connections):
            try:
                if not connection.poll(max(0.0, deadline - time.monotonic())):
                    raise EOFError
                workers.pids.append(connection.recv())
            except (EOFError, ConnectionResetError):
                workers.end()
                raise WorkerError(rank, "did not start", self.reports.tail("nursery.log")) from None

    def close(self) -> None:
        """End the process; it also ends with this object, and with the owner."""
        self._end()


def _end(control: socket.socket, process: subprocess.Popen[bytes], folder: Path) -> None:
    control.close()
    process.kill()
    process.wait()
    shutil.rmtree(folder, ignore_errors=True)


def _environment() -> dict[str, str]:
    """One thread per worker, no GPU, traffic on the loopback interface, this package importable."""
    package = str(Path(__file__).resolve().parents[2])
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    if Path("/sys/class/net/lo").exists():
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    return environment
