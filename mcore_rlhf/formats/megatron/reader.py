"""Opening a legacy Megatron checkpoint: folders, arguments, shards and optimizer become one Source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from mcore_rlhf.core.account import Fate, Report
from mcore_rlhf.errors import Incomplete, LayoutMismatch, Problems
from mcore_rlhf.families.megatron.arguments import Arguments
from mcore_rlhf.families.megatron.buffers import EMBEDDING, OUTPUT
from mcore_rlhf.families.megatron.checks import check_against_arguments, check_folders
from mcore_rlhf.families.megatron.folders import file_ranks, locate, rank_folders
from mcore_rlhf.families.megatron.state import MegatronState
from mcore_rlhf.families.source import ReadOptions, Source, StoredFile
from mcore_rlhf.layouts.parallel import ParallelConfig
from mcore_rlhf.layouts.pipeline import ModelChunk
from mcore_rlhf.models.megatron import in_registration_order
from mcore_rlhf.models.spec import ModelSpec, ParamSpec
from mcore_rlhf.storage.ptfile import PtFile

from .catalog import Holder, MegatronCatalog
from .consistency import check_keys, check_ranks
from .optimizer import OptimizerReading, read_optimizer
from .partitions import PartitionFinder
from .shards import RankFiles, RankShard, globalize
from .state import training_state
from .unplaced import unplaced_of


def read_megatron(path: Path, options: ReadOptions) -> Source:
    """Open a legacy checkpoint.

    Args:
        path: A root with a tracker, or an ``iter_XXXXXXX`` folder.
        options: Which step, which rules.

    Raises:
        CheckpointError: It is incomplete, damaged, or contradicts itself.
    """
    located = locate(path, options.step)
    folders = rank_folders(located.folder)
    notes = Report()
    files = RankFiles(located, options.stubs, options.optimizer)
    args_file, values = files.first_arguments(folders)
    args = Arguments(values)
    parallel = check_folders(args, args_file, folders, notes)
    shards = files.shards(file_ranks(parallel))
    check_ranks(shards, located, notes)
    _check_virtual_parts(shards, parallel)
    num_layers = globalize(shards, parallel, args.num_experts or None)
    check_keys(shards, args)
    chunks = _model_chunks(shards, parallel, num_layers)
    if options.optimizer:
        optimizer = read_optimizer(shards, chunks, args, parallel, options.rules)
    else:
        optimizer = OptimizerReading()
    holders = _holders(shards, optimizer, tied_alias(args, parallel, shards, chunks[-1].mtp))
    unknown: list[str] = []
    finder = PartitionFinder(args, parallel, options.rules, shards, notes, unknown)
    order = _order(shards, parallel)
    specs = finder.specs([name for name in order if name in holders], holders)
    frozen = optimizer.frozen
    specs = [spec if spec.name not in frozen else replace(spec, trainable=False) for spec in specs]
    model = ModelSpec(
        tuple(specs), num_layers, args.tied, args.mtp_layers, args.num_experts, options.vocab_size or args.vocab_size,
        next((spec.global_shape[0] for spec in specs if spec.name == EMBEDDING), None), _unused(args, specs),
    )  # fmt: skip
    check_against_arguments(args, args_file, model, chunks, parallel)
    role = options.role or "actor"
    catalog = MegatronCatalog(role, model, parallel, holders, optimizer.states)
    family = MegatronState(
        located=located, args=args, shards=shards, order=order, unknown=unknown, scalars=optimizer.scalars
    )
    _note_frozen(frozen, notes)
    state = training_state(shards, located, optimizer.groups, notes)
    if optimizer.kind is not None and state.scheduler is None:
        notes.add(
            Fate.NOTE,
            "there is an optimizer, but no scheduler state; Megatron will want --override-opt-param-scheduler",
        )
    return Source(
        format="megatron",
        root=located.root,
        role=role,
        model=model,
        parallel=parallel,
        catalog=catalog,
        state=state,
        files=tuple(_stored_files(shards)),
        states=optimizer.states,
        optimizer=optimizer.kind,
        notes=notes,
        family=family,
        unplaced=unplaced_of(shards, with_optimizer=options.optimizer),
    )


def tied_alias(
    args: Arguments, parallel: ParallelConfig, shards: list[RankShard], mtp_on_last: bool
) -> Mapping[str, str]:
    """Names that are copies of another parameter: the output layer of a tied model on another stage.

    With multi-token prediction on it, the last stage has a copy of the embedding itself, under its own name, and its output
    weight is not used. An output layer of another shape is a value head.

    Source: megatron-core 0.16.1, ``models/gpt/gpt_model.py`` (``shared_embedding_or_output_weight``).
    """
    if not args.tied or parallel.pp == 1 or mtp_on_last:
        return {}
    shapes = {
        name: part.tensors[name].shape
        for shard in shards
        for part in shard.parts
        for name in (EMBEDDING, OUTPUT)
        if name in part.tensors
    }
    return {OUTPUT: EMBEDDING} if shapes.get(OUTPUT) == shapes.get(EMBEDDING) else {}


def _holders(shards: list[RankShard], optimizer: OptimizerReading, alias: Mapping[str, str]) -> dict[str, list[Holder]]:
    holders: dict[str, list[Holder]] = {}
    for shard in shards:
        for part in shard.parts:
            for name, tensor in part.tensors.items():
                states = optimizer.places.get((shard.at.folder, part.vpp_rank, name), {})
                holders.setdefault(alias.get(name, name), []).append(Holder(shard.at, tensor, states))
    return holders


def _order(shards: list[RankShard], parallel: ParallelConfig) -> list[str]:
    """All global names as one process that held the whole model would register them."""
    names: dict[str, None] = {}
    for vpp_rank in range(parallel.vpp):
        for shard in sorted(shards, key=lambda s: (s.at.pp_rank, s.at.rank)):
            for part in shard.parts:
                if part.vpp_rank == vpp_rank:
                    names.update(dict.fromkeys(part.order))
    return in_registration_order(list(names))


def _model_chunks(shards: list[RankShard], parallel: ParallelConfig, num_layers: int) -> tuple[ModelChunk, ...]:
    """The model chunks as the files have them."""
    parts = {(shard.at.pp_rank, part.vpp_rank): part for shard in shards for part in shard.parts}
    chunks, layer = [], 0
    for index in range(parallel.pp * parallel.vpp):
        vpp_rank, pp_rank = divmod(index, parallel.pp)
        part = parts.get((pp_rank, vpp_rank))
        count = part.local_layers if part else 0
        mtp = part is not None and any(name.startswith("mtp.") for name in part.order)
        last = index == parallel.pp * parallel.vpp - 1
        chunks.append(
            ModelChunk(
                pp_rank, vpp_rank, layer, count, mtp, index == 0, last, count > 0 and layer + count == num_layers
            )
        )
        layer += count
    return tuple(chunks)


def _check_virtual_parts(shards: list[RankShard], parallel: ParallelConfig) -> None:
    problems = Problems()
    for shard in shards:
        found = [part.vpp_rank for part in shard.parts]
        if found and max(found) >= parallel.vpp:
            problems.add(
                LayoutMismatch,
                f"{shard.pt.file}: holds model{max(found)}, but args say {parallel.vpp} model chunks per stage",
            )
        elif not found:
            problems.add(Incomplete, f"{shard.pt.file}: holds no model")
    problems.raise_if_any()


def _unused(args: Arguments, specs: list[ParamSpec]) -> frozenset[str]:
    """With tied embeddings and MTP, the last of several stages registers an output weight that nothing reads.

    Source: megatron-core 0.16.1, ``models/gpt/gpt_model.py`` (``shared_embedding_or_output_weight``).
    """
    return frozenset(spec.name for spec in specs if args.tied and spec.name == OUTPUT and spec.partition.vocabulary)


def _note_frozen(frozen: frozenset[str], notes: Report) -> None:
    if frozen:
        some = ", ".join(sorted(frozen)[:3]) + (", …" if len(frozen) > 3 else "")
        notes.add(Fate.NOTE, f"{len(frozen)} parameters have no optimizer state and count as frozen: {some}")


def _stored_files(shards: list[RankShard]) -> list[StoredFile]:
    opened: list[PtFile] = [pt for shard in shards for pt in (shard.pt, shard.distrib) if pt is not None]
    return [_stored_file(pt) for pt in opened]


def _stored_file(pt: PtFile) -> StoredFile:
    records = tuple(
        (m.name, m.byte_offset, m.nbytes, m.crc32) for m in pt.directory.members.values() if pt.directory.checksummed
    )
    return StoredFile(pt.file, pt.directory.nbytes, records)
