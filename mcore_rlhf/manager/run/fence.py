"""Where training waits until what a save still copies may change: before an optimizer's next step."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mcore_rlhf.engines.base import Engine
from mcore_rlhf.engines.until_step import Steps, UntilStep, hook, hook_all
from mcore_rlhf.errors import StorageError, headline

from .options import LOG, ManagerOptions, Reporter
from .stream import Stream
from .world import World

if TYPE_CHECKING:
    import torch


@dataclass(slots=True, eq=False)
class Fence:
    """Before it live tensors are as they were when a save began; behind it they may change.

    Args:
        world: The ranks.
        options: The manager's.
        reporter: Hears of a copy that is given up.
    """

    world: World
    options: ManagerOptions
    reporter: Reporter
    _stream: Stream | None = None
    _step: int = 0
    _report: dict[str, object] = field(default_factory=dict)
    _hooked: weakref.WeakKeyDictionary[torch.optim.Optimizer, Callable[[], None]] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    _said: set[str] = field(default_factory=set)
    _still: tuple[UntilStep, ...] = ()
    _unhook: Callable[[], None] = lambda: None

    def of(self, roles: Mapping[str, Engine]) -> dict[str, UntilStep]:
        """By role, what stays as it is until :meth:`wait`, which all its optimizers call from now on before they step."""
        found = {}
        for role, engine in roles.items():
            until = engine.until_step() if isinstance(engine, Steps) else None
            if until is not None:
                found[role] = until
            elif role not in self._said:
                self._said.add(role)
                text = "lazy_snapshot: role %s is copied inside save(): it has no optimizer that calls hooks before it steps"
                LOG.info(text, role)
            for optimizer in () if until is None else until.optimizers:
                if optimizer not in self._hooked:
                    self._hooked[optimizer] = hook(optimizer, self.wait)
        self._unhook()
        self._still, self._unhook = (
            tuple(found.values()),
            hook_all(self._wait_for_a_stranger) if found else lambda: None,
        )
        return found

    def _wait_for_a_stranger(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer that no role names may train what a role saves, and torch does not count what fused kernels write."""
        if (
            self._stream is not None
            and optimizer not in self._hooked
            and any(until.trains(optimizer) for until in self._still)
        ):
            self.wait()

    def begin(self, stream: Stream, step: int, report: dict[str, object]) -> None:
        """Something is copied behind training, or before it goes on.

        Args:
            stream: It; it is started, and what is urgent of it is waited for.
            step: The step, for messages.
            report: The manifest's; what training waits here is added to ``stall_seconds``.

        Raises:
            StorageError: See :meth:`wait`.
        """
        self._stream, self._step, self._report = stream, step, report
        stream.start()
        if stream.urgent:
            self._wait_for(stream, only_urgent=True)

    def wait(self) -> None:
        """Wait until live tensors may change; at once where nothing is being copied. Not collective.

        Raises:
            StorageError: The copy has stood still for :attr:`ManagerOptions.timeout`, and training is not to go on without it.
        """
        if (stream := self._stream) is not None:
            self._wait_for(stream)
            if self._stream is stream:
                self._stream, self._still = None, ()

    def _wait_for(self, stream: Stream, only_urgent: bool = False) -> None:
        started = time.monotonic()
        if not stream.fence(self.options.timeout, only_urgent):
            text = f"{self.world.name}: the copy of step {self._step} into host memory has stood still for {self.options.timeout:g} s, "
            error = StorageError(
                f"{text}at {stream}\nWhat is written behind it may hang; without the copy, this step cannot be saved any more."
            )
            if self.options.on_error == "raise":
                raise error
            stream.cancel()
            self.reporter.say("failed", self._step, f"{headline(str(error))}; training goes on")
        if self._stream is stream:
            before = self._report["stall_seconds"]
            assert isinstance(before, float)
            self._report["stall_seconds"] = before + time.monotonic() - started

    def close(self) -> None:
        """Nothing waits here any more."""
        for remove in self._hooked.values():
            remove()
        self._hooked.clear()
        self._unhook()
        self._unhook, self._still = lambda: None, ()
