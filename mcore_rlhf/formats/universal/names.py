"""File names and keys of a universal checkpoint.

Source: DeepSpeed 0.19.8, ``checkpoint/{constants,ds_to_universal,universal_checkpoint}.py``.
"""

from __future__ import annotations

import re

from mcore_rlhf.core.names import MASTER

LATEST = "latest_universal"
SUFFIX = "_uni"
ZERO = "zero"
OPTIMIZER_FILE = "optimizer_state.pt"
MODEL_FILES = "mp_rank_*_model_states.pt"
"""What stages 1 and 2 look for."""
STAGE3_MODEL_FILES = "zero_pp_rank_*_mp_rank_*_model_states.pt"
"""What stage 3 looks for; it loads those of ``zero_pp_rank_0``."""

FP32 = "fp32"
STEP = "step"
PARAM_KEY = "param"
CAT_DIM = "cat_dim"
VOCAB_TENSOR = "vocab_tensor"
N_SUB_PARAMS = "param_n_sub_params"

INFO = "universal_checkpoint_info"

_NUMBERS = re.compile(r"(\d+)")


def state_key(state: str) -> str:
    """The file name's stem for a state: the master copy is ``fp32``, all others keep their names."""
    return FP32 if state == MASTER else state


def natural(text: str) -> list[tuple[int, str]]:
    """A sort key by which ``rank_10`` comes after ``rank_9``."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in _NUMBERS.split(text)]


def model_file(mp_rank: int) -> str:
    """The file of a model-parallel rank for stages 1 and 2."""
    return f"mp_rank_{mp_rank:02d}_model_states.pt"


def stage3_model_file(mp_rank: int) -> str:
    """The one file of a model-parallel rank that stage 3 reads."""
    return f"zero_pp_rank_0_mp_rank_{mp_rank:02d}_model_states.pt"
