"""verl's own ``MegatronCheckpointManager`` saves what is read whole: model, optimizer, scheduler and random states, in its layout."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mcore_rlhf.convert import ConvertOptions, convert
from mcore_rlhf.families.options import ReadOptions, WriteOptions
from mcore_rlhf.formats.registry import open_checkpoint
from mcore_rlhf.verify.checkpoint import verify
from tests.trainers import lab as labs

RELEASE = "0.9.1"
Seen = list[dict[str, Any]]
CASES: dict[str, dict[str, Any]] = {
    "buckets": {"parallel": {"tp": 2}},
    "parameters": {"parallel": {"pp": 2}, "fully": True, "tied": True},
}  # fmt: skip
"""How verl stores the optimizer: flat buckets, which is its default, and parameter by parameter."""


class Lab(labs.Lab):
    """Runs of verl on Megatron, each done once."""

    def carry_out(self, world: int, do: Sequence[tuple[str, object]], **how: Any) -> Seen:
        """Carry orders out in processes of their own."""
        return self.run("verl_megatron_job", [f"verl-{RELEASE}", "needs"], world, do, **how)

    def trained(self, case: str) -> tuple[Path, Seen]:
        """The role's folder of a run of three steps, and what it saw in two more."""
        path = self.folder / case / "global_step_3" / "actor"
        if case not in self.before:
            seen = self.carry_out(2, [("train", 3), ("save", path), ("train", 2)], **CASES[case])
            self.before[case] = path, seen[3:]
        return self.before[case]


@pytest.fixture(scope="module")
def lab(trainers: Path, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(trainers, tmp_path_factory.mktemp("verl-megatron"))


@pytest.mark.parametrize("case", CASES)
def test_what_verl_saves_is_read_whole(lab: Lab, case: str) -> None:
    """Megatron goes on from what it became: equal losses and rates."""
    run, wanted = lab.trained(case)
    assert verify(run, ReadOptions()).intact
    source = open_checkpoint(run, ReadOptions())
    assert (source.state.iteration, source.states) == (3, ("master", "exp_avg", "exp_avg_sq"))
    assert [group.fields["step"] for group in source.state.groups] == [3, 3]
    assert source.state.scheduler is not None
    assert source.parallel.world_size == 2
    target = lab.folder / f"{case}-megatron"
    job = convert(run, target, ConvertOptions(to="megatron", fsync=False, workers=1, write=WriteOptions()))
    assert job.lossless
    seen = lab.carry_out(2, [("load", target), ("train", 2)], **{**CASES[case], "seed": 7})
    assert seen == wanted
