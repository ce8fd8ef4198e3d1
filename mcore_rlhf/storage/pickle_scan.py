"""One pass over a pickle before it is loaded: every opcode once, no object made.

What passes costs the loader no more memory and time than its length allows: every length lies inside the bytes, memo indices are
dense, objects are not much more than bytes, and no dictionary key takes long to hash. Both costs are real: ten bytes with a huge
memo index make C's unpickler allocate gigabytes, a key that is a tuple in a tuple, 300,000 deep, ends the process inside C, and
``t = (t, t)`` 26 times over is a key of 223 bytes that hashes for seconds.

Opcodes: Python 3.11, ``Lib/pickletools.py`` and ``Modules/_pickle.c``.
"""

from __future__ import annotations

import pickle as op
from collections.abc import Callable, Mapping
from functools import lru_cache
from struct import Struct
from struct import error as StructError

from ..errors import Corrupt, Incomplete, Unsupported, Untrusted
from .pickle_kinds import Repeated

MAX_KEY_WEIGHT = 4096
"""Values in one dictionary key or element of a set, counted as often as they would be hashed."""

MAX_KEYS_WEIGHT = 16384
"""Values in all keys that are tuples: the hashes of tuples of numbers can be made to collide."""

MAX_LONG_INTS = 4096
"""Integers of 9 to 255 bytes, as random generators and hashes have: more of them can be made to collide as keys."""

MAX_NAME_NBYTES = 1024
_MEMO_SLACK = 1024
_OBJECTS = 200_000
_BYTES_PER_OBJECT = 8
_MAX_WEIGHT = 1 << 20
"""Heavier is not counted: ``t = (t, t)`` a million times would be a number of a million digits."""


def scan(data: bytes) -> None:
    """Check that a pickle can be loaded at a cost that its length bounds. Names of classes are not judged here.

    What is raised says what is wrong with the bytes; who reads them knows whose they are, and what to do.

    Args:
        data: The whole pickle, of any protocol from 2 to 5.

    Raises:
        Incomplete: It ends in the middle.
        Corrupt: It is not a pickle, or something follows its end.
        Unsupported: It has protocol 0 or 1, or one above 5.
        Untrusted: It uses opcodes that no checkpoint needs, or would cost too much memory or time.
    """
    if not data:
        raise Incomplete("it is empty")
    if data[:1] != op.PROTO or len(data) < 2:
        raise Corrupt(f"it begins with {data[:8]!r}, not as a pickle of protocol 2 to 5 does")
    if not 2 <= data[1] <= 5:
        raise Unsupported(f"it has protocol {data[1]}; protocols 2 to 5 can be read")
    try:
        (_passed if len(data) <= _SMALL else _go_through)(data)
    except (IndexError, StructError):
        if data.endswith(op.STOP):
            raise Corrupt("it takes values that are not there") from None
        raise Incomplete("it ends in the middle") from None


def _go_through(data: bytes) -> None:
    _Scan(data).run()


_SMALL = 64 << 10
_passed = lru_cache(maxsize=128)(_go_through)
"""The same bytes pass again: a checkpoint is opened to be planned, to be verified, to be compared. What raises is not kept."""


def _by_code(table: Mapping[bytes, int]) -> list[int]:
    return [table.get(bytes([code]), -1) for code in range(256)]


_CONTAINERS = {op.EMPTY_LIST: 0, op.EMPTY_DICT: 0, op.EMPTY_SET: 0}
_MAKERS = (*_CONTAINERS, op.FROZENSET, op.REDUCE, op.NEWOBJ, op.BINPERSID)
_FIXED = {
    op.NONE: 0, op.NEWTRUE: 0, op.NEWFALSE: 0, op.EMPTY_TUPLE: 0, op.BININT: 4, op.BININT1: 1, op.BININT2: 2,
    op.BINFLOAT: 8,
}  # fmt: skip
_ATOMS = _by_code(_FIXED)
"""Bytes of the argument of every opcode that pushes one value of fixed length; -1 for the others."""

_ATOMS_AND_CONTAINERS = _by_code(_FIXED | _CONTAINERS)
_LONG_PUT, _MEMOIZE, _TEXT = op.LONG_BINPUT[0], op.MEMOIZE[0], op.BINUNICODE[0]
_GET, _GETS = op.BINGET[0], op.BINGET + op.LONG_BINGET
_TUPLE1, _TUPLE2, _CALLS = op.TUPLE1[0], op.TUPLE2[0], op.REDUCE + op.NEWOBJ
_uint32, _uint64 = Struct("<I").unpack_from, Struct("<Q").unpack_from
_Step = Callable[[int], int]
"""Does what an opcode does, given where its argument begins; returns where the next opcode is, or 0 at the end."""


class _Scan:
    """The pickle machine with a number for every value: how many values a hash of it would visit."""

    __slots__ = ("data", "heavy", "kinds", "limit", "long_ints", "marks", "memo", "memoize", "objects", "stack")

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.stack: list[int] = []
        self.marks: list[int] = []
        self.memo: list[int] = []
        self.objects = self.heavy = self.long_ints = 0
        self.limit = _OBJECTS + len(data) // _BYTES_PER_OBJECT
        self.memoize = _MEMOIZE
        self.kinds: Repeated | None = None

    def run(self) -> None:
        """Go through all opcodes."""
        data, stack, memo, uint32 = self.data, self.stack, self.memo, _uint32
        # Where there cannot be too many objects, whatever else these bytes are, none needs counting.
        counted = sum(map(data.count, _MAKERS)) > self.limit
        self.kinds = None if counted else Repeated(data, stack, memo)
        rare = self._table(counted)
        atoms, calls = (_ATOMS, b"") if counted else (_ATOMS_AND_CONTAINERS, _CALLS)
        push, pop, remember, memoize, at = stack.append, stack.pop, memo.append, self.memoize, 2
        while at:
            code = data[at]
            at += 1
            if code == memoize:  # first what there is most of: a quarter of all in a .metadata, then a fifth, …
                remember(stack[-1])
            elif (nbytes := atoms[code]) >= 0:
                push(1)
                at += nbytes
            elif code in _GETS:
                push(memo[data[at] if code == _GET else uint32(data, at)[0]])
                at += 1 if code == _GET else 4
            elif code == _TUPLE2:
                weight = pop() + stack[-1]
                stack[-1] = 1 + (weight if weight < _MAX_WEIGHT else _MAX_WEIGHT)
            elif code in calls:
                weight = pop()
                stack[-1] = weight
            elif code == _TUPLE1:
                stack[-1] += 1 if stack[-1] < _MAX_WEIGHT else 0
            elif code == _TEXT:  # one that is too long leads behind the end
                push(1)
                at += 4 + uint32(data, at)[0]
            elif code == _LONG_PUT and uint32(data, at)[0] == len(memo):
                remember(stack[-1])
                at += 4
            else:
                at = rare[code](at)
                memoize = self.memoize

    def _stop(self, at: int) -> int:
        if at != len(self.data):
            raise Corrupt(f"{len(self.data) - at} bytes follow its end")
        if not self.stack:
            raise Corrupt("it holds nothing")
        return 0

    def _table(self, counted: bool) -> list[_Step]:
        table: list[_Step] = [self._unknown] * 256
        for codes, method in (
            (op.MARK, self._mark), (op.BINPUT, self._short_put), (op.LONG_BINPUT, self._long_put),
            (op.BINBYTES, self._long_text), (op.SHORT_BINUNICODE + op.SHORT_BINBYTES, self._short_text),
            (op.LONG1, self._int), (op.EMPTY_LIST + op.EMPTY_DICT + op.EMPTY_SET, self._container),
            (op.TUPLE3, self._tuple3), (op.TUPLE, self._tuple),
            (op.REDUCE + op.NEWOBJ, self._call), (op.BUILD, self._build), (op.APPEND, self._drop), (op.APPENDS, self._appends),
            (op.SETITEM, self._setitem), (op.SETITEMS, self._setitems), (op.ADDITEMS, self._additems),
            (op.FROZENSET, self._frozenset), (op.GLOBAL, self._global), (op.STACK_GLOBAL, self._stack_global),
            (op.BINPERSID, self._persistent), (op.FRAME, self._frame), (op.STOP, self._stop),
        ):  # fmt: skip
            for code in codes:
                makes = counted and bytes([code]) in _MAKERS
                table[code] = self._counting(method) if makes else method
        return table

    def _counting(self, method: _Step) -> _Step:
        def counted(at: int) -> int:
            self.objects += 1
            if self.objects > self.limit:
                raise Untrusted(f"{self.objects} objects in its first {at} bytes of {len(self.data)}")
            return method(at)

        return counted

    def _unknown(self, at: int) -> int:
        code = self.data[at - 1]
        raise Untrusted(f"its byte {at - 1} is the opcode {bytes([code])!r}, which no checkpoint needs")

    def _mark(self, at: int) -> int:
        self.marks.append(len(self.stack))
        return at

    def _short_put(self, at: int) -> int:
        self._put(self.data[at])
        return at + 1

    def _long_put(self, at: int) -> int:
        self._put(_uint32(self.data, at)[0])
        return at + 4

    def _put(self, index: int) -> None:
        """Picklers number values one by one. After a gap, MEMOIZE would have another number here than in C, and is refused."""
        memo = self.memo
        gap = index - len(memo)
        if gap > _MEMO_SLACK:
            raise Untrusted(f"it stores a value under the number {index} after {len(memo)} others")
        if gap:  # from here on, what a number stands for may change
            self.kinds = None
        if gap >= 0:
            self.memoize = -1 if gap > 0 else self.memoize
            memo.extend([1] * (gap + 1))
        memo[index] = self.stack[-1]

    def _text(self, start: int, nbytes: int) -> int:
        if start + nbytes > len(self.data):
            raise Incomplete(f"a text of {nbytes} bytes begins at byte {start} of {len(self.data)}")
        self.stack.append(1)
        return start + nbytes

    def _long_text(self, at: int) -> int:
        return self._text(at + 4, _uint32(self.data, at)[0])

    def _short_text(self, at: int) -> int:
        return self._text(at + 1, self.data[at])

    def _int(self, at: int) -> int:
        nbytes = self.data[at]
        self.long_ints += nbytes > 8
        if self.long_ints > MAX_LONG_INTS:
            raise Untrusted(f"it holds more than {MAX_LONG_INTS} integers of more than 8 bytes")
        return self._text(at + 1, nbytes)

    def _container(self, at: int) -> int:
        self.stack.append(1)
        return at

    def _push_tuple(self, weight: int) -> None:
        self.stack.append(1 + (weight if weight < _MAX_WEIGHT else _MAX_WEIGHT))

    def _tuple3(self, at: int) -> int:
        stack = self.stack
        weight = stack.pop() + stack.pop() + stack[-1]
        stack[-1] = 1 + (weight if weight < _MAX_WEIGHT else _MAX_WEIGHT)
        return at

    def _since_mark(self) -> list[int]:
        start = self.marks.pop()
        parts = self.stack[start:]
        del self.stack[start:]
        return parts

    def _tuple(self, at: int) -> int:
        self._push_tuple(sum(self._since_mark()))
        return at

    def _call(self, at: int) -> int:
        """As in :meth:`run`: the result keeps its arguments' weight, and may be one of them."""
        weight = self.stack.pop()
        self.stack[-1] = weight
        return at

    def _build(self, at: int) -> int:
        self.stack.pop()
        return at if self.kinds is None else self.kinds.ended(at, self.heavy)

    def _drop(self, at: int) -> int:
        self.stack.pop()
        return at

    def _appends(self, at: int) -> int:
        del self.stack[self.marks.pop() :]
        return at

    def _setitem(self, at: int) -> int:
        self.stack.pop()
        self._hashed([self.stack.pop()])
        return at

    def _setitems(self, at: int) -> int:
        keys = self._since_mark()[::2]
        if keys and max(keys) > 1:
            self._hashed(keys)
        return at

    def _additems(self, at: int) -> int:
        self._hashed(self._since_mark())
        return at

    def _frozenset(self, at: int) -> int:
        parts = self._since_mark()
        self._hashed(parts)
        self._push_tuple(sum(parts))
        return at

    def _hashed(self, weights: list[int]) -> None:
        """Whatever becomes a key, or an element of a set."""
        heavy = [weight for weight in weights if weight > 1]
        self.heavy += sum(heavy)
        if heavy and (max(heavy) > MAX_KEY_WEIGHT or self.heavy > MAX_KEYS_WEIGHT):
            raise Untrusted(
                f"the key of a dictionary holds {max(heavy)} values, all keys that are tuples {self.heavy}; "
                f"at most {MAX_KEY_WEIGHT} and {MAX_KEYS_WEIGHT} are read"
            )

    def _global(self, at: int) -> int:
        try:
            end = self.data.index(b"\n", self.data.index(b"\n", at) + 1) + 1
        except ValueError:
            raise Incomplete("it ends in the middle of a name") from None
        if end - at > MAX_NAME_NBYTES:
            raise Untrusted(f"it asks for a class whose name has {end - at} bytes")
        self.stack.append(1)
        return end

    def _stack_global(self, at: int) -> int:
        self.stack.pop()
        self.stack[-1] = 1
        return at

    def _persistent(self, at: int) -> int:
        self.stack[-1] = 1
        return at

    def _frame(self, at: int) -> int:
        (nbytes,) = _uint64(self.data, at)
        if at + 8 + nbytes > len(self.data):
            raise Incomplete(f"a frame of {nbytes} bytes begins at byte {at} of {len(self.data)}")
        return at + 8
