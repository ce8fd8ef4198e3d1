"""Describing a new legacy Megatron checkpoint from an opened source."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial

from mcore_rlhf.families.megatron.arguments import DISTRIBUTED, Arguments
from mcore_rlhf.families.megatron.blueprint import Blueprint
from mcore_rlhf.families.megatron.folders import TRACKER, FileRank, file_ranks, iteration_folder_name
from mcore_rlhf.families.megatron.new_run import NewRun
from mcore_rlhf.families.megatron.rank_layout import RankLayout, Records
from mcore_rlhf.families.megatron.state import COUNTER, PER_RANK_KEYS
from mcore_rlhf.families.source import Source, WriteOptions
from mcore_rlhf.formats.base import FileLayout, Target, TargetFile
from mcore_rlhf.layouts.pipeline import model_chunks
from mcore_rlhf.storage.pt import Pt

from .opaque import OpaqueValues
from .trees import TreeMaker, needs_distrib_file


def megatron_target(source: Source, options: WriteOptions) -> Target:
    """Describe the legacy Megatron checkpoint that holds what the source has.

    Args:
        source: An opened checkpoint.
        options: What the user asked for.

    Raises:
        CheckpointError: It cannot be done; all problems together.
    """
    run = NewRun.of(source, options, "megatron", "torch")
    writer = _Writer(run)
    run.note()
    writer.opaque.note(run.report)
    files = [file for at in file_ranks(run.choices.parallel) for file in writer.files(at)]
    return Target(
        format="megatron",
        parallel=run.choices.parallel,
        source=run.view,
        files=tuple(files),
        texts={TRACKER: run.tracker},
        report=run.report,
        holds=run.holds(),
    )


@dataclass
class _Writer:
    run: NewRun

    @cached_property
    def blueprint(self) -> Blueprint:
        """The whole new checkpoint."""
        model, parallel = self.run.source.model, self.run.choices.parallel
        chunks = model_chunks(model.num_layers, parallel.pp, parallel.vpp, self.run.choices.split, model.mtp_layers)
        return Blueprint(
            self.run.source.role, model, Arguments(self.run.arguments(None)), self.run.choices, chunks, self.run.family.order,
            self.run.moments, self.run.state_dtypes,
        )  # fmt: skip

    @cached_property
    def opaque(self) -> OpaqueValues:
        """Values of keys that are no parameters."""
        return OpaqueValues(self.run.family.shards, self.run.source.parallel, self.run.choices.parallel)

    def files(self, at: FileRank) -> list[TargetFile]:
        """The files of one rank."""
        folder = iteration_folder_name(self.run.iteration)
        prefix = f"{folder}/{at.folder}"
        files = [TargetFile(f"{prefix}/model_optim_rng.pt", partial(self._model_file, at, folder))]
        if self.run.choices.optimizer == DISTRIBUTED and (at.holds_dense_optimizer or self._has_experts()):
            files.append(TargetFile(f"{prefix}/distrib_optim.pt", partial(self._distrib_file, at, folder)))
        return files

    def _has_experts(self) -> bool:
        return self.run.choices.parallel.ep > 1 and self.run.source.model.num_experts > 0

    def _model_file(self, at: FileRank, folder: str) -> FileLayout:
        rank = RankLayout(self.blueprint, at, folder)
        return _layout(rank.model, lambda: self._trees(rank).model_tree())

    def _distrib_file(self, at: FileRank, folder: str) -> FileLayout:
        rank = RankLayout(self.blueprint, at, folder)
        assert needs_distrib_file(rank)
        return _layout(rank.distrib, lambda: self._trees(rank).distrib_tree())

    def _trees(self, rank: RankLayout) -> TreeMaker:
        run = self.run
        return TreeMaker(
            rank, run.source.state, run.arguments(rank.at), self.opaque.value_for(rank), run.rng_states(rank.at),
            self._per_rank(rank.at), run.membership, run.family.scalars,
        )  # fmt: skip

    def _per_rank(self, at: FileRank) -> Mapping[str, object]:
        if not self.run.same_ranks:
            return {}
        shard = self.run.shard_of(at)
        keys = (COUNTER, *PER_RANK_KEYS) if self.run.same_world else (COUNTER,)
        return {key: shard.materialize(shard.top[key]) for key in keys if key in shard.top}


def _layout(records: Records, tree: Callable[[], object]) -> FileLayout:
    return FileLayout(records.entries, records.records, Pt(tree))
