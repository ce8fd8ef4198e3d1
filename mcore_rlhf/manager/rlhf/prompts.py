"""Prompts: the one line in which those of all epochs stand, whatever the number of ranks, and how they are handed out.

A place in the line is a *slot*. The order of the prompts in an epoch and the seed of every sample are pure functions of a few
numbers and of hash functions with a public standard (FIPS 180-4, FIPS 202): they do not depend on the number of ranks, on the
version of numpy or torch, or on what was drawn before.
"""

from __future__ import annotations

import hashlib
import json
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, SupportsIndex, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from ...errors import Problems, UsageError

Item = TypeVar("Item")

ORDER_VERSION = 1
"""Changes when :func:`epoch_order` changes; a saved cursor means nothing in another order."""

_WORD_NBYTES = 8

LastBatch: TypeAlias = Literal["carry", "short", "drop", "pad"]
"""What becomes of an epoch's last prompts when they do not fill a batch.

``carry``: the next epoch fills it up. ``short``: the batch is short. ``drop``: they are left out of this epoch.
``pad``: prompts from the epoch's beginning fill it up, marked as padding.
"""

LAST_BATCH: tuple[LastBatch, ...] = ("carry", "short", "drop", "pad")

_CACHED_EPOCHS = 2  # the one that is handed out, and the one that rollouts in flight are still from


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of one epoch, and the samples that are wanted of it.

    Args:
        prompt_id: Its index in the dataset.
        epoch: Counted from 0.
        position: Its place in the epoch's order, counted from 0.
        sample_seeds: One 63-bit seed for each of the group's samples, see :func:`sample_seed`.
        pending: The samples that training has not acknowledged: all of a fresh prompt, the rest of one that a resume
            issues again. A group's baseline needs all samples; only these may be trained on.
        padding: Whether it only fills the epoch's last batch up (``last_batch="pad"``) and repeats a prompt; give it
            a loss weight of 0, and acknowledge it like any other.
        reissued: Whether it was in flight when the state was saved.
    """

    prompt_id: int
    epoch: int
    position: int
    sample_seeds: tuple[int, ...]
    pending: tuple[int, ...]
    padding: bool = False
    reissued: bool = False

    @property
    def group_size(self) -> int:
        """How many samples the group has, acknowledged ones included."""
        return len(self.sample_seeds)

    def __str__(self) -> str:
        return f"prompt {self.prompt_id} (epoch {self.epoch}, position {self.position})"


def shard(
    batch: Sequence[Item], dp_rank: int, dp: int, how: Literal["contiguous", "strided"] = "contiguous"
) -> list[Item]:
    """One data-parallel rank's part of a global batch; the parts are disjoint and cover it.

    Args:
        batch: The same batch on every rank.
        dp_rank: This rank, counted from 0.
        dp: How many ranks share the batch. Parts differ by at most one prompt where it does not divide the batch.
        how: ``contiguous``: rank 0 has the first prompts; ``strided``: rank 0 has every dp-th prompt.

    Raises:
        UsageError: There is no such rank, or no such way.
    """
    if not 0 <= dp_rank < dp:
        raise UsageError(f"data-parallel rank {dp_rank} of {dp}: expected a rank from 0 to {dp - 1}")
    if how == "strided":
        return list(batch[dp_rank::dp])
    if how != "contiguous":
        raise UsageError(f"shard: expected 'contiguous' or 'strided', found {how!r}")
    return list(batch[dp_rank * len(batch) // dp : (dp_rank + 1) * len(batch) // dp])


def sample_seed(run_seed: SupportsIndex, epoch: SupportsIndex, prompt_id: SupportsIndex | str, sample: int) -> int:
    """The seed of one sample of one prompt: a re-issued prompt regenerates the same rollout for the same weights.

    Args:
        run_seed: The run's seed, any whole number.
        epoch: Counted from 0.
        prompt_id: Which prompt: its index in the dataset, or a name.
        sample: Which of the group's samples, counted from 0.

    Returns:
        A whole number of 63 bits, so that it fits every framework's signed 64-bit seed.
    """
    name = prompt_id if isinstance(prompt_id, str) else operator.index(prompt_id)
    digest = _digest("sample", operator.index(run_seed), operator.index(epoch), name, operator.index(sample))
    return int.from_bytes(digest[:_WORD_NBYTES], "big") >> 1


def epoch_order(run_seed: SupportsIndex, epoch: SupportsIndex, num_prompts: int) -> NDArray[np.intp]:
    """The order in which an epoch takes the prompts.

    Prompt i gets the i-th 64-bit word of the SHAKE-256 stream of SHA-256(seed, epoch), and the prompts are sorted by
    their words (equal words, of which 2^-64·n²/2 are expected, by index).

    Args:
        run_seed: The run's seed, any whole number.
        epoch: Counted from 0.
        num_prompts: Size of the dataset.

    Returns:
        A permutation of ``range(num_prompts)``, shape (num_prompts,).
    """
    key = _digest("order", operator.index(run_seed), operator.index(epoch))
    stream = hashlib.shake_256(key).digest(_WORD_NBYTES * num_prompts)
    return np.argsort(np.frombuffer(stream, dtype="<u8"), kind="stable")


def _digest(purpose: str, *values: int | str) -> bytes:
    """SHA-256 of a JSON list: values cannot run into each other, and 5 is not "5"."""
    return hashlib.sha256(json.dumps(["mcore_rlhf", purpose, 1, *values]).encode("ascii")).digest()


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
