"""Rows of the table of options that are about a whole job: what it begins with, who does it, and what is done afterwards."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NamedTuple

from .option_types import CONVERTING, FILE, SAFETY, SOURCE, SPEED, Option, OptionType, flag, one_of, option, text


class PartNumber(NamedTuple):
    """One of several parts of a conversion.

    Args:
        number: From 1 on.
        total: How many there are.
    """

    number: int
    total: int

    @classmethod
    def of(cls, text: object) -> PartNumber:
        """From ``3/16``.

        Raises:
            ValueError: It is something else.
        """
        match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", str(text))
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            raise ValueError("should be a part and how many there are, such as 3/16")
        return cls(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"{self.number}/{self.total}"


_PART = Option(
    OptionType(PartNumber.of, metavar="K/N"),
    "Do one of N parts; --finish joins them.",
    group=SPEED,
    more="Parts are balanced by bytes as far as whole files allow, and are the same on every host. "
    "See [converting on a cluster](../how-to/convert-on-a-cluster.md).",
    commands=CONVERTING,
)


@dataclass(frozen=True, slots=True)
class JobOptions:
    """What the command line and its job files can ask for besides a conversion."""

    newest_intact: bool = flag(
        "Of a root: the newest step that is intact, though newer ones are damaged.",
        "--no-newest-intact",
        group=SOURCE,
        more="Its checksums all hold; newer ones are damaged, or not committed.",
    )
    part: PartNumber | None = field(default=None, metadata={"option": _PART})
    plan: str | None = option(
        FILE,
        "A saved plan for --part to go by: plan SRC … --save FILE.",
        group=SPEED,
        more="No part opens the source's files and plans anew then. It is refused where the source, the options or the release are "
        "others; `--finish` plans anew, and finds out.",
        commands=CONVERTING,
    )
    finish: bool = flag(
        "Join the parts that were done with --part, and publish.", "--no-finish", group=SPEED, commands=CONVERTING
    )
    executor: str = option(
        one_of("threads", "ray"),
        "Who does the work: threads of this process, or tasks of a Ray cluster.",
        "threads",
        group=SPEED,
        more="A task takes `--workers` CPUs. Ray is an extra: `mcore_rlhf[ray]`.",
        commands=CONVERTING,
        default="threads",
    )
    address: str | None = option(
        text("ADDRESS"),
        "The Ray cluster.",
        group=SPEED,
        commands=CONVERTING,
        default="RAY_ADDRESS, or one on this machine",
    )
    verify: bool = flag(
        "Afterwards verify the target deeply, and diff it with the source.",
        "--no-verify",
        group=SAFETY,
        commands=CONVERTING,
    )
