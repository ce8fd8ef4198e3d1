"""The live account: every state tensor of every rank, counted, and compared with what is written of the step.

An engine describes the files of a step; what it does not know of, it would leave out without a word. So the live objects are
counted by themselves, and each tensor has to be accounted for: its memory goes into a file that this rank writes, or another
rank, which holds the same, writes it. Pure: no torch, no ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256

from mcore_rlhf.errors import Incomplete, Problems, Unsupported

_MOST = 8
_ADVICE = (
    "Nothing was saved: a step that lacks them would resume as another run. Save this role with an engine or an optimizer that is "
    "supported, or without its optimizer."
)


@dataclass(frozen=True, slots=True)
class HeldTensor:
    """A state tensor that a rank holds.

    Args:
        name: The parameter's or buffer's: ``decoder.layers.0.mlp.linear_fc1.weight``.
        state: ``param``, ``buffer``, ``master``, or the optimizer's own name: ``exp_avg``, ``momentum_buffer``.
        what: Its shape and type, for comparing replicas.
        nbytes: Its length.
        here: Whether its memory goes into a file that this rank writes.
        among: Which ranks hold the same, by a name that they share (``mp_rank_00``); None where no other does.
    """

    name: str
    state: str
    what: str
    nbytes: int
    here: bool
    among: str | None = None


@dataclass(slots=True)
class Counted:
    """Tensors of one state.

    Args:
        tensors: How many.
        nbytes: Their length together.
    """

    tensors: int = 0
    nbytes: int = 0

    def add(self, tensors: int, nbytes: int) -> None:
        """Count some more."""
        self.tensors, self.nbytes = self.tensors + tensors, self.nbytes + nbytes


@dataclass(slots=True)
class Holding:
    """What a rank holds that a set of ranks hold alike, or that it holds alone: small enough to tell all others.

    Args:
        states: By state, how much.
        digest: Of all names, shapes and types, in any order.
        here: Whether this rank writes it.
    """

    states: dict[str, Counted] = field(default_factory=dict)
    digest: str = ""
    here: bool = True


RankAccount = dict[str | None, Holding]
"""A rank's holdings, by the set of ranks that hold the same; None: what it holds alone."""


def account_of(held: Iterable[HeldTensor], role: str, problems: Problems) -> RankAccount:
    """One rank's account.

    Args:
        held: All its state tensors of a role.
        role: The role, for messages.
        problems: Told what would be lost: what this rank holds alone and does not write.
    """
    sets: dict[str | None, list[HeldTensor]] = {}
    for one in held:
        sets.setdefault(one.among, []).append(one)
    if lost := [one for one in sets.get(None, []) if not one.here]:
        text = (
            f"{role}: {len(lost)} live tensors ({_named(lost)}) would not be in the step; the engine does not know them"
        )
        problems.add(Unsupported, text, _ADVICE)
    return {among: _holding(tensors, f"{role}: {among}", problems) for among, tensors in sets.items()}


def _holding(held: Sequence[HeldTensor], where: str, problems: Problems) -> Holding:
    found = Holding(here=any(one.here for one in held if one.nbytes) or not any(one.nbytes for one in held))
    lines = []
    for one in held:
        found.states.setdefault(one.state, Counted()).add(1, one.nbytes)
        lines.append(f"{one.name}\0{one.state}\0{one.what}")
    found.digest = sha256("\n".join(sorted(lines)).encode()).hexdigest()
    if held[0].among is not None and found.here and (lost := [one for one in held if not one.here]):
        text = f"{where}: this rank writes it, but not {len(lost)} of its live tensors ({_named(lost)})"
        problems.add(Unsupported, text, _ADVICE)
    return found


def compare(accounts: Sequence[RankAccount], role: str, problems: Problems) -> dict[str, Counted]:
    """Compare what ranks hold alike with what is written of it.

    Args:
        accounts: Of every rank, in their order.
        role: The role, for messages.
        problems: Told which ranks hold what nobody writes.

    Returns:
        By state, what the step holds; what several hold alike counts once.
    """
    total: dict[str, Counted] = {}
    writers: dict[str, tuple[int, Holding]] = {}
    for rank, account in enumerate(accounts):
        for among, holding in account.items():
            if among is None or (holding.here and writers.setdefault(among, (rank, holding))[0] == rank):
                for state, count in holding.states.items():
                    total.setdefault(state, Counted()).add(count.tensors, count.nbytes)
    for rank, account in enumerate(accounts):
        for among, holding in account.items():
            writer = writers.get(among) if among is not None else None
            if among is not None and (writer is None or writer[1].digest != holding.digest):
                told = f"rank {writer[0]} writes {_counted(writer[1])}" if writer is not None else "no rank writes it"
                text = f"{role}: rank {rank} holds {_counted(holding)} as a copy of {among}, and {told}"
                problems.add(Incomplete, text, _ADVICE)
    return dict(sorted(total.items()))


def as_json(total: Mapping[str, Counted]) -> dict[str, object]:
    """For the manifest: how many tensors and bytes of live state, together and by state."""
    return {
        "tensors": sum(one.tensors for one in total.values()),
        "bytes": sum(one.nbytes for one in total.values()),
        "states": {state: [one.tensors, one.nbytes] for state, one in total.items()},
    }


def _counted(holding: Holding) -> str:
    states = sorted(holding.states.items())
    return ", ".join(f"{one.tensors} × {state} ({one.nbytes} bytes)" for state, one in states)


def _named(held: Sequence[HeldTensor]) -> str:
    names = [f"{one.state} of {one.name}" for one in held[:_MOST]]
    return ", ".join(names) + (", …" if len(held) > _MOST else "")
