"""What a catalogue promises beyond checksums: tensors are whole, replicas are equal, masters agree with parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from mcore_rlhf.core.box import row_major
from mcore_rlhf.core.cast import Words, differing_after_rounding
from mcore_rlhf.core.catalog import Catalog, Chunk, Record, TensorEntry
from mcore_rlhf.core.execute import SourceBytes
from mcore_rlhf.core.names import MASTER, PARAM, TensorName
from mcore_rlhf.core.plan import Copy, check_tiles, coalesced
from mcore_rlhf.errors import Corrupt, CoverageError, Problems
from mcore_rlhf.storage.checksum import crc32

from .ledger import Ledger
from .reading import bands, values

Task = Callable[[], None]
_DAMAGED = "Either file is damaged or from another step."


@dataclass(slots=True)
class Audit:
    """Makes the tasks that check a catalogue.

    Args:
        catalog: What to check.
        source: Where its bytes are.
        ledger: Hears of contiguous ranges that the audit is the first to read, so that they are not read again.
        problems: Told of everything that is wrong.
        progress: Called with the number of bytes just read.
        distrust: Why masters may disagree with parameters though no byte is damaged; see :class:`~..families.source.Source`.
        unlike: Names of the parameters that are not their masters, rounded, as far as they were compared.
    """

    catalog: Catalog
    source: SourceBytes
    ledger: Ledger
    problems: Problems
    progress: Callable[[int], None] = lambda nbytes: None
    distrust: str = ""
    unlike: set[str] = field(default_factory=set)

    @property
    def advice(self) -> str:
        """What to do where masters and parameters disagree."""
        return f"{self.distrust or _DAMAGED} The weights alone can be converted with --no-optimizer."

    def tasks(self, *, replicas: bool, parity: bool) -> Iterator[Task]:
        """One task per tensor and check.

        Args:
            replicas: Whether copies of the same elements are compared.
            parity: Whether fp32 masters, rounded, must be the parameters.
        """
        for name in self.catalog:
            entry = self.catalog.get(name)
            if entry is None:
                continue
            wrong = check_tiles(entry)
            if wrong is not None:
                self.problems.add(CoverageError, f"{name}: {wrong}")
            if replicas:
                for kept, other in entry.replicas():
                    yield lambda n=name, a=kept, b=other: self._compare_replicas(n, a, b)  # type: ignore[misc]
            if parity and name.state == MASTER:
                yield from self._parity_tasks(name, entry)

    def _parity_tasks(self, name: TensorName, masters: TensorEntry) -> Iterator[Task]:
        params = self.catalog.get(name._replace(state=PARAM))
        stored = params.primary() if params is not None else ()
        by_box = {chunk.box: chunk for chunk in stored}
        for master in masters.primary():
            exact = by_box.get(master.box)
            for param in (
                (exact,) if exact is not None else stored
            ):  # ZeRO cuts masters where it does not cut parameters
                box = master.box.intersect(param.box) if exact is None else master.box
                if box is not None:
                    yield partial(self._compare_master, name, master.narrow(box), param.narrow(box))

    def _compare_replicas(self, name: TensorName, kept: Chunk, other: Chunk) -> None:
        differing = 0
        for copy in bands(coalesced(kept.box.shape, kept, other)):
            with values(self.source, copy.source, copy.source_start, copy.shape, copy.source_strides) as a:
                self._tell(copy.source, copy.source_start, copy, copy.source_strides, a)
                with values(self.source, copy.target, copy.target_start, copy.shape, copy.target_strides) as b:
                    self._tell(copy.target, copy.target_start, copy, copy.target_strides, b)
                    if not np.array_equal(a, b):
                        differing += int((a != b).sum())
        if differing:
            self.problems.add(
                Corrupt,
                f"{name}: {differing} elements of {kept.box} differ between the copies in {kept.record.file} and {other.record.file}",
                "Replicas must be equal; --trust-replicas takes the first copy without comparing.",
            )

    def _compare_master(self, name: TensorName, master: Chunk, param: Chunk) -> None:
        differing = 0
        for copy in bands(coalesced(master.box.shape, master, param)):
            with (
                values(self.source, copy.source, copy.source_start, copy.shape, copy.source_strides) as high,
                values(self.source, copy.target, copy.target_start, copy.shape, copy.target_strides) as low,
            ):
                differing += differing_after_rounding(high, low, copy.source.dtype, copy.target.dtype)
        if differing:
            self.unlike.add(name.param)
            self.problems.add(
                Corrupt,
                f"{name._replace(state=PARAM)}: {differing} elements of {master.box} in {param.record.file} are not their fp32 master "
                f"in {master.record.file}, rounded",
                self.advice,
            )

    def _tell(self, record: Record, start: int, copy: Copy, strides: tuple[int, ...], data: Words) -> None:
        """Let the ledger know the checksum of a contiguous range, if it has not seen it."""
        itemsize = record.dtype.itemsize
        offset, nbytes = start * itemsize, copy.numel * itemsize
        if strides == row_major(copy.shape) and self.ledger.wants(record, offset, nbytes):
            self.ledger.saw(record, offset, nbytes, crc32(np.ascontiguousarray(data).data.cast("B")))
            self.progress(nbytes)
