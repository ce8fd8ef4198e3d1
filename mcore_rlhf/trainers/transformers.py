"""transformers' ``Trainer``, and TRL's on it: ``<output_dir>/checkpoint-N``, a model's own folder with the trainer's files in it.

Source: transformers 5.23.0, ``trainer.py`` (``_save_checkpoint``), ``trainer_utils.py`` (``get_last_checkpoint``: the highest number).
How it passes over batches: ``trainer.py`` (``_init_training_state``).
"""

from __future__ import annotations

from .table import Counters, Trainer

TRAINER = Trainer(
    name="transformers",
    title="transformers' Trainer",
    steps=("checkpoint-{step}",),
    marks=("trainer_state.json",),
    needs=("trainer_state.json",),
    resumes="highest",
    skips="trainer_state.json",
    counters=Counters("trainer_state.json", "global_step"),
    formats=("hf-trainer", "deepspeed"),
    tag="global_step{step}",
    told='trainer.train(resume_from_checkpoint="{path}")',
)
