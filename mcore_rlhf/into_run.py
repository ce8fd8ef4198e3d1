"""A universal checkpoint into a run that is there already: its folder appears whole, then ``latest_universal`` names it.

Loaders look at ``latest_universal`` alone. So it is replaced last, and a crash before leaves it at the checkpoint before.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from .convert import ConvertOptions, Job, Progress, is_checkpoint, prepare, write_target
from .errors import UsageError
from .storage.manifest import FileEntry, Manifest, provenance
from .storage.paths import real_path
from .storage.publish import Publication, check_space, replace_text
from .storage.staging import MANIFEST_NAME

TRACKER = "latest_universal"


def is_run(root: Path) -> bool:
    """Whether a folder is the root of a DeepSpeed run, and not a universal checkpoint that was converted as a whole."""
    if (root / "latest").is_file():
        return True
    return (root / TRACKER).is_file() and not (root / MANIFEST_NAME).is_file()


def convert_into_run(source: Path, root: Path, options: ConvertOptions, progress: Progress | None = None) -> Job:
    """Convert a checkpoint to ``<root>/<tag>_uni``, and then let ``latest_universal`` name it.

    Args:
        source: The checkpoint; it may be the run itself, or a tag's folder in it.
        root: The run.
        options: How; ``overwrite`` is about ``<tag>_uni`` alone.
        progress: Hears how far it is.

    Returns:
        The job that was carried out, with its report.

    Raises:
        CheckpointError: Something is wrong; ``latest_universal`` still names what it named before.
    """
    job = add_to_run(source, root, options, progress)
    name_latest(root, job, options)
    return job


def add_to_run(source: Path, root: Path, options: ConvertOptions, progress: Progress | None = None) -> Job:
    """Convert a checkpoint to ``<root>/<tag>_uni``, which nothing names yet.

    Raises:
        CheckpointError: Something is wrong; nothing was published.
    """
    job = prepare(source, options)
    name = str(job.target.texts[TRACKER])
    _refuse_itself(job, root / name)
    publish(job, root / name, options, progress, inner=name)
    return job


def name_latest(root: Path, job: Job, options: ConvertOptions) -> None:
    """Let ``latest_universal`` name what a job wrote.

    Raises:
        StorageError: It could not be replaced.
    """
    replace_text(root / TRACKER, str(job.target.texts[TRACKER]), fsync=options.fsync)


def publish(job: Job, folder: Path, options: ConvertOptions, progress: Progress | None, *, inner: str) -> None:
    """Write what a universal target has below one folder, as another one, all at once.

    Args:
        job: The planned conversion.
        folder: What it becomes.
        options: How.
        progress: Hears how far it is.
        inner: The folder in the target's paths.

    Raises:
        CheckpointError: Something is wrong; nothing was published.
    """
    only_files = replace(job, target=replace(job.target, texts={}))
    with Publication(folder, options.overwrite, options.fsync, replaceable=is_checkpoint) as publication:
        check_space(folder.parent, job.space)
        written = write_target(only_files, publication.staging, options, progress)
        files = _lifted(publication.staging, written, inner)
        part = {"role": job.source.role, "format": job.target.format, "parallel": str(job.target.parallel)}
        job.published = publication.commit(
            Manifest(
                files, step=job.source.state.iteration, parts=(part,), lossless=job.lossless, provenance=provenance(),
                report=job.as_json(),
            )
        )  # fmt: skip


def _lifted(staging: Path, written: dict[str, FileEntry], inner: str) -> dict[str, FileEntry]:
    """Move everything one folder up: the target's paths begin with the checkpoint's name, and the folder has it already."""
    for child in (staging / inner).iterdir():
        os.rename(child, staging / child.name)
    (staging / inner).rmdir()
    return {path.removeprefix(f"{inner}/"): entry for path, entry in written.items()}


def _refuse_itself(job: Job, folder: Path) -> None:
    """The folder to be written may not be the one that is read."""
    beginnings = {file.path.partition("/")[0] for file in job.source.files}
    if any(real_path(job.source.root / name) == real_path(folder) for name in beginnings):
        raise UsageError(f"{folder}: source and target are the same folder.\nChoose another target.")
