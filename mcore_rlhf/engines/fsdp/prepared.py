"""A load that was checked on this rank: nothing has been changed yet."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from mcore_rlhf.core.account import Report
from mcore_rlhf.core.execute import FileRun
from mcore_rlhf.errors import CheckpointError
from mcore_rlhf.storage.mapped import MappedFiles

from ..memory import LiveMemory, Unchecked
from ..stateful import Stateful
from ..undoing import Undo
from ..writable import copied
from .restoring import ShardedOptimizerLoad
from .through_plan import Planned, memory_of

WINDOW_BYTES = 8 << 20


@dataclass(slots=True)
class PreparedFsdpLoad:
    """Everything that is needed to overwrite the live parts on this rank.

    Args:
        planned: The load.
        optimizer: The optimizer's part of it, or None.
        handed: What others' code takes back: a scheduler with its state.
        extra: Modules that have an extra state, with the stored one.
        more: Files that were read already, while the load was prepared.
        done: Called when the live model is the loaded one.
    """

    planned: Planned
    optimizer: ShardedOptimizerLoad | None
    handed: Sequence[tuple[Stateful, dict[str, object]]]
    extra: Sequence[tuple[torch.nn.Module, object]]
    more: Sequence[Path]
    done: Callable[[], None]
    rng: Mapping[str, object] | None = None
    files: Sequence[Path] = field(init=False)

    def __post_init__(self) -> None:
        self.files = tuple(dict.fromkeys((*self.more, *self.planned.files)))

    @property
    def report(self) -> Report:
        """What is kept, derived, changed and lost."""
        return self.planned.report

    def install(self, undo: Undo) -> None:
        """All that may refuse: the optimizer, the schedules, extra states.

        Raises:
            CheckpointError: A part refused its state.
        """
        if self.optimizer is not None:
            with self._saying("optimizer"):
                self.optimizer.read()
                self.optimizer.install(undo)
        for scheduler, state in self.handed:
            with self._saying("lr_scheduler"):
                undo.handed(scheduler, state)
        for module, value in self.extra:
            with self._saying(f"the extra state of {type(module).__name__}"):
                undo.note(partial(module.set_extra_state, copied(module.get_extra_state())))
                module.set_extra_state(value)

    def fill(self) -> None:
        """The tensors, in place.

        Raises:
            StorageError: A file cannot be read any more.
        """
        self._fill()
        self.done()

    def _fill(self) -> None:
        slots = self.planned.slots
        states = self.optimizer.memory if self.optimizer is not None else {}
        wanted = [slot for slot in slots if slot.record.numel and (slot.state == "param" or slot.record.key in states)]
        memory = LiveMemory(memory_of(wanted, states))
        with MappedFiles(self.planned.source.root) as files, torch.no_grad():
            records = [slot.record for slot in wanted]
            FileRun(self.planned.plan, records, files, memory, Unchecked(), WINDOW_BYTES).run()
        memory.finish()

    @contextmanager
    def _saying(self, part: str) -> Iterator[None]:
        """Others' code may raise anything; the user is to hear whose state it was, and that nothing has changed."""
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(
                f"{self.planned.source.root}: {part} refused its state: {type(error).__name__}: {error}\n"
                "What had been loaded was put back. Build this part as it was when it was saved, or load the weights alone: "
                "load(optimizer=False)."
            ) from error
