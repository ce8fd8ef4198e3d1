"""The loaders of which there are rows."""

from __future__ import annotations

from mcore_rlhf.trainers.resuming import Loader

from . import (
    accelerate,
    areal,
    deepspeed,
    megatron,
    megatron_bridge,
    ms_swift,
    nemo_rl,
    open_instruct,
    openrlhf,
    prime_rl,
    rlinf,
    roll,
    skyrl,
    slime,
    torchtitan,
    transformers,
    verl,
)

LOADERS: tuple[Loader, ...] = (
    megatron.LOADER, megatron_bridge.LOADER, deepspeed.LOADER, transformers.LOADER, accelerate.LOADER, verl.LOADER, verl.TUNING_LOADER,
    skyrl.LOADER,
    openrlhf.LOADER, torchtitan.LOADER, rlinf.LOADER, areal.LOADER, nemo_rl.LOADER, open_instruct.LOADER, open_instruct.TUNING_LOADER,
    slime.LOADER, slime.MILES_LOADER, prime_rl.LOADER, ms_swift.LOADER, roll.LOADER, roll.FSDP_LOADER,
)  # fmt: skip
