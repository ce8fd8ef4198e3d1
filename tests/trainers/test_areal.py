"""AReaL's own ``RecoverHandler`` and engine go on from what was made of its runs, as they go on from what AReaL saved itself."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from mcore_rlhf.manager.will_resume import forecast, loader_named
from mcore_rlhf.trainers.resuming import Outcome, Settings, Thing
from tests.trainers import lab as labs
from tests.trainers.lessons import Step

NEEDED = ("areal-1.0.4", "needs")
INFO = ("step_info.json", "saver_info.json", "evaluator_info.json", "checkpoint_info.json", "stats_logger_info.json")
DATA = "recover_info/dataloader_info.pkl"
Seen = list[Step]


class Lab(labs.Lab):
    """Runs of AReaL, each done once."""

    def carry_out(self, world: int, do: Sequence[tuple[str, object]], **how: Any) -> Seen:
        return self.run("areal_job", NEEDED, world, do, **how)

    def place(self, name: str) -> str:
        """Where a run lies, below the lab's folder: AReaL makes the last four parts of it by itself."""
        return f"files/checkpoints/me/exp/{name}"

    def trained(self, *more: str, world: int = 2) -> tuple[Path, Seen]:
        """The root of a run, and what the run itself saw in two steps more."""
        name = "-".join(("run", str(world), *more))
        return self.once(name, self.folder / self.place(name), lambda do: self.carry_out(world, do, more=more))

    def own(self, *more: str) -> tuple[Path, Seen]:
        """The root of a run, and what AReaL sees after it has recovered it."""
        run, _ = self.trained(*more)
        return self.once_more(run, lambda: self.goes_on(run, *more))

    def once_more(self, run: Path, see: Callable[[], Seen]) -> tuple[Path, Seen]:
        if str(run) not in self.before:
            self.before[str(run)] = run, see()
        return self.before[str(run)]

    def goes_on(self, root: Path, *more: str, world: int = 2) -> Seen:
        """What AReaL sees in four steps after it has recovered, with other weights to begin with."""
        return self.carry_out(world, [("load", root), ("train", 4)], seed=7, more=more)


@pytest.fixture(scope="module")
def lab(trainers: Path, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(trainers, tmp_path_factory.mktemp("areal"))


def learnt(seen: Seen, *what: str) -> list[tuple[Any, ...]]:
    return [tuple(step[key] for key in what) for step in seen]


def told(root: Path, world: int | None = None) -> dict[Thing, Outcome]:
    found = forecast(root, loader_named("areal")[0], Settings(), world)
    return {one.thing: one.row.outcome for one in found.roles["actor"]}


def test_it_goes_on_from_its_own_but_for_the_schedule(lab: Lab) -> None:
    """Its schedule is in no file: the first step has the rate that was stored with the optimizer, the next that of a run's second step."""
    (run, seen), (_, wanted) = lab.own(), lab.trained()
    assert learnt(seen[:2], "loss", "data") == learnt(wanted, "loss", "data")
    assert seen[0]["lr"] == wanted[0]["lr"]
    assert seen[1]["lr"] != wanted[1]["lr"]
    assert {thing for thing, outcome in told(run).items() if outcome is Outcome.ANEW} == {Thing.SCHEDULER, Thing.RNG}
    target, job = lab.convert(run, "areal", lab.place("same"))
    assert job.lossless
    assert learnt(lab.goes_on(target), "loss", "lr", "data") == learnt(seen, "loss", "lr", "data")


@pytest.mark.parametrize("to", ["verl", "rlinf", "megatron"])
def test_it_goes_on_with_equal_losses_after_another_run(lab: Lab, to: str) -> None:
    run, wanted = lab.own()
    config = {"tp": 2, "reference_config": str(next(run.glob("default/epoch*")))} if to == "megatron" else {}
    there, _ = lab.convert(run, to, f"in-{to}", **config)
    back, _ = lab.convert(there, "areal", lab.place(f"from-{to}"), like=str(run), **({"dp": 2} if config else {}))
    what = ("loss", "lr", "data") if to == "megatron" else ("loss", "lr")  # others have no place for shares of the data
    assert learnt(lab.goes_on(back), *what) == learnt(wanted, *what)


def test_a_critic_goes_along_and_on_other_ranks_the_data_begin_anew(lab: Lab) -> None:
    """Had the shares gone along as they were, AReaL would have begun everything anew."""
    run, wanted = lab.own("critic")
    three, job = lab.convert(run, "areal", lab.place("three"), dp=3)
    assert any("shares of 2 data-parallel ranks, and AReaL has 3" in text for text in job.report.lost)
    assert told(three, 3)[Thing.DATA] is Outcome.ANEW
    assert set(told(run, 3).values()) == {Outcome.ANEW}
    seen = lab.goes_on(three, "critic", world=3)
    assert [step["loss"] for step in seen] == pytest.approx([step["loss"] for step in wanted], abs=2e-6)
    assert learnt(seen, "lr") == learnt(wanted, "lr")


def _damaged(run: Path, place: Callable[[str], Path]) -> dict[str, Path]:
    """Copies of a run from each of which one thing is gone, by what that is."""
    found = {}

    def copy(name: str) -> Path:
        found[name] = Path(shutil.copytree(run, place(name.replace("/", "-"))))
        return found[name]

    copy("nothing")
    for name in (*INFO, "dataloader_info.pkl"):
        (copy(f"recover_info/{name}") / "recover_info" / name).unlink()
    path = copy("a position of two ranks") / DATA
    path.write_bytes(pickle.dumps(pickle.loads(path.read_bytes()) * 2))
    path = copy("half of a position") / DATA
    path.write_bytes(path.read_bytes()[:40])
    path = copy("a field more") / "recover_info" / "step_info.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "more": 1}))
    path = copy("a counter") / "recover_info" / "saver_info.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "time": {}}))
    (copy(".metadata") / "default" / "recover_checkpoint" / ".metadata").unlink()
    return found


def test_what_it_makes_of_what_is_gone_is_what_will_resume_says(lab: Lab) -> None:
    """Silently anew, or an error: each is attempted by AReaL itself, in one process."""
    run, _ = lab.trained(world=1)
    there = _damaged(run, lambda name: lab.folder / lab.place(f"gone-{name}".replace(" ", "-")))
    there["the optimizer"], _ = lab.convert(run, "areal", lab.place("gone-optimizer"), no_optimizer=True)
    seen = lab.carry_out(1, [("attempt", path) for path in there.values()])
    for (name, path), one in zip(there.items(), seen, strict=True):
        outcomes = told(path, 1)
        if "steps" in one:
            assert Outcome.REFUSED not in outcomes.values(), (name, one)
            assert outcomes[Thing.COUNTERS] is Outcome.RESTORED, (name, one)
        elif one["failed"].endswith("no recover info"):
            assert set(outcomes.values()) == {Outcome.ANEW}, (name, one)
        else:
            assert Outcome.REFUSED in outcomes.values(), (name, one)
    assert [name for name, one in zip(there, seen, strict=True) if "steps" in one] == ["nothing"]
