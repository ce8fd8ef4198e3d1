"""Opening a DCP folder of an FSDP run: keys, param groups and everything else become one Source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property

from mcore_rlhf.core.account import Report
from mcore_rlhf.core.catalog import FLOAT32, FLOATING, MASTER, PARAM, Shape, TensorName
from mcore_rlhf.core.chunks import Chunks
from mcore_rlhf.core.facts import Fate
from mcore_rlhf.errors import Incomplete, LayoutMismatch, Problems, Unsupported
from mcore_rlhf.families.fsdp.groups import STEP, Collected, name_numbers
from mcore_rlhf.families.fsdp.model import model_config, num_layers
from mcore_rlhf.families.fsdp.state import RNG, iteration_of, scheduler_key, scheduler_of
from mcore_rlhf.families.fsdp.tied import find_aliases
from mcore_rlhf.families.inventory import Unplaced
from mcore_rlhf.families.lora.names import in_file, in_memory, of_file
from mcore_rlhf.families.module import ModuleState, read_config
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.families.run_folders import RECOVER_INFO, RECOVER_STEP, RECOVERED, RLINF_FOLDER
from mcore_rlhf.families.sidecar import Sidecar, sidecar_files
from mcore_rlhf.families.source import ParamGroup, Source, TrainingState, scheduled_groups
from mcore_rlhf.layouts.parallel import ParallelConfig
from mcore_rlhf.models.huggingface.config import misfits, sizes_of_config
from mcore_rlhf.models.huggingface.texts import text_of
from mcore_rlhf.models.spec import REPLICATED, ModelSpec, ParamSpec
from mcore_rlhf.models.torchtitan import OWN_NAMES, release_of
from mcore_rlhf.storage.dcp.folder import DcpFolder, DcpObject, DcpTensor, load_tensor
from mcore_rlhf.storage.dcp.metadata import Path_
from mcore_rlhf.storage.paths import ReadablePath, absolute
from mcore_rlhf.storage.pieces import PIECES_INDEX, PLACES, PLACES_VERSION, PieceTensor, read_pieces
from mcore_rlhf.storage.record_file import StoredFile
from mcore_rlhf.storage.records import told
from mcore_rlhf.storage.torch_values import SmallTensor

from .folders import APART, DcpFolders, is_dcp, locate
from .fused import FUSED, FusedParam, PartTensor, fused_names
from .keys import Key, KeyLayout, Style, find_layout, guess_paths, parsed, unflattened
from .plain import plain_source
from .state import DcpState, note_rng

_PIECES_MISSING = (
    "Those of some ranks are missing, or another model's: bring the files that all nodes wrote in one save together."
)


def read_dcp(path: ReadablePath, options: ReadOptions) -> Source:
    """Open a DCP folder, or RLinf's actor with one, or plain weights where there is nothing else.

    Args:
        path: The folder; or a root with ``step-N`` folders.
        options: Which step, which stubs, whether with the optimizer.

    Raises:
        CheckpointError: It is incomplete, damaged, or contradicts itself.
    """
    located = locate(path, options.step)
    if located.folder is None:
        return plain_source(located, options)
    opened = _Opened.of(located, options)
    missing = [key for key in (*opened.tensors, *opened.objects) if key not in opened.paths]
    if missing:
        raise Incomplete(f"{located.folder}: planner_data has no path for {missing[0]}")
    sidecar = Sidecar.read(located.folder, options.stubs)
    layout = find_layout(list(opened.paths.values()), [opened.paths[key] for key in opened.tensors])
    return _DcpReader(located, opened, opened.paths, layout, options, sidecar).source()


@dataclass(slots=True)
class _Opened:
    """The folders of a checkpoint as one: the model's, and the optimizer's where it has one of its own.

    Args:
        folder: The model's.
        tensors, objects: Of all, by key.
        paths: Every key's path in the nest of dictionaries that was saved.
        files: All files.
        unplaced: Texts of files' headers, which nobody reads.
    """

    folder: ReadablePath
    tensors: dict[str, DcpTensor | PieceTensor | PartTensor]
    objects: dict[str, DcpObject]
    paths: dict[str, Path_]
    files: tuple[StoredFile, ...]
    unplaced: Unplaced = field(default_factory=Unplaced)

    @classmethod
    def of(cls, located: DcpFolders, options: ReadOptions) -> _Opened:
        """Open what was found.

        Raises:
            CheckpointError: It is damaged, or two folders have the same key.
        """
        assert located.folder is not None
        pieces = not is_dcp(located.folder)
        found = cls._of_pieces(located) if pieces else cls._of_dcp(located.folder, located.root, options)
        if located.optimizer is not None and options.optimizer:
            found.join(cls._of_dcp(located.optimizer, located.root, options))
        return found

    @classmethod
    def _of_dcp(cls, folder: ReadablePath, root: ReadablePath, options: ReadOptions) -> _Opened:
        dcp = DcpFolder.open(folder, root, options.stubs)
        paths = dict(dcp.planner_data) or guess_paths([*dcp.tensors, *dcp.objects])
        return cls(folder, dict(dcp.tensors), dict(dcp.objects), paths, dcp.files())

    @classmethod
    def _of_pieces(cls, located: DcpFolders) -> _Opened:
        """A folder of pieces, whose names are those of the model: none of them has a path."""
        assert located.folder is not None
        inside, unplaced = located.folder.relative_to(located.root).as_posix(), Unplaced()
        found = read_pieces(located.root, inside)
        for file in found.files:
            unplaced.look(file.file, file.metadata, {PLACES: None, PLACES_VERSION: None}, "metadata")
        files = [StoredFile(f.file, f.nbytes, f.records, rank=rank) for rank, f in enumerate(found.files)]
        if (located.folder / PIECES_INDEX).is_file():
            files.append(StoredFile.at(located.root, f"{inside}/{PIECES_INDEX}"))
        paths: dict[str, Path_] = {name: (name,) for name in found.tensors}
        return cls(located.folder, dict(found.tensors), {}, paths, tuple(files), unplaced)

    def join(self, beside: _Opened) -> None:
        """Let it have what the optimizer's folder has, each tensor and object read from its own.

        Raises:
            Unsupported: Both have the same key.
        """
        twice = sorted({*self.tensors, *self.objects} & {*beside.tensors, *beside.objects})
        if twice:
            raise Unsupported(f"{beside.folder}: has {twice[0]}, which {self.folder} has as well")
        self.tensors |= beside.tensors
        self.objects |= beside.objects
        self.paths |= beside.paths
        self.files += beside.files


@dataclass
class _DcpReader:
    located: DcpFolders
    opened: _Opened
    paths: Mapping[str, Path_]
    layout: KeyLayout
    options: ReadOptions
    sidecar: Sidecar | None
    notes: Report = field(default_factory=Report)
    collected: Collected = field(default_factory=Collected)
    model_keys: dict[str, str] = field(default_factory=dict)
    state_keys: dict[str, dict[str, str]] = field(default_factory=dict)
    rest: dict[Path_, object] = field(default_factory=dict)
    fused_groups: int = 0

    def source(self) -> Source:
        there = self.opened.tensors.keys() | self.opened.objects.keys()
        keys = parsed(self.layout, {key: path for key, path in self.paths.items() if key in there})
        self._sort(keys)
        self._name_adapter()
        self._split_fused()
        if self._with_optimizer and self.located.optimizer is not None:
            of, weights = (path.relative_to(self.located.root) for path in (self.located.optimizer, self.opened.folder))
            self.notes.add(Fate.NOTE, f"the optimizer is from {of}/, beside {weights}/")
        groups = self._groups()
        self._check_pieces()
        aliases = self._aliases()
        model, entries = self._model(set(aliases))
        states = tuple(dict.fromkeys(s for of in entries.values() for s in of if s != PARAM))
        states = tuple(sorted(states, key=lambda state: state != MASTER))
        role = self.options.role or "actor"
        family = self._family(groups, aliases)
        return Source(
            format="dcp",
            root=self.located.root,
            role=role,
            model=model,
            parallel=ParallelConfig(dp=self._ranks()),
            catalog=_table(role, model, self.opened, entries),
            state=self._training(family, groups),
            files=self._files(),
            states=states,
            optimizer="dcp" if self._with_optimizer else None,
            notes=self.notes,
            family=family,
            origin={} if self.sidecar is None else self.sidecar.origin,
            unplaced=self.opened.unplaced.names,
        )

    def _files(self) -> tuple[StoredFile, ...]:
        inner = self.opened.folder.relative_to(self.located.root).as_posix()
        sidecar = sidecar_files(self.located.root, "" if inner == "." else f"{inner}/")
        return (*self.opened.files, *sidecar)

    @property
    def _with_optimizer(self) -> bool:
        return self.options.optimizer and self.layout.optimizer is not None

    def _sort(self, keys: Mapping[str, Key]) -> None:
        """Every key to where it belongs; what is small is loaded."""
        for full, key in keys.items():
            tensor = self.opened.tensors.get(full)
            if key.kind == "model" and tensor is not None:
                self.model_keys[key.param] = full
            elif key.kind in ("state", "group"):
                if self._with_optimizer:
                    self._sort_optimizer(full, key)
            else:
                path = key.path or (*self.layout.model[len(self.layout.rest) :], key.param)
                self.rest[path] = _loaded(tensor) if tensor is not None else self.opened.objects[full].load()
        if not self.model_keys:
            raise Unsupported(f"{self.opened.folder}: holds no tensors of a model")

    def _sort_optimizer(self, full: str, key: Key) -> None:
        tensor = self.opened.tensors.get(full)
        if key.kind == "state" and tensor is not None and key.name != STEP and tensor.global_shape != ():
            self.state_keys.setdefault(key.param, {})[key.name] = full
            return
        value = _loaded(tensor) if tensor is not None else self.opened.objects[full].load()
        if key.kind == "state":
            self.collected.scalars.setdefault(key.param, {})[key.name] = value
        elif self.layout.style is Style.FLAT:
            self.collected.own.setdefault(key.param, {})[key.name] = value
        else:
            self.collected.fields.setdefault(key.group, {})[key.name] = value

    def _name_adapter(self) -> None:
        """Let an adapter's tensors have the names that the model has for them, as the optimizer does: they are peft's.

        Source: accelerate 1.15.0, ``utils/fsdp_utils.py`` (``_get_model_state_dict`` with ``adapter_only``), as transformers calls it.
        """
        trained = dict.fromkeys([*self.collected.members(), *self.state_keys])
        known = {found.file: found.memory for name in trained if (found := in_memory(name)) is not None}
        if self.located.optimizer is None or not any(map(of_file, self.model_keys)):
            return
        names = {key: known.get(key) or in_file(key, ()).memory for key in self.model_keys}
        self.model_keys = {names[key]: full for key, full in self.model_keys.items()}

    def _split_fused(self) -> None:
        """Let each of queries, keys and values have what the optimizer keeps of the one parameter that they are.

        Raises:
            Unsupported: Nothing says how many groups of heads share keys and values.
            LayoutMismatch: Its states are not as long as the three together.
        """
        trained = dict.fromkeys([*self.state_keys, *self.collected.scalars, *self.collected.own])
        for name, parts in fused_names(trained, self.model_keys).items():
            self.fused_groups = self.fused_groups or self._heads(name, parts)
            fused = FusedParam(name, {part: self._shape(self.model_keys[part]) for part in parts}, self.fused_groups)
            keys = self.state_keys.pop(name, {})
            wrong = next((key for key in keys.values() if not fused.fits or self._shape(key) != fused.shape), None)
            if wrong is not None:
                raise LayoutMismatch(
                    f"{self.opened.folder}: {wrong} is {list(self._shape(wrong))}, expected {self.fused_groups} groups of heads in "
                    f"{list(fused.shape)}, as the model's tensors and its config.json have them\nGive the config of this model."
                )
            for part in parts:
                for state, key in keys.items():
                    whole = self.opened.tensors[key]
                    assert isinstance(whole, DcpTensor)
                    self.opened.tensors[f"{key}:{part}"] = PartTensor(whole, fused, part)
                    self.state_keys.setdefault(part, {})[state] = f"{key}:{part}"
                for kept in (self.collected.scalars, self.collected.own):
                    if name in kept:
                        kept[part] = kept[name]
            for kept in (self.collected.scalars, self.collected.own):
                kept.pop(name, None)

    def _heads(self, name: str, parts: tuple[str, ...]) -> int:
        """Groups of heads that share keys and values: noted by whoever converted, in the model's description, or told by a head's norm."""
        if not self.options.values:
            return 1  # all are as long as they are, wherever heads lie
        if self.sidecar is not None and self.sidecar.fused > 0:
            return self.sidecar.fused
        config = read_config(self.options.described_by) if self.options.described_by is not None else self._config
        norm = self.model_keys.get(parts[1].replace(".qkv_linear.wk.", ".k_norm."))
        if config:
            return sizes_of_config(text_of(config)).groups
        if norm is not None and self._shape(norm)[0]:
            return self._shape(self.model_keys[parts[1]])[0] // self._shape(norm)[0]
        raise Unsupported(
            f"{self.opened.folder}: the optimizer trains {name}, which the model has in three: how its heads lie in it nothing here says\n"
            "Give --reference-config, the folder with the model's config.json; --no-optimizer takes the weights alone."
        )

    def _groups(self) -> tuple[ParamGroup, ...]:
        if not self._with_optimizer:
            return ()
        if self.layout.style is Style.NUMBERED:
            self._name_states()
        groups = self.collected.groups(self.opened.folder, list(self.model_keys), self.notes, self.state_keys)
        self._check_scalars({name for group in groups for name in group.params})
        for group in groups:
            self._check_alike(group)
        return groups

    def _check_alike(self, group: ParamGroup) -> None:
        """A parameter that took a step has all elementwise states that others of its group have; one that never did has nothing.

        Other states are of some parameters only: SOAP's preconditioners of matrices, the scales of 8-bit moments of large ones.

        Raises:
            Incomplete: One has a part of them.
        """
        held = {n: {*self.state_keys.get(n, ()), *self.collected.scalars.get(n, ())} for n in group.params}
        kinds = {frozenset(names) for names in held.values() if names}
        if len(kinds) < 2:
            return
        elementwise, problems = self._elementwise(group), Problems()
        for name, own in held.items():
            more = {state for kind in kinds if own and own < kind for state in kind - own if state in elementwise}
            if more:
                text = f"{self.opened.folder}: {', '.join(sorted(more))} of {name} is missing, which others of its group have"
                problems.add(
                    Incomplete, text, "Copy the folder again, or convert the weights alone with --no-optimizer."
                )
        problems.raise_if_any()

    def _elementwise(self, group: ParamGroup) -> set[str]:
        """The states that have the shape of their parameter wherever they are."""
        alike = {
            (state, self._shape(key) == self._shape(self.model_keys[name]))
            for name in group.params
            if name in self.model_keys
            for state, key in self.state_keys.get(name, {}).items()
        }
        return {state for state, same in alike if same} - {state for state, same in alike if not same}

    def _name_states(self) -> None:
        said = self.options.rules.trainable
        may = {name: key for name, key in self.model_keys.items() if said(name) is not False}
        shapes = {name: self._shape(key) for name, key in may.items() if self._may_be_trained(key)}
        one = {number: self._shape(next(iter(keys.values()))) for number, keys in self.state_keys.items()}
        names = name_numbers(self.collected, shapes, one, self.opened.folder, self.notes)
        self.state_keys = {names[number]: keys for number, keys in self.state_keys.items() if number in names}

    def _check_scalars(self, trained: set[str]) -> None:
        """A parameter of no dimensions has moments of none, which look like a step; FSDP does not take such parameters."""
        for name in sorted(trained & self.model_keys.keys()):
            moments = [key for key in self.collected.scalars.get(name, {}) if key != STEP]
            if moments and self._shape(self.model_keys[name]) == ():
                raise Unsupported(
                    f"{self.opened.folder}: {name} has no dimensions; its {moments[0]} is not supported yet"
                )

    def _shape(self, key: str) -> Shape:
        return self.opened.tensors[key].global_shape

    def _is_floating(self, key: str) -> bool:
        return self.opened.tensors[key].dtype in FLOATING

    def _may_be_trained(self, key: str) -> bool:
        """FSDP cuts parameters and no buffers: where several ranks wrote, a whole floating-point tensor is a buffer."""
        return self._is_floating(key) and (not self._any_cut or self.opened.tensors[key].cut)

    @cached_property
    def _any_cut(self) -> bool:
        return any(self.opened.tensors[key].cut for key in self.model_keys.values())

    @cached_property
    def _config(self) -> dict[str, object]:
        return model_config(self.located.root, self.opened.folder)

    def _aliases(self) -> dict[str, str]:
        """Second names of tied weights, which an FSDP run stores under both."""
        if self.sidecar is not None:
            return dict(self.sidecar.module.shared)
        shapes = {name: self._shape(key) for name, key in self.model_keys.items()}
        return find_aliases(
            shapes,
            set(self.state_keys),
            self._config,
            lambda name: self.opened.tensors[self.model_keys[name]].identity(),
            self.notes,
        )

    def _model(self, aliases: set[str]) -> tuple[ModelSpec, dict[str, dict[str, str]]]:
        members = set(self.collected.members())
        specs, entries = [], {}
        for name, key in self.model_keys.items():
            if name in aliases:
                continue
            tensor, states = self.opened.tensors[key], self.state_keys.get(name, {})
            trained = name in members if self._with_optimizer else self._is_trained(name, key)
            self._check_states(name, tensor.global_shape, states)
            own = MASTER if trained and self._with_optimizer and tensor.dtype == FLOAT32 else PARAM
            entries[name] = {own: key, **(states if trained else {})}
            dtype = self.sidecar.dtypes.get(name, tensor.dtype) if self.sidecar is not None else tensor.dtype
            specs.append(ParamSpec(name, tensor.global_shape, dtype, REPLICATED, trained))
        absent = sorted(members - self.model_keys.keys())
        if absent:
            raise Incomplete(f"{self.opened.folder}: the optimizer trains {absent[0]}, but the model does not have it")
        return ModelSpec(tuple(specs), num_layers(entries), bool(aliases), vocab_size=self.options.vocab_size), entries

    def _is_trained(self, name: str, key: str) -> bool:
        if self.sidecar is None:
            return self._is_floating(key)
        return name not in self.sidecar.frozen and name not in self.sidecar.module.buffers

    def _check_pieces(self) -> None:
        """Hold pieces, of which no file says how far they reach, against the model's description, where that is known.

        Raises:
            Incomplete: They are smaller.
        """
        tensors = {name: self.opened.tensors[key] for name, key in self.model_keys.items()}
        if not any(isinstance(tensor, PieceTensor) for tensor in tensors.values()):
            return
        found = list(misfits(self._config, {name: tensor.global_shape for name, tensor in tensors.items()}))
        if found:
            more = f" ({len(found) - 1} more tensors)" if len(found) > 1 else ""
            raise Incomplete(f"{self.opened.folder}: pieces and config.json: {found[0]}{more}\n{_PIECES_MISSING}")

    def _check_states(self, name: str, shape: Shape, states: Mapping[str, str]) -> None:
        for state, key in states.items():
            if self._shape(key) != shape and isinstance(self.opened.tensors[self.model_keys[name]], PieceTensor):
                raise Incomplete(
                    f"{self.opened.folder}: the pieces of {name} reach to {list(shape)}, its {state} to {list(self._shape(key))}\n"
                    f"{_PIECES_MISSING}"
                )
            if self._shape(key) != shape:
                raise Unsupported(
                    f"{self.opened.folder}: {name} has the shape {shape}, its {state} {self._shape(key)}; only states with one value "
                    "per element can be converted"
                )

    def _ranks(self) -> int:
        return max((file.rank for file in self.opened.files if file.rank is not None), default=0) + 1

    def _family(self, groups: tuple[ParamGroup, ...], aliases: Mapping[str, str]) -> DcpState:
        rest = unflattened(self.rest)
        assert self.located.folder is not None
        inner = RLINF_FOLDER if self.located.folder == self.located.root / RLINF_FOLDER else ""
        own = self.sidecar.module if self.sidecar is not None else self._guessed(groups, aliases)
        lost = tuple(text for fate, text in self.notes.lines if fate is Fate.LOST)
        weights = self.located.weights is not None
        laid_out = {**told(self.layout), "scheduler": scheduler_key(rest)}
        if self.located.folder.name == APART[0]:
            laid_out["apart"] = True
        if release := release_of(self.model_keys):
            laid_out[OWN_NAMES] = release
        if self.fused_groups:
            laid_out[FUSED] = self.fused_groups
        if self.layout.style is Style.FLAT:  # its keys do not say how many groups there are, and its scheduler does
            laid_out["groups"] = scheduled_groups(scheduler_of(rest)[0])
        shared = {field.name: getattr(own, field.name) for field in fields(ModuleState)} | {"laid_out": laid_out}
        return DcpState(
            **shared, layout=self.layout, inner=inner, weights=weights, rest=rest, groups=groups,
            scalars=self.collected.scalars, differing=lost,
            derived=() if self.sidecar is None else tuple(key for key in rest if key not in self.sidecar.state.other),
        )  # fmt: skip

    def _guessed(self, groups: tuple[ParamGroup, ...], aliases: Mapping[str, str]) -> ModuleState:
        trained = {name for group in groups for name in group.params}
        buffers = [n for n, key in self.model_keys.items() if n not in trained and not self._may_be_trained(key)]
        return ModuleState(order=tuple(self.model_keys), buffers=tuple(buffers), shared=aliases, config=self._config)

    def _training(self, family: DcpState, groups: tuple[ParamGroup, ...]) -> TrainingState:
        if self.sidecar is None or RNG in self.sidecar.state.other:  # otherwise derived when the folder was written
            note_rng(family.rest, self.notes)
        if self.sidecar is not None:
            state = self.sidecar.state
            return state if self._with_optimizer else replace(state, groups=())
        scheduler, other = scheduler_of(family.rest)
        where = (
            f"{RECOVER_INFO}/{RECOVER_STEP}" if absolute(self.located.root).name == RECOVERED else "the folder's name"
        )
        step = iteration_of(self.located.step, family.rest, scheduler, groups, self.notes, where)
        return TrainingState(step, groups=groups, scheduler=scheduler, other=other)


def _loaded(tensor: DcpTensor | PieceTensor | PartTensor) -> SmallTensor:
    """A small tensor, whole; pieces are of a model's, which none is."""
    assert isinstance(tensor, DcpTensor)
    return load_tensor(tensor)


def _table(role: str, model: ModelSpec, folder: _Opened, keys: Mapping[str, Mapping[str, str]]) -> Chunks:
    """Where every tensor lies; the ends of its items are read when somebody asks.

    Args:
        role: Role of all tensors.
        model: Names.
        folder: The folder.
        keys: For every parameter, the folder's key of each of its states. A trained fp32 parameter is its own master, and
            stands under that name; ``param`` is what a target rounds from it.
    """
    found = Chunks()
    for spec in model.params:
        for state, key in keys[spec.name].items():
            found.add(TensorName(role, spec.name, state), folder.tensors[key].as_tensor())
    return found
