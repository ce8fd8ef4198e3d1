"""A prompt as the sampler hands it out, and each data-parallel rank's part of a batch of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from ...errors import UsageError

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of one epoch, and the samples that are wanted of it.

    Args:
        prompt_id: Its index in the dataset.
        epoch: Counted from 0.
        position: Its place in the epoch's order, counted from 0.
        sample_seeds: One 63-bit seed for each of the group's samples, see :func:`.seeds.sample_seed`.
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
