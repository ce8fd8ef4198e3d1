"""prime-rl: ``<output_dir>/checkpoints/step_N/trainer``, a DCP folder, with the orchestrator's progress and the loaders' states beside it.

Source: prime-rl 047eeea, ``src/prime_rl/trainer/ckpt.py`` (``AppState``, ``CheckpointManager.save_to_path``);
9ca94fe, ``src/prime_rl/utils/pathing.py`` (``CKPT_COMPLETE_MARKERS``: a step without ``trainer/.metadata`` is passed over;
``resolve_latest_ckpt_step``: the highest number).
"""

from __future__ import annotations

from .table import Trainer

TRAINER = Trainer(
    name="prime-rl",
    title="prime-rl",
    steps=("step_{step}",),
    marks=("trainer/.metadata", "trainer/*.distcp", "orchestrator/progress.pt"),
    roles={"actor": ("trainer",)},
    needs=("trainer/.metadata",),
    within="checkpoints",
    resumes="highest",
    told="--ckpt.resume-step {step}",
)
