"""Torch's Muon for frameworks that have one of their own, with the same momentum."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from mcore_rlhf.core.facts import Fate, Rule
from mcore_rlhf.families.fsdp.groups import torch_class
from mcore_rlhf.families.module import USE_MUON
from mcore_rlhf.families.source import ParamGroup, Source

MUON, SIMPLE = "Muon", (3.4445, -4.775, 2.0315)
"""The class, and its coefficients, which Megatron calls ``simple``. Source: torch 2.13.0, ``optim/_muon.py``."""


def is_of_torch(group: ParamGroup) -> bool:
    """Whether torch's Muon trains it."""
    return torch_class(group.fields) == MUON


def marked(source: Source) -> Source:
    """The source with its groups marked as DeepSpeed marks its own; it sorts what its Muon trains, and loads by position.

    Args:
        source: Under a module's names; torch's Muon trains a part of it.
    """
    shapes = source.model.shapes
    groups = []
    for group in source.state.groups:
        own = is_of_torch(group)
        names = sorted(group.params, key=shapes.__getitem__, reverse=True) if own else group.params
        groups.append(replace(group, fields={USE_MUON: own, **group.fields}, params=tuple(names)))
    groups.sort(key=lambda group: not group.fields[USE_MUON])
    return replace(source, state=replace(source.state, groups=tuple(groups)))


def for_deepspeed(source: Source) -> Source:
    """The same, and what DeepSpeed's Muon has no setting for is lost by name.

    Source: deepspeed 0.19.8, ``runtime/zero/muon/original_muon.py`` (``muon_update``, ``zeropower_via_newtonschulz5``).

    Args:
        source: Under a module's names; torch's Muon trains a part of it.
    """
    found, notes = marked(source), source.notes.copy()
    notes.through(_RULES, [group.fields for group in source.state.groups if is_of_torch(group)])
    return replace(found, notes=notes)


def _other(key: str, *known: object) -> Callable[[Sequence[Mapping[str, object]]], list[object]]:
    """Values of a setting that DeepSpeed's Muon has not."""
    return lambda groups: [value for of in groups if (value := of.get(key)) not in known]


_RULES: tuple[Rule[Sequence[Mapping[str, object]]], ...] = (
    Rule(Fate.CHANGED, "torch's Muon becomes DeepSpeed's (type Muon in ds_config), whose momentum is the same", len),
    Rule(Fate.LOST, "adjust_lr_fn {found}: DeepSpeed's Muon scales an update by the square root of rows over columns alone",
         _other("adjust_lr_fn", None, "original")),
    Rule(Fate.LOST, "ns_coefficients {found}: DeepSpeed's Muon has those of torch's default alone",
         _other("ns_coefficients", SIMPLE, [*SIMPLE])),
    Rule(Fate.LOST, "nesterov {found}: DeepSpeed's Muon always has it", _other("nesterov", True)),
)  # fmt: skip


def scale(fields: Mapping[str, object]) -> dict[str, object]:
    """Megatron's arguments for the scale of an update.

    Sources: torch 2.13.0, ``optim/_muon.py`` (``_adjust_lr``); emerging_optimizers 0.3.0, ``orthogonalized_optimizers/muon.py``
    (``get_muon_scale_factor``).

    Args:
        fields: Of a group, torch's or DeepSpeed's.
    """
    if fields.get("adjust_lr_fn") == "match_rms_adamw":
        return {"muon_scale_mode": "spectral", "muon_extra_scale_factor": 0.2}
    return {"muon_scale_mode": "shape_scaling"}
