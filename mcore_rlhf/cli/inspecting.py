"""``mcore-rlhf inspect``: what a checkpoint is, without reading its tensors."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from mcore_rlhf.errors import CheckpointError
from mcore_rlhf.families.source import ReadOptions, Source
from mcore_rlhf.formats.registry import open_without_manifest
from mcore_rlhf.manager.whole_step import WholeStep
from mcore_rlhf.storage.manifest import Manifest
from mcore_rlhf.storage.staging import MANIFEST_NAME

from .describe import model_facts, optimizer_facts, source_facts
from .meaning import chosen_facts, meaning, only_model, print_choice
from .output import Facts, emit_json

if TYPE_CHECKING:
    from mcore_rlhf.core.catalog import TensorEntry

_COUNTERS = ("consumed_train_samples", "consumed_valid_samples", "skipped_train_samples")


def run(path: Path, options: ReadOptions, pattern: str | None, json: bool) -> None:
    """Print what a checkpoint is.

    Args:
        path: The checkpoint.
        options: How it is opened.
        pattern: Which logical tensors to list, or None for none of them.
        json: For machines.

    Raises:
        CheckpointError: It cannot be opened.
    """
    meant = meaning(path, options)
    if isinstance(meant, WholeStep) and pattern is not None:
        meant = only_model(meant, options, "--tensors lists those of one model")
    if isinstance(meant, WholeStep):
        from .whole import inspect_step

        return inspect_step(meant, options, json)
    source = open_without_manifest(meant.path, meant.options)
    facts = {**inspect_facts(source, meant.path), "chosen": chosen_facts(meant.chosen)}
    if pattern is not None:
        facts["tensors"] = [_tensor_facts(source, entry) for entry in _matching(source, pattern)]
    if json:
        emit_json(facts)
        return None
    from .render_inspect import print_inspection

    print_choice(meant.chosen)
    return print_inspection(facts)


def inspect_facts(source: Source, path: Path) -> Facts:
    """What a checkpoint is.

    Keys: those of :func:`~.describe.source_facts`; ``model``; ``optimizer`` (or null); ``unread`` (why the
    optimizer is not understood, or null); ``scheduler``; ``counters``;
    ``files`` (``path``, ``bytes``); ``bytes``; ``notes`` (``fate``, ``text``); ``manifest`` (or null).
    """
    args = source.state.args
    return {
        **source_facts(source),
        "model": model_facts(source.model),
        "optimizer": optimizer_facts(source),
        "unread": source.unread or None,
        "scheduler": source.state.scheduler,
        "counters": {name: args[name] for name in _COUNTERS if name in args},
        "files": [{"path": file.path, "bytes": file.nbytes} for file in source.files],
        "bytes": sum(file.nbytes for file in source.files),
        "notes": source.notes.as_json(),
        "manifest": _manifest_facts(path, source.root),
    }


def _manifest_facts(*folders: Path) -> Facts | None:
    """The manifest in the first folder that has one."""
    where = next((folder / MANIFEST_NAME for folder in folders if (folder / MANIFEST_NAME).is_file()), None)
    if where is None:
        return None
    try:
        manifest = Manifest.read(where)
    except CheckpointError as error:
        return {"path": str(where), "error": str(error)}
    return {
        "path": str(where),
        "step": manifest.step,
        "files": len(manifest.files),
        "lossless": manifest.lossless,
        "parts": [dict(part) for part in manifest.parts],
        "provenance": dict(manifest.provenance),
        "report": dict(manifest.report),
    }


def _matching(source: Source, pattern: str) -> Iterator[TensorEntry]:
    """Entries whose parameter has a name like the pattern: with wildcards, or a part of the name."""
    wanted = pattern if any(character in pattern for character in "*?[") else f"*{pattern}*"
    for name in source.catalog:
        entry = source.catalog.get(name) if fnmatchcase(name.param, wanted) else None
        if entry is not None:
            yield entry


def _tensor_facts(source: Source, entry: TensorEntry) -> Facts:
    """``name``, ``state``, ``global_shape``, ``dtype``, ``partition``, ``chunks``, ``replicas``, ``bytes``."""
    spec = source.model.get(entry.name.param)
    chunks = len(entry.primary())
    return {
        "name": entry.name.param,
        "state": entry.name.state,
        "global_shape": list(entry.global_shape),
        "dtype": str(entry.dtype),
        "partition": str(spec.partition) if spec is not None else None,
        "chunks": chunks,
        "replicas": len(entry.chunks) - chunks,
        "bytes": prod(entry.global_shape) * entry.dtype.itemsize,
    }
