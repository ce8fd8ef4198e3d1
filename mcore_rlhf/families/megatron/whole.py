"""Megatron's tensors in files of another format that cuts nothing: what such a reader knows becomes a source that goes to every other."""

from __future__ import annotations

from dataclasses import replace
from operator import index

from mcore_rlhf.core.catalog import PARAM, DType, Record, Shape, TensorName, dtype_of
from mcore_rlhf.core.chunks import Chunks
from mcore_rlhf.core.facts import Fate, Item, Rule
from mcore_rlhf.errors import Incomplete, Unsupported, Untrusted, shown
from mcore_rlhf.families.inventory import WAITING, inventory_of, state_items
from mcore_rlhf.families.options import ReadOptions, WriteOptions
from mcore_rlhf.families.sidecar import STATE, Sidecar
from mcore_rlhf.families.source import Source, StoredFile
from mcore_rlhf.layouts.parallel import ParallelConfig
from mcore_rlhf.models.megatron import EMBEDDING, Traits, layer_of, partition_of
from mcore_rlhf.models.spec import REPLICATED, ModelSpec, ParamSpec
from mcore_rlhf.storage.paths import ReadablePath

from .arguments import Arguments, check_against_arguments
from .complete import refuse_part, require_complete
from .state import MegatronState


def whole_source(
    name: str,
    root: ReadablePath,
    catalog: Chunks,
    beside: Sidecar,
    files: tuple[StoredFile, ...],
    options: ReadOptions,
) -> Source:
    """A source of whole tensors under Megatron's names.

    How a parameter is cut by others follows from its name and the run's arguments: nobody has to say it, and nobody can say it wrong.

    Args:
        name: The format's.
        root: The folder.
        catalog: Every tensor, whole, under Megatron's names and states.
        beside: What is no tensor: the training state, with the run's arguments in it as Megatron stores them.
        files: All files of the format, its index too.
        options: The user's: whose model it is, how many words there are.

    Raises:
        Incomplete: There are no arguments, or states of an optimizer without param groups; a file ends before a tensor does; a layer
            has not what others have.
        Untrusted: A tensor lies in a file that is not listed, or before its beginning.
        LayoutMismatch: The arguments are those of another model.
        Unsupported: A name is none of Megatron's.
    """
    state, lengths = beside.state, {file.path: file.nbytes for file in files}
    if not state.args:
        raise Incomplete(f"{root}: no arguments of the run are stored, and by them Megatron's tensors are known")
    args = Arguments(state.args)
    traits, specs = Traits(args.gated, args.transformer_engine, args.values), list[ParamSpec]()
    states = dict.fromkeys(tensor.state for tensor in catalog if tensor.state != PARAM)
    trained = {tensor.param for tensor in catalog if tensor.state != PARAM}
    for entry in catalog.entries():
        for record in (chunk.record for chunk in entry.chunks):
            if min(index(record.byte_offset), record.nbytes) < 0 or record.file not in lengths:
                raise Untrusted(
                    f"{root}: {record.key} is said to be bytes {_bytes(record)} of {shown(record.file)}: no file has those"
                )
            if record.byte_offset + record.nbytes > lengths[record.file]:
                raise Incomplete(
                    f"{root / record.file}: ends at byte {lengths[record.file]}, and {record.key} is bytes {_bytes(record)}\n"
                    "Copy it again from where it came from."
                )
        if entry.name.state == PARAM:
            param, partition = entry.name.param, partition_of(entry.name.param, traits)
            if partition is None and len(entry.global_shape) > 1:
                raise Unsupported(f"{root}: {param} is none of Megatron's names: how others cut it is not known")
            is_trained = not states or param in trained
            specs.append(ParamSpec(param, entry.global_shape, entry.dtype, partition or REPLICATED, is_trained))
    require_complete(str(root), {spec.name for spec in specs}, args)
    if states and not state.groups:
        raise Incomplete(
            f"{root}: has {', '.join(states)} of an optimizer, and no param groups, without which no run can load them"
        )
    rows = next((spec.global_shape[0] for spec in specs if spec.name == EMBEDDING), None)
    model = ModelSpec(
        tuple(specs),
        1 + max((layer for spec in specs if (layer := layer_of(spec.name)) is not None), default=-1),
        args.tied,
        args.mtp_layers,
        args.num_experts,
        options.vocab_size or args.vocab_size,
        rows,
    )
    of_model = {
        name: value for name, value in args.values.items() if name != "padded_vocab_size"
    }  # the rows say it themselves
    check_against_arguments(Arguments(of_model), STATE, model, None, ParallelConfig())
    return Source(
        format=name,
        root=root,
        role=options.role or "actor",
        model=model,
        catalog=catalog,
        state=state,
        files=files,
        states=tuple(states),
        optimizer="distributed" if states else None,
        origin=beside.origin,
        family=MegatronState(None, args, [], [spec.name for spec in specs], []),
    )


def _bytes(record: Record) -> str:
    return f"{record.byte_offset} to {record.byte_offset + record.nbytes}"


def whole_tensors(source: Source, options: WriteOptions) -> tuple[Chunks, list[tuple[TensorName, Shape, DType]]]:
    """The catalogue for files of whole tensors, and name, shape and type of everything that they are to hold.

    A weight is among them also where the source stores its fp32 master alone.

    Args:
        source: What is written.
        options: Whether with the optimizer, and what type weights get.

    Raises:
        Unsupported: It is a part of a model.
    """
    if (family := MegatronState.of(source)) is not None:
        refuse_part(source, family.args, "a file of whole tensors")
    dtype, wanted = dtype_of(options.dtype) if options.dtype else None, list[tuple[TensorName, Shape, DType]]()
    for spec in source.model.params:
        wanted.append((TensorName(source.role, spec.name, PARAM), spec.global_shape, dtype or spec.dtype))
        for state in () if options.no_optimizer else source.states:
            if (entry := source.catalog.get(TensorName(source.role, spec.name, state))) is not None:
                wanted.append((entry.name, entry.global_shape, entry.dtype))
    return source.catalog.cast(dtype), wanted


def whole_sidecar(source: Source) -> tuple[Sidecar, dict[Item, object]]:
    """What lies beside the tensors of a source under Megatron's names, and the items that it holds: all but what is of single ranks.

    The arguments are in it by which :func:`whole_source` knows the tensors, also those of a source of another family, which were made of
    its description.

    Args:
        source: Megatron's, or one that is seen as Megatron's.
    """
    family = MegatronState.of(source)
    state = source.state if family is None else replace(source.state, args=dict(family.args.values))
    waiting: dict[Item, object] = {WAITING: source.origin} if source.origin else {}
    return Sidecar(state=state, origin=source.origin), {**dict(state_items(state)), **waiting}


OF_RANKS: Rule[Source] = Rule(
    Fate.LOST, "what is of single ranks: files of whole tensors have no place for it",
    lambda source: {"of": inventory_of(source).keys() - whole_sidecar(source)[1].keys()},
)  # fmt: skip
"""What becomes of what :func:`whole_sidecar` does not hold."""
