"""What stands where in ``state.pt``.

Source: :mod:`mcore_rlhf.engines.plain`; torch 2.13.0, ``optim/optimizer.py`` (``state_dict``).
"""

from __future__ import annotations

NAME = "torch"
FILE = "state.pt"
MODEL, OPTIMIZER, RECORD, SCHEDULER, ITERATION = "model", "optimizer", "optimizer_params", "scheduler", "iteration"
"""The file's parts. ``optimizer_params`` says by group whose states the optimizer's numbers are: ``class``, ``names``, ``shapes``."""
PARTS = frozenset({MODEL, OPTIMIZER, RECORD, SCHEDULER})
"""What no value of the program's own can be called."""
STATE, GROUPS = "state", "param_groups"
"""Of ``optimizer.state_dict()``."""
