"""Ranks that are forked off a process which has imported transformers, accelerate and DeepSpeed: importing takes seven seconds.

``torchrun`` starts processes that import it all again, for each rank of each run. What is forked has computed nothing, and runs the script
as ``python -m`` does, with the environment that ``torchrun`` gives.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

_PROJECT = Path(__file__).parents[2]
_IMPORTED = (
    "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict", "torch.distributed.tensor", "torch.utils.data",
    "transformers.trainer", "transformers.integrations.deepspeed", "transformers.models.auto.modeling_auto",
    "transformers.models.qwen2.modeling_qwen2", "accelerate.utils.deepspeed", "deepspeed", "deepspeed.runtime.engine",
    "deepspeed.runtime.zero.stage_1_and_2", "deepspeed.runtime.zero.stage3",
)  # fmt: skip


class ForkedRanks:
    """The process, which starts with the first run and ends when it is closed."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[str] | None = None

    def run(self, world: int, module: str, *words: str, store: bool = True, **environment: str) -> str:
        """Run a module in so many ranks, which ends by itself: each of them sets an alarm.

        Args:
            world: How many.
            module: Its name.
            words: Its arguments.
            store: Whether there is one for them to meet in, as ``torchrun`` has it; else the script has its own.
            environment: What they see besides what ``torchrun`` sets.

        Returns:
            What they printed.
        """
        if self._server is None:
            self._server = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", __name__],
                cwd=_PROJECT, env={**os.environ, **_CPU}, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )  # fmt: skip
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps([world, module, words, store, environment]) + "\n")
        self._server.stdin.flush()
        answer = self._server.stdout.readline()
        assert answer, "the process that forks ranks has ended"
        codes, printed, errors = json.loads(answer)
        assert not any(codes), f"exit codes {codes}\n{errors}"
        return str(printed)

    def close(self) -> None:
        """End the process."""
        if self._server is not None:
            self._server.communicate()
            self._server = None


_CPU = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what is printed while it imports is no answer
    for name in _IMPORTED:
        importlib.import_module(name)
    torch = sys.modules["torch"]
    torch.optim.Adam([torch.nn.Parameter(torch.ones(1))])  # the first optimizer loads eight hundred modules
    for line in sys.stdin:
        answers.write(json.dumps(_answer(*json.loads(line))) + "\n")
        answers.flush()


def _answer(
    world: int, module: str, words: list[str], store: bool, environment: Mapping[str, str]
) -> tuple[list[int], str, str]:
    """The ranks' exit codes, and what they printed; when one fails, the others are ended."""
    out, err = (os.memfd_create(name) for name in ("stdout", "stderr"))
    agent, port = _agent() if store else (None, 0)
    try:
        codes = _ended([_forked(rank, world, port, module, words, environment, out, err) for rank in range(world)])
    finally:
        if agent is not None:
            os.kill(agent, signal.SIGKILL)
            os.waitpid(agent, 0)
    with os.fdopen(out, "r") as printed, os.fdopen(err, "r") as errors:
        printed.seek(0)
        errors.seek(0)
        return codes, printed.read(), errors.read()


def _ended(pids: list[int]) -> list[int]:
    codes, left = dict.fromkeys(pids, 0), set(pids)
    while left:
        pid, status = os.wait()
        if pid not in left:
            continue
        left.discard(pid)
        codes[pid] = os.waitstatus_to_exitcode(status)
        if codes[pid]:
            for other in left:
                with suppress(ProcessLookupError):
                    os.kill(other, signal.SIGKILL)
    return [codes[pid] for pid in pids]


def _agent() -> tuple[int, int]:
    """A process with the store in which ranks meet, and its port: this one may have no threads."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        from torch.distributed import TCPStore

        store: Any = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(writing, f"{store.port}\n".encode())
        signal.alarm(300)
        while True:
            signal.pause()
    os.close(writing)
    with os.fdopen(reading) as told:
        return pid, int(told.readline())


def _forked(
    rank: int, world: int, port: int, module: str, words: list[str], environment: Mapping[str, str], out: int, err: int
) -> int:
    pid = os.fork()
    if pid == 0:
        os.dup2(out, 1)
        os.dup2(err, 2)
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world), GROUP_RANK="0",
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), **({"TORCHELASTIC_USE_AGENT_STORE": "True"} if port else {}), **environment,
        )  # fmt: skip
        _be_rank(module, words)
    return pid


def _be_rank(module: str, words: list[str]) -> NoReturn:
    code = 1
    sys.argv[1:] = words
    sys.stdin.close()
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _serve()
