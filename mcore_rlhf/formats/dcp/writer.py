"""Describing a new DCP folder: parts become items of files, and the items say what stands in ``.metadata``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from mcore_rlhf.core import facts
from mcore_rlhf.core.account import Report
from mcore_rlhf.core.catalog import (
    PARAM,
    Box,
    Chunk,
    Shape,
    TensorEntry,
    TensorName,
    row_major,
)
from mcore_rlhf.core.chunks import Chunks
from mcore_rlhf.core.facts import Fate, Inventory, Kind, Reason, Rule
from mcore_rlhf.core.shares import EITHER, FROM_MASTERS
from mcore_rlhf.families.fsdp.masters import OF_MASTERS, Trained
from mcore_rlhf.families.fsdp.state import MADE, RNG
from mcore_rlhf.families.inventory import LEAVES_OUT, inventory_of, value_items
from mcore_rlhf.families.lora.names import OF_ADAPTER
from mcore_rlhf.families.module import ModuleState
from mcore_rlhf.families.options import WriteOptions
from mcore_rlhf.families.sidecar import UNHELD, Sidecar
from mcore_rlhf.families.source import Source
from mcore_rlhf.formats.base import FileLayout, PtLayout, Target, TargetFile
from mcore_rlhf.layouts.fsdp import cut
from mcore_rlhf.layouts.parallel import ParallelConfig
from mcore_rlhf.storage.dcp import METADATA_FILE
from mcore_rlhf.storage.dcp.metadata import Path_
from mcore_rlhf.storage.dcp.writer import Distcp, Item, ObjectItem, TensorItem, dcp_metadata, records
from mcore_rlhf.storage.stored import StoredTensor

from .content import Choices, Constant, Content, Part, Planned, choose, for_run, fused_of, rest_of
from .folders import APART, FULL_WEIGHTS
from .keys import ACCELERATE, KeyLayout, joined
from .state import DcpState


def dcp_target(source: Source, options: WriteOptions, *, apart: bool = False) -> Target:
    """Describe the DCP folder that holds what a source of module names has.

    Args:
        source: DeepSpeed's, universal, Hugging Face's, or a DCP folder itself.
        options: What the user asked for.
        apart: Whether model and optimizer are in accelerate's two folders, and nothing else is in them.

    Raises:
        CheckpointError: It cannot be done; all problems together.
    """
    source, report = for_run(source, options), source.notes.for_target()
    choices = choose(source, options)
    if apart:
        adapted = all(OF_ADAPTER.fullmatch(spec.name) for spec in source.model.params)
        layout = replace(ACCELERATE, optimizer=ACCELERATE.optimizer if choices.optimizer else None, adapted=adapted)
        choices = replace(choices, layout=layout, inner="", weights=False, apart=APART)
    content, own = _content(source, choices, {} if apart else rest_of(source, choices)), DcpState.of(source)
    if own:
        report.lines = [line for line in report.lines if line[1] not in own.differing]
    described = _DcpTarget(source, content.module, choices, content, content.view)
    if not apart:
        report.through(_RULES, described)
        report.through(LEAVES_OUT, options)
    return described.target(report)


def keyed(source: Source, options: WriteOptions, layout: KeyLayout) -> Content:
    """Model and optimizer of a source under keys of the caller's, for who reads them without a folder.

    Args:
        source: Any source of module names.
        options: What the user asked for.
        layout: How keys are made; without the optimizer's, the weights alone.

    Raises:
        CheckpointError: See :func:`dcp_target`.
    """
    choices = choose(source, replace(options, no_optimizer=options.no_optimizer or layout.optimizer is None))
    return _content(
        source, replace(choices, layout=layout if choices.optimizer else replace(layout, optimizer=None)), {}
    )


def _content(source: Source, choices: Choices, rest: Mapping[str, object]) -> Content:
    module = ModuleState.needed(source, "dcp")
    names = {spec.name: spec.name for spec in source.model.params} | dict(module.shared)
    order = FROM_MASTERS if choices.masters else EITHER
    view, fused = source.catalog.renamed(source.role, names).states({PARAM: order[PARAM]}), fused_of(source, choices)
    if fused:
        whole = {one.name: one for one in fused.values()}
        shares = {name: one.whole() for name, one in whole.items()}
        view = view.joined(source.catalog.recut(source.role, shares, {name: one.shape for name, one in whole.items()}))
    return Content(source, module, choices, view, rest, fused)


def _holds(source: Source, content: Content) -> Inventory:
    """Everything that is carried: what the keys have no place for travels in an item of its own."""
    if content.choices.bare:
        return {item: value for item, value in inventory_of(source).items() if item.kind in _BARE or item == _ITERATION}
    rest = dict(value_items(content.rest))
    held = {item: value for item, value in inventory_of(source).items() if item != _STATES}
    return {**held, **{item: value for item, value in rest.items() if item.kind is Kind.RNG}}


_BARE, _ITERATION = (Kind.GROUP, Kind.MODEL), facts.Item(Kind.VALUE, "iteration")
_STATES = facts.Item(Kind.RNG, RNG)
"""The random states that RLinf's loader asks for; a run's own, under other keys, are client state, and lie beside."""


@dataclass(frozen=True, slots=True)
class _DcpTarget:
    source: Source
    module: ModuleState
    choices: Choices
    content: Content
    view: Chunks

    def target(self, report: Report) -> Target:
        everything = list(self.content.parts())
        folders = {part: self.choices.folder_of(part.path) for part in everything}
        texts, lost = ({}, []) if self.choices.bare else self._sidecar().texts(_below(self.choices.inner, ""))
        files: list[TargetFile] = []
        for folder in dict.fromkeys(folders.values()):
            parts = [part for part in everything if folders[part] == folder]
            items = self._items(parts)
            keyed = {joined(part.path): part for part in parts if isinstance(part, Planned)}
            files += (_file(_below(folder, name), held, keyed) for name, held in items.items())
            texts[_below(folder, METADATA_FILE)] = dcp_metadata(_shapes(parts), items, _paths(parts))
        if self.choices.weights:
            files.append(TargetFile(FULL_WEIGHTS, self._weights_layout))
        report.through(UNHELD, lost)
        return Target(
            format="dcp",
            parallel=ParallelConfig(dp=self.choices.dp),
            source=self.view,
            files=tuple(files),
            texts=texts,
            report=report,
            holds=_holds(self.source, self.content),
        )

    def _sidecar(self) -> Sidecar:
        """Everything that the keys have no place for."""
        dtype, specs = self.choices.dtype, self.source.model.params
        dtypes = {s.name: dtype if dtype is not None and s.trainable else s.dtype for s in specs}
        fused = max((one.groups for one in self.content.fused.values()), default=0)
        return Sidecar.of(self.source.state, self.module.base(), specs, self.source.origin, dtypes=dtypes, fused=fused)

    def _items(self, parts: Sequence[Part]) -> dict[str, list[Item]]:
        """Items by file: a file for every rank; what is not cut goes into the first."""
        files: dict[str, list[Item]] = {f"__{rank}_0.distcp": [] for rank in range(self.choices.dp)}
        names = list(files)
        for part in parts:
            key = joined(part.path)
            if isinstance(part, Planned):
                boxes = cut(part.shape, self.choices.dp) if part.sharded else [Box.whole(part.shape)]
                for name, box in zip(names, boxes, strict=False):
                    files[name].append(TensorItem(key, part.dtype, box.offset, box.shape))
            elif isinstance(part, Constant):
                whole = Box.whole(part.shape)
                files[names[0]].append(TensorItem(key, part.dtype, whole.offset, whole.shape, part.data))
            else:
                files[names[0]].append(ObjectItem(key, part.data))
        return {name: held for name, held in files.items() if held}

    def _weights_layout(self) -> FileLayout:
        """RLinf's plain weights: names and tensors, tied ones stored once."""
        tree: dict[str, StoredTensor] = {}
        file = PtLayout(FULL_WEIGHTS)
        for part in self.content.model():
            owner = self.module.shared.get(part.name.param)
            if owner in tree:
                tree[part.name.param] = tree[owner]
                continue
            tree[part.name.param] = file.add(part.name, part.shape, part.dtype)
        return file.layout(tree)


def _below(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _file(path: str, items: list[Item], keyed: dict[str, Planned]) -> TargetFile:
    return TargetFile(path, partial(_layout, path, items, keyed))


def _layout(path: str, items: Sequence[Item], keyed: dict[str, Planned]) -> FileLayout:
    """What one ``.distcp`` file holds."""
    placed = {record.key: record for record in records(path, items)}
    holds: dict[TensorName, TensorEntry] = {}
    for item in items:
        if isinstance(item, TensorItem) and item.key in placed:
            part = keyed[item.fqn]
            chunk = Chunk(Box(item.offset, item.shape), placed[item.key], 0, row_major(item.shape))
            holds[part.name] = TensorEntry(part.name, part.shape, part.dtype, (chunk,))
    return FileLayout(Chunks.of(holds.values()), list(placed.values()), Distcp(items))


def _shapes(parts: Sequence[Part]) -> dict[str, Shape]:
    return {joined(part.path): part.shape for part in parts if isinstance(part, Planned | Constant)}


def _paths(parts: Sequence[Part]) -> dict[str, Path_]:
    return {joined(part.path): part.path for part in parts}


def _is_new(t: _DcpTarget) -> bool:
    return DcpState.of(t.source) is None


def _had_rng(t: _DcpTarget) -> bool:
    own = DcpState.of(t.source)
    return RNG in (t.source.state.other if own is None else own.rest)


_OF_RNG = [facts.Item(Kind.RNG)]
_OF_RUN = (Kind.SCHEDULER, Kind.SCALER, Kind.RNG)


def _has_more(source: Source) -> bool:
    """Whether a run has a schedule, random states or values of its own."""
    items = inventory_of(source)
    return any(item.kind in _OF_RUN or (item.kind is Kind.VALUE and item != _ITERATION) for item in items)


_RULES: tuple[Rule[_DcpTarget], ...] = (
    Rule(Fate.CHANGED, "every tensor is cut in {found}, which any number of ranks loads; "
         "{0.source.parallel.world_size} ranks wrote the source",
         lambda t: t.choices.dp != t.source.parallel.dp and ("one part" if t.choices.dp == 1 else f"{t.choices.dp} parts")),
    MADE.of_part(lambda t: t.source if t.choices.made else None),
    Rule(Fate.LOST, "rng: left out, as --rng drop asks", lambda t: t.choices.rng == "drop" and _had_rng(t), _OF_RNG),
    Rule(Fate.DERIVED, "rng: new states, the same on every rank, from iteration {0.source.state.iteration}",
         lambda t: t.choices.rng == "derive", _OF_RNG),
    Rule(Fate.NOTE, "keys: RLinf's, {found}.model.<name> and {found}.optimizers.…, as torch's get_state_dict names them; settings of AdamW "
         "that the source does not have get torch's own values",
         lambda t: _is_new(t) and t.choices.inner and ".".join(map(str, t.choices.layout.rest))),
    Rule(Fate.NOTE, f"the folder is {{0.choices.inner}}/, where RLinf looks; a trainer that wants {METADATA_FILE} in the step itself, or "
         "other keys, passes over it and may begin anew without a word: dcp.load finds it by this path and these keys, and --like a step "
         "of that trainer's makes them its own",
         lambda t: _is_new(t) and t.choices.inner and not t.choices.apart),
    Rule(Fate.KEPT, "keys as the DCP folder had them that the run came from, at the top of the folder",
         lambda t: _is_new(t) and not t.choices.inner and not t.choices.bare),
    Rule(Fate.LOST, "schedule, random states and client state: AReaL stores model and optimizer alone, writes over them, and "
         "begins the rest anew", lambda t: t.choices.bare and _has_more(t.source), [facts.Item(kind) for kind in (*_OF_RUN, Kind.VALUE)]),
    Rule(Reason.OF_ENGINE, when=lambda t: t.choices.bare, of=[facts.Item(kind) for kind in (Kind.ARGUMENT, Kind.CONFIG, Kind.OPTIMIZER)]),
    *(rule.of_part(lambda t: Trained(t.source, t.choices.dtype, t.choices.optimizer)) for rule in OF_MASTERS),
)  # fmt: skip
