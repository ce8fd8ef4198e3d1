"""Any other loader that has ``state_dict`` and ``load_state_dict``, carried in the checkpoint as it is.

The manager saves the state and gives it back; what the loader puts into it, and whether prompts in flight are among
it, is the loader's affair. torchdata's StatefulDataLoader counts what it *yielded*: prompts in flight at a save are
lost on resume unless the loop saves only where nothing is in flight. :class:`.sampler.PromptSampler` has no such gap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeGuard

from ...errors import LayoutMismatch, Problems, UsageError, log_of
from .data_state import WHERE, DataState, Fingerprint, pack, unpack

if TYPE_CHECKING:
    from ...engines.stateful import Stateful, Undo

KIND = "stateful"
DRIVER = "driver"

_logger = log_of(__name__)

_NO_FINGERPRINT: Fingerprint | None = None  # what lies behind a foreign loader is not known


class Carried:
    """A loader whose state is part of the checkpoint.

    Args:
        loader: Has ``state_dict`` and ``load_state_dict``.
        scope: ``driver``: one loader feeds all ranks, or all ranks' loaders are the same. ``rank``: each data-parallel
            rank has a loader of its own, and the checkpoint keeps every one's state.
        rank: This loader's data-parallel rank, with ``scope="rank"``.
        num_ranks: How many there are.

    Raises:
        UsageError: The loader has no such methods, or the rank does not exist.
    """

    def __init__(
        self, loader: Stateful, *, scope: Literal["driver", "rank"] = "driver", rank: int = 0, num_ranks: int = 1
    ) -> None:
        lacking = [name for name in ("state_dict", "load_state_dict") if not callable(getattr(loader, name, None))]
        if lacking:
            raise UsageError(
                f"data: {type(loader).__name__} has no {' and no '.join(lacking)}, so that it cannot be resumed\n"
                "Use torchdata's StatefulDataLoader, or mcore_rlhf's PromptSampler."
            )
        if scope not in ("driver", "rank") or not 0 <= rank < num_ranks:
            raise UsageError(f"data: expected scope 'driver' or 'rank', found {scope!r}; rank {rank} of {num_ranks}")
        self.loader = loader
        self.scope: Literal["driver", "rank"] = scope
        self.rank, self.num_ranks = rank, num_ranks

    def local_state(self) -> dict[str, Any]:
        """This loader's own state, of one rank or of the driver.

        Raises:
            UsageError: It holds an object that a file loaded with ``weights_only=True`` cannot hold; all are named.
        """
        state = self.loader.state_dict()
        problems = Problems()
        _check_plain(state, type(self.loader).__name__, problems)
        problems.raise_if_any()
        return state

    def combine(self, states: Sequence[Mapping[str, Any]]) -> DataState:
        """The content of ``data/data.pt``.

        Args:
            states: Every rank's :meth:`local_state`, in the order of ranks; the driver's alone with
                ``scope="driver"``.

        Raises:
            UsageError: There are not as many states as ranks.
        """
        expected = self.num_ranks if self.scope == "rank" else 1
        if len(states) != expected:
            raise UsageError(f"data: expected the states of {expected} loaders, found {len(states)}")
        return pack(KIND, dict(zip(self._keys(), states, strict=True)), _NO_FINGERPRINT)

    def state_dict(self) -> DataState:
        """The content of ``data/data.pt``, where this loader is the only one.

        Raises:
            UsageError: Other ranks have loaders, too: gather their :meth:`local_state` and :meth:`combine` them.
        """
        if self.scope == "rank" and self.num_ranks > 1:
            raise UsageError(
                f"data: rank {self.rank} knows only its own loader of {self.num_ranks}\n"
                "Gather local_state() of every rank, and call combine() with them."
            )
        return self.combine([self.local_state()])

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Give this rank's loader its state back.

        The bare state of a loader, without version and kind, is taken as the driver's: RLinf writes that
        (RLinf, ``rlinf/runners/reasoning_runner.py``, ``_save_checkpoint``).

        Raises:
            LayoutMismatch: The number of ranks or the scope changed.
            CheckpointError: It is damaged, of another kind or of a newer version.
        """
        if not {"version", "kind"} & set(saved):
            states: dict[str, Any] = {DRIVER: dict(saved)}
            _logger.info("%s: the bare state of a loader, as RLinf writes it", WHERE)
        else:
            states, _ = unpack(saved, KIND)
        expected = self._keys()
        if sorted(states) != sorted(expected):
            raise LayoutMismatch(
                f"{WHERE}: expected the state of {_loaders(expected)}, found that of {_loaders(list(states))}\n"
                "A loader's state cannot be divided anew: resume with the same number of data-parallel ranks, use "
                "PromptSampler, whose order does not depend on it, or start the data anew by not loading this file."
            )
        self.loader.load_state_dict(states[str(self.rank) if self.scope == "rank" else DRIVER])

    def install(self, saved: Mapping[str, Any], undo: Undo) -> None:
        """Load a state, and say how it is taken back."""
        undo.state(self.loader)
        self.load_state_dict(saved)

    def _keys(self) -> list[str]:
        return [str(rank) for rank in range(self.num_ranks)] if self.scope == "rank" else [DRIVER]


def _loaders(keys: Sequence[str]) -> str:
    return "one loader for all ranks (scope 'driver')" if list(keys) == [DRIVER] else f"{len(keys)} ranks' loaders"


def _check_plain(value: object, where: str, problems: Problems) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            _check_plain(item, f"{where}[{key!r}]", problems)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _check_plain(item, f"{where}[{index}]", problems)
    elif not _is_plain(value):
        advice = "Let the loader's state hold numbers, text, bytes, tensors, lists and dictionaries of these only."
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        problems.add(UsageError, f"{where} is a {kind}, which cannot be loaded safely", advice)


def _is_plain(value: object) -> TypeGuard[object]:
    import torch

    return value is None or type(value) in (bool, int, float, str, bytes) or isinstance(value, torch.Tensor)
