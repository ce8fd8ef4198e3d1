"""SkyRL itself goes on from what was made of its runs, and of others': by its own strategy, and its own trainer beside it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rlhf.convert import ConvertOptions, convert
from mcore_rlhf.errors import Unportable
from mcore_rlhf.families.options import ReadOptions, WriteOptions
from mcore_rlhf.formats.registry import open_checkpoint
from mcore_rlhf.manager.convert_step import convert_step
from mcore_rlhf.manager.subject import find
from mcore_rlhf.manager.will_resume import forecast, loader_named
from mcore_rlhf.trainers.resuming import Outcome, Settings, Thing
from mcore_rlhf.trainers.skyrl import TRAINER
from tests.trainers import lab as labs

RELEASE, STEP = "skyrl-0.3.0", "global_step_3"
Seen = list[dict[str, Any]]


class Lab(labs.Lab):
    """Runs of SkyRL, each done once."""

    def carry_out(self, world: int, do: Sequence[tuple[str, object]], **how: Any) -> Seen:
        needed = [RELEASE, f"{RELEASE}/skyrl-gym", "needs"]
        return self.run("skyrl_job", needed, world, do, **how)

    def on_megatron(self, world: int, do: Sequence[tuple[str, object]], **how: Any) -> Seen:
        needed = [str(Path(sys.prefix) / "megatron-0.16.1"), RELEASE, f"{RELEASE}/skyrl-gym", "needs"]
        return self.run("skyrl_megatron_job", needed, world, do, **how)

    def trained(self, world: int = 2, **how: Any) -> tuple[Path, Seen]:
        """The root of a run, and what it saw in two steps more."""
        key = f"{world}-{sorted(how.items())}"
        path = self.folder / f"run-{len(self.before)}" / STEP
        path, wanted = self.once(key, path, lambda do: self.carry_out(world, do, **how))
        return path.parent, wanted

    def goes_on(self, *roots: Path, world: int = 2, **how: Any) -> list[Seen]:
        """What it sees in two steps from each."""
        do = [order for root in roots for order in (("load", root / STEP), ("train", 2))]
        seen = self.carry_out(world, do, **{**how, "seed": 7})
        return [seen[at : at + 2] for at in range(0, len(seen), 2)]


@pytest.fixture(scope="module")
def lab(trainers: Path, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(trainers, tmp_path_factory.mktemp("skyrl"))


def learnt(seen: Seen) -> list[dict[str, Any]]:
    """What does not depend on the random numbers that are drawn beside."""
    return [{key: value for key, value in step.items() if "drawn" not in key and key != "at"} for step in seen]


def told(root: Path, world: int = 2, role: str = "actor") -> dict[Thing, Outcome]:
    found = forecast(root, loader_named("skyrl")[0], Settings(), world)
    return {one.thing: one.row.outcome for one in found.roles[role]}


def test_it_goes_on_from_its_own(lab: Lab) -> None:
    """Policy, critic, schedule, random states, place in the data, counters and tracker: all as if nothing had happened."""
    run, wanted = lab.trained(critic=True)
    assert set(told(run).values()) == {Outcome.RESTORED}
    target, job = lab.convert(run, "skyrl", "same")
    assert job.lossless
    assert set(told(target).values()) == set(told(target, role="critic").values()) == {Outcome.RESTORED}
    (seen,) = lab.goes_on(target, critic=True)
    assert [step.pop("at") for step in seen] == [3, 3]
    assert seen == wanted


@pytest.mark.parametrize("tied", [False, True])
def test_it_goes_on_from_what_every_format_became(lab: Lab, tied: bool) -> None:
    run, wanted = lab.trained(tied=tied)
    by: dict[str, dict[str, Any]] = {
        "megatron": {"tp": 2, "dp": 1}, "megatron-dist": {"pp": 2, "dp": 1}, "deepspeed": {"zero_stage": 2, "dp": 2}, "universal": {},
        "dcp": {"dp": 3}, "hf": {"with_optimizer": True}, "verl": {},
    }  # fmt: skip
    made = []
    for name, write in by.items():
        there, _ = lab.convert(run, name, f"{tied}-{name}", **write)
        back, job = lab.convert(there, "skyrl", f"{tied}-from-{name}", dp=2, like=str(run))
        assert not any("data.pt" in text for text in job.report.lost), job.report.lost
        made.append(back)
    for root, seen in zip(made, lab.goes_on(*made, tied=tied), strict=True):
        assert learnt(seen) == learnt(wanted), root


def test_it_goes_on_with_another_number_of_ranks(lab: Lab) -> None:
    """Which SkyRL itself cannot: it asks for files of as many ranks."""
    run, wanted = lab.trained(critic=True)
    assert told(run, 3)[Thing.WEIGHTS] is Outcome.REFUSED
    three, _ = lab.convert(run, "skyrl", "three", dp=3)
    assert set(told(three, 3).values()) == {Outcome.RESTORED}
    (seen,) = lab.goes_on(three, world=3, critic=True)
    assert [step["data"] for step in seen] == [step["data"] for step in wanted]
    for name in ("loss", "critic loss"):
        assert [step[name] for step in seen] == pytest.approx([step[name] for step in wanted], abs=2e-6)


@pytest.mark.parametrize("tied", [False, True])
def test_it_goes_on_from_a_run_of_verl(lab: Lab, tied: bool) -> None:
    """With equal losses; of tied weights until the first update, since it trains them apart."""
    how = {"strategy": "fsdp", "tied": tied}
    path = lab.folder / f"verl-{tied}" / STEP / "actor"
    verl = ["verl-0.9.1", "needs"]
    _, wanted = lab.once(f"verl-{tied}", path, lambda do: lab.run("verl_job", verl, 2, do, **how))
    own, _ = lab.trained(tied=tied)
    target, job = lab.convert(path.parent, "skyrl", f"of-verl-{tied}", like=str(own))
    (seen,) = lab.goes_on(target, tied=tied, clip=0.0)
    same = 1 if tied else 2
    assert [step["loss"] for step in seen[:same]] == [step["loss"] for step in wanted[:same]]
    texts = [text for _, text in job.jobs["actor"].report.lines]
    assert any("SkyRL trains lm_head.weight apart" in text for text in texts) is tied


@pytest.mark.parametrize("parallel", [{"tp": 2}, {"pp": 2}])
def test_what_it_saves_on_megatron_is_read(lab: Lab, parallel: dict[str, int]) -> None:
    """SkyRL goes on from its own, as is said; all of it is read, though it says no degrees, and becomes Megatron's."""
    folder = lab.folder / "-".join(map(str, *parallel.items())) / STEP
    how = {"parallel": parallel, "fully": True}
    own, wanted = lab.once(str(folder), folder / "policy", lambda do: lab.on_megatron(2, do, **how))
    torch.save({"global_step": 3}, folder / "trainer_state.pt")
    assert {told(folder)[thing] for thing in (Thing.WEIGHTS, Thing.OPTIMIZER, Thing.SCHEDULER, Thing.RNG)} == {
        Outcome.RESTORED
    }
    source = open_checkpoint(own, ReadOptions())
    assert (source.state.iteration, source.states) == (3, ("master", "exp_avg", "exp_avg_sq"))
    assert source.parallel.tp == parallel.get("tp", 1)
    seen = lab.on_megatron(2, [("load", own), ("train", 2)], **{**how, "seed": 7})
    assert seen == wanted
    target = lab.folder / f"{folder.parent.name}-megatron"
    write = WriteOptions(**parallel, dp=1, global_batch_size=4)  # its schedule counts steps
    assert convert(own, target, ConvertOptions(to="megatron", fsync=False, workers=1, write=write)).lossless


@pytest.mark.timeout(900)
def test_it_goes_on_from_what_is_made_for_it_on_megatron(lab: Lab) -> None:
    """Reshardable, with a schedule that counted samples meanwhile, too."""
    parallel = {"tp": 2}
    folder, how = lab.folder / "tp-2" / STEP, {"parallel": parallel, "fully": True}
    own, wanted = lab.once(str(folder), folder / "policy", lambda do: lab.on_megatron(2, do, **how))
    torch.save({"global_step": 3}, folder / "trainer_state.pt")
    target, written = lab.folder / "for-skyrl", WriteOptions(**parallel, dp=1, global_batch_size=4)
    convert(own, target, ConvertOptions(to="megatron", fsync=False, workers=1, write=written))
    runs = [lab.folder / f"megatron-{name}" for name in ("like", "own", "back")]
    for source_of, run, like in ((folder, runs[0], folder), (folder, runs[1], None), (target, runs[2], None)):
        options = ConvertOptions(to="skyrl", fsync=False, workers=1, write=replace(written, like=like and str(like)))
        convert_step(find(source_of, ReadOptions()), run, options)
        things = (Thing.WEIGHTS, Thing.OPTIMIZER, Thing.SCHEDULER, Thing.RNG)
        assert {told(run)[thing] for thing in things} == {Outcome.RESTORED}
    do = [("attempt", run / STEP / "policy") for run in runs]
    seen = lab.on_megatron(2, do, **{**how, "seed": 7})
    assert [[step["loss"] for step in one["steps"]] for one in seen] == [[step["loss"] for step in wanted]] * 3


def test_it_goes_on_from_flat_buffers_that_lie_as_its_own(lab: Lab) -> None:
    """Its own do not say whose layers they are of, whose norms lie at other places: where they begin tells."""
    parallel = {"tp": 2}
    folder, how = lab.folder / "flat" / STEP, {"parallel": parallel, "fully": False}
    own, wanted = lab.once(str(folder), folder / "policy", lambda do: lab.on_megatron(2, do, **how))
    torch.save({"global_step": 3}, folder / "trainer_state.pt")
    source = find(folder, ReadOptions())
    write = WriteOptions(**parallel, dp=1, global_batch_size=4, optimizer_sharding="dp_reshardable")
    convert_step(source, lab.folder / "flat-back", ConvertOptions(to="skyrl", fsync=False, workers=1, write=write))
    do = [("attempt", path) for path in (own, lab.folder / "flat-back" / STEP / "policy")]
    seen = lab.on_megatron(2, do, **{**how, "seed": 7})
    assert [one["steps"] for one in seen] == [wanted, wanted]


def test_a_lora_on_megatron_is_its_own_alone(lab: Lab) -> None:
    """SkyRL goes on from the adapters of its ranks, and stops where one is not there; who reads it says what it is, and no damage."""
    folder = lab.folder / "lora-megatron" / STEP
    how = {"parallel": {"tp": 2}, "lora": True}
    own, wanted = lab.once(str(folder), folder / "policy", lambda do: lab.on_megatron(2, do, **how))
    torch.save({"global_step": 3}, folder / "trainer_state.pt")
    assert lab.on_megatron(2, [("load", own), ("train", 2)], **how) == wanted
    things = (Thing.WEIGHTS, Thing.OPTIMIZER, Thing.SCHEDULER, Thing.RNG, Thing.LORA)
    assert {told(folder)[thing] for thing in things} == {Outcome.RESTORED}
    with pytest.raises(Unportable, match="SkyRL itself goes on from it"):
        open_checkpoint(own, ReadOptions())
    for change in (lambda file: file.write_bytes(bytes(100)), lambda file: file.unlink()):
        change(next(own.glob("adapter_tp1_*.pt")))
        assert told(folder)[Thing.WEIGHTS] is Outcome.REFUSED
        with pytest.raises(AssertionError, match=r"adapter_tp1|_load_lora_adapters"):
            lab.on_megatron(2, [("load", own), ("train", 2)], **how)


@pytest.mark.parametrize("kind", ["async", "sft"])
def test_its_other_trainers_go_on(lab: Lab, kind: str) -> None:
    run, wanted = lab.trained(kind=kind)
    target, job = lab.convert(run, "skyrl", f"{kind}-same")
    assert job.lossless
    assert [learnt(seen) for seen in lab.goes_on(target, kind=kind)] == [learnt(wanted)]


def test_another_strategy_than_the_steps(lab: Lab) -> None:
    """FSDP's loader looks for rank files where Megatron's has ``dist_ckpt``, and the other way round: both stop, as is said."""
    fsdp, folder = lab.trained(1)[0] / STEP, lab.folder / "other-strategy" / STEP
    how = {"parallel": {"tp": 1}, "fully": True}
    lab.on_megatron(1, [("train", 3), ("save", folder / "policy")], **how)
    torch.save({"global_step": 3}, folder / "trainer_state.pt")
    (folder.parent / TRAINER.tracker).write_text("3")
    (on_fsdp,) = lab.carry_out(1, [("attempt", folder)])
    (on_megatron,) = lab.on_megatron(1, [("attempt", fsdp / "policy")], **how)
    assert "model_world_size_1_rank_0.pt" in on_fsdp["failed"]
    assert "failed" in on_megatron
    for step, strategy in ((folder, "fsdp2"), (fsdp, "megatron")):
        found = forecast(step, loader_named("skyrl")[0], Settings({"trainer.strategy": strategy}), 1)
        (weights,) = [one for one in found.roles["actor"] if one.thing is Thing.WEIGHTS]
        assert found.stops
        assert f"trainer.strategy is {strategy}, whose loader finds none of its files" in weights.why
