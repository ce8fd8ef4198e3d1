"""Asking the table: what every argument and every field of a source means, and which of them a target cannot express.

Sources of the fields: transformers 5.23.0, ``configuration_utils.py`` and ``models/*/configuration_*.py``, and of 4.x what published
folders have of it; deepseek-ai/DeepSeek-V3 and moonshotai/Kimi-K2-Instruct, ``config.json``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from . import arguments, declared
from .arguments import OTHER_ARGUMENTS
from .kinds import About, Field, Meaning, Values, by_name, equal

_TRAINING = """
aux_loss_alpha classifier_dropout embd_pdrop embedding_initializer_range hidden_dropout output_router_logits pretraining_tp
resid_pdrop residual_dropout router_aux_loss_coef router_jitter_noise seq_aux
"""
_EXECUTION = """
attn_implementation _attn_implementation chunk_size_feed_forward dtype ep_size output_attentions output_hidden_states
return_dict torch_dtype torchscript use_cache use_return_dict use_mrope
"""
_LAYOUT = "compression_config quantization_config"
_BOOKKEEPING = """
_commit_hash _name_or_path architectures auto_map bos_token_id eos_token_id id2label is_decoder is_encoder_decoder
keys_to_ignore_at_inference label2id mcore_rlhf_origin model_type num_labels pad_token_id problem_type
summary_activation task_specific_params tokenizer_class transformers_version unk_token_id unsloth_fixed unsloth_version
"""

OF_TENSORS = {
    "vocab_size": "vocab_size", "tie_word_embeddings": "untie_embeddings_and_output_weights",
    "attention_bias": "add_qkv_bias", "qkv_bias": "add_qkv_bias", "mlp_bias": "add_bias_linear", "use_bias": "add_bias_linear",
}  # fmt: skip
"""Fields that say what the tensors say as well, each with Megatron's argument for it; the tensors decide."""

OTHER_FIELDS = by_name(
    {About.TRAINING: _TRAINING, About.EXECUTION: _EXECUTION, About.LAYOUT: _LAYOUT, About.BOOKKEEPING: _BOOKKEEPING}
)
"""Fields of a ``config.json`` that stand in no relation to an argument of Megatron's, each with its kind."""


_OF_TENSORS = {
    argument: tuple(name for name, other in OF_TENSORS.items() if other == argument) for argument in OF_TENSORS.values()
}
"""The fields of ``config.json`` that say what an argument says of tensors' shapes."""


def of_arguments(args: Values, relations: Sequence[Field]) -> dict[str, Meaning]:
    """What each of Megatron's arguments means for an architecture of Hugging Face.

    Args:
        args: The arguments.
        relations: The architecture's ``fields``.
    """
    fields = _by_argument(relations)
    return {name: _of_argument(name, fields) for name in args}


def _by_argument(relations: Sequence[Field]) -> dict[str, dict[str, None]]:
    """The fields of ``config.json``, in order, by argument: a model is held against every architecture, with 600 arguments."""
    fields: dict[str, dict[str, None]] = {}
    for relation in relations:
        for argument in relation.arguments:
            fields.setdefault(argument, {}).update(dict.fromkeys(relation.names))
    return fields


def _of_argument(name: str, fields: Mapping[str, Iterable[str]]) -> Meaning:
    spelled = arguments.SPELLED.get(name, name)
    target = tuple(fields.get(spelled, ())) or _OF_TENSORS.get(name, ())
    default = declared.arguments().get(name)
    if name in OTHER_ARGUMENTS:
        return Meaning(name, OTHER_ARGUMENTS[name], target, default)
    row = arguments.BY_NAME.get(name) or arguments.BY_NAME.get(spelled)
    if row is not None:
        return Meaning(name, About.COMPUTES, target, row.neutral[0] if default is None else default)
    kind = About.COMPUTES if target or name in declared.arguments() else About.UNDECLARED
    return Meaning(name, kind, target, default)


def of_config(config: Values, model_type: str, relations: Sequence[Field]) -> dict[str, Meaning]:
    """What each field of a ``config.json`` means for Megatron.

    Args:
        config: The description.
        model_type: What transformers calls its class.
        relations: The architecture's ``fields``.
    """
    return {name: _of_field(name, model_type, relations) for name in config}


def _of_field(name: str, model_type: str, relations: Sequence[Field]) -> Meaning:
    default = declared.config_fields(model_type).get(name, declared.common_fields().get(name))
    related = [relation for relation in relations if name in relation.names]
    target = tuple(dict.fromkeys(argument for relation in related for argument in relation.arguments))
    if related:
        return Meaning(name, _about_of(target), target, default)
    if name in OF_TENSORS:
        return Meaning(name, About.COMPUTES, (OF_TENSORS[name],), default)
    if name in OTHER_FIELDS:
        return Meaning(name, OTHER_FIELDS[name], (), default)
    declares = name in declared.config_fields(model_type) or name in declared.common_fields()
    return Meaning(name, About.COMPUTES if declares else About.UNDECLARED, (), default)


def _about_of(target: tuple[str, ...]) -> About:
    """A field is about what all of its arguments are about."""
    kinds = {OTHER_ARGUMENTS.get(name, About.COMPUTES) for name in target}
    return kinds.pop() if len(kinds) == 1 else About.COMPUTES


def inexpressible_arguments(args: Values, relations: Sequence[Field]) -> Iterator[str]:
    """Arguments that change what the model computes, and of which the architecture has no word.

    Args:
        args: Megatron's.
        relations: The architecture's ``fields``.
    """
    fields = _by_argument(relations)
    for name in args:
        if name in OTHER_ARGUMENTS or arguments.SPELLED.get(name, name) in fields:
            continue
        meaning = _of_argument(name, fields)
        if meaning.about is not About.COMPUTES or meaning.target:
            continue
        row = arguments.BY_NAME.get(name)
        if row.matters(args) if row is not None else not equal(args[name], meaning.default):
            yield name


def inexpressible_fields(config: Values, model_type: str, relations: Sequence[Field]) -> Iterator[str]:
    """Fields that the class declares, of which nobody has said what they are to Megatron, and that are not the default.

    Args:
        config: The description.
        model_type: What transformers calls its class.
        relations: The architecture's ``fields``.
    """
    related = {name for relation in relations for name in relation.names}
    for name, meaning in of_config(config, model_type, relations).items():
        open_question = meaning.about is About.COMPUTES and not meaning.target and name not in related
        if open_question and not equal(config[name], meaning.default):
            yield name


def undeclared(meanings: Iterable[Meaning], ignored: Collection[str] = ()) -> tuple[str, ...]:
    """Names that nobody declares: they are carried, and said."""
    return tuple(m.name for m in meanings if m.about is About.UNDECLARED and m.name not in ignored)
