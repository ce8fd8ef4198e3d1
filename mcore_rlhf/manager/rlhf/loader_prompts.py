"""The prompts of anybody's loader, acknowledged as :class:`~.sampler.PromptSampler`'s are: none is lost or repeated by a resume.

A loader's own state counts what it has *yielded*: what was in flight at a save is skipped by a resume (torchdata 0.11.0,
``stateful_dataloader/stateful_dataloader.py``, ``_sampler_iter_yielded``; verl 0.9.1, ``trainer/ppo/ray_trainer.py``, and NeMo-RL at
7ea279a, ``algorithms/grpo.py``, save it as it is). So the loader's state from before its oldest batch with an unconsumed prompt is saved,
and which prompts after that were consumed; a resume draws those batches once more, and hands out what is pending. No content is stored.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from ...errors import Corrupt, LayoutMismatch, UsageError
from ...storage.records import Natural, record_of, shorten, told
from .data_state import WHERE
from .prompts import Prompt, sample_seed
from .sampler import NextPlace, PendingPrompt

Content = TypeVar("Content", covariant=True)
KIND, LOADER = "loader_prompts", "loaders"


class ResumableLoader(Protocol[Content]):
    """torchdata's ``StatefulDataLoader``, or what is like it: with the same state it yields the same batches up to the epoch's end.

    Once ``iter`` has begun an epoch, the state is that of the new epoch.
    """

    def __iter__(self) -> Iterator[Content]: ...

    def state_dict(self) -> dict[str, Any]:
        """Where it is."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Go on there."""
        ...


@dataclass(frozen=True, slots=True)
class LoadedBatch:
    """A batch of a loader.

    Args:
        content: As the loader yielded it.
        prompts: One for each of its items that is to be trained on; ``prompts[i].prompt_id`` is its place in ``content``.
    """

    content: Any
    prompts: tuple[Prompt, ...]


@dataclass(slots=True)
class _Drawn:
    """A batch that was drawn, and whose prompts are not all consumed."""

    before: dict[str, Any]
    epoch: int
    start: int
    pending: dict[int, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class LoaderPromptsState:
    """What is saved, besides the loader's own state.

    Args:
        group_size, seed: See :class:`LoaderPrompts`.
        begins: The place of the first prompt that the loader yields from each of its saved states on: one for each epoch, as with the
            state of an earlier one it may draw another order of the next.
        next: The first place that was never handed out.
        in_flight: What was handed out, and not wholly acknowledged; all else before ``next`` was.
    """

    group_size: Natural
    seed: int
    begins: tuple[NextPlace, ...]
    next: NextPlace
    in_flight: tuple[PendingPrompt, ...]


def size_of(content: Any) -> int:
    """How many prompts a batch has: a list's length, or that of a mapping's first value, as collate functions make it."""
    if isinstance(content, Mapping):
        return len(next(iter(content.values()), ()))
    return len(content)


@dataclass(slots=True)
class LoaderPrompts:
    """Hands out the batches of a loader, and knows which of their prompts training has consumed; give it to the manager as ``data``.

    Args:
        loader: See :class:`ResumableLoader`.
        seed: The run's seed, of which the samples' seeds are made.
        group_size: Samples of each prompt.
        epochs: How many; None without end.
        size: Says how many prompts a batch has.
    """

    loader: ResumableLoader[Any]
    seed: int
    group_size: int = 1
    epochs: int | None = None
    size: Callable[[Any], int] = size_of
    _iterator: Iterator[Any] | None = None
    _epoch: int = 0
    _position: int = 0
    _drawn: deque[_Drawn] = field(default_factory=deque)
    _later: deque[tuple[NextPlace, dict[str, Any]]] = field(default_factory=deque)
    _until: tuple[int, int] = (0, 0)
    _waiting: dict[tuple[int, int], PendingPrompt] = field(default_factory=dict)

    def next_batch(self) -> LoadedBatch | None:
        """The next batch with prompts that were not consumed; after a resume those in flight come again, first. None at the end.

        Raises:
            UsageError: The loader is empty.
        """
        while (found := self._draw()) is not None:
            if found.prompts:
                return found
        return None

    def __iter__(self) -> Iterator[LoadedBatch]:
        while (batch := self.next_batch()) is not None:
            yield batch

    def _draw(self) -> LoadedBatch | None:
        for began in (False, True):
            if self.epochs is not None and self._epoch >= self.epochs:
                return None
            if self._iterator is None:
                self._iterator = iter(self.loader)
            before = self.loader.state_dict()
            try:
                content = next(self._iterator)
            except StopIteration:
                if began and not self._position:
                    break
                self._next_epoch()
                continue
            return self._issued(content, before)
        raise UsageError(f"data: {type(self.loader).__name__} yields nothing in an epoch")

    def _next_epoch(self) -> None:
        self._epoch, self._position, self._iterator = self._epoch + 1, 0, None
        if self._later:
            place, state = self._later.popleft()
            self.loader.load_state_dict(state)
            self._epoch, self._position = place.epoch, place.position

    def _issued(self, content: Any, before: dict[str, Any]) -> LoadedBatch:
        start, size = self._position, self.size(content)
        self._position += size
        pending = {place: left for place in range(size) if (left := self._pending((self._epoch, start + place)))}
        made = tuple(self._prompt(place, start + place, left) for place, left in pending.items())
        if pending:
            self._drawn.append(_Drawn(before, self._epoch, start, pending))
            for prompt in made:
                self._waiting.pop((prompt.epoch, prompt.position), None)
        return LoadedBatch(content, made)

    def _pending(self, place: tuple[int, int]) -> tuple[int, ...]:
        """The samples of a place that were not consumed; of what had been handed out before a resume, those that it saved."""
        if place >= self._until:
            return tuple(range(self.group_size))
        return self._waiting[place].pending if place in self._waiting else ()

    def _prompt(self, place: int, position: int, pending: tuple[int, ...]) -> Prompt:
        seeds = tuple(sample_seed(self.seed, self._epoch, position, sample) for sample in range(self.group_size))
        return Prompt(place, self._epoch, position, seeds, pending, reissued=(self._epoch, position) < self._until)

    def acknowledge(self, prompt: Prompt, samples: int | Iterable[int] | None = None) -> None:
        """Note that training has used samples of a prompt.

        Args:
            prompt: As it was handed out.
            samples: One or several; by default all that are pending in it.

        Raises:
            UsageError: It is not in flight, or a sample was acknowledged already.
        """
        used = prompt.pending if samples is None else (samples,) if isinstance(samples, int) else tuple(samples)
        found = next((one for one in self._drawn if _holds(one, prompt)), None)
        if found is None:
            raise UsageError(
                f"acknowledge: {prompt} is not in flight: it was acknowledged already, or never handed out"
            )
        pending = found.pending[prompt.position - found.start]
        if len(set(used)) < len(used) or not set(used) <= set(pending):
            raise UsageError(f"acknowledge: {prompt}: samples {used} are not all pending; those are {pending}")
        left = tuple(sample for sample in pending if sample not in used)
        if left:
            found.pending[prompt.position - found.start] = left
        else:
            del found.pending[prompt.position - found.start]
        while self._drawn and not self._drawn[0].pending:
            self._drawn.popleft()

    def acknowledge_all(self, prompts: Iterable[Prompt]) -> None:
        """See :meth:`acknowledge`; of several."""
        for prompt in prompts:
            self.acknowledge(prompt)

    def state_dict(self) -> dict[str, Any]:
        """Plain values, as far as the loader's own state is of such."""
        begins = [*self._begins(), *self._later]
        state = LoaderPromptsState(
            self.group_size,
            self.seed,
            begins=tuple(place for place, _ in begins),
            next=NextPlace(*max(self._until, (self._epoch, self._position))),
            in_flight=(*self._in_flight(), *self._waiting.values()),
        )
        return {KIND: told(state), LOADER: [loader for _, loader in begins]}

    def _begins(self) -> Iterator[tuple[NextPlace, dict[str, Any]]]:
        """Of every epoch with prompts in flight where its first one is drawn; and where the loader is now."""
        epoch = -1
        for one in self._drawn:
            if one.epoch != epoch:
                epoch = one.epoch
                yield NextPlace(epoch, one.start), one.before
        if epoch != self._epoch:
            yield NextPlace(self._epoch, self._position), self.loader.state_dict()

    def _in_flight(self) -> Iterator[PendingPrompt]:
        for one in self._drawn:
            for place, samples in sorted(one.pending.items()):
                yield PendingPrompt(one.epoch, one.start + place, place, samples)

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on where a saved one was.

        Raises:
            LayoutMismatch: The seed or the group size changed.
            CheckpointError: It is another loader's state, or damaged. Nothing is changed by an error.
        """
        state = read_state(saved)
        for name in ("seed", "group_size"):
            expected, found = getattr(self, name), getattr(state, name)
            if expected != found:
                raise LayoutMismatch(
                    f"{WHERE}: {name}: expected {expected}, as this run has, found {found}\nResume with the settings that it began with."
                )
        (place, loader), *later = zip(state.begins, saved[LOADER], strict=True)
        self.loader.load_state_dict(loader)
        self._iterator, self._epoch, self._position, self._later = None, place.epoch, place.position, deque(later)
        self._drawn, self._until = deque(), (state.next.epoch, state.next.position)
        self._waiting = {(one.epoch, one.position): one for one in state.in_flight}


def read_state(saved: object) -> LoaderPromptsState:
    """What is saved beside a loader's state.

    Raises:
        CheckpointError: It is another loader's state, or damaged.
    """
    if not isinstance(saved, Mapping) or saved.keys() != {KIND, LOADER}:
        raise Corrupt(
            f"{WHERE}: expected the state of LoaderPrompts, found another loader's\nResume with the loader that saved it."
        )
    state = record_of(LoaderPromptsState, saved[KIND], f"{WHERE}: {KIND}")
    found = saved[LOADER]
    if not isinstance(found, list) or len(found) != len(state.begins) or not found:
        raise Corrupt(f"{WHERE}: expected the loader's states at {len(state.begins)} places, found {shorten(found)}")
    return state


def _holds(drawn: _Drawn, prompt: Prompt) -> bool:
    return drawn.epoch == prompt.epoch and prompt.position - drawn.start in drawn.pending
