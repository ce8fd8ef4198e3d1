"""Where a stranger's index says that tensors lie: what cannot be is refused, what is one thing under two names is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mcore_rlhf.core.catalog import FLOAT32, Box, Chunk, Record, TensorEntry, TensorName, row_major
from mcore_rlhf.errors import Corrupt, Unsupported
from mcore_rlhf.formats.places import entry_of, require_places

ROOT, LENGTHS = Path("there"), {"x.bin": 64}


def row(param: str, state: str, byte: int, dtype: str = "float32") -> TensorEntry:
    """A tensor of two rows of two, at a byte of the file."""
    return entry_of("actor", [param, state, [2, 2], dtype, [["x.bin", byte]]])


ONE_THING: dict[str, list[TensorEntry]] = {
    "an fp32 run's master": [row("a", "param", 0), row("a", "master", 0)],
    "tied weights": [row("a", "param", 0), row("b", "param", 0)],
    "tied weights with their moments": [
        row("a", "param", 0), row("a", "exp_avg", 16), row("b", "param", 0), row("b", "exp_avg", 16),
    ],
    "tied weights that are masters, too": [row(param, state, 0) for param in "ab" for state in ("param", "master")],
    "one after the other": [row("a", "param", 0), row("a", "exp_avg", 16), row("a", "exp_avg_sq", 32)],
}  # fmt: skip


@pytest.mark.parametrize("case", ONE_THING)
def test_what_is_one_thing_may_lie_in_one_place(case: str) -> None:
    require_places(ROOT, ONE_THING[case], LENGTHS)


TWO_THINGS: dict[str, list[TensorEntry]] = {
    "a moment in its weight": [row("a", "param", 0), row("a", "exp_avg", 0)],
    "two moments": [row("a", "param", 0), row("a", "exp_avg", 16), row("a", "exp_avg_sq", 16)],
    "moments of weights that are not tied": [
        row("a", "param", 0), row("a", "exp_avg", 32), row("b", "param", 16), row("b", "exp_avg", 32),
    ],
    "another's master": [row("a", "param", 0), row("b", "param", 16), row("b", "master", 0)],
    "a master a little further": [row("a", "param", 0), row("a", "master", 4)],
    "tied weights a little further": [row("a", "param", 0), row("b", "param", 8)],
    "tied weights of another type": [row("a", "param", 0, "float16"), row("b", "param", 0, "bfloat16")],
    "moments of parameters without weights": [row("a", "exp_avg", 0), row("b", "exp_avg", 0)],
}  # fmt: skip


@pytest.mark.parametrize("case", TWO_THINGS)
def test_two_things_in_one_place_are_damage(case: str) -> None:
    with pytest.raises(Corrupt, match="are both said to be at byte"):
        require_places(ROOT, TWO_THINGS[case], LENGTHS)


def in_turn(*boxes: Box) -> list[TensorEntry]:
    """A tensor of these parts, one record after the other."""
    chunks, byte = list[Chunk](), 0
    for number, box in enumerate(boxes):
        record = Record("x.bin", f"a:{number}", FLOAT32, box.numel, byte)
        chunks.append(Chunk(box, record, 0, row_major(box.shape)))
        byte += record.nbytes
    return [TensorEntry(TensorName("actor", "a", "param"), (4, 2), FLOAT32, tuple(chunks))]


EVEN, ODD = Box((0, 0), (2, 2), (2, 1)), Box((1, 0), (2, 2), (2, 1))


@pytest.mark.parametrize("boxes", [(EVEN, ODD), (ODD, EVEN), (EVEN, Box((1, 0), (1, 2)), Box((3, 0), (1, 2)))])
def test_rows_in_turn_make_a_whole(boxes: Any) -> None:
    require_places(ROOT, in_turn(*boxes), LENGTHS)
    require_places(ROOT, in_turn(Box((0, 0), (4, 2), (1, 1))), LENGTHS)


@pytest.mark.parametrize(
    "boxes", [(EVEN, Box((0, 0), (2, 2))), (Box((2, 0), (2, 2)), EVEN), (EVEN, Box((0, 0), (2, 2), (3, 1)))]
)
def test_rows_in_turn_that_are_there_twice_are_no_whole(boxes: Any) -> None:
    """As many elements as the tensor has, one twice and one nowhere: that passed."""
    kind = Unsupported if boxes[1].steps == (3, 1) else Corrupt
    with pytest.raises(kind, match=r"both have \[|neither equal nor 1"):
        require_places(ROOT, in_turn(*boxes), LENGTHS)


def test_a_cut_in_many_dimensions_is_not_understood() -> None:
    """It may be right: nobody said that it is damaged."""
    shape = (2,) * 9
    corner = [Box(tuple(number >> dim & 1 for dim in range(9)), (1,) * 9) for number in range(512)]
    entry = TensorEntry(
        TensorName("actor", "a", "param"),
        shape,
        FLOAT32,
        tuple(Chunk(box, Record("x.bin", str(n), FLOAT32, 1, 4 * n), 0, (1,) * 9) for n, box in enumerate(corner)),
    )
    with pytest.raises(Unsupported, match="is cut in 9 dimensions; up to 8 are followed"):
        require_places(ROOT, [entry], {"x.bin": 4 * 512})
