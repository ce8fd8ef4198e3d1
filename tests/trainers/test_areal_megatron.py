"""AReaL's own Megatron checkpoints are read, and what is made for it its own load goes on from; ``will-resume`` says what it does."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from mcore_rlhf.convert import ConvertOptions, convert
from mcore_rlhf.families.options import ReadOptions, WriteOptions
from mcore_rlhf.formats.registry import open_checkpoint
from mcore_rlhf.manager.convert_step import convert_step
from mcore_rlhf.manager.subject import find
from mcore_rlhf.manager.will_resume import forecast, loader_named
from mcore_rlhf.trainers.areal import TRAINER
from mcore_rlhf.trainers.resuming import Outcome, Settings, Thing
from tests.trainers import lab as labs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
RELEASE, ACTOR = "areal-1.0.4", TRAINER.roles["actor"][0]


class Lab(labs.Lab):
    """Runs of AReaL on Megatron, each done once."""

    def of(self, do: Any, world: int = 2, **how: Any) -> Any:
        return self.run(
            "areal_megatron_job", [str(Path(sys.prefix) / "megatron-0.13.1"), RELEASE, "needs"], world, do, **how
        )

    def trained(self, parallel: dict[str, int]) -> tuple[Path, Any]:
        """The actor of a run, and what it saw in two steps more."""
        root = self.folder / "-".join(map(str, *parallel.items()))
        (root / ACTOR).mkdir(parents=True, exist_ok=True)
        own, wanted = self.once(str(root), root / ACTOR, lambda do: self.of(do, parallel=parallel))
        (root / "recover_info").mkdir(exist_ok=True)
        (root / "recover_info" / "step_info.json").write_text(json.dumps({"global_step": 2}))
        return own, wanted


@pytest.fixture(scope="module")
def lab(trainers: Path, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(trainers, tmp_path_factory.mktemp("areal-megatron"))


def test_it_goes_on_from_what_is_made_for_it(lab: Lab) -> None:
    """As from its own, of which it begins the moments anew: the second loss is another than that of the run that was not interrupted."""
    parallel = {"tp": 2}
    own, wanted = lab.trained(parallel)
    source = open_checkpoint(own, ReadOptions())
    assert (source.state.iteration, source.states, source.parallel.tp) == (3, ("master", "exp_avg", "exp_avg_sq"), 2)
    core, runs = lab.folder / "core", [lab.folder / name for name in ("own", "back")]
    write = WriteOptions(tp=2, dp=1, global_batch_size=4)
    convert(own, core, ConvertOptions(to="megatron", fsync=False, workers=1, write=write))
    for given, run in zip((own, core), runs, strict=True):
        convert_step(find(given, ReadOptions()), run, ConvertOptions(to="areal", fsync=False, workers=1, write=write))
    seen = [
        one["steps"]
        for one in lab.of([("attempt", at) for at in (own, *(run / ACTOR for run in runs))], parallel=parallel, seed=7)
    ]
    assert seen[1:] == seen[:1] * 2
    assert seen[0][0] == wanted[0]
    assert (seen[0][1]["loss"], seen[0][1]["lr"]) != (wanted[1]["loss"], wanted[1]["lr"])
    told = forecast(runs[0], loader_named("areal")[0], Settings({}))
    said = {one.thing: one.row.outcome for one in told.roles["actor"]}
    assert {said[thing] for thing in (Thing.WEIGHTS, Thing.GROUPS, Thing.SCHEDULER, Thing.RNG)} == {Outcome.RESTORED}
    assert said[Thing.OPTIMIZER] is Outcome.ANEW


def test_newer_releases_of_megatron_stop_it(lab: Lab) -> None:
    do = [("train", 1), ("save", lab.folder / "stops")]
    (lab.folder / "stops").mkdir()
    with pytest.raises(AssertionError, match="flattened_range is not supported"):
        lab.run("areal_megatron_job", [RELEASE, "needs"], 2, do, parallel={"tp": 2})
