"""The prompt sampler: one global order, whatever the number of ranks, and a cursor of what training has *consumed*.

::

    sampler = PromptSampler.for_dataset(prompts, seed=1234, group_size=8, epochs=3, batch_size=64)
    while batch := sampler.next_batch():                     # the same batch on every rank
        train(shard(batch, dp_rank, dp))
        sampler.acknowledge_all(batch)                       # the same on every rank
        manager.maybe_save(step)                             # saves sampler.state_dict()

A prompt that was handed out and not acknowledged is *in flight*. A state that is saved then names it, and the sampler
that loads the state issues it again, first and in the original order: each prompt is trained on exactly once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from ...errors import Corrupt, LayoutMismatch, Problems, UsageError, log_of
from ...storage.records import Natural, record_of, told
from .data_state import WHERE, DataState, Fingerprint, Indexable, fingerprint, pack, unpack
from .prompts import ORDER_VERSION, LastBatch, Prompt, PromptOrder, check_settings, epoch_length

if TYPE_CHECKING:
    from ...engines.stateful import Undo

_SETTINGS = ("order", "seed", "group_size", "shuffle", "num_prompts", "epoch_length")

_KEEP = "Resume with the settings that the run was started with, or start the data anew by not loading this file."

KIND = "prompt_sampler"

_logger = log_of(__name__)

_DATASET_ADVICE = (
    "Resume with the dataset that the run was started with, or let the data begin again at epoch 0 of the new one: "
    "on_dataset_change='restart'."
)


@dataclass(frozen=True, slots=True)
class NextPlace:
    """Where the order goes on.

    Args:
        epoch, position: The first place that was never handed out.
    """

    epoch: Natural
    position: Natural


@dataclass(frozen=True, slots=True)
class PendingPrompt:
    """A prompt that was handed out, and not wholly acknowledged.

    Args:
        epoch, position: Its place.
        prompt_id: Which prompt stands there.
        pending: Its samples that training has not consumed.
    """

    epoch: Natural
    position: Natural
    prompt_id: Natural
    pending: tuple[Natural, ...]


@dataclass(frozen=True, slots=True)
class SamplerState:
    """What is saved: a record that a person can read. Its size depends on what is in flight, not on what was consumed.

    Args:
        order: The version of the order.
        seed, group_size, shuffle, num_prompts, epoch_length: See :class:`~.prompts.PromptOrder`.
        next: Where it goes on.
        consumed: How many prompts training has consumed.
        in_flight: See :class:`PendingPrompt`.
    """

    order: int
    seed: int
    group_size: int
    shuffle: bool
    num_prompts: int
    epoch_length: int
    next: NextPlace
    consumed: int
    in_flight: tuple[PendingPrompt, ...]


@dataclass(slots=True)
class SamplerProgress:
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


def check_pending(order: PromptOrder, progress: SamplerProgress, prompt: Prompt, samples: tuple[int, ...]) -> None:
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


def to_state(order: PromptOrder, progress: SamplerProgress) -> SamplerState:
    """What is to be saved."""
    in_flight = tuple(_entry(order, slot, pending) for slot, pending in sorted(progress.in_flight.items()))
    return SamplerState(
        **_settings(order),
        next=NextPlace(*order.place(progress.yielded)),
        consumed=progress.consumed,
        in_flight=in_flight,
    )


def _settings(order: PromptOrder) -> dict[str, Any]:
    return {"order": ORDER_VERSION, **{name: getattr(order, name) for name in _SETTINGS if name != "order"}}


def _entry(order: PromptOrder, slot: int, pending: tuple[int, ...]) -> PendingPrompt:
    return PendingPrompt(*order.place(slot), order.prompt_id(slot), pending)


def check_settings_match(state: SamplerState, order: PromptOrder, problems: Problems) -> None:
    """Note every setting that changed and that decides which prompt stands where; the dataset's size is not one."""
    now = _settings(order)
    same_dataset = state.num_prompts == order.num_prompts
    for name in _SETTINGS:
        if name == "num_prompts" or (name == "epoch_length" and not same_dataset):
            continue
        if getattr(state, name) != now[name]:
            what = f"{name} (of batch_size and last_batch)" if name == "epoch_length" else name
            problems.add(
                LayoutMismatch,
                f"{WHERE}: {what}: expected {now[name]!r}, as this run has, found {getattr(state, name)!r}",
                _KEEP,
            )


def read_progress(state: SamplerState, order: PromptOrder, epochs: int | None) -> SamplerProgress:
    """The progress that a state of the same settings and dataset describes.

    Args:
        state: Has passed :func:`check_settings_match`.
        order: The sampler's.
        epochs: How many epochs the run has now; None without end.

    Raises:
        CheckpointError: Its numbers contradict each other, or go beyond the run's epochs; all of them are named.
    """
    next_place, length = state.next, order.epoch_length
    progress = SamplerProgress(order.slot(next_place.epoch, next_place.position))
    problems = Problems()
    if next_place.position >= length:
        problems.add(Corrupt, f"{WHERE}: state.next: expected a position below {length}, found {next_place.position}")
    for entry in state.in_flight:
        for text in _contradictions(entry, order, progress):
            problems.add(Corrupt, f"{WHERE}: state.in_flight: {text}")
        progress.in_flight[order.slot(entry.epoch, entry.position)] = tuple(sorted(entry.pending))
    if progress.consumed != state.consumed:
        text = f"expected {progress.consumed} (handed out − in flight), found {state.consumed}"
        problems.add(Corrupt, f"{WHERE}: state.consumed: {text}")
    if epochs is not None and progress.yielded > epochs * length:
        text = f"the run has {epochs} now, but prompts of epoch {(progress.yielded - 1) // length} have been handed out"
        problems.add(LayoutMismatch, f"{WHERE}: epochs: {text}", _KEEP)
    problems.raise_if_any()
    progress.waiting = dict.fromkeys(sorted(progress.in_flight))
    return progress


def _contradictions(entry: PendingPrompt, order: PromptOrder, progress: SamplerProgress) -> Iterator[str]:
    slot, pending = order.slot(entry.epoch, entry.position), entry.pending
    name = f"epoch {entry.epoch}, position {entry.position}"
    if entry.position >= order.epoch_length or slot >= progress.yielded:
        yield f"{name} was never handed out"
    elif order.prompt_id(slot) != entry.prompt_id:
        yield f"{name} holds prompt {order.prompt_id(slot)}, found {entry.prompt_id}"
    if slot in progress.in_flight:
        yield f"{name} appears twice"
    if not pending or len(set(pending)) < len(pending) or max(pending) >= order.group_size:
        yield f"{name}: expected samples below {order.group_size}, each once, found {pending}"


class Cursor(NamedTuple):
    """A place in the order: at the end of epoch 0 it is (1, 0)."""

    epoch: int
    position: int


class PromptSampler:
    """Hands out the prompts of a dataset in global batches, and knows which of them training has consumed.

    Use it from one thread: on the driver, or on every rank with the same calls.

    Args:
        num_prompts: Size of the dataset.
        seed: The run's seed.
        group_size: Samples of each prompt (GRPO's group; 1 for PPO).
        shuffle: Whether each epoch has an order of its own, or all have the dataset's.
        epochs: How many; None without end. May change between runs.
        batch_size: Prompts in a global batch, where ``next_batch`` is not told.
        last_batch: What becomes of an epoch's last prompts, see :data:`.prompts.LastBatch`.
        dataset: Its fingerprint, to notice on resume that it changed.
        on_dataset_change: ``refuse`` a state of another dataset, or ``restart`` at the new one's first epoch.

    Raises:
        UsageError: Settings are impossible; all of them are named.
    """

    scope: ClassVar[Literal["driver"]] = "driver"
    """The state is the same on every rank, so that one of them saves it (compare :class:`.carried.Carried`)."""

    def __init__(
        self,
        num_prompts: int,
        *,
        seed: int,
        group_size: int = 1,
        shuffle: bool = True,
        epochs: int | None = None,
        batch_size: int | None = None,
        last_batch: LastBatch = "carry",
        dataset: Fingerprint | None = None,
        on_dataset_change: Literal["refuse", "restart"] = "refuse",
    ) -> None:
        check_settings(num_prompts, group_size, epochs, batch_size, last_batch)
        if on_dataset_change not in ("refuse", "restart"):
            raise UsageError(f"on_dataset_change: expected 'refuse' or 'restart', found {on_dataset_change!r}")
        length = epoch_length(num_prompts, batch_size, last_batch)
        self._order = PromptOrder(num_prompts, seed, group_size, shuffle, length)
        self._epochs, self._batch_size, self._last_batch = epochs, batch_size, last_batch
        self._dataset, self._on_dataset_change = dataset, on_dataset_change
        self._whole_group = tuple(range(group_size))
        self._progress = SamplerProgress()

    @classmethod
    def for_dataset(cls, dataset: Indexable, **options: Any) -> PromptSampler:
        """A sampler of this dataset's size, with its fingerprint. ``options`` are those of the class."""
        return cls(len(dataset), dataset=fingerprint(dataset), **options)

    @property
    def yielded(self) -> Cursor:
        """The next prompt that was never handed out."""
        return Cursor(*self._order.place(self._progress.yielded))

    @property
    def consumed(self) -> Cursor:
        """The first prompt that is not wholly acknowledged: every prompt before it has been trained on."""
        return Cursor(*self._order.place(min(self._progress.in_flight, default=self._progress.yielded)))

    @property
    def num_consumed(self) -> int:
        """How many prompts have been trained on, over all epochs, padding included."""
        return self._progress.consumed

    @property
    def exhausted(self) -> bool:
        """Whether ``next_batch`` has nothing left to hand out; prompts may still be in flight."""
        return self._next_slot() is None

    @property
    def finished(self) -> bool:
        """Whether every prompt of every epoch has been trained on."""
        return self.exhausted and not self._progress.in_flight

    def next_batch(self, n: int | None = None) -> list[Prompt]:
        """The next prompts of the global order; those that a resume issues again come first.

        Args:
            n: How many; by default the sampler's ``batch_size``.

        Returns:
            Fewer than n at the end of the last epoch (and of every epoch with ``last_batch="short"``); an empty list
            after it.

        Raises:
            UsageError: The number is below 1, or neither given here nor to the sampler.
        """
        size = self._batch_size if n is None else n
        if size is None or size < 1:
            raise UsageError(f"next_batch: expected a number of prompts of at least 1, found {size!r}")
        batch: list[Prompt] = []
        while len(batch) < size and (slot := self._next_slot()) is not None:
            if self._last_batch == "short" and batch and batch[-1].epoch != self._order.place(slot)[0]:
                break
            batch.append(self._issue(slot))
        return batch

    def __iter__(self) -> Iterator[list[Prompt]]:
        while batch := self.next_batch():
            yield batch

    def _next_slot(self) -> int | None:
        slot = self._progress.next_slot
        is_left = self._epochs is None or slot < self._epochs * self._order.epoch_length
        return slot if is_left else None

    def _issue(self, slot: int) -> Prompt:
        reissued = self._progress.issue(self._whole_group)
        return self._order.prompt(slot, self._progress.in_flight[slot], reissued=reissued)

    def acknowledge(self, prompt: Prompt, samples: int | Iterable[int] | None = None) -> None:
        """Note that training has used samples of a prompt; once it has used all of them, the prompt is consumed.

        Args:
            prompt: As it was handed out.
            samples: One sample or several; by default all that are pending in ``prompt``.

        Raises:
            UsageError: The prompt or a sample was acknowledged already, or was never handed out; it is named.
        """
        used = self._samples(prompt, samples)
        check_pending(self._order, self._progress, prompt, used)
        self._progress.use(self._order.slot(prompt.epoch, prompt.position), used)

    def acknowledge_all(self, prompts: Iterable[Prompt]) -> None:
        """Note that training has used these prompts wholly: all of them, or with an error none.

        Raises:
            UsageError: See :meth:`acknowledge`; or a prompt appears twice.
        """
        problems, seen, batch = Problems(), set[tuple[int, int]](), list(prompts)
        for prompt in batch:
            place = (prompt.epoch, prompt.position)
            if place in seen:
                problems.add(UsageError, f"acknowledge: {prompt} appears twice")
            seen.add(place)
            try:
                check_pending(self._order, self._progress, prompt, prompt.pending)
            except UsageError as error:
                problems.add_error(error)
        problems.raise_if_any()
        for prompt in batch:
            self.acknowledge(prompt)

    @staticmethod
    def _samples(prompt: Prompt, samples: int | Iterable[int] | None) -> tuple[int, ...]:
        if samples is None:
            return prompt.pending
        return (samples,) if isinstance(samples, int) else tuple(samples)

    def in_flight(self) -> list[Prompt]:
        """The prompts that were handed out and not wholly acknowledged, in their order."""
        items = sorted(self._progress.in_flight.items())
        return [self._order.prompt(slot, pending, reissued=slot in self._progress.waiting) for slot, pending in items]

    def claim(self, prompts: Iterable[Prompt]) -> None:
        """Do not issue these prompts again after a resume: their rollouts were stored with the checkpoint.

        They stay in flight until they are acknowledged.

        Raises:
            UsageError: A prompt does not wait to be issued again; it is named, and nothing is claimed.
        """
        slots = {self._order.slot(prompt.epoch, prompt.position): prompt for prompt in prompts}
        for slot, prompt in slots.items():
            if slot not in self._progress.waiting or self._order.prompt_id(slot) != prompt.prompt_id:
                raise UsageError(f"claim: {prompt} does not wait to be issued again")
        for slot in slots:
            del self._progress.waiting[slot]

    def state_dict(self) -> DataState:
        """The content of ``data/data.pt``, of plain values only."""
        return pack(KIND, told(to_state(self._order, self._progress)), self._dataset)

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on where a saved sampler was: what was in flight is issued again, before anything new.

        Raises:
            LayoutMismatch: Settings or the dataset changed; all differences are named.
            CheckpointError: It is damaged, of another kind or of a newer version. Nothing is changed by an error.
        """
        told_state, saved_dataset = unpack(saved, KIND)
        state = record_of(SamplerState, told_state, f"{WHERE}: state")
        problems = Problems()
        check_settings_match(state, self._order, problems)
        changed = self._dataset_change(state.num_prompts, saved_dataset)
        if changed and self._on_dataset_change == "refuse":
            problems.add(LayoutMismatch, changed, _DATASET_ADVICE)
        problems.raise_if_any()
        if changed:
            dropped = len(state.in_flight)
            _logger.warning(
                "%s; on_dataset_change='restart': the data begin again at epoch 0 of this run's dataset, "
                "and %d prompts in flight are dropped",
                changed,
                dropped,
            )
        self._progress = SamplerProgress() if changed else read_progress(state, self._order, self._epochs)

    def install(self, saved: Mapping[str, Any], undo: Undo) -> None:
        """Load a state, and say how it is taken back: what is in flight stays so, and is not issued again."""
        undo.attributes(self, ("_progress",))
        self.load_state_dict(saved)

    def _dataset_change(self, num_prompts: int, saved: Fingerprint | None) -> str:
        """What is different about the dataset; empty if nothing is, or nothing is known."""
        now, expected = self._dataset, self._order.num_prompts
        if num_prompts != expected:
            return f"{WHERE}: the dataset changed: expected {expected} prompts, as this run has, found {num_prompts}"
        if now is None or saved is None:
            if now is not saved:
                side = "the checkpoint has no fingerprint" if now else "this run's sampler was given no fingerprint"
                _logger.warning("%s: cannot tell whether the dataset changed: %s", WHERE, side)
            return ""
        return "" if saved == now else f"{WHERE}: the dataset changed: expected {now}, as this run has, found {saved}"
