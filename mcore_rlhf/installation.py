"""How this installation came about, and so what installs an extra of it, or a newer release: no package index has the project."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.metadata import Distribution
from urllib.parse import unquote, urlsplit

NAME = "mcore_rlhf"


def to_install(extra: str) -> str:
    """The command that installs an extra: from where this installation came, or else the packages that the extra names.

    Args:
        extra: Its name in ``pyproject.toml``.
    """
    where, editable = _origin()
    if where is None:
        return f"pip install {' '.join(shlex.quote(text) for text in _asked_for(extra)) or extra}"
    if "://" in where:
        return f"pip install {shlex.quote(f'{NAME}[{extra}] @ {where}')}"
    return f"pip install {'-e ' if editable else ''}{shlex.quote(f'{where}[{extra}]')}"


def to_upgrade() -> str:
    """What brings a newer release, in words that follow "Upgrade: "."""
    where, _ = _origin()
    if where is None or "://" in where or Path(where).is_file():
        return f"install a newer release of {NAME}, from where this one came"
    return f"bring the checkout {where} up to date, and install it again"


def _origin() -> tuple[str | None, bool]:
    """A checkout's folder, a wheel or a URL to give to pip, if it is there; and whether the installation is an editable one.

    Source: PEP 610, ``direct_url.json``.
    """
    recorded = _recorded()
    url, kind = str(recorded.get("url", "")), recorded.get("dir_info")
    if version := recorded.get("vcs_info"):
        return f"{version['vcs']}+{url}@{version['commit_id']}", False
    if url and not url.startswith("file:"):
        return url, False
    path = Path(unquote(urlsplit(url).path)) if url else Path(__file__).parents[1]
    if isinstance(kind, dict) or not url:
        is_checkout = (path / "pyproject.toml").is_file()
        return (str(path), bool(kind and kind.get("editable"))) if is_checkout else (None, False)
    return (url, False) if path.is_file() else (None, False)


def distribution(name: str) -> Distribution:
    """What is known of an installed package; importing what tells it takes time that only a hint is worth."""
    from importlib.metadata import distribution as installed

    return installed(name)


def _recorded() -> dict[str, Any]:
    """What pip noted of where the package came from; nothing where it did not, or is not installed."""
    try:
        found = json.loads(distribution(NAME).read_text("direct_url.json") or "{}")
    except (ModuleNotFoundError, ValueError):  # not installed, or not JSON
        return {}
    return found if isinstance(found, dict) else {}


def _asked_for(extra: str) -> list[str]:
    """The packages of an extra, and of the extras that it takes in."""
    try:
        lines = distribution(NAME).requires or []
    except ModuleNotFoundError:
        return []
    found: list[str] = []
    for line in lines:
        requirement, _, marker = line.partition(";")
        if not re.search(rf"""extra\s*==\s*['"]{re.escape(extra)}['"]""", marker):
            continue
        inner = re.match(rf"{NAME.replace('_', '[-_]')}\[([\w,-]+)\]", requirement.strip())
        found += [text for one in inner[1].split(",") for text in _asked_for(one)] if inner else [requirement.strip()]
    return found
