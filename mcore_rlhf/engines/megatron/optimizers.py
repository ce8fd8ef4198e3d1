"""Megatron's optimizers seen alike: which parameters each one trains, which part of them this rank owns, and its states.

Sources: megatron-core 0.16.1, ``optimizer/optimizer.py`` (``Float16OptimizerWithFloat16Params``, ``FP32Optimizer``,
``ChainedOptimizer``), ``optimizer/distrib_optimizer.py`` (``DistributedOptimizer``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from mcore_rlhf.core.catalog import EXP_AVG, EXP_AVG_SQ, MASTER
from mcore_rlhf.errors import Problems, Unsupported, log_of
from mcore_rlhf.families.megatron.arguments import DISTRIBUTED, PLAIN

from ..optimizers import STEP, is_elementwise, is_known
from ..save import torch_optimizers
from ..stateful import Stateful, leaves
from .counting import count_apart, counts_per_parameter, load_plain, with_zeros

LOG = log_of("mcore_rlhf")
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
    def opaque(self) -> bool:
        """Whether it is of no kind that is known: it is asked for its state, and given it back, whole."""
        return not any(_is_a(self.optimizer, kind) for kind in _KINDS)

    @property
    def inner(self) -> Any:
        """The torch optimizer inside, or what is taken for one."""
        return self.optimizer if self.opaque else self.optimizer.optimizer

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The live param groups."""
        groups: list[dict[str, Any]] = [] if self.opaque else self.inner.param_groups
        return groups

    @property
    def label(self) -> str:
        """The optimizer inside, for messages."""
        return f"optimizer {self.number} ({type(self.inner).__qualname__})"

    @property
    def is_adam(self) -> bool:
        """Whether it keeps what Adam does: the two moments that Megatron's flat files have a place for."""
        return not self.opaque and all("betas" in group for group in self.groups)

    @property
    def expert(self) -> bool:
        """Whether it holds experts that expert parallelism deals out."""
        return any(group.get("is_expert_parallel") for group in self.groups)

    @property
    def converts(self) -> bool:
        """Whether states are kept in another form than fp32 tensors, and go in and out through Megatron's methods."""
        config = getattr(self.optimizer, "config", None)
        return self.kind == DISTRIBUTED and bool(
            getattr(config, "use_precision_aware_optimizer_no_fp8_or_ds_fp8", False)
        )

    @property
    def keeps_remainders(self) -> bool:
        """Whether masters are kept as what they have beyond their bf16 parameters, in 16 bits: files hold those integers as fp32."""
        config = getattr(self.optimizer, "config", None)
        wanted = getattr(config, "store_param_remainders", False) and getattr(config, "bf16", False)
        # Transformer Engine keeps them of fp32 masters alone, whatever Megatron asks for
        return self.converts and not self.offloaded and bool(getattr(self.inner, "store_param_remainders", wanted))

    @property
    def rescales(self) -> bool:
        """Whether states are kept in fp16 or fp8 with a scale for each part: cut otherwise, they are rounded anew.

        Source: Transformer Engine 2.9, ``pytorch/optimizers/fused_adam.py`` (``_apply_scale``).
        """
        config = getattr(self.optimizer, "config", None)
        kinds = ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
        return self.converts and any(getattr(config, kind, None) in (torch.float16, torch.uint8) for kind in kinds)

    @property
    def offloaded(self) -> bool:
        """Whether parts are trained on the CPU, by several optimizers in one. They keep fp32 masters, whatever the configuration says.

        Source: megatron-core 0.16.1 and 0.19.2, ``optimizer/cpu_offloading/hybrid_optimizer.py``.
        """
        return _is_a(self.inner, "HybridDeviceOptimizer")

    def owned(self) -> list[Owned]:
        """What this rank owns, in the optimizer's order."""
        return [] if self.opaque else list(self._shards() if self.kind == DISTRIBUTED else self._wholes())

    def main_param(self, owned: Owned) -> torch.Tensor:
        """What the torch optimizer inside trains of a part: a master, or the parameter or a shard of it."""
        if self.kind == PLAIN:
            return self._master(owned.param)
        group, order = self.optimizer.model_param_group_index_map[owned.param]
        found: torch.Tensor = self.groups[group]["params"][order]
        return found

    def tensors(self, owned: Owned) -> dict[str, torch.Tensor]:
        """Master and states of a part, by our names; those that the optimizer has not made yet are missing."""
        if self.kind == DISTRIBUTED and not self.stepped:
            # asking Megatron would leave empty states behind, which confuse its load
            held = self.main_param(owned).detach()
            return {MASTER: torch.zeros_like(held) if self.keeps_remainders else held}
        if self.kind == DISTRIBUTED:
            tensors = dict(self.optimizer._get_main_param_and_optimizer_states(owned.param))
            named = {MASTER: tensors.pop(PARAM_KEY), **tensors}
            named.pop(_MASTER_STATE, None)  # CPU offload: the same again
        else:
            held = self.main_param(owned)
            named = {} if held is owned.param else {MASTER: held}
            named |= self.inner.state.get(held, {})
        count = owned.stop - owned.start
        return {
            k: v.detach() for k, v in named.items() if isinstance(v, torch.Tensor) and v.dim() and v.numel() == count
        }

    def kept_as(self, owned: Owned, state: str) -> list[torch.Tensor]:
        """The optimizer's own memory of a state that :meth:`tensors` gives, or of its count of steps; none where it has none."""
        held = self.main_param(owned)
        values = self.inner.state.get(held, {}) if self.stepped else {}
        found = values.get(state, values.get(_MASTER_STATE) if state == MASTER else None)
        return [found] if isinstance(found, torch.Tensor) else []

    def states(self) -> tuple[str, ...]:
        """The states of which a flat file has records: those that Megatron looks for, and what else is elementwise here."""
        usual = getattr(self.optimizer, "optimizer_state_keys", (EXP_AVG, EXP_AVG_SQ)) if self.is_adam else ()
        states = () if self.converts else self.inner.state.values()
        found = {
            key for one in states for key, value in one.items() if is_elementwise(key, getattr(value, "shape", None))
        }
        return (*usual, *sorted(found - {*usual, _MASTER_STATE}))

    def may_keep(self, states: Set[str]) -> bool:
        """Whether stored states can be its own: those that it keeps, or would if it is known; else Adam's and more."""
        if self.kind == PLAIN:
            return states >= self._needed() and (self.is_adam or EXP_AVG_SQ not in states)
        decided = self.stepped or is_known(self.inner)
        return states == set(self.states()) if decided else states >= set(self.states())

    def _needed(self) -> set[str]:
        """The elementwise states that a plain optimizer has, or will have; empty where that is not known."""
        if self.stepped:
            held = next(iter(self.inner.state))
            return {
                k for k, v in self.inner.state[held].items() if is_elementwise(k, getattr(v, "shape", None), held.shape)
            }
        return {EXP_AVG, EXP_AVG_SQ} if self.is_adam and "Adam" in self.label else set()

    def put(self, owned: Owned, tensors: Mapping[str, torch.Tensor], *, own: bool = False) -> None:
        """Give a part new fp32 values where they are kept in another form; see :attr:`converts`.

        Args:
            owned: The part; its parameter is loaded.
            tensors: By state.
            own: Whether masters come as such an optimizer gives them, and are remainders where it keeps those.
        """
        named = {PARAM_KEY if name == MASTER else name: tensor for name, tensor in tensors.items()}
        device = {name: tensor.to(owned.param.device, copy=self.offloaded) for name, tensor in named.items()}
        if self.keeps_remainders:
            master = device[PARAM_KEY]
            device[PARAM_KEY] = (master if own else remainders(master, owned)).to(torch.int16)
        self.optimizer._set_main_param_and_optimizer_states(owned.param, device)

    def settle(self) -> None:
        """Hand on what :meth:`put` was given to those that train with it.

        Source: megatron-core 0.19.2, ``optimizer/distrib_optimizer.py``: ``load_parameter_state_from_fully_reshardable`` does so;
        ``load_parameter_state_from_dp_zero``, that of legacy files, does not, and goes on with the masters that were there before.
        """
        if self.offloaded and self.stepped:
            self.inner._sync_hdo_state_to_sub_optimizers()

    def state_dict(self) -> dict[str, Any]:
        """What the model file holds of it, as Megatron gives it; before the first step too, when Megatron cannot always."""
        if self.kind == PLAIN or self.stepped or not counts_per_parameter(self.inner):
            state: dict[str, Any] = self.optimizer.state_dict()
            return state if self.opaque or self.stepped or self.kind == DISTRIBUTED else with_zeros(state, self.inner)
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
        if not self.stepped:
            self.inner.state.clear()  # empty ones of parameters that somebody asked for
        if self.kind == DISTRIBUTED:
            stored = [{key: value for key, value in group.items() if key != "params"} for group in groups]
            # Megatron finds a group by what identifies it, since 0.19 by learning rates too: it is shown the live groups
            shown = [
                {**live, **{k: v for k, v in new.items() if k == STEP}}
                for live, new in zip(self.groups, stored, strict=True)
            ]
            self.optimizer.load_state_dict({"optimizer": {"param_groups": shown}})
            count_apart(self.inner)
            for live, new in zip(self.groups, stored, strict=True):
                live.update(new)  # and groups that are alike to it, one
            self._allocate(states)
        else:
            load_plain(self.inner, groups, states, scalars)

    def _allocate(self, states: Sequence[str]) -> None:
        """Megatron's load makes Adam's two states; those of other names are made like them, and those that are not its own go."""
        for held in map(self.main_param, self.owned() if not self.converts else ()):
            live = self.inner.state[held]
            live.update({name: torch.zeros_like(held.detach()) for name in states if name not in live})
            for name in {EXP_AVG, EXP_AVG_SQ} & live.keys() - {*states}:
                del live[name]

    @property
    def scaler(self) -> Stateful | None:
        """Its loss scaler, where it has one."""
        found: Stateful | None = getattr(self.optimizer, "grad_scaler", None)
        return found

    def forget(self) -> None:
        """Begin anew from the model's weights: masters are copies of them, moments are zeros."""
        if hasattr(self.optimizer, "reload_model_params"):
            self.optimizer.reload_model_params()
        if self.converts and self.stepped:
            self._forget_converted()
        for inner in torch_optimizers(self.optimizer):
            for key, value in leaves([*inner.state.values()]):
                if isinstance(value, torch.Tensor) and not (self.converts and key.endswith(_MASTER_STATE)):
                    value.zero_()
        for group in self.groups:
            if "step" in group:
                group["step"] = 0

    def _forget_converted(self) -> None:
        """Masters among the states are the parameters, in the form in which they are kept."""
        for owned in self.owned():
            param = owned.param.detach().flatten()[owned.start : owned.stop].float()
            self.put(owned, {MASTER: param, **{state: torch.zeros_like(param) for state in self.states()}})
        self.settle()

    @property
    def stepped(self) -> bool:
        """Whether it has made states."""
        return any(self.inner.state.values())

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
    """The chained optimizers in order, those of chains within it in their places; None for a stub, which a rank without trainable
    parameters has.

    Raises:
        Unsupported: Some have files of their own, or nothing that gives their state; all are named.
    """
    problems = Problems()
    found = [
        None if getattr(one, "is_stub_optimizer", False) else _checked(ChainMember(number, one, layer_wise), problems)
        for number, (one, layer_wise) in enumerate(_links(optimizer) if optimizer is not None else ())
    ]
    problems.raise_if_any()
    _say_what_is_special(found)
    return tuple(found)


_CHAIN, _LAYER_WISE = "ChainedOptimizer", "LayerWiseDistributedOptimizer"
_KINDS = ("DistributedOptimizer", "Float16OptimizerWithFloat16Params", "FP32Optimizer")
_UNKNOWN = "Give the engine an optimizer of megatron-core, or none: MegatronEngine(chunks) saves the weights alone."


def _links(optimizer: Any, layer_wise: bool = False) -> Iterator[tuple[Any, bool]]:
    """What is chained, at any depth, and whether parameters were dealt out to ranks; a chain of no kind that is known may do so.

    Source: megatron-core 0.19.2, ``optimizer/__init__.py`` (``_get_megatron_emerging_optimizer``: a layer-wise chain and a
    distributed optimizer, chained).
    """
    if not hasattr(optimizer, "chained_optimizers"):
        yield optimizer, layer_wise
        return
    dealt = _is_a(optimizer, _LAYER_WISE) or not _is_a(optimizer, _CHAIN)
    for one in optimizer.chained_optimizers:
        yield from _links(one, layer_wise or dealt)


def _checked(member: ChainMember, problems: Problems) -> ChainMember:
    """A member, having said what cannot be saved of it: what is found out now is not lost at the first save."""
    optimizer = member.optimizer
    if getattr(getattr(optimizer, "ddp_config", None), "use_megatron_fsdp", False):
        text = "Megatron-FSDP keeps its state in files of its own (fsdp_dtensor), not in the torch format"
        problems.add(Unsupported, text, _UNKNOWN)
    elif member.opaque and not isinstance(optimizer, Stateful):
        text = f"{member.label}: has neither state_dict nor load_state_dict, and is no optimizer of megatron-core"
        problems.add(Unsupported, text, _UNKNOWN)
    return member


def _say_what_is_special(found: Sequence[ChainMember | None]) -> None:
    """An optimizer of another kind than Adam is named when the engine is made, and what becomes of its states."""
    for member in filter(None, found):
        known = is_known(member.inner) or type(member.inner).__qualname__ == "FusedAdam"  # what stands in for apex's
        if member.layer_wise or member.opaque or not ("Adam" in member.label and known):
            unknown = "" if known else "is not known: "
            how = "whole, rank by rank" if member.layer_wise or member.opaque else "whole"
            fate = "resume at the same layout only" if member.opaque else "are reshaped where they are elementwise"
            LOG.warning("MegatronEngine: %s: %sits states are saved %s, and %s", member.label, unknown, how, fate)


def _is_a(optimizer: object, name: str) -> bool:
    """By name, since not every version of Megatron has every kind."""
    return any(kind.__name__ == name for kind in type(optimizer).__mro__)


def is_whole(chain: Sequence[ChainMember | None]) -> bool:
    """Whether no plan can move the chain: parameters are dealt out whole, or are in several optimizers by their kind."""
    present = [member for member in chain if member is not None and member.kind == PLAIN]
    return rank_by_rank(chain) or sum(not member.expert for member in present) > 1


def rank_by_rank(chain: Sequence[ChainMember | None]) -> bool:
    """Whether every rank has states of its own that no file of the distributed optimizer takes."""
    return any(member.layer_wise or member.opaque for member in chain if member is not None)


def is_laid_out(chain: Sequence[ChainMember | None]) -> bool:
    """Whether some parameters are dealt out whole and the others are cut, as a layer-wise optimizer does by layout."""
    present = [member for member in chain if member is not None]
    return any(member.layer_wise for member in present) and any(member.kind == DISTRIBUTED for member in present)


def remainders(master: torch.Tensor, owned: Owned) -> torch.Tensor:
    """What masters have beyond their bf16 parameters; of one that lies in the middle of two, and was rounded to the lower, as much
    as 16 bits hold.

    Source: Transformer Engine 2.1, ``common/multi_tensor/adam.cu`` (``AdamFunctorMasterParamRemainder``).
    """
    param = owned.param.detach().flatten()[owned.start : owned.stop]
    high = param.contiguous().view(torch.int16).to(torch.int64) << 16
    return (master.contiguous().view(torch.int32).to(torch.int64) - high).clamp(-(1 << 15), (1 << 15) - 1)


def kind_of(chain: Sequence[ChainMember | None]) -> str | None:
    """The kind of a chain, or None where nothing is trained here."""
    return next((member.kind for member in chain if member is not None), None)
