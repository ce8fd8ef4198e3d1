"""Objects that the scan of a pickle passes over: it is as strict about them as about those that it goes through."""

from __future__ import annotations

import pickle
import random
from struct import error as StructError
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.checkpoint import metadata as m
from torch.distributed.checkpoint.filesystem import _StorageInfo

from mcore_rlhf.errors import CheckpointError
from mcore_rlhf.storage.dcp.writer import TensorItem, dcp_metadata
from mcore_rlhf.storage.pickle_kinds import Repeated
from mcore_rlhf.storage.pickle_scan import _Scan, scan
from tests.unit.storage.test_dcp_many import FLOAT
from tests.unit.storage.test_hostile_pickles import genuine


def described(rng: random.Random, protocol: int) -> bytes:
    """A ``.metadata`` whose numbers have all lengths, with tensors of any number of dimensions."""
    tensors, places = {}, {}
    for number in range(6):
        sizes = torch.Size(rng.choices([0, 5, 300, 70_000], k=number))
        parts = [torch.Size(rng.randrange(1 << rng.choice([4, 12, 40])) for _ in sizes) for _ in range(40)]
        properties = m.TensorProperties(dtype=torch.bfloat16)
        tensors[f"w{number}"] = m.TensorStorageMetadata(
            properties, sizes, [m.ChunkStorageMetadata(offset, sizes) for offset in parts]
        )
        for at, offset in enumerate(parts):
            where = _StorageInfo(f"__{at % 16}_0.distcp", rng.randrange(1 << rng.choice([8, 30, 50])), 1 << at % 40)
            places[m.MetadataIndex(f"w{number}", rng.choice([offset, torch.Size(offset)]), at)] = where
    return pickle.dumps(m.Metadata(tensors, None, places), protocol)


class _Nothing(Repeated):
    """Every object is gone through."""

    def ended(self, at: int, heavy: int) -> int:
        return at


def outcome(data: bytes) -> Any:
    """What becomes of a pickle: what is in the memo at its end, or why it is refused."""
    found = _Scan(data)
    try:
        found.run()
    except (CheckpointError, IndexError, StructError) as error:
        return type(error), str(error)
    return found.memo, found.stack, found.marks, found.heavy, found.long_ints


def same(data: bytes) -> Any:
    quick = outcome(data)
    with patch("mcore_rlhf.storage.pickle_scan.Repeated", _Nothing):
        assert quick == outcome(data)
    return quick


def test_what_is_passed_over_is_what_would_be_gone_through() -> None:
    """Genuine pickles, and such with changes here and there: the same memo, or the same refusal."""
    seed = random.SystemRandom().randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    ours = dcp_metadata({"w": (400, 3)}, {"f": [TensorItem("w", FLOAT, (row, 0), (1, 3)) for row in range(400)]})
    good = [ours, *(described(rng, protocol) for protocol in (2, 3, 4, 5)), *genuine()[:20]]
    for data in good:
        assert isinstance(same(data)[0], list)
    refused = 0
    for data in good[:5] * 60:
        forged = bytearray(data)
        for _ in range(rng.randint(1, 4)):
            forged[rng.randrange(len(forged))] = rng.choice([rng.randrange(256), *b"hjKMJ\x94\x85R)u"])
        refused += isinstance(same(bytes(forged))[0], type)
    assert refused > 50


def test_chunks_are_passed_over() -> None:
    """Nine in ten objects, of those that a trainer of ordinary shapes has: else a file of 100 MB takes five times as long."""
    tensors, places = {}, {}
    for number in range(40):
        parts = [m.ChunkStorageMetadata(torch.Size((16 * row, 0)), torch.Size((16, 64))) for row in range(100)]
        tensors[f"w{number}"] = m.TensorStorageMetadata(m.TensorProperties(), torch.Size((1600, 64)), parts)
        for row, part in enumerate(parts):
            places[m.MetadataIndex(f"w{number}", part.offsets)] = _StorageInfo(f"__{row}_0.distcp", number << 12, 4096)
    with patch.object(Repeated, "ended", autospec=True, side_effect=Repeated.ended) as ended:
        scan(pickle.dumps(m.Metadata(tensors, None, places), 4))
    assert ended.call_count < 3 * 40 * 100 / 10


START = b"\x80\x04](cmegatron.core\nX\n\x94\x8c\x01a\x94"
OBJECT = b"h\x00)\x81}(h\x01%sub"


@pytest.mark.parametrize("value", [b"j\x00\x01\x00\x00", b"h\x02", b"j\x01\x00\x00"], ids=["far", "near", "cut"])
def test_a_reference_to_nothing_is_refused_behind_many_that_lead_somewhere(value: bytes) -> None:
    many = START + OBJECT % b"j\x01\x00\x00\x00" * 50
    assert same(many + b"e.")[0] == [1, 1]
    assert isinstance(same(many + OBJECT % value + b"e.")[0], type)
