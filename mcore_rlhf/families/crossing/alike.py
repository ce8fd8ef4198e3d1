"""Two sources to be compared: both as one model under names of one kind."""

from __future__ import annotations

from mcore_rlhf.families.megatron.hybrid import as_gpt, as_hybrid
from mcore_rlhf.families.megatron.state import MegatronState
from mcore_rlhf.families.module import ModuleState
from mcore_rlhf.families.options import WriteOptions
from mcore_rlhf.families.source import Source

from .description import EMBEDDING, known_description
from .packing import repacked
from .to_huggingface import to_huggingface
from .torchtitan import of_torchtitan, with_other_names


def alike(a: Source, b: Source) -> tuple[Source, Source]:
    """Two sources under names that can be compared: Hugging Face's as on disk, where one of them has those.

    Args:
        a, b: Opened checkpoints.

    Raises:
        UsageError: One has torchtitan's own names, and nothing says how many heads the model has.
        CheckpointError: A model has no names in the other family.
    """
    a, b = _same_model(a, b), _same_model(b, a)
    a, b = _same_names(a, b), _same_names(b, a)
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


def _same_names(source: Source, other: Source) -> Source:
    """One with torchtitan's own names under Hugging Face's, where the other has not the same."""
    own = of_torchtitan(source) if ModuleState.of(source) is not None else ""
    if not own or (ModuleState.of(other) is not None and of_torchtitan(other) == own):
        return source
    return with_other_names(source, _description(source, other))


def _description(source: Source, other: Source) -> dict[str, object]:
    """The model's ``config.json``; the other one may have to say which architecture it is."""
    nothing = WriteOptions()
    return known_description(source, nothing) or known_description(other, nothing)


def _unpacked(source: Source, other: Source) -> Source:
    """The source as on disk."""
    if not source.family.names == other.family.names == ModuleState.names:
        return source
    return repacked(source, _description(source, other), packs_experts=False)


def _words(source: Source) -> int | None:
    """Rows of a vocabulary without padding."""
    embedding = source.model.get(EMBEDDING)
    return None if embedding is None else embedding.global_shape[0]
