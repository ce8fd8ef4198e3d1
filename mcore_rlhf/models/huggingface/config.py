"""A model's description: Hugging Face's ``config.json`` and Megatron's arguments, each from the other.

Sources: transformers 5.23.0, ``models/*/configuration_*.py``; Megatron-LM core_v0.16.1, ``megatron/training/arguments.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mcore_rlhf.errors import CheckpointError, Problems, Unsupported, UsageError

from . import ARCHITECTURES
from .attention_fields import Heads, integer
from .dense import FIELDS
from .expert_fields import doubt_about_groups, mixture_layers
from .fields import Field
from .refused import REFUSED
from .relation import HOW_TO_ADD
from .sizes import Sizes
from .table import Architecture

Config = Mapping[str, object]

_SIZES = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
_ARGS = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads")
_LATENT = {
    "q_lora": "q_lora_rank", "kv_lora": "kv_lora_rank", "nope": "qk_head_dim", "rope": "qk_pos_emb_head_dim",
    "v_head": "v_head_dim",
}  # fmt: skip
_EXPERTS = {
    "experts": "num_experts", "expert_ffn": "moe_ffn_hidden_size", "shared": "moe_shared_expert_intermediate_size",
}  # fmt: skip
_LATENT_EPSILON = 1e-6
_UNBIASED = ("qwen2", "mistral", "mixtral")
"""Those whose ``config.json`` does not say whether there are biases: Qwen2 always has them, Mistral's two never."""
_CAUSAL = "ForCausalLM"


@dataclass(frozen=True, slots=True)
class Build:
    """What the tensors say of a model, and its description may not.

    Args:
        tied: Whether it has no output layer of its own.
        biased: Whether queries, keys and values have biases.
        proj_biased: Whether the attention's output projection has one.
        mlp_biased: Whether the feed-forward's matrices have them.
        head: ``ForCausalLM``, or what a class with a value head is called: ``ForSequenceClassification`` where that has no
            bias, ``ForTokenClassification`` where it has one.
    """

    tied: bool = False
    biased: bool = False
    proj_biased: bool = False
    mlp_biased: bool = False
    head: str = _CAUSAL


def architecture_of(config: Config) -> tuple[Architecture, ...]:
    """The architectures that a ``config.json`` may mean: one, or all where it does not say.

    Raises:
        Unsupported: It is none that is known in both families; those that are, are listed.
    """
    said = config.get("model_type")
    if said is None:
        return ARCHITECTURES
    found = tuple(known for known in ARCHITECTURES if known.model_type == said)
    if found:
        return found
    listed = ", ".join(known.model_type for known in ARCHITECTURES)
    why = REFUSED.get(str(said))
    if why is not None:
        raise Unsupported(
            f"config.json: model_type {said} has no relation to Megatron-core's GPT: {why}\nKnown are {listed}."
        )
    raise Unsupported(f"config.json: model_type {said} is in no table; known are {listed}\n{HOW_TO_ADD}")


def sizes_of_config(config: Config) -> Sizes:
    """The sizes in a ``config.json``.

    Raises:
        UsageError: Some are missing; all of them are named.
    """
    missing = [name for name in _SIZES if not isinstance(config.get(name), int)]
    if missing:
        raise UsageError(f"the model's config.json lacks {', '.join(missing)}\nGive the folder of the model itself.")
    known = architecture_of(config)
    args, _ = _said(config, known[0].fields if len(known) == 1 else FIELDS)
    return sizes_of_args(args, integer(config, "vocab_size"))


def sizes_of_args(args: Config, vocabulary: int) -> Sizes:
    """The sizes in Megatron's arguments.

    Args:
        args: The arguments.
        vocabulary: True number of words, which they may lack.

    Raises:
        UsageError: Some are missing; all of them are named.
    """
    missing = [arg for arg in _ARGS if not isinstance(args.get(arg), int)]
    if missing:
        raise UsageError(
            f"the stored args lack {', '.join(missing)}\nGive --reference-config, the folder of a config.json."
        )
    heads = Heads().config(args)
    latent = _LATENT if args.get("multi_latent_attention") else {}  # others' args have defaults for these, too
    experts = _EXPERTS if args.get("num_experts") else {}
    more = {size: integer(args, arg) for size, arg in {**latent, **experts}.items()}
    if experts:
        more["expert_ffn"] = more["expert_ffn"] or integer(args, "ffn_hidden_size")
    return Sizes(
        integer(args, "num_layers"), integer(args, "hidden_size"), integer(args, "ffn_hidden_size"),
        integer(args, "num_attention_heads"), integer(heads, "num_key_value_heads"), integer(heads, "head_dim"), vocabulary,
        mixture=mixture_layers(args), mtp=integer(args, "mtp_num_layers"), **more,
    )  # fmt: skip


def config_of(args: Config, sizes: Sizes, known: Architecture, build: Build) -> dict[str, object]:
    """The ``config.json`` of a model that Megatron trained, as far as its arguments tell.

    Args:
        args: Megatron's.
        sizes: Of the model.
        known: Its architecture.
        build: What its tensors say.

    Raises:
        Unsupported: ``config.json`` has no words for something; all of it is named.
    """
    config: dict[str, object] = {"model_type": known.model_type}
    problems = Problems()
    for field in known.fields:
        try:
            config.update(field.config(args))
        except CheckpointError as error:
            problems.add(
                type(error),
                f"{known.class_name}: {error}",
                "Give --reference-config, the folder of a config.json that is right.",
            )
    problems.raise_if_any()
    config["vocab_size"] = sizes.vocabulary
    return {**config, **built(known, build)}


def built(known: Architecture, build: Build) -> dict[str, object]:
    """What ``config.json`` has of the tensors themselves.

    Args:
        known: The architecture.
        build: What the tensors say.
    """
    config: dict[str, object] = {"architectures": [known.class_name.replace(_CAUSAL, build.head)]}
    config["tie_word_embeddings"] = build.tied
    if build.head.endswith("Classification"):
        config.update(id2label={"0": "LABEL_0"}, label2id={"LABEL_0": 0})
    if known.model_type == "qwen2_moe":
        config["qkv_bias"] = build.biased
    elif known.model_type not in _UNBIASED:
        config["attention_bias"] = build.biased
    if known.model_type == "llama":
        config["mlp_bias"] = build.mlp_biased
    return config


def args_of(config: Config, known: Architecture, build: Build) -> dict[str, object]:
    """Megatron's arguments for a model of Hugging Face's.

    Args:
        config: Its ``config.json``.
        known: Its architecture.
        build: What its tensors say.

    Raises:
        Unsupported: Megatron cannot compute what it asks for; all of it is named.
    """
    args, problems = _said(config, known.fields)
    if build.proj_biased != build.mlp_biased:
        which = "the output projection, and not the feed-forward" if build.proj_biased else "the feed-forward alone"
        problems.add(
            Unsupported,
            f"config.json: biases of {which}; Megatron's --add-bias-linear gives them to both, or to neither",
        )
    problems.raise_if_any()
    return {
        **args, "vocab_size": integer(config, "vocab_size"), "untie_embeddings_and_output_weights": not build.tied,
        "add_bias_linear": build.mlp_biased, "add_qkv_bias": build.biased,
    }  # fmt: skip


def doubts(config: Config, args: Config) -> Iterator[str]:
    """What the two sides may compute differently, although the weights are right.

    Args:
        config: ``config.json``.
        args: Megatron's arguments for the same model.
    """
    window = config.get("sliding_window")
    if isinstance(window, int) and window > 0 and config.get("use_sliding_window", True):
        yield f"sliding_window {window}: Megatron's GPT attends to everything, which is the same up to {window} tokens"
    groups = doubt_about_groups(args)
    if groups is not None:
        yield groups
    epsilon = args.get("layernorm_epsilon")
    if args.get("multi_latent_attention") and epsilon is not None and epsilon != _LATENT_EPSILON:
        yield (
            f"norms inside latent attention: transformers uses an epsilon of {_LATENT_EPSILON:g} whatever rms_norm_eps says, "
            f"Megatron {epsilon:g}"
        )


def _said(config: Config, fields: tuple[Field, ...]) -> tuple[dict[str, object], Problems]:
    """The arguments that a config says, and what Megatron cannot compute of it."""
    args: dict[str, object] = {}
    problems = Problems()
    for field in fields:
        try:
            args.update(field.args(config))
        except CheckpointError as error:
            problems.add_error(error)
    return args, problems
