"""Real FSDP2 and FSDP1 write DCP folders, we cut them anew or carry them through other formats, and torch loads and goes on."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rlhf.convert import ConvertOptions, convert
from mcore_rlhf.demo.workers import WorkerPool
from mcore_rlhf.families.options import ReadOptions, WriteOptions
from mcore_rlhf.formats.registry import open_checkpoint
from mcore_rlhf.storage.reading import OpenFiles
from mcore_rlhf.verify.differ import Differ
from tests.helpers.catalog_values import tensor_of
from tests.helpers.conversions import GOLDENS
from tests.reference import dcp_jobs as jobs
from tests.reference.dcp_jobs import Looked
from tests.reference.fsdp_jobs import Whole, differences
from tests.reference.fsdp_models import Wrapped

TIMEOUT = 100.0
MEGATRON = GOLDENS / "tp2pp2dp2_bf16_do"
SAVED: dict[str, tuple[Wrapped, str]] = {
    "rlinf": (Wrapped(), "rlinf"),
    "rlinf-3": (Wrapped(mesh=(3,)), "rlinf"),
    "titan": (Wrapped(mesh=(3,)), "flat"),
    "plain": (Wrapped(), "plain"),
    "fsdp1": (Wrapped(kind="fsdp1"), "rlinf"),
    "columns": (Wrapped(columns=True, optimizer="sgd"), "rlinf"),
    "tied": (Wrapped(mesh=(3,), tied=True, frozen=True), "rlinf"),
    "amsgrad": (Wrapped(optimizer="amsgrad", mixed=True), "rlinf"),
}


@dataclass
class Runs:
    """Runs of real FSDP, each done once."""

    pool: WorkerPool
    folder: Path
    saved: dict[str, list[Looked]] = field(default_factory=dict)

    def save(self, name: str) -> list[Looked]:
        if name not in self.saved:
            how, style = SAVED[name]
            self.saved[name] = self.run(jobs.save_and_go_on, how, str(self.folder / name), style)
        return self.saved[name]

    def load(self, how: Wrapped, folder: Path, style: str) -> list[Looked]:
        return self.run(jobs.load_and_go_on, how, str(folder), style)

    def run(self, job: Any, how: Wrapped, *args: object) -> list[Looked]:
        return self.pool.run(job, how, *args, world_size=how.world, timeout=TIMEOUT)

    def convert(self, source: Path, name: str, to: str = "dcp", lost: str = "", **write: Any) -> Path:
        target = self.folder / name
        job = convert(source, target, ConvertOptions(to=to, fsync=False, workers=1, write=WriteOptions(**write)))
        assert [text for text in job.report.lost if not lost or not text.startswith(lost)] == []
        return target


@pytest.fixture(scope="module")
def runs(fsdp_pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(fsdp_pool, tmp_path_factory.mktemp("dcp"))


def agreed(ranks: list[Looked]) -> Whole:
    for rank in ranks:
        assert differences(ranks[0].whole, rank.whole) == []
    return ranks[0].whole


def assert_same(a: Path, b: Path) -> None:
    one, other = (open_checkpoint(path, ReadOptions()) for path in (a, b))
    with OpenFiles(one.root) as left, OpenFiles(other.root) as right:
        result = Differ(one, other, left, right).compare()
    assert result.equal, result.differences
    assert result.tensors == len(one.catalog)


@pytest.mark.parametrize("name", SAVED)
def test_torch_loads_what_was_cut_anew_and_trains_on(runs: Runs, name: str) -> None:
    """The same number of ranks goes on bit for bit; another one has every value."""
    how, style = SAVED[name]
    saved = runs.save(name)
    cut = runs.convert(runs.folder / name, f"{name}-cut", dp=4)
    assert len(list(cut.glob("__*_0.distcp"))) == 4
    same = runs.load(how.other(), cut, style)
    other = runs.load(how.other(mesh=(5 - how.world,), columns=False), cut, style)
    for before, after in zip(saved, same, strict=True):
        assert differences(_kept(before.whole, style), _kept(after.whole, style)) == []
        assert after.losses == before.losses or style == "plain"
    assert differences(_kept(agreed(saved), style), _kept(agreed(other), style)) == []
    assert all(loss == loss for seen in other for loss in seen.losses)
    assert any(key.startswith("state.") for key in agreed(other))


def _kept(whole: Whole, style: str) -> Whole:
    """What such a run stores: plain dictionaries leave the schedule out."""
    return {key: value for key, value in whole.items() if style != "plain" or not key.startswith("schedule.")}


@pytest.mark.parametrize("by", ["universal", "deepspeed"])
@pytest.mark.parametrize("name", ["rlinf-3", "titan", "fsdp1"])
def test_torch_loads_what_went_through_deepspeeds_formats(runs: Runs, name: str, by: str) -> None:
    """Coming from elsewhere, a folder has RLinf's keys, whatever its run had."""
    how, _ = SAVED[name]
    saved = runs.save(name)
    write = {"zero_stage": 2, "dp": 2} if by == "deepspeed" else {}
    there = runs.convert(runs.folder / name, f"{name}-{by}", to=by, **write)
    back = runs.convert(there, f"{name}-{by}-back", dp=2)
    loaded = runs.load(how.other(mesh=(2,)), back / "dcp_checkpoint", "rlinf")
    wanted, found = agreed(saved), agreed(loaded)
    assert differences(wanted, found) == []
    assert_same(runs.folder / name, back)


@pytest.mark.parametrize("mesh", [(2,), (3,), (2, 2)])
def test_torch_loads_what_verl_saved_and_trains_on(runs: Runs, mesh: tuple[int, ...]) -> None:
    """DTensors in files of ranks, an optimizer with numbers: torch loads them by name, from a DCP folder, at any size."""
    how = Wrapped(mesh=mesh)
    name = f"verl-{'x'.join(map(str, mesh))}"
    (runs.folder / name).mkdir()
    saved = runs.run(jobs.save_as_verl, how, str(runs.folder / name))
    cut = runs.convert(runs.folder / name, f"{name}-dcp", lost="rng: of rank 0", dp=2)
    loaded = runs.load(how.other(), cut / "dcp_checkpoint", "rlinf")
    for before, after in zip(saved, loaded, strict=True):
        assert differences(before.whole, after.whole) == []
        assert after.losses == before.losses
    assert_same(runs.folder / name, cut)


@pytest.mark.parametrize("by", ["", "universal", "dcp"])
def test_torch_loads_the_rank_files_that_were_made_of_others(runs: Runs, by: str) -> None:
    """The same number of ranks goes on bit for bit, with a mesh that is the run's own; another one has every value."""
    how, name = Wrapped(), f"ranks-{by or 'own'}"
    (runs.folder / name).mkdir()
    saved = runs.run(jobs.save_as_verl, how, str(runs.folder / name))
    lost, like = "rng: of rank 0", str(runs.folder / name)
    there = runs.convert(runs.folder / name, f"{name}-there", by, lost=lost) if by else runs.folder / name
    for world in (2, 3):
        cut = runs.convert(there, f"{name}-{world}", "fsdp-ranks", lost=lost, dp=world, like=like)
        loaded = runs.run(jobs.load_as_verl, how.other(mesh=(world,)), str(cut))
        assert differences(agreed(saved), agreed(loaded)) == []
        assert world == 3 or [seen.losses for seen in loaded] == [seen.losses for seen in saved]


def test_fsdp1_and_fsdp2_load_each_others_folder(runs: Runs) -> None:
    """Names and chunks are alike; only RLinf's note of the version is not."""
    wanted = agreed(runs.save("fsdp1"))
    cut = runs.convert(runs.folder / "fsdp1", "fsdp1-for-2", dp=3)
    loaded = runs.load(replace(SAVED["fsdp1"][0], kind="fsdp2", mesh=(3,)).other(), cut, "rlinf")
    assert differences(wanted, agreed(loaded)) == []


def test_a_run_that_began_from_ours_saves_what_it_got(runs: Runs) -> None:
    """Torch writes it back at another size, without our own item, and nothing has changed."""
    how, style = SAVED["rlinf"]
    runs.save("rlinf")
    cut = runs.convert(runs.folder / "rlinf", "rlinf-again", dp=3)
    again = runs.folder / "rlinf-by-torch"
    runs.run(jobs.load_and_save, how.other(mesh=(3,)), str(cut), str(again), style)
    assert_same(cut, again)
    assert open_checkpoint(again, ReadOptions()).parallel.dp == 3


@pytest.mark.parametrize("world", [2, 3])
def test_a_megatron_run_goes_on_under_fsdp2(runs: Runs, world: int) -> None:
    """A Llama that megatron-core trained at TP2, PP2, DP2: transformers' own under FSDP2 has its masters, moments and steps."""
    pytest.importorskip("transformers")
    folder = runs.folder / f"megatron-{world}"
    job = convert(MEGATRON, folder, ConvertOptions(to="dcp", fsync=False, workers=1, write=WriteOptions(dp=4)))
    assert [text for text in job.report.lost if not text.startswith("RNG")] == []
    source = open_checkpoint(folder, ReadOptions())
    config = {**source.family.config, "dtype": "float32"}  # type: ignore[attr-defined]
    ranks = runs.pool.run(jobs.load_llama, str(folder / "dcp_checkpoint"), config, world_size=world, timeout=TIMEOUT)
    whole, losses = ranks[0]
    for name in source.catalog:
        key = f"model.{name.param}" if name.state == "master" else f"state.{name.param}.{name.state}"
        assert torch.equal(whole[key], tensor_of(source, name.param, name.state)), name
    assert len([key for key in whole if key.startswith("model.")]) == len(source.model.params)
    assert {whole[key].item() for key in whole if key.endswith(".step")} == {2.0}
    assert [whole["group.0.weight_decay"], whole["group.1.weight_decay"]] == [0.1, 0.0]
    assert whole["group.0.lr"] == source.state.groups[0].fields["lr"]
    assert whole["schedule.last_epoch"] == 2
    assert losses[1] < losses[0] < 8.0
    read = runs.pool.run(jobs.load_llama, str(MEGATRON), config, True, world_size=world, timeout=TIMEOUT)
    assert differences(without_schedule(whole), without_schedule(read[0][0])) == [], "as it lies, without a folder"


def without_schedule(whole: Whole) -> Whole:
    """What model and optimizer hold."""
    return {key: value for key, value in whole.items() if not key.startswith("schedule.")}


@pytest.mark.parametrize(
    ("name", "by"), [("rlinf", "universal"), ("rlinf-3", "deepspeed"), ("tied", "dcp"), ("fsdp1", "universal")]
)
def test_torch_reads_any_format_where_it_lies(runs: Runs, name: str, by: str) -> None:
    """``dcp.load`` with our reader: the same number of ranks goes on bit for bit, another one has every value."""
    how, _ = SAVED[name]
    saved = runs.save(name)
    write = {"zero_stage": 2, "dp": 2} if by == "deepspeed" else {}
    there = runs.convert(runs.folder / name, f"{name}-{by}-any", to=by, **write)
    for world in (how.world, 5 - how.world):
        loaded = runs.run(jobs.load_any, how.other(mesh=(world,)), str(there))
        assert differences(without_schedule(agreed(saved)), without_schedule(agreed(loaded))) == []
        assert world != how.world or [seen.losses for seen in loaded] == [seen.losses for seen in saved]


def test_what_is_not_there_is_named(runs: Runs) -> None:
    for text in runs.pool.run(jobs.ask_for_too_much, str(MEGATRON), world_size=2, timeout=TIMEOUT):
        assert "model.nowhere.weight" in text
