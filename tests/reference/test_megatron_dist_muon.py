"""Real Megatron trains with Muon and writes torch_dist; what we make of it at another layout real Megatron loads and trains on with."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from mcore_rlhf.convert import ConvertOptions, convert
from mcore_rlhf.demo.configs import Parallel
from mcore_rlhf.demo.versions import MEGATRON
from mcore_rlhf.demo.workers import WorkerPool
from mcore_rlhf.families.options import ReadOptions, WriteOptions
from mcore_rlhf.verify.checkpoint import Depth, verify
from tests.helpers.dist_reader import read_tensors
from tests.reference.cases import LOSS_TOLERANCE, SAME_ROWS
from tests.reference.cases import PLAIN as NOT_DISTRIBUTED
from tests.reference.lab import TIMEOUT
from tests.reference.merge import bits_equal
from tests.reference.muon_dist_jobs import BY_LAYOUT, PING_PONG, PLAIN, MuonRun, train
from tests.reference.observing import END, Session

pytestmark = pytest.mark.skipif(
    MEGATRON < (0, 18) or find_spec("emerging_optimizers") is None, reason="Muon of this kind came with 0.18"
)
TP2, DP2 = Parallel(tp=2), Parallel(dp=2)
CASES = [
    pytest.param(PLAIN, "dp_reshardable", TP2, Parallel(pp=2), id="plain"),
    pytest.param(PING_PONG, "dp_reshardable", DP2, Parallel(), id="ping-pong"),
    pytest.param(BY_LAYOUT, "dp_reshardable", DP2, Parallel(), id="by-layout-in-buckets"),
]


def momenta(root: Path) -> dict[str, Any]:
    """Muon's momentum of every matrix, as torch's own DCP reads it."""
    name = "optimizer.state.momentum_buffer."
    return {key.partition(name)[2]: tensor for key, tensor in read_tensors(root).items() if name in key}


@pytest.mark.parametrize(("kind", "sharding", "parallel", "other"), CASES)
def test_it_goes_on_at_the_same_layout_and_at_another(
    kind: str, sharding: str, parallel: Parallel, other: Parallel, pool: WorkerPool, tmp_path: Path
) -> None:
    run = MuonRun(Session(SAME_ROWS, parallel, NOT_DISTRIBUTED), kind, sharding)

    def trained(at: Parallel, **places: Any) -> dict[int, float]:
        wanted = replace(run, session=replace(run.session, parallel=at), **places)
        return pool.run(train, wanted, world_size=at.world_size, timeout=TIMEOUT)[0]

    through = trained(parallel, save=str(tmp_path / "theirs"))
    assert verify(tmp_path / "theirs", ReadOptions(), Depth.DEEP).intact
    for name, at in (("same", parallel), ("other", other)):
        write = WriteOptions(tp=at.tp, pp=at.pp, dp=at.dp)
        job = convert(tmp_path / "theirs", tmp_path / name, ConvertOptions("megatron-dist", write=write, fsync=False))
        assert job.lossless or name == "other", job.account.lost
        resumed = trained(at, load=str(tmp_path / name))
        expected = {step: through[step] for step in resumed}
        assert END in resumed
        if name == "same":
            assert resumed == expected
        else:
            assert resumed == pytest.approx(expected, rel=LOSS_TOLERANCE["bf16"])
    convert(tmp_path / "theirs", tmp_path / "names", ConvertOptions("universal", fsync=False))
    again = WriteOptions(tp=parallel.tp, dp=parallel.dp, transformer_impl="local")
    convert(tmp_path / "names", tmp_path / "again", ConvertOptions("megatron-dist", write=again, fsync=False))
    before, after = momenta(tmp_path / "theirs"), momenta(tmp_path / "again")
    assert before.keys() == after.keys() != set()
    assert all(bits_equal(before[key], after[key]) for key in before)
