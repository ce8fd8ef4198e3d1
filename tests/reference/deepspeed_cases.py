"""The matrix of conversions that real DeepSpeed has to take up, and the few of them that every test run does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, dataclass
from itertools import combinations, product

from tests.reference.deepspeed_models import DTYPES, KINDS, Setting

STAGES, DEGREES = (0, 1, 2, 3), (1, 2, 4)
NATIVE, THROUGH, UNIVERSAL = ROUTES = ("native", "through-universal", "universal")
"""Converted at once; by way of a universal checkpoint; or left universal, for DeepSpeed to load with ``load_universal``."""


@dataclass(frozen=True)
class Case:
    """One conversion.

    Args:
        source: The engine that trained and saved.
        stage, dp: Those of the engine that loads.
        route: How it gets there.
    """

    source: Setting
    stage: int
    dp: int
    route: str

    @property
    def target(self) -> Setting:
        return Setting(self.source.kind, self.source.dtype, self.stage, self.dp)

    @property
    def exists(self) -> bool:
        """DeepSpeed loads no universal checkpoint in stage 0, which has no ZeRO optimizer to load it."""
        return self.source.exists and self.target.exists and not (self.route == UNIVERSAL and self.stage == 0)

    @property
    def name(self) -> str:
        source = self.source
        return f"{source.kind}-{source.dtype}-z{source.stage}dp{source.dp}-z{self.stage}dp{self.dp}-{self.route}"

    def pairs(self) -> set[tuple[tuple[int, object], ...]]:
        """Which two values of two axes meet in it."""
        return set(combinations(enumerate((*astuple(self.source), self.stage, self.dp, self.route)), 2))


SOURCES = tuple(
    setting
    for setting in (Setting(*axes) for axes in product(KINDS, DTYPES, STAGES, DEGREES))
    if setting.exists
)  # fmt: skip


def cases_of(source: Setting) -> Iterator[Case]:
    """From one source to every stage; degrees and routes take turns, so that over all sources all meet."""
    number = SOURCES.index(source)
    for stage in STAGES:
        turn = number + stage
        case = Case(source, stage, DEGREES[turn % 3], ROUTES[(turn // 3 + stage) % 3])
        yield case if case.exists else Case(source, stage, case.dp, NATIVE)


MATRIX = tuple(case for source in SOURCES for case in cases_of(source) if case.exists)


def few(count: int) -> list[Case]:
    """Those in which the most pairs of values meet: each adds the most that are new.

    Args:
        count: How many.
    """
    of_case = {case: case.pairs() for case in MATRIX}
    chosen: list[Case] = []
    seen: set[object] = set()
    for _ in range(count):
        chosen.append(max(of_case, key=lambda case: len(of_case[case] - seen)))
        seen |= of_case[chosen[-1]]
    return chosen
