"""Ray Train's reported checkpoints, the files of all workers in one step that is there as a whole or not at all.

In the training function, on every worker::

    from mcore_rlhf.integrations.ray_train import Commits
    commits = Commits()
    checkpoint = commits.resume()                    # the newest intact step, or None; commits.done steps are done
    for step in range(commits.done + 1, steps + 1):
        ...
        if commits.wants(step):                      # as the policy says, and before a node is taken away
            commits.report(step, {"loss": loss}, folder)

Or a call of Ray's own, on every worker: ``ray.train.report(metrics, checkpoint, checkpoint_dir_name=commits.name(step),
checkpoint_upload_fn=commits)``. What is kept is for ``CheckpointConfig.num_to_keep`` to say: Ray lists its checkpoints, and takes no run
further of which one is gone. Importing this module does not import Ray.

Source: ray 2.60.0, ``train/v2/api/train_fn_utils.py`` (``report``, ``get_preemption_info``), ``train/v2/api/preemption.py``,
``train/v2/_internal/execution/context.py`` (``checkpoint_upload_fn(checkpoint, checkpoint_dir_name)`` returns a ``Checkpoint`` below the
experiment's folder), ``train/v2/_internal/execution/checkpoint/checkpoint_manager.py`` (``_assert_checkpoints_exist``).
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from mcore_rlhf.errors import Corrupt, Problems, Unsupported, UsageError, headline
from mcore_rlhf.manager.run.policies import AnyOf, BeforeDeadline, Deadline, EveryMinutes, SaveClock, SavePolicy
from mcore_rlhf.manager.run.steps import NOTE
from mcore_rlhf.manager.trainer_steps import StepOptions, TrainerSteps

from .seam import Seam

SEAM = Seam(
    "ray",
    "2.60.0",
    {
        "report": (
            "metrics", "checkpoint", "checkpoint_dir_name", "checkpoint_upload_mode", "delete_local_checkpoint_after_upload",
            "checkpoint_upload_fn",
        ),
        "get_preemption_info": (),
        "get_context": (),
    },
)  # fmt: skip
_MOST = 100
"""Times that one step is saved."""


class Commits:
    """Saves and finds the steps of one run of Ray Train. Every worker makes one, and makes the same calls: all of them are collective.

    Args:
        save: When :meth:`wants` says yes; a deadline that Ray tells of is looked after in any case.
        options: How steps are committed; what is kept is for Ray to say, and a save that fails is an error.
        deadline: When the job ends; by default SLURM's environment is asked.

    Attributes:
        done: Steps that are done, once :meth:`resume` was called.

    Raises:
        Unsupported: Ray cannot be imported, has not what we need, keeps the run elsewhere than in a folder, or something that is asked for
            would part its list from what is there.
        UsageError: The workers are no ``torch.distributed`` world.
    """

    def __init__(
        self,
        save: SavePolicy | None = None,
        options: StepOptions | None = None,
        deadline: Deadline | None = None,
    ) -> None:
        try:
            self._train: Any = import_module("ray.train")
        except ImportError as error:
            raise Unsupported(f"Ray Train's ray.train cannot be imported: {error}") from error
        SEAM.check(self._train)
        context = self._train.get_context()
        try:
            storage = context.get_storage()
            where, self._filesystem = storage.experiment_fs_path, storage.storage_filesystem
            workers, self._node = context.get_world_size(), context.get_node_rank()
        except (AttributeError, NotImplementedError) as error:  # without a trainer's workers, or of another release
            raise Unsupported(f"Ray Train's context does not say where the run is kept: {error}") from error
        self._refuse(options)
        self._steps = TrainerSteps(where, "ray-train", options)
        self._notes = self._steps.root.trainer.needs[0]
        if self._steps.world.size != workers:
            raise UsageError(
                f"Ray Train has {workers} workers, and torch.distributed has {self._steps.world.size}\n"
                "Use a trainer that makes their process group, such as TorchTrainer."
            )
        policy = save or EveryMinutes(30)
        self._policy = AnyOf((policy, BeforeDeadline()))
        self._clock = SaveClock(deadline or Deadline.of_job())
        self._warned: Any = None
        self._metrics: Mapping[str, float] = {}
        self._thread = threading.get_ident()
        self._failed = ""
        self.done = 0

    def _refuse(self, options: StepOptions | None) -> None:
        problems, given = Problems(), options or StepOptions()
        kind = self._filesystem.type_name
        if kind != "local":
            text = f"RunConfig.storage_path is of a file system {kind!r}, and steps are published by a rename"
            problems.add(Unsupported, text, "Give a folder that all nodes share.")
        if given.keep is not None:
            text = "StepOptions.keep: Ray takes no run further of which a listed checkpoint is gone"
            problems.add(Unsupported, text, "Leave it out, and give RunConfig a CheckpointConfig(num_to_keep=...).")
        if given.on_error != "raise":
            text = f"StepOptions.on_error={given.on_error!r}: there would be no checkpoint to report"
            problems.add(Unsupported, text, "Leave it at 'raise': Ray's FailureConfig says what becomes of it.")
        problems.raise_if_any()

    def resume(self, which: str | int | Path | None = "auto") -> Any:
        """The ``ray.train.Checkpoint`` to load, of which every byte is verified; None where there is nothing to resume from.

        It may be a newer one than ``ray.train.get_checkpoint()`` has, where a kill came before Ray's list was written.

        Args:
            which: See :meth:`~mcore_rlhf.manager.trainer_steps.TrainerSteps.resume`.

        Raises:
            CheckpointError: It is damaged or does not exist; nothing is intact, and something is there.
        """
        found = self._steps.resume(which)
        self.done = 0 if found is None else self._steps.number_of(found)
        return None if found is None else self._checkpoint(found)

    def wants(self, step: int) -> str | None:
        """Why to save after a step, by the policy and the deadlines; None where there is no reason to.

        Ray asks for a save once for every node that is to be taken away, at once where it knows of no moment.
        """
        info = self._train.get_preemption_info()
        news = info is not None and info != self._warned
        reason = None
        if self._steps.world.is_rank0:
            if news and info.deadline_ms is not None:
                told = Deadline.after(info.deadline_ms / 1000 - time.time())
                known = self._clock.deadline
                self._clock.deadline = told if known is None or told.remaining() < known.remaining() else known
            reason = self._policy.wants(self._clock.at(step))
            if news and info.deadline_ms is None:
                reason = reason or "a node is about to be taken away"
        self._warned = info
        return self._steps.world.broadcast(reason)

    def name(self, step: int) -> str:
        """What the folder of a step is to be called: a name that Ray has not listed."""
        plain = self._steps.root.folder_of(step)
        names = [plain.name, *(f"{plain.name}-{number:02d}" for number in range(2, _MOST))]
        free = next((name for name in names if not (plain.parent / name).exists()), None)
        if free is None:
            raise UsageError(f"{plain}: this step was saved {_MOST - 1} times")
        return free

    def report(self, step: int, metrics: Mapping[str, Any], folder: str | Path | None) -> None:
        """As ``ray.train.report``, of a step that is committed.

        Args:
            step: Steps that are done.
            metrics: What Ray is told; numbers are kept with the step.
            folder: What this worker has of the step; None where it has nothing.

        Raises:
            CheckpointError: A worker failed, on every worker; nothing was published.
        """
        world = self._steps.world
        name = world.broadcast(world.on_all_ranks(f"reporting step {step}", lambda: self.name(step)))
        if not any(world.all_gather(folder is not None)):
            raise UsageError(f"step {step}: no worker has a folder to report")
        own = None if folder is None else self._train.Checkpoint.from_directory(folder)
        self._metrics = _numbers(metrics)
        try:
            self._train.report(dict(metrics), own, checkpoint_dir_name=name, checkpoint_upload_fn=self)
            if own is None:  # Ray does not call it here, and the others wait
                self._save(None, name)
        finally:
            self._metrics = {}

    def __call__(self, checkpoint: Any, checkpoint_dir_name: str) -> Any:
        """Ray's ``checkpoint_upload_fn``: commit what all workers report, as one step.

        Args:
            checkpoint: The worker's.
            checkpoint_dir_name: The name of the step's folder: see :meth:`name`.

        Returns:
            The step, as Ray's ``Checkpoint``.

        Raises:
            UsageError: The folder is not called as a step, or two workers report a file of the same name.
            Unsupported: Ray calls from a thread of its own, beside the training.
        """
        return self._checkpoint(self._save(checkpoint, checkpoint_dir_name))

    def _save(self, checkpoint: Any, name: str) -> Path:
        if threading.get_ident() != self._thread:
            raise Unsupported(
                "CheckpointUploadMode.ASYNC: the workers meet to commit a step, which they do on the training's own thread\n"
                "Leave checkpoint_upload_mode at SYNC."
            )
        if self._failed:
            raise UsageError(
                f"{self._failed} could not be saved, and Ray waits for its report: no later one would come through\n"
                "Let the error of a save end the training: FailureConfig(max_failures=...) has the workers started anew."
            )
        steps, self._failed = self._steps, name
        number = steps.root.trainer.step_of(name)
        if number is None:
            raise UsageError(
                f"checkpoint_dir_name={name!r}: says no step\nGive ray.train.report(..., checkpoint_dir_name=commits.name(step))."
            )
        ours = (steps.root.manifest, NOTE)  # where a step that was committed is reported again
        mine = steps.world.on_all_ranks(f"listing {name}", lambda: _files(checkpoint, ours))
        parts = steps.world.all_gather((self._node, mine))
        copies, notes = _who_copies(parts)[steps.world.rank], _who_notes(parts, self._notes) == steps.world.rank

        def write(staging: Path) -> None:
            if checkpoint is not None and copies:
                copy = import_module("pyarrow.fs").copy_files
                copy(checkpoint.path, str(staging), source_filesystem=checkpoint.filesystem)
                steps.root.forget(staging)
            if notes:
                self._note(staging, number)

        self._clock.save_started()
        began = time.monotonic()
        path = steps.save(number, write, name=name, metrics=self._metrics)
        self._clock.save_took(time.monotonic() - began)
        self._failed = ""
        assert path is not None  # a save that fails is an error
        return path

    def _note(self, staging: Path, number: int) -> None:
        """Note the step where Ray keeps what is noted with a checkpoint, beside what the worker has noted."""
        try:
            self._train.Checkpoint(str(staging)).update_metadata({"mcore_rlhf_step": number})
        except (ValueError, AttributeError, RecursionError) as error:
            raise Corrupt(
                f"{self._notes} of this worker's files: expected an object in JSON: {headline(str(error))}\n"
                "Leave it out, or write it with ray.train.Checkpoint.set_metadata."
            ) from error

    def _checkpoint(self, path: Path) -> Any:
        return self._train.Checkpoint(str(path), filesystem=self._filesystem)

    def close(self) -> None:
        """Let go of the folder; another run may save there."""
        self._steps.close()


_Files = tuple[str, tuple[str, ...]]


def _files(checkpoint: Any, ours: tuple[str, ...]) -> _Files:
    """Where a worker's part lies, and the names of its files but ours."""
    if checkpoint is None:
        return "", ()
    selector = import_module("pyarrow.fs").FileSelector(checkpoint.path, recursive=True)
    found = [one.path for one in checkpoint.filesystem.get_file_info(selector) if one.is_file]
    names = (os.path.relpath(path, checkpoint.path) for path in sorted(found))
    return checkpoint.path, tuple(name for name in names if name not in ours)


def _who_copies(parts: list[tuple[int, _Files]]) -> list[bool]:
    """Which workers copy: of those of one node that report one folder, the first.

    Raises:
        UsageError: Two write a file of the same name: one would be lost, or both.
    """
    copies, owners, places = list[bool](), dict[str, int](), set[tuple[int, str]]()
    problems = Problems()
    for rank, (node, (path, names)) in enumerate(parts):
        copies.append(bool(path) and (node, path) not in places)
        places.add((node, path))
        for name in names if copies[-1] else ():
            if (other := owners.setdefault(name, rank)) != rank:
                problems.add(UsageError, f"{name}: is reported by worker {other} and by worker {rank}")
    if problems:
        problems.add(
            UsageError, "one file would take the other's place", "Give each worker's files names of their own."
        )
    problems.raise_if_any()
    return copies


def _who_notes(parts: list[tuple[int, _Files]], notes: str) -> int:
    """The worker that writes into Ray's notes: the one that has some, so that nobody else does meanwhile; else the first."""
    return next((rank for rank, (_, (_, names)) in enumerate(parts) if notes in names), 0)


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    found = {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}
    return {name: value for name, value in found.items() if math.isfinite(value)}


__all__ = ["Commits", "StepOptions"]
