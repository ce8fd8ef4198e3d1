"""What a DCP folder has no place for, kept in one item of its own, so that the way back to another format loses nothing.

The item is called :data:`ITEM`. torch loads what its caller asks for, so no FSDP run looks at it; a run that saves anew leaves it
out. It holds a zip inside a byte tensor: tools that load every item need none of the classes in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from mcore_rlhf.core.dtype import DType, dtype_of
from mcore_rlhf.errors import Unsupported
from mcore_rlhf.families.module import ModuleState
from mcore_rlhf.families.source import ParamGroup, Source, TrainingState

ITEM = "mcore_rlhf"
_VERSION = 1
_NATIVE = tuple(field.name for field in fields(ModuleState) if field.name != "packs_experts")
_TUPLES = frozenset({"order", "buffers", "per_rank"})
_STATE = ("iteration", "release", "args", "scheduler", "grad_scaler", "other")


@dataclass(frozen=True, slots=True)
class Extra:
    """What was kept.

    Args:
        state: Everything about the training that is no tensor.
        native: What formats of module names keep besides.
        dtypes: Types in which the model computes, by parameter: the folder has the fp32 masters.
        frozen: Parameters that are not trained, and buffers.
    """

    state: TrainingState
    native: ModuleState
    dtypes: Mapping[str, DType]
    frozen: frozenset[str]

    def as_tree(self) -> dict[str, Any]:
        """Plain containers, to be stored."""
        groups = [
            {"fields": dict(g.fields), "expert": g.expert, "params": list(g.params), "scalars": list(g.scalars)}
            for g in self.state.groups
        ]
        return {
            "version": _VERSION,
            "state": {name: getattr(self.state, name) for name in _STATE} | {"groups": groups},
            "native": {name: _plain(getattr(self.native, name)) for name in _NATIVE},
            "dtypes": {name: str(dtype) for name, dtype in self.dtypes.items()},
            "frozen": sorted(self.frozen),
        }

    @classmethod
    def of_tree(cls, tree: Any, where: str) -> Extra:
        """What was stored.

        Raises:
            Unsupported: A later version wrote it.
        """
        if not isinstance(tree, dict) or tree.get("version") != _VERSION:
            raise Unsupported(
                f"{where}: its item {ITEM!r} is of a version that is not known; a later mcore_rlhf wrote it"
            )
        state, native = dict(tree["state"]), {k: v for k, v in tree["native"].items() if k in _NATIVE}
        groups = tuple(
            ParamGroup(g["fields"], g["expert"], tuple(g["params"]), tuple(g["scalars"])) for g in state.pop("groups")
        )
        for name in _TUPLES & native.keys():
            native[name] = tuple(native[name])
        dtypes = {name: dtype_of(dtype) for name, dtype in tree["dtypes"].items()}
        return cls(TrainingState(**state, groups=groups), ModuleState(**native), dtypes, frozenset(tree["frozen"]))


def extra_of(source: Source, native: ModuleState, dtype: DType | None) -> Extra:
    """What must be kept of a source.

    Args:
        source: The source.
        native: Its own view.
        dtype: What parameters become, or None to leave them.
    """
    own = ModuleState(**{name: getattr(native, name) for name in _NATIVE})
    dtypes = {s.name: dtype if dtype is not None and s.trainable else s.dtype for s in source.model.params}
    frozen = frozenset(spec.name for spec in source.model.params if not spec.trainable)
    return Extra(replace(source.state), own, dtypes, frozen)


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value
