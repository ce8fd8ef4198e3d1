"""verl, OpenRLHF, RLinf, NeMo-RL and open-instruct go on, by their own code, from each other's runs with the run's own next losses.

Each trains three steps, saves, and sees two more. What it saved becomes every other's run, directly and by a Megatron run of TP 2, as
``convert RUN NEW --to TRAINER`` makes it; that trainer's own loader loads it into a model with other weights, and trains two steps on the
same batches. DeepSpeed adds gradients up in another order than FSDP: where it is one of the two, losses agree to that.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.trainers.lab import Lab
from tests.trainers.lessons import SIZES, Step


@dataclass(frozen=True, slots=True)
class Trainer:
    """How a trainer is run.

    Args:
        job: The module that runs it.
        package: The folder of its package.
        place: Where in a run its job saves, and looks.
        like: The step that shows what depends on the run, if anything does; verl's files name the device, which is no CPU otherwise.
    """

    job: str
    package: str
    place: str = ""
    like: str = ""


TRAINERS = {
    "verl": Trainer("verl_job", "verl-0.9.1", "global_step_3/actor", "global_step_3"),
    "openrlhf": Trainer("openrlhf_job", "openrlhf-0.11.2"),
    "rlinf": Trainer("rlinf_job", "RLinf-a3816b5"),
    "nemo-rl": Trainer("nemo_job", "NeMo-RL-7ea279a", like="step_3"),
    "open-instruct": Trainer("open_instruct_job", "open-instruct-e6c3044"),
}
BY_GIT = ("RLinf-", "NeMo-RL-", "open-instruct-")
ON_DEEPSPEED = {"openrlhf", "open-instruct"}
ROUNDED = 2e-6
WAYS = {"directly": {}, "by Megatron": {"tp": 2, "dp": 1}}


def is_exact(source: str, to: str) -> bool:
    """Whether the two add gradients up in the same order."""
    return source == to or ON_DEEPSPEED.isdisjoint((source, to))


@pytest.fixture(scope="module")
def lab(trainers: Path, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    made = Lab(trainers, tmp_path_factory.mktemp("trainers"))
    rope = {"rope_theta": 10000.0, "rope_type": "default"}
    kind = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", "rope_parameters": rope}
    (made.folder / "config.json").write_text(json.dumps({**kind, **SIZES, "tie_word_embeddings": False}))
    return made


def there(lab: Lab, name: str) -> Trainer:
    """A trainer whose package is there: one that only a repository has may be missing."""
    found = TRAINERS[name]
    if found.package.startswith(BY_GIT) and not (lab.packages / found.package).is_dir():
        pytest.skip(f"needs {found.package.rpartition('-')[0]}'s repository, which make test-trainers could not fetch")
    return found


def trained(lab: Lab, name: str) -> tuple[Path, list[Step]]:
    """The root of a run of three steps, and what the trainer saw in two more; done once."""
    if name not in lab.before:
        trainer, root = there(lab, name), lab.folder / name
        do = [("train", 3), ("save", root / trainer.place), ("train", 2)]
        lab.before[name] = root, lab.run(trainer.job, [trainer.package, "needs"], 2, do, strategy="fsdp2")[3:]
    return lab.before[name]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("to", TRAINERS)
@pytest.mark.parametrize("source", TRAINERS)
def test_a_trainer_goes_on_with_anothers_run(lab: Lab, source: str, to: str) -> None:
    root, wanted = trained(lab, source)
    trainer = there(lab, to)
    told: dict[str, object] = {"reference_config": str(lab.folder / "config.json")}
    like = {"like": str(trained(lab, to)[0] / trainer.like)} if trainer.like else {}
    do: list[tuple[str, object]] = []
    for way, layout in WAYS.items():
        at, name = root, f"{source} {way} to {to}"
        if layout:
            at, _ = lab.convert(at, "megatron", f"{name}, there", **told, **layout)
        made, _ = lab.convert(at, to, name, **told, **like, **({"dp": 2} if layout else {}))
        do += [("load", made / trainer.place), ("train", 2)]
    seen = lab.run(trainer.job, [trainer.package, "needs"], 2, do, strategy="fsdp2", seed=7)
    for at, way in enumerate(WAYS):
        for found, step in zip(seen[2 * at :], wanted, strict=False):
            assert found["loss"] == (
                step["loss"] if is_exact(source, to) else pytest.approx(step["loss"], abs=ROUNDED)
            ), way
            assert found["lr"][0] == pytest.approx(step["lr"][0], rel=1e-12), way
            assert len(set(found["lr"])) == 1, way
