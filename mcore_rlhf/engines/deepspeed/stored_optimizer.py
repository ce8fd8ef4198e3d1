"""The optimizer in one rank's own file, by the number of the flat tensor: what DeepSpeed's four stages store alike.

Source: deepspeed 0.19.8, ``runtime/zero/stage_1_and_2.py``, ``runtime/zero/stage3.py``, ``runtime/bf16_optimizer.py``,
``runtime/fp16/unfused_optimizer.py`` (``state_dict``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mcore_rlhf.families.source import ParamGroup
from mcore_rlhf.storage.ptfile import PtFile, StoredTensor

from .origin import States
from .restoring import WRAPPER

_STEP = "step"


@dataclass(slots=True)
class StoredOptimizer:
    """An optimizer as one file has it.

    Args:
        pt: The file.
        tree: The optimizer's state dict in it.
        param_groups: Torch's param groups; empty in an elastic checkpoint, which has none.
        groups: For every flat tensor, its param group.
        states: For every flat tensor, what torch's optimizer keeps of it.
        masters: For every flat tensor, its master; empty where there are none.
    """

    pt: PtFile
    tree: Mapping[str, Any]
    param_groups: list[Mapping[str, Any]] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    states: list[Mapping[str, Any]] = field(default_factory=list)
    masters: list[Any] = field(default_factory=list)

    @classmethod
    def of(cls, pt: PtFile, tree: Mapping[str, Any]) -> StoredOptimizer:
        """Read a state dict of any stage."""
        found = cls(pt, tree)
        inner = tree.get("optimizer_state_dict", tree.get("base_optimizer_state", tree))
        if isinstance(inner, Mapping) and isinstance(inner.get("param_groups"), list):
            found.param_groups = inner["param_groups"]
            stored = inner.get("state", {})
            for group, one in enumerate(found.param_groups):
                for number in one["params"]:
                    found.groups.append(group)
                    found.states.append(stored.get(number, {}))
        if "fp32_groups" in tree:
            found.masters = [one for group in tree["fp32_groups"] for one in group]
        else:
            found.masters = list(tree.get("fp32_flat_groups", tree.get("single_partition_of_fp32_groups", [])))
        return found

    def tensor_states(self) -> States:
        """Of every flat tensor, the names of the states that are one value per element, such as ``exp_avg``."""
        wide = (tuple(key for key, value in state.items() if _is_wide(key, value)) for state in self.states)
        return dict(enumerate(wide))

    def param_groups_of(self, names: Mapping[int, tuple[str, ...]]) -> tuple[ParamGroup, ...]:
        """The param groups as every format takes them.

        Args:
            names: The parameters of each.
        """
        found = []
        for group, stored in enumerate(self.param_groups):
            fields = {key: self.pt.materialize(value) for key, value in stored.items() if key != "params"}
            scalars: dict[str, object] = {}
            for of, state in zip(self.groups, self.states, strict=True):
                if of == group:
                    values = ((k, v) for k, v in state.items() if not _is_wide(k, v))
                    scalars.update((key, self.pt.materialize(value)) for key, value in values if key not in scalars)
            found.append(ParamGroup({**fields, **scalars}, params=names.get(group, ()), scalars=tuple(scalars)))
        return tuple(found)

    def wrapper(self) -> dict[str, object]:
        """What DeepSpeed's own optimizer keeps besides."""
        return {key: value for key, value in self.tree.items() if key in WRAPPER}


def _is_wide(key: str, value: object) -> bool:
    return key != _STEP and isinstance(value, StoredTensor) and bool(value.shape)
