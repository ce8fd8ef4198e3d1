"""A step on its way into another trainer's run: which roles that has, where they lie, and what goes with them under which name.

All of it follows from the trainer's row in :mod:`mcore_rlhf.trainers`. What the trainer has no place for is lost by name; what it wants
and nobody has is made of what is known, and said.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from mcore_rlhf.core.facts import Fate, Item, Kind
from mcore_rlhf.errors import Unsupported, UsageError
from mcore_rlhf.families.fsdp.state import RNG
from mcore_rlhf.families.megatron.state import MegatronState
from mcore_rlhf.families.module import ModuleState
from mcore_rlhf.families.option_types import Takes
from mcore_rlhf.families.options import ConvertOptions, ReadOptions, RunOf, WriteOptions
from mcore_rlhf.families.source import Source
from mcore_rlhf.families.trainer_files import ROWS, new_states
from mcore_rlhf.formats.base import Target
from mcore_rlhf.formats.carried import GO_ALONG
from mcore_rlhf.formats.registry import format_at, format_named, open_checkpoint, roles_in, wanted_format
from mcore_rlhf.storage.paths import ReadablePath, beneath
from mcore_rlhf.storage.patience import is_there
from mcore_rlhf.storage.reading import read_bytes
from mcore_rlhf.storage.urls import checkpoint_path, remove_file, write_text
from mcore_rlhf.trainers.known import TRAINERS, counted_by, trainer_named
from mcore_rlhf.trainers.table import RANDOM, Trainer

from .run_data import DATA, add_data, data_of_ours, instead_of_loader, take_position, wants_loader
from .run_sides import BesideModels, known_of, unsaid_of
from .runs import TrainerRun, TrainerStep, run_at, step_at
from .subject import Subject, as_whole, former_of

_DEGREES = ("tp", "pp", "vpp", "ep", "etp")
_LAYOUTS = (*_DEGREES, "pipeline_layout")
"""Options that mean a Megatron layout."""
_LONGEST = 1 << 30
"""Of a file beside an iteration, in bytes: a count of prompts, or a buffer of them."""


def resolved(options: ConvertOptions) -> ConvertOptions:
    """The options with the format that a trainer is given, where its name stands for one, and of a run that ``--like`` names a step.

    Args:
        options: What somebody asked for.

    Raises:
        Unsupported: The trainer's runs are read, and not written.
        LayoutMismatch: That run has steps of two trainers.
    """
    shown = None if options.write.like is None else run_at(Path(options.write.like).expanduser())
    if shown is not None and (newest := max(shown.found, default=None)) is not None:  # any step shows how the run is
        options = replace(options, write=replace(options.write, like=str(shown.found[newest].folder)))
    trainer = trainer_named(options.to)
    if trainer is None or options.trainer:
        return options
    if not trainer.formats:
        writable = ", ".join(one.name for one in TRAINERS if one.formats)
        raise Unsupported(
            f"--to {trainer.name}: runs of {trainer.title} are read, and not written as a whole\nWritten are: {writable}."
        )
    if options.write.like is not None and trainer.in_place:
        return _as_shown(options, trainer, shown)
    like, write = _like(options, trainer), options.write
    degrees = {name: getattr(write, name) for name in _LAYOUTS}
    if like is not None and not any(degree is not None for degree in degrees.values()):
        parallel = open_checkpoint(like, options.read, partial=True).parallel
        degrees = {name: getattr(parallel, name) for name in _DEGREES}
        write = replace(write, **{"dp": parallel.dp, **degrees} if write.dp is None else degrees)
    parts = trainer.parts_like(like)
    if like is not None and write.optimizer_sharding is None and parts is not None and parts.as_asked:
        family = MegatronState.of(
            open_checkpoint(like, options.read, partial=True)
        )  # its loader asks for what its run says
        write = replace(write, optimizer_sharding=None if family is None else family.sharding)
    to = _format_of(trainer, write, megatron=any(degree is not None for degree in degrees.values()))
    row = next((row for row in ROWS if row.format in trainer.formats and row.format != to), None)
    if like is None and write.like is not None and Takes.ZERO_STAGE in format_named(to).takes:
        write = _in_ranks_of(write, options.read)
    run = RunOf(
        trainer.name, trainer.second_group, trainer.wants_schedule or row is not None, parts, trainer.counts,
        tag=trainer.tag, strategy=trainer.strategy, beside=row, shown=_shown_by(options, trainer) if trainer.progress else "",
    )  # fmt: skip
    return replace(options, to=to, trainer=trainer.name, write=replace(write, run_of=run))


def _format_of(trainer: Trainer, write: WriteOptions, *, megatron: bool) -> str:
    """The format that a trainer's model is to have: as ``--like`` shows, as options ask for, or its usual one."""
    wanted = [name for name in trainer.formats if (Takes.MEGATRON in format_named(name).takes) == megatron]
    fitting = wanted or [*trainer.formats]
    shown = None if write.like is None else format_at(checkpoint_path(Path(write.like).expanduser()))
    staged = [name for name in fitting if write.zero_stage is not None and Takes.ZERO_STAGE in format_named(name).takes]
    return shown.name if shown is not None and shown.name in fitting else (staged or fitting)[0]


def _in_ranks_of(write: WriteOptions, read: ReadOptions) -> WriteOptions:
    """The options with the ranks and the stage of a run of DeepSpeed's, whose loader takes no others, where nobody gave them."""
    step = _shown_step(shown := Path(str(write.like)).expanduser())
    place = shown if step is None else next(iter(step.models().values()), shown)
    found = open_checkpoint(
        checkpoint_path(place, follow_links=read.follow_links), replace(read, role=None, step=None), partial=True
    )
    stage = (found.optimizer or "").removeprefix("zero")
    return replace(
        write,
        dp=found.parallel.dp if write.dp is None else write.dp,
        zero_stage=int(stage) if write.zero_stage is None and stage.isdigit() else write.zero_stage,
    )


def _shown_step(path: Path) -> TrainerStep | None:
    """The step of several models that ``--like`` names, or the newest of such a run's; None where it is one model."""
    step = step_at(path)
    if (
        step is None and (run := run_at(path)) is not None and run.found
    ):  # roles lie beside each other, each with its steps
        return run.found[max(run.found)]
    return step


def like_of(options: ConvertOptions, role: str) -> ConvertOptions:
    """The options with that role's model, where ``--like`` is a step of several.

    Args:
        options: What somebody asked for.
        role: Of a model.
    """
    if options.write.like is None:
        return options
    step = _shown_step(Path(options.write.like).expanduser())
    place = None if step is None else step.models().get(role)
    return options if place is None else replace(options, write=replace(options.write, like=str(place)))


def _as_shown(options: ConvertOptions, trainer: Trainer, shown: TrainerRun | None) -> ConvertOptions:
    """The same for a trainer whose files beside its models are those of the run that ``--like`` names.

    Raises:
        UsageError: It is no run of that trainer's.
    """
    if shown is None or shown.trainer is not trainer:
        raise UsageError(
            f"--like {options.write.like}: is no run of {trainer.title}, and what it has beside its models is wanted"
        )
    found = resolved(replace(options, write=replace(options.write, like=None)))
    return replace(found, write=replace(found.write, run_of=replace(found.write.run_of, shown=str(shown.root))))


def _shown_by(options: ConvertOptions, trainer: Trainer) -> str:
    """The step of a trainer's own run that ``--like`` names, or in which the model lies that it names; empty where none was given.

    Raises:
        UsageError: It is none of that trainer's.
    """
    if options.write.like is None:
        return ""
    path = Path(options.write.like).expanduser()
    step = next((found for one in (path, path.parent) if (found := step_at(one)) is not None), None)
    if step is None or step.trainer is not trainer:
        raise UsageError(
            f"--like {options.write.like}: is no step of a run of {trainer.title}, which shows what is wanted beside its models"
        )
    return str(step.folder)


def _like(options: ConvertOptions, trainer: Trainer) -> ReadablePath | None:
    """The model in Megatron's format that shows where the run has its parts; None where there is none."""
    if options.write.like is None or not trainer.parts:
        return None
    step = _shown_step(given := Path(options.write.like).expanduser())
    place = given if step is None else next(iter(step.models().values()), given)
    path = checkpoint_path(place, follow_links=options.read.follow_links)
    found = format_at(path) if path.is_dir() else None
    return path if found is not None and Takes.MEGATRON in found.takes else None


def as_step(source: Subject, trainer: Trainer, options: ConvertOptions) -> Subject:
    """The source as a step of those roles that a trainer has: a lone checkpoint as one of its role.

    Args:
        source: What is converted.
        trainer: Whose run it goes into.
        options: How.

    Raises:
        UsageError: The trainer has no model of that role, or of none that the step has.
        CheckpointError: A lone checkpoint cannot be opened.
    """
    source = as_whole(source)
    if not source.alone:
        like = None if options.write.like is None else checkpoint_path(Path(options.write.like).expanduser())
        shown = (
            roles_in(like) if like is not None and trainer.several and like.is_dir() else []
        )  # by number, as the run has them
        roles = sorted(source.models, key=lambda role: shown.index(role) if role in shown else len(shown))
        models = {role: source.models[role] for role in roles if trainer.takes(role, options.to)}
        models = models or ({**source.models} if trainer.is_iteration and len(source.models) == 1 else {})
        if not models:
            raise UsageError(
                f"{source.folder}: has models of the roles {', '.join(source.models)}; {trainer.title} has {', '.join(trainer.roles)}"
            )
        return replace(source, models=models)
    ((name, folder),) = source.models.items()
    role = name or next(iter(trainer.roles))
    if not trainer.takes(role, options.to) and not trainer.is_iteration:  # whose folder is of any one model
        raise UsageError(f"--role {role}: {trainer.title} has models of the roles {', '.join(trainer.roles)}")
    opened = open_checkpoint(folder, replace(source.options, optimizer=False))
    step = opened.state.iteration
    if not step:  # where nothing else says it, the optimizer counts the steps
        step = open_checkpoint(folder, source.options).state.iteration
    counted = counted_by(opened.state.other) if format_named(opened.format).tags else None
    if counted is not None and counted[0] is not trainer:  # the tag is DeepSpeed's own count, of updates
        step = counted[1]
    return replace(source, models={role: folder}, step=step)


def shift_into(source: Subject, trainer: Trainer) -> int:
    """What is added to the number of a step that goes into a trainer's run: one of the two may number them from 0.

    Args:
        source: What is converted.
        trainer: Whose run it goes into.

    Raises:
        LayoutMismatch: The source has files of two trainers.
    """
    folder = next(iter(source.models.values()))
    found = step_at(folder) or run_at(folder)
    return (0 if found is None else found.trainer.ahead) - trainer.ahead


def beside(source: Subject, trainer: Trainer, left_out: Iterable[str]) -> BesideModels:
    """What goes along: the position in the data under the trainer's own name, and all else where the run was this trainer's before.

    Args:
        source: A step.
        trainer: Whose run it goes into.
        left_out: Roles of models that the trainer does not have.
    """
    found, before = BesideModels(), former_of(source)
    data = data_of_ours(source) if before is None else before.data
    for name in source.others:
        item = Item(Kind.FILE, name)
        as_it_was = before is trainer or _is_as_it_was(source, trainer, before, name, found)
        if name == data and wants_loader(trainer):
            add_data(found, source, name, trainer, as_it_was=as_it_was)
        elif as_it_was:
            found.files[name] = name
            found.report.add(Fate.KEPT, GO_ALONG.why.format(found=name), item)
        else:
            text = f"{name}: {trainer.title} has no place for it{instead_of_loader(trainer) if name == data else ''}"
            found.report.add(Fate.LOST, text, item)
    for name in _in_its_root(source):
        found.report.add(
            Fate.LOST,
            f"{name}: lies beside the steps of its run, where it stays; copy it, where the new one is to go on with it",
        )
    for role in left_out:
        text = f"the model of the role {role}: {trainer.title} has models of the roles {', '.join(trainer.roles)}"
        found.report.add(Fate.LOST, text)
    return found


def _in_its_root(source: Subject) -> list[str]:
    """Files of the whole run that lie beside a step which is its framework's own: a reference model."""
    folder = next(iter(source.models.values()))
    step = step_at(folder)
    if step is None:
        run = run_at(folder)
        step = None if run is None else next(iter(run.found.values()), None)
    names = () if step is None else (name for name in step.trainer.beside if "{" not in name)
    return [name for name in names if step is not None and is_there(beneath(step.folder.parent, name))]


def _is_as_it_was(source: Subject, trainer: Trainer, before: Trainer | None, name: str, found: BesideModels) -> bool:
    """Whether a file lies in a step of ours as the trainer's own run, of that step where it has but one, had it."""
    if not trainer.in_place:
        return before is None and name in trainer.marks
    return name in trainer.needs and name not in found.texts and trainer.numbered(source.folder) == source.step


def of_alone(options: ConvertOptions, source: Subject) -> ConvertOptions:
    """The options for a lone checkpoint, whose iteration becomes the number that everybody else says where it leaves Megatron's formats.

    Within them it stays as it is: what is only cut anew is still a rollout of its trainer's.

    Args:
        options: How it is converted.
        source: The checkpoint.
    """
    options = replace(options, read=source.options)
    found = None if Takes.MEGATRON in wanted_format(options).takes else step_at(source.folder) or run_at(source.folder)
    if found is None or not found.trainer.ahead:
        return options
    return replace(
        options, write=replace(options.write, run_of=replace(options.write.run_of, shift=found.trainer.ahead))
    )


def numbered(source: Subject, options: ConvertOptions, trainer: Trainer | None) -> tuple[Subject, ConvertOptions, int]:
    """The source as what it is where it goes, the options with the numbers that it has there, and how many steps are done.

    Args:
        source: What is converted.
        options: How.
        trainer: Whose run it goes into; None for a step of ours, or a lone checkpoint.

    Raises:
        CheckpointError: See :func:`as_step`.
    """
    step = source if trainer is None else as_step(source, trainer, options)
    run, done = options.write.run_of, step.step or 0
    run = replace(run, step=0 if step.alone or format_named(options.to).tags else done)
    if trainer is not None:
        number = step_into(step, trainer)
        run = replace(run, shift=shift_into(step, trainer), tag=run.tag.format(step=number))
        step, done = replace(step, step=number), number + trainer.ahead
    return step, replace(options, write=replace(options.write, run_of=run)), done


def values_of(found: BesideModels, trainer: Trainer, step: int, opened: Source) -> dict[str, object]:
    """What the trainer asks for among its first model's values, where the source has none of its own.

    Args:
        found: What goes along.
        trainer: Whose run it is.
        step: The number of the step.
        opened: The first model.
    """
    take_position(found, trainer, opened)
    known = {**known_of(trainer, step, opened.state.args), DATA: found.data or {}}
    if trainer.generators:
        family = ModuleState.of(opened)
        own = family.rng[0] if family is not None and family.rng else opened.state.other.get(RNG)
        states = own if isinstance(own, Mapping) and trainer.generators.keys() <= own.keys() else new_states(step, 1)[0]
        known[RANDOM] = {name: states[key] for key, name in trainer.generators.items()}
    there = opened.state.other
    others = counted_by(there) is not None and not trainer.asks.keys() <= there.keys()  # one name may be of two things
    missing = [key for key in trainer.asks if key not in there or others]
    if missing:
        unsaid = unsaid_of(opened.state.args) if "samples" in map(trainer.asks.get, missing) else ""
        found.report.add(
            Fate.DERIVED,
            f"{', '.join(missing)}: made for {trainer.title}, which asks for them{unsaid}",
        )
    return {key: known[trainer.asks[key]] for key in missing}


def step_into(source: Subject, trainer: Trainer) -> int:
    """The number that a step has in a trainer's run."""
    return max((source.step or 0) + shift_into(source, trainer), 0)


def taken_out(target: Target, trainer: Trainer) -> Mapping[str, ReadablePath]:
    """Take out of a target what lies beside an iteration's folder, which alone is published; the tracker is written at last.

    Args:
        target: Megatron's, with its tracker.
        trainer: Whose run it goes into.

    Returns:
        Files that are taken over, by where they lie in the run's root.
    """
    target.texts.pop(trainer.tracker, None)
    inside = f"{target.files[0].path.partition('/')[0]}/"
    return {name: target.carried.pop(name) for name in [*target.carried] if not name.startswith(inside)}


@contextmanager
def laid_beside(root: ReadablePath, outside: Mapping[str, ReadablePath], *, fsync: bool) -> Iterator[None]:
    """Lay what belongs beside an iteration before that is there: its trainer begins anew without, and says nothing.

    Args:
        root: The run's.
        outside: Files, by where they lie in it; what was not there before is taken away again where the iteration does not come.
        fsync: Whether each is on the disk then.

    Raises:
        UsageError: Another file lies there.
        StorageError: One cannot be written.
    """
    places, laid = {beneath(root, name): read_bytes(path, _LONGEST) for name, path in outside.items()}, []
    for place in filter(is_there, places):
        if read_bytes(place, _LONGEST) != places[place]:
            raise UsageError(f"{place}: is there, and is another one\nMove it away, or give the run a root of its own.")
    try:
        for place in [one for one in places if not is_there(one)]:
            laid.append(place)
            write_text(place, places[place], fsync=fsync)
        yield
    except BaseException:
        for place in filter(is_there, laid):
            remove_file(place)
        raise


def in_iteration(path: str) -> str:
    """A file's path in the folder of its iteration, by that in the root."""
    return path.partition("/")[2]


def track(root: ReadablePath, trainer: Trainer, step: int, *, fsync: bool) -> None:
    """Let the tracker in a run's root name a step, where it names no newer one.

    Raises:
        StorageError: It cannot be written.
    """
    if _names_before(root, trainer, step + 1):
        write_text(root / trainer.tracker, trainer.tracked.format(step=step), fsync=fsync)


def refuse_untracked(root: ReadablePath, trainer: Trainer, step: int) -> None:
    """Say of a step that is there already that the tracker does not name it yet: between the two a conversion may have been killed.

    Raises:
        UsageError: It does not.
    """
    if _names_before(root, trainer, step):
        raise UsageError(
            f"{root / trainer.folder_of(step)}: exists already, and {trainer.tracker} beside it names none as new: "
            f"who wrote it may have been killed\nGive --overwrite to write it again and have {trainer.title} go on from it."
        )


def _names_before(root: ReadablePath, trainer: Trainer, step: int) -> bool:
    """Whether a run has a tracker of its own, which names nothing, or a step before one."""
    if not trainer.tracker or trainer.by_role:  # there the formats' own writers do
        return False
    run = run_at(root)
    named = run.tracked() if run is not None else None
    return named is None or named < step
