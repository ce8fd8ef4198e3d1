"""The padded vocabulary: how many rows an embedding has, which depends on the tensor-parallel degree."""

from __future__ import annotations

from mcore_rlhf.core.box import Box
from mcore_rlhf.core.catalog import Chunk, TensorEntry


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


def with_rows(entry: TensorEntry, rows: int) -> TensorEntry:
    """A vocabulary-shaped tensor with another number of rows.

    Rows that both sizes have are the same. New rows repeat the last one, which is a trained padding row where there is
    any: zeros would give words that do not exist a larger share of the softmax. Megatron's own converter does the same.

    Args:
        entry: A tensor whose dimension 0 counts words.
        rows: Wanted length of dimension 0.
    """
    have = entry.global_shape[0]
    shape = (rows, *entry.global_shape[1:])
    if rows <= have:
        return TensorEntry(entry.name, shape, entry.dtype, entry.chunks)
    new_rows = [_repeated(chunk, have, rows) for chunk in entry.chunks if chunk.box.stop[0] == have]
    return TensorEntry(entry.name, shape, entry.dtype, (*entry.chunks, *new_rows))


def _repeated(chunk: Chunk, have: int, rows: int) -> Chunk:
    """The last row of a chunk, repeated with stride 0 over rows ``[have, rows)``."""
    box = chunk.box
    last = chunk.narrow(Box((have - 1, *box.offset[1:]), (1, *box.shape[1:])))
    new = Box((have, *box.offset[1:]), (rows - have, *box.shape[1:]))
    return Chunk(new, last.record, last.start, (0, *last.strides[1:]))
