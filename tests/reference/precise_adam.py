"""A stand-in for Transformer Engine's ``FusedAdam`` of precision-aware runs: moments in bf16, fp16 or fp32; masters as int16 remainders, in
fp32, or in fp16 with a scale for each tensor.

Source: Transformer Engine 2.9, ``pytorch/optimizers/fused_adam.py`` (``store_param_remainders``, ``_apply_scale``,
``get_unscaled_state``, ``set_scaled_state``, ``load_state_dict``).
"""

from __future__ import annotations

from typing import Any

import torch

from mcore_rlhf.demo.cpu_kernels import FusedAdam

_MOMENTS = ("exp_avg", "exp_avg_sq")


def joined(param: Any, remainder: Any) -> Any:
    """The masters of bf16 parameters and of what was cut off."""
    rest = remainder.to(torch.int32)
    bits = ((param.view(torch.int16).to(torch.int32) - (rest < 0).to(torch.int32)) << 16) | (rest & 0xFFFF)
    return bits.view(torch.float32)


class PreciseAdam(FusedAdam):
    def __init__(self, params: Any, *, exp_avg_dtype: Any, exp_avg_sq_dtype: Any, master_weights: bool,
                 use_decoupled_grad: bool, master_weight_dtype: Any, store_param_remainders: bool, **fields: Any) -> None:  # fmt: skip
        del master_weights, use_decoupled_grad
        self.store_param_remainders = store_param_remainders and master_weight_dtype == torch.float32
        master = torch.int16 if self.store_param_remainders else master_weight_dtype
        self.dtypes = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype, "master_param": master}
        self._scales: dict[Any, dict[str, Any]] = {}
        super().__init__(params, **fields)

    def initialize_state(self, param: Any) -> None:
        self.state[param] = {name: torch.zeros(param.shape, dtype=kind) for name, kind in self.dtypes.items()}
        self._scales[param] = {name: torch.ones(1) for name, kind in self.dtypes.items() if kind == torch.float16}
        if not self.store_param_remainders:
            self.set_scaled_state(param, "master_param", param.detach().clone().float())

    def get_unscaled_state(self, param: Any, name: str) -> Any:
        held = self.state[param][name]
        if self.dtypes[name] == torch.float16:
            return held.float().mul_(self._scales[param][name])
        return held.float() if self.dtypes[name] == torch.bfloat16 else held

    def set_scaled_state(self, param: Any, name: str, values: Any) -> None:
        kept = self.dtypes[name]
        assert values.dtype == (torch.int16 if kept == torch.int16 else torch.float32)
        if name not in self.state[param]:
            self.initialize_state(param)
        if kept == torch.float16:
            scale = self._scales[param][name]
            torch.div(values.abs().max(), torch.full([1], torch.finfo(torch.float16).max / 2.0), out=scale)
            values.mul_(torch.where(scale > 0, scale.reciprocal(), 0.0))
        self.state[param][name].copy_(values)

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)  # torch makes states of the parameter's type
        params = [param for group in self.param_groups for param in group["params"]]
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        for number, param in zip(numbers, params, strict=True):
            if number not in state_dict["state"]:
                continue
            self.initialize_state(param)
            for name, kind in self.dtypes.items():
                given = state_dict["state"][number][name]
                self.set_scaled_state(param, name, given if kind == torch.int16 else given.float())

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if group["params"]:
                group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                grad = getattr(param, "decoupled_grad", None)
                if grad is not None:
                    self._precisely(param, grad, group)

    def _precisely(self, param: Any, grad: Any, group: Any) -> None:
        if not self.state[param]:
            self.initialize_state(param)
        kept = self.get_unscaled_state(param, "master_param")
        main = joined(param, kept) if self.store_param_remainders else kept.clone()
        self.state[main] = {name: self.get_unscaled_state(param, name).clone() for name in _MOMENTS}
        self._update(main, grad.float(), group)
        done = self.state.pop(main)
        for name in _MOMENTS:
            self.set_scaled_state(param, name, done[name])
        if not self.store_param_remainders:
            param.copy_(main)
            self.set_scaled_state(param, "master_param", main)
            return
        bits = main.view(torch.int32)
        rest = (bits & 0xFFFF).to(torch.int16)
        self.set_scaled_state(param, "master_param", rest)
        param.view(torch.int16).copy_(((bits >> 16) + (rest < 0).to(torch.int32)).to(torch.int16))
