"""A run's YAML, with what the command line overrides, and its ``${…}`` filled in by OmegaConf."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mcore_rlhf.core.yaml_text import MAX_NBYTES, check_yaml
from mcore_rlhf.errors import Problems, UsageError, shown
from mcore_rlhf.storage import regular
from mcore_rlhf.storage.paths import storage_error

from .errors import Key, Origin, lines_of, text

_OVERRIDE = re.compile(r"([A-Za-z_]\w*(?:\.\w+|\[\d+\])*)=(.*)", re.DOTALL)
_REFERENCE = re.compile(r"\$\{\s*([\w.]+)\s*\}")


def read_source(source: Path | Mapping[str, Any], overrides: Sequence[str]) -> tuple[dict[str, Any], Origin]:
    """The values of a configuration, and where each of them was written.

    Args:
        source: A YAML file, or the values.
        overrides: ``a.b=c``, with the value in YAML; the last one wins.

    Raises:
        UsageError: It cannot be parsed, or ``${…}`` leads nowhere; all such keys are named.
        StorageError: The file cannot be read.
    """
    config, origin = _opened(source)
    given = _checked(overrides)
    try:
        merged = OmegaConf.merge(config, OmegaConf.from_dotlist(list(overrides)))
    except (OmegaConfBaseException, yaml.YAMLError, ValueError, TypeError, IndexError) as error:
        raise UsageError(f"overrides {', '.join(overrides)}: {_first_line(error)}") from None
    if not isinstance(merged, DictConfig):
        raise UsageError(f"{origin.name}: expected sections such as 'runner:', found a list")
    origin = Origin(origin.name, origin.lines, given)
    problems = Problems()
    for key, parent, name in _leaves(merged, ()):
        _check(key, parent, name, origin, problems)
    problems.raise_if_any()
    return _plain(merged), origin


def _opened(source: Path | Mapping[str, Any]) -> tuple[DictConfig, Origin]:
    if isinstance(source, Mapping):
        return _created(dict(source), "the configuration"), Origin("the configuration")
    name = str(source)
    try:
        document = regular.read_text(source, MAX_NBYTES)
    except OSError as error:
        raise storage_error(error, source, "read", "the run's configuration") from error
    except UnicodeDecodeError:
        raise UsageError(f"{name}: is not a YAML file: it is not UTF-8 text") from None
    return _created(document, name), Origin(name, lines_of(document))


def _created(content: dict[str, Any] | str, name: str) -> DictConfig:
    try:
        if isinstance(content, str):
            check_yaml(content)
        config = OmegaConf.create(content)
    except yaml.YAMLError as error:
        raise UsageError(f"{name}: is not valid YAML: {error}") from None
    except (OmegaConfBaseException, ValueError) as error:
        found = f"{getattr(error, 'full_key', None) or ''}: {_first_line(error)}"
        raise UsageError(f"{name}: {found.removeprefix(': ')}") from None
    if not isinstance(config, DictConfig) or not config:
        raise UsageError(f"{name}: expected sections such as 'runner:', found {str(content).strip()[:40]!r}")
    return config


def _checked(overrides: Sequence[str]) -> frozenset[str]:
    problems, names = Problems(), set[str]()
    for override in overrides:
        match = _OVERRIDE.fullmatch(override)
        if match is None:
            advice = "Write runner.save_interval=50: keys as in the file, without + and ~."
            problems.add(UsageError, f"override {shown(override)}: expected key=value", advice)
        else:
            names.add(match[1])
            _check_override(override, match[2], problems)
    problems.raise_if_any()
    return frozenset(names)


def _check_override(override: str, value: str, problems: Problems) -> None:
    try:
        check_yaml(value)
    except yaml.YAMLError as error:
        problems.add(UsageError, f"override {shown(override)}: {error}")


def _leaves(node: DictConfig | ListConfig, at: Key) -> Iterator[tuple[Key, DictConfig | ListConfig, Any]]:
    """Every value and every reference, without following references."""
    if node._is_none() or node._is_missing():
        return
    names: list[Any] = list(range(len(node))) if isinstance(node, ListConfig) else list(node.keys())
    for name in names:
        key = (*at, name if isinstance(name, int) and isinstance(node, ListConfig) else str(name))
        child = node._get_node(name)
        if isinstance(child, (DictConfig, ListConfig)) and not OmegaConf.is_interpolation(node, name):
            yield from _leaves(child, key)
        else:
            yield key, node, name


def _check(key: Key, parent: DictConfig | ListConfig, name: Any, origin: Origin, problems: Problems) -> None:
    if OmegaConf.is_missing(parent, name):
        problems.add(UsageError, f"{origin.where(key)}: has no value yet (???)", "Set it in the file, or by key=value.")
        return
    try:
        parent[name]
    except RecursionError:
        problems.add(UsageError, f"{origin.where(key)}: refers to itself: {_raw(parent, name)}")
    except OmegaConfBaseException as error:
        said = f"cannot fill in {_raw(parent, name)}: {_first_line(error)}{_near_miss(parent, _raw(parent, name))}"
        problems.add(UsageError, f"{origin.where(key)}: {said}", _advice(error))


def _raw(parent: DictConfig | ListConfig, name: Any) -> str:
    node = parent._get_node(name)
    return str(getattr(node, "_value", lambda: "")())


def _near_miss(parent: DictConfig | ListConfig, raw: str) -> str:
    known = [text(key) for key, _, _ in _leaves(parent._get_root(), ())]  # type: ignore[arg-type]
    for wanted in _REFERENCE.findall(raw):
        if wanted not in known and (close := difflib.get_close_matches(wanted, known, n=1)):
            return f"; did you mean ${{{close[0]}}}?"
    return ""


def _advice(error: Exception) -> str:
    if "Unsupported interpolation type" in str(error):
        return "Only OmegaConf's own resolvers are there (oc.env, …): write the value itself."
    return (
        "Set it (export NAME=…), or give a default: ${oc.env:NAME,value}"
        if "Environment variable" in str(error)
        else ""
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _plain(config: DictConfig) -> dict[str, Any]:
    plain = OmegaConf.to_container(config, resolve=True)
    return {str(name): value for name, value in plain.items()} if isinstance(plain, dict) else {}
