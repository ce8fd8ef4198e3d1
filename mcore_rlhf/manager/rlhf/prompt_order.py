"""The one line in which all prompts of all epochs stand, whatever the number of ranks; a place in it is a *slot*."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ...errors import Problems, UsageError
from .prompts import Prompt
from .seeds import epoch_order, sample_seed

LastBatch: TypeAlias = Literal["carry", "short", "drop", "pad"]
"""What becomes of an epoch's last prompts when they do not fill a batch.

``carry``: the next epoch fills it up. ``short``: the batch is short. ``drop``: they are left out of this epoch.
``pad``: prompts from the epoch's beginning fill it up, marked as padding.
"""
LAST_BATCH: tuple[LastBatch, ...] = ("carry", "short", "drop", "pad")

_CACHED_EPOCHS = 2  # the one that is handed out, and the one that rollouts in flight are still from


@dataclass(frozen=True, slots=True)
class PromptOrder:
    """Which prompt stands in which slot: slot = epoch × epoch length + position.

    Args:
        num_prompts: Size of the dataset.
        seed: The run's seed.
        group_size: Samples of each prompt.
        shuffle: Whether each epoch has an order of its own, or all have the dataset's.
        epoch_length: Slots of an epoch: the dataset's size, or less or more of it to be a multiple of the batch size.
    """

    num_prompts: int
    seed: int
    group_size: int
    shuffle: bool
    epoch_length: int
    _orders: dict[int, NDArray[np.intp]] = field(default_factory=dict, repr=False, compare=False)

    def slot(self, epoch: int, position: int) -> int:
        """The slot of a position of an epoch."""
        return epoch * self.epoch_length + position

    def place(self, slot: int) -> tuple[int, int]:
        """The epoch and the position of a slot."""
        return divmod(slot, self.epoch_length)

    def prompt_id(self, slot: int) -> int:
        """Which prompt stands in a slot: its index in the dataset."""
        epoch, position = self.place(slot)
        position %= self.num_prompts  # padding begins again at the epoch's beginning
        return int(self._order(epoch)[position]) if self.shuffle else position

    def prompt(self, slot: int, pending: tuple[int, ...], *, reissued: bool) -> Prompt:
        """The prompt of a slot, as it is handed out."""
        epoch, position = self.place(slot)
        prompt_id = self.prompt_id(slot)
        seeds = tuple(sample_seed(self.seed, epoch, prompt_id, sample) for sample in range(self.group_size))
        return Prompt(prompt_id, epoch, position, seeds, pending, position >= self.num_prompts, reissued)

    def _order(self, epoch: int) -> NDArray[np.intp]:
        if epoch not in self._orders:
            while len(self._orders) >= _CACHED_EPOCHS:
                del self._orders[min(self._orders)]
            self._orders[epoch] = epoch_order(self.seed, epoch, self.num_prompts)
        return self._orders[epoch]


def epoch_length(num_prompts: int, batch_size: int | None, last_batch: LastBatch) -> int:
    """How many slots an epoch has.

    It depends on these numbers alone, not on where batches began, so that a resume drops or repeats the same prompts.

    Raises:
        UsageError: The batch size is missing, or an epoch would be empty.
    """
    if last_batch in ("carry", "short"):
        return num_prompts
    if batch_size is None:
        raise UsageError(f"last_batch={last_batch!r} needs the batch_size: an epoch's length is a multiple of it")
    whole = num_prompts // batch_size if last_batch == "drop" else -(-num_prompts // batch_size)
    if not whole:
        raise UsageError(
            f"last_batch='drop' leaves nothing of {num_prompts} prompts with batch_size={batch_size}\n"
            "Choose a smaller batch, or last_batch='carry'."
        )
    return whole * batch_size


def check_settings(
    num_prompts: int, group_size: int, epochs: int | None, batch_size: int | None, last_batch: LastBatch
) -> None:
    """Refuse impossible settings, all at once.

    Raises:
        UsageError: A number is below 1, or ``last_batch`` is not known.
    """
    problems = Problems()
    given = {"num_prompts": num_prompts, "group_size": group_size, "epochs": epochs, "batch_size": batch_size}
    for name, value in given.items():
        if value is not None and (type(value) is not int or value < 1):
            problems.add(UsageError, f"PromptSampler: {name}: expected a whole number of at least 1, found {value!r}")
    if last_batch not in LAST_BATCH:
        problems.add(UsageError, f"PromptSampler: last_batch: expected {', '.join(LAST_BATCH)}; found {last_batch!r}")
    problems.raise_if_any()
