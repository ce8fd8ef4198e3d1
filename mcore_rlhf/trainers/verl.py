"""verl: ``<default_local_dir>/global_step_N/{actor,critic}``, ``data.pt`` beside them, and a tracker; its SFT has a model alone in a step.

Source: verl b178a3c, ``verl/trainer/ppo/ray_trainer.py`` (``_save_checkpoint``, ``_load_checkpoint``),
``verl/utils/checkpoint/checkpoint_manager.py`` (``find_latest_ckpt_path``: without a tracker training begins from scratch);
1dda039 for the layout with ``model``, ``optimizer`` and ``extra``, and 0.9.1, ``verl/utils/megatron_utils.py``
(``get_model_dist_checkpoint_path``, …; ``make_megatron_module``: no overlap), ``verl/workers/engine/megatron/transformer_impl.py``
(``use_dist_checkpointing``: without it the weights are those of ``model/huggingface``). ``fully_reshardable`` its loader cannot load beside
weights in ``torch_dist``: see ``loaders/verl_megatron.py``. 0.9.1, ``verl/workers/engine/{automodel,torchtitan}/transformer_impl.py``
(``save_checkpoint``): ``actor/{model,optim}``; ``step-N`` beside ``data.pt``, of whichever role saved last.
``utils/checkpoint/checkpoint_manager.py`` (``should_save_hf_model``): ``save_contents`` may have ``hf_model`` and no ``model``.
"""

from __future__ import annotations

from dataclasses import replace

from mcore_rlhf.families.dist_parts import DistParts
from mcore_rlhf.families.run_folders import CONTENTS, INNER, SPLIT_BESIDE, SPLIT_MODEL, SPLIT_WEIGHTS

from .table import Trainer

_OF_SCHEDULE = "use_checkpoint_opt_param_scheduler=True"
_SCHEDULE = f"actor_rollout_ref.actor.optim.{_OF_SCHEDULE}"
_TOLD = "trainer.default_local_dir={root} trainer.resume_mode=auto"
_OPTIMIZER, _EXTRA = SPLIT_BESIDE
_PARTS = DistParts(
    model=SPLIT_MODEL,
    optimizer=_OPTIMIZER,
    extra=_EXTRA,
    scheduler="lr_scheduler",
    described=SPLIT_WEIGHTS,
    contents=CONTENTS,
    sharding="dp_reshardable",
    arguments={"overlap_grad_reduce": False},
    told="actor_rollout_ref.actor.megatron.use_dist_checkpointing=True "
    f"actor_rollout_ref.actor.megatron.dist_checkpointing_path={{path}}/actor/{SPLIT_MODEL} "
    f"{_SCHEDULE}",
)
_WEIGHTS = replace(_PARTS, model="", told=_SCHEDULE)
_OLDER = replace(_WEIGHTS, optimizer=INNER, extra=INNER, described="huggingface", contents="")
_ALL_PARTS = (
    _PARTS, _WEIGHTS, _OLDER,
    replace(_OLDER, model=INNER, extra="", told=_PARTS.told.replace(SPLIT_MODEL, INNER)),
)  # fmt: skip
"""As 0.9 has them, which a run gets that nobody shows, and as 0.8 does: beside weights as Hugging Face's files, or all in one folder.

Source: verl 0.8.0, ``verl/utils/checkpoint/megatron_checkpoint_manager.py`` (``save_checkpoint``, ``load_checkpoint``).
"""
TRAINER = Trainer(
    name="verl",
    title="verl",
    steps=("global_step_{step}",),
    marks=(
        "data.pt", "*/fsdp_config.json", "*/model_world_size_*_rank_*.pt", "*/dist_ckpt", "*/ckpt_contents.json", "*/model/dist_ckpt",
        "*/model/huggingface", "*/optimizer/dist_ckpt", "*/optim/.metadata", "step-*/.metadata",
    ),
    roles={role: (role, f"{role}/huggingface") for role in ("actor", "critic")},
    tracker="latest_checkpointed_iteration.txt",
    data="data.pt",
    formats=("fsdp-ranks", "megatron-dist"),
    parts=_ALL_PARTS,
    told=_TOLD,
)  # fmt: skip

_TUNING_PARTS = replace(
    _PARTS,
    told=f"engine.use_dist_checkpointing=True engine.dist_checkpointing_path={{path}}/{SPLIT_MODEL} optim.{_OF_SCHEDULE}",
)
TUNING = Trainer(
    name="verl-sft",
    title="verl's SFT",
    steps=TRAINER.steps,
    marks=(
        "data_*.pt", "model_world_size_*_rank_*.pt", "fsdp_config.json", "dist_ckpt", "ckpt_contents.json", "model/dist_ckpt",
        "optimizer/dist_ckpt", "huggingface",
    ),
    over=("verl",),
    tracker=TRAINER.tracker,
    data="data_{rank}.pt",
    formats=TRAINER.formats,
    parts=(_TUNING_PARTS, replace(_TUNING_PARTS, model="", told=f"optim.{_OF_SCHEDULE}")),
    told=_TOLD,
)  # fmt: skip
"""Source: verl 0.9.1, ``verl/trainer/sft_trainer.py`` (``SFTTrainer``), ``verl/utils/checkpoint/checkpoint_handler.py``
(``CheckpointHandler.save_checkpoint``: each data-parallel rank has the loader's state, all alike); 0.7.0, ``fsdp_sft_trainer.py``, whose
``data.pt`` is rank 0's."""
