"""What one rank saves of a step, taken at one moment: model bytes copied aside, everything else as values of their own."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from mcore_rlhf.engines.base import LiveFile, LiveState, Text
from mcore_rlhf.engines.save import LiveTree, RankAccount, account_of, as_json, compare
from mcore_rlhf.errors import Problems
from mcore_rlhf.storage.pt import Pt

from ..rlhf.carried import Carried
from ..state import RlhfState
from .components import Components
from .crew import Crew
from .rng import RngState, captured
from .staging import HostStaging, StepFile

DATA_FILE = "data/data.pt"
STATE_FILE = "rlhf/rlhf_state.json"
_STATE_FOLDER = "rlhf"


@dataclass(slots=True)
class Snapshot:
    """One rank's share of a step.

    Args:
        files: Files that this rank contributes to; their bytes are in host memory, or live where nothing runs meanwhile.
        texts: Small files that this rank writes, by path relative to the step's folder.
        roles: Models that this rank speaks for in the manifest.
        rng: This rank's random states.
        data: The content of ``data/data.pt``, or this rank's part of it; None where there is no data.
        data_rank: The data-parallel rank that :attr:`data` belongs to, where every one has a loader of its own.
        accounts: By role, the state tensors that this rank holds, counted.
        live: By role, what the step holds of them, for the manifest; see :func:`accounted`.
    """

    files: list[StepFile]
    texts: dict[str, Text] = field(default_factory=dict)
    roles: list[Mapping[str, str]] = field(default_factory=list)
    rng: RngState = field(default_factory=dict)
    data: object = None
    data_rank: int | None = None
    accounts: dict[str, RankAccount] = field(default_factory=dict)
    live: dict[str, object] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of tensors that this rank contributes."""
        return sum(segment.nbytes for file in self.files for segment in file.live.segments)


def described(parts: Components, crew: Crew, step: int) -> Snapshot:
    """Describe this rank's share of a step; tensors are still the live ones.

    Raises:
        CheckpointError: Something cannot be saved.
    """
    snapshot, problems = Snapshot([], rng=captured(parts.rng)), Problems()
    for role, engine in parts.roles.items():
        live = engine.live(step)
        _add_role(snapshot, role, live, speaks=crew.world.rank == engine.ranks[0])
        if live.held is not None:
            snapshot.accounts[role] = account_of(live.held, role, problems)
    problems.raise_if_any()
    if crew.coordinates and parts.state is not None:
        _add_state(snapshot, parts.state, crew.world.rank)
    _add_data(snapshot, parts, crew)
    return snapshot


def accounted(snapshot: Snapshot, crew: Crew) -> None:
    """Compare what all ranks hold with what is written of it; collective.

    Raises:
        Incomplete: Ranks hold what no rank writes. The same error on all ranks.
    """
    gathered, problems = crew.world.gathered(snapshot.accounts), Problems()
    for role in sorted({role for accounts in gathered for role in accounts}):
        total = compare([accounts.get(role, {}) for accounts in gathered], role, problems)
        snapshot.live[role] = as_json(total)
    problems.raise_if_any()


def aside(snapshot: Snapshot, staging: HostStaging) -> Snapshot:
    """The same with the bytes of all tensors copied into host memory: training may go on."""
    snapshot.files = staging.snapshot(snapshot.files)
    return snapshot


def _add_role(snapshot: Snapshot, role: str, live: LiveState, speaks: bool) -> None:
    snapshot.files += [StepFile(role, file) for file in live.files]
    snapshot.texts.update((f"{role}/{name}", text) for name, text in live.texts.items())
    if speaks:
        snapshot.roles.append({"role": role, "format": live.format, "parallel": live.parallel})


def _add_state(snapshot: Snapshot, state: RlhfState, rank: int) -> None:
    snapshot.texts[STATE_FILE] = state.to_json()
    for stem, tensors in state.tensor_files().items():
        live = LiveTree(f"{stem}.pt")
        container = Pt.of(live.placed(tensors))
        snapshot.files.append(StepFile(_STATE_FOLDER, LiveFile(live.file, (rank,), tuple(live.segments), container)))


def _add_data(snapshot: Snapshot, parts: Components, crew: Crew) -> None:
    if isinstance(parts.data, Carried) and parts.data.scope == "rank":
        snapshot.data, snapshot.data_rank = parts.data.local_state(), parts.data.rank
    elif parts.data is not None and crew.coordinates:
        snapshot.data = parts.data.state_dict()
    if snapshot.data is not None:
        snapshot.data = loads(dumps(snapshot.data))  # a copy: the loader goes on


def dumps(tree: object) -> bytes:
    """Plain values and tensors as bytes."""
    buffer = io.BytesIO()
    torch.save(tree, buffer)
    return buffer.getvalue()


def loads(data: bytes) -> object:
    """:func:`dumps` read the other way; no code is run."""
    tree: object = torch.load(io.BytesIO(data), weights_only=True)
    return tree
