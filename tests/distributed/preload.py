"""What the resident workers import before they are forked; they do not wait for the disk, whose patience is not under test."""

from __future__ import annotations

import os

import torch

torch.optim.SGD(
    [torch.nn.Parameter(torch.ones(1))]
)  # the first optimizer loads eight hundred modules; in each rank, later, that takes seconds


def _at_once(fd: int) -> None:
    os.fstat(fd)


os.fsync = _at_once
