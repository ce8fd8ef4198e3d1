"""What a description of a model says of which tensors there are: one table, asked for every format.

A field of ``config.json``, or an argument of Megatron's, that makes a module have a bias, a norm or a head of its own stands here
with the tensors that it makes. Where it says one thing and the tensors another, nobody can tell which of the two is the model, and
a conversion would follow one of them without a word.

Sources: transformers 5.23.0, ``models/*/modeling_*.py`` (a test builds every class with every field on and off); megatron-core 0.16.1
and 0.19.2, ``transformer/{attention,mlp,multi_latent_attention}.py``, ``transformer/moe/{router,shared_experts}.py``,
``models/gpt/{gpt_model,gpt_layer_specs}.py``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mcore_rlhf.core.catalog import Shape

from .meaning.declared import complete, config_fields
from .megatron import EMBEDDING, OUTPUT

Values = Mapping[str, object]
_SHOWN = 3


class Contradiction(NamedTuple):
    """A field that says otherwise than the tensors.

    Args:
        field: Its name.
        said: Its value.
        tensors: Those that are there and should not be, or are not there and should be.
        there: Which of the two.
        beside: Of tensors that are not there: one that is, and should not be alone.
        silent: Whether the description does not have the field, so that its default counts.
    """

    field: str
    said: object
    tensors: tuple[str, ...]
    there: bool
    beside: str = ""
    silent: bool = False

    def __str__(self) -> str:
        """Field and tensors, as they stand in a message."""
        listed = ", ".join(self.tensors[:_SHOWN])
        more = f", … ({len(self.tensors)})" if len(self.tensors) > _SHOWN else ""
        said = str(self.said).lower() if isinstance(self.said, bool) else repr(self.said)
        said = f"not said, which means {said}" if self.silent else said
        verb = "is" if len(self.tensors) == 1 else "are"
        state = "there" if self.there else f"not there, and {self.beside} is" if self.beside else "not there"
        return f"{self.field} is {said}, but {listed}{more} {verb} {state}"


@dataclass(frozen=True, slots=True)
class Implied:
    """One row: a field, and the tensors that there are where it holds, and only there.

    Args:
        field: Its name.
        owner: End of the name of a tensor that is there in either case.
        tensors: Ends of the names of those that the field makes, in the owner's place.
        holds: Whether a value of the field makes them; None where it does not say.
        also: Fields that are another reason for the same tensors; where one is true, or not said, they may be there in any case.
        unless: Fields that are a reason for their absence.
    """

    field: str
    owner: str
    tensors: tuple[str, ...]
    holds: Callable[[object], bool | None] = lambda value: value if isinstance(value, bool) else None
    also: tuple[str, ...] = ()
    unless: tuple[str, ...] = ()

    def contradiction(self, values: Values, names: Collection[str], *, whole: bool) -> Contradiction | None:
        """What speaks against a description, or None.

        Args:
            values: The description.
            names: All tensors.
            whole: Whether a tensor that is not among them is not there at all.
        """
        said = self.holds(values[self.field]) if self.field in values else None
        excused = any(values.get(name) for name in self.unless) or not (
            said or all(values.get(name, True) is False for name in self.also)
        )
        if said is None or excused:
            return None
        made = {made: owner for owner, made in self._made(names)}
        wrong = tuple(name for name in made if (name in names) != said) if whole or not said else ()
        if not wrong:
            return None
        return Contradiction(
            self.field, values[self.field], wrong, not said, made[min(wrong, key=_natural)] if said else ""
        )

    def _made(self, names: Collection[str]) -> Iterator[tuple[str, str]]:
        """The tensors that the field would make, each with the owner that is there."""
        for name in names:
            if name.endswith(self.owner):
                yield from ((name, name.removesuffix(self.owner) + tensor) for tensor in self.tensors)


class Size(NamedTuple):
    """A field, and the dimension of tensors that it counts.

    Args:
        fields: Its name, and those that count where it says nothing.
        names: The tensors.
        dim: The dimension.
        what: What is counted.
    """

    fields: tuple[str, ...]
    names: re.Pattern[str]
    dim: int
    what: str

    def contradictions(self, values: Values, shapes: Mapping[str, Shape]) -> Iterator[Contradiction]:
        """What speaks against it: the first tensor of another size."""
        field = next((name for name in self.fields if values.get(name) is not None), "")
        said = values.get(field)
        if not isinstance(said, int) or self.fields[0] not in values:
            return
        for name, shape in shapes.items():
            if len(shape) > self.dim and shape[self.dim] != said and self.names.fullmatch(name):
                yield Contradiction(field, said, (f"{name} of {shape[self.dim]} {self.what}",), there=True)
                return


def _biases(field: str, *modules: str) -> tuple[Implied, ...]:
    return tuple(Implied(field, f".{module}.weight", (f".{module}.bias",)) for module in modules)


_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_OUT = "self_attn.o_proj"
_DENSE = tuple(f"mlp.{part}_proj" for part in ("gate", "up", "down"))
_SHARED = tuple(f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down"))
_LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu")
_QKV_ALONE = ("glm", "glm4_moe", "seed_oss", "solar_open")
"""Classes whose ``attention_bias`` is not about the output projection."""
_QK_NORMS = tuple(
    Implied("use_qk_norm", ".self_attn.q_proj.weight", (f".self_attn.{part}_norm.weight",)) for part in "qk"
)


def _of_class(model_type: str) -> tuple[Implied, ...]:
    """The rows of a class; of one that nobody has looked at, those of tensors that no class has where such a field is false."""
    latent = model_type in _LATENT
    attention: tuple[str, ...] = ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa", _OUT) if latent else _QKV
    known = bool(config_fields(model_type))
    if known and not latent and model_type not in _QKV_ALONE:
        attention = (*attention, _OUT)
    rows = (
        *_biases("attention_bias", *attention),
        *_biases("qkv_bias", *_QKV),
        *_biases("attention_out_bias", _OUT),
        *_biases("mlp_bias", *_DENSE, *_SHARED),
        *_biases("use_bias", *_QKV, _OUT, *_DENSE),
        *_QK_NORMS,
    )
    return tuple(row for row in rows if not known or row.field in config_fields(model_type))


def _in_text(name: str) -> bool:
    """Whether a tensor is of a decoder's layer; models of images have modules of the same names."""
    return name.startswith(("model.layers.", "model.language_model.layers."))


def against_config(config: Values, names: Collection[str], *, whole: bool = True) -> Iterator[Contradiction]:
    """What a ``config.json`` says otherwise than the tensors of its model; of a class that nobody has looked at, what it excludes alone.

    Args:
        config: The description of the text; what it does not say is what transformers fills in for its class.
        names: All tensors, under Hugging Face's names.
        whole: Whether a tensor that is not among them is not there at all.
    """
    model_type = str(config.get("model_type"))
    there = frozenset(name for name in names if _in_text(name))
    # what a field makes in a class that nobody has looked at is not known: Llama 4's use_qk_norm makes a norm without weights
    whole = whole and bool(config_fields(model_type))
    for found in _contradictions(complete(config, model_type), there, _of_class(model_type), whole):
        yield found._replace(silent=found.field not in config)


def _is(*values: str) -> Callable[[object], bool | None]:
    return lambda value: value in values if isinstance(value, str) else None


def _count(value: object) -> bool | None:
    """Whether a number, or None for none of them, is more than 0."""
    return bool(value) if isinstance(value, int | None) else None


_ATTENTION = ".self_attention.linear_qkv.weight"
_NORMS = (
    (".input_layernorm.weight", ".input_layernorm.bias"), (".pre_mlp_layernorm.weight", ".pre_mlp_layernorm.bias"),
    ("decoder.final_layernorm.weight", "decoder.final_layernorm.bias"),
    (".linear_qkv.layer_norm_weight", ".linear_qkv.layer_norm_bias"), (".linear_fc1.layer_norm_weight", ".linear_fc1.layer_norm_bias"),
)  # fmt: skip
_ROUTER, _SHARED_EXPERT = ".mlp.router.weight", ".mlp.shared_experts.linear_fc1.weight"

ARGUMENTS: tuple[Implied, ...] = (
    Implied("add_qkv_bias", _ATTENTION, (".self_attention.linear_qkv.bias",), also=("add_bias_linear",)),
    Implied("add_bias_linear", _ATTENTION, (".self_attention.linear_qkv.bias",), also=("add_qkv_bias",)),
    *_biases("add_bias_linear", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2"),
    Implied(
        "qk_layernorm", _ATTENTION, (".self_attention.q_layernorm.weight", ".self_attention.k_layernorm.weight"), unless=("qk_l2_norm",),
    ),
    *(Implied("normalization", weight, (bias,), _is("LayerNorm")) for weight, bias in _NORMS),
    Implied("position_embedding_type", EMBEDDING, ("embedding.position_embeddings.weight",), _is("learned_absolute")),
    Implied("softmax_type", _ATTENTION, (".self_attention.core_attention.softmax_offset",), _is("learnable")),
    Implied("moe_shared_expert_intermediate_size", _ROUTER, (_SHARED_EXPERT,), _count),
    Implied("moe_shared_expert_gate", _SHARED_EXPERT, (".mlp.shared_experts.gate_weight",)),
    Implied("moe_router_enable_expert_bias", _ROUTER, (".mlp.router.expert_bias",)),
)  # fmt: skip
"""What Megatron's arguments say of which tensors there are in a layer."""

_ANYWHERE: tuple[tuple[str, Callable[[object], bool | None], str], ...] = (
    ("num_experts", _count, ".mlp.router.weight"),
    ("mtp_num_layers", _count, ".eh_proj.weight"),
    ("multi_latent_attention", lambda value: value if isinstance(value, bool) else None, ".linear_kv_up_proj.weight"),
)
"""Arguments that say of a model whether it has any tensor of such a name."""
_FIRST_LAYER = "decoder.layers.0."
UNTIED = "untie_embeddings_and_output_weights"
_NO_HEADS = ("embedding.", "decoder.", "mtp.")
_ROUTED = r"decoder\..*\.experts\.(local_experts\.\d+\.)?linear_fc2\.weight\d*"
_SIZES = (
    Size(("num_experts",), re.compile(r".*\.mlp\.router\.weight"), 0, "experts"),
    Size(("ffn_hidden_size",), re.compile(r"decoder\.layers\.\d+\.mlp\.linear_fc2\.weight"), 1, "columns"),
    Size(("moe_ffn_hidden_size", "ffn_hidden_size"), re.compile(_ROUTED), 1, "columns"),
    Size(("max_position_embeddings",), re.compile(r"embedding\.position_embeddings\.weight"), 0, "rows"),
)  # fmt: skip
"""Arguments that say how large a dimension is, where nothing else does; others are held against the embedding and against heads."""
_DEALT_BY_FILE = "heterogeneous_layers_config_path"
"""A file that says for every layer what it is. Source: megatron-core 0.16.1, ``transformer/heterogeneous``."""


def against_arguments(args: Values, shapes: Mapping[str, Shape]) -> Iterator[Contradiction]:
    """What Megatron's arguments say otherwise than the tensors of the model.

    Args:
        args: The arguments; those that are not there say nothing.
        shapes: All tensors that the model uses, under Megatron's global names, whole.
    """
    yield from _of_heads(args, shapes)
    if args.get(_DEALT_BY_FILE):
        return
    yield from _contradictions(args, frozenset(shapes), ARGUMENTS, whole=True)
    for field, holds, end in _ANYWHERE:
        said = holds(args[field]) if field in args else None
        found = tuple(name for name in shapes if name.endswith(end))
        if said is False and found:
            yield Contradiction(field, args[field], found, there=True)
        elif said and not found and any(name.startswith(_FIRST_LAYER) for name in shapes):
            yield Contradiction(field, args[field], (f"any tensor that ends in {end}",), there=False)
    for row in _SIZES:
        yield from row.contradictions(args, shapes)


def _of_heads(args: Values, shapes: Mapping[str, Shape]) -> Iterator[Contradiction]:
    """Whether the output layer is the embedding; one of another shape is a value head, and other names are other heads.

    Source: megatron-core 0.16.1, ``models/gpt/gpt_model.py``: with one stage a tied model has no output weight of its own.
    """
    untied = args.get(UNTIED)
    if not isinstance(untied, bool) or EMBEDDING not in shapes:
        return
    if not untied and shapes.get(OUTPUT) == shapes[EMBEDDING]:
        yield Contradiction(UNTIED, untied, (OUTPUT,), there=True)
    if untied and not any(not name.startswith(_NO_HEADS) for name in shapes):
        yield Contradiction(UNTIED, untied, (OUTPUT,), there=False, beside=EMBEDDING)


def _contradictions(
    values: Values, names: Collection[str], rows: Sequence[Implied], whole: bool
) -> Iterator[Contradiction]:
    """One for each field, with all of its tensors."""
    found: dict[tuple[str, bool], list[Contradiction]] = {}
    for row in rows:
        wrong = row.contradiction(values, names, whole=whole)
        if wrong is not None:
            found.setdefault((wrong.field, wrong.there), []).append(wrong)
    for (field, there), several in found.items():
        tensors = sorted(dict.fromkeys(name for one in several for name in one.tensors), key=_natural)
        yield Contradiction(field, several[0].said, tuple(tensors), there, several[0].beside)


def _natural(name: str) -> tuple[str | tuple[int, str], ...]:
    """Names in order of layers."""
    return tuple(
        (int(part), "") if part.isdecimal() and len(part) < 19 else (-1, part) for part in re.split(r"\.", name)
    )
