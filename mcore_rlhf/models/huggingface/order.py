"""The order of a model's parameters in memory, which is what numbers in a torch optimizer's state dict count.

Names and shapes do not say it: safetensors' files are in alphabetical order, and most layers' tensors are alike.
Source: transformers 5.23.0 and, of experts one by one, 4.57.6, ``models/*/modeling_*.py``: ``named_parameters()`` of the class that
``config.json`` names.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from itertools import groupby

from mcore_rlhf.errors import Unsupported
from mcore_rlhf.models.spec import OF_WRAPPER

from . import ARCHITECTURES
from .config import known_architecture
from .relation import HOW_TO_ADD
from .table import EXPERT, LAYER, NEXT, Architecture
from .texts import text_of

BUFFERS = ("e_score_correction_bias",)
"""Ends of the names of tensors that lie in the files beside parameters and are none.

Source: transformers 5.23.0, ``models/deepseek_v3/modeling_deepseek_v3.py`` (``register_buffer``).
"""
_NUMBER = re.compile(r"(?<=\.)\d{1,18}(?=\.|$)")
_BESIDE = "mtp."
_Place = tuple[int, int, int, int, int]
"""Section, layer, run of names in it, expert, name: in this order they are counted."""


def module_order(config: Mapping[str, object], names: Collection[str]) -> list[str]:
    """The parameters of a model in the order of its ``named_parameters()``.

    Args:
        config: Its ``config.json``; empty where there is none: then all tables must agree that have these names.
        names: Its tensors, tied ones once; experts packed, as transformers 5 has them in memory, or one by one, as on disk and in
            transformers 4. Buffers among them are left out.

    Raises:
        Unsupported: No table has the architecture, or it has no place for some of the names; or nothing says which it is, and tables
            that have these names differ.
        LayoutMismatch: The description says sizes that no model has.
    """
    wanted = [name for name in names if not name.endswith(BUFFERS)]
    if not config:
        return _agreed(wanted)
    config = text_of(config)
    known = known_architecture(config)
    if known is None:
        raise Unsupported(
            f"config.json: model_type {config.get('model_type')} is in no table, so that nobody knows in which order its module has its "
            f"parameters\n{HOW_TO_ADD}"
        )
    others, order = min((_sorted(one, wanted) for one in _orders(known)), key=lambda found: len(found[0]))
    if others:
        raise Unsupported(
            f"{len(others)} parameters have no place in {known.class_name} that is known: {', '.join(sorted(others)[:3])}\n{HOW_TO_ADD}"
        )
    return order


def _agreed(names: Collection[str]) -> list[str]:
    """The order in which all tables have the names that have them all."""
    found = {
        tuple(order)
        for known in ARCHITECTURES
        for one in _orders(known)
        for others, order in [_sorted(one, names)]
        if not others
    }
    if len(found) != 1:
        how = "tables that have them differ" if found else "no table has them all"
        raise Unsupported(
            f"no config.json says which model this is, and of the order of its {len(names)} parameters in memory {how}\n"
            "Put the model's own config.json beside the weights."
        )
    return list(found.pop())


def _orders(known: Architecture) -> tuple[Iterable[str], Iterable[str]]:
    """The table's order with packed experts in the place of theirs on disk, and that of modules one by one."""
    packed = {file: row.module for row in known.packed for file in row.files}
    return [*dict.fromkeys(packed.get(name, name) for name in known.order), *OF_WRAPPER], [
        *(known.order4 or known.order),
        *OF_WRAPPER,
    ]


def _sorted(order: Iterable[str], names: Collection[str]) -> tuple[list[str], list[str]]:
    """Names that the order has no place for; and all others, sorted. Layers and experts are counted as they come, none is made up."""
    places = _places(order)
    found: dict[str, _Place] = {}
    for name in names:
        pattern, numbers = _pattern(name)
        if pattern in places:
            section, run, place = places[pattern]
            layer, expert = (*numbers, 0, 0)[:2]
            found[name] = section, layer, run, expert, place
    return [name for name in names if name not in found], sorted(found, key=found.__getitem__)


def _places(order: Iterable[str]) -> dict[str, tuple[int, int, int]]:
    """For every name of a table: the section in which the same is counted, the run in it that counts experts or does not, its place."""
    places: dict[str, tuple[int, int, int]] = {}
    for section, (_, names) in enumerate(
        groupby(order, lambda name: next((n for n in (NEXT, LAYER) if n in name), None))
    ):
        for run, (_, inside) in enumerate(groupby(names, lambda name: EXPERT in name)):
            places.update((name, (section, run, place)) for place, name in enumerate(inside))
    return places


@lru_cache(maxsize=1 << 16)  # a model's names are asked for again for each file and each target
def _pattern(name: str) -> tuple[str, tuple[int, ...]]:
    """A name with ``{i}`` or ``{k}``, and ``{e}``, in the place of its numbers; and these."""
    numbers = tuple(int(number) for number in _NUMBER.findall(name))
    marks = iter((NEXT if name.startswith(_BESIDE) else LAYER, EXPERT))
    return _NUMBER.sub(lambda found: next(marks, found[0]), name), numbers
