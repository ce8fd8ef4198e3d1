"""verl: ``<default_local_dir>/global_step_N/{actor,critic}``, ``data.pt`` beside them, and a tracker.

Source: verl b178a3c, ``verl/trainer/ppo/ray_trainer.py`` (``_save_checkpoint``, ``_load_checkpoint``),
``verl/utils/checkpoint/checkpoint_manager.py`` (``find_latest_ckpt_path``: without a tracker training begins from scratch);
1dda039 for the layout with ``model``, ``optimizer`` and ``extra``.
"""

from __future__ import annotations

from .table import Trainer

TRAINER = Trainer(
    name="verl",
    title="verl",
    steps=("global_step_{step}",),
    marks=(
        "data.pt", "*/fsdp_config.json", "*/model_world_size_*_rank_*.pt", "*/dist_ckpt", "*/ckpt_contents.json", "*/model/dist_ckpt",
        "*/model/huggingface", "*/optimizer/dist_ckpt",
    ),
    roles={"actor": ("actor",), "critic": ("critic",)},
    tracker="latest_checkpointed_iteration.txt",
    data="data.pt",
    formats=("fsdp-ranks",),
    told="trainer.default_local_dir={root} trainer.resume_mode=auto",
)  # fmt: skip
