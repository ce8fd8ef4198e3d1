"""All files of a tag, opened and checked against one another: what each looks like, the degrees, the stage, the experts.

DeepSpeed's own experts have one weight file each, of every layer, under global numbers:
``layer_L_expert_E_mp_rank_XX_model_states.pt``. The optimizer's files and ``param_shapes`` have local numbers, the same on all
expert-parallel ranks: rank 1 of two that share four experts calls its own 0 and 1, and they are 2 and 3. A group of experts is
not cut over all data-parallel ranks, but over those that have the same experts.

Source: deepspeed 0.19.8, ``runtime/engine.py`` (``_save_checkpoint``, ``_save_moe_checkpoint``),
``runtime/zero/stage_1_and_2.py``, ``stage3.py`` and ``runtime/bf16_optimizer.py`` (``state_dict``),
``checkpoint/universal_checkpoint.py`` for ``affine_map``, ``utils/groups.py`` (``_create_expert_and_data_parallel``),
``moe/utils.py`` (``split_params_into_different_moe_groups_for_optimizer``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from mcore_rlhf.errors import Corrupt, Incomplete, LayoutMismatch, Problems, Unsupported
from mcore_rlhf.models.meaning.bounds import MOST_RANKS
from mcore_rlhf.storage.pt import PtFile, read_pt
from mcore_rlhf.storage.stored import StoredTensor

from .files import ExpertName, TagFiles, check_complete, expert_name, section
from .form import (
    INT,
    NUMBER,
    SHAPES,
    TEXT,
    Form,
    by_key,
    by_name,
    check_form,
    each,
    either,
    fields,
    items,
    maybe,
    of,
)

_DATA_FIRST = "use_data_before_expert_parallelism"


@dataclass(slots=True)
class ExpertLayout:
    """How the experts of every layer are dealt to ranks; empty for a model without any.

    Args:
        dp: Data-parallel ranks.
        data_first: Whether ranks with the same experts are neighbours; otherwise those with different ones are.
        held: By layer, how many experts there are.
        local: By layer, how many of them a rank has.
    """

    dp: int
    data_first: bool = False
    held: dict[str, int] = field(default_factory=dict)
    local: dict[str, int] = field(default_factory=dict)

    def degree(self, layer: str) -> int:
        """Expert-parallel ranks that share a layer."""
        return self.held[layer] // self.local[layer]

    def global_name(self, name: str, ep_rank: int) -> str:
        """What a rank's local name means.

        Args:
            name: As ``param_shapes`` has it.
            ep_rank: The expert-parallel rank.
        """
        expert = expert_name(name)
        if expert is None:
            return name
        return str(ExpertName(expert.layer, expert.number + ep_rank * self.local[expert.layer], expert.rest))

    def local_name(self, name: str) -> str:
        """What a rank that has it calls a parameter."""
        expert = expert_name(name)
        if expert is None or expert.layer not in self.local:
            return name
        return str(ExpertName(expert.layer, expert.number % self.local[expert.layer], expert.rest))

    def owners(self, names: tuple[str, ...]) -> list[range]:
        """The data-parallel ranks that share a flat group, for every expert-parallel rank; all of them where it has no experts.

        Args:
            names: The group's parameters, under local names.

        Raises:
            LayoutMismatch: It has experts of layers that are dealt differently.
        """
        experts = [expert_name(name) for name in names]
        degrees = {1 if expert is None else self.degree(expert.layer) for expert in experts} or {1}
        if len(degrees) > 1:
            raise LayoutMismatch(f"the flat group with {names[0]} has parameters of different expert-parallel degrees")
        (degree,) = degrees
        share = self.dp // degree
        if self.data_first:
            return [range(rank * share, (rank + 1) * share) for rank in range(degree)]
        return [range(rank, self.dp, degree) for rank in range(degree)]


def expert_layout(
    where: str, dp: int, trees: Mapping[tuple[int, int], Mapping[str, Any]], top: Mapping[str, Any]
) -> ExpertLayout:
    """Find out how experts are dealt.

    Args:
        where: The folder, for messages.
        dp: Data-parallel ranks.
        trees: The content of the weight file of every (layer, expert).
        top: The content of a model file.

    Raises:
        CheckpointError: Expert files are missing, or are not those that ``param_shapes`` speaks of.
    """
    config = top.get("ds_config")
    layout = ExpertLayout(dp, isinstance(config, Mapping) and bool(config.get(_DATA_FIRST)))
    problems = Problems()
    for layer, numbers in _numbers(name for tree in trees.values() for name in tree).items():
        if numbers != set(range(len(numbers))):
            gone = list(islice((number for number in range(max(numbers)) if number not in numbers), 20))
            problems.add(Incomplete, f"{where}: of {layer}… the files of experts {gone} are missing")
        layout.held[layer] = len(numbers)
    stored = _numbers(name for group in top.get("param_shapes") or () for name in group)
    layout.local = {layer: len(stored.get(layer, ())) or held for layer, held in layout.held.items()}
    for layer in stored.keys() - layout.held.keys():
        problems.add(Incomplete, f"{where}: 'param_shapes' has {layer}…, but there are no files of its experts")
    for layer, held in layout.held.items():
        _check_degree(where, layer, held, layout, problems)
    _check_counts(where, trees, top, problems)
    problems.raise_if_any()
    return layout


def _check_degree(where: str, layer: str, held: int, layout: ExpertLayout, problems: Problems) -> None:
    local = layout.local[layer]
    if held % local or layout.dp % (held // local):
        text = f"{where}: {held} experts of {layer}…, {local} on a rank, do not go into {layout.dp} data-parallel ranks"
        problems.add(LayoutMismatch, text, "Expert files are missing, or of another run.")


def _check_counts(
    where: str, trees: Mapping[tuple[int, int], Mapping[str, Any]], top: Mapping[str, Any], problems: Problems
) -> None:
    """``num_experts`` lists the layers: the only word on experts whose files are missing at the end."""
    counts = top.get("num_experts")
    for layer, count in enumerate(counts if isinstance(counts, list) else ()):
        there = {number for at, number in trees if at == layer and number < count}
        if len(there) < count:
            gone = next(number for number in range(count) if number not in there)
            name = f"layer_{layer}_expert_{gone}_mp_rank_00_model_states.pt"
            text = f"{where}: {name} is missing; layer {layer} has {count} experts, {count - len(there)} of them without a file"
            problems.add(Incomplete, text, "Copy the checkpoint again from where it came from, or use an older tag.")


def _numbers(names: Iterator[str]) -> dict[str, set[int]]:
    """The experts of every layer, by what is before their number."""
    found: dict[str, set[int]] = {}
    for expert in map(expert_name, names):
        if expert is not None:
            found.setdefault(expert.layer, set()).add(expert.number)
    return found


def expert_tensors(where: str, tree: object, number: int) -> Iterator[tuple[str, Any]]:
    """The parameters in a weight file.

    Args:
        where: The file, for messages.
        tree: Its content.
        number: The expert's number, as the file's name says.

    Raises:
        Unsupported: It is not such a file.
    """
    if not isinstance(tree, Mapping):
        raise Unsupported(f"{where}: expected the parameters of one expert by name, found another object")
    for name, value in tree.items():
        expert = expert_name(str(name))
        if expert is None or expert.number != number:
            raise Corrupt(f"{where}: expected parameters of expert {number}, found {str(name)[:120]!r}")
        yield str(name), value


_TENSOR = of("a tensor", StoredTensor)
_NUMBER_OR_NAME = of("a number or a name", int, str)
_STATES = fields()
_TORCH_OPTIMIZER = fields(
    ("state", "param_groups"),
    state=fields(),
    param_groups=each(fields(("params",), params=each(_NUMBER_OR_NAME), param_names=each(TEXT))),
)
"""What ``torch.optim.Optimizer.state_dict`` gives."""

_STRIDED = items(INT, each(INT))
_PIECE = fields(("shape", "source", "dest"), shape=each(INT), source=_STRIDED, dest=_STRIDED, scale=NUMBER)
_OF_RANK = fields(("shard_shape", "pieces"), shard_shape=each(INT), pieces=each(_PIECE))
_AFFINE = fields(
    ("logical_shape", "ranks"),
    logical_shape=each(INT),
    ranks=by_key(_NUMBER_OR_NAME, _OF_RANK),
)

MODEL = fields(
    module=maybe(by_name()),
    buffer_names=maybe(each(TEXT)),
    param_shapes=maybe(each(SHAPES)),
    frozen_param_shapes=maybe(SHAPES),
    frozen_param_fragments=maybe(by_name(_TENSOR)),
    shared_params=maybe(by_name(TEXT)),
    optimizer=maybe(
        fields(optimizer_state_dict=_TORCH_OPTIMIZER, fp32_groups=each(each(_TENSOR)), fp32_groups_flat=each(_TENSOR))
    ),
    global_steps=maybe(INT),
    num_experts=maybe(either(INT, each(INT))),
    checkpoint_parallel_dimensions=maybe(fields(("pp_degree", "tp_degree"), pp_degree=INT, tp_degree=INT)),
    universal_checkpoint_info=maybe(fields(affine_map=maybe(fields(params=by_name(_AFFINE))))),
)
"""A model file."""

LAYER = by_name()
"""A layer of a ``PipelineModule``."""

OPTIMIZER = fields(
    optimizer_state_dict=fields(
        base_optimizer_state=either(each(_STATES), _TORCH_OPTIMIZER),
        optimizer_state_dict=_TORCH_OPTIMIZER,
        single_partition_of_fp32_groups=each(maybe(_TENSOR)),
        fp32_flat_groups=each(maybe(_TENSOR)),
        param_alignment_paddings=maybe(each(each(INT))),
        param_slice_mappings=maybe(each(by_name())),
        partition_count=either(INT, each(INT)),
        ds_version=maybe(TEXT),
    ),
)
"""An optimizer file of one rank."""


Rank = tuple[int, int]
"""(data-parallel rank, model-parallel rank)."""

_DEGREES = ("dp_world_size", "mp_world_size")
_EQUAL = (*_DEGREES, "global_steps", "skipped_steps", "ds_version")
_MIXED = "Files of different steps or runs are mixed in one tag: copy the checkpoint again from where it came from."


@dataclass(slots=True)
class OpenedTag:
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

    def all(self) -> Iterator[tuple[int | None, PtFile]]:
        """Every file; of the optimizer's, the data-parallel rank whose partitions it has."""
        yield from ((None, pt) for pt in (*self.model.values(), *self.layers.values(), *self.expert_files.values()))
        yield from ((dp_rank, pt) for (dp_rank, _), pt in self.optim.items())


def open_tag(files: TagFiles, stubs: tuple[str, ...], *, optimizer: bool) -> OpenedTag:
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
    _check_groups(files, top)
    opened = OpenedTag(files, dp, pp, tp)
    opened.model = {at: read(name, MODEL) for at, name in named.items()}
    opened.layers = {at: read(name, LAYER) for at, name in files.layers.items()}
    _open_experts(opened, stubs, top)
    if optimizer:
        opened.optim = {at: read(name, OPTIMIZER) for at, name in files.optim.items()}
    _check_equal(opened, first, top)
    opened.stage = _stage(opened)
    return opened


def _check_groups(files: TagFiles, top: Mapping[str, Any]) -> None:
    """MiCS cuts parameters over smaller groups of ranks, each of which has all of them.

    Source: deepspeed, ``runtime/zero/mics.py`` (``MiCS_Init``, ``MiCS_Optimizer``); gone in 0.19.8.

    Raises:
        Unsupported: It does.
    """
    size = section(top.get("ds_config"), "zero_optimization").get("mics_shard_size", -1)
    if isinstance(size, int) and size > 0:
        raise Unsupported(
            f"{files.folder}: written with MiCS (mics_shard_size {size}), whose ranks hold other parts than ZeRO's\n"
            "Let DeepSpeed gather the weights: stage3_gather_16bit_weights_on_model_save, and save_16bit_model."
        )


def _open_experts(opened: OpenedTag, stubs: tuple[str, ...], top: Mapping[str, Any]) -> None:
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
    if type(value) is not int or not 1 <= value <= MOST_RANKS:
        raise Unsupported(f"{pt.directory.path}: '{key}' should be a number of ranks, found {value!r}")
    return value


def _has_optimizer_files(files: TagFiles, first: PtFile, top: Mapping[str, Any]) -> bool:
    """Whether the run wrote any: stage 0 did not, and says so by having no ``param_shapes``.

    In bfloat16 DeepSpeed 0.17 has them at stage 0, and wrote none (0.17.6, ``runtime/engine.py``, ``_configure_checkpointing``).
    """
    if files.optim or top.get("param_shapes") is None or top.get("optimizer") is not None:
        return bool(files.optim)
    stage0 = section(top.get("ds_config"), "zero_optimization").get("stage") == 0
    copy = "DeepSpeed 0.17 never wrote them at stage 0: r" if stage0 else "Copy them as well, or r"
    raise Incomplete(
        f"{files.folder}: {first.file} says that ZeRO partitioned the optimizer, but there is no …_optim_states.pt file\n"
        f"{copy}ead the weights alone with --no-optimizer."
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


def _check_equal(opened: OpenedTag, first: PtFile, top: Mapping[str, Any]) -> None:
    problems = Problems()
    for pt in opened.model.values():
        other = _top_of(pt)
        for key in _EQUAL:
            if other.get(key) != top.get(key):
                text = f"{pt.directory.path}: {key} is {other.get(key)!r}, but {top.get(key)!r} in {first.file}"
                problems.add(LayoutMismatch, text, _MIXED)
    for pt in opened.optim.values():
        _check_partition_count(opened, pt, problems)
    stages = [(pt.directory.path, stage_number(_optimizer_in(pt).get("zero_stage", 1))) for pt in opened.optim.values()]
    for path, stage in stages[1:]:
        if stage != stages[0][1]:
            problems.add(
                LayoutMismatch, f"{path}: is of ZeRO stage {stage}, but {stages[0][0]} of {stages[0][1]}", _MIXED
            )
    problems.raise_if_any()


def _optimizer_in(pt: PtFile) -> Mapping[str, Any]:
    state = pt.tree.get("optimizer_state_dict") if isinstance(pt.tree, Mapping) else None
    return state if isinstance(state, Mapping) else {}


def _check_partition_count(opened: OpenedTag, pt: PtFile, problems: Problems) -> None:
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


def _stage(opened: OpenedTag) -> int:
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


def _configured_stage(opened: OpenedTag) -> int:
    """The stage that ``ds_config`` asks for, where no optimizer says it."""
    stage = section(opened.first.get("ds_config"), "zero_optimization").get("stage")
    return stage if isinstance(stage, int) and stage in (1, 2) else 1


def stage_number(value: object) -> int:
    """The number in a stored ``ZeroStageEnum``, or in a plain int."""
    args = getattr(value, "stub_args", None)
    number = args[0] if args else value
    return number if isinstance(number, int) else -1
