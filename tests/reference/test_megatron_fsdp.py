"""What Megatron-FSDP wrote, converted, goes on in a Megatron without FSDP: same parameters, optimizer and next losses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mcore_rlhf.convert import ConvertOptions, convert
from mcore_rlhf.demo.configs import Parallel, TinyGPT
from mcore_rlhf.demo.workers import WorkerPool
from mcore_rlhf.families.options import WriteOptions
from tests.reference.cases import LOSS_TOLERANCE, WIDE
from tests.reference.dist_jobs import observe_dist, resumed
from tests.reference.fsdp_dtensor import MODEL, WITH_EXPERTS
from tests.reference.lab import TIMEOUT, layout_options
from tests.reference.observing import Session

GOLDENS = Path(__file__).parents[1] / "goldens" / "megatron_fsdp"
CASES = [
    pytest.param("dp2_bf16", MODEL, Parallel(dp=2), id="dense"),
    pytest.param("ep2_bf16", WITH_EXPERTS, Parallel(ep=2, dp=2), id="experts"),
    pytest.param("tp2dp2_bf16", MODEL, Parallel(tp=2, dp=2), id="tp2"),
]


@pytest.mark.parametrize(("name", "model", "parallel"), CASES)
def test_it_goes_on_without_fsdp(
    name: str, model: TinyGPT, parallel: Parallel, pool: WorkerPool, tmp_path: Path
) -> None:
    write = WriteOptions(**layout_options(parallel, model.num_layers))
    job = convert(GOLDENS / name, tmp_path / "out", ConvertOptions("megatron-dist", write=write, fsync=False))
    assert job.lossless, job.account.lost
    wanted = replace(resumed(Session(model, parallel, WIDE), tmp_path / "out"), until=4)
    seen = pool.run(observe_dist, wanted, world_size=parallel.world_size, timeout=TIMEOUT)
    losses = seen[0].losses
    expected = json.loads((GOLDENS / f"{name}.json").read_text())["losses"]
    assert losses == pytest.approx({step: expected[str(step)] for step in (3, 4)}, rel=LOSS_TOLERANCE["bf16"])


def test_it_goes_on_without_torch_fsdp2(pool: WorkerPool, tmp_path: Path) -> None:
    """``torch_dcp``, of which parameters, masters and moments are found by their numbers."""
    golden, parallel = GOLDENS.parent / "megatron_torch_dcp" / "dp2_bf16", Parallel(dp=2)
    write = WriteOptions(**layout_options(parallel, MODEL.num_layers), optimizer="distributed")
    job = convert(golden, tmp_path / "out", ConvertOptions("megatron-dist", write=write, fsync=False))
    assert job.lossless, job.account.lost
    wanted = replace(resumed(Session(MODEL, parallel, WIDE), tmp_path / "out"), until=4)
    losses = pool.run(observe_dist, wanted, world_size=parallel.world_size, timeout=TIMEOUT)[0].losses
    expected = json.loads(golden.with_suffix(".json").read_text())["losses"]
    assert losses == pytest.approx({step: expected[str(step)] for step in (3, 4)}, rel=LOSS_TOLERANCE["bf16"])
