"""Loading through the Megatron engine: an unchanged layout goes on bit for bit, any other gets the same whole tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from mcore_rlhf.demo.configs import Parallel, TinyGPT, Training
from tests.reference import engine_jobs
from tests.reference.cases import LOSS_TOLERANCE
from tests.reference.engine_lab import ADAM, BUCKETS, CUBE, GPT, MOE, PLAIN, SAME_ROWS, TIED, WIDE, EngineLab
from tests.reference.lab import TIMEOUT, Lab
from tests.reference.merge import differences
from tests.reference.observing import END, LOOK, Session

EVEN = replace(SAME_ROWS, dropout=0.0)
Run = tuple[TinyGPT, Parallel, Training]
slow = pytest.mark.slow

UNCHANGED: dict[str, Run] = {
    "cube": (GPT, CUBE, ADAM),
    "experts": (MOE, Parallel(ep=2, dp=2), ADAM),
    "plain_tied": (TIED, Parallel(pp=2), PLAIN),
}
UNCHANGED_SLOW: dict[str, Run] = {
    "virtual_stages_buckets": (GPT, Parallel(pp=2, vpp=2, dp=2), BUCKETS),
    "plain": (GPT, Parallel(tp=2, dp=2), PLAIN),
    "fp32": (replace(GPT, dtype="fp32"), Parallel(tp=2, dp=2), ADAM),
    "fp32_plain": (replace(GPT, dtype="fp32"), Parallel(tp=2), PLAIN),
    "fp16": (replace(GPT, dtype="fp16"), Parallel(dp=2), ADAM),
    "fp16_plain": (replace(GPT, dtype="fp16"), Parallel(dp=2), PLAIN),
    "tied_buckets": (TIED, Parallel(pp=2, dp=2), BUCKETS),
    "experts_deep": (replace(MOE, moe_shared_expert_intermediate_size=32, moe_router_enable_expert_bias=True,
                             moe_layer_freq=(0, 1, 0, 1)), Parallel(pp=2, ep=2, dp=2), ADAM),
    "experts_packed": (replace(MOE, moe_grouped_gemm=True), Parallel(ep=2, dp=4), BUCKETS),
    "experts_thin": (MOE, Parallel(tp=2, ep=2, etp=1, dp=2, sequence_parallel=True), ADAM),
    "experts_tp2": (MOE, Parallel(tp=2, ep=2, dp=4, sequence_parallel=True), WIDE),
    "experts_plain": (MOE, Parallel(ep=2, dp=2), PLAIN),
    "context_parallel": (GPT, Parallel(cp=2, tp=2), ADAM),
    "next_tokens": (replace(TIED, mtp_num_layers=1), Parallel(pp=2), ADAM),
    "decoupled_rate": (GPT, Parallel(tp=2, dp=2), Training(decoupled_lr=5e-4)),
    "decoupled_rate_plain": (GPT, Parallel(tp=2, dp=2), Training(optimizer="plain", decoupled_lr=5e-4)),
    "no_optimizer": (GPT, Parallel(tp=2, pp=2), Training(optimizer="none")),
}  # fmt: skip


@pytest.fixture(scope="module")
def engine_lab(lab: Lab) -> EngineLab:
    return EngineLab(lab)


@pytest.mark.parametrize("name", [*UNCHANGED, *(pytest.param(name, marks=slow) for name in UNCHANGED_SLOW)])
def test_an_unchanged_layout_goes_on_bit_for_bit(name: str, engine_lab: EngineLab) -> None:
    """Into a trainer that has gone two steps of its own, so that nothing may be left of it."""
    run = (UNCHANGED | UNCHANGED_SLOW)[name]
    saved = engine_lab.save(*run)
    resumed, ranks = engine_lab.load(saved.ours, *run, steps_before=2)
    assert differences(saved.run.models[LOOK], resumed.models[LOOK]) == []
    assert resumed.losses == {step: saved.run.losses[step] for step in (3, 4)}
    assert differences(saved.run.models[END], resumed.models[END]) == []
    assert (resumed.groups, resumed.scheduler, resumed.scaler) == (
        saved.run.groups,
        saved.run.scheduler,
        saved.run.scaler,
    )
    assert all(("kept", "parameters: this rank's own, bit for bit") in rank.report for rank in ranks)
    assert all(len(rank.files) <= 3 for rank in ranks)
    assert all(rank.read == rank.needed > 0 for rank in ranks)


@pytest.mark.parametrize("training", [ADAM, PLAIN], ids=["distributed", "plain"])
def test_torchs_adam_counts_the_steps_of_each_parameter_apart(training: Training, engine_lab: EngineLab) -> None:
    """As on a GPU that has neither Transformer Engine nor apex, where a resume on one counted sixteen steps for each."""
    session, root = Session(EVEN, Parallel(dp=2), training), engine_lab.lab.new_root()
    ranks = engine_lab.lab.pool.run(
        engine_jobs.resume_with_torchs_adam, session, str(root), world_size=2, timeout=TIMEOUT
    )
    for whole, rest, steps in ranks:
        assert rest == {step: whole[step] for step in (3, 4)}
        assert steps == {4.0}


@dataclass(frozen=True)
class Case:
    name: str
    model: TinyGPT
    source: Parallel
    target: Parallel
    training: Training = ADAM
    resumed: Training | None = None


QUICK = [
    Case("cube_to_one", EVEN, CUBE, Parallel(dp=2)),
    Case("cube_to_pp4_plain", EVEN, CUBE, Parallel(pp=4), ADAM, PLAIN),
    Case("experts_to_ep1", replace(MOE, dropout=0.0), Parallel(ep=2, dp=2), Parallel()),
    Case("padding", replace(GPT, dropout=0.0), Parallel(dp=2), Parallel(tp=2, dp=2)),
]
SLOW = [
    Case("cube_to_tp4", EVEN, CUBE, Parallel(tp=4)),
    Case("data_parallel", EVEN, CUBE, Parallel(tp=2, pp=2)),
    Case("data_parallel_buckets", replace(EVEN, ffn_hidden_size=90, num_layers=3), Parallel(dp=3), Parallel(dp=2),
         replace(BUCKETS, global_batch_size=12), replace(BUCKETS, global_batch_size=12, ddp_bucket_size=9000)),
    Case("to_virtual_stages", EVEN, CUBE, Parallel(pp=2, vpp=2)),
    Case("uneven", EVEN, CUBE, Parallel(pp=2, first_stage_layers=3, last_stage_layers=1)),
    Case("layout_string", EVEN, CUBE, Parallel(tp=2, pp=2, pipeline_layout="Et|t|tt|L")),
    Case("tied", replace(TIED, dropout=0.0), Parallel(tp=2, pp=2), Parallel(dp=2)),
    Case("tied_apart", replace(TIED, dropout=0.0), Parallel(dp=2), Parallel(tp=2, pp=2), BUCKETS),
    Case("experts_to_ep4", replace(MOE, dropout=0.0), Parallel(ep=2, dp=2), Parallel(ep=4, dp=4), WIDE),
    Case("experts_from_ep1", replace(MOE, dropout=0.0), Parallel(), Parallel(ep=2, dp=2)),
    Case("experts_packed", replace(MOE, dropout=0.0, moe_grouped_gemm=True), Parallel(ep=2, dp=2), Parallel(ep=4, dp=4), WIDE),
    Case("experts_thin", replace(MOE, dropout=0.0), Parallel(ep=2, dp=2),
         Parallel(tp=2, ep=2, etp=1, dp=2, sequence_parallel=True)),
    Case("plain_to_distributed", EVEN, Parallel(tp=2), Parallel(dp=2), PLAIN, ADAM),
    Case("plain_to_distributed_in_place", EVEN, Parallel(tp=2, dp=2), Parallel(tp=2, dp=2), PLAIN, ADAM),
    Case("distributed_to_plain_in_place", EVEN, Parallel(tp=2, dp=2), Parallel(tp=2, dp=2), ADAM, PLAIN),
    Case("fp32", replace(EVEN, dtype="fp32"), Parallel(tp=2, dp=2), Parallel(pp=2)),
    Case("fp32_plain_to_distributed", replace(EVEN, dtype="fp32"), Parallel(tp=2), Parallel(dp=2), PLAIN, ADAM),
    Case("fp16", replace(EVEN, dtype="fp16"), Parallel(tp=2, dp=2), Parallel(pp=2)),
    Case("next_tokens", replace(TIED, dropout=0.0, mtp_num_layers=1), CUBE, Parallel(pp=4)),
    Case("next_tokens_to_one", replace(EVEN, mtp_num_layers=1), CUBE, Parallel()),
    Case("next_tokens_from_one", replace(EVEN, mtp_num_layers=1), Parallel(), Parallel(tp=2, pp=2)),
    Case("no_optimizer", EVEN, Parallel(tp=2, pp=2), Parallel(tp=4), Training(optimizer="none")),
    Case("padding_cut", replace(GPT, dropout=0.0), Parallel(tp=2), Parallel(dp=2)),
]  # fmt: skip


@pytest.mark.parametrize("training", [ADAM, PLAIN], ids=["distributed", "plain"])
def test_a_state_of_any_name_goes_where_its_parameter_goes(training: Training, engine_lab: EngineLab) -> None:
    """One that is elementwise: at the same layout out of this rank's own files, at another through a plan."""
    root, tp2 = engine_lab.lab.new_root(), Parallel(tp=2, dp=2 if training is ADAM else 1)
    assert all(engine_lab.save_a_third_moment(root, SAME_ROWS, tp2, training))
    for parallel in (tp2, Parallel(pp=2)):
        ranks = engine_lab.load_a_third_moment(root, SAME_ROWS, parallel, training)
        assert ranks == [[]] * parallel.world_size


@pytest.mark.parametrize(
    "case", [*(pytest.param(c, id=c.name) for c in QUICK), *(pytest.param(c, id=c.name, marks=slow) for c in SLOW)]
)
def test_another_layout_gets_the_same_whole_tensors(case: Case, engine_lab: EngineLab) -> None:
    saved = engine_lab.save(case.model, case.source, case.training)
    resumed, ranks = engine_lab.load(
        saved.ours, case.model, case.target, case.resumed or case.training, steps_before=1, restore_rng=False
    )
    assert differences(saved.run.models[LOOK], resumed.models[LOOK]) == []
    if "padding" not in case.name:
        assert all(rank.read == rank.needed > 0 for rank in ranks)
    assert resumed.groups == saved.run.groups
    assert resumed.scheduler == saved.run.scheduler
    assert resumed.scaler[:1] == saved.run.scaler[:1]
    if case.model.vocab_size == EVEN.vocab_size:  # new padding rows take part in the softmax
        expected = {step: saved.run.losses[step] for step in (3, 4)}
        assert resumed.losses == pytest.approx(expected, rel=LOSS_TOLERANCE[case.model.dtype])
    assert all(rank.args["consumed_train_samples"] == 2 * case.training.global_batch_size for rank in ranks)
