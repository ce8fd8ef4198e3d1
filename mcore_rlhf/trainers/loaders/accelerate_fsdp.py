"""What accelerate restores of FSDP's own files, for its scripts and for transformers' Trainer: in one file, or in DCP folders.

Source: accelerate 1.15.0, ``utils/fsdp_utils.py`` (``load_fsdp_model``, ``load_fsdp_optimizer``: ``FULL_STATE_DICT`` has
``pytorch_model_fsdp.bin`` and ``optimizer.bin``, by parameters' names; ``SHARDED_STATE_DICT`` folders of DCP, which stop at a name that is
asked for and not there); torch 2.13.0, ``distributed/checkpoint/state_dict.py`` (``set_optimizer_state_dict``).
"""

from __future__ import annotations

import re

from mcore_rlhf.trainers.conditions import ADAM, OF_GROUP, both, has, undealt, unlisted
from mcore_rlhf.trainers.resuming import OF_OPTIMIZER, Habit, Outcome, Seen, Thing, rows_of

_RESTORED, _ANEW, _IGNORED, _REFUSED, _ABSENT = Outcome
WHOLE, _OPTIMIZER, _SHARDS = "pytorch_model_fsdp*.bin", "optimizer*.bin", "*optimizer_*/.metadata"
_STATE, _PARAM, _FIELD = (
    re.compile(pattern)
    for pattern in (r"state/([^/]+)/([^/]+)", r"param_groups/\d+/params/(.*\D.*)", r"(param_groups/\d+/)([^/]+)")
)
_OF_GROUP = ("lr", "betas", "eps", "weight_decay")


def _named(seen: Seen) -> tuple[str, set[str], dict[str, set[str]]]:
    """The optimizer's file, the names in its groups, and the states of each."""
    for name in seen.matching(_OPTIMIZER) if seen.has(WHOLE) else ():
        keys, states = seen.keys(name), dict[str, set[str]]()
        for found in filter(None, map(_STATE.fullmatch, keys)):
            states.setdefault(found[1], set()).add(found[2])
        return name, {match[1] for key in keys if (match := _PARAM.fullmatch(key))}, states
    return "", set(), {}


def _weightless(seen: Seen) -> object:
    """A parameter of the optimizer is not among the weights: ``{file}`` and ``{key}``."""
    _, params, _ = _named(seen)
    for name in seen.matching(WHOLE):
        gone = sorted(params - seen.keys(name))
        if gone:
            return {"file": name, "key": gone[0]}
    return None


def _stateless(seen: Seen) -> object:
    """A parameter has no state at all: ``{file}`` and ``{key}``."""
    name, params, states = _named(seen)
    gone = sorted(params - states.keys() - seen.held.frozen)
    return states and gone and {"file": name, "key": f"state/{gone[0]}"}


def _partly(seen: Seen) -> object:
    """A parameter lacks one of its states, which others have: ``{file}`` and ``{key}``."""
    name, _, states = _named(seen)
    wanted = {key for key in ADAM if any(key in there for there in states.values())}
    gone = sorted(f"state/{param}/{key}" for param, there in states.items() for key in wanted - there)
    return gone and {"file": name, "key": gone[0]}


def _groupless(seen: Seen) -> object:
    """A param group lacks what it is trained by: ``{file}`` and ``{key}``."""
    name, params, _ = _named(seen)
    groups: dict[str, set[str]] = {}
    for found in filter(None, map(_FIELD.fullmatch, seen.keys(name) if params else ())):
        groups.setdefault(found[1], set()).add(found[2])
    gone = sorted(f"{group}{key}" for group, there in groups.items() for key in {*_OF_GROUP} - there)
    return gone and {"file": name, "key": gone[0]}


def _undealt(seen: Seen) -> object:
    """A parameter that has a state is in none of the param groups, each of which says its own: ``{file}`` and ``{key}``."""
    name, params, states = _named(seen)
    keys = seen.keys(name) if name else frozenset()
    groups = {key for key in keys if _A_GROUP.fullmatch(key)}
    gone = sorted(states.keys() - params)
    return (
        "param_groups" in keys
        and {f"{one}/params" for one in groups} <= keys
        and gone
        and {"file": name, "key": gone[0]}
    )


_A_GROUP = re.compile(r"param_groups/\d+")


def _of_first(seen: Seen) -> object:
    """The configuration has the first FSDP, and the states are sharded: ``{key}``; accelerate's default, and not transformers'.

    Source: accelerate 1.15.0, ``utils/dataclasses.py`` (``FullyShardedDataParallelPlugin``); transformers 5.23.0, ``training_args.py``.
    """
    said = (key for key in ("fsdp_version", "fsdp_config.version") if seen.settings.get(key) is not None)
    key = next(said, "fsdp_version")
    version = seen.settings.get(key) or ("1" if seen.settings.get("distributed_type") == "FSDP" else "")
    return str(version) == "1" and seen.has(_SHARDS) and {"key": key}


def _shards(before: str, *names: str) -> Habit:
    why = "{file} has no {key}: DCP stops where one that is asked for is not there"
    return Habit(OF_OPTIMIZER, _REFUSED, why, "load_fsdp_optimizer", unlisted(_SHARDS, before, *names), True)


ROWS = rows_of(
    "accelerate 1.15.0, utils/fsdp_utils.py:",
    Habit((Thing.WEIGHTS,), _ANEW, "{file} has no {key}, which the optimizer has: it keeps what the run made it with; nothing is said",
        "load_fsdp_model", _weightless, True),
    _shards(r"optimizer\.state\..+\.", *ADAM),
    _shards(r"optimizer\.param_groups\.\d+\.", *OF_GROUP, "params"),
    Habit(OF_OPTIMIZER, _REFUSED, "{file} has no {key}: DCP stops where one that is asked for is not there", "load_fsdp_optimizer",
        undealt(_SHARDS, r"optimizer\."), True),
    Habit(OF_OPTIMIZER, _ANEW, "{file} has no param group with {key}: it begins anew; nothing is said", "load_fsdp_optimizer",
        _undealt, True),
    Habit(OF_OPTIMIZER, _REFUSED, "{file} has no {key}: DCP stops where one that is asked for is not there", "load_fsdp_optimizer",
        both(has("scheduler*"), unlisted(_SHARDS, r"optimizer\.param_groups\.\d+\.", "initial_lr")), True),
    Habit(OF_OPTIMIZER, _REFUSED, "{file} has no {key}: a RuntimeError, “Missing optimizer state”", "load_fsdp_optimizer", _stateless,
        True),
    Habit((Thing.OPTIMIZER,), _ANEW, "{file} has no {key}: it begins anew; nothing is said", "load_fsdp_optimizer", _partly, True),
    Habit((Thing.GROUPS,), _ANEW, "{file} has no {key}: the run's own is kept; nothing is said", "load_fsdp_optimizer", _groupless, True),
    Habit(OF_OPTIMIZER, _RESTORED, "optimizer.bin, by name", "load_fsdp_optimizer",
        lambda seen: bool(_named(seen)[1]) and bool(_named(seen)[2]), True),
    Habit((Thing.OPTIMIZER,), _ANEW, "{key} is 1, the first FSDP: DCP is asked for the states that a new optimizer has, which are none; "
        "nothing is said", "load_fsdp_optimizer", _of_first, True),
    Habit((Thing.OPTIMIZER,), _RESTORED, "by FSDP2; the first one (fsdp_version 1) asks DCP for the states that a new optimizer has, which "
        "are none, without a word", "load_fsdp_optimizer", has(_SHARDS), True),
)  # fmt: skip
