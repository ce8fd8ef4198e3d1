"""Ray Train, at our seam: ``<experiment>/checkpoint_step_N``, what the workers reported, in one folder.

Source: ray 2.60.0, ``train/v2/_internal/execution/context.py`` (``report``: the folder's name is given, and must be given once only, so
a step that is saved again has ``-02`` behind it), ``train/_checkpoint.py`` (``.metadata.json``: what is noted with a checkpoint).
"""

from __future__ import annotations

from .table import Trainer

NOTES = ".metadata.json"
"""Where Ray has what is noted with a checkpoint: here, its step."""

TRAINER = Trainer(
    name="ray-train",
    title="Ray Train",
    steps=("checkpoint_step_{step}", "checkpoint_step_{step}-*"),
    marks=(NOTES,),
    needs=(NOTES,),
    resumes="named",
    told='ray.train.Checkpoint("{path}")',
)
