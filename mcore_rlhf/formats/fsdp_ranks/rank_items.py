"""Rank files of torch_checkpointing ("DCP v2"): ``model_0.pt``, ``optimizer_0.pt``, a file of each item per rank, and ``metadata.pkl``.

Source: torch_checkpointing 0.1.1, ``checkpoint_layout.py`` (``default_torch_layout_info``: ``<item>_<rank>.pt``, by ``torch.save``),
``metadata_serialization.py``, ``distributed_metadata.py`` (``DistributedMetadata.to_dict``), ``state_transformations.py``. ``metadata.pkl``
is written where an item has a resharder, and the package runs it; here it is read as any pickle of a stranger's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mcore_rlhf.core.catalog import DType, Shape, row_major
from mcore_rlhf.errors import Corrupt, Incomplete, LayoutMismatch, Problems, Unsupported, shown
from mcore_rlhf.models.meaning.bounds import MOST_RANKS
from mcore_rlhf.storage import reading
from mcore_rlhf.storage.paths import ReadablePath
from mcore_rlhf.storage.pickling import pickle_tree

MODEL, OPTIMIZER = "model", "optimizer"
METADATA = "metadata.pkl"
NAMES = "param_names"
NAMED = "_optimizer_state_format_version"
"""The note that states have names. Source: ``state_transformations.py``."""
_NAME = re.compile(r"([A-Za-z_][\w.-]{0,99})_(0|[1-9]\d{0,17})\.pt")
_VERSIONS = ("1.0", "2.0")
"""Source: ``distributed_metadata.py`` (``_SUPPORTED_VERSIONS``)."""


def has_items(folder: ReadablePath) -> bool:
    """Whether a folder holds such files: the first rank's model, and nothing of ``torch.save`` under other names."""
    if not (folder / f"{MODEL}_0.pt").is_file():
        return False
    return all(_NAME.fullmatch(path.name) for path in folder.iterdir() if path.name.endswith(".pt"))


def item_files(root: ReadablePath) -> dict[str, list[str]]:
    """The files of every item, by rank.

    Args:
        root: A folder that :func:`has_items`.

    Raises:
        Incomplete: A rank's file is missing.
        Unsupported: Items lie elsewhere than the writer has them by itself, or in another kind of file.
        LayoutMismatch: More ranks than a run has.
    """
    ranks: dict[str, set[int]] = {}
    for path in root.iterdir():
        if match := _NAME.fullmatch(path.name):
            ranks.setdefault(match[1], set()).add(int(match[2]))
    world = _world(root, ranks)
    problems = Problems()
    for item, there in sorted(ranks.items()):
        for rank in range(world):
            if rank not in there:
                problems.add(
                    Incomplete, f"{root / f'{item}_{rank}.pt'}: missing; {world} ranks wrote this checkpoint",
                    "Each node writes the files of its own ranks: bring those of all nodes together.",
                )  # fmt: skip
        if max(there) >= world:
            text = f"{root / f'{item}_{max(there)}.pt'}: of rank {max(there)}, and {METADATA} says that {world} ranks wrote"
            problems.add(LayoutMismatch, text, "Move the files of the other run away.")
    problems.raise_if_any()
    return {item: [f"{item}_{rank}.pt" for rank in range(world)] for item in sorted(ranks)}


def file_of(item: str, rank: int) -> str:
    """What a rank's file of an item is called."""
    return f"{item}_{rank}.pt"


@dataclass(frozen=True, slots=True)
class DescribedTensor:
    """A tensor, as ``metadata.pkl`` describes it, by which resharders find its parts.

    Args:
        path: Its keys in its item.
        shape: Of the whole tensor.
        dtype: Its type.
        dim: The dimension along which it is cut; None where every rank has all of it.
    """

    path: tuple[str | int, ...]
    shape: Shape
    dtype: DType
    dim: int | None


def metadata_of(items: Mapping[str, Sequence[DescribedTensor]], device: str, world: int, axis: str) -> bytes:
    """``metadata.pkl``: plain values, pickled.

    Source: torch_checkpointing 0.1.1, ``distributed_metadata.py``, ``dtensor_metadata.py`` (``DTensorShardingMetadata``,
    ``DeviceMeshSpec``); ``default_resharder.py`` for what is no DTensor.

    Args:
        items: The tensors of each item.
        device: On what the run computes.
        world: Ranks.
        axis: What the mesh calls its axis; empty where it has no name.
    """
    ranks = tuple(range(world))
    mesh = {
        "device_type": device, "mesh_shape": (world,), "mesh_data": ranks, "mesh_dim_names": (axis,) if axis else None,
    }  # fmt: skip
    plain = {**mesh, "mesh_dim_names": None}

    def about(one: DescribedTensor) -> list[dict[str, object]]:
        placed = {"type": "Replicate"} if one.dim is None else {"type": "Shard", "dim": one.dim}
        data = {
            "global_shape": list(one.shape), "dtype": f"torch.{one.dtype.name}", "stride": list(row_major(one.shape)),
            "mesh_spec": plain if one.dim is None else mesh, "placements": [placed],
        }  # fmt: skip
        return [{"sharding_metadata": {"type": "DTensorShardingMetadata", "data": data}, "ranks": ranks}]

    layouts = dict.fromkeys(ranks)
    metadata = {
        item: {
            "nested_path_to_metadata": {
                json.dumps(list(one.path), separators=(",", ":")): about(one) for one in tensors
            },
            "rank_to_layout_info": layouts,
        }
        for item, tensors in items.items()
    }
    return pickle_tree({"metadata": metadata, "world_size": world, "version": _VERSIONS[-1]}, METADATA).data


def _world(root: ReadablePath, ranks: Mapping[str, set[int]]) -> int:
    """Ranks that wrote: as ``metadata.pkl`` says, or as far as the names go."""
    world = max(map(max, ranks.values())) + 1
    if (root / METADATA).is_file():
        world = _said(root, ranks)
    if not 0 < world <= MOST_RANKS:
        raise LayoutMismatch(f"{root}: holds files of {world:,} ranks; no run has more than {MOST_RANKS:,}")
    return world


def _said(root: ReadablePath, ranks: Mapping[str, set[int]]) -> int:
    """The world's size in ``metadata.pkl``, and that its items are those that are there."""
    from mcore_rlhf.storage.unpickle import unpickle

    path = root / METADATA
    tree = unpickle(reading.read_bytes(path), str(path))
    world = tree.get("world_size") if isinstance(tree, dict) else None
    items = tree.get("metadata") if isinstance(tree, dict) else None
    if type(world) is not int or not isinstance(items, dict):
        raise Corrupt(f"{path}: expected a world_size and the metadata of items, found {shown(tree, 80)}")
    if tree.get("version") not in _VERSIONS:
        found = shown(tree.get("version"), 40)
        raise Unsupported(
            f"{path}: its version is {found}; known are {', '.join(_VERSIONS)}, of torch_checkpointing 0.1.1"
        )
    for item, about in items.items():
        layouts = about.get("rank_to_layout_info") if isinstance(about, dict) else None
        for layout in layouts.values() if isinstance(layouts, dict) else ():
            if layout is not None and not (isinstance(layout, dict) and _NAME.fullmatch(str(layout.get("file_path")))):
                raise Unsupported(
                    f"{path}: {shown(item, 80)} has a layout of its own ({shown(layout, 120)}), which is not read"
                )
        if item not in ranks:
            raise Incomplete(
                f"{path}: has an item {shown(item, 80)}, of which no file is there\nCopy the folder again."
            )
    return world
