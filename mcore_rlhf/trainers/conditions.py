"""What rows of loaders often ask of a step: which files there are, and which keys are in them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase

from .resuming import INSIDE, MOST_RANKS, Seen
from .torch_optimizers import lacking


def lacks(*patterns: str) -> Callable[[Seen], object]:
    """No file fits any of the patterns."""
    return lambda seen: not seen.has(*patterns)


def has(*patterns: str) -> Callable[[Seen], object]:
    """A file fits a pattern."""
    return lambda seen: seen.has(*patterns)


def broken(*patterns: str) -> Callable[[Seen], object]:
    """A file that fits cannot be read: ``{file}`` and ``{wrong}``."""

    def when(seen: Seen) -> object:
        found = next((name for name in seen.matching(*patterns) if name in seen.broken), None)
        return found and {"file": found, "wrong": seen.broken[found]}

    return when


def without(pattern: str | tuple[str, ...], *keys: str, inside: str = "") -> Callable[[Seen], object]:
    """A file that fits can be read, and lacks a key: ``{file}`` and ``{key}``.

    Args:
        pattern: Of the file, or several; see :meth:`.Seen.places`.
        keys: Each a key, or several with ``|`` between them, of which one is enough.
        inside: A key with a ``/`` behind it: only where something lies there, which the keys are looked for in.
    """
    patterns = (pattern,) if isinstance(pattern, str) else pattern

    def when(seen: Seen) -> object:
        for name in seen.places(*patterns):
            there = {key.removeprefix(inside) for key in seen.keys(name) if key.startswith(inside)}
            gone = [key for key in keys if there.isdisjoint(key.split("|"))]
            if there and gone:
                return {"file": name.replace(INSIDE, ": "), "key": inside + gone[0].partition("|")[0]}
        return None

    return when


def lacks_of(pattern: str, group: str, *lists: str) -> Callable[[Seen], object]:
    """A file that fits lists names, in a list or in several, that are not in a group of keys beside it: ``{file}`` and ``{key}``."""

    def when(seen: Seen) -> object:
        for name in seen.matching(pattern):
            there = seen.keys(name)
            listed = {
                match[1]
                for key in there
                for one in lists
                if (match := re.fullmatch(rf"{one}(?:/\d+)?/([^/]*[^/\d][^/]*)", key))
            }
            gone = sorted(one for one in listed if f"{group}/{one}" not in there)
            if gone and group in there:
                return {"file": name, "key": f"{group}/{gone[0]}"}
        return None

    return when


def stateless(pattern: str, inside: str = "", *, of_ranks: bool = False) -> Callable[[Seen], object]:
    """An optimizer that fits has parameters without a state, which then begin anew: ``{file}`` and ``{count}``.

    Args:
        pattern: Of its file.
        inside: The key at which it lies there, with a ``/`` behind it.
        of_ranks: Whether each rank has such a file, of all parameters: what a reader understands of several, where FSDP1 has no piece of
            some on a rank and no rank has states of frozen ones, is as it was saved. Of one rank no other says it.
    """

    def when(seen: Seen) -> object:
        names = seen.matching(pattern)
        if of_ranks and len(names) > 1 and seen.held.optimizer and not seen.held.problem:
            return None
        for name in names:
            keys = _inside(seen.keys(name), inside)
            params, states = _numbered(keys)
            known = lacking(keys, _inside(seen.on(name), inside))
            gone = params - states.keys() if known is None else known.anew
            if gone := {number for number in gone if str(number) not in seen.held.frozen}:
                return {"file": name, "count": f"{len(gone)} of {len(params) if known is None else known.count}"}
        return None

    return when


def uneven(pattern: str, inside: str = "") -> Callable[[Seen], object]:
    """Some parameters' states in an optimizer that fits lack what others have, or Adam's one moment: ``{file}``, ``{key}``, ``{count}``.

    Args:
        pattern: Of its file.
        inside: The key at which it lies there, with a ``/`` behind it.
    """

    def when(seen: Seen) -> object:
        for name in seen.matching(pattern):
            keys = _inside(seen.keys(name), inside)
            if (known := lacking(keys, _inside(seen.on(name), inside))) is not None:
                if state := min(known.fails, default=None):
                    return {"file": name, "key": state, "count": f"{known.fails[state]} of {known.count}"}
                continue
            _, states = _numbered(keys)
            counts = Counter(key for held in states.values() for key in held)
            if "exp_avg_sq" in counts:
                counts.setdefault("exp_avg", 0)
            short = {
                key: many
                for key, many in counts.items()
                if (len(states) <= 2 * many or key == "exp_avg") and many < len(states)
            }
            if key := min(short, default=None):
                return {"file": name, "key": key, "count": f"{len(states) - short[key]} of {len(states)}"}
        return None

    return when


def ungrouped(pattern: str, inside: str = "") -> Callable[[Seen], object]:
    """A param group of an optimizer that fits lacks what its first step asks for, or a parameter that has a state: ``{file}``, ``{key}``.

    Args:
        pattern: Of its file.
        inside: The key at which it lies there, with a ``/`` behind it.
    """

    def when(seen: Seen) -> object:
        for name in seen.matching(pattern):
            keys = _inside(seen.keys(name), inside)
            if (known := lacking(keys, _inside(seen.on(name), inside))) is not None and known.field:
                return {"file": name, "key": f"{inside}param_groups/{known.field}"}
            has_adam = any(key.endswith("/exp_avg") for key in keys)  # Adafactor has `exp_avg_sq` of vectors
            groups: dict[str, set[str]] = {}
            for found in filter(None, map(_GROUP.fullmatch, keys)):
                groups.setdefault(found[1], set()).add(found[2])
            for number, there in sorted(groups.items()):
                is_adam = has_adam and there & {"betas", "eps"}
                if gone := sorted(({*_ASKED_FOR, *_OF_ADAM} if is_adam else _ASKED_FOR) - there):
                    return {"file": name, "key": f"{inside}param_groups/{number}/{gone[0]}"}
            listed = sum(1 for key in keys if _PARAM.fullmatch(key))
            strange = [int(one[1]) for key in keys if (one := _STATE.fullmatch(key)) and int(one[1]) >= listed]
            if strange and "param_groups" in keys:
                return {
                    "file": name,
                    "key": f"number of parameter {min(strange)}, which has a state, in {inside}param_groups",
                }
            if "param_groups" in keys and not groups and any(key.startswith("state/") for key in keys):
                return {"file": name, "key": f"group in {inside}param_groups"}
        return None

    return when


_GROUP, _PARAM, _STATE, _ADAMS = (
    re.compile(pattern)
    for pattern in (
        r"param_groups/(\d+)/([^/]+)",
        r"param_groups/(\d+)/params/(\d+)",
        r"state/(\d+)/([^/]+)",
        r"param_groups/(\d+)/betas",
    )
)
_ASKED_FOR, _OF_ADAM = {"params", "lr"}, {"betas", "eps", "weight_decay"}


def _inside(keys: frozenset[str], at: str) -> frozenset[str]:
    return frozenset(key.removeprefix(at) for key in keys if key.startswith(at)) if at else keys


def _numbered(keys: frozenset[str]) -> tuple[set[int], dict[int, set[str]]]:
    """The parameters of a torch optimizer's Adam groups, as it numbers them, and the keys of each one's state."""
    places = sorted((int(found[1]), int(found[2])) for key in keys if (found := _PARAM.fullmatch(key)))
    adams = {int(found[1]) for key in keys if (found := _ADAMS.fullmatch(key))}
    states: dict[int, set[str]] = {}
    for found in filter(None, map(_STATE.fullmatch, keys)):
        states.setdefault(int(found[1]), set()).add(found[2])
    params = {number for number, (group, _) in enumerate(places) if group in adams}
    return params, {number: found for number, found in states.items() if number in params}


ADAM = ("step", "exp_avg", "exp_avg_sq")
OF_GROUP = (
    "lr",
    "betas",
    "eps",
    "weight_decay",
    "amsgrad",
    "maximize",
    "foreach",
    "capturable",
    "differentiable",
    "fused",
)
OF_SCHEDULE = ("base_lrs", "last_epoch", "_step_count", "_last_lr", "_get_lr_called_within_step")
"""What torch's Adam keeps of a parameter and of a param group, and its schedules, in every release since 2.0.

Source: torch 2.13.0, ``optim/adam.py``, ``optim/lr_scheduler.py`` (``LRScheduler``).
"""


def lambdaless(pattern: str) -> Callable[[Seen], object]:
    """A schedule that fits is a ``LambdaLR``, as it has no numbers of its own, and lacks what that asks for: ``{file}`` and ``{key}``."""

    def when(seen: Seen) -> object:
        for name in seen.matching(pattern):
            there = {key.partition("/")[0] for key in seen.keys(name)}
            if "last_epoch" in there and there <= {*OF_SCHEDULE, *_OF_SOME_RELEASES}:
                return {"file": name, "key": "lr_lambdas"}
        return None

    return when


_OF_SOME_RELEASES = {"_is_initial", "verbose"}


def unrated(pattern: str, groups: str, inside: str = "") -> Callable[[Seen], object]:
    """A ``LambdaLR`` that fits has a base rate for more or fewer param groups than there are: ``{file}``, ``{there}`` and ``{wanted}``.

    Args:
        pattern: Of its file.
        groups: Of the optimizer's; where it has no list of groups, the schedule's own functions say how many there are.
        inside: The key at which the schedule lies, with a ``/`` behind it.
    """

    def when(seen: Seen) -> object:
        files = [name for name in seen.matching(groups) if name not in seen.broken]
        counts = {name: len({*filter(None, map(_group_in, seen.keys(name)))}) for name in files}
        for name in seen.matching(pattern):
            there, own = seen.keys(name), _NUMBER.findall(name)
            dealt = max((many for one, many in counts.items() if _NUMBER.findall(one) == own), default=0)
            if {f"{inside}base_lrs", f"{inside}lr_lambdas"} <= there:
                rates, lambdas = (_items(there, inside + key) for key in ("base_lrs", "lr_lambdas"))
                wanted = dealt or lambdas
                if rates != wanted:
                    return {"file": name, "there": rates, "wanted": wanted}
        return None

    return when


_NUMBER = re.compile(r"_(\d+)\.bin$")  # of several optimizers that one Accelerator prepared, and of their schedules
UNRATED = "{file} has {there} base_lrs for {wanted} param groups: it is loaded, and the next step of LambdaLR fails"
"""What is said of one. Source: torch 2.13.0, ``optim/lr_scheduler.py`` (``LambdaLR.get_lr``: ``zip`` with ``strict``)."""


def _group_in(key: str) -> str | None:
    """The number of the param group that a key lies in."""
    found = _IN_GROUP.fullmatch(key)
    return found and found[1]


_IN_GROUP = re.compile(r"(?:.*/)?param_groups/(\d+)/params")


def _items(there: frozenset[str], at: str) -> int:
    return sum(1 for key in there if key.startswith(f"{at}/") and "/" not in key[len(at) + 1 :])


def unlisted(file: str, before: str, *names: str) -> Callable[[Seen], object]:
    """Of the names in a DCP folder that begin alike, one is not there that belongs to them, or that most such have: ``{file}``, ``{key}``.

    Args:
        file: The folder's ``.metadata``, in the model's folder or in the step's; a pattern.
        before: A pattern of what they begin with, up to the last dot; each beginning that it finds is asked for all.
        names: What belongs to them, where half of it is there: a schedule made of others has none of its own.
    """
    begins = re.compile(before)

    def when(seen: Seen) -> object:
        for name in sorted(one for one in {*seen.files, *seen.above} if fnmatchcase(one, file)):
            found: dict[str, set[str]] = {}
            for key in seen.keys(name):
                if match := begins.match(key):
                    found.setdefault(match[0], set()).add(key[match.end() :])
            counts = Counter(rest for there in found.values() for rest in there)
            usual = {rest for rest, many in counts.items() if 2 * many > len(found)} if len(found) > 1 else set()
            for at, there in sorted(found.items()):
                known = len(names) == 1 or 2 * len(there.intersection(names)) >= len(names)
                asked_for = {*names} if known else set()
                if gone := sorted((asked_for | usual) - there):
                    return {"file": name, "key": at + gone[0]}
        return None

    return when


def undealt(file: str, optimizer: str) -> Callable[[Seen], object]:
    """A parameter that has a state in a DCP folder is in none of its param groups: ``{file}`` and ``{key}``.

    Args:
        file: The folder's ``.metadata``, in the model's folder or in the step's; a pattern.
        optimizer: What the names of states and param groups begin with, with a dot behind it; a regular expression.
    """
    state, numbered, named = (
        re.compile(optimizer + rest)
        for rest in (r"state\.(.+)\.[^.]+", r"param_groups\.\d+\.params", r"param_groups\.(.*[^.\d].*)\.[^.]+")
    )

    def when(seen: Seen) -> object:
        for name in sorted(one for one in {*seen.files, *seen.above} if fnmatchcase(one, file)):
            keys = seen.keys(name)
            listed = [seen.keys(f"{name}{INSIDE}{key}") for key in keys if numbered.fullmatch(key)]
            dealt = {found[1] for key in keys if (found := named.fullmatch(key))}.union(*listed)
            gone = sorted(found[1] for key in keys if (found := state.fullmatch(key)) and found[1] not in dealt)
            if gone:
                return {"file": name, "key": f"param group with {gone[0]}"}
        return None

    return when


def asked(*keys: str) -> Callable[[Seen], object]:
    """The configuration says yes to a key: ``{key}``."""
    return lambda seen: next(({"key": key} for key in keys if seen.settings.says(key)), None)


def refused(*keys: str) -> Callable[[Seen], object]:
    """The configuration says no to a key: ``{key}``."""
    return lambda seen: next(({"key": key} for key in keys if seen.settings.denies(key)), None)


def missing_ranks(pattern: str, least: Callable[[Seen], int] = lambda seen: seen.held.dp) -> Callable[[Seen], object]:
    """Some rank that loads, or that saved, has no file of its own: ``{file}`` and ``{ranks}``."""

    def when(seen: Seen) -> object:
        there = seen.ranks(pattern)
        count = seen.world if seen.world is not None else max([least(seen), *(rank + 1 for rank in there)])
        gone = [rank for rank in range(min(count, MOST_RANKS)) if rank not in there]
        return there and gone and {"file": pattern.format(rank=gone[0]), "ranks": f"{len(gone)} of {count}"}

    return when


def ranks_of(seen: Seen, world: int | None) -> int:
    """Ranks that load files with their number in the name: so many, or, for None, as many as saved.

    Source: verl and SkyRL, whose files are ``model_world_size_W_rank_R.pt``, ….
    """
    saved = [name.partition("_world_size_")[2].partition("_")[0] for name in seen.matching("*_world_size_*")]
    return world or max((int(one) for one in saved if one.isdecimal() and len(one) < 7), default=1)


def ranks_lack(what: str, world_of: Callable[[Seen], int | None]) -> Callable[[Seen], object]:
    """A rank that loads has no file of its name, which has the number of ranks in it: ``{file}`` and ``{ranks}``.

    Args:
        what: The kind of file.
        world_of: How many ranks load; None for as many as saved.
    """

    def when(seen: Seen) -> object:
        world = min(ranks_of(seen, world_of(seen)), MOST_RANKS)
        there = seen.ranks(f"{what}_world_size_{world}_rank_{{rank}}.pt")
        gone = [rank for rank in range(world) if rank not in there]
        return gone and {"file": f"{what}_world_size_{world}_rank_{gone[0]}.pt", "ranks": f"{len(gone)} of {world}"}

    return when


def other_dtype(*keys: str) -> Callable[[Seen], object]:
    """The configuration makes the model in another type than it is stored in: ``{was}`` and ``{now}``.

    Args:
        keys: Of the configuration, of which the first that is there names the type.
    """

    def when(seen: Seen) -> object:
        now = str(seen.settings.get(*keys) or "").removeprefix("torch.")
        now, was = (_DTYPES.get(one, one) for one in (now, seen.held.dtype))
        return {"was": was, "now": now} if was and now not in ("", "auto", was) else None

    return when


_DTYPES = {
    **dict.fromkeys(("bf16", "bf16-mixed"), "bfloat16"),
    **dict.fromkeys(("fp16", "half", "16", "16-mixed"), "float16"),
    **dict.fromkeys(("fp32", "float", "32", "32-true"), "float32"),
}


_FAMILIES = {
    "bitsandbytes": ({"state1"}, ("8bit", "bnb", "paged")),
    "Adafactor": ({"exp_avg_sq_row"}, ("adafactor",)),
    "Adam": ({"exp_avg", "exp_avg_sq"}, ("adam", "lamb")),
    "RMSprop": ({"square_avg"}, ("rmsprop",)),
    "Adagrad": ({"sum", "step"}, ("adagrad",)),
    "SGD or Muon": ({"momentum_buffer"}, ("sgd", "muon")),
    "Lion": ({"exp_avg"}, ("lion",)),
}
"""Families of optimizers: what they keep of a parameter, and parts of their classes' names; the first that fits is meant.

Source: torch 2.13.0, ``optim``; transformers 5.23.0, ``optimization.py`` (``Adafactor``); bitsandbytes 0.49, ``optim/optimizer.py``.
"""


def other_optimizer(key: str, *places: str) -> Callable[[Seen], object]:
    """The configuration makes an optimizer of another family than that whose states are stored: ``{key}``, ``{now}`` and ``{was}``.

    Args:
        key: Of the configuration, which names the class; with ``{role}`` for the model's role.
        places: Patterns of the files with the states, in the model's folder or in the step's.
    """

    def when(seen: Seen) -> object:
        asked_for = key.format(role=seen.role or "actor")
        now = seen.settings.get(asked_for)
        wanted = isinstance(now, str) and next(
            (family for family, (_, words) in _FAMILIES.items() if any(word in now.lower() for word in words)), None
        )
        for name in sorted(
            one for one in {*seen.files, *seen.above} if any(fnmatchcase(one, place) for place in places)
        ):
            there = {part for found in seen.keys(name) for part in re.split(r"[./]", found)} if wanted else set()
            was = next((family for family, (kept, _) in _FAMILIES.items() if kept <= there), wanted)
            if was != wanted:
                return {"key": asked_for, "now": now, "was": was}
        return None

    return when


OTHER_CLASS = (
    "{key} is {now}, and the states that are stored are those of {was}: loading them, or the first step, fails"
)
"""What is said of one. Source: torch 2.13.0, ``optim/optimizer.py`` (``load_state_dict``: states and groups are then the stored ones)."""


def other_backend(files: Mapping[str, tuple[str, ...]], *keys: str) -> Callable[[Seen], object]:
    """The configuration trains on a backend of which no file is there, and there are another's: ``{key}``, ``{now}`` and ``{file}``.

    Args:
        files: Patterns of what each backend saves, by its name in the configuration; of others nothing is said.
        keys: Of the configuration, of which the first that is there names the backend; with ``{role}`` for the model's role.
    """

    def when(seen: Seen) -> object:
        asked_for = (key.format(role=seen.role or "actor") for key in keys)
        key, now = next(((one, str(found)) for one in asked_for if (found := seen.settings.get(one))), ("", ""))
        if not key or now not in files or seen.has(*files[now]):
            return None
        others = seen.matching(*(pattern for patterns in files.values() for pattern in patterns))
        return others and {"key": key, "now": now, "file": others[0]}

    return when


OTHER_BACKEND = (
    "{key} is {now}, whose loader finds none of its files, and stops: what lies there is another backend's ({file})"
)
"""What is said of one."""


def both(*conditions: Callable[[Seen], object]) -> Callable[[Seen], object]:
    """All of them are meant; the values are the last one's."""

    def when(seen: Seen) -> object:
        found: object = None
        for condition in conditions:
            found = condition(seen)
            if not found:
                return None
        return found

    return when


def incomplete(seen: Seen) -> object:
    """The reader misses a file, or a rank: ``{problem}``."""
    return {"problem": seen.held.problem} if seen.held.incomplete else None


def incomplete_in(*words: str) -> Callable[[Seen], object]:
    """The reader misses a file in whose path one of the words is: ``{problem}``."""
    return lambda seen: incomplete(seen) if any(word in seen.held.problem for word in words) else None


_FEWER = re.compile(r"has (\d+) parameters, and the model beside it (\d+)")


def lacks_tensors(seen: Seen) -> object:
    """A model's files lack a tensor, by its ``config.json``, or are fewer than the optimizer beside it has: ``{problem}``."""
    problem = seen.held.problem or seen.held.unread
    fewer = _FEWER.search(problem)
    gone = int(fewer[2]) < int(fewer[1]) if fewer else " lacks " in problem
    return gone and {"problem": problem}
