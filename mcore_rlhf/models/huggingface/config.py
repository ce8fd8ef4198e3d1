"""A model's description: Hugging Face's ``config.json`` and Megatron's arguments, each from the other; and whether a ``config.json``
is that of given tensors.

Sources: transformers 5.23.0, ``models/*/configuration_*.py``; Megatron-LM core_v0.16.1, ``megatron/training/arguments.py``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache

from mcore_rlhf.core.catalog import Shape
from mcore_rlhf.errors import CheckpointError, Problems, Unsupported, UsageError
from mcore_rlhf.models.meaning.arguments import modern
from mcore_rlhf.models.meaning.bounds import check_sizes
from mcore_rlhf.models.meaning.declared import arguments, complete, config_fields
from mcore_rlhf.models.meaning.kinds import Field
from mcore_rlhf.models.meaning.lookup import inexpressible_arguments, inexpressible_fields

from . import ARCHITECTURES, REFUSED
from .attention_fields import GROUPED_HEADS, delta_layers
from .dense import FIELDS
from .expert_fields import doubt_about_groups, mixture_layers
from .fields import integer
from .relation import HOW_TO_ADD, Filled, filled
from .table import LOCAL, SEQUENTIAL, Architecture, Packed, Sizes, Spelling
from .texts import is_moved, name_in_text

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
_DELTA = {
    "delta_keys": "linear_num_key_heads", "delta_key": "linear_key_head_dim", "delta_values": "linear_num_value_heads",
    "delta_value": "linear_value_head_dim", "kernel": "linear_conv_kernel_dim",
}  # fmt: skip
QUANTIZATION = ("quantization_config", "compression_config")
"""Where a ``config.json`` says how its weights are quantized; compressed-tensors once had a key of its own."""
_LATENT_EPSILON = 1e-6
_KINDS_OF_ATTENTION = ("multi_latent_attention", "experimental_attention_variant")
IGNORE = "To convert without it, and to have that stand in the report as lost: --ignore-field with its name."
_CAUSAL = "ForCausalLM"
_HEADS = (_CAUSAL, "ForSequenceClassification", "ForTokenClassification", "Model")
_ABSENT = (
    "layernorm_epsilon", "rotary_base", "rotary_percent", "moe_router_topk", "moe_router_pre_softmax",
    "moe_router_score_function", "moe_shared_expert_gate", "quick_geglu", "glu_linear_offset", "activation_func_clamp_value",
)  # fmt: skip
"""Arguments whose absence means Megatron's default, where the tensors do not say another thing."""
_ROPE = ("rope_scaling", "rope_parameters")


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
    said, named = config.get("model_type"), known_architecture(config)
    if named is not None:
        return (named,)
    listed = ", ".join(known.model_type for known in ARCHITECTURES)
    why = REFUSED.get(str(said))
    if why is not None:
        raise Unsupported(
            f"config.json: model_type {said} has no relation to Megatron-core's GPT: {why}\nKnown are {listed}."
        )
    if said is None:
        return ARCHITECTURES
    raise Unsupported(f"config.json: model_type {said} is in no table; known are {listed}\n{HOW_TO_ADD}")


def known_architecture(config: Config) -> Architecture | None:
    """The architecture that a ``config.json`` names, by its type or by its class; None where it names none that is known.

    Folders with code of their own have types of their own: Kimi-K2's class is DeepSeek-V3's.

    Raises:
        Unsupported: The type is no text.
        LayoutMismatch: It says sizes that no model has.
    """
    check_sizes(config, "config.json")
    said = config.get("model_type")
    if not isinstance(said, str | None):
        raise Unsupported(f"config.json: model_type should be a text, found {said!r:.80}")
    by_type = next((known for known in ARCHITECTURES if known.model_type == said), None)
    return by_type if by_type is not None or said in REFUSED else _of_class(config)


def packed_in(config: Config) -> tuple[Packed, ...]:
    """What of a model is packed in memory and not on disk; nothing where nobody says which it is, since others pack differently."""
    known = known_architecture(config)
    return () if known is None else known.packed


def is_other_in_memory(config: Config) -> bool:
    """Whether some of a model is packed, or called otherwise, in memory and not on disk."""
    return bool(packed_in(config)) or is_moved(config)


def _of_class(config: Config) -> Architecture | None:
    classes = config.get("architectures")
    named = str(classes[0]) if isinstance(classes, list) and classes else ""
    stem = next((named.removesuffix(head) for head in _HEADS if named.endswith(head)), named)
    return next((known for known in ARCHITECTURES if known.class_name.removesuffix(_CAUSAL) == stem), None)


def sizes_of_config(config: Config) -> Sizes:
    """The sizes in a ``config.json``.

    Raises:
        UsageError: Some are missing; all of them are named.
    """
    named = known_architecture(config)
    spoken = {"vocab_size", *(name for field in (FIELDS if named is None else named.fields) for name in field.names)}
    missing = [name for name in _SIZES if name in spoken and not isinstance(config.get(name), int)]
    if missing:
        raise UsageError(f"the model's config.json lacks {', '.join(missing)}\nGive the folder of the model itself.")
    known = architecture_of(config)
    if len(known) == 1:
        config = complete(config, known[0].model_type)
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
    heads = GROUPED_HEADS.config(args)
    latent = _LATENT if args.get("multi_latent_attention") else {}  # others' args have defaults for these, too
    experts = _EXPERTS if args.get("num_experts") else {}
    linear = delta_layers(args)
    delta = _DELTA if linear else {}
    more = {size: integer(args, arg) for size, arg in {**latent, **experts, **delta}.items()}
    if experts:
        more["expert_ffn"] = more["expert_ffn"] or integer(args, "ffn_hidden_size")
    return Sizes(
        integer(args, "num_layers"), integer(args, "hidden_size"), integer(args, "ffn_hidden_size"),
        integer(args, "num_attention_heads"), integer(heads, "num_key_value_heads"), integer(heads, "head_dim"), vocabulary,
        mixture=mixture_layers(args), linear=linear, mtp=integer(args, "mtp_num_layers"), **more,
    )  # fmt: skip


def config_of(
    args: Config, sizes: Sizes, known: Architecture, build: Build, ignored: Collection[str] = ()
) -> dict[str, object]:
    """The ``config.json`` of a model that Megatron trained, as far as its arguments tell.

    Args:
        args: Megatron's.
        sizes: Of the model.
        known: Its architecture.
        build: What its tensors say.
        ignored: Arguments that are passed over: ``--ignore-field``.

    Raises:
        Unsupported: ``config.json`` has no words for something; all of it is named.
    """
    config, problems = _told(_with_absent(args, known, ignored), known)
    problems.raise_if_any()
    config["vocab_size"] = sizes.vocabulary
    return {"model_type": known.model_type, **config, **built(known, build)}


def expresses(args: Config, known: Architecture, ignored: Collection[str] = ()) -> bool:
    """Whether an architecture has words for all that Megatron's arguments say, whatever its tensors are."""
    said = _with_absent(args, known, ignored)
    try:
        for field in known.fields:
            field.config(said)
    except CheckpointError:
        return False
    return not any(True for _ in inexpressible_arguments(said, known.fields))


def refuse_inexpressible(args: Config, known: Architecture, ignored: Collection[str] = ()) -> None:
    """Refuse arguments of which an architecture has no word at all.

    Args:
        args: Megatron's.
        known: The architecture.
        ignored: Arguments that are passed over.

    Raises:
        Unsupported: There are some; all are named.
    """
    problems = Problems()
    _refuse_inexpressible(problems, {k: v for k, v in args.items() if k not in ignored}, known)
    problems.raise_if_any()


def _refuse_inexpressible(problems: Problems, args: Config, known: Architecture) -> None:
    for name in inexpressible_arguments(args, known.fields):
        text = f"args: {name} is {args[name]!r}, for which its config.json has no words"
        _refuse(problems, Unsupported, known, text, args, (name,))


def _with_absent(args: Config, known: Architecture, ignored: Collection[str]) -> dict[str, object]:
    """The arguments without those that are passed over, and with Megatron's defaults of those that are not there."""
    said = modern({name: value for name, value in args.items() if name not in ignored})
    return {**{name: arguments()[name] for name in absent_arguments(said, known)}, **said}


def absent_arguments(args: Config, known: Architecture) -> tuple[str, ...]:
    """Arguments of an architecture that are not there, and are taken to be Megatron's defaults."""
    spoken = {name for field in known.fields for name in field.arguments}
    said = modern(args)
    return tuple(name for name in _ABSENT if name in spoken and name not in said)


def _told(args: Config, known: Architecture) -> tuple[dict[str, object], Problems]:
    """What a ``config.json`` says of arguments, and what it has no words for."""
    config: dict[str, object] = {}
    problems = Problems()
    for field in known.fields:
        try:
            config.update(field.config(args))
        except CheckpointError as error:
            _refuse(problems, type(error), known, str(error), args, field.arguments)
    _refuse_inexpressible(problems, args, known)
    return config, problems


def _refuse(
    problems: Problems,
    kind: type[CheckpointError],
    known: Architecture,
    text: str,
    args: Config,
    names: tuple[str, ...],
) -> None:
    """Refuse a value, with the architectures that could express it."""
    able = [other.class_name for other in ARCHITECTURES if other is not known and _can_say(other, args, names)]
    could = f"these could say it: {', '.join(able)}" if able else "no architecture that is known could say it"
    problems.add(kind, f"{known.class_name}: {text}; {could}", IGNORE)


def _can_say(known: Architecture, args: Config, names: tuple[str, ...]) -> bool:
    """Whether fields of an architecture speak of arguments, and have words for their values."""
    fields = [field for field in known.fields if set(field.arguments) & set(names)]
    for kind in _KINDS_OF_ATTENTION:
        if bool(args.get(kind)) != any(kind in field.arguments for field in known.fields):
            return False  # its attention is of another kind
    try:
        for field in fields:
            field.config(args)
    except CheckpointError:
        return False
    return bool(fields)


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
    said = dict.fromkeys(("qkv_bias", "attention_bias"), build.biased)
    said |= dict.fromkeys(("mlp_bias", "use_bias"), build.mlp_biased)
    declared = config_fields(known.model_type)  # Qwen2 always has biases, Mistral's two never: their classes do not say
    return config | {name: value for name, value in said.items() if name in declared}


def args_of(config: Config, known: Architecture, build: Build, ignored: Collection[str] = ()) -> dict[str, object]:
    """Megatron's arguments for a model of Hugging Face's.

    Args:
        config: Its ``config.json``; what that does not say is what transformers fills in for the class.
        known: Its architecture.
        build: What its tensors say.
        ignored: Fields that are passed over: ``--ignore-field``.

    Raises:
        Unsupported: Megatron cannot compute what it asks for; all of it is named.
    """
    said = _without(complete(config, known.model_type), ignored)
    args, problems = _said(said, known.fields)
    for name in inexpressible_fields(said, known.model_type, known.fields):
        text = f"config.json: {name} is {said[name]!r}; {known.class_name} declares it, and what it is to Megatron is not known"
        problems.add(Unsupported, text, IGNORE)
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


def _without(config: Config, ignored: Collection[str]) -> dict[str, object]:
    """A ``config.json`` without some of its fields, also in what it says of rotary positions."""
    left = {name: value for name, value in config.items() if name not in ignored}
    for name in _ROPE:
        inside = left.get(name)
        if isinstance(inside, Mapping):
            left[name] = {key: value for key, value in inside.items() if key not in ignored}
    return left


def doubts(args: Config) -> Iterator[str]:
    """What the two sides compute differently whatever is written, although the weights are right.

    Args:
        args: Megatron's arguments.
    """
    groups = doubt_about_groups(args)
    if groups is not None:
        yield groups
    epsilon = modern(args).get("layernorm_epsilon")
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
            problems.add(type(error), str(error), IGNORE)
    return args, problems


_EMBEDDING = "model.embed_tokens.weight"
_LAYER = re.compile(r"model\.layers\.(\d{1,18})\.")
_EXPERT = re.compile(r"\.experts\.\d{1,18}\.")
_PACKED = ".experts.gate_up_proj"
_SHOWN = 3


def misfits(config: Mapping[str, object], shapes: Mapping[str, Shape], *, whole: bool = True) -> Iterator[str]:
    """What speaks against a description, one line each; nothing where it is of an architecture in no table, or all names are others.

    Args:
        config: The description.
        shapes: The tensors as they are on disk, tied ones once.
        whole: Whether what is missing speaks against it too.
    """
    try:
        (known,), sizes = architecture_of(config), sizes_of_config(config)
    except (CheckpointError, ValueError):
        return
    shapes = {name_in_text(name): shape for name, shape in shapes.items()}
    layers = max((int(match[1]) for name in shapes if (match := _LAYER.match(name))), default=-1) + 1
    spelling = Spelling(known.implementation or LOCAL, SEQUENTIAL)
    rows = tuple(filled(known, replace(sizes, mtp=max(0, layers - sizes.layers)), spelling))
    expected = {tensor for row in rows for tensor in row.tensors}
    if expected.isdisjoint(shapes):
        return
    yield from _other_shapes(rows, shapes)
    if any(name.endswith(_PACKED) for name in shapes):  # named as in memory
        return
    if whole:
        yield from _listed(known, "lacks", _missing(known, sizes, rows, shapes))
    yield from _listed(known, "has no place for", _strange(sizes, expected, shapes))


def foreign_names(config: Mapping[str, object], shapes: Collection[str]) -> str:
    """What is said of tensors that are all called otherwise than those of the class that a description names; empty where some are not.

    transformers leaves at random whatever it does not find under its own name, and looks at nothing else.

    Args:
        config: The description of a model of text; of an architecture in no table, no names are known.
        shapes: The tensors.
    """
    try:
        (known,), sizes = architecture_of(config), sizes_of_config(config)
    except (CheckpointError, ValueError):
        return ""
    shapes = [name_in_text(name) for name in shapes]
    rows = filled(known, sizes, Spelling(known.implementation or LOCAL, SEQUENTIAL))
    own = {tensor for row in rows for tensor in row.tensors}
    if not shapes or own.intersection(shapes) or any(name.endswith(_PACKED) for name in shapes):
        return ""
    found = ", ".join(list(shapes)[:_SHOWN])
    return f"no tensor has a name of {known.class_name}'s, such as {_EMBEDDING}: found {found}, … ({len(shapes)})"


def _other_shapes(rows: Collection[Filled], shapes: Mapping[str, Shape]) -> Iterator[str]:
    for row in rows:
        for name, shape in row.tensors.items():
            found = shapes.get(name)
            if found is not None and found != shape and name != _EMBEDDING and not name.startswith("lm_head."):
                yield f"{name} is {list(found)}, but its sizes make {list(shape)}"


def _missing(known: Architecture, sizes: Sizes, rows: Collection[Filled], shapes: Mapping[str, Shape]) -> Iterator[str]:
    yield from (need for need in known.needs if need not in sizes.traits)
    yield from (name for row in rows if not row.row.optional for name in row.tensors if name not in shapes)


def _strange(sizes: Sizes, expected: Collection[str], shapes: Mapping[str, Shape]) -> Iterator[str]:
    """Tensors of a decoder's layer that only other architectures have; anybody's own additions are none of them."""
    for name in shapes:
        match = _LAYER.match(name)
        if match and name not in expected and int(match[1]) < sizes.layers and _pattern(name) in _patterns():
            yield name


def _listed(known: Architecture, what: str, names: Iterator[str]) -> Iterator[str]:
    found = list(dict.fromkeys(names))
    if found:
        more = f", … ({len(found)})" if len(found) > _SHOWN else ""
        yield f"{known.class_name} {what} {', '.join(found[:_SHOWN])}{more}"


def _pattern(name: str) -> str:
    return _EXPERT.sub(".experts.{e}.", _LAYER.sub("model.layers.{i}.", name))


@cache
def _patterns() -> frozenset[str]:
    """The names of all tensors of all architectures."""
    rows = (row for known in ARCHITECTURES for row in known.rows)
    return frozenset(tensor.name for row in rows for tensor in row.huggingface)


def without_quantization(config: Config) -> dict[str, object]:
    """A model's description that does not say how its weights are quantized."""
    found = {key: value for key, value in config.items() if key not in QUANTIZATION}
    text = found.get("text_config")
    if isinstance(text, Mapping):
        found["text_config"] = without_quantization(text)
    return found


def method_of(config: Config) -> str:
    """How a description says that the weights are quantized: ``fp8``, ``gptq``, …; empty where it does not."""
    said = quantization_in(config)
    return str(said.get("quant_method") or said.get("format") or "some method") if said else ""


def quantization_in(config: Config) -> Config:
    """What a description says of how the weights are quantized; nothing where it does not."""
    text = config.get("text_config")
    for section in (config, text if isinstance(text, Mapping) else {}):
        for key in QUANTIZATION:
            found = section.get(key)
            if isinstance(found, Mapping) and found:
                return found
    return {}
