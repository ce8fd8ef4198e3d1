"""Describing a new ``torch_dist`` checkpoint from an opened source: fully reshardable, so that it loads on any layout."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from mcore_rlhf.core.account import Fate
from mcore_rlhf.families.megatron.arguments import DISTRIBUTED
from mcore_rlhf.families.megatron.folders import TRACKER, iteration_folder_name
from mcore_rlhf.families.megatron.new_run import NewRun
from mcore_rlhf.families.source import Source, WriteOptions
from mcore_rlhf.formats.base import FileLayout, Target, TargetFile
from mcore_rlhf.storage.dcp import METADATA_FILE, Distcp, Item, ObjectItem, dcp_metadata, records
from mcore_rlhf.storage.pt import Pt

from .common import common_tree
from .folders import BACKEND, COMMON, CONFIG, CONFIG_TEXT
from .items import Contents
from .names import Spelling, spelling_of_names
from .objects import Objects
from .optimizer import FULLY_RESHARDABLE
from .ranks import rng_ranks
from .reader import DistState


def dist_target(source: Source, options: WriteOptions) -> Target:
    """Describe the ``torch_dist`` checkpoint that holds what the source has.

    Args:
        source: An opened checkpoint.
        options: What the user asked for.

    Raises:
        CheckpointError: It cannot be done; all problems together.
    """
    run = NewRun.of(source, options, "megatron-dist", BACKEND)
    spelling = spelling_of_names([spec.name for spec in source.model.params], run.family.args)
    return _Writer(run, spelling, source.model.num_layers).target()


@dataclass
class _Writer:
    run: NewRun
    spelling: Spelling
    num_layers: int
    contents: Contents = field(init=False)
    objects: list[ObjectItem] = field(init=False)

    def __post_init__(self) -> None:
        objects = Objects(self.run, self.spelling, self.num_layers)
        self.contents = Contents(self.run, self.spelling, self.num_layers)
        self.objects = list(objects.items())
        self.run.note()
        objects.note()
        self._note_sharding()

    @property
    def folder(self) -> str:
        """Folder of the iteration, relative to the root."""
        return iteration_folder_name(self.run.iteration)

    def target(self) -> Target:
        """The described checkpoint."""
        numbers = range(1 + len(self.contents.files))
        files = [TargetFile(f"{self.folder}/{COMMON}", self._common)]
        files += [TargetFile(f"{self.folder}/{_name(number)}", partial(self._file, number)) for number in numbers]
        metadata = dcp_metadata(self.contents.shapes(), {_name(number): self._items(number) for number in numbers})
        texts: dict[str, str | bytes] = {
            f"{self.folder}/{METADATA_FILE}": metadata,
            f"{self.folder}/{CONFIG}": CONFIG_TEXT,
            TRACKER: self.run.tracker,
        }
        return Target(
            format="megatron-dist",
            parallel=self.run.choices.parallel,
            source=self.run.view,
            files=tuple(files),
            texts=texts,
            report=self.run.report,
            holds=self.run.holds(),
        )

    def _items(self, number: int) -> list[Item]:
        """What a file holds: the first the objects, the others tensors."""
        return [*self.contents.items(number - 1)] if number else [*self.objects]

    def _file(self, number: int) -> FileLayout:
        items = self._items(number)
        found = records(f"{self.folder}/{_name(number)}", items)
        entries = self.contents.entries(number - 1, found) if number else []
        return FileLayout(entries, found, Distcp(items))

    def _common(self) -> FileLayout:
        _, first = next(rng_ranks(self.run.choices.parallel))
        return FileLayout((), (), Pt(lambda: common_tree(self.run, first)))

    def _note_sharding(self) -> None:
        """Say what the optimizer's states become where the source had them otherwise."""
        family = DistState.of(self.run.source)
        old = family.sharding if family else None
        if self.run.choices.optimizer == DISTRIBUTED and old not in (None, FULLY_RESHARDABLE):
            self.run.report.add(
                Fate.CHANGED, f"optimizer states: {old} → {FULLY_RESHARDABLE}, which loads on any layout"
            )


def _name(number: int) -> str:
    return f"__{number}_0.distcp"
