"""What prime-rl restores with ``resume``: one DCP folder of the trainer, asked for by every name, and the orchestrator's progress.

Source: prime-rl 559b447, ``src/prime_rl/trainer/ckpt.py`` (``AppState``, ``CheckpointManager.load_from_path``),
``src/prime_rl/trainer/{rl,sft}/train.py``, ``src/prime_rl/orchestrator/ckpt.py`` (``CheckpointManager.load``),
``src/prime_rl/utils/pathing.py`` (``get_all_ckpt_steps``, ``resolve_latest_ckpt_step``).
"""

from __future__ import annotations

from collections.abc import Callable

from mcore_rlhf.trainers.conditions import (
    ADAM,
    OF_GROUP,
    OF_SCHEDULE,
    OTHER_CLASS,
    asked,
    both,
    broken,
    has,
    incomplete,
    lacks,
    other_optimizer,
    undealt,
    unlisted,
)
from mcore_rlhf.trainers.prime_rl import TRAINER
from mcore_rlhf.trainers.resuming import OF_OPTIMIZER, Habit, Loader, Outcome, Seen, Thing, rows_of

_RESTORED, _ANEW, _IGNORED, _REFUSED, _ABSENT = Outcome
_PROGRESS = "orchestrator/progress.pt"
_APP = (Thing.WEIGHTS, *OF_OPTIMIZER, Thing.SCHEDULER, Thing.COUNTERS)
_DCP = "trainer/ckpt.py:215 (load_from_path)"
_LINEAR, _COSINE = ("start_factor", "end_factor", "total_iters"), ("T_max", "eta_min")
"""What torch's schedules have besides, of which prime-rl's are made (``trainer/scheduler.py``)."""
_NO_KEY = "{file} has no {key}: DCP stops where one that is asked for is not there"


def _reads(name: str) -> int | None:
    """Its own rule: whatever begins so, by what stands behind the last underscore."""
    return int(name.rsplit("_", 1)[1]) if name.startswith("step_") else None


def _scheduled(seen: Seen) -> bool:
    """A schedule writes its first rate into the groups."""
    return any(key.startswith("app.scheduler.") for key in seen.keys(".metadata"))


def _unlisted(before: str, *names: str, given: Callable[[Seen], object] = lambda seen: True) -> Habit:
    return Habit(_APP, _REFUSED, _NO_KEY, _DCP, both(given, unlisted(".metadata", before, *names)), True)


def _of_rl(seen: Seen) -> bool:
    """Its RL has an orchestrator, its SFT a loader's state of each rank."""
    return not seen.has("dataloader/*")


def _ranks_lack(seen: Seen) -> object:
    there = seen.ranks("dataloader/rank_{rank}.pt")
    gone = sorted({*range(seen.world or max(there, default=-1) + 1)} - there)
    return gone and {"file": f"dataloader/rank_{gone[0]}.pt"}


def _progress(seen: Seen) -> object:
    return {"file": _PROGRESS, "wrong": seen.broken[_PROGRESS]} if _PROGRESS in seen.broken else None


ROWS = rows_of(
    "prime-rl 559b447, src/prime_rl/",
    Habit(_APP, _REFUSED, "{file} {wrong}: loading it fails", _DCP, broken(".metadata", "*.distcp"), True),
    Habit(_APP, _REFUSED, ".metadata is not there: loading it fails", _DCP, lacks(".metadata"), True),
    Habit(_APP, _REFUSED, "a file is missing: {problem}", _DCP, incomplete, True),
    Habit(OF_OPTIMIZER, _ANEW, "{key}: the optimizer is not loaded", "trainer/ckpt.py:213 (load_from_path)", asked("ckpt.skip_optimizer")),
    Habit((Thing.SCHEDULER,), _ANEW, "{key}: the schedule begins anew", "trainer/sft/train.py:235", asked("ckpt.skip_scheduler")),
    _unlisted(r"app\.optimizers\.state\..+\.", *ADAM),
    _unlisted(r"app\.optimizers\.param_groups\..+\.", *OF_GROUP),
    _unlisted(r"app\.optimizers\.param_groups\..+\.", "initial_lr", given=_scheduled),
    *(_unlisted(rf"app\.scheduler\.{inner}", *names) for inner in ("", r"_schedulers\.\d+\.") for names in (OF_SCHEDULE, _LINEAR, _COSINE)),
    _unlisted(r"app\.progress\.", "step", "total_tokens", "total_samples"),
    Habit(_APP, _REFUSED, _NO_KEY, _DCP, undealt(".metadata", r"app\.optimizers\."), True),
    Habit(_APP, _REFUSED, "no optimizer is stored, and its keys are asked for; ckpt.skip_optimizer begins it anew", _DCP,
        lambda seen: not seen.held.problem and not seen.held.optimizer, True),
    Habit(OF_OPTIMIZER, _REFUSED, OTHER_CLASS, _DCP, other_optimizer("optim.type", ".metadata")),
    Habit((Thing.WEIGHTS, *OF_OPTIMIZER), _RESTORED, "app.model and app.optimizers, by name, whatever the ranks", _DCP, ran=True),
    Habit((Thing.SCHEDULER,), _RESTORED, "app.scheduler", _DCP, ran=True),
    Habit((Thing.COUNTERS,), _ANEW, "{key}: the trainer's step and tokens begin anew", "trainer/sft/train.py:236",
        both(lambda seen: not _of_rl(seen), asked("ckpt.skip_progress"))),
    Habit((Thing.COUNTERS,), _RESTORED, "app.progress: step, tokens, samples", _DCP, ran=True),
    Habit((Thing.RNG,), _ABSENT, "prime-rl stores no random states", _DCP, ran=True),
    Habit((Thing.DATA,), _ANEW, "{key}: the data begin anew", "orchestrator/ckpt.py:58 (load)", asked("skip_progress", "skip_dataloader")),
    Habit((Thing.DATA,), _ANEW, "{file} is not there: its rank takes the first rank's place in the data; a warning",
        "trainer/ckpt.py:225 (load_from_path)", both(has("dataloader/rank_0.pt"), _ranks_lack)),
    Habit((Thing.DATA,), _REFUSED, "{file} is not there, and the first rank's is what a rank falls back to",
        "trainer/ckpt.py:231 (load_from_path)", both(lambda seen: not _of_rl(seen), _ranks_lack)),
    Habit((Thing.DATA,), _REFUSED, "{file} {wrong}: loading it fails", "trainer/ckpt.py:234 (load_from_path)", broken("dataloader/*")),
    Habit((Thing.DATA,), _RESTORED, "dataloader/rank_….pt of each rank", "trainer/ckpt.py:234 (load_from_path)", has("dataloader/*")),
    Habit((Thing.DATA,), _REFUSED, f"{_PROGRESS} is not there: the orchestrator stops", "orchestrator/ckpt.py:55 (load)",
        lambda seen: _PROGRESS not in seen.above),
    Habit((Thing.DATA,), _REFUSED, "{file} {wrong}: the orchestrator stops", "orchestrator/ckpt.py:62 (load)", _progress),
    Habit((Thing.DATA,), _RESTORED, f"train_source in {_PROGRESS}; rollouts that were under way are made again",
        "orchestrator/ckpt.py:66 (load)"),
)  # fmt: skip

LOADER = Loader(TRAINER, "559b447", ROWS, ("resume.step",), takes_any=True, reads=_reads)
