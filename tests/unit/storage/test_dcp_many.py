"""DCP folders with very many items: each is checked as if it were the only one, and nothing is read before it is wanted."""

from __future__ import annotations

import random
import shutil
import time
import zlib
from collections.abc import Iterator
from itertools import combinations, pairwise, product
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from mcore_rlhf.core.catalog import Box, dtype_of
from mcore_rlhf.errors import CheckpointError, Corrupt
from mcore_rlhf.storage.dcp import METADATA_FILE
from mcore_rlhf.storage.dcp.checks import overlap
from mcore_rlhf.storage.dcp.folder import DcpFolder
from mcore_rlhf.storage.dcp.items import DcpItem as OpenItem
from mcore_rlhf.storage.dcp.items import ItemKinds
from mcore_rlhf.storage.dcp.writer import Distcp, Item, ObjectItem, TensorItem, dcp_metadata, saved
from mcore_rlhf.storage.reading import LocalFile, opened

FLOAT = dtype_of("float32")
FILE = "__0_0.distcp"
GOLDEN = Path(__file__).parents[2] / "goldens" / "dcp" / "fsdp2_ws3" / "actor" / "dcp_checkpoint"
COUNT = 30


def written(folder: Path, rows: int = 2) -> Path:
    """A folder of many equal items: tensors of ``rows`` x 3 floats, and objects."""
    tensors = [TensorItem(f"w{number}", FLOAT, (0, 0), (rows, 3)) for number in range(COUNT)]
    items: list[Item] = [*tensors, *(ObjectItem(f"o{number}", saved([None], f"o{number}")) for number in range(COUNT))]
    folder.mkdir(exist_ok=True)
    (folder / METADATA_FILE).write_bytes(dcp_metadata({item.fqn: item.shape for item in tensors}, {FILE: items}))
    with Distcp(items).create(folder / FILE) as writer:
        crcs = {}
        for number, item in enumerate(tensors):
            data = torch.full(item.shape, float(number)).numpy().tobytes()
            writer.write(item.key, 0, memoryview(data))
            crcs[item.key] = zlib.crc32(data)
        writer.finish(crcs)
    return folder


def looked(folder: Path) -> None:
    for file in DcpFolder.open(folder, folder).files():
        tuple(file.records)


def cut(whole: Box, rng: random.Random) -> Iterator[Box]:
    """A box cut from edge to edge, again and again."""
    dim = rng.randrange(len(whole.shape))
    if whole.numel == 1 or rng.random() < 0.15 or whole.shape[dim] < 2:
        yield whole
        return
    at = sorted({0, whole.shape[dim], rng.randrange(1, whole.shape[dim])})
    for start, stop in pairwise(at):
        offset, shape = list(whole.offset), list(whole.shape)
        offset[dim], shape[dim] = offset[dim] + start, stop - start
        yield from cut(Box(tuple(offset), tuple(shape)), rng)


def test_boxes_overlap_as_comparing_all_of_them_says() -> None:
    """Tilings that were cut, and those with a box moved, grown or doubled; pinwheels, which nothing cuts from edge to edge."""
    seed = random.SystemRandom().randrange(1 << 30)
    print("seed", seed)
    rng, met = random.Random(seed), 0
    for _ in range(300):
        held = list(cut(Box((0,) * 3, (6, 5, 4)), rng))
        for number in rng.sample(range(len(held)), min(len(held), rng.randrange(3))):
            box = held[number]
            held[number] = Box(tuple(a + rng.randint(0, 1) for a in box.offset), tuple(n + 1 for n in box.shape))
        rng.shuffle(held)
        expected = any(a.intersect(b) is not None for a, b in combinations(held, 2))
        found = overlap(held)
        assert (found is not None) == expected
        assert found is None or found[0].intersect(found[1]) is not None
        met += expected
    assert 30 < met < 270
    wheel = [
        Box((0, 0), (1, 2)),
        Box((0, 2), (2, 1)),
        Box((2, 1), (1, 2)),
        Box((1, 0), (2, 1)),
        Box((1, 1), (1, 1)),
    ]
    assert overlap(wheel) is None
    assert overlap([*wheel, Box((1, 1), (1, 1))]) is not None
    assert overlap([Box((), ()), Box((), ())]) is not None


def test_boxes_of_a_stack_of_layers_and_experts_are_not_compared_each_with_each() -> None:
    held = [Box((*at, half), (1, 1, 8)) for at in product(range(94), range(128)) for half in (0, 8)]
    start = time.process_time()
    assert overlap(held) is None
    assert overlap([*held, Box((93, 127, 15), (1, 1, 1))]) is not None
    assert time.process_time() - start < 2  # 60 s, when each row was compared


def test_nothing_is_read_before_checksums_are_asked_for(tmp_path: Path) -> None:
    folder = written(tmp_path)
    with patch.object(LocalFile, "read", side_effect=AssertionError("read")):
        files = DcpFolder.open(folder, folder).files()
        assert [(file.path, file.nbytes) for file in files][1] == (FILE, (folder / FILE).stat().st_size)
    records = files[1].records
    assert len(records) == 2 * COUNT
    assert records[:2] == tuple(records)[:2]
    assert records[0] == next(iter(records))


def test_items_that_look_alike_are_taken_apart_once(tmp_path: Path) -> None:
    for rows in (2, 500):  # short ones are read as a whole, long ones at both ends
        folder = written(tmp_path / str(rows), rows)
        opened = DcpFolder.open(folder, folder)
        with patch.object(OpenItem, "directory", autospec=True, side_effect=OpenItem.directory) as directory:
            parts = {fqn: part.record for fqn, tensor in opened.tensors.items() for part in tensor.chunks()}
            assert all(file.records for file in opened.files()[1:])
            assert directory.call_count <= 2
        data = (folder / FILE).read_bytes()
        for number in range(COUNT):
            at = parts[f"w{number}"].byte_offset
            assert torch.frombuffer(bytearray(data[at : at + 4]), dtype=torch.float32).item() == number


@pytest.mark.parametrize("rows", [2, 500])
def test_every_flipped_byte_of_the_last_item_that_looks_like_others_is_found(rows: int, tmp_path: Path) -> None:
    """As it is where the item stands alone: each flip that is found there is found here."""
    folder = written(tmp_path, rows)
    opened = DcpFolder.open(folder, folder)
    path, good = folder / FILE, (folder / FILE).read_bytes()
    place = opened.metadata.places[f"w{COUNT - 1}", (0, 0)]
    data = next(r for file in opened.files() for r in file.records if r[0] == f"w{COUNT - 1}[0,0]")
    ends = [*range(place.offset, data[1]), *range(data[1] + data[2], place.offset + place.length)]
    rng = random.Random(5)
    missed = [at for at in rng.sample(ends, 250) if not is_found(folder, path, good, at)]
    alone = [at for at in missed if is_found_alone(path, good, at, place.offset, place.length)]
    assert alone == []
    assert len(missed) < 150


def is_found(folder: Path, path: Path, good: bytes, at: int) -> bool:
    """Whether a flipped bit is noticed by whoever looks at all items, or at this one after another."""
    path.write_bytes(good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :])
    opened = DcpFolder.open(folder, folder)
    try:
        opened.tensors["w0"].chunks()
        opened.tensors[f"w{COUNT - 1}"].chunks()
    except CheckpointError:
        return True
    return False


def is_found_alone(path: Path, good: bytes, at: int, offset: int, length: int) -> bool:
    """Whether taking the item apart by itself notices it."""
    path.write_bytes(good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :])
    try:
        ItemKinds().ends(opened(path), "w", offset, length, is_tensor=True)
    except CheckpointError:
        return True
    return False


def test_all_damaged_files_are_named_at_once(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(GOLDEN, tmp_path / "dcp"))
    opened = DcpFolder.open(folder, folder)
    for name in ("__0_0.distcp", "__1_0.distcp"):
        first = next(place for place in opened.metadata.places.values() if place.file == name)
        with (folder / name).open("r+b") as file:
            file.seek(first.offset)
            file.write(b"XX")
    with pytest.raises(Corrupt, match=r"(?s)__0_0.*__1_0|__1_0.*__0_0"):
        looked(folder)
