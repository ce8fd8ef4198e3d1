"""A source under Hugging Face's names as Megatron's: names, shapes, arguments, groups, and a vocabulary that is padded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from mcore_rlhf.core.dtype import BFLOAT16, FLOAT16
from mcore_rlhf.errors import LayoutMismatch, Problems, Unsupported, UsageError
from mcore_rlhf.formats.base import ParamGroup, Source, TrainingState, WriteOptions
from mcore_rlhf.formats.report import Fate, Report
from mcore_rlhf.layouts.padding import padded_vocab_size
from mcore_rlhf.layouts.parallel import ParallelConfig
from mcore_rlhf.models.huggingface.config import args_of, sizes_of_config
from mcore_rlhf.models.huggingface.relation import Relation, from_huggingface
from mcore_rlhf.models.huggingface.table import TRANSFORMER_ENGINE
from mcore_rlhf.models.megatron import Traits, partition_of
from mcore_rlhf.models.spec import REPLICATED, ModelSpec, ParamSpec

from .crossing_groups import as_megatron
from .crossing_to_huggingface import EMBEDDING, ORIGIN
from .crossing_view import CrossingView
from .megatron.arguments import Arguments
from .megatron.groups import Membership
from .megatron.reader import MegatronNative
from .module_state import ModuleState
from .reference_config import read_config

_DIVISOR = 128
_NEW_RUN: dict[str, object] = {
    "make_vocab_size_divisible_by": _DIVISOR, "seed": 1234, "num_experts": None, "mtp_num_layers": None,
    "data_parallel_random_init": False, "use_distributed_optimizer": True, "decoupled_lr": None,
    "apply_wd_to_qk_layernorm": False, "overlap_grad_reduce": False, "ddp_bucket_size": None, "ddp_num_buckets": None,
    "ddp_pad_buckets_for_high_nccl_busbw": False, "overlap_param_gather_with_optimizer_step": False,
    "num_distributed_optimizer_instances": 1,
}  # fmt: skip
"""Arguments on which the files depend, as Megatron has them unless told otherwise.

Source: Megatron-LM core_v0.16.1, ``megatron/training/arguments.py``.
"""
_HEADS = ("lm_head.weight", "score.weight")


@dataclass(frozen=True, slots=True)
class _Origin:
    """What a conversion out of Megatron left for the way back; empty for a run that was never there."""

    values: Mapping[str, object]

    @property
    def args(self) -> dict[str, object]:
        """Megatron's arguments, as far as they are plain values."""
        return self._section("args")

    @property
    def config(self) -> dict[str, object]:
        """The model's description."""
        return self._section("config")

    @property
    def other(self) -> dict[str, object]:
        """Counters."""
        return self._section("other")

    def scheduler(self, iteration: int) -> dict[str, object] | None:
        """The scheduler's state, unless the run went on since."""
        return self._section("scheduler") or None if self.values.get("iteration") == iteration else None

    def _section(self, name: str) -> dict[str, object]:
        found = self.values.get(name)
        return dict(found) if isinstance(found, Mapping) else {}


def to_megatron(source: Source, native: ModuleState, options: WriteOptions) -> Source:
    """The source under Megatron's names, with the arguments that a run of such a model would have stored.

    Args:
        source: A source of DeepSpeed's under Hugging Face's names.
        native: Its own view of it.
        options: What the user asked for: ``reference_config``, ``transformer_impl``, ``rules``.

    Raises:
        CheckpointError: It is a model whose names are not known, or nothing describes it.
    """
    _check(source, native)
    stored = source.state.other.get(ORIGIN)
    origin = _Origin(stored if isinstance(stored, Mapping) else {})
    config = _config(source, origin, options)
    sizes = sizes_of_config(config)
    spelling = options.transformer_impl or str(origin.values.get("spelling") or TRANSFORMER_ENGINE)
    shapes = {spec.name: spec.global_shape for spec in source.model.params if spec.name not in native.buffers}
    relation = from_huggingface(shapes, sizes, spelling)
    tied = not any(head in shapes for head in _HEADS)
    args = Arguments(_args(source, origin, config, relation, tied, spelling))
    notes = Report(list(source.notes.lines))
    model = _model(source, relation, args, tied, sizes.vocabulary)
    _note(source, relation, model, notes, native)
    rows = {s.name: s.global_shape[0] for s in model.params if s.partition.vocabulary}
    catalog = CrossingView(source.catalog, source.role, relation.of_megatron(), relation.megatron, rows)
    groups = as_megatron(source, relation, Membership(args, options.rules), notes)
    return replace(
        source, model=model, parallel=ParallelConfig(dp=source.parallel.world_size), catalog=catalog,
        state=_state(source, origin, args, groups, notes), notes=notes,
        optimizer=None if source.optimizer is None else "distributed",
        native=MegatronNative(None, args, [], list(_with_extra_states(relation)), []),
    )  # fmt: skip


def _with_extra_states(relation: Relation) -> Iterator[str]:
    """All keys of the state dict: linear modules have an ``_extra_state`` after their parameters, which is None here.

    Source: megatron-core 0.16.1, ``tensor_parallel/layers.py`` (``set_extra_state``).
    """
    modules = [name.rpartition(".")[0] for name in relation.megatron]
    for name, module, following in zip(relation.megatron, modules, [*modules[1:], ""], strict=True):
        yield name
        if module != following and module.rpartition(".")[2].startswith(("linear_", "output_layer")):
            yield f"{module}._extra_state"
    if "output_layer" not in modules:
        yield "output_layer._extra_state"


def _check(source: Source, native: ModuleState) -> None:
    if native.pipeline:
        raise Unsupported(f"{source.root}: a PipelineModule's names are its layers' numbers, not Hugging Face's")
    if source.model.get(EMBEDDING) is None:
        some = ", ".join(spec.name for spec in source.model.params[:3])
        raise Unsupported(
            f"{source.root}: from {source.format} to megatron needs Hugging Face's names, {EMBEDDING} and so on; found {some}, …"
        )
    kept = {alias: owner for alias, owner in native.shared.items() if (alias, owner) != (_HEADS[0], EMBEDDING)}
    if kept:
        raise Unsupported(f"{source.root}: shared parameters that Megatron has no name for: {kept}")


def _config(source: Source, origin: _Origin, options: WriteOptions) -> dict[str, object]:
    """The model's description; without it nobody knows how wide a head is."""
    if options.reference_config is not None:
        return read_config(options.reference_config)
    if origin.config:
        return origin.config
    raise UsageError(
        f"{source.root}: nothing in it describes the model: how many heads it has, its rotary base, …\n"
        "Give --reference-config, the folder with its config.json."
    )


def _args(
    source: Source, origin: _Origin, config: Mapping[str, object], relation: Relation, tied: bool, spelling: str
) -> dict[str, object]:
    import torch

    biased = any(name.endswith("q_proj.bias") for name in relation.huggingface)
    dtype = next((spec.dtype for spec in source.model.params if spec.trainable), source.model.params[0].dtype)
    args: dict[str, object] = {**_NEW_RUN, **origin.args}
    described = args_of(config, relation.architecture, tied=tied, biased=biased)
    if origin.args:  # they say the same, and the tokenizer's extra words besides
        described = {key: value for key, value in described.items() if key not in origin.args}
    args.update(described)
    args.update(
        transformer_impl=spelling, iteration=source.state.iteration, bf16=dtype == BFLOAT16, fp16=dtype == FLOAT16,
        params_dtype=getattr(torch, dtype.name), accumulate_allreduce_grads_in_fp32=True,
    )  # fmt: skip
    samples = source.state.other.get("global_samples")
    args["consumed_train_samples"] = samples if isinstance(samples, int) else 0
    return args


def _model(source: Source, relation: Relation, args: Arguments, tied: bool, words: int) -> ModelSpec:
    rows = padded_vocab_size(words, args.integer("make_vocab_size_divisible_by", _DIVISOR), 1)
    shares, problems, specs = relation.of_megatron(), Problems(), []
    traits = Traits(gated=True, transformer_engine=relation.spelling == TRANSFORMER_ENGINE)
    for name, shape in relation.megatron.items():
        parts = [spec for share in shares[name] if (spec := source.model.get(share.name)) is not None]
        if len({(spec.dtype, spec.trainable) for spec in parts}) > 1:
            text = (
                f"{name}: is made of {', '.join(dict.fromkeys(s.name for s in parts))}, some frozen or of another type"
            )
            problems.add(LayoutMismatch, text)
        partition = partition_of(name, traits) or REPLICATED
        if partition.vocabulary and shares[name][0].name.startswith("score."):
            partition = REPLICATED
        whole = (rows, *shape[1:]) if partition.vocabulary else shape
        specs.append(ParamSpec(name, whole, parts[0].dtype, partition, parts[0].trainable))
    problems.raise_if_any()
    layers = 1 + max(int(name.split(".")[2]) for name in relation.megatron if name.startswith("decoder.layers."))
    return ModelSpec(tuple(specs), layers, tied, vocab_size=words, padded_vocab_size=rows)


def _state(
    source: Source, origin: _Origin, args: Arguments, groups: tuple[ParamGroup, ...], notes: Report
) -> TrainingState:
    old = source.state
    scheduler = origin.scheduler(old.iteration)
    if scheduler is None and old.scheduler is not None:
        notes.add(
            Fate.LOST,
            "lr_scheduler: DeepSpeed's knows only its step; Megatron will want --override-opt-param-scheduler",
        )
    return TrainingState(
        old.iteration, args=dict(args.values), groups=groups, scheduler=scheduler,
        other={"checkpoint_version": 3.0, "iteration": old.iteration, **_counters(origin, old.iteration)},
    )  # fmt: skip


def _counters(origin: _Origin, iteration: int) -> dict[str, object]:
    same = origin.values.get("iteration") == iteration
    return {key: value for key, value in origin.other.items() if key != "iteration"} if same else {}


def _note(source: Source, relation: Relation, model: ModelSpec, notes: Report, native: ModuleState) -> None:
    known, words, rows = relation.architecture, model.vocab_size or 0, model.padded_vocab_size or 0
    notes.add(
        Fate.CHANGED,
        f"names and shapes: those of {known.class_name} become Megatron's ({len(relation.huggingface)} → {len(relation.megatron)} "
        f"tensors), spelled as with --transformer-impl {relation.spelling}",
    )
    if rows > words:
        notes.add(
            Fate.CHANGED,
            f"vocabulary rows {words}–{rows - 1} are new padding and repeat row {words - 1}, in every state",
        )
    if source.optimizer == "zero3":
        notes.add(Fate.DERIVED, "parameters: rounded from their fp32 masters, since stage 3 does not store them")
    notes.add(Fate.DERIVED, "args: those that describe the model; all others are the new run's")
    if native.buffers:
        notes.add(Fate.LOST, f"buffers that Megatron does not have: {', '.join(native.buffers[:3])}")
    lost = sorted(
        set(source.state.other)
        - {ORIGIN, "global_samples", "skipped_steps", "ds_version", "data_sampler", "random_ltd"}
    )
    if lost:
        notes.add(Fate.LOST, f"client state, for which Megatron has no place: {', '.join(lost)}")
    if getattr(source.state.grad_scaler, "dynamic", False):
        notes.add(Fate.LOST, "loss_scaler: Megatron's and DeepSpeed's count differently; the run starts with its own")
