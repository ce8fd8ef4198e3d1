"""The rows of the table of options that are about object stores; see :mod:`.options`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_rlhf.storage.paths import local_path
from mcore_rlhf.storage.settings import StoreSettings

from .option_types import COUNT, FOLDER, READING, STORES, OptionType, one_of, option

_EVERYWHERE = (*READING, "steps", "prune", "adopt")


def _pairs(value: Any) -> object:
    """``region=eu-west-1``, one or several."""
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list | tuple):
        raise ValueError("should be KEY=VALUE, or a list of them")
    for item in listed:
        if not isinstance(item, str) or not all(item.partition("=")[::2]):
            raise ValueError(f"should be KEY=VALUE, found {item!r}")
    return tuple(listed)


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """How object stores are asked."""

    store_option: tuple[str, ...] = option(
        OptionType(_pairs, metavar="KEY=VALUE", repeated=True),
        "A setting of the object store: endpoint, region, …; may be repeated.",
        (),
        group=STORES,
        more="By obstore's names; it wins over the environment's variables.",
        commands=_EVERYWHERE,
    )
    connections: int = option(
        COUNT, "Requests at a time, of one store.", 16, group=STORES, commands=_EVERYWHERE, default="16"
    )
    staging: str | None = option(
        FOLDER,
        "Local folder for files that cannot be sent as they are made.",
        group=STORES,
        more="None of the known formats has such files; a container of your own may.",
        commands=("convert",),
    )
    layout: str = option(
        one_of("prefix", "plain"),
        "Where files lie in a store: below the prefix that the manifest names, or under plain names.",
        "prefix",
        group=STORES,
        more="`plain` is for other loaders: the store copies every file once it is published, and the manifest says when all are there.",
        commands=("convert",),
        default="prefix",
    )

    def settings(self) -> StoreSettings:
        """What the library takes."""
        pairs = (item.partition("=") for item in self.store_option)
        staging = None if self.staging is None else Path(os.path.abspath(local_path(self.staging).expanduser()))
        return StoreSettings({key: value for key, _, value in pairs}, self.connections, staging, self.layout == "plain")
