"""What a trainer would go on with, if it were started on a folder: which step it takes, and what its loader makes of each thing.

The rows are :mod:`mcore_rlhf.trainers.loaders`'; here a folder is looked at as they ask. Nothing of a trainer is imported, and no
tensor read.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from math import prod

from mcore_rlhf.core.facts import Kind
from mcore_rlhf.errors import CheckpointError, Incomplete, NotACheckpoint, Unportable, UsageError, headline
from mcore_rlhf.families.fsdp.groups import left_frozen
from mcore_rlhf.families.inventory import inventory_of
from mcore_rlhf.families.megatron.state import MegatronState
from mcore_rlhf.families.module import ModuleState
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.families.sidecar import passed_over
from mcore_rlhf.formats.registry import is_model, open_without_manifest, roles_in
from mcore_rlhf.models.spec import OF_WRAPPER
from mcore_rlhf.storage import reading
from mcore_rlhf.storage.dcp import METADATA_FILE
from mcore_rlhf.storage.dcp.folder import object_in
from mcore_rlhf.storage.dcp.metadata import read_metadata
from mcore_rlhf.storage.dcp.rankfile import read_rank_file
from mcore_rlhf.storage.manifest import STEP_MANIFEST
from mcore_rlhf.storage.paths import ReadablePath, absolute, beneath, files_below
from mcore_rlhf.storage.patience import is_there, may_be_folder, names_in
from mcore_rlhf.storage.pt import read_pt
from mcore_rlhf.storage.publish import MANIFEST_NAME
from mcore_rlhf.storage.record_file import StoredFile
from mcore_rlhf.storage.unpickle import unpickle
from mcore_rlhf.suggestions import FORMATS, did_you_mean, same
from mcore_rlhf.trainers.known import called_so
from mcore_rlhf.trainers.loaders import deepspeed
from mcore_rlhf.trainers.loaders.known import LOADERS
from mcore_rlhf.trainers.resuming import INSIDE, Held, Loader, Outcome, Prospect, Seen, Settings
from mcore_rlhf.trainers.table import HERE, Trainer
from mcore_rlhf.trainers.torchdata import astray
from mcore_rlhf.verify.audit import misplaced
from mcore_rlhf.verify.itself import wrong_with

from .runs import counted_step, meant_below, run_at, step_at

_OWN_ARGUMENTS = "training_args.bin"
"""The pickled arguments that transformers' Trainer was given; its loader does not look at them."""
_VERSION = re.compile(r"[0-9A-Za-z][\w.+-]{0,63}", re.ASCII)
_DEPTH = 6
"""``optimizer_state_dict/base_optimizer_state/param_groups/0/params/0``."""
_PLAIN_PICKLE = b"\x80"
"""A pickle without a zip round it begins so, of any protocol from 2 on."""
_NUMBER = re.compile(r"\d{1,18}", re.ASCII)
_LOOKED_INTO = 4096
"""Files of a folder that are looked into; of those after them only the names are asked."""
_OURS = frozenset({MANIFEST_NAME, STEP_MANIFEST})


def loader_named(given: str) -> tuple[Loader, str]:
    """The loader that is meant, and the version that was asked for; empty where none was.

    Args:
        given: ``NAME`` or ``NAME@VERSION``.

    Raises:
        UsageError: There are no rows of such a trainer, or that is no version.
    """
    name, at, version = given.partition("@")
    by_name = {called: one for one in LOADERS for called in (one.trainer.name, *one.others)}
    plain = name.strip().lower().replace("_", "-")
    found = by_name.get(plain) or by_name.get(same(plain, by_name, FORMATS) or "")
    if found is None:
        known = [one.trainer.name for one in LOADERS]
        raise UsageError(f"unknown trainer {name!r}{did_you_mean(name, by_name, FORMATS)}\nKnown: {', '.join(known)}")
    if at and not _VERSION.fullmatch(version):
        raise UsageError(f"{given!r}: expected NAME@VERSION, such as {found.trainer.name}@{found.version}")
    return found, version


@dataclass(frozen=True, slots=True)
class Taken:
    """The step that a trainer takes.

    Args:
        folder: It; None where it takes none, and training begins anew.
        why: What makes it so.
        places: Role → the model's folder.
        stops: Whether it takes none because it ends with an error as it looks for one.
    """

    folder: ReadablePath | None
    why: str
    places: dict[str, ReadablePath] = field(default_factory=dict)
    stops: bool = False


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a trainer would go on with.

    Args:
        loader: Whose rows.
        taken: The step.
        roles: Role → what becomes of each thing.
        notes: What limits that.
        doubtful: Roles of which nothing seems lost, and whose model no reader here can open: whether its own loader can, nobody knows.
        contradicts: What two places of the step say otherwise, of which the loader takes one.
    """

    loader: Loader
    taken: Taken
    roles: dict[str, list[Prospect]]
    notes: tuple[str, ...] = ()
    doubtful: tuple[str, ...] = ()
    contradicts: tuple[str, ...] = ()

    @property
    def resumes(self) -> bool:
        """Whether everything goes on, as far as can be told, and as one thing says it."""
        losses = (one.row.outcome.is_loss for prospects in self.roles.values() for one in prospects)
        return self.taken.folder is not None and not (self.doubtful or self.contradicts or any(losses))

    @property
    def stops(self) -> bool:
        """Whether the loader stops with an error."""
        refused = (one.row.outcome is Outcome.REFUSED for prospects in self.roles.values() for one in prospects)
        return self.taken.stops or any(refused)


def forecast(path: ReadablePath, loader: Loader, settings: Settings, world: int | None = None) -> Forecast:
    """Say what a trainer would go on with.

    Args:
        path: The root of its run, or a step.
        loader: The trainer's.
        settings: Its configuration.
        world: Ranks that are to load; None for as many as saved.

    Raises:
        NotACheckpoint: The path does not exist, or nothing in it is a step of that trainer's.
    """
    path = absolute(path)
    if not path.is_dir():
        raise NotACheckpoint(f"{path}: " + ("expected a folder, found a file" if path.exists() else "no such folder"))
    path = _root_in(path, loader.trainer)
    taken = take(path, loader, settings)
    roles: dict[str, list[Prospect]] = {}
    notes, doubtful, contradicts = list[str](), list[str](), _otherwise(path, taken, loader.trainer.data_file())
    for number, (role, place) in enumerate(taken.places.items()):
        seen = _seen(loader.trainer, role, place, taken.folder or path, settings, world)
        found = loader.prospects(seen)
        roles[role] = [one for one in found if number == 0 or one.thing not in loader.once]
        contradicts += [f"{role}: {text}" if role else text for text in seen.held.contradicts]
        if unknown := seen.held.problem or seen.held.unread:
            notes.append(
                f"{role or 'the model'} cannot be opened{'' if seen.held.problem else ' with its optimizer'}: {unknown}"
            )
            is_said = seen.held.unportable or loader.knows(seen) or any(one.row.outcome.is_loss for one in roles[role])
            doubtful += [] if is_said else [role]
    return Forecast(loader, taken, roles, tuple(notes), tuple(doubtful), tuple(contradicts))


def _otherwise(path: ReadablePath, taken: Taken, data: str) -> list[str]:
    """What the files of the step that is taken say of its number, and its folder's name does not; and two places in the data."""
    if taken.folder is None:
        return []
    found, run = step_at(taken.folder), run_at(path)
    steps = [found] if found is not None else [*run.found.values()] if run is not None and run.trainer.by_role else []
    meant = (
        one
        for one in steps
        if found is not None or any(place in one.places.values() for place in taken.places.values())
    )
    said = [text for one in meant for text in one.contradictions()]
    with suppress(CheckpointError, OSError):  # what cannot be read, a row says
        if data and is_there(taken.folder / data) and (wrong := astray(read_pt(taken.folder, data).tree)):
            said.append(f"{data}: {wrong}")
    return [text.replace(f"{taken.folder}/", "") for text in said]


def forecast_for_its_writer(path: ReadablePath) -> Forecast | None:
    """What the trainer that wrote a run, or a step, would go on with, by its own defaults; None where no loader's rows speak of such.

    Args:
        path: Any folder.

    Raises:
        CheckpointError: It has steps of two trainers.
    """
    found = step_at(path) or run_at(path)
    by_name = {one.trainer.name: one for one in LOADERS}
    loader = by_name.get(found.trainer.name) if found is not None else None
    if found is None and is_there(path / deepspeed.TRAINER.tracker):
        written = any(deepspeed.TRAINER.wrote(path / name) for name in names_in(path))
        loader = by_name[deepspeed.TRAINER.name] if written else None
    return None if loader is None else forecast(path, loader, Settings())


def take(path: ReadablePath, loader: Loader, settings: Settings) -> Taken:
    """The step that a trainer takes of a folder.

    Raises:
        NotACheckpoint: Nothing in it is a step of that trainer's.
    """
    trainer = loader.trainer
    if trainer.by_role:
        return _taken_by_role(path, trainer)
    if _is_step(path, trainer):
        return Taken(path, "named", _places(path, trainer))
    taken = _of_root(path, loader, settings)
    if taken.folder is None and not taken.stops and not _holds_steps(path, trainer):
        hint = meant_below(path, lambda one: _holds_steps(_root_in(one, trainer), trainer) or trainer.wrote(one)) or (
            "Give the root of its run, or a step's folder; mcore-rlhf inspect says what else it may be."
        )
        raise NotACheckpoint(
            f"{path}: holds no step of {trainer.title}, such as {trainer.folder_of(100) or trainer.marks[0]}\n{hint}"
        )
    return taken if taken.folder is None else replace(taken, places=_places(taken.folder, trainer))


def _is_step(path: ReadablePath, trainer: Trainer) -> bool:
    """Whether a folder is a step and no root: by its name, even where a file that marks one is gone, or by what is in it."""
    if trainer.step_of(path.name) is not None:
        return True
    return not _holds_steps(path, trainer) and (trainer.wrote(path) or (trainer.alone and is_model(path)))


def _root_in(path: ReadablePath, trainer: Trainer) -> ReadablePath:
    """The run's root in a folder that its trainer was given, or the path itself."""
    inner = path / trainer.within
    above = trainer.within and trainer.step_of(path.name) is None and not _holds_steps(path, trainer)
    return inner if above and inner.is_dir() and _holds_steps(inner, trainer) else path


def _holds_steps(path: ReadablePath, trainer: Trainer) -> bool:
    named = any(trainer.step_of(name) is not None for name in names_in(path))
    return named or any(is_there(path / name) for name in (trainer.tracker, trainer.counted) if name)


def _named_in(loader: Loader, settings: Settings) -> str:
    """The step that the configuration names: a number, or the end of a path; empty where it does not, or says which by a word."""
    found = str(settings.get(*loader.named) or "").rstrip("/").rpartition("/")[2] if loader.named else ""
    return found if loader.trainer.step_of(found) is not None or _NUMBER.fullmatch(found) else ""


def _of_root(root: ReadablePath, loader: Loader, settings: Settings) -> Taken:
    """The folder of a root that a trainer takes."""
    trainer, named = loader.trainer, _named_in(loader, settings)
    if named:
        folder = root / (trainer.folder_of(int(named)) if named.isdecimal() else named)
        if not folder.is_dir():
            return Taken(None, f"the configuration names {folder.name}, which is not there", stops=True)
        return Taken(folder, "the configuration names it")
    if trainer.resumes == "tracker":
        taken = _tracked(root, trainer)
        lacking = [
            key
            for key in loader.counted
            if is_there(root / trainer.counted) and key not in _keys_in(root, trainer.counted)
        ]
        if lacking and not taken.stops:
            return Taken(None, f"{trainer.counted} has no {lacking[0]}: it cannot be read", stops=True)
        why = (
            loader.stops_at(_number_in(root, trainer), names_in(root), settings)
            if is_there(root / trainer.tracker)
            else ""
        )
        return Taken(None, why, stops=True) if why else taken
    if trainer.resumes == "highest":
        return _highest(root, loader)
    numbers = {number: name for name in sorted(names_in(root)) if (number := trainer.step_of(name)) is not None}
    if not numbers:
        return Taken(None, "no step is there")
    return Taken(root / numbers[max(numbers)], "the newest; the script names which it loads")


def _highest(root: ReadablePath, loader: Loader) -> Taken:
    trainer, taken, passed = loader.trainer, dict[int, str](), set[int]()
    for name in sorted(names_in(root)):
        try:
            number = loader.number_of(name)
        except ValueError:
            return Taken(None, f"{name} is taken for a step, and its number cannot be read: a ValueError", stops=True)
        if number is not None and may_be_folder(root / name):
            if trainer.missing(root / name) and not loader.takes_any:
                passed.add(number)
            else:
                taken[number] = name
    passed -= taken.keys()
    without = ", ".join(trainer.needs).replace("|", " or ")
    said = f", passing over {', '.join(map(str, sorted(passed)))}, without {without}" if passed else ""
    if not taken:
        return Taken(None, "no step is there that it takes for one: training begins anew")
    number = max(taken)
    folder = root / trainer.folder_of(number)
    if not folder.is_dir():
        why = f"{taken[number]} is taken for step {number}, and {folder.name} is not there: loading it fails"
        return Taken(None, why, stops=True)
    return Taken(folder, f"the highest number{said}")


def _tracked(root: ReadablePath, trainer: Trainer) -> Taken:
    if trainer.counted and is_there(root / trainer.counted):
        try:
            folder = root / trainer.folder_of(counted_step(root, trainer.counted))
        except (CheckpointError, OSError) as error:
            wrong = headline(str(error)).replace(f"{root}/", "")
            return Taken(None, f"{trainer.counted} cannot be read: {wrong}", stops=True)
        return _named_by(trainer.counted, folder)
    if not is_there(root / trainer.tracker):
        return Taken(None, f"{trainer.tracker} is not there: training begins anew, and nothing stops it")
    try:
        text = reading.read_line(root / trainer.tracker)
    except OSError as error:
        return Taken(None, f"{trainer.tracker} cannot be read: {error.strerror or error}")
    number = trainer.tracked_step(text)
    try:
        folder = beneath(root, trainer.folder_of(number) if number is not None else text, "step", parts=1)
    except CheckpointError as error:
        return Taken(None, f"{trainer.tracker} names no step: {headline(str(error))}")
    return _named_by(trainer.tracker, folder)


def _number_in(root: ReadablePath, trainer: Trainer) -> int | None:
    with suppress(OSError):
        return trainer.tracked_step(reading.read_line(root / trainer.tracker))
    return None


def _named_by(tracker: str, folder: ReadablePath) -> Taken:
    if folder.is_dir():
        return Taken(folder, tracker)
    return Taken(None, f"{tracker} names {folder.name}, which is not there")


def _taken_by_role(path: ReadablePath, trainer: Trainer) -> Taken:
    """Of a run with a folder for each role, each role's own step."""
    places: dict[str, ReadablePath] = {}
    said: list[str] = []
    if trainer.wrote(path) and trainer.step_of(path.name) is not None:
        return Taken(path, "named", {"": path})
    there = _by_role(path, trainer)
    for role, folder in there.items():
        found = _tracked(folder, trainer)
        said.append(f"{role}: {found.why}" if role else found.why)
        if found.folder is not None:
            places[role] = found.folder
    if not places and not any(_holds_steps(folder, trainer) for folder in there.values()):
        hint = meant_below(
            path, lambda one: any(_holds_steps(folder, trainer) for folder in _by_role(one, trainer).values())
        )
        raise NotACheckpoint(
            f"{path}: holds no run of {trainer.title}: neither {', '.join(names[0] for names in trainer.roles.values())}, nor a tracker\n"
            f"{hint or 'Give the folder that ckpt.path names.'}"
        )
    lacking = len(places) < len(there)
    return Taken(None if lacking else path, "; ".join(said), places)


def _by_role(path: ReadablePath, trainer: Trainer) -> dict[str, ReadablePath]:
    """The folders of a run's roles, or its own where it has none of them."""
    folders = {role: path / names[0] for role, names in trainer.roles.items()}
    return {role: folder for role, folder in folders.items() if folder.is_dir()} or {"": path}


def _places(step: ReadablePath, trainer: Trainer) -> dict[str, ReadablePath]:
    """Where the models of a step lie, by role: the likeliest place where none can be told."""
    if trainer.alone:
        return {"": step}
    found = {}
    for role, names in trainer.roles.items():
        there = [step / name if name != HERE else step for name in names if (step / name).is_dir()]
        if there:
            found[role] = next((place for place in there if is_model(place)), there[0])
    return found or {"": step}


def _seen(
    trainer: Trainer, role: str, place: ReadablePath, step: ReadablePath, settings: Settings, world: int | None
) -> Seen:
    files = [name for name in files_below(place) if name not in _OURS]
    above = files if place == step else files_below(step)
    broken, swapped = _broken(place, files)
    if place != step:
        beside = [name for name in above if not (step / name).is_relative_to(place)]
        more = _broken(step, [name for name in beside if name.count("/") < 2])
        broken, swapped = broken | more[0], swapped + more[1]
    found = cache(lambda name: _keys_in(place if name.partition(INSIDE)[0] in files else step, name))
    keys = cache(lambda name: frozenset(found(name)))
    on = cache(lambda name: frozenset(key for key, is_on in found(name).items() if is_on))
    number = next((one for _, one in called_so(step.name)), None)
    shown = trainer.step_of(step.name)
    named = [] if shown is None else [pattern.format(step=trainer.number(shown)) for pattern in trainer.beside]
    near = {name: wrong_with(step.parent, name) or "" for name in named if is_there(step.parent / name)}
    held = held_by(place)
    held = replace(held, contradicts=(*held.contradicts, *swapped))
    if _OWN_ARGUMENTS in files:
        held = replace(held, args=_own_arguments(place))
    return Seen(role, frozenset(files), frozenset(above), broken, held, settings, world, number, keys, near, on)


def _own_arguments(folder: ReadablePath) -> Mapping[str, object]:
    """What transformers' Trainer keeps of the arguments that it was given; nothing where that cannot be read."""
    with suppress(CheckpointError, OSError, ValueError):
        kept = getattr(_tree_of(folder, _OWN_ARGUMENTS), "stub_state", None)
        return {key: value for key, value in kept.items() if isinstance(key, str)} if isinstance(kept, Mapping) else {}
    return {}


def _keys_in(folder: ReadablePath, name: str) -> Mapping[str, bool]:
    """The keys of what ``torch.save`` or JSON put into a file, as deep as an optimizer's are told apart; a DCP folder's names.

    With each, whether it is a number or a switch, and not 0. Megatron-core puts each object into a list of one.
    """
    file, inside, item = name.partition(INSIDE)
    try:
        if inside:
            stored = object_in((folder / file).parent, item)
            one = (
                stored[0]
                if isinstance(stored, list) and len(stored) == 1 and not isinstance(stored[0], str)
                else stored
            )
            if isinstance(one, bytes) and one.startswith(_PLAIN_PICKLE):  # torchtitan's place in the data
                one = unpickle(one, name)
            return dict(_paths(one, "", _DEPTH))
        if name.rpartition("/")[2] == METADATA_FILE:
            found = read_metadata((folder / name).parent)
            return dict.fromkeys((*found.tensors, *found.objects), False)
        tree = _tree_of(folder, name)
    except (CheckpointError, OSError, ValueError):
        return {}
    return dict(_paths(tree, "", _DEPTH))


def _tree_of(folder: ReadablePath, name: str) -> object:
    if name.endswith(".json"):
        return reading.read_json(folder / name)
    data = reading.read_bytes(folder / name) if name.endswith(".pkl") else b""
    return unpickle(data, name) if data.startswith(_PLAIN_PICKLE) else read_rank_file(folder, name).tree


def _paths(value: object, at: str, depth: int) -> Iterator[tuple[str, bool]]:
    if at:
        yield at, isinstance(value, bool | int | float) and bool(value)
    listed = value if isinstance(value, list | tuple) else ()
    names = bool(listed) and all(isinstance(one, str) for one in listed)  # a list of names is asked for them
    inner = value if isinstance(value, Mapping) else dict.fromkeys(listed) if names else dict(enumerate(listed))
    for key, one in inner.items() if depth else ():
        yield from _paths(one, f"{at}/{key}" if at else str(key), depth - 1)


def _broken(folder: ReadablePath, names: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """What is wrong with files, by name; and of which another one lies in the place, which a loader takes as it is."""
    sound, there = list[StoredFile](), {*names}
    broken = {name: wrong for name in names[:_LOOKED_INTO] if (wrong := wrong_with(folder, name, sound))}
    return broken, [f"{file.path}: {said}" for file in sound if (said := misplaced(file, there, of_rank=True))]


def held_by(folder: ReadablePath) -> Held:
    """What a reader finds in a model's folder, apart from what waits beside it for the way back: no trainer looks there.

    Of several models in one folder it is the first one's, unless another cannot be opened.
    """
    try:
        with passed_over():
            roles = roles_in(folder) if folder.is_dir() else []
            opened = [open_without_manifest(folder, ReadOptions(role=role, values=False)) for role in roles or (None,)]
            source = next((one for one in opened if one.unread), opened[0])
            inventory = inventory_of(source)
    except CheckpointError as error:
        return Held(headline(str(error)).replace(f"{folder}/", ""), isinstance(error, Incomplete))
    dtypes: Counter[str] = Counter()
    for param in source.model.params:
        dtypes[str(param.dtype)] += prod(param.global_shape)
    state, module, megatron = source.state, ModuleState.of(source), MegatronState.of(source)
    return Held(
        unread=headline(source.unread).replace(f"{folder}/", ""),
        unportable=issubclass(source.refused, Unportable),
        optimizer=source.optimizer not in (None, "") or bool(source.unread),
        scheduler=state.scheduler is not None,
        scaler=state.grad_scaler is not None,
        rng=any(item.kind is Kind.RNG for item in inventory),
        release=state.release,
        dtype=dtypes.most_common(1)[0][0] if dtypes else "",
        dp=source.parallel.dp,
        fsdp=module.fsdp if module is not None else 0,
        args=state.args,
        values=frozenset(map(str, state.other)),
        counted=at if type(at := (state.scheduler or {}).get("num_steps")) is int else 0,
        sharding=(megatron.sharding if megatron is not None else None) or "",
        contradicts=tuple(text.replace(f"{folder}/", "") for text in source.notes.contradictions),
        headed=source.model.get(OF_WRAPPER[0]) is not None,
        frozen=left_frozen(source) if len(opened) == 1 else frozenset(),  # whose numbers are one optimizer's
    )
