"""torchtitan: ``<folder>/step-N``, a DCP folder; without ``.metadata`` it is no step, and where there is none training begins anew.

Source: torchtitan 0.2.2, ``components/checkpoint.py`` (``CheckpointManager._create_checkpoint_id``, ``_find_load_step``).
"""

from __future__ import annotations

from .table import Trainer

TRAINER = Trainer(
    name="torchtitan",
    title="torchtitan",
    steps=("step-{step}",),
    marks=(".metadata", "*.distcp"),
    needs=(".metadata",),
    resumes="highest",
    formats=("dcp",),
    told="--checkpoint.enable --checkpoint.folder {root}",
)
