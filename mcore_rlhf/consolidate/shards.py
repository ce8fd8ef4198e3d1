"""The state dict as files: ``pytorch_model*.bin`` or ``model*.safetensors``, with the index of Hugging Face's loaders."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mcore_rlhf.convert import ConvertOptions, Progress, is_checkpoint
from mcore_rlhf.core.box import row_major
from mcore_rlhf.core.catalog import TensorEntry
from mcore_rlhf.formats.base import FileLayout, TargetFile
from mcore_rlhf.storage.manifest import Manifest, provenance
from mcore_rlhf.storage.ptwriter import PtWriter
from mcore_rlhf.storage.publish import Publication, check_space, refuse_overlap
from mcore_rlhf.storage.safetensors_file import SafeTensor, SafetensorsWriter
from mcore_rlhf.storage.stored import StoredTensor

from .parts import Parts, carry_out, open_tag, parts_of

DEFAULT_SHARD = 5 * 10**9


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
        shards = list(shards_of(parts, options))
        check_space(target.parent, sum(shard.nbytes for shard in shards))
        how = ConvertOptions(workers=options.workers, fsync=options.fsync)
        files = tuple(TargetFile(shard.file, shard.layout) for shard in shards)
        texts = index_of(shards, options) if len(shards) > 1 else {}
        written = carry_out(source, parts, files, publication.staging, how, texts, progress)
        part = {"role": source.role, "format": "fp32", "parallel": str(source.parallel)}
        publication.commit(Manifest(written, step=source.state.iteration, parts=(part,), provenance=provenance()))
    return [*(file.path for file in files), *texts]


@dataclass(slots=True)
class Shard:
    """One file of several.

    Args:
        parts: Its tensors.
        aliases: Second names of its tensors.
        safe: Whether it is a safetensors file.
        file: Its name.
    """

    parts: list[TensorEntry]
    aliases: Mapping[str, str]
    safe: bool
    file: str = ""
    nbytes: int = 0

    def names(self) -> list[str]:
        """All names in it."""
        return [*(part.name.param for part in self.parts), *self.aliases]

    def layout(self) -> FileLayout:
        """What the file will hold; safetensors cannot share elements, so an alias is a copy there."""
        named = [(part.name.param, part) for part in self.parts]
        owners = dict(named)
        if self.safe:
            named += [(alias, owners[owner]) for alias, owner in self.aliases.items()]
        entries = [self._placed(number, name, part) for number, (name, part) in enumerate(named)]
        records = [entry.chunks[0].record for entry in entries]
        if self.safe:
            tensors = [SafeTensor(r, e.global_shape) for r, e in zip(records, entries, strict=True)]
            return FileLayout(
                entries, records, lambda root: SafetensorsWriter.create(root / self.file, tensors, {"format": "pt"})
            )
        stored = {name: _stored(entry) for (name, _), entry in zip(named, entries, strict=True)}
        stored |= {alias: stored[owner] for alias, owner in self.aliases.items()}
        return FileLayout(
            entries, records, lambda root: PtWriter.create(root / self.file, OrderedDict(stored), file=self.file)
        )

    def _placed(self, number: int, name: str, part: TensorEntry) -> TensorEntry:
        record = replace(part.chunks[0].record, file=self.file, key=name if self.safe else f"data/{number}")
        return replace(part, chunks=(replace(part.chunks[0], record=record),))


def _stored(entry: TensorEntry) -> StoredTensor:
    return StoredTensor(entry.chunks[0].record, 0, entry.global_shape, row_major(entry.global_shape))


def shards_of(parts: Parts, options: Consolidation) -> Iterator[Shard]:
    """Tensors in order, as many as fit into each file; an alias goes with its owner."""
    by_owner: dict[str, dict[str, str]] = {}
    for alias, owner in parts.aliases.items():
        by_owner.setdefault(owner, {})[alias] = owner
    shards: list[Shard] = []
    for part in parts.entries:
        aliases = by_owner.get(part.name.param, {})
        nbytes = part.chunks[0].record.nbytes * (1 + len(aliases) * options.safe_serialization)
        if not shards or shards[-1].nbytes + nbytes > options.max_shard_size:
            shards.append(Shard([], {}, options.safe_serialization))
        shards[-1].parts.append(part)
        shards[-1].aliases = {**shards[-1].aliases, **aliases}
        shards[-1].nbytes += nbytes
    stem, ending = ("model", "safetensors") if options.safe_serialization else ("pytorch_model", "bin")
    for number, shard in enumerate(shards, 1):
        suffix = f"-{number:05d}-of-{len(shards):05d}" if len(shards) > 1 else ""
        shard.file = f"{stem}{suffix}.{ending}"
        yield shard


def index_of(shards: Sequence[Shard], options: Consolidation) -> dict[str, str]:
    """The index that Hugging Face's loaders look for."""
    weights = {name: shard.file for shard in shards for name in shard.names()}
    total = sum(part.chunks[0].record.nbytes for shard in shards for part in shard.parts)
    name = "model.safetensors" if options.safe_serialization else "pytorch_model.bin"
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": weights}, indent=2) + "\n"
    return {f"{name}.index.json": text}
