"""ROLL on Megatron: ``checkpoint-N`` with the actor's files in it, the critic's in ``critic``, and ``pipeline`` beside them.

Each worker saves below its own name, ``<output_dir>/actor_train-0/checkpoint-N``, and ``checkpoint_config`` (``type: file_system``) copies
those of all workers into one ``checkpoint-N``, which is what a run is told to go on from. N counts from 0: after ``checkpoint-3`` four
steps are done. mcore_adapter's own ``McaTrainer``, which LLaMA-Factory runs, leaves the same files beside transformers'
``trainer_state.json``, and its N are the steps that are done.

Source: ROLL 8eb27cc2, ``roll/pipeline/base_worker.py`` (``do_checkpoint``), ``roll/pipeline/base_pipeline.py`` (``do_checkpoint``),
``roll/utils/upload_utils.py`` (``FileSystemUploader``: ``get_latest_ckpt`` takes the highest number), ``roll/utils/worker_state.py``,
``roll/distributed/strategy/megatron_strategy.py`` (``save_checkpoint``; ``load_checkpoint``: a distributed optimizer is asked for as the
run's ``distrib_optim_fully_reshardable`` says, which is off by default).
"""

from __future__ import annotations

from mcore_rlhf.families.dist_parts import DistParts
from mcore_rlhf.families.run_folders import ADAPTED, ADAPTED_OPTIMIZER, COUNTED, RANDOM, ROLLS_DCP, SCHEDULE

from .table import HERE, Counters, Trainer

_PARTS = DistParts(
    optimizer=f"iter_0000001/{ADAPTED_OPTIMIZER}",
    extra=RANDOM[0],
    scheduler=SCHEDULE,
    contents=ADAPTED,
    sharding="dp_reshardable",
    arguments={"overlap_grad_reduce": False},
    adapted=True,
)
TRAINER = Trainer(
    name="roll",
    title="ROLL on Megatron",
    steps=("checkpoint-{step}",),
    marks=(ADAPTED, f"*/{ADAPTED}"),
    over=("ms-swift", "transformers"),
    roles={"actor": (HERE,), "critic": ("critic",)},
    needs=(COUNTED,),
    resumes="highest",
    first=0,
    random=RANDOM[0],
    counters=Counters(COUNTED, "step", {"step": "number"}),
    formats=("megatron-dist",),
    parts=(_PARTS,),
    told="resume_from_checkpoint={path}",
)
FSDP = Trainer(
    name="roll-fsdp2",
    title="ROLL on FSDP2",
    steps=TRAINER.steps,
    marks=(f"{ROLLS_DCP}/.metadata",),
    over=("transformers",),
    roles={"actor": (ROLLS_DCP,), "critic": (f"critic/{ROLLS_DCP}",)},
    needs=TRAINER.needs,
    resumes="highest",
    first=0,
    counters=TRAINER.counters,
    told=TRAINER.told,
)
"""Source: ROLL 8eb27cc2, ``roll/distributed/strategy/fsdp2_strategy.py`` (``save_checkpoint``: Hugging Face's files lie beside)."""
ADAPTER = Trainer(
    name="mcore-adapter",
    title="mcore_adapter's McaTrainer",
    steps=TRAINER.steps,
    marks=(f"{ADAPTED}&trainer_state.json", f"{ADAPTED}&training_args.bin"),
    over=("roll", *TRAINER.over),
    needs=("trainer_state.json",),
    resumes="named",
    counters=Counters("trainer_state.json", "global_step"),
    told="resume_from_checkpoint: {path}",
)
"""Source: ROLL 8eb27cc2, ``mcore_adapter/src/mcore_adapter/trainer/trainer.py`` (``McaTrainer``)."""
