"""Runs as trainers leave them, and a journal of rollouts: what is made of the goldens, and the commands that take a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

GOLDENS = Path(__file__).parents[1] / "goldens"
JOURNAL = "journal"
"""The specimen whose ``source`` holds rollouts."""

OF = "run-"
"""What a trainer's run is called, before its name in :data:`RUNS`."""


@dataclass(frozen=True)
class Run:
    """One golden as a run.

    Args:
        golden: Folder of it, below the goldens.
        trainer: Who wrote it.
        step: Its step below the run's root; None where the run is one folder for all.
        inside: Where the golden lies below the root.
        beside: Small files that the trainer writes next to it, which the golden lacks.
        config: What is asked of ``will-resume --config``.
        others: Trainers whose run it can become.
    """

    golden: str
    trainer: str
    step: str | None
    inside: str = ""
    beside: tuple[tuple[str, str], ...] = ()
    config: str = ""
    others: tuple[str, ...] = ("verl", "accelerate", "openrlhf")


_VERL_CONFIG = """\
actor_rollout_ref:
  actor:
    strategy: fsdp2
    checkpoint: {load_contents: [model, optimizer, extra]}
trainer: {resume_mode: auto, default_local_dir: source}
"""
_SWIFT_CONFIG = """\
finetune: false
no_load_optim: false
no_load_rng: false
tensor_model_parallel_size: 1
"""
RUNS = {
    "verl": Run(
        "verl/fsdp2_tied_ws2",
        "verl",
        "global_step_3",
        "global_step_3/actor",
        (("latest_checkpointed_iteration.txt", "3"),),
        _VERL_CONFIG,
        ("verl", "skyrl", "transformers"),
    ),
    "skyrl": Run("trainers/skyrl_fsdp2", "skyrl", "global_step_3", others=("skyrl", "verl")),
    "rlinf": Run("trainers/rl_fsdp2/grpo/checkpoints", "rlinf", "global_step_3", others=("rlinf", "accelerate")),
    "areal": Run("areal/trial", "areal", None, others=("areal", "verl")),
    "openrlhf": Run("trainers/or_z2", "openrlhf", None, others=("openrlhf", "rlinf")),
    "nemo-rl": Run("trainers/nm_v1", "nemo-rl", "step_3", others=("nemo-rl", "openrlhf")),
    "nemo-rl-2": Run(
        "nemo_rl/v2_ws2", "nemo-rl", "step_3", beside=(("step_3/training_info.json", '{"total_steps": 3}'),)
    ),
    "transformers": Run("transformers/checkpoint-2", "transformers", "checkpoint-2", "checkpoint-2", others=("verl", "transformers")),
    "transformers-4": Run("transformers_4/checkpoint-2", "transformers", "checkpoint-2", "checkpoint-2"),
    "adapter": Run("trainers/tr_peft_ds2", "transformers", "checkpoint-3", others=("transformers", "accelerate")),
    "accelerate": Run("transformers/step_2", "accelerate", "step_2", "step_2"),
    "accelerate-ds": Run("trainers/ac_ds2", "accelerate", "step_3", others=("accelerate", "transformers")),
    "torchtitan": Run("torchtitan/checkpoint", "torchtitan", "step-3", others=("torchtitan", "accelerate")),
    "prime-rl": Run("trainers/prime", "prime-rl", "checkpoints/step_3", others=("prime-rl", "verl", "open-instruct")),
    "open-instruct": Run("trainers/open_instruct", "open-instruct", None, others=("open-instruct", "openrlhf")),
    "roll": Run("trainers/roll", "roll", "checkpoint-3", others=("roll", "verl", "transformers")),
    "ms-swift": Run("trainers/swift", "ms-swift", "checkpoint-4", config=_SWIFT_CONFIG, others=("ms-swift", "verl", "openrlhf")),
}  # fmt: skip


def commands(run: Run) -> Iterator[str]:
    """What is asked of a run, and what is made of it."""
    yield from (
        "steps source",
        "steps source --json",
        "verify source",
        "verify source --deep --json",
        "inspect source --json",
    )
    for trainer in (run.trainer, "megatron-lm", "deepspeed", "transformers"):
        yield f"will-resume source --trainer {trainer} --json"
    yield f"will-resume source --trainer {run.trainer} --world-size 3"
    yield "diff source {pristine}/source"
    if run.config:
        yield f"will-resume source --trainer {run.trainer} --config beside/config.yaml"
    if run.step:
        yield f"adopt source/{run.step}"
        yield f"verify source/{run.step}"
        yield f"will-resume source/{run.step} --trainer {run.trainer}"
    for to in run.others:
        like = f" --like beside/run/{run.step or ''}" if to == run.trainer else ""
        yield f"plan source --to {to}{like}"
        yield f"convert source out/target --to {to}{like} --no-fsync"
    yield "convert source out/target --to dcp --no-fsync"
    yield "convert source out/target --to universal --no-fsync"


def make_journal(root: Path) -> None:
    """A root with the rollouts of two producers, some of them trained on already."""
    from mcore_rlhf import JournalWriter, PromptSampler, Rollout, RolloutJournal

    sampler = PromptSampler(num_prompts=12, seed=5, group_size=2, batch_size=4)
    root.mkdir(parents=True)
    with JournalWriter(root, producer="worker-0") as first, JournalWriter(root, producer="worker-1") as second:
        for prompt in sampler.next_batch():
            for number, writer in enumerate((first, second)):
                tokens, logprobs = np.arange(5), np.zeros(5, np.float32)
                writer.add(Rollout.of(prompt, number, version=number, reward=0.5, tokens=tokens, logprobs=logprobs))
    RolloutJournal(root)


OF_JOURNALS = ("journal source", "journal source --json", "steps source", "verify source")
