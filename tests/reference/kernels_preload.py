"""Megatron on the CPU with stand-ins for the kernels of Mamba and the gated delta net, imported before ranks are forked."""

import importlib

from tests.reference.hybrid_worker import stand_in_for_kernels

stand_in_for_kernels()  # before Megatron looks for them
for name in (
    "mcore_rlhf.demo.with_megatron",
    "megatron.core.optimizer",
    "megatron.core.models.hybrid.hybrid_model",  # since 0.19
    "megatron.core.dist_checkpointing.gpt_checkpoint_interop",
    "megatron.core.models.gpt.experimental_attention_variant_module_specs",
):
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        if not name.startswith("megatron.core."):
            raise
