"""accelerate's ``save_state``: a folder that the user's script names; ``checkpoints/checkpoint_N`` where it names them itself.

Source: accelerate 1.15.0, ``accelerator.py`` (``save_state``, ``load_state``), ``checkpointing.py`` (``save_accelerator_state``).
"""

from __future__ import annotations

from .table import Trainer

TRAINER = Trainer(
    name="accelerate",
    title="accelerate",
    steps=("checkpoint_{step}", "step_{step}", "checkpoint-{step}", "step-{step}"),
    marks=("random_states_*.pkl",),
    within="checkpoints",
    resumes="named",
    formats=("hf-accelerate", "deepspeed"),
    tag="pytorch_model",
    several="hf-accelerate",
    told='accelerator.load_state("{path}")',
)
