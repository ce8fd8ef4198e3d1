"""What the server of :mod:`.forked` has imported before it forks; it computes nothing."""

from __future__ import annotations

import torch

import mcore_rlhf.consolidate
import mcore_rlhf.convert
import mcore_rlhf.engines.adapter
import mcore_rlhf.engines.plain
import mcore_rlhf.manager.rlhf.sampler
import mcore_rlhf.manager.run.manager
import mcore_rlhf.manager.state  # noqa: F401

torch.optim.Adam([torch.nn.Parameter(torch.ones(1))])  # the first optimizer loads eight hundred modules
