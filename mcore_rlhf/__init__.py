"""Save, resume, convert and prove the checkpoints of RLHF runs on Megatron-core and DeepSpeed.

The names below are the public ones; they are imported when first used, so that ``import mcore_rlhf`` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .convert import ConvertOptions, Job
    from .convert import convert as convert_checkpoint
    from .convert import prepare as prepare_conversion
    from .errors import CheckpointError
    from .formats.base import ReadOptions, Source, WriteOptions
    from .formats.registry import open_checkpoint
    from .verify.checkpoint import Depth
    from .verify.checkpoint import verify as verify_checkpoint

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "ConvertOptions",
    "Depth",
    "Job",
    "ReadOptions",
    "Source",
    "WriteOptions",
    "__version__",
    "convert_checkpoint",
    "open_checkpoint",
    "prepare_conversion",
    "verify_checkpoint",
]

# Where each name lives, as "module:name".
_HOMES = {
    "CheckpointError": "errors:CheckpointError",
    "ConvertOptions": "convert:ConvertOptions",
    "Depth": "verify.checkpoint:Depth",
    "Job": "convert:Job",
    "ReadOptions": "formats.base:ReadOptions",
    "Source": "formats.base:Source",
    "WriteOptions": "formats.base:WriteOptions",
    "convert_checkpoint": "convert:convert",
    "open_checkpoint": "formats.registry:open_checkpoint",
    "prepare_conversion": "convert:prepare",
    "verify_checkpoint": "verify.checkpoint:verify",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = _HOMES[name].partition(":")
    return getattr(import_module(f".{module}", __name__), attribute)
