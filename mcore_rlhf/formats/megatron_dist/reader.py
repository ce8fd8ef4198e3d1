"""Opening a ``torch_dist`` checkpoint: its folder, arguments, names and optimizer become one Source, whose catalogue computes slices of
stacked tensors when asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace

from mcore_rlhf.core.account import Report
from mcore_rlhf.core.catalog import (
    BFLOAT16,
    FLOAT16,
    MASTER,
    PARAM,
)
from mcore_rlhf.core.facts import Fate, Rule
from mcore_rlhf.errors import CheckpointError, LayoutMismatch, Unsupported
from mcore_rlhf.families.inventory import Unplaced
from mcore_rlhf.families.lora.names import adapters_alone
from mcore_rlhf.families.megatron.adapted import GAPS
from mcore_rlhf.families.megatron.arguments import (
    DISTRIBUTED,
    NO_ARGUMENTS,
    Arguments,
    check_against_arguments,
    stored_arguments,
)
from mcore_rlhf.families.megatron.complete import require_complete
from mcore_rlhf.families.megatron.groups import Membership, look_at_optimizer
from mcore_rlhf.families.megatron.layout import Blueprint
from mcore_rlhf.families.megatron.modelopt import KEY as MODELOPT
from mcore_rlhf.families.megatron.new_layout import NewLayout
from mcore_rlhf.families.megatron.run_config import (
    UNTIED,
    TrainState,
    arguments_beside,
    train_state_beside,
)
from mcore_rlhf.families.megatron.state import (
    COUNTER,
    GONE,
    SCHEDULER_KEYS,
    UNSCHEDULED,
    MegatronState,
    scheduler_in,
)
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.families.run_folders import TRAIN_STATE, counted_above, named_step
from mcore_rlhf.families.source import FROZEN, ITERATION, Source, TrainingState, open_bytes
from mcore_rlhf.formats.base import Format
from mcore_rlhf.layouts.parallel import ParallelConfig
from mcore_rlhf.layouts.pipeline import model_chunks
from mcore_rlhf.models.megatron import EMBEDDING, OUTPUT, registration_order
from mcore_rlhf.models.spec import ModelSpec
from mcore_rlhf.storage.dcp.folder import DcpObject
from mcore_rlhf.storage.paths import ReadablePath
from mcore_rlhf.storage.record_file import StoredFile

from .bridged import BridgedWeights, described, with_weights
from .buckets import FlatStates
from .complete import refuse_adapter, require_entries
from .folders import DistFolder, ShardKey, digests_in, is_fsdp_folder, is_torch_dcp_folder, locate_dist
from .fsdp import FsdpFolder
from .modelopt import modelopt_in
from .names import KeySpelling, spelling_of_keys
from .objects import EXTRA, RNG, DistState, dist_ranks, idle_objects, opaque_values, other_objects
from .optimizer import (
    CONTENT,
    DP_RESHARDABLE,
    FULLY_RESHARDABLE,
    OptimizerValues,
    read_optimizer,
    trained_states,
    with_steps,
)
from .parameters import Parameters, SpecFinder
from .tensors import DistTensors
from .torch_dcp import TorchDcpFolder

_FAULT = (
    "Megatron-core (seen with 0.16.1; every release up to 0.19.2 has it) does that to a fully_reshardable save of a run with overlapping "
    "gradient reduction and several padded buckets: states of other parameters are stored under these names, and a resumed run goes "
    "wrong without a word. Go back to a step that was saved as torch or dp_reshardable, or start with a new optimizer; in the run, leave "
    "out --dist-ckpt-optim-fully-reshardable or --overlap-grad-reduce."
)
_PLACED = {"args", "optimizer", "rng_state", CONTENT, *SCHEDULER_KEYS}


def read_dist(path: ReadablePath, options: ReadOptions, weights: Format, ranks: Format) -> Source:
    """Open a checkpoint.

    Args:
        path: A root with a tracker, or an ``iter_XXXXXXX`` folder.
        options: Which step, which rules.
        weights: The format of weights that lie beside a folder which has none.
        ranks: That of weights as each rank has them, which may.

    Raises:
        CheckpointError: It is incomplete, damaged, or contradicts itself.
    """
    located = locate_dist(path, options.step)
    kinds = ((is_fsdp_folder, FsdpFolder), (is_torch_dcp_folder, TorchDcpFolder))
    kind = next((kind for is_kind, kind in kinds if is_kind(located.folder)), DistFolder)
    folder = kind.open(located, options)
    bridged = None if folder.model else BridgedWeights.of(folder, weights, ranks, options)
    if bridged is not None and not options.optimizer:
        return bridged.alone(folder.located)
    stored = folder.top.get("iteration")
    if located.iteration is not None and stored is not None and stored != located.iteration:
        raise LayoutMismatch(
            f"{located.folder.name}: the folder is of iteration {located.iteration}, {folder.common_file} is of iteration {stored}\n"
            "Files of two checkpoints are mixed, or a folder was renamed."
        )
    try:
        return _DistReader(folder, options, bridged).source()
    except LayoutMismatch:
        if not folder.flat or "transformer_impl" in stored_arguments(folder.top) or arguments_beside(located.folder)[1]:
            raise
        with suppress(CheckpointError):
            return _DistReader(folder, options, bridged, local=True).source()
        raise


_LOCAL: Rule[object] = Rule(
    Fate.NOTE, "flat buffers lie as those of --transformer-impl local: norms of layers have names of their own"
)
_BESIDE: Rule[str] = Rule(Fate.NOTE, "the weights are those of {found}, with Megatron's optimizer beside", str)
_APART: Rule[DistFolder] = Rule(
    Fate.LOST, "{found}: other than {0.common_file} says, which was taken", lambda folder: list(folder.apart), contradicts=True
)  # fmt: skip
_SHARED_RNG: Rule[tuple[ParallelConfig, Mapping[ShardKey, DcpObject]]] = Rule(
    Fate.NOTE,
    "RNG states: Megatron stored those of one rank for each (stage, tensor-parallel rank) and none of the others' "
    "(EP {0[0].ep}, DP {0[0].dp}); all ranks resume with them",
    lambda asked: asked[0].ep > 1 and asked[1] and all(len(key.index) < 3 for key in asked[1]),
)
"""Since 0.17 the ranks that differ in their experts share one object: what the others had is not there."""
_OTHER_DEGREES: Rule[tuple[Arguments, ParallelConfig, Mapping[ShardKey, DcpObject]]] = Rule(
    Fate.NOTE,
    "{0[0].where} are of PP {0[1].pp} and TP {0[1].tp}, and the random states of PP {found[0]} and TP {found[1]}: one is of another run",
    lambda asked: next((k.shape[:2] for k in asked[2] if len(k.shape) > 1 and k.shape[:2] != (asked[1].pp, asked[1].tp)), None),
    contradicts=True,
)  # fmt: skip
_UNTOLD: Rule[object] = Rule(
    Fate.NOTE, f"optimizer states: may be those of other parameters, which no master tells here. {_FAULT}"
)


class _DistReader:
    """Builds the Source of an opened folder."""

    def __init__(
        self, folder: DistFolder, options: ReadOptions, bridged: BridgedWeights | None, *, local: bool = False
    ) -> None:
        self.folder, self.options, self.bridged, self.notes = folder, options, bridged, Report()
        self.train_state = self._train_state()
        self.args = self._arguments()
        self.weights = self._weights()
        folder = self.folder
        refuse_adapter(folder)
        self.parallel = self._parallel()
        self.spelling: KeySpelling = spelling_of_keys(folder.model, self.args)
        if local:  # keys are the same, and the order of registration is not
            self.spelling = replace(self.spelling, separate_norms=True)
            self.notes.through([_LOCAL], None)
        self.parameters = Parameters(folder.model, self.spelling)
        require_entries(folder, self.args, optimizer=options.optimizer)
        self.optimizer = read_optimizer(folder, self.args) if options.optimizer else OptimizerValues()
        masters = folder.masters_of_model if isinstance(folder, FsdpFolder) else {}
        self.unrounded = frozenset(n for n, homes in self.parameters.homes.items() if homes[0].key in masters)

    def _train_state(self) -> TrainState | None:
        """Megatron-Bridge's counters.

        Raises:
            LayoutMismatch: They are of another iteration.
        """
        located = self.folder.located
        found = train_state_beside(located.folder, self.options.stubs)
        if found is not None and located.iteration is not None and found.step != located.iteration:
            raise LayoutMismatch(
                f"{located.folder / TRAIN_STATE}: is of step {found.step}, its folder of iteration {located.iteration}\n"
                "Files of two checkpoints are mixed, or a folder was renamed."
            )
        return found

    def _arguments(self) -> Arguments:
        """Those that are stored, or what the run's configuration beside them amounts to."""
        stored, located = stored_arguments(self.folder.top), self.folder.located
        file, beside = ("", {}) if stored else arguments_beside(located.folder)
        if not beside:
            return Arguments(stored, f"args in {self.folder.common_file}")
        self._note_arguments(f"they are those of {file} beside it")
        counters = {} if self.train_state is None else self.train_state.counters
        model = self.folder.model
        tied = {UNTIED: OUTPUT in model} if model else {}  # which the fields of a TransformerConfig do not say
        where = f"{located.folder.name}/{file}" if (located.folder / file).is_file() else file
        return Arguments({**tied, **beside, **counters}, f"args in {where}")

    def _weights(self) -> Source | None:
        """Those that lie elsewhere, under Megatron's names; the folder gets their keys."""
        if self.bridged is None:
            return None
        seen = self.bridged.in_megatron(self.args, self.options)
        self.args = described(self.args, seen.state.args)
        self.folder = with_weights(self.folder, seen, self.args)
        self.notes.through([_BESIDE], self.bridged.place)
        return seen

    def _note_arguments(self, instead: str) -> None:
        self.notes.through([NO_ARGUMENTS], {"file": self.folder.common_file, "instead": instead})

    def _of_ranks(self) -> MegatronState | None:
        """What the weights' own files have of each rank; None where they lie here, or are another family's."""
        own = self.bridged is not None and self.bridged.of_ranks
        return MegatronState.of(self.weights) if own and self.weights is not None else None

    def source(self) -> Source:
        """The checkpoint."""
        opaque = opaque_values(self.folder, self.spelling)
        of_ranks = self._of_ranks()
        order = self._order(opaque) if of_ranks is None else of_ranks.order
        model, unknown = self._model(order)
        role = self.options.role or "actor"
        flat = self._flat(role, model, order)
        own = self._own_states(model, flat)
        model = self._with_frozen(model, own)
        masters = self.folder.tensors.get(MASTER, {}) if self.unrounded else {}
        tensors = self.folder.tensors if self.options.optimizer else {PARAM: self.folder.model, MASTER: masters}
        stored = DistTensors(
            role=role,
            model=model,
            states=self.optimizer.states or ((MASTER,) if masters else ()),
            unrounded=self.unrounded,
            homes=self.parameters.homes,
            tensors=tensors,
            axes=self.parameters.axes,
            flat=flat,
            weights=None if self.weights is None else self.weights.catalog,
            own=own,
        )
        shards = dist_ranks(self.folder, self.parallel, opaque)
        if of_ranks is not None:
            by_folder = {shard.at.folder: shard for shard in of_ranks.shards}
            shards = [replace(by_folder[shard.at.folder], top=shard.top) for shard in shards]
        rng = {key: item for key, item in self.folder.objects.items() if key.key == RNG}
        family = DistState(
            located=self.folder.located,
            args=self.args,
            shards=shards,
            order=order,
            unknown=unknown,
            scalars=self.optimizer.scalars,
            by_size=self.optimizer.by_size,
            rng=rng,
            others=other_objects(self.folder),
            sharding=self.optimizer.sharding,
            idle=idle_objects(self.folder.top),
        )
        self.notes.through([_SHARED_RNG], (self.parallel, rng))
        self.notes.through([_APART], self.folder)
        self.notes.through([_OTHER_DEGREES], (self.args, self.parallel, rng))
        self.notes.through(GAPS, (self.folder.around, self.parallel.world_size))
        modelopt, its_files = modelopt_in(self.folder.located, self.options)
        source = Source(
            format="megatron-dist",
            root=self.folder.located.root,
            role=role,
            model=model,
            parallel=self.parallel,
            catalog=stored.table(),
            state=self._state({} if modelopt is None else {MODELOPT: modelopt}),
            files=self._files(its_files),
            states=stored.states,
            optimizer=self.optimizer.kind,
            notes=self.notes,
            family=family,
            distrust=self._distrust(),
            unplaced=self._unplaced(),
            parity=not self.args.has_narrow_params,
            digests=digests_in(self.folder.located),
        )
        if self.optimizer.kind != DISTRIBUTED or not self.args.flag("use_precision_aware_optimizer"):
            return source
        from mcore_rlhf.families.megatron.remainders import has_remainders, with_masters_joined  # needs numpy

        joined = with_masters_joined(source)
        if joined.distrust and (not joined.parity or has_remainders(joined)):
            self.notes.through([_UNTOLD], None)
        return joined

    def _unplaced(self) -> tuple[str, ...]:
        found = Unplaced()
        if self.train_state is not None:
            found.look(self.train_state.directory.path.name, self.train_state.rest, {})
        if self.optimizer.kind is not None:
            stored = self.folder.top.get("optimizer")
            look_at_optimizer(found, self.folder.common_file, stored)
            for number, member in stored.items() if isinstance(stored, dict) else ():
                if isinstance(member, dict) and "grad_scaler" in member:  # chained ones may have come to other scales
                    own, first = {"grad_scaler": member["grad_scaler"]}, {"grad_scaler": self.optimizer.scaler}
                    found.compare(self.folder.common_file, own, first, f"optimizer.{number}")
        odd = (
            f"{names[0]} and {len(names) - 1} more states that are not shaped like their weights"
            for names in self.optimizer.odd.values()
        )
        return (*found.names, *odd)

    def _distrust(self) -> str:
        """A fault of the framework that wrote the optimizer's states: it needs several buckets, whose ends are padded.

        It cuts the parameters' states out of the concatenated buckets at offsets that count the padding between them, which is
        not there. Source: megatron-core 0.16.1, ``optimizer/distrib_optimizer.py`` (``sharded_param_state_fully_reshardable``,
        which warns of it only where it runs out of elements).
        """
        overlapped = self.args.flag("overlap_grad_reduce", default=True)
        return _FAULT if self.optimizer.sharding == FULLY_RESHARDABLE and overlapped else ""

    def _parallel(self) -> ParallelConfig:
        """The degrees in the arguments, or, where there are none, those that the random states tell, or how parameters are cut."""
        if self.args.values:
            return self.args.parallel()
        shapes = {key.shape for key in self.folder.objects if key.key == RNG}
        pp, tp = next(iter(shapes))[:2] if shapes else self._cuts()
        found = ParallelConfig(tp=tp, pp=pp, etp=tp)
        how = "the random states are those of" if shapes else "parameters and buffers are cut as those of"
        self._note_arguments(f"{how} {found}")
        return found

    def _cuts(self) -> tuple[int, int]:
        """Stages, and ranks that share a parameter: SkyRL stores each rank's random states nowhere.

        The embedding is cut by rows, and each combination of both has flat buffers of its own where it has any.
        """
        embedding = self.folder.model.get(EMBEDDING)
        tp = len({box.offset[0] for box in embedding.boxes}) if embedding is not None else 1
        groups = {key.group for key in self.folder.flat if key.member == 0}
        return max(1, len(groups) // max(tp, 1)), max(tp, 1)

    def _order(self, opaque: Iterable[str]) -> list[str]:
        """All names, in registration order; Megatron leaves the output layer's opaque value out, a live model has it."""
        names = {*self.parameters.homes, *opaque}
        names |= _left_out(self.parameters.homes, self.args) if not opaque else set()
        head = self.folder.model.get(OUTPUT)
        is_critic = head is not None and head.global_shape[0] == 1  # whose head is no module of Megatron's
        if any(name.endswith(EXTRA) for name in names) and not is_critic:
            names.add(f"output_layer.{EXTRA}")
        return registration_order(names)

    def _model(self, order: list[str]) -> tuple[ModelSpec, list[str]]:
        unknown: list[str] = []
        finder = SpecFinder(self.parameters, self.args, self.parallel, self.options.rules, self.notes, unknown)
        specs = finder.specs([name for name in order if name in self.parameters.homes])
        half = BFLOAT16 if self.args.flag("bf16") else FLOAT16
        specs = [replace(spec, dtype=half) if spec.name in self.unrounded else spec for spec in specs]
        rows = next((spec.global_shape[0] for spec in specs if spec.name == EMBEDDING), None)
        args = self.args
        tied = args.tied if args.values else OUTPUT not in self.parameters.homes
        model = ModelSpec(
            tuple(specs), self.parameters.num_layers(), tied, args.mtp_layers, args.num_experts,
            self.options.vocab_size or args.vocab_size, rows,
        )  # fmt: skip
        check_against_arguments(args, args.where.removeprefix("args in "), model, None, self.parallel)
        require_complete(str(self.folder.located.folder), self.parameters.homes, args)
        return model, unknown

    def _flat(self, role: str, model: ModelSpec, order: list[str]) -> FlatStates | None:
        """Where states lie in flat buffers, if they do."""
        dealt = self.optimizer.kind == DISTRIBUTED and self.optimizer.sharding == DP_RESHARDABLE
        if not (dealt or self.optimizer.flat):
            return None
        parallel, split = self.parallel, self.args.pipeline_split
        chunks = model_chunks(model.num_layers, parallel.pp, parallel.vpp, split, model.mtp_layers)
        choices = NewLayout(parallel, split, model.padded_vocab_size, None, DISTRIBUTED, "drop")

        def blueprint(trained: ModelSpec) -> Blueprint:
            return Blueprint(role, trained, self.args, choices, chunks, order, (), {})

        def laid_out(trained: ModelSpec) -> FlatStates:
            flat = FlatStates(self.folder, self.optimizer.flat)
            flat.add(blueprint(trained))
            return flat

        try:
            return laid_out(model)
        except (LayoutMismatch, Unsupported):
            part = adapters_alone(model) or self._trained_part(model, blueprint(model))
            if part is None:
                raise
            return laid_out(part)

    def _trained_part(self, model: ModelSpec, whole: Blueprint) -> ModelSpec | None:
        """The model with those parameters trained whose masters lie in flat buffers; None where that cannot be told."""
        from .trained import trained_in  # needs numpy

        if self.weights is not None or not {PARAM, MASTER} <= {PARAM, *self.optimizer.flat}:
            return None
        params = DistTensors(
            role=whole.role, model=model, states=(), homes=self.parameters.homes, tensors={PARAM: self.folder.model},
            axes=self.parameters.axes,
        )  # fmt: skip
        flat = FlatStates(self.folder, self.optimizer.flat)
        flat.collect()
        with open_bytes(self.folder.located.root, None) as files:
            found = trained_in(flat, whole, params.table(), files)
        return (
            model.having(replace(s, trainable=s.trainable and s.name in found) for s in model.params) if found else None
        )

    def _own_states(self, model: ModelSpec, flat: FlatStates | None) -> dict[str, tuple[str, ...]]:
        """The states of every parameter that has some."""
        if self.optimizer.kind is None:
            return {}
        if not self.optimizer.states:  # SGD without momentum
            return {spec.name: () for spec in model.params if spec.trainable}
        if flat is not None and set(self.optimizer.flat) == set(self.optimizer.states):
            return flat.own
        keys = {name: frozenset(home.key for home in homes) for name, homes in self.parameters.homes.items()}
        found = trained_states(self.folder, self.optimizer, model.params, keys, self.args.has_matrix_optimizer)
        return found if flat is None else {**found, **flat.own}

    def _with_frozen(self, model: ModelSpec, trained: Mapping[str, tuple[str, ...]]) -> ModelSpec:
        """The model, with those parameters frozen that the optimizer has no states for."""
        if self.optimizer.kind is None:
            return model
        frozen = [spec.name for spec in model.params if spec.trainable and spec.name not in trained]
        self.notes.through([FROZEN], frozen)
        params = ((spec.name, len(spec.global_shape)) for spec in model.params if spec.name in trained)
        apart = self.args.experts_apart(self.parallel)
        membership = Membership(self.args, self.options.rules)
        membership.require(self.folder.common_file, params, self.optimizer.groups, apart)
        return model.having(replace(s, trainable=s.trainable and s.name in trained) for s in model.params)

    def _files(self, its_files: Iterable[StoredFile]) -> tuple[StoredFile, ...]:
        """All files, each once."""
        weights = () if self.weights is None else self.weights.files
        found = (*self.folder.files(), *its_files, *self._counted(), *weights)
        return tuple({one.path: one for one in found}.values())

    def _counted(self) -> tuple[StoredFile, ...]:
        """The file of Bridge's counters."""
        if self.train_state is None:
            return ()
        path = (self.folder.located.folder / TRAIN_STATE).relative_to(self.folder.located.root).as_posix()
        return (StoredFile.of_zip(path, self.train_state.directory),)

    def _state(self, beside: Mapping[str, object]) -> TrainingState:
        if self.train_state is not None and self.train_state.operations is not None:
            beside = {COUNTER: self.train_state.operations, **beside}
        top, located = self.folder.top, self.folder.located
        scheduler, (in_samples, in_steps) = scheduler_in(top, self.notes), map(top.get, SCHEDULER_KEYS)
        by_steps = in_samples is None and in_steps is not None
        self.notes.through([UNSCHEDULED], (self.optimizer.kind, scheduler))
        self.notes.through([GONE], located)
        iteration = self._iteration()
        return TrainingState(
            iteration=iteration,
            release=located.release,
            args=dict(self.args.values),
            groups=with_steps(self.optimizer, self.args, iteration, scheduler, self.notes, by_steps=by_steps),
            scheduler=None if scheduler is None else dict(scheduler),
            grad_scaler=self.optimizer.scaler,
            other={**{key: value for key, value in top.items() if key not in _PLACED}, **beside},
            by_steps=by_steps,
        )

    def _iteration(self) -> int:
        """What the files say, or the folder; where neither does, or both always say 0, what the folders above are called."""
        stored, located = self.folder.top.get("iteration"), self.folder.located
        said = stored if isinstance(stored, int) else located.iteration
        above = named_step(located.folder) if said is None else None if said else counted_above(located.folder)
        if located.release:
            return said or 0
        if above is None and said is None and (counted := self.folder.around.counted):
            how, above = "as many updates as its schedule counts, since no name and no counters say more", counted
        elif above is None:
            return said or 0
        else:
            where = "the step's counters, or its name" if self._of_ranks() else "the name of the step's folder"
            how = f"from {where}, since {self._silent(said)}"
        self.notes.through([ITERATION], {"at": above, "how": how})
        return above

    def _silent(self, said: int | None) -> str:
        name = self.folder.located.folder.name
        return f"{name} says none" if said is None else f"its trainer calls every step's {name}"


def _left_out(names: Iterable[str], args: Arguments) -> set[str]:
    """Opaque values that a live model has though none is stored: with ``--ckpt-drop-redundant-extra-state`` they are left out where they
    say nothing, and other releases insist on them.
    """
    modules = {name.rpartition(".")[0] for name in names}
    kinds = ("linear_", "eh_proj", *(("in_proj", "out_proj") if args.transformer_engine else ()))
    found = {module for module in modules if module.rpartition(".")[2].startswith(kinds)}
    if args.transformer_engine:
        found |= {module for module in modules if module.endswith("norm")}
    return {f"{module}.{EXTRA}" for module in found}
