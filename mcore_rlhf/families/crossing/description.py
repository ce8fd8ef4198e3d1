"""What describes a model that crosses: ``config.json`` and Megatron's arguments, held against its tensors.

What one description says and the other has no words for is carried, passed over, and said. A ``config.json`` goes along as a file
(:mod:`mcore_rlhf.formats.carried`) and keeps there what fine-tuners add; it says more than arguments do, where it is of the same
model. Arguments that no Megatron declares wait in ``config.json``, under a name of ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from mcore_rlhf.core.account import Fate, Item, Reason, Report
from mcore_rlhf.core.account import Kind as Of
from mcore_rlhf.core.catalog import BFLOAT16, FLOAT16
from mcore_rlhf.errors import CheckpointError, LayoutMismatch, UsageError
from mcore_rlhf.families.described import refuse_contradictions
from mcore_rlhf.families.module import CONFIG, config_in, read_config
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
    text_of,
)
from mcore_rlhf.models.huggingface.relation import Relation, from_megatron
from mcore_rlhf.models.huggingface.table import SEQUENTIAL, STACKED, Architecture, Sizes
from mcore_rlhf.models.implied import against_config
from mcore_rlhf.models.meaning import Kind
from mcore_rlhf.models.meaning.arguments import modern
from mcore_rlhf.models.meaning.declared import complete
from mcore_rlhf.models.meaning.kinds import equal
from mcore_rlhf.models.meaning.lookup import of_arguments, of_config, undeclared
from mcore_rlhf.storage.torch_values import torch_dtype

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


@dataclass(frozen=True, slots=True)
class Described:
    """A model of Megatron's that is to be described as Hugging Face does.

    Args:
        args: Megatron's.
        sizes: Of the model.
        known: Its architecture.
        build: What its tensors say.
        options: What the user asked for: ``ignore_fields``.
        notes: Told what the descriptions say otherwise.
    """

    args: Mapping[str, object]
    sizes: Sizes
    known: Architecture
    build: Build
    options: WriteOptions
    notes: Report

    def config(
        self, reference: Mapping[str, object] | None, travelled: Mapping[str, object] | None
    ) -> dict[str, object]:
        """Its ``config.json``.

        Args:
            reference: The description that the user gave, which is kept; only what the tensors contradict is changed.
            travelled: One that travelled with the checkpoint; what the arguments contradict is changed, too.

        Raises:
            Unsupported: ``config.json`` has no words for something.
        """
        ignored = self.options.ignore_fields
        note_ignored(ignored, self.args, self.notes)
        waiting = waiting_args(self.args, self.known, ignored, self.notes)
        if reference is not None:
            return {**self._of_reference(reference), **waiting}
        made = config_of(self.args, self.sizes, self.known, self.build, ignored)
        absent = absent_arguments(self.args, self.known)
        if absent and self.args and travelled is None:
            text = f"args: do not say {', '.join(absent)}: taken as Megatron's own defaults"
            self.notes.add(Fate.DERIVED, text)
        if travelled is not None and self.known in architecture_of(travelled):
            args = {name: value for name, value in self.args.items() if name not in ignored}
            made = self._adapted(kept_spelling(travelled, made, args, self.known, self.notes))
        return {**made, **waiting}

    def _of_reference(self, reference: Mapping[str, object]) -> dict[str, object]:
        refuse_inexpressible(self.args, self.known, self.options.ignore_fields)
        for found in differences(self.args, reference, self.known):
            text = f"args: {found.argument} is {found.said!r}, and --reference-config makes it {found.other!r}, which counts"
            self.notes.add(Fate.CHANGED, text)
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
    return dict(source.family.config or FormerFamily.of(source).config)


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
    sizes: Sizes,
    ignored: tuple[str, ...] = (),
) -> dict[str, object]:
    """The arguments that a Megatron run of such a model would have stored.

    Args:
        source: Under Hugging Face's names.
        origin: What an earlier conversion left.
        config: The model's description.
        relation: Its tensors under both names.
        sizes: Of the model; its layers of multi-token prediction are those that there are.
        ignored: Fields of the description that are passed over.

    Raises:
        Unsupported: Megatron cannot compute what the description asks for.
    """
    dtype = next((spec.dtype for spec in source.model.params if spec.trainable), source.model.params[0].dtype)
    described = args_of(config, relation.architecture, build_of(relation, tied=True), ignored)
    if origin.args:  # they say the same, and the tokenizer's extra words besides
        described = {key: value for key, value in described.items() if key not in origin.args}
    args: dict[str, object] = {
        **carried_args(config), **_NEW_RUN, **origin.args, **described, **_experts(relation, sizes),
    }  # fmt: skip
    args.update(
        transformer_impl=relation.spelling.implementation, iteration=source.state.iteration, bf16=dtype == BFLOAT16,
        fp16=dtype == FLOAT16, params_dtype=torch_dtype(dtype.name), accumulate_allreduce_grads_in_fp32=True,
        mtp_num_layers=sizes.mtp or None,
    )  # fmt: skip
    if args.get("layernorm_zero_centered_gamma"):
        args["apply_layernorm_1p"] = True  # what Megatron-LM's scripts call it
    samples = source.state.other.get("global_samples")
    args["consumed_train_samples"] = samples if isinstance(samples, int) else 0
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


_SHOWN = 8
_IMPLIED = "the architecture implies it"
Values = Mapping[str, object]


def carried_args(config: Values) -> dict[str, object]:
    """The arguments that wait in a ``config.json``; empty where there are none."""
    waiting = config.get(ORIGIN)
    found = waiting.get("args") if isinstance(waiting, Mapping) else None
    return dict(found) if isinstance(found, Mapping) else {}


def waiting_args(args: Values, known: Architecture, ignored: Sequence[str], notes: Report) -> dict[str, object]:
    """What a ``config.json`` gets of arguments: those that nobody declares.

    Args:
        args: Megatron's.
        known: The architecture that they become.
        ignored: Those that are passed over.
        notes: Told which.
    """
    names = [name for name in undeclared(of_arguments(args, known.fields).values(), ignored) if name != ORIGIN]
    kept = plain({name: args[name] for name in names})
    _note("arguments", list(kept), f"in config.json, under {ORIGIN}", notes)
    lost = [name for name in names if name not in kept]
    if lost:
        notes.add(Fate.LOST, f"arguments that nobody declares, and that no JSON can hold: {_listed(lost)}")
    return {ORIGIN: {"args": kept}} if kept else {}


def note_fields(config: Values, known: Architecture, ignored: Sequence[str], notes: Report) -> None:
    """Say which fields of a ``config.json`` nobody declares: they go along in the file itself."""
    meanings = of_config(config, known.model_type, known.fields).values()
    _note("fields of config.json", undeclared(meanings, ignored), "in the file that goes along", notes)


def _note(what: str, names: Sequence[str], where: str, notes: Report) -> None:
    if names:
        notes.add(Fate.KEPT, f"{what} that nobody declares: {_listed(names)}: {where}")


def _listed(names: Sequence[str]) -> str:
    more = f", … ({len(names)})" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def note_ignored(ignored: Sequence[str], values: Values, notes: Report) -> None:
    """Say what was passed over because the user said so.

    Args:
        ignored: Names that the user gave.
        values: The source's arguments, or its ``config.json``.
        notes: Told what each was.
    """
    there = dict(values)
    for name in ("rope_scaling", "rope_parameters"):
        inside = values.get(name)
        there.update(inside if isinstance(inside, Mapping) else {})
    for name in ignored:
        if name in there:
            text = f"{name} {there[name]!r}: passed over, as --ignore-field asks"
            notes.add(Fate.LOST, text, Item(Of.ARGUMENT, name), Item(Of.CONFIG, name))
        else:
            notes.add(Fate.NOTE, f"--ignore-field {name}: the source has nothing of that name")


def arguments_to_config(args: Values, known: Architecture, config: Values, notes: Report) -> dict[Item, Item]:
    """Where each of Megatron's arguments is after a crossing: in the ``config.json``, or in what waits for the way back.

    Args:
        args: Megatron's.
        known: The architecture that they become.
        config: The ``config.json`` that was made of them.
        notes: Told of those that are nowhere.
    """
    kept, moved = plain(args), dict[Item, Item]()
    for name, meaning in of_arguments(args, known.fields).items():
        item, spelled = Item(Of.ARGUMENT, name), next((n for n in meaning.target if n in config), None)
        if spelled is not None:
            moved[item] = Item(Of.CONFIG, spelled)
        elif name in carried_args(config):
            moved[item] = Item(Of.CONFIG, ORIGIN)
        elif meaning.kind is Kind.COMPUTES:
            notes.settle(Fate.DERIVED, _IMPLIED, item)
        elif name in kept:
            moved[item] = Item(Of.VALUE, ORIGIN)
        else:
            notes.leave(Reason.OF_ENGINE, item)
    return moved


def config_to_arguments(
    config: Values, known: Architecture, args: Values, notes: Report, *, carried: bool
) -> dict[Item, Item]:
    """Where each field of a ``config.json`` is after a crossing: in Megatron's arguments, or in the file that goes along.

    Args:
        config: The description.
        known: Its architecture.
        args: The arguments that were made of it.
        notes: Told of those that are nowhere.
        carried: Whether the file goes along.
    """
    moved = dict[Item, Item]()
    for name, meaning in of_config(config, known.model_type, known.fields).items():
        item, spelled = Item(Of.CONFIG, name), next((n for n in meaning.target if n in args), None)
        if spelled is not None:
            moved[item] = Item(Of.ARGUMENT, spelled)
        elif carried:
            notes.settle(Fate.KEPT, "in config.json, which goes along", item)
        elif meaning.kind is Kind.COMPUTES:
            notes.settle(Fate.DERIVED, _IMPLIED, item)
        elif meaning.kind is Kind.UNDECLARED:
            notes.add(Fate.LOST, f"{name}: a field of the model's description that nobody declares", item)
        else:
            notes.leave(Reason.OF_ENGINE, item)
    return moved


@dataclass(frozen=True, slots=True)
class Difference:
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


def differences(args: Values, config: Values, known: Architecture) -> Iterator[Difference]:
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
            computes = name in args and meanings[name].kind is Kind.COMPUTES
            if computes and not equal(args[name], value):
                yield Difference(field.names, name, args[name], value)


def kept_spelling(carried: Values, made: Values, args: Values, known: Architecture, notes: Report) -> dict[str, object]:
    """A ``config.json`` that travelled with a checkpoint, where it says what the arguments say; what they make, otherwise.

    Args:
        carried: The one that travelled.
        made: What the arguments make.
        args: Megatron's.
        known: The architecture of both.
        notes: Told what is another by now.
    """
    config, dropped = dict(carried), dict[str, None]()
    for found in differences(args, carried, known):
        dropped.update(dict.fromkeys(found.names))
        text = f"args: {found.argument} is {found.said!r}, and was {found.other!r} in the config.json that travelled with it"
        notes.add(Fate.CHANGED, text)
    for name in dropped:
        config.pop(name, None)
        if name in made:
            config[name] = made[name]
    return config


def travelled_config(source: Source, notes: Report) -> dict[str, object] | None:
    """The description that belongs to a Megatron source, or None where there is none or its tensors are others.

    Args:
        source: Megatron's.
        notes: Told that it is not used, and why.
    """
    config = dict(text_of(config_in(source.carried))) if source.carried is not None else {}
    if not config:
        return None
    model = source.model
    shapes = {s.name: s.global_shape for s in model.params if s.name not in model.unused}
    try:
        relation = from_megatron(
            shapes, replace(sizes_of_config(config), mtp=model.mtp_layers), architecture_of(config)
        )
        for wrong in against_config(config, relation.huggingface):
            raise LayoutMismatch(str(wrong))
    except CheckpointError as error:
        why = str(error).splitlines()[0]
        notes.add(
            Fate.NOTE, f"{CONFIG}: the one that travelled with the checkpoint is not used, the run is another: {why}"
        )
        return None
    return config
