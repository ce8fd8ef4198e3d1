"""``pip install mcore_rlhf`` brings none of the trainers: what stands around them is imported without, and says what is missing."""

from __future__ import annotations

import subprocess
import sys

import pytest

FOREIGN = (
    "transformers",
    "trl",
    "accelerate",
    "torchtitan",
    "megatron",
    "deepspeed",
    "datasets",
    "verl",
    "nemo_rl",
    "ray",
    "lightning",
)
_CODE = """
import importlib, sys
for name in {foreign}:
    sys.modules[name] = None  # as where it is not installed
NAMES = "accelerate_state deepspeed_checkpoints megatron_bridge miles nemo_rl ray_train transformers_trainer verl_trainer"
for name in NAMES.split():
    importlib.import_module("mcore_rlhf.integrations." + name)
from types import SimpleNamespace
from mcore_rlhf.errors import Unsupported
from mcore_rlhf.integrations import megatron_bridge
try:
    megatron_bridge.use(SimpleNamespace())
except Unsupported as error:
    print(error)
from mcore_rlhf.integrations.ray_train import Commits
try:
    Commits()
except Unsupported as error:
    print(error)
for name in ("nemo_rl", "verl_trainer"):
    try:
        importlib.import_module("mcore_rlhf.integrations." + name).use()
    except Unsupported as error:
        print(error)
for name in ("torchtitan_manager", "lightning_io"):
    try:
        importlib.import_module("mcore_rlhf.integrations." + name)
    except Unsupported as error:
        print(error)
"""


@pytest.fixture(scope="module")
def said() -> str:
    command = [sys.executable, "-c", _CODE.format(foreign=FOREIGN)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "text",
    [
        "Megatron-Bridge's megatron.bridge.utils.instantiate_utils cannot be imported",
        "Ray Train's ray.train cannot be imported",
        "NeMo-RL's nemo_rl.utils.checkpoint.CheckpointManager: ",
        "verl.trainer.ppo.ray_trainer.RayPPOTrainer: ",
        "torchtitan's components.checkpointer.dcp cannot be imported",
        "Lightning's lightning.pytorch.plugins.io cannot be imported",
    ],
)
def test_what_is_missing_is_said(said: str, text: str) -> None:
    assert text in said
