"""The formats that are known: a new one is a file or folder, and one line here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mcore_rlhf.errors import NotACheckpoint, Unsupported, UsageError

from .base import Format, ReadOptions, Source
from .dcp import FORMAT as DCP
from .deepspeed import FORMAT as DEEPSPEED
from .hf import FORMAT as HF
from .megatron import FORMAT as MEGATRON
from .megatron_dist import FORMAT as MEGATRON_DIST
from .peft import FORMAT as PEFT
from .selection import selected, with_role
from .universal import FORMAT as UNIVERSAL

FORMATS: tuple[Format, ...] = (MEGATRON_DIST, MEGATRON, UNIVERSAL, DEEPSPEED, DCP, HF, PEFT)


def format_named(name: str) -> Format:
    """The format of that name.

    Raises:
        Unsupported: There is none.
    """
    for known in FORMATS:
        if known.name == name:
            return known
    raise Unsupported(f"unknown format {name!r}; known: {', '.join(f.name for f in FORMATS)}")


def open_checkpoint(path: Path, options: ReadOptions) -> Source:
    """Open whatever checkpoint a path means: a root, one iteration, or a step that has roles as sub-folders.

    Args:
        path: The folder.
        options: Which role and step, which rules.

    Raises:
        CheckpointError: There is no checkpoint, or it is damaged.
    """
    if not path.exists():
        raise NotACheckpoint(f"{path}: no such file or folder")
    if not path.is_dir():
        raise NotACheckpoint(f"{path}: expected the folder of a checkpoint, found a file")
    options = with_role(options, _roles(path))
    folder, role = _role_folder(path, options.role)
    found = detect(folder)
    return selected(found.read(folder, replace(options, role=role)), options)


def detect(path: Path) -> Format:
    """The format of a folder.

    Raises:
        NotACheckpoint: No known format.
    """
    for known in FORMATS:
        if known.detect(path):
            return known
    raise NotACheckpoint(
        f"{path}: not a checkpoint in a format that is known ({', '.join(f.name for f in FORMATS)})\n"
        "Expected a folder with latest_checkpointed_iteration.txt and iter_XXXXXXX folders, or an iter_XXXXXXX folder itself; "
        "or DeepSpeed's: one with 'latest' or 'latest_universal', or the folder of a tag; or FSDP's: .metadata beside .distcp files, "
        "dcp_checkpoint, model_world_size_W_rank_R.pt; or a folder with config.json and safetensors, or an adapter_config.json."
    )


def _role_folder(path: Path, role: str | None) -> tuple[Path, str]:
    """The folder of one role: the path itself, or a sub-folder of a step such as ``global_step_50/actor``."""
    roles = _roles(path)
    chosen = [name for name in roles if role in (None, name)]
    if len(chosen) == 1:
        return path / chosen[0], chosen[0]
    if roles:
        names = ", ".join(roles)
        raise UsageError(f"{path}: holds several checkpoints: {names}\nName one with --role, or give its folder.")
    return path, role or "actor"


def _roles(path: Path) -> list[str]:
    """The models in a step, by role; none where the path is a checkpoint itself."""
    if any(known.detect(path) for known in FORMATS):
        return []
    children = [child for child in sorted(path.iterdir()) if child.is_dir()]
    return [child.name for child in children if any(known.detect(child) for known in FORMATS)]
