"""prime-rl: ``<run>/checkpoints/step_N/trainer``, a DCP folder, with the orchestrator's progress and the loaders' states beside it.

Source: prime-rl 559b447, ``src/prime_rl/trainer/ckpt.py`` (``AppState``, ``CheckpointManager.save_to_path``),
``src/prime_rl/orchestrator/ckpt.py`` (``CheckpointManager.load``: stops without its file, or one of other environments),
``packages/prime-rl-configs/src/prime_rl/configs/shared.py`` (``ResumeConfig``: ``dir`` is a step of any run, by its name);
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
    progress="orchestrator/progress.pt",
    formats=("dcp",),
    told="--resume.dir {path}",
)
