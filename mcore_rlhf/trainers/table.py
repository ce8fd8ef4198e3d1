"""One row of the table: what a trainer calls its steps, what lies where in one, and how it finds the one that it goes on from."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from string import Formatter
from typing import Literal

from mcore_rlhf.families.dist_parts import DistParts
from mcore_rlhf.storage.paths import ReadablePath, lies_in

STEP = "step"
"""The field of a pattern that stands for a step's number."""
RANDOM = "random"
"""What it asks for where that is a process's random states: see :attr:`Trainer.asks`."""
HERE = ""
"""The place of a role whose model is the step's folder itself."""
ITERATIONS = ("iter_{step:07d}",)
"""What Megatron calls the folders of a root. Source: Megatron-LM core_v0.16.1, ``training/checkpointing.py`` (``get_checkpoint_name``)."""

Resumed = Literal["tracker", "highest", "named"]
"""What a trainer goes on from by itself: what its tracker names, the step of the highest number, or only one that it is told."""


_OF_EPOCHS = ("epoch", "of_epoch", "per_epoch", "number")
_SAMPLES = "samples"
_MOST = 10**18


@dataclass(frozen=True, slots=True)
class Counters:
    """The file in a step that says how far the run is.

    Args:
        file: JSON, or a file of ``torch.save`` (``.pt``), relative to the step.
        step: The field that is the step's number.
        fields: What a new file says: fields, and what each is: ``step``, ``samples`` or ``number`` (what the trainer calls that step); or
            the ``epoch`` that it is in, where in it (``of_epoch``) and how many steps one has (``per_epoch``), as a run shows.
        within: A field that counts the steps of an epoch, and the field that counts epochs; empty where there are none.
    """

    file: str
    step: str
    fields: Mapping[str, str] = field(default_factory=dict)
    within: tuple[str, ...] = ()

    def number(self, said: Mapping[str, object]) -> tuple[str, object]:
        """The field that is the step's number, and what it says: that of an epoch's steps where it says more, which alone is counted then.

        Source: NeMo-RL 7ea279a, ``algorithms/grpo.py`` (``async_grpo_train``: it sets ``current_step``, and never ``total_steps``).

        Args:
            said: What the file says.
        """
        step, inner = said.get(self.step), said.get(self.within[0]) if self.within else None
        apart = self.within and type(step) is type(inner) is int and inner > step
        return (self.within[0], inner) if apart else (self.step, step)

    def contradictions(self, said: Mapping[str, object], file: ReadablePath) -> list[str]:
        """Where the epoch, how far in it the run is, or its samples are another step than the file's.

        Args:
            said: What the file says.
            file: For the sentence.
        """
        return [*self._of_epoch(said, file), *self._of_steps(said, file)]

    def _of_steps(self, said: Mapping[str, object], file: ReadablePath) -> Iterator[str]:
        """The first epoch has all steps of the run, and each step has a sample, where they are counted."""
        name, step = self.number(said)
        if type(step) is not int:
            return
        at, epochs = self.within[:2] or ("", "")
        inner, epoch = said.get(at), said.get(epochs)
        if type(inner) is int and (inner < 0 or (epoch == 0 and type(epoch) is int and inner != step)):
            yield f"{file}: {at} is {told(inner)}{' of the first epoch' * (epoch == 0)}, and {name} is {told(step)}"
        for of in (of for of, kind in self.fields.items() if kind == _SAMPLES):
            if type(samples := said.get(of)) is int and samples and samples < step:
                yield f"{file}: {of} is {told(samples)}, and {name} is {told(step)}"

    def _of_epoch(self, said: Mapping[str, object], file: ReadablePath) -> list[str]:
        by_kind = {kind: said.get(name) for name, kind in self.fields.items()}
        found = [value for kind in _OF_EPOCHS if type(value := by_kind.get(kind)) is int]
        if len(found) < len(_OF_EPOCHS):
            return []
        epoch, within, of, number = found
        whole = epoch * of + within
        if whole == number:
            return []
        return [
            f"{file}: step {within} of epoch {epoch}, of {of} steps each, is {told(whole)}, and {self.step} is {number}"
        ]


def told(number: int) -> int | str:
    """A number in words: Python writes none of thousands of digits."""
    return number if abs(number) < _MOST else "no number of steps"


@dataclass(frozen=True)
class Trainer:
    """How a trainer lays out its runs.

    Args:
        name: What it is called on the command line.
        title: What its authors call it.
        steps: What a step's folder is called in the root: patterns with one field, ``{step}``, and ``*`` for any text; the first, which has
            none, is the one that is written. None where the run's folder is its one step, which the next one is written over.
        marks: Patterns of what lies in a step, of which one is there in each of its own, and in nobody else's of that name; with ``&``
            between them, of what lies there together.
        beside: Patterns, with ``{step}``, of what lies beside its steps in the root, of which one is there: what tells a step from those of
            the trainer that it saves with, where nothing in the step does.
        over: Trainers that it saves with, whose files lie in its own steps as well.
        roles: Role → places in a step where its model may lie, the likeliest first; :data:`HERE` for the step's folder itself.
        within: What the root is called in the folder that the trainer is given, and which people name for it; empty where they are one.
        by_role: Whether the root has a folder for each role, with steps in it; the places of roles are those folders then.
        aside: What a step's folder is called while it is written or replaced.
        needs: Files without which it does not go on from a step, each one or, with ``|`` between them, one of several.
        tracker: The file in the root, or of runs by role in each role's folder, that names the step; empty where there is none.
        tracked: What stands in the tracker.
        counted: The file of ``torch.save`` in the root by whose ``step`` it goes before it looks at the tracker; empty where there is none.
        resumes: What it goes on from by itself.
        data: Where a step says how far the data are, as a state of torchdata's ``StatefulDataLoader``; empty where it does not. With
            ``{rank}``, each data-parallel rank has one, of its share.
        random: Where each rank's random states lie in a step, with ``{rank}``, where it goes on without them and says so in a log alone.
        opens_data: Whether it opens that file without a look, and stops where it is not there.
        skips: The file by whose count of steps it passes over as many batches when it resumes; empty where it has no such count, or has
            the loader's own state.
        asks: What it asks for among the values of its first role's model, and what each is: ``step``, ``samples``, ``zero`` or ``data``,
            or ``random``: the states of a process's generators, by what each is called there (``generators``).
        generators: What each generator's state is called there, by what it is called here.
        counters: Which file says how far the run is; None where its formats' own do.
        numbered: Gives the number of a step in the run's own folder: how many are done; None where the file that says it is not there.
        first: What it calls the step after which one is done; those that are done are what everybody else calls a step.
        made: Files that it wants beside its counters, and what is in one that is made, where nobody has it; JSON.
        made_says: What that makes it do, in words.
        progress: A file of ``torch.save`` that it stops without and only its own runs show: ``progress``, which counts steps, and whatever
            else a run goes on by; empty where there is none.
        second_group: Parts of the names of parameters that its optimizer has in a second param group; empty where it has one group, and
            None where a run says, or nobody.
        wants_schedule: Whether it takes a scheduler's state from every file with an optimizer, and stops where there is none.
        strategy: What each rank's file says of the strategy that wrote it, where the trainer has rank files of FSDP2 alone, with one param
            group; empty elsewhere.
        formats: The formats in which it has models, those that it is given: first the usual one, then those that ``--like`` or options of
            theirs ask for, DeepSpeed's or Megatron's; none where it is only read.
        tag: What the tag of DeepSpeed's files is called in its steps, with ``{step}``; empty where it has none.
        parts: Where a model in ``torch_dist`` has its parts: the usual way first, and others, of which a checkpoint of a run shows which
            is its own; none where they are one folder.
        megatrons: Where in a model's place Megatron's own folder is; empty where it is that place itself.
        counts: Whether Megatron's iteration is its step; it looks for iteration 0 in every step otherwise.
        ahead: How many more steps are done than the number of a step says, which is Megatron's iteration: it counts from 0.
        several: The format in which a step's folder has models of any roles, by numbers in the names of their files; empty elsewhere.
        told: How it is told to go on, with ``{root}``, ``{step}`` and ``{path}``.
    """

    name: str
    title: str
    steps: tuple[str, ...]
    marks: tuple[str, ...]
    beside: tuple[str, ...] = ()
    over: tuple[str, ...] = ()
    roles: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: {"actor": (HERE,)})
    within: str = ""
    by_role: bool = False
    aside: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    tracker: str = ""
    tracked: str = "{step}"
    counted: str = ""
    resumes: Resumed = "tracker"
    data: str = ""
    random: str = ""
    opens_data: bool = False
    skips: str = ""
    asks: Mapping[str, str] = field(default_factory=dict)
    generators: Mapping[str, str] = field(default_factory=dict)
    counters: Counters | None = None
    numbered: Callable[[ReadablePath], int | None] = lambda root: None
    first: int = 1
    made: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    made_says: str = ""
    progress: str = ""
    second_group: tuple[str, ...] | None = None
    wants_schedule: bool = False
    strategy: str = ""
    formats: tuple[str, ...] = ()
    tag: str = ""
    parts: tuple[DistParts, ...] = ()
    megatrons: str = ""
    counts: bool = True
    ahead: int = 0
    several: str = ""
    told: str = ""

    @property
    def alone(self) -> bool:
        """Whether a step's folder is one model's own."""
        return not self.by_role and [*self.roles.values()] == [(HERE,)]

    @property
    def in_place(self) -> bool:
        """Whether the run's folder is its one step."""
        return not self.steps

    @property
    def is_iteration(self) -> bool:
        """Whether a step's folder is its framework's own, beside others: Megatron's iteration, DeepSpeed's tag; none that holds one."""
        return not self.by_role and self.steps[:1] in (ITERATIONS, (self.tag,))

    @property
    def unfolded(self) -> bool:
        """Whether its steps have no folder of their own, in which a manifest could vouch for one."""
        return self.by_role or self.in_place

    def done(self, number: int) -> int:
        """The steps that are done after the one that it calls so."""
        return number + 1 - self.first

    def number(self, step: int) -> int:
        """What it calls a step: the other way round of :meth:`done`."""
        return step - 1 + self.first

    def place_of(self, role: str, *, megatron: bool = False) -> str | None:
        """Where a role's model is written in a step, or in the root of a run by role; None where the trainer has no such role.

        Args:
            role: The role.
            megatron: Whether it is in one of Megatron's formats.
        """
        if role not in self.roles:
            return None
        return f"{self.roles[role][0]}/{self.megatrons}".rstrip("/") if megatron else self.roles[role][0]

    def takes(self, role: str, to: str) -> bool:
        """Whether it has models of a role, in a format.

        Args:
            role: The role.
            to: The format.
        """
        return role in self.roles or (bool(self.several) and self.several == to)

    def parts_like(self, like: ReadablePath | None) -> DistParts | None:
        """Where a model in ``torch_dist`` has its parts, as one that the run saved shows it; None where they are one folder.

        Args:
            like: That model's folder.
        """
        shown = (
            one
            for one in self.parts
            if like is not None
            and lies_in(like, f"{one.model}/*" if one.model else f"{one.described}/*.safetensors".lstrip("/"))
        )
        return next(shown, next(iter(self.parts), None))

    @property
    def of_each_rank(self) -> bool:
        """Whether each data-parallel rank says for itself how far its share of the data is."""
        return "{rank}" in self.data

    @property
    def shares_data(self) -> bool:
        """Whether its data-parallel ranks have a share of the data each: a file of each counts it, or one that is pickled for all."""
        return self.of_each_rank or self.data.endswith(".pkl")

    def data_file(self, rank: int = 0) -> str:
        """The file that says how far the data are, or a rank's share; empty where there is none."""
        return self.data.format(rank=rank)

    def folder_of(self, step: int) -> str:
        """The name of a step's folder; empty where that is the root."""
        return self.steps[0].format(step=self.number(step)) if self.steps else HERE

    def step_of(self, name: str) -> int | None:
        """The step whose folder is called so; None where none is."""
        found = _number(self._steps, name)
        return None if found is None else self.done(found)

    def step_aside(self, name: str) -> int | None:
        """The step that is being written or replaced in a folder of that name; None where none is."""
        return _number(self._aside, name)

    def wrote(self, step: ReadablePath) -> bool:
        """Whether a folder, which is called as a step is, has in it, or beside it, what this trainer leaves there."""
        number = self.step_of(step.name)
        return any(all(lies_in(step, one) for one in mark.split("&")) for mark in self.marks) or any(
            lies_in(step.parent, mark.format(step=number)) for mark in self.beside
        )

    def is_not_of(self, step: ReadablePath, other: Trainer) -> bool:
        """Whether a step of its own has a model where it has none itself, and another trainer does."""
        own, others = (
            {place.partition("/")[0] for places in one.roles.values() for place in places} for one in (self, other)
        )
        return any((step / place).is_dir() for place in others - own if place)

    def missing(self, step: ReadablePath) -> tuple[str, ...]:
        """What it looks for in a step that is not there, so that it does not go on from it."""
        gone = (names for names in self.needs if not any(lies_in(step, name) for name in names.split("|")))
        return tuple(names.partition("|")[0] for names in gone)

    def tracked_step(self, text: str) -> int | None:
        """The step that the text of a tracker names; None where it names none."""
        return _number((_pattern(self.tracked),), text.strip())

    @cached_property
    def _steps(self) -> tuple[re.Pattern[str], ...]:
        return tuple(map(_pattern, self.steps))

    @cached_property
    def _aside(self) -> tuple[re.Pattern[str], ...]:
        return tuple(map(_pattern, self.aside))


def _pattern(text: str) -> re.Pattern[str]:
    """The names that a pattern makes: of each number one, so that nothing is read that would not be written."""
    parts = []
    for literal, name, spec, _ in Formatter().parse(text):
        parts.append(re.escape(literal).replace(r"\*", "[^/]*"))
        if name is not None:
            parts.append(r"(?P<step>\d{1,18})" if spec else r"(?P<step>0|[1-9]\d{0,17})")
    return re.compile("".join(parts), re.ASCII)


def _number(patterns: tuple[re.Pattern[str], ...], name: str) -> int | None:
    match = next((found for pattern in patterns if (found := pattern.fullmatch(name))), None)
    return int(match[STEP]) if match else None
