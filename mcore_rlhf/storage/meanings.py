"""What the names mean that torch's and Python's own pickles use: from what a stub took down to the value itself.

Values are built here, from checked facts, after the pickle has been read: a constructor that a pickle could call would copy a long
list as often as it likes, and numpy's ``dtype.__setstate__`` believes any flags it is given, so that a forged pickle makes it treat
raw bytes as object pointers (numpy ``descriptor.c``, ``arraydescr_setstate``).

Source: torch 2.13.0, ``_utils.py``, ``_tensor.py``, ``_weights_only_unpickler.py``; CPython 3.11, ``Lib/copyreg.py`` and the
``__reduce_ex__`` of the classes; numpy 2, ``_core/src/multiarray/methods.c`` (``array_reduce``, ``array_setstate``).
"""

from __future__ import annotations

import io
import re
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

from ..errors import CheckpointError, Corrupt, Unsupported
from .stored import Namespace, StoredArray, Stub, StubType
from .torch_values import TorchSize, torch_device, torch_dtype

STORAGES = {
    "torch.FloatStorage": "float32", "torch.DoubleStorage": "float64", "torch.HalfStorage": "float16",
    "torch.BFloat16Storage": "bfloat16", "torch.LongStorage": "int64", "torch.IntStorage": "int32",
    "torch.ShortStorage": "int16", "torch.CharStorage": "int8", "torch.ByteStorage": "uint8",
    "torch.BoolStorage": "bool", "torch.ComplexFloatStorage": "complex64", "torch.ComplexDoubleStorage": "complex128",
    "torch.storage.UntypedStorage": "uint8",
}  # fmt: skip
"""Element types of torch's classes of storages."""

_DTYPE = re.compile(r"torch\.(q?u?int\d{1,2}(x\d)?|b?float\d{1,2}(_\w{1,16})?|b?complex\d{2,3}|bool|bits\w{1,8})")
_ARRAY_CODE = re.compile(r"[<>|=]?(\?|[biufcO]\d{1,2}|[SUV]\d{0,9})")
_NUMBERS = {
    f"{kind}{size}": size for kind, sizes in (("iu", (1, 2, 4, 8)), ("f", (2, 4, 8))) for kind in kind for size in sizes
}
_MOST_DIMENSIONS = 32  # numpy 1 has no more
_FACTORIES = {f"builtins.{kind.__name__}": kind for kind in (list, dict, int, float, str, bool, set, tuple)}
_TENSOR_CLASSES = {"torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer"}
_QUANTIZED = {
    f"torch.{name}" for name in (
        "QInt8Storage", "QUInt8Storage", "QInt32Storage", "QUInt4x2Storage", "QUInt2x4Storage", "per_tensor_affine",
        "per_tensor_symmetric", "per_channel_affine", "per_channel_symmetric", "per_channel_affine_float_qparams",
    )
}  # fmt: skip
_NUMPY = ("numpy.core.multiarray", "numpy._core.multiarray")


class Unfit(Exception):
    """Something that a file holds and that is wrong or not supported; where it is, the resolver knows.

    Args:
        kind: The error that it becomes.
        what: What it is: completes "x is …".
    """

    def __init__(self, kind: type[CheckpointError], what: str) -> None:
        super().__init__(what)
        self.kind = kind


class Resolver(Protocol):
    """What a meaning asks of :class:`~.resolve.TreeResolver`: the values inside of it, at a bounded cost."""

    def resolve(self, value: Any) -> Any:
        """One object inside."""
        ...

    def charge(self, count: int) -> None:
        """Count values that are met or copied."""
        ...

    def hashed(self, keys: list[Any], build: Callable[[], Any]) -> Any:
        """Build a container that hashes these values."""
        ...

    def of_subclass(self, name: str, args: tuple[Any, ...], state: Any) -> Any:
        """A tensor of another class than torch's own."""
        ...

    def tensor(self, storage: Any, start: Any, shape: Any, strides: Any, dtype: str | None = None) -> Any:
        """A tensor, where it lies."""
        ...


@dataclass(frozen=True, slots=True)
class ClassMeaning:
    """What an object of one class is.

    Args:
        build: Makes it from the stub.
        state: Whether it has a state.
        items: Whether it has items.
    """

    build: Callable[[Resolver, Stub], Any]
    state: bool = False
    items: bool = False


def has_meaning(name: str) -> bool:
    """Whether a name is one of those that are made into what they mean."""
    return name in MEANINGS or name in _CLASSES or _DTYPE.fullmatch(name) is not None


def meaning_of(name: str) -> ClassMeaning | None:
    """What objects of a class are; None for a class that stays a stub.

    Raises:
        Unfit: The name is known, but not as one that has objects.
    """
    found = MEANINGS.get(name)
    if found is None and (name in _CLASSES or _DTYPE.fullmatch(name)):
        raise Unfit(Corrupt, f"an object made by {name}, which makes none")
    return found


def class_value(cls: StubType) -> Any:
    """A class or function that stands in a tree as a value: an element type, or a stub.

    Raises:
        Unfit: Neither.
    """
    name = cls.stub_name
    if _DTYPE.fullmatch(name):
        try:
            return torch_dtype(name)
        except ValueError:
            raise Unfit(Unsupported, f"the element type {name}, which torch does not have") from None
    if has_meaning(name):
        raise Unfit(Unsupported, f"the class {name} itself")
    return cls


def shape_of(value: Any) -> tuple[int, ...]:
    """A shape, as a tuple or as ``torch.Size``.

    Raises:
        Unfit: It is none.
    """
    if isinstance(value, Stub) and type(value).stub_name == "torch.Size" and len(value.stub_args) == 1:
        value = value.stub_args[0]
    if type(value) is not tuple or any(type(n) is not int or not 0 <= n < 1 << 63 for n in value):
        raise Unfit(Corrupt, f"a tensor whose shape is a {type(value).__name__} that does not hold sizes")
    return value


def _arguments(stub: Stub, most: int, least: int = 0) -> tuple[Any, ...]:
    args = stub.stub_args
    if not least <= len(args) <= most:
        raise Unfit(Corrupt, f"a call of {type(stub).stub_name} with {len(args)} arguments")
    return args


def _sequence(resolver: Resolver, value: Any) -> list[Any]:
    """The elements of a list or tuple, copied."""
    found = resolver.resolve(value)
    if not isinstance(found, list | tuple):
        raise Unfit(Corrupt, f"a container made of a {type(found).__name__}")
    resolver.charge(len(found))
    return list(found)


def _only_sequence(resolver: Resolver, stub: Stub) -> list[Any]:
    args = _arguments(stub, 1)
    return _sequence(resolver, args[0]) if args else []


def _hashable(resolver: Resolver, stub: Stub, build: Callable[[list[Any]], Any]) -> Any:
    items = _only_sequence(resolver, stub)
    return resolver.hashed(items, lambda: build(items))


def _pairs(resolver: Resolver, stub: Stub, given: tuple[Any, ...]) -> list[Any]:
    """What a dictionary is made of: the pairs that it was called with, then its items."""
    found = [resolver.resolve(part) for part in (*given, stub.stub_items) if part is not None]
    pairs = [pair for part in found for pair in (part.items() if isinstance(part, dict) else _sequence(resolver, part))]
    resolver.charge(len(pairs))
    if any(not isinstance(pair, list | tuple) or len(pair) != 2 for pair in pairs):
        raise Unfit(Corrupt, f"a {type(stub).stub_name} that is not made of pairs")
    return pairs


def _mapping(resolver: Resolver, stub: Stub, made: Any, given: tuple[Any, ...]) -> Any:
    pairs = _pairs(resolver, stub, given)

    def fill() -> Any:
        for key, value in pairs:  # not update(), with which a Counter would count
            made[key] = value
        return made

    return resolver.hashed([key for key, _ in pairs], fill)


def _fields(resolver: Resolver, stub: Stub) -> dict[str, Any]:
    state = resolver.resolve(stub.stub_state)
    if state is None:
        return {}
    if type(state) is not dict or not {str}.issuperset(map(type, state)):
        raise Unfit(Corrupt, f"a {type(stub).stub_name} whose state is no dictionary of names")
    return state


def _ordered(resolver: Resolver, stub: Stub) -> OrderedDict[Any, Any]:
    made: OrderedDict[Any, Any] = _mapping(resolver, stub, OrderedDict(), _arguments(stub, 1))
    vars(made).update(_fields(resolver, stub))
    return made


def _counter(resolver: Resolver, stub: Stub) -> Counter[Any]:
    made: Counter[Any] = _mapping(resolver, stub, Counter(), _arguments(stub, 1))
    return made


def _dict(resolver: Resolver, stub: Stub) -> dict[Any, Any]:
    made: dict[Any, Any] = _mapping(resolver, stub, {}, _arguments(stub, 1))
    return made


def _defaultdict(resolver: Resolver, stub: Stub) -> defaultdict[Any, Any]:
    factory, *given = _arguments(stub, 2) or (None,)
    name = factory.stub_name if isinstance(factory, StubType) else ""
    if factory is not None and name not in _FACTORIES:
        raise Unfit(Unsupported, "a defaultdict whose factory is not a builtin type")
    made: defaultdict[Any, Any] = _mapping(resolver, stub, defaultdict(_FACTORIES.get(name)), tuple(given))
    return made


def _deque(resolver: Resolver, stub: Stub) -> deque[Any]:
    args = _arguments(stub, 2)
    given, maxlen = args[0] if args else (), args[1] if len(args) == 2 else None
    if maxlen is not None and (type(maxlen) is not int or maxlen < 0):
        raise Unfit(Corrupt, "a deque without a plain length")
    return deque([*_sequence(resolver, given), *_sequence(resolver, stub.stub_items or [])], maxlen)


def _complex(resolver: Resolver, stub: Stub) -> complex:
    real, imag = _arguments(stub, 2, 2)
    if type(real) is not float or type(imag) is not float:
        raise Unfit(Corrupt, "a complex number that is not made of two")
    return complex(real, imag)


def _no_bytes(_resolver: Resolver, stub: Stub) -> bytes:
    _arguments(stub, 0)  # with a number, it could be made to fill the memory
    return b""


def _encoded(resolver: Resolver, stub: Stub) -> bytes:
    """Bytes, as protocol 2 writes them."""
    text, encoding = _arguments(stub, 2, 2)
    if type(text) is not str or encoding not in ("latin1", "latin-1"):
        raise Unfit(Corrupt, "a text that is not encoded as bytes are")
    resolver.charge(len(text))
    try:
        return text.encode("latin-1")
    except UnicodeEncodeError:
        raise Unfit(Corrupt, "a text that does not stand for bytes") from None


def _bytes(resolver: Resolver, value: Any) -> bytes:
    found = resolver.resolve(value)
    if type(found) is not bytes:
        raise Unfit(Corrupt, f"something of the type {type(found).__name__} where bytes belong")
    resolver.charge(len(found))
    return found


def _bytearray(resolver: Resolver, stub: Stub) -> bytearray:
    args = _arguments(stub, 2)
    if len(args) == 2:
        return bytearray(_encoded(resolver, stub))
    return bytearray(_bytes(resolver, args[0]) if args else b"")


def _bytesio(resolver: Resolver, stub: Stub) -> io.BytesIO:
    state = stub.stub_state
    if _arguments(stub, 0) or type(state) is not tuple or len(state) != 3 or type(state[1]) is not int or state[1] < 0:
        raise Unfit(Corrupt, "a BytesIO without its bytes and its place in them")
    made = io.BytesIO(_bytes(resolver, state[0]))
    made.seek(state[1])
    return made


def _namespace(resolver: Resolver, stub: Stub) -> Namespace:
    _arguments(stub, 0)
    return Namespace(_fields(resolver, stub))


def _array_code(stub: Any) -> str:
    """The name of a ``numpy.dtype``: the type's code, behind the byte order that its state tells."""
    if not isinstance(stub, Stub) or type(stub).stub_name != "numpy.dtype":
        raise Unfit(Corrupt, f"a numpy array whose dtype is a {type(stub).__name__}")
    code = stub.stub_args[0] if stub.stub_args else None
    state = (3, "|", None, None, None, -1, -1, 0) if stub.stub_state is None else stub.stub_state
    plain = isinstance(state, tuple) and len(state) >= 5 and not any(state[2:5])
    if not plain or not isinstance(code, str) or not _ARRAY_CODE.fullmatch(code):
        raise Unfit(Unsupported, f"a numpy array of dtype {_short(code)}, which is not a plain number or string type")
    return f"{state[1]}{code.lstrip('<>|=')}" if state[1] in ("<", ">") else code


def _array_dtype(stub: Any) -> Any:
    import numpy as np

    code = _array_code(stub)
    try:
        return np.dtype(code)
    except (TypeError, ValueError):
        raise Unfit(Corrupt, f"a numpy array of the unknown dtype {_short(code)}") from None


def _stored_array(resolver: Resolver, state: Any) -> Any:
    """Plain numbers, row by row, are left as they lie; whatever else numpy knows becomes what it is."""
    if isinstance(state, tuple) and len(state) == 5 and state[3] is False:
        _, shape, pickled, _, data = state
        dtype, content = _array_code(pickled), resolver.resolve(data)
        itemsize = _NUMBERS.get(dtype.lstrip("<>|="))
        sound = (
            isinstance(shape, tuple)
            and len(shape) <= _MOST_DIMENSIONS
            and all(type(n) is int and n >= 0 for n in shape)
        )
        if itemsize and sound and isinstance(content, bytes) and len(content) == prod(shape) * itemsize:
            resolver.charge(len(content))
            return StoredArray(dtype, shape, content)
    return _array(resolver, state)


def _array(resolver: Resolver, state: Any) -> Any:
    import numpy as np

    if not isinstance(state, tuple) or len(state) != 5:
        raise Unfit(Corrupt, "a numpy array without its five-part state")
    _, shape, pickled, fortran, data = state
    if not isinstance(shape, tuple) or any(type(n) is not int or n < 0 for n in shape):
        raise Unfit(Corrupt, f"a numpy array of shape {_short(shape)}")
    dtype, content = _array_dtype(pickled), resolver.resolve(data)
    nbytes = prod(shape) * (1 if dtype.hasobject else dtype.itemsize)
    if not isinstance(content, list if dtype.hasobject else bytes) or len(content) != nbytes:
        raise Unfit(
            Corrupt, f"a numpy array of shape {_short(shape)} and dtype {dtype} whose data does not have {nbytes} bytes"
        )
    resolver.charge(nbytes)
    order: Any = "F" if fortran else "C"
    try:
        if isinstance(content, bytes):
            return np.frombuffer(content, dtype).reshape(shape, order=order).copy(order)
        flat = np.empty(len(content), dtype)
        for index, value in enumerate(content):
            flat[index] = value
        return flat.reshape(shape).copy(order)  # objects are listed row by row, whatever the order in memory
    except (ValueError, OverflowError) as error:  # too many dimensions
        raise Unfit(Corrupt, f"a numpy array of shape {_short(shape)}: {error}") from None


def _short(value: Any) -> str:
    return repr(value)[:60] if isinstance(value, str | tuple) and len(value) < 64 else f"a {type(value).__name__}"


def _reconstruct(resolver: Resolver, stub: Stub) -> Any:
    """``numpy._core.multiarray._reconstruct``: an empty array, whose state follows."""
    cls = stub.stub_args[0] if stub.stub_args else None
    if not isinstance(cls, StubType) or cls.stub_name != "numpy.ndarray":
        raise Unfit(Unsupported, f"a numpy array of the class {getattr(cls, 'stub_name', type(cls).__name__)}")
    return _stored_array(resolver, stub.stub_state)


def _scalar(resolver: Resolver, stub: Stub) -> Any:
    dtype, data = _arguments(stub, 2, 2)
    return _array(resolver, (1, (), dtype, False, data))[()]


def _size(resolver: Resolver, stub: Stub) -> Any:
    (values,) = _arguments(stub, 1, 1)
    resolver.charge(len(shape_of(values)))
    return TorchSize(shape_of(values))


def _device(_resolver: Resolver, stub: Stub) -> Any:
    args = _arguments(stub, 2, 1)
    if type(args[0]) is not str or any(type(arg) is not int for arg in args[1:]):
        raise Unfit(Corrupt, "a torch.device that is not made of a name and a number")
    try:
        return torch_device(*args)
    except ValueError:
        raise Unfit(Unsupported, f"the device {_short(args)}, which torch does not know") from None


def _tensor_v1(resolver: Resolver, stub: Stub) -> Any:
    return resolver.tensor(*_arguments(stub, 4, 4))


def _tensor_v2(resolver: Resolver, stub: Stub) -> Any:
    storage, start, shape, strides, *rest = _arguments(stub, 7, 6)
    _no_lazy(rest[2:])
    return resolver.tensor(storage, start, shape, strides)


def _tensor_v3(resolver: Resolver, stub: Stub) -> Any:
    storage, start, shape, strides, _, _, dtype, *rest = _arguments(stub, 8, 7)
    _no_lazy(rest)
    if not isinstance(dtype, StubType):
        raise Unfit(Corrupt, "a tensor without an element type")
    return resolver.tensor(storage, start, shape, strides, dtype.stub_name)


def _no_lazy(metadata: list[Any]) -> None:
    """``torch._utils.get_tensor_metadata``: bits that say "conjugated" and "negated"."""
    if any(metadata):
        raise Unfit(Unsupported, "a sparse, quantized or lazily negated tensor; save it as a plain one")


def _parameter(resolver: Resolver, stub: Stub) -> Any:
    return resolver.resolve(_arguments(stub, 4, 1)[0])


def _of_class(resolver: Resolver, stub: Stub) -> Any:
    """``torch._tensor._rebuild_from_type_v2(function, class, arguments, state)``: tensors with attributes, or of a subclass."""
    function, cls, args, state = _arguments(stub, 4, 4)
    if not isinstance(function, StubType) or not isinstance(cls, StubType) or type(args) is not tuple:
        raise Unfit(Corrupt, "a tensor that is not made by one of torch's functions")
    if cls.stub_name not in _TENSOR_CLASSES:
        return resolver.of_subclass(cls.stub_name, args, state)
    if function.stub_name not in _TENSORS:
        raise Unfit(Unsupported, f"a tensor that is made by {function.stub_name}")
    return _TENSORS[function.stub_name].build(resolver, function(*args))


def _not_plain(_resolver: Resolver, _stub: Stub) -> Any:
    raise Unfit(Unsupported, "a sparse, quantized or lazily negated tensor; save it as a plain one")


def _without_data(_resolver: Resolver, _stub: Stub) -> Any:
    raise Unfit(Unsupported, "a tensor without stored data (saved on the meta device, or a wrapper)")


def _layout(_resolver: Resolver, _stub: Stub) -> Any:
    raise Unfit(Unsupported, "a torch.layout")


_TENSORS = {
    "torch._utils._rebuild_tensor": ClassMeaning(_tensor_v1),
    "torch._utils._rebuild_tensor_v2": ClassMeaning(_tensor_v2),
    "torch._utils._rebuild_tensor_v3": ClassMeaning(_tensor_v3),
    "torch._utils._rebuild_parameter": ClassMeaning(_parameter),
    "torch._utils._rebuild_parameter_with_state": ClassMeaning(_parameter),
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": ClassMeaning(_parameter),
    "torch._utils._rebuild_sparse_tensor": ClassMeaning(_not_plain),
    "torch._utils._rebuild_nested_tensor": ClassMeaning(_not_plain),
    "torch._utils._rebuild_qtensor": ClassMeaning(_not_plain),
    "torch._utils._rebuild_meta_tensor_no_storage": ClassMeaning(_without_data),
    "torch._utils._rebuild_wrapper_subclass": ClassMeaning(_without_data),
    "torch._utils._rebuild_device_tensor_from_numpy": ClassMeaning(_without_data),
}
MEANINGS: dict[str, ClassMeaning] = {
    **_TENSORS,
    "torch._tensor._rebuild_from_type_v2": ClassMeaning(_of_class),
    "torch.Size": ClassMeaning(_size),
    "torch.device": ClassMeaning(_device),
    "torch.serialization._get_layout": ClassMeaning(_layout),
    "collections.OrderedDict": ClassMeaning(_ordered, state=True, items=True),
    "collections.Counter": ClassMeaning(_counter, items=True),
    "collections.defaultdict": ClassMeaning(_defaultdict, items=True),
    "collections.deque": ClassMeaning(_deque, items=True),
    "builtins.dict": ClassMeaning(_dict, items=True),
    "builtins.list": ClassMeaning(_only_sequence),
    "builtins.tuple": ClassMeaning(lambda resolver, stub: tuple(_only_sequence(resolver, stub))),
    "builtins.set": ClassMeaning(lambda resolver, stub: _hashable(resolver, stub, set)),
    "builtins.frozenset": ClassMeaning(lambda resolver, stub: _hashable(resolver, stub, frozenset)),
    "builtins.complex": ClassMeaning(_complex),
    "builtins.bytes": ClassMeaning(_no_bytes),
    "builtins.bytearray": ClassMeaning(_bytearray),
    "_codecs.encode": ClassMeaning(_encoded),
    "_io.BytesIO": ClassMeaning(_bytesio, state=True),
    "io.BytesIO": ClassMeaning(_bytesio, state=True),
    "argparse.Namespace": ClassMeaning(_namespace, state=True),
    "numpy.dtype": ClassMeaning(lambda resolver, stub: _array_dtype(stub), state=True),
    **{f"{module}._reconstruct": ClassMeaning(_reconstruct, state=True) for module in _NUMPY},
    **{f"{module}.scalar": ClassMeaning(_scalar) for module in _NUMPY},
}
_CLASSES = {*STORAGES, *_FACTORIES, *_TENSOR_CLASSES, *_QUANTIZED, "numpy.ndarray"}
"""Names that stand only inside of what others mean; an object of such a class is nothing."""
