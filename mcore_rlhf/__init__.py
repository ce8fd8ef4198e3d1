"""Save, resume, convert and prove the checkpoints of RLHF runs on Megatron-core, DeepSpeed and FSDP.

The names below are the public ones; they are imported when first used, so that ``import mcore_rlhf`` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mcore_rlhf.families.options import ReadOptions, WriteOptions
    from mcore_rlhf.families.source import Source

    from .consolidate import load_fp32_state_dict
    from .convert import ConvertOptions, Job
    from .convert import convert as convert_checkpoint
    from .convert import prepare as prepare_conversion
    from .engines.adapter import AdapterEngine
    from .engines.deepspeed import DeepSpeedEngine
    from .engines.fsdp import FsdpEngine
    from .engines.megatron import MegatronEngine
    from .engines.plain import TorchEngine
    from .errors import CheckpointError
    from .formats.registry import open_checkpoint
    from .manager.config.options import manager_options
    from .manager.config.run import RunConfig, load_run_config
    from .manager.rlhf.sampler import PromptSampler
    from .manager.rlhf.state import RlhfState
    from .manager.run.manager import CheckpointManager, Resumed
    from .manager.run.options import ManagerOptions, Mirror
    from .verify.checkpoint import Depth
    from .verify.checkpoint import verify as verify_checkpoint

__version__ = "0.2.0"

__all__ = [
    "AdapterEngine",
    "CheckpointError",
    "CheckpointManager",
    "ConvertOptions",
    "DeepSpeedEngine",
    "Depth",
    "FsdpEngine",
    "Job",
    "ManagerOptions",
    "MegatronEngine",
    "Mirror",
    "PromptSampler",
    "ReadOptions",
    "Resumed",
    "RlhfState",
    "RunConfig",
    "Source",
    "TorchEngine",
    "WriteOptions",
    "__version__",
    "convert_checkpoint",
    "load_fp32_state_dict",
    "load_run_config",
    "manager_options",
    "open_checkpoint",
    "prepare_conversion",
    "verify_checkpoint",
]

# Where each name lives, as "module:name".
_HOMES = {
    "AdapterEngine": "engines.adapter:AdapterEngine",
    "CheckpointError": "errors:CheckpointError",
    "CheckpointManager": "manager.run.manager:CheckpointManager",
    "ConvertOptions": "convert:ConvertOptions",
    "DeepSpeedEngine": "engines.deepspeed:DeepSpeedEngine",
    "Depth": "verify.checkpoint:Depth",
    "FsdpEngine": "engines.fsdp:FsdpEngine",
    "Job": "convert:Job",
    "ManagerOptions": "manager.run.options:ManagerOptions",
    "MegatronEngine": "engines.megatron:MegatronEngine",
    "Mirror": "manager.run.options:Mirror",
    "PromptSampler": "manager.rlhf.sampler:PromptSampler",
    "ReadOptions": "families.options:ReadOptions",
    "Resumed": "manager.run.manager:Resumed",
    "RlhfState": "manager.rlhf.state:RlhfState",
    "RunConfig": "manager.config.run:RunConfig",
    "Source": "families.source:Source",
    "TorchEngine": "engines.plain:TorchEngine",
    "WriteOptions": "families.options:WriteOptions",
    "convert_checkpoint": "convert:convert",
    "load_fp32_state_dict": "consolidate:load_fp32_state_dict",
    "load_run_config": "manager.config.run:load_run_config",
    "manager_options": "manager.config.options:manager_options",
    "open_checkpoint": "formats.registry:open_checkpoint",
    "prepare_conversion": "convert:prepare",
    "verify_checkpoint": "verify.checkpoint:verify",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = _HOMES[name].partition(":")
    try:
        return getattr(import_module(f".{module}", __name__), attribute)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        needs = f"{__name__}.{name} needs torch, which is not installed here"
        raise ImportError(f"{needs}; install it with: pip install 'mcore_rlhf[torch]'", name="torch") from error
