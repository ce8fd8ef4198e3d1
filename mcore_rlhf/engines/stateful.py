"""What anything must have that is saved and loaded without being known."""

from __future__ import annotations

from typing import Protocol, runtime_checkable


@runtime_checkable
class Stateful(Protocol):
    """Anything that says what it holds, and takes it back: a scheduler, a scaler, a whole trainer."""

    def state_dict(self) -> dict[str, object]:
        """What it holds."""
        ...

    def load_state_dict(self, state_dict: dict[str, object], /) -> object:
        """Take it back."""
        ...
