"""The task: write a number backwards. Its prompts are numbered, its answers are checked by a rule, not a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

VOCABULARY = (*"0123456789", "<pad>", "<bos>", "<eos>", "=", "+", "-")
"""16 tokens, so that no layout up to TP4 pads the vocabulary and all sample from the same distribution."""
PAD, BOS, EOS, EQUALS = (VOCABULARY.index(token) for token in ("<pad>", "<bos>", "<eos>", "="))


@dataclass(frozen=True, slots=True)
class Reversal:
    """Prompts ``<bos>42=`` with the answer ``24<eos>``, one for every number of so many digits.

    Args:
        digits: Digits of a prompt.
    """

    digits: int = 2

    def __len__(self) -> int:
        """Number of prompts."""
        return int(10**self.digits)

    def __getitem__(self, prompt_id: int) -> list[int]:
        """Tokens of a prompt and of its answer, the items of a dataset to whoever fingerprints one."""
        return [*self.prompt(prompt_id), *self.answer(prompt_id)]

    @property
    def prompt_length(self) -> int:
        """Tokens of every prompt."""
        return self.digits + 2

    @property
    def answer_length(self) -> int:
        """Tokens of the longest answer that is sampled."""
        return self.digits + 1

    @property
    def seq_length(self) -> int:
        """Tokens of prompt and answer."""
        return self.prompt_length + self.answer_length

    def prompt(self, prompt_id: int) -> list[int]:
        """Tokens of a prompt.

        Args:
            prompt_id: Its number, from 0.

        Raises:
            IndexError: There is no such prompt.
        """
        if not 0 <= prompt_id < len(self):
            raise IndexError(f"prompt {prompt_id} is not one of the {len(self)} of {self}")
        return [BOS, *self._digits(prompt_id), EQUALS]

    def answer(self, prompt_id: int) -> list[int]:
        """Tokens of the right answer."""
        return [*reversed(self._digits(prompt_id)), EOS]

    def reward(self, prompt_id: int, answer: Sequence[int]) -> float:
        """The share of the right answer's tokens that stand in their place.

        Args:
            prompt_id: The prompt.
            answer: Sampled tokens; what follows the first ``<eos>`` does not count.

        Returns:
            From 0 to 1. Part of an answer is worth something, or chance alone would never find the first reward.
        """
        right = self.answer(prompt_id)
        written = answer[: answer_length(answer)]
        return sum(a == b for a, b in zip(right, written, strict=False)) / len(right)

    def _digits(self, prompt_id: int) -> list[int]:
        return [int(digit) for digit in f"{prompt_id:0{self.digits}d}"]


def answer_length(answer: Sequence[int]) -> int:
    """Tokens of an answer up to and including the first ``<eos>``; all of them where there is none."""
    return answer.index(EOS) + 1 if EOS in answer else len(answer)
