"""Megatron's arguments of a run whose trainer leaves the model's sizes in Hugging Face's description alone, beside its own settings.

Sources: ms-swift 4.6.0, ``swift/megatron/utils/megatron_lm_utils.py`` (``_generate_state_dict``: ``args`` are its own), mcore_bridge 1.6.5,
``model/gpt_model.py`` (``GPTModel``: it pads the vocabulary to a multiple of the tensor-parallel ranks).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mcore_rlhf.core.facts import Fate, Rule
from mcore_rlhf.errors import CheckpointError
from mcore_rlhf.families.megatron.state import MegatronState
from mcore_rlhf.families.source import Source
from mcore_rlhf.models.huggingface.config import args_of

from .description import build_of, relation_to, travelled_config

_ONCE_PER_RANK = {"make_vocab_size_divisible_by": 1}


def with_sizes(source: Source) -> Source:
    """A source of Megatron's with the arguments that the description beside it amounts to, where that is of its tensors.

    Args:
        source: Whose own arguments say none.
    """
    family, (made, why) = MegatronState.needed(source), _made(source)
    source.notes.through(_RULES, (made, why))
    args = replace(family.args, values={**made, **family.args.values})
    return replace(
        source, state=replace(source.state, args={**made, **source.state.args}), family=replace(family, args=args)
    )


def _made(source: Source) -> tuple[Mapping[str, object], str]:
    """Those arguments; none where the description is not of the tensors, or Megatron cannot compute what it says, and then why."""
    config, why = travelled_config(source)
    if config is None:
        return {}, why
    relation = relation_to(source, config)
    try:
        return {**args_of(config, relation.architecture, build_of(relation, source.model.tied)), **_ONCE_PER_RANK}, ""
    except CheckpointError as error:
        return {}, str(error).splitlines()[0]


_UNSAID = "the stored args do not say the model's sizes"
_RULES: tuple[Rule[tuple[Mapping[str, object], str]], ...] = (
    Rule(Fate.NOTE, f"{_UNSAID}: they are those of config.json beside them", lambda asked: asked[0]),
    Rule(Fate.NOTE, f"{_UNSAID}, and config.json beside them is none that is taken: {{found}}", lambda asked: asked[1]),
)
