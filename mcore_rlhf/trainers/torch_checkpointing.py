"""torch_checkpointing, torch's "DCP v2": a folder that the user's script names, with a file of each item of each rank.

Source: torch_checkpointing 0.1.1, ``checkpoint_layout.py`` (``default_torch_layout_info``: ``<item>_<rank>.pt``),
``metadata_serialization.py`` (``metadata.pkl``, where an item has a resharder), ``checkpoint_writer.py`` (``temp_dir_prefix``),
``checkpoint_manager.py`` (``load``: of the path that it is given).
"""

from __future__ import annotations

from .table import Trainer

TRAINER = Trainer(
    name="torch-checkpointing",
    title="torch_checkpointing",
    steps=("step_{step}", "step-{step}", "checkpoint_{step}", "checkpoint-{step}"),
    marks=("model_0.pt", "metadata.pkl"),
    aside=("tmp_step_{step}", "tmp_step-{step}", "tmp_checkpoint_{step}", "tmp_checkpoint-{step}"),
    resumes="named",
    told='CheckpointManager(…).load("{path}", into={{"model": …, "optimizer": …}})',
)
