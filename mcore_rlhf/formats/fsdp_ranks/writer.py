"""Describing rank files: what lies in the files of each rank, and what the run that loads them must be like."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

from mcore_rlhf.core.account import Report
from mcore_rlhf.core.catalog import (
    FLOAT32,
    FLOATING,
    MASTER,
    PARAM,
    Box,
    DType,
    TensorEntry,
    TensorName,
    dtype_of,
)
from mcore_rlhf.core.chunks import Chunks
from mcore_rlhf.core.facts import Fate, Inventory, Item, Kind, Rule
from mcore_rlhf.core.shares import EITHER, FROM_MASTERS
from mcore_rlhf.errors import Incomplete, Problems, Unsupported, UsageError
from mcore_rlhf.families.fsdp.groups import PARAMS, check_groups, completed, own_scalars
from mcore_rlhf.families.fsdp.masters import OF_MASTERS, Trained
from mcore_rlhf.families.fsdp.order import Unit, ordered, units_of
from mcore_rlhf.families.fsdp.state import RNG, SCHEDULER
from mcore_rlhf.families.inventory import LEAVES_OUT, inventory_of
from mcore_rlhf.families.module import ModuleState
from mcore_rlhf.families.options import WriteOptions
from mcore_rlhf.families.sidecar import UNHELD, Sidecar
from mcore_rlhf.families.source import ParamGroup, Source
from mcore_rlhf.formats.base import FileLayout, PtLayout, Target, TargetFile
from mcore_rlhf.layouts.fsdp import part
from mcore_rlhf.layouts.parallel import ParallelConfig
from mcore_rlhf.models.meaning.bounds import MOST_RANKS
from mcore_rlhf.models.spec import ParamSpec
from mcore_rlhf.storage.dcp.sharded import dtensor

from . import rank_items
from .adapter import is_alone, texts_of
from .by_name import flat
from .files import CONFIG, EXTRA, MODEL, OPTIMIZER, VERSION, WORLD, file_of
from .groups import as_run_has, scheduler_of
from .manner import CLIENT, OF_RANK, SCORE, STRATEGY, TAG, VALUE_HEAD, Manner, dealt_to, like
from .pieces import flattened, own_piece, units_aligned
from .state import RanksState, Rng, keeps_states, states_of_ranks


def ranks_target(source: Source, options: WriteOptions) -> Target:
    """Describe the rank files that hold what a source of module names has.

    Args:
        source: Of any format under a module's names.
        options: What the user asked for.

    Raises:
        CheckpointError: It cannot be done; all problems together.
    """
    report = source.notes.for_target()
    module, own = ModuleState.needed(source, "fsdp-ranks"), RanksState.of(source)
    manner, shown_by = _manner(source, own, options)
    world = options.dp or manner.world or source.parallel.dp
    if world > MOST_RANKS:
        raise UsageError(f"--dp {world}: no run has more than {MOST_RANKS:,} ranks")
    manner = dealt_to(manner, world, options.like)
    optimizer = source.optimizer is not None and not options.no_optimizer
    if optimizer:
        check_groups(source)
    groups = as_run_has(source, manner, report) if optimizer else ()
    names = {spec.name: spec.name for spec in source.model.params} | dict(module.shared)
    order = FROM_MASTERS if optimizer else EITHER
    view = source.catalog.renamed(source.role, names).states({PARAM: order[PARAM]})
    ranks = _Ranks(source, module, manner, shown_by, options, world, optimizer, groups, view)
    ranks.check()
    report.through(_RULES, ranks)
    scheduler = scheduler_of(source, manner, groups, optimizer, report) if ranks.has_place(SCHEDULER) else None
    random = states_of_ranks(source, world, options.rng, report) if ranks.has_place(RNG) else [None] * world
    return ranks.target(scheduler, random, report)


def _manner(source: Source, own: RanksState | None, options: WriteOptions) -> tuple[Manner, str]:
    """As the run that is named writes its files, or the one that wrote the source, or as verl does it; and which of them it is."""
    if options.like is not None:
        manner, by = like(options.like, source.role), f"as in {options.like}"
    elif own is not None and own.manner is not None:
        manner, by = own.manner, "as the source's run has them"
    else:
        manner, by = Manner(), "verl's strategy fsdp2; --like FOLDER takes them from what the run itself wrote"
    return _of_trainer(manner, options, by) if options.run_of.name else (manner, by)


def _of_trainer(manner: Manner, options: WriteOptions, by: str) -> tuple[Manner, str]:
    """As the trainer has its files for whose run they are; what another's run has of its own is none of its.

    Raises:
        UsageError: The folder that shows how they are is not this trainer's.
    """
    wanted = options.run_of.strategy
    if manner.strategy == wanted and manner.items is None:
        return manner, by
    if options.like is not None:
        raise UsageError(
            f"--like {options.like}: was not written by {options.run_of.name}\nGive a folder that the run itself saved."
        )
    own = Manner(device=manner.device, release=manner.release, strategy=wanted)
    return own, f"as {options.run_of.name} has them; --like FOLDER takes them from the run's own"


@dataclass(frozen=True, slots=True)
class _Ranks:
    source: Source
    module: ModuleState
    manner: Manner
    shown_by: str
    options: WriteOptions
    world: int
    optimizer: bool
    groups: Sequence[ParamGroup]
    view: Chunks

    @property
    def dtype(self) -> DType | None:
        """What trained parameters become; None to leave them."""
        return None if self.options.dtype is None else dtype_of(self.options.dtype)

    @property
    def width(self) -> int:
        """The ranks that have the model together."""
        return self.manner.width(self.world)

    def has_place(self, item: str) -> bool:
        """Whether the run's files have one for it."""
        return self.manner.items is None or item in self.manner.items

    @property
    def _keeps_random(self) -> bool:
        return self.has_place(RNG) and keeps_states(self.source, self.world, self.options.rng)

    @property
    def apart(self) -> Mapping[str, str]:
        """Second names of tied weights, and their owners, where the trainer trains both: see :func:`.tied.untied`."""
        return self.module.shared if self.manner.strategy else {}

    def check(self) -> None:
        """Everything that verl could not load.

        Raises:
            Unsupported: A parameter is a number; nobody knows the module's order.
            Incomplete: The source lacks a tensor.
        """
        problems = Problems()
        for name in self._names():
            if self._entry(name, PARAM) is None:
                problems.add(Incomplete, f"{self.source.root}: {name} of the model is nowhere in it")
            elif self._is_cut(name) and not self._entry_of(name).global_shape:
                problems.add(
                    Unsupported, f"{self.source.root}: {name} has no dimensions, and FSDP takes no such parameters"
                )
        if self.manner.strategy and (bias := f"{SCORE.removesuffix('weight')}bias") in self._names():
            text = f"{self.source.root}: {bias}: SkyRL's critics have a head without one, and refuse it"
            problems.add(Unsupported, text, "Train a critic of SkyRL's anew; --role actor converts the policy alone.")
        _, strange = ordered([spec.name for spec in self._params()], self.module.config, self.module.order)
        if strange and self.optimizer and not self.manner.says_names:
            some = ", ".join(strange[:5]) + (f" and {len(strange) - 5} more" if len(strange) > 5 else "")
            number = "torch's optimizers number the parameters in the module's order, which nobody knows here"
            problems.add(
                Unsupported,
                f"{self.source.root}: {number}: no table has {some}",
                "--reference-config names the model's config.json, by which a table is found; --no-optimizer writes the weights alone.",
            )
        counted = len(self._params())
        if self.optimizer and is_alone(self.source) and (self._alone is None or len(self._alone[1]) != counted):
            problems.add(
                Unsupported,
                f"{self.source.root}: is an adapter without its base, which the optimizer of such a run counts, too; which numbers "
                f"the adapter's {counted} tensors have is not known here",
                "--like FOLDER names a step that the run itself saved (save_lora_only); --no-optimizer writes the weights alone.",
            )
        problems.raise_if_any()

    def target(self, scheduler: Mapping[str, object] | None, random: Sequence[Rng | None], report: Report) -> Target:
        files, manner, beside = list[TargetFile](), self.manner, set[str]()
        for rank in range(self.world):
            files.append(self._file(MODEL, rank, partial(self._model, rank)))
            if self.optimizer:
                flat = self._pieces if manner.original else self._flat
                make = flat if manner.version == 1 else self._numbered
                files.append(self._file(OPTIMIZER, rank, partial(make, rank)))
            for item, tree in self._others(rank, scheduler, random[rank]):
                files.append(self._file(item, rank, partial(_small, tree)))
                beside.add(item)
        texts, lost = self._sidecar().texts()
        report.through(UNHELD, lost)
        report.through(_LACKING, [item for item in manner.items or () if item not in beside])
        if manner.items is None:
            texts |= texts_of(self.source)
            said = {STRATEGY: manner.strategy} if manner.strategy else {VERSION: manner.version}
            texts[CONFIG] = json.dumps({**said, WORLD: self.world}, indent=4)
        else:
            texts[rank_items.METADATA] = rank_items.metadata_of(
                self._described(), manner.device, self.world, manner.axis
            )
        return Target(
            format="fsdp-ranks",
            parallel=ParallelConfig(dp=self.world),
            source=self.view,
            files=tuple(files),
            texts=texts,
            report=report,
            holds=self._holds(),
        )

    def _file(self, kind: str, rank: int, make: Any) -> TargetFile:
        if self.manner.items is None:
            path = file_of(kind, self.world, rank)
        else:
            path = rank_items.file_of(rank_items.OPTIMIZER if kind == OPTIMIZER else kind, rank)
        return TargetFile(path, partial(make, path))

    def _others(
        self, rank: int, scheduler: Mapping[str, object] | None, random: Rng | None
    ) -> Iterator[tuple[str, object]]:
        """What lies beside model and optimizer: verl's one file, or each item of the run's that the source has."""
        state: dict[str, object] = {SCHEDULER: None if scheduler is None else dict(scheduler)}
        if self.manner.strategy:
            state |= {CLIENT: self.source.state.other.get(CLIENT, {}), TAG: self.source.state.other.get(TAG)}
            state |= zip(OF_RANK, (self.manner.strategy, self.world, rank), strict=True)
        if self.manner.items is None:
            yield EXTRA, state if random is None else {**state, RNG: dict(random)}
            return
        found = {**self.source.state.other, **{k: v for k, v in state.items() if v is not None}}
        found = {key: value for key, value in found.items() if key != RNG}
        found |= {} if random is None else {RNG: dict(random)}
        yield from ((item, found[item]) for item in self.manner.items if item in found)

    def _described(self) -> dict[str, list[rank_items.DescribedTensor]]:
        """All tensors, as resharders want them described."""
        model = []
        for name in self._names():
            entry = self._entry_of(name)
            cut = self._is_cut(name) and self.manner.cuts(self.world)
            dim = self.manner.dim(entry.global_shape, self.world) if cut else None
            model.append(rank_items.DescribedTensor((name,), entry.global_shape, self._dtype(name, entry), dim))
        states = []
        for key, name in self._keyed() if self.optimizer else ():
            held = list(self._states(name))
            for entry in held:
                dim = self.manner.dim(entry.global_shape, self.world)
                path = ("state", key, entry.name.state)
                states.append(rank_items.DescribedTensor(path, entry.global_shape, entry.dtype, dim))
            for scalar in self._scalars(name) if held else ():
                states.append(rank_items.DescribedTensor(("state", key, scalar), (), FLOAT32, None))
        return {rank_items.MODEL: model, **({rank_items.OPTIMIZER: states} if self.optimizer else {})}

    def _keyed(self) -> list[tuple[int | str, str]]:
        """Every parameter of the optimizer, by the key of its states."""
        names = [name for group in self._members() for name in group]
        numbered = zip(self._numbers(len(names)), names, strict=True)
        return [(name if self.manner.named else number, name) for number, name in numbered]

    @property
    def _alone(self) -> tuple[int, tuple[int, ...]] | None:
        return self.manner.alone if is_alone(self.source) else None

    def _numbers(self, count: int) -> Sequence[int]:
        """The numbers of so many parameters, or flat parameters; those of an adapter alone are where its run has them."""
        return range(count) if self._alone is None else self._alone[1]

    def _holds(self) -> Inventory:
        """All that the files have no place for lies beside them, but for random states."""
        found = inventory_of(self.source).items()
        return {item: value for item, value in found if item.kind is not Kind.RNG or self._keeps_random}

    def _sidecar(self) -> Sidecar:
        specs, dtype, state = self.source.model.params, self.dtype, self.source.state
        dtypes = {s.name: dtype if dtype is not None and s.trainable else s.dtype for s in specs}
        waiting = () if len(self.groups) == len(state.groups) else state.groups
        return Sidecar.of(replace(state, groups=waiting), self.module.base(), specs, self.source.origin, dtypes=dtypes)

    def _params(self) -> list[ParamSpec]:
        """Those of which torch gives an optimizer ``parameters()``: all but buffers."""
        return [spec for spec in self.source.model.params if spec.name not in self.module.buffers]

    def _names(self) -> list[str]:
        """The keys of the state dict, second names of tied weights among them, in the module's order as far as it is known."""
        params, _ = ordered([spec.name for spec in self._params()], self.module.config, self.module.order)
        there = dict.fromkeys([*(spec.name for spec in self.source.model.params), *self.module.shared])
        known = [name for name in self.module.order if name in there]
        in_turn = [name for name in known if name in set(params)] == params
        return list(dict.fromkeys([*known, *there] if in_turn else [*params, *known, *there]))

    def _entry(self, name: str, state: str) -> TensorEntry | None:
        return self.view.get(TensorName(self.source.role, name, state))

    def _entry_of(self, name: str) -> TensorEntry:
        found = self._entry(name, PARAM)
        assert found is not None  # :meth:`check`
        return found

    def _is_cut(self, name: str) -> bool:
        spec = self.source.model.get(self.module.shared.get(name, name))
        return spec is not None and spec.name not in self.module.buffers and spec.dtype in FLOATING

    def _dtype(self, name: str, entry: TensorEntry) -> DType:
        spec = self.source.model.get(self.module.shared.get(name, name))
        if spec is None or spec.dtype not in FLOATING:
            return entry.dtype
        if self.dtype is not None and spec.trainable:
            return self.dtype
        return entry.dtype if self.optimizer else spec.dtype

    def _model(self, rank: int, path: str) -> FileLayout:
        """A rank's part of the state dict; what is tied is stored once."""
        file, tree = PtLayout(path), cast(OrderedDict[str, Any], OrderedDict())
        mesh = self.manner.mesh(self.world, rank)
        for name in self._names():
            owner = self.module.shared.get(name)
            if owner is not None and owner in tree:
                tree[name] = tree[owner]
                continue
            entry = self._entry_of(name)
            shape, dtype = entry.global_shape, self._dtype(name, entry)
            if not self._is_cut(name) or not self.manner.cuts(self.world):
                tree[name] = file.add(entry.name, shape, dtype, Box.whole(shape))
                continue
            dim = self.manner.dim(shape, self.world)
            tree[name] = dtensor(
                file.add(entry.name, shape, dtype, part(shape, dim, self.width, rank % self.width)), shape, dim, mesh
            )
        called = {SCORE: VALUE_HEAD} if self.manner.strategy else {}
        return file.layout(OrderedDict((called.get(name, name), value) for name, value in tree.items()))

    def _numbered(self, rank: int, path: str) -> FileLayout:
        """A rank's part of FSDP2's optimizer: states by the parameters' numbers, cut as they are."""
        file, state, mesh = PtLayout(path), dict[int | str, Any](), self.manner.mesh(self.world, rank)
        for key, name in self._keyed():
            held: dict[str, Any] = {}
            for entry in self._states(name):
                dim = self.manner.dim(entry.global_shape, self.world)
                box = part(entry.global_shape, dim, self.width, rank % self.width)
                held[entry.name.state] = dtensor(
                    file.add(entry.name, entry.global_shape, entry.dtype, box), entry.global_shape, dim, mesh
                )
            if held:
                state[key] = {**self._scalars(name), **held}
        return file.layout(self._optimizer(state, [len(group) for group in self._members()]))

    def _members(self) -> list[list[str]]:
        """The parameters of every group in the module's order; those that are not trained stand where the run has them, and with all
        others, as in ``parameters()``, where nobody said.
        """
        if self.manner.says_names:
            return [list(group.params) for group in self.groups]
        names = [*(spec.name for spec in self._params()), *self.apart]
        place, _ = ordered(names, self.module.config, self.module.order)
        where = {name: number for number, group in enumerate(self.groups) for name in group.params}
        where |= {name: where[owner] for name, owner in self.apart.items() if owner in where}
        found: list[list[str]] = [[] for _ in self.groups]
        listed = None if self.manner.members is None else {name for names in self.manner.members for name in names}
        for name in place:
            if name in where or (len(self.groups) == 1 and (listed is None or name in listed)):
                found[where.get(name, 0)].append(name)
        return found

    def _flat(self, rank: int, path: str) -> FileLayout:
        """A rank's part of FSDP1's optimizer: a piece of each of its flat parameters."""
        file, state, units = PtLayout(path), dict[int, Any](), self._units()
        still = self._frozen()
        for number, unit in zip(self._numbers(len(units)), units, strict=True):
            if still.issuperset(unit.shapes):
                continue
            entries = {name: {entry.name.state: entry for entry in self._states(name)} for name in unit.shapes}
            first = next(iter(entries))
            kinds = {name: {(state, entry.dtype) for state, entry in of.items()} for name, of in entries.items()}
            if any(kind != kinds[first] for kind in kinds.values()) or not kinds[first]:
                apart = next(name for name in kinds if kinds[name] != kinds[first] or not kinds[name])
                raise Unsupported(f"{path}: {apart} has other states than {first}, with which FSDP1 flattens it")
            held = {}
            for kind, entry in entries[first].items():
                of = [(entries[name][kind].name, shape) for name, shape in unit.shapes.items()]
                held[kind] = flattened(file, of, entry.dtype, unit, self.width, rank % self.width)
            state[number] = {**self._scalars(first), **held}
        return file.layout(self._optimizer(state, [len(units)]))

    def _pieces(self, rank: int, path: str) -> FileLayout:
        """The same with original parameters: of each what lies in its rank's piece, nothing where none does."""
        file, state = PtLayout(path), dict[int | str, Any]()
        names, _ = ordered([spec.name for spec in self._params()], self.module.config, self.module.order)
        units = units_aligned({name: self._entry_of(name).global_shape for name in names}, self.source.root)
        for key, name in self._keyed():
            pieces = {
                entry.name.state: own_piece(file, entry, units[name], self.width, rank % self.width)
                for entry in self._states(name)
            }
            if held := {key: piece for key, piece in pieces.items() if piece is not None}:
                state[key] = {**self._scalars(name), **held}
        return file.layout(self._optimizer(state, [len(group) for group in self._members()]))

    def _units(self) -> list[Unit]:
        """The flat parameters of the run.

        Raises:
            Unsupported: It has several groups, or trains only some parameters of a layer, which FSDP1 does not flatten then.
        """
        if len(self.groups) != 1:
            raise Unsupported(
                f"{self.source.root}: there are {len(self.groups)} param groups; of FSDP1's flat parameters only those of a model that is "
                "trained in one group are known\nverl's strategy fsdp2 takes it; --no-optimizer writes the weights alone."
            )
        (members,) = self._members()
        still = self._frozen()
        steps = {str(self._scalars(name)) for name in members if name not in still}
        if len(steps) > 1:
            raise Unsupported(
                f"{self.source.root}: parameters have counted different steps, and FSDP1 has one for all of a layer"
            )
        units = units_of({name: self._entry_of(name).global_shape for name in members})
        apart = next(
            (n for unit in units for n in unit.shapes if n in still and not still.issuperset(unit.shapes)), None
        )
        if apart is not None:
            raise Unsupported(
                f"{self.source.root}: {apart} is not trained, and others are with which FSDP1 flattens it; without use_orig_params it "
                "trains a layer as a whole or not at all, and so what lies in no layer\nverl's strategy fsdp2 takes it; --no-optimizer "
                "writes the weights alone."
            )
        return units

    def _frozen(self) -> set[str]:
        """What is not trained: it has no states, and the run that lists it all the same does not say so."""
        params = self._params()
        return {spec.name for spec in params if not spec.trainable or next(self._states(spec.name), None) is None}

    def _optimizer(self, state: Mapping[Any, Any], counts: Sequence[int]) -> dict[str, Any]:
        groups, first = [], 0
        for number, (group, count) in enumerate(zip(self.groups, counts, strict=True)):
            fields = completed(group.fields, group.scalars)
            if self.manner.items is not None and self.manner.groups is not None:
                own = self.manner.groups[number] if number < len(self.manner.groups) else {}
                fields = {key: value for key, value in fields.items() if key in group.fields or key in own}
            if self.manner.says_names:
                fields[rank_items.NAMES] = list(self._members()[number])
            count = count if self._alone is None else self._alone[0]
            if not self.manner.named:
                fields[PARAMS] = list(range(first, first + count))
            groups.append(fields)
            first += count
        if self.manner.named and self.manner.items is None:
            return flat(state, groups)
        return {"state": dict(state), "param_groups": groups, **({rank_items.NAMED: 1} if self.manner.named else {})}

    def _states(self, name: str) -> Iterator[TensorEntry]:
        states = (self._entry(name, state) for state in self.source.states if state != MASTER)
        return (entry for entry in states if entry is not None)

    def _scalars(self, name: str) -> dict[str, object]:
        """A parameter's own step, as the group has it that it comes from."""
        owner = self.apart.get(name, name)
        return next((own_scalars(group) for group in self.source.state.groups if owner in group.params), {})


def _small(tree: object, path: str) -> FileLayout:
    del path
    return FileLayout.of_tree(tree)


def _how_without_optimizer(t: _Ranks) -> str:
    """How a run is told to load files without an optimizer; empty where they have one, or the user left it out."""
    if t.optimizer or t.options.no_optimizer:
        return ""
    if t.manner.strategy:
        return "and begins with a new optimizer"
    return (
        "where its load_contents is ['model'] or ['model', 'extra']" if t.manner.items is None else "into a model alone"
    )


_RULES: tuple[Rule[_Ranks], ...] = (
    Rule(Fate.NOTE, "rank files: {0.manner}, {0.shown_by}"),
    Rule(Fate.CHANGED,
         "files of {0.world} ranks, whom alone {0.manner.loader} lets load them; {0.source.parallel.world_size} wrote the source",
         lambda t: t.world != t.source.parallel.world_size),
    *(rule.of_part(lambda t: t.options) for rule in LEAVES_OUT),
    Rule(Fate.NOTE, "no optimizer: {loader} loads the files {how}",
         lambda t: (how := _how_without_optimizer(t)) and {"how": how, "loader": t.manner.loader.partition(",")[0]}),
    Rule(Fate.CHANGED, "tied weights: SkyRL trains {found}; each gets the values and states that were of both",
         lambda t: [f"{name} apart from {owner}" for name, owner in t.apart.items()]),
    *(rule.of_part(lambda t: Trained(t.source, t.dtype, t.optimizer)) for rule in OF_MASTERS),
    Rule(Fate.LOST, "rng: the run that loads it has no item for random states",
         lambda t: not t.has_place(RNG) and RNG in t.source.state.other, [Item(Kind.RNG)]),
)  # fmt: skip
_LACKING: Sequence[Rule[Sequence[str]]] = [
    Rule(Fate.NOTE, "{item}: the source has none; torch_checkpointing stops where a run loads this item",
         lambda items: [{"item": item} for item in items])
]  # fmt: skip
