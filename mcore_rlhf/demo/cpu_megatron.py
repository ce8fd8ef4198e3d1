"""Real megatron-core 0.16 on a machine without a GPU: import it through here.

Megatron takes CUDA, NCCL and apex for granted. :func:`import_megatron` puts stand-ins in their places, imports
megatron-core and finishes the few that need it imported. No file of Megatron is changed, and what it computes,
saves and loads is its own; each stand-in is one named function that says why it is needed, in ``cpu_device``,
``cpu_communication``, ``cpu_kernels`` and ``cpu_optimizer``.

The stand-ins last as long as the process. On a machine with a GPU nothing happens unless it is forced.
"""

from __future__ import annotations

import importlib
import os
import warnings

import torch

from mcore_rlhf.demo import cpu_communication, cpu_device, cpu_kernels, cpu_optimizer

_MODULES = (
    "megatron.core.parallel_state",
    "megatron.core.tensor_parallel",
    "megatron.core.pipeline_parallel",
    "megatron.core.distributed",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.optimizer",
    "megatron.core.transformer.moe.experts",
)
_done = {"install": False, "finish": False}


def needed() -> bool:
    """Whether this machine lacks the GPU that Megatron takes for granted."""
    return not torch.cuda.is_available()


def installed() -> bool:
    """Whether the stand-ins are in place in this process."""
    return _done["install"]


def install(force: bool = False) -> bool:
    """Put the stand-ins in place that must precede the import of megatron; a second call does nothing.

    Args:
        force: Also on a machine with a GPU.

    Returns:
        Whether the stand-ins are in place.
    """
    if not _done["install"] and (force or needed()):
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron asks for it, GPU or not
        cpu_device.install()
        cpu_communication.install()
        cpu_kernels.install()
        _done["install"] = True
    return _done["install"]


def import_megatron(force: bool = False) -> None:
    """Import megatron-core, with stand-ins where there is no GPU; a second call does nothing.

    Args:
        force: Use the stand-ins also on a machine with a GPU.

    Raises:
        ModuleNotFoundError: If megatron-core is not installed.
    """
    stand_in = install(force)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"megatron\.")  # it complains of every optional package
        for name in _MODULES:
            importlib.import_module(name)
    if stand_in and not _done["finish"]:
        cpu_device.stand_in_for_tracker_states()
        cpu_kernels.finish()
        cpu_optimizer.finish()
        _done["finish"] = True
