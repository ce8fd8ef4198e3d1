"""How a manager works (when to save, what to keep, whether training waits, what is exported), and what it says about it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Literal

from mcore_rlhf.convert import convert
from mcore_rlhf.errors import Problems, UsageError, log_of
from mcore_rlhf.families.options import ConvertOptions, ReadOptions, WriteOptions
from mcore_rlhf.formats.registry import format_named
from mcore_rlhf.storage.settings import SCHEMES, StoreSettings, redacted, stores_with
from mcore_rlhf.storage.store import StorePath

from .policies import AnyOf, Deadline, SavePolicy
from .retention import Retention, exports_of
from .rng import Policy as RngPolicy
from .world import Worlds

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from torch.utils.tensorboard import SummaryWriter

_CHOICES = {
    "on_busy": ("wait", "refuse"),
    "on_error": ("raise", "continue"),
    "on_existing": ("refuse", "continue"),
    "rng": ("derive", "refuse", "ignore"),
    "check": ("bytes", "sizes"),
}

LOG = log_of("mcore_rlhf.manager")

Kind = Literal["save", "commit", "load", "skip", "delete", "clean", "export", "mirror", "drop", "retry", "failed"]

_LEVELS: dict[Kind, int] = {
    "skip": logging.WARNING, "drop": logging.WARNING, "retry": logging.WARNING, "failed": logging.ERROR, "delete": logging.DEBUG,
}  # fmt: skip
"""Deleting logs a line of its own, with the size, wherever it is done."""


def check_values(options: DataclassInstance, choices: Mapping[str, Sequence[str]], problems: Problems) -> None:
    """See that what options for saving have in common has values that it can have.

    Args:
        options: With ``timeout``, perhaps ``keep``, switches, and what :attr:`choices` names.
        choices: Of each option the words that it may be.
        problems: Takes what is wrong.
    """
    for name, allowed in choices.items():
        value = getattr(options, name)
        if value not in allowed:
            problems.add(UsageError, f"{name}: expected {' or '.join(map(repr, allowed))}, found {value!r}")
    for one in fields(options):
        value, kind = getattr(options, one.name), _KINDS.get(str(one.type))
        if kind is not None and not isinstance(value, kind):
            problems.add(UsageError, f"{one.name}: expected {one.type}, found {value!r}")
    timeout, keep = getattr(options, "timeout"), getattr(options, "keep", None)  # noqa: B009 - tags have no rules
    if not _is_positive(timeout) or timeout > _LONGEST_S:
        problems.add(
            UsageError, f"timeout: expected a positive number of seconds, {_LONGEST_S:g} at most, found {timeout!r}"
        )
    if keep is not None and not isinstance(keep, Retention):
        problems.add(UsageError, f"keep: expected a Retention, such as Retention([KeepLast(3)]), found {keep!r}")


_KINDS = {"bool": (bool,), "Deadline | None": (Deadline, NoneType), "Worlds | None": (Worlds, NoneType)}
"""Options that something else would pass for: a text that says no is true."""
_LONGEST_S = 1e9
"""What a rank waits for another one is a ``timedelta``, which holds no more for ever."""


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and value > 0


@dataclass(frozen=True, slots=True)
class Mirror:
    """A second place for committed steps, in an object store: they are sent there behind training.

    Args:
        url: Folder of all steps there: ``s3://checkpoints/run7``.
        keep: What is kept there; everything by default.
        most_waiting: So many steps that are not there yet stay in the root, whatever :attr:`ManagerOptions.keep` says; of more,
            the oldest are deleted by its rules.
        on_error: What a failure is: something that is said, and tried again (``continue``), or that the next save raises
            (``raise``).
        connections: Requests at a time, of each host.
        memory: Bytes that may be on their way, of each host.
        store: The store's settings by obstore's names, such as ``endpoint``; the environment's are read without.

    Raises:
        UsageError: Something has a value that it cannot have; all of it is named.
    """

    url: str
    keep: Retention | None = None
    most_waiting: int = 4
    on_error: Literal["continue", "raise"] = "continue"
    connections: int = 8
    memory: int = 256 << 20
    store: Mapping[str, str] = field(default_factory=dict, repr=False)  # keys and tokens may be among them

    def __post_init__(self) -> None:
        problems = Problems()
        if self.on_error not in ("continue", "raise"):
            problems.add(UsageError, f"mirror.on_error: expected 'continue' or 'raise', found {self.on_error!r}")
        for name in ("most_waiting", "connections", "memory"):
            if getattr(self, name) < 1:
                problems.add(UsageError, f"mirror.{name}: should be positive, found {getattr(self, name)}")
        problems.raise_if_any()
        object.__setattr__(self, "url", redacted(self.url))  # it is written into the root, into logs and events

    def open(self, patience: float | None = None) -> StorePath:
        """It, as it is now.

        Args:
            patience: Seconds for which a request that fails is tried again; None for three minutes.

        Raises:
            UsageError: It is no URL of a store that can be written to.
        """
        from mcore_rlhf.storage.objects import open_url  # a mirror is seldom meant

        scheme, _, rest = self.url.partition("://")
        if scheme not in SCHEMES or not rest.partition("/")[2].strip("/"):
            raise UsageError(
                f"mirror: {self.url}: expected a folder in an object store, such as s3://checkpoints/run7\n"
                "Steps on a file system need no mirror: the root itself may lie there."
            )
        with stores_with(StoreSettings(self.store, self.connections, patience=patience)):
            return open_url(self.url)


@dataclass(frozen=True, slots=True)
class ManagerOptions:
    """Everything that can be chosen.

    Args:
        save: When :meth:`~.manager.CheckpointManager.maybe_save` saves; nothing but signals by default.
        keep: What is kept of committed steps; everything by default.
        asynchronous: Whether saves go on behind training; ``save(blocking=…)`` overrides it.
        on_busy: What a save does while the one before is still being written: ``wait`` for it, or ``refuse``.
        on_error: What a save is that fails: an error that the next call raises (``raise``), or an event, after which training goes on
            (``continue``); then :meth:`~.manager.CheckpointManager.close` alone raises it, if no save has succeeded since.
        save_retries: How often a save that failed is tried again behind training, after 1 s, 2 s, 4 s and so on; the same on all ranks.
            A copy that went in waves (``max_host_memory``) is not there any more: the next ``maybe_save`` after so long saves what is; of
            several worlds, the next save that all are told to make.
        save_timeout: Seconds for which a save may make no progress on a rank. After that it is left to itself, and the next one starts
            afresh. None for no limit. It should be longer than the file system takes to sync one file.
        lazy_snapshot: Whether what no forward or backward pass changes (parameters, optimizer states) is copied behind these passes, and
            waited for before the optimizer's next step, which the roles' engines see to; buffers, random states and all others are copied
            inside ``save`` as before. Whatever else changes weights calls :meth:`~.manager.CheckpointManager.before_step` first; a
            write that torch can see is noticed, and that save fails.
        max_host_memory: Bytes of host memory that the copies of all processes which save into this root on a host may take together, of
            whatever world, each as large a part as of what is copied. What does not fit is copied in waves, each written before its memory
            is used again, and training waits for the last wave; None for no limit.
        link_unchanged: Whether a file that would be byte for byte one that is there already, such as a frozen reference model's, is not
            written again, but is another name (a hard link) of the same role's in the step before, or of another role's in this one. It
            is compared, not guessed; in waves, it is written before that, and dropped again. Not files that several ranks write together.
        on_existing: What the first save does in a root that holds committed steps which this run has neither loaded nor
            written: ``refuse``, or ``continue`` among them.
        fsync: Whether a step is on the disk before it appears. Without, a crash of the machine can lose or tear it.
        rng: On resume at another layout: ``derive`` RNG states, ``refuse``, or ``ignore`` them.
        follow_links: Whether links may lead out of the root, to a scratch disk say; without, a file that lies elsewhere is refused.
        check: What is verified before a step is loaded: every byte that is read (``bytes``), or lengths only (``sizes``).
        timeout: Seconds to wait for a rank that does not come.
        catch_signals: Whether SIGTERM and SIGUSR1 save and stop the run at the next step boundary.
        deadline: When the job ends; by default SLURM's environment is asked.
        exports: By-products to make of committed steps.
        provenance: For every manifest: git revision, hash of the configuration.
        on_event: Hears of everything that happens; may be called from the thread that writes.
        tensorboard: Folder for scalars, or None.
        read_only: Whether this run only loads: nothing is locked, made or cleaned up.
        worlds: Other ``torch.distributed`` worlds that save with this one.
        mirror: Where committed steps are sent as well, a URL or more; :meth:`~.manager.CheckpointManager.load` looks there, too.

    Raises:
        UsageError: Something has a value that it cannot have; all of it is named.
    """

    save: SavePolicy = field(default_factory=AnyOf)
    keep: Retention | None = None
    asynchronous: bool = True
    on_busy: Literal["wait", "refuse"] = "wait"
    on_error: Literal["raise", "continue"] = "raise"
    save_retries: int = 0
    save_timeout: float | None = None
    lazy_snapshot: bool = False
    max_host_memory: int | None = None
    link_unchanged: bool = False
    on_existing: Literal["refuse", "continue"] = "refuse"
    fsync: bool = True
    rng: RngPolicy = "derive"
    follow_links: bool = False
    check: Literal["bytes", "sizes"] = "bytes"
    timeout: float = 600.0
    catch_signals: bool = True
    deadline: Deadline | None = None
    exports: Sequence[Export] = ()
    provenance: Mapping[str, object] = field(default_factory=dict)
    on_event: Hook | None = None
    tensorboard: Path | None = None
    read_only: bool = False
    worlds: Worlds | None = None
    mirror: Mirror | str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.mirror, str):
            object.__setattr__(self, "mirror", Mirror(self.mirror))
        problems = Problems()
        check_values(self, _CHOICES, problems)
        if self.save_timeout is not None and not _is_positive(self.save_timeout):
            problems.add(
                UsageError, f"save_timeout: expected a positive number of seconds, found {self.save_timeout!r}"
            )
        if type(self.save_retries) is not int or self.save_retries < 0:
            problems.add(UsageError, f"save_retries: expected a whole number from 0 on, found {self.save_retries!r}")
        if self.max_host_memory is not None and (type(self.max_host_memory) is not int or self.max_host_memory < 1):
            text = f"max_host_memory: expected a number of bytes, found {self.max_host_memory!r}"
            problems.add(UsageError, text)
        if not callable(getattr(self.save, "wants", None)):
            problems.add(UsageError, f"save: expected a policy, such as EverySteps(10), found {self.save!r}")
        problems.raise_if_any()


@dataclass(frozen=True, slots=True)
class Export:
    """What to make, and how often. It lies in ``<root>/exports/global_step_N/<format>`` and is deleted with its step.

    Args:
        format: Name of the target's format, such as ``hf``.
        every: At every multiple of so many steps, as far as these are saved.
        role: Whose model.
        write: What the target is to be: degrees, dtype, without optimizer.

    Raises:
        UsageError: There is no such format, or ``every`` is not positive.
    """

    format: str
    every: int = 1
    role: str = "actor"
    write: WriteOptions = field(default_factory=lambda: WriteOptions(no_optimizer=True))

    def __post_init__(self) -> None:
        format_named(self.format)
        if self.every < 1:
            raise UsageError(f"export: every should be positive, found {self.every}")

    def wants(self, step: int) -> bool:
        """Whether a step is to be exported."""
        return step % self.every == 0

    def run(self, step_folder: Path) -> Path:
        """Convert one role of a committed step.

        Raises:
            CheckpointError: It cannot be converted; the step itself is not touched.
        """
        target = exports_of(step_folder) / self.format
        read, write = ReadOptions(role=self.role), self.write
        convert(step_folder / self.role, target, ConvertOptions(to=self.format, read=read, write=write, overwrite=True))
        return target


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a step.

    Args:
        kind: ``save``: the live state was copied aside, and training goes on. ``commit``: the step is published. ``load``: a
            step was loaded. ``skip``: a step was passed over on resume. ``delete``, ``clean``: a step, or what a dead run had
            left, was removed. ``export``: a by-product was made. ``mirror``: the step is published in the mirror. ``drop``: it was deleted
            before it was. ``retry``: a save failed, and is tried again.
            ``failed``: a save, or a by-product, was given up, or the mirror cannot be written now.
        step: The step; None where there is none.
        rank: The rank that says so.
        values: Numbers: ``stall_s``, ``seconds``, ``bytes``, ``gb_per_s``.
        text: One line for people; may be empty.
    """

    kind: Kind
    step: int | None
    rank: int
    values: Mapping[str, float] = field(default_factory=dict)
    text: str = ""

    def __str__(self) -> str:
        """``rank=0 step=50 event=commit seconds=1.2 bytes=…: text``."""
        numbers = [f"{name}={_number(value)}" for name, value in self.values.items()]
        step = [] if self.step is None else [f"step={self.step}"]
        line = " ".join([f"rank={self.rank}", *step, f"event={self.kind}", *numbers])
        return f"{line}: {self.text}" if self.text else line


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else f"{value:.4g}"


Hook = Callable[[Event], None]


@dataclass(slots=True)
class Reporter:
    """Passes events on.

    Args:
        rank: This rank.
        hook: The user's own; it may be called from the thread that writes. What it raises is logged.
        tensorboard: Folder for scalars ``checkpoint/stall_s`` and so on, written by rank 0; None for none.
    """

    rank: int
    hook: Hook | None = None
    tensorboard: Path | None = None
    _writer: SummaryWriter | None = None

    def say(self, kind: Kind, step: int | None, text: str = "", **values: float) -> None:
        """Report an event on this rank."""
        event = Event(kind, step, self.rank, values, text)
        LOG.log(_LEVELS.get(kind, logging.INFO), "%s", event)
        for what, listener in (("TensorBoard's writer", self._scalars), ("the on_event hook", self.hook)):
            if listener is not None:
                try:
                    listener(event)
                except Exception:  # nobody who only listens breaks a save
                    LOG.exception("rank=%d: %s failed at %s", self.rank, what, event)

    def _scalars(self, event: Event) -> None:
        if self.tensorboard is None or self.rank != 0 or event.step is None:
            return
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self.tensorboard))
        for name, value in event.values.items():
            self._writer.add_scalar(f"checkpoint/{event.kind}/{name}", value, event.step)

    def close(self) -> None:
        """Flush scalars."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
