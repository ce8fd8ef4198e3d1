"""What every reader gives and is asked for, and what every writer is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from mcore_rlhf.core.account import Report
from mcore_rlhf.core.chunks import Chunks
from mcore_rlhf.core.facts import Fate, Inventory, Item, Kind, Rule, Values
from mcore_rlhf.errors import CheckpointError, Unsupported
from mcore_rlhf.layouts.parallel import ParallelConfig
from mcore_rlhf.models.spec import ModelSpec
from mcore_rlhf.storage.leftovers import CarriedFiles, Leftover
from mcore_rlhf.storage.paths import ReadablePath, absolute
from mcore_rlhf.storage.record_file import StoredFile
from mcore_rlhf.storage.urls import open_files

from .option_types import Takes

if TYPE_CHECKING:
    from mcore_rlhf.core.computed import Computation  # needs numpy, which opening a source does not
    from mcore_rlhf.core.execute import SourceBytes

SomeFamily = TypeVar("SomeFamily", bound="Family")


@dataclass(frozen=True, slots=True)
class ParamGroup:
    """One group of an optimizer: its own learning rate, weight decay, betas, step.

    Args:
        fields: Everything the format stores of it, except which parameters belong to it.
        expert: Whether it holds routed experts that expert parallelism deals out.
        params: Names of the parameters in it, in the optimizer's own order; empty where the format does not store them.
        scalars: Which of the fields the optimizer keeps once per parameter and not per group, such as ``step``.
    """

    fields: Mapping[str, object]
    expert: bool = False
    params: tuple[str, ...] = ()
    scalars: tuple[str, ...] = ()


ITERATION: Rule[Values] = Rule(Fate.NOTE, "iteration {at}: {how}", dict)
"""Where the number is from, of a run whose files do not say it."""


FROZEN: Rule[Sequence[str]] = Rule(
    Fate.NOTE, "{count} parameters have no optimizer state and count as frozen: {names:3}{more}",
    lambda names: {"count": len(names), "names": names, "more": ", …" if len(names) > 3 else ""} if names else None,
)  # fmt: skip
"""Of the parameters for which an optimizer has no states."""


BASE_LRS, LAST_LRS, LAMBDAS = "base_lrs", "_last_lr", "lr_lambdas"
"""A scheduler's learning rates, and a ``LambdaLR``'s functions, one for each param group.

Source: torch 2.13.0, ``optim/lr_scheduler.py`` (``LRScheduler``).
"""
OF_SCHEDULERS = frozenset(
    (BASE_LRS, LAST_LRS, "last_epoch", "verbose", "_step_count", "_is_initial", "_get_lr_called_within_step")
)
"""What every scheduler of torch's keeps, and a LambdaLR nothing else but what its functions say of themselves."""


def scheduled_groups(scheduler: Mapping[str, object] | None) -> int | None:
    """How many param groups a scheduler of torch's has learning rates for; None where it is another's, or there is none.

    Args:
        scheduler: Its state.
    """
    rates = None if scheduler is None else scheduler.get(BASE_LRS)
    return len(rates) if isinstance(rates, list) else None


def uneven_schedule(scheduler: Mapping[str, object] | None) -> str:
    """What a ``LambdaLR``'s state says of other numbers of param groups, in words; empty where it agrees with itself, or is no such state.

    Source: torch 2.13.0, ``optim/lr_scheduler.py`` (``LambdaLR.get_lr``: ``zip`` of the two with ``strict``).

    Args:
        scheduler: The state.
    """
    rates, lambdas = scheduled_groups(scheduler), (scheduler or {}).get(LAMBDAS)
    if rates is None or not isinstance(lambdas, list) or len(lambdas) == rates:
        return ""
    return f"{BASE_LRS} of {rates} param groups and {LAMBDAS} of {len(lambdas)}, of which one for each group is asked at the next step"


def contradictory_rates(state: TrainingState) -> list[str]:
    """Learning rates that torch's scheduler and the param groups say otherwise, in words: who saves both at once saves the same numbers.

    Source: torch 2.13.0, ``optim/lr_scheduler.py`` (``LRScheduler.__init__`` takes ``base_lrs`` of the groups' ``initial_lr``,
    ``_update_lr`` takes ``_last_lr`` of their ``lr``).
    """
    said = []
    for key, name in ((LAST_LRS, "lr"), (BASE_LRS, "initial_lr")):
        rates, held = (state.scheduler or {}).get(key), [group.fields.get(name) for group in state.groups]
        if (
            isinstance(rates, list)
            and len(rates) == len(held)
            and all(type(n) is float for n in (*rates, *held))
            and rates != held
        ):
            both = f"the scheduler's {key} is {_few(rates)}, and {name} of the param groups is {_few(held)}"
            said.append(f"{both}: one of them was changed, or is another save's, and each loader goes by one of them")
    return said


def contradictory_degrees(args: Mapping[str, object]) -> list[str]:
    """Ranks of a run that Megatron's arguments count in two ways, in words.

    Source: Megatron-LM core_v0.16.1, ``training/arguments.py`` (``validate_args``: ``data_parallel_size`` is what divides ``world_size``).
    """
    degrees = {
        f"{axis}_parallel_size": args.get(f"{axis}_parallel_size")
        for axis in ("tensor_model", "pipeline_model", "context", "data")
    }
    world, numbers = args.get("world_size"), [n for n in degrees.values() if type(n) is int]
    if type(world) is not int or len(numbers) < len(degrees) or prod(numbers) == world:
        return []
    said = " × ".join(f"{name} {n}" for name, n in degrees.items())
    return [
        f"args.world_size is {world}, and {said} make {prod(numbers)}: one of them was changed, or is another run's"
    ]


def _few(numbers: Sequence[object]) -> str:
    """The first few of many."""
    return f"[{', '.join(map(repr, numbers[:4]))}{', …' if len(numbers) > 4 else ''}]"


@dataclass(slots=True)
class TrainingState:
    """What a checkpoint holds besides tensors.

    Args:
        iteration: The training iteration; 0 for a release.
        release: Whether the checkpoint is a release: weights only, no iteration of its own.
        args: The run's arguments by name; empty where the format stores none.
        groups: The optimizer's param groups.
        scheduler: The learning-rate scheduler's state, or None.
        grad_scaler: The loss scaler's state, or None.
        other: Further values, each under the format's own key, that are equal on all ranks.
        by_steps: Whether a scheduler of Megatron-core's counts steps; Megatron-LM's counts samples.
    """

    iteration: int
    release: bool = False
    args: dict[str, object] = field(default_factory=dict)
    groups: tuple[ParamGroup, ...] = ()
    scheduler: dict[str, object] | None = None
    grad_scaler: object | None = None
    other: dict[str, object] = field(default_factory=dict)
    by_steps: bool = False


@dataclass(frozen=True, slots=True)
class Computed:
    """Tensors that are made of stored ones: sums with an adapter, weights times their scales.

    Args:
        root: Folder to which the files of the catalogue are relative; that of several checkpoints, as a rule.
        computations: What is computed, by the name of its record's file.
    """

    root: ReadablePath
    computations: Mapping[str, Computation]


@dataclass(slots=True)
class Family:
    """What a source has besides tensors and its :class:`TrainingState`: each family of names extends it, and so may a format.

    As it stands, it is that of a source of which nothing more is known.
    """

    names: ClassVar[str] = ""
    """Whose names they are, as :attr:`Names.family` has it."""
    homeless: ClassVar[Sequence[Rule[Any]]] = ()
    """What becomes of what only files of the source's own format have a place for."""

    @classmethod
    def of(cls: type[SomeFamily], source: Source) -> SomeFamily | None:
        """That of a source, if it is of this kind: how a writer asks for more of its own format's sources."""
        return source.family if isinstance(source.family, cls) else None

    @classmethod
    def needed(cls: type[SomeFamily], source: Source, to: str = "") -> SomeFamily:
        """That of a source which is to become a checkpoint of a format.

        Args:
            source: An opened checkpoint.
            to: Name of the target's format; without it, that of the family.

        Raises:
            Unsupported: It is of another kind.
        """
        found, to = cls.of(source), to or cls.names
        if found is None:
            if type(source.family) is Family:
                why = f"{source.format} says no more of its model than names and shapes, and {to} needs more"
                raise Unsupported(
                    f"from {source.format} to {to}: {why}\nIts reader gives no Source.family of either kind."
                )
            raise Unsupported(f"from {source.format} to {to}: this pair of formats is not supported yet")
        return found

    @property
    def config(self) -> Mapping[str, object]:
        """The model's description, as ``config.json`` has it; empty where it is not kept here."""
        return {}

    @property
    def shared(self) -> Mapping[str, str]:
        """Second names of tied parameters: ``{alias: owner}``. The catalogue has owners only."""
        return {}

    @property
    def buffers(self) -> tuple[str, ...]:
        """Names of persistent buffers; they are parameters of the model that are not trained."""
        return ()

    def inventory(self) -> Inventory:
        """What it has, item by item."""
        return {}

    def renamed(self, names: NewNames) -> Family:
        """What a source under other names has, or one without some of its tensors."""
        return self


@dataclass(frozen=True, slots=True)
class NewNames:
    """Who is who in a source that is seen under other names.

    Args:
        rename: The new name of any name of the source; None for what is left out.
        owners: For every parameter that is left, its old name.
        shared: Second names of tied parameters that are left, with their owners; both are new names.
    """

    rename: Callable[[str], str | None]
    owners: Mapping[str, str]
    shared: Mapping[str, str]

    def new(self) -> dict[str, list[str]]:
        """For every old name, what has become of it."""
        found: dict[str, list[str]] = {}
        for new, old in self.owners.items():
            found.setdefault(old, []).append(new)
        return found


@dataclass(slots=True)
class Source:
    """An opened checkpoint: nothing of its tensors has been read yet.

    Args:
        format: Name of the format.
        root: Folder to which all paths are relative.
        model: What the model is.
        catalog: Where every logical tensor lies.
        role: Whose model it is.
        parallel: How it is cut.
        state: What is not a tensor.
        files: All files, for checksums.
        states: Names of the optimizer's tensor states, without the parameter itself: ``master``, ``exp_avg``, …
        optimizer: What kind of optimizer wrote it: ``distributed``, ``plain``, ``zero1`` to ``zero3``, …, or None.
        notes: What a reader should know.
        family: What it has besides.
        computed: What of it is stored nowhere, but computed from files; None for an ordinary checkpoint.
        moved: Items of the source that this one was made of, and what they are a part of here; see :mod:`.crossing`.
        distrust: Why parameters and their masters may disagree though no byte is damaged: a fault of the framework that wrote
            them; empty where nothing of the kind is known.
        parity: Whether parameters are their masters, rounded; not in a run that keeps them in fewer bits than its files hold.
        unread: Why the optimizer was not read though it is there; empty where it was, or was not to be.
        refused: The error that this is for who needs the optimizer: nobody knows it, or no other layout can hold it.
        carried: Files that belong to the model and are none of its tensors: its config, tokenizer, code; None where there are none.
        of_run: Files of this step that lie in the run's root, outside of the step's folder, by path relative to the root.
        unplaced: Values in its files of which the reader does not know what they are; see :class:`.inventory.Unplaced`.
        digests: SHA-256 of files, by path, as a list in the checkpoint says that it should be; ``verify`` holds them against it.
        origin: What it was in another family and has no place for in this one; it waits in :mod:`.sidecar` for the way back.
        told: The model's ``config.json`` as whoever opened it was given it; nothing of its own.
    """

    format: str
    root: ReadablePath
    model: ModelSpec
    catalog: Chunks
    role: str = "actor"
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    state: TrainingState = field(default_factory=lambda: TrainingState(0))
    files: tuple[StoredFile, ...] = ()
    states: tuple[str, ...] = ()
    optimizer: str | None = None
    notes: Report = field(default_factory=Report)
    family: Family = field(default_factory=Family)
    computed: Computed | None = None
    distrust: str = ""
    parity: bool = True
    unread: str = ""
    refused: type[CheckpointError] = Unsupported
    carried: CarriedFiles | None = None
    of_run: tuple[Leftover, ...] = ()
    moved: Mapping[Item, Item] = field(default_factory=dict)
    unplaced: tuple[str, ...] = ()
    digests: Mapping[str, str] = field(default_factory=dict)
    origin: Mapping[str, object] = field(default_factory=dict)
    told: Mapping[str, object] = field(default_factory=dict)


FROM_ZERO = "one of the two trainers counts the steps that are done, the other numbers them from 0"
UPDATES = "DeepSpeed counts updates, of which a trainer may make several in a step"


def counted_on(source: Source, by: int, why: str = FROM_ZERO) -> Source:
    """The source at another number of its step, if it is of one.

    Args:
        source: An opened checkpoint.
        by: How many steps are to be added.
        why: Why there are two numbers.
    """
    if source.state.release or not source.state.iteration:
        return source
    at = source.state.iteration + by
    source.notes.through([_COUNTED_ON], {"own": source.state.iteration, "at": at, "why": why})
    held = {"iteration": at} if "iteration" in source.state.other else {}
    return replace(source, state=replace(source.state, iteration=at, other={**source.state.other, **held}))


_COUNTED_ON: Rule[Mapping[str, object]] = Rule(
    Fate.DERIVED, "iteration {own} becomes {at}: {why}", dict, [Item(Kind.VALUE, "iteration")]
)


def below(source: Source, root: ReadablePath) -> Source:
    """The source with its files named from a folder further up.

    Args:
        source: An opened checkpoint, of which nothing is computed.
        root: The folder.
    """
    inside = absolute(source.root).relative_to(absolute(root)).as_posix()
    folder = "" if inside == "." else f"{inside}/"
    files = tuple(replace(file, path=folder + file.path) for file in source.files)
    return replace(source, root=root, catalog=source.catalog.below(folder), files=files)


@contextmanager
def open_bytes(root: ReadablePath, computed: Computed | None) -> Iterator[SourceBytes]:
    """Where the bytes of a catalogue are.

    Args:
        root: Folder of its files, where nothing is computed.
        computed: What is computed of them.
    """
    from mcore_rlhf.core.computed import ComputedBytes

    with open_files(root if computed is None else computed.root) as files:
        yield files if computed is None else ComputedBytes(files, computed.computations)


def bytes_of(source: Source) -> AbstractContextManager[SourceBytes]:
    """Where the bytes of a source's catalogue are: its files, and what is computed of them."""
    return open_bytes(source.root, source.computed)


class Names:
    """Under whose names a format has its tensors; :class:`~mcore_rlhf.formats.base.Format` says the rest.

    Args:
        name: What the command line calls the format; empty where names alone are wanted.
        family: ``megatron``, or ``module`` for a torch module's own names, which are Hugging Face's.
        packs_experts: Whether the experts of a layer are one tensor, as transformers has them in memory, or one by one, as on disk.
        adapter: Whether it keeps an adapter alone.
        holds_adapters: Whether a model in it may have an adapter, under peft's names.
        weights_only: Whether a checkpoint of it holds a model alone, unless it is asked to keep more.
        lays_out_keys: Whether its keys, and names of tensors that a trainer has alone, are as the run had them that it came from.
        deals_groups: Whether its loader finds the parameters of a param group by their place: a run that goes on is asked for them.
        takes: What may be chosen of a target; other options are refused.
    """

    name: str = ""
    family: str = "module"
    packs_experts: bool = True
    adapter: bool = False
    holds_adapters: bool = False
    weights_only: bool = False
    lays_out_keys: bool = False
    deals_groups: bool = False
    takes: tuple[Takes, ...] = ()

    def roles(self, path: ReadablePath) -> Sequence[str]:
        """Whose models a folder of this format holds, where that may be several; elsewhere the folder's own name or place says it.

        Args:
            path: A folder of this format.
        """
        return ()
