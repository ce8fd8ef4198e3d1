"""The configuration of a trainer, as it lies in a file: YAML (hydra's too), JSON, TOML, or arguments as they are typed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from itertools import takewhile
from pathlib import Path

from mcore_rlhf.core.yaml_text import MAX_NBYTES, check_yaml, wrong_yaml
from mcore_rlhf.errors import Unsupported, UsageError
from mcore_rlhf.storage import reading

from .resuming import Settings

_ARGUMENTS = re.compile(r"(?:\S+\s+)*?--[A-Za-z]")
_OVERRIDE = re.compile(r"\+{0,2}([\w./@-]+)=(.*)")


def read_settings(path: Path) -> Settings:
    """What a file says.

    Args:
        path: It; ``.json``, ``.toml``, or else YAML, or a text of ``--flag value`` and ``key=value``.

    Raises:
        UsageError: It cannot be read, or is none of these.
        Unsupported: It is TOML, and this Python is older than 3.11.
    """
    try:
        text = reading.read_text(path, MAX_NBYTES)
        found = _parsed(path, text)
    except OSError as error:
        raise UsageError(f"{path}: cannot read the configuration: {error.strerror or error}") from None
    except ValueError as error:
        raise UsageError(f"{path}: the configuration cannot be understood: {error}") from None
    if isinstance(found, list) and all(isinstance(one, str) for one in found):
        found = _of_words(found)
    if not isinstance(found, Mapping):
        raise UsageError(
            f"{path}: expected keys and values, found {type(found).__name__}\nGive the file that the trainer was given."
        )
    return Settings(dict(_flat(found)))


def _parsed(path: Path, text: str) -> object:
    """The values of a text, by its file's ending and how it begins."""
    if path.suffix == ".json":
        return reading.parse_json(text)
    if path.suffix == ".toml":
        return _toml(path, text)
    if path.suffix not in (".yaml", ".yml"):  # where a text may have dashes in it
        lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
        if path.suffix == ".sh" or _ARGUMENTS.match(lines.strip()):
            return _of_words(_words(lines))
        words = lines.split()
        if words and all(map(_OVERRIDE.fullmatch, words)):
            return _of_words(words)
    import yaml

    try:
        check_yaml(text)
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"no valid YAML: {wrong_yaml(error)}") from None


def _toml(path: Path, text: str) -> object:
    try:
        tomllib = import_module("tomllib")
    except ModuleNotFoundError:
        raise Unsupported(f"{path}: TOML is read by Python 3.11 and later\nGive the same as YAML or JSON.") from None
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _words(script: str) -> Iterator[str]:
    """The words of a shell's lines, each line's end among them; what is behind ``#`` is none, and a line goes on behind a backslash.

    A word that stands alone in its line is the value of the flag before it, as in files of arguments: its line does not end before it.
    """
    lexer = shlex.shlex(script.replace("\\\n", " ").replace("\n", " \n "), posix=True)
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    line: list[str] = []
    for word in (*lexer, "\n"):
        line.append(word)
        if word == "\n":
            words = list(takewhile(lambda one: not one.startswith("#"), line[:-1]))
            yield from words if len(words) == 1 else ["\n", *words]
            line = []


_ENDS = frozenset({"\n", "(", ")", ";", "&", "&&", "|", "||", "done", "fi", "wait"})
"""What is no value of the flag before it, but ends its list, or its command."""


def _of_words(words: Iterable[str]) -> dict[str, object]:
    """Arguments: ``--flag``, ``--flag value …``, ``--flag=value``, ``key=value``."""
    found: dict[str, object] = {}
    flag = ""
    for word in words:
        if word in _ENDS:
            flag = ""
        elif word.startswith("--"):
            flag, _, value = word[2:].partition("=")
            found[flag] = value or True
        elif (match := _OVERRIDE.fullmatch(word)) is not None:
            flag, found[match[1]] = "", None if match[2] == "null" else match[2]  # as Hydra takes it
        elif flag:
            found[flag] = word if found[flag] is True else f"{found[flag]} {word}"
    return found


def _flat(values: Mapping[object, object], above: str = "") -> Iterator[tuple[str, object]]:
    for key, value in values.items():
        name = f"{above}{str(key).replace('-', '_').replace('/', '.')}"
        yield name, value
        if isinstance(value, Mapping):
            yield from _flat(value, f"{name}.")
