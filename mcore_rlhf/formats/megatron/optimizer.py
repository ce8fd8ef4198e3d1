"""Reading the optimizer of a checkpoint, whatever kind wrote it: where the states of every parameter lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mcore_rlhf.core.dtype import FLOATING
from mcore_rlhf.core.names import EXP_AVG, EXP_AVG_SQ, MASTER
from mcore_rlhf.errors import CheckpointError, Incomplete, Problems, Unsupported
from mcore_rlhf.families.megatron.arguments import DISTRIBUTED, PLAIN, Arguments
from mcore_rlhf.families.megatron.buffers import LocalParam, Member, buffers, is_shared_embedding, members
from mcore_rlhf.families.megatron.groups import Membership, inner_state, merged_groups
from mcore_rlhf.families.source import ParamGroup
from mcore_rlhf.layouts.parallel import ParallelConfig
from mcore_rlhf.layouts.pipeline import ModelChunk
from mcore_rlhf.models.megatron import is_buffer
from mcore_rlhf.models.rules import Rules
from mcore_rlhf.storage.ptfile import StoredTensor

from .flat_state import States, flat_states, member_contents
from .plain_state import has_plain_state, plain_states
from .shards import RankShard


@dataclass(slots=True)
class OptimizerReading:
    """What was found of an optimizer.

    Args:
        kind: ``distributed``, ``plain``, or None for a checkpoint without optimizer state.
        places: By (folder, chunk, name): state name → where it lies.
        groups: The param groups of all ranks.
        states: Names of the states, in the usual order.
        frozen: Global names of parameters without states.
        scalars: Values that a plain optimizer keeps per parameter, equal for all.
    """

    kind: str | None = None
    places: dict[tuple[str, int, str], States] = field(default_factory=dict)
    groups: tuple[ParamGroup, ...] = ()
    states: tuple[str, ...] = ()
    frozen: frozenset[str] = frozenset()
    scalars: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Run:
    """What reading needs to know of the run."""

    chunks: Mapping[tuple[int, int], ModelChunk]
    args: Arguments
    parallel: ParallelConfig
    rules: Rules
    has_mtp: bool


def read_optimizer(
    shards: Sequence[RankShard], chunks: Sequence[ModelChunk], args: Arguments, parallel: ParallelConfig, rules: Rules
) -> OptimizerReading:
    """Find the optimizer state of all ranks.

    Raises:
        CheckpointError: Files are missing, or contradict the parameters; all problems together.
    """
    kind = _kind(shards)
    by_place = {(chunk.pp_rank, chunk.vpp_rank): chunk for chunk in chunks}
    run = _Run(by_place, args, parallel, rules, any(chunk.mtp for chunk in chunks))
    reading = OptimizerReading(kind)
    if kind is None:
        return reading
    problems, trained = Problems(), set[str]()
    for shard in shards:
        try:
            trained.update(_read_rank(shard, kind, run, reading))
        except CheckpointError as error:
            problems.add(type(error), str(error).partition("\n")[0], str(error).partition("\n")[2])
    problems.raise_if_any()
    reading.groups = merged_groups([_groups(shard) for shard in shards])
    found = {state for states in reading.places.values() for state in states}
    usual = [state for state in (MASTER, EXP_AVG, EXP_AVG_SQ) if state in found]
    reading.states = (*usual, *sorted(found - set(usual)))
    with_state = {name for _, _, name in reading.places}
    reading.frozen = frozenset(trained - with_state)
    return reading


def _kind(shards: Sequence[RankShard]) -> str | None:
    """Which optimizer wrote the files.

    Raises:
        Incomplete: Some ranks have ``distrib_optim.pt`` and others lack it.
    """
    with_file = [shard for shard in shards if shard.distrib is not None]
    if not with_file:
        if any(has_plain_state(member) for shard in shards for member in _members(shard)):
            return PLAIN
        if any(inner_state(member).get("param_groups") for shard in shards for member in _members(shard)):
            raise Incomplete(
                f"{shards[0].pt.file} has param groups, but no rank has a distrib_optim.pt with their state\n"
                "Restore the files, or convert the weights alone with --no-optimizer."
            )
        return None
    if not any(map(_members, shards)):
        raise Incomplete(
            f"{with_file[0].pt.file}: no 'optimizer' with its param groups, but there is a distrib_optim.pt\n"
            "Restore the file, or convert the weights alone with --no-optimizer."
        )
    expected = [s for s in shards if s.at.holds_dense_optimizer or len(_members(s)) > 1]
    missing = [shard.at.folder for shard in expected if shard.distrib is None]
    if missing:
        raise Incomplete(
            f"distrib_optim.pt is missing in {', '.join(missing)}, but {with_file[0].at.folder} has one\n"
            "Restore the file, or convert the weights alone with --no-optimizer."
        )
    return DISTRIBUTED


def _members(shard: RankShard) -> list[Mapping[str, object]]:
    stored = shard.top.get("optimizer")
    if stored is None:
        return []
    listed: list[Mapping[str, object]] = stored if isinstance(stored, list) else [stored]  # type: ignore[list-item]
    if not all(isinstance(member, dict) for member in listed):
        raise Unsupported(f"{shard.pt.file}: 'optimizer' should hold dictionaries, found {type(listed[0]).__name__}")
    return listed


def _groups(shard: RankShard) -> list[ParamGroup]:
    return [group for number, _ in enumerate(_members(shard)) for group in _member_groups(shard, number)]


def _member_groups(shard: RankShard, number: int) -> list[ParamGroup]:
    member = _members(shard)[number]
    stored = inner_state(member).get("param_groups", [])
    if not isinstance(stored, list) or not all(isinstance(group, dict) for group in stored):
        raise Unsupported(f"{shard.pt.file}: the optimizer's param_groups should be a list of dictionaries")
    return [
        ParamGroup(
            shard.pt.materialize({key: value for key, value in group.items() if key != "params"}),
            expert=bool(group.get("is_expert_parallel")),
        )
        for group in stored
    ]


def _read_rank(shard: RankShard, kind: str, run: _Run, reading: OptimizerReading) -> set[str]:
    """Note the places of one rank's states; returns the names that could have some."""
    params, stored = _local_params(shard, run)
    chained = members(run.args, run.parallel)
    if kind == DISTRIBUTED:
        _read_flat(shard, chained, params, stored, run, reading)
    else:
        _read_plain(shard, chained, params, run, reading)
    return {param.name for param in params}


def _read_flat(
    shard: RankShard,
    chained: tuple[Member, ...],
    params: list[LocalParam],
    stored: Mapping[tuple[int, str], StoredTensor],
    run: _Run,
    reading: OptimizerReading,
) -> None:
    if shard.distrib is None:
        return
    numel = sum(param.numel for param in params)
    contents = member_contents(shard.distrib.tree, shard.distrib.file, chained)
    for member, content in zip(chained, contents, strict=True):
        owned = [param for param in params if member.owns(param, run.parallel.ep)]
        if content is None:
            if owned and (member.expert or shard.at.holds_dense_optimizer):
                raise Incomplete(
                    f"{shard.distrib.file}: the state of {'expert' if member.expert else 'dense'} parameters is missing"
                )
            continue

        def layout(candidates: Sequence[LocalParam], member: Member = member) -> list[object]:
            return buffers(candidates, member, run.args, run.parallel, shard.at, numel)  # type: ignore[return-value]

        places = flat_states(content, shard.distrib.file, owned, stored, layout)  # type: ignore[arg-type]
        reading.places.update(((shard.at.folder, *key), states) for key, states in places.items())


def _read_plain(
    shard: RankShard, chained: tuple[Member, ...], params: list[LocalParam], run: _Run, reading: OptimizerReading
) -> None:
    stored = _members(shard)
    if len(stored) != len(chained):
        raise Unsupported(f"{shard.pt.file}: expected {len(chained)} chained optimizers, found {len(stored)}")
    for number, member in enumerate(chained):
        owned = [param for param in params if member.owns(param, run.parallel.ep)]
        membership = Membership(run.args, run.rules)
        groups = _member_groups(shard, number)
        places, scalars = plain_states(stored[number], shard.pt, owned, groups, membership)
        reading.places.update(((shard.at.folder, *key), states) for key, states in places.items() if states)
        reading.scalars.update(scalars)


def _local_params(shard: RankShard, run: _Run) -> tuple[list[LocalParam], dict[tuple[int, str], StoredTensor]]:
    """The parameters of a rank that an optimizer may own, in registration order, and where they lie."""
    params, stored = [], {}
    for part in shard.parts:
        chunk = run.chunks[shard.at.pp_rank, part.vpp_rank]
        for name, tensor in part.tensors.items():
            if is_buffer(name) or tensor.record.dtype not in FLOATING or run.rules.trainable(name) is False:
                continue
            shared = is_shared_embedding(name, chunk, run.parallel.pp, run.args.tied, run.has_mtp)
            params.append(LocalParam(name, part.vpp_rank, tensor.shape, tensor.record.dtype, shared))
            stored[part.vpp_rank, name] = tensor
    return params, stored
