"""Verifying one checkpoint: sizes, checksums, shard algebra, and, when asked, replicas and masters."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from pathlib import Path

from mcore_rlhf.core.account import Report
from mcore_rlhf.core.catalog import MASTER, PARAM, TensorName
from mcore_rlhf.errors import CheckpointError, Corrupt, LayoutMismatch, Problem, Problems
from mcore_rlhf.families.inventory import UNPLACED
from mcore_rlhf.families.megatron.folders import folder_meant
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.families.source import Source, bytes_of, uneven_schedule
from mcore_rlhf.formats.registry import is_model, open_checkpoint
from mcore_rlhf.storage.manifest import Manifest, check
from mcore_rlhf.storage.paths import ReadablePath
from mcore_rlhf.storage.patience import looked
from mcore_rlhf.storage.publish import MANIFEST_NAME
from mcore_rlhf.storage.reading import opened
from mcore_rlhf.storage.threads import Pool
from mcore_rlhf.storage.urls import checkpoint_path

from .audit import Audit, Ledger, read_checksums
from .itself import beside

_PIECE_NBYTES = 4 << 20


class Depth(str, Enum):
    """How much is looked at."""

    QUICK = "quick"
    FULL = "full"
    DEEP = "deep"


@dataclass(slots=True)
class Verdict:
    """What verifying found.

    Args:
        problems: Everything that is wrong.
        source: The opened checkpoint, where it could be opened.
        manifest: Whether it has a manifest of ours.
        nbytes: Bytes whose checksum was computed.
        checked: What was checked, in words.
        unchecked: What a deeper look would check besides.
        contradicts: What two places say otherwise, of which a loader takes one: nothing is broken, and one of them is not as saved.
    """

    problems: Problems = field(default_factory=Problems)
    source: Source | None = None
    manifest: bool = False
    nbytes: int = 0
    checked: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    contradicts: list[str] = field(default_factory=list)

    @property
    def intact(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


def verify(
    path: ReadablePath,
    options: ReadOptions,
    depth: Depth = Depth.FULL,
    workers: int = 2,
    progress: Callable[[int], None] | None = None,
    begin: Callable[[int], None] | None = None,
) -> Verdict:
    """Verify a checkpoint.

    Args:
        path: A root, an iteration, or a step.
        options: How it is read.
        depth: ``quick`` looks at sizes and zip directories, ``full`` at every byte's checksum and at the algebra of shards,
            ``deep`` also at replicas and at the agreement of masters and parameters.
        workers: Threads.
        progress: Called with the number of bytes just read.
        begin: Called before the first of them with how many there will be.

    Returns:
        The verdict; problems are in it, not raised.

    Raises:
        NotACheckpoint: There is nothing to verify, or no more: it was deleted while it was read.
        Unreadable: A disk or file system failed, and nothing else is known to be wrong.
    """
    path = checkpoint_path(path)
    verdict = looked(
        path, lambda: _verified(path, options, depth, workers, progress, begin), lambda found: not found.intact
    )
    verdict.problems.raise_if_unread()
    return verdict


def _verified(
    path: ReadablePath,
    options: ReadOptions,
    depth: Depth,
    workers: int,
    progress: Callable[[int], None] | None,
    begin: Callable[[int], None] | None,
) -> Verdict:
    listing = _listing(path, options.step)
    verdict = _sizes(listing) if listing is not None else Verdict()
    if verdict.problems:
        return verdict
    if verdict.manifest and not is_model(path):
        return _by_manifest(verdict, path, depth, progress, begin)
    try:
        source = open_checkpoint(path, replace(options, values=False), partial=True)
        more = beside(source, options.stubs, verdict.problems, listed=verdict.manifest)
        source.files = (*source.files, *more)
        read_checksums(source.files)
        verdict.source = source
        if wrong := uneven_schedule(source.state.scheduler):
            advice = "Take the scheduler's state of another copy, or of another step."
            verdict.problems.add(LayoutMismatch, f"{source.root}: the scheduler's state has {wrong}", advice)
        verdict.contradicts.extend(source.notes.contradictions)
        verdict.contradicts.extend(Report.of(UNPLACED, source).lost)
    except CheckpointError as error:
        if error.exit_code == 2:
            raise
        verdict.problems.add_error(error)
        return verdict
    understood = "arguments, but not what the optimizer holds" if source.unread else "arguments and optimizer layout"
    headers = "directories and headers of the files"
    if not isinstance(path, Path):
        headers = "directories of the files (headers in front of tensors were worked out and not fetched where torch.save laid them out)"
    verdict.checked.append(f"{headers}, {understood}")
    if more:
        verdict.checked.append(f"further files, by what they say of themselves: {_some([file.path for file in more])}")
    if depth is not Depth.QUICK:
        if begin is not None:
            begin(Ledger(source.files).unread)
        _check_bytes(verdict, listing, depth, workers, progress)
    return verdict


def _listing(path: ReadablePath, step: int | None) -> ReadablePath | None:
    """The folder whose manifest lists the files of what a path means: its own, or that of its iteration; None where there is none."""
    places = (one for one in (path, folder_meant(path, step)) if one is not None)
    return next((one for one in places if (one / MANIFEST_NAME).is_file()), None)


def _sizes(path: ReadablePath) -> Verdict:
    """What a folder's manifest says of the sizes of its files."""
    verdict = Verdict(manifest=True, checked=["sizes of all files in the manifest"])
    try:
        verdict.problems.extend(check(path, Manifest.read(path / MANIFEST_NAME), sizes_only=True).found)
    except CheckpointError as error:
        verdict.problems.add_error(error)
    return verdict


def _by_manifest(
    verdict: Verdict,
    path: ReadablePath,
    depth: Depth,
    progress: Callable[[int], None] | None,
    begin: Callable[[int], None] | None,
) -> Verdict:
    """Hold a committed folder in no format that is known, such as a step of Lightning's, against its manifest."""
    verdict.checked.append("nothing of what the files hold: they are in no format that is known")
    if depth is Depth.QUICK:
        return verdict
    manifest = Manifest.read(path / MANIFEST_NAME)
    if begin is not None:
        begin(sum(entry.nbytes for entry in manifest.files.values()))

    def count(_: str, nbytes: int) -> None:
        verdict.nbytes += nbytes
        if progress is not None:
            progress(nbytes)

    verdict.problems.extend(check(path, manifest, progress=count).found)
    verdict.checked.append("the CRC-32 of every file in the manifest")
    return verdict


def _distrusted(source: Source, params: Collection[str], advice: str) -> Problem:
    """All that a known fault spoils: where a master is not its parameter's, neither are the other states."""
    states, names = (
        ", ".join(source.states),
        ", ".join(spec.name for spec in source.model.params if spec.name in params),
    )
    text = f"do not trust the optimizer states {states} of {len(params)} parameters; the weights are sound: {names}"
    return Problem(Corrupt, text, advice)


def _has_copies(source: Source) -> bool:
    """Whether the same numbers lie there twice, so that a file of another rank or step may be sound and yet not belong there."""
    names = ([TensorName(source.role, spec.name, state) for state in (PARAM, MASTER)] for spec in source.model.params)
    return source.parallel.tp > 1 or any(all(name in source.catalog for name in both) for both in names)


def _checksums(source: Source) -> str:
    """Which bytes were held against a checksum: not every format stores one, and nobody can check what is not there."""
    bare = [file.path for file in source.files if not file.records]
    if not bare:
        return "every record's CRC-32"
    with_records = "every CRC-32 that there is" if len(bare) < len(source.files) else "no checksum"
    return f"{with_records} ({len(bare)} files store none, so damaged bytes go unseen there: {_some(bare)})"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")


def _digest_tasks(source: Source, problems: Problems) -> Iterator[Callable[[], None]]:
    """Tasks that hold files against the sums that a list in the checkpoint has of them."""

    def check_file(name: str, expected: str) -> None:
        digest = hashlib.sha256()
        with opened(source.root / name) as file:
            for piece in file.pieces(_PIECE_NBYTES):
                digest.update(piece)
        if digest.hexdigest() != expected:
            problems.add(
                Corrupt,
                f"{name}: its SHA-256 is {digest.hexdigest()[:16]}…, and the checkpoint lists {expected[:16]}…: its bytes are damaged",
                "Copy the file again from where it was written; if it was changed on purpose, remove integrity.json.",
            )

    for name, expected in source.digests.items():
        yield partial(check_file, name, expected)


def _check_bytes(
    verdict: Verdict,
    listing: ReadablePath | None,
    depth: Depth,
    workers: int,
    progress: Callable[[int], None] | None,
) -> None:
    source = verdict.source
    assert source is not None

    def count(nbytes: int) -> None:
        verdict.nbytes += nbytes
        if progress is not None:
            progress(nbytes)

    ledger = Ledger(source.files)
    with bytes_of(source) as mapped, Pool(workers, "verify") as pool:
        audit = Audit(mapped, ledger, verdict.problems, count, source.distrust)
        deep = depth is Depth.DEEP
        list(pool.map(lambda task: task(), audit.tasks(source.catalog, replicas=deep, parity=deep and source.parity)))
        list(pool.map(lambda task: task(), ledger.tasks(mapped, verdict.problems, count)))
        list(pool.map(lambda task: task(), _digest_tasks(source, verdict.problems)))
    if source.digests:
        verdict.checked.append(f"the SHA-256 of {len(source.digests)} files that the checkpoint itself lists")
    if source.distrust and audit.unlike:
        verdict.problems.found.insert(0, _distrusted(source, audit.unlike, audit.advice))
    verdict.checked.append(f"{_checksums(source)}, and that shards tile every tensor")
    if not deep and not verdict.manifest and _has_copies(source):
        verdict.unchecked.append("whether replicas agree, and masters with parameters: --deep does")
    if deep:
        masters = "" if source.parity else " (not: the run keeps these in fewer bits)"
        verdict.checked.append(f"equality of all replicas, and of fp32 masters with parameters{masters}")
    if listing is not None and not verdict.problems:
        verdict.problems.extend(check(listing, Manifest.read(listing / MANIFEST_NAME)).found)
        verdict.checked.append("the CRC-32 of every file in the manifest")
