"""LoRA as Megatron-Bridge adds it, by real megatron-core: a distributed optimizer of the adapters alone, in flat buckets (its default)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from mcore_rlhf.cli.app import app
from mcore_rlhf.convert import ConvertOptions, convert
from mcore_rlhf.core.catalog import MASTER, PARAM
from mcore_rlhf.core.facts import Fate
from mcore_rlhf.demo.configs import Parallel, Training
from mcore_rlhf.demo.workers import WorkerPool
from mcore_rlhf.families.options import ReadOptions, WriteOptions
from mcore_rlhf.formats.registry import open_checkpoint
from tests.helpers.catalog_values import tensor_of
from tests.reference.bridge_jobs import ALPHA, RANK, observe_adapters
from tests.reference.cases import LOSS_TOLERANCE
from tests.reference.dist_jobs import DP_RESHARDABLE, DistSession, resumed
from tests.reference.fsdp_dtensor import MODEL as SMALL
from tests.reference.lab import TIMEOUT, layout_options
from tests.reference.observing import Session

pytestmark = pytest.mark.reference
MODEL = replace(SMALL, dropout=0.0)
HERE = Parallel(tp=2, dp=2)
TRAINING = Training(global_batch_size=8)
QKV = "decoder.layers.0.self_attention.linear_qkv.adapter.linear_"


@pytest.fixture(scope="module")
def written(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, float]]:
    """A run of four iterations, saved at the second, and its losses."""
    root = tmp_path_factory.mktemp("bridge") / "run"
    wanted = DistSession(Session(MODEL, HERE, TRAINING), DP_RESHARDABLE, save=str(root), until=4)
    seen = pool.run(observe_adapters, wanted, world_size=HERE.world_size, timeout=TIMEOUT)
    (root.parent / "adapter_config.json").write_text(json.dumps({"lora_alpha": ALPHA}))
    return root, seen[0].losses


def test_adapters_alone_are_trained(written: tuple[Path, dict[int, float]]) -> None:
    source = open_checkpoint(written[0], ReadOptions())
    for spec in source.model.params:
        assert spec.trainable == (".adapter." in spec.name)
        if spec.trainable:
            parameter, master = (tensor_of(source, spec.name, state) for state in (PARAM, MASTER))
            assert torch.equal(master.to(torch.bfloat16), parameter)


@pytest.mark.parametrize("parallel", [HERE, Parallel(tp=2, pp=2)], ids=["same", "stages"])
def test_megatron_goes_on_with_them_at_another_layout(
    written: tuple[Path, dict[int, float]], parallel: Parallel, pool: WorkerPool, tmp_path: Path
) -> None:
    root, losses = written
    write = WriteOptions(
        **layout_options(parallel, MODEL.num_layers), optimizer_sharding=DP_RESHARDABLE, vocab_size=132
    )
    job = convert(root, tmp_path / "out", ConvertOptions("megatron-dist", write=write, fsync=False))
    assert job.lossless, job.account.lost
    wanted = replace(resumed(Session(MODEL, parallel, TRAINING), tmp_path / "out"), sharding=DP_RESHARDABLE, until=4)
    seen = pool.run(observe_adapters, wanted, world_size=parallel.world_size, timeout=TIMEOUT)[0].losses
    assert seen == pytest.approx({step: losses[step] for step in (3, 4)}, rel=LOSS_TOLERANCE["bf16"])


def test_adapters_of_experts_lie_in_the_experts_own_buffers(pool: WorkerPool, tmp_path: Path) -> None:
    """Bridge makes them experts' (``is_expert``), so that each expert-parallel rank trains its own."""
    model, both = replace(MODEL, num_experts=4), Parallel(ep=2, dp=2)
    wanted = DistSession(Session(model, both, TRAINING), DP_RESHARDABLE, save=str(tmp_path / "run"), until=4)
    losses = pool.run(observe_adapters, wanted, world_size=both.world_size, timeout=TIMEOUT)[0].losses
    for number, other in enumerate((Parallel(dp=2), Parallel(ep=2, dp=4))):
        write = WriteOptions(
            **layout_options(other, model.num_layers), optimizer_sharding=DP_RESHARDABLE, vocab_size=132
        )
        out = tmp_path / f"out{number}"
        assert convert(tmp_path / "run", out, ConvertOptions("megatron-dist", write=write, fsync=False)).lossless
        again = replace(resumed(Session(model, other, TRAINING), out), sharding=DP_RESHARDABLE, until=4)
        seen = pool.run(observe_adapters, again, world_size=other.world_size, timeout=TIMEOUT)[0].losses
        assert seen == pytest.approx({step: losses[step] for step in (3, 4)}, rel=LOSS_TOLERANCE["bf16"])


def test_they_become_pefts_and_all_is_accounted_for(written: tuple[Path, dict[int, float]], tmp_path: Path) -> None:
    root, out = written[0], tmp_path / "out"
    write = WriteOptions(vocab_size=132, reference_config=str(root.parent / "adapter_config.json"))
    job = convert(root, out, ConvertOptions("peft", write=write, fsync=False))
    assert job.account.unaccounted == ()
    assert any(
        "the adapters' optimizer" in said.text for said in job.account.entries.values() if said.fate is Fate.LOST
    )
    found, source = load_file(out / "adapter_model.safetensors"), open_checkpoint(root, ReadOptions())
    shared = found["base_model.model.model.layers.0.self_attn.k_proj.lora_A.weight"]
    assert torch.equal(shared, tensor_of(source, f"{QKV}in.weight", PARAM))
    assert shared.shape[0] == RANK
    for options in (["--to", "peft"], ["--to", "hf", "--merge-adapter"]):
        more = ["--vocab-size", "132", "--reference-config", write.reference_config, "--verify", "--no-fsync", "--json"]
        done = CliRunner().invoke(app, ["convert", str(root), str(tmp_path / options[1]), *options, *map(str, more)])
        assert done.exit_code == 0, done.output
        assert "nothing accounts for it" not in done.output
