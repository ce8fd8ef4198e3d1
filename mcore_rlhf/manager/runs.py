"""Runs as other trainers lay them out: which steps lie in a root, which of them is meant, and what one holds.

What is called what stands in :mod:`mcore_rlhf.trainers`; here it is read, by one reader for all of them. Steps called ``global_step_N``,
ours, verl's and RLinf's, are :mod:`.run.steps`'s to describe.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import PurePath

from mcore_rlhf.errors import CheckpointError, Corrupt, Incomplete, LayoutMismatch, Problem
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.families.run_folders import CONTENTS, TRANSFORMER, is_split
from mcore_rlhf.formats.fsdp_ranks.files import lone_optimizer
from mcore_rlhf.formats.registry import is_model, open_without_manifest
from mcore_rlhf.storage import reading
from mcore_rlhf.storage.paths import ReadablePath, absolute
from mcore_rlhf.storage.patience import is_there, may_be_folder, names_in
from mcore_rlhf.storage.pt import read_pt
from mcore_rlhf.storage.publish import MANIFEST_NAME
from mcore_rlhf.storage.torch_values import SmallTensor
from mcore_rlhf.storage.unfinished import interrupted
from mcore_rlhf.trainers.known import TRAINERS, called_so, writer_of
from mcore_rlhf.trainers.table import HERE, STEP, Counters, Trainer, told

from .run import steps
from .run.naming import OWN, Naming
from .run.steps import Step


def manifest_of(trainer: Trainer) -> str:
    """What our manifest is called in a trainer's step: in a model's own folder, or one that has several steps, what conversions leave.

    In folders that are called as our steps are, it is a step's.
    """
    ours = steps.step_of(PurePath(trainer.folder_of(0))) is not None
    return MANIFEST_NAME if (trainer.alone and not ours) or trainer.unfolded else steps.MANIFEST


@dataclass(frozen=True, slots=True)
class TrainerStep:
    """A step of another trainer's run.

    Args:
        trainer: Whose.
        step: Its number.
        folder: Its folder; of a run by role the root, in which every role has one.
        places: Folders in it that are the step's, by role where the run is one by role; else the folder itself, without a role.
    """

    trainer: Trainer
    step: int
    folder: ReadablePath
    places: Mapping[str, ReadablePath]

    @property
    def manifest(self) -> str:
        """What our manifest is called in it."""
        return manifest_of(self.trainer)

    @property
    def absent(self) -> list[str]:
        """Folders of roles that the run has, and this step not; none where a step has all of its roles in one folder."""
        if not self.trainer.by_role:
            return []
        there, roles = self.models(), self.trainer.roles
        return [names[0] for role, names in roles.items() if role not in there and (self.folder / names[0]).is_dir()]

    def models(self) -> dict[str, ReadablePath]:
        """The folders of its models, by role; of what is in no format that is known, none."""
        if self.trainer.by_role:
            return {role: place for role, place in self.places.items() if is_model(place)}
        found = {}
        for role, names in self.trainer.roles.items():
            places = (self.folder / name if name else self.folder for name in names)
            place = next((place for place in places if place.is_dir() and is_model(place)), None)
            if place is not None:
                found[role] = place
        return found

    def refuse_contradiction(self) -> None:
        """Every role of a run by role has the step, and what its counters say is what its folder is called.

        Raises:
            Incomplete: A role has no such step, or no model in it.
            LayoutMismatch: The counters are another step's.
        """
        if self.absent:
            raise Incomplete(
                f"{self.folder}: step {self.step} has no model in {', '.join(self.absent)}\n"
                "Name a step that all roles have with --step N, or one role's folder alone."
            )
        if found := self.contradictions():
            raise LayoutMismatch(f"{found[0]}\nOne of them is another step's: training would go on at the wrong one.")

    def contradictions(self) -> list[str]:
        """What the step's files say of its number besides the folder's name, and say otherwise."""
        found, counters = list[str](), self.trainer.counters
        if counters is not None:
            said = _said_in(self.folder, counters)
            name, number = counters.number(said)
            if type(number) is int and self.trainer.done(number) != self.step:
                found.append(
                    f"{self.folder / counters.file}: {name} is {told(number)}, and the folder is {self.folder.name}"
                )
            found += counters.contradictions(said, self.folder / counters.file)
        return [*found, *self._asked()]

    def _asked(self) -> Iterator[str]:
        """Of a run by role, the number that it takes of its first role's values, where that is another step's."""
        role = next(iter(self.trainer.roles))
        keys = [key for key, what in self.trainer.asks.items() if what == STEP] if self.trainer.by_role else []
        place = self.places.get(role) if keys else None
        if place is None:
            return
        with suppress(CheckpointError):  # who opens it says what is wrong
            values = open_without_manifest(place, ReadOptions(role=role, optimizer=False, values=False)).state.other
            for key in keys:
                if type(said := values.get(key)) is int and self.trainer.done(said) != self.step:
                    yield f"{place}: its client state has {key} {said}, and the folder is {place.name}"

    def described(self) -> Step:
        """As it stands in the list of a root's steps."""
        if not self.trainer.unfolded and is_there(self.folder / self.manifest):
            found = steps.described(self.step, self.folder, self.manifest)
            return found if found.roles else replace(found, roles=tuple(self.models()))
        missing = {name for place in self.places.values() for name in self.trainer.missing(place)}
        why = f"has no {', '.join(sorted(missing))}: {self.trainer.title} does not go on from it"
        if absent := self.absent:
            missing, why = {*absent}, f"has no model in {', '.join(absent)}"
        return Step(
            self.step,
            next(iter(self.places.values())),
            "partial" if missing else "foreign",
            sum(steps.size_of(place) for place in self.places.values()),
            tuple(self.models()),
            steps.changed(next(iter(self.places.values()))),
            why if missing else f"a step of {self.trainer.title}, which has no {self.manifest}",
            quarantined=steps.reason_of(next(iter(self.places.values()))),
        )


def _said_in(folder: ReadablePath, counters: Counters) -> Mapping[str, object]:
    """What counters say; nothing where they cannot be read: who opens them, or checks them, says what is wrong."""
    with suppress(OSError, ValueError, CheckpointError):
        if counters.file.endswith(".pt"):
            pt = read_pt(folder, counters.file)
            said = pt.materialize(pt.tree)
        else:
            said = reading.read_json(folder / counters.file)
        return said if isinstance(said, Mapping) else {}
    return {}


@dataclass(frozen=True, slots=True)
class TrainerRun:
    """The root of another trainer's run.

    Args:
        root: Its folder.
        trainer: Whose.
        found: Its steps by number, oldest first; of several folders of one, the one that :func:`_worth` puts last.
        aside: Numbers and folders of what is being written or replaced.
        again: Other folders of the same steps: some trainers' names say more than the number.
    """

    root: ReadablePath
    trainer: Trainer
    found: Mapping[int, TrainerStep]
    aside: tuple[tuple[int, ReadablePath], ...] = ()
    again: tuple[TrainerStep, ...] = ()

    def listed(self) -> list[Step]:
        """Every step once, oldest first, and what is not one yet."""
        title = self.trainer.title
        why = f"being written or replaced by {title}, or left behind by a process that died"
        half = [Step(step, path, "partial", steps.size_of(path), why=why) for step, path in self.aside]
        whole = [step.described() for step in self.found.values()]
        return sorted([*whole, *half], key=lambda one: (one.step, one.state == "partial"))

    def folders(self) -> list[Step]:
        """As :meth:`listed`, with every folder of each step: the one to go on from last."""
        again = [step.described() for step in self.again]
        return sorted([*again, *self.listed()], key=_worth) if again else self.listed()

    def of(self, step: Step) -> TrainerStep:
        """What one of :meth:`folders` is of this run."""
        return next((one for one in self.again if one.folder == step.path), self.found[step.step])

    def tracked(self) -> int | None:
        """The step that its tracker names, in every role the same; None where there is none, or it says nothing of a step."""
        if not self.trainer.tracker:
            return None
        folders = [place[0] for place in self.trainer.roles.values()] if self.trainer.by_role else [HERE]
        named = set[int | None]()
        for name in folders:
            folder = self.root / name if name else self.root
            if folder.is_dir():
                named.add(self._tracked_in(folder))
        return named.pop() if len(named) == 1 else None

    def misled(self) -> list[Problem]:
        """Trackers that are there, and name no step of the run: its trainer stops at one, or begins anew."""
        if not self.trainer.tracker:
            return []
        folders = (
            [self.root / places[0] for places in self.trainer.roles.values()] if self.trainer.by_role else [self.root]
        )
        there = [*self.found, *(step for step, _ in self.aside)]
        trackers = (folder / self._tracker_in(folder) for folder in folders)
        return [
            tracker_problem(tracker, self.trainer.title, there)
            for tracker, named in ((one, self._tracked_in(one.parent)) for one in trackers)
            if named not in there and is_there(tracker)
        ]

    def _tracker_in(self, folder: ReadablePath) -> str:
        """The file by which its trainer goes: that which is asked first, where it is there."""
        counted = self.trainer.counted
        return counted if counted and is_there(folder / counted) else self.trainer.tracker

    def _tracked_in(self, folder: ReadablePath) -> int | None:
        with suppress(OSError, ValueError, CheckpointError):
            tracker = self._tracker_in(folder)
            if tracker == self.trainer.counted:
                return counted_step(folder, tracker)
            return self.trainer.tracked_step(reading.read_line(folder / tracker))
        return None


def tracker_problem(tracker: ReadablePath, title: str, there: Collection[int]) -> Problem:
    """What is said of a tracker that names no step of its run.

    Args:
        tracker: The file.
        title: Whose.
        there: The steps that there are.
    """
    listed = ", ".join(map(str, sorted(there)))
    return Problem(
        Corrupt,
        f"{tracker}: names no step that is there ({listed}): {title} does not go on from one by itself",
        "Write the step that it is to go on from into the file, as the trainer does.",
    )


def counted_step(root: ReadablePath, name: str) -> int:
    """The step in a root's counters, see :attr:`.Trainer.counted`.

    Args:
        root: The root.
        name: What the file is called.

    Raises:
        CheckpointError: It cannot be read, or has no step.
    """
    pt = read_pt(root, name)
    tree = pt.materialize(pt.tree)
    step = tree.get(STEP) if isinstance(tree, Mapping) else None
    number = int(step) if isinstance(step, SmallTensor) and step.numel() == 1 else -1
    if number < 0:
        raise Corrupt(f"{root / name}: step should be a number of no dimensions, not negative, and is {step!r:.80}")
    return number


def listed_steps(root: ReadablePath) -> list[Step]:
    """Every step in a root, whoever's they are, oldest first.

    Args:
        root: The run's root.

    Raises:
        CheckpointError: See :func:`.run.steps.listed` and :func:`run_at`.
    """
    found = steps.listed(root)
    other = None if found else run_at(root)
    return found if other is None else other.listed()


def meant_below(root: ReadablePath, holds: Callable[[ReadablePath], object] = listed_steps) -> str:
    """A question, where a run that is looked for in a folder lies in one of that folder's own; or what became of it; else empty.

    Args:
        root: A folder that is no run's.
        holds: Whether a folder is.
    """
    found = (root / name for name in sorted(names_in(root)) if may_be_folder(root / name) and holds(root / name))
    below = next(found, None)
    return interrupted(root) or ("" if below is None else f"Is {below} meant?")


def naming_of(root: ReadablePath) -> Naming:
    """How the steps of a root are called, whoever's they are; ours where it has none.

    Raises:
        CheckpointError: See :func:`listed_steps`.
    """
    other = None if steps.listed(root) else run_at(root)
    return OWN if other is None else naming_by(other.trainer)


def tracked_in(root: ReadablePath) -> list[int]:
    """The step that a trainer's own tracker names, from which it would go on; none where there is none, or the steps are ours."""
    other = None if steps.listed(root) else run_at(root)
    named = None if other is None else other.tracked()
    return [] if named is None else [named]


def naming_by(trainer: Trainer) -> Naming:
    """How a trainer calls the steps that lie in a root of its own."""

    def listed(root: ReadablePath) -> list[Step]:
        run = run_at(root)
        return [] if run is None else run.folders()

    def newest_first(root: ReadablePath) -> Iterator[Step]:
        return (step for step in reversed(listed(root)) if not steps.is_hidden(step.path))

    return Naming(manifest_of(trainer), trainer.step_of, listed, newest_first)


def run_at(root: ReadablePath) -> TrainerRun | None:
    """The run whose root a folder is; None where it is none of another trainer's.

    Args:
        root: Any path; also the folder that the trainer was given, where the root has a name of its own in it.

    Raises:
        LayoutMismatch: It has steps of two trainers, or a step that has files of two.
    """
    if not root.is_dir():
        return None
    within = ((one, root / one.within) for one in TRAINERS if one.within and (root / one.within).is_dir())
    own = _of_folder(root)
    return own or next(
        (run for one, inner in within if (run := _of_folder(inner)) is not None and run.trainer is one), None
    )


def _of_folder(root: ReadablePath) -> TrainerRun | None:
    """The run whose steps lie in a folder itself."""
    by_role = _by_role(root) or _in_place(root)
    if by_role is not None:
        return by_role
    found = list[TrainerStep]()
    for name in names_in(root):
        if any(called_so(name)) and may_be_folder(root / name) and (written := writer_of(root / name)) is not None:
            found.append(TrainerStep(*written, root / name, {"": root / name}))
    known = {one.trainer.name: one.trainer for one in found}
    trainers = [one for one in known.values() if not any(one.name in other.over for other in known.values())]
    if len(trainers) > 1:
        listed = "; ".join(f"{one.folder.name} of {one.trainer.title}" for one in found)
        raise LayoutMismatch(
            f"{root}: holds steps of two trainers: {listed}\nGive the folder of the step that is meant, or move those of the other away."
        )
    if not trainers:
        return None
    (trainer,) = trainers  # those that it saves with may have written some of its steps, as far as these show
    found = _by_worth([replace(one, trainer=trainer) for one in found])
    steps_of = {one.step: one for one in found}
    again = tuple(one for one in found if one is not steps_of[one.step])
    return TrainerRun(root, trainer, steps_of, tuple(_aside(root, trainer)), again)


def _by_worth(found: list[TrainerStep]) -> list[TrainerStep]:
    """By number, and folders of one number as :func:`_worth` has them; they are looked into only where there are several."""
    often = Counter(one.step for one in found)
    alone = [one for one in found if often[one.step] == 1]
    again = sorted((one for one in found if often[one.step] > 1), key=lambda one: _worth(one.described()))
    return sorted([*alone, *again], key=lambda one: one.step)


def _worth(step: Step) -> tuple[int, bool, bool, str, str]:
    """Steps by number; folders of one step with the one to go on from last: committed, and of such the one that was written last."""
    return step.step, steps.is_hidden(step.path), step.resumable, step.time, step.path.name


def step_at(folder: ReadablePath) -> TrainerStep | None:
    """The step of another trainer's run that a folder is, by its name and what is in it; None where it is none.

    Args:
        folder: Any path.

    Raises:
        LayoutMismatch: It has files of two trainers.
    """
    written = writer_of(absolute(folder)) if folder.is_dir() else None
    if written is None or written[0].by_role:
        return None
    return TrainerStep(*written, folder, {"": folder})


def unmet(folder: ReadablePath) -> list[Problem]:
    """Files without which the trainer that wrote a step does not go on from it, and that are not there.

    Args:
        folder: Any path.

    Raises:
        LayoutMismatch: It has files of two trainers.
    """
    found = step_at(folder)
    if found is None:
        return []
    why = f"is missing: {found.trainer.title} does not go on from the step"
    advice = "Take another step; or convert this one, where its models are whole."
    return [Problem(Incomplete, f"{folder / name}: {why}", advice) for name in found.trainer.missing(folder)]


def goes_without(folder: ReadablePath, *, dp: int = 1, world: int = 1) -> list[str]:
    """Files that a step's trainer writes and goes on without, and that are not there: the step is whole, and yet less.

    Args:
        folder: Any path.
        dp: Data-parallel ranks of its model, of each of which some trainers have the place in the data.
        world: All of its ranks.

    Raises:
        LayoutMismatch: It has files of two trainers.
    """
    found = step_at(folder)
    if found is None:
        return []
    trainer, said = found.trainer, []
    for role, place in found.models().items():
        if place.parent != folder and (lone := lone_optimizer(place.parent)):
            at = place.relative_to(folder)
            said.append(
                f"{role} is the weights of {at} alone: {lone} is of an optimizer whose model's files are not there"
            )
    for file, ranks, what in (
        (
            trainer.data,
            dp if trainer.of_each_rank else 1,
            "stops, as it opens it" if trainer.opens_data else "begins its data anew",
        ),
        (trainer.random, world, "goes on with other random states"),
    ):
        gone = [rank for rank in range(ranks if file else 0) if not is_there(folder / file.format(rank=rank))]
        if gone:
            some = f", on {len(gone)} of {ranks} ranks" if ranks > 1 else ""
            shares = file == trainer.data and gone[0] and ranks % gone[0] == 0 and len(gone) == ranks - gone[0]
            text = f"{file.format(rank=gone[0])}: without it {trainer.title} {what}{some}"
            if shares:
                text += (
                    f", unless {ranks // gone[0]} ranks each share their data (sequence parallelism, or Ray's driver)"
                )
            said.append(text)
    split = [places[0] for places in trainer.roles.values() if is_split(folder / places[0])]
    for name, why in (
        (CONTENTS, "writes it last: the save did not end, or another program brought the folder into this layout"),
        (TRANSFORMER, "needs none, and nothing else says how the run was laid out"),
    ):
        listed = (f"{place}/{name}".lstrip("/") for place in split)
        said += (f"{file}: {trainer.title} {why}" for file in listed if not is_there(folder / file))
    return said


def _aside(root: ReadablePath, trainer: Trainer) -> Iterator[tuple[int, ReadablePath]]:
    for name in names_in(root) if trainer.aside else ():
        number = trainer.step_aside(name)
        if number is not None and may_be_folder(root / name):
            yield number, root / name


def _in_place(root: ReadablePath) -> TrainerRun | None:
    """The run of a trainer whose one step is the run's folder."""
    found = step_at(root)
    return None if found is None or not found.trainer.in_place else TrainerRun(root, found.trainer, {found.step: found})


def _by_role(root: ReadablePath) -> TrainerRun | None:
    """The run of a trainer that has a folder for each role."""
    for trainer in (one for one in TRAINERS if one.by_role):
        found = dict[int, dict[str, ReadablePath]]()
        for role, (place, *_) in trainer.roles.items():
            folder = root / place
            for name in names_in(folder) if folder.is_dir() else ():
                number = trainer.step_of(name)
                if number is not None and trainer.wrote(folder / name):
                    found.setdefault(number, {})[role] = folder / name
        if found:
            return TrainerRun(root, trainer, {n: TrainerStep(trainer, n, root, found[n]) for n in sorted(found)})
    return None
