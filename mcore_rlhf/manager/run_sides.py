"""What lies beside the models of a step that goes into another trainer's run, and what of it is made because nobody has it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mcore_rlhf.core.account import Report
from mcore_rlhf.core.facts import Fate, Item
from mcore_rlhf.errors import UsageError
from mcore_rlhf.families.fsdp.state import MOST_STEPS
from mcore_rlhf.families.options import RunOf
from mcore_rlhf.layouts.parallel import ParallelConfig
from mcore_rlhf.storage import reading
from mcore_rlhf.storage.dcp.writer import saved
from mcore_rlhf.storage.paths import ReadablePath, beneath
from mcore_rlhf.storage.patience import is_there
from mcore_rlhf.storage.pickling import pickle_tree
from mcore_rlhf.storage.pt import read_pt
from mcore_rlhf.storage.stored import Stub, new_stub
from mcore_rlhf.storage.urls import checkpoint_path
from mcore_rlhf.trainers.table import STEP, Trainer

from .run.adopt import less_than_whole
from .runs import unmet

_PROGRESS = "progress"
_SAMPLES = "consumed_train_samples"
_LONGEST = 1 << 20


@dataclass(slots=True)
class BesideModels:
    """What lies beside the models of a step that is written.

    Args:
        files: Files of the source that are taken over, by their names in the target.
        texts: New files.
        data: The state of the loader, where the trainer keeps it among a model's values.
        ranks: How many loaders shared the data of the source's run.
        said: Where the loader's state goes, and of which items that speaks; None where there is none.
        report: What became of every file beside the source's models.
    """

    files: dict[str, str] = field(default_factory=dict)
    texts: dict[str, bytes] = field(default_factory=dict)
    data: object = None
    ranks: int = 1
    said: tuple[str, tuple[Item, ...]] | None = None
    report: Report = field(default_factory=Report)

    def goes_on(self, text: str, *about: Item) -> None:
        """Note where the loader's state goes; :func:`settle_data` says it."""
        self.said = text, about


def say_what_is_gone(report: Report, step: ReadablePath, ranks: Sequence[ParallelConfig]) -> None:
    """Say of a trainer's step what is not there, and what of it the trainer itself would not go on without: it is lost.

    Args:
        report: What is said of the step.
        step: Its folder, or any.
        ranks: Of its models.
    """
    for problem in unmet(step):
        report.add(Fate.LOST, problem.message)
    for text in less_than_whole(step, ranks):
        report.add(Fate.NOTE, f"missing: {text}")


def known_of(trainer: Trainer, step: int, args: Mapping[str, object], per_epoch: int = 0) -> dict[str, object]:
    """What a file that is made can say of a step, by what a field of it is: see :class:`~mcore_rlhf.trainers.table.Counters`.

    Args:
        trainer: Whose.
        step: The steps that are done.
        args: The arguments of the first model.
        per_epoch: How many steps an epoch has; zero where nobody knows.
    """
    samples, number = args.get(_SAMPLES), trainer.number(step)
    epoch, of_epoch = divmod(number, per_epoch) if per_epoch else (0, number)
    epochs = {"epoch": epoch, "of_epoch": of_epoch, "per_epoch": per_epoch}
    return {"step": step, "samples": samples if isinstance(samples, int) else 0, "zero": 0, "number": number, **epochs}


def unsaid_of(args: Mapping[str, object]) -> str:
    """What is said where a run's arguments do not say how many samples were consumed."""
    return "" if isinstance(args.get(_SAMPLES), int) else "; nothing says how many samples were consumed: 0"


def add_counters(found: BesideModels, trainer: Trainer, step: int, args: Mapping[str, object], run: RunOf) -> None:
    """The file without which the trainer passes over a step, where the source has none.

    Args:
        found: Gets it.
        trainer: Whose run it is.
        step: The step's number.
        args: The arguments of the first model, which may say how many samples were consumed.
        run: May name a run that shows how long an epoch is.
    """
    wanted = trainer.counters
    if wanted is None or not wanted.fields or wanted.file in found.files:
        return
    per = next((key for key, what in wanted.fields.items() if what == "per_epoch"), "")
    known = known_of(trainer, step, args, _whole(Path(run.shown, wanted.file), per) if run.shown and per else 0)
    fields = {name: known[what] for name, what in wanted.fields.items()}
    of_torch = wanted.file.endswith(".pt")
    found.texts[wanted.file] = saved(fields, wanted.file) if of_torch else json.dumps(fields).encode()
    unsaid = unsaid_of(args) if "samples" in wanted.fields.values() else ""
    found.report.add(Fate.DERIVED, f"{wanted.file}: step {step}{unsaid}")


def _whole(path: Path, key: str) -> int:
    """A number of a file of JSON; zero where it says none that can be one."""
    try:
        said = reading.read_json(path).get(key)
    except (OSError, ValueError, AttributeError):
        return 0
    return said if type(said) is int and 0 < said < MOST_STEPS else 0


def _shown(run: RunOf, name: str) -> bytes:
    """A file of the run that ``--like`` names.

    Raises:
        UsageError: It is not there.
        CheckpointError: It leads out of the run, or is too long to be one.
    """
    path = beneath(checkpoint_path(run.shown), name)
    try:
        return reading.read_bytes(path, _LONGEST)
    except OSError as error:
        raise UsageError(f"--like {run.shown}: {name}: {error.strerror or error}\nName a run that is whole.") from error


def add_made(found: BesideModels, trainer: Trainer, run: RunOf) -> None:
    """What a trainer wants beside its counters, as a run of its own has it, or made.

    Args:
        found: Gets it.
        trainer: Whose run it is.
        run: May name a run that shows it.
    """
    missing = [name for name in trainer.made if name not in found.files]
    for name in missing:
        shown = _shown(run, name) if run.shown else b""
        found.texts[name] = shown or json.dumps(trainer.made[name], indent=4).encode()
    if missing:
        what = f"as {run.shown} has them" if run.shown else trainer.made_says
        found.report.add(Fate.DERIVED, f"{', '.join(missing)}: {what}")


def add_progress(found: BesideModels, trainer: Trainer, step: int, run: RunOf) -> None:
    """The file that only a run of the trainer's own shows, with the number of this step.

    Args:
        found: Gets it.
        trainer: Whose run it is.
        step: The steps that are done.
        run: May name a step that shows it.

    Raises:
        UsageError: That step does not have it, or it is none.
        CheckpointError: It is damaged, or has what nobody may write.
    """
    name = trainer.progress
    if not name or name in found.files or not run.shown:
        return
    shown = checkpoint_path(run.shown)
    if not is_there(beneath(shown, name)):
        raise UsageError(
            f"--like {run.shown}: has no {name}, without which {trainer.title} stops\nName a step of a run that has one."
        )
    file = read_pt(shown, name)
    tree = file.materialize(file.tree)
    progress = tree.get(_PROGRESS) if isinstance(tree, dict) else None
    counted = progress.stub_state if isinstance(progress, Stub) else progress
    if not isinstance(counted, dict) or type(counted.get(STEP)) is not int:
        raise UsageError(f"--like {run.shown}: {name}: expected {_PROGRESS} with a {STEP}, found {progress!r:.80}")
    counted = {**counted, STEP: step}
    made = new_stub(type(progress).stub_name, counted) if isinstance(progress, Stub) else counted
    found.texts[name] = saved({**tree, _PROGRESS: made}, name)
    rest = ", ".join(sorted({*tree, *counted} - {_PROGRESS, STEP}))
    found.report.add(Fate.DERIVED, f"{name}: step {step}; {rest}: as {run.shown} has them, at its step")


def add_beginning(found: BesideModels, trainer: Trainer) -> None:
    """An empty state, with which a ``StatefulDataLoader`` begins anew, for a trainer that stops where it has none.

    Source: torchdata 0.11.0, ``stateful_dataloader/stateful_dataloader.py`` (``load_state_dict``).

    Args:
        found: Gets it, where nothing else says how far the data are.
        trainer: Whose run it goes into.
    """
    name = trainer.data_file()
    if trainer.opens_data and name not in (*found.files, *found.texts):
        found.texts[name] = pickle_tree({}, name).data if name.endswith(".pkl") else saved({}, name)
        found.report.add(
            Fate.DERIVED, f"{name}: empty, since {trainer.title} opens it without a look; its data begin anew"
        )
