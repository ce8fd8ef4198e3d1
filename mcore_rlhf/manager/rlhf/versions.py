"""The version of ``rlhf_state.json``: what is refused, and how an older one is brought up to date."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ...errors import Corrupt, NotACheckpoint, Unsupported
from .plain import shorten

FORMAT = "mcore_rlhf.rlhf_state"
VERSION = 1

Document = dict[str, object]

UPGRADES: Mapping[int, Callable[[Document], Document]] = {}
"""By version: what turns a document of that version into one of the next. A change of the schema raises ``VERSION``
and adds one entry here, ``{1: _from_1_to_2}``; nothing else ever reads an old document. The functions see the JSON
as it stands in the file, with marked values not yet decoded, and return a new dict.
"""


def up_to_date(document: object, where: str) -> Document:
    """The document, of this release's version.

    Args:
        document: What the file holds.
        where: Its path, for messages.

    Raises:
        NotACheckpoint: It is not an RLHF state.
        Unsupported: A newer release wrote it.
        Corrupt: Its version is no version.
    """
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise NotACheckpoint(f'{where}: not an RLHF state (it has no "format": "{FORMAT}").')
    version = document.get("version")
    if type(version) is not int or version < 1:
        raise Corrupt(f"{where}: version: expected a whole number from 1, found {shorten(version)}.")
    if version > VERSION:
        raise Unsupported(
            f"{where}: version {version} of the RLHF state; this release reads up to {VERSION}.\n"
            "Upgrade: pip install --upgrade mcore_rlhf"
        )
    for older in range(version, VERSION):
        document = UPGRADES[older](document) | {"version": older + 1}
    return document
