"""What a conversion from one family to another leaves for the way back; it lies in :mod:`.sidecar`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .module import ModuleState
from .sidecar import STATE
from .source import Source

if TYPE_CHECKING:
    from mcore_rlhf.models.huggingface.table import Spelling

ORIGIN = "mcore_rlhf_origin"
"""The key of ``config.json`` under which arguments wait that nobody declares, and once of client state, for everything."""
WAITS = f"waits in {STATE} for the way back"


@dataclass(frozen=True, slots=True)
class FormerFamily:
    """What is there; empty for a run that was never another family's.

    Args:
        values: Of Megatron's: ``iteration``, ``config``, ``args``, ``spelling``, ``experts``, ``mtp``, ``scheduler``, ``other``; of a
            module's: ``iteration``, ``module``.
    """

    values: Mapping[str, object]

    @classmethod
    def of(cls, source: Source) -> FormerFamily:
        """That of a source."""
        return cls(source.origin)

    @property
    def args(self) -> dict[str, object]:
        """Megatron's arguments, as far as they are plain values."""
        return self._section("args")

    @property
    def config(self) -> dict[str, object]:
        """The model's description."""
        return self._section("config")

    @property
    def other(self) -> dict[str, object]:
        """Counters."""
        return self._section("other")

    def scheduler(self, iteration: int) -> dict[str, object] | None:
        """The scheduler's state, unless the run went on since."""
        return self._section("scheduler") or None if self.values.get("iteration") == iteration else None

    def spelling(self, implementation: str | None) -> Spelling:
        """Whose names Megatron's side is to have.

        Args:
            implementation: What the user asked for, or None. Transformer Engine's experts are one ``TEGroupedMLP``, as in
                all runs with ``--moe-grouped-gemm``, unless the run had others.
        """
        from mcore_rlhf.models.huggingface import table  # all architectures, which opening a source needs not

        said = self.values.get("spelling")
        engine = implementation or (said if isinstance(said, str) else table.TRANSFORMER_ENGINE)
        experts = table.SEQUENTIAL if engine == table.LOCAL else table.GROUPED
        if engine == said:
            experts = str(self.values.get("experts") or experts)
        return table.Spelling(engine, experts, str(self.values.get("mtp") or table.MTP_LAYER))

    def module(self, iteration: int) -> dict[str, object]:
        """What a run under a module's names had, unless the run went on since."""
        return self._section("module") if self.values.get("iteration") == iteration else {}

    def _section(self, name: str) -> dict[str, object]:
        found = self.values.get(name)
        return dict(found) if isinstance(found, Mapping) else {}


def origin_of_megatron(source: Source, config: Mapping[str, object], spelling: Spelling) -> dict[str, object]:
    """What a Megatron source leaves.

    Args:
        source: It.
        config: The model's description.
        spelling: Whose names its parameters have.
    """
    old = source.state
    return {
        "iteration": old.iteration, "config": dict(config), "args": plain(old.args), "spelling": spelling.implementation,
        "experts": spelling.experts, "mtp": spelling.mtp, "scheduler": dict(old.scheduler or {}), "other": plain(old.other),
    }  # fmt: skip


def origin_of_module(source: Source, family: ModuleState) -> dict[str, object]:
    """What a source under a module's own names leaves: client state, scheduler, loss scaler, settings; nothing for a model alone.

    Args:
        source: It.
        family: What it has besides.
    """
    old = source.state
    held = {
        "args": old.args, "scheduler": old.scheduler, "grad_scaler": old.grad_scaler, "other": old.other,
        "optimizer": dict(family.optimizer),
    }  # fmt: skip
    left = {key: value for key, value in held.items() if value}
    return {"iteration": old.iteration, "module": {**left, "tag": family.tag}} if left else {}


def plain(values: Mapping[str, object]) -> dict[str, object]:
    """Those of the values that any reader understands: numbers, texts, lists and dictionaries of them."""
    return {key: value for key, value in values.items() if _is_plain(value)}


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(type(key) is str and _is_plain(item) for key, item in value.items())
    return value is None or type(value) in (bool, int, float, str)
