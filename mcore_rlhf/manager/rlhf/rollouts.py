"""A finished rollout: one sample of one prompt, with all that training needs of it, as bytes and back."""

from __future__ import annotations

import json
import math
import struct
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ...errors import Corrupt, UsageError
from ...storage.reading import parse_json
from ...storage.records import Natural, record_of, shorten
from .prompts import Prompt

if TYPE_CHECKING:
    import torch

Values: TypeAlias = "NDArray[Any] | torch.Tensor"
"""Tokens, log-probabilities and the like; a tensor is given back as a tensor only where NumPy lacks its type."""

_LENGTH = struct.Struct("<I")
_MAX_HEAD, _MAX_TENSORS, _MAX_DIMS = 16 << 20, 1024, 32


class SampleKey(NamedTuple):
    """Which rollout of a run: a place in the order of prompts, and a sample of its group."""

    epoch: int
    position: int
    sample: int


@dataclass(frozen=True, slots=True)
class Rollout:
    """One finished sample of one prompt.

    Args:
        prompt_id: The prompt's index in the dataset, or its name.
        epoch, position: Its place in the order of prompts; where there is no :class:`~.prompts.PromptSampler`, the number of the epoch,
            and whatever number tells prompts of an epoch apart.
        sample: Which of the group's samples.
        version: Version of the weights that it was made with.
        seed: The sample's own that it was made with, of :attr:`~.prompts.Prompt.sample_seeds`: where another one is asked for, it is
            another run's. 0 where nobody knows.
        reward: Its reward, where it is known already; True and False are 1 and 0.
        tensors: ``tokens``, ``logprobs``, …: arrays or tensors of any shape.
        extra: What else belongs to it: plain values that JSON can hold.
    """

    prompt_id: int | str
    epoch: int
    position: int
    sample: int
    version: int
    seed: int = 0
    reward: float | None = None
    tensors: Mapping[str, Values] = field(default_factory=dict)
    extra: Mapping[str, object] = field(default_factory=dict)

    @classmethod
    def of(
        cls, prompt: Prompt, sample: int, *, version: int, reward: float | None = None, **tensors: Values
    ) -> Rollout:
        """Of a prompt that a sampler has handed out; its seed is the sample's own.

        Args:
            prompt: It.
            sample: Which of the group's samples.
            version: Version of the weights that it was made with.
            reward: Its reward, where it is known already.
            tensors: See the class.
        """
        place = (prompt.prompt_id, prompt.epoch, prompt.position, sample)
        return cls(*place, version=version, seed=prompt.sample_seeds[sample], reward=reward, tensors=tensors)

    @property
    def key(self) -> SampleKey:
        """What tells it from all others of the run."""
        return SampleKey(self.epoch, self.position, self.sample)

    def to_bytes(self) -> bytes:
        """It as bytes: a head in JSON behind its length, then the tensors' elements, C-contiguous, little-endian.

        Raises:
            UsageError: A tensor is none, or something is not what can be read back.
        """
        parts: list[bytes | memoryview] = []
        told: list[tuple[str, str, tuple[int, ...]]] = []
        for name, value in self.tensors.items():
            dtype, shape, data = _elements(name, value)
            told.append((name, dtype, shape))
            parts.append(data)
        head = {
            "prompt_id": str(self.prompt_id) if isinstance(self.prompt_id, str) else _whole("prompt_id", self.prompt_id),
            "epoch": _whole("epoch", self.epoch, 0), "position": _whole("position", self.position, 0),
            "sample": _whole("sample", self.sample, 0), "version": _whole("version", self.version),
            "seed": _whole("seed", self.seed), "reward": _number("reward", self.reward), "tensors": told, "extra": self.extra,
        }  # fmt: skip
        if not isinstance(self.extra, Mapping):
            raise UsageError(f"rollout: extra: expected names and values, found {shorten(self.extra)}")
        try:
            text = _ENCODE(head).encode()
        except (TypeError, ValueError) as error:
            raise UsageError(f"rollout {self.key}: holds what JSON cannot: {error}") from None
        if len(text) > _MAX_HEAD or len(told) > _MAX_TENSORS:
            raise UsageError(
                f"rollout {self.key}: {len(told):,} tensors, and {len(text):,} bytes beside them, are more than the "
                f"{_MAX_TENSORS:,} and {_MAX_HEAD:,} that are read back\nPut what is large into one tensor."
            )
        return b"".join((_LENGTH.pack(len(text)), text, *parts))

    @classmethod
    def from_bytes(cls, data: bytes | memoryview, where: str) -> Rollout:
        """From :meth:`to_bytes`.

        Raises:
            CheckpointError: It is no rollout: bytes of another program, whose checksums are right; or a newer release's.
        """
        head, at = _read_head(data, where)
        tensors: dict[str, Values] = {}
        for one in head.tensors:
            tensors[one.name], at = _taken(one, data, at, where)
        if at != len(data):
            raise Corrupt(f"{where}: expected a rollout of {at:,} bytes, found {len(data):,}")
        values = {name: getattr(head, name) for name in _PLAIN}
        return cls(**values, tensors=tensors)


class RolloutTensor(NamedTuple):
    """A tensor of a stored rollout: its name, type and shape."""

    name: str
    dtype: str
    shape: tuple[Natural, ...]


@dataclass(frozen=True, slots=True)
class RolloutHead:
    """A rollout without its tensors' elements; see :class:`Rollout`."""

    prompt_id: int | str
    epoch: Natural
    position: Natural
    sample: Natural
    version: int
    seed: int
    reward: float | None
    tensors: tuple[RolloutTensor, ...]
    extra: Mapping[str, object]


_PLAIN = ("prompt_id", "epoch", "position", "sample", "version", "seed", "reward", "extra")
_ENCODE = json.JSONEncoder(separators=(",", ":"), default=lambda value: _plain(value)).encode


def _whole(name: str, value: object, least: int | None = None) -> int:
    """A whole number as Python's; a rollout of another would be a damaged one to whoever reads it."""
    found = value if type(value) is int else _one(value)
    if type(found) is not int or (least is not None and found < least):
        begin = "" if least is None else f" from {least} on"
        raise UsageError(f"rollout: {name}: expected a whole number{begin}, found {shorten(value)}")
    return found


def _number(name: str, value: object) -> float | None:
    """A number, of which right and wrong are 1 and 0, or none."""
    found = value if value is None or type(value) is float else _one(value)
    if found is not None and not isinstance(found, int | float):
        raise UsageError(f"rollout: {name}: expected a number or None, found {shorten(value)}")
    return None if found is None else float(found)


def _one(value: object) -> object:
    """See :func:`_plain`; anything else is as it is."""
    with suppress(TypeError):
        return _plain(value)
    return value


def _plain(value: object) -> object:
    """A number of NumPy's, or a tensor of one element, as Python's."""
    if isinstance(value, np.generic):
        return value.item()
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    raise TypeError(f"a {type(value).__name__}")


class StoredPlace(NamedTuple):
    """What an index needs of a stored rollout."""

    key: SampleKey
    prompt_id: int | str
    version: int


def read_place(data: bytes | memoryview, where: str) -> StoredPlace:
    """Which rollout it is; a million of them take seconds.

    Raises:
        Corrupt: It is no rollout.
    """
    content, _ = _content(data, where, json.loads)
    try:
        place = StoredPlace(
            SampleKey(*(content[name] for name in SampleKey._fields)), content["prompt_id"], content["version"]
        )
    except (KeyError, TypeError) as error:
        raise Corrupt(f"{where}: is no rollout: {error} is missing") from None
    numbers = all(type(one) is int and one >= 0 for one in place.key) and type(place.version) is int
    if numbers and type(place.prompt_id) in (int, str):
        return place
    raise Corrupt(f"{where}: is no rollout: {shorten(place)}")


def _content(data: bytes | memoryview, where: str, parse: Callable[[str], Any] = parse_json) -> tuple[Any, int]:
    length = _LENGTH.unpack_from(data)[0] if len(data) >= _LENGTH.size else -1
    end = _LENGTH.size + length
    if not 0 <= length <= _MAX_HEAD or end > len(data):
        raise Corrupt(f"{where}: is no rollout: its head should have {length:,} of {len(data):,} bytes")
    try:
        return parse(str(data[_LENGTH.size : end], "utf-8")), end
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"{where}: is no rollout: {error}") from None


def _read_head(data: bytes | memoryview, where: str) -> tuple[RolloutHead, int]:
    content, end = _content(data, where)
    head = record_of(RolloutHead, content, where)
    if len(head.tensors) > _MAX_TENSORS:
        raise Corrupt(f"{where}: {len(head.tensors):,} tensors, and at most {_MAX_TENSORS:,} are taken")
    return head, end


def _elements(name: str, value: object) -> tuple[str, tuple[int, ...], bytes | memoryview]:
    """The type, the shape and the elements of an array or tensor."""
    if type(name) is not str:
        raise UsageError(f"rollout: tensors: expected names, found {shorten(name)}")
    torch = sys.modules.get("torch")  # a tensor cannot exist before torch was imported
    if torch is not None and isinstance(value, torch.Tensor):
        dtype, shape = str(value.dtype).removeprefix("torch."), tuple(value.shape)
        if dtype not in _NUMPY and dtype not in _TORCH:
            raise UsageError(f"rollout: {name}: expected numbers of a known type, found a tensor of {dtype}")
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return dtype, shape, _bytes_of(flat.numpy())
    array = np.asarray(value)
    known = _NAMES.get(array.dtype) or array.dtype.name
    if known not in _NUMPY:
        raise UsageError(
            f"rollout: {name}: expected numbers of a known type, found {type(value).__name__} of {array.dtype}"
        )
    if array.dtype != _NUMPY[known]:
        array = array.astype(_NUMPY[known])  # big-endian
    return known, array.shape, _bytes_of(array)


def _bytes_of(array: NDArray[Any]) -> bytes | memoryview:
    """The elements in their order, without a copy where they lie so."""
    return array.data.cast("B") if array.flags.c_contiguous and array.size and array.ndim else array.tobytes()


def _taken(one: RolloutTensor, data: bytes | memoryview, at: int, where: str) -> tuple[Values, int]:
    """A tensor out of the elements that begin at a place, and where they end; a copy of its own, which can be changed."""
    make, itemsize = _maker(one, where)
    shape = one.shape[:_MAX_DIMS]
    end = at + math.prod(shape) * itemsize
    spanned = math.prod(max(1, size) for size in shape) * itemsize  # what is empty may still be too large to be made
    if len(one.shape) > _MAX_DIMS or end > len(data) or spanned > _MOST_SPANNED:
        raise Corrupt(
            f"{where}: {shorten(one.name)}: {shorten(one.shape)} of {shorten(one.dtype)} does not fit into {len(data):,} bytes"
        )
    return make(bytearray(data[at:end])), end


def _maker(one: RolloutTensor, where: str) -> tuple[Any, int]:
    """What makes a tensor of its elements, and how many bytes one has."""
    if one.dtype in _NUMPY:
        dtype = _NUMPY[one.dtype]
        return lambda data: np.frombuffer(data, dtype).reshape(one.shape), dtype.itemsize
    if one.dtype not in _TORCH:
        raise Corrupt(f"{where}: {shorten(one.name)}: no type {shorten(one.dtype)} is known")
    import torch

    kind: torch.dtype = getattr(torch, one.dtype)

    def tensor(data: bytearray) -> torch.Tensor:
        return (
            torch.frombuffer(data, dtype=torch.uint8).view(kind).reshape(one.shape)
            if data
            else torch.empty(one.shape, dtype=kind)
        )

    return tensor, _TORCH[one.dtype]


_NUMPY = {
    name: np.dtype(name).newbyteorder("<")
    for name in (
        "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64",
        "complex64", "complex128",
    )
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _NUMPY.items()}
"""Of little-endian ones: a type takes microseconds to say its name, a rollout of a few tokens not many more."""
_MOST_SPANNED = 1 << 62
_TORCH = {"bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
"""What only torch has, and the bytes of an element."""
