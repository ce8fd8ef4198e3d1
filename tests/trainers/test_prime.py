"""prime-rl goes on, by its own trainer's and orchestrator's code, from its own runs that were another's, and from what others' became.

Its trainer asks for every key of its own, and its orchestrator for a file with the run's environments: what came from elsewhere takes
both from ``--like``, a step of the run, and nothing of how far that step was but its place among the tasks.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from mcore_rlhf.errors import Unsupported
from tests.trainers.lab import Lab
from tests.trainers.lessons import SIZES

NEEDED = ("prime-rl-559b447/src", "needs")
ROUNDED = 2e-6


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_it_goes_on(trainers: Path, tmp_path: Path) -> None:
    if not (trainers / NEEDED[0]).is_dir():
        pytest.skip("needs prime-rl's repository, which make test-trainers could not fetch")
    lab = Lab(trainers, tmp_path)
    rope = {"rope_theta": 10000.0, "rope_type": "default"}
    kind = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", "rope_parameters": rope}
    (tmp_path / "config.json").write_text(json.dumps({**kind, **SIZES, "tie_word_embeddings": False}))
    described = str(tmp_path / "config.json")
    seen = lab.run("prime_job", NEEDED, 2, [("train", 3), ("save", tmp_path / "run"), ("train", 2)])
    lab.run("prime_job", NEEDED, 1, [("train", 1), ("save", tmp_path / "other")], seed=5)

    def into(source: Path, to: str, name: str, **write: object) -> Path:
        return lab.convert(source, to, name, reference_config=described, **write)[0]

    like = str(tmp_path / "other" / "checkpoints")
    verl, zero = into(tmp_path / "run", "verl", "verl"), into(tmp_path / "run", "openrlhf", "zero")
    cut = into(tmp_path / "run", "megatron", "cut", tp=2, dp=1)
    into(tmp_path / "run", "prime-rl", "own/checkpoints", dp=1)
    into(cut, "prime-rl", "again/checkpoints", dp=2, like=like)
    into(verl, "prime-rl", "verls/checkpoints", like=like)
    into(zero, "prime-rl", "zeros/checkpoints", like=like)
    names = ("own", "again", "verls", "zeros")
    do = [order for name in names for order in (("load", tmp_path / name), ("train", 2))]
    found = lab.run("prime_job", NEEDED, 2, do, seed=7)
    for number, name in enumerate(names):
        for was, now in zip(seen[3:], found[2 * number :], strict=False):
            assert now["loss"] == (pytest.approx(was["loss"], abs=ROUNDED) if name == "again" else was["loss"]), name
            assert now["lr"] == was["lr"], name
    tasks = [one["task"] for one in found]
    assert tasks == [3, 4, 3, 4, 1, 2, 1, 2], "its own file goes along, also in a run of Megatron's"
    with pytest.raises(Unsupported, match="--like FOLDER"):
        into(verl, "prime-rl", "alone")
    file = torch.load(
        tmp_path / "verls/checkpoints/step_3/orchestrator/progress.pt", pickle_module=_Named, weights_only=False
    )
    assert vars(file["progress"]) == {"step": 3, "total_tokens": 0, "total_samples": 0, "total_problems": 2}


class _Named:
    """A pickle module that makes plain objects of prime-rl's class."""

    import pickle

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> object:
            if module == "prime_rl.orchestrator.types":
                return type(name, (), {})
            return super().find_class(module, name)

    load = pickle.load
