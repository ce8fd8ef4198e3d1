"""A checkpoint that stores masters only is compared with one that stores parameters: rounded, they must be the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mcore_rlhf.convert import convert
from mcore_rlhf.core.catalog import MASTER, PARAM
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.formats.registry import open_checkpoint
from mcore_rlhf.storage.reading import OpenFiles
from mcore_rlhf.verify.differ import Comparison, Differ
from tests.helpers.conversions import options

GOLDEN = Path(__file__).parents[2] / "goldens" / "deepspeed" / "z2_bf16_ac_dp2" / "step3"


@pytest.fixture(scope="module")
def masters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The golden in stage 3, which has no parameters beside its masters."""
    target = tmp_path_factory.mktemp("rounding") / "stage3"
    convert(GOLDEN, target, replace(options(zero_stage=3), to="deepspeed"))
    return target


def compared(a: Path, b: Path) -> Comparison:
    first, second = (open_checkpoint(path, ReadOptions()) for path in (a, b))
    with OpenFiles(first.root) as bytes_a, OpenFiles(second.root) as bytes_b:
        return Differ(first, second, bytes_a, bytes_b, states=(PARAM,)).compare()


def test_either_side_may_have_masters_only(masters: Path) -> None:
    for pair in ((GOLDEN, masters), (masters, GOLDEN)):
        result = compared(*pair)
        assert result.equal, result.differences
        assert result.tensors == len([n for n in open_checkpoint(GOLDEN, ReadOptions()).catalog if n.state == PARAM])
        assert any("rounded" in note for note in result.notes)


def test_masters_alone_are_held_against_each_other_and_missed(masters: Path) -> None:
    """Where parameters alone are asked for; a buffer or two were compared, and all else was passed over."""
    both = compared(masters, masters)
    assert (both.equal, both.notes) == (True, [])
    assert both.tensors == compared(GOLDEN, masters).tensors


def test_a_master_that_does_not_round_to_the_parameter_is_a_difference(masters: Path) -> None:
    source = open_checkpoint(masters, ReadOptions())
    name = next(n for n in source.catalog if n.state == MASTER)
    entry = source.catalog.get(name)
    assert entry is not None
    record = entry.chunks[0].record
    victim = source.root / record.file
    at = record.byte_offset + entry.chunks[0].start * 4 + 3  # sign and exponent of its first element
    data = bytearray(victim.read_bytes())
    data[at] ^= 0x40
    victim.write_bytes(data)
    differences = compared(GOLDEN, masters).differences
    assert [d.name for d in differences] == [f"{name.param} ({PARAM})"]
    assert differences[0].differing == 1
