"""What describes a model that crosses: ``config.json`` and Megatron's arguments, held against its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mcore_rlhf.core.account import Fate, Report
from mcore_rlhf.core.dtype import BFLOAT16, FLOAT16
from mcore_rlhf.errors import UsageError
from mcore_rlhf.families.origin import Origin
from mcore_rlhf.families.source import Source, WriteOptions
from mcore_rlhf.models.huggingface.config import (
    Build,
    absent_arguments,
    architecture_of,
    args_of,
    built,
    config_of,
    refuse_inexpressible,
)
from mcore_rlhf.models.huggingface.relation import Relation
from mcore_rlhf.models.huggingface.table import SEQUENTIAL, STACKED, Architecture, Sizes

from .fields import carried_args, differences, kept_spelling, note_ignored, waiting_args
from .reference_config import read_config

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
        return any(name.endswith(f"{layer}_proj.bias") for name in names)

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
        if self.sizes.mtp or "num_nextn_predict_layers" in config:
            adapted["num_nextn_predict_layers"] = self.sizes.mtp
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
    return dict(source.family.config or Origin.of(source).config)


def description(source: Source, options: WriteOptions) -> dict[str, object]:
    """The same; without it nobody knows how wide a head is.

    Raises:
        UsageError: There is none.
    """
    found = known_description(source, options)
    if not found:
        raise UsageError(
            f"{source.root}: nothing in it describes the model: how many heads it has, its rotary base, …\n"
            "Give --reference-config, the folder with its config.json."
        )
    return found


def arguments(
    source: Source,
    origin: Origin,
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
    import torch

    dtype = next((spec.dtype for spec in source.model.params if spec.trainable), source.model.params[0].dtype)
    described = args_of(config, relation.architecture, build_of(relation, tied=True), ignored)
    if origin.args:  # they say the same, and the tokenizer's extra words besides
        described = {key: value for key, value in described.items() if key not in origin.args}
    args: dict[str, object] = {
        **carried_args(config), **_NEW_RUN, **origin.args, **described, **_experts(relation, sizes),
    }  # fmt: skip
    args.update(
        transformer_impl=relation.spelling.implementation, iteration=source.state.iteration, bf16=dtype == BFLOAT16,
        fp16=dtype == FLOAT16, params_dtype=getattr(torch, dtype.name), accumulate_allreduce_grads_in_fp32=True,
        mtp_num_layers=sizes.mtp or None,
    )  # fmt: skip
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
