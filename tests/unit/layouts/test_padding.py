"""The padded vocabulary: Megatron's rule, and what follows without the true size."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rlhf.layouts.tensor import padded_vocab_size, repadded


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
