"""Megatron on the CPU with more rounding in its matrix products: every 32 terms of a bf16 sum are rounded to bf16, which is what no
processor does (AMX adds pairs in fp32), and makes sums depend on where they are cut more than on any.
"""

# ruff: noqa: F401
import mcore_rlhf.demo.trainer

# isort: split
from collections.abc import Callable
from typing import Any

import torch

BLOCK = 32
batched = torch.bmm  # of fp32, which is many times as fast as bf16 where the processor has none


def rounded(product: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A product of matrices whose partial sums are rounded; other types than bf16 go as they go."""

    def multiply(left: torch.Tensor, right: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        if left.dtype != torch.bfloat16 or right.dim() < 2 or rest or options:
            return product(left, right, *rest, **options)
        terms, rows = left.shape[-1], left.reshape(-1, left.shape[-1]).float()
        if right.dim() > 2 or terms % BLOCK:
            blocks = zip(left.split(BLOCK, -1), right.split(BLOCK, -2), strict=True)
            return torch.stack([product(one, other) for one, other in blocks]).sum(0)
        cut = rows.unflatten(1, (-1, BLOCK)).transpose(0, 1), right.float().unflatten(0, (-1, BLOCK))
        return batched(*cut).bfloat16().sum(0).reshape(*left.shape[:-1], right.shape[1])

    return multiply


def rounded_linear(linear: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if x.dtype != torch.bfloat16:
            return linear(x, weight, bias)
        found = torch.matmul(x, weight.t())
        return found if bias is None else found + bias

    return multiply


torch.matmul = rounded(torch.matmul)
torch.Tensor.matmul = rounded(torch.Tensor.matmul)  # type: ignore[method-assign, assignment]
torch.Tensor.__matmul__ = rounded(torch.Tensor.__matmul__)  # type: ignore[method-assign, assignment]
torch.bmm = rounded(torch.bmm)
torch.nn.functional.linear = rounded_linear(torch.nn.functional.linear)  # type: ignore[assignment]
