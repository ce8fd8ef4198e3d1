"""RLinf: ``<output_dir>/<experiment>/checkpoints/global_step_N/{actor,critic}``, ``data/data.pt`` beside them, and no tracker.

Source: RLinf a3816b5, ``rlinf/runners/reasoning_runner.py`` (``_save_checkpoint``; ``resume_dir: auto`` takes the highest number, finished
or not), ``rlinf/hybrid_engines/fsdp/strategy/base.py`` (``save_checkpoint``), ``rlinf/hybrid_engines/fsdp/fsdp_model_manager.py``
(``build_optimizer``): its schedule has a rate for each param group, and stops at its first step where a checkpoint had more (torch
2.13.0, ``optim/lr_scheduler.py``, ``LambdaLR.get_lr``).
"""

from __future__ import annotations

from .table import Trainer

TRAINER = Trainer(
    name="rlinf",
    title="RLinf",
    steps=("global_step_{step}",),
    marks=("data/data.pt", "*/dcp_checkpoint", "*/local_shard_checkpoint", "*/model_state_dict", "*/iter_*"),
    roles={"actor": ("actor",), "critic": ("critic",)},
    within="checkpoints",
    resumes="highest",
    data="data/data.pt",
    second_group=("value_head",),
    formats=("dcp", "megatron"),
    told="runner.resume_dir={path}",
)
