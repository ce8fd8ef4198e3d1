"""SkyRL: ``<ckpt_path>/global_step_N/{policy,critic}``, ``data.pt`` and ``trainer_state.pt`` beside them, and a tracker.

Source: SkyRL 0.3.0, ``skyrl/train/trainer.py`` (``save_checkpoints``, ``load_checkpoints``: without ``trainer_state.pt`` a
FileNotFoundError, without a tracker from scratch), ``skyrl/train/sft_trainer.py`` (the same files, of a policy alone),
``skyrl/train/fully_async_trainer.py`` (``fully_async_state.pt`` beside them), ``skyrl/backends/skyrl_train/distributed/fsdp_strategy.py``
(``save_checkpoint``: FSDP2's rank files; ``_fsdp_init_train_model``: AdamW of all parameters in one group) and
``distributed/megatron/megatron_strategy.py`` (``save_checkpoint``: ``torch_dist`` in the role's folder itself, by
``dp_reshardable`` unless ``dist_ckpt_optim_fully_reshardable`` is set).
"""

from __future__ import annotations

from mcore_rlhf.families.dist_parts import DistParts

from .table import Counters, Trainer

_PARTS = DistParts(
    extra="rng",
    scheduler="lr_scheduler",
    described="huggingface",
    sharding="fully_reshardable",
    arguments={"overlap_grad_reduce": False},
    told="trainer.policy.megatron_config.dist_ckpt_optim_fully_reshardable=true",
)
TRAINER = Trainer(
    name="skyrl",
    title="SkyRL",
    steps=("global_step_{step}",),
    marks=("trainer_state.pt", "fully_async_state.pt", "policy/model_world_size_*", "policy/fsdp_config.json", "policy/.metadata"),
    over=("verl",),
    roles={"actor": ("policy",), "critic": ("critic",)},
    needs=("trainer_state.pt",),
    tracker="latest_ckpt_global_step.txt",
    data="data.pt",
    counters=Counters("trainer_state.pt", "global_step", {"global_step": "step"}),
    strategy="fsdp",
    formats=("fsdp-ranks", "megatron-dist"),
    parts=(_PARTS,),
    told="trainer.ckpt_path={root} trainer.resume_mode=latest",
)  # fmt: skip
