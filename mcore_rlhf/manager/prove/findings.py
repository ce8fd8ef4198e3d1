"""What comparing two runs finds."""

from __future__ import annotations

from dataclasses import dataclass, field

_MOST = 1000


@dataclass(frozen=True, slots=True)
class Finding:
    """One value that is not the same.

    Args:
        where: The file.
        key: Place of the value in it: ``optimizer/state/0/exp_avg``.
        first: What the uninterrupted run has.
        second: What the other one has.
        detail: More about it: the first element that differs, and how many do.
    """

    where: str
    key: str
    first: str
    second: str
    detail: str = ""


@dataclass(slots=True)
class Tally:
    """Counts what was compared, and keeps what differs.

    Args:
        compared: Values that were compared.
        ignored: Values that may differ, and were not compared.
        findings: The first 1000 differences.
        differing: How many there are.
    """

    compared: int = 0
    ignored: int = 0
    findings: list[Finding] = field(default_factory=list)
    differing: int = 0

    @property
    def equal(self) -> bool:
        """Whether something was compared, and nothing differs."""
        return self.compared > 0 and not self.differing

    def same(self) -> None:
        """Count a value that is equal."""
        self.compared += 1

    def differs(self, finding: Finding) -> None:
        """Count a value that is not."""
        self.compared += 1
        self.differing += 1
        if len(self.findings) < _MOST:
            self.findings.append(finding)


def shown(value: object, width: int = 60) -> str:
    """A value in one short line."""
    text = " ".join(repr(value).split())
    return text if len(text) <= width else f"{text[: width - 1]}…"
