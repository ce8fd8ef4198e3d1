"""verl itself loads what was made of its runs, and of others', and trains on with the losses that the source's run had."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from mcore_rlhf.convert import ConvertOptions, convert
from mcore_rlhf.families.options import ReadOptions, WriteOptions
from mcore_rlhf.formats.registry import open_checkpoint
from mcore_rlhf.verify.checkpoint import verify
from tests.helpers.catalog_values import tensor_of

JOB = Path(__file__).parent / "verl_job.py"
RELEASES = ("0.9.1", "0.7.0")
TIMEOUT = 400
Seen = list[dict[str, Any]]


@dataclass
class Lab:
    """Runs of verl's, each done once.

    Args:
        packages: Where its releases lie.
        folder: Where everything goes.
    """

    packages: Path
    folder: Path
    runs: dict[str, Seen] = field(default_factory=dict)
    _count: int = 0

    def run(self, release: str, world: int, do: Sequence[tuple[str, object]], **how: Any) -> Seen:
        """Carry orders out in processes of their own.

        Args:
            release: Of verl.
            world: Ranks.
            do: ``train``, ``save`` and ``load``, with how many steps or where.
            how: The model, the strategy.
        """
        own = self.packages / f"verl-{release}"
        if not own.is_dir():
            pytest.fail(f"{own}: missing; pip install --no-deps --target {own} verl=={release}")
        self._count += 1
        orders = self.folder / f"orders-{self._count}.json"
        base = {"seed": 1, "tied": False, "model": "qwen2", "strategy": "fsdp2", "world": world, "step": 3}
        orders.write_text(
            json.dumps({**base, **how, "do": [[what, str(v) if what != "train" else v] for what, v in do]})
        )
        env = dict(os.environ, PYTHONPATH=f"{own}:{self.packages / 'verl-needs'}", OMP_NUM_THREADS="1")
        ranks = [
            subprocess.Popen([sys.executable, JOB, orders, str(rank)], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            for rank in range(world)
        ]  # fmt: skip
        said: list[str] = [""] * world

        def listen(rank: int) -> None:
            said[rank] = ranks[rank].communicate(timeout=TIMEOUT)[0]

        threads = [threading.Thread(target=listen, args=(rank,)) for rank in range(world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(rank.returncode == 0 for rank in ranks), "\n".join(text[-3000:] for text in said)
        found: Seen = json.loads(orders.with_suffix(".seen").read_text())
        return found

    def trained(self, release: str, **how: Any) -> tuple[Path, Seen]:
        """A run of three steps, saved by verl, and what it saw in two more."""
        key = f"{release}-{sorted(how.items())}"
        path = self.folder / f"run-{abs(hash(key))}" / "global_step_3" / "actor"
        if key not in self.runs:
            world = how.pop("world", 2)
            self.runs[key] = self.run(release, world, [("train", 3), ("save", path), ("train", 2)], **how)[3:]
        return path, self.runs[key]

    def convert(self, source: Path, name: str, to: str = "fsdp-ranks", **write: Any) -> Path:
        target = self.folder / name
        convert(source, target, ConvertOptions(to=to, fsync=False, workers=1, write=WriteOptions(**write)))
        assert verify(target, ReadOptions()).intact
        return target


@pytest.fixture(scope="module")
def lab(trainers: Path, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(trainers, tmp_path_factory.mktemp("verl"))


def losses(seen: Seen) -> list[float]:
    return [step["loss"] for step in seen]


@pytest.mark.parametrize("release", RELEASES)
def test_verl_goes_on_from_what_every_format_became(lab: Lab, release: str) -> None:
    """The same number of ranks: the same losses to the last bit, and from its own files the same random numbers."""
    run, wanted = lab.trained(release)
    by: dict[str, dict[str, Any]] = {
        "megatron": {"tp": 2, "dp": 1},
        "megatron-dist": {"pp": 2, "dp": 1},
        "deepspeed": {"zero_stage": 2, "dp": 2},
        "universal": {},
        "dcp": {"dp": 3},
        "hf": {"with_optimizer": True},
    }
    folders = [lab.convert(run, f"{release}-same")]
    for name, write in by.items():
        there = lab.convert(run, f"{release}-{name}", name, **write)
        folders.append(lab.convert(there, f"{release}-from-{name}", dp=2, like=str(run)))
    do = [order for folder in folders for order in (("load", folder), ("train", 2))]
    seen = lab.run(release, 2, do, seed=7)
    for number, folder in enumerate(folders):
        found = seen[2 * number : 2 * number + 2]
        assert losses(found) == losses(wanted), folder
        assert [step["lr"] for step in found] == [step["lr"] for step in wanted], folder
    assert [step["drawn"] for step in seen[:2]] == [step["drawn"] for step in wanted]


@pytest.mark.parametrize("model", ["qwen2", "llama"])
@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_verl_goes_on_with_another_number_of_ranks(lab: Lab, model: str, strategy: str) -> None:
    """Uneven parts, flat pieces that end inside a row, tied weights; the batch is the same, shared by other ranks."""
    how = {"model": model, "strategy": strategy, "tied": model == "llama"}
    run, wanted = lab.trained("0.9.1", **how)
    for world in (1, 3) if strategy == "fsdp" else (3,):
        cut = lab.convert(run, f"{model}-{strategy}-{world}", dp=world)
        seen = lab.run("0.9.1", world, [("load", cut), ("train", 2)], seed=7, **how)
        assert losses(seen) == pytest.approx(losses(wanted), abs=2e-6)
        back = lab.convert(cut, f"{model}-{strategy}-{world}-back", dp=2, like=str(run))
        assert losses(lab.run("0.9.1", 2, [("load", back), ("train", 2)], seed=7, **how)) == losses(wanted)


def test_verl_goes_on_where_its_placement_is_another(lab: Lab) -> None:
    """Releases up to 0.7 cut along the first dimension that the ranks divide: ``--like`` shows it."""
    run, wanted = lab.trained("0.7.0", placement=True, world=3)
    weights = lab.convert(run, "placed-hf", "hf", with_optimizer=True)
    cut = lab.convert(weights, "placed", dp=3, like=str(run))
    seen = lab.run("0.7.0", 3, [("load", cut), ("train", 2)], seed=7, placement=True)
    assert losses(seen) == losses(wanted)


def test_what_verl_saves_after_a_resume_is_read(lab: Lab) -> None:
    """The other way round: verl's own files, of a run that went on from ours."""
    run, _ = lab.trained("0.9.1", strategy="fsdp")
    later = lab.folder / "global_step_5" / "actor"
    cut = lab.convert(run, "resumed", dp=3)
    lab.run("0.9.1", 3, [("load", cut), ("train", 2), ("save", later)], strategy="fsdp")
    source = open_checkpoint(later, ReadOptions())
    assert source.state.iteration == 5
    assert source.state.groups[0].fields["step"] == 5
    moment = tensor_of(source, "model.norm.weight", "exp_avg")
    assert moment.abs().max() > 0
    assert verify(later, ReadOptions()).intact
