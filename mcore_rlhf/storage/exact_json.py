"""Values as JSON that says exactly what they are: what is read is what was written, type by type and bit by bit.

What JSON has by itself stays itself. Everything else is an object with one key that begins with ``$``: ``{"$tuple": [1, 2]}``,
``{"$float": "Infinity"}``, ``{"$tensor": ["float32", [], "AADAfw=="]}``. Each kind is one row of a table, with the way there and the
way back side by side; who keeps less, or other things, has a table of its own. Long arrays may lie in a safetensors file beside it:
``{"$array": ["<i8", [624], {"at": "0"}]}``. The names of classes that are only carried along (a loss scaler of DeepSpeed's) are judged
as in a pickle, and written into one only as :mod:`.trust` allows it.
"""

from __future__ import annotations

import base64
import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from mcore_rlhf.core.catalog import row_major
from mcore_rlhf.storage.torch_values import SmallTensor, TorchDtype, TorchSize, torch_dtype

from ..core.catalog import dtype_of
from ..errors import Corrupt, Unsupported, Untrusted
from .records import Place, shorten, under
from .safetensors import DTYPES
from .stored import NAMESPACES, Namespace, Stub, StubType, stub_class
from .trust import PickleVerdict, require_trust

MAX_ARRAY_NBYTES = 16 << 20
"""Larger tensors are no settings, and do not belong into a text."""

_PLAIN = (bool, int, str, type(None))


@dataclass(frozen=True, slots=True)
class Marked:
    """One type of value.

    Args:
        tag: The key that marks it.
        fits: Whether a value is of this kind.
        parts: What it is made of: something that is encoded in its turn.
        made: The value, made of its parts again.
        array: Whether its parts are a dtype, a shape and bytes, which may lie in a file beside.
        named: Whether its parts begin with the name of a class.
    """

    tag: str
    fits: Callable[[Any], bool]
    parts: Callable[[Any], Any]
    made: Callable[[Any], Any]
    array: bool = False
    named: bool = False


_FLOATS = {
    "NaN": math.nan,
    "Infinity": math.inf,
    "-Infinity": -math.inf,
    "nan": math.nan,
    "inf": math.inf,
    "-inf": -math.inf,
}


def _float_name(value: float) -> str:
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def as_list(parts: Any) -> list[Any]:
    """Parts that are a list; TypeError where they are none."""
    if type(parts) is not list:
        raise TypeError("no list")
    return parts


def _dict(parts: Any) -> dict[Any, Any]:
    return {key: value for key, value in map(as_list, as_list(parts))}  # noqa: C416  # sees that they are pairs


def _exactly(kind: type) -> Callable[[Any], bool]:
    return lambda value: type(value) is kind


def _sorted(values: Any) -> list[Any]:
    return sorted(values, key=repr)


def pairs(mapping: Any) -> list[Any]:
    """Keys and values of a mapping."""
    return [[key, value] for key, value in mapping.items()]


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _bytes(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else base64.b64decode(text, validate=True)


def _stub_parts(stub: Any) -> list[Any]:
    items = stub.stub_items
    return [type(stub).stub_name, list(stub.stub_args), stub.stub_called, items, stub.stub_state]


def _stub_of(parts: Any) -> Stub:
    cls, args, called, items, state = parts
    made: Stub = cls(*args)
    made.stub_state, made.stub_called, made.stub_items = state, called, items
    return made


def _tensor_parts(tensor: Any) -> list[Any]:
    return [tensor.dtype.name, list(tensor.shape), tensor.contiguous()]


def _tensor_of(parts: Any) -> Any:
    name, shape, text = parts
    dtype, data = dtype_of(name), bytes(_bytes(text))
    if len(data) != prod(shape) * dtype.itemsize:
        raise ValueError(f"a tensor of shape {shape} and dtype {dtype} does not have {len(data)} bytes")
    return SmallTensor(data, dtype, tuple(shape), row_major(tuple(shape)))


def _is_array(value: Any) -> bool:
    import numpy as np

    return type(value) is np.ndarray and _is_number(value)


def _is_scalar(value: Any) -> bool:
    import numpy as np

    return isinstance(value, np.generic) and _is_number(value)


def _is_number(value: Any) -> bool:
    return value.dtype.kind in "biufc" and value.nbytes <= MAX_ARRAY_NBYTES


def _array_parts(array: Any) -> list[Any]:
    return [array.dtype.str, list(array.shape), array.tobytes()]


def _array_of(parts: Any) -> Any:
    import numpy as np

    name, shape, text = parts
    dtype = np.dtype(str(name))
    if dtype.kind not in "biufc":
        raise ValueError(f"an array of {name} is no numbers")
    return np.frombuffer(bytearray(_bytes(text)), dtype).reshape(shape)


FLOAT = Marked(
    "$float", lambda value: type(value) is float and not math.isfinite(value), _float_name, _FLOATS.__getitem__
)
TUPLE = Marked("$tuple", _exactly(tuple), list, lambda parts: tuple(as_list(parts)))
KINDS = (
    FLOAT,
    TUPLE,
    Marked("$set", _exactly(set), _sorted, set),
    Marked("$frozenset", _exactly(frozenset), _sorted, frozenset),
    Marked("$dict", _exactly(dict), pairs, _dict),
    Marked("$ordered", _exactly(OrderedDict), pairs, lambda parts: OrderedDict(_dict(parts))),
    Marked("$bytes", _exactly(bytes), _text, _bytes),
    Marked("$namespace", lambda value: type(value) in NAMESPACES, lambda value: dict(vars(value)), Namespace),
    Marked("$stub", lambda value: isinstance(value, Stub), _stub_parts, _stub_of, named=True),
    Marked("$class", lambda value: isinstance(value, StubType), lambda value: value.stub_name, lambda parts: parts[0], named=True),
    Marked("$size", _exactly(TorchSize), list, TorchSize),
    Marked("$dtype", _exactly(TorchDtype), lambda value: value.name, torch_dtype),
    Marked(
        "$tensor", lambda value: type(value) is SmallTensor and value.nbytes <= MAX_ARRAY_NBYTES, _tensor_parts, _tensor_of, array=True
    ),
    Marked("$array", _is_array, _array_parts, _array_of, array=True),
    Marked("$scalar", _is_scalar, _array_parts, lambda parts: _array_of(parts)[()], array=True),
)  # fmt: skip
_DTYPES = {
    "<f8": "F64", "<f4": "F32", "<f2": "F16", "<i8": "I64", "<i4": "I32", "<i2": "I16", "|i1": "I8", "<u8": "U64", "<u4": "U32",
    "<u2": "U16", "|u1": "U8", "|b1": "BOOL", "<c8": "C64",
}  # fmt: skip
"""numpy's names of element types, and safetensors'."""
_LONG_NBYTES = 256
"""Arrays of more bytes lie in the file beside, where there may be one."""


@dataclass(frozen=True, slots=True)
class LongArray:
    """An array that lies in a file beside.

    Args:
        dtype: Its element type, as safetensors calls it.
        shape: Its shape.
        data: Its elements in row-major order.
    """

    dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(slots=True)
class Encoder:
    """Turns values into what JSON has, and remembers what it could not.

    Args:
        lost: Where something was that cannot be kept, and what it was.
        arrays: Gets the long arrays; None where there is no file beside.
        kinds: What is kept.
    """

    lost: list[str] = field(default_factory=list)
    arrays: dict[str, LongArray] | None = None
    kinds: Sequence[Marked] = KINDS

    def encode(self, value: object, where: Place) -> object:
        """A value as a nest of what JSON has; what cannot be kept is left out of its dictionary, or becomes null.

        Args:
            value: A nest of containers, plain values, tensors, arrays and stubs.
            where: What it is, for :attr:`lost`.
        """
        if type(value) in _PLAIN or (type(value) is float and math.isfinite(value)):
            return value
        if type(value) is list:
            return [self.encode(item, (where, number)) for number, item in enumerate(value)]
        if type(value) in (dict, OrderedDict):
            return self._mapping(value, where)  # type: ignore[arg-type]
        kind = self._kind_of(value)
        if kind is None:
            self.lost.append(f"{under(where)} ({type(value).__name__})")
            return None
        if kind.array:
            return {kind.tag: self._array(*kind.parts(value))}
        return {kind.tag: self.encode(kind.parts(value), where)}

    def _array(self, dtype: str, shape: list[int], data: bytes) -> list[object]:
        known = DTYPES.get(dtype.removeprefix("torch.")) or _DTYPES.get(dtype)
        if self.arrays is None or known is None or len(data) <= _LONG_NBYTES:
            return [dtype, shape, _text(data)]
        name = str(len(self.arrays))
        self.arrays[name] = LongArray(known, tuple(shape), data)
        return [dtype, shape, {"at": name}]

    def _mapping(self, value: dict[object, object], where: Place) -> object:
        kept = {}
        for key, item in value.items():
            if type(item) in (*_PLAIN, float, list) or self._kind_of(item) is not None:
                kept[key] = item
            else:
                self.lost.append(f"{under(where, key)} ({type(item).__name__})")
        if type(value) is dict and all(type(key) is str and not key.startswith("$") for key in kept):
            return {key: self.encode(item, (where, key)) for key, item in kept.items()}
        kind = self._kind_of(value)
        assert kind is not None  # every table has one for dictionaries
        return {kind.tag: [[self.encode(key, where), self.encode(item, (where, key))] for key, item in kept.items()]}

    def _kind_of(self, value: object) -> Marked | None:
        return next((kind for kind in self.kinds if kind.fits(value)), None)


def decode(
    value: object,
    where: str,
    stubs: Collection[str] = (),
    arrays: Callable[[str], bytes] | None = None,
    kinds: Sequence[Marked] = KINDS,
) -> object:
    """The value that was encoded.

    Args:
        value: What JSON has of it.
        where: The file, and the place in it, for messages.
        stubs: Further classes that may become inert stubs.
        arrays: The bytes of a long array.
        kinds: What there may be.

    Raises:
        Untrusted: It names a class that is not allowed.
        Unsupported: It has a mark that is not known.
        Corrupt: It is not what :class:`Encoder` makes.
    """
    return _Decoder(where.removesuffix(": "), stubs, arrays, {kind.tag: kind for kind in kinds}).decoded(value, where)


@dataclass(frozen=True, slots=True)
class _Decoder:
    where: str
    stubs: Collection[str]
    arrays: Callable[[str], bytes] | None
    kinds: Mapping[str, Marked]

    def decoded(self, value: Any, place: Place) -> Any:
        if isinstance(value, list):
            return [self.decoded(item, (place, number)) for number, item in enumerate(value)]
        if not isinstance(value, dict):
            return value
        tag = next(iter(value), "")
        if not tag.startswith("$"):
            return {key: self.decoded(item, (place, key)) for key, item in value.items()}
        if len(value) != 1 or tag not in self.kinds:
            raise Unsupported(f"{under(place)}: the mark {tag} is not known; known are {', '.join(self.kinds)}")
        try:
            return self._made(self.kinds[tag], value[tag], place)
        except (ValueError, TypeError, KeyError, IndexError, OverflowError, RuntimeError) as error:
            raise Corrupt(f"{under(place)}: {tag} is followed by {shorten(value[tag])}: {error}") from None

    def _made(self, kind: Marked, told: Any, place: Place) -> Any:
        if kind.array:
            return kind.made(self._array(*told))
        if kind.named and isinstance(told, str):
            told = [told]  # a class alone
        parts = self.decoded(told, place)
        return kind.made([self._judged(parts[0]), *parts[1:]] if kind.named else parts)

    def _array(self, dtype: object, shape: object, data: Any) -> list[object]:
        if isinstance(data, dict):
            if self.arrays is None:
                raise ValueError(f"an array at {data!r:.40}, and there is no file beside")
            data = self.arrays(data["at"])
        return [dtype, shape, data]

    def _judged(self, name: object) -> StubType:
        """The class of that name: only what a pickle may name as a stub."""
        if not isinstance(name, str):
            raise ValueError(f"{name!r} is no name of a class")
        if require_trust([name], self.stubs, self.where)[name] is not PickleVerdict.STUB:
            raise Untrusted(
                f"{self.where}: {name!r} is no class of a training framework's, which is all that it may name"
            )
        return stub_class(name, name in self.stubs)
