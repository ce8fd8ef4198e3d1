"""Megatron's tensors in files of another format that cuts nothing: what such a reader knows becomes a source that goes to every other."""

from __future__ import annotations

from dataclasses import replace

from mcore_rlhf.core.catalog import PARAM
from mcore_rlhf.core.chunks import Chunks
from mcore_rlhf.core.facts import Fate, Item, Rule
from mcore_rlhf.errors import Incomplete, Unsupported
from mcore_rlhf.families.inventory import WAITING, inventory_of, state_items
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.families.sidecar import Sidecar
from mcore_rlhf.families.source import Source, StoredFile
from mcore_rlhf.models.megatron import EMBEDDING, Traits, partition_of
from mcore_rlhf.models.spec import REPLICATED, ModelSpec, ParamSpec
from mcore_rlhf.storage.paths import ReadablePath

from .arguments import Arguments
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
        Incomplete: There are no arguments, or states of an optimizer without param groups.
        Unsupported: A name is none of Megatron's.
    """
    state = beside.state
    if not state.args:
        raise Incomplete(f"{root}: no arguments of the run are stored, and by them Megatron's tensors are known")
    args = Arguments(state.args)
    traits, specs = Traits(args.gated, args.transformer_engine, args.values), list[ParamSpec]()
    states = dict.fromkeys(tensor.state for tensor in catalog if tensor.state != PARAM)
    trained = {tensor.param for tensor in catalog if tensor.state != PARAM}
    for entry in catalog.entries():
        if entry.name.state == PARAM:
            param, partition = entry.name.param, partition_of(entry.name.param, traits)
            if partition is None and len(entry.global_shape) > 1:
                raise Unsupported(f"{root}: {param} is none of Megatron's names: how others cut it is not known")
            is_trained = not states or param in trained
            specs.append(ParamSpec(param, entry.global_shape, entry.dtype, partition or REPLICATED, is_trained))
    if states and not state.groups:
        raise Incomplete(
            f"{root}: has {', '.join(states)} of an optimizer, and no param groups, without which no run can load them"
        )
    rows = next((spec.global_shape[0] for spec in specs if spec.name == EMBEDDING), None)
    model = ModelSpec(
        tuple(specs),
        args.integer("num_layers"),
        args.tied,
        args.mtp_layers,
        args.num_experts,
        options.vocab_size or args.vocab_size,
        rows,
    )
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
