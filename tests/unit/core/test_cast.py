"""Casts without torch against torch's own: every pattern of 8 and 16 bits, and the edges of the wider types."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from mcore_rlhf.core.cast import Words, as_floats, convert, differing_after_rounding, is_exact
from mcore_rlhf.core.catalog import FLOATING, DType, dtype_of

FLOATS = sorted(FLOATING, key=str)
INTEGERS = [dtype_of(name) for name in ("int64", "int32", "int16", "int8", "uint8", "bool")]
MANTISSA, EXPONENT = {4: 23, 8: 52}, {4: 8, 8: 11}


def by_torch(words: Words, source: DType, target: DType) -> Words:
    """What torch makes of it; of many copies of each element, since its vectors and single elements differ in NaNs."""
    values = torch.from_numpy(words.copy()).view(getattr(torch, source.name))
    found = values.to(getattr(torch, target.name))
    result: Words = found.view(getattr(torch, f"uint{8 * target.itemsize}")).numpy()
    return result


def wide(itemsize: int, seed: int) -> Words:
    """Patterns of a wide type: random ones, every exponent with the mantissas around all that can be a tie, NaNs."""
    word = np.dtype(f"u{itemsize}")
    mantissa, exponents = MANTISSA[itemsize], 1 << EXPONENT[itemsize]
    bits = 8 * itemsize
    random = np.random.default_rng(seed).integers(0, 1 << bits, 200_000, dtype=word)
    steps = {0, 1, (1 << mantissa) - 1}
    for kept in (0, 1, 2, 3, 7, 10, 23):
        if kept < mantissa:
            half = 1 << (mantissa - kept - 1)
            steps |= {half - 1, half, half + 1, 3 * half - 1, 3 * half, 3 * half + 1, (1 << mantissa) - half}
    edges = [
        (sign << (bits - 1)) | (exponent << mantissa) | (step % (1 << mantissa))
        for sign, exponent, step in itertools.product((0, 1), range(exponents), sorted(steps))
    ]
    return np.concatenate([random, np.array(edges, word)])


def patterns(dtype: DType, seed: int) -> Words:
    if dtype.itemsize > 2:
        return wide(dtype.itemsize, seed)
    every = np.arange(1 << (8 * dtype.itemsize), dtype=f"u{dtype.itemsize}")
    return np.tile(every, 256 if dtype.itemsize == 1 else 1)


@pytest.mark.parametrize("target", FLOATS, ids=str)
@pytest.mark.parametrize("source", FLOATS, ids=str)
def test_every_cast_is_torchs(source: DType, target: DType, seed: int) -> None:
    if source == target:
        return
    words = patterns(source, seed)
    ours, theirs = convert(words, source, target), by_torch(words, source, target)
    differ = np.flatnonzero(ours != theirs)
    # fp64 becomes bfloat16 in torch by vectors or one by one, as it comes, and the NaNs of the two differ
    if (source.name, target.name) == ("float64", "bfloat16"):
        differ = differ[~(np.isnan(as_floats(ours, target)) & np.isnan(as_floats(theirs, target)))[differ]]
    assert not len(differ), [
        (hex(int(words[at])), hex(int(ours[at])), hex(int(theirs[at]))) for at in differ[:: len(differ) // 10 + 1]
    ]


@pytest.mark.parametrize("target", INTEGERS, ids=str)
@pytest.mark.parametrize("source", [*INTEGERS, *FLOATS], ids=str)
def test_numbers_that_integers_have_too(source: DType, target: DType) -> None:
    values = torch.tensor([0, 1, 2, 100, 127]).to(getattr(torch, source.name))
    words = values.view(getattr(torch, f"uint{8 * source.itemsize}")).numpy()
    for there, back in ((source, target), (target, source)):
        given = words if there == source else by_torch(words, source, target)
        assert np.array_equal(convert(given, there, back), by_torch(given, there, back)) or there == back


def test_shape_and_order_are_kept() -> None:
    words = np.arange(24, dtype=np.uint16).reshape(2, 3, 4).transpose(2, 0, 1)
    made = convert(words, dtype_of("bf16"), dtype_of("fp32"))
    assert made.shape == (4, 2, 3)
    assert np.array_equal(made, words.astype(np.uint32) << 16)
    assert convert(words[:0], dtype_of("bf16"), dtype_of("fp32")).shape == (0, 2, 3)
    assert convert(words[0, 0, 0], dtype_of("bf16"), dtype_of("fp32")).shape == ()


def test_a_source_that_is_only_to_be_read_stays_as_it_is() -> None:
    words = np.frombuffer(b"\x00\x3f\x80\x7f" * 8, np.uint16)
    for target in FLOATS:
        convert(words, dtype_of("bf16"), target)
    assert words.tobytes() == b"\x00\x3f\x80\x7f" * 8


def test_masters_that_are_rounded() -> None:
    fp32, bf16 = dtype_of("fp32"), dtype_of("bf16")
    masters = np.array([0x3F800000, 0x3F808000, 0x3F818000, 0x7FC00001], np.uint32)  # 1, two ties, a NaN
    assert differing_after_rounding(masters, np.array([0x3F80, 0x3F80, 0x3F82, 0xFFC0], np.uint16), fp32, bf16) == 0
    assert (
        differing_after_rounding(masters, np.array([0x3F80, 0x3F81, 0x3F82, 0x7FC0], np.uint16), fp32, bf16) == 0
    )  # up
    assert differing_after_rounding(masters, np.array([0x3F80, 0x3F82, 0x3F82, 0x7FC0], np.uint16), fp32, bf16) == 1


@pytest.mark.parametrize("target", [*FLOATS, *INTEGERS], ids=str)
@pytest.mark.parametrize("source", [*FLOATS, *INTEGERS], ids=str)
def test_a_cast_is_exact_where_torch_brings_every_value_back(source: DType, target: DType, seed: int) -> None:
    """Every value of types of up to 16 bits, and of the wider ones the edges, where they would break."""
    kind, other = getattr(torch, source.name), getattr(torch, target.name)
    if source.name == "bool":
        values = torch.tensor([False, True])
    elif source in INTEGERS:
        most, least = torch.iinfo(kind).max, torch.iinfo(kind).min
        values = torch.tensor([least, least + 1, -1 if least else 1, 0, 1, most - 1, most], dtype=kind)
    else:
        bits = getattr(torch, f"uint{8 * source.itemsize}")
        values = torch.from_numpy(patterns(source, seed)).view(bits).view(kind)
    numbers = values.double() if source != dtype_of("int64") else values
    back = values.to(other).to(kind)
    again = back.double() if source != dtype_of("int64") else back
    same = again == numbers
    if values.is_floating_point():
        has_nan = torch.isnan(values.to(other).float()) if other.is_floating_point else torch.zeros(len(values)).bool()
        same = (same & (torch.signbit(again) == torch.signbit(numbers))) | (numbers.isnan() & has_nan)
    elif source != target:
        same &= values.to(other).double() == values.double() if source != dtype_of("int64") else same
    assert is_exact(source, target) == bool(same.all())


def test_complex_numbers_have_two_parts() -> None:
    single, double, wide = (dtype_of(name) for name in ("complex64", "complex128", "float64"))
    assert is_exact(single, double)
    assert not is_exact(double, single)
    assert is_exact(wide, double)
    assert not is_exact(wide, single)
    assert not is_exact(single, wide)
