"""What a torch_dist folder lacks of what belongs to its own entries: ``.metadata`` is the only list of them, and names what is left.

Source: megatron-core 0.19.2, ``core/optimizer/distrib_optimizer.py`` (``sharded_param_state_dp_reshardable``: every bucket has each state;
``sharded_param_state_fs_model_space``: every state is called after its weight), ``core/transformer/utils.py``
(``sharded_state_dict_default``: an opaque value for each layer of a stack).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from math import prod

from mcore_rlhf.core.catalog import ADAMS, EXP_AVG, EXP_AVG_SQ, MASTER
from mcore_rlhf.errors import Incomplete, Problems, Unsupported
from mcore_rlhf.families.megatron.arguments import Arguments
from mcore_rlhf.families.megatron.groups import by_adam

from .folders import DistFolder, ShardKey
from .objects import EXTRA, RERUN_RANKS, RNG
from .optimizer import states_in

_ADVICE = "Copy the folder again, or use an older step. Where the optimizer alone lacks something, --no-optimizer converts the weights."


def refuse_adapter(folder: DistFolder) -> None:
    """Refuse a folder that has an adapter alone under peft's names, as ms-swift leaves it beside peft's own files.

    Its ``lora_B`` of gate and up lies as the tensor-parallel ranks had it, which no key says.
    Source: ms-swift 4.6.0, ``swift/megatron/utils/megatron_lm_utils.py`` (``_filter_adapter_state_dict``); mcore_bridge 1.6.5,
    ``tuners/lora.py`` (``LoraParallelLinear.sharded_state_dict``).

    Raises:
        Unsupported: It is one.
    """
    if folder.model and all(_LORA.search(key) for key in folder.model):
        beside = folder.located.root / "adapter_model.safetensors"
        raise Unsupported(
            f"{folder.located.folder}: holds an adapter alone, {next(iter(folder.model))}, …, as ranks had it: not read\n"
            + (f"Copy {beside.name} and adapter_config.json, which lie beside it, to a folder of their own: those are peft's."
               if beside.is_file() else "Let ms-swift save it with --save_safetensors true, as peft has it.")
        )  # fmt: skip


_LORA = re.compile(r"\.lora_[AB]\.|\.modules_to_save\.")


def require_entries(folder: DistFolder, args: Arguments, *, optimizer: bool) -> None:
    """Refuse a folder with a gap.

    Args:
        folder: It.
        args: The run's arguments.
        optimizer: Whether its states are wanted.

    Raises:
        Incomplete: There are gaps; all of them are listed.
    """
    problems = Problems()
    objects: dict[str, list[ShardKey]] = {}
    for one in folder.objects:
        objects.setdefault(one.key, []).append(one)
    of_optimizer = (*_orphans(folder), *_buckets(folder, args), *_groups(folder)) if optimizer else ()
    for text in (*_opaque(folder, objects), *_of_ranks(objects), *of_optimizer):
        problems.add(Incomplete, f"{folder.located.folder}: {text}", _ADVICE)
    problems.raise_if_any()


def _orphans(folder: DistFolder) -> Iterator[str]:
    """Adam's states of what is no weight."""
    for state in ADAMS:
        for key, tensor in folder.tensors.get(state, {}).items():
            if key not in folder.model:
                yield f"{tensor.fqn} is there, and {key} is missing, whose state it is"


def _buckets(folder: DistFolder, args: Arguments) -> Iterator[str]:
    """States that a distributed optimizer has of every bucket."""
    states = states_in(list(folder.flat))
    wanted = {MASTER, EXP_AVG, *({EXP_AVG_SQ} if by_adam(args.values) else ())}
    for state in sorted(wanted - states) if states else ():
        yield f"the buckets of the optimizer have no {state}, which a distributed optimizer has from its first step on"


def _opaque(folder: DistFolder, objects: Mapping[str, Sequence[ShardKey]]) -> Iterator[str]:
    """A stack of layers has an opaque value for each of them, or for none."""
    for key, found in objects.items():
        weight = folder.model.get(f"{key.removesuffix(EXTRA)}weight") if key.endswith(f".{EXTRA}") else None
        if weight is None or not found[0].shape or found[0].shape[:1] != weight.global_shape[:1]:
            continue
        there = {one.index[0] for one in found}
        for layer in sorted(set(range(min(found[0].shape[0], len(there) + 1))) - there):
            yield f"{key} of layer {layer} is missing, and others are there"


def _of_ranks(objects: Mapping[str, Sequence[ShardKey]]) -> Iterator[str]:
    """What every rank of a grid has a part of: the list says how large the grid is."""
    for key in (RNG, RERUN_RANKS):
        found = objects.get(key)
        if found and len(found) < prod(found[0].shape):
            yield f"{key} is of {len(found)} ranks, and says that there are {prod(found[0].shape)}"


def _groups(folder: DistFolder) -> Iterator[str]:
    """Data-parallel groups keep the same kinds of things: param groups, and how large their buckets are."""
    usual = {name for held in folder.groups.values() for name in held}
    for (member, group), held in sorted(folder.groups.items()):
        for name in sorted(usual - held.keys()):
            yield f"data-parallel group {group} of chained optimizer {member} has no {name!r}, and others have"
    with_buckets = {(key.member, key.group) for key in folder.flat} if folder.groups else set()
    for member, group in sorted(with_buckets - folder.groups.keys()):
        yield f"data-parallel group {group} of chained optimizer {member} has buckets, and no param groups"
