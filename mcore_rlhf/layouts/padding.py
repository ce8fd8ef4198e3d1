"""The padded vocabulary: how many rows an embedding has, which depends on the tensor-parallel degree."""

from __future__ import annotations


def padded_vocab_size(vocab_size: int, divisible_by: int, tp: int) -> int:
    """Rows of the word embedding for a true vocabulary.

    Source: Megatron-LM core_v0.16.1, ``megatron/training/tokenizer/tokenizer.py``, ``_vocab_size_with_padding``.

    Args:
        vocab_size: Words of the tokenizer, extra ids included.
        divisible_by: Megatron's ``make_vocab_size_divisible_by``.
        tp: Tensor-parallel degree.
    """
    multiple = divisible_by * tp
    return -(-vocab_size // multiple) * multiple


def repadded(padded: int, divisible_by: int, old_tp: int, new_tp: int) -> int | None:
    """The padded size at another degree when the true vocabulary is not known, or None where that is ambiguous.

    ``padded`` rows at ``old_tp`` came from any true size in ``(padded - multiple, padded]``. The answer is certain only
    if all of them lead to the same size.
    """
    multiple = divisible_by * old_tp
    smallest, largest = max(1, padded - multiple + 1), padded
    sizes = {padded_vocab_size(size, divisible_by, new_tp) for size in (smallest, largest)}
    return sizes.pop() if len(sizes) == 1 else None
