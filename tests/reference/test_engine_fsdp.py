"""The FSDP engine in the manager, against real FSDP2 and FSDP1 on gloo: its files, its loads, its losses."""

from __future__ import annotations

import os
import shutil
import signal
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rlhf.convert import ConvertOptions, convert
from mcore_rlhf.demo.workers import WorkerPool
from mcore_rlhf.families.options import WriteOptions
from tests.reference import fsdp_jobs as jobs
from tests.reference.fsdp_jobs import Seen, Whole, differences
from tests.reference.fsdp_models import Wrapped

GOLDENS = Path(__file__).parents[1] / "goldens" / "dcp"
TIMEOUT = 100.0
TWO = Wrapped()
SAVED: dict[str, Wrapped] = {
    "plain": TWO,
    "three": Wrapped(mesh=(3,), unused=True, pauses=True),
    "bf16": Wrapped(dtype="bfloat16", frozen=True),
    "mixed": Wrapped(mixed=True, tied=True, checkpointed=True),
    "amsgrad": Wrapped(optimizer="amsgrad", offload=True, unused=True),
    "sgd": Wrapped(optimizer="sgd", columns=True, compiled=True),
    "replicas": Wrapped(mesh=(2, 2), nested=False),
    "tensor-parallel": Wrapped(mesh=(2, 2), tensor_parallel=True),
    "fsdp1": Wrapped(kind="fsdp1"),
    "fsdp1-tied": Wrapped(kind="fsdp1", tied=True, nested=False, mesh=(3,), frozen=True, unused=True),
}
CHANGED: dict[str, tuple[str, Wrapped]] = {
    "plain-to-3": ("plain", Wrapped(mesh=(3,))),
    "plain-to-1": ("plain", Wrapped(mesh=(1,))),
    "3-to-2-offloaded": ("three", Wrapped(offload=True, unused=True)),
    "plain-to-replicas": ("plain", Wrapped(mesh=(2, 2))),
    "replicas-to-plain": ("replicas", TWO),
    "tensor-parallel-to-3": ("tensor-parallel", Wrapped(mesh=(3,))),
    "plain-to-tensor-parallel": ("plain", Wrapped(mesh=(2, 2), tensor_parallel=True)),
    "columns-to-3": ("sgd", Wrapped(optimizer="sgd", mesh=(3,))),
    "fsdp1-to-fsdp2": ("fsdp1", Wrapped(mesh=(3,))),
    "fsdp2-to-fsdp1": ("plain", Wrapped(kind="fsdp1", mesh=(3,), nested=False)),
    "fsdp1-to-3": ("fsdp1", Wrapped(kind="fsdp1", mesh=(3,))),
    "tied-fsdp1-to-fsdp2": ("fsdp1-tied", Wrapped(tied=True, frozen=True, unused=True)),
}


@dataclass
class FsdpLab:
    """Runs jobs on the pool, and keeps what was saved."""

    pool: WorkerPool
    folder: Path
    saved: dict[str, list[Seen]] = field(default_factory=dict)

    def root(self, name: str) -> Path:
        return self.folder / name

    def role(self, name: str) -> Path:
        return self.root(name) / "global_step_2" / "actor"

    def save(self, name: str) -> list[Seen]:
        """An uninterrupted run that saved at step 2; it is done once."""
        if name not in self.saved:
            self.saved[name] = self.run(jobs.save_and_go_on, SAVED[name], str(self.root(name)))
        return self.saved[name]

    def run(self, job: Any, how: Wrapped, *args: object, **options: object) -> list[Any]:
        return self.pool.run(job, how, *args, world_size=how.world, timeout=TIMEOUT, **options)

    def empty(self) -> str:
        """A root of a run in which nothing is."""
        return str(self.folder / "empty")

    def copy(self, name: str, to: str) -> Path:
        self.save(name)
        shutil.copytree(self.root(name), self.root(to))
        return self.root(to)


@pytest.fixture(scope="module")
def lab(fsdp_pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> FsdpLab:
    return FsdpLab(fsdp_pool, tmp_path_factory.mktemp("fsdp"))


def _agree(ranks: list[Seen]) -> Whole:
    for rank in ranks:
        assert differences(ranks[0].whole, rank.whole) == []
    return ranks[0].whole


@pytest.mark.parametrize("name", SAVED)
def test_a_killed_run_goes_on_bit_for_bit(lab: FsdpLab, name: str) -> None:
    saved = lab.save(name)
    for pid in lab.pool.pids if name == "plain" else ():
        os.kill(pid, signal.SIGKILL)
    if name == "plain":
        with pytest.raises(Exception, match="died"):
            lab.run(jobs.load_and_go_on, SAVED[name], str(lab.root(name)))
    loaded = lab.run(jobs.load_and_go_on, SAVED[name].other(), str(lab.root(name)))
    for before, after in zip(saved, loaded, strict=True):
        assert differences(before.whole, after.whole) == []
        assert after.losses == before.losses
        assert after.draws == before.draws
        assert not [line for line in after.report if line.startswith(("lost", "derived"))], after.report
        assert after.others["note"] == {"answer": 42}
    assert any(name.startswith("state.") for name in saved[0].whole)
    steps = {float(value) for at, value in saved[0].whole.items() if at.startswith("state.") and at.endswith(".step")}
    assert len(steps) == (2 if SAVED[name].pauses else SAVED[name].optimizer != "sgd")
    assert len({tuple(seen.losses) for seen in saved}) > 1 or SAVED[name].world == 1


@pytest.mark.parametrize("name", CHANGED)
def test_every_value_arrives_in_another_layout(lab: FsdpLab, name: str) -> None:
    source, how = CHANGED[name]
    wanted = _agree(lab.save(source))
    loaded = lab.run(jobs.load_and_go_on, how.other(), str(lab.root(source)), goes_on=False)
    found = _agree(loaded)
    assert differences(wanted, found) == []
    assert not [line for line in loaded[0].report if line.startswith("lost")], loaded[0].report


@pytest.mark.parametrize(("name", "world"), [("plain", 2), ("plain", 3), ("plain", 1), ("fsdp1", 3), ("replicas", 3)])
def test_torch_itself_loads_the_step(lab: FsdpLab, name: str, world: int) -> None:
    wanted = _agree(lab.save(name))
    how = replace(SAVED[name], mesh=(world,)).other()
    same = how.mesh == SAVED[name].mesh
    states = [seen.state for seen in lab.save(name)] if same else []
    loaded = lab.run(jobs.load_by_torch, how, str(lab.role(name) / "dcp_checkpoint"), states)
    assert differences(wanted, _agree(loaded)) == []
    if same:
        assert [seen.losses for seen in loaded] == [seen.losses for seen in lab.save(name)]


def test_no_rank_writes_what_another_one_has(lab: FsdpLab) -> None:
    lab.save("replicas")
    files = sorted(path.name for path in (lab.role("replicas") / "dcp_checkpoint").iterdir())
    assert files == [".metadata", "__0_0.distcp", "__1_0.distcp"]
    lab.save("three")
    sizes = {path.name: path.stat().st_size for path in (lab.role("three") / "dcp_checkpoint").glob("__*")}
    assert len(sizes) == 3
    assert max(sizes["__1_0.distcp"], sizes["__2_0.distcp"]) < sizes["__0_0.distcp"]


def test_a_run_that_has_trained_already_takes_the_step_back(lab: FsdpLab) -> None:
    wanted = _agree(lab.save("plain"))
    loaded = lab.run(jobs.load_and_go_on, TWO.other(), str(lab.root("plain")), trained=2)
    assert differences(wanted, _agree(loaded)) == []
    assert [seen.losses for seen in loaded] == [seen.losses for seen in lab.save("plain")]


def test_weights_alone_leave_the_optimizer_as_it_is(lab: FsdpLab) -> None:
    wanted = lab.save("plain")[0].whole
    found = lab.run(jobs.load_and_go_on, TWO.other(), str(lab.root("plain")), optimizer=False, goes_on=False)[0].whole
    apart = differences(wanted, found)
    assert not [name for name in apart if name.startswith("model.")]
    assert not [name for name in found if name.startswith("state.")]


def test_a_trained_and_a_frozen_model_are_saved_together(lab: FsdpLab) -> None:
    assert lab.run(jobs.two_roles, TWO, str(lab.root("two"))) == [[], []]


def test_a_step_before_the_first_update_is_saved_and_loaded(lab: FsdpLab) -> None:
    saved = lab.run(jobs.save_and_go_on, TWO, str(lab.root("fresh")), steps=0)
    loaded = lab.run(jobs.load_and_go_on, TWO.other(), str(lab.root("fresh")), trained=1, goes_on=False)
    assert differences(saved[0].whole, loaded[0].whole) == []
    assert not [name for name in loaded[0].whole if name.startswith("state.")]


@pytest.mark.parametrize("file", ["__0_0.distcp", "__1_0.distcp", ".metadata"])
def test_a_flipped_bit_is_refused_before_anything_changes(lab: FsdpLab, file: str) -> None:
    root = lab.copy("plain", f"flipped{file}")
    path = root / "global_step_2" / "actor" / "dcp_checkpoint" / file
    data = bytearray(path.read_bytes())
    data[len(data) * 2 // 3] ^= 1
    path.write_bytes(bytes(data))
    for kind, text, same in lab.run(jobs.refused, TWO.other(), str(root)):
        assert kind
        assert file in text
        assert same


@pytest.mark.parametrize("file", ["__1_0.distcp", ".metadata"])
def test_a_missing_file_is_refused(lab: FsdpLab, file: str) -> None:
    root = lab.copy("plain", f"missing{file}")
    (root / "global_step_2" / "actor" / "dcp_checkpoint" / file).unlink()
    for kind, text, same in lab.run(jobs.refused, TWO.other(), str(root)):
        assert kind
        assert file in text
        assert same


@pytest.mark.parametrize(
    ("how", "wanted"),
    [
        (Wrapped(narrow=True), "embed.weight: live (12, 8), stored (11, 8)"),
        (Wrapped(optimizer="sgd"), "momentum_buffer"),
        (Wrapped(optimizer="amsgrad"), "max_exp_avg_sq"),
    ],
)
def test_another_model_or_optimizer_is_refused(lab: FsdpLab, how: Wrapped, wanted: str) -> None:
    lab.save("plain")
    for _, text, same in lab.run(jobs.refused, how.other(), str(lab.root("plain"))):
        assert wanted in text
        assert same


def test_a_schedule_that_refuses_leaves_everything_as_it_was(lab: FsdpLab) -> None:
    lab.save("plain")
    for _, text, same in lab.run(jobs.refused_by_the_schedule, TWO.other(), str(lab.root("plain"))):
        assert "lr_scheduler refused its state" in text
        assert "no such curve" in text
        assert same


@pytest.mark.parametrize(
    ("how", "wanted"),
    [
        (Wrapped(kind="fsdp1", original=False), "use_orig_params=True"),
        (Wrapped(kind="fsdp1", mesh=(2, 2)), "HYBRID_SHARD"),
    ],
)
def test_what_cannot_be_saved_is_refused_with_advice(lab: FsdpLab, how: Wrapped, wanted: str) -> None:
    for text in lab.run(jobs.unsupported, how):
        assert wanted in text
        assert "Wrap with" in text


def test_a_rank_that_stays_away_is_named(lab: FsdpLab) -> None:
    texts = lab.run(jobs.one_rank_stays_away, TWO, str(lab.root("away")))
    assert "without rank 1" in texts[0]


@pytest.mark.parametrize(
    ("to", "write", "how"),
    [
        ("universal", WriteOptions(), Wrapped(mesh=(3,))),
        ("deepspeed", WriteOptions(zero_stage=2, dp=2), TWO),
        ("deepspeed", WriteOptions(zero_stage=3, dp=3), Wrapped(kind="fsdp1")),
        ("dcp", WriteOptions(dp=3), TWO),
    ],
)
def test_other_formats_are_loaded_through_the_plan(lab: FsdpLab, to: str, write: WriteOptions, how: Wrapped) -> None:
    wanted = _agree(lab.save("plain"))
    folder = lab.folder / f"as-{to}-{write.zero_stage}"
    convert(lab.role("plain"), folder, ConvertOptions(to=to, write=write, fsync=False))
    loaded = lab.run(jobs.load_folder, how.other(), str(folder), lab.empty())
    apart = differences(wanted, _agree(loaded))
    assert not [name for name in apart if name.startswith(("model.", "state.", "schedule."))]
    assert not [name for name in apart if name.endswith((".lr", ".weight_decay", ".betas", ".eps"))]
    assert not [line for line in loaded[0].report if line.startswith("lost: actor")], loaded[0].report


def test_weights_of_a_hugging_face_folder_are_loaded(lab: FsdpLab) -> None:
    wanted = _agree(lab.save("plain"))
    folder = lab.folder / "as-hf"
    convert(lab.role("plain"), folder, ConvertOptions(to="hf", fsync=False))
    loaded = lab.run(jobs.load_folder, Wrapped(mesh=(3,)).other(), str(folder), lab.empty())
    apart = differences(_only(wanted, "model."), _only(_agree(loaded), "model."))
    assert apart == []
    assert [line for line in loaded[0].report if line.startswith("lost: actor: optimizer: not in the checkpoint")]


@pytest.mark.parametrize(("golden", "world"), [("fsdp2_ws3", 2), ("fsdp2_ws2", 3)])
def test_what_torch_itself_saved_is_loaded(lab: FsdpLab, golden: str, world: int) -> None:
    folder = GOLDENS / golden / "actor"
    how = Wrapped(mesh=(world,), golden=True, seed=3)
    found = _agree(lab.run(jobs.load_folder, how, str(folder), lab.empty()))
    weights = torch.load(folder / "model_state_dict" / "full_weights.pt")
    assert differences({f"model.{name}": value for name, value in weights.items()}, _only(found, "model.")) == []
    states = [value for name, value in found.items() if name.startswith("state.") and name.endswith("exp_avg_sq")]
    assert len(states) == 9
    assert all(value.abs().sum() > 0 for value in states)
    assert {float(value) for name, value in found.items() if name.startswith("state.") and name.endswith("step")} == {
        2.0
    }


def _only(whole: Whole, start: str) -> Whole:
    return {name: value for name, value in whole.items() if name.startswith(start)}


def test_a_flipped_bit_is_found_without_a_manifest_too(lab: FsdpLab) -> None:
    root = lab.copy("plain", "nobodys")
    (root / "global_step_2" / "manifest.json").unlink()
    path = root / "global_step_2" / "actor" / "dcp_checkpoint" / "__1_0.distcp"
    data = bytearray(path.read_bytes())
    whole = lab.save("plain")[0].whole["model.head.weight"]
    at = data.index(whole[-1].numpy().tobytes())
    data[at] ^= 1
    path.write_bytes(bytes(data))
    for kind, text, same in lab.run(jobs.refused, TWO.other(), str(root)):
        assert kind == "Corrupt"
        assert "model.head.weight[6,0]" in text
        assert same
