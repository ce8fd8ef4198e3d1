"""open-instruct: GRPO's DeepSpeed folders, and those of accelerate that its SFT and DPO save.

GRPO has ``<checkpoint_state_dir>/global_stepN`` and ``latest``, and the reference model beside them.
Counters, the loader's and each rank's random states are the client state of DeepSpeed's files. Where no reference model is kept
(``load_ref_policy`` off), nothing tells its steps from others of DeepSpeed's, as which they are read.
Source: open-instruct d526c5d, ``open_instruct/grpo_fast.py`` (``PolicyTrainerRayProcess.save_checkpoint_state``, ``from_pretrained``).
"""

from __future__ import annotations

from .table import Trainer

TRAINER = Trainer(
    name="open-instruct",
    title="open-instruct",
    steps=("global_step{step}",),
    marks=(),
    beside=("ref_policy/pytorch_model.bin",),
    over=("openrlhf",),
    tracker="latest",
    tracked="global_step{step}",
    told="--checkpoint_state_dir {root}",
)

TUNING = Trainer(
    name="open-instruct-tuning",
    title="open-instruct's SFT and DPO",
    steps=("step_{step}",),
    marks=("COMPLETED",),
    over=("accelerate",),
    needs=("COMPLETED",),
    resumes="highest",
    told="--output_dir {root}",
)
"""Steps without ``COMPLETED`` are passed over; an ``epoch_N``, whose number is an epoch's, is looked at where there is no ``step_N``.

Source: open-instruct e6c3044, ``open_instruct/finetune.py``, ``dpo_tune_cache.py`` (``accelerator.save_state``), ``open_instruct/utils.py``
(``get_last_checkpoint``: before ``--resume_from_checkpoint`` comes the output folder's own).
"""
