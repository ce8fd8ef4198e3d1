"""The only arithmetic there is: converting values from one element type to another, bit for bit as torch does, without torch.

bfloat16 is ml_dtypes', fp16, fp32 and fp64 are numpy's, and fp8 goes through tables; all of it gives up the GIL. What NaNs become
is put right afterwards, where there are any. To bfloat16, fp16 and fp8 every cast passes through fp32, as in torch.

Source: torch 2.13.0, ``aten/src/ATen/native/cpu/CopyKernel.cpp``, ``torch/headeronly/util/{BFloat16,Half,Float8_*}.h``; compared
with torch in ``tests/unit/core/test_cast.py``. Torch itself gives a NaN of other bits to the first elements of an array than to
its last (vectors and single elements); here all get those of the vectors.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .catalog import BFLOAT16, FLOAT16, FLOAT32, DType, dtype_of

Words = NDArray[Any]
"""Elements as unsigned words that hold their bits; numpy cannot say which width at type-checking time."""


@dataclass(frozen=True, slots=True)
class _Float8:
    """A floating type of 8 bits: sign, exponent, mantissa.

    Args:
        mantissa: Bits of the mantissa.
        bias: Of the exponent.
        last: Code of the largest finite value.
        beyond: Code of what rounds to more.
        nan: Code of a positive NaN.
    """

    mantissa: int
    bias: int
    last: int
    beyond: int
    nan: int

    @property
    def one_zero(self) -> bool:
        """Whether the code that would be the negative zero is the one NaN ("fnuz")."""
        return self.nan == _SIGN

    def magnitudes(self) -> Words:
        """The values of the codes without sign, up to the largest finite one, as float64."""
        codes = np.arange(self.last + 1)
        exponents, fractions = codes >> self.mantissa, codes & ((1 << self.mantissa) - 1)
        fractions += (exponents > 0) << self.mantissa
        found: Words = np.ldexp(fractions, np.maximum(exponents, 1) - self.bias - self.mantissa)
        return found


_DOUBLE = dtype_of("float64")
_SIGN = 0x80
_FLOAT8 = {
    "float8_e4m3fn": _Float8(3, 7, last=0x7E, beyond=0x7E, nan=0x7F),
    "float8_e5m2": _Float8(2, 15, last=0x7B, beyond=0x7C, nan=0x7F),
    "float8_e4m3fnuz": _Float8(3, 8, last=0x7F, beyond=_SIGN, nan=_SIGN),
    "float8_e5m2fnuz": _Float8(2, 16, last=0x7F, beyond=_SIGN, nan=_SIGN),
}
_SCALE = "float8_e8m0fnu"
"""An exponent alone: what blocks of smaller types are scaled by."""


class _Values(NamedTuple):
    """The numbers that a type has.

    Args:
        precision: Most binary digits of a number, from its first to its last.
        smallest: Power of two of the last digit of the smallest number.
        largest: Power of two of the first digit of the largest one.
        signed: Whether there are negative ones.
        special: What else there is: a negative zero ("-"), infinity ("i"), NaN ("n"); "0" for a zero.
    """

    precision: int
    smallest: int
    largest: int
    signed: bool
    special: str


_VALUES = {
    "float64": _Values(53, -1074, 1023, True, "0-in"), "float32": _Values(24, -149, 127, True, "0-in"),
    "bfloat16": _Values(8, -133, 127, True, "0-in"), "float16": _Values(11, -24, 15, True, "0-in"),
    "float8_e5m2": _Values(3, -16, 15, True, "0-in"), "float8_e4m3fn": _Values(4, -9, 8, True, "0-n"),
    "float8_e5m2fnuz": _Values(3, -17, 15, True, "0n"), "float8_e4m3fnuz": _Values(4, -10, 7, True, "0n"),
    "float8_e8m0fnu": _Values(1, -127, 127, False, "n"), "bool": _Values(1, 0, 0, False, "0"),
    **{f"{sign}int{bits}": _Values(bits - (not sign), 0, bits - 1 - (not sign), not sign, "0")
       for sign in ("", "u") for bits in (8, 16, 32, 64)},
}  # fmt: skip
"""Of every type but the complex ones. Of the signed integers the least (a power of two) has a digit of its own, see below."""


def is_exact(source: DType, target: DType) -> bool:
    """Whether every value of a type is one of another, so that nothing is lost by a conversion, and it can be undone.

    Args:
        source: What values are.
        target: What they become.
    """
    if source == target:
        return True
    if "complex" in target.name:
        part = FLOAT32 if target.itemsize == 8 else _DOUBLE
        own = {8: FLOAT32, 16: _DOUBLE}[source.itemsize] if "complex" in source.name else source
        return is_exact(own, part)
    if "complex" in source.name:
        return False
    have, hold = _VALUES[source.name], _VALUES[target.name]
    return (
        have.precision <= hold.precision
        and have.smallest >= hold.smallest
        and have.largest + _least(source) <= hold.largest + _least(target)
        and have.signed <= hold.signed
        and set(have.special) <= set(hold.special)
    )


def _least(dtype: DType) -> int:
    """1 for signed integers: -128 needs the power of two that 127 does not."""
    return int(dtype.name.startswith("int"))


def convert(words: Words, source: DType, target: DType) -> Words:
    """Convert elements, given and returned as unsigned words that hold their bits (numpy has no bfloat16).

    Args:
        words: Elements of type ``source``, any shape.
        source: What the words hold.
        target: What they become; rounding is to the nearest, ties to even.

    Returns:
        Words as wide as ``target``, of the same shape.
    """
    values = numbers(words, source)
    with np.errstate(all="ignore"):  # of numbers that are too large, and of NaNs that signal
        if target == BFLOAT16:
            return _to_bfloat16(values.astype(np.float32, copy=False), 0xFFFF if source == FLOAT32 else 0x7FC0)
        if _is_float8(target):
            return _to_float8(values.astype(np.float32, copy=False), target.name)
        if target == FLOAT16:
            return _with_quiet_nans(values.astype(np.float32, copy=False), np.uint32, np.dtype(np.float16))
        if source == FLOAT16:
            return _with_quiet_nans(values, np.uint16, np.dtype(target.name))
        own = source != target  # what was made of bfloat16 and fp8 is fp32 already, and nobody else's
        return values.astype(target.name, copy=not own).view(_word(target.itemsize))


def differing_after_rounding(masters: Words, params: Words, master: DType, param: DType) -> int:
    """Count the elements whose master copy, rounded, is not the parameter, bit for bit; NaN agrees with NaN.

    Half way between two bf16 numbers either is right: torch takes the even one, and a precision-aware optimizer the one further from 0.
    Source: Transformer Engine 2.1, ``common/multi_tensor/adam.cu`` (``AdamFunctorMasterParamRemainder``).

    Args:
        masters: Words of elements of type ``master``.
        params: As many words of elements of type ``param``, of the same shape.

    Returns:
        The number of elements that differ; 0 when the two agree.
    """
    rounded = masters if master == param else convert(masters, master, param)
    if np.array_equal(rounded, params):
        return 0
    both_nan = np.isnan(as_floats(rounded, param)) & np.isnan(as_floats(params, param))  # whose bits nobody agrees on
    wrong = (rounded != params) & ~both_nan
    if (master, param) == (FLOAT32, BFLOAT16):
        wrong &= ((masters & np.uint32(0xFFFF)) != 0x8000) | (params != (masters >> np.uint32(16)) + 1)
    return int(wrong.sum())


def as_floats(words: Words, dtype: DType) -> Words:
    """The values of elements as float64, or complex128, for comparing with a tolerance."""
    if dtype.name == "float8_e8m0fnu":  # powers of two, and nothing else
        return np.where(words == 0xFF, np.nan, np.ldexp(1.0, words.astype(np.int32) - 127))
    with np.errstate(invalid="ignore"):  # a NaN that signals
        return numbers(words, dtype).astype(np.complex128 if "complex" in dtype.name else np.float64)


def numbers(words: Words, dtype: DType) -> Words:
    """Elements as numbers of a type that numpy has: their own, or fp32 where it has none."""
    if dtype == BFLOAT16:
        found: Words = words.view(_bfloat16()).astype(np.float32)
        return found
    return _float8_values(dtype.name).take(words) if _is_float8(dtype) else words.view(dtype.name)


def _word(itemsize: int) -> Any:
    return np.dtype(f"u{itemsize}" if itemsize <= 8 else np.complex128)


@cache
def _bfloat16() -> Any:
    """Imported where it is needed, which is not for looking at a checkpoint."""
    from ml_dtypes import bfloat16

    return np.dtype(bfloat16)


def _is_float8(dtype: DType) -> bool:
    return dtype.name.startswith("float8")


def _has_nan(values: Words) -> bool:
    return bool(np.isnan(values.max(initial=0)))


def _to_bfloat16(values: Words, nan: int) -> Words:
    result: Words = values.astype(_bfloat16()).view(np.uint16)
    if _has_nan(values):
        result[np.isnan(values)] = nan
    return result


def _to_float8(values: Words, name: str) -> Words:
    """By a table of the 65,536 values of bfloat16; its last bit, set for all that is cut off, is enough to round by."""
    bits = values.view(np.uint32)
    index = bits >> np.uint32(16)
    index |= (bits & np.uint32(0xFFFF)) != 0
    return _float8_codes(name).take(index)


@cache
def _float8_values(name: str) -> Words:
    """The value of each code, as fp32."""
    if name == _SCALE:
        bits = np.arange(256, dtype=np.uint32) << 23
        bits[0], bits[255] = 0x400000, 0x7F800001
        return bits.view(np.float32)
    kind = _FLOAT8[name]
    fractions = np.arange(_SIGN, dtype=np.uint32) << np.uint32(23 - kind.mantissa)
    half: Words = fractions | np.uint32(0x7F800000)  # infinity and NaNs, but for what follows
    half[kind.beyond + 1 :] |= np.uint32(1 << 22)  # quiet
    half[: kind.last + 1] = kind.magnitudes().astype(np.float32).view(np.uint32)
    bits = np.concatenate([half, half | np.uint32(1 << 31)])
    if kind.one_zero:
        bits[_SIGN] = 0x7F800001
    return bits.view(np.float32)


@cache
def _float8_codes(name: str) -> Words:
    """The code that each value of bfloat16 is rounded to."""
    bits = np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)
    if name == _SCALE:
        magnitudes = bits & np.uint32(0x7FFFFFFF)
        rounded = (magnitudes + np.uint32(0x400000) - (magnitudes == 0x400000)) >> 23
        return np.where(magnitudes >= 0x7F800000, 0xFF, rounded).astype(np.uint8)
    kind, values = _FLOAT8[name], bits.view(np.float32).astype(np.float64)
    known = kind.magnitudes()
    middles = (known + np.append(known[1:], 2 * known[-1] - known[-2])) / 2
    codes = np.searchsorted(middles, np.abs(values))
    ties = np.append(middles, 0)[codes] == np.abs(values)
    codes += ties & (codes % 2 == 1)
    codes[codes > kind.last] = kind.beyond
    codes[np.isnan(values)] = kind.nan
    signed = np.signbit(values) & ((codes > 0) | ~np.bool_(kind.one_zero))
    found: Words = np.where(signed, codes | _SIGN, codes).astype(np.uint8)
    return found


def _with_quiet_nans(values: Words, word: Any, target: Any) -> Words:
    """Numpy's conversion, which keeps the bits of a NaN, but not those that say that it signals, as processors do."""
    result = values.astype(target)
    if target.kind == "f" and _has_nan(result if values.dtype == np.float16 else values):  # fp16's own max() is slow
        nan = np.isnan(values)
        quiet = values[nan].view(word) | word(1 << (np.finfo(values.dtype).nmant - 1))
        result[nan] = quiet.view(values.dtype).astype(target)
    return result.view(_word(target.itemsize))
