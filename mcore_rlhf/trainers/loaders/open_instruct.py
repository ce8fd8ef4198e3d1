"""What open-instruct restores: its GRPO by DeepSpeed's loader and the client state, its SFT and DPO by accelerate's ``load_state``.

Source: open-instruct e6c3044, ``open_instruct/grpo_fast.py`` (``PolicyTrainerRayProcess.from_pretrained``, ``run_training``, ``main``),
``finetune.py``, ``dpo_tune_cache.py``, ``utils.py`` (``get_last_checkpoint``).
"""

from __future__ import annotations

from mcore_rlhf.trainers.conditions import both, has, lacks, without
from mcore_rlhf.trainers.open_instruct import TRAINER, TUNING
from mcore_rlhf.trainers.resuming import EVERYTHING, Habit, Loader, Outcome, Seen, Thing, rows_of

from . import accelerate, deepspeed

_RESTORED, _ANEW, _IGNORED, _REFUSED, _ABSENT = Outcome
_SLICED = "zero_pp_rank_0_*_model_states.pt"


def _shared(seen: Seen) -> object:
    """Whether one file has the client state of all ranks, as below stage 3."""
    return seen.held.dp > 1 and lacks(_SLICED)(seen)


ROWS = (
    *rows_of(
        "open-instruct e6c3044, open_instruct/grpo_fast.py:",
        Habit((Thing.COUNTERS,), _REFUSED, "{file} has no {key}: a KeyError", "415 (from_pretrained)",
            without(deepspeed.MODEL, "training_step", "rng_states"), True),
        Habit((Thing.RNG,), _REFUSED, "{file} has no {key}: a KeyError", "417 (from_pretrained)",
            without(deepspeed.MODEL, "rng_states"), True),
        Habit((Thing.RNG,), _REFUSED, "{file} has no {key}: a KeyError", "418 (from_pretrained)",
            without(deepspeed.MODEL, *TRAINER.generators.values(), inside="rng_states/"), True),
        Habit((Thing.RNG,), _ANEW, "rng_states of {dp} ranks: below stage 3 one file has rank 0's, which all take; nothing is said",
            "417 (from_pretrained)", lambda seen: _shared(seen) and {"dp": seen.held.dp}),
        Habit((Thing.RNG,), _RESTORED, "rng_states, in the client state", "417 (from_pretrained)", ran=True),
        Habit((Thing.DATA,), _ANEW, "{file} has no {key}: the prompts begin anew; nothing is said", "1827 (run_training)",
            without(deepspeed.MODEL, "dataloader_state", "data_prep_actor_state")),
        Habit((Thing.DATA,), _RESTORED, "dataloader_state and data_prep_actor_state, in the client state", "1827 (run_training)"),
    ),
    *deepspeed.ROWS,
)  # fmt: skip

TUNED = (
    *rows_of(
        "open-instruct e6c3044, open_instruct/",
        Habit(EVERYTHING, _ANEW, "COMPLETED is not there: the step is passed over", "utils.py:801 (get_last_checkpoint)",
            both(has("*"), lacks("COMPLETED"))),
        Habit((Thing.COUNTERS, Thing.DATA), _RESTORED,
            "by the number in the folder's name: as many batches, times gradient_accumulation_steps, are skipped", "finetune.py:758"),
    ),
    *accelerate.ROWS,
)  # fmt: skip

LOADER = Loader(TRAINER, "e6c3044", ROWS)
TUNING_LOADER = Loader(TUNING, "e6c3044", TUNED)
