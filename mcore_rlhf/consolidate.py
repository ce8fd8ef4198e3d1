"""One fp32 state dict out of a training checkpoint: in memory, as ``.bin`` shards or as safetensors shards.

Names are the checkpoint's own. Trained parameters come from their fp32 masters, frozen ones and buffers from what the model
computes with; integer buffers keep their type. No optimizer state is read, and whatever is used is checked.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from mcore_rlhf.convert import Job, is_checkpoint, write_target
from mcore_rlhf.core.catalog import (
    FLOAT32,
    FLOATING,
    MASTER,
    PARAM,
    Box,
    DType,
    Record,
    Shape,
    TensorEntry,
    TensorName,
)
from mcore_rlhf.core.chunks import Chunks
from mcore_rlhf.errors import Incomplete, NotACheckpoint, Problems
from mcore_rlhf.execution.run import Progress
from mcore_rlhf.families.module import ModuleState
from mcore_rlhf.families.options import ConvertOptions, ReadOptions, WriteOptions
from mcore_rlhf.families.source import Source
from mcore_rlhf.formats.base import FileLayout, Target, TargetFile
from mcore_rlhf.formats.hf.files import (
    BIN,
    DEFAULT_SHARD,
    MODEL_STEM,
    SAFETENSORS,
    SafetensorsShard,
    WrittenTensor,
    index_of,
    shards_of,
)
from mcore_rlhf.formats.registry import open_checkpoint
from mcore_rlhf.storage.destination import Destination
from mcore_rlhf.storage.in_memory import Bytes, MemoryFiles
from mcore_rlhf.storage.manifest import FileEntry, Manifest, provenance
from mcore_rlhf.storage.paths import beneath, local_path
from mcore_rlhf.storage.pt import Pt
from mcore_rlhf.storage.publish import LocalPublication
from mcore_rlhf.storage.record_file import Raw
from mcore_rlhf.storage.stored import StoredTensor
from mcore_rlhf.storage.urls import refuse_overlap

if TYPE_CHECKING:
    import torch


def open_tag(path: Path, tag: str | None, stubs: tuple[str, ...]) -> Source:
    """Open one checkpoint of a root, or whatever a path means.

    Raises:
        CheckpointError: There is none, or it is damaged.
    """
    path = local_path(path)
    if tag is None:
        return open_checkpoint(path, ReadOptions(stubs=stubs))
    if not beneath(path, tag).is_dir():
        raise NotACheckpoint(f"{path}: there is no checkpoint with the tag {tag!r} in it")
    return open_checkpoint(path / tag, ReadOptions(stubs=stubs))


def fp32_state_dict(source: Source, exclude_frozen: bool) -> tuple[list[WrittenTensor], Chunks, list[str]]:
    """What the state dict of a checkpoint is made of.

    Returns:
        What is wanted, each tensor with all its names; where they come from; all names in the module's order.

    Raises:
        Incomplete: A parameter is stored nowhere.
    """
    family = ModuleState.of(source) or ModuleState()
    tensors: list[WrittenTensor] = []
    found: dict[TensorName, TensorEntry] = {}
    problems = Problems()
    for spec in source.model.params:
        if exclude_frozen and not spec.trainable and spec.name not in family.buffers:
            continue
        name = TensorName(source.role, spec.name, MASTER)
        entry = (source.catalog.get(name) if spec.trainable else None) or source.catalog.get(name._replace(state=PARAM))
        if entry is None:
            problems.add(
                Incomplete, f"{spec.name}: neither master weights nor the parameter itself are in {source.root}"
            )
            continue
        dtype = FLOAT32 if entry.dtype in FLOATING else entry.dtype
        found[entry.name] = entry
        aliases = (alias for alias, owner in family.shared.items() if owner == spec.name)
        tensors.append(WrittenTensor(entry.name, entry.global_shape, dtype, (spec.name, *aliases)))
    problems.raise_if_any()
    names = {name for part in tensors for name in part.names}
    order = dict.fromkeys([*family.order, *(name for part in tensors for name in part.names)])
    return tensors, Chunks.of(found.values()), [name for name in order if name in names]


def copy_into(
    source: Source,
    catalog: Chunks,
    files: tuple[TargetFile, ...],
    to: Destination,
    options: ConvertOptions,
    texts: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> dict[str, FileEntry]:
    """Copy what is wanted, and check what was read: the optimizer's states are neither read nor checked."""
    target = Target(
        format="fp32",
        parallel=source.parallel,
        source=catalog,
        files=files,
        texts=dict(texts or {}),
        report=source.notes,
    )
    job, problems = Job(source, target), Problems()
    plans = [job.plan(file, problems)[1] for file in files]
    problems.raise_if_any()
    used = {(record.file, record.key) for plan in plans for record in plan.read}
    stored = tuple(
        replace(file, records=tuple(r for r in file.records if (file.path, r[0]) in used), whole=None)
        for file in source.files
    )
    job.source = replace(source, catalog=catalog, files=stored)
    how = replace(options, write=WriteOptions(no_optimizer=True))  # masters are not compared with what nobody reads
    return write_target(job, to, how, progress)


def load_fp32_state_dict(
    path: str | Path, tag: str | None = None, *, exclude_frozen_parameters: bool = False
) -> OrderedDict[str, torch.Tensor]:
    """The fp32 weights of a checkpoint in memory, for ``model.load_state_dict``.

    Args:
        path: A root, a tag's folder, or whatever else ``mcore-rlhf inspect`` takes.
        tag: Which checkpoint of a root; None for that in ``latest``.
        exclude_frozen_parameters: Leave frozen parameters out.

    Returns:
        Contiguous tensors on the CPU, in the module's order. Tied names are one tensor.

    Raises:
        CheckpointError: It is incomplete or damaged: every byte that is used is checked.
    """
    source = open_tag(Path(path), tag, ())
    tensors, catalog, order = fp32_state_dict(source, exclude_frozen_parameters)
    memory = MemoryFiles()
    files = tuple(TargetFile(str(at), partial(memory_layout, part, str(at))) for at, part in enumerate(tensors))
    copy_into(source, catalog, files, memory, ConvertOptions(fsync=False))
    found: dict[str, torch.Tensor] = {}
    for file, part in zip(files, tensors, strict=True):
        found.update(dict.fromkeys(part.names, torch_tensor(memory.files[file.path], part.dtype, part.shape)))
    return OrderedDict((name, found[name]) for name in order)


def torch_tensor(data: Bytes, dtype: DType, shape: Shape) -> torch.Tensor:
    """Bytes in memory as a tensor; they are not copied."""
    import torch

    kind: torch.dtype = getattr(torch, dtype.name)
    if not len(data):  # NumPy gives what is empty no stride, and torch then no view of another type
        return torch.empty(shape, dtype=kind)
    return torch.from_numpy(data).view(kind).reshape(shape)


def memory_layout(part: WrittenTensor, file: str, box: Box | None = None) -> FileLayout:
    """A file that is one tensor's elements, or those of a part of it, and nothing else."""
    record = Record(file, "all", part.dtype, prod(part.shape if box is None else box.shape), 0)
    return FileLayout(Chunks.of([part.placed(record, box)]), [record], Raw([record]))


def consolidate(
    path: Path,
    target: Path,
    options: ConvertOptions,
    *,
    safetensors: bool = False,
    frozen: bool = True,
    tag: str | None = None,
    progress: Progress | None = None,
) -> list[str]:
    """Write the fp32 weights of a checkpoint as files, and publish them at once.

    Args:
        path: A root, or a tag's folder.
        target: The folder to write; must not exist.
        options: How: workers, overwriting, syncing, stubs, and the largest size of a file.
        safetensors: Whether the files are safetensors, and not ``.bin``.
        frozen: Whether frozen parameters come along.
        tag: Which checkpoint of a root; None for that in ``latest``.
        progress: Hears how far it is.

    Returns:
        The names of the files, the index last where there is one.

    Raises:
        CheckpointError: Something is wrong; nothing was published.
    """
    source = open_tag(path, tag, options.read.stubs)
    for folder in {file.path.partition("/")[0] for file in source.files}:
        refuse_overlap(source.root / folder, target)  # beside it, in the run's own folder, is where people want it
    publication = LocalPublication(target, overwrite=options.overwrite, fsync=options.fsync, replaceable=is_checkpoint)
    with publication:
        tensors, catalog, _ = fp32_state_dict(source, not frozen)
        ending = SAFETENSORS if safetensors else BIN
        largest = DEFAULT_SHARD if options.write.max_shard_size is None else options.write.max_shard_size
        shards = shards_of(tensors, MODEL_STEM[ending], largest, ending, copies=safetensors)
        publication.check_space(sum(shard.nbytes for shard in shards))
        files = tuple(_target(shard, safetensors) for shard in shards)
        texts = index_of(shards, MODEL_STEM[ending], ending)
        written = copy_into(source, catalog, files, publication, options, texts, progress)
        part = {"role": source.role, "format": "fp32", "parallel": str(source.parallel)}
        publication.commit(Manifest(written, step=source.state.iteration, parts=(part,), provenance=provenance()))
    return [*(file.path for file in files), *texts]


def _target(shard: SafetensorsShard, safe: bool) -> TargetFile:
    return shard.target() if safe else TargetFile(shard.file, partial(_bin_layout, shard))


def _bin_layout(shard: SafetensorsShard) -> FileLayout:
    """What a ``.bin`` file will hold, where second names share their owners' storage."""
    records = [
        Record(shard.file, f"data/{number}", part.dtype, prod(part.shape), 0) for number, part in enumerate(shard.parts)
    ]
    pairs = list(zip(shard.parts, records, strict=True))
    stored = {part.names[0]: StoredTensor.whole(record, part.shape) for part, record in pairs}
    tree = OrderedDict(stored)
    tree.update({alias: stored[part.names[0]] for part in shard.parts for alias in part.names[1:]})
    entries = [part.placed(record) for part, record in pairs]
    return FileLayout(Chunks.of(entries), records, Pt.of(tree))
