"""What differs between the releases of megatron-core that the demonstration runs on: 0.16.1, 0.17.1, 0.18.2 and 0.19.2."""

from __future__ import annotations

import dataclasses
from typing import Any

from mcore_rlhf.engines.megatron.importing import MEGATRON as MEGATRON

HAS_GROUPED_MLP = MEGATRON < (0, 17)
"""Whether experts can be packed in two tensors without Transformer Engine (core/transformer/moe/experts.py, GroupedMLP)."""

_WITHDRAWN = ("cuda_graph_scope", "moe_use_legacy_grouped_gemm")
"""Fields of TransformerConfig that 0.16.1 needs to be set, and that later releases do not have."""


def known_fields(config_class: type, fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a configuration without those that this release has withdrawn.

    Args:
        config_class: Megatron's class of configurations.
        fields: Its fields by name, as 0.16.1 takes them.

    Returns:
        The fields that it takes; one that is unknown and was never withdrawn stays, and is refused by the class.
    """
    known = {field.name for field in dataclasses.fields(config_class)}
    return {name: value for name, value in fields.items() if name in known or name not in _WITHDRAWN}


def on_this_cp_rank(batch: dict[str, Any]) -> dict[str, Any]:
    """A batch's part that this context-parallel rank works on.

    Since 0.18 Megatron has to be told that the part does not vary by sample, and without a group it takes all ranks for one.
    """
    from megatron.core import parallel_state
    from megatron.core.utils import get_batch_on_this_cp_rank

    told = {"is_hybrid_cp": False} if MEGATRON >= (0, 18) else {}
    return get_batch_on_this_cp_rank(batch, cp_group=parallel_state.get_context_parallel_group(), **told)
