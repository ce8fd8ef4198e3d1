"""What one rank saves of a step, taken at one moment: model bytes copied aside, everything else as values of their own.

What a run consists of stands here too: models by role, the data, the RLHF state.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias, runtime_checkable

import torch

from mcore_rlhf.engines.base import Engine, HasRng, LiveFile, LiveState, Segment, StateTensor, Text
from mcore_rlhf.engines.plain import TorchEngine
from mcore_rlhf.engines.save import LiveTree, RankAccount, account_of, as_json, compare, details, explain
from mcore_rlhf.engines.stateful import Stateful
from mcore_rlhf.engines.until_step import UntilStep, is_at
from mcore_rlhf.errors import CheckpointError, Problems, StorageError, UsageError
from mcore_rlhf.storage.pt import Pt

from ..rlhf.carried import Carried
from ..rlhf.sampler import PromptSampler
from ..rlhf.state import RlhfState
from .rng import RngState, captured
from .staging import HostStaging, StepFile
from .steps import RESERVED
from .stream import Stream
from .world import World

_ROLE = re.compile(r"(?!iter_|mp_rank_|global_step_)[A-Za-z](?:[A-Za-z0-9_.-]*[A-Za-z0-9_-])?")

Role: TypeAlias = "Engine | torch.nn.Module | Stateful"
Data: TypeAlias = "PromptSampler | Carried | Stateful"

DATA_FILE = "data/data.pt"

STATE_FILE = "rlhf/rlhf_state.json"

_STATE_FOLDER = "rlhf"


@runtime_checkable
class _LooksLikeEngine(Protocol):
    def live(self, step: int) -> object: ...

    def prepare_load(self, request: object) -> object: ...


@dataclass(frozen=True, slots=True)
class Components:
    """Everything that is saved together.

    Args:
        roles: An engine for every role.
        data: Where prompts come from, or None.
        state: The RLHF state, or None.
    """

    roles: Mapping[str, Engine]
    data: PromptSampler | Carried | None
    state: RlhfState | None

    @property
    def layout(self) -> str:
        """How all models are cut: ``actor TP2×PP1×DP1, critic TP1×PP1×DP2``."""
        return ", ".join(f"{role} {engine.layout}" for role, engine in sorted(self.roles.items()))

    @property
    def rng(self) -> HasRng | None:
        """The engine whose framework keeps RNG states of its own; all of one process share them."""
        return next((engine for engine in self.roles.values() if isinstance(engine, HasRng)), None)


def components(roles: Mapping[str, Role] | Role, data: Data | None, state: RlhfState | None) -> Components:
    """Understand what the user gives.

    Args:
        roles: By role, or a single model, which becomes ``actor``.
        data: A sampler or any loader with ``state_dict``.
        state: The RLHF state.

    Raises:
        UsageError: A role's name cannot be a folder, or something cannot be saved.
    """
    named = roles if isinstance(roles, Mapping) else {"actor": roles}
    if not named and data is None and state is None:
        raise UsageError(
            "no roles, no data and no state: there is nothing to save; give a model, such as {'actor': engine}"
        )
    engines = {role: _engine(role, model) for role, model in named.items()}
    return Components(engines, _carried(data), state)


def _engine(role: str, model: Role) -> Engine:
    if not _ROLE.fullmatch(role) or role in RESERVED:
        raise UsageError(
            f"role {role!r}: expected a name such as actor, critic, reward or reference (it becomes a folder)"
        )
    if isinstance(model, torch.nn.Module):
        return TorchEngine(model)
    if isinstance(model, _LooksLikeEngine):
        return model  # type: ignore[return-value]
    if isinstance(model, Stateful):
        return TorchEngine(None, state=model)
    raise UsageError(f"role {role!r}: {type(model).__name__} is no engine, no torch module and has no state_dict()")


def _carried(data: Data | None) -> PromptSampler | Carried | None:
    if data is None or isinstance(data, PromptSampler | Carried):
        return data
    if isinstance(data, Stateful):
        return Carried(data)
    raise UsageError(f"data: {type(data).__name__} has no state_dict() and load_state_dict()")


@dataclass(slots=True)
class Snapshot:
    """One rank's share of a step.

    Args:
        files: Files that this rank contributes to, in the order in which it writes them: first those that it lays out. Their bytes are in
            host memory or on their way there, or live where nothing runs meanwhile.
        texts: Small files that this rank writes, by path relative to the step's folder.
        roles: Models that this rank speaks for in the manifest.
        rng: This rank's RNG states.
        data: The content of ``data/data.pt``, or this rank's part of it; None where there is no data.
        data_rank: The data-parallel rank that :attr:`data` belongs to, where every one has a loader of its own.
        held: By role, the state tensors that this rank holds.
        accounts: The same, counted.
        live: By role, what the step holds of them, for the manifest; see :func:`accounted`.
        still: By role, what nothing changes before its optimizer's next step; empty where all is copied at once.
        stream: Brings the bytes into host memory; None where they are written from where they are.
    """

    files: list[StepFile]
    texts: dict[str, Text] = field(default_factory=dict)
    roles: list[Mapping[str, str]] = field(default_factory=list)
    rng: RngState = field(default_factory=dict)
    data: object = None
    data_rank: int | None = None
    held: dict[str, Sequence[StateTensor]] = field(default_factory=dict)
    accounts: dict[str, RankAccount] = field(default_factory=dict)
    live: dict[str, object] = field(default_factory=dict)
    still: dict[str, UntilStep] = field(default_factory=dict)
    stream: Stream | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of tensors that this rank contributes."""
        return sum(share.nbytes for file in self.files for share in file.shares)


def described(parts: Components, world: World, step: int) -> Snapshot:
    """Describe this rank's share of a step; tensors are still the live ones.

    Raises:
        CheckpointError: Something cannot be saved.
    """
    lives, failed = dict[str, LiveState](), list[Exception]()
    for role, engine in parts.roles.items():
        try:
            lives[role] = engine.live(step)
        except Exception as error:  # some have their ranks meet: none may be missing because of another role
            failed.append(error)
    if failed:
        raise failed[0]
    snapshot, problems = Snapshot([], rng=captured(parts.rng)), Problems()
    for role, live in lives.items():
        engine = parts.roles[role]
        _add_role(snapshot, role, live, speaks=world.rank == engine.ranks[0])
        if live.state_tensors is not None:
            snapshot.held[role] = live.state_tensors
            snapshot.accounts[role] = account_of(live.state_tensors, world.rank, role, problems)
    problems.raise_if_any()
    if world.commits and parts.state is not None:
        _add_state(snapshot, parts.state, world.rank)
    snapshot.files.sort(key=lambda file: file.live.writers[0] != world.rank)
    _add_data(snapshot, parts, world)
    return snapshot


def accounted(snapshot: Snapshot, world: World) -> None:
    """Compare what all ranks hold with what is written of it; collective.

    Raises:
        Incomplete: Ranks hold what no rank writes. The same error on all ranks.
    """
    gathered, problems = world.all_gather(snapshot.accounts), Problems()
    for role in sorted({role for accounts in gathered for role in accounts}):
        total, wrong = compare([accounts.get(role, {}) for accounts in gathered])
        snapshot.live[role] = as_json(total)
        if wrong:  # on all ranks alike: what is compared is what all of them were told
            explain(wrong, world.all_gather(details(snapshot.held.get(role, ()), wrong)), role, problems)
    problems.raise_if_any()


def staged(snapshot: Snapshot, staging: HostStaging) -> Stream:
    """Prepare to copy the bytes of all tensors into host memory; those that somebody may change meanwhile are copied now.

    Returns:
        What copies the rest: training may go on when it has, and where the roles' optimizers wait for it before they step, even now.
    """
    places = {role: until.places() for role, until in snapshot.still.items()}
    since = {role: until.versions() for role, until in snapshot.still.items()}

    def waits(folder: str, segment: Segment) -> bool:
        return folder in places and is_at(segment.tensor, places[folder])

    def changed() -> CheckpointError | None:
        still, snapshot.still = snapshot.still, {}
        found = ((role, until.changed(since[role])) for role, until in still.items())
        return next((_changed(role, name) for role, name in found if name is not None), None)

    snapshot.files, snapshot.stream = staging.staged(snapshot.files, waits, changed)
    return snapshot.stream


def _changed(role: str, name: str) -> CheckpointError:
    return StorageError(
        f"role {role}: {name} was written to after save(), and before its optimizer's next step: what was copied is of no one moment\n"
        "The step is not saved. Call manager.before_step() before anything but an optimizer changes weights, or save without "
        "lazy_snapshot."
    )


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


def _add_data(snapshot: Snapshot, parts: Components, world: World) -> None:
    if isinstance(parts.data, Carried) and parts.data.scope == "rank":
        snapshot.data, snapshot.data_rank = parts.data.local_state(), parts.data.rank
    elif parts.data is not None and world.commits:
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
