"""AReaL: a run's folder is its one step, which the next one is written over: ``checkpoints/USER/EXPERIMENT/TRIAL``.

``default`` (the actor) and ``critic`` have a ``recover_checkpoint`` each, and ``recover_info`` says how far the run is; weights alone lie
beside, in ``default/epochEepochstepSglobalstepG``, for whoever serves them. G counts from 0: after ``globalstep2`` three steps are done.

Source: AReaL 1.0.4, ``areal/utils/recover.py`` (``RecoverInfo.dump``, ``load``: one file that is not there or wrong, and training begins
anew, with a warning; ``RecoverHandler``), ``areal/utils/saver.py`` (``Saver.get_recover_checkpoint_path``, ``get_model_save_path``),
``areal/engine/fsdp_engine.py`` (``_save_to_dcp``; ``_create_optimizer``: one param group), ``areal/utils/timeutil.py``
(``FrequencyControl.load_state_dict``: how often it saves is what the file says, not the configuration),
``areal/trainer/rl_trainer.py``
(``_save_recover_checkpoint``; ``train`` goes by ``global_step`` alone), ``areal/engine/megatron_utils/checkpointer.py``
(``generate_state_dict``: a distributed optimizer's states as megatron-core has them without metadata).
"""

from __future__ import annotations

from mcore_rlhf.families.dist_parts import DistParts
from mcore_rlhf.families.run_folders import RECOVER_INFO, RECOVER_STEP, RECOVERED, recovered_step

from .table import Counters, Trainer


def _every(epochs: int | None, steps: int | None) -> dict[str, object]:
    """An ``EpochStepTimeFreqCtl`` that has counted nothing yet; no seconds, for which a run without ranks stops with an error."""

    def of(steps: int | None) -> dict[str, object]:
        return {
            "frequence_seconds": None, "frequency_steps": steps, "start_time": 0.0, "steps": 0, "last_time": 0.0, "last_steps": 0,
            "interval_steps": None, "interval_seconds": None, "initial_value": False,
        }  # fmt: skip

    return {"epoch": of(epochs), "step": of(steps), "time": of(None)}


_MADE: dict[str, dict[str, object]] = {
    "saver_info.json": _every(1, None), "evaluator_info.json": _every(1, None), "checkpoint_info.json": _every(1, 10),
    "stats_logger_info.json": {"last_commit_step": 0},
}  # fmt: skip
_PARTS = DistParts(
    scheduler="lr_scheduler",
    sharding="fully_sharded_model_space",
    told="actor.megatron.use_checkpoint_opt_param_scheduler=true",
)
_DATA = f"{RECOVER_INFO}/dataloader_info.pkl"

TRAINER = Trainer(
    name="areal",
    title="AReaL",
    steps=(),
    marks=(f"{RECOVER_INFO}/{RECOVER_STEP}", f"*/{RECOVERED}/.metadata", f"*/{RECOVERED}/metadata.json"),
    numbered=lambda root: recovered_step(root / RECOVER_INFO),
    first=0,
    roles={"actor": (f"default/{RECOVERED}",), "critic": (f"critic/{RECOVERED}",)},
    needs=(f"{RECOVER_INFO}/{RECOVER_STEP}", *(f"{RECOVER_INFO}/{name}" for name in _MADE), _DATA),
    resumes="named",
    data=_DATA,
    opens_data=True,
    counters=Counters(
        f"{RECOVER_INFO}/{RECOVER_STEP}",
        "global_step",
        {"epoch": "epoch", "epoch_step": "of_epoch", "global_step": "number", "steps_per_epoch": "per_epoch"},
    ),
    made={f"{RECOVER_INFO}/{name}": content for name, content in _MADE.items()},
    made_says="weights for serving and an evaluation every epoch, a recover checkpoint every 10 steps, whatever the configuration says; "
    "--like RUN gives those of one",
    second_group=(),
    formats=("dcp", "megatron-dist"),
    parts=(_PARTS,),
    told="recover.mode=auto experiment_name=… trial_name=… cluster.fileroot=…, so that its checkpoints/USER/EXPERIMENT/TRIAL is {root}",
)

WEIGHTS = Trainer(
    name="areal-weights",
    title="AReaL's Saver",
    steps=("epoch*epochstep*globalstep{step}",),
    marks=("*.safetensors",),
    first=0,
    resumes="named",
    told="actor.path={path}",
)
"""What lies in ``default`` for whoever serves the policy; AReaL begins from one as from any model, and resumes from none."""
