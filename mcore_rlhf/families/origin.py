"""What a conversion out of Megatron leaves in client state for the way back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mcore_rlhf.models.huggingface.table import GROUPED, LOCAL, MTP_LAYER, SEQUENTIAL, TRANSFORMER_ENGINE, Spelling

from .source import Source

ORIGIN = "mcore_rlhf_origin"
"""The key of client state under which it lies."""


@dataclass(frozen=True, slots=True)
class Origin:
    """What is there; empty for a run that was never Megatron's."""

    values: Mapping[str, object]

    @classmethod
    def of(cls, source: Source) -> Origin:
        """That of a source."""
        stored = source.state.other.get(ORIGIN)
        return cls(stored if isinstance(stored, Mapping) else {})

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
        said = self.values.get("spelling")
        engine = implementation or (said if isinstance(said, str) else TRANSFORMER_ENGINE)
        experts = SEQUENTIAL if engine == LOCAL else GROUPED
        if engine == said:
            experts = str(self.values.get("experts") or experts)
        return Spelling(engine, experts, str(self.values.get("mtp") or MTP_LAYER))

    def _section(self, name: str) -> dict[str, object]:
        found = self.values.get(name)
        return dict(found) if isinstance(found, Mapping) else {}


def origin_of(source: Source, config: Mapping[str, object], spelling: Spelling) -> dict[str, object]:
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


def plain(values: Mapping[str, object]) -> dict[str, object]:
    """Those of the values that any reader understands: numbers, texts, lists and dictionaries of them."""
    return {key: value for key, value in values.items() if _is_plain(value)}


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(type(key) is str and _is_plain(item) for key, item in value.items())
    return value is None or type(value) in (bool, int, float, str)
