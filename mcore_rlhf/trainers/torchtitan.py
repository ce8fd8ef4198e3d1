"""torchtitan: ``<folder>/step-N``, a DCP folder, or at last a Hugging Face one; where there is no such step training begins anew.

Source: torchtitan 0.2.2, ``components/checkpoint.py`` (``CheckpointManager._create_checkpoint_id``, ``_find_load_step``); 0.3.0,
``components/checkpointer/dcp.py``. Both, ``config`` (``dump_folder``, in which ``checkpoint.folder`` is ``checkpoint``).
"""

from __future__ import annotations

from .table import Trainer

TRAINER = Trainer(
    name="torchtitan",
    title="torchtitan",
    steps=("step-{step}",),
    marks=(".metadata", "*.distcp"),
    within="checkpoint",
    needs=(".metadata|model.safetensors.index.json",),
    resumes="highest",
    formats=("dcp",),
    told="--checkpoint.enable --checkpoint.folder {root}",
)
