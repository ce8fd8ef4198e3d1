"""The RNG states of every rank: ``rng/rng_state.pt``.

Megatron's own file keeps one state per (tp, pp) only; here every rank has its own. On an unchanged layout they are put back as
they were. On another they are derived from those of rank 0, or refused, and either way it is said.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from mcore_rlhf.core.account import Report
from mcore_rlhf.core.facts import Fate
from mcore_rlhf.engines.base import HasRng
from mcore_rlhf.errors import Corrupt, Incomplete, LayoutMismatch, Unsupported

VERSION = 1
WORLDS = "; "
"""Between the layouts of several worlds that saved together."""
Policy = Literal["derive", "refuse", "ignore"]
"""What happens where the layout is not the one saved: see :meth:`RngKeeper.restore`."""

RngState = dict[str, object]
_FIELDS = ("python", "numpy", "torch", "cuda", "tracker")


def captured(framework: HasRng | None = None) -> RngState:
    """All RNG states of this rank, as values that load with ``weights_only=True``.

    Args:
        framework: An engine that keeps states of its own.
    """
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "tracker": framework.rng_states() if framework is not None else {},
    }


def put_back(state: Mapping[str, object], framework: HasRng | None = None) -> None:
    """Restore what :func:`captured` gave, on this rank."""
    version, internal, gauss_next = _fields(state["python"])
    random.setstate((version, tuple(internal), gauss_next))
    name, keys, position, has_gauss, gauss = _fields(state["numpy"])
    np.random.set_state((str(name), np.asarray(keys).astype(np.uint32), int(position), int(has_gauss), float(gauss)))
    torch.set_rng_state(_tensor(state["torch"]))
    if state.get("cuda") is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(_tensor(state["cuda"]))
    tracker = state.get("tracker")
    if framework is not None and isinstance(tracker, Mapping) and tracker:
        framework.set_rng_states(tracker)


def _fields(value: object) -> tuple[Any, ...]:
    assert isinstance(value, tuple)
    return value


def _tensor(value: object) -> torch.Tensor:
    assert isinstance(value, torch.Tensor)
    return value


def file_content(states: Sequence[RngState], layout: str) -> dict[str, object]:
    """The content of the file.

    Args:
        states: Of every rank, in order.
        layout: How the models are cut: ``actor TP2×PP2×DP1``; of several worlds, with :data:`WORLDS` in between.
    """
    return {"version": VERSION, "world_size": len(states), "layout": layout, "ranks": list(states)}


@dataclass(frozen=True, slots=True)
class RngKeeper:
    """Puts saved RNG states back.

    Args:
        rank: This rank.
        size: Ranks of this run.
        layout: How this run's models are cut.
        framework: An engine that keeps states of its own, or None.
        policy: For another layout: ``derive``, ``refuse``, or ``ignore`` (leave what the run has).
    """

    rank: int
    size: int
    layout: str
    framework: HasRng | None
    policy: Policy = "derive"

    def chosen(self, tree: object, where: str, step: int, report: Report) -> RngState | None:
        """What this rank is to get; nothing is changed yet.

        Args:
            tree: The file's content.
            where: The file's path, for messages.
            step: The step.
            report: Hears what became of the states.

        Raises:
            LayoutMismatch: The layout is another one, and that is refused.
            CheckpointError: The file is not what it should be.
        """
        ranks, layout = _checked(tree, where)
        if len(ranks) == self.size and any(_same_ranks(part, self.layout) for part in layout.split(WORLDS)):
            report.add(Fate.KEPT, "random states of every rank")
            return dict(ranks[self.rank])
        change = f"saved at {layout} on {len(ranks)} ranks, now {self.layout} on {self.size}"
        if self.policy == "refuse":
            raise LayoutMismatch(
                f"{where}: random states belong to ranks: {change}\nResume on the same layout, or derive them (rng='derive')."
            )
        if self.policy == "ignore":
            report.add(Fate.LOST, f"random states: {change}; those of this run are left as they are")
            return None
        report.add(Fate.DERIVED, f"random states: seeded from those of rank 0, since ranks are others: {change}")
        if self.framework is not None:
            return dict(self.framework.derived_rng(ranks[0], step))
        return derived(ranks[0], step, self.rank)

    def restore(self, state: RngState | None) -> None:
        """Put the chosen state back."""
        if state is not None:
            put_back(state, self.framework)


def _same_ranks(saved: str, live: str) -> bool:
    """Whether the models that both have are cut alike: a role that came or went moves no rank."""
    (saved_world, saved_cuts), (live_world, live_cuts) = _cuts(saved), _cuts(live)
    common = saved_cuts.keys() & live_cuts.keys()
    return saved_world == live_world and bool(common) and all(saved_cuts[role] == live_cuts[role] for role in common)


def _cuts(layout: str) -> tuple[str, dict[str, str]]:
    """The world's name, empty where there is one only, and how every role is cut."""
    world, colon, rest = layout.partition(": ")
    cuts = (part.rpartition(" ") for part in (rest if colon else layout).split(", "))
    return world if colon else "", {role: cut for role, _, cut in cuts}


def _checked(tree: object, where: str) -> tuple[list[RngState], str]:
    if not isinstance(tree, dict) or not isinstance(tree.get("ranks"), list) or not tree["ranks"]:
        raise Corrupt(
            f"{where}: expected a dictionary with the random states of all ranks, found {type(tree).__name__}"
        )
    version = tree.get("version")
    if not isinstance(version, int) or version > VERSION:
        raise Unsupported(f"{where}: version {version!r}; this release reads up to {VERSION}\nUpgrade mcore_rlhf.")
    missing = {name for state in tree["ranks"] for name in _FIELDS if name not in state}
    if missing:
        raise Incomplete(f"{where}: the fields {', '.join(sorted(missing))} are missing")
    return tree["ranks"], str(tree.get("layout", ""))


def derived(first: Mapping[str, object], step: int, rank: int) -> RngState:
    """States for a rank of a framework without trackers: seeded by SHA-256 of (saved states of rank 0, step, rank)."""
    saved = _tensor(first["torch"]).numpy().tobytes() + repr(first["python"]).encode()
    seed = int.from_bytes(hashlib.sha256(saved + f"/{step}/{rank}".encode()).digest()[:8], "little") >> 1
    numpy_state = np.random.RandomState(seed % 2**32).get_state(legacy=True)
    name, keys, position, has_gauss, gauss = numpy_state
    cuda = first.get("cuda")
    return {
        "python": random.Random(seed).getstate(),
        "numpy": (name, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, gauss),
        "torch": torch.Generator().manual_seed(seed).get_state(),
        "cuda": _philox(seed) if cuda is not None else None,
        "tracker": {},
    }


def _philox(seed: int) -> torch.Tensor:
    """A CUDA generator's state: seed and offset, 8 bytes each."""
    return torch.tensor(list(seed.to_bytes(8, "little") + bytes(8)), dtype=torch.uint8, device="cpu")
