"""What OpenRLHF restores with ``--ckpt.load_enable``: DeepSpeed's loader for each role, and the actor's client state.

Source: OpenRLHF 0.11.2, ``openrlhf/trainer/ray/ppo_actor.py``, ``ppo_critic.py`` (``load_ckpt``), ``openrlhf/trainer/ppo_trainer.py``
(``init_checkpoint_states``, ``fit``), ``openrlhf/utils/deepspeed/deepspeed.py`` (``load_ckpt``).
"""

from __future__ import annotations

from mcore_rlhf.trainers.conditions import refused, without
from mcore_rlhf.trainers.openrlhf import TRAINER
from mcore_rlhf.trainers.resuming import EVERYTHING, Habit, Loader, Outcome, Seen, Thing, rows_of
from mcore_rlhf.trainers.torchdata import STOPS, stops_at

from . import deepspeed

_RESTORED, _ANEW, _IGNORED, _REFUSED, _ABSENT = Outcome


def _averaged(seen: Seen) -> bool:
    """Whether the run keeps an average of the actor's weights."""
    return seen.role == "actor" and seen.settings.says("enable_ema")


def _unsaid(seen: Seen) -> object:
    gone = sorted({*TRAINER.asks} - {*seen.held.values})
    return not seen.held.problem and gone and {"keys": ", ".join(gone)}


def _without_place(seen: Seen) -> bool:
    stored = (key for name in seen.matching("*mp_rank_00_model_states.pt")[:1] for key in seen.keys(name))
    return not seen.held.problem and not any(key.startswith("data_loader_state_dict/") for key in stored)


ROWS = (
    *rows_of(
        "OpenRLHF 0.11.2, openrlhf/trainer/",
        Habit(EVERYTHING, _ANEW, "{key} is off: nothing is loaded", "ray/ppo_actor.py:575", refused("ckpt.load_enable", "load_enable")),
        Habit((Thing.COUNTERS, Thing.DATA), _REFUSED, "the client state has no {keys}: a KeyError", "ppo_trainer.py:507 (fit)", _unsaid),
        Habit((Thing.DATA,), _ANEW, "the actor's data_loader_state_dict is empty: the data from the start; nothing is said",
            "ppo_trainer.py:517 (fit)", _without_place),
        Habit((Thing.DATA,), _REFUSED, STOPS, "ppo_trainer.py:518 (fit)",
            stops_at("*mp_rank_00_model_states.pt", inside="data_loader_state_dict/"), True),
        Habit((Thing.DATA,), _RESTORED, "data_loader_state_dict, in the actor's client state", "ppo_trainer.py:518 (fit)",
            lambda seen: not seen.held.problem),
        Habit((Thing.COUNTERS,), _RESTORED, "episode, global_step, total_consumed_prompts, in the actor's client state",
            "ppo_trainer.py:507 (fit)", lambda seen: not seen.held.problem),
        Habit((Thing.SCHEDULER,), _REFUSED, "{file} has no {key}, and the engine has a schedule: loading it fails",
            "../utils/deepspeed/deepspeed.py (load_ckpt)", without(deepspeed.MODEL, "lr_scheduler"), True),
        Habit((Thing.SCHEDULER,), _REFUSED, "{file} has no {key}: a KeyError of the schedule",
            "../utils/deepspeed/deepspeed.py (load_ckpt)", without(deepspeed.MODEL, "lr_lambdas", inside="lr_scheduler/"), True),
        Habit((Thing.AVERAGE,), _ANEW, "no checkpoint has it: it begins with the model that training began with, not with the step's, "
            "and what is saved in Hugging Face's files is made of it", "ray/ppo_actor.py:537", _averaged),
        Habit((Thing.AVERAGE,), _ABSENT, "no checkpoint has it; a run with train.enable_ema would begin it anew",
            "ray/ppo_actor.py:664 (save_checkpoint)", lambda seen: seen.role == "actor" and seen.settings.get("enable_ema") is None),
    ),
    *deepspeed.ROWS,
)  # fmt: skip

LOADER = Loader(TRAINER, "0.11.2", ROWS)
