"""How far the data are, in a step on its way into another trainer's run: out of whatever says it, into what the trainer goes on from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mcore_rlhf.core.facts import Fate, Item, Kind
from mcore_rlhf.errors import CheckpointError, Unsupported
from mcore_rlhf.families.module import ModuleState
from mcore_rlhf.families.source import Source
from mcore_rlhf.families.trainer_files import ROWS, RunFiles
from mcore_rlhf.formats.carried import GO_ALONG
from mcore_rlhf.storage import reading
from mcore_rlhf.storage.dcp.writer import saved
from mcore_rlhf.storage.patience import names_in
from mcore_rlhf.storage.pickling import pickle_tree
from mcore_rlhf.storage.pt import PtFile, read_pt
from mcore_rlhf.storage.record_file import StoredFile
from mcore_rlhf.storage.unpickle import unpickle
from mcore_rlhf.trainers.known import TRAINERS
from mcore_rlhf.trainers.table import STEP, Trainer
from mcore_rlhf.trainers.torchdata import astray

from .rlhf.data_state import WHERE
from .run_sides import BesideModels
from .runs import step_at
from .subject import Subject

DATA = "data"
_STATEFUL = "stateful"
_COUNTERS = "trainer_state"
"""Under which key of client state the counters of transformers' Trainer travel."""
_LOADERS = ("_num_yielded", "_snapshot")
"""What a loader's state has, of one without workers and with. Source: torchdata 0.11.0, ``stateful_dataloader/stateful_dataloader.py``."""
_YIELDED = "_sampler_iter_yielded"
_SAMPLERS, _MAIN = ("_sampler_iter_state", "_index_sampler_state"), ("_snapshot", "_main_snapshot")
"""What it has of its sampler, and where that lies in one with workers. Source: the same."""


def data_of_ours(source: Subject) -> str:
    """Where a step of ours says how far the data are: in our own place, or as the trainer had it from whose step it was made."""
    places = (WHERE, *(one.data for one in TRAINERS if one.data and not one.of_each_rank))
    return next((name for name in places if name in source.others), WHERE)


def instead_of_loader(trainer: Trainer) -> str:
    """What a trainer goes by that has no place for the loader's state."""
    if trainer.skips:
        return f"; when it resumes it passes over as many batches of its own order as {trainer.skips} counts steps"
    return "; its data begin anew, unless the script goes forward itself"


def add_data(found: BesideModels, source: Subject, name: str, trainer: Trainer, *, as_it_was: bool) -> None:
    """The state of a ``StatefulDataLoader``, as it is or out of our own file; no trainer goes on from our own sampler's.

    Source: AReaL 1.0.4, ``areal/utils/recover.py`` (``RecoverInfo.load``: of another number of shares it begins everything anew, with a
    warning).

    Args:
        found: Gets it.
        source: A step.
        name: The file that has it there.
        trainer: Whose run it goes into.
        as_it_was: Whether it is this trainer's own file, of this step.
    """
    item = Item(Kind.FILE, name)
    try:
        state = _state_in(source, name)
        if wrong := astray(state):
            found.report.add(Fate.NOTE, f"{name}: the loader's state contradicts itself: {wrong}")
        shares = state if _is_pickle(name) and isinstance(state, list) else None
        if state == {}:
            found.report.add(Fate.KEPT, f"{name}: is empty, so that data begin anew, as they do there", item)
            return
        if as_it_was and _is_pickle(name):
            found.files[name], found.ranks = name, 0 if shares is None else len(shares)
            found.goes_on(GO_ALONG.why.format(found=name), item)
            return
        loaders = name == WHERE and isinstance(state, Mapping) and {"version", "kind", "state"} <= state.keys()
        if loaders and state["kind"] != _STATEFUL:
            text = f"{name}: the position of a sampler of ours, from which {trainer.title} cannot go on"
            found.report.add(Fate.LOST, text, item)
            return
        if loaders:
            state = state["state"]
        elif _is_pickle(name):
            state = _alone(state if shares is None else shares)
        elif trainer.data and not _is_pickle(trainer.data):
            found.files[trainer.data_file()] = name
            found.goes_on(f"{GO_ALONG.why.format(found=name)}, as {trainer.data}", item)
            return
        _give(found, trainer, state)
    except CheckpointError as error:
        found.report.add(Fate.LOST, f"{name}: {error}; {trainer.title} begins its data anew", item)
        return
    found.goes_on(f"the loader's state in {name}, {_as_what(trainer)}", item)


def _give(found: BesideModels, trainer: Trainer, state: object) -> None:
    """The state of a loader where the trainer has it, in the trainer's own form.

    Raises:
        Unsupported: A trainer that pickles it cannot go on from such a state: its samplers have no generators.
    """
    if not trainer.data:
        found.data = state
    elif not _is_pickle(trainer.data):
        found.texts[trainer.data_file()] = saved(state, trainer.data_file())
    elif wrong := _unfit(state, [0], 0):
        raise Unsupported(wrong)
    elif (pickled := pickle_tree(state, trainer.data)).records:
        raise Unsupported("has tensors, as a sampler with a generator of its own has")
    else:
        found.texts[trainer.data], found.ranks = pickled.data, 0


def _alone(shares: object) -> object:
    """The state of the one loader of a run.

    Raises:
        Unsupported: There were several, or it does not say enough.
    """
    state, *more = shares if isinstance(shares, list) else [shares]
    if more:
        raise Unsupported(f"counts the shares of {1 + len(more)} ranks")
    if wrong := _without_sampler(state):
        raise Unsupported(wrong)
    return state


def _is_pickle(name: str) -> bool:
    return name.endswith(".pkl")


def _state_in(source: Subject, name: str) -> Any:
    """The state of a loader, or of several, that a file holds; nothing of it is run."""
    if _is_pickle(name):
        return unpickle(reading.read_bytes(source.folder / name), str(source.folder / name), source.options.stubs)
    file = read_pt(source.folder, name, stubs=source.options.stubs)
    return file.materialize(file.tree)


def take_position(found: BesideModels, trainer: Trainer, opened: Source) -> None:
    """The loader's state out of a file beside the source's model (accelerate), as the trainer has it.

    Args:
        found: Gets it.
        trainer: Whose run it is.
        opened: The model; a file that is taken counts as opened from then on, so that every byte of it is checked.
    """
    if not wants_loader(trainer) or _take_shares(found, trainer, opened):
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
        if wrong := _unfit(position, [opened.state.iteration], opened.state.iteration) or _without_sampler(position):
            raise Unsupported(wrong)
        _give(found, trainer, position)
    except CheckpointError as error:
        found.report.add(Fate.LOST, f"{name}: {error}; {told}")
        return
    found.goes_on(f"{name}, {_as_what(trainer)}")
    _count_as_opened(opened, {name: file})


def _take_shares(found: BesideModels, trainer: Trainer, opened: Source) -> bool:
    """Take what the loader of each data-parallel rank has beside a model alone, as in verl's SFT; whether it is such a step."""
    step = step_at(opened.root)
    if step is None or not step.trainer.of_each_rank:
        return False
    found.ranks = opened.parallel.dp
    there = {*names_in(opened.root)}
    names = {rank: name for rank in range(found.ranks) if (name := step.trainer.data_file(rank)) in there}
    listed, files, states = ", ".join(names.values()), dict[str, PtFile](), list[object]()
    try:
        for name in names.values():
            files[name] = read_pt(opened.root, name)
            states.append(files[name].materialize(files[name].tree))
            if wrong := _unfit(states[-1], [opened.state.iteration], opened.state.iteration):
                raise Unsupported(wrong)
        if names and _is_pickle(trainer.data):
            _give(found, trainer, _alone(states))
    except CheckpointError as error:
        found.report.add(Fate.LOST, f"{listed}: {error}; {trainer.title} begins its data anew")
        return True
    if not trainer.data and found.ranks == len(states) == 1:
        (found.data,) = states
    elif trainer.data and not _is_pickle(trainer.data):
        found.files |= {trainer.data_file(rank): name for rank, name in names.items()}
    if names:
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


def settle_data(found: BesideModels, trainer: Trainer, dp: int) -> None:
    """Say what becomes of the loader's state: it goes on where as many loaders share the data as before.

    Args:
        found: What goes along.
        trainer: Whose run it goes into.
        dp: Data-parallel ranks of the new run.
    """
    if found.said is None:
        return
    (text, about), wanted = found.said, dp if trainer.shares_data else 1
    if found.ranks in (wanted, 0):
        found.report.add(Fate.KEPT, f"{text}: for the same data in the same order", *about)
        return
    for kept in (found.files, found.texts):
        for rank in range(max(found.ranks, 1)):
            kept.pop(trainer.data_file(rank), None)
    shares = f"counts the shares of {found.ranks} data-parallel ranks, and {trainer.title} has {wanted} there"
    found.report.add(Fate.LOST, f"{text}: {shares}; its data begin anew", *about)


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


def add_position(found: BesideModels, trainer: Trainer, step: int, opened: Source) -> None:
    """The loader's state as the trainer's own file, where the source's trainer has it among its first model's values (OpenRLHF).

    Args:
        found: Gets it; a file of the source goes before.
        trainer: Whose run it is.
        step: The number of the step.
        opened: The first model.
    """
    if not trainer.data or trainer.data_file() in (*found.files, *found.texts):
        return
    state = opened.state
    asking = ((trained, name) for trained in TRAINERS for name, what in trained.asks.items() if what == DATA)
    for former, key in asking:
        position = state.other.get(key)
        if not position:  # a run of one that has no loader, or had none before
            continue
        steps = [state.other.get(name) for name, what in former.asks.items() if what == STEP]
        if wrong := _unfit(position, steps, step):
            found.report.add(Fate.LOST, f"{key}: {wrong}; {trainer.title} begins its data anew")
            continue
        try:
            _give(found, trainer, position)
        except CheckpointError as error:
            found.report.add(Fate.LOST, f"{key}: {error}; {trainer.title} begins its data anew")
            continue
        found.goes_on(f"{key}, among the values of the first model, as {trainer.data}")
        return


def say_what_was_counted(found: BesideModels, trainer: Trainer, opened: Source) -> None:
    """Say that data begin anew where the source's trainer has no more than a count of its steps, and the other wants a loader's state.

    Args:
        found: Told.
        trainer: Whose run it goes into.
        opened: The first model.
    """
    if not wants_loader(trainer) or found.data is not None or trainer.data_file() in (*found.files, *found.texts):
        return
    former = next((one for one in TRAINERS if one.skips and not _formats(opened).isdisjoint(one.formats[:1])), None)
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


def wants_loader(trainer: Trainer) -> bool:
    """Whether a trainer goes on from the state of a loader."""
    return bool(trainer.data) or DATA in trainer.asks.values()


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
