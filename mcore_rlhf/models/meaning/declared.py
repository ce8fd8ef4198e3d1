"""What the frameworks declare, and their defaults: ``declared.json``, read once.

``python -m tests.reference.declared --write`` makes it of the installed packages.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

Values = Mapping[str, object]


@cache
def _snapshot() -> dict[str, Any]:
    text = (files(__package__) / "declared.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


@cache
def arguments() -> Values:
    """Megatron's arguments and fields of its ``TransformerConfig``, with their defaults; an argument's is the user's."""
    found: dict[str, object] = {}
    for classes in _newest_first("megatron-core"):
        found = {**found, **classes["MLATransformerConfig"], **classes["TransformerConfig"]}
    for declared in _newest_first("megatron-lm"):
        found.update(declared)
    return found


@cache
def transformer_fields() -> Mapping[str, Values]:
    """By version of megatron-core: the fields of ``TransformerConfig`` and of latent attention's, with their defaults."""
    versions: Mapping[str, Any] = _snapshot()["megatron-core"]
    return {v: {**of["MLATransformerConfig"], **of["TransformerConfig"]} for v, of in versions.items()}


def _newest_first(package: str) -> list[dict[str, Any]]:
    """What the versions of a package declare: the oldest, which the sources of the tables are, counts."""
    versions: Mapping[str, dict[str, Any]] = _snapshot()[package]
    return [versions[version] for version in sorted(versions, key=version, reverse=True)]


def version(text: str) -> tuple[int, ...]:
    """The numbers of a release, which sort."""
    return tuple(int(part) for part in text.split("."))


@cache
def config_fields(model_type: str) -> Values:
    """The fields of a class of transformers, with their defaults, without what all classes have; empty if unknown."""
    found: Values = _snapshot()["transformers"]["classes"].get(model_type, {}).get("fields", {})
    return found


@cache
def common_fields() -> Values:
    """The fields that all classes of transformers have, with their defaults."""
    return config_fields("PreTrainedConfig")


@cache
def rotary_defaults(model_type: str) -> Values:
    """What ``rope_parameters`` are where a ``config.json`` of the class says nothing of them; empty if unknown."""
    found: Values = _snapshot()["transformers"]["classes"].get(model_type, {}).get("rope_parameters", {})
    return found


@cache
def aliases(model_type: str) -> Mapping[str, str]:
    """Other names of fields of a class, each with the one that is stored."""
    found: Mapping[str, str] = _snapshot()["transformers"]["classes"].get(model_type, {}).get("aliases", {})
    return found


def complete(config: Values, model_type: str) -> dict[str, object]:
    """A ``config.json`` with what its class fills in where it says nothing; None that is said stays None.

    Args:
        config: The description.
        model_type: What transformers calls the class; for one that is not in the snapshot nothing is added.
    """
    other = aliases(model_type)
    known_as = {name: {name, other.get(name, name), *(a for a, b in other.items() if b == name)} for name in config}
    said = {name for names in known_as.values() for name in names}
    rope = rotary_defaults(model_type)
    found = {**{n: value for n, value in {**rope, **config_fields(model_type)}.items() if n not in said}, **config}
    silent = not any(config.get(name) for name in ("rope_parameters", "rope_scaling"))
    if silent and rope.get("rope_type", "default") != "default":  # a class that scales positions unless told otherwise
        found["rope_parameters"] = {**rope, **{name: found[name] for name in ("rope_theta",) if name in config}}
    return found
