"""A Megatron source under Hugging Face's names, as all formats but Megatron's own want it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from mcore_rlhf.core.account import Fate, Item, Kind, Reason, Report
from mcore_rlhf.core.catalog import BFLOAT16, FLOAT16, MASTER, PARAM
from mcore_rlhf.core.shares import FROM_MASTERS
from mcore_rlhf.errors import Unsupported, UsageError
from mcore_rlhf.families.described import refuse_contradictions
from mcore_rlhf.families.inventory import ELEMENTS, WAITING, value_items
from mcore_rlhf.families.megatron.groups import Membership
from mcore_rlhf.families.megatron.state import OF_RANKS, PER_RANK_KEYS, MegatronState, names_of, opaque_item
from mcore_rlhf.families.module import ModuleState, read_config, scaler_of, static_scaler
from mcore_rlhf.families.options import WriteOptions
from mcore_rlhf.families.sidecar import WAITS, FormerFamily, origin_of_megatron, plain
from mcore_rlhf.families.source import ParamGroup, Source, TrainingState
from mcore_rlhf.layouts.parallel import ParallelConfig
from mcore_rlhf.models.huggingface import ARCHITECTURES
from mcore_rlhf.models.huggingface.config import (
    architecture_of,
    doubts,
    expresses,
    sizes_of_args,
    sizes_of_config,
    text_of,
)
from mcore_rlhf.models.huggingface.deepseek import FULL_QUERY_NORM
from mcore_rlhf.models.huggingface.relation import Relation, from_megatron
from mcore_rlhf.models.huggingface.table import Architecture, Sizes
from mcore_rlhf.models.implied import against_config
from mcore_rlhf.models.megatron import is_buffer
from mcore_rlhf.models.spec import REPLICATED, ModelSpec, ParamSpec

from .description import EMBEDDING, LM_HEAD, Described, arguments_to_config, build_of, travelled_config
from .groups import with_members
from .shifting import shifted


def to_huggingface(source: Source, options: WriteOptions) -> Source:
    """The source under Hugging Face's names as they are on disk, without the padding of the vocabulary.

    Args:
        source: Megatron's.
        options: What the user asked for: ``vocab_size``, ``reference_config``, ``rules``.

    Raises:
        CheckpointError: It is a model whose names are not known, or its true vocabulary is not.
    """
    family, model, notes = MegatronState.needed(source), source.model, source.notes.copy()
    given = options.reference_config
    reference = None if given is None else text_of(read_config(given))
    travelled = travelled_config(source, notes) if given is None else None
    sizes = _sizes(source, family, reference or travelled, options.vocab_size)
    among = _among(source.state.args, travelled, options) if reference is None else architecture_of(reference)
    shapes = {s.name: s.global_shape for s in model.params if s.name not in model.unused}
    _refuse_query_norm(source, shapes)
    relation = from_megatron(shapes, sizes, among)
    if relation.shifts:
        source = shifted(source, {name: -by for _, name, by in relation.shifts}, notes)
    build = build_of(relation, model.tied)
    described = Described(source.state.args, sizes, relation.architecture, build, options, notes)
    config = described.config(reference, travelled)
    if reference is not None:
        found = against_config(config, relation.huggingface)
        refuse_contradictions(found, f"--reference-config {given}", source)
    _note(source, family, relation, sizes, notes)
    for doubt in doubts(source.state.args):
        notes.add(Fate.LOST, doubt)
    groups = with_members(source, relation, Membership(family.args, options.rules), family.scalars, notes)
    shares = relation.of_huggingface()
    tensors = source.catalog
    if not source.parity and MASTER in source.states:
        tensors = tensors.states({PARAM: FROM_MASTERS[PARAM]})
        notes.add(
            Fate.CHANGED, "parameters: rounded from their fp32 masters; the run itself computes with fewer bits of them"
        )
    left = FormerFamily.of(source).module(source.state.iteration)
    if source.origin:
        _note_left(left, notes)
    return replace(
        source, model=_model(source, relation, sizes, build.tied), parallel=ParallelConfig(dp=source.parallel.world_size),
        catalog=tensors.recut(source.role, shares, relation.huggingface), parity=True,
        state=_with_left(_state(source, notes, groups), left), notes=notes,
        family=ModuleState(
            str(left.get("tag") or f"global_step{source.state.iteration}"), (*relation.huggingface, *([LM_HEAD] if build.tied else [])),
            buffers=tuple(name for name, parts in shares.items() if is_buffer(parts[0].name)),
            shared={LM_HEAD: EMBEDDING} if build.tied else {}, config=config, optimizer=_section(left, "optimizer"), packs_experts=False,
            laid_out=FormerFamily.of(source).laid_out,
        ), moved={**_waiting(source), **arguments_to_config(source.state.args, relation.architecture, config, notes)},
        origin=origin_of_megatron(source, config, relation.spelling),
    )  # fmt: skip


def as_release(source: Source) -> Source:
    """A release that becomes a model's folder, which has no run whose counters and arguments would be lost; its config says all."""
    notes = source.notes.copy()
    notes.leave(Reason.NO_RUN, Item(Kind.ARGUMENT), Item(Kind.SCHEDULER), Item(Kind.VALUE))
    return replace(source, state=replace(source.state, other={}, scheduler=None), notes=notes, origin={})


def _refuse_query_norm(source: Source, names: Iterable[str]) -> None:
    """Refuse what no architecture of Hugging Face's computes."""
    found = [name for name in names if name.endswith(FULL_QUERY_NORM)]
    if found:
        raise Unsupported(
            f"{source.root}: {found[0]} (and {len(found) - 1} more) normalizes what the queries are projected from once more, as "
            "megatron-core 0.19 does where q_lora_rank is not set and qk_layernorm is\nNo class of transformers computes that: the model "
            "stays Megatron's. 0.16 to 0.18 train such a model without that norm."
        )


def _among(
    args: Mapping[str, object], travelled: Mapping[str, object] | None, options: WriteOptions
) -> tuple[Architecture, ...]:
    """The architectures that a model may be, the likeliest first: what has words for its arguments, and what it once was."""
    first = () if travelled is None else architecture_of(travelled)
    among = (*first, *(known for known in ARCHITECTURES if known not in first))
    return tuple(sorted(among, key=lambda known: not expresses(args, known, options.ignore_fields)))


def _waiting(source: Source) -> dict[Item, Item]:
    """What of the run waits in client state for the way back."""
    state, there = source.state, WAITING
    found = [Item(Kind.SCHEDULER, key) for key in state.scheduler or {}]
    found += [item for item, _ in value_items(plain(state.other))]
    return dict.fromkeys(found, there)


def _sizes(
    source: Source, family: MegatronState, reference: Mapping[str, object] | None, vocab_size: int | None
) -> Sizes:
    """What the reference says, otherwise what the arguments do."""
    if reference is not None:
        sizes = replace(sizes_of_config(reference), mtp=source.model.mtp_layers)
        return sizes if vocab_size is None else replace(sizes, vocabulary=vocab_size)
    words = vocab_size or source.model.vocab_size
    if words is None:
        raise UsageError(
            f"{source.root}: args do not say how many words the vocabulary has, and Hugging Face's tensors have no padding rows\n"
            "Give --vocab-size, or --reference-config with the folder of the model that was trained."
        )
    return replace(sizes_of_args(family.args.values, words), mtp=source.model.mtp_layers)


def _model(source: Source, relation: Relation, sizes: Sizes, tied: bool) -> ModelSpec:
    shares = relation.of_huggingface()
    specs = []
    for name, shape in relation.huggingface.items():
        origin = source.model.get(shares[name][0].name)
        assert origin is not None  # the relation is made of these parameters
        specs.append(ParamSpec(name, shape, origin.dtype, REPLICATED, origin.trainable))
    return ModelSpec(tuple(specs), sizes.layers, tied, vocab_size=sizes.vocabulary, padded_vocab_size=sizes.vocabulary)


def _note_left(left: Mapping[str, object], notes: Report) -> None:
    """What a run under a module's names has left here is of one step: whoever trained on has other values."""
    if left:
        notes.add(Fate.KEPT, f"{', '.join(left)}: as the step had them before it became Megatron's", WAITING)
    else:
        notes.add(Fate.CHANGED, f"what {WAITS} is of another step than this one, and is not used", WAITING)


def _with_left(state: TrainingState, left: Mapping[str, object]) -> TrainingState:
    known: dict[str, Any] = {key: left[key] for key in ("args", "scheduler", "grad_scaler") if key in left}
    return replace(state, other={**state.other, **_section(left, "other")}, **known)


def _section(left: Mapping[str, object], name: str) -> dict[str, object]:
    found = left.get(name)
    return dict(found) if isinstance(found, Mapping) else {}


def _state(source: Source, notes: Report, groups: tuple[ParamGroup, ...]) -> TrainingState:
    old = source.state
    other: dict[str, object] = {"skipped_steps": 0}
    samples = old.args.get("consumed_train_samples")
    if isinstance(samples, int):
        other["global_samples"] = samples
        text = f"consumed_train_samples {samples}: as global_samples"
        notes.add(Fate.KEPT, text, Item(Kind.ARGUMENT, "consumed_train_samples"))
    if old.scheduler is not None:
        notes.add(
            Fate.DERIVED,
            f"lr_scheduler: last_batch_iteration {old.iteration - 1}, which is all that DeepSpeed's own schedulers keep; "
            f"Megatron's own state {WAITS}",
            Item(Kind.SCHEDULER),
        )
    trained = (
        old.iteration > 0 and not old.release
    )  # DeepSpeed wants to load a scheduler, even where Megatron stored none
    scheduler: dict[str, object] | None = {"last_batch_iteration": old.iteration - 1} if trained else None
    return TrainingState(
        iteration=old.iteration,
        release=old.release,
        args=_ds_config(source),
        groups=groups,
        scheduler=scheduler,
        grad_scaler=_scaler(source, notes),
        other=other,
    )


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
    notes.add(Fate.DERIVED, f"loss_scaler: dynamic, at Megatron's scale of {scale:g}", Item(Kind.SCALER))
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


def _note(source: Source, family: MegatronState, relation: Relation, sizes: Sizes, notes: Report) -> None:
    known = relation.architecture
    notes.add(
        Fate.CHANGED,
        f"names and shapes: Megatron's become those of {known.class_name} ({len(relation.megatron)} → {len(relation.huggingface)} tensors)",
    )
    rows = source.model.padded_vocab_size
    if rows is not None and rows > sizes.vocabulary:
        _note_cut(family.args.vocab_size, sizes.vocabulary, rows, notes)
    if sizes.mtp:
        notes.add(
            Fate.NOTE,
            f"multi-token prediction: layer {sizes.layers} and further ones; transformers passes over them, and saves the model without",
        )
    if not source.state.release:  # nobody trains on with those of a release
        text = "RNG states: Megatron's belong to its ranks, and formats under module names store none"
        notes.add(Fate.LOST, text, Item(Kind.RNG))
    notes.leave(Reason.NO_RUN, Item(Kind.RNG))
    notes.leave(Reason.OF_LAYOUT, *(OF_RANKS[key] for key in PER_RANK_KEYS))
    notes.settle(
        Fate.DERIVED, "as torch's optimizers keep it", Item(Kind.GROUP), Item(Kind.OPTIMIZER), Item(Kind.SCALER)
    )
    _note_objects(source, notes)
    opaque = list(family.opaque())
    if opaque:
        text = f"values that are no parameters: {names_of(opaque)}"
        notes.add(Fate.LOST, text, *map(opaque_item, opaque))


def _note_objects(source: Source, notes: Report) -> None:
    """Values that are no numbers and no texts are understood by Megatron only."""
    state = source.state
    other = [item for item, _ in value_items(state.other) if item.name not in plain(state.other)]
    if other:
        notes.add(Fate.LOST, f"values that only Megatron understands: {', '.join(item.name for item in other)}", *other)


def _note_cut(stored: int | None, words: int, rows: int, notes: Report) -> None:
    """Rows behind the last word go; a number that the user gave may make words of the run's own go as well."""
    loses = stored is not None and words < stored <= rows
    if stored is not None and loses:
        notes.add(
            Fate.LOST,
            f"vocabulary rows {words}–{stored - 1}: words of the run, which has {stored} as its args say; cut, as the {words} words "
            "of --vocab-size or --reference-config ask",
            ELEMENTS,
        )
    first = words if stored is None or stored > rows else max(words, stored)
    if first < rows:
        text = f"vocabulary rows {first}–{rows - 1} are Megatron's padding, and are cut"
        notes.add(Fate.CHANGED, text, *([] if loses else [ELEMENTS]))  # a loss of some is what counts of them all
