"""The RNG states of a new layout: kept where ranks stay the same, otherwise derived, or written fresh.

Megatron stops when ``rng_tracker_states`` is missing, so there are always valid states.

Sources: Megatron-LM core_v0.16.1, ``megatron/training/checkpointing.py`` (``get_rng_state``); megatron-core 0.16.1,
``tensor_parallel/random.py`` (``model_parallel_cuda_manual_seed``), Megatron-LM ``training/initialize.py``
(``_set_random_seed``).
"""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .folders import FileRank
from .state import OLD_RNG_KEYS, RankValues

if TYPE_CHECKING:
    import torch

_PHILOX_NBYTES = 16
"""A CUDA generator's state: seed and offset, 8 bytes each. The CPU's has 5056 bytes."""

RngState = dict[str, object]

NAMES = {
    "python": "random_rng_state",
    "numpy": "np_rng_state",
    "torch": "torch_rng_state",
    "cuda": "cuda_rng_state",
    "tracker": "rng_tracker_states",
}
"""The manager's names for a rank's random states, and Megatron's."""


@dataclass(frozen=True, slots=True)
class RngMaker:
    """Makes the RNG states of new ranks.

    Args:
        saved: The state of the source's first rank; None where the source has none.
        iteration: Goes into derived seeds, so that two steps do not repeat each other.
        seed: The run's ``--seed``, for fresh states.
    """

    saved: Mapping[str, object] | None
    iteration: int
    seed: int

    def derived(self, at: FileRank, dp_rank: int = 0) -> RngState:
        """States seeded by a hash of (saved state of coordinate 0, own coordinate, iteration).

        The default and data-parallel states are equal within a tensor-parallel group, model-parallel ones differ per
        (tp, pp), expert ones per (ep, etp, pp).
        """
        base = hashlib.sha256(_digest(self.saved) + struct.pack("<q", self.iteration)).digest()

        def seed(*coordinate: object) -> int:
            place = (*coordinate, dp_rank) if dp_rank else coordinate
            return int.from_bytes(hashlib.sha256(base + repr(place).encode()).digest()[:8], "little") >> 1

        return self._states(
            default=seed("default", at.pp_rank),
            tracker={
                "data-parallel-rng": seed("data", at.pp_rank),
                "model-parallel-rng": seed("model", at.tp_rank, at.pp_rank),
                "expert-parallel-rng": seed("expert", at.ep_rank, at.etp_rank, at.pp_rank),
            },
        )

    def fresh(self, at: FileRank, dp_rank: int = 0) -> RngState:
        """The states that Megatron itself has right after it was started with the run's seed."""
        seed = self.seed + 100 * at.pp_rank + 10 * dp_rank
        return self._states(
            default=seed,
            tracker={
                "data-parallel-rng": seed,
                "model-parallel-rng": seed + 2718 + at.tp_rank,
                "expert-parallel-rng": seed + 1024 + 100 * at.ep_rank + at.etp_rank,
            },
        )

    def _states(self, default: int, tracker: Mapping[str, int]) -> RngState:
        generator = random.Random(default)
        return {
            "random_rng_state": generator.getstate(),
            "np_rng_state": np.random.RandomState(default % 2**32).get_state(),
            "torch_rng_state": _cpu_state(default),
            "cuda_rng_state": self._device_state("cuda_rng_state", default),
            "rng_tracker_states": {name: self._device_state(name, seed) for name, seed in tracker.items()},
        }

    def _device_state(self, name: str, seed: int) -> torch.Tensor:
        """A state of the kind that the source has: a CUDA generator's, or the CPU's where the run had no GPU."""
        import torch

        if self._nbytes(name) != _PHILOX_NBYTES:
            return _cpu_state(seed)
        return torch.frombuffer(bytearray(struct.pack("<QQ", seed, 0)), dtype=torch.uint8)

    def _nbytes(self, name: str) -> int:
        saved = self.saved or {}
        tracker = saved.get("rng_tracker_states")
        value = saved.get(name, tracker.get(name) if isinstance(tracker, dict) else None)
        if value is None:
            value = saved.get("cuda_rng_state")
        numel = getattr(value, "numel", None)
        return int(numel()) if callable(numel) else _PHILOX_NBYTES


def _cpu_state(seed: int) -> torch.Tensor:
    import torch

    return torch.Generator().manual_seed(seed % 2**63).get_state()


def _digest(state: object) -> bytes:
    """A hash of a nest of dictionaries, sequences, arrays and tensors."""
    digest = hashlib.sha256()

    def feed(value: object) -> None:
        digest.update(type(value).__name__.encode())
        if isinstance(value, Mapping):
            for key in sorted(value, key=repr):
                digest.update(repr(key).encode())
                feed(value[key])
        elif isinstance(value, list | tuple):
            for item in value:
                feed(item)
        elif hasattr(value, "numpy"):
            digest.update(value.numpy().tobytes())
        elif isinstance(value, np.ndarray):
            digest.update(value.tobytes())
        else:
            digest.update(repr(value).encode())

    feed(state)
    return digest.digest()


def saved_rng(shard: RankValues) -> list[Mapping[str, object]]:
    """The RNG states that a rank of the source stored, with real tensors."""
    stored = shard.top.get("rng_state")
    if stored is None and "rng_tracker_states" in shard.top:
        stored = [{key: shard.top[key] for key in OLD_RNG_KEYS if key in shard.top}]
    listed = shard.materialize(stored)
    return listed if isinstance(listed, list) else []
