"""The formats that are known: a new one is a file or folder, and one line here."""

from __future__ import annotations

from dataclasses import replace

from mcore_rlhf.core.account import Fate
from mcore_rlhf.core.catalog import Traced
from mcore_rlhf.errors import (
    CheckpointError,
    LayoutMismatch,
    Lossy,
    NotACheckpoint,
    Unsupported,
    Untrusted,
    UsageError,
    headline,
    shown,
)
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.families.selection import selected, with_role
from mcore_rlhf.families.source import Source
from mcore_rlhf.storage.paths import SURROGATE, ReadablePath, files_below, human
from mcore_rlhf.storage.urls import checkpoint_path

from .base import Format
from .carried import with_carried
from .checksums import contradictions, listed_at, refuse_damaged_texts, with_checksums
from .dcp import FORMAT as DCP
from .deepspeed import FORMAT as DEEPSPEED
from .hf import FORMAT as HF
from .megatron import FORMAT as MEGATRON
from .megatron_dist import FORMAT as MEGATRON_DIST
from .peft import FORMAT as PEFT
from .universal import FORMAT as UNIVERSAL

FORMATS: tuple[Format, ...] = (MEGATRON_DIST, MEGATRON, UNIVERSAL, DEEPSPEED, DCP, HF, PEFT)

_SHOWN = 5


def format_named(name: str) -> Format:
    """The format of that name.

    Raises:
        Unsupported: There is none.
    """
    for known in FORMATS:
        if known.name == name:
            return known
    raise Unsupported(f"unknown format {name!r}; known: {', '.join(f.name for f in FORMATS)}")


def open_checkpoint(path: ReadablePath, options: ReadOptions, *, partial: bool = False) -> Source:
    """Open whatever checkpoint a path means: a root, one iteration, or a step that has roles as sub-folders.

    Its files are those that a manifest of ours lists, if there is one, with the checksums in it.

    Args:
        path: The folder.
        options: Which role and step, which rules.
        partial: Whether an optimizer that is not understood stays unread: :attr:`Source.unread` says why.

    Raises:
        CheckpointError: There is no checkpoint, or it is damaged.
    """
    folder, inner = _meant(path, options)
    listed = listed_at(folder)
    try:
        source = with_carried(_read(folder, inner, partial), inner.stubs)
    except CheckpointError:
        refuse_damaged_texts(folder, listed)
        raise
    _note_beside(source, checkpoint_path(path), folder, options)
    return _traced(with_checksums(source, listed), inner)


def open_without_manifest(path: ReadablePath, options: ReadOptions) -> Source:
    """The same for someone who only looks: what a manifest of ours says otherwise of files is noted, and they are shown as they are.

    Sizes are looked at, and the checksums of texts and of the manifest itself. An optimizer that is not understood stays unread.

    Args:
        path: The folder.
        options: Which role and step, which rules.

    Raises:
        CheckpointError: There is no checkpoint, or what its reader looks at is damaged.
    """
    folder, inner = _meant(path, options)
    source = with_carried(_read(folder, inner, partial=True), inner.stubs)
    _note_beside(source, checkpoint_path(path), folder, options)
    for text in contradictions(folder):
        source.notes.add(Fate.NOTE, text)
    return _traced(source, inner)


def _traced(source: Source, options: ReadOptions) -> Source:
    """The part that was asked for, with a catalogue that remembers what was planned of it."""
    part = selected(source, options)
    return replace(part, catalog=Traced(part.catalog))


def _read(folder: ReadablePath, options: ReadOptions, partial: bool) -> Source:
    """What a format's reader makes of a folder; without the optimizer, where only that is not understood, or fits no other layout."""
    found = detect(folder)
    try:
        return _believable(found.read(folder, options))
    except (Unsupported, Lossy) as error:
        if not (partial and options.optimizer):
            raise
        try:
            source = found.read(folder, replace(options, optimizer=False))
        except CheckpointError:
            raise error from None
        source.unread, source.refused = str(error), type(error)
        source.notes.add(Fate.LOST, f"the optimizer, which is there and not understood: {headline(source.unread)}")
        return source


_FEW_RANKS, _BYTES_OF_A_RANK = 1024, 1 << 16


def _believable(source: Source) -> Source:
    """The source, unless it says that more ranks wrote it than its files have bytes for: a new layout of as many would be made.

    Raises:
        LayoutMismatch: It does. Few are always believed.
        Untrusted: A tensor has a name that is no text: no format could hold it.
    """
    for spec in source.model.params:
        if not spec.name.isprintable() and SURROGATE.search(spec.name):
            raise Untrusted(
                f"{source.root}: the tensor {shown(spec.name)} has half a character in its name, which is no text"
            )
    ranks, stored = source.parallel.world_size, sum(file.nbytes for file in source.files)
    if ranks > _FEW_RANKS + stored // _BYTES_OF_A_RANK:
        raise LayoutMismatch(
            f"{source.root}: says that {ranks:,} ranks wrote it ({source.parallel}), and all its files together have {human(stored)}\n"
            "The degrees in it are damaged or forged: take the files that belong together."
        )
    return source


def _meant(path: ReadablePath, options: ReadOptions) -> tuple[ReadablePath, ReadOptions]:
    """The folder that a path means, and the options with the role in it."""
    path = checkpoint_path(path, follow_links=options.follow_links)
    if not path.exists():
        raise NotACheckpoint(f"{path}: no such file or folder")
    if not path.is_dir():
        raise NotACheckpoint(f"{path}: expected the folder of a checkpoint, found a file")
    options = with_role(options, _roles(path))
    folder, role = _role_folder(path, options.role)
    return folder, replace(options, role=role)


def detect(path: ReadablePath) -> Format:
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


def _role_folder(path: ReadablePath, role: str | None) -> tuple[ReadablePath, str]:
    """The folder of one role: the path itself, or a sub-folder of a step such as ``global_step_50/actor``."""
    roles = _roles(path)
    chosen = [name for name in roles if role in (None, name)]
    if len(chosen) == 1:
        return path / chosen[0], chosen[0]
    if roles:
        names = ", ".join(roles)
        raise UsageError(f"{path}: holds several checkpoints: {names}\nName one with --role, or give its folder.")
    return path, role or "actor"


def _note_beside(source: Source, path: ReadablePath, folder: ReadablePath, options: ReadOptions) -> None:
    """Where one model of a step was opened, and nobody said that the rest is not wanted."""
    if folder == path or with_role(options, [folder.name]).role is not None:
        return
    beside = [name for name in files_below(path) if not name.startswith(f"{folder.name}/")]
    if beside:
        listed = ", ".join(beside[:_SHOWN]) + (f", … ({len(beside)} files)" if len(beside) > _SHOWN else "")
        source.notes.add(Fate.LOST, f"what lies beside {folder.name}/, of which alone this is: {listed}")


def _roles(path: ReadablePath) -> list[str]:
    """The models in a step, by role; none where the path is a checkpoint itself."""
    if any(known.detect(path) for known in FORMATS):
        return []
    children = [child for child in sorted(path.iterdir()) if child.is_dir()]
    return [child.name for child in children if any(known.detect(child) for known in FORMATS)]
