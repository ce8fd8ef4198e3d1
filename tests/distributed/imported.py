"""What the server of :mod:`.forked` has imported before it forks; it computes nothing."""

from __future__ import annotations

import torch

from tests.distributed import toy_trainer

__all__ = ["toy_trainer"]
torch.optim.Adam([torch.nn.Parameter(torch.ones(1))])  # the first optimizer loads eight hundred modules
