"""Where the matrix runs: sources are trained once, conversions are ours, and real DeepSpeed loads what they wrote."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from mcore_rlhf.convert import ConvertOptions, convert
from mcore_rlhf.demo.workers import WorkerPool
from mcore_rlhf.families.options import WriteOptions
from tests.reference.deepspeed_cases import NATIVE, UNIVERSAL, Case
from tests.reference.deepspeed_live import Live, Seen
from tests.reference.deepspeed_models import Setting

TIMEOUT = 100.0
"""Seconds for a job of a few tiny steps; two cores that others use as well take their time."""
_RESIDENT = "tests.reference.deepspeed_resident"


@dataclass
class Matrix:
    """Runs cases, and remembers sources.

    Args:
        pool: Ranks with DeepSpeed in them.
        folder: Of all checkpoints.
    """

    pool: WorkerPool
    folder: Path
    _trained: dict[Setting, tuple[Path, list[Seen]]] = field(default_factory=dict)
    _roots: int = 0

    def run(self, job: str, *args: Any, dp: int, **kwargs: Any) -> list[Any]:
        """One result per rank of a function of the resident module."""
        return self.pool.run(f"{_RESIDENT}:{job}", *args, world_size=dp, timeout=TIMEOUT, **kwargs)

    def source(self, setting: Setting) -> tuple[Path, list[Seen]]:
        """What DeepSpeed saved, and what each rank saw then and afterwards."""
        if setting not in self._trained:
            root = self.new_root()
            self._trained[setting] = root, self.run("train_and_save", setting, str(root), dp=setting.dp)
        return self._trained[setting]

    def converted(self, case: Case) -> Path:
        """The root of the checkpoint that our conversion makes for a case."""
        root = self.source(case.source)[0]
        if case.route != NATIVE:
            root = self.convert(root, "universal")
        return root if case.route == UNIVERSAL else self.convert(root, "deepspeed", zero_stage=case.stage, dp=case.dp)

    def convert(self, source: Path, to: str, **write: Any) -> Path:
        """Convert into a new root; the options are those of ``WriteOptions``."""
        target = self.new_root()
        convert(source, target, ConvertOptions(to=to, write=WriteOptions(**write), workers=1, fsync=False))
        return target

    def loaded(self, case: Case) -> list[Seen]:
        """What each rank sees after real DeepSpeed has loaded the result."""
        root = str(self.converted(case))
        return self.run("load_and_train", case.target, root, dp=case.dp, universal=case.route == UNIVERSAL)

    def new_root(self) -> Path:
        self._roots += 1
        return self.folder / f"root_{self._roots}"


def differences(a: Live, b: Live) -> list[str]:
    """What two engines do not share to the last bit, by name."""
    found = [name for name in ("steps", "settings", "counters") if getattr(a, name) != getattr(b, name)]
    for kind, ours, theirs in (("param", a.param, b.param), ("state", a.states, b.states)):
        assert ours, kind
        found += [f"{kind} {key}: on one side only" for key in ours.keys() ^ theirs.keys()]
        found += [f"{kind} {key}" for key in ours.keys() & theirs.keys() if not same(ours[key], theirs[key])]
    return sorted(found)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have equal types, shapes and bits."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
