"""NeMo-RL's DTensor v2 goes on, by its own manager and nemo_automodel's loader, from other trainers' runs, and others from its."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainers.lab import Lab
from tests.trainers.test_each_other import ROUNDED, TRAINERS, is_exact, lab, there, trained

_LAB = lab  # a fixture
OWN = ["NeMo-RL-7ea279a", "nemo_automodel-0.4.0", "needs"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def own(lab: Lab) -> Path:
    """The root of a run of its own, once made; what it saw in two more steps is beside the others'."""
    there(lab, "nemo-rl")
    root = lab.folder / "nemo-rl v2"
    return lab.once("nemo-rl v2", root, lambda do: lab.run("nemo_v2_job", OWN, 2, do))[0]


@pytest.mark.parametrize("source", ["nemo-rl v2", "nemo-rl", "verl", "openrlhf"])
@pytest.mark.parametrize("by", ["directly", "by Megatron"])
def test_it_goes_on(lab: Lab, own: Path, source: str, by: str) -> None:
    at, wanted = lab.before["nemo-rl v2"] if source == "nemo-rl v2" else trained(lab, source)
    told = {"reference_config": str(lab.folder / "config.json")}
    if by == "by Megatron":
        at, _ = lab.convert(at, "megatron", f"{source} to v2, there", **told, tp=2, dp=1)
    made, done = lab.convert(at, "nemo-rl", f"{source} {by} to v2", **told, like=str(own / "step_3"), dp=2)
    assert done.published is not None
    assert (done.published / "policy" / "weights" / "model").is_dir()
    seen = lab.run("nemo_v2_job", OWN, 2, [("load", made), ("train", 2)], seed=7)
    for found, step in zip(seen, wanted, strict=True):
        near = pytest.approx(step["loss"], abs=ROUNDED)
        assert found["loss"] == (step["loss"] if is_exact(source, "nemo-rl") else near)
        assert found["lr"][0] == pytest.approx(step["lr"][0], rel=1e-12)


@pytest.mark.parametrize("to", ["nemo-rl", "openrlhf"])
def test_others_go_on_from_it(lab: Lab, own: Path, to: str) -> None:
    like = {"like": str(trained(lab, to)[0] / TRAINERS[to].like)} if TRAINERS[to].like else {}
    made, _ = lab.convert(own, to, f"v2 to {to}", reference_config=str(lab.folder / "config.json"), **like)
    seen = lab.run(
        TRAINERS[to].job, [TRAINERS[to].package, "needs"], 2, [("load", made), ("train", 2)], strategy="fsdp2", seed=7
    )
    for found, step in zip(seen, lab.before["nemo-rl v2"][1], strict=True):
        assert found["loss"] == pytest.approx(step["loss"], abs=ROUNDED)
