"""What users call a checkpoint: a path of this machine, a URL of an object store, or a path that a store gave."""

from __future__ import annotations

import os

from ..errors import UsageError
from .paths import ReadablePath, local_path, url_in


def checkpoint_path(given: str | os.PathLike[str] | ReadablePath) -> ReadablePath:
    """A path to read from. The one place that knows which there are.

    Args:
        given: What a user named, or what a store gave.

    Raises:
        UsageError: It is a URL of a kind that nobody reads, or of a store that cannot be opened.
    """
    if not isinstance(given, str | os.PathLike):
        return given
    url = url_in(given)
    if url is None or url.lower().startswith("file:"):
        return local_path(given)
    from .objects import SCHEMES, open_url  # a store is seldom meant

    if url.partition(":")[0] in SCHEMES:
        return open_url(url)
    if url.startswith("hf:"):
        from .hub import open_hub

        return open_hub(url)
    raise UsageError(
        f"{url}: is a URL of a kind that is not read; those that are: {', '.join(f'{scheme}://' for scheme in SCHEMES)}, hf://, file://\n"
        "Copy it to a local folder first, or mount it."
    )
