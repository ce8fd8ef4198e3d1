"""What the server of :mod:`.forked` has imported before it forks; it computes nothing."""

from __future__ import annotations

import gc

import ml_dtypes
import torch
from obstore import exceptions, store

from mcore_rlhf.formats.hf import writer
from mcore_rlhf.formats.megatron import reader
from mcore_rlhf.manager.run import mirror_hosts
from mcore_rlhf.storage import upload
from tests.distributed import toy_trainer
from tests.helpers import mirror_child, store_child

__all__ = [
    "exceptions",
    "mirror_child",
    "mirror_hosts",
    "ml_dtypes",
    "reader",
    "store",
    "store_child",
    "toy_trainer",
    "upload",
    "writer",
]
torch.optim.Adam([torch.nn.Parameter(torch.ones(1))])  # the first optimizer loads eight hundred modules
gc.freeze()  # else every child's collector looks at all of that, and copies it
gc.set_threshold(50_000, 10, 10)
