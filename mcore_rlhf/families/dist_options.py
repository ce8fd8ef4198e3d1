"""The rows of :mod:`.options` that are about Megatron-core's ``torch_dist`` alone."""

from __future__ import annotations

from dataclasses import dataclass

from .option_types import CONTENT, SAFETY, Takes, flag, one_of, option


@dataclass(frozen=True, slots=True)
class DistOptions:
    """What such a checkpoint is to be."""

    optimizer_sharding: str | None = option(
        one_of("fully_reshardable", "dp_reshardable"),
        "How a distributed optimizer's states are stored.",
        group=CONTENT,
        more="Megatron loads `fully_reshardable` on any layout, and `dp_reshardable`, its own default, at the same TP, PP and EP alone.",
        takes=Takes.TORCH_DIST,
        default="fully_reshardable",
    )
    integrity: bool = flag(
        "Write integrity.json, the SHA-256 of all files.",
        "--no-integrity",
        group=SAFETY,
        more="Runs with `--verify-integrity` (megatron-core 0.17.1 and later) load no folder without it. Every file is read again for it.",
        takes=Takes.TORCH_DIST,
    )
