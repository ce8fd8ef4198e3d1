"""A checkpoint under a module's own names, compared with a live module: which stored tensor each live one is, and what is missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mcore_rlhf.core.account import Report
from mcore_rlhf.core.catalog import FLOATING, MASTER, PARAM, DType, Shape, TensorName
from mcore_rlhf.core.chunks import Chunks
from mcore_rlhf.core.facts import Fate
from mcore_rlhf.core.shares import EITHER, FROM_MASTERS
from mcore_rlhf.errors import LayoutMismatch, Problems, Unsupported
from mcore_rlhf.families.module import ModuleState
from mcore_rlhf.families.source import ParamGroup, Source

_ADVICE = "Build the model that the checkpoint holds, or load another checkpoint."
_MOST = 5


@dataclass(frozen=True, slots=True)
class LiveParam:
    """A parameter or buffer of a live module.

    Args:
        name: Its name.
        global_shape: Shape of the whole tensor.
        dtype: Element type.
        trained: Whether it must be in the checkpoint; buffers and frozen parameters may be left out.
    """

    name: str
    global_shape: Shape
    dtype: DType
    trained: bool


@dataclass(slots=True)
class ModuleSource:
    """A source of the module family on its way into a live module.

    Args:
        source: The opened checkpoint.
        live: The module's tensors, each once.
        shared: Second names of the module's tied tensors: ``{alias: name}``.
        problems: Takes what does not fit.
        report: Takes what is left out.
    """

    source: Source
    live: Sequence[LiveParam]
    shared: Mapping[str, str] = field(default_factory=dict)
    problems: Problems = field(default_factory=Problems)
    report: Report = field(default_factory=Report)
    _stored: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, source: Source, live: Sequence[LiveParam], shared: Mapping[str, str], into: str) -> ModuleSource:
        """Take a source up.

        Args:
            source: The opened checkpoint.
            live: The module's tensors, each once.
            shared: Second names of tied tensors.
            into: What it is loaded into, for people.

        Raises:
            Unsupported: The checkpoint is of another family.
        """
        native = ModuleState.of(source)
        if native is None:
            raise Unsupported(
                f"{source.root}: from {source.format} into {into}: its tensors have other names\n"
                "Convert it first: mcore-rlhf convert SRC DST --to dcp --reference-config DIR."
            )
        found = cls(source, live, shared)
        found._stored = {one.name: found._stored_as(one.name, native) for one in live}
        return found

    def stored_as(self, name: str) -> str:
        """What the checkpoint calls a live tensor: a tied one may have another of its names there."""
        return self._stored.get(name, name)

    def _stored_as(self, name: str, native: ModuleState) -> str:
        known = self.source.model
        others = [alias for alias, owner in self.shared.items() if owner == name]
        for candidate in (name, *others):
            owner = native.shared.get(candidate, candidate)
            for stored in (candidate, owner):
                if known.get(stored) is not None:
                    return stored
        return name

    def compare(self) -> set[str]:
        """Note what does not fit.

        Returns:
            The names of live tensors that stay as they are, since the checkpoint has none for them.
        """
        missing = {one.name for one in self.live if self._compare(one)}
        self._compare_back()
        if missing:
            self.report.add(
                Fate.LOST,
                f"not in the checkpoint, and left as this run has them: {len(missing)} buffers and frozen parameters "
                f"({', '.join(sorted(missing)[:_MOST])})",
            )
        return missing

    def _compare(self, one: LiveParam) -> bool:
        """Note how a live tensor differs; returns whether it is one that may be missing, and is."""
        stored = self.stored_as(one.name)
        spec = self.source.model.get(stored)
        if spec is None or not self._has(stored):
            if one.trained:
                text = f"{one.name}: live {one.global_shape}, not in the checkpoint"
                self.problems.add(LayoutMismatch, text, _ADVICE)
            return not one.trained
        if spec.global_shape != one.global_shape:
            text = f"{one.name}: live {one.global_shape}, stored {spec.global_shape}"
            self.problems.add(LayoutMismatch, text, _ADVICE)
        return False

    def _compare_back(self) -> None:
        seen = {*self._stored.values(), *self.shared}
        for spec in self.source.model.params:
            if spec.name not in seen:
                text = f"{spec.name}: stored {spec.global_shape}, and this run has no such parameter"
                self.problems.add(LayoutMismatch, text, _ADVICE)

    def _has(self, stored: str) -> bool:
        return any(TensorName(self.source.role, stored, state) in self.source.catalog for state in EITHER[PARAM])

    def view(self) -> Chunks:
        """The source's catalogue, with weights rounded from their masters where this run has another element type."""
        return self.source.catalog.states(FROM_MASTERS if self._from_masters() else EITHER)

    def _from_masters(self) -> bool:
        if MASTER not in self.source.states:
            return False
        for one in self.live:
            spec = self.source.model.get(self.stored_as(one.name))
            if one.trained and spec is not None and spec.dtype != one.dtype:
                return spec.dtype in FLOATING
        return False


def matched_groups(live: Sequence[Sequence[str]], stored: Sequence[ParamGroup], problems: Problems) -> list[ParamGroup]:
    """For every live param group the stored one whose parameters it has: each keeps its own settings.

    Args:
        live: The names of every group's parameters, as the checkpoint calls them.
        stored: The checkpoint's groups.
        problems: Told where there is none.

    Returns:
        As many as there are live ones, if there are no problems.
    """
    found: list[ParamGroup] = []
    for number, params in enumerate(live):
        names = set(params)
        same = [group for group in stored if set(group.params) == names]
        within = same or [group for group in stored if names and names <= set(group.params)]
        if not names and number < len(stored):
            within = [stored[number]]
        if not within:
            some = ", ".join(sorted(names)[:3])
            text = f"param group {number} ({some}, …): its parameters are in no single param group of the checkpoint"
            problems.add(
                LayoutMismatch, text, "Group the parameters as the saved run did, or load with optimizer=False."
            )
        found += within[:1]
    return found
