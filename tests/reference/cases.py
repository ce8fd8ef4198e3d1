"""Which models are trained on which layout, and which layouts their checkpoints are reshaped to."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from mcore_rlhf.demo.configs import Parallel, TinyGPT, Training
from tests.reference.lab import layout_options

SAME_ROWS = TinyGPT(vocab_size=190, dropout=0.0)
"""Its vocabulary is padded to 192 rows on 1, 2 and 4 tensor-parallel ranks, so losses on all layouts can be compared."""

TIED = replace(SAME_ROWS, untie_embeddings_and_output_weights=False)
MOE = replace(SAME_ROWS, num_experts=4)
ADAM = Training()
WIDE = Training(global_batch_size=8)
"""Enough samples for four data-parallel ranks, and for virtual stages on two."""

SMALL_BUCKETS = replace(WIDE, overlap_grad_reduce=True, ddp_bucket_size=5000)
PLAIN = Training(optimizer="plain")


@dataclass(frozen=True)
class Case:
    """A checkpoint, and a layout to reshape it to.

    Args:
        name: Of the test.
        model: What is trained.
        source: The layout that it is trained on.
        target: The layout that the checkpoint is reshaped to.
        training: How it is trained.
        resumed: How it is trained on, where that is another way.
        back: Whether it is also reshaped back, which has to give the same files' content, and so the same training.
        options: More of ``WriteOptions``.
    """

    name: str
    model: TinyGPT
    source: Parallel
    target: Parallel
    training: Training = ADAM
    resumed: Training | None = None
    back: bool = False
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def resumed_training(self) -> Training:
        return self.resumed or self.training

    @property
    def write_options(self) -> dict[str, Any]:
        return {**layout_options(self.target, self.model.num_layers), **dict(self.options)}


LOSS_TOLERANCE = {"bf16": 1e-4, "fp16": 1e-4, "fp32": 5e-6}
"""Relative difference of losses on another layout, where sums are taken in another order. One bf16 number is good to
4e-3, but the mean over a batch of 256 tokens is far better: seen were up to 1.4e-5 in bf16, 4e-7 in fp32. The loss of so
young a model depends little on its weights; that every bit of them is right is shown tensor by tensor."""

CUBE = Parallel(tp=2, pp=2, dp=2)

QUICK = [
    Case("cube_to_one", SAME_ROWS, CUBE, Parallel(dp=2)),
    Case("cube_to_tp4_and_back", SAME_ROWS, CUBE, Parallel(tp=4), back=True),
    Case("cube_to_uneven_counts", SAME_ROWS, CUBE, Parallel(pp=2, first_stage_layers=3, last_stage_layers=1)),
    Case("cube_to_layout_string", SAME_ROWS, CUBE, Parallel(tp=2, pp=2, pipeline_layout="Et|t|tt|L")),
    Case("vpp_to_tp2_and_back", SAME_ROWS, Parallel(pp=2, vpp=2), Parallel(tp=2), back=True),
    Case("uneven_to_one_and_back", replace(SAME_ROWS, num_layers=5),
         Parallel(pp=2, dp=2, first_stage_layers=2, last_stage_layers=3), Parallel(), back=True),
    Case("tied_to_one_and_back", TIED, Parallel(tp=2, pp=2), Parallel(dp=2), back=True),
    Case("experts_to_ep1_and_back", MOE, Parallel(ep=2, dp=2), Parallel(), back=True),
    Case("fp32_to_pp2", replace(SAME_ROWS, dtype="fp32"), Parallel(tp=2, dp=2), Parallel(pp=2), back=True),
    Case("plain_to_distributed_and_back", SAME_ROWS, Parallel(tp=2), Parallel(dp=2), PLAIN, ADAM, back=True,
         options=(("optimizer", "distributed"),)),
    Case("buckets_to_tp2_and_back", SAME_ROWS, Parallel(dp=2), Parallel(tp=2, dp=2), SMALL_BUCKETS, back=True),
    Case("more_ranks_than_query_groups", SAME_ROWS, Parallel(tp=4), Parallel(tp=2), back=True),
    Case("gpt2_to_pp2", replace(SAME_ROWS, gated=False, normalization="LayerNorm", add_bias_linear=True, num_query_groups=None,
         position_embedding_type="learned_absolute"), Parallel(tp=2), Parallel(pp=2)),
    Case("latent_attention_to_tp2", replace(SAME_ROWS, multi_latent_attention=True, num_query_groups=None), Parallel(dp=2), Parallel(tp=2)),
    Case("sinks_and_biased_experts_to_tp2", replace(MOE, gpt_oss=True, add_bias_linear=True), Parallel(ep=2, dp=2),
         Parallel(tp=2, ep=2, etp=1, sequence_parallel=True), back=True),
    Case("next_tokens_to_one", replace(SAME_ROWS, mtp_num_layers=1), Parallel(pp=2), Parallel(tp=2)),
]  # fmt: skip

TP2_MOE = Parallel(tp=2, ep=2, dp=2, sequence_parallel=True)
THIN_EXPERTS = Parallel(tp=2, ep=2, etp=1, dp=2, sequence_parallel=True)
LATENT = replace(SAME_ROWS, multi_latent_attention=True, num_query_groups=None, q_lora_rank=24, qk_layernorm=True)

SLOW = [
    Case("cube_to_pp4", SAME_ROWS, CUBE, Parallel(pp=4)),
    Case("one_to_vpp", SAME_ROWS, Parallel(dp=2), Parallel(pp=2, vpp=2)),
    Case("experts_to_ep4", MOE, Parallel(ep=2, dp=2), Parallel(ep=4, dp=4), WIDE),
    Case("distributed_to_plain", SAME_ROWS, Parallel(tp=2, dp=2), Parallel(pp=2), ADAM, PLAIN, options=(("optimizer", "plain"),)),
    Case("buckets_tied_pp", TIED, Parallel(pp=2, dp=2), Parallel(tp=2, pp=2), SMALL_BUCKETS),
    Case("experts_tp2_to_pp2", MOE, TP2_MOE, Parallel(pp=2, ep=2, dp=2), back=True),
    Case("experts_etp1_to_etp2", MOE, THIN_EXPERTS, TP2_MOE, back=True),
    Case("experts_cut_otherwise", MOE, Parallel(tp=2, etp=1, sequence_parallel=True), TP2_MOE, back=True),
    Case("experts_to_etp1", MOE, Parallel(ep=2, dp=2), THIN_EXPERTS, back=True),
    Case("experts_cube", MOE, Parallel(tp=2, pp=2, ep=2, dp=2, sequence_parallel=True), Parallel(ep=4, dp=4), WIDE),
    Case("experts_packed", replace(MOE, moe_grouped_gemm=True), Parallel(ep=2, dp=2), Parallel(ep=4, dp=4), WIDE, back=True),
    Case("experts_packed_tp2", replace(MOE, moe_grouped_gemm=True), TP2_MOE, Parallel(), back=True),
    Case("experts_plain", MOE, Parallel(ep=2, dp=2), Parallel(), PLAIN, back=True),
    Case("experts_buckets", MOE, Parallel(ep=2, dp=2), Parallel(ep=4, dp=4), SMALL_BUCKETS, back=True),
    Case("experts_shared_biased_mixed", replace(MOE, moe_shared_expert_intermediate_size=32, moe_router_enable_expert_bias=True,
         moe_layer_freq=(0, 1, 0, 1)), Parallel(ep=2, dp=2), Parallel(pp=2, ep=4, dp=4), WIDE, back=True),
    Case("experts_vpp_mixed", replace(MOE, moe_layer_freq=(0, 1, 1, 1)),
         Parallel(pp=2, vpp=2, ep=2, dp=2), Parallel(ep=2, dp=2), WIDE, back=True),
    Case("fp16", replace(SAME_ROWS, dtype="fp16"), Parallel(tp=2, dp=2), Parallel(pp=2), back=True),
    Case("fp16_plain_to_distributed", replace(SAME_ROWS, dtype="fp16"), Parallel(dp=2), Parallel(tp=2), PLAIN, ADAM, back=True,
         options=(("optimizer", "distributed"),)),
    Case("fp32_plain_to_distributed", replace(SAME_ROWS, dtype="fp32"), Parallel(tp=2), Parallel(dp=2), PLAIN, ADAM, back=True,
         options=(("optimizer", "distributed"),)),
    Case("qkv_bias_and_norms", replace(SAME_ROWS, add_qkv_bias=True, qk_layernorm=True), Parallel(tp=2), Parallel(pp=2), back=True),
    Case("one_query_group", replace(SAME_ROWS, num_query_groups=1), Parallel(tp=2), Parallel(tp=4), back=True),
    Case("latent_attention_with_ranks", LATENT, Parallel(tp=2, dp=2), Parallel(pp=2), back=True),
    Case("next_tokens_tied", replace(TIED, mtp_num_layers=1), CUBE, Parallel(pp=4), back=True),
    Case("context_parallel", SAME_ROWS, Parallel(cp=2, tp=2), Parallel(cp=2, pp=2), back=True),
    Case("tied_vpp", TIED, Parallel(tp=2, pp=2, vpp=2), Parallel(pp=4), back=True),
    Case("tied_buckets_cube", TIED, CUBE, Parallel(), SMALL_BUCKETS, back=True),
    Case("busbw_padding", SAME_ROWS, Parallel(dp=2), Parallel(tp=2, dp=2), replace(SMALL_BUCKETS, ddp_bucket_size=20000,
         ddp_pad_buckets_for_high_nccl_busbw=True), back=True),
    Case("odd_sizes_dp3", replace(SAME_ROWS, ffn_hidden_size=90, num_layers=3), Parallel(dp=3), Parallel(tp=2),
         replace(SMALL_BUCKETS, global_batch_size=12), back=True),
    Case("odd_sizes_pp3", replace(SAME_ROWS, hidden_size=68, ffn_hidden_size=90, kv_channels=18, num_layers=5),
         Parallel(pp=3, first_stage_layers=1, last_stage_layers=2), Parallel(tp=2), back=True),
    Case("empty_stages", SAME_ROWS, Parallel(pp=2, pipeline_layout="E|tt|tt|L"), Parallel(tp=2, pp=2)),
    Case("gradients_in_bf16", SAME_ROWS, Parallel(dp=2), Parallel(tp=2),
         replace(WIDE, accumulate_allreduce_grads_in_fp32=False), back=True),
    Case("no_optimizer", SAME_ROWS, Parallel(tp=2, pp=2), Parallel(tp=4), Training(optimizer="none"), back=True),
]  # fmt: skip
