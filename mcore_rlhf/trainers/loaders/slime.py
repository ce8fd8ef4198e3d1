"""What slime, and miles which came of it, restore: Megatron-LM's loader for the model, and where the data are in a file beside the step.

Source: slime 624b824, ``slime/utils/arguments.py`` (a ``--load`` without a tracker), ``slime/backends/megatron_utils/checkpoint.py``
(``load_checkpoint``: Megatron's own), ``slime/backends/megatron_utils/actor.py:114``, ``slime/rollout/data_source.py``
(``RolloutDataSource.load``), ``slime/ray/placement_group.py`` (``create_training_models``: where the rollouts begin); miles 31f1ca9,
``miles/rollout/data_source.py``, ``miles/utils/arguments.py``, the same.
"""

from __future__ import annotations

from dataclasses import replace

from mcore_rlhf.trainers.conditions import refused
from mcore_rlhf.trainers.resuming import Habit, Loader, Outcome, Seen, Thing, rows_of
from mcore_rlhf.trainers.slime import TRAINER

from . import megatron

_RESTORED, _ANEW, _IGNORED, _REFUSED, _ABSENT = Outcome


def _wrong(seen: Seen) -> object:
    return next(({"file": name, "wrong": wrong} for name, wrong in seen.beside.items() if wrong), None)


def _elsewhere(seen: Seen) -> object:
    """The rollouts do not begin behind this step: ``{why}``, where they ``{begin}``, and in which ``{file}`` the prompts are then."""
    anew = seen.settings.says("finetune") or seen.held.release
    asked, step = seen.settings.number("start_rollout_id"), 0 if anew else seen.step
    if step is None:
        return None
    begin = step + 1 if asked is None else asked
    why = "weights alone are loaded, as of iteration 0" if asked is None else f"start_rollout_id is {asked}"
    file = _PROMPTS.format(step=begin - 1)
    return begin - 1 != seen.step and {"why": why, "begin": begin, "file": file}


_PROMPTS = TRAINER.beside[0]


def _rows(source: str) -> tuple[Habit, ...]:
    """Rows of data and counters, before Megatron's own, which count samples that this trainer does not go by."""
    return (
        *rows_of(
            f"{source}/",
            Habit((Thing.DATA,), _ABSENT, "{key} is off: prompts come from elsewhere", "rollout/data_source.py (load)",
                lambda seen: refused("rollout_global_dataset")(seen) or (seen.settings.says("disable_rollout_global_dataset")
                and {"key": "rollout_global_dataset"})),
            Habit((Thing.DATA,), _ANEW, "{why}: the prompts are where {file} has them, and begin anew where that is not there",
                "ray/placement_group.py (create_training_models)", _elsewhere, True),
            Habit((Thing.COUNTERS,), _ANEW, "{why}: the rollouts begin at {begin}", "ray/placement_group.py (create_training_models)",
                _elsewhere, True),
            Habit((Thing.DATA,), _REFUSED, "{file} {wrong}: loading it fails", "rollout/data_source.py (load)", _wrong),
            Habit((Thing.DATA,), _ANEW, f"{_PROMPTS.format(step='N')}, of this rollout, is not there beside the step: the prompts "
                "begin anew; an info line says so", "rollout/data_source.py (load)", lambda seen: not seen.beside, True),
            Habit((Thing.DATA,), _RESTORED, f"{_PROMPTS.format(step='N')}: offset, epoch and numbers of samples; what lies in a "
                "buffer of samples is not stored", "rollout/data_source.py (load)", ran=True),
            Habit((Thing.COUNTERS,), _RESTORED, "the iteration is the rollout: the next one begins",
                "ray/placement_group.py (create_training_models)", ran=True),
        ),
        *(replace(row, ran=False) for row in megatron.ROWS),
    )  # fmt: skip


SLIME_ROWS, MILES_ROWS = _rows("slime 624b824, slime"), _rows("miles 31f1ca9, miles")
LOADER = Loader(TRAINER, "624b824", SLIME_ROWS, megatron.LOADER.named, stops_at=megatron.LOADER.stops_at)
MILES_LOADER = Loader(
    replace(TRAINER, name="miles", title="miles"),
    "31f1ca9",
    MILES_ROWS,
    megatron.LOADER.named,
    stops_at=megatron.LOADER.stops_at,
)
