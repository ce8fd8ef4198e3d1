"""``optimizer/state.json``: what of a run is neither a weight nor has a place in a Hugging Face folder.

The optimizer's tensors lie beside it, one series of safetensors files for each state (``optimizer/exp_avg.safetensors``),
each tensor under its parameter's name. The layout is ours; docs/reference/formats-hf.md describes it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from mcore_rlhf.errors import Corrupt, Unsupported
from mcore_rlhf.families.module import ModuleState
from mcore_rlhf.families.source import ParamGroup, Source, TrainingState

from .exact_json import Encoder, decode
from .names import OPTIMIZER, STATE
from .series import read_json

FORMAT, VERSION = "mcore_rlhf.optimizer", 1
_GROUP = ("fields", "expert", "params", "scalars")


@dataclass(frozen=True, slots=True)
class Kept:
    """Everything that is kept; each field is a key of the file.

    Args:
        optimizer: What kind of optimizer wrote the states.
        states: Names of the optimizer's tensor states; each is a series of files.
        iteration, release, args, groups, scheduler, grad_scaler, other: See :class:`~mcore_rlhf.families.source.TrainingState`.
        tag, order, buffers, shared, values, keys, pipeline, without_frozen: See
            :class:`~mcore_rlhf.families.module.ModuleState`, whose ``optimizer`` is ``values`` here.
        frozen: Parameters that are not trained.
    """

    optimizer: str
    states: tuple[str, ...]
    iteration: int
    release: bool = False
    args: dict[str, object] = field(default_factory=dict)
    groups: tuple[ParamGroup, ...] = ()
    scheduler: dict[str, object] | None = None
    grad_scaler: object | None = None
    other: dict[str, object] = field(default_factory=dict)
    tag: str = ""
    order: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    shared: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, object] = field(default_factory=dict)
    keys: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    pipeline: bool = False
    frozen: tuple[str, ...] = ()
    without_frozen: bool = False

    def training(self) -> TrainingState:
        """The training state."""
        return TrainingState(
            iteration=self.iteration,
            release=self.release,
            args=self.args,
            groups=self.groups,
            scheduler=self.scheduler,
            grad_scaler=self.grad_scaler,
            other=self.other,
        )

    def text(self) -> tuple[str, list[str]]:
        """The file's content, and what could not be put into it."""
        encoder = Encoder()
        plain = {item.name: _plain(getattr(self, item.name)) for item in fields(self)}
        content = encoder.encode({"format": FORMAT, "version": VERSION, **plain}, "")
        return json.dumps(content, indent=1, allow_nan=False) + "\n", [what.removeprefix("/") for what in encoder.lost]


def kept_of(source: Source, native: ModuleState, states: tuple[str, ...]) -> Kept:
    """What of a source is kept.

    Args:
        source: The checkpoint.
        native: Its own view of it.
        states: The optimizer's states that have files.
    """
    state, names = source.state, {spec.name for spec in source.model.params}
    frozen = tuple(s.name for s in source.model.params if not s.trainable and s.name not in native.buffers)
    groups = tuple(
        ParamGroup(g.fields, g.expert, tuple(n for n in g.params if n in names), g.scalars) for g in state.groups
    )
    return Kept(
        source.optimizer or "", states, state.iteration, state.release, state.args, groups, state.scheduler,
        state.grad_scaler, state.other, native.tag, native.order, native.buffers, native.shared, native.optimizer,
        native.keys, native.pipeline, frozen, native.without_frozen,
    )  # fmt: skip


def read_kept(root: Path, stubs: tuple[str, ...]) -> Kept | None:
    """What a folder has kept, or None where there is nothing.

    Raises:
        Corrupt: It is not what :meth:`Kept.text` writes.
        Unsupported: A newer version wrote it.
        Untrusted: It names classes that are not allowed.
    """
    if not (root / STATE).is_file():
        return None
    where, content = str(root / STATE), read_json(root, STATE)
    if content.get("format") != FORMAT:
        raise Unsupported(f"{where}: was not written by mcore_rlhf; another program's {OPTIMIZER} folder is not read")
    if content.get("version") != VERSION:
        raise Unsupported(
            f"{where}: version {content.get('version')!r}; this release reads {VERSION}\nUpgrade mcore_rlhf."
        )
    found = decode(content, where, stubs)
    assert isinstance(found, dict)  # it was one, and has no mark of anything else
    return _checked(found, where)


def _plain(value: object) -> object:
    """A field as it is encoded: names and groups as lists, mappings as dictionaries."""
    if isinstance(value, tuple) and all(isinstance(item, ParamGroup) for item in value):
        return [{key: _plain(getattr(group, key)) for key in _GROUP} for group in value]
    if isinstance(value, tuple) and all(isinstance(item, str) for item in value):
        return list(value)
    return dict(value) if isinstance(value, Mapping) else value


def _checked(found: Mapping[str, Any], where: str) -> Kept:
    """The fields, each of the type that it should have."""
    values: dict[str, Any] = {}
    try:
        for name, kind in _TYPES.items():
            value = found.get(name, _LATER[name]) if name in _LATER else found[name]
            if not isinstance(value, kind):
                raise TypeError(f"{name} is {value!r:.60}")
            values[name] = tuple(value) if kind is list else value
        values["groups"] = tuple(_group(group) for group in found["groups"])
        for name in ("states", "order", "buffers", "frozen"):
            if not all(isinstance(item, str) for item in values[name]):
                raise TypeError(f"{name} should hold names")
        if not all(isinstance(name, str) for pair in values["shared"].items() for name in pair):
            raise TypeError("shared should map names to names")
        return Kept(**values)
    except (KeyError, TypeError) as error:
        raise Corrupt(f"{where}: is not what it should be: {error}\nCopy the file again, or convert again.") from None


def _group(group: Mapping[str, Any]) -> ParamGroup:
    values, expert, params, scalars = (group[key] for key in _GROUP)
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in (*params, *scalars)):
        raise TypeError("a param group has no fields, or params that are no names")
    return ParamGroup(values, bool(expert), tuple(params), tuple(scalars))


_MAYBE_DICT = (dict, type(None))
_TYPES: dict[str, Any] = {
    "optimizer": str, "states": list, "iteration": int, "release": bool, "args": dict, "groups": list,
    "scheduler": _MAYBE_DICT, "grad_scaler": object, "other": dict, "tag": str, "order": list, "buffers": list,
    "shared": dict, "values": dict, "keys": dict, "pipeline": bool, "frozen": list,
    "without_frozen": bool,
}  # fmt: skip
_LATER: dict[str, object] = {"without_frozen": False}
"""Fields that files of earlier releases lack, and what they mean by it."""
