"""Describing a new ``torch_dist`` checkpoint from an opened source: fully reshardable, so that it loads on any layout, unless the flat
buckets of ``dp_reshardable`` are asked for, which load on one.

Its ``.distcp`` files hold every state of every parameter, cut as the new layout's ranks would store it: any cut loads on any layout,
this one lets a rank of the new layout read whole pieces. ``common.pt`` is what all ranks share, built as Megatron-LM builds it.

Sources: Megatron-LM core_v0.16.1, ``megatron/training/checkpointing.py`` (``generate_state_dict``,
``_build_sharded_state_dict_metadata``); megatron-core 0.16.1, ``optimizer/optimizer.py``, ``optimizer/distrib_optimizer.py``
(``sharded_state_dict``), of which what is not sharded is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from math import prod

from mcore_rlhf.core.catalog import (
    FLOAT32,
    MASTER,
    PARAM,
    Box,
    Chunk,
    DType,
    Record,
    Shape,
    TensorEntry,
    TensorName,
    row_major,
)
from mcore_rlhf.core.chunks import Chunks
from mcore_rlhf.core.facts import Fate, Rule
from mcore_rlhf.errors import CheckpointError, Problems, Unsupported, UsageError
from mcore_rlhf.families.dist_parts import DistParts
from mcore_rlhf.families.megatron.arguments import Arguments
from mcore_rlhf.families.megatron.folders import TRACKER, iteration_folder_name
from mcore_rlhf.families.megatron.groups import is_matrix
from mcore_rlhf.families.megatron.layout import Blueprint
from mcore_rlhf.families.megatron.modelopt import KEY
from mcore_rlhf.families.megatron.new_run import NewRun
from mcore_rlhf.families.megatron.remainders import remainder_dtype
from mcore_rlhf.families.megatron.rules import RULES
from mcore_rlhf.families.options import WriteOptions
from mcore_rlhf.families.source import Source
from mcore_rlhf.formats.base import FileLayout, Format, Target, TargetFile
from mcore_rlhf.layouts.pipeline import model_chunks
from mcore_rlhf.layouts.tensor import Shard, local_layout
from mcore_rlhf.models.megatron import is_buffer, is_routed_expert
from mcore_rlhf.models.spec import ParamSpec
from mcore_rlhf.storage.dcp import METADATA_FILE
from mcore_rlhf.storage.dcp.writer import Distcp, Item, ObjectItem, TensorItem, dcp_metadata, records
from mcore_rlhf.storage.pt import Pt

from .adapted import WRAPPED, optimizer_alone, weights_beside, with_beside
from .buckets import BucketContents, FilePart, dealt
from .common import RULES as RULES_OF_SHARDING
from .common import Tree, common_tree, is_distributed, of_model, of_optimizer, of_run, optimizers, prefixed, sharding_of
from .folders import BACKEND, COMMON, CONFIG, CONFIG_TEXT, INTEGRITY, MASTERS, integrity_of
from .modelopt import RULES as OF_MODELOPT
from .modelopt import modelopt_files
from .names import Home, KeySpelling, home_of, homes_of, spelling_of_names, stacked, without_holes
from .objects import RULES as OF_OBJECTS
from .objects import Objects, rng_ranks
from .optimizer import CONTENT, DP_RESHARDABLE, FULLY_RESHARDABLE, MODEL_SPACE
from .split import contents_of
from .tensors import even_cells, gridded


def dist_target(source: Source, options: WriteOptions, weights: Format, ranks: Format) -> Target:
    """Describe the ``torch_dist`` checkpoint that holds what the source has.

    Args:
        source: An opened checkpoint.
        options: What the user asked for.
        weights: The format of weights that a trainer has in the place of Megatron's own.
        ranks: That of weights as each rank has them, which another has there.

    Raises:
        CheckpointError: It cannot be done; all problems together.
    """
    if options.like is not None and options.run_of.parts is None:
        raise UsageError("--like: a Megatron checkpoint depends on nothing that another one would show\nLeave it out.")
    run = NewRun.of(source, options, "megatron-dist", BACKEND)
    spelling = _spelling(run)
    return _DistWriter(run, spelling, source.model.num_layers, weights_beside(run, weights, ranks)).target()


def _usual_spelling(run: NewRun) -> KeySpelling:
    return spelling_of_names([spec.name for spec in run.source.model.params], run.family.args)


def _spelling(run: NewRun) -> KeySpelling:
    """Which keys the parameters have: where some of a kind are frozen, layers and experts have keys of their own.

    Raises:
        Unsupported: Experts would need them in a checkpoint for releases that have none.
    """
    params, usual = run.source.model.params, _usual_spelling(run)
    if run.choices.optimizer is None or sharding_of(run) == DP_RESHARDABLE or all(spec.trainable for spec in params):
        return usual
    named = (spec for spec in params if not is_buffer(spec.name))
    found = without_holes(usual, {spec.name: (spec.trainable, run.states_of.get(spec.name)) for spec in named})
    if found.singleton and sharding_of(run) == MODEL_SPACE:
        raise Unsupported(
            f"some experts of a layer are trained and others are not: {MODEL_SPACE} has a state of all of them in one tensor\n"
            "Leave out --optimizer-sharding: fully_reshardable has each by itself."
        )
    return found


@dataclass
class _DistWriter:
    run: NewRun
    spelling: KeySpelling
    num_layers: int
    bridged: Target | None = None
    folders: list[_Folder] = field(init=False)

    def __post_init__(self) -> None:
        objects = Objects(self.run, self.spelling, self.num_layers)
        parts = self.run.options.run_of.parts
        self.folders = [self._whole(objects)] if parts is None or parts.is_one else self._in_parts(objects, parts)
        self.run.report.through(RULES, self.run)
        self.run.report.through(OF_OBJECTS, objects)
        self.run.report.through(
            (*(OF_MODELOPT if KEY in self.run.source.state.other else ()), *RULES_OF_SHARDING), self.run
        )
        self.run.report.through(_OF_KEYS, self)

    def _whole(self, objects: Objects) -> _Folder:
        """The folder of the iteration."""
        in_buckets = sharding_of(self.run) == DP_RESHARDABLE
        contents = Contents(self.run, self.spelling, self.num_layers, moments=not in_buckets)
        buckets = [self._buckets()] if in_buckets else []
        held = [*objects.items(), *(item for one in buckets for item in one.objects)]
        parts = self.run.options.run_of.parts
        if parts is None:
            return self._folder(iteration_folder_name(self.run.iteration), [contents, *buckets], held)
        return self._folder(parts.model, [contents, *buckets], held, partial(of_run, self.run, parts))

    def _folder(
        self, path: str, contents: list[Contents | BucketContents], held: list[ObjectItem],
        of_common: Callable[[Tree], Tree] = dict,
    ) -> _Folder:  # fmt: skip
        return _Folder(self.run, self.spelling, path, contents, held, of_common)

    def _in_parts(self, objects: Objects, parts: DistParts) -> list[_Folder]:
        """The folders of the weights, the optimizer, and the random states."""
        run, of_ranks = self.run, list(objects.of_ranks())
        weights, found = Contents(run, self.spelling, self.num_layers, moments=False), list[_Folder]()
        if self.bridged is None:
            found.append(self._folder(parts.model, [weights], list(objects.of_model()), of_model))
        if run.choices.optimizer is not None:
            in_buckets = sharding_of(run) == DP_RESHARDABLE
            states = self._buckets() if in_buckets else Contents(run, self.spelling, self.num_layers, params=False)
            held = [
                *(states.objects if isinstance(states, BucketContents) else []),
                *(of_ranks if parts.together else []),
            ]
            beside = partial(of_optimizer, scheduler=parts.scheduler, alone=self.bridged is not None)
            shared: Callable[[Tree], Tree] = optimizer_alone if parts.adapted else beside
            found.append(self._folder(parts.optimizer, [states], held, shared))
        if of_ranks and not parts.adapted and not (parts.together and found):
            found.append(self._folder(parts.extra, [], of_ranks, lambda tree: {CONTENT: tree[CONTENT]}))
        return found

    def _buckets(self) -> BucketContents:
        values = [tree for _, tree in optimizers(self.run)]
        master = remainder_dtype if self.run.keeps_remainders else lambda _: FLOAT32
        return BucketContents(_blueprint(self.run), self.run.moments, values, master)

    def target(self) -> Target:
        """The described checkpoint."""
        run, first = self.run, next((folder.path for folder in self.folders), "")
        parts = run.options.run_of.parts
        modelopt, beside = modelopt_files(run, first) if KEY in run.source.state.other else ([], {})
        said = {TRACKER: run.tracker} if parts is None else contents_of(run, parts)
        target = Target(
            format="megatron-dist",
            parallel=run.choices.parallel,
            source=run.view,
            files=(*modelopt, *(file for folder in self.folders for file in folder.files())),
            texts={
                **{name: text for folder in self.folders for name, text in folder.texts().items()},
                **said,
                **beside,
            },
            report=run.report,
            holds=run.holds(),
            sums={f"{one.path}/{INTEGRITY}": integrity_of for one in self.folders if run.options.integrity},
            needs=run.needs,
            described="" if parts is None else parts.described,
        )
        return target if self.bridged is None else with_beside(target, self.bridged, run)


@dataclass(frozen=True, slots=True)
class _Folder:
    """One folder that Megatron-core takes for a checkpoint: all of it, or what a trainer has in a folder of its own.

    Args:
        run: The checkpoint that is to be written.
        spelling: Which keys its parameters have.
        path: Relative to the root.
        contents: Its tensors.
        objects: What it has besides, by rank.
        of_common: What it has of what all ranks share.
    """

    run: NewRun
    spelling: KeySpelling
    path: str
    contents: list[Contents | BucketContents]
    objects: list[ObjectItem]
    of_common: Callable[[Tree], Tree] = dict

    def files(self) -> Iterator[TargetFile]:
        """Those that are large."""
        yield TargetFile(self._in(COMMON), self._common)
        for name, at in self._held().items():
            yield TargetFile(self._in(name), partial(self._file, name, at))

    def _in(self, name: str) -> str:
        return f"{self.path}/{name}" if self.path else name

    def texts(self) -> dict[str, str | bytes]:
        """The directory of the parts, and the small file that says what kind of checkpoint it is."""
        shapes = {fqn: shape for part in self.contents for fqn, shape in part.shapes().items()}
        of_parameters = [part for part in self.contents if isinstance(part, Contents)]
        flattened = {fqn: shape for part in of_parameters for fqn, shape in part.unflattened().items()}
        items = {name: self._items(at) for name, at in self._held().items()}
        metadata = dcp_metadata(shapes, items, unflattened=flattened)
        return {self._in(METADATA_FILE): metadata, self._in(CONFIG): CONFIG_TEXT}

    def _held(self) -> dict[str, _At]:
        held: list[_At] = [None] if self.objects else []
        held += [(part, number) for part in self.contents for number in range(len(part.files))]
        return {f"__{number}_0.distcp": at for number, at in enumerate(held)}

    def _items(self, at: _At) -> list[Item]:
        """What a file holds: the first the objects, the others tensors."""
        return [*self.objects] if at is None else [*at[0].items(at[1])]

    def _file(self, name: str, at: _At) -> FileLayout:
        items = self._items(at)
        found = records(self._in(name), items)
        entries = [] if at is None else at[0].entries(at[1], found)
        return FileLayout(Chunks.of(entries), found, Distcp(items))

    def _common(self) -> FileLayout:
        _, first = next(rng_ranks(self.run.choices.parallel))
        return FileLayout(Chunks(), (), Pt(lambda: self.of_common(common_tree(self.run, first, self.spelling))))


_OF_KEYS: tuple[Rule[_DistWriter], ...] = (
    Rule(Fate.NOTE, "a part of the layers or experts is trained, so each has keys of its own ({found}), which Megatron finds by the "
         "folder's content_metadata; itself it saves such a run as dp_reshardable or with --ckpt-format torch alone",
         lambda w: w.spelling != _usual_spelling(w.run)
         and ("singleton_local_shards" if w.spelling.singleton else "non_homogeneous_layers")),
    Rule(Fate.NOTE, "flat buffers lie as layers of --transformer-impl {found} register their parameters: a run with other layers loads "
         f"moments of other parameters without a word, where {FULLY_RESHARDABLE} is right for any",
         lambda w: sharding_of(w.run) == DP_RESHARDABLE and w.run.options.run_of.parts is not None
         and ("local" if w.spelling.separate_norms else "transformer_engine")),
    Rule(Fate.NOTE, "folders: {found}, as verl has them from 0.9 on; for a run of 0.8, --like FOLDER names a step of its own",
         lambda w: (of := w.run.options.run_of.parts) is not None and of.contents and not of.adapted
         and ", ".join(filter(None, (of.model or of.described, of.optimizer, of.extra)))),
)  # fmt: skip
"""Where keys are not as Megatron has them of a model that is trained whole; where they do not tell an order that matters."""


def _blueprint(run: NewRun) -> Blueprint:
    """The ranks of the new layout, whose buffers are to be laid out."""
    model, parallel = run.source.model, run.choices.parallel
    chunks = model_chunks(model.num_layers, parallel.pp, parallel.vpp, run.choices.split, model.mtp_layers)
    args = Arguments(run.arguments(None))
    return Blueprint(run.source.role, model, args, run.choices, chunks, run.family.order, (), run.state_dtypes)


@dataclass(frozen=True, slots=True)
class StatePart(FilePart[Box]):
    """Some of the boxes of one state of one parameter, in the parameter's own coordinates.

    Args:
        spec: The parameter, with the target's shape and dtype.
    """

    spec: ParamSpec


@dataclass(slots=True)
class Contents:
    """All tensors of a new checkpoint, dealt to files.

    Args:
        run: The checkpoint that is to be written.
        spelling: Which keys its parameters have.
        num_layers: Decoder layers.
        params: Whether the parameters lie here.
        moments: Whether the optimizer's states do, and not in flat buckets, or in a folder of their own.
    """

    run: NewRun
    spelling: KeySpelling
    num_layers: int
    params: bool = True
    moments: bool = True
    files: list[list[StatePart]] = field(init=False)
    _boxes: dict[object, tuple[Box, ...]] = field(default_factory=dict)
    _fqns: dict[tuple[str, str], str] = field(default_factory=dict)
    _kinds: dict[bool, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.files = dealt(list(self._parts()))

    def specs(self) -> Iterator[ParamSpec]:
        """The parameters that are stored, with the target's shape and dtype; ties are stored once."""
        model, choices = self.run.source.model, self.run.choices
        for spec in model.params:
            if spec.name in model.unused:
                continue
            if spec.partition.vocabulary and choices.padded_vocab_size is not None:
                spec = replace(spec, global_shape=(choices.padded_vocab_size, *spec.global_shape[1:]))
            yield replace(spec, dtype=choices.dtype) if choices.dtype is not None and spec.trainable else spec

    def states(self, spec: ParamSpec) -> Iterator[str]:
        """The states of a parameter that the target has."""
        if self.params:
            yield PARAM
        if self.run.choices.optimizer is None or not spec.trainable or not self.moments:
            return
        if self._distributed(spec) or spec.dtype != FLOAT32:
            yield MASTER
        yield from self.run.states_of.get(spec.name, ())

    def _dtype(self, spec: ParamSpec, state: str) -> DType:
        return spec.dtype if state == PARAM else self.run.state_dtypes.get(state, FLOAT32)

    def shapes(self) -> dict[str, Shape]:
        """Shapes of all tensors as they are stored, by their key in the checkpoint."""
        return {fqn: shape if cell is None else gridded(shape, cell) for fqn, (shape, cell) in self._shapes().items()}

    def unflattened(self) -> dict[str, Shape]:
        """Whole shapes of those that are stored in flattened cells."""
        shapes = self._shapes() if prefixed(self.run) else {}
        return {fqn: shape for fqn, (shape, cell) in shapes.items() if cell is not None}

    def _shapes(self) -> dict[str, tuple[Shape, Shape | None]]:
        """Whole shapes, and those of the cells, by key."""
        found: dict[str, tuple[Shape, Shape | None]] = {}
        experts = self.run.source.model.num_experts
        for part in (part for parts in self.files for part in parts):
            cells = self._cells(part.spec) if self._flattened(part.state) else {}
            for home, shape in stacked(part.spec, self.spelling, self.num_layers, experts):
                cell = home.turned(cells[home][0].shape) if home in cells else None
                found.setdefault(self.fqn(home, part), (shape, cell))
        return found

    def _flattened(self, state: str) -> bool:
        return state != PARAM and prefixed(self.run)

    def _cells(self, spec: ParamSpec) -> dict[Home, tuple[Box, ...]]:
        """The parts of a parameter by where they lie, alike in shape at each place."""
        boxes = self._boxes_of(spec)
        return {
            home: even_cells(boxes, first, (rows, *spec.global_shape[1:]))
            for home, first, rows in homes_of(spec, self.spelling)
        }

    def fqn(self, home: Home, part: StatePart) -> str:
        """The key of a tensor."""
        if (home.key, part.state) not in self._fqns:  # one string for hundreds of chunks
            kind = MODEL_SPACE if prefixed(self.run) else FULLY_RESHARDABLE
            master = MASTERS[kind if self._distributed(part.spec) else None]
            wrapped = WRAPPED if self.run.options.run_of.adapted else ""
            state = (
                f"{self._chained(part.spec)}optimizer.state.{master if part.state == MASTER else part.state}.{wrapped}"
            )
            self._fqns[home.key, part.state] = home.key if part.state == PARAM else f"{state}{home.key}"
        return self._fqns[home.key, part.state]

    def _chained(self, spec: ParamSpec) -> str:
        """What stands before the keys of one of several chained optimizers, where their numbers do."""
        parallel = self.run.choices.parallel
        if not prefixed(self.run) or not Arguments(self.run.arguments(None)).experts_apart(parallel):
            return ""
        return f"chained_{int(is_routed_expert(spec.name))}."

    def _distributed(self, spec: ParamSpec) -> bool:
        matrices = is_matrix(spec.name, len(spec.global_shape))
        if matrices not in self._kinds:
            self._kinds[matrices] = is_distributed(self.run, matrices=matrices)
        return self._kinds[matrices]

    def items(self, number: int) -> list[TensorItem]:
        """What one file holds, in its order."""
        return [item for part in self.files[number] for item in self._items(part)]

    def entries(self, number: int, records: Sequence[Record]) -> list[TensorEntry]:
        """Which parts of which parameters lie in one file.

        Args:
            number: The file.
            records: Its records.
        """
        by_key = {record.key: record for record in records}
        return [
            TensorEntry(
                TensorName(self.run.source.role, part.spec.name, part.state), part.spec.global_shape, part.dtype,
                tuple(self._chunks(part, by_key)),
            )
            for part in self.files[number]
        ]  # fmt: skip

    def _items(self, part: StatePart) -> Iterator[TensorItem]:
        homes = homes_of(part.spec, self.spelling)
        for box in part.chunks:
            home, start, _ = next(h for h in reversed(homes) if len(homes) == 1 or h[1] <= box.offset[0])
            offset = box.offset if not start else (box.offset[0] - start, *box.offset[1:])
            ones, at, cell = (1,) * len(home.index), home.turned(offset), home.turned(box.shape)
            if self._flattened(part.state):
                at = (*(o // max(n, 1) for o, n in zip(at, cell, strict=True)), 0)
                cell = (*(1,) * len(cell), prod(cell))
            yield TensorItem(self.fqn(home, part), part.dtype, (*home.index, *at), (*ones, *cell))

    def _chunks(self, part: StatePart, records: Mapping[str, Record]) -> Iterator[Chunk]:
        home = home_of(part.spec.name, self.spelling)
        for item, box in zip(self._items(part), part.chunks, strict=True):
            if box.numel:
                yield Chunk(box, records[item.key], 0, home.turned(row_major(home.turned(box.shape))))

    def _parts(self) -> Iterator[StatePart]:
        problems = Problems()
        for spec in self.specs():
            try:
                boxes = self._boxes_of(spec)
            except CheckpointError as error:
                problems.add(type(error), f"{spec.name}: {error}")
                continue
            for state in self.states(spec):
                cells = tuple(chain(*self._cells(spec).values())) if self._flattened(state) else boxes
                yield StatePart(state, self._dtype(spec, state), cells, spec)
        problems.raise_if_any()

    def _boxes_of(self, spec: ParamSpec) -> tuple[Box, ...]:
        """The distinct parts that the ranks of the new layout have of a parameter."""
        parallel, routed = self.run.choices.parallel, is_routed_expert(spec.name)
        key = (spec.partition, spec.global_shape, routed)
        if key not in self._boxes:
            degree = parallel.etp if routed else parallel.tp
            ranks = range(degree if spec.partition.dim is not None else 1)
            stacks = range(parallel.ep if spec.partition.stacked is not None else 1)
            layouts = (
                local_layout(spec.partition, spec.global_shape, Shard(rank, degree), Shard(stack, parallel.ep))
                for stack in stacks
                for rank in ranks
            )
            self._boxes[key] = tuple(piece.box for layout in layouts for piece in layout.pieces)
        return self._boxes[key]


_At = tuple[Contents | BucketContents, int] | None
"""Whose file of what number; None for that of the objects."""
