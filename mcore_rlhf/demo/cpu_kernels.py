"""Stand-ins for compiled kernels: torch.compile, Triton, Transformer Engine's and grouped GEMMs."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

_BATCH_INVARIANT = "megatron.core.transformer.custom_layers.batch_invariant_kernels"


def stand_in_for_compiling() -> None:
    """Leave functions uncompiled: Megatron decorates its fusions with ``torch.compile``, slow and pointless here."""

    def compile(function: Callable[..., Any] | None = None, *_: object, **__: object) -> Any:
        return function if function is not None else lambda decorated: decorated

    setattr(torch, "compile", compile)  # noqa: B010 - its type is an overload that nobody calls here


def stand_in_for_triton() -> None:
    """Answer "no" for the batch-invariant kernels: their module imports Triton at once."""
    if importlib.util.find_spec("triton") is not None:
        return
    module = types.ModuleType(_BATCH_INVARIANT)
    module.__spec__ = importlib.machinery.ModuleSpec(_BATCH_INVARIANT, None)
    for name in ("enable_batch_invariant_mode", "disable_batch_invariant_mode", "is_batch_invariant_mode_enabled"):
        setattr(module, name, lambda *_, **__: False)
    sys.modules[_BATCH_INVARIANT] = module


def stand_in_for_router_gemm() -> None:
    """Define the router's GEMM as absent: without Transformer Engine Megatron forgets to, and fails on the name."""
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def stand_in_for_latent_attention() -> None:
    """Say that Transformer Engine is absent: the module believes otherwise, and asks for instances of a mere mock."""
    from megatron.core.transformer import multi_latent_attention

    if not isinstance(multi_latent_attention.TELinear, type):
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
    """Offer ``grouped_gemm``'s one operation, so that Megatron's GroupedMLP (packed experts) can be run."""
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
    stand_in_for_triton()


def finish() -> None:
    """Everything that has to follow the import of megatron."""
    stand_in_for_router_gemm()
    stand_in_for_latent_attention()
    stand_in_for_grouped_gemm()
    stand_in_for_sharded_norms()
