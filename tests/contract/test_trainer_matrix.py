"""From every trainer's run to every other's: what arrives is held against the source, and written on a page.

``python -m pytest tests/contract/test_trainer_matrix.py`` fails where the page is not as the conversions are, and leaves the page that
would be right beside it when ``WRITE_PAGES`` is set.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from mcore_rlhf.errors import CheckpointError
from mcore_rlhf.families.options import ConvertOptions, ReadOptions, WriteOptions
from mcore_rlhf.families.source import bytes_of
from mcore_rlhf.formats.registry import open_checkpoint
from mcore_rlhf.manager.convert_step import StepJob, convert_step
from mcore_rlhf.manager.subject import Subject, find
from mcore_rlhf.trainers.known import TRAINERS
from mcore_rlhf.verify.differ import Differ, Difference
from tests.trainers.test_each_other import ROUNDED, is_exact
from tests.trainers.test_each_other import TRAINERS as TRIED
from tests.unit.manager.test_into_tags import config

PROJECT = Path(__file__).parents[2]
PAGE = PROJECT / "docs" / "reference" / "trainer-matrix.md"
GOLDENS = PROJECT / "tests" / "goldens"
CONFIG = GOLDENS / "trainers" / "config.json"
SOURCES = {
    "verl (FSDP2)": GOLDENS / "verl" / "fsdp2_tied_ws2",
    "RLinf (FSDP2)": GOLDENS / "trainers" / "rl_fsdp2" / "grpo" / "checkpoints",
    "AReaL (FSDP2)": GOLDENS / "areal" / "trial",
    "OpenRLHF (ZeRO-2)": GOLDENS / "trainers" / "or_z2",
    "NeMo-RL (DTensor v1)": GOLDENS / "trainers" / "nm_v1",
    "NeMo-RL (DTensor v2)": GOLDENS / "nemo_rl" / "v2_ws2",
    "prime-rl": GOLDENS / "trainers" / "prime",
    "open-instruct (ZeRO-2)": GOLDENS / "trainers" / "open_instruct",
    "transformers' Trainer": GOLDENS / "transformers" / "checkpoint-2",
    "accelerate": GOLDENS / "transformers" / "step_2",
    "accelerate (ZeRO-2)": GOLDENS / "trainers" / "ac_ds2",
}
LIKE = {
    "nemo-rl": SOURCES["NeMo-RL (DTensor v1)"] / "step_3",
    "torchtitan": GOLDENS / "torchtitan" / "checkpoint" / "step-3",
    "prime-rl": GOLDENS / "trainers" / "prime" / "checkpoints" / "step_3",
}
"""A step that the trainer itself wrote, for those that ask for every key of their own; of another model it helps nobody."""
SMALL: dict[str, dict[str, object]] = {
    "prime-rl": {},
    "open-instruct (ZeRO-2)": {"hidden_size": 16, "intermediate_size": 24},
}
"""Whose models are other ones than :data:`CONFIG` describes, and in what."""
TARGETS = [one.name for one in TRAINERS if one.formats]
_STATES = ("exp_avg", "exp_avg_sq")


def run_of(name: str, folder: Path) -> Path:
    """The run, below names that its trainer gives, where the golden is a part of one."""
    source = SOURCES[name]
    assert source.is_dir(), f"{source}: a row of the page has no golden"
    if name.startswith("verl"):
        shutil.copytree(source, folder / "global_step_3" / "actor")
        return folder
    if name == "NeMo-RL (DTensor v2)":  # by the checkpointer behind it, which does not count steps
        shutil.copytree(source, folder)
        (folder / "step_3" / "training_info.json").write_text('{"total_steps": 3}')
        return folder
    return source


def arrived(source: Subject, done: StepJob) -> str:
    """What of a run is in another, bit for bit, and what is not."""
    parts, names = [], []
    for role, job in done.jobs.items():
        assert done.published is not None
        a = job.source
        b = open_checkpoint(done.published / done.places[role], ReadOptions(role=role))
        states = tuple(state for state in _STATES if state in a.states)
        seen = job.seen or a
        with bytes_of(seen) as bytes_a, bytes_of(b) as bytes_b:
            found = Differ(seen, b, bytes_a, bytes_b, states=("param", *states)).compare()
        apart = [one for one in found.differences if done.trainer == "skyrl" and _is_of_its_own(one)]
        assert found.differences == apart, (role, found.differences[:3])
        assert found.tensors >= 3 * len(states)
        assert seen.state.iteration == b.state.iteration
        schedules = [one.state.scheduler or {} for one in (a, b)]
        goes_on = "last_epoch" in schedules[0] and schedules[0]["last_epoch"] == schedules[1].get("last_epoch")
        parts.append(("weights", *(["optimizer"] if states else []), *(["schedule"] if goes_on else [])))
        names.append(f"{role}, tied ones apart" if apart else role)
    kept = set(parts[0]).intersection(*parts[1:])
    told = [word for word in ("weights", "optimizer", "schedule") if word in kept]
    if len(names) > 1 or "," in names[0]:
        told[0] = f"{told[0]} of {' and '.join(names)}"
    moved = [name for name in (*done.carried, *done.texts) if name in {one.data for one in TRAINERS if one.data}]
    moved = [name for name in moved if not any(text.startswith(f"{name}: empty") for _, text in done.report.lines)]
    return ", ".join([*told, *(["data"] if moved else [])])


def _is_of_its_own(one: Difference) -> bool:
    """An output layer that was tied, with the states that were of both: see ``docs/how-to/for-skyrl-users.md``."""
    return one.what == "only in the second" and one.tensor is not None and one.tensor.param == "lm_head.weight"


def cell(root: Path, target: Path, to: str, write: WriteOptions) -> str:
    """What arrives in a trainer's run, or why it is not written."""
    try:
        source = find(root, ReadOptions())
        return arrived(source, convert_step(source, target, ConvertOptions(to=to, fsync=False, write=write)))
    except CheckpointError as error:
        why = next(line for line in str(error).splitlines() if not line.endswith("problems:"))
        return f"refused: {why.split(': ')[-1]}"


def rows(tmp: Path, every: int) -> list[str]:
    """The table; cells that are not tried are the page's.

    Args:
        tmp: A folder for what is made.
        every: How many columns it is from one that is tried to the next; each row begins with another one.
    """
    lines = ["| from ↓ to → | " + " | ".join(f"`{name}`" for name in TARGETS) + " |", "|---|" + "---|" * len(TARGETS)]
    shown = _shown()
    for number, name in enumerate(SOURCES):
        cells = []
        root = run_of(name, tmp / f"source{number}")
        # by this alone: these trainers leave no config.json
        described = str(CONFIG) if SOURCES[name].is_relative_to(CONFIG.parent) else None
        if name in SMALL:
            (tmp / name).mkdir()
            described = config(tmp / name, **SMALL[name])
        for column, to in enumerate(TARGETS):
            if (number + column) % every:
                cells.append(shown.get((name, f"`{to}`"), "not on the page"))
                continue
            target = tmp / f"target{number}_{to}"
            plain = WriteOptions(reference_config=described)
            said = cell(root, target, to, plain)
            if said.startswith("refused") and to in LIKE:
                liked = cell(root, target, to, replace(plain, like=str(LIKE[to])))
                said = said if liked.startswith("refused") else f"with `--like`: {liked}"
            cells.append(said)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def _shown() -> dict[tuple[str, str], str]:
    """What the page has between two trainers."""
    text = PAGE.read_text(encoding="utf-8").splitlines()
    lines = [line.strip("| ").split(" | ") for line in text if line.startswith("| ")]
    return {(line[0], to): cell for line in lines for to, cell in zip(lines[0][1:], line[1:], strict=False)}


def page(lines: list[str]) -> str:
    """The page with a table in it."""
    return HEAD + "\n".join(lines) + "\n" + RESUMED + "\n".join(_resumed()) + "\n"


def _resumed() -> list[str]:
    """What ``tests/trainers/test_each_other.py`` tries, each by the trainer's own loader."""
    head = ["| from ↓ to → | " + " | ".join(f"`{to}`" for to in TRIED) + " |", "|---|" + "---|" * len(TRIED)]
    how = {True: "the same, to the last bit", False: f"the same, to {ROUNDED:g}"}
    return head + [f"| `{name}` | " + " | ".join(how[is_exact(name, to)] for to in TRIED) + " |" for name in TRIED]


HEAD = """# From trainer to trainer

Each cell was converted by a test, of a run that the trainer's own code wrote (`tests/goldens/ORIGIN.md`), opened again, and held against
its source: what it names is there, tensors bit for bit, the iteration too. What a cell does not name is lost by name in the report: see
[another trainer's run](../how-to/another-trainers-run.md).

"""
RESUMED = """
## Next losses
`make test-trainers` has each trainer's own code save a run, and another's own code load what became of it, directly and by a Megatron run
of TP 2 (verl 0.9.1, OpenRLHF 0.11.2, RLinf a3816b5, NeMo-RL 7ea279a with DTensor v1, open-instruct e6c3044; a small Qwen2 in fp32 on two
CPU processes). The losses of the next two steps, on the same batches, are those that the run itself saw; DeepSpeed adds gradients up in
another order than FSDP. The learning rates are the same too. `transformers`, `accelerate` and `torchtitan` go on with equal losses
from their own runs that were another format's in between; so does TRL's GRPOTrainer, where its `rng_state.pth` is put back by hand.

"""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)], ids=["one in three", "each"])
def test_the_page_says_what_arrives(tmp_path: Path, every: int) -> None:
    found = page(rows(tmp_path, 1 if os.environ.get("WRITE_PAGES") else every))
    if os.environ.get("WRITE_PAGES"):
        PAGE.write_text(found, encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == found, "WRITE_PAGES=1 writes the page as the conversions are"
