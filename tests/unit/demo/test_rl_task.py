"""The task: what is asked, what is right, and what an answer is worth."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_rlhf.demo.rl.task import BOS, EOS, EQUALS, PAD, VOCABULARY, Reversal, answer_length

TASK = Reversal()


def text(tokens: list[int]) -> str:
    return "".join(VOCABULARY[token] for token in tokens)


@pytest.mark.parametrize(("number", "prompt", "answer"), [(42, "<bos>42=", "24<eos>"), (7, "<bos>07=", "70<eos>")])
def test_a_prompt_and_its_answer(number: int, prompt: str, answer: str) -> None:
    assert text(TASK.prompt(number)) == prompt
    assert text(TASK.answer(number)) == answer
    assert text(TASK[number]) == prompt + answer
    assert len(TASK[number]) == TASK.seq_length


def test_special_tokens_are_no_digits() -> None:
    assert min(PAD, BOS, EOS, EQUALS) >= 10
    assert len(set(VOCABULARY)) == len(VOCABULARY) == 16


def test_every_number_is_a_prompt_of_its_own() -> None:
    assert len({tuple(TASK.prompt(number)) for number in range(len(TASK))}) == len(TASK) == 100


@pytest.mark.parametrize("number", [-1, 100])
def test_other_prompts_do_not_exist(number: int) -> None:
    with pytest.raises(IndexError, match=f"prompt {number} is not one of the 100"):
        TASK.prompt(number)


@pytest.mark.parametrize(
    ("answer", "reward"),
    [([2, 4, EOS], 1.0), ([2, 4, 4], 2 / 3), ([2, 5, EOS], 2 / 3), ([EOS, 4, EOS], 0.0), ([2, EOS, EOS], 1 / 3),
     ([4, 2, PAD], 0.0)],
)  # fmt: skip
def test_the_reward_counts_tokens_in_their_place_up_to_the_end(answer: list[int], reward: float) -> None:
    assert TASK.reward(42, answer) == reward


@given(st.integers(0, 99), st.lists(st.integers(0, 15), min_size=3, max_size=3))
def test_only_the_right_answer_earns_everything(number: int, answer: list[int]) -> None:
    reward = TASK.reward(number, answer)
    assert 0 <= reward <= 1
    assert (reward == 1) == (answer == TASK.answer(number))


@pytest.mark.parametrize(("answer", "length"), [([EOS, 1, 2], 1), ([1, 2, EOS], 3), ([1, 2, 3], 3)])
def test_an_answer_ends_with_its_first_end(answer: list[int], length: int) -> None:
    assert answer_length(answer) == length
