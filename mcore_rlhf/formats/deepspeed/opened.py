"""All files of a tag, opened and checked against one another: degrees, stage, and that they are of one run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from mcore_rlhf.errors import Incomplete, LayoutMismatch, Problems, Unsupported
from mcore_rlhf.formats.form import Form, check_form
from mcore_rlhf.storage.ptfile import PtFile, read_pt

from .experts import ExpertLayout, expert_layout, expert_tensors
from .files import MAX_RANKS, TagFiles, check_complete
from .form import LAYER, MODEL, OPTIMIZER

Rank = tuple[int, int]
"""(data-parallel rank, model-parallel rank)."""

_DEGREES = ("dp_world_size", "mp_world_size")
_EQUAL = (*_DEGREES, "global_steps", "skipped_steps", "ds_version")
_MIXED = "Files of different steps or runs are mixed in one tag: copy the checkpoint again from where it came from."


@dataclass(slots=True)
class Opened:
    """An opened tag.

    Args:
        files: Which files there are.
        dp, pp, tp: Degrees of parallelism.
        stage: ZeRO stage.
        model: Model files; those of stages 0 to 2 count as data-parallel rank 0's.
        optim: Optimizer files; empty where they are not wanted.
        layers: Layer files of a ``PipelineModule``, by (layer, tensor-parallel rank).
        expert_files: Weight files of DeepSpeed's own experts, by (layer, expert).
        experts: How these are dealt to ranks.
    """

    files: TagFiles
    dp: int
    pp: int
    tp: int
    stage: int = 0
    model: dict[Rank, PtFile] = field(default_factory=dict)
    optim: dict[Rank, PtFile] = field(default_factory=dict)
    layers: dict[Rank, PtFile] = field(default_factory=dict)
    expert_files: dict[tuple[int, int], PtFile] = field(default_factory=dict)
    experts: ExpertLayout = field(default_factory=lambda: ExpertLayout(1))

    @property
    def mp(self) -> int:
        """Model-parallel ranks."""
        return self.pp * self.tp

    @property
    def sliced(self) -> bool:
        """Whether this is stage 3."""
        return self.stage == 3

    @property
    def first(self) -> Mapping[str, Any]:
        """The content of the first model file."""
        return self.top(0, 0)

    def top(self, dp_rank: int, mp_rank: int) -> Mapping[str, Any]:
        """The content of a rank's model file."""
        tree: Mapping[str, Any] = self.model[dp_rank if self.sliced else 0, mp_rank].tree
        return tree

    def optimizer(self, dp_rank: int, mp_rank: int) -> Mapping[str, Any]:
        """The optimizer's state dict in a rank's optimizer file."""
        found: Mapping[str, Any] = self.optim[dp_rank, mp_rank].tree["optimizer_state_dict"]
        return found

    def all(self) -> Iterator[PtFile]:
        """Every file."""
        yield from (*self.model.values(), *self.layers.values(), *self.expert_files.values(), *self.optim.values())


def open_tag(files: TagFiles, stubs: tuple[str, ...], *, optimizer: bool) -> Opened:
    """Open all files of a tag.

    Args:
        files: Which there are.
        stubs: Further classes that may become inert stubs.
        optimizer: Whether the optimizer is wanted; stage 3 has its weights there, and is opened whole in any case.

    Raises:
        CheckpointError: Files are missing, damaged, or of different runs; all problems together.
    """
    named = files.model_of_rank or {(0, mp_rank): name for mp_rank, name in files.model.items()}

    def read(name: str, form: Form) -> PtFile:
        pt = read_pt(files.root, files.path(name), stubs=stubs)
        if isinstance(pt.tree, Mapping):
            check_form(pt.tree, form, str(pt.directory.path))
        return pt

    first = read(next(iter(named.values())), MODEL)
    top = _top_of(first)
    dp, mp = (_degree(first, top, key) for key in _DEGREES)
    optimizer = files.sliced or (optimizer and _has_optimizer_files(files, first, top))
    check_complete(files, dp, mp, optimizer=optimizer)
    pp, tp = _axes(files, top, mp)
    opened = Opened(files, dp, pp, tp)
    opened.model = {at: read(name, MODEL) for at, name in named.items()}
    opened.layers = {at: read(name, LAYER) for at, name in files.layers.items()}
    _open_experts(opened, stubs, top)
    if optimizer:
        opened.optim = {at: read(name, OPTIMIZER) for at, name in files.optim.items()}
    _check_equal(opened, first, top)
    opened.stage = _stage(opened)
    return opened


def _open_experts(opened: Opened, stubs: tuple[str, ...], top: Mapping[str, Any]) -> None:
    """The weight files of DeepSpeed's own experts, and how the experts are dealt to ranks."""
    files = opened.files
    if top.get("ds_autoep_layers"):
        raise Unsupported(
            f"{files.folder}: AutoEP's experts are not supported yet\nConvert it with DeepSpeed's own ds_to_universal."
        )
    opened.expert_files = {at: read_pt(files.root, files.path(name), stubs=stubs) for at, name in files.experts.items()}
    trees = {at: dict(expert_tensors(str(pt.directory.path), pt.tree, at[1])) for at, pt in opened.expert_files.items()}
    opened.experts = expert_layout(str(files.folder), opened.dp, trees, top)


def _top_of(pt: PtFile) -> Mapping[str, Any]:
    if not isinstance(pt.tree, Mapping) or "module" not in pt.tree:
        raise Unsupported(
            f"{pt.directory.path}: expected what DeepSpeed saves, a dictionary with 'module'; found another object"
        )
    return pt.tree


def _degree(pt: PtFile, top: Mapping[str, Any], key: str) -> int:
    value = top.get(key)
    if type(value) is not int or not 1 <= value <= MAX_RANKS:
        raise Unsupported(f"{pt.directory.path}: '{key}' should be a number of ranks, found {value!r}")
    return value


def _has_optimizer_files(files: TagFiles, first: PtFile, top: Mapping[str, Any]) -> bool:
    """Whether the run wrote any: stage 0 did not, and says so by having no ``param_shapes``."""
    if files.optim or top.get("param_shapes") is None or top.get("optimizer") is not None:
        return bool(files.optim)
    raise Incomplete(
        f"{files.folder}: {first.file} says that ZeRO partitioned the optimizer, but there is no …_optim_states.pt file\n"
        "Copy them as well, or read the weights alone with --no-optimizer."
    )


def _axes(files: TagFiles, top: Mapping[str, Any], mp: int) -> tuple[int, int]:
    """Pipeline and tensor-parallel degree."""
    stored = top.get("checkpoint_parallel_dimensions")
    if isinstance(stored, Mapping):
        pp, tp = int(stored["pp_degree"]), int(stored["tp_degree"])
    else:
        tp = 1 + max((tp_rank for _, tp_rank in files.layers), default=0) if files.layers else mp
        pp = mp // tp
    if pp * tp != mp:
        raise LayoutMismatch(f"{files.folder}: PP {pp} × TP {tp} is not mp_world_size, which is {mp}")
    return pp, tp


def _check_equal(opened: Opened, first: PtFile, top: Mapping[str, Any]) -> None:
    problems = Problems()
    for pt in opened.model.values():
        other = _top_of(pt)
        for key in _EQUAL:
            if other.get(key) != top.get(key):
                text = f"{pt.directory.path}: {key} is {other.get(key)!r}, but {top.get(key)!r} in {first.file}"
                problems.add(LayoutMismatch, text, _MIXED)
    for pt in opened.optim.values():
        _check_partition_count(opened, pt, problems)
    problems.raise_if_any()


def _check_partition_count(opened: Opened, pt: PtFile, problems: Problems) -> None:
    state = pt.tree.get("optimizer_state_dict") if isinstance(pt.tree, Mapping) else None
    if not isinstance(state, Mapping):
        problems.add(Unsupported, f"{pt.directory.path}: expected a dictionary with 'optimizer_state_dict'")
        return
    count = state.get("partition_count")
    counts = set(count) if isinstance(count, list) else {count}
    shared = {opened.dp // opened.experts.degree(layer) for layer in opened.experts.held}
    if counts - {opened.dp, None, *shared}:
        problems.add(
            LayoutMismatch,
            f"{pt.directory.path}: is cut for {_listed(counts)} data-parallel ranks, but the model files say {opened.dp}",
            _MIXED,
        )


def _listed(counts: set[Any]) -> str:
    return " and ".join(map(str, sorted(counts, key=repr)))


def _stage(opened: Opened) -> int:
    if opened.files.sliced:
        return 3
    if not opened.files.optim:
        plain = opened.first.get("optimizer") is not None or opened.first.get("param_shapes") is None
        return 0 if plain else _configured_stage(opened)
    if not opened.optim:
        return _configured_stage(opened)
    stage = stage_number(opened.optimizer(0, 0).get("zero_stage", 1))  # BF16_Optimizer, which is stage 1, stores none
    if stage not in (1, 2):
        raise Unsupported(f"{opened.files.folder}: stage {stage}, but with one model file for all ranks")
    return stage


def _configured_stage(opened: Opened) -> int:
    """The stage that ``ds_config`` asks for, where no optimizer says it."""
    config = opened.first.get("ds_config")
    zero = config.get("zero_optimization") if isinstance(config, Mapping) else None
    stage = zero.get("stage") if isinstance(zero, Mapping) else None
    return stage if stage in (1, 2) else 1


def stage_number(value: object) -> int:
    """The number in a stored ``ZeroStageEnum``, or in a plain int."""
    args = getattr(value, "stub_args", None)
    number = args[0] if args else value
    return number if isinstance(number, int) else -1
