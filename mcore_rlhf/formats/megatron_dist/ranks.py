"""What a checkpoint has for each rank: random states, and values that are no parameters (``_extra_state``).

Random states are one object per (pipeline stage, tensor-parallel rank), and with experts dealt over ranks one per
(stage, tensor-parallel rank, data-parallel rank). Opaque values are one object per layer (and expert): the copies of all
tensor-parallel ranks count as one.

Sources: Megatron-LM core_v0.16.1, ``megatron/training/checkpointing.py`` (``get_rng_state``); megatron-core 0.16.1,
``transformer/utils.py`` (``make_sharded_object_for_checkpoint``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mcore_rlhf.core.box import Shape
from mcore_rlhf.families.megatron.folders import FileRank, folder_name
from mcore_rlhf.families.megatron.state import COUNTER, ModelPart
from mcore_rlhf.layouts.parallel import ParallelConfig
from mcore_rlhf.models.megatron import is_routed_expert
from mcore_rlhf.storage.dcp import DcpObject

from .names import Experts, Spelling, name_at, stacked_axes
from .opened import DistFolder, ShardKey, unwrapped

RNG = "rng_state"
EXTRA = "_extra_state"


@dataclass(frozen=True, slots=True)
class DistRank:
    """What belongs to one rank; see :class:`~mcore_rlhf.formats.megatron.shards.RankValues`.

    Args:
        at: The rank.
        top: Its values by the keys of a legacy file.
        parts: Its opaque values.
    """

    at: FileRank
    top: Mapping[str, object]
    parts: tuple[ModelPart, ...]

    def materialize(self, value: object) -> Any:
        """A value that was found, read."""
        return unwrapped(value) if isinstance(value, DcpObject) else value


def rng_index(parallel: ParallelConfig, rank: int) -> tuple[Shape, Shape]:
    """Where a rank's random states stand among those of all ranks, and how many there are.

    Args:
        parallel: The degrees.
        rank: A global rank.
    """
    at = parallel.coordinates(rank)
    if parallel.ep == 1:
        return (at.pp_rank, at.tp_rank), (parallel.pp, parallel.tp)
    data = parallel.dp * parallel.cp
    return (at.pp_rank, at.tp_rank, at.dp_rank * parallel.cp + at.cp_rank), (parallel.pp, parallel.tp, data)


def rng_ranks(parallel: ParallelConfig) -> Iterator[tuple[int, FileRank]]:
    """The ranks whose random states are stored, and where they stand as a rank that writes a legacy file."""
    seen: set[Shape] = set()
    for rank, _ in parallel.ranks():
        index, _ = rng_index(parallel, rank)
        if index not in seen:
            seen.add(index)
            yield rank, file_rank(parallel, rank)


def file_rank(parallel: ParallelConfig, rank: int) -> FileRank:
    """A rank as one that writes a legacy file. That format cannot hold every layout, this one can."""
    at = parallel.coordinates(rank)
    folder = folder_name(at.tp_rank, at.pp_rank, at.ep_rank, parallel)
    dense = rank % parallel.stage_size < parallel.tp
    return FileRank(folder, at.tp_rank, at.pp_rank, at.ep_rank, at.etp_rank, rank, dense)


def model_ranks(parallel: ParallelConfig) -> Iterator[FileRank]:
    """The first rank of every combination of parts of the model: of its dense parameters, and of its experts."""
    for pp_rank in range(parallel.pp):
        for place in range(max(parallel.tp, parallel.etp * parallel.ep)):
            yield file_rank(parallel, pp_rank * parallel.stage_size + place)


def rng_of(objects: Mapping[ShardKey, DcpObject], parallel: ParallelConfig, rank: int) -> DcpObject | None:
    """The random states of a rank. Newer Megatron stores no more than one per (stage, tensor-parallel rank)."""
    index, shape = rng_index(parallel, rank)
    return objects.get(ShardKey(RNG, index, shape)) or objects.get(ShardKey(RNG, index[:2], shape[:2]))


def dist_ranks(folder: DistFolder, parallel: ParallelConfig, opaque: Mapping[str, object]) -> list[DistRank]:
    """What every rank of the run has, one for each folder that the legacy format would write.

    Args:
        folder: The checkpoint.
        parallel: The run's degrees.
        opaque: Values that are no parameters, by name; they are equal on all tensor-parallel ranks.
    """
    ranks, folders = [], dict[str, FileRank]()
    for at in model_ranks(parallel):
        folders.setdefault(at.folder, at)
    for at in folders.values():
        top: dict[str, object] = {key: folder.top[key] for key in (COUNTER,) if key in folder.top}
        stored = rng_of(folder.objects, parallel, at.rank)
        if stored is not None:
            top[RNG] = stored
        # every value once for each rank that has one of its own
        mine = dict(opaque) if at.pp_rank == 0 and at.ep_rank == 0 else {}
        ranks.append(DistRank(at, top, (ModelPart(0, opaque=mine),)))
    return ranks


def opaque_values(folder: DistFolder, spelling: Spelling) -> dict[str, object]:
    """Values that are no parameters, under the names that a live model has for them.

    Raises:
        CheckpointError: One is damaged, or asks for code.
    """
    values: dict[str, object] = {}
    for where, item in folder.objects.items():
        if not where.key.endswith(EXTRA):
            continue
        if is_routed_expert(where.key) and spelling.experts is not Experts.SEQUENTIAL:
            continue  # one module holds all experts of a rank
        index = where.index[: stacked_axes(where.key, spelling)]
        values[name_at(where.key, index, spelling)] = folder.value(item)
    return values


def other_objects(folder: DistFolder) -> dict[ShardKey, DcpObject]:
    """Objects that nobody knows; they can go along where no rank changes."""
    return {key: item for key, item in folder.objects.items() if key.key != RNG and not key.key.endswith(EXTRA)}
