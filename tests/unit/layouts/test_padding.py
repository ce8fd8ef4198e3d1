"""The padded vocabulary: Megatron's rule, what follows without the true size, and what new rows hold."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mcore_rlhf.core.plan import check_tiles
from mcore_rlhf.layouts.padding import padded_vocab_size, repadded, with_rows
from tests.unit.core.layouts import stored, view


@pytest.mark.parametrize(
    ("words", "divisor", "tp", "rows"),
    [
        (132, 16, 1, 144),
        (132, 16, 2, 160),
        (50257, 128, 1, 50304),
        (50257, 128, 8, 51200),
        (128, 128, 1, 128),
        (1, 1, 3, 3),
    ],
)
def test_megatrons_rule(words: int, divisor: int, tp: int, rows: int) -> None:
    assert padded_vocab_size(words, divisor, tp) == rows


@settings(max_examples=50)
@given(st.integers(1, 500), st.sampled_from([1, 2, 16]), st.sampled_from([1, 2, 4, 3]), st.sampled_from([1, 2, 4, 3]))
def test_without_the_true_size_only_certain_answers_are_given(words: int, divisor: int, old: int, new: int) -> None:
    rows = padded_vocab_size(words, divisor, old)
    possible = {
        padded_vocab_size(w, divisor, new) for w in range(1, rows + 1) if padded_vocab_size(w, divisor, old) == rows
    }
    answer = repadded(rows, divisor, old, new)
    assert answer == (possible.pop() if len(possible) == 1 else None)


@settings(max_examples=50)
@given(st.randoms(use_true_random=False), st.integers(1, 12))
def test_rows_are_kept_cut_or_repeated(rng: random.Random, rows: int) -> None:
    have, width = rng.randrange(1, 9), rng.randrange(1, 6)
    tensor = np.arange(1, have * width + 1, dtype=np.int32).reshape(have, width)
    made = stored(rng, tensor, "a", rng.randrange(1, 5))
    entry = with_rows(made.entry, rows)
    assert entry.global_shape == (rows, width)
    got = np.zeros((max(rows, have), width), np.int32)
    for chunk in entry.primary():
        to = tuple(slice(a, b) for a, b in zip(chunk.box.offset, chunk.box.stop, strict=True))
        assert not got[to].any(), "rows come from one place"
        got[to] = view(made.contents[chunk.record.key], chunk.start, chunk.box.shape, chunk.strides)
    expected = np.concatenate([tensor, np.repeat(tensor[-1:], max(0, rows - have), 0)])
    np.testing.assert_array_equal(got[:rows], expected[:rows])


@settings(max_examples=50)
@given(st.randoms(use_true_random=False))
def test_more_rows_still_tile(rng: random.Random) -> None:
    tensor = np.zeros((4, 3), np.int32)
    entry = with_rows(stored(rng, tensor, "a", 4).entry, 9)
    assume(len(entry.chunks) > 1)
    assert check_tiles(entry) is None
