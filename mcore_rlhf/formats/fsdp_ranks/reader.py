"""Opening the files of all ranks: parts of DTensors find their places, numbers become names, flat pieces are taken apart.

torch_checkpointing's are such files, too: see :mod:`.rank_items`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, cast

from mcore_rlhf.core.account import Report
from mcore_rlhf.core.catalog import (
    FLOAT32,
    FLOATING,
    MASTER,
    PARAM,
    Box,
    Chunk,
    DType,
    Shape,
    TensorEntry,
    TensorName,
)
from mcore_rlhf.core.chunks import Chunks
from mcore_rlhf.core.facts import Fate, same
from mcore_rlhf.errors import Incomplete, LayoutMismatch, Problems, Unportable, Unsupported
from mcore_rlhf.families.fsdp.groups import PARAMS, Collected, name_numbers
from mcore_rlhf.families.fsdp.model import model_config, num_layers
from mcore_rlhf.families.fsdp.order import Unit, ordered
from mcore_rlhf.families.fsdp.state import RNG, SCHEDULER, is_of_one, iteration_of
from mcore_rlhf.families.fsdp.tied import find_aliases, stored_identity, untied
from mcore_rlhf.families.inventory import Unplaced, state_dict_of
from mcore_rlhf.families.module import ModuleState
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.families.run_folders import named_step
from mcore_rlhf.families.sidecar import Sidecar, sidecar_files
from mcore_rlhf.families.source import ParamGroup, Source, TrainingState
from mcore_rlhf.layouts.parallel import ParallelConfig
from mcore_rlhf.models.spec import REPLICATED, ModelSpec, ParamSpec
from mcore_rlhf.storage.dcp.rankfile import Local, RankFile, read_rank_file
from mcore_rlhf.storage.paths import ReadablePath
from mcore_rlhf.storage.pt import read_pt
from mcore_rlhf.storage.record_file import StoredFile
from mcore_rlhf.storage.stored import StoredTensor, whole_entry
from mcore_rlhf.storage.torchzip import read_directory

from . import rank_items
from .adapter import said_of, saying
from .alike import brief, refuse_apart, refuse_swapped, scalar_of, told_apart
from .by_name import nested
from .files import EXTRA, MODEL, OPTIMIZER, rank_files
from .manner import OTHERWISE, SCORE, VALUE_HEAD, Manner, manner_of, of_run, strategy_in, with_items, with_strategy
from .pieces import FlatPieces, Flattened, units_in
from .state import RanksState, Rng

Values = list[dict[str, Any]]
NAME = "fsdp-ranks"


def read_ranks(root: ReadablePath, options: ReadOptions) -> Source:
    """Open the rank files of an actor or critic.

    Args:
        root: Its folder.
        options: Whether with the optimizer, which role, which stubs.

    Raises:
        CheckpointError: Ranks are missing, files are damaged, or the optimizer's are FSDP1's of a model that no table orders.
    """
    if rank_items.has_items(root):
        extra, items = rank_items.item_files(root), True
        model, optimizer = extra.pop(rank_items.MODEL), extra.pop(rank_items.OPTIMIZER, [])
    else:
        files, items = rank_files(root, optimizer=options.optimizer), False
        model, optimizer, extra = files[MODEL], files[OPTIMIZER], {"": files[EXTRA]} if files[EXTRA] else {}
    opened = [read_rank_file(root, name, options.stubs) for name in model]
    optim = [nested(read_rank_file(root, name, options.stubs)) for name in (optimizer if options.optimizer else ())]
    return _RanksReader(root, options, opened, optim, extra, items, Sidecar.read(root, options.stubs)).source()


@dataclass
class _RanksReader:
    root: ReadablePath
    options: ReadOptions
    model: list[RankFile]
    optim: list[RankFile]
    extra: dict[str, list[str]]
    items: bool
    sidecar: Sidecar | None
    notes: Report = field(default_factory=Report)
    collected: Collected = field(default_factory=Collected)
    unplaced: Unplaced = field(default_factory=Unplaced)
    random: list[Rng] = field(default_factory=list)
    strategy: str = ""

    def __post_init__(self) -> None:
        first = () if self.items else tuple(*self.extra.values())[:1]
        trees = (read_pt(self.root, name, stubs=self.options.stubs).tree for name in first)
        self.strategy = next(map(strategy_in, trees), "")

    def source(self) -> Source:
        whose = "torch_checkpointing's" if self.items else "SkyRL's" if self.strategy else "verl's"
        self.notes.add(Fate.NOTE, f"{whose} rank files, of {len(self.model)} ranks")
        refuse_swapped(self.model, [self._dictionary(file) for file in self.model])
        role = self.options.role or "actor"
        tensors = self._tensors([self._dictionary(file) for file in self.model])
        config = model_config(self.root) or (dict(self.sidecar.module.config) if self.sidecar is not None else {})
        states = self._states(tensors, config)
        listed = self.collected.groups(self.root, list(tensors), self.notes, states) if states else ()
        groups = tuple(self._trained(group, states) for group in listed)
        members = {name for group in groups for name in group.params}
        aliases = self._aliases(tensors, states, config)
        config = untied(config, tensors.keys() - aliases.keys(), self.notes) if self.strategy else config
        entries: dict[TensorName, TensorEntry] = {}
        specs = []
        for name, parts in tensors.items():
            if name in aliases:
                continue
            entry = self._entry(TensorName(role, name), parts)
            trained = name in members if states else self._may_be_trained(name, parts, entry.dtype)
            own = MASTER if states and trained and entry.dtype == FLOAT32 else PARAM
            of = {own: parts, **(states.get(name, {}) if trained else {})}
            entries |= {(at := TensorName(role, name, state)): self._entry(at, held) for state, held in of.items()}
            dtype = entry.dtype if self.sidecar is None else self.sidecar.dtypes.get(name, entry.dtype)
            specs.append(ParamSpec(name, entry.global_shape, dtype, REPLICATED, trained))
        found = tuple(dict.fromkeys(name.state for name in entries if name.state != PARAM))
        model = ModelSpec(tuple(specs), num_layers(tensors), bool(aliases), vocab_size=self.options.vocab_size)
        buffers = [name for name, parts in tensors.items() if name not in members and not self._is_cut(parts)]
        return Source(
            format=NAME,
            root=self.root,
            role=role,
            model=model,
            parallel=ParallelConfig(dp=len(self.model)),
            catalog=Chunks.of(entries.values()),
            state=self._training(groups),
            files=self._files(),
            states=tuple(sorted(found, key=lambda state: state != MASTER)),
            optimizer=NAME if states else None,
            notes=self.notes,
            family=self._family(ModuleState("", tuple(tensors), tuple(buffers), aliases, config=config), listed),
            unplaced=self.unplaced.names,
            origin={} if self.sidecar is None else self.sidecar.origin,
        )

    def _family(self, own: ModuleState, groups: Sequence[ParamGroup]) -> RanksState:
        """What lies beside says more of the model than the files do."""
        known = self.sidecar.module if self.sidecar is not None else own
        shared = {item.name: getattr(known, item.name) for item in fields(ModuleState)}
        shared |= {"order": own.order, "buffers": own.buffers, "shared": own.shared, "config": own.config}
        return RanksState(**shared, manner=self._manner(groups), random=tuple(self.random))

    def _manner(self, listed: Sequence[ParamGroup]) -> Manner | None:
        try:
            found = with_strategy(manner_of(self.model), self.root, self.model, self.optim)
        except Unsupported:  # what is read and not written
            return None
        found = replace(found, strategy=self.strategy)
        if self.items:
            found = with_items(found, self.model[0], self.optim[:1], self.extra)
        else:
            self.notes.through([OTHERWISE], (self.root, len(self.model), found))
        groups = [self.collected.fields[number] for number in sorted(self.collected.fields)]
        fields = tuple({key: value for key, value in group.items() if key != PARAMS} for group in groups)
        return replace(found, groups=fields or None, members=tuple(group.params for group in listed) or None)

    def _trained(self, group: ParamGroup, states: Mapping[str, object]) -> ParamGroup:
        """A group without what is in it and frozen, as what lies beside says."""
        still = () if self.sidecar is None else self.sidecar.frozen
        kept = (name for name in group.params if name in states or name not in still)
        return replace(group, params=tuple(kept)) if still else group

    def _may_be_trained(self, name: str, parts: Sequence[Any], dtype: DType) -> bool:
        if self.sidecar is not None:
            return name not in self.sidecar.frozen and name not in self.sidecar.module.buffers
        return self._is_cut(parts) and dtype in FLOATING

    def _dictionary(self, file: RankFile) -> dict[str, Any]:
        if not isinstance(file.tree, dict):
            raise Unsupported(
                f"{file.directory.path}: expected a dictionary of tensors, found a {type(file.tree).__name__}"
            )
        return file.tree

    def _tensors(self, ranks: Values) -> dict[str, list[Any]]:
        """Every tensor's parts, by rank; nothing else of the state dict (``_extra_state``) is read."""
        refuse_apart(self.model, ranks, "")
        for file, values in zip(self.model, ranks, strict=True):
            others = {k: v for k, v in values.items() if v is not None and not isinstance(v, Local | StoredTensor)}
            self.unplaced.look(file.file, others, {})
        ranks = self._of_one(ranks)
        if called := {VALUE_HEAD: SCORE} if self.strategy and VALUE_HEAD in ranks[0] else {}:
            self.notes.add(Fate.NOTE, f"{VALUE_HEAD}: is a critic's head, and is called {SCORE}")
        return {
            called.get(name, name): [values[name] for values in ranks]
            for name, value in ranks[0].items()
            if isinstance(value, Local | StoredTensor)
        }

    def _of_one(self, ranks: Values) -> Values:
        """FSDP1 cuts nothing where it is alone, and saves plain tensors: each is the whole of what one rank of one has."""
        if len(ranks) > 1 or any(isinstance(value, Local) for value in ranks[0].values()):
            return ranks
        return [
            {
                name: Local(value, value.shape, (0,))
                if isinstance(value, StoredTensor) and value.shape and value.record.dtype in FLOATING
                else value
                for name, value in ranks[0].items()
            }
        ]

    def _aliases(
        self, tensors: Mapping[str, Sequence[Any]], states: Collection[str], config: Mapping[str, object]
    ) -> dict[str, str]:
        """Second names of tied weights, by what lies at both of them on every rank."""
        directories = [file.directory for file in self.model]
        stored = {n: [p.stored if isinstance(p, Local) else p for p in parts] for n, parts in tensors.items()}
        shapes = {n: parts[0].global_shape if self._is_cut(parts) else parts[0].shape for n, parts in tensors.items()}
        return find_aliases(
            shapes,
            states,
            config,
            lambda name: stored_identity([*zip(directories, stored[name], strict=True)]),
            self.notes,
        )

    def _is_cut(self, parts: Sequence[Any]) -> bool:
        return isinstance(parts[0], Local)

    def _states(
        self, tensors: Mapping[str, Sequence[Any]], config: Mapping[str, object]
    ) -> dict[str, dict[str, list[Any]]]:
        """The optimizer's states by parameter, its groups on the way."""
        if not self.optim:
            return {}
        ranks = [self._dictionary(file) for file in self.optim]
        numbered = cast(Values, [values.get("state", {}) for values in ranks])
        found: dict[str, dict[str, list[Any]]] = {}
        for number, key in self._keys(numbered):
            held = [states[number][key] for states in numbered if key in states.get(number, {})]
            if isinstance(held[0], Local) or getattr(held[0], "shape", None):
                found.setdefault(str(number), {})[key] = held
            else:
                one = self._scalar(numbered, number, key)
                self.collected.scalars.setdefault(str(number), {})[key] = one
        self._compare_groups(ranks)
        self.collected.fields = {n: dict(group) for n, group in enumerate(ranks[0].get("param_groups", ()))}
        said = self.options.rules.trainable
        whole = {name: parts[0].global_shape for name, parts in tensors.items() if self._is_cut(parts)}
        shapes = {name: shape for name, shape in whole.items() if said(name) is not False}
        if named := self._named():
            return self._named_states(found, named, tensors)
        if any(
            isinstance(part, StoredTensor) for states in found.values() for parts in states.values() for part in parts
        ):
            aliases = self._aliases(tensors, (), config)
            listed = [fields.get(PARAMS) for fields in self.collected.fields.values()]
            alone = listed[0] if len(listed) == 1 and isinstance(listed[0], list) else []
            own = {name: shape for name, shape in whole.items() if name not in aliases}
            world, hybrid = len(self.optim), any(len(p[0].dims) > 1 for p in tensors.values() if self._is_cut(p))
            copies = world // self._shards() if hybrid else 1
            if units := units_in(found, alone, own, config, world, copies):
                return self._taken_apart(found, units, copies)
            return self._flat_states(found, shapes, list(own), config, copies)
        one = {number: next(iter(states.values()))[0].global_shape for number, states in found.items()}
        names = name_numbers(self.collected, shapes, one, self.root, self.notes)
        return {names[number]: states for number, states in found.items()}

    def _keys(self, ranks: Values) -> list[tuple[Any, Any]]:
        """Every state by number and key; where they are parts of DTensors, all ranks have all of them.

        Raises:
            LayoutMismatch: They have not, or files lie under each other's names.
        """
        if any(isinstance(value, Local) for rank in ranks for states in rank.values() for value in states.values()):
            refuse_apart(self.optim, ranks, "state of parameter ")
            for number in ranks[0]:
                refuse_apart(self.optim, [rank[number] for rank in ranks], f"state of parameter {number}: ")
            refuse_swapped(self.optim, [{(n, k): v for n, of in rank.items() for k, v in of.items()} for rank in ranks])
        listed = {(number, key): None for rank in ranks for number, states in rank.items() for key in states}
        return sorted(listed, key=lambda at: at[0])

    def _named(self) -> dict[str, str]:
        """What the optimizer calls its parameters, by the number or name of their states; empty where it does not say.

        It does where it was made of ``named_parameters()``. Source: torch 2.13.0, ``optim/optimizer.py`` (``param_names``).
        """
        named: dict[str, str] = {}
        for number in sorted(self.collected.fields):
            fields = self.collected.fields[number]
            names = fields.get(rank_items.NAMES)
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                return {}
            keys = fields.get(PARAMS, names)  # torch_checkpointing's transformed states have no numbers
            if not isinstance(keys, list) or len(keys) != len(names):
                return {}
            named |= dict(zip(map(str, keys), names, strict=True))
        return named

    def _named_states(
        self, found: Mapping[str, dict[str, list[Any]]], named: Mapping[str, str], tensors: Mapping[str, Sequence[Any]]
    ) -> dict[str, dict[str, list[Any]]]:
        """States whose parameters the optimizer names itself.

        Raises:
            LayoutMismatch: The model has no such parameters, or of another shape.
        """
        problems, where = Problems(), self.optim[0].directory.path
        shapes = {n: parts[0].global_shape if self._is_cut(parts) else parts[0].shape for n, parts in tensors.items()}
        for name in sorted({*named.values()} - tensors.keys())[:5]:
            problems.add(LayoutMismatch, f"{where}: the optimizer trains {name}, which the model does not have")
        for key, states in found.items():
            for state, parts in states.items():
                shape = parts[0].global_shape if self._is_cut(parts) else parts[0].shape
                owner = named.get(key, key)
                if key not in named or shapes.get(owner, shape) != shape:
                    text = f"{where}: {state} of {owner} has the shape {shape}, its parameter {shapes.get(owner)}"
                    problems.add(LayoutMismatch, text, "Files of different models are mixed in one folder.")
        problems.raise_if_any()
        for number in sorted(self.collected.fields):
            fields = self.collected.fields[number]
            fields[PARAMS] = fields.pop(rank_items.NAMES)
        self.collected.scalars = {named[key]: values for key, values in self.collected.scalars.items() if key in named}
        return {named[key]: dict(states) for key, states in found.items()}

    def _flat_states(
        self,
        found: Mapping[str, Mapping[str, list[Any]]],
        shapes: Mapping[str, Shape],
        own: Collection[str],
        config: Mapping[str, object],
        copies: int,
    ) -> dict[str, dict[str, list[Any]]]:
        """States of FSDP1 with original parameters: bare pieces, each of one of them, and those of all ranks together are it.

        Raises:
            Unsupported: Nobody knows which parameters are meant.
        """
        sizes = {n: (FlatPieces((), tuple(next(iter(states.values()))), copies).numel,) for n, states in found.items()}
        try:
            names = name_numbers(self.collected, shapes, sizes, self.root, self.notes, flat=True)
        except Unsupported:
            _, strange = ordered([*own], config, ())
            whose = f"no table has {strange[0]}" if strange else "they have other lengths than those of its layers"
            raise (Unsupported if config else Unportable)(
                f"{self.optim[0].directory.path}: the optimizer of FSDP1 keeps flat pieces of flattened modules, which do not say "
                f"which parameters they are; by the model's config.json they cannot be told apart: {whose}\n"
                "verl's strategy fsdp2 saves an optimizer that says it."
            ) from None
        return {
            names[number]: {
                key: [FlatPieces(shapes[names[number]], tuple(pieces), copies)] for key, pieces in states.items()
            }
            for number, states in found.items()
        }

    def _taken_apart(
        self, found: Mapping[str, Mapping[str, list[Any]]], units: Mapping[str, Unit], copies: int
    ) -> dict[str, dict[str, list[Any]]]:
        """The states of all parameters, each in its unit's pieces; groups and steps by name."""
        named = [(number, name) for number, unit in units.items() for name in unit.shapes]
        self.collected.fields[0][PARAMS] = [name for _, name in named]
        steps = self.collected.scalars
        self.collected.scalars = {name: steps[number] for number, name in named if number in steps}
        text = "by the order of its table, each layer flattened as FSDP1 does it; all pieces have their lengths"
        self.notes.add(Fate.DERIVED, f"names of the optimizer's {len(units)} flat parameters: {text}")
        return {
            name: {key: [Flattened(name, units[number], tuple(of), copies)] for key, of in found[number].items()}
            for number, name in named
            if number in found
        }

    def _scalar(self, ranks: Values, number: Any, key: str) -> object:
        """A step, which all ranks have counted alike.

        Raises:
            CheckpointError: They have not, or one that has such states lacks it.
        """
        there = [(file, rank) for file, rank in zip(self.optim, ranks, strict=True) if number in rank]
        for file, rank in there:
            if key not in rank[number]:
                raise Incomplete(f"{file.directory.path}: parameter {number} has no {key}, which it has on other ranks")
        first, *others = (scalar_of(file, rank[number][key]) for file, rank in there)
        for (file, _), other in zip(there[1:], others, strict=True):
            if not same(other, first) and not getattr(first, "shape", ()):  # what has dimensions is FSDP1's
                raise LayoutMismatch(
                    f"{file.directory.path}: {key} of parameter {number} is {brief(other)}, but {brief(first)} on rank 0\n"
                    "Files of different steps are mixed in one folder: copy the checkpoint again from where it came from."
                )
        return first

    def _compare_groups(self, ranks: Values) -> None:
        """The groups of the first rank stand for all; nothing else is read of the files."""
        first = ranks[0].get("param_groups", ())
        for file, values in zip(self.optim, ranks, strict=True):
            self.unplaced.look(file.file, values, {"state": None, "param_groups": None, rank_items.NAMED: None})
            for number, (group, known) in enumerate(zip(values.get("param_groups", ()), first, strict=False)):
                self.unplaced.compare(file.file, group, known, f"param_groups.{number}")

    def _entry(self, name: TensorName, parts: Sequence[Any]) -> TensorEntry:
        first = parts[0]
        if isinstance(first, StoredTensor):
            return whole_entry(name, *parts)
        if isinstance(first, FlatPieces | Flattened):
            return TensorEntry(name, first.global_shape, first.pieces[0].record.dtype, tuple(first.chunks()))
        chunks = tuple(self._chunks(name, parts))
        return TensorEntry(name, first.global_shape, first.stored.record.dtype, chunks)

    def _chunks(self, name: TensorName, parts: Sequence[Local]) -> Iterator[Chunk]:
        """Parts in the order of ranks, each behind the one before it; a mesh that replicates has them several times."""
        *outer, cut = parts[0].dims
        if cut is None or any(dim is not None for dim in outer) or any(part.dims != parts[0].dims for part in parts):
            raise Unsupported(
                f"{self.root}: {name.param} is cut along other axes of the mesh than the last one ({parts[0].dims}); "
                "that is not supported"
            )
        shape, shards = parts[0].global_shape, self._shards()
        for first in range(0, len(parts), shards):
            at = 0
            for part in parts[first : first + shards]:
                stored = part.stored
                offset = tuple(at if dim == cut else 0 for dim in range(len(shape)))
                at += stored.shape[cut]
                if 0 not in stored.shape:
                    yield Chunk(Box(offset, stored.shape), stored.record, stored.start, stored.strides)
            if at != shape[cut]:
                raise LayoutMismatch(
                    f"{self.root}: the parts of {name.param} on ranks {first} to {first + shards - 1} have {at} rows together, "
                    f"its shape is {shape}; the files are not of one save"
                )

    def _shards(self) -> int:
        """Ranks among which tensors are cut: all, or, where the mesh's first axis replicates, those of one copy.

        Found by the parts themselves: so many ranks have all rows of a tensor together. Ranks without rows come last, so the tensor
        that needs the most ranks decides.
        """
        world, most = len(self.model), 1
        ranks = [self._dictionary(file) for file in self.model]
        for name, first in ranks[0].items():
            if isinstance(first, Local) and first.dims[-1] is not None:
                cut, rows, count = first.dims[-1], 0, 0
                while rows < first.global_shape[cut] and count < world:
                    rows += ranks[count][name].stored.shape[cut]
                    count += 1
                most = max(most, count if len(first.dims) > 1 else world)
        return next(count for count in range(most, world + 1) if world % count == 0)

    def _training(self, groups: tuple[ParamGroup, ...]) -> TrainingState:
        """Groups and scheduler are those of the files; all else that a run of another trainer had lies beside them."""
        other: dict[str, object] = {}
        for item, files in self.extra.items():
            trees = {name: self._extra_of(name, item) for name in files}
            first = trees[files[0]]
            for name, tree in trees.items():
                self.unplaced.compare(name, {**tree, RNG: None}, {**first, RNG: None})
            states = [tree.get(RNG) for tree in trees.values()]
            self.random += [state for state in states if isinstance(state, Mapping)]
            other |= first
        other |= {} if self.items else said_of(self.root, self.unplaced)
        scheduler = state_dict_of(other.pop(SCHEDULER, None), SCHEDULER, self.notes)
        state = None if scheduler is None else dict(scheduler)
        if self.sidecar is not None:
            return self._with_what_lies_beside(self.sidecar.state, groups, state, other)
        step = iteration_of(named_step(self.root), other, state, groups, self.notes)
        return TrainingState(step, groups=groups, scheduler=state, other=other)

    def _with_what_lies_beside(
        self,
        known: TrainingState,
        groups: tuple[ParamGroup, ...],
        scheduler: dict[str, object] | None,
        other: dict[str, object],
    ) -> TrainingState:
        """Groups that have become one, another framework's scheduler and random states that were derived are as the source had them."""
        if not self.random or not same(known.other.get(RNG), self.random[0]):
            self.random = []
        merged = bool(known.groups and groups)
        waits = merged or (known.scheduler is not None and not is_of_one(known.scheduler))
        more = {key: value for key, value in other.items() if key != RNG}
        groups, scheduler = known.groups if merged else groups, known.scheduler if waits else scheduler
        return replace(known, groups=groups, scheduler=scheduler, other={**known.other, **more})

    def _extra_of(self, name: str, item: str) -> dict[str, object]:
        """What a file has besides model and optimizer: verl's are dictionaries, an item of torch_checkpointing's may be anything."""
        opened = read_pt(self.root, name, stubs=self.options.stubs)
        tree = opened.materialize(opened.tree)
        found = {item: tree} if item else dict(tree) if isinstance(tree, dict) else {}
        return of_run(found, name) if self.strategy and not item else found

    def _files(self) -> tuple[StoredFile, ...]:
        """Random states of other ranks than the first are not used, and their bytes are checked all the same."""
        zips = told_apart(self.model, self.optim)
        names = (name for names in self.extra.values() for name in names)
        zips += [StoredFile.of_zip(name, read_directory(self.root / name)) for name in names]
        items = [StoredFile.at(self.root, name) for name in (rank_items.METADATA,) if (self.root / name).is_file()]
        items += [StoredFile.at(self.root, name) for name in saying(self.root)]
        return (*zips, *items, *sidecar_files(self.root))
