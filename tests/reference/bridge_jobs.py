"""Real megatron-core with LoRA as Megatron-Bridge adds it: the base frozen, adapters beside its linear layers, an optimizer for them alone.

Megatron-Bridge itself needs Transformer Engine and a GPU's toolchain. What it puts around Megatron-core's layers is a few lines:
which linear layers an adapter has, what is cut, and under which names both are saved.

Source: NVIDIA-NeMo/Megatron-Bridge, ``src/megatron/bridge/peft/{adapter_wrapper,lora_layers,utils}.py`` (``AdapterWrapper``,
``LoRALinear``, ``ParallelLinearAdapter``). The module is imported by the tests too, so Megatron is imported only when a worker runs a job.
"""

from __future__ import annotations

from typing import Any

from tests.reference.dist_jobs import DistSession, observe_dist
from tests.reference.observing import Observation

RANK, ALPHA = 4, 8
TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


def observe_adapters(wanted: DistSession, alone: bool = False) -> Observation:
    """Train (or continue) a model of which adapters alone are trained; see :func:`.dist_jobs.observe_dist`.

    Args:
        wanted: What to train, load and save.
        alone: Whether the adapters alone are saved, as Megatron-Bridge does.
    """
    from mcore_rlhf.demo import trainer
    from tests.reference import dist_jobs

    building, sharding = trainer.build_chunk, dist_jobs._sharded

    def build(*args: Any) -> Any:
        return _adapted(building(*args))

    def sharded(*args: Any, **kwargs: Any) -> dict[str, Any]:
        state = sharding(*args, **kwargs)
        state["model"] = {key: value for key, value in state["model"].items() if ".adapter." in key}
        return state

    trainer.build_chunk = build
    dist_jobs._sharded = sharded if alone else sharding  # type: ignore[assignment]
    try:
        return observe_dist(wanted)
    finally:
        trainer.build_chunk, dist_jobs._sharded = building, sharding  # type: ignore[assignment]


def _adapted(chunk: Any) -> Any:  # noqa: C901  two classes that need Megatron, in the function that imports it
    """The model with adapters, of which alone gradients are wanted."""
    import torch
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import apply_swiglu_sharded_factory

    class Adapter(torch.nn.Module):
        """``ParallelLinearAdapter``: B A x, scaled; A is cut where the base's input is, and B always."""

        def __init__(self, base: Any, name: str) -> None:
            super().__init__()
            config, self.name = base.config, name
            self.rows = isinstance(base, RowParallelLinear)
            inputs, outputs = base.input_size, base.output_size
            same = dict(config=config, init_method=torch.nn.init.xavier_normal_, bias=False, skip_bias_add=True,
                        is_expert=base.is_expert)  # fmt: skip
            if self.rows:
                self.linear_in = RowParallelLinear(inputs, RANK, input_is_parallel=True, **same)
            else:
                self.linear_in = ColumnParallelLinear(inputs, RANK, gather_output=True, **same)
            self.linear_out = ColumnParallelLinear(RANK, outputs, gather_output=self.rows, **same)

        def forward(self, x: Any) -> Any:
            return self.linear_out(self.linear_in(x)[0])[0] * (ALPHA / RANK)

        def sharded_state_dict(self, prefix: str, offsets: Any, metadata: Any) -> dict[str, Any]:
            found = self.linear_in.sharded_state_dict(f"{prefix}linear_in.", offsets, metadata)
            out = self.linear_out.sharded_state_dict(f"{prefix}linear_out.", offsets, metadata)
            if self.name == "linear_fc1":
                key = f"{prefix}linear_out.weight"
                out[key] = apply_swiglu_sharded_factory(out[key], offsets)
            return {**found, **out}

    class Wrapped(torch.nn.Module):
        """``LoRALinear``: the base's names are its own, and the adapter's lie below them."""

        def __init__(self, to_wrap: Any, name: str) -> None:
            super().__init__()
            self.to_wrap, self.adapter = to_wrap, Adapter(to_wrap, name)
            self.config = to_wrap.config

        def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
            output, bias = self.to_wrap(x, *args, **kwargs)
            return output + self.adapter(x), bias

        def state_dict(self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
            found = {} if destination is None else destination
            self.to_wrap.state_dict(destination=found, prefix=prefix, keep_vars=keep_vars)
            self.adapter.state_dict(destination=found, prefix=f"{prefix}adapter.", keep_vars=keep_vars)
            return found

        def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *args: Any) -> None:
            for key in [key for key in state if key.startswith(prefix) and not key.startswith(f"{prefix}adapter.")]:
                state[f"{prefix}to_wrap.{key.removeprefix(prefix)}"] = state.pop(key)

        def sharded_state_dict(
            self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
        ) -> dict[str, Any]:
            own = self.adapter.sharded_state_dict(f"{prefix}adapter.", sharded_offsets, metadata)
            return {**self.to_wrap.sharded_state_dict(prefix, sharded_offsets, metadata), **own}

    for param in chunk.parameters():
        param.requires_grad_(False)
    torch.manual_seed(7 + parallel_state.get_tensor_model_parallel_rank())
    for module in list(chunk.modules()):
        for name, child in list(module.named_children()):
            if name in TARGETS:
                setattr(module, name, Wrapped(child, name).to(next(child.parameters()).dtype))
    for param in chunk.parameters():
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(param)
    return chunk
