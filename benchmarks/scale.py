"""Row 20: planning the reshape of a 671B mixture of experts on a thousand GPUs, without its files. Run as a module, it plans.

Layers, experts and shapes are those of DeepSeek-V3 (61 layers, the first three dense, 256 experts, latent attention), from its
``config.json``. Everything else is as in row 12: the catalogue is made of the places that the writer's own layout gives.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path

from mcore_rlhf.core.catalog import EXP_AVG, EXP_AVG_SQ
from mcore_rlhf.core.plan import plan_file
from mcore_rlhf.errors import Problems
from mcore_rlhf.execution.fingerprint import Binding, identity, of_options
from mcore_rlhf.execution.parts import share
from mcore_rlhf.execution.saved import SavedPlan, write_plan
from mcore_rlhf.execution.spool import PlannedFile, Spool, Task
from mcore_rlhf.execution.work import PlannedTarget, Work, in_blocks
from mcore_rlhf.families.job_options import PartNumber
from mcore_rlhf.families.megatron.folders import file_ranks
from mcore_rlhf.families.megatron.layout import Blueprint
from mcore_rlhf.families.megatron.ranks import RankLayout
from mcore_rlhf.families.options import ConvertOptions
from mcore_rlhf.layouts.parallel import ParallelConfig
from mcore_rlhf.layouts.pipeline import PipelineSplit
from mcore_rlhf.models.spec import COLUMN, GATED, REPLICATED, ROW, VOCABULARY, ModelSpec, Partition
from mcore_rlhf.storage.manifest import Manifest
from mcore_rlhf.storage.pickling import PickledTree
from mcore_rlhf.storage.pt import PickledFile
from mcore_rlhf.storage.record_file import StoredFile
from mcore_rlhf.verify.audit import pairs

from . import planning
from .measure import MIB, in_fresh_process, status
from .table import Row

LAYERS, DENSE, EXPERTS, HIDDEN, FFN, EXPERT_FFN, ROWS = 61, 3, 256, 7168, 18432, 2048, 129280
HEADS, Q_RANK, KV_RANK, NOPE, ROPE, VALUE = 128, 1536, 512, 128, 64, 128
SOURCE = ParallelConfig(tp=1, pp=16, ep=64, etp=1, dp=64)
TARGET = ParallelConfig(tp=1, pp=8, ep=64, etp=1, dp=64)
_SPLITS = {16: PipelineSplit(first=4, last=1), 8: PipelineSplit(first=8, last=5)}
_MOMENTS = (EXP_AVG, EXP_AVG_SQ)


def row_20(folder: Path) -> Iterator[Row]:
    found = in_fresh_process(__name__)
    size = (
        f"{found['tensors']:.0f} tensors, {found['chunks']:.0f} chunks → {found['files']:.0f} files, "
        f"{found['copies']:.0f} copies; {found['cpu']:.1f} s, of which {found['read cpu']:.1f} s stand in for reading the source"
    )
    what = "plan 671B with optimizer, 1024 → 512 GPUs, catalogue included"
    yield Row(20, f"{what}: cpu a chunk", found["cpu"] / found["chunks"] * 1e6, " µs", 60, 20, size)
    yield Row(20, "the same: memory high-water", found["memory"], " MiB", 400, None)
    place = folder / "plan-671b"
    place.mkdir()
    saved = in_fresh_process(__name__, "saved", place)
    first = in_fresh_process(__name__, "first", place)
    size = f"{saved['bytes'] / MIB:.0f} MiB, {first['tasks']:.0f} tasks; wall {first['wall']:.2f} s"
    yield Row(20, "from its saved plan until the first file of a part runs: cpu", first["cpu"], " s", 1, 0.2, size)


def model() -> ModelSpec:
    """The parameters in registration order, as the local spec names them."""
    made = planning._spec
    params = [made("embedding.word_embeddings.weight", (ROWS, HIDDEN), VOCABULARY)]
    for layer in range(LAYERS):
        params += [made(f"decoder.layers.{layer}.{name}", shape, how) for name, shape, how in _layer(layer)]
    params.append(made("decoder.final_layernorm.weight", (HIDDEN,), REPLICATED))
    params.append(made("output_layer.weight", (ROWS, HIDDEN), VOCABULARY))
    return ModelSpec(tuple(params), LAYERS, False, 0, EXPERTS, ROWS, ROWS)


def _layer(number: int) -> Iterator[tuple[str, tuple[int, ...], Partition]]:
    attention = "self_attention.linear_"
    yield "input_layernorm.weight", (HIDDEN,), REPLICATED
    yield f"{attention}proj.weight", (HIDDEN, HEADS * VALUE), ROW
    yield f"{attention}q_down_proj.weight", (Q_RANK, HIDDEN), REPLICATED
    yield f"{attention}q_up_proj.weight", (HEADS * (NOPE + ROPE), Q_RANK), COLUMN
    yield f"{attention}kv_down_proj.weight", (KV_RANK + ROPE, HIDDEN), REPLICATED
    yield f"{attention}kv_up_proj.weight", (HEADS * (NOPE + VALUE), KV_RANK), COLUMN
    yield "self_attention.q_layernorm.weight", (Q_RANK,), REPLICATED
    yield "self_attention.kv_layernorm.weight", (KV_RANK,), REPLICATED
    yield "pre_mlp_layernorm.weight", (HIDDEN,), REPLICATED
    if number < DENSE:
        yield "mlp.linear_fc1.weight", (2 * FFN, HIDDEN), GATED
        yield "mlp.linear_fc2.weight", (HIDDEN, FFN), ROW
        return
    yield "mlp.router.weight", (EXPERTS, HIDDEN), REPLICATED
    for expert in range(EXPERTS):
        yield f"mlp.experts.local_experts.{expert}.linear_fc1.weight", (2 * EXPERT_FFN, HIDDEN), GATED
        yield f"mlp.experts.local_experts.{expert}.linear_fc2.weight", (HIDDEN, EXPERT_FFN), ROW
    yield "mlp.shared_experts.linear_fc1.weight", (2 * EXPERT_FFN, HIDDEN), GATED
    yield "mlp.shared_experts.linear_fc2.weight", (HIDDEN, EXPERT_FFN), ROW


def blueprint(spec: ModelSpec, parallel: ParallelConfig) -> Blueprint:
    """A checkpoint of that model at some layout."""
    return planning.blueprint(spec, parallel, _SPLITS[parallel.pp])


def _saved(folder: Path) -> None:
    """Save the plan of it, of files that are there by name only; what they hold besides tensors is made up."""
    spec = model()
    catalog, whole = planning.found_in(blueprint(spec, SOURCE)).table(), blueprint(spec, TARGET)
    root = folder / "source"
    for name in {chunk.record.file for entry in catalog.entries() for chunk in entry.chunks}:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    stored = [StoredFile(path.relative_to(root).as_posix(), 0, ()) for path in sorted(root.rglob("*.pt"))]
    spool, files = Spool(), list[Task]()
    for at in file_ranks(TARGET):
        rank = RankLayout(whole, at, "iter_0000001")
        for records in (rank.model, rank.distrib):
            tree = PickledTree(bytes(36_000), {record.key: record.nbytes for record in records.records})
            planned = PlannedFile(plan_file(records.file, records.holds(), catalog), records.records, PickledFile(tree))
            files.append(spool.write(planned))
    binding = Binding(root, identity(root, stored), of_options(ConvertOptions()), [file.told for file in files])
    blocks = partial(in_blocks, pairs(catalog, Problems(), replicas=True, parity=True), "compared :")
    work = Work("", files, spool, lambda problems: blocks(), tuple, nullcontext)  # type: ignore[arg-type]
    target = PlannedTarget([work], Manifest({}), fingerprint=binding.fingerprint())
    cpu = time.process_time()
    nbytes = write_plan(folder / "plan", target, {"": binding}, root, {}, ConvertOptions())
    print(json.dumps({"cpu": time.process_time() - cpu, "bytes": nbytes}))


def _first(folder: Path) -> None:
    """What a part does before it copies: its plan, its share, and the first of its files."""
    start, cpu = time.perf_counter(), time.process_time()
    conversion = SavedPlan(folder / "plan").load(folder / "source", ConvertOptions())
    mine = share(conversion.works, PartNumber(3, 16))
    next(work.planned(file) for work in conversion.works for file in work.files if file.path in mine)
    found = {"wall": time.perf_counter() - start, "cpu": time.process_time() - cpu, "memory": status("VmHWM") / MIB}
    tasks = sum(len(work.files) + len([*work.compared(Problems())]) for work in conversion.works)
    print(json.dumps({**found, "tasks": tasks}))


def _main() -> None:
    if len(sys.argv) > 2:
        (_saved if sys.argv[1] == "saved" else _first)(Path(sys.argv[2]))
        return
    spec = model()
    planning.measured(lambda: blueprint(spec, SOURCE), lambda: blueprint(spec, TARGET))


if __name__ == "__main__":
    gc.freeze()
    sys.exit(_main())
