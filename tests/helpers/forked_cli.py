"""A ``mcore-rlhf`` for shells that is forked off a process which has imported it: a start takes longer than most commands of a page.

What stands in a folder that is first in ``PATH`` hands its words, folder, environment and streams over, and ends as the command does.
"""

from __future__ import annotations

import gc
import io
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

PROJECT = Path(__file__).resolve().parents[2]
_LONGEST = 1 << 20
_CLIENT = """#!{python} -SE
import json, os, socket, sys
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
    server.connect({address!r})
    socket.send_fds(server, [json.dumps([sys.argv, os.getcwd(), dict(os.environ)]).encode()], [0, 1, 2])
    code = int(server.recv(16))
if code < 0:
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


@contextmanager
def forking(folder: Path, environment: dict[str, str]) -> Iterator[Path]:
    """The folder with ``mcore-rlhf``, as long as this lasts.

    Args:
        folder: Where to make it.
        environment: Of the process that imports.
    """
    client, address = folder / "mcore-rlhf", folder / "socket"
    client.write_text(_CLIENT.format(python=sys.executable, address=str(address)))
    client.chmod(0o755)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(str(address))
        listening.listen(64)
        words = [sys.executable, "-m", __name__, str(listening.fileno())]
        server = subprocess.Popen(words, cwd=PROJECT, env=environment, pass_fds=[listening.fileno()])
    try:
        yield folder
    finally:
        server.kill()
        server.wait()


def _serve(listening: socket.socket) -> None:
    import mcore_rlhf.cli.app
    import mcore_rlhf.cli.converting
    import mcore_rlhf.formats.megatron.reader
    import mcore_rlhf.formats.megatron.writer  # noqa: F401

    gc.freeze()  # else every child's collector looks at all of that, and copies it
    while True:
        asking, _ = listening.accept()
        with suppress(ChildProcessError):  # those that were waited for are done
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if os.fork() == 0:
            listening.close()
            _wait_for_the_command(asking)
        asking.close()


def _wait_for_the_command(asking: socket.socket) -> NoReturn:
    """Tell its exit code; it ends with who asked."""
    request, streams, _, _ = socket.recv_fds(asking, _LONGEST, 3)
    child = os.fork()
    if child == 0:
        asking.close()
        os.setsid()
        _be_the_command(streams, *json.loads(request))
    for descriptor in streams:
        os.close(descriptor)
    ended = os.pidfd_open(child)
    gone = ended not in select.select([ended, asking], [], [])[0]
    if gone:
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if not gone:
        asking.send(str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def _be_the_command(streams: list[int], words: list[str], folder: str, environment: dict[str, str]) -> None:
    from mcore_rlhf.cli import main

    for target, descriptor in enumerate(streams):
        os.dup2(descriptor, target)
        os.close(descriptor)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - as long as the process
    sys.stdout, sys.stderr = (_unbuffered(number) for number in (1, 2))
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[:] = words
    main()


def _unbuffered(number: int) -> io.TextIOWrapper:
    return io.TextIOWrapper(open(number, "wb", buffering=0, closefd=False), write_through=True)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
