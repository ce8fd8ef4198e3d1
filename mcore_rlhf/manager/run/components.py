"""What a run consists of: models by role, the data, the RLHF state."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

import torch

from mcore_rlhf.engines.base import Engine, HasRng
from mcore_rlhf.engines.plain import Stateful, TorchEngine
from mcore_rlhf.errors import UsageError

from ..rlhf.carried import Carried
from ..rlhf.sampler import PromptSampler
from ..state import RlhfState
from .step_names import RESERVED

_ROLE = re.compile(r"(?!iter_|mp_rank_|global_step_)[A-Za-z](?:[A-Za-z0-9_.-]*[A-Za-z0-9_-])?")

Role: TypeAlias = "Engine | torch.nn.Module | Stateful"
Data: TypeAlias = "PromptSampler | Carried | Stateful"


@runtime_checkable
class _LooksLikeEngine(Protocol):
    def live(self, step: int) -> object: ...

    def prepare_load(self, request: object) -> object: ...


@dataclass(frozen=True, slots=True)
class Components:
    """Everything that is saved together.

    Args:
        roles: An engine for every role.
        data: Where prompts come from, or None.
        state: The RLHF state, or None.
    """

    roles: Mapping[str, Engine]
    data: PromptSampler | Carried | None
    state: RlhfState | None

    @property
    def layout(self) -> str:
        """How all models are cut: ``actor TP2×PP1×DP1, critic TP1×PP1×DP2``."""
        return ", ".join(f"{role} {engine.layout}" for role, engine in sorted(self.roles.items()))

    @property
    def rng(self) -> HasRng | None:
        """The engine whose framework keeps random states of its own; all of one process share them."""
        return next((engine for engine in self.roles.values() if isinstance(engine, HasRng)), None)


def components(roles: Mapping[str, Role] | Role, data: Data | None, state: RlhfState | None) -> Components:
    """Understand what the user gives.

    Args:
        roles: By role, or a single model, which becomes ``actor``.
        data: A sampler or any loader with ``state_dict``.
        state: The RLHF state.

    Raises:
        UsageError: A role's name cannot be a folder, or something cannot be saved.
    """
    named = roles if isinstance(roles, Mapping) else {"actor": roles}
    if not named and data is None and state is None:
        raise UsageError(
            "no roles, no data and no state: there is nothing to save; give a model, such as {'actor': engine}"
        )
    engines = {role: _engine(role, model) for role, model in named.items()}
    return Components(engines, _carried(data), state)


def _engine(role: str, model: Role) -> Engine:
    if not _ROLE.fullmatch(role) or role in RESERVED:
        raise UsageError(
            f"role {role!r}: expected a name such as actor, critic, reward or reference (it becomes a folder)"
        )
    if isinstance(model, torch.nn.Module):
        return TorchEngine(model)
    if isinstance(model, _LooksLikeEngine):
        return model  # type: ignore[return-value]
    if isinstance(model, Stateful):
        return TorchEngine(None, state=model)
    raise UsageError(f"role {role!r}: {type(model).__name__} is no engine, no torch module and has no state_dict()")


def _carried(data: Data | None) -> PromptSampler | Carried | None:
    if data is None or isinstance(data, PromptSampler | Carried):
        return data
    if isinstance(data, Stateful):
        return Carried(data)
    raise UsageError(f"data: {type(data).__name__} has no state_dict() and load_state_dict()")
