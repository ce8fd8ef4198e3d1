"""Row 12: planning the reshape of a mixture of experts with a million chunks, without its files. Run as a module, it plans.

A layer is one of Qwen3-235B-A22B (128 experts). Of its 94 layers there are 98,900 tensors, as Megatron fuses gate and up, and 600,000
chunks at this layout; here are as many layers as make a million of them, and more tensors than the 144,384 of the unfused model.
The source's catalogue is made of the places that the writer's own layout gives; catalogue, layouts and planner are the real ones.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable, Iterator

from mcore_rlhf.core.catalog import BFLOAT16, EXP_AVG, EXP_AVG_SQ, MASTER
from mcore_rlhf.core.chunks import Chunks
from mcore_rlhf.core.plan import plan_file
from mcore_rlhf.families.megatron.arguments import Arguments
from mcore_rlhf.families.megatron.folders import file_ranks
from mcore_rlhf.families.megatron.layout import Blueprint
from mcore_rlhf.families.megatron.new_layout import NewLayout
from mcore_rlhf.families.megatron.ranks import RankLayout
from mcore_rlhf.formats.accounting import Tally
from mcore_rlhf.formats.megatron.parameters import HoldingRank, StoredTensors
from mcore_rlhf.layouts.parallel import ParallelConfig
from mcore_rlhf.layouts.pipeline import PipelineSplit, model_chunks
from mcore_rlhf.models.spec import COLUMN, GATED, REPLICATED, ROW, VOCABULARY, ModelSpec, ParamSpec, Partition
from mcore_rlhf.storage.stored import StoredTensor

from .measure import MIB, in_fresh_process, status
from .table import Row

LAYERS, EXPERTS, HIDDEN, EXPERT_FFN, HEADS, GROUPS, CHANNELS, VOCABULARY_ROWS = 156, 128, 4096, 1536, 64, 4, 128, 151936
SOURCE = ParallelConfig(tp=4, pp=2, ep=8, etp=4, dp=8)
TARGET = ParallelConfig(tp=2, pp=2, ep=16, etp=2, dp=16)
_MOMENTS = (EXP_AVG, EXP_AVG_SQ)


def row_12() -> Iterator[Row]:
    found, apart = in_fresh_process(__name__), in_fresh_process(__name__, "apart")
    size = (
        f"{found['tensors']:.0f} tensors, {found['chunks']:.0f} chunks → {found['wanted']:.0f} chunks "
        f"in {found['files']:.0f} files, {found['copies']:.0f} copies; catalogue included, {found['made']:.1f} s"
    )
    yield Row(12, f"plan an MoE of {LAYERS} layers, {SOURCE} → {TARGET}: wall", found["wall"], " s", 30, 10, size)
    cpu = f"{found['cpu'] / found['chunks'] * 1e6:.0f} µs a chunk"
    yield Row(12, "the same: cpu", found["cpu"], " s", 30, 10, cpu)
    yield Row(
        12,
        "the same: memory high-water",
        found["memory"],
        " MiB",
        300,
        None,
        f"imports {found['imports']:.0f} MiB included",
    )
    told = f"{apart['with']:.1f} s of CPU with it, {apart['without']:.1f} s without, file by file in one process"
    yield Row(12, "the account of it: CPU with it ÷ without", apart["with"] / apart["without"], "×", 1.10, None, told)


def model() -> ModelSpec:
    """The parameters in registration order, as the local spec names them."""
    params = [_spec("embedding.word_embeddings.weight", (VOCABULARY_ROWS, HIDDEN), VOCABULARY)]
    for layer in range(LAYERS):
        params += [_spec(f"decoder.layers.{layer}.{name}", shape, how) for name, shape, how in _layer()]
    params.append(_spec("decoder.final_layernorm.weight", (HIDDEN,), REPLICATED))
    params.append(_spec("output_layer.weight", (VOCABULARY_ROWS, HIDDEN), VOCABULARY))
    return ModelSpec(tuple(params), LAYERS, False, 0, EXPERTS, VOCABULARY_ROWS, VOCABULARY_ROWS)


def _spec(name: str, shape: tuple[int, ...], partition: Partition) -> ParamSpec:
    return ParamSpec(name, shape, BFLOAT16, partition)


def _layer() -> Iterator[tuple[str, tuple[int, ...], Partition]]:
    yield "input_layernorm.weight", (HIDDEN,), REPLICATED
    yield "self_attention.linear_proj.weight", (HIDDEN, HEADS * CHANNELS), ROW
    yield "self_attention.linear_qkv.weight", ((HEADS + 2 * GROUPS) * CHANNELS, HIDDEN), COLUMN
    yield "self_attention.q_layernorm.weight", (CHANNELS,), REPLICATED
    yield "self_attention.k_layernorm.weight", (CHANNELS,), REPLICATED
    yield "pre_mlp_layernorm.weight", (HIDDEN,), REPLICATED
    yield "mlp.router.weight", (EXPERTS, HIDDEN), REPLICATED
    for expert in range(EXPERTS):
        yield f"mlp.experts.local_experts.{expert}.linear_fc1.weight", (2 * EXPERT_FFN, HIDDEN), GATED
        yield f"mlp.experts.local_experts.{expert}.linear_fc2.weight", (HIDDEN, EXPERT_FFN), ROW


def blueprint(spec: ModelSpec, parallel: ParallelConfig, split: PipelineSplit | None = None) -> Blueprint:
    """A checkpoint of a model at some layout."""
    split = split or PipelineSplit()
    args = Arguments({"num_experts": spec.num_experts, "use_distributed_optimizer": True, "bf16": True})
    choices = NewLayout(parallel, split, spec.padded_vocab_size, None, "distributed", "derive")
    chunks = model_chunks(spec.num_layers, parallel.pp, parallel.vpp, split, 0)
    return Blueprint("actor", spec, args, choices, chunks, [param.name for param in spec.params], _MOMENTS, {})


def source_catalog(spec: ModelSpec, parallel: ParallelConfig) -> Chunks:
    """What opening such a checkpoint would give, without files."""
    return found_in(blueprint(spec, parallel)).table()


def found_in(whole: Blueprint) -> StoredTensors:
    """What reading the files of such a checkpoint would find, without files: it stands in for that."""
    parallel, holders = whole.choices.parallel, dict[str, list[HoldingRank]]()
    for at in file_ranks(parallel):
        rank = RankLayout(whole, at, "iter_0000001")
        states = _states(rank)
        for item in rank.items:
            name = item.item.name
            holders.setdefault(name, []).append(
                HoldingRank(at, rank.params[item.vpp_rank, item.key], states.get(name, {}))
            )
    return StoredTensors("actor", whole.model, (MASTER, *_MOMENTS), parallel, holders)


def _states(rank: RankLayout) -> dict[str, dict[str, StoredTensor]]:
    params = {item.item.name: rank.params[item.vpp_rank, item.key] for item in rank.items}
    found: dict[str, dict[str, StoredTensor]] = {}
    for (member, index), buffer_states in rank.buffer_states.items():
        buffer = rank.stage.buffers[member][index]
        for item, place in zip(buffer.items, buffer.pattern.flat.places, strict=True):
            param = params[item.name]
            found[item.name] = {
                state: StoredTensor(stored.record, place.file_start, param.shape, param.strides)
                for state, stored in buffer_states.items()
            }
    return found


def _apart() -> None:
    """What the account costs: each file is planned with it and without, in turns, since a machine is seldom quiet for long."""
    spec = model()
    catalog, whole, spent = source_catalog(spec, SOURCE), blueprint(spec, TARGET), {"with": 0.0, "without": 0.0}
    tally = Tally(catalog)
    for number, at in enumerate(file_ranks(TARGET)):
        rank = RankLayout(whole, at, "iter_0000001")
        for records in (rank.model, rank.distrib):
            holds = records.holds()
            plan_file(records.file, holds, catalog)  # lays the rows, of which the second to ask is the faster
            for how in ("with", "without") if number % 2 else ("without", "with"):
                began = time.process_time()
                plan = plan_file(records.file, holds, catalog)
                if how == "with":
                    tally.add(plan, holds, catalog)
                spent[how] += time.process_time() - began
    began = time.process_time()
    assert tally.complete
    assert not any(tally.unplanned().values())
    print(json.dumps({**spent, "with": spent["with"] + time.process_time() - began}))


def measured(source: Callable[[], Blueprint], target: Callable[[], Blueprint]) -> None:
    """Make a catalogue, plan every file of a target of it, and print what that took.

    Args:
        source: Describes the checkpoint whose catalogue it is.
        target: Describes the target.
    """
    imports, start, cpu = status("VmHWM") / MIB, time.perf_counter(), time.process_time()
    copies = files = wanted = 0
    found = found_in(source())
    read = time.process_time() - cpu
    catalog = found.table()
    tally = Tally(catalog)
    made, whole = time.perf_counter() - start, target()
    for at in file_ranks(whole.choices.parallel):
        rank = RankLayout(whole, at, "iter_0000001")
        for records in (rank.model, rank.distrib):
            holds = records.holds()
            plan = plan_file(records.file, holds, catalog)
            tally.add(plan, holds, catalog)
            plan.problems.raise_if_any()
            copies, files = copies + len(plan.copies), files + 1
            wanted += len(holds.tensors.rows.start)
    assert tally.complete
    assert not any(tally.unplanned().values())
    measured = {
        "wall": time.perf_counter() - start, "cpu": time.process_time() - cpu, "made": made, "read cpu": read,
        "memory": status("VmHWM") / MIB, "imports": imports, "tensors": len(catalog), "chunks": len(catalog.tensors.rows.start),
        "copies": copies, "files": files, "wanted": wanted,
    }  # fmt: skip
    print(json.dumps(measured))


def _main() -> None:
    spec = model()
    measured(lambda: blueprint(spec, SOURCE), lambda: blueprint(spec, TARGET))


if __name__ == "__main__":
    gc.freeze()
    _apart() if "apart" in sys.argv else _main()
