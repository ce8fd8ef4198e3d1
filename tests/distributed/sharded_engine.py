"""A small engine whose files are filled by several ranks, as the distributed optimizer's are, without any framework."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from mcore_rlhf.core.account import Report
from mcore_rlhf.core.catalog import Record, dtype_of
from mcore_rlhf.engines.base import LiveFile, LiveState, LoadRequest, PreparedLoad, Segment
from mcore_rlhf.engines.load import fill_places
from mcore_rlhf.engines.stateful import Undo
from mcore_rlhf.errors import LayoutMismatch
from mcore_rlhf.storage.pt import Pt, StoredTensor, read_pt

WEIGHTS, MOMENTS = "weights.pt", "moments.pt"


class ShardedEngine:
    """Two vectors, cut over the ranks: the first rank owns the file of one, the last rank the file of the other.

    Args:
        rank: This rank.
        size: Ranks.
        numel: Elements of each vector.
        seed: Of their first values.
    """

    def __init__(self, rank: int, size: int, numel: int = 6000, seed: int = 0) -> None:
        assert numel % size == 0
        self.rank, self.size, self.numel = rank, size, numel
        self.ranks = tuple(range(size))
        self.layout = f"S{size}"
        self.values: dict[str, torch.Tensor] = {}
        self.reset(seed)

    @property
    def share(self) -> int:
        return self.numel // self.size

    def reset(self, seed: int) -> None:
        """New values, which depend on the seed and the element only, not on how they are cut."""
        for number, file in enumerate((WEIGHTS, MOMENTS)):
            whole = torch.randn(self.numel, generator=torch.Generator().manual_seed(2 * seed + number))
            cut = whole[self.rank * self.share : (self.rank + 1) * self.share].clone()
            if file in self.values:
                self.values[file].copy_(cut)
            else:
                self.values[file] = cut

    def live(self, step: int) -> LiveState:
        owners = {WEIGHTS: 0, MOMENTS: self.size - 1}
        files = tuple(self._file(name, owner, step) for name, owner in owners.items())
        return LiveState("sharded", self.layout, files, {"about.txt": f"step {step}\n"} if self.rank == 0 else {})

    def _file(self, name: str, owner: int, step: int) -> LiveFile:
        record = Record(name, "data/0", dtype_of(torch.float32), self.numel, 0)
        vector = StoredTensor(record, 0, (self.numel,), (1,))
        tree = Pt.of({"vector": vector, "step": step}) if owner == self.rank else None
        writers = (owner, *(rank for rank in range(self.size) if rank != owner))
        segment = Segment("vector", self.rank * self.share * 4, self.values[name])
        return LiveFile(name, writers, (segment,), tree, {"vector": "data/0"} if tree else {})

    def prepare_load(self, request: LoadRequest) -> PreparedLoad:
        places = {}
        for name in (WEIGHTS, MOMENTS):
            place = read_pt(request.folder, name).tree["vector"]
            if place.shape != (self.numel,):
                raise LayoutMismatch(
                    f"{request.folder / name}: has shape {place.shape}, the model's is {(self.numel,)}"
                )
            places[name] = StoredTensor(place.record, place.start + self.rank * self.share, (self.share,), (1,))
        return _Load(self, request.folder, places)


@dataclass
class _Load:
    engine: ShardedEngine
    folder: Path
    places: dict[str, StoredTensor]

    @property
    def report(self) -> Report:
        return Report()

    @property
    def files(self) -> Sequence[Path]:
        return [self.folder / name for name in self.places]

    def install(self, undo: Undo) -> None:
        """Nothing here may refuse."""

    def fill(self) -> None:
        fill_places(self.folder, ((place, self.engine.values[name]) for name, place in self.places.items()))
