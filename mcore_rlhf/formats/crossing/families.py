"""Conversions between families of formats: Megatron's names and shapes, and Hugging Face's, which all others store.

The source is wrapped in one of the target's family: its catalogue is a view with other names and boxes, its groups and
arguments are derived, and the target's format never learns of it.
"""

from __future__ import annotations

from mcore_rlhf.formats.base import Format, Source, WriteOptions

from .crossing_to_huggingface import EMBEDDING, to_huggingface
from .crossing_to_megatron import to_megatron
from .megatron.reader import MegatronNative
from .module_state import ModuleState


def crossed(source: Source, to: Format, options: WriteOptions) -> Source:
    """The source as a target of the format wants it: itself where both are of one family.

    Args:
        source: An opened checkpoint.
        to: The target's format.
        options: What the target is to be.

    Raises:
        CheckpointError: The model has no names in the other family, or what decides its shapes is not known.
    """
    if isinstance(source.native, MegatronNative) and to.family == "module":
        return to_huggingface(source, source.native, options)
    if isinstance(source.native, ModuleState) and to.family == "megatron":
        return to_megatron(source, source.native, options)
    return source


def alike(a: Source, b: Source) -> tuple[Source, Source]:
    """Two sources under names that can be compared: Megatron's as Hugging Face's, where the other one has those.

    Args:
        a, b: Opened checkpoints.

    Raises:
        CheckpointError: Megatron's model has no names in the other family.
    """
    if isinstance(a.native, MegatronNative) and isinstance(b.native, ModuleState):
        return to_huggingface(a, a.native, WriteOptions(vocab_size=_words(b))), b
    if isinstance(b.native, MegatronNative) and isinstance(a.native, ModuleState):
        return a, to_huggingface(b, b.native, WriteOptions(vocab_size=_words(a)))
    return a, b


def _words(source: Source) -> int | None:
    """Rows of a vocabulary without padding."""
    embedding = source.model.get(EMBEDDING)
    return None if embedding is None else embedding.global_shape[0]
