"""A model as the plain engine sees it where the adapter is saved elsewhere: what is trained besides, and everybody's names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from .live_adapter import LiveAdapter


class Trained(torch.nn.Module):
    """Has the names of all parameters, and the state of those that are trained and belong to no adapter.

    Args:
        adapter: The live one.
    """

    def __init__(self, adapter: LiveAdapter) -> None:
        super().__init__()
        self._adapter = [adapter]  # in a list, so that the model does not become a part of this

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """What is trained besides the adapter."""
        del args, kwargs
        return {name: parameter.detach() for name, parameter in self._adapter[0].others().items()}

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """All of the model's."""
        return self._adapter[0].model.named_parameters(*args, **kwargs)

    def parameters(self, recurse: bool = True) -> Iterator[torch.nn.Parameter]:
        """All of the model's."""
        return self._adapter[0].model.parameters(recurse)

    def buffers(self, recurse: bool = True) -> Iterator[torch.Tensor]:
        """All of the model's."""
        return self._adapter[0].model.buffers(recurse)
