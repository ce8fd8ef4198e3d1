"""What a state dict is made of, and how it is copied: whatever is used is checked, and nothing else is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from mcore_rlhf.convert import ConvertOptions, Job, Progress, write_target
from mcore_rlhf.core.catalog import Catalog, FixedCatalog, TensorEntry
from mcore_rlhf.core.dtype import FLOAT32, FLOATING
from mcore_rlhf.core.names import MASTER, PARAM, TensorName
from mcore_rlhf.core.plan import plan_file
from mcore_rlhf.errors import Incomplete, NotACheckpoint, Problems
from mcore_rlhf.families.module import ModuleState
from mcore_rlhf.families.source import ReadOptions, Source, StoredFile, WriteOptions
from mcore_rlhf.formats.base import Target, TargetFile
from mcore_rlhf.formats.hf.shards import Part
from mcore_rlhf.formats.registry import open_checkpoint
from mcore_rlhf.storage.manifest import FileEntry
from mcore_rlhf.storage.paths import inside, local_path


@dataclass(slots=True)
class Parts:
    """What a state dict is made of.

    Args:
        tensors: What is wanted, each tensor with all its names.
        catalog: Where they come from.
        order: All names in the module's order.
    """

    tensors: list[Part]
    catalog: Catalog
    order: list[str]


def open_tag(path: Path, tag: str | None, stubs: tuple[str, ...]) -> Source:
    """Open one checkpoint of a root, or whatever a path means.

    Raises:
        CheckpointError: There is none, or it is damaged.
    """
    path = local_path(path)
    if tag is None:
        return open_checkpoint(path, ReadOptions(stubs=stubs))
    if not inside(path, tag).is_dir():
        raise NotACheckpoint(f"{path}: there is no checkpoint with the tag {tag!r} in it")
    return open_checkpoint(path / tag, ReadOptions(stubs=stubs))


def parts_of(source: Source, exclude_frozen: bool) -> Parts:
    """What the state dict of a checkpoint is made of.

    Raises:
        Incomplete: A parameter is stored nowhere.
    """
    native = source.native if isinstance(source.native, ModuleState) else ModuleState("")
    tensors: list[Part] = []
    found: dict[TensorName, TensorEntry] = {}
    problems = Problems()
    for spec in source.model.params:
        if exclude_frozen and not spec.trainable and spec.name not in native.buffers:
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
        aliases = (alias for alias, owner in native.shared.items() if owner == spec.name)
        tensors.append(Part(entry.name, entry.global_shape, dtype, (spec.name, *aliases)))
    problems.raise_if_any()
    names = {name for part in tensors for name in part.names}
    order = dict.fromkeys([*native.order, *(name for part in tensors for name in part.names)])
    return Parts(tensors, FixedCatalog(found), [name for name in order if name in names])


def carry_out(
    source: Source, parts: Parts, files: tuple[TargetFile, ...], folder: Path, options: ConvertOptions,
    texts: Mapping[str, str] | None = None, progress: Progress | None = None,
) -> dict[str, FileEntry]:  # fmt: skip
    """Copy what is wanted, and check what was read: the optimizer's states are neither read nor checked."""
    problems, used, nbytes = Problems(), set(), 0
    for file in files:
        layout = file.layout()
        plan = plan_file(file.path, layout.holds, parts.catalog)
        problems.extend(plan.problems.found)
        used |= {(copy.source.file, copy.source.key) for copy in plan.copies}
        nbytes += sum(record.nbytes for record in layout.records)
    problems.raise_if_any()
    stored = tuple(
        StoredFile(f.path, f.nbytes, tuple(r for r in f.records if (f.path, r[0]) in used)) for f in source.files
    )
    narrowed = replace(source, catalog=parts.catalog, files=stored)
    target = Target("fp32", source.parallel, parts.catalog, files, dict(texts or {}), source.notes)
    how = replace(
        options, write=WriteOptions(no_optimizer=True)
    )  # masters are not compared with parameters that nobody reads
    return write_target(Job(narrowed, target, nbytes), folder, how, progress)
