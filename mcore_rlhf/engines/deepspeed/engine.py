"""The engine of a DeepSpeed trainer."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from mcore_rlhf.errors import Unsupported, UsageError
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.formats.deepspeed import FORMAT
from mcore_rlhf.formats.deepspeed.files import LATEST, TagFiles, is_tag_folder, locate
from mcore_rlhf.formats.registry import detect, open_checkpoint
from mcore_rlhf.layouts.parallel import ParallelConfig
from mcore_rlhf.storage.paths import ReadablePath
from mcore_rlhf.storage.pt import Pt

from ..base import Engine, LiveFile, LiveState, LoadRequest
from ..load import Load
from ..optimizers import say_what_is_unknown
from ..save import LiveTree, MemoryRanges
from ..until_step import UntilStep
from .load import DeepSpeedHooks, LiveOwner, Restored, load_from
from .model import LiveOptimizer, live_optimizer, state_tensors, weights_of
from .own_files import OwnRankFiles
from .restoring import client_state_of

ClientState = Mapping[str, object]


class DeepSpeedEngine:
    """A live DeepSpeed engine of ZeRO stage 0 to 3 as a source and a target of checkpoints; every rank makes one.

    Saving describes the files that ``engine.save_checkpoint`` writes, so that ``engine.load_checkpoint`` loads them from
    the role's folder, ``<root>/global_step_N/<role>``. Every rank writes its own files; nothing is gathered. DeepSpeed's
    two scripts beside the tag (``zero_to_fp32.py``, ``zero_to_torch.py``) are left out.

    Loading takes native checkpoints of any stage and data-parallel size, and universal ones. Where stage and size are the
    stored ones, each rank reads its own files straight into the engine's tensors; otherwise what it needs of all files.
    What DeepSpeed 0.19.8 gets wrong when it loads by itself, and this does not:

    * A universal checkpoint's stage-3 load gives all sub-groups one ``step`` tensor, which each of them then counts up; here
      each flat tensor has its own.
    * It gives every param group the settings of the first, weight decay with them; here each keeps its own, matched by its
      parameters.
    * A universal load does not restore buffers and frozen parameters; here they are, where the checkpoint has them.
    * A universal load fails with ``IndexError`` on a rank whose part of a group is all padding; here it is zeros.
    * Another stage or data-parallel size fails with an assertion unless it goes through universal files; here it loads.
    * After a load of stages 1 and 2, ``safe_get_full_optimizer_state`` shows the states from before; here it is linked.

    The manager's RLHF state is committed with the models, so ``client_state`` need not carry it. Without the manager, put
    ``RlhfState.state_dict()`` into it: ``engine.save_checkpoint(folder, client_state={"rlhf": state.state_dict()})``, and
    after ``_, client = engine.load_checkpoint(folder)`` call ``state.load_state_dict(client["rlhf"])``.

    Args:
        engine: What ``deepspeed.initialize`` returned first. One that trains nothing (inference) has weights alone.
        client_state: Goes to the top level of the model files, as DeepSpeed's does; a function that gives it is called at
            each save.
        tag: Name of the checkpoint's folder, or a function of the step; ``global_step<N>``, of the manager's step, by default.
        exclude_frozen_parameters: Leave frozen parameters out; loading then leaves the live ones as they are.
        save_latest: Write ``latest``, which names the tag. DeepSpeed without a ``tag`` argument needs it.

    Attributes:
        loaded_client_state: The client state of the checkpoint that was loaded.
        loaded_iteration: Its ``global_steps``.

    Raises:
        Unsupported: A pipeline engine, a model with experts, or an optimizer that is not known.
    """

    def __init__(
        self,
        engine: Any,
        client_state: ClientState | Callable[[], ClientState] | None = None,
        tag: str | Callable[[int], str] | None = None,
        exclude_frozen_parameters: bool = False,
        save_latest: bool = True,
    ) -> None:
        self.engine = engine
        self.exclude_frozen_parameters, self.save_latest = exclude_frozen_parameters, save_latest
        self._client_state, self._tag = client_state, tag
        self.loaded_client_state: dict[str, object] = {}
        self.loaded_iteration = 0
        _check_kind(engine)
        live = live_optimizer(engine)  # one that is not known is refused now, and not at the first save
        if live is not None:
            say_what_is_unknown("DeepSpeedEngine", live.inner)

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks: DeepSpeed's groups span the whole world."""
        return tuple(range(dist.get_world_size()))

    @property
    def parallel(self) -> ParallelConfig:
        """Degrees of parallelism."""
        tp = int(self.engine.mp_world_size)
        return ParallelConfig(tp=tp, etp=tp, dp=int(self.engine.seq_dp_world_size))

    @property
    def layout(self) -> str:
        """How the model is cut, apart from the ZeRO stage, with which random states have nothing to do."""
        return str(self.parallel)

    def live(self, step: int) -> LiveState:
        """Describe DeepSpeed's own files.

        Args:
            step: The step, which names the tag.

        Raises:
            UsageError: LoRA weights are fused into the model.
            Unsupported: The engine's state cannot be described.
        """
        self._check_unfused("save")
        live = live_optimizer(self.engine)  # refuses what a load could not take back
        tag, rank = self._tag_of(step), dist.get_rank()
        files, trees = [], []
        for path, state in self._own_files(tag, live).items():
            tree = LiveTree(path)
            placed = tree.placed(state)
            files.append(LiveFile(path, (rank,), tuple(tree.segments), Pt.of(placed)))
            trees.append(tree)
        texts = {LATEST: tag} if self.save_latest and rank == self.ranks[0] else {}
        weights, frozen = weights_of(self.engine, live), not self.exclude_frozen_parameters
        alive = state_tensors(self.engine, live, weights, MemoryRanges.of(files, trees), frozen=frozen)
        return LiveState(FORMAT.name, self.layout, tuple(files), texts, tuple(alive))

    def until_step(self) -> UntilStep | None:
        """See :class:`~..until_step.Steps`."""
        live = live_optimizer(self.engine)
        weights = [
            (one.name, one.tensor) for one in weights_of(self.engine, live) if one.trained or one.sliced is not None
        ]
        return UntilStep.of([self.engine.module], live.inner if live is not None else None, weights)

    def prepare_load(self, request: LoadRequest) -> Load[LiveOwner]:
        """Open a native or universal checkpoint, check that it fits this rank, and plan the load.

        Raises:
            CheckpointError: It does not fit: all differences, with shapes.
        """
        self._check_unfused("load")
        live = live_optimizer(self.engine)
        load, restored = self._load(request, live)

        def done() -> None:
            self.loaded_client_state = client_state_of(restored.state.other)
            self.loaded_iteration = restored.state.iteration

        hooks = DeepSpeedHooks(self.engine, live, request.optimizer, restored, load.report, done)
        return load.checked(hooks)

    def _load(self, request: LoadRequest, live: LiveOptimizer | None) -> tuple[Load[LiveOwner], Restored]:
        weights = weights_of(self.engine, live)
        folder: ReadablePath = request.folder
        step = request.step
        if detect(folder).name == FORMAT.name:
            files = _tag_files(request)
            own = OwnRankFiles.find(self.engine, files, live, weights, optimizer=request.optimizer)
            if own is not None:
                return own.load(optimizer=request.optimizer)
            folder, step = files.folder, None
        if self.parallel.tp > 1:
            raise Unsupported(
                f"{folder}: another layout into a model-parallel engine is not supported yet\n"
                "Load it with as many data-parallel ranks at the same ZeRO stage, or convert it to universal for DeepSpeed."
            )
        source = open_checkpoint(folder, ReadOptions(role=request.role, step=step, optimizer=request.optimizer))
        return load_from(source, live, weights, f"DP {self.parallel.dp}", optimizer=request.optimizer)

    def _own_files(self, tag: str, live: LiveOptimizer | None) -> dict[str, dict[str, Any]]:
        given = self._client_state() if callable(self._client_state) else self._client_state
        frozen = self.exclude_frozen_parameters
        found = own_files(self.engine, tag, given or {}, frozen, trained=live is not None)
        for path, state in found.items():
            if live is not None and live.stage == 0 and path.endswith("model_states.pt"):
                found[path] = {**state, "param_shapes": _named_groups(live)}
        return found

    def _tag_of(self, step: int) -> str:
        tag = self._tag(step) if callable(self._tag) else self._tag
        tag = f"global_step{step}" if tag is None else str(tag)
        if not tag or "/" in tag or tag.startswith("."):
            raise UsageError(f"tag {tag!r}: expected the name of a folder")
        return tag

    def _check_unfused(self, action: str) -> None:
        if getattr(self.engine, "is_lora_fused", False):
            raise UsageError(
                f"cannot {action}: the Hybrid Engine has LoRA weights fused into the model for generation\n"
                "Call engine.unfuse_lora_weight() (or engine.train()) first."
            )


def _tag_files(request: LoadRequest) -> TagFiles:
    """The tag that is meant: what ``latest`` names, the only one, or the one of the step."""
    folder = request.folder
    if is_tag_folder(folder) or (folder / LATEST).is_file():
        return locate(folder, None)
    tags = [child for child in sorted(folder.iterdir()) if is_tag_folder(child)]
    return locate(tags[0], None) if len(tags) == 1 else locate(folder, request.step)


def _named_groups(live: LiveOptimizer) -> list[dict[str, object]]:
    """Stage 0 stores no names of what it trains; DeepSpeed passes over this key there, and readers need not guess."""
    groups: list[dict[str, object]] = [{} for _ in range(live.groups)]
    for flat in live.flats:
        for name, shape in zip(flat.names, flat.shapes, strict=True):
            groups[flat.param_group][name] = torch.Size(shape)
    return groups


def _check_kind(engine: Any) -> None:
    """Refuse what is not known, before anything is saved."""
    if not hasattr(engine, "_save_checkpoint") or not hasattr(engine, "zero_optimization_stage"):
        raise UsageError(f"{type(engine).__name__}: expected the engine that deepspeed.initialize returns first")
    if type(getattr(engine, "optimizer", None)).__name__ == "DeepSpeedZeRoOffload":
        raise Unsupported(
            "ZeRO stage 3 without an optimizer: DeepSpeed itself cannot save such an engine\n"
            "A frozen model needs no checkpoint of its own; leave the role out, or use stage 0."
        )
    if any(kind.__name__ == "PipelineModule" for kind in type(engine.module).__mro__):
        raise Unsupported("DeepSpeed's pipeline engine is not supported in the manager yet")
    if getattr(engine, "has_moe_layers", False):
        raise Unsupported("DeepSpeed-MoE models are not supported in the manager yet")


if TYPE_CHECKING:

    def _keeps_the_seam(engine: DeepSpeedEngine) -> Engine:
        return engine


State = dict[str, Any]
_ATOMS = (str, int, float, bool, bytes, type(None), torch.dtype, torch.device, torch.Size)
RESERVED = frozenset({"checkpoint_parallel_dimensions"})
"""What DeepSpeed does not let a client state overwrite."""


@dataclass(slots=True)
class _CapturingEngine:
    """Stands in for DeepSpeed's checkpoint engine."""

    saved: dict[str, State] = field(default_factory=dict)

    def save(self, state_dict: State, path: str) -> None:
        """Keep what is to be written."""
        self.saved[path] = state_dict

    def preserves_storage_sharing(self) -> bool:
        """As the one that calls ``torch.save``: DeepSpeed need not clone."""
        return False


def own_files(
    engine: Any, tag: str, client_state: Mapping[str, object], exclude_frozen: bool, *, trained: bool = True
) -> dict[str, State]:
    """The content of the files that this rank writes, by path below the folder that ``save_checkpoint`` is given.

    DeepSpeed makes its state dicts and hands them to a *checkpoint engine*, which writes them. Here one stands in that only
    keeps them: so the files are DeepSpeed's own to the key, whatever its version puts into them.

    Source: deepspeed 0.19.8, ``runtime/engine.py`` (``save_checkpoint``, ``_save_checkpoint``, ``_save_zero_checkpoint``).

    Tensors are the live ones. No collective is called: where stage 3 keeps small parameters whole between steps, their
    places in the module are emptied here, and not by partitioning them.

    Args:
        engine: DeepSpeed's engine.
        tag: Name of the checkpoint's folder.
        client_state: Goes to the top level, over DeepSpeed's own keys, as DeepSpeed has it.
        exclude_frozen: See ``save_checkpoint``.
        trained: Whether there is an optimizer. In bf16 without one DeepSpeed wraps a dummy, which its own save trips over.

    Raises:
        Unsupported: The client state has a key that DeepSpeed guards.
    """
    if clash := RESERVED & set(client_state):
        raise Unsupported(f"client_state: the key {min(clash)!r} is DeepSpeed's own\nGive it another name.")
    keeper = _CapturingEngine()
    others: dict[str, object] = {} if trained else {"optimizer": None, "save_zero_checkpoint": False}
    others |= {"_get_param_fragment_func": _fragment, "_copy_recovery_script": _nothing}
    with _replaced(engine, checkpoint_engine=keeper, **others):
        engine._save_checkpoint("", tag, client_state=dict(client_state), exclude_frozen_parameters=exclude_frozen)
        if engine.save_zero_checkpoint:
            engine._save_zero_checkpoint("", tag)
    for path, state in keeper.saved.items():
        if path.endswith("model_states.pt") and engine.zero_optimization_partition_weights():
            _empty_sliced(engine, state)
    return {path: _settled(state) for path, state in keeper.saved.items()}


@contextmanager
def _replaced(engine: Any, **values: object) -> Iterator[None]:
    """Attributes of the engine that are others for a while."""
    own = vars(engine)
    before = {name: own[name] for name in values if name in own}
    own.update(values)
    try:
        yield
    finally:
        for name in values:
            del own[name]
        own.update(before)


def _fragment(param: Any) -> torch.Tensor:
    """A frozen parameter, or this rank's slice of it, without DeepSpeed's copy to the CPU."""
    found: torch.Tensor = (param.ds_tensor if hasattr(param, "ds_id") else param).detach()
    return found


def _nothing(save_path: str) -> None:
    """DeepSpeed copies two scripts beside the tag; this package reads such files without running any."""


def _empty_sliced(engine: Any, state: State) -> None:
    """Stage 3: all parameters are empty in the module, those too that are whole between steps just now."""
    sliced = {name for name, param in engine.module.named_parameters(remove_duplicate=False) if hasattr(param, "ds_id")}
    module = state["module"]
    state["module"] = type(module)(
        (name, torch.empty(0, dtype=value.dtype) if name in sliced else value) for name, value in module.items()
    )


def _settled(value: Any) -> Any:
    """The same nest with containers and objects of its own, so that training may go on; tensors are still the live ones."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, dict):
        items = ((key, _settled(item)) for key, item in value.items())
        return OrderedDict(items) if isinstance(value, OrderedDict) else dict(items)
    if isinstance(value, _ATOMS):
        return value
    if type(value) in (list, tuple):
        return type(value)(_settled(item) for item in value)
    return copy.deepcopy(value)
