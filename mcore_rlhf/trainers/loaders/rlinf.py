"""What RLinf restores of ``runner.resume_dir``.

Source: RLinf a3816b5, ``rlinf/runners/reasoning_runner.py`` (``init_workers``), ``rlinf/hybrid_engines/fsdp/strategy/checkpoint.py``
(``load_state_dict``).
"""

from __future__ import annotations

from mcore_rlhf.trainers.conditions import (
    ADAM,
    OF_GROUP,
    OF_SCHEDULE,
    OTHER_BACKEND,
    both,
    broken,
    has,
    incomplete,
    other_backend,
    other_dtype,
    undealt,
    unlisted,
)
from mcore_rlhf.trainers.resuming import EVERYTHING, OF_OPTIMIZER, Habit, Loader, Outcome, Thing, rows_of
from mcore_rlhf.trainers.rlinf import TRAINER
from mcore_rlhf.trainers.torchdata import STOPS, stops_at

_RESTORED, _ANEW, _IGNORED, _REFUSED, _ABSENT = Outcome
_MODEL = (Thing.WEIGHTS, *OF_OPTIMIZER, Thing.SCHEDULER, Thing.RNG)
_STATE, _RUNNER = (
    "hybrid_engines/fsdp/strategy/checkpoint.py:105 (load_state_dict)",
    "runners/reasoning_runner.py:278 (init_workers)",
)
_DCP = has("*dcp_checkpoint/*")
_OF_FSDP, _OF_MEGATRON = ("*dcp_checkpoint/*", "*local_shard_checkpoint/*", "*model_state_dict/*"), ("iter_*/*",)
_BACKEND = "{role}.training_backend"

_NAMES, _NO_KEY = "*dcp_checkpoint/.metadata", "{file} has no {key}: DCP stops where one that is asked for is not there"


def _unlisted(before: str, *names: str) -> Habit:
    """Whatever is not there, the one call that loads everything stops."""
    return Habit(_MODEL, _REFUSED, _NO_KEY, _STATE, unlisted(_NAMES, before, *names), True)


ROWS = rows_of(
    "RLinf a3816b5, rlinf/",
    Habit(EVERYTHING, _ANEW, "runner.resume_dir is null: nothing is loaded", "runners/reasoning_runner.py:261 (init_workers)",
        lambda seen: "runner.resume_dir" in seen.settings.values and seen.settings.values["runner.resume_dir"] is None),
    Habit(_MODEL, _REFUSED, "{file} {wrong}: loading it fails", _STATE, broken("*dcp_checkpoint/*", "*local_shard_checkpoint/*",
        "iter_*/*")),
    Habit(_MODEL, _REFUSED, "a file is missing: {problem}", _STATE, incomplete),
    Habit(_MODEL, _ANEW, "{key} is {now}, and what lies there is FSDP's ({file}): Megatron finds no tracker, prints a warning, and begins "
        "with the model that the run made", "hybrid_engines/megatron/megatron_model_manager.py:632 (load_checkpoint)",
        other_backend({"megatron": _OF_MEGATRON, "": _OF_FSDP}, _BACKEND)),
    Habit(_MODEL, _REFUSED, OTHER_BACKEND, _STATE, other_backend({"fsdp": _OF_FSDP, "": _OF_MEGATRON}, _BACKEND)),
    _unlisted(r"fsdp_checkpoint\.optimizers\.state\..+\.", *ADAM),
    _unlisted(r"fsdp_checkpoint\.optimizers\.param_groups\.\d+\.", *OF_GROUP, "initial_lr", "params"),
    Habit(_MODEL, _REFUSED, _NO_KEY, _STATE, undealt(_NAMES, r"fsdp_checkpoint\.optimizers\."), True),
    _unlisted(r"fsdp_checkpoint\.lr_schedulers\.\d+\.", *OF_SCHEDULE),
    _unlisted(r"fsdp_checkpoint\.rng\.", "cpu", "numpy", "random"),
    _unlisted(r"fsdp_checkpoint\.(?=fsdp_version|optimizers|model)", "fsdp_version"),
    Habit(OF_OPTIMIZER, _REFUSED, "no optimizer is stored, and its key is asked for", _STATE,
        lambda seen: not seen.held.problem and not seen.held.optimizer),
    Habit((Thing.SCHEDULER,), _REFUSED, "no lr_schedulers are stored, and their key is asked for", _STATE,
        lambda seen: not seen.held.problem and not seen.held.scheduler),
    Habit((Thing.RNG,), _REFUSED, "no rng is stored, and its key is asked for", _STATE,
        lambda seen: not seen.held.problem and _DCP(seen) and not seen.held.rng),
    Habit(_MODEL, _RESTORED, "dcp_checkpoint, of a run whose fsdp_version is the same", _STATE, _DCP),
    Habit(_MODEL, _RESTORED, "what Megatron-LM's own loader restores: see --trainer megatron-lm on the role's folder", _STATE),
    Habit((Thing.DTYPE,), _IGNORED, "stored as {was}, cast to the {now} of model.precision, moments too; nothing is said", _STATE,
        both(_DCP, lambda seen: other_dtype(f"{seen.role or 'actor'}.model.precision")(seen))),
    Habit((Thing.COUNTERS,), _RESTORED, "the step, out of the folder's name", "runners/reasoning_runner.py:267 (init_workers)"),
    Habit((Thing.DATA,), _ANEW, "data/data.pt is not there: a warning, and the data from the start", _RUNNER,
        lambda seen: "data/data.pt" not in seen.above),
    Habit((Thing.DATA,), _REFUSED, "data/data.pt {wrong}: loading it fails", _RUNNER,
        lambda seen: "data/data.pt" in seen.broken and {"wrong": seen.broken["data/data.pt"]}),
    Habit((Thing.DATA,), _REFUSED, STOPS, _RUNNER, stops_at("data/data.pt"), True),
    Habit((Thing.DATA,), _RESTORED, "data/data.pt", _RUNNER),
)  # fmt: skip


def _taken_for(name: str) -> int | None:
    """``resume_dir: auto`` takes for a number whatever stands behind the last ``global_step_``."""
    return int(name.rpartition("global_step_")[2]) if name.startswith("global_step_") else None


LOADER = Loader(TRAINER, "a3816b5", ROWS, ("runner.resume_dir",), reads=_taken_for)
