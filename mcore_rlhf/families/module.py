"""What formats under a torch module's own names keep besides tensors and the :class:`~.source.TrainingState`.

These are DeepSpeed's two, native and universal, torch's DCP, and Hugging Face's folders. DeepSpeed's two fill
``TrainingState`` alike: ``iteration`` is ``global_steps``, ``args`` the stored ``ds_config``, ``scheduler`` the
``lr_scheduler`` state, ``grad_scaler`` the ``loss_scaler``, and ``other`` everything else at the top of the first
``…model_states.pt`` (counters, client state), without the keys in :data:`LAYOUT_KEYS`. In all of them a param group's
optimizer step is its field ``step``, named in its ``scalars``. The loss scaler is an object in ZeRO's files, loose values in those
of stage 0.

Source: deepspeed 0.19.8, ``runtime/fp16/loss_scaler.py`` (``LossScaler``, ``DynamicLossScaler``),
``runtime/fp16/fused_optimizer.py`` (``state_dict``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar

from mcore_rlhf.core.catalog import Shape
from mcore_rlhf.core.facts import Fate, Inventory, Rule
from mcore_rlhf.errors import UsageError
from mcore_rlhf.storage import reading
from mcore_rlhf.storage.leftovers import CarriedFiles
from mcore_rlhf.storage.stored import Stub, new_stub
from mcore_rlhf.suggestions import hub_name

from .inventory import OPAQUE, items_in
from .source import Family, NewNames, Source
from .trainer_files import RankStates, RunFiles, of_ranks, rng_item

LAYOUT_KEYS = frozenset(
    {
        "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments",
        "shared_params", "lr_scheduler", "global_steps", "dp_world_size", "mp_world_size",
        "checkpoint_parallel_dimensions", "ds_config",
    }
)  # fmt: skip
"""Top-level keys of ``…model_states.pt`` that have a place of their own, or follow from the layout.

Source: DeepSpeed 0.19.8, ``runtime/engine.py`` (``_save_checkpoint``).
"""

SHARDED_KEYS = frozenset(
    {
        "base_optimizer_state", "base_optimizer_state_step", "single_partition_of_fp32_groups", "param_slice_mappings",
        "optimizer_state_dict", "fp32_flat_groups", "fp32_groups", "param_groups", "loss_scaler", "zero_stage",
        "group_paddings", "param_alignment_paddings", "partition_count", "ds_zero_partition_groups",
    }
)  # fmt: skip
"""Keys of an optimizer's state that have a place of their own, or follow from stage and degrees.

Source: DeepSpeed 0.19.8, ``runtime/zero/{stage_1_and_2,stage3}.py`` and ``runtime/bf16_optimizer.py`` (``state_dict``).
"""


USE_MUON, MOMENTUM = "use_muon", "momentum_buffer"
"""How DeepSpeed's Muon marks its param groups, and its one state. Source: ``runtime/zero/muon/muon_optimizer.py``."""


def is_for_muon(name: str, shape: Shape) -> bool:
    """Whether DeepSpeed's Muon trains a parameter; each of its groups lists those that it does by shape, the largest first.

    Sources: deepspeed 0.19.8, ``__init__.py`` (``set_optimizer_flags``), ``runtime/zero/muon/original_muon.py`` (``MuonWithAuxAdam``).
    """
    return len(shape) >= 2 and not any(word in name.lower() for word in ("embed", "lm_head"))


OF_RANKS: Rule[ModuleState] = Rule(
    Fate.LOST, "random states of {count}: only transformers' and accelerate's own files have a place for them",
    lambda own: {"count": of_ranks(len(own.rng)), "of": [rng_item(rank) for rank in range(len(own.rng))]} if own.rng else None,
)  # fmt: skip


@dataclass(slots=True)
class ModuleState(Family):
    """A checkpoint under a module's own names; ``Source.family`` of all formats of this family is one, or extends it.

    Args:
        tag: Name of a DeepSpeed checkpoint's folder without ``_uni``: ``global_step1000``; empty for all others.
        order: Keys of the module's state dict in its order, buffers and aliases included; empty where nobody knows.
        buffers: Names of persistent buffers; they are parameters of the model that are not trained.
        shared: Second names of tied parameters: ``{alias: owner}``. The catalogue has owners only.
        optimizer: Everything about the optimizer that is neither a tensor nor in :data:`SHARDED_KEYS`: ``clip_grad``,
            ``dynamic_loss_scale``, ``overflow``, ``ds_version``.
        per_rank: For each model-parallel rank, ``pp_rank * tp + tp_rank``, what its file has where ``TrainingState.other``
            has the first rank's; empty where there is one rank.
        keys: For a parameter, what a universal file says besides the tensor: ``cat_dim``, ``vocab_tensor``, …
        pipeline: Whether the model is a ``PipelineModule``, whose weights lie in layer files.
        config: The model's description, as Hugging Face's ``config.json`` has it; empty where nobody said.
        without_frozen: Whether no frozen parameter is in the checkpoint and the model may have some, so that whoever loads it
            must not look for them.
        left_out: Whether the files are as those of a save that leaves frozen parameters out; the model may have none all the same.
        packs_experts: Whether the experts of a layer are one tensor, as transformers has them in memory, or one by one, as on disk.
        laid_out: How the DCP folder that it came from has its keys, and where it lies; it waits for the way back. Empty for all others.
        rng: Each rank's random states, by generator, of a run of transformers' Trainer or accelerate.
        beside: Whose files of schedule and random states lie beside its tag; None for a run that is DeepSpeed's alone.
        spelled: What the module of a run calls tensors that its class calls otherwise: one that ``torch.compile`` wrapped.
        place: The folder for what is this model's alone, with a ``/`` at the end, where it is a further one of several in a step's files;
            empty for all others.
    """

    names: ClassVar[str] = "module"
    homeless: ClassVar[Sequence[Rule[Any]]] = [
        Rule(
            Fate.LOST, "values of the state dict that are no tensors: only DeepSpeed's own files hold them", of=[OPAQUE]
        ),
        OF_RANKS,
    ]
    tag: str = ""
    order: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    shared: Mapping[str, str] = field(default_factory=dict)
    optimizer: Mapping[str, object] = field(default_factory=dict)
    per_rank: tuple[Mapping[str, object], ...] = ()
    keys: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    pipeline: bool = False
    config: Mapping[str, object] = field(default_factory=dict)
    without_frozen: bool = False
    left_out: bool = False
    packs_experts: bool = True
    laid_out: Mapping[str, object] = field(default_factory=dict)
    rng: tuple[RankStates, ...] = ()
    beside: RunFiles | None = None
    spelled: Mapping[str, str] = field(default_factory=dict)
    place: str = ""

    @property
    def fsdp(self) -> int:
        """The version of FSDP whose rank files it was read from; 0 where nobody said, or they are another's."""
        return 0

    def base(self) -> ModuleState:
        """The same without what one format knows of its own files; :func:`dataclasses.replace` changes it by field."""
        return ModuleState(**{item.name: getattr(self, item.name) for item in fields(ModuleState)})

    def inventory(self) -> Inventory:
        """What it has, item by item; where nothing is said there is no item."""
        of_ranks = {rng_item(rank): states for rank, states in enumerate(self.rng)}
        return {**dict(items_in(self, "optimizer", "config", "shared", "buffers", "per_rank", "keys")), **of_ranks}

    def renamed(self, names: NewNames) -> ModuleState:
        """The same without what only its own format's files would say of tensors that are left out."""
        kept, new = {*names.owners, *names.shared}, names.new()
        return replace(
            self.base(),
            shared=names.shared,
            order=tuple(name for old in self.order if (name := names.rename(old)) in kept and name is not None),
            buffers=tuple(name for old in self.buffers for name in new.get(old, ())),
            keys={name: self.keys[old] for name, old in names.owners.items() if old in self.keys},
            spelled={
                name: self.spelled[name] for name, old in names.owners.items() if name == old and old in self.spelled
            },
        )


def may_lack_frozen(source: Source, family: ModuleState) -> bool:
    """Whether weights that are not trained may have been left out: nothing in the files says that all are there."""
    return family.without_frozen or not any(spec.trainable for spec in source.model.params)


def leaves_out_frozen(top: Mapping[str, object], stage: int | None = None) -> bool:
    """Whether a file of DeepSpeed's is as ``save_checkpoint(exclude_frozen_parameters=True)`` leaves it.

    Stages 2 and 3 list frozen parameters, and none where there are none; with the option they list nothing. Those below never do.
    Source: deepspeed 0.19.8, ``runtime/engine.py`` (``_save_checkpoint``: ``save_frozen_param``).

    Args:
        top: What a ``…model_states.pt`` has at the top.
        stage: The ZeRO stage; None for the one that its configuration asked for.
    """
    config = top.get("ds_config")
    zero = config.get("zero_optimization") if isinstance(config, Mapping) else None
    asked = zero.get("stage") if stage is None and isinstance(zero, Mapping) else stage
    return isinstance(asked, int) and asked >= 2 and top.get("frozen_param_shapes", ()) is None


_STATIC = "deepspeed.runtime.fp16.loss_scaler.LossScaler"
_DYNAMIC = "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"
_LOOSE = ("cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window")
_DEFAULTS: dict[str, object] = {
    "cur_scale": 65536.0, "cur_iter": 0, "last_overflow_iter": -1, "scale_factor": 2.0, "scale_window": 1000,
    "min_scale": 1, "delayed_shift": 1, "cur_hysteresis": 1, "consecutive_hysteresis": False,
    "raise_error_at_min_scale": True, "dtype": None, "dynamic": True,
}  # fmt: skip


def scaler_of(optimizer: Mapping[str, object]) -> Stub | None:
    """The loss scaler of an optimizer's state dict, or None where there is none."""
    stored = optimizer.get("loss_scaler")
    if isinstance(stored, Stub):
        return stored
    if "cur_scale" not in optimizer:
        return None
    if not optimizer.get("dynamic_loss_scale"):
        return static_scaler(optimizer["cur_scale"])
    return new_stub(_DYNAMIC, {**_DEFAULTS, **{key: optimizer[key] for key in _LOOSE if key in optimizer}})


def static_scaler(scale: object = 1.0) -> Stub:
    """A scale that never changes; 1 outside of fp16."""
    return new_stub(_STATIC, {"cur_scale": scale, "dynamic": False})


def is_dynamic(scaler: object) -> bool:
    """Whether a scaler adapts itself."""
    return bool(getattr(scaler, "dynamic", False)) if scaler is not None else False


def loose_values(scaler: object) -> dict[str, object]:
    """The scaler as stage 0 stores it."""
    dynamic = is_dynamic(scaler)
    keys = _LOOSE if dynamic else _LOOSE[:2]
    values = {key: getattr(scaler, key, {**_DEFAULTS, "cur_scale": 1.0}[key]) for key in keys}
    return {"dynamic_loss_scale": dynamic, **values}


CONFIG = "config.json"


def described(source: Source, config: Callable[[], Mapping[str, object]]) -> Source:
    """A source with the model's description, where it has a place for one and has none.

    Args:
        source: An opened checkpoint.
        config: Gives the content of ``config.json``.
    """
    family = ModuleState.of(source)
    return source if family is None or family.config else replace(source, family=replace(family, config=config()))


def read_config(folder: str) -> dict[str, object]:
    """The ``config.json`` of a model's folder, or such a file itself.

    Raises:
        UsageError: There is none, or it is none.
    """
    path = Path(folder).expanduser()
    path = path / CONFIG if path.is_dir() else path
    try:
        config = reading.read_json(path)
    except OSError as error:
        advice = hub_name(folder, local=True) or "\nGive --reference-config the folder of a Hugging Face model."
        raise UsageError(f"{path}: cannot read the model's config: {error.strerror}{advice}") from None
    except ValueError as error:
        raise UsageError(f"{path}: is no JSON: {error}\nTake it from where the model was published.") from None
    if not isinstance(config, dict):
        raise UsageError(f'{path}: expected an object such as {{"hidden_size": 4096}}, found {type(config).__name__}')
    return config


def config_in(carried: CarriedFiles) -> dict[str, object]:
    """The model's description among the files; empty where there is none, or where it is none."""
    path, text = carried.files.get(CONFIG), carried.texts.get(CONFIG)
    try:
        found = reading.parse_json(text or (reading.read_bytes(path) if path is not None else "{}"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
