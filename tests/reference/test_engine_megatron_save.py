"""What the Megatron engine describes is what Megatron writes, and Megatron's own loader goes on from it bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mcore_rlhf.demo.configs import Parallel, TinyGPT, Training
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.formats.registry import open_checkpoint
from mcore_rlhf.verify.checkpoint import Depth, verify
from tests.reference.engine_lab import ADAM, BUCKETS, CUBE, GPT, MOE, PLAIN, TIED, WIDE, EngineLab
from tests.reference.lab import Lab
from tests.reference.merge import bits_equal, differences
from tests.reference.observing import END, LOOK

Run = tuple[TinyGPT, Parallel, Training]

QUICK: dict[str, Run] = {
    "cube": (GPT, CUBE, ADAM),
    "experts": (MOE, Parallel(ep=2, dp=2), ADAM),
    "plain_tied": (TIED, Parallel(pp=2), PLAIN),
}
SLOW: dict[str, Run] = {
    "virtual_stages_buckets": (GPT, Parallel(pp=2, vpp=2, dp=2), BUCKETS),
    "plain": (GPT, Parallel(tp=2, dp=2), PLAIN),
    "fp32": (replace(GPT, dtype="fp32"), Parallel(tp=2, dp=2), ADAM),
    "fp32_plain": (replace(GPT, dtype="fp32"), Parallel(tp=2), PLAIN),
    "fp16": (replace(GPT, dtype="fp16"), Parallel(dp=2), ADAM),
    "fp16_plain": (replace(GPT, dtype="fp16"), Parallel(dp=2), PLAIN),
    "tied_buckets": (TIED, Parallel(pp=2, dp=2), BUCKETS),
    "odd_sizes_dp3": (replace(GPT, ffn_hidden_size=90, num_layers=3), Parallel(dp=3), replace(BUCKETS, global_batch_size=12)),
    "busbw": (GPT, Parallel(dp=2), replace(BUCKETS, ddp_bucket_size=20000, ddp_pad_buckets_for_high_nccl_busbw=True)),
    "experts_deep": (replace(MOE, moe_shared_expert_intermediate_size=32, moe_router_enable_expert_bias=True,
                             moe_layer_freq=(0, 1, 0, 1)), Parallel(pp=2, ep=2, dp=2), ADAM),
    "experts_packed": (replace(MOE, moe_grouped_gemm=True), Parallel(ep=2, dp=4), BUCKETS),
    "experts_thin": (MOE, Parallel(tp=2, ep=2, etp=1, dp=2, sequence_parallel=True), ADAM),
    "experts_tp2": (MOE, Parallel(tp=2, ep=2, dp=4, sequence_parallel=True), WIDE),
    "experts_plain": (MOE, Parallel(ep=2, dp=2), PLAIN),
    "context_parallel": (GPT, Parallel(cp=2, tp=2), ADAM),
    "next_tokens": (replace(TIED, mtp_num_layers=1), Parallel(pp=2), ADAM),
    "learned_positions": (replace(GPT, gated=False, normalization="LayerNorm", add_bias_linear=True, num_query_groups=None,
                                  position_embedding_type="learned_absolute"), Parallel(tp=2), ADAM),
    "no_optimizer": (GPT, Parallel(tp=2, pp=2), Training(optimizer="none")),
}  # fmt: skip
CASES = [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]


@pytest.fixture(scope="module")
def engine_lab(lab: Lab) -> EngineLab:
    return EngineLab(lab)


@pytest.mark.parametrize("name", CASES)
def test_the_files_are_megatrons(name: str, engine_lab: EngineLab) -> None:
    saved = engine_lab.save(*(QUICK | SLOW)[name])
    assert engine_lab.file_differences(saved) == []
    assert (saved.ours / "latest_checkpointed_iteration.txt").read_text() == str(LOOK)


@pytest.mark.parametrize("name", CASES)
def test_megatron_goes_on_from_them(name: str, engine_lab: EngineLab) -> None:
    run = (QUICK | SLOW)[name]
    saved = engine_lab.save(*run)
    resumed = engine_lab.lab.resume(saved.ours, *run)
    assert differences(saved.run.models[LOOK], resumed.models[LOOK]) == []
    assert resumed.losses == {step: saved.run.losses[step] for step in (3, 4)}
    assert differences(saved.run.models[END], resumed.models[END]) == []
    assert (resumed.groups, resumed.scheduler, resumed.scaler) == (
        saved.run.groups,
        saved.run.scheduler,
        saved.run.scaler,
    )


@pytest.mark.parametrize("name", CASES)
def test_the_offline_reader_finds_them_sound(name: str, engine_lab: EngineLab) -> None:
    saved = engine_lab.save(*(QUICK | SLOW)[name])
    source = open_checkpoint(saved.ours, ReadOptions())
    assert source.state.iteration == LOOK
    verdict = verify(saved.ours, ReadOptions(), Depth.DEEP)
    assert verdict.intact, verdict.problems.describe()


def test_a_swapped_shard_is_noticed(engine_lab: EngineLab) -> None:
    """Otherwise the tests above would prove nothing about who writes where."""
    run = (GPT, Parallel(dp=2), ADAM)
    saved = engine_lab.save(*run)
    damaged = engine_lab.with_swapped_shards(saved)
    assert engine_lab.file_differences(damaged) != []
    resumed = engine_lab.lab.resume(damaged.ours, *run)
    found = differences(saved.run.models[LOOK], resumed.models[LOOK])
    assert found
    assert all("master" in problem for problem in found)
    assert resumed.losses != {step: saved.run.losses[step] for step in (3, 4)}


@pytest.mark.slow
def test_a_trainer_that_never_stepped_can_be_saved(engine_lab: EngineLab) -> None:
    """Megatron cannot do that itself, but loads it: the moments are zeros, as they are before the first step."""
    root = engine_lab.lab.new_root()
    started = engine_lab.save_at_once(root, *QUICK["cube"])
    again = engine_lab.start_from(root, *QUICK["cube"])
    for first, second in zip(started, again, strict=True):
        assert second.losses == first.losses
        assert all(bits_equal(second.states[0][key], tensor) for key, tensor in first.states[0].items())
        moments = [tensor for (state, _), tensor in second.states[0].items() if state.startswith("exp_avg")]
        assert moments
        assert not any(tensor.any() for tensor in moments)


BIASED = replace(MOE, moe_router_enable_expert_bias=True)


@pytest.mark.parametrize(
    "run",
    [
        pytest.param((BIASED, Parallel(ep=2, dp=2), ADAM), id="router_bias"),
        pytest.param((GPT, Parallel(pp=2, vpp=2, dp=2), BUCKETS), id="buckets", marks=pytest.mark.slow),
        pytest.param((replace(GPT, dtype="fp16"), Parallel(tp=2, dp=2), ADAM), id="fp16", marks=pytest.mark.slow),
        pytest.param((replace(GPT, dtype="fp32"), Parallel(tp=2), PLAIN), id="plain", marks=pytest.mark.slow),
    ],
)
def test_what_is_copied_behind_training_is_what_was_there(run: Run, engine_lab: EngineLab) -> None:
    assert engine_lab.save_lazily(*run) == [[]] * run[1].world_size
