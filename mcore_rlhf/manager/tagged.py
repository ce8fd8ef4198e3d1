"""Checkpoints under tags, as DeepSpeed has them: a folder for each in one root, and a file there that names the last one.

Tags are the user's, and need not be numbers: so nothing is retired, and no tag is older than another. What is added is that a tag's folder
is there as a whole or not at all, that the file names it only then, and that damage is found before it is loaded.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

from mcore_rlhf.convert import is_checkpoint
from mcore_rlhf.errors import (
    CheckpointError,
    Corrupt,
    Incomplete,
    NotACheckpoint,
    Problem,
    Problems,
    UsageError,
    log_of,
)
from mcore_rlhf.formats.registry import detect, is_model
from mcore_rlhf.storage import reading
from mcore_rlhf.storage.beneath import Beneath, make_folder, write_over
from mcore_rlhf.storage.links import enclose
from mcore_rlhf.storage.manifest import FileEntry, Manifest, check, provenance
from mcore_rlhf.storage.paths import canonical, local_path
from mcore_rlhf.storage.publish import MANIFEST_NAME, LocalPublication, remove_unrenamed
from mcore_rlhf.storage.transactions import recover_in

from .run.options import check_values
from .run.together import GOES_AFTER, Together, Write, damage_of_share
from .run.world import World

LOG = log_of("mcore_rlhf.manager")
_LONGEST = 1 << 20
"""Bytes of a file beside the tags: a script, or a name."""


@dataclass(frozen=True, slots=True)
class TagOptions:
    """How tags are committed.

    Args:
        fsync: Whether a tag is on the disk before it appears.
        check: What is verified before a tag is loaded: every byte (``bytes``), or lengths only (``sizes``).
        timeout: Seconds to wait for a rank that does not come.
        provenance: For every manifest: git revision, hash of the configuration.

    Raises:
        UsageError: Something has a value that it cannot have.
    """

    fsync: bool = True
    check: Literal["bytes", "sizes"] = "bytes"
    timeout: float = 600.0
    provenance: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        problems = Problems()
        check_values(self, {"check": ("bytes", "sizes")}, problems)
        problems.raise_if_any()


class Tags:
    """Saves and checks the tags of roots. Every rank makes one, and makes the same calls: all of them are collective.

    Args:
        trainer: Who writes the files, for the manifest.
        options: See :class:`TagOptions`.
        world: Who makes the calls, where that is not every rank.
    """

    def __init__(self, trainer: str, options: TagOptions | None = None, world: World | None = None) -> None:
        self._trainer, self.options = trainer, options or TagOptions()
        self.world = world or World.current(self.options.timeout)

    def save(
        self,
        root: str | Path,
        tag: str,
        write: Write,
        *,
        step: int | None = None,
        latest: str = "",
        beside: Collection[str] = (),
    ) -> Path:
        """Have the trainer write a tag aside, publish it, and name it in the root.

        Args:
            root: The folder of all tags, on a file system that all ranks share.
            tag: What the checkpoint is called.
            write: Called on every rank with a hidden folder, which is to be the trainer's root: it makes the tag's folder there.
            step: The training step, for the manifest.
            latest: The file in the root that is to name the tag; empty for none.
            beside: Files that the trainer writes beside the tag, which are laid into the root.

        Raises:
            UsageError: The tag is none that a folder can be called.
            Exception: What the trainer's code raised, on the rank that it did; a CheckpointError on all others. Nothing is published.
        """
        started = time.monotonic()
        self.world.meet()
        target = self._folder(root, tag)
        others: dict[str, bytes] = {}
        folder = Together(
            self.world,
            target,
            partial(self._begun, target),
            partial(_arrange, tag, beside, others),
            partial(self._manifest, step),
            patience=min(GOES_AFTER, self.options.timeout),
        )
        nbytes = folder.publish(write)
        self.world.on_all_ranks(f"naming {target}", partial(self._named, target, latest, others))
        if self.world.is_rank0:
            LOG.info("%s: committed, %d bytes in %.3g s", target, nbytes, time.monotonic() - started)
        return target

    def _folder(self, root: str | Path, tag: str) -> Path:
        """Where a tag lies.

        Raises:
            UsageError: It cannot be called so, or lies in a store.
        """
        if not tag or tag.startswith(".") or "/" in tag:
            raise UsageError(
                f"tag {tag!r}: is to be the name of one folder\nGive a name without / that begins with no dot."
            )
        return local_path(root).absolute() / canonical(tag, root, "tag", parts=1)

    def _begun(self, target: Path) -> LocalPublication:
        make_folder(target.parent)
        made = LocalPublication(target, True, self.options.fsync, is_checkpoint)
        _clean_up(target.parent)
        return made.__enter__()

    def _manifest(self, step: int | None, staging: Path, files: Mapping[str, FileEntry]) -> Manifest:
        part = [{"role": "actor", "format": detect(staging).name}] if is_model(staging) else []
        more = {str(key): value for key, value in self.options.provenance.items()}
        told = provenance(**more, trainer=self._trainer, ranks=self.world.size)
        return Manifest(files, step=step, parts=part, provenance=told)

    def _named(self, target: Path, latest: str, others: Mapping[str, bytes]) -> None:
        if not self.world.is_rank0:
            return
        for name, content in others.items():
            write_over(target.parent / name, content, fsync=False)
        if latest:
            write_over(target.parent / latest, target.name.encode(), fsync=self.options.fsync)

    def check(self, root: str | Path, tag: str | None, latest: str = "") -> None:
        """See that what is to be loaded is what was committed. Where no manifest is, it is the trainer's own, and taken as it is.

        What killed saves left in the root is cleaned up first: a tag that was being replaced is put back.

        Args:
            root: The folder of all tags.
            tag: Which one; None for the one that is named in the root.
            latest: The file that names it, where no tag is given.

        Raises:
            CheckpointError: It is damaged, or cannot be read; all that is wrong is named. On every rank.
        """
        self.world.meet()
        self.world.on_all_ranks(f"opening {root}", partial(self._recovered, root))
        folder = self.world.broadcast(
            self.world.on_all_ranks(f"looking for {tag}", partial(self._found, root, tag, latest))
        )
        if folder is None:
            return
        problems = Problems()
        for found in self.world.all_gather(self.world.on_all_ranks(f"checking {folder}", partial(self._mine, folder))):
            problems.extend(found)
        if problems:
            problems.add(Corrupt, f"{folder}: is not loaded", self._advice(folder))
        problems.raise_if_any()

    def _recovered(self, root: str | Path) -> None:
        if self.world.is_rank0:
            _clean_up(local_path(root).absolute())

    def _found(self, root: str | Path, tag: str | None, latest: str) -> Path | None:
        """The folder of the tag, on rank 0; None where nothing is to be checked."""
        if not self.world.is_rank0:
            return None
        place = local_path(root).absolute()
        if tag is None:
            tag = self._named_last(place / latest)
        folder = None if tag is None else place / tag
        return folder if folder is not None and (folder / MANIFEST_NAME).is_file() else None

    def _named_last(self, tracker: Path) -> str | None:
        """The tag that a root names; None where there is no such file."""
        if not tracker.is_file():
            return None
        text = reading.read_bytes(tracker, _LONGEST).decode(errors="replace").strip()
        if not text:
            raise NotACheckpoint(f"{tracker}: is empty\nGive the tag to load: {_there(tracker.parent)}.")
        return canonical(text, tracker, "tag")

    def _mine(self, folder: Path) -> list[Problem]:
        """What is wrong with this rank's share."""
        enclose(folder)
        return damage_of_share(self.world, folder / MANIFEST_NAME, self.options.check == "sizes")

    def _advice(self, folder: Path) -> str:
        return (
            f"Others that are there as a whole: {_there(folder.parent, but=folder.name)}. Give one of them as the tag."
        )


def _arrange(tag: str, beside: Collection[str], others: dict[str, bytes], staging: Path) -> None:
    """Move up what the trainer wrote into the tag's folder, and take what it wrote beside it.

    Raises:
        Incomplete: It wrote no such folder.
    """
    inner = staging / tag
    if not inner.is_dir() or not any(inner.iterdir()):
        raise Incomplete(f"{inner}: nothing was written there; nothing was published")
    with Beneath(staging) as folder:
        for name in beside:
            if (staging / name).is_file():
                others[name] = reading.read_bytes(staging / name, _LONGEST)
                folder.remove(name)
        for path in sorted(inner.iterdir()):
            folder.move(f"{tag}/{path.name}", path.name)
        folder.remove(tag)


def _clean_up(root: Path) -> None:
    """Remove what killed saves left in a root, and put back what they had moved aside."""
    for line in recover_in(root):
        LOG.info("%s", line)
    for path in remove_unrenamed(root):
        LOG.info("removed %s: it was left behind", path)


def _there(root: Path, but: str = "") -> str:
    """The tags of a root that were committed, by length of their files."""
    found = []
    for folder in sorted(root.iterdir()):
        file = folder / MANIFEST_NAME
        with suppress(CheckpointError):  # whatever is wrong with it, it is none of them
            if folder.name != but and file.is_file() and not check(folder, Manifest.read(file), sizes_only=True):
                found.append(folder.name)
    return ", ".join(found) or "none"


__all__ = ["TagOptions", "Tags"]
