"""The file itself: a template with style and script, and one block of JSON in it."""

from __future__ import annotations

import html
import json
import time
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, TypedDict

from mcore_rlhf.errors import UsageError
from mcore_rlhf.storage.manifest import provenance
from mcore_rlhf.storage.paths import storage_error
from mcore_rlhf.storage.publish import make_folder_of, replace_text

from .saved import SavedRole
from .shards import ShardMap
from .timeline import RunFacts

_MARK = '<meta name="generator" content="mcore-rlhf report">'
_LOOKED_AT = 4096
_SCRIPTS = ("base.js", "shards.js", "run.js", "metrics.js", "findings.js", "page.js")
"""Parts of the page's script, in the order in which they stand in it; the last puts the page together."""

Facts = Mapping[str, Any]
"""What another command prints with ``--json``."""


Origin = Literal["conversion", "run", "adoption", "unknown"]
"""What wrote a checkpoint: a conversion, a training run, ``adopt`` (files of another trainer); or its manifest does not say."""


class Model(TypedDict, total=False):
    """One model: ``facts`` as of ``inspect`` (with ``file_count`` in place of ``files``), its ``shards``, its ``verdict`` as of
    ``verify``; or the ``error`` that kept it from being opened.
    """

    facts: Facts
    shards: ShardMap
    verdict: Facts
    error: Facts


class ManifestConversion(TypedDict):
    """What a converted checkpoint's manifest says: its ``source``, whether it is ``lossless``, ``lines`` and ``accounts`` by role."""

    source: str
    lossless: bool | None
    lines: dict[str, Any]
    accounts: dict[str, Any]


class PageSubject(TypedDict):
    """A step or a lone checkpoint; ``models`` by role, ``saved`` roles that no reader knows as models, ``metrics`` of the step;
    ``manifest``, ``origin`` and ``conversion`` null where there are none.
    """

    label: str
    path: str
    models: dict[str, Model]
    manifest: Facts | None
    origin: Origin | None
    conversion: ManifestConversion | None
    saved: list[SavedRole]
    metrics: dict[str, float]
    step_verdict: Facts | None


class Compared(TypedDict):
    """``diff --json``, model by model, each with its ``heat`` map; ``others`` are the files beside the models."""

    equal: bool
    models: Mapping[str, Facts]
    others: dict[str, str]


class Page(TypedDict):
    """Everything that stands on a page; what is null has no section."""

    kind: str
    title: str
    subtitle: str
    problems: list[str]
    subjects: list[PageSubject]
    run: RunFacts | None
    diff: Compared | None
    resume_check: Facts | None
    made: dict[str, str]


def made() -> dict[str, str]:
    """Who makes a page, and when."""
    own = provenance()
    return {"mcore_rlhf": str(own["mcore_rlhf"]), "time": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())}


def rendered(title: str, data: str) -> str:
    """A page as text.

    Args:
        title: What stands in the browser's tab.
        data: The :class:`Page` as JSON.
    """
    # In a script's text only "<" could end it; as an escape it is the same JSON.
    parts = {"TITLE": html.escape(title), "DATA": data.replace("<", "\\u003c")}
    text = _text("page.html").replace("@CSS@", _text("page.css")).replace("@JS@", "".join(map(_text, _SCRIPTS)))
    before, _, rest = text.partition("@TITLE@")
    middle, _, after = rest.partition("@DATA@")
    return f"{before}{parts['TITLE']}{middle}{parts['DATA']}{after}"


def write(path: Path, title: str, page: Any) -> None:
    """Write a page, or a new one over an older one.

    Args:
        path: The file.
        title: What stands in the browser's tab.
        page: A :class:`Page` as JSON can hold it.

    Raises:
        UsageError: Something that is no page of ours is there.
        StorageError: The file system refused.
    """
    if path.is_dir() or (path.exists() and not _is_ours(path)):
        raise UsageError(f"{path}: exists, and is no page of mcore-rlhf report\nGive another name with -o.")
    text = json.dumps(page, allow_nan=False, separators=(",", ":"))
    make_folder_of(path)
    replace_text(path, rendered(title, text), fsync=False)


def _is_ours(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            return _MARK.encode() in file.read(_LOOKED_AT)
    except OSError as error:
        raise storage_error(error, path, "read") from error


def _text(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")
