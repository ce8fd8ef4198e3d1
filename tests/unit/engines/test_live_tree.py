"""A live tree lies in its file as ``torch.save`` would lay it out."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import pytest
import torch

from mcore_rlhf.engines.save import SMALL_NBYTES, LiveTree
from mcore_rlhf.storage.checksum import crc32
from mcore_rlhf.storage.pt import Pt
from mcore_rlhf.storage.stored import StoredTensor

LARGE = SMALL_NBYTES  # elements of float32: four times the limit


def saved(tmp_path: Path, tree: object) -> object:
    """What torch itself reads of a tree that was written segment by segment."""
    live = LiveTree("state.pt")
    placed = live.placed(tree)
    with Pt.of(placed).create(tmp_path / "state.pt", "state.pt") as writer:
        crcs = {}
        for segment in live.segments:
            data = segment.tensor.contiguous().view(torch.uint8).numpy().data
            writer.write(segment.label, segment.byte_offset, data)
            crcs[segment.label] = crc32(data)
        writer.finish(crcs)
    return torch.load(tmp_path / "state.pt", weights_only=True)


def test_views_of_one_storage_stay_views_and_are_written_once(tmp_path: Path) -> None:
    flat = torch.arange(float(LARGE))
    live = LiveTree("x.pt")
    live.placed({"a": flat[:10], "b": flat[10:]})
    assert [segment.nbytes for segment in live.segments] == [4 * LARGE]
    found = saved(tmp_path, {"a": flat[:10], "b": flat[10:].view(2, -1), "whole": flat})
    assert isinstance(found, dict)
    assert torch.equal(found["b"].flatten(), flat[10:])
    assert found["a"].untyped_storage().data_ptr() == found["whole"].untyped_storage().data_ptr()


def test_small_views_stay_views_too(tmp_path: Path) -> None:
    flat = torch.arange(12.0)
    found = saved(tmp_path, [flat[2:5], flat])
    assert isinstance(found, list)
    assert torch.equal(found[0], torch.tensor([2.0, 3.0, 4.0]))
    assert found[0].untyped_storage().data_ptr() == found[1].untyped_storage().data_ptr()


def test_two_dtypes_of_one_storage(tmp_path: Path) -> None:
    words = torch.arange(LARGE, dtype=torch.int32)
    found = saved(tmp_path, {"words": words, "halves": words.view(torch.int16)})
    assert isinstance(found, dict)
    assert torch.equal(found["words"], words)
    assert torch.equal(found["halves"], words.view(torch.int16))


def test_strides_survive(tmp_path: Path) -> None:
    matrix = torch.randn(300, 400)
    found = saved(tmp_path, {"t": matrix.t()})
    assert isinstance(found, dict)
    assert found["t"].stride() == (1, 400)
    assert torch.equal(found["t"], matrix.t())


def test_the_tree_does_not_change_when_the_live_one_does(tmp_path: Path) -> None:
    small, groups = torch.zeros(3), OrderedDict(lr=0.1, nested={"betas": [0.9, 0.95]})
    live = LiveTree("x.pt")
    placed = live.placed({"small": small, "groups": groups})
    small.fill_(7)
    groups["lr"] = 0.2
    groups["nested"]["betas"].append(1.0)
    assert torch.equal(placed["small"], torch.zeros(3))
    assert placed["groups"] == OrderedDict(lr=0.1, nested={"betas": [0.9, 0.95]})
    assert isinstance(placed["groups"], OrderedDict)


def test_large_tensors_are_not_copied() -> None:
    large = torch.zeros(LARGE)
    live = LiveTree("x.pt")
    placed = live.placed({"large": large})
    assert isinstance(placed["large"], StoredTensor)
    assert live.segments[0].tensor.data_ptr() == large.data_ptr()


@pytest.mark.parametrize("shape", [(), (0,), (0, 5), (1,)])
def test_odd_shapes(tmp_path: Path, shape: tuple[int, ...]) -> None:
    tensor = torch.ones(shape)
    found = saved(tmp_path, {"x": tensor})
    assert isinstance(found, dict)
    assert found["x"].shape == shape
    assert torch.equal(found["x"], tensor)
