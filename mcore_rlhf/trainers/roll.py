"""ROLL on Megatron: ``checkpoint-N`` with the actor's files in it, the critic's in ``critic``, and ``pipeline`` beside them.

Each worker saves below its own name, ``<output_dir>/actor_train-0/checkpoint-N``, and ``checkpoint_config`` (``type: file_system``) copies
those of all workers into one ``checkpoint-N``, which is what a run is told to go on from. N counts from 0. mcore_adapter's own
``McaTrainer``, which LLaMA-Factory runs, leaves the same files beside transformers' ``trainer_state.json``.

Source: ROLL 8eb27cc2, ``roll/pipeline/base_worker.py`` (``do_checkpoint``), ``roll/pipeline/base_pipeline.py`` (``do_checkpoint``),
``roll/utils/upload_utils.py`` (``FileSystemUploader``: ``get_latest_ckpt`` takes the highest number),
``roll/distributed/strategy/megatron_strategy.py`` (``save_checkpoint``).
"""

from __future__ import annotations

from mcore_rlhf.families.run_folders import ADAPTED

from .table import HERE, Trainer

COUNTED = "pipeline/worker_state_pipeline.json"
TRAINER = Trainer(
    name="roll",
    title="ROLL on Megatron",
    steps=("checkpoint-{step}",),
    marks=(ADAPTED, f"*/{ADAPTED}"),
    over=("ms-swift", "transformers"),
    roles={"actor": (HERE,), "critic": ("critic",)},
    needs=(f"{COUNTED}|trainer_state.json",),
    resumes="highest",
    told="resume_from_checkpoint={path}",
)
