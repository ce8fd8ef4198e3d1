"""A source under Hugging Face's names as Megatron's: names, shapes, arguments, groups, and a vocabulary that is padded."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from mcore_rlhf.core.catalog import ADAMS, EXP_AVG, EXP_AVG_SQ, Shape
from mcore_rlhf.core.chunks import new_rows
from mcore_rlhf.core.facts import Fate, Item, Kind, Reason, Rule, Values
from mcore_rlhf.errors import LayoutMismatch, Problems, Unsupported
from mcore_rlhf.families.fsdp.groups import counted_of_each
from mcore_rlhf.families.inventory import FROM_ZERO3, WAITING, inventory_of
from mcore_rlhf.families.megatron.arguments import DISTRIBUTED, PLAIN, Arguments
from mcore_rlhf.families.megatron.groups import Membership, by_sgd
from mcore_rlhf.families.megatron.schedule import MADE, made_at, new_scheduler
from mcore_rlhf.families.megatron.state import MegatronState
from mcore_rlhf.families.module import CONFIG, MOMENTUM, USE_MUON, ModuleState
from mcore_rlhf.families.options import WriteOptions
from mcore_rlhf.families.selection import renamed
from mcore_rlhf.families.sidecar import WAITS, FormerFamily, origin_of_module
from mcore_rlhf.families.source import ParamGroup, Source, TrainingState
from mcore_rlhf.layouts.parallel import ParallelConfig
from mcore_rlhf.layouts.tensor import padded_vocab_size
from mcore_rlhf.models.huggingface.config import architecture_of, doubts, sizes_of_config
from mcore_rlhf.models.huggingface.relation import Relation, from_huggingface
from mcore_rlhf.models.huggingface.rotary_fields import is_frequencies
from mcore_rlhf.models.huggingface.table import EXPERTS, MTP_MODEL_LAYER, TRANSFORMER_ENGINE, Architecture, Sizes
from mcore_rlhf.models.huggingface.texts import is_of_images, name_in_text
from mcore_rlhf.models.megatron import Traits, is_buffer, partition_of
from mcore_rlhf.models.spec import REPLICATED, ModelSpec, ParamSpec

from .description import (
    DIVISOR,
    EMBEDDING,
    LM_HEAD,
    VALUE_HEAD,
    arguments,
    config_to_arguments,
    description,
    undeclared_fields,
)
from .groups import OF_MEGATRON, DealtGroups, as_megatron
from .packing import repacked
from .rules import CARRIED_FIELDS, IGNORED, OF_PLACES, CrossedPlaces
from .shifting import SHIFTED, shifted
from .torch_muon import SIMPLE, is_of_torch, scale

_FULL_QUERY = "self_attention.linear_q_proj.weight"
"""The end of a name that only models of latent attention without ``q_lora_rank`` have."""

_COPIES = ("embed_tokens.weight", "shared_head.head.weight")
"""What release files repeat in a layer of multi-token prediction: the model's own embedding and output layer."""

_NEXT_LAYER = re.compile(r"mtp\.layers\.(\d{1,18})\.")
"""The beginning of a name in a layer of multi-token prediction."""

_ENGINE_VALUES = ("skipped_steps", "ds_version")
"""What DeepSpeed counts for itself."""
_IN_LAYER = re.compile(r"model\.layers\.(\d{1,18})\.(.*)")


def to_megatron(source: Source, options: WriteOptions) -> Source:
    """The source under Megatron's names, with the arguments that a run of such a model would have stored.

    Args:
        source: A source under Hugging Face's names.
        options: What the user asked for: ``reference_config``, ``transformer_impl``, ``rules``.

    Raises:
        CheckpointError: It is a model whose names are not known, or nothing describes it.
    """
    source = _text_alone(source)
    family = ModuleState.needed(source, MegatronState.names)
    _check(source, family)
    origin = FormerFamily.of(source)
    config = description(source, options)
    source = repacked(source, config, packs_experts=False)
    relation = related(source, config, options)
    shapes = relation.huggingface
    by = {name: number for name, _, number in relation.shifts}
    if by:
        source = shifted(source, by)
    tied = LM_HEAD not in shapes and VALUE_HEAD not in shapes
    if tied and config.get("tie_word_embeddings") is False:
        raise LayoutMismatch(
            f"{source.root}: has neither {LM_HEAD} nor {VALUE_HEAD}, but config.json says that the embedding is not tied"
        )
    described = arguments(source, origin, config, relation, options.ignore_fields, options.global_batch_size)
    args = Arguments({**described, **_optimizer_arguments(source)})
    model = _model(source, relation, args, tied)
    rows = {s.name: s.global_shape[0] for s in model.params if s.partition.vocabulary}
    catalog = source.catalog.recut(source.role, relation.of_megatron(), relation.megatron).rows(rows)
    dealt = as_megatron(source, relation, Membership(args, options.rules), options.lr_limits)
    places = config_to_arguments(family.config, relation.architecture, args.values, carried=_goes_along(source))
    seen = _InMegatron(source, family, relation, model, args.values, config, options, by, dealt, places)
    notes = source.notes.copy()
    notes.through(_RULES, seen)
    return replace(
        source, model=model, parallel=ParallelConfig(dp=source.parallel.world_size), catalog=catalog,
        state=_state(source, origin, args, dealt.groups, options.global_batch_size), notes=notes,
        optimizer=None if source.optimizer is None else DISTRIBUTED if EXP_AVG in source.states else PLAIN,
        family=MegatronState(located=None, args=args, shards=[], order=list(_with_extra_states(relation)), unknown=[]),
        moved={**places.moved, **_waiting(source)}, origin=origin_of_module(source, family),
    )  # fmt: skip


def _text_alone(source: Source) -> Source:
    """The source without its model of images, where it has one, and its text under the names of a model of text."""
    gone = [spec.name for spec in source.model.params if is_of_images(spec.name)]
    if not gone and all(name_in_text(spec.name) == spec.name for spec in source.model.params):
        return source
    source = renamed(source, lambda name: None if is_of_images(name) else name_in_text(name))
    source.notes.through([_WITHOUT_IMAGES], gone)
    return source


def _implementation(among: Sequence[Architecture], options: WriteOptions) -> str | None:
    """What spells the names: as asked for, or the only one with which Megatron builds the model."""
    only = among[0].implementation if len(among) == 1 else None
    if None not in (only, options.transformer_impl) and only != options.transformer_impl:
        raise Unsupported(
            f"--transformer-impl {options.transformer_impl}: Megatron builds {among[0].class_name} with {only} alone"
        )
    return options.transformer_impl or only


def _waiting(source: Source) -> dict[Item, Item]:
    """What of the run has no place in Megatron's files, and changes nothing there."""
    kinds = (Kind.VALUE, Kind.RNG, Kind.ARGUMENT, Kind.OPTIMIZER)
    placed = {WAITING, Item(Kind.VALUE, "iteration"), Item(Kind.VALUE, "global_samples")}
    return {item: WAITING for item in inventory_of(source) if item.kind in kinds and item not in placed}


def _of_muon(source: Source) -> list[ParamGroup]:
    return [group for group in source.state.groups if group.fields.get(USE_MUON) is True]


def _momentum(groups: Sequence[ParamGroup]) -> object:
    return groups[0].fields.get("momentum", 0.95)


def _optimizer_arguments(source: Source) -> dict[str, object]:
    """What a Megatron run has to be told that goes on with another optimizer than Adam or Lion: DeepSpeed's Muon, whose momentum is the
    same moving average in both, and in torch's; or torch's SGD, which a distributed optimizer does not take.

    Sources: deepspeed 0.19.8, ``runtime/zero/muon/original_muon.py`` (``muon_update``, ``_aspect_ratio_scale``); emerging_optimizers
    0.3.0, ``orthogonalized_optimizers/orthogonalized_optimizer.py`` (``step``), ``muon.py`` (``get_muon_scale_factor``);
    torch 2.13.0, ``optim/sgd.py``, ``optim/_muon.py``; megatron-core 0.19.2, ``optimizer/optimizer_config.py``, ``optimizer/__init__.py``
    (``_get_megatron_optimizer_based_on_param_groups``), ``optimizer/distrib_optimizer.py`` (``DistributedOptimizer.__init__``).
    """
    if muon := _of_muon(source):
        return {
            "optimizer": "muon", "use_distributed_optimizer": False, "use_layer_wise_distributed_optimizer": False,
            "muon_momentum": _momentum(muon), "muon_nesterov": bool(muon[0].fields.get("nesterov", True)), **scale(muon[0].fields),
            "muon_coefficient_type": "simple", "muon_num_ns_steps": muon[0].fields.get("ns_steps", 5),
        }  # fmt: skip
    groups = source.state.groups
    momentum = [group.fields.get("momentum") for group in groups if "dampening" in group.fields]
    if not momentum or len(momentum) < len(groups):
        return {}
    return {"optimizer": "sgd", "sgd_momentum": momentum[0], "use_distributed_optimizer": False}


def _goes_along(source: Source) -> bool:
    """Whether the model's description lies in a file of its own, which is carried."""
    return source.carried is not None and CONFIG in source.carried.files


def related(source: Source, config: Mapping[str, object], options: WriteOptions) -> Relation:
    """Relate the tensors of a source under Hugging Face's names to Megatron's.

    Args:
        source: It, with experts that are modules of their own.
        config: The model's description.
        options: What the user asked for.

    Raises:
        CheckpointError: See :func:`to_megatron`.
    """
    among = architecture_of(config)
    shapes, sizes = _with_next_layers(source.model.shapes, sizes_of_config(config))
    spelling = FormerFamily.of(source).spelling(_implementation(among, options))
    buffers = frozenset(ModuleState.needed(source, MegatronState.names).buffers)
    return from_huggingface(shapes, sizes, spelling, among, buffers)


def _with_next_layers(shapes: dict[str, Shape], sizes: Sizes) -> tuple[dict[str, Shape], Sizes]:
    """The layers of multi-token prediction that there really are, without the copies that release files have in them, which come last.

    A ``config.json`` counts them also where transformers has saved the model, which leaves them out.
    """
    found = {name: match for name in shapes if (match := _IN_LAYER.fullmatch(name))}
    further = {int(match.group(1)) for match in found.values() if int(match.group(1)) >= sizes.layers}
    copies = [name for name, match in found.items() if match.group(2) in _COPIES and int(match.group(1)) in further]
    kept = {name: shape for name, shape in shapes.items() if name not in copies}
    beside = {match.group(1) for name in shapes if (match := _NEXT_LAYER.match(name))}
    return kept, replace(sizes, mtp=len(beside) or (len(further) if sizes.mtp else 0))


def _with_extra_states(relation: Relation) -> Iterator[str]:
    """All keys of the state dict: linear modules have an ``_extra_state`` after their parameters, which is None here.

    A value head is no module of Megatron's, and has none. Source: megatron-core 0.16.1, ``tensor_parallel/layers.py``
    (``set_extra_state``).
    """
    modules = [name.rpartition(".")[0] for name in relation.megatron]
    names = ("linear_", "eh_proj", *([] if VALUE_HEAD in relation.huggingface else ["output_layer"]))
    for name, module, following in zip(relation.megatron, modules, [*modules[1:], ""], strict=True):
        yield name
        if module != following and module.rpartition(".")[2].startswith(names):
            yield f"{module}._extra_state"
    if "output_layer" not in modules:
        yield "output_layer._extra_state"


def _check(source: Source, family: ModuleState) -> None:
    if family.pipeline:
        raise Unsupported(f"{source.root}: a PipelineModule's names are its layers' numbers, not Hugging Face's")
    if source.model.get(EMBEDDING) is None:
        some = ", ".join(spec.name for spec in source.model.params[:3])
        raise Unsupported(
            f"{source.root}: from {source.format} to megatron needs Hugging Face's names, {EMBEDDING} and so on; found {some}, …"
        )
    kept = {alias: owner for alias, owner in family.shared.items() if (alias, owner) != (LM_HEAD, EMBEDDING)}
    if kept:
        raise Unsupported(f"{source.root}: shared parameters that Megatron has no name for: {kept}")


def _model(source: Source, relation: Relation, args: Arguments, tied: bool) -> ModelSpec:
    sizes = relation.sizes
    words = sizes.vocabulary
    rows = padded_vocab_size(words, args.integer("make_vocab_size_divisible_by", DIVISOR), 1)
    shares, problems, specs = relation.of_megatron(), Problems(), []
    engine = relation.spelling.implementation == TRANSFORMER_ENGINE
    traits = Traits(gated=args.gated, transformer_engine=engine, args=args.values)
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
        trainable = parts[0].trainable and not is_buffer(name)
        specs.append(ParamSpec(name, whole, parts[0].dtype, partition, trainable))
    problems.raise_if_any()
    return ModelSpec(
        tuple(specs), sizes.layers, tied, sizes.mtp, sizes.experts, vocab_size=words, padded_vocab_size=rows
    )


def _state(
    source: Source, origin: FormerFamily, args: Arguments, groups: tuple[ParamGroup, ...], batch: int | None
) -> TrainingState:
    old = source.state
    return TrainingState(
        iteration=old.iteration,
        release=old.release,
        args=dict(args.values),
        groups=groups,
        scheduler=(former := origin.scheduler(old.iteration)) or new_scheduler(source, batch),
        other={"checkpoint_version": 3.0, "iteration": old.iteration, **_counters(origin, old.iteration)},
        by_steps=former is not None and origin.by_steps,
    )


def _counters(origin: FormerFamily, iteration: int) -> dict[str, object]:
    same = origin.values.get("iteration") == iteration
    return {key: value for key, value in origin.other.items() if key != "iteration"} if same else {}


@dataclass(frozen=True, slots=True)
class _InMegatron:
    """What is asked about a source that is seen under Megatron's names."""

    source: Source
    family: ModuleState
    relation: Relation
    model: ModelSpec
    args: Mapping[str, object]
    config: Mapping[str, object]
    options: WriteOptions
    shifts: Mapping[str, float]
    dealt: DealtGroups
    places: CrossedPlaces

    def lacking(self) -> int:
        """Layers of multi-token prediction that config.json counts, where the files have no layer behind those of the model itself."""
        counted = sizes_of_config(self.config)
        found = (_IN_LAYER.fullmatch(name) for name in self.source.model.shapes)
        return 0 if any(int(match.group(1)) >= counted.layers for match in found if match) else counted.mtp

    def copies(self) -> list[str]:
        """What release files have twice."""
        related = self.relation.huggingface
        return [name for name in self.source.model.shapes if name.endswith(_COPIES) and name not in related]

    def padding(self) -> str:
        """The rows of words that are new."""
        words, rows = self.model.vocab_size or 0, self.model.padded_vocab_size or 0
        return new_rows(words, rows) if rows > words else ""

    def frequencies(self) -> list[str]:
        """Buffers of rotary frequencies."""
        return [name for name in self.family.buffers if is_frequencies(name)]

    def without_place(self) -> list[str]:
        """Buffers that Megatron does not have."""
        there = (*self.relation.huggingface, *self.frequencies())
        return [name for name in self.family.buffers if name not in there]

    def made(self) -> Mapping[str, object] | None:
        """Where a scheduler that is made stands."""
        return made_at(self.source, self.options.global_batch_size)

    def client_state(self) -> list[str]:
        """Values for which Megatron has no place."""
        placed = {"global_samples", *_ENGINE_VALUES}
        return sorted(key for key, value in self.source.state.other.items() if key not in placed and value is not None)

    def strange_states(self) -> Values | None:
        """States of an optimizer that Megatron does not have, which has Adam, Lion, SGD and Muon; and what it makes of the others.

        Source: megatron-core 0.19.2, ``optimizer/distrib_optimizer.py`` (``load_parameter_state_from_dp_zero``, ``sharded_state_dict``),
        which wants both moments.
        """
        found = [state for state in self.source.states if state not in (*ADAMS, MOMENTUM)]
        goes_on = {EXP_AVG, EXP_AVG_SQ} <= {*self.source.states}
        then = (
            "It goes on as Adam" if goes_on else "It stops where it loads them: start a new optimizer (--no-load-optim)"
        )
        return {"states": ", ".join(found), "then": then} if found else None

    def muon(self) -> Values | None:
        """What DeepSpeed's or torch's Muon trains, and how Megatron is told of it."""
        groups = _of_muon(self.source)
        if not groups:
            return None
        spelled = {key: value for key, value in _optimizer_arguments(self.source).items() if key.startswith("muon")}
        given = " ".join(
            f"--{key.replace('_', '-')}{'' if value is True else f' {value}'}"
            for key, value in spelled.items()
            if value is not False
        )
        whose = "torch" if is_of_torch(groups[0]) else "DeepSpeed"
        return {"count": sum(len(g.params) for g in groups), "given": given, "whose": whose}

    def coefficients(self) -> list[object]:
        """Coefficients of Newton and Schulz's steps that Megatron's choices have not."""
        found = [group.fields.get("ns_coefficients") for group in _of_muon(self.source)]
        return [list(one) for one in found if isinstance(one, list | tuple) and tuple(one) != SIMPLE]

    def rates(self) -> list[object]:
        """Learning rates, where Muon's groups and others have not all the same."""
        found = {group.fields.get("lr") for group in self.source.state.groups if _of_muon(self.source)}
        return list(found) if len(found) > 1 else []


def _tensors(key: str, names: Sequence[str]) -> Values | None:
    return {key: names, "count": len(names), "of": [Item(Kind.TENSOR, name) for name in names]} if names else None


_WITHOUT_IMAGES: Rule[Sequence[str]] = Rule(
    Fate.LOST, "the model of images, {count} tensors such as {names:1}: left out, since Megatron's GPT is the text alone",
    lambda gone: _tensors("names", gone),
)  # fmt: skip
_RULES: tuple[Rule[_InMegatron], ...] = (
    Rule(Fate.NOTE, "SGD: Megatron trains it with --optimizer sgd --sgd-momentum {0.args[sgd_momentum]}, without a distributed optimizer",
         lambda s: by_sgd(s.args) and s.source.optimizer is not None),
    Rule(Fate.NOTE, "config.json counts {found} layers of multi-token prediction; there are none in the files", _InMegatron.lacking),
    Rule(Fate.NOTE, "copies of the embedding and the output layer are taken as such, and left out: {found}", _InMegatron.copies),
    Rule(Fate.DERIVED, "a copy of another one", lambda s: _tensors("copies", s.copies()), told=False),
    SHIFTED.of_part(lambda s: s.shifts or None),
    Rule(Fate.CHANGED, "{whose}'s Muon of {count} matrices becomes Megatron's (0.18 and later): " + MOMENTUM + " is the same in both, "
         "and how updates are made of it is the run's affair. --optimizer muon {given} comes nearest: Megatron "
         "orthogonalizes gate and up as one matrix", _InMegatron.muon),
    Rule(Fate.LOST, "ns_coefficients {found} of Muon: Megatron has its own sets of them alone (--muon-coefficient-type)",
         _InMegatron.coefficients),
    Rule(Fate.CHANGED, "learning rates {found} of Muon's and Adam's groups: Megatron's scheduler gives both that of --lr",
         _InMegatron.rates),
    Rule(Fate.CHANGED, "names and shapes: those of {0.relation.architecture.class_name} become Megatron's ({old} → {new} tensors), spelled "
         "as with --transformer-impl {0.relation.spelling.implementation}",
         lambda s: {"old": len(s.relation.huggingface), "new": len(s.relation.megatron)}),
    Rule(Fate.CHANGED, "{found}", _InMegatron.padding),
    Rule(Fate.NOTE, "queries without q_lora_rank: for megatron-core 0.16 to 0.18. 0.19 has a norm before linear_q_proj, with which it "
         "computes something else than this model; it does not load these files",
         lambda s: any(name.endswith(_FULL_QUERY) for name in s.relation.megatron)),
    Rule(Fate.NOTE, f"multi-token prediction: its layer is called {MTP_MODEL_LAYER}, as since megatron-core 0.17; for 0.16 use --to "
         "megatron-dist, whose keys are the same for all",
         lambda s: s.model.mtp_layers and s.relation.spelling.mtp == MTP_MODEL_LAYER),
    Rule(Fate.DERIVED, FROM_ZERO3, lambda s: s.source.optimizer == "zero3"),
    Rule(Fate.DERIVED, "args: those that describe the model; all others are the new run's"),
    Rule(Fate.DERIVED, "as Megatron's optimizers keep it", of=[Item(Kind.GROUP)], told=False),
    Rule(Fate.DERIVED, "as Megatron stores it",
         of=[WAITING, Item(Kind.VALUE, "global_samples"), Item(Kind.SCHEDULER), Item(Kind.MODEL)], told=False),
    Rule(Reason.OF_ENGINE, of=[Item(Kind.ARGUMENT), Item(Kind.OPTIMIZER), Item(Kind.SCALER)]),
    Rule(Reason.OF_LAYOUT, of=[Item(Kind.MODEL, "keys")]),
    Rule(Fate.DERIVED, "rotary frequencies, {count} tensors such as {names:1}: computed from the arguments, as transformers does",
         lambda s: _tensors("names", s.frequencies())),
    Rule(Fate.LOST, "buffers that Megatron does not have: {names:3}", lambda s: _tensors("names", s.without_place())),
    Rule(Fate.DERIVED, "experts: spelled as Megatron's {found}", lambda s: s.model.num_experts and EXPERTS[s.relation.spelling.experts]),
    Rule(Fate.DERIVED, "there is none",
         lambda s: {"of": [Item(Kind.VALUE, key) for key, value in s.source.state.other.items() if value is None]}, told=False),
    Rule(Fate.KEPT, "client state, for which Megatron has no place: {keys}: " + WAITS,
         lambda s: (keys := s.client_state()) and {"keys": keys, "of": [Item(of, key) for key in keys for of in (Kind.VALUE, Kind.RNG)]}),
    Rule(Fate.LOST, "loss_scaler: Megatron's and DeepSpeed's count differently; the run starts with its own",
         lambda s: getattr(s.source.state.grad_scaler, "dynamic", False), [Item(Kind.SCALER)]),
    *(rule.of_part(lambda s: (s.options.ignore_fields, s.config)) for rule in IGNORED),
    CARRIED_FIELDS.of_part(lambda s: undeclared_fields(s.config, s.relation.architecture, s.options.ignore_fields)),
    Rule(Fate.LOST, "{doubt}", lambda s: [{"doubt": doubt} for doubt in doubts(s.args)]),
    *(rule.of_part(lambda s: s.dealt) for rule in OF_MEGATRON),
    Rule(Fate.LOST, "{states}: no optimizer of Megatron's keeps such states, and none goes on with them; they lie in its files, for the "
         "way back. {then}", lambda s: s.strange_states()),
    Rule(Fate.LOST, "{names}: numbers that the optimizer keeps of each parameter, for which Megatron's groups have no place",
         lambda s: counted_of_each(s.source)),
    Rule(Fate.LOST, f"lr_scheduler: is not like Megatron's; {MADE}", lambda s: s.made() if s.source.state.scheduler else None,
         [Item(Kind.SCHEDULER)]),
    Rule(Fate.NOTE, f"lr_scheduler: there is none; {MADE}", lambda s: s.made() if not s.source.state.scheduler else None),
    *(rule.of_part(lambda s: s.places) for rule in OF_PLACES),
)  # fmt: skip
"""What a run of Megatron's has of its own, or under other names."""
