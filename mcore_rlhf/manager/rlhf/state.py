"""The RLHF state of a run: all that training needs to go on and that is neither model, optimizer, data nor RNG.

It is stored as ``rlhf/rlhf_state.json``, which a person can read, and one ``rlhf/<name>.pt`` for each group of tensors;
docs/reference/rlhf-state.md describes both.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import TypeVar

from ...errors import Corrupt, Incomplete, Problems, UsageError
from ...storage.records import shorten
from .controls import KL_CONTROLLERS, SCHEDULES, KindRegistry, KLController, Schedule
from .json_values import cloned, dumps, loads, refill
from .pieces import BestMetric, Buffer, InFlightPrompt, RunningStatistics
from .state_json import COUNTERS, Document, Files, read, tensor_stems, up_to_date, write

_NO_FILES: Mapping[str, object] = MappingProxyType({})
_JSON, _TENSORS = "rlhf_state", "tensors"
_ADVICE = "Load into a state without it and add it afterwards, or use a step that has it."

T = TypeVar("T")


def _statistics() -> dict[str, RunningStatistics]:
    return {name: RunningStatistics() for name in ("reward", "value", "advantage")}


@dataclass(slots=True, eq=False)
class RlhfState:
    """The RLHF state of a run, the same on every rank.

    Args:
        algorithm: ``grpo``, ``ppo`` or any other name; where it is empty, a checkpoint of any algorithm loads.
        iteration: Iterations done: one is rollouts and the training on them.
        rollout_step: Batches of rollouts made.
        optimizer_steps: Optimizer steps taken.
        prompts_consumed: Prompts trained on.
        samples_consumed: Responses trained on.
        tokens_consumed: Tokens trained on.
        epoch: Epoch of the data, from 0.
        ppo_epoch: Pass over the current rollouts, from 0.
        minibatch: Minibatch within that pass, from 0.
        weight_version: Version of the policy's weights that rollouts are made with.
        kl: KL controllers by name; one alone is taken as ``{"actor": controller}``.
        statistics: Running statistics by name; ``reward``, ``value`` and ``advantage`` are there from the start.
        schedules: Schedules by name: ``clip``, ``entropy``.
        best: The best value of a metric.
        in_flight: Prompts that were given out and not yet trained on.
        buffers: Replay and rollout buffers by name, which is the name of their file.
        extra: What else is to be kept: plain values, with tensors at any depth.
    """

    algorithm: str = ""
    iteration: int = 0
    rollout_step: int = 0
    optimizer_steps: int = 0
    prompts_consumed: int = 0
    samples_consumed: int = 0
    tokens_consumed: int = 0
    epoch: int = 0
    ppo_epoch: int = 0
    minibatch: int = 0
    weight_version: int = 0
    kl: dict[str, KLController] = field(default_factory=dict)
    statistics: dict[str, RunningStatistics] = field(default_factory=_statistics)
    schedules: dict[str, Schedule] = field(default_factory=dict)
    best: BestMetric | None = None
    in_flight: list[InFlightPrompt] = field(default_factory=list)
    buffers: dict[str, Buffer] = field(default_factory=dict)
    extra: dict[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        controllers: object = self.kl
        if not isinstance(controllers, dict):
            self.kl = {"actor": controllers}  # type: ignore[dict-item]  # a lone controller; write() names any other

    @property
    def reward(self) -> RunningStatistics:
        """Running statistics of rewards."""
        return self.statistics["reward"]

    @property
    def value(self) -> RunningStatistics:
        """Running statistics of the critic's values."""
        return self.statistics["value"]

    @property
    def advantage(self) -> RunningStatistics:
        """Running statistics of advantages."""
        return self.statistics["advantage"]

    def to_json(self) -> str:
        """The content of ``rlhf/rlhf_state.json``; the same state gives the same text.

        Raises:
            UsageError: Something in the state cannot be stored; every such place is named.
        """
        return dumps(self._written()[0], "RlhfState: ")

    def tensor_files(self) -> dict[str, dict[str, object]]:
        """What the files ``rlhf/<stem>.pt`` hold, by stem: nested dicts of the live tensors, not of copies.

        Raises:
            UsageError: See :meth:`to_json`.
        """
        return self._written()[1]

    def _written(self) -> tuple[Document, Files]:
        return write({item.name: getattr(self, item.name) for item in fields(self)})

    @classmethod
    def from_json(cls, text: str | bytes, where: str, files: Mapping[str, object] = _NO_FILES) -> RlhfState:
        """Read a state.

        Args:
            text: The content of ``rlhf_state.json``.
            where: Its path, for messages.
            files: What the tensor files hold, by stem; :func:`tensor_file_stems` says which ones belong to it. The
                state takes their tensors as they are.

        Raises:
            NotACheckpoint: It is JSON, but not an RLHF state.
            Unsupported: A newer version wrote it, or fields, kinds or files are not known; they are named.
            Incomplete: Fields, files or tensors are missing; they are named.
            Corrupt: It is not JSON, or a field has the wrong type.
        """
        return cls(**read(loads(text, where), files, where))

    def load_from(self, text: str | bytes, files: Mapping[str, object], where: str) -> None:
        """Become the stored state, in place: controllers, statistics, schedules and buffers stay the same objects.

        A tensor of a buffer is filled in place where it has the stored dtype and shape. Hyperparameters, such as the
        target of a KL controller, come from the checkpoint as well: to change one, set it after loading.

        Args:
            text: The content of ``rlhf_state.json``.
            files: What the tensor files hold, by stem.
            where: The JSON's path, for messages.

        Raises:
            CheckpointError: See :meth:`from_json`. Nothing has been changed then.
            UsageError: The run has another algorithm, or another kind of controller or schedule under a name.
            Incomplete: The run has a name that the checkpoint lacks.
        """
        restore(self, self._loadable(text, files, where))

    def check_load(self, text: str | bytes, files: Mapping[str, object], where: str) -> None:
        """Raise what :meth:`load_from` would raise, and change nothing: every rank asks before any rank loads."""
        self._loadable(text, files, where)

    def _loadable(self, text: str | bytes, files: Mapping[str, object], where: str) -> RlhfState:
        stored = RlhfState.from_json(text, where, files)
        check(self, stored, where).raise_if_any()
        return stored

    def state_dict(self) -> dict[str, object]:
        """All of it as one nested dict of plain values and the live tensors, which ``weights_only=True`` loads.

        Meant for those who save it themselves, as DeepSpeed's ``client_state``.
        """
        return {_JSON: json.loads(self.to_json()), _TENSORS: self.tensor_files()}

    def load_state_dict(self, state_dict: Mapping[str, object], where: str = "state_dict") -> None:
        """Become what :meth:`state_dict` gave, in place; its tensors are copied.

        Raises:
            CheckpointError: See :meth:`load_from`. Nothing has been changed then.
        """
        files = state_dict.get(_TENSORS)
        if state_dict.keys() != {_JSON, _TENSORS} or not isinstance(files, Mapping):
            raise Corrupt(f"{where}: expected {_JSON!r} and a dict {_TENSORS!r}, found {shorten(sorted(state_dict))}.")
        try:
            text = json.dumps(state_dict[_JSON])
        except (TypeError, ValueError) as error:
            raise Corrupt(f"{where}: {_JSON!r} is no tree of plain values: {error}.") from error
        self.load_from(text, {stem: cloned(content) for stem, content in files.items()}, where)


def tensor_file_stems(text: str | bytes, where: str) -> tuple[str, ...]:
    """Which tensor files belong to a ``rlhf_state.json``: ``replay`` stands for ``rlhf/replay.pt``.

    Raises:
        CheckpointError: It is not an RLHF state of a version that this release reads.
    """
    return tensor_stems(up_to_date(loads(text, where), where), where)


def check(live: RlhfState, stored: RlhfState, where: str) -> Problems:
    """Whether the live state can become the stored one.

    What the live state holds by name must be in the file, and of the same kind; what it lacks will be added. Running
    statistics that have not seen a number yet may be missing.
    """
    problems = Problems()
    if live.algorithm and live.algorithm != stored.algorithm:
        text = f"{where}: algorithm: this run is {live.algorithm!r}, the checkpoint is of {stored.algorithm!r}"
        problems.add(UsageError, text, "Set algorithm='' to load it all the same.")
    _check_kinds(KL_CONTROLLERS, live.kl, stored.kl, f"{where}: kl", problems)
    _check_kinds(SCHEDULES, live.schedules, stored.schedules, f"{where}: schedules", problems)
    used = {name: item for name, item in live.statistics.items() if item.count}
    _check_names(used, stored.statistics, f"{where}: statistics", problems)
    _check_names(live.buffers, stored.buffers, f"{where}: buffers", problems)
    _check_best(live, stored, where, problems)
    return problems


def _check_names(live: Mapping[str, T], stored: Mapping[str, T], place: str, problems: Problems) -> None:
    for name in sorted(live.keys() - stored.keys()):
        problems.add(Incomplete, f"{place}/{name}: is missing in the checkpoint; this run has it", _ADVICE)


def _check_kinds(
    kinds: KindRegistry[T], live: Mapping[str, T], stored: Mapping[str, T], place: str, found: Problems
) -> None:
    _check_names(live, stored, place, found)
    for name in sorted(live.keys() & stored.keys()):
        if type(live[name]) is not type(stored[name]):
            expected = kinds.kind_of(live[name]) or type(live[name]).__qualname__
            text = f"{place}/{name}: this run has a {kinds.what} of kind {expected!r}, the checkpoint one of kind "
            found.add(UsageError, f"{text}{kinds.kind_of(stored[name])!r}", "Configure the run as the checkpoint was.")


def _check_best(live: RlhfState, stored: RlhfState, where: str, problems: Problems) -> None:
    if live.best is None:
        return
    if stored.best is None:
        problems.add(Incomplete, f"{where}: best: is null in the checkpoint; this run has {live.best.name!r}", _ADVICE)
    elif (live.best.name, live.best.mode) != (stored.best.name, stored.best.mode):
        ours, theirs = (f"the {item.mode} of {item.name!r}" for item in (live.best, stored.best))
        problems.add(UsageError, f"{where}: best: this run keeps {ours}, the checkpoint {theirs}")


def restore(live: RlhfState, stored: RlhfState) -> None:
    """Make the live state the stored one; :func:`check` has found that it can be."""
    for name in ("algorithm", "weight_version", *COUNTERS):
        setattr(live, name, getattr(stored, name))
    _refill(live.kl, stored.kl, assign)
    _refill(live.schedules, stored.schedules, assign)
    _refill(live.statistics, live.statistics | stored.statistics, assign)
    _refill(live.buffers, stored.buffers, _assign_buffer)
    if live.best is None or stored.best is None:
        live.best = stored.best
    else:
        assign(live.best, stored.best)
    live.in_flight[:] = stored.in_flight
    live.extra.clear()
    live.extra.update(stored.extra)


def _refill(live: dict[str, T], stored: Mapping[str, T], assign_to: Callable[[T, T], None]) -> None:
    """Live objects take the stored values, in the stored order; new ones are added."""
    merged = dict(stored)
    for name in live.keys() & stored.keys():
        assign_to(live[name], stored[name])
        merged[name] = live[name]
    live.clear()
    live.update(merged)


def assign(live: object, stored: object) -> None:
    """Give a dataclass object the fields of another of its class."""
    for item in fields(stored):  # type: ignore[arg-type]  # every caller passes a dataclass
        setattr(live, item.name, getattr(stored, item.name))


def _assign_buffer(live: Buffer, stored: Buffer) -> None:
    refill(live.tensors, stored.tensors)
    live.meta.clear()
    live.meta.update(stored.meta)
