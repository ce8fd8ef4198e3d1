"""Opening a legacy Megatron checkpoint: folders, arguments, shards and optimizer become one Source.

Sources: Megatron-LM core_v0.16.1, ``megatron/training/checkpointing.py`` (``generate_state_dict``, ``load_checkpoint``);
megatron-core 0.16.1, ``optimizer/optimizer.py``, ``optimizer/distrib_optimizer.py`` (``state_dict``,
``get_parameter_state_dp_zero``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from mcore_rlhf.core.account import Report
from mcore_rlhf.core.facts import Fate, Item, Kind, Rule, same
from mcore_rlhf.errors import Incomplete, LayoutMismatch, Problems, Unsupported
from mcore_rlhf.families.inventory import Unplaced
from mcore_rlhf.families.megatron.adapted import GAPS, BesideIteration
from mcore_rlhf.families.megatron.arguments import (
    DISTRIBUTED,
    LAYER_WISE,
    NO_ARGUMENTS,
    Arguments,
    check_against_arguments,
    stored_arguments,
)
from mcore_rlhf.families.megatron.folders import FoundIteration, file_ranks, locate, numbers_in, rank_folders
from mcore_rlhf.families.megatron.groups import look_at_optimizer
from mcore_rlhf.families.megatron.modelopt import KEY as MODELOPT
from mcore_rlhf.families.megatron.run_config import arguments_beside
from mcore_rlhf.families.megatron.state import (
    COUNTER,
    GONE,
    LAID_OUT,
    OLD_RNG_KEYS,
    PER_RANK_KEYS,
    RNG_KEYS,
    SCHEDULER_KEYS,
    UNSCHEDULED,
    MegatronState,
    is_timeless,
    scheduler_in,
)
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.families.run_folders import OF_ROLLS_LORA, PEFT_CONFIG, adapted_step, named_step, refuse_unadapted
from mcore_rlhf.families.source import FROZEN, ITERATION, ParamGroup, Source, TrainingState
from mcore_rlhf.layouts.parallel import ParallelConfig
from mcore_rlhf.layouts.pipeline import ModelChunk
from mcore_rlhf.models.megatron import EMBEDDING, OUTPUT, in_registration_order
from mcore_rlhf.models.spec import ModelSpec, ParamSpec
from mcore_rlhf.storage.paths import ReadablePath
from mcore_rlhf.storage.pt import PtFile
from mcore_rlhf.storage.record_file import StoredFile
from mcore_rlhf.storage.stored import StoredTensor

from .optimizer import OptimizerReading, is_flat, read_optimizer
from .parameters import HoldingRank, PartitionFinder, StoredTensors
from .shards import MODEL_KEY, RankFiles, RankShard, check_keys, check_ranks, globalize

_MODELOPT_KEYS = re.compile(rf"{MODELOPT}(_\d{{1,9}})?")
"""What modelopt's keys at the top of a legacy file are called: with a number, that of one model chunk, where a rank has several."""


@dataclass(frozen=True, slots=True)
class OpenedRun:
    """The rank files of a checkpoint, held against its arguments.

    Args:
        located: Where it is.
        args: Its stored arguments.
        args_file: Where they are from.
        parallel: The degrees of the files.
        shards: All ranks, under global names.
        chunks: The model chunks as the files have them.
        around: What lies beside the iteration.
    """

    located: FoundIteration
    args: Arguments
    args_file: str
    parallel: ParallelConfig
    shards: list[RankShard]
    chunks: tuple[ModelChunk, ...]
    around: BesideIteration = field(default_factory=BesideIteration)

    @classmethod
    def of(cls, located: FoundIteration, options: ReadOptions, notes: Report) -> OpenedRun:
        """Open the files of all ranks.

        Raises:
            CheckpointError: They are incomplete, damaged, or contradict each other.
        """
        folders = rank_folders(located.folder)
        files = RankFiles(located, options.stubs, options.optimizer)
        args_file, values = files.first_arguments(folders)
        if not values and (beside := arguments_beside(located.folder))[1]:
            notes.through(
                [NO_ARGUMENTS], {"file": args_file, "instead": f"they are those of {beside[0]} beside the ranks"}
            )
            args_file, values = beside
        args = Arguments(values, f"args in {args_file}")
        parallel = _check_folders(args, args_file, folders, notes)
        shards = files.shards(file_ranks(parallel))
        check_ranks(shards, located, notes)
        _check_virtual_parts(shards, parallel)
        num_layers = globalize(shards, parallel, args.num_experts or None)
        check_keys(shards, args)
        around = BesideIteration()
        if adapted_step(located.folder) is not None:
            around = BesideIteration.of(located.root, options)
            notes.through(GAPS, (around, parallel.world_size))
            for shard in shards:
                shard.top = {**shard.top, **around.top, **around.of_rank(parallel, shard.at)}
        return cls(located, args, args_file, parallel, shards, _model_chunks(shards, parallel, num_layers), around)

    @property
    def num_layers(self) -> int:
        """Decoder layers of the model."""
        return sum(chunk.num_layers for chunk in self.chunks)


_OF_EXPERTS: Rule[str] = Rule(
    Fate.NOTE, "{found}: its last number is an expert-parallel rank, not a pipeline stage, as args say", str
)


def _check_folders(args: Arguments, args_file: str, folders: Sequence[str], notes: Report) -> ParallelConfig:
    """The degrees that the arguments give, checked against the rank folders that are there.

    Raises:
        Incomplete: Folders are missing.
        LayoutMismatch: There are more folders than the arguments know, or other ones.
    """
    parallel = args.parallel() if args.values else _from_names(folders)
    if not args.values:
        notes.through([NO_ARGUMENTS], {"file": args_file, "instead": f"the folder names are read as {parallel}"})
    expected = {at.folder for at in file_ranks(parallel)}
    missing, extra = sorted(expected - set(folders)), sorted(set(folders) - expected)
    where = f"args in {args_file} say {parallel}, which is {len(expected)} rank folders"
    problems = Problems()
    if missing and extra:
        problems.add(
            LayoutMismatch,
            f"{where} ({_some(sorted(expected))}); found {len(folders)} ({_some(folders)})",
            "The files are of another layout than their args, or files of two checkpoints are mixed.",
        )
    elif missing:
        problems.add(
            Incomplete, f"{where}; missing: {_some(missing)}", "Copy the missing folders from the run's storage."
        )
    elif extra:
        problems.add(
            LayoutMismatch,
            f"{where}; not expected: {_some(extra)}",
            "Move them away if they are left over from another run.",
        )
    problems.raise_if_any()
    if parallel.ep > 1 and parallel.pp == 1:
        notes.through([_OF_EXPERTS], folders[-1])
    return parallel


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:6]) + (f", … ({len(names)})" if len(names) > 6 else "")


def _from_names(folders: Sequence[str]) -> ParallelConfig:
    """Degrees from folder names alone: two numbers are read as tensor and pipeline ranks."""
    numbers = [numbers_in(folder) for folder in folders]
    width = max(map(len, numbers))
    if width > 2:
        raise LayoutMismatch("the files store no args, and three numbers in folder names need them to be understood")
    tp = 1 + max(parts[0] for parts in numbers)
    pp = 1 + max(parts[1] for parts in numbers) if width == 2 else 1
    return ParallelConfig(tp=tp, pp=pp, etp=tp)


def read_megatron(path: ReadablePath, options: ReadOptions) -> Source:
    """Open a legacy checkpoint.

    Args:
        path: A root with a tracker, or an ``iter_XXXXXXX`` folder.
        options: Which step, which rules.

    Raises:
        CheckpointError: It is incomplete, damaged, or contradicts itself.
    """
    notes = Report()
    located = locate(path, options.step)
    refuse_unadapted(located.folder)
    if adapted_step(located.folder) is not None and (located.root / PEFT_CONFIG).is_file():
        raise Unsupported(f"{located.root}: {OF_ROLLS_LORA}")
    run = OpenedRun.of(located, options, notes)
    optimizer = OptimizerReading()
    if options.optimizer:
        optimizer = read_optimizer(run.shards, run.chunks, run.args, run.parallel, options.rules)
    holders, order, unknown = _holders(run, optimizer), _order(run.shards, run.parallel), list[str]()
    finder = PartitionFinder(run.args, run.parallel, options.rules, run.shards, notes, unknown)
    model = _model(run, finder.specs([name for name in order if name in holders], holders), optimizer.frozen, options)
    check_against_arguments(run.args, run.args_file, model, run.chunks, run.parallel)
    notes.through([FROZEN], sorted(optimizer.frozen))
    state = training_state(run.shards, run.located, optimizer.groups, notes)
    if adapted_step(located.folder) is not None:
        state = _as_adapted(state, run, notes)
    notes.through([UNSCHEDULED], (optimizer.kind, state.scheduler))
    notes.through([GONE], run.located)
    tensors = StoredTensors(
        options.role or "actor",
        model,
        optimizer.states,
        run.parallel,
        holders,
        own=_own_states(holders, optimizer.states),
    )
    source = Source(
        format="megatron",
        root=run.located.root,
        role=tensors.role,
        model=model,
        parallel=run.parallel,
        catalog=tensors.table(),
        state=state,
        files=(
            *(StoredFile.of_zip(pt.file, pt.directory) for shard in run.shards for pt in shard.files),
            *run.around.files,
        ),
        states=optimizer.states,
        optimizer=optimizer.kind,
        notes=notes,
        family=MegatronState(
            located=run.located,
            args=run.args,
            shards=run.shards,
            order=order,
            unknown=unknown,
            scalars=optimizer.scalars,
            by_size=optimizer.kind == LAYER_WISE and not run.args.flag(LAID_OUT),
        ),
        unplaced=unplaced_of(run.shards, with_optimizer=options.optimizer),
        parity=not run.args.has_narrow_params,
    )
    if optimizer.kind != DISTRIBUTED or not run.args.flag("use_precision_aware_optimizer"):
        return source
    from mcore_rlhf.families.megatron.remainders import with_masters_joined  # needs numpy

    return with_masters_joined(source)


def _model(run: OpenedRun, specs: Sequence[ParamSpec], frozen: frozenset[str], options: ReadOptions) -> ModelSpec:
    args = run.args
    return ModelSpec(
        tuple(replace(spec, trainable=False) if spec.name in frozen else spec for spec in specs),
        num_layers=run.num_layers,
        tied=args.tied,
        mtp_layers=args.mtp_layers,
        num_experts=args.num_experts,
        vocab_size=options.vocab_size or args.vocab_size,
        padded_vocab_size=next((spec.global_shape[0] for spec in specs if spec.name == EMBEDDING), None),
        unused=_unused(args, specs),
    )


def _tied_alias(run: OpenedRun) -> Mapping[str, str]:
    """Names that are copies of another parameter: the output layer of a tied model on another stage.

    With multi-token prediction on it, the last stage has a copy of the embedding itself, under its own name, and its output
    weight is not used. An output layer of another shape is a value head.

    Source: megatron-core 0.16.1, ``models/gpt/gpt_model.py`` (``shared_embedding_or_output_weight``).
    """
    if not run.args.tied or run.parallel.pp == 1 or run.chunks[-1].mtp:
        return {}
    tensors = [part.tensors for shard in run.shards for part in shard.parts]
    shapes = {name: held[name].shape for held in tensors for name in (EMBEDDING, OUTPUT) if name in held}
    return {OUTPUT: EMBEDDING} if shapes.get(OUTPUT) == shapes.get(EMBEDDING) else {}


def _holders(run: OpenedRun, optimizer: OptimizerReading) -> dict[str, list[HoldingRank]]:
    holders: dict[str, list[HoldingRank]] = {}
    alias = _tied_alias(run)
    for shard in run.shards:
        for part in shard.parts:
            for name, tensor in part.tensors.items():
                states = optimizer.places.get((shard.at.folder, part.vpp_rank, name), {})
                holders.setdefault(alias.get(name, name), []).append(HoldingRank(shard.at, tensor, states))
    return holders


def _own_states(holders: Mapping[str, Sequence[HoldingRank]], states: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """The states of parameters that have some, and not all."""
    found = {name: {state for holder in held for state in holder.states} for name, held in holders.items()}
    return {name: tuple(s for s in states if s in own) for name, own in found.items() if own and len(own) < len(states)}


def _order(shards: list[RankShard], parallel: ParallelConfig) -> list[str]:
    """All global names as one process that held the whole model would register them."""
    names: dict[str, None] = {}
    for vpp_rank in range(parallel.vpp):
        for shard in sorted(shards, key=lambda s: (s.at.pp_rank, s.at.rank)):
            for part in shard.parts:
                if part.vpp_rank == vpp_rank:
                    names.update(dict.fromkeys(part.order))
    return in_registration_order(list(names))


def _model_chunks(shards: list[RankShard], parallel: ParallelConfig, num_layers: int) -> tuple[ModelChunk, ...]:
    """The model chunks as the files have them."""
    parts = {(shard.at.pp_rank, part.vpp_rank): part for shard in shards for part in shard.parts}
    chunks, layer = [], 0
    for index in range(parallel.pp * parallel.vpp):
        vpp_rank, pp_rank = divmod(index, parallel.pp)
        part = parts.get((pp_rank, vpp_rank))
        count = part.local_layers if part else 0
        mtp = part is not None and any(name.startswith("mtp.") for name in part.order)
        last = index == parallel.pp * parallel.vpp - 1
        chunks.append(
            ModelChunk(
                pp_rank, vpp_rank, layer, count, mtp, index == 0, last, count > 0 and layer + count == num_layers
            )
        )
        layer += count
    return tuple(chunks)


def _check_virtual_parts(shards: list[RankShard], parallel: ParallelConfig) -> None:
    problems = Problems()
    for shard in shards:
        found = [part.vpp_rank for part in shard.parts]
        if found and max(found) >= parallel.vpp:
            problems.add(
                LayoutMismatch,
                f"{shard.pt.file}: holds model{max(found)}, but args say {parallel.vpp} model chunks per stage",
            )
        elif not found:
            problems.add(Incomplete, f"{shard.pt.file}: holds no model")
    problems.raise_if_any()


def _unused(args: Arguments, specs: Sequence[ParamSpec]) -> frozenset[str]:
    """With tied embeddings and MTP, the last of several stages registers an output weight that nothing reads.

    Source: megatron-core 0.16.1, ``models/gpt/gpt_model.py`` (``shared_embedding_or_output_weight``).
    """
    if not args.tied or not args.mtp_layers:
        return frozenset()
    return frozenset(spec.name for spec in specs if spec.name == OUTPUT and spec.partition.vocabulary)


_SMALL = 16 << 20
"""Unknown values are carried along up to this size; they are read at once."""

_KNOWN = {"args", "optimizer", *SCHEDULER_KEYS, *RNG_KEYS, *OLD_RNG_KEYS, *PER_RANK_KEYS}


_TIMELESS = "a frozen model's file, the same at every step: its iteration is the folder's, its random states a start's; it has no counters"


def training_state(
    shards: Sequence[RankShard], located: FoundIteration, groups: tuple[ParamGroup, ...], notes: Report
) -> TrainingState:
    """The state that all ranks share, taken from the first.

    Values under keys that are not known are kept where all ranks agree, and otherwise said to be lost.
    """
    first = shards[0].top
    iteration = first.get("iteration", first.get("total_iters", located.iteration or 0))
    scheduler = scheduler_in(first, notes)
    if is_timeless(shards[0].pt.tree):
        notes.add(Fate.NOTE, _TIMELESS)
    return TrainingState(
        iteration=int(iteration) if isinstance(iteration, int) else located.iteration or 0,
        release=located.release,
        args=stored_arguments(first),
        groups=groups,
        scheduler=shards[0].pt.materialize(scheduler) if scheduler is not None else None,
        grad_scaler=shards[0].of_optimizer.materialize(_grad_scaler(first.get("optimizer"))),
        other=_other(shards, notes),
    )


def _as_adapted(state: TrainingState, run: OpenedRun, notes: Report) -> TrainingState:
    """The same of a step of ROLL's, whose iteration is 1 at every step, and whose files say no arguments."""
    named = named_step(run.located.folder)
    where = "the step's counters, or its name" if named is not None else "the updates that its schedule counts"
    iteration = run.around.counted if named is None else named
    name = run.located.folder.name
    notes.through([ITERATION], {"at": iteration, "how": f"from {where}, since its trainer calls every step's {name}"})
    return replace(state, iteration=iteration, args=dict(run.args.values), by_steps=True)


def _members(optimizer: object) -> list[object]:
    return optimizer if isinstance(optimizer, list) else [optimizer]


def _grad_scaler(optimizer: object) -> object | None:
    members = _members(optimizer)
    return next((m["grad_scaler"] for m in members if isinstance(m, dict) and "grad_scaler" in m), None)


_NOT_OF_ALL: Rule[Mapping[str, str]] = Rule(
    Fate.LOST,
    "{key}: {why}",
    lambda lost: [{"key": key, "why": why, "of": [Item(Kind.VALUE, key)]} for key, why in lost.items()],
)


def _other(shards: Sequence[RankShard], notes: Report) -> dict[str, object]:
    kept: dict[str, object] = {}
    modelopt = [
        (shard, value) for shard in shards for key, value in shard.top.items() if _MODELOPT_KEYS.fullmatch(str(key))
    ]
    values = [shard.materialize(value) for shard, value in modelopt]
    lost = {}
    if values and all(same(value, values[0]) for value in values):
        kept[MODELOPT] = values[0]
    elif values:
        lost[MODELOPT] = "ModelOpt's, of which every rank has another: it names modules of its own rank"
    for key, value in {key: value for shard in reversed(shards) for key, value in shard.top.items()}.items():
        if key in _KNOWN or any(keys.fullmatch(str(key)) for keys in (MODEL_KEY, _MODELOPT_KEYS)):
            continue
        if key == COUNTER:
            kept[key] = max(_number(shard.top.get(key)) for shard in shards)  # each rank counts for itself
        elif _tensor_bytes(value) > _SMALL or not all(_equal_content(shards[0], shard, key) for shard in shards[1:]):
            lost[str(key)] = "not a key of Megatron's, and not equal on all ranks, or made of large tensors"
        else:
            kept[key] = shards[0].pt.materialize(value)
    notes.through([_NOT_OF_ALL], lost)
    return kept


def _number(value: object) -> float:
    return value if isinstance(value, int | float) else 0


def _equal_content(a: RankShard, b: RankShard, key: str) -> bool:
    return same(a.pt.materialize(a.top.get(key)), b.pt.materialize(b.top.get(key)))


def _tensor_bytes(value: object) -> int:
    if isinstance(value, dict):
        return sum(map(_tensor_bytes, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(_tensor_bytes, value))
    return value.record.nbytes if isinstance(value, StoredTensor) else 0


_OF_BUFFERS = ("buckets_coalesced", "per_bucket_numel", "per_bucket_numel_unpadded", "numel_unpadded")
"""Sizes and marks, which follow from the parameters."""


def unplaced_of(shards: Sequence[RankShard], *, with_optimizer: bool) -> tuple[str, ...]:
    """What is found in the files of all ranks.

    Args:
        shards: The ranks.
        with_optimizer: Whether the optimizer is read at all.
    """
    found, first = Unplaced(), _scheduler(shards[0])
    scaler = _scaler(shards[0], _grad_scaler(shards[0].top.get("optimizer")))
    for shard in shards:
        found.compare(shard.pt.file, _scheduler(shard), first)
        for number, member in enumerate(_members(shard.top.get("optimizer")) if with_optimizer else ()):
            if isinstance(member, dict) and "grad_scaler" in member:  # chained ones may have come to other scales
                found.compare(shard.pt.file, _scaler(shard, member["grad_scaler"]), scaler, f"optimizer.{number}")
        if with_optimizer:
            look_at_optimizer(found, shard.of_optimizer.file, shard.top.get("optimizer"))
            for dealt in shard.dealt.values():
                look_at_optimizer(found, dealt.file, dealt.tree)
        if with_optimizer and shard.distrib is not None:
            _look_flat(found, shard.distrib)
    return found.names


def _scaler(shard: RankShard, stored: object) -> dict[str, object]:
    return {"grad_scaler": shard.of_optimizer.materialize(stored)}


def _scheduler(shard: RankShard) -> dict[str, object]:
    return {key: shard.materialize(shard.top[key]) for key in SCHEDULER_KEYS if key in shard.top}


def _look_flat(found: Unplaced, distrib: PtFile) -> None:
    """Members with buffers by number, each of them by pair of dtypes; a state is one flat tensor, or one per bucket."""
    for member in distrib.tree if isinstance(distrib.tree, list) else [distrib.tree]:
        buffers = {number: of for number, of in (member or {}).items() if isinstance(number, int)}
        found.look(distrib.file, member, dict.fromkeys((*_OF_BUFFERS, *map(str, buffers))))
        for number, by_dtype in buffers.items():
            for states in by_dtype.values():
                flat = [str(state) for state, value in states.items() if is_flat(value)]
                found.look(distrib.file, states, dict.fromkeys((*_OF_BUFFERS, *flat)), f"buffer {number}")
