"""Conversions between families of formats: Megatron's names and shapes, and Hugging Face's, which all others store.

The source is wrapped in one of the target's family: its catalogue is a view with other names and boxes, its groups and
arguments are derived, and the target's format never learns of it.
"""

from __future__ import annotations

from dataclasses import replace

from mcore_rlhf.core.account import Item, Kind, Reason
from mcore_rlhf.families.megatron.native import MegatronNative
from mcore_rlhf.families.module import ModuleState
from mcore_rlhf.families.source import Names, Source, WriteOptions

from .description import EMBEDDING, known_description
from .packing import in_memory, on_disk
from .quantized import refuse_quantized
from .to_huggingface import to_huggingface
from .to_megatron import to_megatron

_ON_DISK = "hf"
"""The format whose tensors are named as transformers writes them; others' are named as it has them in memory."""
_IN_MEMORY = ("deepspeed", "universal", "dcp")


def crossed(source: Source, to: Names, options: WriteOptions) -> Source:
    """The source as a target of the format wants it: itself where both have the same names.

    Args:
        source: An opened checkpoint.
        to: The target's format.
        options: What the target is to be.

    Raises:
        CheckpointError: The model has no names in the other family, or what decides its shapes is not known.
    """
    native = source.native
    refuse_quantized(source, to.name, options)
    if isinstance(native, ModuleState):
        return _from_module(source, native, to, options)
    if isinstance(native, MegatronNative) and to.family == "module":
        return _packed(_released(to_huggingface(source, native, options), to), to)
    return source


def _from_module(source: Source, native: ModuleState, to: Names, options: WriteOptions) -> Source:
    if to.family == "megatron":
        return to_megatron(source, native, options)
    if to.name == _ON_DISK:
        config = known_description(source, native, options)
        if config and not native.config:
            native = replace(native, config=config)
            source = replace(source, native=native)
        return on_disk(source, native, config)
    return _packed(source, to) if source.format == _ON_DISK else source


def _released(source: Source, to: Names) -> Source:
    """A release that becomes a folder has no run whose counters and arguments would be lost; its config says all."""
    if to.name == _ON_DISK and source.state.release:
        notes = source.notes.copy()
        notes.leave(Reason.NO_RUN, Item(Kind.ARGUMENT), Item(Kind.SCHEDULER), Item(Kind.VALUE))
        return replace(source, state=replace(source.state, other={}, scheduler=None), notes=notes)
    return source


def _packed(source: Source, to: Names) -> Source:
    native = source.native
    if to.name not in _IN_MEMORY or not isinstance(native, ModuleState):
        return source
    return in_memory(source, native, native.config)


def alike(a: Source, b: Source) -> tuple[Source, Source]:
    """Two sources under names that can be compared: Hugging Face's as on disk, where one of them has those.

    Args:
        a, b: Opened checkpoints.

    Raises:
        CheckpointError: Megatron's model has no names in the other family.
    """
    if isinstance(a.native, MegatronNative) and isinstance(b.native, ModuleState):
        seen = to_huggingface(a, a.native, WriteOptions(vocab_size=_words(b)))
        return seen, _unpacked(b, seen)
    if isinstance(b.native, MegatronNative) and isinstance(a.native, ModuleState):
        seen = to_huggingface(b, b.native, WriteOptions(vocab_size=_words(a)))
        return _unpacked(a, seen), seen
    return _unpacked(a, b), _unpacked(b, a)


def _unpacked(source: Source, other: Source) -> Source:
    """The source as on disk; the other one may have to say which architecture it is."""
    if not isinstance(source.native, ModuleState) or not isinstance(other.native, ModuleState):
        return source
    nothing = WriteOptions()
    config = known_description(source, source.native, nothing) or known_description(other, other.native, nothing)
    return on_disk(source, source.native, config)


def _words(source: Source) -> int | None:
    """Rows of a vocabulary without padding."""
    embedding = source.model.get(EMBEDDING)
    return None if embedding is None else embedding.global_shape[0]
