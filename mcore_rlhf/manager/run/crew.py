"""Who takes part in a save: one ``torch.distributed`` world, or several that save one step together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mcore_rlhf.errors import UsageError

from .world import World


@dataclass(frozen=True, slots=True)
class Worlds:
    """Several worlds that save one step in one commit: actor, critic and rollout workers under Ray.

    Each world has a manager of its own with its own roles. All are given the same transaction id at every save (a driver makes
    it with :func:`~.transaction.new_transaction`), find each other through the file system, and the first one listed commits.

    Args:
        mine: Name of this process' world.
        sizes: Ranks of every world, the coordinating one first: ``{"actor": 8, "critic": 4}``.
    """

    mine: str
    sizes: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Crew:
    """All ranks of all worlds that take part.

    Args:
        world: This process' own.
        worlds: All of them, where there are several.
    """

    world: World
    worlds: Worlds | None = None
    _names: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_names", tuple(self._listed()))

    @property
    def names(self) -> tuple[str, ...]:
        """What each rank's part is called; random states are stored in this order."""
        return self._names

    @property
    def me(self) -> str:
        """This rank's."""
        return _name(self.worlds.mine if self.worlds else "", self.world.rank)

    @property
    def index(self) -> int:
        """This rank's number among all."""
        return self._names.index(self.me)

    @property
    def coordinates(self) -> bool:
        """Whether this rank commits."""
        return self.me == self._names[0]

    @property
    def is_split(self) -> bool:
        """Whether there are several worlds."""
        return self.worlds is not None

    def layout(self, layout: str) -> str:
        """How this world's models are cut, by a name that no other world has."""
        return f"{self.worlds.mine}: {layout}" if self.worlds else layout

    def _listed(self) -> list[str]:
        if self.worlds is None:
            return [_name("", rank) for rank in range(self.world.size)]
        mine = self.worlds.sizes.get(self.worlds.mine)
        if mine != self.world.size:
            raise UsageError(
                f"worlds: {self.worlds.mine!r} should have {mine} ranks, and this world has {self.world.size}"
            )
        return [_name(world, rank) for world, size in self.worlds.sizes.items() for rank in range(size)]


def _name(world: str, rank: int) -> str:
    return f"{world}-{rank:05d}" if world else f"{rank:05d}"
