"""The engine of a script without Megatron: plain torch, in a module that stands for ``megatron_engine``."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from mcore_rlhf.engines.base import LoadRequest
from mcore_rlhf.engines.plain import TorchEngine
from mcore_rlhf.integrations.megatron_arguments import ScriptObjects


class Counters:
    """Carries what Megatron's model file holds besides tensors."""

    def __init__(self, args: Callable[[], Namespace], further: Callable[[], Mapping[str, object]] | None) -> None:
        self.args, self.further = args, further
        self.loaded: dict[str, Any] = {}

    def state_dict(self) -> dict[str, object]:
        return {"args": dict(vars(self.args())), "further": dict(self.further() if self.further else {})}

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        self.loaded = dict(state_dict)


class ScriptEngine(TorchEngine):
    def __init__(
        self,
        trained: ScriptObjects,
        args: Callable[[], Namespace],
        further: Callable[[], Mapping[str, object]] | None = None,
    ) -> None:
        bare = further is not None and args().no_save_optim
        self.counters = Counters(args, further)
        super().__init__(trained.chunks[0], None if bare else trained.optimizer, None, counters=self.counters)
        self.loaded_iteration = 0

    def prepare_load(self, request: LoadRequest) -> Any:
        self.loaded_iteration = request.step or 0
        return super().prepare_load(LoadRequest(request.folder, request.role, request.step, True))

    @property
    def loaded_args(self) -> dict[str, Any]:
        return self.counters.loaded.get("args", {})

    def further(self, name: str, default: Any) -> Any:
        return self.counters.loaded.get("further", {}).get(name, default)

    def rng_states(self) -> dict[str, torch.Tensor]:
        return {}

    def set_rng_states(self, states: Mapping[str, torch.Tensor]) -> None:
        raise AssertionError("there are none")

    def derived_rng(self, first: Mapping[str, object], step: int) -> Mapping[str, object]:
        raise AssertionError("the layout is the same")


def module() -> ModuleType:
    """What is imported in place of ``mcore_rlhf.integrations.megatron_engine``."""
    made: Any = ModuleType("mcore_rlhf.integrations.megatron_engine")
    made.ScriptEngine = ScriptEngine
    return made


def script(seed: int = 0) -> SimpleNamespace:
    """A model, its optimizer and a scheduler, as a script has them; one step done."""
    torch.manual_seed(seed)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    return SimpleNamespace(model=[model], optimizer=optimizer, scheduler=SimpleNamespace(lr=1.0))


def weights(one: SimpleNamespace) -> torch.Tensor:
    return one.model[0].weight.detach().clone()
