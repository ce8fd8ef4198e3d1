"""The containers that are known: the one list of kinds of files that tensors lie in.

A newcomer is a class, see :class:`~.record_file.Container`, and a line here. Whoever writes a file names the class; whoever reads a
file of a model asks :func:`open_tensors`.
"""

from __future__ import annotations

from collections.abc import Collection

from ..errors import Unsupported
from .dcp.writer import Distcp
from .paths import ReadablePath
from .pt import Pt
from .record_file import Container, OpenedFile, Raw
from .safetensors import Safetensors

CONTAINERS: tuple[type[Container], ...] = (Safetensors, Pt, Distcp, Raw)
"""Those that know a file by its name first; no two have a suffix in common."""


def container_of(name: str) -> type[Container]:
    """The container of that name.

    Raises:
        ValueError: There is none.
    """
    for container in CONTAINERS:
        if container.name == name:
            return container
    raise ValueError(f"no kind of file is called {name!r:.60}")


def open_tensors(root: ReadablePath, file: str, stubs: Collection[str] = ()) -> OpenedFile:
    """Open a file of tensors, whatever its kind. No byte of a tensor is read, and nothing of it is run.

    Args:
        root: The checkpoint's folder.
        file: Path relative to it, with ``/``.
        stubs: Full names of classes that a pickle in it may name.

    Raises:
        Unsupported: No container has files of such a name.
        CheckpointError: It is missing or damaged.
    """
    for container in CONTAINERS:
        if file.endswith(container.suffixes):
            return container.open(root, file, stubs)
    known = ", ".join(suffix for container in CONTAINERS for suffix in container.suffixes)
    raise Unsupported(f"{root / file}: nobody knows files of this name; known are {known}")
