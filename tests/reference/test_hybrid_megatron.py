"""Real megatron-core 0.19 loads hybrid models that we reshaped, trains on, and holds what it makes of its own ``torch_dist`` itself."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from mcore_rlhf.convert import ConvertOptions, convert
from mcore_rlhf.demo.workers import WorkerPool
from mcore_rlhf.families.options import WriteOptions

PROJECT = Path(__file__).parents[2]
GOLDENS = PROJECT / "tests" / "goldens" / "megatron_0_19"
_CORE = importlib.util.find_spec("megatron.core") if importlib.util.find_spec("megatron") else None
_NEW = _CORE is not None and (Path(str(_CORE.origin)).parent / "ssm" / "gated_delta_net" / "gdn.py").is_file()
pytestmark = [pytest.mark.reference, pytest.mark.skipif(not _NEW, reason="needs megatron-core 0.19")]


def run(ranks: WorkerPool, **job: Any) -> list[dict[str, Any]]:
    """What every process of a job saw."""
    return ranks.run("tests.reference.hybrid_worker:run", job, world_size=job["tp"] * job["pp"], timeout=250)


@pytest.mark.parametrize("kind", ["attn_mlp", "mamba", "gdn"])
def test_megatron_finds_what_it_would_have_made_itself(kernels_pool: WorkerPool, tmp_path: Path, kind: str) -> None:
    """At TP 1, and at TP 1 with two stages: every parameter and state, bit for bit; and its losses go on."""
    golden = GOLDENS / f"hybrid_{kind}_tp2_bf16_do"
    for name, to, write in (
        ("tp1", "megatron", {"tp": 1, "dp": 1}),
        ("pp2", "megatron", {"tp": 1, "pp": 2}),
        ("dist", "megatron-dist", {}),
    ):
        convert(
            golden, tmp_path / name, ConvertOptions(to, write=WriteOptions(**write, padded_vocab_size=160), fsync=False)
        )
    step = "iter_0000006"
    megatrons, ours = str(tmp_path / "megatron" / step), str(tmp_path / "dist" / step)
    (first, _) = run(kernels_pool, tp=2, pp=1, legacy=str(golden / step), save=megatrons)
    (whole,) = run(kernels_pool, tp=1, pp=1, legacy=str(tmp_path / "tp1" / step), dist=[megatrons, ours])
    stages = run(kernels_pool, tp=1, pp=2, legacy=str(tmp_path / "pp2" / step), dist=[megatrons, ours])
    for seen in (whole, *stages):
        assert seen["compared"] > 20
        assert (seen[megatrons], seen[ours]) == ([], [])
    assert whole["losses"] == pytest.approx(first["losses"], rel=2e-3)  # bf16, summed in another order
    assert whole["losses"][-1] < whole["losses"][0] - 1


def test_a_gptmodel_becomes_what_megatrons_own_migration_makes_of_it(kernels_pool: WorkerPool, tmp_path: Path) -> None:
    """Megatron maps layers as it loads, from torch_dist; we write a legacy file of the same run: all states are equal, bit for bit."""
    write = WriteOptions(tp=1, pp=2, hybrid_layer_pattern="*-*|-*-*-", padded_vocab_size=160)
    convert(GOLDENS / "tp2pp2_bf16_do", tmp_path / "hybrid", ConvertOptions("megatron", write=write, fsync=False))
    legacy, gpt = (
        f"{root}/iter_0000006" for root in (tmp_path / "hybrid", GOLDENS / "dist_tp2pp2_bf16_do_fullyreshardable")
    )
    for seen in run(kernels_pool, tp=1, pp=2, legacy=legacy, gpt=[gpt]):
        assert seen["compared"] >= 40
        assert seen[gpt] == []


@pytest.mark.slow
def test_a_mamba_of_0_18_becomes_one_of_0_19_and_back(kernels_pool: WorkerPool, tmp_path: Path) -> None:
    """0.18 has the convolution as a module, whose name and place among the parameters are others.

    0.18.2 loads what we make of 0.19.2's file and writes its own two formats; of these we make another layout, and ``torch_dist``:
    each release finds in all of them what it would have found in its own, bit for bit, and 0.19.2 what it had at first.
    """
    before = Path(sys.prefix) / "megatron-0.18.2"
    if not before.is_dir():
        pytest.skip("megatron-core 0.18.2 is not there: scripts/add_megatron.sh 0.18.2")
    step, golden, padded = "iter_0000006", GOLDENS / "hybrid_mamba_tp2_bf16_do", {"padded_vocab_size": 160}
    ours, old, again = (str(tmp_path / name / step) for name in ("dist", "old_dist", "again"))

    def make(source: Path, name: str, to: str, **write: Any) -> None:
        options = ConvertOptions(to, write=WriteOptions(**write, **padded), fsync=False)
        convert(source, tmp_path / name, options)

    make(golden, "dist", "megatron-dist")
    job = {"tp": 2, "pp": 1, "legacy": str(golden / step)}
    with WorkerPool(2, preload="tests.reference.kernels_preload", first=(str(before),)) as ranks:
        first, _ = run(ranks, **job, begin=ours, write=str(tmp_path / "old"), save=old)
        make(tmp_path / "old", "tp1", "megatron", tp=1, dp=1)
        make(tmp_path / "old", "again", "megatron-dist", tp=1)
        (whole,) = run(ranks, tp=1, pp=1, legacy=str(tmp_path / "tp1" / step), dist=[old, again])
    assert whole["compared"] > 20
    assert (whole[old], whole[again]) == ([], [])
    assert whole["losses"] == pytest.approx(first["losses"], rel=2e-3)  # bf16, summed in another order
    for seen in run(kernels_pool, **job, dist=[old, again]):
        assert seen["compared"] > 20
        assert (seen[old], seen[again]) == ([], [])
