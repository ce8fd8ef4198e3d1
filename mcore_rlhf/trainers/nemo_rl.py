"""NeMo-RL: ``<checkpoint_dir>/step_N/{policy,value}``, written as ``tmp_step_N`` and renamed, ``training_info.json`` in each.

Source: NeMo-RL 7ea279a, ``nemo_rl/utils/checkpoint.py`` (``CheckpointManager``: ``init_tmp_checkpoint``, ``finalize_checkpoint``,
``get_latest_checkpoint_path``: the highest number; ``load_training_info``; ``get_resume_paths``: ``policy/weights/iter_0000000`` of a
policy on Megatron), ``nemo_rl/data/utils.py`` (``load_dataloader_state``: opens ``train_dataloader.pt`` without a look). Megatron-Bridge
067f987, ``training/checkpointing.py`` (``_load_checkpoint_from_path``): without ``run_config.yaml`` the arguments in the checkpoint say how
it lies.
"""

from __future__ import annotations

from .table import Counters, Trainer

TRAINER = Trainer(
    name="nemo-rl",
    title="NeMo-RL",
    steps=("step_{step}",),
    marks=("training_info.json", "policy/weights"),
    roles={
        "actor": ("policy", "policy/weights", "policy/weights/model"),
        "critic": ("value", "value/weights", "value/weights/model"),
    },
    aside=("tmp_step_{step}", "old_step_{step}"),
    needs=("training_info.json",),
    resumes="highest",
    data="train_dataloader.pt",
    opens_data=True,
    counters=Counters(
        "training_info.json",
        "total_steps",
        {"consumed_samples": "samples", "current_step": "step", "total_steps": "step"},
        within=("current_step", "current_epoch"),
    ),
    formats=("dcp", "megatron-dist"),
    megatrons="weights",
    counts=False,
    told="checkpointing.checkpoint_dir={root}",
)
