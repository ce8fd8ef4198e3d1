"""What a source has that no file does: it is computed from the files when it is looked at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mcore_rlhf.core.computed import Computation


@dataclass(frozen=True, slots=True)
class Computed:
    """Tensors that are made of stored ones: sums with an adapter, weights times their scales.

    Args:
        root: Folder to which the files of the catalogue are relative; that of several checkpoints, as a rule.
        computations: What is computed, by the name of its record's file.
    """

    root: Path
    computations: Mapping[str, Computation]
