"""What an FSDP run calls its tensors in a DCP folder: one description of a layout of keys, read both ways.

A key is a path in the nested dict that was saved, joined by dots; ``planner_data`` has the path itself, in which a
parameter's name is one part, dots and all. Layouts that are known, with ``P`` for a parameter's name and an int for a list's index:

=========  ======================================================  =======================================================
style      state of the optimizer                                  its param groups
=========  ======================================================  =======================================================
nested     ``(…, "state", P, "exp_avg")``                          ``(…, "param_groups", 0, "lr")``, ``"params"``: names
numbered   ``(…, "state", "7", "exp_avg")``                        the same, ``"params"``: numbers
flat       ``(…, "state.P.exp_avg")``                              ``(…, "param_groups.P.lr")``: for each parameter
=========  ======================================================  =======================================================

Source: torch 2.13.0, ``distributed/checkpoint/state_dict.py`` (``get_state_dict`` is nested, and flat with
``flatten_optimizer_state_dict``), ``optim/optimizer.py`` (``state_dict`` is numbered); RLinf,
``hybrid_engines/fsdp/strategy/checkpoint.py`` (nested below ``fsdp_checkpoint``); torchtitan, ``components/checkpoint.py``
(flat, and the model's names at the top or below ``model``).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from enum import Enum
from itertools import takewhile
from typing import Any

from mcore_rlhf.errors import CheckpointError
from mcore_rlhf.families.fsdp.groups import PARAMS
from mcore_rlhf.families.lora.names import in_memory
from mcore_rlhf.models.meaning.bounds import is_number
from mcore_rlhf.storage.dcp.metadata import Path_
from mcore_rlhf.storage.records import record_of
from mcore_rlhf.storage.torch_values import is_tensor

STATE, GROUPS = "state", "param_groups"
_MODEL_NAMES = ("model", "module", "model_state_dict", "state_dict", "model_state", "app")
_NOT_MODELS = re.compile(r"rng|lr_sched|scheduler|dataloader|train_state|sampler|progress|extra|trainer")


class Style(Enum):
    """How the optimizer's keys are spelled."""

    NESTED = "nested"
    NUMBERED = "numbered"
    FLAT = "flat"


@dataclass(frozen=True, slots=True)
class KeyLayout:
    """How keys are made.

    Args:
        model: Path of the model's dictionary.
        optimizer: Path of the optimizer's, or None where the folder has none.
        style: How its keys are spelled.
        top: Whether something lies outside of the dictionary that both of them are in.
        adapted: Whether the model's are an adapter's, under the names that peft's file has for them; the optimizer's are not.
    """

    model: Path_
    optimizer: Path_ | None = None
    style: Style = Style.NESTED
    top: bool = False
    adapted: bool = False

    @classmethod
    def noted(cls, values: Mapping[str, object]) -> KeyLayout | None:
        """The layout that was noted as a record, with whatever else; None where it is none."""
        own = {item.name: values[item.name] for item in fields(cls) if item.name in values}
        with suppress(CheckpointError):
            return record_of(cls, own, "", sparse=True)
        return None

    @property
    def rest(self) -> Path_:
        """Path of the dictionary that holds everything else."""
        own, other = self.model[:-1], self.model[:-1] if self.optimizer is None else self.optimizer[:-1]
        common = takewhile(lambda pair: pair[0] == pair[1], zip(own, other, strict=False))
        return () if self.top else tuple(part for part, _ in common)

    def spells(self, other: KeyLayout) -> bool:
        """Whether keys of the same names are meant; of weights alone, the model's."""
        return (self.model, self.style) == (other.model, other.style) and self.optimizer in (None, other.optimizer)

    def model_path(self, param: str) -> Path_:
        """Path of a parameter or buffer."""
        own = in_memory(param) if self.adapted else None
        return (*self.model, param if own is None else own.file)

    def state_path(self, param: str, state: str, number: int = 0) -> Path_:
        """Path of a parameter's optimizer state; the number is its own among all that are trained."""
        head = self.optimizer or ()
        if self.style is Style.FLAT:
            return (*head, f"{STATE}.{param}.{state}")
        return (*head, STATE, str(number) if self.style is Style.NUMBERED else param, state)

    def group_path(self, number: int, field: str, param: str = "") -> Path_:
        """Path of a field of a param group, or, in the flat style, of a parameter's own."""
        head = self.optimizer or ()
        return (*head, f"{GROUPS}.{param}.{field}") if self.style is Style.FLAT else (*head, GROUPS, number, field)

    def parse(self, path: Path_) -> Key:
        """What a path stands for: the other way round of the three methods above."""
        head = self.optimizer
        if head is not None and path[: len(head)] == head:
            found = _flat_key(path[-1]) if self.style is Style.FLAT else _nested_key(path[len(head) :])
            if found is not None and (self.style is not Style.FLAT or len(path) == len(head) + 1):
                return found
        if path[:-1] == self.model and isinstance(path[-1], str):
            return Key("model", param=path[-1])
        return Key("rest", path=path[len(self.rest) :] if path[: len(self.rest)] == self.rest else path)


@dataclass(frozen=True, slots=True)
class Key:
    """What a key stands for.

    Args:
        kind: ``model``, ``state``, ``group`` or ``rest``.
        param: The parameter; in the numbered style, its number.
        name: The state, or the field.
        group: The group's number; -1 in the flat style.
        path: Where it lies in the rest.
    """

    kind: str
    param: str = ""
    name: str = ""
    group: int = -1
    path: Path_ = ()


NEMO_V1 = KeyLayout(("model",), ("optim", "optim"))
NEMO_V2 = KeyLayout((), ("optim",), Style.FLAT)
KEYS_OF: Mapping[str, tuple[KeyLayout, ...]] = {
    "nemo-rl": (NEMO_V1, NEMO_V2), "torchtitan": (KeyLayout((), ("optimizer",), Style.FLAT),),
    "prime-rl": (KeyLayout(("app", "model"), ("app", "optimizers")),),
}  # fmt: skip
"""Trainers that ask for keys of their own when they load, and which.

Sources: NeMo-RL 7ea279a, ``nemo_rl/utils/native_checkpoint.py`` (``ModelState``, ``OptimizerState``); nemo_automodel 0.4.0,
``components/checkpoint/stateful_wrappers.py`` (the same), with which its DTensor v2 saves; torchtitan 0.2.2, ``components/checkpoint.py``;
prime-rl 559b447, ``src/prime_rl/trainer/ckpt.py`` (``AppState``).
"""
RLINF = KeyLayout(("fsdp_checkpoint", "model"), ("fsdp_checkpoint", "optimizers"))
"""What a new folder has unless its source was one itself."""
AREAL = KeyLayout(("dcp", "model"), ("dcp", "optim"))
LAYOUTS: Mapping[str, KeyLayout] = {"rlinf": RLINF, "areal": AREAL}
"""Trainers whose keys are always these, whatever the source's were.

Sources: RLinf a3816b5, ``rlinf/hybrid_engines/fsdp/strategy/checkpoint.py``; AReaL 1.0.4, ``areal/engine/fsdp_engine.py``
(``_save_to_dcp``), ``areal/engine/fsdp_utils/checkpoint.py`` (``DCPState``: model and optimizer, and nothing beside them).
"""
ACCELERATE = KeyLayout(("model",), ("optimizer",))
"""What accelerate has in its two. Source: accelerate 1.15.0, ``utils/fsdp_utils.py`` (``save_fsdp_model``, ``save_fsdp_optimizer``)."""


def _nested_key(tail: Path_) -> Key | None:
    if len(tail) != 3:
        return None
    first, second, third = tail
    if first == STATE and isinstance(second, str) and isinstance(third, str):
        return Key("state", param=second, name=third)
    if first == GROUPS and isinstance(second, int) and isinstance(third, str):
        return Key("group", name=third, group=second)
    return None


def _flat_key(last: str | int) -> Key | None:
    first, _, rest = str(last).partition(".")
    param, _, name = rest.rpartition(".")
    if not param or first not in (STATE, GROUPS):
        return None
    return Key("state" if first == STATE else "group", param=param, name=name)


def joined(path: Path_) -> str:
    """The key of a path, as torch joins it (``distributed/checkpoint/_nested_dict.py``)."""
    return ".".join(map(str, path))


def find_layout(paths: Collection[Path_], tensors: Collection[Path_]) -> KeyLayout:
    """The layout of a folder.

    Args:
        paths: Of everything in it.
        tensors: Of its tensors.
    """
    optimizer, style = _find_optimizer(paths)
    found = KeyLayout((), optimizer, style)
    named = {key.param for path in paths if (key := found.parse(path)).kind == "state"}
    if named and all(name.isdecimal() for name in named):
        found, named = KeyLayout((), optimizer, Style.NUMBERED), set()
    others = [path for path in tensors if found.parse(path).kind not in ("state", "group")]
    layout = KeyLayout(_find_model(others, named), optimizer, found.style)
    return replace(layout, top=any(path[: len(layout.rest)] != layout.rest for path in paths))


def _find_optimizer(paths: Iterable[Path_]) -> tuple[Path_ | None, Style]:
    """Where the param groups are; every optimizer has some."""
    nested: Counter[Path_] = Counter()
    flat: Counter[Path_] = Counter()
    for path in paths:
        if len(path) >= 3 and path[-3] == GROUPS and isinstance(path[-2], int):
            nested[path[:-3]] += 1
        elif str(path[-1]).startswith(f"{GROUPS}."):
            flat[path[:-1]] += 1
    for found, style in ((nested, Style.NESTED), (flat, Style.FLAT)):
        if found:
            return found.most_common(1)[0][0], style
    return None, Style.NESTED


def _find_model(tensors: Iterable[Path_], named: Collection[str]) -> Path_:
    """The dictionary that has the parameters which the optimizer names; without an optimizer, the one that looks like it."""
    votes: Counter[Path_] = Counter()
    sizes: Counter[Path_] = Counter()
    for path in tensors:
        sizes[path[:-1]] += 1
        votes[path[:-1]] += path[-1] in named
    if votes and votes.most_common(1)[0][1]:
        return votes.most_common(1)[0][0]
    likely = {head: n for head, n in sizes.items() if not _NOT_MODELS.search(joined(head).lower())} or sizes
    called = [head for head in likely if head and head[-1] in _MODEL_NAMES]
    return max(called or likely, key=lambda head: sizes[head], default=())


def guess_paths(keys: Collection[str]) -> dict[str, Path_]:
    """Paths for keys of a folder that stores none, from the words that all layouts have in common.

    Args:
        keys: The keys.
    """
    heads = Counter(key.partition(f"{GROUPS}.")[0] for key in keys if f"{GROUPS}." in key)
    head = heads.most_common(1)[0][0] if heads else None
    prefix = _model_prefix(keys, head)
    return {key: _guess(key, head, prefix, _is_nested(keys, head)) for key in keys}


def _is_nested(keys: Collection[str], head: str | None) -> bool:
    return head is not None and any(
        re.fullmatch(rf"{re.escape(head)}{GROUPS}\.\d+\.{PARAMS}", key) is not None for key in keys
    )


def _model_prefix(keys: Collection[str], head: str | None) -> str:
    """What stands before the parameters' names: found by those that the optimizer names."""
    if head is not None:
        states = [key for key in keys if key.startswith(f"{head}{STATE}.")]
        param = next((key[len(head) + 6 :].rpartition(".")[0] for key in states), "")
        others = [key for key in keys if param and key.endswith(param) and not key.startswith(head)]
        if others:
            return min(others, key=len)[: -len(param)]
    dotted = [name + "." for name in _MODEL_NAMES]
    for key in keys:
        for name in dotted:
            at = key.find(name)
            if at == 0 or (at > 0 and key[at - 1] == "." and not _NOT_MODELS.search(key[:at])):
                return key[: at + len(name)]
    return ""


def _guess(key: str, head: str | None, prefix: str, nested: bool) -> Path_:
    if head is not None and key.startswith(head):
        base = tuple(head.rstrip(".").split(".")) if head else ()
        found = _flat_key(key[len(head) :])
        if found is not None and not nested:
            return (*base, key[len(head) :])
        if found is not None and found.kind == "state":
            return (*base, STATE, found.param, found.name)
        if found is not None and is_number(found.param):
            return (*base, GROUPS, int(found.param), found.name)
    if prefix and key.startswith(prefix):
        return (*prefix.rstrip(".").split("."), key[len(prefix) :])
    return (key,) if not prefix and head is not None and not key.startswith(head) else tuple(key.split("."))


def parsed(layout: KeyLayout, paths: Mapping[str, Path_]) -> dict[str, Key]:
    """What every key of a folder stands for."""
    return {key: layout.parse(path) for key, path in paths.items()}


def flattened(value: object, path: Path_ = ()) -> Iterator[tuple[Path_, object]]:
    """Take a nested dict apart as torch does.

    Dictionaries are always entered, and lists that hold dictionaries or tensors; everything else is a leaf.
    Source: torch 2.13.0, ``distributed/checkpoint/_traverse.py`` (``traverse_state_dict``).
    """
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from flattened(item, (*path, key if type(key) is int else str(key)))
    elif isinstance(value, list) and not _is_leaf(value):
        for index, item in enumerate(value):
            yield from flattened(item, (*path, index))
    else:
        yield path, value


def _is_leaf(value: list[Any]) -> bool:
    return not any(
        isinstance(item, Mapping) or is_tensor(item) or (isinstance(item, list) and not _is_leaf(item))
        for item in value
    )


def unflattened(values: Mapping[Path_, object]) -> dict[str, Any]:
    """Put a nested dict together again: an int in a path is an index of a list.

    Args:
        values: Leaves by path; no path is empty. Of a list whose beginning is not there, an int stays what it is.
    """
    root: dict[str | int, Any] = {}
    for path, value in values.items():
        at = root
        for part in path[:-1]:
            at = at.setdefault(part, {})
        at[path[-1]] = value
    return {str(key): _with_lists(value) for key, value in root.items()}


def _with_lists(value: Any) -> Any:
    if type(value) is not dict:
        return value
    items = {key: _with_lists(item) for key, item in value.items()}
    if items and sorted(items, key=str) == sorted(range(len(items)), key=str) and all(type(k) is int for k in items):
        return [items[index] for index in range(len(items))]
    return items
