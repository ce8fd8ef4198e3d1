"""A Megatron source under Hugging Face's names, as all formats but Megatron's own want it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mcore_rlhf.core.catalog import BFLOAT16, FLOAT16, MASTER, PARAM
from mcore_rlhf.core.facts import Fate, Item, Kind, Reason, Rule, Values
from mcore_rlhf.core.shares import FROM_MASTERS
from mcore_rlhf.errors import Unsupported, UsageError
from mcore_rlhf.families.described import refuse_contradictions
from mcore_rlhf.families.inventory import ELEMENTS, WAITING, random_states, value_items
from mcore_rlhf.families.megatron.groups import Membership
from mcore_rlhf.families.megatron.state import NO_PARAMETERS, NO_RNG, OF_RANKS, PER_RANK_KEYS, MegatronState
from mcore_rlhf.families.module import CONFIG, ModuleState, read_config, scaler_of, static_scaler
from mcore_rlhf.families.options import WriteOptions
from mcore_rlhf.families.sidecar import ORIGIN, WAITS, FormerFamily, origin_of_megatron, plain
from mcore_rlhf.families.source import ParamGroup, Source, TrainingState
from mcore_rlhf.layouts.parallel import ParallelConfig
from mcore_rlhf.models.huggingface import ARCHITECTURES
from mcore_rlhf.models.huggingface.config import architecture_of, doubts, expresses, sizes_of_args, sizes_of_config
from mcore_rlhf.models.huggingface.relation import Relation, from_megatron
from mcore_rlhf.models.huggingface.table import Architecture, Sizes
from mcore_rlhf.models.huggingface.texts import text_of
from mcore_rlhf.models.implied import against_config
from mcore_rlhf.models.megatron import is_buffer
from mcore_rlhf.models.spec import REPLICATED, ModelSpec, ParamSpec

from .description import (
    EMBEDDING,
    LM_HEAD,
    ConfigDifference,
    DescribedModel,
    arguments_to_config,
    build_of,
    differences,
    travelled_config,
)
from .groups import OF_HUGGINGFACE, DealtGroups, with_members
from .rules import IGNORED, OF_PLACES, CrossedPlaces, listed
from .shifting import SHIFTED, shifted

_FULL_QUERY_NORM = "self_attention.linear_q_proj.layer_norm_weight"
"""A norm before a query that is projected whole, which transformers does not have: with ``qk_layernorm`` megatron-core 0.19 always puts
one there, behind the layer's own, and without Transformer Engine it builds no such model. 0.16 to 0.18 project what the layer's norm gives.

Source: megatron-core 0.19.2, ``transformer/mla_qk_norm_config.py`` (``_resolve_mla_qk_layernorm``); 0.18.2,
``transformer/multi_latent_attention.py``.
"""


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
    travelled, unused = travelled_config(source) if given is None else (None, "")
    sizes = _sizes(source, family, reference or travelled, options.vocab_size)
    among = _among(source.state.args, travelled, options) if reference is None else architecture_of(reference)
    shapes = {s.name: s.global_shape for s in model.params if s.name not in model.unused}
    _refuse_query_norm(source, shapes)
    relation = from_megatron(shapes, sizes, among)
    shifts = {name: -by for _, name, by in relation.shifts}
    if shifts:
        source = shifted(source, shifts)
    build = build_of(relation, model.tied)
    described = DescribedModel(source.state.args, sizes, relation.architecture, build, options)
    config = described.config(reference, travelled)
    if reference is not None:
        found = against_config(config, relation.huggingface)
        refuse_contradictions(found, f"--reference-config {given}", source)
    dealt = with_members(source, relation, Membership(family.args, options.rules), family.scalars)
    shares = relation.of_huggingface()
    tensors = source.catalog
    if not source.parity and MASTER in source.states:
        tensors = tensors.states({PARAM: FROM_MASTERS[PARAM]})
    left = FormerFamily.of(source).module(source.state.iteration)
    places, state = arguments_to_config(source.state.args, relation.architecture, config), _state(source, dealt.groups)
    notes.through(
        _RULES,
        _InHuggingface(
            source, family, relation, described, reference, travelled, unused, shifts, dealt, left, places, state
        ),
    )
    return replace(
        source, model=_model(source, relation, sizes, build.tied), parallel=ParallelConfig(dp=source.parallel.world_size),
        catalog=tensors.recut(source.role, shares, relation.huggingface), parity=True,
        state=_with_left(state, left), notes=notes,
        family=ModuleState(
            str(left.get("tag") or f"global_step{source.state.iteration}"), (*relation.huggingface, *([LM_HEAD] if build.tied else [])),
            buffers=tuple(name for name, parts in shares.items() if is_buffer(parts[0].name)),
            shared={LM_HEAD: EMBEDDING} if build.tied else {}, config=config, optimizer=_section(left, "optimizer"), packs_experts=False,
            laid_out=FormerFamily.of(source).laid_out,
        ), moved={**_waiting(source), **places.moved},
        origin=origin_of_megatron(source, config, relation.spelling),
    )  # fmt: skip


def as_release(source: Source) -> Source:
    """A release that becomes a model's folder, which has no run whose counters and arguments would be lost; its config says all."""
    notes = source.notes.copy()
    notes.through([Rule(Reason.NO_RUN, of=[Item(Kind.ARGUMENT), Item(Kind.SCHEDULER), Item(Kind.VALUE)])], source)
    return replace(source, state=replace(source.state, other={}, scheduler=None), notes=notes, origin={})


def _refuse_query_norm(source: Source, names: Iterable[str]) -> None:
    """Refuse what no architecture of Hugging Face's computes."""
    found = [name for name in names if name.endswith(_FULL_QUERY_NORM)]
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


def _with_left(state: TrainingState, left: Mapping[str, object]) -> TrainingState:
    known: dict[str, Any] = {key: left[key] for key in ("args", "scheduler", "grad_scaler") if key in left}
    return replace(state, other={**state.other, **_section(left, "other")}, **known)


def _section(left: Mapping[str, object], name: str) -> dict[str, object]:
    found = left.get(name)
    return dict(found) if isinstance(found, Mapping) else {}


def _state(source: Source, groups: tuple[ParamGroup, ...]) -> TrainingState:
    old = source.state
    other: dict[str, object] = {"skipped_steps": 0}
    samples = old.args.get("consumed_train_samples")
    if isinstance(samples, int):
        other["global_samples"] = samples
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
        grad_scaler=_scaler(source),
        other=other,
    )


def _stored_scaler(source: Source) -> Mapping[str, Any]:
    return source.state.grad_scaler if isinstance(source.state.grad_scaler, Mapping) else {}


def _scaler(source: Source) -> object | None:
    """DeepSpeed's loss scaler in the state of Megatron's: a run in fp16 must not go on with a scale of 1.

    Source: megatron-core 0.16.1, ``optimizer/grad_scaler.py``; DeepSpeed 0.19.8, ``runtime/fp16/loss_scaler.py``.
    """
    stored, at = _stored_scaler(source), source.state.iteration
    if not isinstance(source.state.grad_scaler, Mapping):
        return None
    constant = source.state.args.get("loss_scale")
    if "growth_tracker" not in stored:  # a constant scale has no state
        return static_scaler(float(constant)) if isinstance(constant, int | float) else None
    scale = float(stored["scale"])
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


@dataclass(frozen=True, slots=True)
class _InHuggingface:
    """What is asked about a source that is seen under Hugging Face's names."""

    source: Source
    family: MegatronState
    relation: Relation
    described: DescribedModel
    reference: Mapping[str, object] | None
    travelled: Mapping[str, object] | None
    unused: str
    shifts: Mapping[str, float]
    dealt: DealtGroups
    left: Mapping[str, object]
    places: CrossedPlaces
    state: TrainingState

    def kept_args(self) -> list[str]:
        """Arguments that nobody declares, and that wait in ``config.json``."""
        return list(plain(self.described.undeclared()))

    def lost_args(self) -> list[str]:
        """Those that no JSON can hold."""
        return [name for name in self.described.undeclared() if name not in self.kept_args()]

    def objects(self) -> Values | None:
        """Values that are no numbers and no texts."""
        other = self.source.state.other
        items = [item for item, _ in value_items(other) if item.name not in plain(other)]
        return {"names": [item.name for item in items], "of": items} if items else None

    def words_cut(self) -> Values | None:
        """Words of the run's own that the number goes without which the user gave."""
        stored, words, rows = (
            self.family.args.vocab_size,
            self.described.sizes.vocabulary,
            self.source.model.padded_vocab_size,
        )
        return (
            {"words": words, "last": stored - 1, "stored": stored}
            if stored and rows and words < stored <= rows
            else None
        )

    def padding_cut(self) -> Values | None:
        """Rows behind the last word; a loss of some is what counts of them all."""
        stored, words, rows = (
            self.family.args.vocab_size,
            self.described.sizes.vocabulary,
            self.source.model.padded_vocab_size,
        )
        first = words if stored is None or stored > (rows or 0) else max(words, stored)
        there = rows is not None and rows > words and first < rows
        of = {} if self.words_cut() else {"of": [ELEMENTS]}  # which the rule on these has then
        return {"first": first, "last": (rows or 0) - 1, **of} if there else None


def _rows(found: Sequence[ConfigDifference]) -> list[Values]:
    return [{"argument": one.argument, "said": one.said, "other": one.other} for one in found]


_RULES: tuple[Rule[_InHuggingface], ...] = (
    Rule(Fate.NOTE, f"{CONFIG}: the one that travelled with the checkpoint is not used, the run is another: {{found}}", lambda s: s.unused),
    SHIFTED.of_part(lambda s: s.shifts or None),
    *(rule.of_part(lambda s: (s.described.options.ignore_fields, s.source.state.args)) for rule in IGNORED),
    Rule(Fate.KEPT, f"arguments that nobody declares: {{found}}: in config.json, under {ORIGIN}",
         lambda s: s.kept_args() and listed(s.kept_args())),
    Rule(Fate.LOST, "arguments that nobody declares, and that no JSON can hold: {found}",
         lambda s: s.lost_args() and listed(s.lost_args())),
    Rule(Fate.CHANGED, "args: {argument} is {said!r}, and --reference-config makes it {other!r}, which counts",
         lambda s: s.reference and _rows([*differences(s.source.state.args, s.reference, s.described.known)])),
    Rule(Fate.DERIVED, "args: do not say {found}: taken as Megatron's own defaults",
         lambda s: s.reference is None and s.travelled is None and s.described.unsaid()),
    Rule(Fate.CHANGED, "args: {argument} is {said!r}, and was {other!r} in the config.json that travelled with it",
         lambda s: s.travelled and _rows(s.described.differences(s.travelled))),
    Rule(Fate.CHANGED, "names and shapes: Megatron's become those of {0.relation.architecture.class_name} ({old} → {new} tensors)",
         lambda s: {"old": len(s.relation.megatron), "new": len(s.relation.huggingface)}),
    Rule(Fate.LOST, "vocabulary rows {words}–{last}: words of the run, which has {stored} as its args say; cut, as the {words} words of "
         "--vocab-size or --reference-config ask", _InHuggingface.words_cut, [ELEMENTS]),
    Rule(Fate.CHANGED, "vocabulary rows {first}–{last} are Megatron's padding, and are cut", _InHuggingface.padding_cut),
    Rule(Fate.NOTE, "multi-token prediction: layer {0.described.sizes.layers} and further ones; transformers passes over them, and saves "
         "the model without", lambda s: s.described.sizes.mtp),
    Rule(Fate.LOST, NO_RNG, lambda s: not s.source.state.release and {"of": random_states(s.source)}),  # nobody trains on with a release's
    Rule(Reason.NO_RUN, of=[Item(Kind.RNG)]),
    Rule(Reason.OF_LAYOUT, of=[OF_RANKS[key] for key in PER_RANK_KEYS]),
    Rule(Fate.DERIVED, "as torch's optimizers keep it", of=[Item(Kind.GROUP), Item(Kind.OPTIMIZER), Item(Kind.SCALER)], told=False),
    Rule(Fate.LOST, "values that only Megatron understands: {names}", _InHuggingface.objects),
    NO_PARAMETERS.of_part(lambda s: s.family),
    Rule(Fate.LOST, "{doubt}", lambda s: [{"doubt": doubt} for doubt in doubts(s.source.state.args)]),
    *(rule.of_part(lambda s: s.dealt) for rule in OF_HUGGINGFACE),
    Rule(Fate.CHANGED, "parameters: rounded from their fp32 masters; the run itself computes with fewer bits of them",
         lambda s: not s.source.parity and MASTER in s.source.states),
    Rule(Fate.KEPT, "{found}: as the step had them before it became Megatron's", lambda s: s.source.origin and [*s.left], [WAITING]),
    Rule(Fate.CHANGED, f"what {WAITS} is of another step than this one, and is not used",
         lambda s: s.source.origin and not s.left, [WAITING]),
    Rule(Fate.KEPT, "consumed_train_samples {found[0]}: as global_samples",
         lambda s: [s.state.other["global_samples"]] if "global_samples" in s.state.other else [],
         [Item(Kind.ARGUMENT, "consumed_train_samples")]),
    Rule(Fate.DERIVED, "lr_scheduler: last_batch_iteration {last}, which is all that DeepSpeed's own schedulers keep; Megatron's own state "
         + WAITS, lambda s: s.source.state.scheduler is not None and {"last": s.source.state.iteration - 1}, [Item(Kind.SCHEDULER)]),
    Rule(Fate.DERIVED, "loss_scaler: dynamic, at Megatron's scale of {found[0]:g}",
         lambda s: "growth_tracker" in (scaler := _stored_scaler(s.source)) and [float(scaler["scale"])], [Item(Kind.SCALER)]),
    *(rule.of_part(lambda s: s.places) for rule in OF_PLACES),
)  # fmt: skip
"""What formats under a module's names have of it, or under other names."""
