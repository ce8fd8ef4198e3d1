"""What describes a model that crosses: ``config.json`` and Megatron's arguments, held against its tensors.

What one description says and the other has no words for is carried, passed over, and said. A ``config.json`` goes along as a file
(:mod:`mcore_rlhf.formats.carried`) and keeps there what fine-tuners add; it says more than arguments do, where it is of the same
model. Arguments that no Megatron declares wait in ``config.json``, under a name of ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from mcore_rlhf.core.catalog import BFLOAT16, FLOAT16
from mcore_rlhf.core.facts import Item, Kind
from mcore_rlhf.errors import CheckpointError, LayoutMismatch, UsageError
from mcore_rlhf.families.described import refuse_contradictions
from mcore_rlhf.families.megatron.schedule import samples_of
from mcore_rlhf.families.module import config_in, read_config
from mcore_rlhf.families.options import WriteOptions
from mcore_rlhf.families.sidecar import ORIGIN, FormerFamily, plain
from mcore_rlhf.families.source import Source
from mcore_rlhf.models.huggingface.config import (
    Build,
    absent_arguments,
    architecture_of,
    args_of,
    built,
    config_of,
    refuse_inexpressible,
    sizes_of_config,
)
from mcore_rlhf.models.huggingface.relation import Relation, from_megatron
from mcore_rlhf.models.huggingface.table import SEQUENTIAL, STACKED, Architecture, Sizes
from mcore_rlhf.models.huggingface.texts import text_of
from mcore_rlhf.models.implied import against_config
from mcore_rlhf.models.meaning import About, declared
from mcore_rlhf.models.meaning.arguments import modern
from mcore_rlhf.models.meaning.declared import complete
from mcore_rlhf.models.meaning.kinds import equal
from mcore_rlhf.models.meaning.lookup import of_arguments, of_config, undeclared
from mcore_rlhf.storage.torch_values import torch_dtype

from .rules import CrossedPlaces

_FURTHER = "num_nextn_predict_layers"
LM_HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
VALUE_HEAD, VALUE_BIAS = "score.weight", "score.bias"
DIVISOR = 128
"""Megatron's own ``--make-vocab-size-divisible-by``."""

_NEW_RUN: dict[str, object] = {
    "make_vocab_size_divisible_by": DIVISOR, "seed": 1234, "num_experts": None, "mtp_num_layers": None,
    "data_parallel_random_init": False, "use_distributed_optimizer": True, "decoupled_lr": None,
    "apply_wd_to_qk_layernorm": False, "overlap_grad_reduce": False, "ddp_bucket_size": None, "ddp_num_buckets": None,
    "ddp_pad_buckets_for_high_nccl_busbw": False, "overlap_param_gather_with_optimizer_step": False,
    "num_distributed_optimizer_instances": 1,
}  # fmt: skip
"""Arguments on which the files depend, as Megatron has them unless told otherwise.

Source: Megatron-LM core_v0.16.1, ``megatron/training/arguments.py``.
"""


def build_of(relation: Relation, tied: bool) -> Build:
    """What the tensors say.

    Args:
        relation: Of the model.
        tied: Whether an output layer that is not there shares the embedding's weight.
    """
    names = relation.huggingface
    head = "ForCausalLM"
    if VALUE_HEAD in names:
        head = "ForTokenClassification" if VALUE_BIAS in names else "ForSequenceClassification"
    elif LM_HEAD not in names and not tied:  # a loader would make up an output layer for any other class
        head = "Model"

    def biased(layer: str) -> bool:
        return any(name.endswith((f"{layer}_proj.bias", f"{layer}_proj_bias")) for name in names)

    own_head = LM_HEAD in names or VALUE_HEAD in names
    return Build(
        tied=tied and not own_head, biased=biased("q"), proj_biased=biased("o"), mlp_biased=biased("down"), head=head
    )


_OF_ROTARY = ("position_embedding_type", "rotary_base")
"""Arguments of which each run of Megatron-LM or Megatron-Bridge has one: to megatron-core they are the model's, and no fields of its
``TransformerConfig``. Source: megatron-core 0.19.2, ``models/gpt/gpt_model.py`` (``GPTModel``)."""


@dataclass(frozen=True, slots=True)
class DescribedModel:
    """A model of Megatron's that is to be described as Hugging Face does.

    Args:
        args: Megatron's.
        sizes: Of the model.
        known: Its architecture.
        build: What its tensors say.
        options: What the user asked for: ``ignore_fields``.
    """

    args: Mapping[str, object]
    sizes: Sizes
    known: Architecture
    build: Build
    options: WriteOptions

    def config(
        self, reference: Mapping[str, object] | None, travelled: Mapping[str, object] | None
    ) -> dict[str, object]:
        """Its ``config.json``.

        Args:
            reference: The description that the user gave, which is kept; only what the tensors contradict is changed.
            travelled: One that travelled with the checkpoint; what the arguments contradict is changed, too.

        Raises:
            Unsupported: ``config.json`` has no words for something.
            UsageError: Nothing says how positions are told.
        """
        ignored, kept = self.options.ignore_fields, plain(self.undeclared())
        waiting = {ORIGIN: {"args": kept}} if kept else {}
        if reference is not None:
            return {**self._of_reference(reference), **waiting}
        if travelled is None and self.args and self.args.keys().isdisjoint(_OF_ROTARY):
            raise UsageError(
                "args: do not say how positions are told, and no config.json lies beside the checkpoint: the model's own configuration, "
                "which is all that its trainer wrote, has no base of rotary positions\n"
                "Give --reference-config with the folder of the model that was trained."
            )
        made = config_of(self.args, self.sizes, self.known, self.build, ignored)
        if travelled is not None and self.known in architecture_of(travelled):
            made = self._adapted(kept_spelling(travelled, made, self.differences(travelled)))
        else:
            made["pad_token_id"] = (
                None  # else a class's own: Phi-3's 32000 or Ernie's 0, whose embedding gets no gradient
            )
        return {**made, **waiting}

    def undeclared(self) -> dict[str, object]:
        """Arguments that nobody declares: they wait in ``config.json``, as far as it can hold them."""
        strange = {name: value for name, value in self.args.items() if name not in declared.arguments()}
        meanings = of_arguments(strange, self.known.fields).values()
        return {name: self.args[name] for name in undeclared(meanings, self.options.ignore_fields) if name != ORIGIN}

    def unsaid(self) -> Sequence[str]:
        """What the arguments do not say."""
        return absent_arguments(self.args, self.known) if self.args else ()

    def differences(self, config: Values) -> list[ConfigDifference]:
        """What the arguments say otherwise than a description that travelled with them."""
        if self.known not in architecture_of(config):
            return []
        args = {name: value for name, value in self.args.items() if name not in self.options.ignore_fields}
        return list(differences(args, config, self.known))

    def _of_reference(self, reference: Mapping[str, object]) -> dict[str, object]:
        refuse_inexpressible(self.args, self.known, self.options.ignore_fields)
        return self._adapted(reference)

    def _adapted(self, config: Mapping[str, object]) -> dict[str, object]:
        """A description with what the tensors say of it."""
        adapted = {**config, "vocab_size": self.sizes.vocabulary, "tie_word_embeddings": self.build.tied}
        classes = config.get("architectures")
        named = classes[0] if isinstance(classes, list) and classes else ""
        if not str(named).endswith(self.build.head):
            adapted.update(built(self.known, self.build))
        if _FURTHER in {name for field in self.known.fields for name in field.names} and (
            self.sizes.mtp or _FURTHER in config
        ):
            adapted[_FURTHER] = self.sizes.mtp
        return adapted


def known_description(source: Source, options: WriteOptions) -> dict[str, object]:
    """The ``config.json`` of a source under Hugging Face's names: what the user gave, what it has, or what waits in it.

    Args:
        source: The source.
        options: What the user asked for: ``reference_config``.

    Returns:
        Nothing where nobody said.
    """
    if options.reference_config is not None:
        return read_config(options.reference_config)
    return dict(source.family.config or FormerFamily.of(source).config or source.told)


def description(source: Source, options: WriteOptions) -> dict[str, object]:
    """The same, of its text where there are images as well; without it nobody knows how wide a head is.

    Raises:
        UsageError: There is none.
    """
    found = known_description(source, options)
    if not found:
        raise UsageError(
            f"{source.root}: nothing in it describes the model: how many heads it has, its rotary base, …\n"
            "Give --reference-config, the folder with its config.json."
        )
    if options.reference_config is not None:
        whole = not source.model.quantized
        found_wrong = against_config(text_of(found), source.model.shapes, whole=whole)
        refuse_contradictions(found_wrong, f"--reference-config {options.reference_config}", source)
    return dict(text_of(found))


def arguments(
    source: Source,
    origin: FormerFamily,
    config: Mapping[str, object],
    relation: Relation,
    ignored: tuple[str, ...] = (),
    batch: int | None = None,
) -> dict[str, object]:
    """The arguments that a Megatron run of such a model would have stored.

    Args:
        source: Under Hugging Face's names.
        origin: What an earlier conversion left.
        config: The model's description.
        relation: Its tensors under both names.
        ignored: Fields of the description that are passed over.
        batch: Samples of a step, where somebody says it.

    Raises:
        Unsupported: Megatron cannot compute what the description asks for.
    """
    dtype = next((spec.dtype for spec in source.model.params if spec.trainable), source.model.params[0].dtype)
    described = args_of(config, relation.architecture, build_of(relation, tied=True), ignored)
    if origin.args:  # they say the same, and the tokenizer's extra words besides
        described = {key: value for key, value in described.items() if key not in origin.args}
    args: dict[str, object] = {
        **carried_args(config), **_NEW_RUN, **origin.args, **described, **_experts(relation, relation.sizes),
    }  # fmt: skip
    args.update(
        transformer_impl=relation.spelling.implementation, iteration=source.state.iteration, bf16=dtype == BFLOAT16,
        fp16=dtype == FLOAT16, params_dtype=torch_dtype(dtype.name), accumulate_allreduce_grads_in_fp32=True,
        mtp_num_layers=relation.sizes.mtp or None,
    )  # fmt: skip
    if args.get("layernorm_zero_centered_gamma"):
        args["apply_layernorm_1p"] = True  # what Megatron-LM's scripts call it
    args["consumed_train_samples"] = samples_of(source, batch)
    return args


def _experts(relation: Relation, sizes: Sizes) -> dict[str, object]:
    """How experts are stored; the degrees are those of one rank, and become the target's."""
    if not sizes.experts:
        return {}
    how = relation.spelling.experts
    return {
        "expert_model_parallel_size": 1, "expert_tensor_parallel_size": 1, "moe_grouped_gemm": how != SEQUENTIAL,
        "moe_use_legacy_grouped_gemm": how == STACKED,
    }  # fmt: skip


Values = Mapping[str, object]


def carried_args(config: Values) -> dict[str, object]:
    """The arguments that wait in a ``config.json``; empty where there are none."""
    waiting = config.get(ORIGIN)
    found = waiting.get("args") if isinstance(waiting, Mapping) else None
    return dict(found) if isinstance(found, Mapping) else {}


def undeclared_fields(config: Values, known: Architecture, ignored: Sequence[str]) -> Sequence[str]:
    """Fields of a ``config.json`` that nobody declares: they go along in the file itself."""
    return undeclared(of_config(config, known.model_type, known.fields).values(), ignored)


def arguments_to_config(args: Values, known: Architecture, config: Values) -> CrossedPlaces:
    """Where each of Megatron's arguments is after a crossing: in the ``config.json``, or in what waits for the way back.

    Args:
        args: Megatron's.
        known: The architecture that they become.
        config: The ``config.json`` that was made of them.
    """
    kept, moved, nowhere = plain(args), dict[Item, Item](), dict[Item, About]()
    for name, meaning in of_arguments(args, known.fields).items():
        item, spelled = Item(Kind.ARGUMENT, name), next((n for n in meaning.target if n in config), None)
        if spelled is not None:
            moved[item] = Item(Kind.CONFIG, spelled)
        elif name in carried_args(config):
            moved[item] = Item(Kind.CONFIG, ORIGIN)
        elif meaning.about is not About.COMPUTES and name in kept:
            moved[item] = Item(Kind.VALUE, ORIGIN)
        else:
            nowhere[item] = meaning.about
    return CrossedPlaces(moved, (), nowhere)


def config_to_arguments(config: Values, known: Architecture, args: Values, *, carried: bool) -> CrossedPlaces:
    """Where each field of a ``config.json`` is after a crossing: in Megatron's arguments, or in the file that goes along.

    Args:
        config: The description.
        known: Its architecture.
        args: The arguments that were made of it.
        carried: Whether the file goes along.
    """
    meanings = of_config(config, known.model_type, known.fields)
    spelled = {name: next((n for n in meaning.target if n in args), None) for name, meaning in meanings.items()}
    others = {Item(Kind.CONFIG, name): meanings[name].about for name, new in spelled.items() if new is None}
    moved = {Item(Kind.CONFIG, name): Item(Kind.ARGUMENT, new) for name, new in spelled.items() if new is not None}
    return CrossedPlaces(moved, list(others), {}) if carried else CrossedPlaces(moved, (), others)


@dataclass(frozen=True, slots=True)
class ConfigDifference:
    """Something that Megatron's arguments say otherwise than a ``config.json`` for the same model.

    Args:
        names: Fields of the ``config.json``.
        argument: Megatron's argument.
        said: Its value.
        other: What it would be of the ``config.json``.
    """

    names: tuple[str, ...]
    argument: str
    said: object
    other: object


def differences(args: Values, config: Values, known: Architecture) -> Iterator[ConfigDifference]:
    """What arguments say otherwise than a ``config.json``.

    Args:
        args: Megatron's; what is not there says nothing.
        config: For the same model.
        known: Its architecture.
    """
    args = modern(args)
    meanings = of_arguments(args, known.fields)
    described = complete(config, known.model_type)
    for field in known.fields:
        try:
            said = field.args(described)
        except CheckpointError:  # Megatron cannot say it, so that its arguments are another model's
            said = dict.fromkeys(field.arguments)
        for name, value in said.items():
            computes = name in args and meanings[name].about is About.COMPUTES
            if computes and not equal(args[name], value):
                yield ConfigDifference(field.names, name, args[name], value)


def kept_spelling(carried: Values, made: Values, others: Sequence[ConfigDifference]) -> dict[str, object]:
    """A ``config.json`` that travelled with a checkpoint, where it says what the arguments say; what they make, otherwise.

    Args:
        carried: The one that travelled.
        made: What the arguments make.
        others: What is another by now.
    """
    gone = dict.fromkeys(name for found in others for name in found.names)
    return {**{k: v for k, v in carried.items() if k not in gone}, **{k: made[k] for k in gone if k in made}}


def travelled_config(source: Source) -> tuple[dict[str, object] | None, str]:
    """The description that belongs to a Megatron source, or None where there is none or its tensors are others, and then why.

    Args:
        source: Megatron's.
    """
    config = dict(text_of(config_in(source.carried))) if source.carried is not None else {}
    if not config:
        return None, ""
    try:
        for wrong in against_config(config, relation_to(source, config).huggingface):
            raise LayoutMismatch(str(wrong))
    except CheckpointError as error:
        return None, str(error).splitlines()[0]
    return config, ""


def relation_to(source: Source, config: Mapping[str, object]) -> Relation:
    """Megatron's tensors of a source under the names of a description's architecture.

    Raises:
        CheckpointError: They are not those of such a model.
    """
    model = source.model
    shapes = {s.name: s.global_shape for s in model.params if s.name not in model.unused}
    return from_megatron(shapes, replace(sizes_of_config(config), mtp=model.mtp_layers), architecture_of(config))
