"""verl's adapter files: one ``.pt`` per model-parallel rank, with Megatron-Bridge's names and local layer numbers. Read only.

With virtual pipeline stages verl saves the first chunk of each rank and no other: such a checkpoint is not whole, which shows when its
layers are counted. Source: verl-project/verl ``verl/utils/megatron_peft_utils.py`` (``save_adapter_checkpoint``), read, not run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from mcore_rlhf.core.account import Report
from mcore_rlhf.core.catalog import Chunk, TensorEntry, TensorName, dot
from mcore_rlhf.core.chunks import Chunks
from mcore_rlhf.core.facts import Fate
from mcore_rlhf.errors import Incomplete, LayoutMismatch, Problems, Unsupported
from mcore_rlhf.families.megatron.arguments import Arguments
from mcore_rlhf.families.megatron.state import MegatronState
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.families.source import Source, TrainingState
from mcore_rlhf.layouts.parallel import ParallelConfig
from mcore_rlhf.layouts.tensor import Shard, global_shape_of, local_layout
from mcore_rlhf.models.megatron import Traits, layer_of, partition_of, renumbered
from mcore_rlhf.models.spec import REPLICATED, ModelSpec, ParamSpec, Partition
from mcore_rlhf.storage.paths import ReadablePath
from mcore_rlhf.storage.pt import PtFile, read_pt
from mcore_rlhf.storage.record_file import StoredFile
from mcore_rlhf.storage.stored import StoredTensor

_FILE = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3}))?(?:_(\d{3}))?_adapter\.pt")
_KEY = "adapter_state_dict"
_TRAITS = Traits(gated=True, transformer_engine=True)

Ranks = dict[tuple[int, int], Mapping[str, StoredTensor]]
"""(tensor-parallel rank, pipeline rank) → what its file holds."""


def is_verl_adapter(path: ReadablePath) -> bool:
    """Whether a folder has such files."""
    return path.is_dir() and any(_FILE.fullmatch(child.name) for child in path.glob("mp_rank_*_adapter.pt"))


def read_verl_adapter(path: ReadablePath, options: ReadOptions) -> Source:
    """Open the adapter files of all ranks.

    Args:
        path: The folder ``adapter_checkpoint``.
        options: Whose model it is, which stubs.

    Raises:
        CheckpointError: Files are missing, damaged, or contradict each other.
    """
    opened = {ranks: read_pt(path, name, stubs=options.stubs) for ranks, name in sorted(_files(path).items())}
    ranks: Ranks = {(tp, pp): _tensors(pt) for (tp, pp, ep), pt in opened.items() if ep == 0}
    _check(path, ranks, with_experts=any(ep for _, _, ep in opened))
    layers = _layers(ranks)
    role = options.role or "actor"
    entries = list(_entries(path, role, ranks, layers))
    specs = tuple(ParamSpec(e.name.param, e.global_shape, e.dtype, _partition(e.name.param)) for e in entries)
    notes = Report()
    notes.add(
        Fate.NOTE, f"verl's adapter files: {sum(layers)} layers, counted from the files; they say nothing of lora_alpha"
    )
    return Source(
        format="verl-adapter",
        root=path,
        role=role,
        model=ModelSpec(specs, sum(layers), False),
        parallel=ParallelConfig(tp=1 + max(tp for tp, _ in ranks), pp=len(layers)),
        catalog=Chunks.of(entries),
        state=TrainingState(0, release=True),
        files=tuple(StoredFile.of_zip(pt.file, pt.directory) for pt in opened.values()),
        states=(),
        optimizer=None,
        notes=notes,
        family=MegatronState(
            located=None, args=Arguments({}), shards=[], order=[spec.name for spec in specs], unknown=[]
        ),
    )


def _files(path: ReadablePath) -> dict[tuple[int, int, int], str]:
    matches = (_FILE.fullmatch(child.name) for child in path.iterdir())
    return {(int(m[1]), int(m[2] or 0), int(m[3] or 0)): m.group() for m in matches if m is not None}


def _tensors(pt: PtFile) -> Mapping[str, StoredTensor]:
    found = pt.tree.get(_KEY) if isinstance(pt.tree, dict) else None
    if not isinstance(found, dict) or not all(isinstance(value, StoredTensor) for value in found.values()):
        raise Unsupported(f"{pt.root / pt.file}: expected a dictionary of tensors under {_KEY!r}")
    return found


def _check(path: ReadablePath, ranks: Ranks, *, with_experts: bool) -> None:
    """Every rank is there, and all tensor-parallel ranks of a stage have the same tensors."""
    problems = Problems()
    tps, pps = 1 + max(tp for tp, _ in ranks), 1 + max(pp for _, pp in ranks)
    for pp in range(pps):
        first = ranks.get((0, pp), {})
        for tp in range(tps):
            held = ranks.get((tp, pp))
            if held is None:
                problems.add(Incomplete, f"{path}: there is no file of tensor-parallel rank {tp}, pipeline rank {pp}")
            elif {n: t.shape for n, t in held.items()} != {n: t.shape for n, t in first.items()}:
                text = f"{path}: tensor-parallel ranks 0 and {tp} of pipeline rank {pp} hold other names or shapes"
                problems.add(LayoutMismatch, text)
    if with_experts and any(".experts." in name for held in ranks.values() for name in held):
        problems.add(Unsupported, f"{path}: adapters of routed experts cannot be converted")
    problems.raise_if_any()


def _layers(ranks: Ranks) -> list[int]:
    """How many layers every pipeline stage has; each is taken to have an adapter somewhere."""
    stages = sorted({pp for _, pp in ranks})
    return [1 + max((layer_of(name) or 0 for name in ranks[0, pp]), default=-1) for pp in stages]


def _entries(path: ReadablePath, role: str, ranks: Ranks, layers: list[int]) -> Iterator[TensorEntry]:
    degree = 1 + max(tp for tp, _ in ranks)
    for pp in range(len(layers)):
        for local, first in ranks[0, pp].items():
            name = renumbered(local, sum(layers[:pp]), 0)
            if ".adapter." not in name:
                raise Unsupported(f"{path}: {local}: is no adapter's tensor")
            partition = _partition(name)
            shape = global_shape_of(partition, first.shape, degree, 1, 0)
            chunks = []
            for tp in range(degree):
                stored = ranks[tp, pp][local]
                for piece in local_layout(partition, shape, Shard(tp, degree)).pieces:
                    start = stored.start + dot(piece.offset, stored.strides)
                    chunks.append(Chunk(piece.box, stored.record, start, stored.strides))
            yield TensorEntry(TensorName(role, name), shape, first.record.dtype, tuple(chunks))


def _partition(name: str) -> Partition:
    return partition_of(name, _TRAITS) or REPLICATED
