"""What formats under a torch module's own names keep besides tensors and the :class:`~.source.TrainingState`.

These are DeepSpeed's two, native and universal, torch's DCP, and Hugging Face's folders. DeepSpeed's two fill
``TrainingState`` alike: ``iteration`` is ``global_steps``, ``args`` the stored ``ds_config``, ``scheduler`` the
``lr_scheduler`` state, ``grad_scaler`` the ``loss_scaler``, and ``other`` everything else at the top of the first
``…model_states.pt`` (counters, client state), without the keys in :data:`LAYOUT_KEYS`. In all of them a param group's
optimizer step is its field ``step``, named in its ``scalars``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from mcore_rlhf.core.account import Inventory, Item, Kind
from mcore_rlhf.errors import Unsupported

from .source import Source

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


@dataclass(slots=True)
class ModuleState:
    """A checkpoint under a module's own names; ``Source.native`` of all formats of this family is one, or extends it.

    Args:
        tag: Name of the checkpoint's folder without ``_uni``: ``global_step1000``.
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
    """

    tag: str
    order: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    shared: Mapping[str, str] = field(default_factory=dict)
    optimizer: Mapping[str, object] = field(default_factory=dict)
    per_rank: tuple[Mapping[str, object], ...] = ()
    keys: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    pipeline: bool = False
    config: Mapping[str, object] = field(default_factory=dict)
    without_frozen: bool = False

    def base(self) -> ModuleState:
        """The same without what one format knows of its own files; :func:`dataclasses.replace` changes it by field."""
        return ModuleState(**{item.name: getattr(self, item.name) for item in fields(ModuleState)})

    def inventory(self) -> Inventory:
        """What it has, item by item; where nothing is said there is no item."""
        named = {"shared": self.shared, "buffers": self.buffers, "per_rank": self.per_rank, "keys": self.keys}
        return {
            **{Item(Kind.OPTIMIZER, str(key)): value for key, value in self.optimizer.items()},
            **{Item(Kind.CONFIG, str(key)): value for key, value in self.config.items()},
            **{Item(Kind.MODEL, name): value for name, value in named.items() if value},
        }


def module_state_of(source: Source, to: str) -> ModuleState:
    """What a source keeps besides tensors.

    Args:
        source: An opened checkpoint.
        to: Name of the target's format.

    Raises:
        Unsupported: The source's names are not a module's own.
    """
    if not isinstance(source.native, ModuleState):
        raise Unsupported(f"from {source.format} to {to}: this pair of formats is not supported yet")
    return source.native
