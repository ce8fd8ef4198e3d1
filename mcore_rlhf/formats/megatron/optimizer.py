"""Reading the optimizer of a checkpoint, whatever kind wrote it: where the states of every parameter lie.

``distrib_optim.pt`` alone does not say where a parameter lies, so two ways must agree: places are computed from registration order
and args; where the model file still has its parameters as views of one flat buffer, their storage offsets must be the same places.
That the values agree is checked when they are read. Optimizers that have parameters whole are read by :mod:`.plain`.

Source: megatron-core 0.16.1, ``optimizer/distrib_optimizer.py`` (``get_parameter_state_dp_zero``,
``load_parameter_state_from_dp_zero_legacy`` for files from before February 2024).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from mcore_rlhf.core.catalog import ADAMS, EXP_AVG, EXP_AVG_SQ, FLOATING, MASTER, row_major
from mcore_rlhf.errors import CheckpointError, Incomplete, LayoutMismatch, Problems, Unsupported
from mcore_rlhf.families.megatron.arguments import DISTRIBUTED, LAYER_WISE, PLAIN, Arguments
from mcore_rlhf.families.megatron.dealing import Dealing, Dealt, DealtFile, dealt_files
from mcore_rlhf.families.megatron.groups import (
    ChainedOptimizer,
    LocalParam,
    Membership,
    as_stored,
    by_adam,
    inner_state,
    keeps_nothing,
    members,
    merged_groups,
)
from mcore_rlhf.families.megatron.layout import LocalBuffer, buffers, is_shared_embedding
from mcore_rlhf.families.source import ParamGroup
from mcore_rlhf.layouts.flat import FlatPlace
from mcore_rlhf.layouts.parallel import ParallelConfig
from mcore_rlhf.layouts.pipeline import ModelChunk
from mcore_rlhf.models.megatron import is_buffer
from mcore_rlhf.models.spec import Rules
from mcore_rlhf.storage.pt import PtFile
from mcore_rlhf.storage.stored import StoredTensor

from .plain import LEFT, Scalars, States, groups_of, has_plain_state, members_of, plain_states
from .shards import RankShard

_PARAM = "param"
"""What its file calls masters."""


@dataclass(slots=True)
class OptimizerReading:
    """What was found of an optimizer.

    Args:
        kind: ``distributed``, ``plain``, ``layer_wise``, or None for a checkpoint without optimizer state.
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
    scalars: Scalars = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Run:
    """What reading needs to know of the run."""

    chunks: Mapping[tuple[int, int], ModelChunk]
    args: Arguments
    parallel: ParallelConfig
    rules: Rules
    has_mtp: bool
    stateless: bool


def read_optimizer(
    shards: Sequence[RankShard], chunks: Sequence[ModelChunk], args: Arguments, parallel: ParallelConfig, rules: Rules
) -> OptimizerReading:
    """Find the optimizer state of all ranks.

    Raises:
        CheckpointError: Files are missing, or contradict the parameters; all problems together.
    """
    kind = _kind(shards, args)
    by_place = {(chunk.pp_rank, chunk.vpp_rank): chunk for chunk in chunks}
    run = _Run(by_place, args, parallel, rules, any(chunk.mtp for chunk in chunks), _keeps_no_state(shards, args))
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
    reading.groups = merged_groups([groups for shard in shards for groups in _groups(shard)])
    found = {state for states in reading.places.values() for state in states}
    if by_adam(args.values) and EXP_AVG in found and EXP_AVG_SQ not in found:
        raise Incomplete(
            f"{shards[0].pt.directory.path}: args say that Adam trained it, and no parameter has {EXP_AVG_SQ}\n{LEFT}"
        )
    usual = [state for state in ADAMS if state in found]
    reading.states = (*usual, *sorted(found - set(usual)))
    with_state = {name for _, _, name in reading.places}
    if with_state:  # SGD without momentum trains all, and keeps nothing of any
        reading.frozen = frozenset(trained - with_state)
    return reading


def _kind(shards: Sequence[RankShard], args: Arguments) -> str | None:
    """Which optimizer wrote the files.

    Raises:
        Incomplete: Some ranks have ``distrib_optim.pt`` and others lack it.
    """
    with_file = [shard for shard in shards if shard.distrib is not None]
    if not with_file:
        members = [member for shard in shards for member in _members(shard)]
        if any(shard.dealt for shard in shards) or (members and args.layer_wise):
            return LAYER_WISE
        if any(map(has_plain_state, members)) or (members and _keeps_no_state(shards, args)):
            return PLAIN
        if any(inner_state(member).get("param_groups") for member in members):
            raise Incomplete(
                f"{shards[0].pt.file} has param groups, but no rank has a distrib_optim.pt with their state\n"
                "Restore the files, or convert the weights alone with --no-optimizer."
            )
        return None
    if both := [shard for shard in with_file if shard.dealt]:
        raise Unsupported(
            f"{both[0].at.folder}: a layer-wise optimizer that deals parameters by layout, and a distributed one beside it "
            "(distrib_optim.pt): no release of Megatron reads such files; they go on at the layout that was saved\n"
            "Save with --no-use-layer-wise-param-layout to change the layout, or convert the weights alone with --no-optimizer."
        )
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


def _keeps_no_state(shards: Sequence[RankShard], args: Arguments) -> bool:
    """Whether a plain optimizer has nothing but its groups: SGD without momentum, or one that has not stepped yet.

    In fp16 the first iterations may all be skipped, until the loss scale is low enough.
    """
    if args.values.get("use_distributed_optimizer") is not False:
        return False
    members = [(shard, member) for shard in shards for member in _members(shard)]
    skipped = all("grad_scaler" in member and not has_plain_state(member) for _, member in members) and not any(
        group.fields.get("step") for shard, member in members for group in groups_of(member, shard.of_optimizer)
    )
    return skipped or keeps_nothing(args.values) or not shards[0].top.get("iteration")


def _members(shard: RankShard) -> list[Mapping[str, object]]:
    return members_of(shard.top.get("optimizer"), shard.of_optimizer.file)


def _groups(shard: RankShard) -> Iterator[list[ParamGroup]]:
    """The groups of a rank's model file, and those of the files that whole parameters are dealt to."""
    yield [group for member in _members(shard) for group in groups_of(member, shard.of_optimizer)]
    for pt in shard.dealt.values():
        yield [group for member in members_of(pt.tree, pt.file) for group in groups_of(member, pt)]


def _read_rank(shard: RankShard, kind: str, run: _Run, reading: OptimizerReading) -> set[str]:
    """Note the places of one rank's states; returns the names that could have some."""
    params, stored = _local_params(shard, run)
    chained = as_stored(members(run.args, run.parallel), len(_members(shard)))
    if kind == DISTRIBUTED:
        _read_flat(shard, chained, params, stored, run, reading)
    elif kind == PLAIN:
        _read_whole(
            shard, shard.of_optimizer, _members(shard), chained, lambda dealing: dealing.whole(params), run, reading
        )
    else:
        _read_dealt(shard, chained, params, run, reading)
    return {param.name for param in params}


def _read_flat(
    shard: RankShard,
    chained: tuple[ChainedOptimizer, ...],
    params: list[LocalParam],
    stored: Mapping[tuple[int, str], StoredTensor],
    run: _Run,
    reading: OptimizerReading,
) -> None:
    if shard.distrib is None:
        return
    numel, apart = sum(param.numel for param in params), run.args.experts_apart(run.parallel)
    contents = member_contents(shard.distrib.tree, shard.distrib.file, chained)
    groups = [groups_of(stored, shard.of_optimizer) for stored in _members(shard)]
    for number, (member, content) in enumerate(zip(chained, contents, strict=True)):
        owned = [param for param in params if member.owns(param, apart)]
        if content is None:
            if owned and (shard.at.holds_expert_optimizer if member.expert else shard.at.holds_dense_optimizer):
                raise Incomplete(
                    f"{shard.distrib.file}: the state of {'expert' if member.expert else 'dense'} parameters is missing"
                )
            continue

        def layout(candidates: Sequence[LocalParam], member: ChainedOptimizer = member) -> list[object]:
            return buffers(candidates, member, run.args, run.parallel, shard.at, numel)  # type: ignore[return-value]

        places = flat_states(content, shard.distrib.file, owned, stored, layout)  # type: ignore[arg-type]
        if len(groups) == len(chained):  # frozen parameters are in no buffer, and need none
            trained = ((param.name, len(param.shape)) for param in owned if (param.vpp_rank, param.name) in places)
            Membership(run.args, run.rules).require(shard.pt.file, trained, groups[number], apart)
        reading.places.update(((shard.at.folder, *key), states) for key, states in places.items())


def _read_whole(
    shard: RankShard,
    pt: PtFile,
    stored: Sequence[Mapping[str, object]],
    chained: tuple[ChainedOptimizer, ...],
    deal: Callable[[Dealing], Dealt],
    run: _Run,
    reading: OptimizerReading,
) -> None:
    """Note the states of parameters that one file has whole."""
    if not stored:
        raise Incomplete(
            f"{pt.file}: has no optimizer, and other ranks do\nCopy it again, or convert the weights with --no-optimizer."
        )
    if len(stored) != len(chained):
        raise Unsupported(f"{pt.file}: expected {len(chained)} chained optimizers, found {len(stored)}")
    groups = [groups_of(member, pt) for member in stored]
    dealt = deal(Dealing(chained, groups, Membership(run.args, run.rules), run.args.experts_apart(run.parallel)))
    for member, inside in zip(stored, dealt, strict=True):
        if any(inside) and not has_plain_state(member) and not run.stateless:
            raise Incomplete(
                f"{pt.file}: a chained optimizer has {sum(map(len, inside))} parameters and no state of any\n"
                "Restore the file, or convert the weights alone with --no-optimizer."
            )
        places, scalars = plain_states(member, pt, inside)
        reading.places.update(((shard.at.folder, *key), states) for key, states in places.items() if states)
        reading.scalars.update(scalars)


def _read_dealt(
    shard: RankShard,
    chained: tuple[ChainedOptimizer, ...],
    params: list[LocalParam],
    run: _Run,
    reading: OptimizerReading,
) -> None:
    """Note the states of parameters that are dealt to data-parallel ranks, each of which has a file.

    Raises:
        Incomplete: Some of the files are missing: what the model file has are the states of one rank.
    """
    expected = dealt_files(run.parallel, shard.at)
    missing = [file.name for file in expected if file.name not in shard.dealt]
    if missing and len(expected) > 1:
        raise Incomplete(
            f"{shard.pt.file}: the layer-wise optimizer deals whole parameters to {len(expected)} data-parallel ranks, and "
            f"{', '.join(missing)} beside it {'is' if len(missing) == 1 else 'are'} missing: the states of about "
            f"{len(missing)} of {len(expected)} of its {len(params)} parameters are lost; the model file repeats those of one rank\n"
            "Restore the files, or convert the weights alone with --no-optimizer."
        )
    for file in expected:
        pt = shard.dealt.get(file.name)
        stored = _members(shard) if pt is None else members_of(pt.tree, pt.file)

        def deal(dealing: Dealing, file: DealtFile = file) -> Dealt:
            return dealing.of_rank(params, file.dense, file.expert)

        _read_whole(shard, pt or shard.pt, stored, chained, deal, run, reading)


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


Layout = Callable[[Sequence[LocalParam]], list[LocalBuffer]]


def member_contents(
    tree: object, file: str, chained: tuple[ChainedOptimizer, ...]
) -> list[Mapping[object, object] | None]:
    """What the file has for each chained optimizer; None where another rank's file has it.

    Raises:
        Unsupported: The file is not built like a distributed optimizer's.
    """
    contents: list[Mapping[object, object] | None] = tree if isinstance(tree, list) else [tree]  # type: ignore[list-item]
    if len(contents) != len(chained):
        raise Unsupported(f"{file}: expected the state of {len(chained)} chained optimizers, found {len(contents)}")
    for content in contents:
        if content is not None and not isinstance(content, dict):
            raise Unsupported(f"{file}: expected dictionaries of buffers, found {type(content).__name__}")
    return contents


def flat_states(
    content: Mapping[object, object],
    file: str,
    params: Sequence[LocalParam],
    stored: Mapping[tuple[int, str], StoredTensor],
    layout: Layout,
) -> dict[tuple[int, str], States]:
    """Where the states of one member's parameters lie.

    Args:
        content: The member's part of the file.
        file: The file, for messages.
        params: The member's trainable parameters on this rank, in registration order.
        stored: Where each parameter itself lies, by (chunk, name).
        layout: Lays out parameters in buffers.

    Returns:
        By (chunk, name): state name → where it lies.

    Raises:
        LayoutMismatch: The sizes, or the storage offsets, contradict the computed places.
    """
    candidates = [params, _views_of_buffers(params, stored)]
    reason = ""
    for candidate in candidates:
        buffers = layout(candidate)
        reason = _contradiction(buffers, content, stored)
        if not reason:
            return _located(buffers, content, candidate, file)
    raise LayoutMismatch(
        f"{file}: {reason}\nThe bucket or padding options in args may not be those of the run, or some parameters were "
        "frozen: mark those with 'trainable: false' in --rules."
    )


def _views_of_buffers(params: Sequence[LocalParam], stored: Mapping[tuple[int, str], StoredTensor]) -> list[LocalParam]:
    """Only the parameters that are views of a storage larger than themselves: frozen ones are not in any buffer."""
    return [p for p in params if stored[p.vpp_rank, p.name].record.numel > p.numel]


def _contradiction(
    buffers: Sequence[LocalBuffer], content: Mapping[object, object], stored: Mapping[tuple[int, str], StoredTensor]
) -> str:
    """What the file, or the model file's storage offsets, say against a layout; empty when nothing."""
    indices = [key for key in content if isinstance(key, int)]
    if len(indices) != len(buffers):
        return f"{len(indices)} buffers stored, {len(buffers)} expected"
    for index, buffer in enumerate(buffers):
        states = _buffer_states(content, index)
        found = {name: sum(t.shape[0] for t in tensors) for name, tensors in states.items()}
        wrong = {name: numel for name, numel in found.items() if numel != buffer.flat.numel_unpadded}
        if wrong or not found:
            return (
                f"buffer {index} should have {buffer.flat.numel_unpadded} elements, computed from the model's parameters; "
                f"found {wrong or 'none'}"
            )
        if moved := _moved(buffer, stored):
            return f"buffer {index}: {moved}"
    return ""


def _moved(buffer: LocalBuffer, stored: Mapping[tuple[int, str], StoredTensor]) -> str:
    """A parameter whose storage offset in the model file is not its computed place, where the file still has views."""
    for place in buffer.flat.places:
        tensor = stored[buffer.vpp_rank, place.name]
        is_view = tensor.record.numel == buffer.flat.numel
        if is_view and tensor.start != place.buffer_start:
            return f"{place.name} is at {tensor.start} of the model's flat storage, computed {place.buffer_start}"
    return ""


def _buffer_states(content: Mapping[object, object], index: int) -> dict[str, list[StoredTensor]]:
    """State name → its tensors (one, or one per bucket in old files)."""
    by_dtype = content.get(index)
    if not isinstance(by_dtype, dict) or len(by_dtype) != 1:
        raise Unsupported(
            f"distributed optimizer: buffer {index} should have one entry per dtype pair, found {by_dtype!r:.80}"
        )
    (states,) = by_dtype.values()
    result: dict[str, list[StoredTensor]] = {}
    for name, value in states.items():
        if is_flat(value):
            result[MASTER if name == _PARAM else str(name)] = value if isinstance(value, list) else [value]
    return result


def is_flat(value: object) -> bool:
    """Whether a value of a buffer is a state of its parameters: one flat tensor, or one per bucket in old files."""
    tensors = value if isinstance(value, list) else [value]
    return all(isinstance(tensor, StoredTensor) and len(tensor.shape) == 1 for tensor in tensors)


def _located(
    buffers: Sequence[LocalBuffer], content: Mapping[object, object], params: Sequence[LocalParam], file: str
) -> dict[tuple[int, str], States]:
    shapes = {(p.vpp_rank, p.name): p.shape for p in params}
    located: dict[tuple[int, str], States] = {}
    for index, buffer in enumerate(buffers):
        states = _buffer_states(content, index)
        if gone := [_PARAM if state == MASTER else state for state in (MASTER, EXP_AVG) if state not in states]:
            raise Incomplete(
                f"{file}: buffer {index} has no {gone[0]!r}, which a distributed optimizer always writes\n{LEFT}"
            )
        for state, tensors in states.items():
            ends = list(accumulate(t.shape[0] for t in tensors))
            for place in buffer.flat.places:
                tensor, start = _bucket_of(place, tensors, ends, file)
                shape = shapes[buffer.vpp_rank, place.name]
                at = StoredTensor(tensor.record, tensor.start + start, shape, row_major(shape))
                located.setdefault((buffer.vpp_rank, place.name), {})[state] = at
    return located


def _bucket_of(
    place: FlatPlace, tensors: Sequence[StoredTensor], ends: Sequence[int], file: str
) -> tuple[StoredTensor, int]:
    """The stored tensor that holds a parameter's state, and where in it that begins."""
    for tensor, end in zip(tensors, ends, strict=True):
        start = place.file_start - (end - tensor.shape[0])
        if start >= 0 and place.file_start + place.numel <= end:
            return tensor, start
    raise Unsupported(
        f"{file}: {place.name} lies across two buckets of an old file; save it once with a newer Megatron"
    )
