"""What a source of Megatron's family has besides tensors, whichever of Megatron's formats it was read from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol

from mcore_rlhf.core.account import Inventory, Item, Kind
from mcore_rlhf.errors import Unsupported
from mcore_rlhf.families.inventory import OPAQUE
from mcore_rlhf.families.source import Family, NewNames
from mcore_rlhf.storage.ptfile import StoredTensor

from .arguments import Arguments
from .folders import FileRank, Located

SCHEDULER_KEYS = ("opt_param_scheduler", "lr_scheduler")
RNG_KEYS = ("rng_state",)
OLD_RNG_KEYS = ("random_rng_state", "np_rng_state", "torch_rng_state", "cuda_rng_state", "rng_tracker_states")
PER_RANK_KEYS = ("rerun_state_machine",)
COUNTER = "num_floating_point_operations_so_far"
OF_RANKS = {
    **{key: Item(Kind.RNG, key) for key in (*RNG_KEYS, *OLD_RNG_KEYS)},
    **{key: Item(Kind.VALUE, key) for key in PER_RANK_KEYS},
}
"""Keys of which every rank has a value of its own, and the items that these values are."""


@dataclass(slots=True)
class ModelPart:
    """One model chunk in one rank's file.

    Args:
        vpp_rank: Its number on this rank.
        tensors: Global name → where the local tensor lies, in registration order.
        opaque: Global name → whatever else the state dict has there (``_extra_state``).
        local_layers: Decoder layers found in it.
    """

    vpp_rank: int
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    opaque: dict[str, object] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    local_layers: int = 0


class RankValues(Protocol):
    """What a source has for one rank that belongs to it alone, whichever format stored it."""

    @property
    def at(self) -> FileRank:
        """Which rank it is."""
        ...

    @property
    def top(self) -> Mapping[str, object]:
        """Values by the key that they have at the top of a legacy file: ``args``, ``rng_state``, counters."""
        ...

    @property
    def parts(self) -> Sequence[ModelPart]:
        """Its model chunks, as far as they have values that are no parameters."""
        ...

    def materialize(self, value: object) -> Any:
        """A value of :attr:`top` or :attr:`parts` with real tensors in it."""
        ...


@dataclass(slots=True)
class MegatronState(Family):
    """What only a Megatron target needs of a Megatron source.

    Args:
        located: Where it is; None for a source of another family that is seen as Megatron's.
        args: The stored arguments.
        shards: All ranks: their opaque values and RNG states; none where Megatron did not write the files.
        order: All names, opaque ones included, in registration order.
        unknown: Parameters about which nothing is known, because there is one tensor-parallel rank only.
        scalars: Values that the plain optimizer keeps per parameter and that are equal for all.
    """

    names: ClassVar[str] = "megatron"
    located: Located | None
    args: Arguments
    shards: Sequence[RankValues]
    order: list[str]
    unknown: list[str]
    scalars: dict[str, object] = field(default_factory=dict)

    def inventory(self) -> Inventory:
        """What its ranks have, item by item, beside what all of them share."""
        keys = dict.fromkeys(key for shard in self.shards for key in shard.top if key in OF_RANKS)
        opaque = [v for shard in self.shards for part in shard.parts for v in part.opaque.values() if v is not None]
        return {
            **{OF_RANKS[key]: tuple(shard.top.get(key) for shard in self.shards) for key in keys},
            **{Item(Kind.OPTIMIZER, str(key)): value for key, value in self.scalars.items()},
            **({OPAQUE: tuple(opaque)} if opaque else {}),
        }

    def renamed(self, names: NewNames) -> MegatronState:
        """Names stay: of those that are left out, the opaque values of their modules go along."""
        there = set(names.owners.values())
        modules = {name.rpartition(".")[0] for name in there}
        order = [
            name
            for name in self.order
            if name in there or (name.endswith("._extra_state") and name.rpartition(".")[0] in modules)
        ]
        return replace(self, order=order, unknown=[name for name in self.unknown if name in there])

    def check_attribute(self, root: Path, attribute: str, only: str) -> None:
        """Layers are found by their whole names, which say their place in the pipeline."""
        raise Unsupported(
            f"--only {only}: {root} is Megatron's, whose layers are found by their whole names\n"
            f"Give patterns, which keep names: --only '{attribute}.*', or --only '!output_layer.*' to leave a head out."
        )

    def exclude_frozen(self, root: Path) -> MegatronState:
        """Megatron loads no model with parameters missing."""
        raise Unsupported(
            f"--exclude-frozen: {root} is Megatron's, which loads no model with parameters missing\n"
            "Convert it --to hf, dcp, universal or deepspeed, and leave them out there, or leave names out with --only."
        )
