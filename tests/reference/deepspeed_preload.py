"""What ranks with DeepSpeed import before they are forked from one another."""

from tests.reference import (
    deepspeed_commit,
    deepspeed_faults,
    deepspeed_muon,
    deepspeed_transformers,
    deepspeed_variants,
    deepspeed_worker,
)

__all__ = [
    "deepspeed_commit",
    "deepspeed_faults",
    "deepspeed_muon",
    "deepspeed_transformers",
    "deepspeed_variants",
    "deepspeed_worker",
]
