"""Tensors that are no numbers: the ``_extra_state`` of a module, where it lies as bytes among the tensors, is what the module unpickles.

Elsewhere such bytes are values, and are looked into where they are written: see :mod:`mcore_rlhf.storage.pickling`.

Source: Transformer Engine 2.9, ``pytorch/module/base.py`` (``get_extra_state``, ``set_extra_state``: ``pickle.loads`` of the bytes of a
tensor, whose type it does not ask for); megatron-core 0.19.2, ``extensions/transformer_engine.py`` (``TEGroupedLinear``:
``_extra_state0``, ``_extra_state1``, … of its parts); torch 2.13.0, ``distributed/checkpoint/state_dict.py`` (an extra state that is a
tensor is saved as any other).
"""

from __future__ import annotations

import re

from mcore_rlhf.core.catalog import Box, TensorEntry
from mcore_rlhf.core.computed import gather
from mcore_rlhf.errors import Problems, Untrusted
from mcore_rlhf.families.source import Source, bytes_of
from mcore_rlhf.storage.nested import calls_of

_NAME = re.compile(r"(.*\.)?_extra_state\d*", re.DOTALL)
_MOST = 64 << 20


def check_extra_states(source: Source) -> None:
    """Refuse tensors of bytes that a module would unpickle, and that call what is on no list of harmless names.

    Args:
        source: What a target is made of.

    Raises:
        Untrusted: There are some; all are named.
        StorageError: One cannot be read.
    """
    problems = Problems()
    names = [name for name in source.catalog if _NAME.fullmatch(name.param)]
    for entry in filter(None, map(source.catalog.get, names)):
        if calls := _calls(source, entry):
            problems.add(
                Untrusted,
                f"{source.root}: {entry.name.param} holds a pickle that calls {', '.join(map(repr, calls))}",
                "No honest checkpoint needs it: do not load the source with anything else either.",
            )

    problems.raise_if_any()


def _calls(source: Source, entry: TensorEntry) -> list[str]:
    whole = Box.whole(entry.global_shape)
    if whole.numel * entry.dtype.itemsize > _MOST:
        return ["more than can be looked into"]
    with bytes_of(source) as stored:
        return calls_of(bytes(gather(entry, [whole], entry.dtype, stored)))
