"""Element types by name, without torch: a plan only needs to know how wide an element is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DType:
    """An element type.

    Args:
        name: torch's name without the ``torch.`` prefix, for example ``bfloat16``.
        itemsize: Bytes per element.
    """

    name: str
    itemsize: int

    def __str__(self) -> str:
        return self.name


_ITEMSIZES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint64": 8, "uint32": 4, "uint16": 2, "uint8": 1,
    "bool": 1, "complex64": 8, "complex128": 16,
}  # fmt: skip
_BY_NAME = {name: DType(name, itemsize) for name, itemsize in _ITEMSIZES.items()}
_ALIASES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float": "float32",
    "fp64": "float64",
}

BFLOAT16 = _BY_NAME["bfloat16"]
FLOAT16 = _BY_NAME["float16"]
FLOAT32 = _BY_NAME["float32"]
UINT8 = _BY_NAME["uint8"]
FLOATING = frozenset(dtype for dtype in _BY_NAME.values() if "float" in dtype.name)


def dtype_of(name: object) -> DType:
    """The element type of that name; ``torch.bfloat16``, ``"torch.bfloat16"``, ``"bfloat16"`` and ``"bf16"`` are one.

    Raises:
        ValueError: The name is not known.
    """
    text = str(name).removeprefix("torch.")
    try:
        return _BY_NAME[_ALIASES.get(text, text)]
    except KeyError:
        raise ValueError(f"unknown dtype {text!r}; known: {', '.join(sorted(_BY_NAME))}") from None
