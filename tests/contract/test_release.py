"""What a release says of itself is said alike everywhere."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from mcore_rlhf import __version__

PROJECT = Path(__file__).resolve().parents[2]


def test_version_and_date_are_those_of_the_changelog() -> None:
    text = (PROJECT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## \[(.+?)\](?: - (\d{4}-\d{2}-\d{2}))?$", text, re.MULTILINE)
    assert headings[0] == ("Unreleased", "")
    assert all(date for _, date in headings[1:])
    citation = yaml.safe_load((PROJECT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (citation["version"], str(citation["date-released"])) == headings[1] == (__version__, headings[1][1])
