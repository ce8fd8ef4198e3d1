"""What SkyRL restores with ``resume_mode=latest`` or ``from_path``: each rank's files of FSDP2, and what lies beside the models.

Source: SkyRL 0.3.0, ``skyrl/train/trainer.py`` (``load_checkpoints``), ``skyrl/train/fully_async_trainer.py`` (the same),
``skyrl/train/utils/trainer_utils.py`` (``validate_consistency_for_latest_checkpoint``, ``extract_step_from_path``),
``skyrl/backends/skyrl_train/distributed/fsdp_strategy.py`` (``load_checkpoint``), ``distributed/strategy.py`` (``load_rng_state``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

from mcore_rlhf.families.run_folders import OF_ADAPTERS
from mcore_rlhf.trainers.conditions import (
    OTHER_BACKEND,
    UNRATED,
    both,
    broken,
    has,
    other_backend,
    ranks_lack,
    stateless,
    uneven,
    ungrouped,
    unrated,
    without,
)
from mcore_rlhf.trainers.resuming import (
    EVERYTHING,
    OF_OPTIMIZER,
    Habit,
    Loader,
    Outcome,
    Seen,
    Settings,
    Thing,
    rows_of,
)
from mcore_rlhf.trainers.skyrl import TRAINER
from mcore_rlhf.trainers.torchdata import STOPS, stops_at

_RESTORED, _ANEW, _IGNORED, _REFUSED, _ABSENT = Outcome
_MODEL, _OPTIM, _EXTRA = "model_world_size_*", "optim_world_size_*", "extra_state_world_size_*"
_STATE, _ASYNC = "trainer_state.pt", "fully_async_state.pt"
_DRIVER, _STRATEGY = (
    "train/trainer.py:{} (load_checkpoints)",
    "backends/skyrl_train/distributed/fsdp_strategy.py:{} (load_checkpoint)",
)
_OF_MODEL = (Thing.WEIGHTS, *OF_OPTIMIZER, Thing.SCHEDULER, Thing.RNG)
_OF_LORA = (*_OF_MODEL, Thing.LORA)
_OF_FSDP, _OF_MEGATRON = (_MODEL, _OPTIM, _EXTRA, "fsdp_config.json"), (".metadata", "metadata.json", "common.pt")
_FSDP, _MEGATRON = has(*_OF_FSDP), has(*_OF_MEGATRON)
_BACKENDS = {"fsdp": _OF_FSDP, "fsdp2": _OF_FSDP, "megatron": _OF_MEGATRON}
_LORA = both(_MEGATRON, has(OF_ADAPTERS))
_IN_MEGATRON = "backends/skyrl_train/distributed/megatron/megatron_strategy.py:{} (load_checkpoint)"
_PREFIX, _INTERVAL = "global_step_", 10


def _world(seen: Seen) -> int | None:
    """Ranks that are to load, as it is configured; None where nobody says."""
    role = "critic" if seen.role == "critic" else "policy"
    gpus, nodes = (seen.settings.number(f"placement.{role}_num_{what}") for what in ("gpus_per_node", "nodes"))
    return seen.world or ((gpus or 1) * (nodes or 1) if gpus or nodes else None)


def _of_file(things: tuple[Thing, ...], outcome: Outcome, what: str, why: str, line: str) -> tuple[Habit, ...]:
    """The rows of one of the three files that each rank has: one that cannot be read, and one that is not there."""
    where = _STRATEGY.format(line)
    gone = both(_FSDP, ranks_lack(what, _world))
    return (
        Habit(things, _REFUSED, "{file} {wrong}: loading it fails", where, broken(f"{what}_world_size_*"), True),
        Habit(things, outcome, f"{{file}} is not there ({{ranks}} ranks): {why}", where, gone, True),
    )


def _inside(things: tuple[Thing, ...], outcome: Outcome, why: str, line: str, when: Callable[[Seen], object]) -> Habit:
    return Habit(things, outcome, why, _STRATEGY.format(line), when, True)


def _other_model(seen: Seen) -> object:
    """The configuration trains adapters, and the whole model lies there, or the other way round: ``{key}``, ``{now}`` and ``{was}``."""
    key = f"{'critic' if seen.role == 'critic' else 'policy'}.model.lora.rank"
    now, has_adapters = seen.settings.number(key), bool(_LORA(seen))
    was = "adapters" if has_adapters else "the whole model"
    return _MEGATRON(seen) and now is not None and (now > 0) != has_adapters and {"key": key, "now": now, "was": was}


def _no_adapter(seen: Seen) -> object:
    """Some ranks, of those that are to load or that saved, have no file of adapters: ``{there}`` and ``{wanted}``."""
    saved = [int(name[2:].partition("_")[0]) for name in seen.matching("__[0-9]*_*.distcp") if _SHARD.fullmatch(name)]
    there, wanted = len(seen.matching(OF_ADAPTERS)), seen.world or 1 + max(saved, default=-1)
    return _LORA(seen) and there < wanted and {"there": there, "wanted": wanted}


_SHARD = re.compile(r"__\d{1,5}_\d+\.distcp")


def _above(name: str, is_there: bool = True) -> Callable[[Seen], object]:
    return lambda seen: (name in seen.above) is is_there


def _other_dtype(seen: Seen) -> object:
    return _FSDP(seen) and seen.held.dtype not in ("", "float32") and {"was": seen.held.dtype}


def _fully_async(seen: Seen) -> object:
    """The configuration is one of the fully asynchronous trainer, and the step is not."""
    return _ASYNC not in seen.above and any("fully_async" in key for key in seen.settings.values)


_BROKEN = "{wrong}: loading it fails"


def _broken_above(name: str) -> Callable[[Seen], object]:
    return lambda seen: name in seen.broken and {"wrong": seen.broken[name]}


ROWS = rows_of(
    "SkyRL 0.3.0, skyrl/",
    Habit(EVERYTHING, _ANEW, "resume_mode is none: nothing is loaded", _DRIVER.format("1709"),
        lambda seen: "trainer.resume_mode" in seen.settings.values and seen.settings.denies("trainer.resume_mode")),
    Habit(EVERYTHING, _REFUSED, f"{_STATE} is not there: a FileNotFoundError; its SFT warns, and goes on", _DRIVER.format("1759"),
        _above(_STATE, False), True),
    Habit(EVERYTHING, _REFUSED, f"{_STATE} {_BROKEN}", _DRIVER.format("1763"), _broken_above(_STATE), True),
    Habit(EVERYTHING, _REFUSED, f"{_ASYNC} is not there: its fully asynchronous trainer stops with an AssertionError",
        "train/fully_async_trainer.py:1137 (load_checkpoints)", _fully_async, True),
    Habit(_OF_MODEL, _REFUSED, OTHER_BACKEND, "train/entrypoints/main_base.py:262 (_setup_trainer)",
        other_backend(_BACKENDS, "trainer.strategy", "strategy"), True),
    *_of_file(_OF_MODEL, _REFUSED, "model", "a FileNotFoundError; as many ranks must load as saved", "490"),
    *_of_file(_OF_MODEL, _REFUSED, "extra_state", "a FileNotFoundError; as many ranks must load as saved", "492"),
    *_of_file(OF_OPTIMIZER, _ANEW, "optim", "its rank's moments begin at zero, with the configured groups; nothing is said", "508"),
    _inside(OF_OPTIMIZER, _ANEW, "{file} has no {key}: it is empty, and passed over; nothing is said", "523",
        lambda seen: next(({"file": name, "key": "state"} for name in seen.matching(_OPTIM) if not seen.keys(name)), None)),
    _inside(OF_OPTIMIZER, _REFUSED, "{file} has no {key}: a KeyError", "524", without(_OPTIM, "state", "param_groups")),
    _inside(OF_OPTIMIZER, _REFUSED, "{file} has no {key}: loading it, or the first step, fails", "524", ungrouped(_OPTIM)),
    _inside(OF_OPTIMIZER, _REFUSED, "{file} has no {key} for {count} parameters: loading it, or the first step, fails", "524",
        uneven(_OPTIM)),
    _inside((Thing.OPTIMIZER,), _ANEW, "{file} has no state for {count} parameters: frozen, or begun at zero; nothing is said", "524",
        stateless(_OPTIM, of_ranks=True)),
    _inside((Thing.SCHEDULER,), _REFUSED, "{file} has no {key}: a KeyError", "529", without(_EXTRA, "lr_scheduler")),
    _inside((Thing.SCHEDULER,), _REFUSED, "{file} has no {key}: a KeyError", "529", without(_EXTRA, "lr_lambdas", inside="lr_scheduler/")),
    _inside((Thing.SCHEDULER,), _ANEW, "{file} has no {key}: the schedule keeps its own; nothing is said", "529",
        without(_EXTRA, "last_epoch", inside="lr_scheduler/")),
    _inside((Thing.SCHEDULER,), _REFUSED, UNRATED, "529", unrated(_EXTRA, _OPTIM, "lr_scheduler/")),
    _inside((Thing.RNG,), _ANEW, "{file} has no {key}: the seed's own states; nothing is said", "533", without(_EXTRA, "rng")),
    _inside((Thing.RNG,), _REFUSED, "{file} has no {key}: a KeyError", "534", without(_EXTRA, "cpu", "numpy", "random", inside="rng/")),
    Habit(_OF_MODEL, _REFUSED, "no files of ranks are there: a FileNotFoundError", _STRATEGY.format("490"),
        lambda seen: not _FSDP(seen) and not _MEGATRON(seen), True),
    Habit(_OF_MODEL, _REFUSED, "{file} {wrong}: loading it fails", _IN_MEGATRON.format("397"),
        both(_MEGATRON, broken(".metadata", "metadata.json", "common.pt", "*.distcp"))),
    Habit(_OF_LORA, _REFUSED, "{key} is {now}, and {was} lies there: loading it fails", _IN_MEGATRON.format("392"), _other_model),
    Habit(_OF_LORA, _REFUSED, "{file} {wrong}: loading it fails", _IN_MEGATRON.format("515"), both(_LORA, broken(OF_ADAPTERS)), True),
    Habit(_OF_LORA, _REFUSED, "{there} of {wanted} ranks have adapters: a FileNotFoundError", _IN_MEGATRON.format("515"), _no_adapter,
        True),
    Habit((Thing.WEIGHTS, Thing.LORA), _RESTORED, "adapters of each rank, in the model that it begins with", _IN_MEGATRON.format("516"),
        _LORA, True),
    Habit(_OF_MODEL, _REFUSED, "a file is missing: {problem}", _IN_MEGATRON.format("397"),
        lambda seen: _MEGATRON(seen) and seen.held.incomplete and {"problem": seen.held.problem}),
    Habit((Thing.SCHEDULER,), _REFUSED, "{file} has no {key}: an AssertionError", _IN_MEGATRON.format("419"),
        both(_MEGATRON, without("common.pt", "lr_scheduler"))),
    Habit((Thing.RNG,), _ANEW, "{file} has no {key}: the seed's own states; nothing is said", _IN_MEGATRON.format("426"),
        both(_MEGATRON, without("common.pt", "rng"))),
    Habit((Thing.RNG,), _RESTORED, "rng in common.pt: all ranks get those of rank 0", _IN_MEGATRON.format("427"), _MEGATRON, True),
    Habit((Thing.WEIGHTS, *OF_OPTIMIZER, Thing.SCHEDULER), _RESTORED, "torch_dist in the role's folder", _IN_MEGATRON.format("397"),
        _MEGATRON, True),
    Habit((Thing.WEIGHTS,), _RESTORED, "model_world_size_….pt of each rank", _STRATEGY.format("519"), ran=True),
    Habit(OF_OPTIMIZER, _RESTORED, "optim_world_size_….pt of each rank", _STRATEGY.format("524"), ran=True),
    Habit((Thing.SCHEDULER, Thing.RNG), _RESTORED, "extra_state_world_size_….pt of each rank", _STRATEGY.format("529"), ran=True),
    Habit((Thing.DTYPE,), _IGNORED, "stored as {was}; SkyRL trains in float32, and widens what it loads; nothing is said",
        "backends/skyrl_train/workers/fsdp/fsdp_worker.py:160 (init_model)", _other_dtype),
    Habit((Thing.LORA,), _RESTORED, "with the weights; lora_adapter/ is for serving", _STRATEGY.format("519"), has("lora_adapter/*"), True),
    Habit((Thing.COUNTERS,), _RESTORED, "the step, out of the folder's name", _DRIVER.format("1746"), ran=True),
    Habit((Thing.DATA,), _RESTORED, f"{_ASYNC}: prompts that were consumed are passed over, from the start of their epoch",
        "train/fully_async_trainer.py:1138 (load_checkpoints)", _above(_ASYNC), True),
    Habit((Thing.DATA,), _ANEW, "data.pt is not there: a logged warning, and the data from the start", _DRIVER.format("1780"),
        _above("data.pt", False), True),
    Habit((Thing.DATA,), _ANEW, "data.pt {wrong}: a logged warning, and the data from the start", _DRIVER.format("1777"),
        _broken_above("data.pt"), True),
    Habit((Thing.DATA,), _REFUSED, STOPS, _DRIVER.format("1774"), stops_at("data.pt"), True),
    Habit((Thing.DATA,), _RESTORED, "data.pt", _DRIVER.format("1774"), ran=True),
)  # fmt: skip


def _stops_at(tracked: int | None, names: Collection[str], settings: Settings) -> str:
    """Why it stops at a root, whose tracker names a step: it looks at every folder that is called like one."""
    numbers = [name.removeprefix(_PREFIX) for name in names if name.startswith(_PREFIX)]
    strange = next((one for one in numbers if not one.isdecimal()), None)
    if strange is not None:
        return f"{_PREFIX}{strange} is taken for a step, and its number cannot be read: a ValueError"
    there, interval = [int(one) for one in numbers], settings.number("ckpt_interval") or _INTERVAL
    if tracked is None:
        return "the tracker is no number: a ValueError"
    if there and max(there) - tracked > interval:
        ahead = f"more than ckpt_interval ({interval}) steps ahead of the tracker"
        return f"{_PREFIX}{max(there)} is {ahead}, which names {tracked}: a ValueError"
    return "" if tracked in there else f"the tracker names {_PREFIX}{tracked}, which is not there: a FileNotFoundError"


LOADER = Loader(TRAINER, "0.3.0", ROWS, ("trainer.resume_path", "resume_from"), stops_at=_stops_at)
