"""Norms that count from 0 on one side and from 1 on the other: the one arithmetic between the two families of names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mcore_rlhf.core.catalog import MASTER, PARAM, TensorName
from mcore_rlhf.core.facts import Fate, Item, Kind, Rule
from mcore_rlhf.core.rows import Tensor
from mcore_rlhf.families.source import Computed, Source

SHIFTED: Rule[Mapping[str, float]] = Rule(
    Fate.LOST,
    "{count} norms such as {first}: {number:+g} on every element, since one side counts from 1 and the other from 0; rounded once, which "
    "loses nothing of norms between 0.5 and 2 on the way to Megatron",
    lambda by: by and {
        "count": len(by), "first": next(iter(by)), "number": next(iter(by.values())),
        "of": [Item(Kind.TENSOR, name) for name in (*by, PARAM, MASTER)],
    },
)  # fmt: skip
"""What is said of what :func:`shifted` adds."""


def shifted(source: Source, by: Mapping[str, float]) -> Source:
    """The source with a number added to some parameters and their masters; a parameter is rounded from its master, where it has one.

    Args:
        source: Under either family's names.
        by: What is added, by parameter.
    """
    from mcore_rlhf.core.computed import Shifted  # needs numpy, which looking at a folder does not

    made = []
    for name, number in by.items():
        stored = {state: source.catalog.get(TensorName(source.role, name, state)) for state in (PARAM, MASTER)}
        base = stored[MASTER] or stored[PARAM]
        made += [
            Shifted(base, number, own.name, own.dtype)
            for own in stored.values()
            if own is not None and base is not None
        ]
    before = source.computed or Computed(source.root, {})
    entries = {one.name: one.entry for one in made}
    computations = {entries[one.name].chunks[0].record.file: one for one in made}
    return replace(
        source,
        catalog=source.catalog.replaced({name: Tensor.of(entry) for name, entry in entries.items()}),
        computed=Computed(before.root, {**before.computations, **computations}),
    )
