"""Save, resume, convert and prove the checkpoints of RLHF runs on Megatron-core and DeepSpeed."""

from __future__ import annotations

__version__ = "0.1.0"
