"""Describing a new legacy Megatron checkpoint from an opened source."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

from mcore_rlhf.core.dtype import DType
from mcore_rlhf.core.names import MASTER, TensorName
from mcore_rlhf.errors import LayoutMismatch, Unsupported, UsageError
from mcore_rlhf.formats.base import FileLayout, FileWriter, Source, Target, TargetFile, WriteOptions
from mcore_rlhf.formats.report import Fate, Report
from mcore_rlhf.layouts.pipeline import model_chunks
from mcore_rlhf.storage.ptwriter import PtWriter

from .arguments import Arguments, arguments_for, stored_arguments
from .blueprint import Blueprint
from .buffers import OUTPUT
from .choices import Choices, choose, same_coordinates
from .folders import TRACKER, FileRank, file_ranks, iteration_folder_name
from .groups import Membership
from .opaque import OpaqueValues
from .optimizer import DISTRIBUTED
from .rank_layout import RankLayout, Records
from .reader import MegatronNative
from .rng import RngMaker
from .shards import RankShard
from .state import COUNTER, OLD_RNG_KEYS, PER_RANK_KEYS
from .trees import TreeMaker, needs_distrib_file
from .view import TargetView


def megatron_target(source: Source, options: WriteOptions) -> Target:
    """Describe the legacy Megatron checkpoint that holds what the source has.

    Args:
        source: An opened checkpoint.
        options: What the user asked for.

    Raises:
        CheckpointError: It cannot be done; all problems together.
    """
    native = source.native
    if not isinstance(native, MegatronNative):
        raise Unsupported(f"from {source.format} to megatron: this pair of formats is not supported yet")
    report = Report(list(source.notes.lines))
    choices = _without_ranks(choose(source, native.args, options, report), native, options)
    _refuse_unknown(native, choices)
    writer = _Writer(source, native, choices, options, report)
    writer.note_vocabulary()
    writer.note_states()
    files = [file for at in file_ranks(choices.parallel) for file in writer.files(at)]
    view = TargetView(
        source.catalog, source.model, choices.padded_vocab_size, choices.dtype is not None and MASTER in source.states
    )
    tracker = "release" if source.state.release else str(source.state.iteration)
    return Target("megatron", choices.parallel, view, tuple(files), {TRACKER: tracker}, report)


def _without_ranks(choices: Choices, native: MegatronNative, options: WriteOptions) -> Choices:
    """Files that Megatron did not write have no ranks whose RNG could be kept, or derived from.

    Raises:
        UsageError: It was to be kept.
    """
    if native.shards:
        return choices
    if options.rng == "keep":
        raise UsageError(
            "--rng keep: the source has no RNG states of Megatron's\nLeave it out: fresh ones are written."
        )
    return replace(choices, rng="drop")


def _refuse_unknown(native: MegatronNative, choices: Choices) -> None:
    if native.unknown and choices.parallel.tp > 1:
        raise LayoutMismatch(
            f"{len(native.unknown)} parameters are in no table, and with one tensor-parallel rank their copies cannot be compared: "
            f"{', '.join(native.unknown[:5])}\nSay how they are cut with --rules rules.yaml (pattern → replicated, column, row, …)."
        )


@dataclass
class _Writer:
    source: Source
    native: MegatronNative
    choices: Choices
    options: WriteOptions
    report: Report

    @cached_property
    def same_ranks(self) -> bool:
        """Whether what belongs to a rank can stay with it."""
        return bool(self.native.shards) and same_coordinates(self.source.parallel, self.choices.parallel)

    @cached_property
    def blueprint(self) -> Blueprint:
        """The whole new checkpoint."""
        model, parallel = self.source.model, self.choices.parallel
        chunks = model_chunks(model.num_layers, parallel.pp, parallel.vpp, self.choices.split, model.mtp_layers)
        moments = tuple(state for state in self.source.states if state != MASTER)
        return Blueprint(
            self.source.role, model, Arguments(self._arguments(None)), self.choices, chunks, self.native.order, moments,
            self._state_dtypes(),
        )  # fmt: skip

    @cached_property
    def opaque(self) -> OpaqueValues:
        """Values of keys that are no parameters."""
        return OpaqueValues(self.native.shards, self.source.parallel, self.choices.parallel)

    @cached_property
    def rng(self) -> RngMaker:
        """Maker of RNG states."""
        saved = _saved_rng(self.native.shards[0]) if self.native.shards else []
        seed = self.native.args.integer("seed", 1234)
        return RngMaker(saved[0] if saved else None, self.source.state.iteration, seed)

    def files(self, at: FileRank) -> list[TargetFile]:
        """The files of one rank."""
        folder = iteration_folder_name(None if self.source.state.release else self.source.state.iteration)
        prefix = f"{folder}/{at.folder}"
        files = [TargetFile(f"{prefix}/model_optim_rng.pt", partial(self._model_file, at, folder))]
        if self.choices.optimizer == DISTRIBUTED and (at.holds_dense_optimizer or self._has_experts(at)):
            files.append(TargetFile(f"{prefix}/distrib_optim.pt", partial(self._distrib_file, at, folder)))
        return files

    def _has_experts(self, at: FileRank) -> bool:
        return self.choices.parallel.ep > 1 and self.source.model.num_experts > 0

    def _model_file(self, at: FileRank, folder: str) -> FileLayout:
        rank = RankLayout(self.blueprint, at, folder)
        return _layout(rank.model, lambda: self._trees(rank).model_tree())

    def _distrib_file(self, at: FileRank, folder: str) -> FileLayout:
        rank = RankLayout(self.blueprint, at, folder)
        assert needs_distrib_file(rank)
        return _layout(rank.distrib, lambda: self._trees(rank).distrib_tree())

    def _trees(self, rank: RankLayout) -> TreeMaker:
        return TreeMaker(
            rank, self.source.state, self._arguments(rank.at), self.opaque.value_for(rank), self._rng(rank.at),
            self._per_rank(rank.at), Membership(self.native.args, self.options.rules), self.native.scalars,
        )  # fmt: skip

    def _arguments(self, at: FileRank | None) -> dict[str, object]:
        """The arguments of a rank; for None those that all ranks share."""
        if not self.source.state.args:
            return {}
        dtype, old, rank = self.choices.dtype, self.source.state.args, None if at is None else at.rank
        if at is not None and self.same_ranks and self._same_world():
            old, rank = stored_arguments(self._shard_of(at).top) or old, None
        new = arguments_for(
            old, self.choices.parallel, self.choices.split, rank=rank,
            padded_vocab_size=self.choices.padded_vocab_size, params_dtype=dtype, optimizer=self.choices.optimizer,
        )  # fmt: skip
        if self.options.no_optimizer:
            new["no_save_optim"] = True  # what a run says that saved no optimizer
        if dtype is not None:
            import torch

            new["params_dtype"] = getattr(torch, dtype.name)
        return new

    def _state_dtypes(self) -> Mapping[str, DType]:
        """Element types of the optimizer's states, as the first trained parameter has them."""
        first = next((spec.name for spec in self.source.model.params if spec.trainable), None)
        found: dict[str, DType] = {}
        for state in self.source.states if first is not None else ():
            entry = self.source.catalog.get(TensorName(self.source.role, str(first), state))
            if entry is not None:
                found[state] = entry.dtype
        return found

    def _shard_of(self, at: FileRank) -> RankShard:
        """The source's rank that has the same folder."""
        return next(shard for shard in self.native.shards if shard.at.folder == at.folder)

    def _rng(self, at: FileRank) -> Sequence[Mapping[str, object]] | None:
        """One state, or one per data-parallel rank in a run with ``--data-parallel-random-init``."""
        wanted = self.choices.parallel.dp if self.native.args.flag("data_parallel_random_init") else 1
        kept = _saved_rng(self._shard_of(at))[:wanted] if self.choices.rng == "keep" else []
        if self.choices.rng == "keep" and not kept:
            return None
        make = self.rng.fresh if self.choices.rng == "drop" else self.rng.derived
        return [*kept, *(make(at, dp_rank) for dp_rank in range(len(kept), wanted))]

    def _per_rank(self, at: FileRank) -> Mapping[str, object]:
        if not self.same_ranks:
            return {}
        shard = self._shard_of(at)
        keys = (COUNTER, *PER_RANK_KEYS) if self._same_world() else (COUNTER,)
        return {key: shard.pt.materialize(shard.top[key]) for key in keys if key in shard.top}

    def note_vocabulary(self) -> None:
        """Say which rows of the embedding are new, or cut."""
        rows, new = self.source.model.padded_vocab_size, self.choices.padded_vocab_size
        if rows is None or new is None or rows == new:
            return
        if new > rows:
            text = f"vocabulary rows {rows}–{new - 1} are new padding and repeat row {rows - 1}, in every state; all others are kept"
        else:
            text = f"vocabulary rows {new}–{rows - 1} are padding that the new layout does not have, and are cut"
        self.report.add(Fate.CHANGED, text)

    def note_states(self) -> None:
        """Say what becomes of the RNG, of opaque values, of masters and of what only fits one layout."""
        fates = {
            "keep": (Fate.KEPT, "RNG states of every rank")
            if self.rng.saved
            else (Fate.NOTE, "the source has no RNG states"),
            "derive": (
                Fate.DERIVED,
                "RNG states: seeded from the source's, since its ranks are not those of the new layout",
            ),
            "drop": (Fate.LOST, "RNG states: fresh ones from args.seed, as --rng drop asks"),
        }
        if not self.native.shards:
            fates["drop"] = (
                Fate.DERIVED,
                "RNG states: fresh ones from args.seed, since Megatron did not write the source",
            )
        self.report.add(*fates[self.choices.rng])
        self.opaque.note(self.report)
        if self.choices.optimizer == DISTRIBUTED and MASTER not in self.source.states:
            self.report.add(Fate.DERIVED, "fp32 master parameters: copies of the fp32 parameters")
        if self.choices.dtype is not None:
            kept = MASTER in self.source.states and self.choices.optimizer is not None
            self.report.add(
                Fate.DERIVED if kept else Fate.LOST,
                f"parameters: converted to {self.choices.dtype}"
                + (" from their fp32 masters, which are kept" if kept else ""),
            )
        if any(key in shard.top for shard in self.native.shards for key in PER_RANK_KEYS) and not self._same_world():
            self.report.add(
                Fate.LOST, "rerun_state_machine: belongs to the ranks of the source; Megatron ignores it as well"
            )
        self._note_unused_output()
        self._note_batch()

    def _note_unused_output(self) -> None:
        """With tied embeddings and MTP, Megatron's last stage has an output layer of its own that it never uses."""
        if OUTPUT in self.source.model.unused and self.choices.parallel.pp == 1:
            self.report.add(
                Fate.NOTE, f"{OUTPUT}: left out; on one stage Megatron has no such weight, the embedding is tied"
            )

    def _same_world(self) -> bool:
        return self.same_ranks and self.source.parallel.world_size == self.choices.parallel.world_size

    def _note_batch(self) -> None:
        """Megatron asserts that the global batch divides into micro-batches of all data-parallel ranks."""
        args = self.native.args
        micro, batch = args.optional("micro_batch_size"), args.optional("global_batch_size")
        dp = self.choices.parallel.dp
        if micro and batch and batch % (micro * dp):
            self.report.add(
                Fate.NOTE,
                f"global_batch_size {batch} is not a multiple of micro_batch_size {micro} × DP {dp}: Megatron will want another --dp, "
                "or other batch sizes",
            )


def _layout(records: Records, tree: Callable[[], object]) -> FileLayout:
    def create(root: Path) -> FileWriter:
        path = root / records.file
        path.parent.mkdir(parents=True, exist_ok=True)
        return PtWriter.create(path, tree(), file=records.file)

    return FileLayout(records.entries, records.records, create)


def _saved_rng(shard: RankShard) -> list[Mapping[str, object]]:
    """The RNG states that a rank of the source stored, with real tensors."""
    stored = shard.top.get("rng_state")
    if stored is None and "rng_tracker_states" in shard.top:
        stored = [{key: shard.top[key] for key in OLD_RNG_KEYS if key in shard.top}]
    listed = shard.pt.materialize(stored)
    return listed if isinstance(listed, list) else []
