"""What NeMo-RL restores of the newest step in ``checkpointing.checkpoint_dir``.

Source: NeMo-RL 7ea279a, ``nemo_rl/utils/checkpoint.py`` (``get_resume_paths``, ``load_training_info``), ``nemo_rl/algorithms/grpo.py``
(``setup``, ``load_dataloader_state``).
"""

from __future__ import annotations

from collections.abc import Callable

from mcore_rlhf.trainers.conditions import (
    ADAM,
    OF_GROUP,
    OF_SCHEDULE,
    OTHER_CLASS,
    both,
    broken,
    incomplete,
    other_dtype,
    other_optimizer,
    undealt,
    unlisted,
)
from mcore_rlhf.trainers.loaders.megatron import lies_flat
from mcore_rlhf.trainers.nemo_rl import TRAINER
from mcore_rlhf.trainers.resuming import OF_OPTIMIZER, Habit, Loader, Outcome, Seen, Thing, rows_of
from mcore_rlhf.trainers.torchdata import STOPS, stops_at

_RESTORED, _ANEW, _IGNORED, _REFUSED, _ABSENT = Outcome
_PATHS = "utils/checkpoint.py:191 (get_resume_paths)"
_WITH_OPTIMIZER = (*OF_OPTIMIZER, Thing.SCHEDULER)


def _role(seen: Seen) -> str:
    return {"critic": "value"}.get(seen.role, "policy")


def _on_megatron(seen: Seen) -> bool:
    """Megatron-Bridge wrote the weights, whose iteration is always 0."""
    return any("/iter_0000000/" in name for name in seen.above if name.startswith(f"{_role(seen)}/"))


def _no_optimizer(seen: Seen) -> bool:
    """Neither a folder of its own beside the weights, nor in what Megatron wrote."""
    apart = any(name.startswith(f"{_role(seen)}/optimizer/") for name in seen.above)
    return not apart and not (_on_megatron(seen) and (seen.held.optimizer or bool(seen.held.problem)))


def _of_weights(seen: Seen) -> bool:
    """What is missing does not lie in the optimizer's own folder."""
    return not seen.held.problem.startswith("optimizer/")


def _untracked(seen: Seen) -> bool:
    """Megatron-Bridge finds no tracker beside the iteration, or among files of DTensor, and takes the model that training began with."""
    trackers = (f"{_role(seen)}/weights/{name}" for name in _TRACKERS)
    loads = _on_megatron(seen) or seen.settings.says(f"{_role(seen)}.megatron_cfg.enabled")
    return loads and not any(name in seen.above for name in trackers)


def _by_dtensor(seen: Seen) -> bool:
    """The configuration trains with DTensor what Megatron wrote."""
    return _on_megatron(seen) and seen.settings.says(f"{_role(seen)}.dtensor_cfg.enabled")


def _of_step(seen: Seen, file: str) -> object:
    return {"wrong": seen.broken[file]} if file in seen.broken else None


def _data(seen: Seen) -> list[str]:
    return sorted(name for name in seen.above if name.startswith("train_dataloader"))


_TRACKERS = ("latest_train_state.pt", "latest_checkpointed_iteration.txt")
"""Source: NVIDIA-NeMo/Megatron-Bridge 067f987, ``training/checkpointing.py`` (``load_checkpoint``, ``checkpoint_exists``)."""
_DCP = "utils/native_checkpoint.py:238 (load_checkpoint)"
_NO_KEY = "{file} has no {key}: DCP stops where one that is asked for is not there"
_INFO = ("current_step", "total_steps", "consumed_samples")


def _unlisted(before: str, *names: str, given: Callable[[Seen], object] = lambda seen: True) -> Habit:
    """DTensor v1 keeps optimizer and schedule in one DCP folder, and asks for all of it."""
    return Habit(
        _WITH_OPTIMIZER,
        _REFUSED,
        _NO_KEY,
        _DCP,
        both(given, unlisted("policy/optimizer/.metadata", before, *names)),
        True,
    )


def _scheduled(seen: Seen) -> bool:
    """A schedule is kept: it writes its first rate into the groups."""
    return any(key.startswith("optim.sched.") for key in seen.keys("policy/optimizer/.metadata"))


def _uninformed(seen: Seen) -> object:
    there = seen.keys("training_info.json") if "training_info.json" in seen.above else frozenset()
    gone = [key for key in _INFO if key not in there]
    return there and gone and {"key": gone[0]}


ROWS = rows_of(
    "NeMo-RL 7ea279a, nemo_rl/",
    Habit((Thing.WEIGHTS,), _REFUSED, "{file} {wrong}: loading it fails", _PATHS, broken("*.distcp", "*.metadata", "*.safetensors")),
    Habit((Thing.WEIGHTS,), _REFUSED, "a file is missing: {problem}", _PATHS, both(_of_weights, incomplete)),
    Habit((Thing.WEIGHTS, *_WITH_OPTIMIZER), _ANEW, f"neither {' nor '.join(_TRACKERS)} is in weights/: Megatron-Bridge takes the "
        "model that training began with, without an optimizer; a line in the log",
        "models/megatron/setup.py:1899 (setup_model_and_optimizer)", _untracked),
    Habit((Thing.WEIGHTS, *_WITH_OPTIMIZER), _REFUSED, "dtensor_cfg.enabled is true, and what lies there is Megatron's (iter_0000000): DCP "
        "finds no .metadata in weights/, and stops", _DCP, _by_dtensor),
    Habit((Thing.WEIGHTS,), _RESTORED, "weights/ of the role", _PATHS),
    Habit(_WITH_OPTIMIZER, _ANEW, "neither optimizer/ beside the weights, nor an optimizer in Megatron's iter_0000000: a warning", _PATHS,
        _no_optimizer),
    Habit(_WITH_OPTIMIZER, _REFUSED, "a file is missing: {problem}", _DCP, both(lambda seen: not _of_weights(seen), incomplete)),
    Habit(_WITH_OPTIMIZER, _REFUSED, "stored as {was}, trained in the {now} of policy.precision: flat buckets are looked for by their type",
        "models/megatron/setup.py:1899 (setup_model_and_optimizer)", both(_on_megatron, lies_flat, other_dtype("policy.precision"))),
    Habit((Thing.DTYPE,), _IGNORED, "stored as {was}, cast to the {now} of policy.precision; nothing is said",
        "models/megatron/setup.py:1899 (setup_model_and_optimizer)", both(_on_megatron, other_dtype("policy.precision"))),
    _unlisted(r"optim\.optim\.state\..+\.", *ADAM),
    _unlisted(r"optim\.optim\.param_groups\.\d+\.", *OF_GROUP, "params"),
    _unlisted(r"optim\.optim\.param_groups\.\d+\.", "initial_lr", given=_scheduled),
    Habit(_WITH_OPTIMIZER, _REFUSED, _NO_KEY, _DCP, undealt("policy/optimizer/.metadata", r"optim\.optim\."), True),
    _unlisted(r"optim\.sched\.", *OF_SCHEDULE),
    _unlisted(r"optim\.sched\._schedulers\.\d+\.", *OF_SCHEDULE),
    Habit(OF_OPTIMIZER, _REFUSED, OTHER_CLASS, _DCP, other_optimizer("policy.optimizer.name", "policy/optimizer/.metadata",
        "policy/optimizer/optim/.metadata")),
    Habit(_WITH_OPTIMIZER, _RESTORED, "optimizer/, or Megatron's own in the weights' folder", _PATHS),
    Habit((Thing.COUNTERS,), _REFUSED, "training_info.json is not there", "utils/checkpoint.py:571 (load_training_info)",
        lambda seen: "training_info.json" not in seen.above),
    Habit((Thing.COUNTERS,), _REFUSED, "training_info.json {wrong}", "utils/checkpoint.py:571 (load_training_info)",
        lambda seen: _of_step(seen, "training_info.json")),
    Habit((Thing.COUNTERS,), _ANEW, "training_info.json has no {key}: it begins at 0; nothing is said",
        "algorithms/grpo.py:338 (_get_grpo_save_state)", _uninformed),
    Habit((Thing.COUNTERS,), _RESTORED, "training_info.json", "utils/checkpoint.py:571 (load_training_info)"),
    Habit((Thing.DATA,), _REFUSED, "no train_dataloader….pt is there", "algorithms/grpo.py:592 (init_train_dataloader)",
        lambda seen: not _data(seen)),
    Habit((Thing.DATA,), _REFUSED, "train_dataloader….pt {wrong}", "algorithms/grpo.py:592 (init_train_dataloader)",
        lambda seen: next((found for name in _data(seen) if (found := _of_step(seen, name))), None)),
    Habit((Thing.DATA,), _ANEW, "train_dataloader….pt is empty: the data from the start; nothing is said",
        "algorithms/grpo.py:592 (init_train_dataloader)", lambda seen: not any(map(seen.keys, _data(seen)))),
    Habit((Thing.DATA,), _REFUSED, STOPS, "algorithms/grpo.py:592 (init_train_dataloader)", stops_at("train_dataloader*.pt"), True),
    Habit((Thing.DATA,), _RESTORED, "train_dataloader….pt", "algorithms/grpo.py:592 (init_train_dataloader)"),
    Habit((Thing.RNG,), _IGNORED, "Megatron's files have random states, and load_rng is False: those of the seed",
        "models/megatron/setup.py:1281 (_create_checkpoint_config)", lambda seen: _on_megatron(seen) and seen.held.rng),
    Habit((Thing.RNG,), _ABSENT, "NeMo-RL stores no random states on DTensor", _PATHS),
)  # fmt: skip

LOADER = Loader(TRAINER, "7ea279a", ROWS, takes_any=True)
