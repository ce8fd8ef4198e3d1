"""The RLHF state of a run: all that training needs to go on and that is neither model, optimizer, data nor RNG.

It is stored as ``rlhf/rlhf_state.json``, which a person can read, and one ``rlhf/<name>.pt`` for each group of tensors;
docs/reference/rlhf-state.md describes both.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from ...errors import Corrupt
from .best import BestMetric
from .kl import KLController
from .plain import dumps, loads, shorten
from .reading import read, tensor_stems
from .restoring import check, restore
from .schedules import Schedule
from .statistics import RunningStatistics
from .tensors import Buffer, InFlightPrompt, cloned
from .versions import up_to_date
from .writing import write

_NO_FILES: Mapping[str, object] = MappingProxyType({})
_JSON, _TENSORS = "rlhf_state", "tensors"


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
        return dumps(write(self)[0], "RlhfState: ")

    def tensor_files(self) -> dict[str, dict[str, object]]:
        """What the files ``rlhf/<stem>.pt`` hold, by stem: nested dicts of the live tensors, not of copies.

        Raises:
            UsageError: See :meth:`to_json`.
        """
        return write(self)[1]

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
        """All of it as one nest of plain values and the live tensors, which ``weights_only=True`` loads.

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
