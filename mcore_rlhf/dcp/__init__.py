"""torch's own doors: ``dcp.load(…, storage_reader=AnyReader(PATH))`` and ``dcp.save(…, storage_writer=Writer(PATH))``.

:class:`AnyReader` fills a state dict out of a checkpoint of any format; :class:`Writer` has a folder appear as a whole, with checksums.
"""

from __future__ import annotations

from .reader import AnyReader
from .writer import Writer, clean_up

__all__ = ["AnyReader", "Writer", "clean_up"]
