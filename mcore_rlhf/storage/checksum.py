"""CRC-32, the checksum of zip files, at the speed of memory, and how checksums of adjacent pieces combine."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import lru_cache
from types import ModuleType
from typing import TYPE_CHECKING

_CANDIDATES = ("zlib_ng.zlib_ng", "isal.isal_zlib", "zlib")
"""Same values from all three; measured on one core: 29, 28 and 4 GB/s. All release the GIL for long buffers.
"""

_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31


def _fastest() -> ModuleType:
    for name in _CANDIDATES:
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise ImportError("Python was built without zlib; install zlib-ng: pip install zlib-ng")


_library = _fastest()

IMPLEMENTATION: str = _library.__name__.rpartition(".")[2]
"""Which library computes: ``zlib_ng``, ``isal_zlib`` or ``zlib``."""

if TYPE_CHECKING:
    from zlib import crc32 as crc32
else:
    crc32 = _library.crc32
    """``crc32(data, value=0)``: the CRC-32 of ``data``, carried on from ``value``, the CRC-32 of what comes before it."""


def combine_by_algebra(first: int, second: int, second_nbytes: int) -> int:
    """What :func:`combine` computes, without a library: ``first * x^(8 n) + second`` over GF(2) modulo the
    CRC polynomial.

    Source of the algebra: zlib 1.2.13 ``crc32.c``, ``multmodp`` and ``x2nmodp``. The factor is kept per
    length.
    """
    return _multiply(_shift_factor(second_nbytes), first) ^ second


def crc32_of_zeros(nbytes: int) -> int:
    """The CRC-32 of so many zero bytes, in no time: the register begins with all ones, is shifted, and turned over."""
    return _multiply(_shift_factor(nbytes), 0xFFFFFFFF) ^ 0xFFFFFFFF


def _multiply(a: int, b: int) -> int:
    """Product of two polynomials, bits reflected, modulo the CRC polynomial."""
    product, mask = 0, _ONE
    while a:
        if a & mask:
            product ^= b
            a ^= mask
        mask >>= 1
        b = (b >> 1) ^ _POLYNOMIAL if b & 1 else b >> 1
    return product


@lru_cache(maxsize=4096)
def _shift_factor(nbytes: int) -> int:
    """``x^(8 * nbytes)`` modulo the CRC polynomial."""
    factor, power, exponent = _ONE, _ONE >> 1, 8 * nbytes
    while exponent:
        if exponent & 1:
            factor = _multiply(power, factor)
        power = _multiply(power, power)
        exponent >>= 1
    return factor


combine: Callable[[int, int, int], int] = getattr(_library, "crc32_combine", combine_by_algebra)
"""``combine(first, second, second_nbytes)``: the CRC-32 of two adjacent pieces from the CRC-32 of each."""
