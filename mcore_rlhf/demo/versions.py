"""What differs between the releases of megatron-core that the demonstration runs on: 0.16.1, 0.17.1, 0.18.2 and 0.19.2; its trainer,
for tests of what older runs left, on 0.13.1, 0.14.0 and 0.15.3 as well.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
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
        The fields that it takes; one that is unknown and was never withdrawn stays, and is refused by the class. Releases before 0.16
        lack more than can be listed.
    """
    known = {field.name for field in dataclasses.fields(config_class)}
    kept = known if MEGATRON < (0, 16) else known | (fields.keys() - {*_WITHDRAWN})
    return {name: value for name, value in fields.items() if name in kept}


def on_this_cp_rank(batch: dict[str, Any]) -> dict[str, Any]:
    """A batch's part that this context-parallel rank works on.

    Since 0.18 Megatron has to be told that the part does not vary by sample, and without a group it takes all ranks for one.
    """
    from megatron.core import parallel_state
    from megatron.core.utils import get_batch_on_this_cp_rank

    told = {} if MEGATRON < (0, 16) else {"cp_group": parallel_state.get_context_parallel_group()}
    return get_batch_on_this_cp_rank(batch, **told, **({"is_hybrid_cp": False} if MEGATRON >= (0, 18) else {}))


def quick_gelu() -> Callable[..., Any]:
    """The activation of gpt-oss, which Megatron has since 0.14."""
    from megatron.core.fusions.fused_bias_geglu import quick_gelu

    return quick_gelu


def experts_metrics() -> dict[str, Any]:
    """What a release before 0.18 counts of experts: a dictionary that is handed out itself."""
    from megatron.core import parallel_state
    from megatron.core.transformer.moe import moe_utils

    name = "get_moe_layer_wise_logging_tracker"  # up to 0.13 in the first
    found: dict[str, Any] = getattr(moe_utils if hasattr(moe_utils, name) else parallel_state, name)()
    return found
