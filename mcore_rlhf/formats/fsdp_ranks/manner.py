"""What of rank files depends on the run that loads them, and not on the model: taken from files that this run wrote, or as verl does it.

Sources: verl 0.7.0 and 0.9.1, ``utils/checkpoint/fsdp_checkpoint_manager.py``; ``workers/engine/fsdp/{transformer_impl,utils}.py``
(``create_device_mesh``: one axis, ``fsdp``; ``build_optimizer``: AdamW of all parameters in one group); ``utils/fsdp_utils.py`` of 0.7.0
(``get_shard_placement_fn``: the first dimension that the number of ranks divides; 0.9.1 leaves the choice to torch, which takes the
first of all).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

from mcore_rlhf.core.account import Report
from mcore_rlhf.core.catalog import Shape
from mcore_rlhf.core.facts import Fate, Rule
from mcore_rlhf.errors import LayoutMismatch, Unsupported, UsageError
from mcore_rlhf.families.fsdp.groups import PARAMS, Collected, name_numbers
from mcore_rlhf.families.fsdp.model import model_config
from mcore_rlhf.families.fsdp.order import units_of
from mcore_rlhf.families.fsdp.state import SCHEDULER
from mcore_rlhf.storage.dcp.rankfile import Local, RankFile, read_rank_file
from mcore_rlhf.storage.dcp.sharded import NEWEST, Release, ReplicaAxis, SavingMesh
from mcore_rlhf.storage.paths import ReadablePath
from mcore_rlhf.storage.pt import read_pt
from mcore_rlhf.storage.stored import StoredTensor

from . import rank_items
from .adapter import numbers_in
from .by_name import nested
from .files import CONFIG, EXTRA, MODEL, OPTIMIZER, VERSION, WORLD, is_rank_files, rank_files, said_of_run

STRATEGY, CLIENT, TAG = "fsdp_strategy", "client_state", "tag"
OF_RANK = (STRATEGY, "world_size", "rank")
"""What SkyRL has in each rank's file besides; the last say of which ranks it is. Its loader hands them back to nobody.

Source: SkyRL 0.3.0, ``skyrl/backends/skyrl_train/distributed/fsdp_strategy.py`` (``save_checkpoint``, ``load_checkpoint``).
"""
VALUE_HEAD, SCORE = "value_head.weight", "score.weight"
"""What SkyRL calls its critics' head, and what others do. Source: SkyRL 0.3.0, ``skyrl/train/config/config.py`` (``value_head_prefix``)."""


@dataclass(frozen=True, slots=True)
class Manner:
    """How a run writes its rank files.

    Args:
        version: FSDP's: 1 keeps the optimizer's states in flat pieces, 2 cuts them as it does the parameters.
        original: Whether FSDP1 does so parameter by parameter (``use_orig_params``).
        device: On what the run computes.
        axis: What its mesh calls the axis along which it cuts.
        release: Of torch, as far as files differ by it.
        divides: Whether a tensor is cut along the first dimension that the number of ranks divides, and not along the first of all.
        groups: Fields of its param groups; None where nobody said, and verl has one.
        scheduler: The fields of its scheduler's state; empty where nobody said.
        items: What torch_checkpointing calls its files besides model and optimizer; None for verl's files.
        named: Whether its optimizer's states go by their parameters' names, as ``optimizer_transform_pre`` has them, or VeOmni.
        says_names: Whether its param groups list names (``param_names``).
        members: The parameters of each, in its optimizer's order; None where nobody said.
        alone: Of a run that saves its adapter without the base: how many parameters its optimizer lists, and which are the adapter's.
        strategy: What each rank's file says of its strategy, as SkyRL's do; empty for others'.
        world: The ranks of the run that ``--like`` names, whom alone such files fit; 0 where none is named.
        copies: How ranks are dealt to copies of the model (HSDP); None where all have one together.
    """

    version: int = 2
    original: bool = False
    device: str = "cuda"
    axis: str = "fsdp"
    release: Release = NEWEST
    divides: bool = False
    groups: tuple[Mapping[str, object], ...] | None = None
    scheduler: Mapping[str, object] = field(default_factory=dict)
    items: tuple[str, ...] | None = None
    named: bool = False
    says_names: bool = False
    members: tuple[tuple[str, ...], ...] | None = None
    alone: tuple[int, tuple[int, ...]] | None = None
    strategy: str = ""
    world: int = 0
    copies: ReplicaAxis | None = None

    @property
    def loader(self) -> str:
        """Whose loader takes such files."""
        if self.items is not None:
            return "torch_checkpointing, without a resharder,"
        return "SkyRL" if self.strategy else "verl"

    def mesh(self, world: int, rank: int) -> SavingMesh:
        """The ranks, as one of them sees them."""
        return SavingMesh(self.device, world, rank, self.axis, self.release, self.copies)

    def width(self, world: int) -> int:
        """The ranks among which a tensor is cut."""
        return world if self.copies is None else self.copies.width

    def cuts(self, world: int) -> bool:
        """Whether the model's tensors are DTensors: FSDP1 cuts nothing where it is alone.

        Source: torch 2.13.0, ``distributed/fsdp/_init_utils.py`` (``NO_SHARD`` for one rank).
        """
        return self.version > 1 or world > 1

    def dim(self, global_shape: Shape, world: int) -> int:
        """The dimension along which a tensor is cut."""
        dividing = (dim for dim, size in enumerate(global_shape) if size % self.width(world) == 0)
        return next(dividing, 0) if self.divides else 0

    def __str__(self) -> str:
        dims = "the first dimension that the ranks divide" if self.divides else "dimension 0"
        whose = "" if self.items is None else "torch_checkpointing's, "
        mesh = f"mesh {self.axis!r}" if self.axis else "mesh without names"
        if self.copies is not None:
            mesh += f" of {self.copies.width} ranks in each of {len(self.copies.groups) // self.copies.width} copies"
        how = f"FSDP{self.version}{' with use_orig_params' * self.original}"
        return f"{whose}{how}, cut along {dims}, a {mesh} on {self.device}, as torch {self.release.value} pickles it"


def manner_of(files: list[RankFile]) -> Manner:
    """How model files were written.

    Args:
        files: Those of all ranks, or of the first, where these are one copy.

    Raises:
        Unsupported: Their mesh has several axes that cut, or what it says of copies (HSDP) is not understood.
    """
    parts = [part for _, part in _named(files)]
    first = next(iter(parts), None)
    if first is None:
        return Manner()
    copies = None if len(first.dims) == 1 else _copies(files)
    said, plain = first.mesh, Manner()
    name = said.names[-1] if said.names else plain.axis
    divides = any(part.dims[-1] for part in parts)
    return Manner(device=said.device or plain.device, axis=name, release=said.release, divides=divides, copies=copies)


def _copies(files: list[RankFile]) -> ReplicaAxis:
    """How the ranks of a mesh of two axes are dealt to copies, by the files of all of them."""
    firsts = [next((part for _, part in _named([file])), None) for file in files]
    meshes = [part.mesh for part in firsts if part is not None and len(part.dims) == 2 and part.dims[0] is None]
    shapes = {mesh.shape if len(mesh.shape) == len(mesh.groups) == 2 else () for mesh in meshes}
    if len(meshes) == len(files) and len(shapes) == 1 and (shape := shapes.pop()) and prod(shape) == len(files):
        name = meshes[0].names[0] if meshes[0].names else ""
        return ReplicaAxis(name, shape[1], tuple(mesh.groups for mesh in meshes))
    axes = " × ".join(firsts[0].mesh.names) if firsts[0] is not None else ""
    raise Unsupported(
        f"{files[0].directory.path}: is of a mesh of {axes or 'several axes'}; rank files of a mesh are written where it has one axis, or "
        "has copies along its first\nWrite them for a run with fsdp_size: -1."
    )


def dealt_to(found: Manner, world: int, like: str | None) -> Manner:
    """The same for so many ranks: how they are dealt to copies is known of a run with as many alone, since files name its groups.

    Args:
        found: How a run's files were written.
        world: The ranks that are to have some.
        like: The folder that showed it; None for the source's own.

    Raises:
        UsageError: The run that is shown has other ranks.
    """
    copies = found.copies
    if copies is None or len(copies.groups) == world:
        return found
    if like is None:
        return replace(found, copies=None)
    raise UsageError(
        f"--like {like}: has {len(copies.groups)} ranks, {copies.width} of them to a copy of the model, and {world} are to be written\n"
        f"Give --dp {len(copies.groups)}, or a folder that a run of {world} ranks saved."
    )


def with_strategy(found: Manner, root: ReadablePath, model: list[RankFile], optimizer: list[RankFile]) -> Manner:
    """The same with FSDP's version, which ``fsdp_config.json`` says, and what else the optimizer's files show.

    Args:
        found: How the model's files were written.
        root: Their folder.
        model, optimizer: Files of both kinds, of the first rank at least; of the second kind there may be none.
    """
    states = _states(optimizer[0].tree) if optimizer else {}
    found = replace(found, alone=numbers_in(model[0].tree, optimizer[0].tree, states) if optimizer else None)
    bare = any(isinstance(value, StoredTensor) and value.shape for of in states.values() for value in of.values())
    if not bare:
        by_name = bool(optimizer) and any(rank_items.NAMES in group for group in _groups(optimizer[0]))
        found = replace(found, named=by_name, says_names=by_name)
        return replace(found, version=found.version if optimizer and states else _version(root))
    tree = model[0].tree if isinstance(model[0].tree, dict) else {}
    shapes = {str(name): _shape(part) for name, part in tree.items() if isinstance(part, Local | StoredTensor)}
    groups = optimizer[0].tree.get("param_groups")  # bare states are a dictionary's
    held = [group.get(PARAMS) for group in groups if _is_dict(group)] if isinstance(groups, list) else []
    listed = sum(len(numbers) for numbers in held if isinstance(numbers, list))
    units = len(units_of(shapes))
    if found.alone is not None:  # a unit for each layer of the base, and one for what lies in none
        layers = model_config(root).get("num_hidden_layers")
        units += 1 + layers if type(layers) is int else 0
    return replace(found, version=1, original=max(len(states), listed) > units)


def _shape(part: Local | StoredTensor) -> Shape:
    return part.global_shape if isinstance(part, Local) else part.shape


def _named(files: list[RankFile]) -> Iterator[tuple[str, Local]]:
    trees = [file.tree for file in files if isinstance(file.tree, dict)]
    return ((str(name), value) for tree in trees for name, value in tree.items() if isinstance(value, Local))


def _states(tree: Any) -> dict[object, Mapping[str, object]]:
    """An optimizer's states by number, as far as they are what they should be."""
    states = tree.get("state") if isinstance(tree, dict) else None
    listed = states.items() if isinstance(states, Mapping) else ()
    return {number: of for number, of in listed if isinstance(of, Mapping)}


def _version(root: ReadablePath) -> int:
    said = said_of_run(root).get(VERSION)
    return said if type(said) is int and said in (1, 2) else Manner().version


def otherwise(asked: tuple[ReadablePath, int, Manner]) -> list[dict[str, object]]:
    """What ``fsdp_config.json`` says otherwise than the files beside it, for :data:`OTHERWISE`."""
    root, world, found = asked
    wrote, said = {WORLD: world, VERSION: found.version}, said_of_run(root)
    return [
        {"key": key, "said": said[key], "found": value, "file": root / CONFIG}
        for key, value in wrote.items()
        if type(said.get(key)) is int and said[key] != value
    ]


OTHERWISE: Rule[tuple[ReadablePath, int, Manner]] = Rule(
    Fate.NOTE,
    "{file}: {key} is {said}, and the files are of {found}; verl's own merger goes by the former",
    otherwise,
    contradicts=True,
)
"""Source: verl 0.9.1, ``verl/model_merger/fsdp_model_merger.py`` (``_get_world_size``)."""


def like(folder: str, role: str) -> Manner:
    """How a run writes its files, by those that it wrote.

    Args:
        folder: A role's folder, or a step with it.
        role: Which, in a step.

    Raises:
        UsageError: It has no rank files.
        CheckpointError: They are incomplete, damaged, or of a run whose files are not written.
    """
    given = Path(folder).expanduser()
    items = next((path for path in (given, given / role) if path.is_dir() and rank_items.has_items(path)), None)
    if items is not None:
        return _like_items(items)
    root = next((path for path in (given, given / role) if is_rank_files(path)), None)
    if root is None:
        raise UsageError(
            f"--like {given}: holds no rank files of verl's or SkyRL's ({MODEL}_world_size_W_rank_R.pt), and none of torch_checkpointing's "
            "(model_R.pt)\nGive the folder of a role that the run itself saved, such as global_step_20/actor."
        )
    listed = rank_files(root, optimizer=False)
    model = [read_rank_file(root, listed[MODEL][0])]
    if any(len(part.dims) > 1 for _, part in _named(model)):
        model += [read_rank_file(root, name) for name in listed[MODEL][1:]]
    optimizer = [nested(read_rank_file(root, name)) for name in listed[OPTIMIZER][:1]]
    extra = read_pt(root, listed[EXTRA][0]).tree if listed[EXTRA] else {}
    scheduler = extra.get(SCHEDULER) if isinstance(extra, Mapping) else None
    found = replace(
        with_strategy(manner_of(model), root, model, optimizer), strategy=strategy_in(extra), world=len(listed[MODEL])
    )
    found = replace(found, scheduler=dict(scheduler) if isinstance(scheduler, Mapping) else {})
    if optimizer and found.named:
        return _with_names(found, optimizer[0])
    if optimizer:
        members = _members(model[0], optimizer[0], {VALUE_HEAD: SCORE} if found.strategy else {})
        found = replace(found, groups=_groups(optimizer[0]), members=members)
    return found


def strategy_in(extra: object) -> str:
    """What a rank's file of other things says of its strategy; empty where it does not."""
    said = extra.get(STRATEGY) if isinstance(extra, Mapping) else None
    return said if isinstance(said, str) else ""


def of_run(extra: Mapping[str, object], name: str) -> dict[str, object]:
    """What such a file says of the run: not which rank's it is, nor what is empty in every run of SkyRL.

    Args:
        extra: Its content.
        name: The file's.

    Raises:
        LayoutMismatch: By what it says itself it is another rank's.
    """
    _, world, rank = (extra.get(key) for key in OF_RANK)
    if type(rank) is type(world) is int and not name.endswith(f"_world_size_{world}_rank_{rank}.pt"):
        text = f"{name}: says that rank {rank} of {world} wrote it\nFiles of ranks were swapped: give them their names again."
        raise LayoutMismatch(text)
    return {key: value for key, value in extra.items() if key not in OF_RANK and (value or key not in (CLIENT, TAG))}


def _like_items(root: Path) -> Manner:
    files = rank_items.item_files(root)
    models = files.pop(rank_items.MODEL)
    model = read_rank_file(root, models[0])
    optimizer = [read_rank_file(root, name) for name in files.pop(rank_items.OPTIMIZER, [])[:1]]
    found = replace(with_items(manner_of([model]), model, optimizer, files), world=len(models))
    scheduler = read_pt(root, files[SCHEDULER][0]).tree if SCHEDULER in files else None
    found = replace(found, scheduler=dict(scheduler) if isinstance(scheduler, Mapping) else {})
    return _with_names(found, optimizer[0]) if optimizer else found


def _with_names(found: Manner, optimizer: RankFile) -> Manner:
    """The same with param groups, as far as they name their parameters."""
    groups = _groups(optimizer)
    listed = [group.get(rank_items.NAMES) for group in groups]
    members = tuple(tuple(map(str, names)) for names in listed if isinstance(names, list))
    fields = tuple({key: value for key, value in group.items() if key != rank_items.NAMES} for group in groups)
    return replace(found, groups=fields, members=members if len(members) == len(groups) else None)


def with_items(found: Manner, model: RankFile, optimizer: list[RankFile], items: Iterable[str]) -> Manner:
    """The same of torch_checkpointing's files.

    Args:
        found: How the model's files were written.
        model: One of them.
        optimizer: One of the optimizer's, or none.
        items: What else there is.
    """
    tree = optimizer[0].tree if optimizer and isinstance(optimizer[0].tree, dict) else {}
    groups = tree.get("param_groups") or ()
    says = bool(groups) and all(isinstance(group, dict) and rank_items.NAMES in group for group in groups)
    names = next((part.mesh.names for _, part in _named([model])), (found.axis,))
    return replace(
        found,
        axis=found.axis if names else "",
        items=tuple(sorted(items)),
        named=rank_items.NAMED in tree,
        says_names=says,
    )


def _groups(file: RankFile) -> tuple[Mapping[str, object], ...]:
    groups = file.tree.get("param_groups") if isinstance(file.tree, dict) else None
    if not isinstance(groups, list) or not all(map(_is_dict, groups)):
        raise Unsupported(f"{file.directory.path}: is not the state dict of one of torch's optimizers")
    return tuple({key: value for key, value in group.items() if key != PARAMS} for group in groups)


def _members(model: RankFile, optimizer: RankFile, called: Mapping[str, str]) -> tuple[tuple[str, ...], ...] | None:
    """Who is in each group of FSDP2's optimizer, some by other names; None where its numbers do not say it."""
    tree = model.tree if isinstance(model.tree, dict) else {}
    shapes = {str(name): part.global_shape for name, part in tree.items() if isinstance(part, Local)}
    held = {
        number: next((v for v in of.values() if isinstance(v, Local)), None)
        for number, of in _states(optimizer.tree).items()
    }
    states = {str(number): value.global_shape for number, value in held.items() if value is not None}
    if not states:
        return None
    groups = optimizer.tree["param_groups"]
    collected = Collected({number: dict(group) for number, group in enumerate(groups)})
    try:
        names = name_numbers(collected, shapes, states, optimizer.directory.path.parent, Report())
    except Unsupported:
        return None
    return tuple(
        tuple(called.get(name := names[str(number)], name) for number in group[PARAMS] if str(number) in names)
        for group in groups
    )


def _is_dict(value: Any) -> bool:
    return isinstance(value, dict)
