"""Stand-ins for compiled kernels: torch.compile, Transformer Engine's, grouped GEMMs, and fused Adam.

Adam is as apex and Transformer Engine define it, without their kernels.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from typing import Any

import torch

from mcore_rlhf.demo import versions
from mcore_rlhf.engines.megatron.importing import make_importable


def stand_in_for_compiling() -> None:
    """Leave functions uncompiled: Megatron decorates its fusions with ``torch.compile``, slow and pointless here."""

    def compile(function: Callable[..., Any] | None = None, *_: object, **__: object) -> Any:
        return function if function is not None else lambda decorated: decorated

    setattr(torch, "compile", compile)  # noqa: B010 - its type is an overload that nobody calls here


def stand_in_for_router_gemm() -> None:
    """Define the router's GEMM as absent: without Transformer Engine Megatron forgets to, and fails on the name."""
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def stand_in_for_latent_attention() -> None:
    """Say that Transformer Engine is absent: the module believes otherwise, and asks for instances of a mere mock."""
    from megatron.core.transformer import multi_latent_attention

    if not isinstance(getattr(multi_latent_attention, "TELinear", type), type):
        multi_latent_attention.HAVE_TE = False


def grouped_matmul(
    inputs: torch.Tensor, weights: torch.Tensor, batch_sizes: torch.Tensor, trans_b: bool = False
) -> torch.Tensor:
    """Multiply consecutive runs of rows each by its own matrix, as the package ``grouped_gemm`` does.

    Args:
        inputs: Rows, (sum of ``batch_sizes``, k).
        weights: One matrix per run, (runs, k, n), or (runs, n, k) with ``trans_b``.
        batch_sizes: Rows per run.
        trans_b: Whether the matrices are transposed.
    """
    matrices = weights.transpose(1, 2) if trans_b else weights
    runs = inputs.split(batch_sizes.tolist())
    return torch.cat([run @ matrix for run, matrix in zip(runs, matrices, strict=True)])


def stand_in_for_grouped_gemm() -> None:
    """Offer ``grouped_gemm``'s one operation, so that the GroupedMLP (packed experts) of Megatron 0.16 can be run."""
    if not versions.HAS_GROUPED_MLP:
        return
    from megatron.core.transformer.moe import grouped_gemm_util

    if grouped_gemm_util.grouped_gemm_is_available():
        return
    grouped_gemm_util.ops = types.SimpleNamespace(gmm=grouped_matmul)
    grouped_gemm_util.grouped_gemm_is_available = lambda: True


def stand_in_for_sharded_norms() -> None:
    """Let torch's norms serve under sequence parallelism, which tensor plus expert parallelism requires.

    Megatron's wrapper refuses because torch does not mark the weights. The mark is all that is missing: Megatron then
    sums the gradients of marked parameters over the tensor-parallel group, as it does for apex's norms.
    """
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    create = WrappedTorchNorm.__new__

    def create_marked(cls: type, config: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
        marked, config.sequence_parallel = config.sequence_parallel, False
        try:
            norm = create(cls, config, *args, **kwargs)
        finally:
            config.sequence_parallel = marked
        for param in norm.parameters():
            param.sequence_parallel = marked
        return norm

    WrappedTorchNorm.__new__ = create_marked


def install() -> None:
    """Everything that has to be in place before megatron is imported."""
    stand_in_for_compiling()
    make_importable()


class FusedAdam(torch.optim.Optimizer):
    """Adam(W) with one integer ``step`` per parameter group and only ``exp_avg``, ``exp_avg_sq`` per parameter.

    That is where apex keeps the step, and where Megatron's checkpoints expect it: with ``torch.optim.AdamW`` (a step
    tensor per parameter) loading a legacy checkpoint ends in ``KeyError: 'step'``.

    Args:
        params: Tensors or parameter groups.
        lr: Learning rate.
        bias_correction: Whether the moments are corrected for their start at zero.
        betas: Decay of the two moments.
        eps: Added to the root of the second moment.
        adam_w_mode: Decoupled weight decay (AdamW) instead of an L2 term in the gradient.
        weight_decay: Weight decay.
        capturable: Whether a CUDA graph may capture the step; asked for by Megatron since 0.17, and of no meaning here.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        capturable: bool = False,
    ) -> None:
        self.adam_w_mode = adam_w_mode
        defaults = dict(lr=lr, bias_correction=bias_correction, betas=betas, eps=eps, weight_decay=weight_decay)
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            if group["params"]:
                group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, param.grad, group)

    def _update(self, param: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2) = self.state[param], group["betas"]
        if not state:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
        decay = group["weight_decay"]
        if not self.adam_w_mode:
            grad = grad.add(param, alpha=decay)
        state["exp_avg"].mul_(beta1).add_(grad, alpha=1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        correct = group["bias_correction"]
        scale1 = 1 - beta1 ** group["step"] if correct else 1.0
        scale2 = 1 - beta2 ** group["step"] if correct else 1.0
        change = (state["exp_avg"] / scale1) / ((state["exp_avg_sq"] / scale2).sqrt() + group["eps"])
        param.add_(change.add(param, alpha=decay) if self.adam_w_mode else change, alpha=-group["lr"])


def stand_in_for_fused_adam() -> None:
    """Bind :class:`FusedAdam` where Megatron looks for apex's.

    A fake ``apex`` module would not do: it would also select apex's fused LayerNorm, which refuses RMSNorm.
    """
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    optimizer.Adam, optimizer.USING_PYTORCH_OPTIMIZER = FusedAdam, False
    distrib_optimizer.Adam = FusedAdam
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_APEX_OPTIMIZER = True


def mend_loading_of_fp32_state() -> None:
    """Load fp32 parameters without recording gradients.

    Not about the CPU: megatron-core 0.16.1 copies into fp32 parameters, which are leaves, in place, and so cannot
    load the distributed optimizer's file of an fp32 model that it wrote itself.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    load = DistributedOptimizer.load_parameter_state_from_dp_zero
    DistributedOptimizer.load_parameter_state_from_dp_zero = torch.no_grad()(load)


def finish() -> None:
    """Everything that has to follow the import of megatron."""
    stand_in_for_router_gemm()
    stand_in_for_latent_attention()
    stand_in_for_grouped_gemm()
    stand_in_for_sharded_norms()
    stand_in_for_fused_adam()
    mend_loading_of_fp32_state()
