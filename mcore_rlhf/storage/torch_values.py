"""What a saved tree holds of torch's, without torch: small tensors, sizes, element types, devices.

They are written back as torch's own, to the same bytes. Live engines make torch's of them in one place:
``mcore_rlhf.engines.stateful.torch_values``.
"""

from __future__ import annotations

import re
import struct
import sys
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

from ..core.catalog import DType, Shape, dtype_of, row_major

_ELEMENT_TYPE = re.compile(
    r"bool|bfloat16|float(16|32|64)|float8_e(4m3fn|5m2|4m3fnuz|5m2fnuz)|float8_e8m0fnu|float4_e2m1fn_x2|b?complex32|complex(64|128)"
    r"|u?int([1-8]|16|32|64)|qint(8|32)|quint(8|4x2|2x4)|bits(8|16|1x8|2x4|4x2)"
)
_DEVICE = re.compile(
    r"(cpu|cuda|ipu|xpu|mkldnn|opengl|opencl|ideep|hip|ve|fpga|maia|xla|lazy|vulkan|mps|meta|hpu|mtia|privateuseone)(:\d{1,3})?"
)
"""Source of both: torch 2.13.0, ``c10/core/ScalarType.h`` and ``c10/core/DeviceType.cpp``."""


_CODES = {"float32": "<f", "float64": "<d", "int64": "<q", "int32": "<i", "uint8": "<B", "bool": "<?"}


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class SmallTensor:
    """A tensor that was read into memory since it is no weight: a step, a generator's state, a scale.

    Args:
        data: Its storage, from the first element on.
        dtype: Element type.
        shape: Its shape.
        strides: Its strides, in elements.
    """

    data: bytes
    dtype: DType
    shape: Shape
    strides: Shape

    @classmethod
    def of(cls, value: Any, dtype: DType) -> SmallTensor:
        """A contiguous one of a number, or of numbers.

        Args:
            value: What numpy makes an array of.
            dtype: Its element type, one that numpy has.
        """
        import numpy as np

        array = np.asarray(value, dtype.name)
        return cls(array.tobytes(), dtype, array.shape, row_major(array.shape))

    @classmethod
    def of_bytes(cls, data: bytes) -> SmallTensor:
        """One of bytes: a generator's state."""
        return cls(data, dtype_of("uint8"), (len(data),), (1,))

    @classmethod
    def empty(cls, dtype: DType) -> SmallTensor:
        """One without elements, which keeps a place."""
        return cls(b"", dtype, (0,), (1,))

    @property
    def words(self) -> Any:
        """Its elements as unsigned words that hold their bits: an array of its shape."""
        import numpy as np

        from ..core.execute import WORDS, strided

        flat = np.frombuffer(self.data, WORDS[self.dtype.itemsize])
        return strided(flat, 0, self.shape, self.strides)

    def numpy(self) -> Any:
        """Its elements as numbers; those of types that numpy does not have as fp32."""
        from ..core.cast import numbers

        return numbers(self.words, self.dtype)

    def contiguous(self) -> bytes:
        """The bytes of its elements, row by row."""
        data: bytes = self.words.tobytes()
        return data

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return self.numel() * self.dtype.itemsize

    def numel(self) -> int:
        """How many elements it has."""
        return prod(self.shape)

    def item(self) -> Any:
        """The one element that it has, as a number."""
        code = _CODES.get(self.dtype.name)
        if code is not None and self.numel() == 1:  # a step: no reason to import numpy
            return struct.unpack_from(code, self.data)[0]
        return self.numpy().item()

    def tolist(self) -> Any:
        """Its elements as a nest of lists."""
        return self.numpy().tolist()

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __bool__(self) -> bool:
        return bool(self.item()) if self.numel() == 1 else self.numel() > 0  # of several: that there are some

    def __eq__(self, other: object) -> bool:
        if isinstance(other, SmallTensor):
            if self.shape != other.shape or self.numel() == 1:
                return self.shape == other.shape and bool(self.item() == other.item())
            return bool((self.numpy() == other.numpy()).all())
        return isinstance(other, int | float) and self.numel() == 1 and bool(self.item() == other)

    __hash__ = None  # type: ignore[assignment]  # no key of a dictionary

    def __repr__(self) -> str:
        said = "" if self.dtype.name in ("float32", "int64", "bool") else f", dtype=torch.{self.dtype}"
        return f"tensor({_shown(self.tolist())}{said})"


def _shown(value: Any) -> str:
    """As torch prints it."""
    if isinstance(value, list):
        return f"[{', '.join(map(_shown, value))}]"
    if not isinstance(value, float):
        return str(value)
    if not 1e-4 <= abs(value) < 1e8 and value:
        return f"{value:.4e}"
    return f"{int(value)}." if value == int(value) else f"{value:.4f}"


class TorchSize(tuple[int, ...]):
    """A ``torch.Size``."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"torch.Size({list(self)})"


@dataclass(frozen=True, slots=True, repr=False)
class TorchDtype:
    """A ``torch.dtype``; one object for each name, see :func:`torch_dtype`.

    Args:
        name: Without ``torch.``.
    """

    name: str

    def __repr__(self) -> str:
        return f"torch.{self.name}"

    def __reduce__(self) -> tuple[Any, ...]:
        """So that a copy is the same object."""
        return torch_dtype, (self.name,)


@cache
def torch_dtype(name: object) -> TorchDtype:
    """The element type of that name; see :func:`mcore_rlhf.core.catalog.dtype_of` for those that our own tensors can have.

    Raises:
        ValueError: Torch has none of that name.
    """
    text = str(name).removeprefix("torch.")
    if _ELEMENT_TYPE.fullmatch(text) is None:
        raise ValueError(f"torch has no element type {text}")
    return TorchDtype(text)


@dataclass(frozen=True, slots=True, repr=False)
class TorchDevice:
    """A ``torch.device``.

    Args:
        kind: Its type, such as ``cuda``.
        index: Its number, or None.
    """

    kind: str
    index: int | None = None

    @property
    def args(self) -> tuple[str] | tuple[str, int]:
        """What torch makes one of."""
        return (self.kind,) if self.index is None else (self.kind, self.index)

    def __repr__(self) -> str:
        return f"device(type={self.kind!r}{'' if self.index is None else f', index={self.index}'})"

    def __str__(self) -> str:
        return ":".join(map(str, self.args))


def torch_device(name: str, *index: int) -> TorchDevice:
    """The device of a name such as ``cuda`` or ``cuda:1``.

    Raises:
        ValueError: Torch knows none of that name.
    """
    found = _DEVICE.fullmatch(name)
    if found is None or (index and (found[2] or index[0] < 0)):
        raise ValueError(f"torch has no device {name}")
    number = [int(found[2][1:])] if found[2] else index[:1]
    return TorchDevice(found[1], *number)


def cpu_generator_state(seed: int) -> SmallTensor:
    """What ``torch.Generator().manual_seed(seed).get_state()`` gives: a Mersenne Twister that was never asked.

    Source: torch 2.13.0, ``aten/src/ATen/CPUGeneratorImpl.cpp`` (``CPUGeneratorImplState``), ``core/MT19937RNGEngine.h``; the
    twister is seeded as numpy's is.
    """
    import numpy as np

    twister: Any = np.random.RandomState(seed % 2**32).get_state(legacy=False)
    words = twister["state"]["key"].astype("<u8").tobytes()
    return SmallTensor.of_bytes(struct.pack("<QiiQ", seed % 2**64, 1, 1, 0) + words + bytes(3 * 8 + 8 + 8))


def cuda_generator_state(seed: int) -> SmallTensor:
    """What a CUDA generator has after it was given a seed: the seed and an offset."""
    return SmallTensor.of_bytes(struct.pack("<QQ", seed, 0))


def is_tensor(value: object) -> bool:
    """Whether a value is a small tensor, or a live trainer's tensor."""
    return isinstance(value, SmallTensor) or hasattr(value, "untyped_storage")


def inert(value: Any) -> Any:
    """A live trainer's tensor, size, element type or device as one of the above; everything else as it is.

    Torch is not imported: where it is not loaded, there is nothing of its own.
    """
    torch = sys.modules.get("torch")
    if torch is None or isinstance(value, SmallTensor | TorchDtype | TorchSize | TorchDevice):
        return value
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1)
        data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        return SmallTensor(data, dtype_of(value.dtype), tuple(value.shape), row_major(tuple(value.shape)))
    if isinstance(value, torch.Size):
        return TorchSize(value)
    if isinstance(value, torch.dtype):
        return torch_dtype(value)
    return torch_device(str(value)) if isinstance(value, torch.device) else value
