"""Describing a new checkpoint of transformers' Trainer, or accelerate's: the weights' own format says how these lie, and beside them come
the optimizer in numbers, the schedule, the counters and random states.

Both load the optimizer by position: its groups are dealt as the trainer that goes on deals them, by name, and have every field that
torch's optimizers ask for. What the files have no place for waits in :mod:`mcore_rlhf.families.sidecar`.
Source: transformers 5.23.0, ``trainer.py`` (``create_optimizer``, ``get_decay_parameter_names``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from mcore_rlhf.core.account import Report
from mcore_rlhf.core.catalog import MASTER, PARAM, TensorName
from mcore_rlhf.core.chunks import Chunks
from mcore_rlhf.core.facts import Fate, Inventory, Item, Kind, Rule
from mcore_rlhf.core.shares import FROM_MASTERS
from mcore_rlhf.errors import Unsupported, UsageError
from mcore_rlhf.families.crossing.description import known_description
from mcore_rlhf.families.crossing.packing import repacked
from mcore_rlhf.families.crossing.schedule import in_ticks, with_fitting_schedule
from mcore_rlhf.families.fsdp.dealing import OF_MEGATRON, dealt
from mcore_rlhf.families.fsdp.groups import STEP, check_groups, own_scalars
from mcore_rlhf.families.fsdp.state import MADE, is_of_one, scheduler_state
from mcore_rlhf.families.inventory import inventory_of
from mcore_rlhf.families.lora.names import BASE_LAYER, OF_ADAPTER, PREFIX, in_memory, of_file
from mcore_rlhf.families.lora.parts import CARRIED, adapter_alone
from mcore_rlhf.families.module import CONFIG, ModuleState, described, loose_values
from mcore_rlhf.families.options import ReadOptions, WriteOptions
from mcore_rlhf.families.selection import renamed
from mcore_rlhf.families.sidecar import UNHELD, Sidecar
from mcore_rlhf.families.source import ParamGroup, Source, TrainingState, scheduled_groups
from mcore_rlhf.families.trainer_counters import COUNTED, NewCounters
from mcore_rlhf.families.trainer_files import FSDP_WHOLE, RunFiles, new_states, of_ranks, place_of_model, rng_item
from mcore_rlhf.formats.base import FileLayout, Format, PtLayout, Target, TargetFile
from mcore_rlhf.layouts.parallel import ParallelConfig
from mcore_rlhf.models.spec import OF_WRAPPER
from mcore_rlhf.storage.paths import ReadablePath
from mcore_rlhf.storage.pt import read_pt

from .files import ALIKE, HEAD_FILES, SCALER, HfRunState, OneModel
from .like import PICKLED, Like, is_sharded
from .optimizer import GROUPS, PARAMS, STATE, trainable_order


def run_target(source: Source, options: WriteOptions, one: OneModel, like_it: OneModel) -> Target:
    """Describe the checkpoint that holds what a source under a module's own names has.

    Args:
        source: An opened checkpoint, of a model, of an adapter, or of both.
        options: What the user asked for.
        one: Which of several models it becomes.
        like_it: Which one of the step that ``--like`` names shows how it is.

    Raises:
        CheckpointError: It cannot be done; all problems together.
    """
    files, weights = one.files, one.weights
    if not files.counters:
        options = _in_one_file(options)
    module = ModuleState.needed(source, files.format)
    adapted = any(OF_ADAPTER.fullmatch(spec.name) for spec in source.model.params)
    prepared = adapted and not files.counters and any(f".{BASE_LAYER}." in spec.name for spec in source.model.params)
    adapted = adapted and not prepared
    given = None if options.like is None else Path(options.like).expanduser()
    sharded = _is_sharded(source, module, options)
    whole = not sharded and _is_whole(source, given)
    if adapted and HfRunState.of(source) is None and not sharded:
        alone = adapter_alone(source, options.reference_config)
        source = renamed(alone, lambda name: plain if (plain := name.removeprefix(PREFIX)) in OF_WRAPPER else name)
        module = ModuleState.needed(source, files.format)
    config = {} if adapted else known_description(source, options)
    shown = None if given is None else _shown(given, like_it.weights[0])
    spelled = (module if shown is None else ModuleState.needed(shown)).spelled
    packed = not files.counters and (shown is None or repacked(shown, config, packs_experts=False) is not shown)
    optimizer = source.optimizer is not None and not options.no_optimizer
    if optimizer:
        check_groups(source)
    if (sharded or whole) and one.number:
        raise Unsupported(f"{source.root}: accelerate has one model in a run on FSDP\n--role takes one of them.")
    if whole:
        one = replace(one, files=files.of_fsdp, weights=(weights[3], *weights[1:]))
        files, weights = one.files, one.weights
    if sharded:
        if adapted and files.counters:
            source = _in_two_groups(source)
        base = weights[2].target(_sharded(source, module), options)
        if config:
            base.texts[CONFIG] = json.dumps(config, indent=2) + "\n"
    else:
        head = _head_apart(source, given, adapted)
        held = _without(source, head)
        base = (
            _as_prepared(held, config, spelled, options, weights[0])
            if prepared or spelled
            else _alone(held, config, options, weights[adapted], packed=packed)
        )
        base = _with_head(base, head)
        if whole and adapted:  # which that run loads from its own file
            loaded = _as_prepared(source, {}, _names_in(given or source.root, source), options, weights[0])
            base = replace(base, files=(*base.files, *loaded.files), source=base.source.joined(loaded.source))
    asked = optimizer or options.like is not None
    every = trainable_order(config, source.model, module.buffers) if asked else []
    still = _still(source, module)
    order = [name for name in every if name not in still]
    like = Like.read(given, like_it.files, (order, every), source.model.shapes, module.shared)
    return _RunTarget(source, module, options, one, base, order, like, optimizer, sharded, whole).target()


def _head_apart(source: Source, like: Path | None, adapted: bool) -> Chunks:
    """A value head that goes to a file of its own: beside an adapter, whose file has no place for it, and where such a run shows it."""
    at = source.root if like is None and HfRunState.of(source) is not None else like
    apart = adapted or (at is not None and any((at / name).is_file() for name in HEAD_FILES))
    names = {name: name for name in OF_WRAPPER if apart and source.model.get(name) is not None}
    whole = {PARAM: FROM_MASTERS[PARAM]}
    return source.catalog.states(whole).renamed(source.role, names)


def _without(source: Source, head: Chunks) -> Source:
    """A source whose model has no such parameters."""
    apart = {name.param for name in head}
    return replace(source, model=source.model.having(spec for spec in source.model.params if spec.name not in apart))


def _with_head(base: Target, head: Chunks) -> Target:
    """A target that has the head in a file of its own, which LLaMA-Factory loads; it writes the other, of the same tensors."""

    def layout() -> FileLayout:
        file = PtLayout(HEAD_FILES[-1])
        names = dict.fromkeys(TensorName(name.role, name.param) for name in head)
        own = [one for name in names if (one := head.get(name)) is not None]
        return file.layout({one.name.param: file.add(one.name, one.global_shape, one.dtype) for one in own})

    more = (TargetFile(HEAD_FILES[-1], layout),) if len(head) else ()
    return replace(base, files=(*base.files, *more), source=base.source.joined(head))


def _in_one_file(options: WriteOptions) -> WriteOptions:
    """The options as accelerate's ``load_state`` wants them, which looks for one file of weights and no index.

    Source: accelerate 1.15.0, ``checkpointing.py`` (``load_accelerator_state``).

    Raises:
        UsageError: Several are asked for.
    """
    if options.max_shard_size is not None:
        raise UsageError(
            "--max-shard-size: accelerate's load_state looks for model.safetensors alone, and for no index of several files\nLeave it out."
        )
    return replace(options, max_shard_size=_ENDLESS)


_ENDLESS = 1 << 62
_EXPERTS: Rule[Source] = Rule(
    Fate.NOTE,
    "experts are one by one in model.safetensors, as transformers saves them; its Trainer passes over them when it resumes (5.23.0): make "
    "the model with from_pretrained of this folder, then resume from it",
)


def _still(source: Source, module: ModuleState) -> set[str]:
    """What no optimizer has."""
    return {*module.buffers, *(spec.name for spec in source.model.params if not spec.trainable)}


def _alone(
    source: Source, config: Mapping[str, object], options: WriteOptions, weights: Format, *, packed: bool = False
) -> Target:
    """The weights without an optimizer, with experts one by one, as transformers saves them, or packed, as its modules have them."""
    module = ModuleState.needed(source)
    state = TrainingState(0, other={key: value for key, value in source.state.other.items() if key == CARRIED})
    masters = tuple(state for state in source.states if state == MASTER)
    alone = replace(
        source, optimizer=None, states=masters, state=state, origin={}, family=replace(module.base(), rng=())
    )
    if config and not (packed and module.packs_experts):
        alone = repacked(described(alone, lambda: config), config, packs_experts=packed)
    trained = source.optimizer is not None and not options.no_optimizer
    wanted = replace(options, masters=trained and bool(masters), no_optimizer=True, with_optimizer=False)
    target = weights.target(alone, wanted)
    if trained and config and not packed and alone.model.params != source.model.params:
        target.report.through([_EXPERTS], source)
    return target


def _as_prepared(
    source: Source, config: Mapping[str, object], spelled: Mapping[str, str], options: WriteOptions, weights: Format
) -> Target:
    """The weights under the names of the module that a script prepared: compiled, or with an adapter in it; no class has them all."""
    plain = replace(source, family=replace(ModuleState.needed(source).base(), config={}, shared={}))
    named = renamed(plain, lambda name: spelled.get(name, name)) if spelled else plain
    base = _alone(named, {}, replace(options, reference_config=None, tokenizer=None), weights)
    if not config:
        return base
    base.texts[CONFIG] = json.dumps(config, indent=2) + "\n"
    return replace(base, holds={**base.holds, **{Item(Kind.CONFIG, key): value for key, value in config.items()}})


def _shown(like: Path, weights: Format) -> Source | None:
    """The weights of a step of the run's own, by which it is seen what its module calls them; None where it has none of a whole model."""
    return weights.read(like, ReadOptions(optimizer=False)) if weights.detect(like) else None


def _is_sharded(source: Source, module: ModuleState, options: WriteOptions) -> bool:
    """Whether the run that goes on is FSDP's, which loads the two folders that accelerate makes."""
    if options.like is not None:
        return is_sharded(Path(options.like).expanduser())
    own = HfRunState.of(source)
    return own.within is not None if own is not None else bool(module.laid_out.get("apart"))


def _is_whole(source: Source, like: Path | None) -> bool:
    """Whether the run that goes on is FSDP's, and loads :data:`FSDP_WHOLE`."""
    own = HfRunState.of(source)
    return (like / FSDP_WHOLE).is_file() if like is not None else own is not None and own.whole


def _names_in(shown: ReadablePath, source: Source) -> dict[str, str]:
    """What an adapter's tensors are called in :data:`FSDP_WHOLE`: as in peft's file by the first FSDP, and as in the model by the second.

    Source: accelerate 1.15.0, ``utils/fsdp_utils.py`` (``_get_model_state_dict`` with ``adapter_only``), as transformers calls it.
    """
    there = read_pt(shown, FSDP_WHOLE).tree
    if not isinstance(there, Mapping) or not any(of_file(str(name)) for name in there):
        return {}
    return {spec.name: own.file for spec in source.model.params if (own := in_memory(spec.name)) is not None}


def _in_two_groups(source: Source) -> Source:
    """A source whose one group is the Trainer's first: the second, of biases and norms, trains nothing of an adapter, and is asked for."""
    groups = source.state.groups
    if len(groups) != 1:
        return source
    still = {key: value for key, value in groups[0].fields.items() if key not in groups[0].scalars}
    second = ParamGroup({**still, "weight_decay": 0.0}, params=())
    return replace(source, state=replace(source.state, groups=(*groups, second)))


def _sharded(source: Source, module: ModuleState) -> Source:
    """Model and optimizer alone: schedule and counters have files of their own."""
    own = HfRunState.of(source)
    family = own.within if own is not None and own.within is not None else module.base()
    state = TrainingState(source.state.iteration, groups=source.state.groups)
    return replace(source, state=state, origin={}, family=family)


@dataclass
class _RunTarget:
    source: Source
    module: ModuleState
    options: WriteOptions
    one: OneModel
    base: Target
    order: list[str]
    like: Like
    optimizer: bool
    sharded: bool = False
    whole: bool = False
    small: list[TargetFile] = field(default_factory=list)

    def target(self) -> Target:
        report = self.base.report
        source = replace(self.source, state=replace(self.source.state, groups=self._dealt(report)))
        if self.optimizer:
            self._put(self.files.scheduler, self._schedule(source, report))
        rng, place = self._random_states(), place_of_model(self.one.number)
        if not place:  # of one process, however many models it has
            for rank, states in enumerate(rng):
                self._put(self.files.rng_name(rank, len(rng)), self.files.spelled(states))
            self._put_scaler()
        texts, lost = self._sidecar().texts(place)
        report.through((*_RULES, *(rule.of_part(lambda _: lost) for rule in UNHELD)), self)
        texts |= self._counters(report)
        numbered = self.optimizer and not self.sharded
        parts = [TargetFile(self.files.optimizer, partial(self._layout, source.state.groups))] if numbered else []
        moments = self.source.catalog.of_states(self.source.states)
        return replace(
            self.base,
            format=self.files.format,
            parallel=ParallelConfig(dp=max(1, self.ranks if place else len(rng))),
            source=self.base.source if self.sharded else self.base.source.joined(moments),
            files=(*self.base.files, *parts, *self.small),
            texts={**{place + name: text for name, text in self.base.texts.items()}, **texts},
            holds=self._holds(rng),
            carried=self._beside(texts, place),
            alike=ALIKE,
        )

    @property
    def files(self) -> RunFiles:
        """What its files are called."""
        return self.one.files

    @property
    def second(self) -> bool:
        """Whether it is a further model of a step that others were of another one, whose random states a process cannot have, too."""
        own = HfRunState.of(self.source)
        return bool(self.one.number) and not (own is not None and own.together)

    def _put(self, file: str, tree: object) -> None:
        self.small.append(TargetFile(file, partial(FileLayout.of_tree, tree)))

    def _dealt(self, report: Report) -> tuple[ParamGroup, ...]:
        if not self.optimizer or self.sharded:
            return self.source.state.groups
        own = HfRunState.of(self.source)
        return dealt(self.source, self.order, self.like.groups, report, () if own is None else own.groups)

    def _layout(self, groups: Sequence[ParamGroup]) -> FileLayout:
        """The optimizer's file: states by number, in the order of the groups, or by name."""
        listed = [name for group in groups for name in group.params]
        numbers: dict[str, int | str] = {name: name if self.whole else number for number, name in enumerate(listed)}
        file = PtLayout(self.files.optimizer)
        states: dict[int | str, dict[str, object]] = {}
        scalars = self._scalars()
        for name, number in numbers.items():
            held: dict[str, object] = {}
            for state in (state for state in self.source.states if state != MASTER):
                entry = self.source.catalog.get(TensorName(self.source.role, name, state))
                if entry is not None:
                    held[state] = file.add(entry.name, entry.global_shape, entry.dtype)
            if held:
                states[number] = {**scalars.get(name, {}), **held}
        tree = {STATE: states, GROUPS: [_as_stored(group, numbers) for group in groups]}
        return file.layout(tree)

    def _scalars(self) -> Mapping[str, Mapping[str, object]]:
        own = HfRunState.of(self.source)
        if own is not None and own.scalars:
            return own.scalars
        return {name: own_scalars(group) for group in self.source.state.groups for name in group.params}

    def _schedule(self, source: Source, report: Report) -> dict[str, object]:
        """The run's own, where it is torch's; one that has made as many steps otherwise, from the learning rates of ``--like``."""
        own, groups = HfRunState.of(self.source), len(source.state.groups)
        if own is not None and scheduled_groups(own.schedule) == groups:
            return in_ticks(own.schedule, source.state.iteration, self.like.epochs_of_schedule(), report)
        if scheduled_groups(source.state.scheduler) not in (None, 0, groups):
            fitting = with_fitting_schedule(source)
            report.lines += [line for line in fitting.notes.lines if line not in report.lines]
            source = replace(source, state=fitting.state)
        report.through([MADE], source)
        known = is_of_one(source.state.scheduler)
        made = in_ticks(
            scheduler_state(source),
            source.state.iteration,
            self.like.epochs_of_schedule(),
            report if known else Report(),
        )
        return (
            made if known else {**{key: value for key, value in self.like.scheduler.items() if key not in made}, **made}
        )

    @property
    def kept_rng(self) -> list[Mapping[str, object]]:
        """The source's random states of such a run, by rank."""
        return [*self.module.rng]

    @property
    def ranks(self) -> int:
        """Ranks that are to have some."""
        return (
            self.options.dp or self.like.ranks or len(self.kept_rng) or (self.base.parallel.dp if self.sharded else 1)
        )

    @property
    def rng(self) -> str:
        """What becomes of them: ``keep``, ``derive`` or ``drop``."""
        fits = len(self.kept_rng) == self.ranks
        wanted = self.options.rng or ("keep" if fits else "derive")
        alone = not self.optimizer and self.files.counters  # accelerate's steps have them always, and are known by them
        return "drop" if wanted == "drop" or alone or self.second else "keep" if wanted == "keep" and fits else "derive"

    def _random_states(self) -> list[Mapping[str, object]]:
        at, ranks = self.source.state.iteration, self.ranks
        if self.rng != "derive":
            return self.kept_rng if self.rng == "keep" else []
        return [*new_states(at, ranks)]

    def _put_scaler(self) -> None:
        """Torch's loss scaler, where the run's adapts itself."""
        scaler = self.source.state.grad_scaler
        values: dict[str, Any] = loose_values(scaler)
        if self.optimizer and scaler is not None and values.get("dynamic_loss_scale"):
            growth, passed = (
                float(values["scale_factor"]) or 2.0,
                int(values["cur_iter"]) - int(values["last_overflow_iter"]),
            )
            made = {"scale": float(values["cur_scale"]), "growth_factor": growth, "backoff_factor": 1 / growth}
            self._put(SCALER, {**made, "growth_interval": values["scale_window"], "_growth_tracker": max(0, passed)})

    def _counters(self, report: Report) -> dict[str, str | bytes]:
        """The Trainer's counters, where it has a file for them."""
        if not self.files.counters:
            return {}
        found = NewCounters(self.source, self.files, self.like.counters)
        report.through(COUNTED, found)
        return {self.files.counters: found.text()}

    def _sidecar(self) -> Sidecar:
        """Everything that the files have no place for; weights are the fp32 masters where there are any."""
        state, specs = self.source.state, self.source.model.params
        module = replace(self.module.base(), config={})
        dtypes = {spec.name: spec.dtype for spec in specs} if self.optimizer else {}
        return Sidecar.of(state, module, specs, self.source.origin, dtypes=dtypes)

    def _holds(self, rng: Sequence[Mapping[str, object]]) -> Inventory:
        """Everything that is carried; of ranks' random states those that were kept. A run's own are client state, and lie beside."""
        ranks = {rng_item(rank) for rank in range(len(self.kept_rng))}
        held = {i: v for i, v in inventory_of(self.source).items() if i.kind is not Kind.CONFIG and i not in ranks}
        there = inventory_of(self.source) if self.sharded else self.base.holds
        described = {item: value for item, value in there.items() if item.kind is Kind.CONFIG}
        return {**held, **described, **{rng_item(rank): states for rank, states in enumerate(rng)}}

    def _beside(self, texts: Mapping[str, object], place: str) -> dict[str, Any]:
        """What goes along: as the weights' format has it, without what is written anew."""
        written = {*texts, self.files.optimizer, *(file.path for file in self.small)}
        return {place + name: path for name, path in self.base.carried.items() if place + name not in written}


def _as_stored(group: ParamGroup, numbers: Mapping[str, int | str]) -> dict[str, object]:
    fields = {key: value for key, value in group.fields.items() if key not in (*group.scalars, STEP, *OF_MEGATRON)}
    return {**fields, PARAMS: [numbers[name] for name in group.params]}


def _of_each(target: _RunTarget) -> list[Item]:
    """The source's random states, rank by rank."""
    return [rng_item(rank) for rank in range(len(target.kept_rng))]


_NEW_STATES = "rng: new states for {found}, from iteration {0.source.state.iteration}"
_RULES: tuple[Rule[_RunTarget], ...] = (
    Rule(Fate.LOST, "rng: left out", lambda t: t.rng == "drop" and not t.second and t.kept_rng, [Item(Kind.RNG)]),
    Rule(Fate.LOST, "rng: a process has one state of each generator, and gets that of the first model", lambda t: t.second and t.kept_rng,
         [Item(Kind.RNG)]),
    Rule(Fate.DERIVED, _NEW_STATES, lambda t: t.rng == "derive" and of_ranks(t.ranks)),  # there are new ones, whatever became of the old
    Rule(Fate.DERIVED, _NEW_STATES, lambda t: t.rng == "derive" and of_ranks(t.ranks), [Item(Kind.RNG)], told=False),
    Rule(Fate.DERIVED, _NEW_STATES, lambda t: t.rng == "derive" and {"found": of_ranks(t.ranks), "of": _of_each(t)}, told=False),
    Rule(Fate.KEPT, "", lambda t: t.rng == "keep" and {"of": _of_each(t)}, told=False),
    Rule(Fate.NOTE, "model_{0.one.number}.safetensors: load_state counts models, optimizers and schedules from 0, in the order in which "
         "the script prepares them; --like STEP takes that of a run", lambda t: t.one.number),
    Rule(Fate.NOTE, "the source's run is under DeepSpeed, and one without it loads what is written; --to accelerate, or transformers, with "
         "--zero-stage N or --like STEP writes a step of such a run", lambda t: t.module.beside is not None),
    Rule(Fate.NOTE, f"weights: in safetensors, where --like has {PICKLED}: the run goes on with save_safetensors=True",
         lambda t: t.like.pickled and t.files.counters),
)  # fmt: skip
"""What becomes of random states, and what the run is to be told."""
