"""The state dict as files: ``pytorch_model*.bin`` or ``model*.safetensors``, with the index of Hugging Face's loaders."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path

from mcore_rlhf.convert import ConvertOptions, Progress, is_checkpoint
from mcore_rlhf.core.box import row_major
from mcore_rlhf.core.catalog import Record
from mcore_rlhf.formats.base import FileLayout, TargetFile
from mcore_rlhf.formats.hf.names import BIN, MODEL_STEM, SAFETENSORS
from mcore_rlhf.formats.hf.shards import DEFAULT_SHARD, Shard, index_of, shards_of
from mcore_rlhf.storage.manifest import Manifest, provenance
from mcore_rlhf.storage.ptwriter import PtWriter
from mcore_rlhf.storage.publish import Publication, check_space, refuse_overlap
from mcore_rlhf.storage.stored import StoredTensor

from .parts import carry_out, open_tag, parts_of


@dataclass(frozen=True, slots=True)
class Consolidation:
    """How a state dict is written.

    Args:
        max_shard_size: Bytes per file; a tensor that is larger has a file of its own.
        safe_serialization: safetensors instead of ``.bin``.
        exclude_frozen: Leave frozen parameters out.
        workers: Files written at the same time.
        overwrite: Whether an existing checkpoint at the target may be replaced.
        fsync: Whether everything is on the disk before it is published.
        stubs: Further pickled classes that may become inert stubs.
    """

    max_shard_size: int = DEFAULT_SHARD
    safe_serialization: bool = False
    exclude_frozen: bool = False
    workers: int = 2
    overwrite: bool = False
    fsync: bool = True
    stubs: tuple[str, ...] = ()


def consolidate(
    path: Path, target: Path, options: Consolidation, tag: str | None = None, progress: Progress | None = None
) -> list[str]:
    """Write the fp32 weights of a checkpoint as files, and publish them at once.

    Args:
        path: A root, or a tag's folder.
        target: The folder to write; must not exist.
        options: How.
        tag: Which checkpoint of a root; None for that in ``latest``.
        progress: Hears how far it is.

    Returns:
        The names of the files, the index last where there is one.

    Raises:
        CheckpointError: Something is wrong; nothing was published.
    """
    source = open_tag(path, tag, options.stubs)
    for folder in {file.path.partition("/")[0] for file in source.files}:
        refuse_overlap(source.root / folder, target)  # beside it, in the run's own folder, is where people want it
    publication = Publication(target, overwrite=options.overwrite, fsync=options.fsync, replaceable=is_checkpoint)
    with publication:
        parts = parts_of(source, options.exclude_frozen)
        safe = options.safe_serialization
        ending = SAFETENSORS if safe else BIN
        shards = shards_of(parts.tensors, MODEL_STEM[ending], options.max_shard_size, ending, copies=safe)
        check_space(target.parent, sum(shard.nbytes for shard in shards))
        how = ConvertOptions(workers=options.workers, fsync=options.fsync)
        files = tuple(_target(shard, safe) for shard in shards)
        texts = index_of(shards, MODEL_STEM[ending], ending)
        written = carry_out(source, parts, files, publication.staging, how, texts, progress)
        part = {"role": source.role, "format": "fp32", "parallel": str(source.parallel)}
        publication.commit(Manifest(written, step=source.state.iteration, parts=(part,), provenance=provenance()))
    return [*(file.path for file in files), *texts]


def _target(shard: Shard, safe: bool) -> TargetFile:
    return shard.target() if safe else TargetFile(shard.file, partial(_bin_layout, shard))


def _bin_layout(shard: Shard) -> FileLayout:
    """What a ``.bin`` file will hold, where second names share their owners' storage."""
    records = [
        Record(shard.file, f"data/{number}", part.dtype, prod(part.shape), 0) for number, part in enumerate(shard.parts)
    ]
    pairs = list(zip(shard.parts, records, strict=True))
    stored = {part.names[0]: StoredTensor(record, 0, part.shape, row_major(part.shape)) for part, record in pairs}
    tree = OrderedDict(stored)
    tree.update({alias: stored[part.names[0]] for part in shard.parts for alias in part.names[1:]})
    entries = [part.placed(record) for part, record in pairs]
    return FileLayout(entries, records, lambda root: PtWriter.create(root / shard.file, tree, file=shard.file))
