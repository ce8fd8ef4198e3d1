"""The project's URLs in the metadata of wheel and sdist: of wherever it is published, which no file of it knows.

Whoever builds a release says it (``MCORE_RLHF_URL=https://… python -m build``); else the clone that it is built in knows where it came
from, and an sdist keeps what it was built with. Where nobody knows, there are none: a link that leads nowhere is worse than no link.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_SAFE = re.compile(r"https://[\w.-]+/[\w./~-]+")


class ProjectUrls(MetadataHookInterface):
    """Fills in ``project.urls``."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the URLs, where one is known."""
        root = Path(self.root)
        home = os.environ.get("MCORE_RLHF_URL", "") or _kept(root) or _origin(root)
        home = home.strip().removesuffix("/").removesuffix(".git")
        if not _SAFE.fullmatch(home):  # a local path, or one with a password in it
            return
        files = f"{home}/blob/main"
        metadata["urls"] = {
            "Homepage": home,
            "Documentation": f"{files}/docs/README.md",
            "Source": home,
            "Issues": f"{home}/issues",
            "Changelog": f"{files}/CHANGELOG.md",
        }


def _kept(root: Path) -> str:
    """What an sdist was built with."""
    about = root / "PKG-INFO"
    lines = about.read_text(encoding="utf-8").splitlines() if about.is_file() else []
    return next((line.partition(", ")[2] for line in lines if line.startswith("Project-URL: Homepage, ")), "")


def _origin(root: Path) -> str:
    try:
        command = ["git", "-C", str(root), "config", "--get", "remote.origin.url"]
        return (
            subprocess.run(command, capture_output=True, text=True, check=False).stdout
            if (root / ".git").exists()
            else ""
        )
    except OSError:
        return ""


def get_metadata_hook() -> type[MetadataHookInterface]:
    """What hatchling looks for."""
    return ProjectUrls
