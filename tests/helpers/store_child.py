"""A conversion in a process of its own, which can be killed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any


def convert_there(
    environment: Mapping[str, str], source: str, target: str, plain: bool, options: dict[str, Any]
) -> None:
    """Convert; the server's address stands in the environment."""
    os.environ.update(environment)
    from mcore_rlhf.convert import ConvertOptions, convert
    from mcore_rlhf.families.options import WriteOptions
    from mcore_rlhf.storage.settings import StoreSettings, stores_with

    write = WriteOptions(**options.pop("write", {}))
    with stores_with(StoreSettings(plain=plain)):
        convert(source, target, ConvertOptions(to="hf", write=write, fsync=False, workers=1, **options))  # type: ignore[arg-type]
