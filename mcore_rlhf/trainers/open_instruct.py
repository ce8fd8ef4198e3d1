"""open-instruct: GRPO's DeepSpeed folders, and those of accelerate that its SFT and DPO save.

GRPO has ``<checkpoint_state_dir>/global_stepN`` and ``latest``, and the reference model beside them. N is DeepSpeed's own count of updates.
Counters, the loader's and each rank's random states are the client state of DeepSpeed's files. Where no reference model is kept
(``load_ref_policy`` off), nothing tells its steps from others of DeepSpeed's, as which they are read.
Source: open-instruct e6c3044, ``open_instruct/grpo_fast.py`` (``PolicyTrainerRayProcess.save_checkpoint_state``, ``from_pretrained``: a
KeyError without ``training_step`` or ``rng_states``; all else may be missing, and the prompts begin anew then),
``grpo_utils.py`` (``set_weight_decay_on_bias_and_norm``), ``utils.py`` (``get_optimizer_grouped_parameters``).
"""

from __future__ import annotations

from . import accelerate
from .openrlhf import SECOND_GROUP
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
    asks={"training_step": "step", "rng_states": "random"},
    generators={"cpu": "torch_cpu_rng_state", "numpy": "numpy_rng_state", "random": "python_rng_state"},
    second_group=SECOND_GROUP,
    wants_schedule=True,
    formats=("deepspeed",),
    tag="global_step{step}",
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
    made={"COMPLETED": {}},
    made_says="by which it knows a whole step",
    second_group=SECOND_GROUP,
    formats=accelerate.TRAINER.formats,
    tag=accelerate.TRAINER.tag,
    told="--output_dir {root}",
)
"""Steps without ``COMPLETED`` are passed over; an ``epoch_N``, whose number is an epoch's, is looked at where there is no ``step_N``.

Source: open-instruct e6c3044, ``open_instruct/finetune.py``, ``dpo_tune_cache.py`` (``accelerator.save_state``), ``open_instruct/utils.py``
(``get_last_checkpoint``: before ``--resume_from_checkpoint`` comes the output folder's own).
"""
