"""The account's table against real megatron-core: what it calls without meaning for the function leaves the logits as they are."""

from __future__ import annotations

from typing import Any

import pytest

from mcore_rlhf.demo.versions import MEGATRON
from mcore_rlhf.demo.workers import WorkerPool
from mcore_rlhf.models.meaning import About
from mcore_rlhf.models.meaning.arguments import OTHER_ARGUMENTS
from mcore_rlhf.models.meaning.declared import transformer_fields
from tests.reference.fields_jobs import SIZES, differences

TOLERANCE = 1e-4
COMPUTES: dict[str, Any] = {
    "softmax_scale": 1.0, "window_size": (3, 0), "glu_linear_offset": 1.0, "activation_func_clamp_value": 0.001,
    "rotary_interleaved": True, "layernorm_epsilon": 0.1, "moe_router_topk": 3, "no_rope_freq": [1, 1],
    "moe_router_pre_softmax": True, "moe_router_score_function": "sigmoid",
}  # fmt: skip
"""Fields that do change it, so that the comparison can fail."""


def other(value: object) -> object:
    """Another value of the same type; None where nobody can say one."""
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int | float) else None


@pytest.fixture(scope="module")
def fields() -> Any:
    version = next((v for v in transformer_fields() if v.startswith(f"{MEGATRON[0]}.{MEGATRON[1]}.")), "0.16.1")
    return transformer_fields()[version]


def test_what_has_no_meaning_for_the_function_changes_no_logit(pool: WorkerPool, fields: Any) -> None:
    kinds = (About.TRAINING, About.EXECUTION, About.BOOKKEEPING)
    tried = {
        name: other(SIZES.get(name, value)) for name, value in fields.items() if OTHER_ARGUMENTS.get(name) in kinds
    }
    tried = {name: value for name, value in tried.items() if value is not None}
    (found,) = pool.run(differences, tried, world_size=1, timeout=200)
    compared = {name: far for name, far in found.items() if isinstance(far, float)}
    print(f"{len(compared)} of {len(tried)} fields compared; not built: {[n for n in tried if n not in compared]}")
    assert len(compared) > 60
    assert {name: far for name, far in compared.items() if far > TOLERANCE} == {}


def test_what_is_said_to_compute_does_compute(pool: WorkerPool) -> None:
    (found,) = pool.run(differences, COMPUTES, world_size=1, timeout=200)
    assert {name: far for name, far in found.items() if isinstance(far, str) or far < TOLERANCE} == {}
