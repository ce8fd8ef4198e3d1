"""slime, and miles which came of it: Megatron-LM's ``<save>/iter_NNNNNNN``, N being the rollout, and where its data source is beside them.

Source: slime 018ff18, ``slime/rollout/data_source.py`` (``RolloutDataSource.save``, ``load``: without the file the data begin anew, with
a line in the log); 624b824, ``slime/backends/megatron_utils/actor.py`` (``save_model``: the iteration is the rollout, counted from 0).
"""

from __future__ import annotations

from .table import ITERATIONS, Trainer

TRAINER = Trainer(
    name="slime",
    title="slime",
    steps=ITERATIONS,
    marks=(),
    beside=("rollout/global_dataset_state_dict_{step}.pt",),
    over=("megatron-lm", "megatron-bridge"),
    tracker="latest_checkpointed_iteration.txt",
    formats=("megatron-dist",),
    ahead=1,
    told="--load {root} --save {root}",
)
