"""Opening a ``torch_dist`` checkpoint: its folder, arguments, names and optimizer become one Source."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

from mcore_rlhf.core.account import Fate, Inventory, Item, Kind, Report
from mcore_rlhf.core.names import PARAM
from mcore_rlhf.errors import Incomplete, LayoutMismatch
from mcore_rlhf.families.inventory import Unplaced, state_dict_of
from mcore_rlhf.families.megatron.arguments import DISTRIBUTED, Arguments, check_against_arguments, stored_arguments
from mcore_rlhf.families.megatron.groups import look_at_optimizer
from mcore_rlhf.families.megatron.layout import Blueprint
from mcore_rlhf.families.megatron.new_run import Choices
from mcore_rlhf.families.megatron.state import OF_RANKS, SCHEDULER_KEYS, MegatronState
from mcore_rlhf.families.source import ReadOptions, Source, TrainingState
from mcore_rlhf.layouts.parallel import ParallelConfig
from mcore_rlhf.layouts.pipeline import model_chunks
from mcore_rlhf.models.megatron import EMBEDDING, OUTPUT
from mcore_rlhf.models.spec import ModelSpec
from mcore_rlhf.storage.dcp import DcpObject

from .catalog import DistCatalog
from .flat import FlatStates
from .folders import locate_dist
from .names import Spelling, spelling_of_keys
from .opened import DistFolder, ShardKey
from .optimizer import CONTENT, DP_RESHARDABLE, FULLY_RESHARDABLE, OptimizerValues, read_optimizer, trained_names
from .order import registration_order
from .parameters import Parameters, SpecFinder
from .ranks import EXTRA, RNG, dist_ranks, opaque_values, other_objects

_FAULT = (
    "Megatron-core (seen with 0.16.1) does that to a fully_reshardable save of a run with overlapping gradient reduction and several "
    "padded buckets: states of other parameters are stored under these names, and a resumed run goes wrong without a word. "
    "Go back to a step that was saved as torch or dp_reshardable, or start with a new optimizer; in the run, leave out "
    "--dist-ckpt-optim-fully-reshardable or --overlap-grad-reduce."
)
_PLACED = {"args", "optimizer", "rng_state", CONTENT, *SCHEDULER_KEYS}


@dataclass(slots=True)
class DistState(MegatronState):
    """What only a ``torch_dist`` target needs besides what every Megatron target does.

    Args:
        rng: The random states of every rank.
        others: Objects that nobody knows.
        sharding: How the distributed optimizer's states are stored.
    """

    rng: Mapping[ShardKey, DcpObject] = field(default_factory=dict)
    others: Mapping[ShardKey, DcpObject] = field(default_factory=dict)
    sharding: str | None = None

    def inventory(self) -> Inventory:
        """What its ranks have, item by item, beside what all of them share."""
        return {
            **MegatronState.inventory(self),
            **({OF_RANKS[RNG]: tuple(self.rng.values())} if self.rng else {}),
            **{Item(Kind.VALUE, key.key): item for key, item in self.others.items()},
        }


def read_dist(path: Path, options: ReadOptions) -> Source:
    """Open a checkpoint.

    Args:
        path: A root with a tracker, or an ``iter_XXXXXXX`` folder.
        options: Which step, which rules.

    Raises:
        CheckpointError: It is incomplete, damaged, or contradicts itself.
    """
    located = locate_dist(path, options.step)
    folder = DistFolder.open(located, options.stubs)
    if not folder.model:
        raise Incomplete(f"{located.folder}: holds no tensor of a model")
    stored = folder.top.get("iteration")
    if located.iteration is not None and stored is not None and stored != located.iteration:
        raise LayoutMismatch(
            f"{located.folder.name}: the folder is of iteration {located.iteration}, {folder.common.file} is of iteration {stored}\n"
            "Files of two checkpoints are mixed, or a folder was renamed."
        )
    return _Reading(folder, options).source()


class _Reading:
    """Builds the Source of an opened folder."""

    def __init__(self, folder: DistFolder, options: ReadOptions) -> None:
        self.folder, self.options, self.notes = folder, options, Report()
        self.args = Arguments(stored_arguments(folder.top))
        self.parallel = self._parallel()
        self.spelling: Spelling = spelling_of_keys(folder.model, self.args)
        self.parameters = Parameters(folder.model, self.spelling)
        self.optimizer = read_optimizer(folder) if options.optimizer else OptimizerValues()

    def source(self) -> Source:
        """The checkpoint."""
        opaque = opaque_values(self.folder, self.spelling)
        order = self._order(opaque)
        model, unknown = self._model(order)
        role = self.options.role or "actor"
        flat = self._flat(role, model, order)
        model = self._with_frozen(model, flat)
        tensors = self.folder.tensors if self.options.optimizer else {PARAM: self.folder.model}
        catalog = DistCatalog(
            role, model, self.parameters.homes, tensors, self.parameters.axes, self.optimizer.states,
            None if flat is None else flat.chunks,
        )  # fmt: skip
        shards = dist_ranks(self.folder, self.parallel, opaque)
        rng = {key: item for key, item in self.folder.objects.items() if key.key == RNG}
        family = DistState(
            located=self.folder.located,
            args=self.args,
            shards=shards,
            order=order,
            unknown=unknown,
            scalars=self.optimizer.scalars,
            rng=rng,
            others=other_objects(self.folder),
            sharding=self.optimizer.sharding,
        )
        return Source(
            format="megatron-dist",
            root=self.folder.located.root,
            role=role,
            model=model,
            parallel=self.parallel,
            catalog=catalog,
            state=self._state(),
            files=self.folder.files(),
            states=self.optimizer.states,
            optimizer=self.optimizer.kind,
            notes=self.notes,
            family=family,
            distrust=self._distrust(),
            unplaced=self._unplaced(),
        )

    def _unplaced(self) -> tuple[str, ...]:
        found = Unplaced()
        if self.optimizer.kind is not None:
            look_at_optimizer(found, self.folder.common.file, self.folder.top.get("optimizer"))
        return found.names

    def _distrust(self) -> str:
        """A fault of the framework that wrote the optimizer's states: it needs several buckets, whose ends are padded.

        It cuts the parameters' states out of the concatenated buckets at offsets that count the padding between them, which is
        not there. Source: megatron-core 0.16.1, ``optimizer/distrib_optimizer.py`` (``sharded_param_state_fully_reshardable``,
        which warns of it only where it runs out of elements).
        """
        overlapped = self.args.flag("overlap_grad_reduce", default=not self.args.values)
        return _FAULT if self.optimizer.sharding == FULLY_RESHARDABLE and overlapped else ""

    def _parallel(self) -> ParallelConfig:
        """The degrees in the arguments, or, where there are none, those that the random states tell."""
        if self.args.values:
            return self.args.parallel()
        shapes = {key.shape for key in self.folder.objects if key.key == RNG}
        pp, tp = next(iter(shapes))[:2] if shapes else (1, 1)
        found = ParallelConfig(tp=tp, pp=pp, etp=tp)
        self.notes.add(Fate.NOTE, f"{self.folder.common.file} stores no args; the random states are those of {found}")
        return found

    def _order(self, opaque: Iterable[str]) -> list[str]:
        """All names, in registration order; Megatron leaves the output layer's opaque value out, a live model has it."""
        names = {*self.parameters.homes, *opaque}
        if any(name.endswith(EXTRA) for name in opaque):
            names.add(f"output_layer.{EXTRA}")
        return registration_order(names)

    def _model(self, order: list[str]) -> tuple[ModelSpec, list[str]]:
        unknown: list[str] = []
        finder = SpecFinder(self.parameters, self.args, self.parallel, self.options.rules, self.notes, unknown)
        specs = finder.specs([name for name in order if name in self.parameters.homes])
        rows = next((spec.global_shape[0] for spec in specs if spec.name == EMBEDDING), None)
        args = self.args
        tied = args.tied if args.values else OUTPUT not in self.parameters.homes
        model = ModelSpec(
            tuple(specs), self.parameters.num_layers(), tied, args.mtp_layers, args.num_experts,
            self.options.vocab_size or args.vocab_size, rows,
        )  # fmt: skip
        check_against_arguments(args, self.folder.common.file, model, None, self.parallel)
        return model, unknown

    def _flat(self, role: str, model: ModelSpec, order: list[str]) -> FlatStates | None:
        """Where states lie in flat buffers, if they do."""
        if self.optimizer.sharding != DP_RESHARDABLE or not self.options.optimizer:
            return None
        flat, parallel, split = FlatStates(self.folder, self.optimizer.states), self.parallel, self.args.pipeline_split
        chunks = model_chunks(model.num_layers, parallel.pp, parallel.vpp, split, model.mtp_layers)
        choices = Choices(parallel, split, model.padded_vocab_size, None, DISTRIBUTED, "drop")
        flat.add(Blueprint(role, model, self.args, choices, chunks, order, (), {}))
        return flat

    def _with_frozen(self, model: ModelSpec, flat: FlatStates | None) -> ModelSpec:
        """The model, with those parameters frozen that the optimizer has no states for."""
        if self.optimizer.kind is None:
            return model
        if flat is not None:
            trained = flat.names
        else:
            keys = {name: frozenset(home.key for home in homes) for name, homes in self.parameters.homes.items()}
            trained = trained_names(self.folder, self.optimizer, keys)
        frozen = [spec.name for spec in model.params if spec.trainable and spec.name not in trained]
        if frozen:
            some = ", ".join(frozen[:3]) + (", …" if len(frozen) > 3 else "")
            self.notes.add(Fate.NOTE, f"{len(frozen)} parameters have no optimizer state and count as frozen: {some}")
        return model.having(replace(s, trainable=s.trainable and s.name in trained) for s in model.params)

    def _state(self) -> TrainingState:
        top, located = self.folder.top, self.folder.located
        iteration = top.get("iteration", located.iteration)
        key = next((key for key in SCHEDULER_KEYS if top.get(key) is not None), SCHEDULER_KEYS[0])
        scheduler = state_dict_of(top.get(key), key, self.notes)
        if self.optimizer.kind is not None and scheduler is None:
            self.notes.add(
                Fate.NOTE,
                "there is an optimizer, but no scheduler state; Megatron will want --override-opt-param-scheduler",
            )
        return TrainingState(
            iteration=iteration if isinstance(iteration, int) else located.iteration or 0,
            release=located.release,
            args=dict(self.args.values),
            groups=self.optimizer.groups,
            scheduler=cast(dict[str, object], self.folder.common.materialize(scheduler))
            if scheduler is not None
            else None,
            grad_scaler=self.optimizer.scaler,
            other={key: self.folder.common.materialize(value) for key, value in top.items() if key not in _PLACED},
        )
