"""The table of chunks, and the law of each view of it: what it answers, told by doing to whole arrays what it does to chunks."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mcore_rlhf.core.catalog import (
    EXP_AVG,
    FLOAT32,
    MASTER,
    PARAM,
    Box,
    TensorEntry,
    TensorName,
    dtype_of,
)
from mcore_rlhf.core.chunks import Chunks
from mcore_rlhf.core.plan import check_tiles, plan_file
from mcore_rlhf.core.rows import Rows, Strip, Tensor
from mcore_rlhf.core.shares import EITHER, FROM_MASTERS, Share
from tests.unit.core.layouts import INT32, cut, naive, random_tensor, stored, view

ROLE = "actor"
BF16 = dtype_of("bfloat16")
STATES = (PARAM, MASTER, EXP_AVG)
randoms = st.randoms(use_true_random=False)


@dataclass
class Known:
    """A small catalogue, and the arrays that it describes."""

    arrays: dict[TensorName, np.ndarray] = field(default_factory=dict)
    contents: dict[tuple[str, str], np.ndarray] = field(default_factory=dict)
    entries: dict[TensorName, TensorEntry] = field(default_factory=dict)

    @property
    def catalog(self) -> Chunks:
        return Chunks.of(self.entries.values())

    def add(self, rng: random.Random, name: TensorName, tensor: np.ndarray) -> None:
        made = stored(rng, tensor, f"file {len(self.entries)}", rng.randrange(1, 5), transposed=True)
        self.arrays[name] = tensor
        self.entries[name] = replace(made.entry, name=name)
        self.contents.update({(f"file {len(self.entries) - 1}", key): data for key, data in made.contents.items()})

    def read(self, entry: TensorEntry | None) -> np.ndarray:
        assert entry is not None
        got = np.full(entry.global_shape, -2, np.int32)
        for chunk in entry.primary():
            box = chunk.box.intersect(Box.whole(entry.global_shape))
            if box is not None:
                part = chunk.narrow(box)
                to = tuple(slice(a, b, by) for a, b, by in zip(box.offset, box.stop, box.steps, strict=True))
                data = self.contents[chunk.record.file.removeprefix("up/"), chunk.record.key]
                got[to] = view(data, part.start, box.shape, part.strides)
        return got


def known(rng: random.Random, params: str = "abcd") -> Known:
    """Some parameters, each in some states: every state of a parameter has its shape."""
    made = Known()
    for param in params:
        shape = random_tensor(rng).shape
        for state in STATES:
            if rng.random() < 0.7:
                made.add(
                    rng,
                    TensorName(ROLE, param, state),
                    rng.randrange(99) + np.arange(np.prod(shape), dtype=np.int32).reshape(shape),
                )
    return made


def keeps_the_law(catalog: Chunks) -> None:
    """Of every table: it has what it says, under the name that it says, and is as long as it says."""
    names = list(catalog)
    assert len(catalog) == len(names) == len(set(names))
    for name in names:
        entry = catalog.get(name)
        assert entry is not None
        assert entry.name == name
    assert catalog.get(TensorName("critic", "a")) is None
    assert catalog.get(TensorName(ROLE, "nowhere")) is None


@settings(max_examples=50)
@given(randoms)
def test_renamed(rng: random.Random) -> None:
    below = known(rng)
    names = {new: rng.choice("abcd") for new in ("x", "y", "z", "a") if rng.random() < 0.8}
    seen = below.catalog.renamed(ROLE, names)
    keeps_the_law(seen)
    expected = {
        TensorName(ROLE, new, state)
        for new, old in names.items()
        for state in STATES
        if (ROLE, old, state) in below.arrays
    }
    assert set(seen) == expected
    for name in seen:
        np.testing.assert_array_equal(below.read(seen.get(name)), below.arrays[name._replace(param=names[name.param])])
    assert names.keys() >= {"b"} or seen.get(TensorName(ROLE, "b")) is None


def test_renaming_there_and_back_is_nothing(rng: random.Random) -> None:
    below = known(rng)
    there = below.catalog.renamed(ROLE, dict(zip("wxyz", "abcd", strict=True)))
    back = there.renamed(ROLE, dict(zip("abcd", "wxyz", strict=True)))
    assert {name: back.get(name) for name in back} == below.entries


@settings(max_examples=50)
@given(randoms, st.integers(1, 12))
def test_rows(rng: random.Random, rows: int) -> None:
    below = known(rng)
    seen = below.catalog.rows({"a": rows, "b": rows})
    keeps_the_law(seen)
    for name, array in below.arrays.items():
        expected = array
        if name.param in "ab":
            expected = np.concatenate([array, np.repeat(array[-1:], max(0, rows - len(array)), 0)])[:rows]
        np.testing.assert_array_equal(below.read(seen.get(name)), expected)


@settings(max_examples=50)
@given(randoms)
def test_recut(rng: random.Random) -> None:
    """Pieces of one tensor, each a tensor with its dimensions in another order, and put together again from those."""
    tensor = random_tensor(rng)
    below = Known()
    below.add(rng, TensorName(ROLE, "a"), tensor)
    below.add(rng, TensorName(ROLE, "a", EXP_AVG), tensor + 1000)
    shares, shapes = {}, {}
    for number, box in enumerate(cut(rng, Box.whole(tensor.shape), rng.randrange(1, 5))):
        axes = tuple(rng.sample(range(tensor.ndim), tensor.ndim)) if rng.random() < 0.7 else None
        shape = box.shape if axes is None else tuple(box.shape[axis] for axis in axes)
        shares[f"piece {number}"], shapes[f"piece {number}"] = (Share(Box.whole(shape), "a", box, axes),), shape
    pieces = below.catalog.recut(ROLE, shares, shapes)
    keeps_the_law(pieces)
    for name in pieces:
        share = shares[name.param][0]
        part = below.arrays[name._replace(param="a")][
            tuple(slice(a, b) for a, b in zip(share.other.offset, share.other.stop, strict=True))
        ]
        np.testing.assert_array_equal(
            below.read(pieces.get(name)), part if share.axes is None else part.transpose(share.axes)
        )
    inverse = {"a": tuple(share.inverse(name) for name, (share,) in shares.items())}
    back = pieces.recut(ROLE, inverse, {"a": tensor.shape})
    keeps_the_law(back)
    for name, array in below.arrays.items():
        np.testing.assert_array_equal(below.read(back.get(name)), array)


@settings(max_examples=50)
@given(randoms)
def test_recut_of_elements_in_turn(rng: random.Random) -> None:
    """Every second or third element of a dimension, transposed as well, and woven together again; a plan moves both."""
    tensor, parts = random_tensor(rng), rng.randrange(2, 4)
    dim = rng.randrange(tensor.ndim)
    tensor = np.concatenate([tensor] * parts, axis=dim)
    below = Known()
    below.add(rng, TensorName(ROLE, "a"), tensor)
    shares, shapes = {}, {}
    for part in range(parts):
        offset = tuple(part if d == dim else 0 for d in range(tensor.ndim))
        shape = tuple(n // parts if d == dim else n for d, n in enumerate(tensor.shape))
        box = Box(offset, shape, tuple(parts if d == dim else 1 for d in range(tensor.ndim)))
        axes = tuple(reversed(range(tensor.ndim)))
        shapes[f"part {part}"] = tuple(reversed(shape))
        shares[f"part {part}"] = (Share(Box.whole(shapes[f"part {part}"]), "a", box, axes),)
    pieces = below.catalog.recut(ROLE, shares, shapes)
    woven = pieces.recut(ROLE, {"a": tuple(s.inverse(name) for name, (s,) in shares.items())}, {"a": tensor.shape})
    for part in range(parts):
        taken = tensor[tuple(slice(part, None, parts) if d == dim else slice(None) for d in range(tensor.ndim))]
        np.testing.assert_array_equal(below.read(pieces.get(TensorName(ROLE, f"part {part}"))), taken.T)
    entry = woven.get(TensorName(ROLE, "a"))
    assert entry is not None
    assert check_tiles(entry) is None
    np.testing.assert_array_equal(below.read(entry), tensor)
    target = stored(rng, tensor, "b", rng.randrange(1, 5), transposed=True)
    plan = plan_file("b", Chunks.of([replace(target.entry, name=entry.name)]), woven)
    assert not plan.problems
    got = {key: np.full_like(value, -1) for key, value in target.contents.items()}
    for copy in plan.copies:
        naive(copy, below.contents[copy.source.file, copy.source.key], got[copy.target.key])
    for key, value in target.contents.items():
        np.testing.assert_array_equal(got[key], value)


def test_what_recut_lacks_is_missing(rng: random.Random) -> None:
    below = Known()
    below.add(rng, TensorName(ROLE, "a"), np.ones((2, 3), np.int32))
    whole = Box.whole((2, 3))
    shares = {
        "x": (Share(whole, "a", whole), Share(Box((2, 0), (2, 3)), "gone", whole)),
        "y": (Share(whole, "gone", whole),),
    }
    seen = below.catalog.recut(ROLE, shares, {"x": (4, 3), "y": (2, 3)})
    keeps_the_law(seen)
    entry = seen.get(TensorName(ROLE, "x"))
    assert entry is not None
    assert check_tiles(entry) == "6 of 12 elements are stored nowhere"


def test_a_dimension_that_the_other_tensor_lacks(rng: random.Random) -> None:
    below, tensor = Known(), np.arange(6, dtype=np.int32).reshape(2, 3)
    below.add(rng, TensorName(ROLE, "a"), tensor)
    share = Share(Box((0, 0, 0), (1, 2, 3)), "a", Box.whole((2, 3)), (-1, 0, 1))
    seen = below.catalog.recut(ROLE, {"x": (share,)}, {"x": (1, 2, 3)})
    np.testing.assert_array_equal(below.read(seen.get(TensorName(ROLE, "x"))), tensor[None])


@pytest.mark.parametrize("order", [EITHER, FROM_MASTERS, {MASTER: (MASTER, PARAM)}])
def test_states_in_order(rng: random.Random, order: dict[str, tuple[str, ...]]) -> None:
    below = known(rng)
    seen = below.catalog.states(order)
    keeps_the_law(seen)
    assert list(seen) == list(below.entries)
    for param in "abcd":
        for state in STATES:
            name = TensorName(ROLE, param, state)
            there = [s for s in order.get(state, (state,)) if name._replace(state=s) in below.arrays]
            entry = seen.get(name)
            assert (entry is None) == (not there)
            if entry is not None:
                assert entry.name == name
                np.testing.assert_array_equal(below.read(entry), below.arrays[name._replace(state=there[0])])


@pytest.mark.parametrize(
    ("stored_as", "master", "wanted", "taken"),
    [
        (BF16, True, None, PARAM), (BF16, True, BF16, PARAM), (BF16, True, INT32, MASTER), (BF16, False, INT32, PARAM),
        (None, True, BF16, MASTER), (None, True, None, MASTER), (None, False, BF16, None),
    ],
)  # fmt: skip
def test_cast(stored_as: object, master: bool, wanted: object, taken: str | None) -> None:
    param, copy = TensorName(ROLE, "a"), TensorName(ROLE, "a", MASTER)
    entries = {param: TensorEntry(param, (0,), stored_as, ())} if stored_as else {}  # type: ignore[arg-type]
    entries |= {copy: TensorEntry(copy, (0,), FLOAT32, ())} if master else {}
    seen = Chunks.of(entries.values()).cast(wanted)  # type: ignore[arg-type]
    assert seen.get(copy) == entries.get(copy)
    assert seen.get(param) == (None if taken is None else replace(entries[param._replace(state=taken)], name=param))


@settings(max_examples=50)
@given(randoms)
def test_joined(rng: random.Random) -> None:
    first, second = known(rng, "abc"), known(rng, "bcd")
    seen = first.catalog.joined(second.catalog)
    keeps_the_law(seen)
    assert {name: seen.get(name) for name in seen} == {**second.entries, **first.entries}


def test_below(rng: random.Random) -> None:
    below = known(rng)
    seen = below.catalog.below("up/")
    keeps_the_law(seen)
    for name, array in below.arrays.items():
        entry = seen.get(name)
        assert entry is not None
        assert all(chunk.record.file.startswith("up/") for chunk in entry.chunks)
        np.testing.assert_array_equal(below.read(entry), array)
    assert below.catalog.below("").get(next(iter(below.entries))) == next(iter(below.entries.values()))


def test_some_states(rng: random.Random) -> None:
    below = known(rng)
    seen = below.catalog.of_states((PARAM, MASTER))
    keeps_the_law(seen)
    assert {name: seen.get(name) for name in seen} == {n: e for n, e in below.entries.items() if n.state != EXP_AVG}
    assert seen.get(TensorName(ROLE, "a", EXP_AVG)) is None


def test_rows_are_laid_once_and_when_they_are_asked_for(rng: random.Random) -> None:
    below, asked = known(rng), list[TensorName]()
    table = Chunks()
    for name, entry in below.entries.items():

        def lay(rows: Rows, name: TensorName = name, entry: TensorEntry = entry) -> Iterator[Strip]:
            asked.append(name)
            return rows.strips(entry.chunks)

        table.add(name, Tensor(entry.global_shape, entry.dtype, lay))
    seen = table.renamed(ROLE, {"w": "a", "b": "b"}).states(EITHER)
    assert not asked
    assert [seen.dtype(name) for name in seen] == [INT32] * len(seen)
    assert not asked
    for _ in range(2):
        keeps_the_law(seen)
        keeps_the_law(table)
    assert sorted(asked) == sorted(below.entries)


def test_views_combine(rng: random.Random) -> None:
    below = Known()
    below.add(rng, TensorName(ROLE, "a", MASTER), np.arange(6, dtype=np.int32).reshape(2, 3))
    seen = below.catalog.renamed(ROLE, {"b": "a"}).states(EITHER).rows({"b": 4})
    np.testing.assert_array_equal(
        below.read(seen.get(TensorName(ROLE, "b"))), [[0, 1, 2], [3, 4, 5], [3, 4, 5], [3, 4, 5]]
    )


@settings(max_examples=50)
@given(st.randoms(use_true_random=False), st.integers(1, 12))
def test_rows_are_kept_cut_or_repeated(rng: random.Random, rows: int) -> None:
    have, width = rng.randrange(1, 9), rng.randrange(1, 6)
    tensor = np.arange(1, have * width + 1, dtype=np.int32).reshape(have, width)
    made = stored(rng, tensor, "a", rng.randrange(1, 5))
    entry = Chunks.of([made.entry]).rows({made.entry.name.param: rows}).get(made.entry.name)
    assert entry is not None
    assert entry.global_shape == (rows, width)
    got = np.zeros((max(rows, have), width), np.int32)
    for chunk in entry.primary():
        to = tuple(slice(a, b) for a, b in zip(chunk.box.offset, chunk.box.stop, strict=True))
        assert not got[to].any(), "rows come from one place"
        got[to] = view(made.contents[chunk.record.key], chunk.start, chunk.box.shape, chunk.strides)
    expected = np.concatenate([tensor, np.repeat(tensor[-1:], max(0, rows - have), 0)])
    np.testing.assert_array_equal(got[:rows], expected[:rows])


@settings(max_examples=50)
@given(st.randoms(use_true_random=False))
def test_more_rows_still_tile(rng: random.Random) -> None:
    tensor = np.zeros((4, 3), np.int32)
    made = stored(rng, tensor, "a", 4).entry
    entry = Chunks.of([made]).rows({made.name.param: 9}).get(made.name)
    assert entry is not None
    assume(len(entry.chunks) > 1)
    assert check_tiles(entry) is None
