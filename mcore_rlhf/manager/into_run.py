"""A step on its way into another trainer's run: which roles that has, where they lie, and what goes with them under which name.

All of it follows from the trainer's row in :mod:`mcore_rlhf.trainers`. What the trainer has no place for is lost by name; what it wants
and nobody has is made of what is known, and said.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from mcore_rlhf.core.account import Report
from mcore_rlhf.core.facts import Fate, Item, Kind
from mcore_rlhf.errors import CheckpointError, Unsupported, UsageError
from mcore_rlhf.families.module import ModuleState
from mcore_rlhf.families.option_types import Takes
from mcore_rlhf.families.options import ConvertOptions, RunOf
from mcore_rlhf.families.source import Source, StoredFile
from mcore_rlhf.families.trainer_files import ROWS, RunFiles
from mcore_rlhf.formats.registry import format_at, format_named, open_checkpoint
from mcore_rlhf.storage.dcp.writer import saved
from mcore_rlhf.storage.paths import ReadablePath
from mcore_rlhf.storage.patience import names_in
from mcore_rlhf.storage.pt import PtFile, read_pt
from mcore_rlhf.storage.urls import checkpoint_path, write_text
from mcore_rlhf.trainers.known import TRAINERS, trainer_named
from mcore_rlhf.trainers.table import STEP, Trainer

from .rlhf.data_state import WHERE
from .runs import run_at, step_at
from .subject import Subject, former_of

_DEGREES = ("tp", "pp", "vpp", "ep", "etp")
_LAYOUTS = (*_DEGREES, "pipeline_layout")
"""Options that mean a Megatron layout."""
_SAMPLES = "consumed_train_samples"
_STATEFUL, _DATA = "stateful", "data"
_COUNTERS = "trainer_state"
"""Under which key of client state the counters of transformers' Trainer travel."""
_LOADERS = ("_num_yielded", "_snapshot")
"""What a loader's state has, of one without workers and with. Source: torchdata 0.11.0, ``stateful_dataloader/stateful_dataloader.py``."""
_YIELDED = "_sampler_iter_yielded"
_SAMPLERS, _MAIN = ("_sampler_iter_state", "_index_sampler_state"), ("_snapshot", "_main_snapshot")
"""What it has of its sampler, and where that lies in one with workers. Source: the same."""


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
    like, write = _like(options, trainer), options.write
    degrees = {name: getattr(write, name) for name in _LAYOUTS}
    if like is not None and not any(degree is not None for degree in degrees.values()):
        parallel = open_checkpoint(like, options.read, partial=True).parallel
        degrees = {name: getattr(parallel, name) for name in _DEGREES}
        write = replace(write, **{"dp": parallel.dp, **degrees} if write.dp is None else degrees)
    megatron = any(degree is not None for degree in degrees.values())
    wanted = [name for name in trainer.formats if (Takes.MEGATRON in format_named(name).takes) == megatron]
    to = (wanted or [*trainer.formats])[0]
    parts = trainer.parts_like(like)
    run = RunOf(trainer.name, trainer.second_group, trainer.wants_schedule, parts, trainer.counts, trainer.strategy)
    return replace(options, to=to, trainer=trainer.name, write=replace(write, run_of=run))


def like_of_role(options: ConvertOptions, trainer: Trainer, role: str) -> ConvertOptions:
    """The options with the folder of a role of the step that ``--like`` names, where its trainer calls that otherwise.

    Args:
        options: How the role's model is converted.
        trainer: Whose run it goes into.
        role: The role.
    """
    shown = None if options.write.like is None else step_at(Path(options.write.like).expanduser())
    place = None if shown is None or shown.trainer is not trainer else shown.folder / (trainer.place_of(role) or role)
    if place is None or place.name == role or not place.is_dir():
        return options
    return replace(options, write=replace(options.write, like=str(place)))


def _like(options: ConvertOptions, trainer: Trainer) -> ReadablePath | None:
    """The model in Megatron's format that shows where the run has its parts; None where there is none."""
    if options.write.like is None or not trainer.parts:
        return None
    path = checkpoint_path(Path(options.write.like).expanduser(), follow_links=options.read.follow_links)
    found = format_at(path) if path.is_dir() else None
    return path if found is not None and Takes.MEGATRON in found.takes else None


@dataclass(slots=True)
class Beside:
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
    if not source.alone:
        models = {role: folder for role, folder in source.models.items() if trainer.place_of(role) is not None}
        if not models:
            raise UsageError(
                f"{source.folder}: has models of the roles {', '.join(source.models)}; {trainer.title} has {', '.join(trainer.roles)}"
            )
        return replace(source, models=models)
    ((name, folder),) = source.models.items()
    role = name or next(iter(trainer.roles))
    if trainer.place_of(role) is None:
        raise UsageError(f"--role {role}: {trainer.title} has models of the roles {', '.join(trainer.roles)}")
    step = open_checkpoint(folder, replace(source.options, optimizer=False)).state.iteration
    if not step:  # where nothing else says it, the optimizer counts the steps
        step = open_checkpoint(folder, source.options).state.iteration
    return replace(source, models={role: folder}, step=step)


def beside(source: Subject, trainer: Trainer, left_out: Iterable[str]) -> Beside:
    """What goes along: the position in the data under the trainer's own name, and all else where the run was this trainer's before.

    Args:
        source: A step.
        trainer: Whose run it goes into.
        left_out: Roles of models that the trainer does not have.
    """
    found, before = Beside(), former_of(source)
    data = _data_of_ours(source) if before is None else before.data
    for name in source.others:
        item = Item(Kind.FILE, name)
        if name == data and _wants_loader(trainer):
            _add_data(found, source, name, trainer)
        elif before is trainer or (before is None and name in trainer.marks):
            found.files[name] = name
            found.report.add(Fate.KEPT, f"{name}, byte for byte", item)
        else:
            text = f"{name}: {trainer.title} has no place for it{_instead(trainer) if name == data else ''}"
            found.report.add(Fate.LOST, text, item)
    for role in left_out:
        text = f"the model of the role {role}: {trainer.title} has models of the roles {', '.join(trainer.roles)}"
        found.report.add(Fate.LOST, text)
    return found


def _data_of_ours(source: Subject) -> str:
    """Where a step of ours says how far the data are: in our own place, or as the trainer had it from whose step it was made."""
    places = (WHERE, *(one.data for one in TRAINERS if one.data and not one.of_each_rank))
    return next((name for name in places if name in source.others), WHERE)


def _instead(trainer: Trainer) -> str:
    """What a trainer goes by that has no place for the loader's state."""
    if trainer.skips:
        return f"; when it resumes it passes over as many batches of its own order as {trainer.skips} counts steps"
    return "; its data begin anew, unless the script goes forward itself"


def _add_data(found: Beside, source: Subject, name: str, trainer: Trainer) -> None:
    """The state of a ``StatefulDataLoader``, as it is or out of our own file; no trainer goes on from our own sampler's."""
    item = Item(Kind.FILE, name)
    try:
        file = read_pt(source.folder, name, stubs=source.options.stubs)
        tree = file.materialize(file.tree)
    except CheckpointError as error:
        found.report.add(Fate.LOST, f"{name}: {error}", item)
        return
    if tree == {}:
        found.report.add(Fate.KEPT, f"{name}: is empty, so that data begin anew, as they do there", item)
        return
    own = name == WHERE and isinstance(tree, Mapping) and {"version", "kind", "state"} <= tree.keys()
    if own and tree["kind"] != _STATEFUL:
        found.report.add(
            Fate.LOST, f"{name}: the position of a sampler of ours, from which {trainer.title} cannot go on", item
        )
    elif not trainer.data:
        found.data = tree["state"] if own else tree
        found.goes_on(f"{name}, among the values of the first model", item)
    elif not own:
        found.files[trainer.data_file()] = name
        found.goes_on(f"{name}, byte for byte, as {trainer.data}", item)
    else:
        found.texts[trainer.data_file()] = saved(tree["state"], trainer.data_file())
        found.goes_on(f"the loader's state in {name}, as {trainer.data}", item)


def values_of(found: Beside, trainer: Trainer, opened: Source) -> dict[str, object]:
    """What the trainer asks for among its first model's values, where the source has none of its own.

    Args:
        found: What goes along.
        trainer: Whose run it is.
        opened: The first model.
    """
    take_position(found, trainer, opened)
    known = {**_known(opened.state.iteration, opened.state.args), _DATA: found.data or {}}
    missing = [key for key in trainer.asks if key not in opened.state.other]
    if missing:
        found.report.add(
            Fate.DERIVED,
            f"{', '.join(missing)}: made for {trainer.title}, which asks for them{_unsaid(opened.state.args)}",
        )
    return {key: known[trainer.asks[key]] for key in missing}


def _known(step: int, args: Mapping[str, object]) -> dict[str, object]:
    samples = args.get(_SAMPLES)
    return {"step": step, "samples": samples if isinstance(samples, int) else 0, "zero": 0}


def _unsaid(args: Mapping[str, object]) -> str:
    return "" if isinstance(args.get(_SAMPLES), int) else "; nothing says how many samples were consumed: 0"


def take_position(found: Beside, trainer: Trainer, opened: Source) -> None:
    """The loader's state out of a file beside the source's model (accelerate), as the trainer has it.

    Args:
        found: Gets it.
        trainer: Whose run it is.
        opened: The model; a file that is taken counts as opened from then on, so that every byte of it is checked.
    """
    if not _wants_loader(trainer) or _take_shares(found, trainer, opened):
        return
    row = next((row for row in ROWS if row.loader and row.format in _formats(opened)), None)
    if row is None or not (opened.root / row.loader).is_file():
        return
    name, told = row.loader, f"{trainer.title} begins its data anew"
    if wrong := _not_the_runs(opened, row):
        found.report.add(Fate.LOST, f"{name}: {wrong}; {told}")
        return
    try:
        file = read_pt(opened.root, name)
        position = file.materialize(file.tree)
        wrong = _unfit(position, [opened.state.iteration], opened.state.iteration) or _without_sampler(position)
        text = b"" if wrong or not trainer.data else saved(position, trainer.data_file())
    except CheckpointError as error:
        wrong = str(error)
    if wrong:
        found.report.add(Fate.LOST, f"{name}: {wrong}; {told}")
        return
    if trainer.data:
        found.texts[trainer.data_file()] = text
    else:
        found.data = position
    found.goes_on(f"{name}, {_as_what(trainer)}")
    _count_as_opened(opened, {name: file})


def _take_shares(found: Beside, trainer: Trainer, opened: Source) -> bool:
    """Take what the loader of each data-parallel rank has beside a model alone, as in verl's SFT; whether it is such a step."""
    step = step_at(opened.root)
    if step is None or not step.trainer.of_each_rank:
        return False
    found.ranks = opened.parallel.dp
    there = {*names_in(opened.root)}
    names = {rank: name for rank in range(found.ranks) if (name := step.trainer.data_file(rank)) in there}
    listed = ", ".join(names.values())
    files, wrong = dict[str, PtFile](), ""
    try:
        for name in names.values():
            files[name] = read_pt(opened.root, name)
            found.data = files[name].materialize(files[name].tree)
            wrong = wrong or _unfit(found.data, [opened.state.iteration], opened.state.iteration)
    except CheckpointError as error:
        wrong = str(error)
    if trainer.data or wrong or found.ranks != 1:
        found.data = None
    if wrong:
        found.report.add(Fate.LOST, f"{listed}: {wrong}; {trainer.title} begins its data anew")
    elif names:
        if trainer.data:
            found.files |= {trainer.data_file(rank): name for rank, name in names.items()}
        found.goes_on(f"{listed}, {_as_what(trainer)}")
        _count_as_opened(opened, files)
    return True


def _count_as_opened(opened: Source, files: Mapping[str, PtFile]) -> None:
    opened.files = (*opened.files, *(StoredFile.of_zip(name, file.directory) for name, file in files.items()))
    if opened.carried is not None:
        left = tuple(item for item in opened.carried.found if item.path not in files)
        opened.carried = replace(opened.carried, found=left)


def _as_what(trainer: Trainer) -> str:
    return f"as {trainer.data}" if trainer.data else "among the values of the first model"


def settle_data(found: Beside, trainer: Trainer, dp: int) -> None:
    """Say what becomes of the loader's state: it goes on where as many loaders share the data as before.

    Args:
        found: What goes along.
        trainer: Whose run it goes into.
        dp: Data-parallel ranks of the new run.
    """
    if found.said is None:
        return
    (text, about), wanted = found.said, dp if trainer.of_each_rank else 1
    if found.ranks == wanted:
        found.report.add(Fate.KEPT, f"{text}: for the same data in the same order", *about)
        return
    for kept in (found.files, found.texts):
        for rank in range(found.ranks):
            kept.pop(trainer.data_file(rank), None)
    shares = f"counts the shares of {found.ranks} data-parallel ranks, and {trainer.title} has {wanted} there"
    found.report.add(Fate.LOST, f"{text}: {shares}; its data begin anew", *about)


def add_beginning(found: Beside, trainer: Trainer) -> None:
    """An empty state, with which a ``StatefulDataLoader`` begins anew, for a trainer that stops where it has none.

    Source: torchdata 0.11.0, ``stateful_dataloader/stateful_dataloader.py`` (``load_state_dict``).

    Args:
        found: Gets it, where nothing else says how far the data are.
        trainer: Whose run it goes into.
    """
    name = trainer.data_file()
    if trainer.opens_data and name not in (*found.files, *found.texts):
        found.texts[name] = saved({}, name)
        found.report.add(
            Fate.DERIVED, f"{name}: empty, since {trainer.title} opens it without a look; its data begin anew"
        )


def _not_the_runs(opened: Source, row: RunFiles) -> str:
    """Why the one file is not how far the whole run is; empty where it is."""
    stem, _, ending = row.loader.rpartition(".")
    if more := [path.name for path in opened.root.glob(f"{stem}_*.{ending}")]:
        return f"lies beside {', '.join(sorted(more))}, and nothing says which loader gave the prompts"
    ranks = len(ModuleState.needed(opened).rng)
    if ranks == 1:
        return ""
    return (
        f"is of one of {ranks} ranks, each of which had a share of the data"
        if ranks
        else "nothing says how many ranks had such a loader"
    )


def add_position(found: Beside, trainer: Trainer, opened: Source) -> None:
    """The loader's state as the trainer's own file, where the source's trainer has it among its first model's values (OpenRLHF).

    Args:
        found: Gets it; a file of the source goes before.
        trainer: Whose run it is.
        opened: The first model.
    """
    if not trainer.data or trainer.data_file() in (*found.files, *found.texts):
        return
    state = opened.state
    asking = ((trained, name) for trained in TRAINERS for name, what in trained.asks.items() if what == _DATA)
    for former, key in asking:
        position = state.other.get(key)
        if not position:  # a run of one that has no loader, or had none before
            continue
        steps = [state.other.get(name) for name, what in former.asks.items() if what == STEP]
        if wrong := _unfit(position, steps, state.iteration):
            found.report.add(Fate.LOST, f"{key}: {wrong}; {trainer.title} begins its data anew")
            continue
        try:
            found.texts[trainer.data_file()] = saved(position, trainer.data_file())
        except CheckpointError as error:
            found.report.add(Fate.LOST, f"{key}: {error}")
            continue
        found.goes_on(f"{key}, among the values of the first model, as {trainer.data}")
        return


def say_what_was_counted(found: Beside, trainer: Trainer, opened: Source) -> None:
    """Say that data begin anew where the source's trainer has no more than a count of its steps, and the other wants a loader's state.

    Args:
        found: Told.
        trainer: Whose run it goes into.
        opened: The first model.
    """
    if not _wants_loader(trainer) or found.data is not None or trainer.data_file() in (*found.files, *found.texts):
        return
    former = next((one for one in TRAINERS if one.skips and not _formats(opened).isdisjoint(one.formats)), None)
    if former is None:
        return
    counters = opened.state.other.get(_COUNTERS)
    epoch = counters.get("epoch") if isinstance(counters, Mapping) else None
    far = f"step {opened.state.iteration}" + (f", epoch {epoch:g}" if isinstance(epoch, int | float) else "")
    text = f"the place in the data: {former.title} counts batches by its steps alone ({far}); {trainer.title} begins its data anew"
    found.report.add(Fate.LOST, text)


def _without_sampler(position: object) -> str:
    """Why torchdata's loader would begin anew from a state, and say nothing: it counts batches, and its sampler said nothing."""
    inner = position
    for key in _MAIN:
        inner = inner.get(key, inner) if isinstance(inner, Mapping) else inner
    if not isinstance(inner, Mapping) or any(inner.get(key) is not None for key in _SAMPLERS):
        return ""
    count = next((inner[key] for key in (_YIELDED, _LOADERS[0]) if key in inner), 0)
    if isinstance(count, int) and not count:
        return ""
    return f"counts {count!r:.20} batches, and has no state of a sampler, without which torchdata's loader begins anew"


def _wants_loader(trainer: Trainer) -> bool:
    return bool(trainer.data) or _DATA in trainer.asks.values()


def _formats(opened: Source) -> set[str]:
    """What a model is in, and what the files beside it are of."""
    family = ModuleState.of(opened)
    return {opened.format} if family is None or family.beside is None else {opened.format, family.beside.format}


def _unfit(position: object, steps: list[object], step: int) -> str:
    """Why what should be the state of a ``StatefulDataLoader`` at a step is not; empty where it is."""
    if not isinstance(position, Mapping) or position.keys().isdisjoint(_LOADERS):
        return f"has none of {', '.join(_LOADERS)}, which a StatefulDataLoader of torchdata has"
    if steps != [step]:  # values that were carried through a run which went on
        return f"is of step {', '.join(map(str, steps))}, and the model of step {step}"
    return ""


def add_counters(found: Beside, trainer: Trainer, step: int, args: Mapping[str, object]) -> None:
    """The file without which the trainer passes over a step, where the source has none.

    Args:
        found: Gets it.
        trainer: Whose run it is.
        step: The step's number.
        args: The arguments of the first model, which may say how many samples were consumed.
    """
    wanted = trainer.counters
    if wanted is None or not wanted.fields or wanted.file in found.files:
        return
    known = _known(step, args)
    fields = {name: known[what] for name, what in wanted.fields.items()}
    of_torch = wanted.file.endswith(".pt")
    found.texts[wanted.file] = saved(fields, wanted.file) if of_torch else json.dumps(fields).encode()
    found.report.add(
        Fate.DERIVED, f"{wanted.file}: step {step}{_unsaid(args) if 'samples' in wanted.fields.values() else ''}"
    )


def track(root: ReadablePath, trainer: Trainer, step: int, *, fsync: bool) -> None:
    """Let the tracker in a run's root name a step, where it names no newer one.

    Raises:
        StorageError: It cannot be written.
    """
    if not trainer.tracker or trainer.by_role:  # there the formats' own writers do
        return
    run = run_at(root)
    named = run.tracked() if run is not None else None
    if named is None or named <= step:
        write_text(root / trainer.tracker, trainer.tracked.format(step=step), fsync=fsync)
