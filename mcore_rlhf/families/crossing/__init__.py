"""Conversions between families of formats: Megatron's names and shapes, and Hugging Face's, which all others store.

The source is wrapped in one of the target's family: its catalogue is a view with other names and boxes, its groups and
arguments are derived, and the target's format never learns of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from mcore_rlhf.core.account import Item, Kind, Reason
from mcore_rlhf.families.megatron.hybrid import GPT, as_gpt, as_hybrid
from mcore_rlhf.families.megatron.state import MegatronState
from mcore_rlhf.families.module import ModuleState
from mcore_rlhf.families.options import WriteOptions
from mcore_rlhf.families.source import Names, Source

from .description import EMBEDDING, known_description
from .packing import in_memory, on_disk
from .quantized import refuse_quantized
from .to_huggingface import to_huggingface
from .to_megatron import to_megatron

_CROSSINGS: dict[tuple[str, str], Callable[[Source, WriteOptions], Source]] = {
    (MegatronState.names, ModuleState.names): to_huggingface,
    (ModuleState.names, MegatronState.names): to_megatron,
}
"""From one family to another; a third one adds its own."""


def crossed(source: Source, to: Names, options: WriteOptions) -> Source:
    """The source as a target of the format wants it: itself where both have the same names.

    Args:
        source: An opened checkpoint.
        to: The target's format.
        options: What the target is to be.

    Raises:
        CheckpointError: The model has no names in the other family, or what decides its shapes is not known.
    """
    if ModuleState.of(source):
        refuse_quantized(source, to, options)
    cross, pattern = _CROSSINGS.get((source.family.names, to.family)), options.hybrid_layer_pattern
    if cross is not None:
        source = _released(cross(as_gpt(source), options), to)
    if pattern is not None:
        source = as_gpt(source) if pattern == GPT else as_hybrid(source, pattern)
    module = ModuleState.of(source)
    if module is None or to.family != module.names or to.adapter:
        return source
    if to.packs_experts:
        return source if module.packs_experts else in_memory(source, module.config)
    if cross is not None:
        return source
    config = known_description(source, options)
    return on_disk(replace(source, family=module.described(lambda: config)) if config else source, config)


def _released(source: Source, to: Names) -> Source:
    """A release that becomes a folder has no run whose counters and arguments would be lost; its config says all."""
    if not source.state.release or to.packs_experts:
        return source
    notes = source.notes.copy()
    notes.leave(Reason.NO_RUN, Item(Kind.ARGUMENT), Item(Kind.SCHEDULER), Item(Kind.VALUE))
    return replace(source, state=replace(source.state, other={}, scheduler=None), notes=notes, origin={})


def alike(a: Source, b: Source) -> tuple[Source, Source]:
    """Two sources under names that can be compared: Hugging Face's as on disk, where one of them has those.

    Args:
        a, b: Opened checkpoints.

    Raises:
        CheckpointError: Megatron's model has no names in the other family.
    """
    a, b = _same_model(a, b), _same_model(b, a)
    if (a.family.names, b.family.names) == (MegatronState.names, ModuleState.names):
        a = to_huggingface(a, WriteOptions(vocab_size=_words(b)))
        return a, _unpacked(b, a)
    if (b.family.names, a.family.names) == (MegatronState.names, ModuleState.names):
        b = to_huggingface(b, WriteOptions(vocab_size=_words(a)))
        return _unpacked(a, b), b
    return _unpacked(a, b), _unpacked(b, a)


def _same_model(source: Source, other: Source) -> Source:
    """A GPTModel as the hybrid model that it is compared with, and a hybrid one as a GPTModel where the other has Hugging Face's names."""
    mine, theirs = MegatronState.of(source), MegatronState.of(other)
    if mine is None or theirs is None:
        return as_gpt(source) if mine is not None and ModuleState.of(other) else source
    if theirs.args.pattern is not None and mine.args.pattern is None:
        return as_hybrid(source, str(theirs.args.pattern))
    return source


def _unpacked(source: Source, other: Source) -> Source:
    """The source as on disk; the other one may have to say which architecture it is."""
    if not source.family.names == other.family.names == ModuleState.names:
        return source
    nothing = WriteOptions()
    return on_disk(source, known_description(source, nothing) or known_description(other, nothing))


def _words(source: Source) -> int | None:
    """Rows of a vocabulary without padding."""
    embedding = source.model.get(EMBEDDING)
    return None if embedding is None else embedding.global_shape[0]
