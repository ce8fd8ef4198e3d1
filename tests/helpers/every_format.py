"""One small model in every format: what the tests over all pairs of formats convert."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

from mcore_rlhf.convert import ConvertOptions, Job, convert
from mcore_rlhf.families.options import ReadOptions, WriteOptions
from mcore_rlhf.families.source import Source
from mcore_rlhf.formats.registry import FORMATS, open_checkpoint
from mcore_rlhf.storage.reading import OpenFiles
from mcore_rlhf.verify.differ import Comparison, Differ
from tests.helpers.conversions import GOLDENS

MODEL = GOLDENS / "tp2pp2dp2_bf16_do"
"""A Llama of two layers, trained by real megatron-core at TP2, PP2 and DP2 with the distributed optimizer."""

EVERY = tuple(known.name for known in FORMATS if known.name not in ("peft", "hf-accelerate"))
"""Those that hold a whole model, each once: accelerate's is ``hf-trainer`` under other file names."""
PAIRS = tuple((source, target) for source in EVERY for target in EVERY)

_UNPADDED = "universal"
_OPTIONS = {"hf": WriteOptions(with_optimizer=True), "megatron": WriteOptions(transformer_impl="local")}


def options(to: str) -> ConvertOptions:
    """How a test converts to a format: with the optimizer everywhere, and in Megatron's names as the golden has them."""
    return ConvertOptions(to=to, fsync=False, workers=1, write=_OPTIONS.get(to, WriteOptions()))


@dataclass
class Zoo:
    """The model in every format, and everything that was made of it; each conversion is made once.

    Args:
        folder: Where the checkpoints lie.
    """

    folder: Path
    _jobs: dict[str, tuple[Path, Job]] = field(default_factory=dict)

    def base(self, name: str) -> Path:
        """The model in a format. Rows of padding are not in every format: all are made of one that has none."""
        if name == _UNPADDED:
            return self._made(MODEL, name, name)[0]
        return self._made(self.base(_UNPADDED), name, name)[0]

    def pair(self, source: str, target: str) -> tuple[Path, Job]:
        """The model of one format in another."""
        return self._made(self.base(source), target, f"{source}-{target}")

    def back(self, source: str, target: str) -> Path:
        """There and back again."""
        return self._made(self.pair(source, target)[0], source, f"{source}-{target}-{source}")[0]

    def _made(self, path: Path, to: str, name: str) -> tuple[Path, Job]:
        if name not in self._jobs:
            target = self.folder / name
            self._jobs[name] = target, convert(path, target, options(to))
        return self._jobs[name]


@lru_cache(maxsize=256)  # of all pairs there and back: a smaller one has lost each when it is asked for again
def opened(path: Path) -> Source:
    """A checkpoint of a test, which nobody changes."""
    return open_checkpoint(path, ReadOptions())


def compared(a: Path, b: Path, *, state: bool = True) -> Comparison:
    """Two checkpoints of one family, bit by bit.

    Args:
        a, b: The checkpoints.
        state: Whether scheduler, param groups and counters are compared as well.
    """
    first, second = opened(a), opened(b)
    if not state:
        second = replace(second, state=first.state)
    with OpenFiles(first.root) as bytes_a, OpenFiles(second.root) as bytes_b:
        return Differ(first, second, bytes_a, bytes_b).compare()
