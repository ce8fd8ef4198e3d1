"""By-products of a step: the model in another format or layout, made behind the training loop from the committed step."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from mcore_rlhf.convert import ConvertOptions, convert
from mcore_rlhf.errors import UsageError
from mcore_rlhf.families.source import ReadOptions, WriteOptions
from mcore_rlhf.formats.registry import format_named

from .deletion import exports_of


@dataclass(frozen=True, slots=True)
class Export:
    """What to make, and how often. It lies in ``<root>/exports/global_step_N/<format>`` and is deleted with its step.

    Args:
        format: Name of the target's format, such as ``hf``.
        every: At every multiple of so many steps, as far as these are saved.
        role: Whose model.
        write: What the target is to be: degrees, dtype, without optimizer.

    Raises:
        UsageError: There is no such format, or ``every`` is not positive.
    """

    format: str
    every: int = 1
    role: str = "actor"
    write: WriteOptions = field(default_factory=lambda: WriteOptions(no_optimizer=True))

    def __post_init__(self) -> None:
        format_named(self.format)
        if self.every < 1:
            raise UsageError(f"export: every should be positive, found {self.every}")

    def wants(self, step: int) -> bool:
        """Whether a step is to be exported."""
        return step % self.every == 0

    def run(self, step_folder: Path) -> Path:
        """Convert one role of a committed step.

        Raises:
            CheckpointError: It cannot be converted; the step itself is not touched.
        """
        target = exports_of(step_folder) / self.format
        read, write = ReadOptions(role=self.role), self.write
        convert(step_folder / self.role, target, ConvertOptions(to=self.format, read=read, write=write, overwrite=True))
        return target
