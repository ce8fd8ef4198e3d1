"""Fresh states of the generators that torch's trainers restore, for a target whose source has none: a function of what it is given."""

from __future__ import annotations

import hashlib
import random
from typing import cast

from mcore_rlhf.storage.torch_values import cpu_generator_state, cuda_generator_state


def random_states(seeded_by: str) -> dict[str, object]:
    """States of torch's generators on CPU and CUDA, numpy's and Python's, under ``cpu``, ``cuda``, ``numpy`` and ``random``.

    Args:
        seeded_by: Of what they are made: the iteration, a rank.
    """
    import numpy as np

    seed = int.from_bytes(hashlib.sha256(seeded_by.encode()).digest()[:4], "little")
    state = cast(tuple[object, ...], np.random.RandomState(seed).get_state())
    return {
        "cpu": cpu_generator_state(seed),
        "numpy": state,
        "random": random.Random(seed).getstate(),
        "cuda": cuda_generator_state(seed),
    }
