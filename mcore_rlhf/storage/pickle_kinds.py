"""Objects that a pickle repeats: the chunks of a ``.metadata``, hundreds of thousands, differ in a few numbers and references.

What an object does to the scan (:mod:`.pickle_scan`) depends on its opcodes and on the weights of what it takes from the memo, and on
nothing else. So it is gone through once, and one whose bytes are the same but for numbers, and whose references lead to values of the same
weights, is passed over as a whole: it leaves on the stack and in the memo what the first one left there.
"""

from __future__ import annotations

import re
from struct import Struct


def _any(codes: dict[bytes, int], form: bytes) -> bytes:
    return b"|".join(form % (re.escape(code), nbytes) for code, nbytes in codes.items())


_NUMBERS = {b"K": 1, b"M": 2, b"J": 4} | {b"\x8a" + bytes([nbytes]): nbytes for nbytes in range(1, 9)}
"""Opcodes of numbers of up to 64 bits, with their length where they have one, and the bytes that follow."""
_TEXTS = {b"\x8c" + bytes([nbytes]): nbytes for nbytes in range(64)}
_NUMBER = b"(?:%s)" % _any(_NUMBERS, b"%s.{%d}")
_TEXT = rb"(?:%s)\x94?" % _any(_TEXTS, b"%s.{%d}")
_GET = b"(?:h.|j....)"
_TUPLE = rb"(?:\)|(?:%s\x85|%s{2}\x86|%s{3}\x87|\(%s*t)\x94?)" % ((_NUMBER,) * 4)
_VALUE = rb"(?:%s%s\x85\x94?R\x94?|%s|%s|[N\x88\x89]|%s)" % (_GET, _TUPLE, _GET, _NUMBER, _TEXT)
_OBJECT = re.compile(rb"%s\)\x81\x94?\}\x94?\((?:%s%s)+ub" % (_GET, _GET, _VALUE), re.DOTALL)
"""NEWOBJ of a class, and a state: keys from the memo, and as values numbers, short texts, what is in the memo, and calls with a tuple of
numbers. It takes nothing that was on the stack, and leaves one value there."""
_ARGUMENTS = re.compile(b"j(....)|h.|%s|." % _any(_NUMBERS | _TEXTS, b"%s(.{%d})"), re.DOTALL)
_MOST_NBYTES = 512
_MOST = 32
_COMPARISONS, _OF_A_LOOK, _OF_A_MEETING, _OF_A_PASS = 1 << 12, 4, 64, 8
"""Comparisons that may be made in vain before kinds are given up. Looking whether an object has one, and taking it down, cost as much as
so many; so many are saved by an object that is passed over."""


class _Alike:
    """Objects with the same bytes but for numbers and references.

    Args:
        piece: The bytes of one.
        memo: The weights of all that is in the memo when it ends.
        before: How many of them were there when it began.
    """

    __slots__ = ("gets", "leaves", "mask", "nbytes", "same", "then", "weights")

    def __init__(self, piece: bytes, memo: list[int], before: int) -> None:
        mask, gets, end = bytearray(b"\xff" * len(piece)), "<", 0
        for found in _ARGUMENTS.finditer(piece):
            if found.lastindex is not None:
                start, stop = found.span(found.lastindex)
                mask[start:stop] = bytes(stop - start)
                if found.lastindex == 1:
                    gets, end = f"{gets}{start - end}xI", stop
        self.nbytes, self.mask = len(piece), int.from_bytes(mask, "little")
        self.same = int.from_bytes(piece, "little") & self.mask
        self.gets = Struct(gets).unpack_from
        self.weights = [memo[number] for number in self.gets(piece)]
        self.leaves = memo[before:]
        self.then: _Alike | None = None
        """What followed the one before."""

    def fits(self, data: bytes, at: int, memo: list[int]) -> bool:
        """Whether such an object begins there, and takes nothing that it makes itself."""
        if int.from_bytes(data[at : at + self.nbytes], "little") & self.mask != self.same:
            return False
        known = len(memo)
        for number, weight in zip(self.gets(data, at), self.weights, strict=True):
            if number >= known or memo[number] != weight:
                return False
        return True


class Repeated:
    """The kinds that were met in one pickle whose memo only grows.

    Args:
        data: The pickle.
        stack, memo: The weights of what is there.
    """

    __slots__ = ("_comparisons", "_data", "_kinds", "_memo", "_since", "_stack")

    def __init__(self, data: bytes, stack: list[int], memo: list[int]) -> None:
        self._data, self._stack, self._memo = data, stack, memo
        self._kinds: list[_Alike] = []
        self._comparisons, self._since = _COMPARISONS, (0, 0, 0)

    def ended(self, at: int, heavy: int) -> int:
        """An object ended: take its kind down, and pass over those behind it whose kinds are known.

        Args:
            at: Where it ended.
            heavy: What heavy keys weigh so far: one that has some is looked at each time.

        Returns:
            Where something else begins.
        """
        if self._comparisons > 0:
            start, before, lighter = self._since
            last = self._met(start, at, before) if heavy == lighter else None
            at = self._passed(at, last)
            self._since = at, len(self._memo), heavy
        return at

    def _met(self, start: int, stop: int, before: int) -> _Alike | None:
        if stop - start > _MOST_NBYTES or not _OBJECT.fullmatch(self._data, start, stop):
            self._comparisons -= _OF_A_LOOK
            return None
        self._comparisons -= _OF_A_MEETING
        kind = _Alike(self._data[start:stop], self._memo, before)
        self._kinds = [kind, *self._kinds[: _MOST - 1]]
        return kind

    def _passed(self, at: int, last: _Alike | None) -> int:
        data, stack, memo, kinds = self._data, self._stack, self._memo, self._kinds
        while True:
            kind = last.then if last is not None else None
            if kind is None or not kind.fits(data, at, memo):
                self._comparisons -= len(kinds)
                kind = next((kind for kind in kinds if kind.fits(data, at, memo)), None)
                if kind is None:
                    return at
                if last is not None:
                    last.then = kind
            self._comparisons += _OF_A_PASS
            stack.append(1)
            memo += kind.leaves
            at += kind.nbytes
            last = kind
