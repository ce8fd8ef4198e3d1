"""What a source has that no file does: sums, which are computed from the files when they are looked at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mcore_rlhf.core.lowrank import LowRankSum


@dataclass(frozen=True, slots=True)
class Computed:
    """Tensors that are sums of stored ones.

    Args:
        root: Folder to which the files of the catalogue are relative; that of several checkpoints, as a rule.
        sums: What is computed, by the name of its record's file.
    """

    root: Path
    sums: Mapping[str, LowRankSum]
