"""What a path means: a step of roles, with everything else that belongs to it; a lone checkpoint is a step of one role without the rest.

In the root of a run, which step that is where none was named, and what that passes over.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from mcore_rlhf.errors import CheckpointError, Corrupt, NotACheckpoint, Problem, Unreadable, Unsupported, UsageError
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.families.run_folders import named_step
from mcore_rlhf.families.selection import with_role
from mcore_rlhf.formats.registry import format_at, is_model, models_in, open_checkpoint, require_folder, roles_in
from mcore_rlhf.models.meaning.bounds import is_number
from mcore_rlhf.storage.manifest import Manifest, check
from mcore_rlhf.storage.paths import ReadablePath, files_below, refused
from mcore_rlhf.storage.patience import is_there, looked, patiently
from mcore_rlhf.storage.publish import MANIFEST_NAME
from mcore_rlhf.storage.unfinished import refuse_unfinished
from mcore_rlhf.storage.urls import checkpoint_path
from mcore_rlhf.suggestions import did_you_mean
from mcore_rlhf.trainers.known import OF_TRAINER, writer_of
from mcore_rlhf.trainers.table import Trainer

from .run import steps
from .run.steps import RESERVED, Step, tracker_text
from .runs import TrainerRun, TrainerStep, run_at, step_at

if TYPE_CHECKING:
    from mcore_rlhf.execution.run import Progress

T = TypeVar("T")

_SHOWN = 10
_OURS = (MANIFEST_NAME, steps.MANIFEST, steps.NOTE)
"""Our own files in another trainer's step."""


@dataclass(frozen=True, slots=True)
class ChosenStep:
    """A step of a root.

    Args:
        root: The root.
        folder: The step's folder.
        why: What made it the one: ``named``, ``newest committed``, ``newest intact``, ``tracker`` or ``only one``.
        step: Its number.
        passed_over: Newer steps, newest first, each with its state and what is wrong with it.
        of: What it is, where another trainer's run calls its steps otherwise than we do.
        misled: What is wrong with trackers that are there, and name no step.
    """

    root: ReadablePath
    folder: ReadablePath
    why: str
    step: int
    passed_over: tuple[Step, ...] = ()
    of: TrainerStep | None = None
    misled: tuple[Problem, ...] = ()

    @property
    def undecided(self) -> tuple[Step, ...]:
        """Newer steps about which nobody has decided: neither empty, nor in quarantine."""
        return tuple(step for step in self.passed_over if step.nbytes and not step.quarantined)

    def damage(self) -> list[Problem]:
        """What is wrong with newer steps that are damaged, and with trackers.

        Raises:
            Unsupported: One of them is a newer release's.
        """
        damaged = [step for step in self.undecided if step.state == "damaged"]
        for step in damaged:
            _refuse_newer_release(step)
        advice = f"An older step is {self.folder}; mcore-rlhf steps {self.root} lists them all."
        return [*self.misled, *(Problem(Corrupt, f"{step.path}: is damaged: {step.why}", advice) for step in damaged)]

    def require_newest(self) -> None:
        """Refuse to work on an older step than the newest, unless that was asked for.

        Raises:
            Corrupt: A newer one is damaged.
            UsageError: A newer one is not committed.
            Unsupported: A newer one is of a newer release.
        """
        if not self.undecided:
            return
        damaged = self.damage()
        listed = "; ".join(step.describe() for step in self.undecided[:_SHOWN])
        raise (Corrupt if damaged else UsageError)(
            f"{self.root}: the newest step is not the newest that is committed, {self.folder.name}: {listed}\n"
            f"--newest-intact takes the newest that is committed and whose checksums hold; --step N takes one by its number."
        )


def choose(
    root: ReadablePath,
    step: int | None = None,
    *,
    newest_intact: bool = False,
    progress: Progress | None = None,
) -> ChosenStep:
    """Choose a step of a root.

    Args:
        root: The root of a run.
        step: The number of the step that is meant, or None for the newest that is committed. Where all steps are another
            trainer's, for the one that its tracker names.
        newest_intact: Whether every file's checksum must hold as well; damaged steps are passed over.
        progress: Is told how far it is; each step that is read is a stage.

    Raises:
        NotACheckpoint: There is no such step, or none of them is committed and no tracker says which is meant.
        Unreadable: A newer one cannot be read: it may be the one.
        Corrupt: None of them is committed, and some are damaged.
    """
    if step is not None:
        folder = steps.step_folder(root, step)
        if not folder.is_dir():
            refuse_unfinished(folder)
            raise NotACheckpoint(f"{folder}: does not exist\nmcore-rlhf steps {root} lists the steps.")
        return ChosenStep(root, folder, "named", step)
    passed_over: list[Step] = []
    for found in steps.newest_first(root):
        found.require_read()
        if found.resumable and newest_intact:
            found = _checked(found, progress)
        if found.resumable:
            why = "newest intact" if newest_intact else "newest committed"
            return ChosenStep(root, found.path, why, found.step, tuple(passed_over))
        passed_over.append(found)
    return _tracked(root, passed_over)


def _checked(step: Step, progress: Progress | None, name: str = steps.MANIFEST) -> Step:
    """The step, damaged if a checksum does not hold; ``name`` is its manifest's."""
    try:
        manifest = steps.read_manifest(step.path, name)
        if progress is not None:
            progress.stage(f"checking step {step.step}", sum(entry.nbytes for entry in manifest.files.values()))
        advance = (lambda nbytes: None) if progress is None else progress.advance
        problems = check(step.path, manifest, progress=lambda _, nbytes: advance(nbytes))
        problems.raise_if_unread()
        why = problems.found[0].message.splitlines()[0] if problems else ""
    except Unreadable:
        raise
    except CheckpointError as error:
        why = str(error).splitlines()[0]
    return replace(step, state="damaged", why=why) if why else step


def _tracked(root: ReadablePath, found: list[Step]) -> ChosenStep:
    """In a root that others wrote, their tracker is the authority.

    Source: verl ``verl/utils/checkpoint/checkpoint_manager.py`` (``latest_checkpointed_iteration.txt``, the global step);
    RLinf writes none.
    """
    foreign = [step for step in found if step.state == "foreign" and not step.quarantined]
    if foreign and not any(step.state == "damaged" for step in found):
        run, why = run_at(root), "tracker"
        named = run.tracked() if run is not None and run.trainer.tracker else _tracker(root)
        if named is None and len(found) == 1:
            named, why = found[0].step, "only one"
        for at, step in enumerate(found):
            if step.step == named and step in foreign:
                misled = () if run is None else tuple(run.misled())
                return ChosenStep(root, step.path, why, step.step, tuple(found[:at]), misled=misled)
    listed = "; ".join(step.describe() for step in found[:_SHOWN]) or "there is no step at all"
    kind = Corrupt if any(step.state == "damaged" for step in found) else NotACheckpoint
    raise kind(
        f"{root}: no committed step in it: {listed}\n"
        f"mcore-rlhf steps {root} says what is there; name one with --step N, or give its folder."
    )


def _tracker(root: ReadablePath) -> int | None:
    try:
        text = tracker_text(root)
    except (OSError, ValueError):
        return None
    return int(text) if is_number(text) else None


def _refuse_newer_release(step: Step) -> None:
    if steps.is_of_newer_release(step.path):
        raise Unsupported(f"{step.path}: {step.why}\nUse that release; or name an older step with --step N.")


@dataclass(frozen=True, slots=True)
class Subject:
    """A step of roles, or a lone checkpoint.

    Args:
        folder: The step's folder; of a lone checkpoint, its folder, or what it is found in.
        models: Role → folder, for models in a format that is known. A lone checkpoint's role is empty where nobody named it.
        options: How the models are opened.
        step: The step's number; None for a lone checkpoint, which has nothing of what follows.
        manifest: The step's manifest, or None for another trainer's step.
        others: Files of everything else, relative to the step's folder: data, RLHF state, RNG states, and roles in formats
            that cannot be converted.
        chosen: How the step was found in a root; None where the path says which.
    """

    folder: ReadablePath
    models: Mapping[str, ReadablePath]
    options: ReadOptions
    step: int | None = None
    manifest: Manifest | None = None
    others: tuple[str, ...] = ()
    chosen: ChosenStep | None = None

    @property
    def alone(self) -> bool:
        """Whether it is a lone checkpoint."""
        return self.step is None

    def reading(self, role: str) -> ReadOptions:
        """How the model of a role is opened, in the role's folder."""
        return self.options if self.alone else replace(self.options, role=role, step=None)

    def of(self, role: str) -> Subject:
        """One of its models, alone."""
        return Subject(self.models[role], {role: self.models[role]}, self.reading(role), chosen=self.chosen)

    def only(self, why: str) -> Subject:
        """The one model of a step that has no other.

        Args:
            why: What asks for one model.

        Raises:
            UsageError: The step has several, or none.
        """
        if self.alone:
            return self
        if len(self.models) != 1:
            advice = "Name one of its models with --role." if self.models else "It has none in a format that is known."
            raise UsageError(f"{why}, and {self.folder} is a whole step\n{advice}")
        return self.of(next(iter(self.models)))


def find(path: ReadablePath, options: ReadOptions, chosen: ChosenStep | None = None) -> Subject:
    """Understand a path: the root of a run, a step, a role's folder, an iteration.

    Args:
        path: The path.
        options: ``role`` picks one model of a step, ``step`` one step of a root.
        chosen: The step, where it is a root's and was chosen already.

    Raises:
        NotACheckpoint: The step does not have that role.
        CheckpointError: There is no such step, or it is damaged.
    """
    given, path = path, checkpoint_path(path, follow_links=options.follow_links)
    chosen = chosen or chosen_step(path, options.step)
    if chosen is not None:
        path, options = chosen.folder, replace(options, step=None)
    found = (
        _of_trainer(chosen.of, options) if chosen is not None and chosen.of is not None else whole_step(path, options)
    )
    if found is None:
        if isinstance(path, Path):  # before anything is said of a target; a store is asked once, when it is opened
            require_folder(path, str(given))
        return Subject(path, {options.role or "": path}, options, chosen=chosen)
    if options.step not in (None, found.step):
        raise UsageError(
            f"{path}: is one step, {found.step or path.name}, and --step {options.step} is wanted\n"
            f"Leave --step out, or give the root of the run: {path.parent}"
        )
    options = with_role(options, found.models)
    found = replace(found, options=options, chosen=chosen)
    if options.role is None:
        return found
    if options.role not in found.models:
        there = ", ".join(found.models) or "none in a format that is known"
        parts = found.manifest.parts if found.manifest is not None else ()
        own = next((part["format"] for part in parts if part["role"] == options.role), "")
        why = f"; what an engine of {own!r} saves goes back to such an engine, and is not converted" if own else ""
        hint = did_you_mean(options.role, found.models)
        raise NotACheckpoint(f"{found.folder}: has no model of the role {options.role!r}; it has: {there}{hint}{why}")
    return found.of(options.role)


def look(path: ReadablePath, options: ReadOptions, action: Callable[[Subject], T], doubted: Callable[[T], bool]) -> T:
    """Find what a path means, and look at it; and do both again where it was saved again meanwhile.

    Args:
        path, options: See :func:`find`.
        action: Looks.
        doubted: Whether what it found may come of a folder that was replaced; what it raised, always.

    Raises:
        NotACheckpoint: It was deleted meanwhile.
        CheckpointError: See :func:`find`; or the action's.
    """
    path = checkpoint_path(path)
    chosen = patiently(lambda: chosen_step(path, options.step))
    folder = path if chosen is None else chosen.folder
    return looked(folder, lambda: patiently(lambda: action(find(path, options, chosen))), doubted)


def whole_step(path: ReadablePath, options: ReadOptions) -> Subject | None:
    """The step that a folder is, whatever it holds; None where it is something else, such as a lone checkpoint.

    Raises:
        Corrupt: The step is damaged; what is wrong is said.
    """
    path = checkpoint_path(path)
    if not path.is_dir() or is_model(path):
        return _of_roles(path, options) if path.is_dir() else None
    found = _opened(path, options) if _is_step(path) else None
    other = None if found is not None and former_of(found) is None else step_at(path)
    if found is not None and found.models:
        return _named(found, other)
    other = other or step_at(path)  # whose models may lie further down
    return (_of_trainer(other, options) if other is not None else None) or found


def former_of(step: Subject) -> Trainer | None:
    """Whose step it is; None for one of ours, which may have the same folders.

    Raises:
        LayoutMismatch: It has files of two trainers.
    """
    manifest = step.manifest
    if manifest is not None and not (manifest.report.get(OF_TRAINER) or manifest.provenance.get("adopted")):
        return None
    written = writer_of(step.folder)
    return written[0] if written is not None else None


def _named(found: Subject, step: TrainerStep | None) -> Subject:
    """The same with each model under its role, where the trainer whose step it is calls the role's folder otherwise."""
    if step is None:
        return found
    step.refuse_contradiction()
    known = step.models()
    others = {name: folder for name, folder in found.models.items() if folder not in known.values()}
    return replace(found, models={**known, **others})


def chosen_step(
    path: ReadablePath,
    step: int | None = None,
    *,
    newest_intact: bool = False,
    progress: Progress | None = None,
) -> ChosenStep | None:
    """The step that the root of a run means; None where the path is no root.

    Args:
        path: Any path.
        step, newest_intact, progress: See :func:`choose`.

    Raises:
        UsageError: ``newest_intact``, and the path is no root.
        CheckpointError: See :func:`choose`.
    """
    path = checkpoint_path(path)
    if _is_root(path):
        return choose(path, step, newest_intact=newest_intact, progress=progress)
    other = None if _is_step(path) else run_at(path)
    if other is not None and (not (known := format_at(path)) or (step in other.found and known.model_folder)):
        return _chosen_of(other, step, newest_intact, progress)
    if newest_intact:
        raise UsageError(f"--newest-intact chooses one of several steps, and {path} is not the root of a run")
    return None


def _chosen_of(run: TrainerRun, step: int | None, newest_intact: bool, progress: Progress | None) -> ChosenStep:
    """The step that another trainer's run means: one that was named, or has a manifest of ours; else the one that its tracker names, or
    the only one.

    Raises:
        NotACheckpoint: There is no such step.
        UsageError: There are several, and nothing says which is meant.
        CheckpointError: See :func:`choose`.
    """
    if step is not None:
        if step not in run.found:
            there = ", ".join(map(str, run.found))
            raise NotACheckpoint(f"{run.root}: {run.trainer.title} has no step {step} there; there are {there}")
        return ChosenStep(run.root, run.found[step].folder, "named", step, of=run.found[step])
    passed_over: list[Step] = []
    for found in reversed([one for one in run.folders() if one.step in run.found and one.state != "partial"]):
        found.require_read()
        if found.resumable and newest_intact:
            found = _checked(found, progress, run.of(found).manifest)
        if found.resumable:
            why = "newest intact" if newest_intact else "newest committed"
            return ChosenStep(run.root, found.path, why, found.step, tuple(passed_over), run.of(found))
        passed_over.append(found)
    numbers = [one.step for one in passed_over]
    tracked = run.tracked()
    meant = tracked if tracked in numbers else numbers[0] if len(numbers) == 1 else None
    if meant is None or newest_intact:
        listed = "; ".join(one.describe() for one in passed_over[:_SHOWN] or run.folders()[-_SHOWN:])
        raise (UsageError if numbers else NotACheckpoint)(
            f"{run.root}: which of {run.trainer.title}'s steps is meant? {listed}\nName one with --step N, or give its folder."
        )
    why = "tracker" if meant == tracked else "only one"
    over = tuple(passed_over[: numbers.index(meant)])
    return ChosenStep(run.root, run.found[meant].folder, why, meant, over, run.found[meant], tuple(run.misled()))


def _of_trainer(step: TrainerStep, options: ReadOptions) -> Subject | None:
    """A step of another trainer's; None where it is one model's own folder, or has no model where one should be."""
    step.refuse_contradiction()
    models = {} if step.trainer.alone else step.models()
    if not models:
        return _of_roles(step.folder, options, step.step)
    manifest = steps.read_manifest(step.folder) if is_there(step.folder / steps.MANIFEST) else None
    others = _beside_of(step, models.values())
    return Subject(step.folder, models, options, step.step, manifest, others)


def _of_roles(folder: ReadablePath, options: ReadOptions, number: int = 0) -> Subject | None:
    """A folder whose format says that it has several models; None where it has one."""
    roles = roles_in(folder)
    if len(roles) < 2:
        return None
    manifest = Manifest.read(folder / MANIFEST_NAME) if is_there(folder / MANIFEST_NAME) else None
    step = named_step(folder) or _iteration(folder, replace(options, role=roles[0])) or number
    return Subject(folder, dict.fromkeys(roles, folder), options, step, manifest)


def _iteration(folder: ReadablePath, options: ReadOptions) -> int:
    """What a model says that it is of; whoever opens it hears why it cannot be read."""
    with suppress(CheckpointError):
        return open_checkpoint(folder, options, partial=True).state.iteration
    return 0


def as_whole(source: Subject) -> Subject:
    """The step of several roles in whose folder a lone model lies, where that is the step's own; else the model, as it is.

    Args:
        source: What a path means.
    """
    step = step_at(source.folder) if source.alone and source.options.role is None else None
    found = None if step is None else _of_trainer(step, source.options)
    return found or source


def _beside_of(step: TrainerStep, models: Collection[ReadablePath]) -> tuple[str, ...]:
    """The files of another trainer's step that lie in none of its models' folders; where one is the step's own, what it goes on by."""
    if step.trainer.in_place or step.folder in models:
        return tuple(name for name in step.trainer.needs if is_there(step.folder / name))
    return () if step.trainer.by_role else tuple(_beside(step.folder, models))


def _beside(folder: ReadablePath, models: Collection[ReadablePath]) -> Iterator[str]:
    """The files of a step that lie in none of its models' folders, relative to its own."""
    inside = tuple(f"{place.relative_to(folder).as_posix()}/" for place in models)
    return (name for name in files_below(folder, refused) if not name.startswith(inside) and name not in _OURS)


def _is_root(path: ReadablePath) -> bool:
    if not path.is_dir() or _is_step(path) or is_model(path):
        return False
    return any(steps.step_of(child) is not None for child in path.iterdir())


def _is_step(path: ReadablePath) -> bool:
    return steps.step_of(path) is not None or (path / steps.MANIFEST).is_file()


def _opened(folder: ReadablePath, options: ReadOptions) -> Subject | None:
    has_manifest = (folder / steps.MANIFEST).is_file()
    manifest = steps.read_manifest(folder) if has_manifest else None
    if manifest is not None and steps.step_of(folder) is not None and not steps.is_committed(folder):
        raise Corrupt(
            f"{folder}: is damaged: {steps.why_not_committed(folder)}\nUse another step: mcore-rlhf steps {folder.parent}"
        )
    models = models_in(folder, RESERVED)
    if options.role and options.role not in (*models, *RESERVED) and is_model(own := folder / options.role):
        models[options.role] = own
    number = steps.step_of(folder)
    if number is None and manifest is not None:
        number = manifest.step
    if not models and manifest is None:
        return None
    return Subject(folder, models, options, number or 0, manifest, _others(folder, manifest, models))


def _others(folder: ReadablePath, manifest: Manifest | None, models: Mapping[str, ReadablePath]) -> tuple[str, ...]:
    """Everything that no model has; of a step of ours, what its manifest lists."""
    names = sorted(manifest.files) if manifest is not None else files_below(folder, refused)
    return tuple(name for name in names if name.partition("/")[0] not in models)
