"""The order and the seeds are fixed for ever: by numbers, by what they must not depend on, and by statistics."""

from __future__ import annotations

import hashlib
import itertools
import time

import numpy as np
import pytest

from mcore_rlhf.manager.rlhf.prompts import epoch_order, sample_seed
from mcore_rlhf.manager.rlhf.sampler import PromptSampler

# Whoever changes these breaks the resume of every run that exists: raise ORDER_VERSION instead.
FIRST_TEN = {
    (0, 0, 10): [2, 0, 9, 6, 4, 1, 5, 3, 7, 8],
    (1234, 0, 10): [8, 2, 4, 3, 6, 7, 1, 0, 9, 5],
    (1234, 1, 10): [4, 9, 5, 1, 8, 6, 0, 7, 3, 2],
    (1234, 0, 1000): [625, 152, 261, 622, 958, 609, 213, 285, 695, 329],
    (42, 7, 106000): [31411, 94546, 96721, 13725, 82203, 78836, 76622, 14776, 22524, 94644],
    (-1, 0, 17): [2, 1, 8, 15, 12, 0, 7, 10, 16, 3],
    (9223372036854775808, 2147483648, 64): [49, 3, 47, 58, 50, 16, 8, 5, 54, 38],
}


@pytest.mark.parametrize(("seed", "epoch", "size"), FIRST_TEN)
def test_the_order_is_the_one_that_was_published(seed: int, epoch: int, size: int) -> None:
    assert epoch_order(seed, epoch, size)[:10].tolist() == FIRST_TEN[seed, epoch, size]
    sampler = PromptSampler(size, seed=seed)
    if epoch == 0:
        assert [prompt.prompt_id for prompt in sampler.next_batch(10)] == FIRST_TEN[seed, epoch, size]


def test_the_order_is_what_the_documentation_says() -> None:
    """Written again from the page, without numpy."""
    key = hashlib.sha256(b'["mcore_rlhf", "order", 1, 1234, 3]').digest()
    stream = hashlib.shake_256(key).digest(8 * 1000)
    words = [int.from_bytes(stream[8 * i : 8 * i + 8], "little") for i in range(1000)]
    assert epoch_order(1234, 3, 1000).tolist() == sorted(range(1000), key=words.__getitem__)


def test_the_sample_seed_is_what_the_documentation_says() -> None:
    digest = hashlib.sha256(b'["mcore_rlhf", "sample", 1, 1234, 3, 17, 5]').digest()
    assert sample_seed(1234, 3, 17, 5) == int.from_bytes(digest[:8], "big") // 2 == 7201060464532006850
    assert sample_seed(np.int64(1234), np.int32(3), np.uint8(17), 5) == sample_seed(1234, 3, 17, 5)


def test_sample_seeds_differ_in_every_argument_and_fit_63_bits() -> None:
    seeds = {sample_seed(*values) for values in itertools.product(range(-4, 4), range(8), range(8), range(8))}
    assert len(seeds) == 8**4
    assert 0 <= min(seeds) < max(seeds) < 2**63
    assert sample_seed(0, 0, "5", 0) != sample_seed(0, 0, 5, 0)
    assert sample_seed(1, 11, 1, 0) != sample_seed(11, 1, 1, 0)


def test_every_order_is_equally_likely() -> None:
    counts = dict.fromkeys(itertools.permutations(range(4)), 0)
    epochs = 4800
    for epoch in range(epochs):
        counts[tuple(epoch_order(99, epoch, 4).tolist())] += 1
    expected = epochs / len(counts)
    chi_square = sum((count - expected) ** 2 / expected for count in counts.values())
    assert chi_square < 49.7  # 23 degrees of freedom: once in a thousand runs; this one's numbers are fixed


def test_orders_of_neighbouring_seeds_and_epochs_have_nothing_in_common() -> None:
    base = epoch_order(5, 5, 2000)
    for other in (epoch_order(6, 5, 2000), epoch_order(5, 6, 2000), epoch_order(-5, 5, 2000)):
        assert (base == other).sum() < 12  # one place in common is expected
        assert abs(np.corrcoef(base, other)[0, 1]) < 0.1


def test_a_million_prompts_are_put_in_order_within_a_second() -> None:
    start = time.process_time()
    order = epoch_order(1, 0, 1_000_000)
    assert time.process_time() - start < 1.0
    assert np.array_equal(np.sort(order), np.arange(1_000_000))
