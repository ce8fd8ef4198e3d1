"""What a logical tensor is called."""

from __future__ import annotations

from typing import NamedTuple

PARAM = "param"
MASTER = "master"
EXP_AVG = "exp_avg"
EXP_AVG_SQ = "exp_avg_sq"


class TensorName(NamedTuple):
    """The identity of a logical tensor, equal in every format that keeps the same names.

    Args:
        role: Whose model it is: ``actor``, ``critic``, ``reward``, ``reference``.
        param: The parameter's global name; layer and expert numbers are global.
        state: ``param`` (the weight as the model computes with it), ``master`` (its fp32 copy), or the name of an
            optimizer state such as ``exp_avg``.
    """

    role: str
    param: str
    state: str = PARAM

    def __str__(self) -> str:
        return f"{self.role}/{self.param} ({self.state})"
