"""How a manager works: when to save, what to keep, whether training waits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from mcore_rlhf.errors import Problems, UsageError

from .crew import Worlds
from .events import Hook
from .export import Export
from .policies import AnyOf, Deadline, SavePolicy
from .retention import Retention
from .rng import Policy as RngPolicy


@dataclass(frozen=True, slots=True)
class ManagerOptions:
    """Everything that can be chosen.

    Args:
        save: When :meth:`~.checkpoint_manager.CheckpointManager.maybe_save` saves; nothing but signals by default.
        keep: What is kept of committed steps; everything by default.
        asynchronous: Whether saves go on behind training; ``save(blocking=…)`` overrides it.
        on_busy: What a save does while the one before is still being written: ``wait`` for it, or ``refuse``.
        on_existing: What the first save does in a root that holds committed steps which this run has neither loaded nor
            written: ``refuse``, or ``continue`` among them.
        fsync: Whether a step is on the disk before it appears. Without, a crash of the machine can lose or tear it.
        rng: On resume at another layout: ``derive`` random states, ``refuse``, or ``ignore`` them.
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

    Raises:
        UsageError: Something has a value that it cannot have; all of it is named.
    """

    save: SavePolicy = field(default_factory=AnyOf)
    keep: Retention | None = None
    asynchronous: bool = True
    on_busy: Literal["wait", "refuse"] = "wait"
    on_existing: Literal["refuse", "continue"] = "refuse"
    fsync: bool = True
    rng: RngPolicy = "derive"
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

    def __post_init__(self) -> None:
        problems = Problems()
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                problems.add(UsageError, f"{name}: expected {' or '.join(map(repr, allowed))}, found {value!r}")
        if not self.timeout > 0:
            problems.add(UsageError, f"timeout: expected a positive number of seconds, found {self.timeout!r}")
        keep: object = self.keep
        if keep is not None and not isinstance(keep, Retention):
            problems.add(UsageError, f"keep: expected a Retention, such as Retention([KeepLast(3)]), found {keep!r}")
        if not callable(getattr(self.save, "wants", None)):
            problems.add(UsageError, f"save: expected a policy, such as EverySteps(10), found {self.save!r}")
        problems.raise_if_any()


_CHOICES = {
    "on_busy": ("wait", "refuse"), "on_existing": ("refuse", "continue"), "rng": ("derive", "refuse", "ignore"),
    "check": ("bytes", "sizes"),
}  # fmt: skip
