"""Megatron's optimizers seen alike: which parameters each one trains, which part of them this rank owns, and its states.

Sources: megatron-core 0.16.1, ``optimizer/optimizer.py`` (``Float16OptimizerWithFloat16Params``, ``FP32Optimizer``,
``ChainedOptimizer``), ``optimizer/distrib_optimizer.py`` (``DistributedOptimizer``).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from mcore_rlhf.core.catalog import EXP_AVG, EXP_AVG_SQ, MASTER
from mcore_rlhf.errors import Problems, Unsupported
from mcore_rlhf.families.megatron.arguments import DISTRIBUTED, PLAIN

from ..optimizers import is_elementwise, is_known
from ..stateful import Stateful

LOG = logging.getLogger("mcore_rlhf")
PARAM_KEY = "param"
"""What Megatron calls the fp32 master in ``distrib_optim.pt`` and among the distributed optimizer's tensors."""
_MASTER_STATE = "master_param"
"""What Transformer Engine's precision-aware optimizer calls it among its states."""


@dataclass(frozen=True, slots=True)
class Owned:
    """A parameter, or the part of it whose optimizer states this rank has.

    Args:
        param: The model's parameter.
        start: First element of the part, in the flattened local parameter.
        stop: One past the last.
        group: Position of its param group in the member.
    """

    param: torch.nn.Parameter
    start: int
    stop: int
    group: int


@dataclass(frozen=True, slots=True, eq=False)
class ChainMember:
    """One of the chained optimizers, none of them a stub.

    Args:
        number: Its position in the chain.
        optimizer: Megatron's object.
        layer_wise: Whether it has whole parameters that a layer-wise optimizer dealt out to the data-parallel ranks.
    """

    number: int
    optimizer: Any
    layer_wise: bool = False

    @property
    def kind(self) -> str:
        """``distributed`` or ``plain``."""
        return DISTRIBUTED if isinstance(self.optimizer, DistributedOptimizer) else PLAIN

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The live param groups."""
        groups: list[dict[str, Any]] = self.optimizer.optimizer.param_groups
        return groups

    @property
    def label(self) -> str:
        """The optimizer inside, for messages."""
        return f"optimizer {self.number} ({type(self.optimizer.optimizer).__qualname__})"

    @property
    def is_adam(self) -> bool:
        """Whether it keeps what Adam does: the two moments that Megatron's flat files have a place for."""
        return all("betas" in group for group in self.groups)

    @property
    def expert(self) -> bool:
        """Whether it holds experts that expert parallelism deals out."""
        return any(group.get("is_expert_parallel") for group in self.groups)

    @property
    def converts(self) -> bool:
        """Whether states are kept in another form than fp32 tensors, and go in and out through Megatron's methods."""
        config = self.optimizer.config
        return self.kind == DISTRIBUTED and bool(
            getattr(config, "use_precision_aware_optimizer_no_fp8_or_ds_fp8", False)
        )

    def owned(self) -> list[Owned]:
        """What this rank owns, in the optimizer's order."""
        return list(self._shards() if self.kind == DISTRIBUTED else self._wholes())

    def main_param(self, owned: Owned) -> torch.Tensor:
        """What the torch optimizer inside trains of a part: a master, or the parameter or a shard of it."""
        if self.kind == PLAIN:
            return self._master(owned.param)
        group, order = self.optimizer.model_param_group_index_map[owned.param]
        found: torch.Tensor = self.groups[group]["params"][order]
        return found

    def tensors(self, owned: Owned) -> dict[str, torch.Tensor]:
        """Master and states of a part, by our names; those that the optimizer has not made yet are missing."""
        if self.kind == DISTRIBUTED and not self._stepped:
            return {
                MASTER: self.main_param(owned).detach()
            }  # asking Megatron would leave empty states behind, which confuse its load
        if self.kind == DISTRIBUTED:
            tensors = dict(self.optimizer._get_main_param_and_optimizer_states(owned.param))
            named = {MASTER: tensors.pop(PARAM_KEY), **tensors}
        else:
            held = self.main_param(owned)
            named = {} if held is owned.param else {MASTER: held}
            named |= self.optimizer.optimizer.state.get(held, {})
        count = owned.stop - owned.start
        return {
            k: v.detach() for k, v in named.items() if isinstance(v, torch.Tensor) and v.dim() and v.numel() == count
        }

    def kept_as(self, owned: Owned, state: str) -> list[torch.Tensor]:
        """The optimizer's own memory of a state that :meth:`tensors` gives, or of its count of steps; none where it has none."""
        held = self.main_param(owned)
        values = self.optimizer.optimizer.state.get(held, {}) if self._stepped else {}
        found = values.get(state, values.get(_MASTER_STATE) if state == MASTER else None)
        return [found] if isinstance(found, torch.Tensor) else []

    def states(self) -> tuple[str, ...]:
        """The states of which a flat file has records: Adam's two, which Megatron looks for, and what else is elementwise here."""
        states = () if self.converts else self.optimizer.optimizer.state.values()
        found = {
            key for one in states for key, value in one.items() if is_elementwise(key, getattr(value, "shape", None))
        }
        return (EXP_AVG, EXP_AVG_SQ, *sorted(found - {EXP_AVG, EXP_AVG_SQ}))

    def may_keep(self, states: Set[str]) -> bool:
        """Whether stored states can be its own: those that it keeps, or would if it is known; else Adam's and more."""
        decided = self._stepped or is_known(self.optimizer.optimizer)
        return states == set(self.states()) if decided else states >= set(self.states())

    def put(self, owned: Owned, tensors: Mapping[str, torch.Tensor]) -> None:
        """Give a part new fp32 values where they are kept in another form; see :attr:`converts`."""
        named = {PARAM_KEY if name == MASTER else name: tensor for name, tensor in tensors.items()}
        device = {name: tensor.to(owned.param.device) for name, tensor in named.items()}
        self.optimizer._set_main_param_and_optimizer_states(owned.param, device)

    def state_dict(self) -> dict[str, Any]:
        """What the model file holds of it, as Megatron gives it; before the first step too, when Megatron cannot always."""
        if self.kind == PLAIN or self._stepped or not counts_per_parameter(self.optimizer.optimizer):
            state: dict[str, Any] = self.optimizer.state_dict()
            return state if self._stepped or self.kind == DISTRIBUTED else with_zeros(state, self.optimizer.optimizer)
        groups = [{**{k: v for k, v in group.items() if k != "params"}, "step": 0} for group in self.groups]
        scaler = self.optimizer.grad_scaler
        return {"optimizer": {"param_groups": groups}, **({"grad_scaler": scaler.state_dict()} if scaler else {})}

    def has_master(self, owned: Owned) -> bool:
        """Whether there is an fp32 copy of the parameter, or a shard of the parameter itself that counts as one."""
        return self.kind == DISTRIBUTED or self.main_param(owned) is not owned.param

    def load(
        self,
        fields: Sequence[Mapping[str, object]],
        states: Sequence[str],
        scalars: Mapping[str, object],
    ) -> None:
        """Set param groups, and allocate the states; their values are to be filled in afterwards.

        Args:
            fields: For every live group, what to set.
            states: Names of the tensor states, without the master.
            scalars: Values kept per parameter in a plain optimizer (``step``), equal for all.
        """
        steps = {"step": 0} if any("step" in group for group in self.groups) else {}
        groups = [{**live, **steps, **new} for live, new in zip(self.groups, fields, strict=True)]
        if not self._stepped:
            self.optimizer.optimizer.state.clear()  # empty ones of parameters that somebody asked for
        if self.kind == DISTRIBUTED:
            stored = [{key: value for key, value in group.items() if key != "params"} for group in groups]
            self.optimizer.load_state_dict({"optimizer": {"param_groups": stored}})
            for live, new in zip(self.groups, stored, strict=True):
                live.update(new)  # groups that differ in their learning rates alone are one to Megatron
            self._allocate([name for name in states if name not in (EXP_AVG, EXP_AVG_SQ)])
        else:
            load_plain(self.optimizer.optimizer, groups, states, scalars)

    def _allocate(self, states: Sequence[str]) -> None:
        """Megatron's load makes Adam's two states; those of other names are made like them."""
        for held in map(self.main_param, self.owned() if states else ()):
            live = self.optimizer.optimizer.state[held]
            live.update({name: torch.zeros_like(held.detach()) for name in states if name not in live})

    @property
    def scaler(self) -> Stateful | None:
        """Its loss scaler, where it has one."""
        found: Stateful | None = getattr(self.optimizer, "grad_scaler", None)
        return found

    def forget(self) -> None:
        """Begin anew from the model's weights: masters are copies of them, moments are zeros."""
        self.optimizer.reload_model_params()
        for state in self.optimizer.optimizer.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    value.zero_()
        for group in self.groups:
            if "step" in group:
                group["step"] = 0

    @property
    def _stepped(self) -> bool:
        return any(self.optimizer.optimizer.state.values())

    def _shards(self) -> Iterator[Owned]:
        optimizer = self.optimizer
        for ranges in optimizer.gbuf_ranges:
            for buckets in ranges.values():
                for bucket in buckets:
                    for param, place in bucket["param_map"].items():
                        group, _ = optimizer.model_param_group_index_map[param]
                        yield Owned(param, place["param"].start, place["param"].end, group)

    def _wholes(self) -> Iterator[Owned]:
        masters = self._params_by_master()
        for number, group in enumerate(self.groups):
            for held in group["params"]:
                param = masters.get(held, held)
                yield Owned(param, 0, param.numel(), number)

    def _master(self, param: torch.nn.Parameter) -> torch.Tensor:
        """What the plain optimizer holds for a parameter: its fp32 copy, or itself."""
        held = getattr(param, "main_param", None)
        return param if held is None else held

    def _params_by_master(self) -> dict[torch.Tensor, torch.nn.Parameter]:
        pairs = zip(
            getattr(self.optimizer, "fp32_from_float16_groups", []),
            getattr(self.optimizer, "float16_groups", []),
            strict=True,
        )
        return {main: param for mains, params in pairs for main, param in zip(mains, params, strict=True)}


def members(optimizer: Any | None) -> tuple[ChainMember | None, ...]:
    """The chained optimizers in order; None for a stub, which a rank without trainable parameters has.

    Raises:
        Unsupported: Some are of a kind that is not known, or whose files are not Megatron's ``torch`` format; all are named.
    """
    if optimizer is None:
        return ()
    chained: Sequence[Any] = getattr(optimizer, "chained_optimizers", [optimizer])
    layer_wise, problems = _is_a(optimizer, _LAYER_WISE), Problems()
    if hasattr(optimizer, "chained_optimizers") and not (layer_wise or _is_a(optimizer, _CHAIN)):
        problems.add(Unsupported, f"{type(optimizer).__qualname__}: not a chain of optimizers that is known", _UNKNOWN)
    found = [
        None if getattr(one, "is_stub_optimizer", False) else _checked(ChainMember(number, one, layer_wise), problems)
        for number, one in enumerate(chained)
    ]
    problems.raise_if_any()
    _say_what_is_not_adam(found)
    return tuple(found)


_CHAIN, _LAYER_WISE = "ChainedOptimizer", "LayerWiseDistributedOptimizer"
_KINDS = ("DistributedOptimizer", "Float16OptimizerWithFloat16Params", "FP32Optimizer")
_UNKNOWN = "Give the engine an optimizer of megatron-core, or none: MegatronEngine(chunks) saves the weights alone."


def _checked(member: ChainMember, problems: Problems) -> ChainMember:
    """A member, having said what is not known of it: what is found out now is not lost at the first save."""
    optimizer, kind = member.optimizer, type(member.optimizer).__qualname__
    if getattr(getattr(optimizer, "ddp_config", None), "use_megatron_fsdp", False):
        text = "Megatron-FSDP keeps its state in files of its own (fsdp_dtensor), not in the torch format"
        problems.add(Unsupported, text, _UNKNOWN)
    elif not any(_is_a(optimizer, known) for known in _KINDS) or (member.layer_wise and member.kind == DISTRIBUTED):
        problems.add(Unsupported, f"optimizer {member.number}: {kind}: how it keeps its states is not known", _UNKNOWN)
    elif member.kind == DISTRIBUTED and not member.is_adam:
        text = f"{member.label}: Megatron's distributed optimizer has files for Adam's two moments only"
        problems.add(Unsupported, text, "Use it without the distributed optimizer, or layer-wise.")
    return member


def _say_what_is_not_adam(found: Sequence[ChainMember | None]) -> None:
    """An optimizer of another kind is named when the engine is made, and what becomes of its states."""
    fate = "resume at the same layout only" if is_whole(found) else "are reshaped where they are elementwise"
    for member in filter(None, found):
        if member.layer_wise or not member.is_adam:
            how = "whole, rank by rank" if member.layer_wise else "whole"
            LOG.warning("MegatronEngine: %s: its states are saved %s, and %s", member.label, how, fate)


def _is_a(optimizer: object, name: str) -> bool:
    """By name, since not every version of Megatron has every kind."""
    return any(kind.__name__ == name for kind in type(optimizer).__mro__)


def is_whole(chain: Sequence[ChainMember | None]) -> bool:
    """Whether no plan can move the chain: parameters are dealt out whole, or are in several optimizers by their kind."""
    present = [member for member in chain if member is not None and member.kind == PLAIN]
    return any(member.layer_wise for member in present) or sum(not member.expert for member in present) > 1


def kind_of(chain: Sequence[ChainMember | None]) -> str | None:
    """The kind of a chain, or None where nothing is trained here."""
    return next((member.kind for member in chain if member is not None), None)


def counts_per_parameter(inner: torch.optim.Optimizer) -> bool:
    """Whether the step is a state of every parameter (torch), and not of a group (apex, Transformer Engine)."""
    return isinstance(inner, torch.optim.AdamW | torch.optim.Adam)


def load_plain(
    inner: torch.optim.Optimizer,
    groups: Sequence[Mapping[str, Any]],
    states: Sequence[str],
    scalars: Mapping[str, object],
) -> None:
    """Set the param groups, and allocate the states that are to be filled in afterwards; those that exist are kept.

    Args:
        inner: The optimizer.
        groups: What the live groups become, with their live parameters.
        states: Names of the tensor states.
        scalars: Values kept per parameter (``step``), equal for all.
    """
    numbered: dict[int, dict[str, object]] = {}
    packed = []
    for group in groups:
        fields, shared = _steps(inner, group, scalars)
        numbers = range(len(numbered), len(numbered) + len(group["params"]))
        for number, held in zip(numbers, group["params"], strict=True):
            live = inner.state.get(held, {})
            tensors = {name: live[name] if name in live else torch.zeros_like(held.detach()) for name in states}
            numbered[number] = {**{name: _copied(value) for name, value in shared.items()}, **tensors}
        packed.append({**fields, "params": list(numbers)})
    inner.load_state_dict({"state": numbered, "param_groups": packed})


def with_zeros(state: dict[str, Any], inner: torch.optim.Optimizer) -> dict[str, Any]:
    """A state dict with Adam's first moments, where it has not made them yet: a reader would miss them.

    Args:
        state: What Megatron's plain optimizer gives.
        inner: The optimizer inside it.
    """
    content = state.get("optimizer", state)
    if not all("betas" in group for group in inner.param_groups):
        return state
    held = [param for group in inner.param_groups for param in group["params"]]
    numbers = [number for group in content["param_groups"] for number in group["params"]]
    steps = {"step": torch.tensor(0.0)} if counts_per_parameter(inner) else {}
    content["state"] = {
        number: {**steps, **{moment: torch.zeros(param.shape) for moment in (EXP_AVG, EXP_AVG_SQ)}}
        for number, param in zip(numbers, held, strict=True)
    }
    return state


def _steps(
    inner: torch.optim.Optimizer, group: Mapping[str, Any], scalars: Mapping[str, object]
) -> tuple[dict[str, Any], dict[str, object]]:
    """The group's fields and what its parameters share, with the step where this optimizer counts it."""
    step = scalars.get("step", group.get("step"))
    fields = {key: value for key, value in group.items() if key != "step"}
    shared = {key: value for key, value in scalars.items() if key != "step"}
    if counts_per_parameter(inner):
        shared["step"] = torch.tensor(float(step or 0))  # type: ignore[arg-type]
    elif step is not None:
        fields["step"] = int(step)  # type: ignore[call-overload]
    return fields, shared


def _copied(value: object) -> object:
    """Parameters share no tensor: each counts its own steps."""
    return value.clone() if isinstance(value, torch.Tensor) else value
