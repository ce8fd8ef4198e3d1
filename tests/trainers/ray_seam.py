"""Ray Train's own ``TorchTrainer`` with two workers, what they report committed: ``python -m tests.trainers.ray_seam JOB FOLDER RESULT``.

Jobs: ``alone`` (Ray's own upload), ``call`` (by a call of Ray's own), ``killed`` (worker 1, in the middle of the upload of step 4, and
started anew by Ray when step 4 is committed and Ray has not heard of it), ``raised`` (worker 1 has an error in the middle of that upload;
odd steps are reported without us), ``resumed``, ``one`` (the same with one worker, which reports what it loaded again), ``rank0`` (only
worker 0 has files), ``same`` (both report a file of one name), ``async`` (Ray uploads behind the training), ``elsewhere`` (the run is kept
in no folder), ``kills`` (one worker of each of ``SEAM_KILLS`` starts, at random; ``SEAM_LAST`` steps), ``preempted`` (Ray's worker is told,
as Ray's watcher tells it, that a node is taken away: no node is). What every worker saw is written as JSON.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
import torch.distributed as dist
from pyarrow.fs import LocalFileSystem, SubTreeFileSystem
from ray.train.torch import TorchTrainer

from mcore_rlhf.errors import Unsupported
from mcore_rlhf.integrations.ray_train import Commits, StepOptions
from mcore_rlhf.manager.run.policies import EverySteps
from mcore_rlhf.manager.run.retention import KeepLast, Retention
from tests.crash.dcp_writer_kills import Killer
from tests.trainers.seam_kills import TOLD, Told, whole_steps

LAST, EVERY = 6, 2
KILLS = int(os.environ.get("SEAM_KILLS", "0"))


class Failing(Commits):
    """Dies, or has an error, when it has copied its files and not said so; or when they are committed, and Ray has not heard of it."""

    job, start = "", 0

    def _save(self, checkpoint: Any, name: str) -> Path:
        own = self._steps.save

        def save(step: int, write: Any, **named: Any) -> Any:
            def failing(staging: Path) -> None:
                write(staging)
                if step == 4 and self.start == 0:
                    self._fail()

            saved = own(step, failing, **named)
            if step == 4:
                self._fail()
            return saved

        self._steps.save = save  # type: ignore[method-assign]
        return super()._save(checkpoint, name)

    def _fail(self) -> None:
        if ray.train.get_context().get_world_rank() == 1:
            if self.job == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError("No space left on device")


def train(config: dict[str, str]) -> None:
    """What every worker does."""
    job, rank = config["job"], ray.train.get_context().get_world_rank()
    torch.set_num_threads(1)
    seen: list[Any] = Told()
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    commits: Any = None
    done, checkpoint = 0, None
    if job != "alone":
        try:
            Commits(options=StepOptions(keep=Retention([KeepLast(1)]), on_error="continue"))
        except Unsupported as error:
            seen.append(str(error))
        failures, starts = {"killed": 2, "raised": 1}.get(job, 0), Path(config["folder"], "starts")
        start = starts.stat().st_size if starts.exists() else 0
        kind = Failing if start < failures else Commits
        Failing.job, Failing.start = job, start
        dist.barrier()
        if rank == 0:
            starts.write_text("s" * (start + 1))
        arm(config, start, rank, seen)
        commits = kind(EverySteps(EVERY if job != "preempted" else 1000))
        checkpoint = commits.resume()
        done = commits.done
        if checkpoint is not None:
            seen.append(f"resumed {Path(checkpoint.path).name}")
            with checkpoint.as_directory() as folder:
                found = torch.load(Path(folder, "worker-0.pt" if job == "rank0" else f"worker-{rank}.pt"))
            model.load_state_dict(found["model"])
            optimizer.load_state_dict(found["optimizer"])
            torch.set_rng_state(found["random"])
    for step in range(done + 1, last_of(config, done) + 1):
        loss = model(torch.randn(4, 4) + rank).square().mean()
        optimizer.zero_grad()
        loss.backward()
        for one in model.parameters():
            dist.all_reduce(one.grad)
        optimizer.step()
        seen.append([step, loss.item()])
        if job == "preempted" and step == 3:
            warn(rank)
        reason = commits.wants(step) if commits is not None else step % EVERY == 0 and "SEAM_LAST" not in os.environ
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "random": torch.get_rng_state()}
        if reason:
            seen.append(reason if job == "preempted" else step)
            report(config, commits, step, state, checkpoint)
        elif job == "raised":
            with tempfile.TemporaryDirectory() as folder:
                torch.save(state, Path(folder, f"worker-{rank}.pt"))
                ray.train.report({"step": step}, ray.train.Checkpoint.from_directory(folder))
    Path(config["result"]).with_name(f"{job}-{rank}.json").write_text(json.dumps(seen))


def last_of(config: dict[str, str], done: int) -> int:
    """The step after which a run is over: of one that is killed, soon after it was for the last time."""
    is_over = config["job"] == "kills" and Path(config["folder"], "starts").stat().st_size > KILLS
    return done + LAST if is_over else int(os.environ.get("SEAM_LAST", LAST))


def arm(config: dict[str, str], start: int, rank: int, seen: list[Any]) -> None:
    """Have one of the workers be killed, at one of its changes of the file system, or at a moment of time; all that is there is whole."""
    if config["job"] != "kills":
        return
    os.environ[TOLD] = f"{config['folder']}/told-{start}-{rank}"
    seen.append(f"whole: {whole_steps(Path(config['folder'], 'run'))}")
    draws = random.Random(f"{os.environ.get('SEED')} {start}")
    victim, at, after = draws.randrange(2), draws.randrange(1, 80), draws.uniform(0.0, 0.6)
    if rank != victim or start >= KILLS:
        return
    if start % 2:
        Killer(at)
    else:
        threading.Timer(after, os.kill, (os.getpid(), signal.SIGKILL)).start()


def warn(rank: int) -> None:
    """As ``RayTrainWorker.mark_preempt`` does; worker 0's is what counts."""
    from ray.train.v2._internal.execution.context import get_train_context
    from ray.train.v2.api.preemption import PreemptionInfo

    info = PreemptionInfo(int(1000 * (time.time() + 30)), {"node": [rank]})
    get_train_context().preemption_context.preemption_info = info


def report(config: dict[str, str], commits: Any, step: int, state: dict[str, Any], loaded: Any) -> None:
    """Write this worker's part, and report it."""
    job, rank = config["job"], ray.train.get_context().get_world_rank()
    name = "model.pt" if job == "same" else f"worker-{rank}.pt"
    with tempfile.TemporaryDirectory() as folder:
        if job == "one":
            loaded.to_directory(folder)
        torch.save(state, Path(folder, name))
        if job in ("alone", "call", "async"):
            own: dict[str, Any] = {"checkpoint_dir_name": f"checkpoint_step_{step}"}
            if job != "alone":
                own = {"checkpoint_dir_name": commits.name(step), "checkpoint_upload_fn": commits}
            if job == "async":
                own["checkpoint_upload_mode"] = ray.train.CheckpointUploadMode.ASYNC
            ray.train.report({"step": step}, ray.train.Checkpoint.from_directory(folder), **own)
        else:
            commits.report(step, {"step": step}, None if job == "rank0" and rank else folder)


def main(job: str, folder: str, result: Path) -> None:
    """One job, in a cluster of its own on this machine."""
    place = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # sockets have short names only
    try:
        ray.init(
            num_cpus=2, include_dashboard=False, object_store_memory=80 << 20, logging_level="error", _temp_dir=place
        )
        run = ray.train.RunConfig(
            name="run", storage_path=folder, checkpoint_config=ray.train.CheckpointConfig(num_to_keep=6 if job == "raised" else 2),
            failure_config=ray.train.FailureConfig(max_failures={"killed": 2, "raised": 1, "kills": -1}.get(job, 0)),
            storage_filesystem=SubTreeFileSystem("/", LocalFileSystem()) if job == "elsewhere" else None,
        )  # fmt: skip
        trainer = TorchTrainer(
            train, train_loop_config={"job": job, "folder": folder, "result": str(result)},
            scaling_config=ray.train.ScalingConfig(num_workers=1 if job == "one" else 2), run_config=run,
        )  # fmt: skip
        ended = trainer.fit()
        latest = None if ended.checkpoint is None else Path(ended.checkpoint.path).name
        result.write_text(json.dumps({"latest": latest, "metrics": ended.metrics}))
    finally:
        ray.shutdown()
        shutil.rmtree(place, ignore_errors=True)


if __name__ == "__main__":
    sys.path.insert(0, os.getcwd())
    from tests.trainers import ray_seam  # what workers are sent is found by its name there

    ray_seam.main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
