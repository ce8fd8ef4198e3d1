"""A Megatron source under Hugging Face's names, as DeepSpeed's formats want it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mcore_rlhf.core.dtype import BFLOAT16, FLOAT16
from mcore_rlhf.errors import Unsupported, UsageError
from mcore_rlhf.formats.base import ParamGroup, Source, TrainingState, WriteOptions
from mcore_rlhf.formats.report import Fate, Report
from mcore_rlhf.layouts.parallel import ParallelConfig
from mcore_rlhf.models.huggingface.config import config_of, sizes_of_args, sizes_of_config
from mcore_rlhf.models.huggingface.relation import Relation, from_megatron
from mcore_rlhf.models.huggingface.sizes import Sizes
from mcore_rlhf.models.spec import REPLICATED, ModelSpec, ParamSpec

from .crossing_groups import with_members
from .crossing_view import CrossingView
from .deepspeed.scaler import scaler_of, static_scaler
from .megatron.groups import Membership
from .megatron.reader import MegatronNative
from .module_state import ModuleState
from .reference_config import plain, read_config

ORIGIN = "mcore_rlhf_origin"
"""The key of client state under which what only Megatron has waits for the way back."""

_LM_HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def to_huggingface(source: Source, native: MegatronNative, options: WriteOptions) -> Source:
    """The source under Hugging Face's names, without the padding of the vocabulary.

    Args:
        source: Megatron's.
        native: Its own view of it.
        options: What the user asked for: ``vocab_size``, ``reference_config``, ``rules``.

    Raises:
        CheckpointError: It is a model whose names are not known, or its true vocabulary is not.
    """
    model = source.model
    if model.num_experts or model.mtp_layers:
        raise Unsupported("models with experts or multi-token prediction have no Hugging Face names here yet")
    reference = None if options.reference_config is None else read_config(options.reference_config)
    sizes = _sizes(source, native, reference, options.vocab_size)
    relation = from_megatron({s.name: s.global_shape for s in model.params if s.name not in model.unused}, sizes)
    notes = Report(list(source.notes.lines))
    _note(source, native, relation, sizes, notes)
    tied = model.tied and _LM_HEAD not in relation.huggingface and "score.weight" not in relation.huggingface
    config = _config(source, relation, sizes, tied) if reference is None else reference
    groups = with_members(source, relation, Membership(native.args, options.rules), native.scalars, notes)
    catalog = CrossingView(source.catalog, source.role, relation.of_huggingface(), relation.huggingface)
    return replace(
        source, model=_model(source, relation, sizes, tied), parallel=ParallelConfig(dp=source.parallel.world_size),
        catalog=catalog, state=_state(source, relation, {**config, "vocab_size": sizes.vocabulary}, notes, groups), notes=notes,
        native=ModuleState(
            f"global_step{source.state.iteration}", (*relation.huggingface, *([_LM_HEAD] if tied else [])),
            shared={_LM_HEAD: EMBEDDING} if tied else {},
        ),
    )  # fmt: skip


def _sizes(
    source: Source, native: MegatronNative, reference: Mapping[str, object] | None, vocab_size: int | None
) -> Sizes:
    """What the reference says, otherwise what the arguments do."""
    if reference is not None:
        sizes = sizes_of_config(reference)
        return sizes if vocab_size is None else replace(sizes, vocabulary=vocab_size)
    words = vocab_size or source.model.vocab_size
    if words is None:
        raise UsageError(
            f"{source.root}: args do not say how many words the vocabulary has, and Hugging Face's tensors have no padding rows\n"
            "Give --vocab-size, or --reference-config with the folder of the model that was trained."
        )
    return sizes_of_args(native.args.values, words)


def _model(source: Source, relation: Relation, sizes: Sizes, tied: bool) -> ModelSpec:
    shares = relation.of_huggingface()
    specs = []
    for name, shape in relation.huggingface.items():
        origin = source.model.get(shares[name][0].name)
        assert origin is not None  # the relation is made of these parameters
        specs.append(ParamSpec(name, shape, origin.dtype, REPLICATED, origin.trainable))
    return ModelSpec(tuple(specs), sizes.layers, tied, vocab_size=sizes.vocabulary, padded_vocab_size=sizes.vocabulary)


def _config(source: Source, relation: Relation, sizes: Sizes, tied: bool) -> dict[str, object]:
    biased = any(name.endswith("q_proj.bias") for name in relation.huggingface)
    return config_of(source.state.args, sizes, relation.architecture, tied=tied, biased=biased)


def _state(
    source: Source, relation: Relation, config: Mapping[str, object], notes: Report, groups: tuple[ParamGroup, ...]
) -> TrainingState:
    old = source.state
    origin = {
        "iteration": old.iteration, "config": dict(config), "args": plain(old.args), "spelling": relation.spelling,
        "scheduler": dict(old.scheduler or {}), "other": plain(old.other),
    }  # fmt: skip
    other: dict[str, object] = {"skipped_steps": 0, ORIGIN: origin}
    samples = old.args.get("consumed_train_samples")
    if isinstance(samples, int):
        other["global_samples"] = samples
        notes.add(Fate.KEPT, f"consumed_train_samples {samples}: DeepSpeed's global_samples")
    if old.scheduler is not None:
        notes.add(
            Fate.DERIVED,
            f"lr_scheduler: last_batch_iteration {old.iteration - 1}, which is all that DeepSpeed's own schedulers keep; "
            f"Megatron's own state waits under {ORIGIN}",
        )
    scheduler: dict[str, object] | None = None if old.scheduler is None else {"last_batch_iteration": old.iteration - 1}
    return TrainingState(
        old.iteration, args=_ds_config(source), groups=groups, scheduler=scheduler, grad_scaler=_scaler(source, notes),
        other=other,
    )  # fmt: skip


def _scaler(source: Source, notes: Report) -> object | None:
    """DeepSpeed's loss scaler in the state of Megatron's: a run in fp16 must not go on with a scale of 1.

    Source: megatron-core 0.16.1, ``optimizer/grad_scaler.py``; DeepSpeed 0.19.8, ``runtime/fp16/loss_scaler.py``.
    """
    stored, at = source.state.grad_scaler, source.state.iteration
    if not isinstance(stored, Mapping):
        return None
    constant = source.state.args.get("loss_scale")
    if "growth_tracker" not in stored:  # a constant scale has no state
        return static_scaler(float(constant)) if isinstance(constant, int | float) else None
    scale = float(stored["scale"])
    notes.add(Fate.DERIVED, f"loss_scaler: dynamic, at Megatron's scale of {scale:g}")
    clean = {"cur_iter": at, "last_overflow_iter": at - int(stored["growth_tracker"])}
    window = source.state.args.get("loss_scale_window")
    more = {"scale_window": int(window)} if isinstance(window, int | float) else {}
    return scaler_of({"dynamic_loss_scale": True, "cur_scale": scale, **clean, **more})


def _ds_config(source: Source) -> dict[str, object]:
    """What ``ds_config`` has of the run's arguments; stage and everything else are the new run's own."""
    args: Mapping[str, object] = source.state.args
    config: dict[str, object] = {}
    for ours, theirs in (
        ("global_batch_size", "train_batch_size"),
        ("micro_batch_size", "train_micro_batch_size_per_gpu"),
        ("clip_grad", "gradient_clipping"),
    ):
        if args.get(ours) is not None:
            config[theirs] = args[ours]
    dtypes = {spec.dtype for spec in source.model.params if spec.trainable}
    config.update(
        {name: {"enabled": True} for name, dtype in (("bf16", BFLOAT16), ("fp16", FLOAT16)) if dtype in dtypes}
    )
    return config


def _note(source: Source, native: MegatronNative, relation: Relation, sizes: Sizes, notes: Report) -> None:
    known = relation.architecture
    notes.add(
        Fate.CHANGED,
        f"names and shapes: Megatron's become those of {known.class_name} ({len(relation.megatron)} → {len(relation.huggingface)} tensors)",
    )
    rows = source.model.padded_vocab_size
    if rows is not None and rows > sizes.vocabulary:
        notes.add(Fate.CHANGED, f"vocabulary rows {sizes.vocabulary}–{rows - 1} are Megatron's padding, and are cut")
    notes.add(Fate.LOST, "RNG states: Megatron's belong to its ranks, and DeepSpeed stores none")
    opaque = [
        name for s in native.shards for part in s.parts for name, value in part.opaque.items() if value is not None
    ]
    if opaque:
        notes.add(Fate.LOST, f"values that are no parameters, such as {opaque[0]}")
