"""A run on megatron-core 0.16.1, taken over by the newest through our files, and back: every bit of its state, in both formats."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mcore_rlhf.convert import ConvertOptions, convert
from mcore_rlhf.demo.configs import Parallel
from mcore_rlhf.demo.workers import WorkerPool
from mcore_rlhf.families.options import WriteOptions
from tests.reference import dist_jobs
from tests.reference.cases import ADAM, MOE, TIED
from tests.reference.dist_jobs import FULLY_RESHARDABLE, DistSession, observe_dist
from tests.reference.lab import TIMEOUT, Lab, Trained, together
from tests.reference.merge import differences
from tests.reference.observing import LOOK, Session
from tests.reference.releases import OLDEST

CASES = {
    "tied": (TIED, Parallel(tp=2, pp=2), Parallel(dp=2)),
    "experts": (MOE, Parallel(ep=2, dp=2), Parallel(pp=2)),
}


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    folder = Path(sys.prefix) / f"megatron-{OLDEST}"
    if not folder.is_dir():
        pytest.skip(f"megatron-core {OLDEST} is not in {folder}: scripts/add_megatron.sh {OLDEST}")
    with WorkerPool(4, first=(str(folder),)) as workers:
        yield Lab(workers, tmp_path_factory.mktemp("old"))


@pytest.mark.parametrize("direction", ["forth", "back"])
@pytest.mark.parametrize("name", CASES)
def test_a_run_is_taken_over(name: str, direction: str, old: Lab, lab: Lab) -> None:
    """At the layout of the source it goes on to the last bit; on another one all whole tensors are the same."""
    source, target = (old, lab) if direction == "forth" else (lab, old)
    assert _release(source) != _release(target)
    model, parallel, other = CASES[name]
    run = source.train(model, parallel, ADAM)
    same, _ = source.reshape(run.root)
    _assert_taken_over(run, target.resume(same, model, parallel, ADAM), exact=True)
    reshaped, _ = source.reshape(run.root, tp=other.tp, pp=other.pp, ep=other.ep, dp=other.dp)
    _assert_taken_over(run, target.resume(reshaped, model, other, ADAM), exact=False)


@pytest.mark.parametrize("direction", ["forth", "back"])
def test_a_torch_dist_folder_is_taken_over(direction: str, old: Lab, lab: Lab, tmp_path: Path) -> None:
    """The newest keeps what all ranks share where 0.16.1 does not look; what we make of it is for both."""
    source, target = (old, lab) if direction == "forth" else (lab, old)
    model, parallel, other = CASES["tied"]
    session = Session(model, parallel, ADAM)
    run = _observe(source, dist_jobs.written(model, parallel, ADAM, tmp_path, FULLY_RESHARDABLE))
    options = WriteOptions(tp=other.tp, pp=other.pp, dp=other.dp)
    convert(tmp_path / "dist", tmp_path / "ours", ConvertOptions(to="megatron-dist", write=options, fsync=False))
    found = _observe(target, dist_jobs.resumed(replace(session, parallel=other), tmp_path / "ours"))
    _assert_taken_over(run, found, exact=False)


def _observe(lab: Lab, wanted: DistSession) -> Trained:
    world = wanted.session.parallel.world_size
    ranks = lab.pool.run(observe_dist, wanted, world_size=world, timeout=TIMEOUT)
    return together(wanted.session, Path(wanted.save or wanted.load or ""), ranks)


def _assert_taken_over(run: Trained, found: Trained, exact: bool) -> None:
    assert differences(run.models[LOOK], found.models[LOOK]) == []
    expected = {step: run.losses[step] for step in (3, 4)}
    assert found.losses == (expected if exact else pytest.approx(expected, rel=1e-4))


def _release(lab: Lab) -> str:
    answer: list[Any] = lab.pool.run("importlib.metadata:version", "megatron-core", world_size=1, timeout=TIMEOUT)
    return str(answer[0])
