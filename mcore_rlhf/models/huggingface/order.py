"""The order of a model's parameters in memory, which is what numbers in a torch optimizer's state dict count.

Names and shapes do not say it: safetensors' files are in alphabetical order, and most layers' tensors are alike.
Source: transformers 5.23.0, ``models/*/modeling_*.py``: ``named_parameters()`` of the class that ``config.json`` names.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from mcore_rlhf.errors import Unsupported

from .config import known_architecture, sizes_of_config, text_of
from .relation import HOW_TO_ADD, in_order
from .table import Architecture

BUFFERS = ("e_score_correction_bias",)
"""Ends of the names of tensors that lie in the files beside parameters and are none.

Source: transformers 5.23.0, ``models/deepseek_v3/modeling_deepseek_v3.py`` (``register_buffer``).
"""


def module_order(config: Mapping[str, object], names: Collection[str]) -> list[str]:
    """The parameters of a model in the order of its ``named_parameters()``.

    Args:
        config: Its ``config.json``.
        names: Its tensors, tied ones once; experts packed, as transformers 5 has them in memory, or one by one, as on disk and in
            transformers 4. Buffers among them are left out.

    Raises:
        Unsupported: No table has the architecture, or it has no place for some of the names.
        LayoutMismatch: The description says sizes that no model has.
        UsageError: It lacks sizes.
    """
    config = text_of(config)
    known = known_architecture(config)
    if known is None:
        raise Unsupported(
            f"config.json: model_type {config.get('model_type')} is in no table, so that nobody knows in which order its module has its "
            f"parameters\n{HOW_TO_ADD}"
        )
    wanted, sizes = {name for name in names if not name.endswith(BUFFERS)}, sizes_of_config(config)
    found = [
        [name for name in dict.fromkeys(in_order(order, sizes)) if name in wanted]
        for order in (_in_memory(known), known.order)
    ]
    longest = max(found, key=len)
    if len(longest) < len(wanted):
        others = sorted(wanted.difference(longest))
        raise Unsupported(
            f"{len(others)} parameters have no place in {known.class_name} that is known: {', '.join(others[:3])}\n{HOW_TO_ADD}"
        )
    return longest


def _in_memory(known: Architecture) -> list[str]:
    """The order with packed experts in the place of theirs on disk."""
    packed = {file: row.module for row in known.packed for file in row.files}
    return list(dict.fromkeys(packed.get(name, name) for name in known.order))
