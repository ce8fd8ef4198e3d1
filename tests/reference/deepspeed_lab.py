"""Worlds of real DeepSpeed on the CPU: each runs a list of cases."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mcore_rlhf.demo.workers import WorkerPool

_TIMEOUT = 280.0
Case = dict[str, Any]


@dataclass
class DeepSpeedLab:
    """Runs cases, and keeps what each rank saw.

    Args:
        pool: Ranks with DeepSpeed in them.
        root: Folder of all cases' folders.
        seen: By case, one result per rank.
    """

    pool: WorkerPool
    root: Path
    seen: dict[str, list[Case]] = field(default_factory=dict)

    def run(self, world: int, cases: dict[str, Case]) -> None:
        """Run cases one after the other in one world."""
        job = "tests.reference.deepspeed_worker:run"
        results = self.pool.run(job, str(self.root), cases, world_size=world, timeout=_TIMEOUT)
        self.seen |= {name: [result[name] for result in results] for name in cases}

    def role(self, name: str) -> Path:
        """The role's folder that the manager saved."""
        return self.root / name / "ours" / "global_step_2" / "actor"
