"""Writes the folders beside it: transformers' Trainer and accelerate themselves save. Run: python -m tests.goldens.transformers.make"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

from tests.trainers.hf_runs import HALF, accelerated, adapted, model, train

HERE = Path(__file__).parent

with tempfile.TemporaryDirectory() as made:
    runs = Path(made)
    seen = {
        "trainer": train(model(1, tie_word_embeddings=True), runs / "trainer"),
        "adapter": train(adapted(1), runs / "adapter"),
        "accelerate": accelerated(model(1, tie_word_embeddings=False), runs / "accelerate" / f"step_{HALF}"),
    }
    for run, steps in seen.items():
        (folder,) = (runs / run).glob(f"*[-_]{HALF}")
        name = run if run == "adapter" else folder.name
        shutil.rmtree(HERE / name, ignore_errors=True)
        shutil.copytree(folder, HERE / name, ignore=shutil.ignore_patterns("training_args.bin", "README.md"))
        (HERE / f"{name}.json").write_text(json.dumps(steps) + "\n")
