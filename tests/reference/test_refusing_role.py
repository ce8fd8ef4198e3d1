"""A role that refuses, on one rank of a Megatron run, leaves every role, the data, the RLHF state and the RNG as they were."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mcore_rlhf.demo.configs import Parallel, Training
from tests.reference import refusing_jobs
from tests.reference.engine_lab import ADAM, GPT, PLAIN
from tests.reference.lab import TIMEOUT, Lab
from tests.reference.observing import Session


@pytest.mark.parametrize(("training", "roles", "refuser"), [
    (ADAM, ("actor", "critic"), "critic"),
    (PLAIN, ("critic", "actor"), "actor"),
    pytest.param(PLAIN, ("actor", "critic"), "critic", marks=pytest.mark.slow),
    pytest.param(ADAM, ("critic", "actor"), "actor", marks=pytest.mark.slow),
])  # fmt: skip
def test_a_refusing_role_leaves_the_whole_run_as_it_was(
    lab: Lab, training: Training, roles: tuple[str, ...], refuser: str
) -> None:
    session = Session(replace(GPT, dropout=0.0), Parallel(dp=2), training)
    seen = lab.pool.run(
        refusing_jobs.refused, session, str(lab.new_root()), roles, refuser, world_size=2, timeout=TIMEOUT
    )
    for rank, one in enumerate(seen):
        kind, text = one["told"]
        assert kind == "CheckpointError"
        assert f"{refuser}: " in text
        assert "not with me" in text
        assert "put back" in text
        assert ("rank 1" in text) == (rank != refusing_jobs.VICTIM)
        assert one["differs"] == []
