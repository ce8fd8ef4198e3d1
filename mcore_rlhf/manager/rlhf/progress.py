"""How far a sampler is: what was handed out, what of it is in flight, and what is to be issued again."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...errors import UsageError
from .prompt_order import PromptOrder
from .prompts import Prompt


@dataclass(slots=True)
class Progress:
    """Slots that were handed out. What lies below ``yielded`` and is not in flight has been trained on.

    Args:
        yielded: The first slot that was never handed out.
        in_flight: Slots that were handed out and not wholly acknowledged, and their samples that are pending.
        waiting: Slots in flight that a resume issues again, in their order: a set that is also a queue.
    """

    yielded: int = 0
    in_flight: dict[int, tuple[int, ...]] = field(default_factory=dict)
    waiting: dict[int, None] = field(default_factory=dict)

    @property
    def consumed(self) -> int:
        """How many slots have been trained on."""
        return self.yielded - len(self.in_flight)

    @property
    def next_slot(self) -> int:
        """The slot that is issued next."""
        return next(iter(self.waiting), self.yielded)

    def issue(self, whole_group: tuple[int, ...]) -> bool:
        """Hand out the next slot; whether that is the second time.

        Args:
            whole_group: The samples that are pending of a fresh slot.
        """
        slot = self.next_slot
        if slot in self.waiting:
            del self.waiting[slot]
            return True
        self.yielded += 1
        self.in_flight[slot] = whole_group
        return False

    def use(self, slot: int, samples: tuple[int, ...]) -> None:
        """Note that samples of a slot in flight have been trained on."""
        left = tuple(sample for sample in self.in_flight[slot] if sample not in samples)
        if left:
            self.in_flight[slot] = left
        else:
            del self.in_flight[slot]


def check_pending(order: PromptOrder, progress: Progress, prompt: Prompt, samples: tuple[int, ...]) -> None:
    """Refuse to acknowledge what was not handed out, or was acknowledged already.

    Raises:
        UsageError: The prompt, and the sample where it is about one, are named.
    """
    slot = order.slot(prompt.epoch, prompt.position)
    if not 0 <= prompt.position < order.epoch_length or not 0 <= slot < progress.yielded:
        raise UsageError(f"acknowledge: {prompt} has never been handed out by this sampler")
    if order.prompt_id(slot) != prompt.prompt_id:
        raise UsageError(f"acknowledge: {prompt}: that place holds prompt {order.prompt_id(slot)}")
    if slot not in progress.in_flight:
        raise UsageError(f"acknowledge: {prompt} was acknowledged already")
    if slot in progress.waiting:
        raise UsageError(
            f"acknowledge: {prompt} waits to be issued again after a resume\n"
            "Take it from next_batch; or, if its rollout was stored, claim it first."
        )
    _check_samples(prompt, samples, progress.in_flight[slot])


def _check_samples(prompt: Prompt, samples: tuple[int, ...], pending: tuple[int, ...]) -> None:
    for index, sample in enumerate(samples):
        if not 0 <= sample < prompt.group_size:
            raise UsageError(f"acknowledge: {prompt} has {prompt.group_size} samples, and no sample {sample}")
        if sample not in pending or sample in samples[:index]:
            raise UsageError(f"acknowledge: sample {sample} of {prompt} was acknowledged already")
