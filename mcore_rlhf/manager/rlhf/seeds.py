"""What the run's seed decides: the order of the prompts in an epoch, and the seed of every sample.

Both are pure functions of a few numbers and of hash functions with a public standard (FIPS 180-4, FIPS 202): they do
not depend on the number of ranks, on the version of numpy or torch, or on what was drawn before.
"""

from __future__ import annotations

import hashlib
import json
import operator
from typing import SupportsIndex

import numpy as np
from numpy.typing import NDArray

ORDER_VERSION = 1
"""Changes when :func:`epoch_order` changes; a saved cursor means nothing in another order."""

_WORD_NBYTES = 8


def sample_seed(run_seed: SupportsIndex, epoch: SupportsIndex, prompt_id: SupportsIndex | str, sample: int) -> int:
    """The seed of one sample of one prompt: a re-issued prompt regenerates the same rollout for the same weights.

    Args:
        run_seed: The run's seed, any whole number.
        epoch: Counted from 0.
        prompt_id: Which prompt: its index in the dataset, or a name.
        sample: Which of the group's samples, counted from 0.

    Returns:
        A whole number of 63 bits, so that it fits every framework's signed 64-bit seed.
    """
    name = prompt_id if isinstance(prompt_id, str) else operator.index(prompt_id)
    digest = _digest("sample", operator.index(run_seed), operator.index(epoch), name, operator.index(sample))
    return int.from_bytes(digest[:_WORD_NBYTES], "big") >> 1


def epoch_order(run_seed: SupportsIndex, epoch: SupportsIndex, num_prompts: int) -> NDArray[np.intp]:
    """The order in which an epoch takes the prompts.

    Prompt i gets the i-th 64-bit word of the SHAKE-256 stream of SHA-256(seed, epoch), and the prompts are sorted by
    their words (equal words, of which 2^-64·n²/2 are expected, by index).

    Args:
        run_seed: The run's seed, any whole number.
        epoch: Counted from 0.
        num_prompts: Size of the dataset.

    Returns:
        A permutation of ``range(num_prompts)``, shape (num_prompts,).
    """
    key = _digest("order", operator.index(run_seed), operator.index(epoch))
    stream = hashlib.shake_256(key).digest(_WORD_NBYTES * num_prompts)
    return np.argsort(np.frombuffer(stream, dtype="<u8"), kind="stable")


def _digest(purpose: str, *values: int | str) -> bytes:
    """SHA-256 of a JSON list: values cannot run into each other, and 5 is not "5"."""
    return hashlib.sha256(json.dumps(["mcore_rlhf", purpose, 1, *values]).encode("ascii")).digest()
