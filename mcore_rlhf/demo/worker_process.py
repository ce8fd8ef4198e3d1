"""The processes behind :class:`mcore_rlhf.demo.workers.WorkerPool`.

One *nursery* imports torch and Megatron once and then forks the workers, so that eight of them are ready in the time
of one import, and new ones at once when some had to be killed. It never starts a thread. Every worker watches the
*lifeline*, a pipe whose other end only the pool's owner holds: when the owner is gone, however it ended, the workers
are gone too, and what they started.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import importlib.util
import os
import pickle
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import IO, Any, NoReturn

# What torch and numpy import with the first optimizer and the first random number: two seconds of every worker.
_IMPORTED_LATE = ("torch._dynamo", "numpy.random")
_MAX_RECEIVED = 250
_WRAPPERS = {
    "torch.nn.parameter": "Parameter",
    "megatron.core.distributed": "DistributedDataParallel",
    "deepspeed.runtime.engine": "DeepSpeedEngine",
    "deepspeed.runtime.base_optimizer": "DeepSpeedOptimizer",
    "deepspeed.runtime.zero.parameter_offload": "DeepSpeedZeRoOffload",
    "deepspeed.runtime.zero.partitioned_param_coordinator": "PartitionedParameterCoordinator",
}
"""What frameworks put around a model or its optimizer, or hang things on, by module."""


@dataclass(frozen=True, slots=True)
class FunctionReference:
    """A module-level function by name, and by file where the module cannot be imported (scripts, test files)."""

    module: str
    name: str
    file: str | None = None

    def resolve(self) -> Callable[..., Any]:
        """The function itself, in this process."""
        target: Any = self._import()
        for part in self.name.split("."):
            target = getattr(target, part)
        return target

    def _import(self) -> ModuleType:
        if self.module != "__main__":
            try:
                return importlib.import_module(self.module)
            except ModuleNotFoundError:
                if self.file is None:
                    raise
        return _import_file(Path(self.file or ""))


def _import_file(path: Path) -> ModuleType:
    """Import a file once, under a name of its own (so that its ``__main__`` part does not run)."""
    name = f"_pool_{path.stem}_{abs(hash(str(path)))}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise ImportError(f"cannot import {path}")
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@dataclass(frozen=True, slots=True)
class WorkerJob:
    """One rank's part of a job.

    Args:
        rank: Of this worker in the job.
        world_size: Ranks of the job.
        store: File through which the ranks find one another; it must not exist yet.
        timeout: Seconds after which the worker dumps its stack and ends.
        search_path: ``sys.path`` of the owner.
        call: Pickled function reference, arguments and keyword arguments.
    """

    rank: int
    world_size: int
    store: str
    timeout: float
    search_path: tuple[str, ...]
    call: bytes


def run_nursery(preload: str, folder: Path, control_fd: int) -> None:
    """Import, then fork workers whenever the owner asks, until the owner is gone.

    Args:
        preload: Module that is imported before forking.
        folder: Where logs and stacks go.
        control_fd: Socket on which a request brings the read end of a lifeline and one connected socket per worker.
    """
    gc.set_threshold(50_000, 10, 10)  # a step makes thousands of objects: with 700, a tenth of a worker's time
    for name in (preload, *_IMPORTED_LATE):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a worker
    control = socket.socket(fileno=control_fd)
    while True:
        request, received, _, _ = socket.recv_fds(control, 1, _MAX_RECEIVED)
        if not request:
            os._exit(0)
        _fork_workers(control, folder, *received)


def _fork_workers(control: socket.socket, folder: Path, lifeline: int, *ends: int) -> None:
    for number, end in enumerate(ends):
        if os.fork() == 0:
            control.close()
            for other in ends:
                if other != end:
                    os.close(other)
            _run_worker(number, Connection(end), folder, lifeline)
    for descriptor in (lifeline, *ends):
        os.close(descriptor)


def _run_worker(number: int, owner: Connection, folder: Path, lifeline: int) -> None:
    os.setpgrp()  # Megatron starts processes that would outlive a killed worker: they end with its group
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _redirect_output(folder / f"worker_{number}.log")
    faulthandler.enable()  # a crash in C leaves its stack in the log
    threading.Thread(target=_end_with_owner, args=(lifeline,), daemon=True).start()
    with open(folder / f"worker_{number}.stacks", "w") as stacks:
        owner.send(os.getpid())
        environment = dict(os.environ)
        try:
            while True:
                job: WorkerJob | None = owner.recv()
                if job is None:  # all ranks are done: one that was early still served as the others' peer
                    _clear(environment)
                else:
                    _answer(owner, job, stacks, environment)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            _end_group()


def _redirect_output(path: Path) -> None:
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def _end_with_owner(lifeline: int) -> None:
    os.read(lifeline, 1)
    _end_group()


def _end_group() -> NoReturn:
    """End at once, with every process that this one started."""
    os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _answer(owner: Connection, job: WorkerJob, stacks: IO[str], environment: dict[str, str]) -> None:
    """Do a job and send ``(True, pickled result)`` or ``(False, traceback)``."""
    faulthandler.dump_traceback_later(job.timeout, exit=True, file=stacks)
    answer: tuple[bool, bytes | str]
    try:
        answer = (True, pickle.dumps(_perform(job)))
    except BaseException:  # SystemExit too: Megatron calls sys.exit
        answer = (False, traceback.format_exc())
    if not answer[0]:
        _clear(environment)  # closes connections, so that ranks waiting for this one fail as well
    faulthandler.cancel_dump_traceback_later()
    sys.stdout.flush()
    sys.stderr.flush()
    owner.send(answer)


def _perform(job: WorkerJob) -> Any:
    import torch.distributed as dist

    sys.path[:] = [*job.search_path, *(path for path in sys.path if path not in job.search_path)]
    os.environ.update(RANK=str(job.rank), LOCAL_RANK=str(job.rank), WORLD_SIZE=str(job.world_size))
    reference, args, kwargs = pickle.loads(job.call)  # noqa: S301 - written by the pool's owner
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(job.store, job.world_size),  # type: ignore[attr-defined]
        rank=job.rank,
        world_size=job.world_size,
        timeout=timedelta(seconds=job.timeout),
    )
    return reference.resolve()(*args, **kwargs)


def _clear(environment: dict[str, str]) -> None:
    """Undo what the job before may have left: process groups, Megatron's globals, environment, signal handlers."""
    import torch.distributed as dist

    _empty_wrappers()
    if "megatron.core" in sys.modules:
        _clear_megatron()
    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(environment)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    gc.collect()


def _empty_wrappers() -> None:
    """Autograd's hooks hold a wrapper: a cycle that the collector cannot see, on which process groups hang, and three threads on each.

    DeepSpeed notes groups on parameters as well.
    """
    known = tuple(getattr(sys.modules[module], name) for module, name in _WRAPPERS.items() if module in sys.modules)
    for leftover in gc.get_objects():
        if issubclass(type(leftover), known):  # asks no object anything: a proxy may raise whatever it likes
            vars(leftover).clear()


def _clear_megatron() -> None:
    """Let go of what Megatron keeps for good."""
    from megatron.core import num_microbatches_calculator, parallel_state, rerun_state_machine
    from megatron.core.models.common.embeddings import RotaryEmbedding, YarnRotaryEmbedding

    for embedding in (RotaryEmbedding, YarnRotaryEmbedding):
        embedding.forward.cache_clear()  # caches results per module, and so the modules
    _clear_experts_metrics()
    parallel_state.destroy_model_parallel()
    num_microbatches_calculator.destroy_num_microbatches_calculator()
    rerun_state_machine.destroy_rerun_state_machine()


def _clear_experts_metrics() -> None:
    """Their arrays are as long as the model that made them is deep."""
    try:
        from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
    except ImportError:  # before 0.18
        from mcore_rlhf.demo import versions

        versions.experts_metrics().clear()
    else:
        destroy_moe_metrics_tracker()


if __name__ == "__main__":
    from mcore_rlhf.demo import worker_process  # not __main__: the owner's pickles name the module

    worker_process.run_nursery(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
