"""What must be there before megatron-core is imported, where the Python or the machine lacks it: ``typing.override`` and Triton."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types
import typing
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def _installed() -> tuple[int, int]:
    """The first two numbers of the installed release; of the newest that is known where none is installed."""
    try:
        major, minor = version("megatron-core").split(".")[:2]
        return int(major), int(minor)
    except PackageNotFoundError:
        return (0, 19)


MEGATRON = _installed()
"""The release: 0.16 to 0.19, and as far as tests have run them 0.13 to 0.15."""

_NEED_TRITON = (
    "emerging_optimizers.triton_kernels",
    *{
        (0, 16): ["megatron.core.transformer.custom_layers.batch_invariant_kernels"],
        (0, 18): ["megatron.core.transformer.moe.paged_stash"],
        (0, 19): ["megatron.core.transformer.moe.ops.paged_stash"],
    }.get(MEGATRON, []),
)
"""Modules that cannot be imported without Triton, though they are."""


def make_importable() -> None:
    """See to it that ``import megatron.core`` works; a second call, or one where nothing is lacking, does nothing."""
    offer_override()
    stand_in_for_triton()


def unwrapped(chunks: Sequence[torch.nn.Module]) -> list[Any]:
    """The modules within Megatron's wrappers; releases before 0.14 leave their unwrapping to the training script.

    Args:
        chunks: The model's.
    """
    from megatron.core import utils

    if hasattr(utils, "unwrap_model"):
        return list(utils.unwrap_model(list(chunks)))
    return [_within(chunk) for chunk in chunks]


def _within(chunk: torch.nn.Module) -> torch.nn.Module:
    """Each wrapper has what it wraps as ``module``. Source: Megatron-LM core_v0.13.0, ``megatron/training/utils.py`` (``unwrap_model``)."""
    inner = getattr(chunk, "module", None)
    return chunk if inner is None else _within(inner)


def offer_override() -> None:
    """Offer ``typing.override`` on Python 3.11, too.

    emerging_optimizers 0.3.0, which Megatron imports where it is installed, takes it from there, asks for 3.12, and runs otherwise.
    """
    if not hasattr(typing, "override") and importlib.util.find_spec("typing_extensions") is not None:
        from typing_extensions import override

        setattr(typing, "override", override)  # noqa: B010 - mypy knows that 3.10 has none


def stand_in_for_triton() -> None:
    """Answer "no" in the place of modules that import Triton at once: without a GPU it is a gigabyte, and nobody wants their kernels."""
    if "triton" in sys.modules or importlib.util.find_spec("triton") is not None:
        return
    for name in _NEED_TRITON:
        if name not in sys.modules:
            module = types.ModuleType(name)
            module.__spec__ = importlib.machinery.ModuleSpec(name, None)
            module.__getattr__ = _no  # type: ignore[method-assign]
            sys.modules[name] = module


def _no(name: str) -> Any:
    """What a module without kernels has under a public name: a function whose answer is no, or a flag that says no."""
    if name.startswith("__"):
        raise AttributeError(name)
    return False if name.isupper() else lambda *_, **__: False
