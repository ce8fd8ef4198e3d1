"""Megatron-LM and what saves with it: ``<save>/iter_NNNNNNN`` and a tracker; Megatron-Bridge, slime and miles leave files of their own.

Sources: Megatron-LM core_v0.16.1, ``megatron/training/checkpointing.py`` (``get_checkpoint_name``, ``read_metadata``); Megatron-Bridge
067f987, ``training/utils/checkpoint_utils.py`` (``run_config.yaml``, ``train_state.pt``), ``training/checkpointing.py``
(``_resolve_checkpoint_iteration``).
"""

from __future__ import annotations

from mcore_rlhf.families.run_folders import RUN_CONFIG, TRAIN_STATE

from .table import ITERATIONS, Trainer

_TRACKER = "latest_checkpointed_iteration.txt"

BRIDGE = Trainer(
    name="megatron-bridge",
    title="Megatron-Bridge",
    steps=ITERATIONS,
    marks=(RUN_CONFIG, TRAIN_STATE),
    over=("megatron-lm",),
    tracker=_TRACKER,
    counted="latest_train_state.pt",
    formats=("megatron-dist",),
    told="checkpoint.load={root}",
)
LM = Trainer(
    name="megatron-lm",
    title="Megatron-LM",
    steps=ITERATIONS,
    marks=("mp_rank_*", "common.pt", "metadata.json", ".metadata"),
    tracker=_TRACKER,
    formats=("megatron-dist", "megatron"),
    told="--load {root}",
)
