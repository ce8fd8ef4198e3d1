"""A stand-in for Transformer Engine's ``FusedAdam`` of precision-aware runs: bf16 moments, masters as int16 remainders or in fp32.

Source: transformer_engine 2.x, ``pytorch/optimizers/fused_adam.py`` (``store_param_remainders``, ``get_unscaled_state``,
``set_scaled_state``).
"""

from __future__ import annotations

from typing import Any

import torch

from mcore_rlhf.demo.cpu_kernels import FusedAdam


def joined(param: Any, remainder: Any) -> Any:
    """The masters of bf16 parameters and of what was cut off."""
    rest = remainder.to(torch.int32)
    bits = ((param.view(torch.int16).to(torch.int32) - (rest < 0).to(torch.int32)) << 16) | (rest & 0xFFFF)
    return bits.view(torch.float32)


class PreciseAdam(FusedAdam):
    def __init__(self, params: Any, *, exp_avg_dtype: Any, exp_avg_sq_dtype: Any, master_weights: bool,
                 use_decoupled_grad: bool, master_weight_dtype: Any, store_param_remainders: bool, **fields: Any) -> None:  # fmt: skip
        del master_weights, use_decoupled_grad, master_weight_dtype
        self.master = torch.int16 if store_param_remainders else torch.float32
        self.dtypes = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype, "master_param": self.master}
        super().__init__(params, **fields)

    def initialize_state(self, param: Any) -> None:
        self.state[param] = {name: torch.zeros(param.shape, dtype=kind) for name, kind in self.dtypes.items()}
        if self.master == torch.float32:
            self.state[param]["master_param"].copy_(param)

    def get_unscaled_state(self, param: Any, name: str) -> Any:
        held = self.state[param][name]
        return held if name == "master_param" else held.float()

    def set_scaled_state(self, param: Any, name: str, values: Any) -> None:
        if name == "master_param":
            assert values.dtype == self.master
        if name not in self.state[param]:
            self.initialize_state(param)
        self.state[param][name].copy_(values)

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)  # torch makes states of the parameter's type
        for own in self.state.values():
            own.update({name: own[name].to(kind) for name, kind in self.dtypes.items() if name in own})

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
        own = self.state[param]
        main = own["master_param"].clone() if self.master == torch.float32 else joined(param, own["master_param"])
        self.state[main] = {name: own[name].float() for name in ("exp_avg", "exp_avg_sq")}
        self._update(main, grad.float(), group)
        done = self.state.pop(main)
        for name in ("exp_avg", "exp_avg_sq"):
            own[name].copy_(done[name])
        if self.master == torch.float32:
            own["master_param"].copy_(main)
            param.copy_(main)
            return
        bits = main.view(torch.int32)
        rest = (bits & 0xFFFF).to(torch.int16)
        own["master_param"].copy_(rest)
        param.view(torch.int16).copy_(((bits >> 16) + (rest < 0).to(torch.int32)).to(torch.int16))
