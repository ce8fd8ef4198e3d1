"""Lightning's ``CheckpointIO``: each of its checkpoints is there as a whole or not at all.

::

    from mcore_rlhf.integrations.lightning_io import CommittedCheckpointIO
    trainer = Trainer(plugins=[CommittedCheckpointIO()], callbacks=[ModelCheckpoint("runs/a", save_top_k=-1)])
    trainer.fit(model, ckpt_path="runs/a")    # the newest intact step of the folder, or a new run where there is none

``runs/a/epoch=0-step=10.ckpt`` is a folder then, with Lightning's own file, ``lightning.ckpt``, in it: Lightning alone loads that file. It
is unpickled by Lightning's own loading, and after every byte of it was verified. Importing this module imports Lightning.

A strategy that is no single process' or DDP's may go round a ``CheckpointIO``: FSDP, DeepSpeed and ModelParallel load by themselves what
they find under the path, and need a file or a folder of their own there. So this is not for them.

Source: lightning 2.6.6, ``fabric/plugins/io/{checkpoint_io,torch_io}.py``; ``pytorch/strategies/strategy.py`` (``save_checkpoint`` and
``remove_checkpoint`` call it on global rank 0, ``load_checkpoint`` on every rank), ``pytorch/strategies/fsdp.py``;
``pytorch/trainer/connectors/checkpoint_connector.py`` (``resume_start``; an empty checkpoint restores nothing; the digits of every name
with ``hpc_ckpt_`` in it are a number to go on from), ``pytorch/trainer/connectors/signal_connector.py`` (``_slurm_sigusr_handler_fn``);
``pytorch/tuner/lr_finder.py`` and ``pytorch/strategies/launchers/multiprocessing.py`` (names that begin with a dot, for a moment).
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from mcore_rlhf.errors import CheckpointError, NotACheckpoint, Unsupported, UsageError, headline
from mcore_rlhf.manager.run import retention
from mcore_rlhf.manager.run.together import Write
from mcore_rlhf.manager.run.world import World
from mcore_rlhf.manager.tagged import TagOptions, Tags
from mcore_rlhf.manager.trainer_steps import StepOptions, TrainerSteps

from .seam import LOG, Seam

try:
    import lightning
    from lightning.pytorch.plugins.io import TorchCheckpointIO
except ImportError as missing:
    raise Unsupported(
        f"Lightning's lightning.pytorch.plugins.io cannot be imported: {missing}\n"
        "It is of the package lightning; pytorch_lightning, which has the same under another name, is not served."
    ) from missing

SEAM = Seam(
    "lightning",
    "2.6.6",
    {
        "save_checkpoint": ("checkpoint", "path", "storage_options"),
        "load_checkpoint": ("path", "map_location", "weights_only"),
        "remove_checkpoint": ("path",),
        "teardown": (),
    },
)
SEAM.check(TorchCheckpointIO)
_SHOWN = 5
_OF_SLURM = re.compile(r"hpc_ckpt_(\d+)\.ckpt")


class _Nothing(dict[str, Any]):
    """What Lightning is given where there is nothing to resume from: false, so that nothing is restored."""

    def __bool__(self) -> bool:
        return False


class CommittedCheckpointIO(TorchCheckpointIO):
    """As Lightning's own, of files; what it saves is written aside and published whole, what it loads was verified.

    A name with ``step=N`` is a step, with events and rules on what is kept. Any other name, such as ``last.ckpt``, is one folder, which is
    replaced when the new one is whole. What is no such folder, and what another store has, is Lightning's own, and goes its way.

    Args:
        options: How steps are committed.
    """

    def __init__(self, options: StepOptions | None = None) -> None:
        super().__init__()
        self._options = options or StepOptions()
        given = self._options
        self._tags = Tags(
            "lightning", TagOptions(given.fsync, given.check, given.timeout, given.provenance), self._alone()
        )
        self._roots = dict[Path, TrainerSteps]()
        self._loaded: Path | None = None
        self._own = set[Path]()

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """As Lightning's own, which calls it on rank 0 alone.

        Raises:
            CheckpointError: It cannot be saved; nothing is published, and what was there is untouched.
        """
        place = _place(path)
        if place is None or place.name.startswith("."):
            return super().save_checkpoint(checkpoint, path, storage_options)
        steps, own = self._steps_of(place.parent), super().save_checkpoint
        number = steps.root.trainer.step_of(place.name)

        def write(folder: Path) -> None:
            own(checkpoint, str(_file_in(steps, folder)), storage_options)

        if number is None:
            return self._save_named(place, lambda staging: write(staging / place.name))
        if self._loaded is not None and self._loaded.parent == steps.root.path:
            steps.goes_on_from(self._loaded)
        self._loaded = None
        if steps.save(number, write, name=place.name, metrics=_measured(checkpoint)) is not None:
            self._own.add(steps.root.path / place.name)
            self._supersede(steps, number, place.name)
        return None

    def _supersede(self, steps: TrainerSteps, number: int, name: str) -> None:
        """Delete folders of the same step that this run has neither loaded nor written: another epoch, or ``-v1``, is in their names."""
        for other in sorted(steps.root.path.iterdir()):
            again = steps.root.trainer.step_of(other.name) == number and other not in self._own
            if again and _is_committed(steps, other):
                self._delete(steps, other, number, f"saved again as {name}")

    def _save_named(self, place: Path, write: Write) -> None:
        try:
            self._tags.save(place.parent, place.name, write)
        except Exception as error:  # whatever Lightning's own code raises
            if self._options.on_error == "raise" or isinstance(error, UsageError):
                raise
            LOG.warning("%s: not saved: %s: %s", place, type(error).__name__, headline(str(error)))

    def load_checkpoint(
        self, path: Any, map_location: Any = lambda storage, _: storage, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """As Lightning's own, on every rank; of a folder of steps, the newest one that is intact, or nothing where there is none.

        Raises:
            CheckpointError: What was named is damaged; nothing is intact, and something is there. On every rank.
        """
        place = _place(path)
        if place is None:
            return super().load_checkpoint(path, map_location, weights_only)
        world = World.current(self._options.timeout)
        chosen = world.on_all_ranks(f"looking for {place}", lambda: self._chosen(place) if world.is_rank0 else None)
        found = world.broadcast(chosen)
        world.close()
        if found is None:
            LOG.warning("%s: holds no step to resume from: nothing is loaded", place)
            return _Nothing({"pytorch-lightning_version": lightning.__version__})
        loaded: dict[str, Any] = super().load_checkpoint(str(found), map_location, weights_only)
        return loaded

    def _chosen(self, place: Path) -> Path | None:
        """The file that is to be loaded, every byte of it verified where it was committed; None where nothing is."""
        folder = place.resolve()  # what last.ckpt, a link, leads to
        beside = self._steps_of(folder.parent)
        if _is_committed(beside, folder):
            self._tags.check(folder.parent, folder.name)
            retention.remember(folder)
            self._loaded = None if beside.root.trainer.step_of(folder.name) is None else folder
            self._own.add(folder)
            return _file_in(beside, folder)
        if _OF_SLURM.fullmatch(place.name) and not place.exists():
            return self._of_slurm(place)
        if place.is_file() or place.suffix == ".ckpt":
            return place
        steps = self._steps_of(place)
        found = steps.resume("auto")
        if found is None:
            _refuse_files(place)
            return None
        self._own.add(found)
        return _file_in(steps, found)

    def _of_slurm(self, place: Path) -> Path | None:
        """What a requeued job goes on from: Lightning's number for it has digits of what a kill left aside, if the last save was killed.

        That is its newest save on a signal that was committed, or else the newest intact step there.
        """
        self._tags.check(place.parent, place.name)  # which cleans up
        found = {int(one[1]): one[0] for one in map(_OF_SLURM.fullmatch, sorted(os.listdir(place.parent))) if one}
        return self._chosen(place.parent / found[max(found)] if found else place.parent)

    def remove_checkpoint(self, path: Any) -> None:
        """As Lightning's own, which calls it on rank 0 alone; but a step stays as long as no newer one is committed.

        A folder that was not committed is left as it is: a line says so.
        """
        place = _place(path)
        if place is None or place.is_symlink() or not place.is_dir():
            return super().remove_checkpoint(path)
        steps = self._steps_of(place.parent)
        if not _is_committed(steps, place):
            LOG.warning("%s: is not deleted: it has no %s, so it was not saved here", place, steps.root.manifest)
            return None
        number = steps.root.trainer.step_of(place.name)
        if number is None:
            retention.remove_folder(place, steps.root.manifest)
            return None
        self._delete(steps, steps.root.path / place.name, number, "Lightning's own rules do not keep it", after=True)
        return None

    def _delete(self, steps: TrainerSteps, folder: Path, number: int, why: str, *, after: bool = False) -> None:
        """Delete a folder, where that is asked for only when a newer step is committed. What cannot be deleted stays: training goes on."""
        naming = steps.root.naming
        try:
            newest = naming.newest(steps.root.path) if after else None
            if after and (newest is None or newest.step <= number):
                steps.reporter.say("skip", number, f"{folder.name} is not deleted: no newer step is committed")
            elif retention.delete(folder, naming):
                steps.reporter.say("delete", number, f"{folder.name}: {why}")
        except CheckpointError as error:
            steps.reporter.say("skip", number, f"{folder.name} is not deleted: {headline(str(error))}")

    def _alone(self) -> World:
        return World(0, 1, self._options.timeout)

    def _steps_of(self, folder: Path) -> TrainerSteps:
        root = folder.resolve()
        if root not in self._roots:
            self._roots[root] = TrainerSteps(root, "lightning", self._options, self._alone())
        return self._roots[root]

    def teardown(self) -> None:
        """Let go of the folders; another run may save there."""
        super().teardown()
        for steps in self._roots.values():
            with suppress(CheckpointError):
                steps.end()
        self._roots.clear()


def _place(path: Any) -> Path | None:
    """Where a path of Lightning's leads on this machine; None where it is another store's."""
    text = os.fspath(path)
    return None if "://" in text else Path(text).expanduser().absolute()


def _is_committed(steps: TrainerSteps, folder: Path) -> bool:
    return (folder / steps.root.manifest).is_file()


def _refuse_files(folder: Path) -> None:
    """A run does not begin anew beside Lightning's own files, which hold as much as a step.

    Raises:
        NotACheckpoint: There are some.
    """
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    found = [name for name in names if name.endswith(".ckpt") and not name.startswith(".")]
    if found:
        raise NotACheckpoint(
            f"{folder}: holds no committed step, but {', '.join(found[:_SHOWN])}\n"
            "Give the one to go on from as ckpt_path; or give this run a folder of its own."
        )


def _file_in(steps: TrainerSteps, folder: Path) -> Path:
    """Where Lightning's own file lies in a folder of ours."""
    return folder / steps.root.trainer.needs[0]


def _measured(checkpoint: Mapping[str, Any]) -> dict[str, float]:
    """What callbacks watch, for rules that keep the best."""
    found: dict[str, float] = {}
    for state in (checkpoint.get("callbacks") or {}).values():
        if not isinstance(state, Mapping) or not state.get("monitor") or state.get("current_score") is None:
            continue
        value = float(state["current_score"])
        if math.isfinite(value):
            found[str(state["monitor"])] = value
    return found


__all__ = ["CommittedCheckpointIO", "StepOptions"]
