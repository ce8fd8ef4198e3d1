"""torch's own restricted unpickler (``weights_only=True``), fed with stubs, on tensors without data.

The pickle is taken out of its file, checked, and put into a small zip in memory whose records are all empty:
torch then cannot read a byte of a tensor, and what was judged is what is loaded, even if the file changes
meanwhile. torch gives every storage loaded on the meta device the offset of its record
(``_checkpoint_offset``, ``torch/serialization.py`` 2.13, ``_load.load_tensor``), which says the record's key.
"""

from __future__ import annotations

import io
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

from ..errors import CheckpointError, Corrupt, Unsupported
from .standins import Containers, PickledArray, PickledDtype, PickledScalar, empty_bytes, reconstruct
from .stubs import stub_class
from .trust import Verdict, require_trust
from .zipheaders import archive

_lock = threading.Lock()
"""torch keeps its list of allowed globals per process."""

_PLAIN_CONTAINERS: dict[str, type[list[Any]] | type[OrderedDict[Any, Any]]] = {
    "append": list, "extend": list, "SETITEM": OrderedDict, "SETITEMS": OrderedDict,
}  # fmt: skip
_WANTS_CONTAINER = re.compile(r"Can only (append|extend|SETITEMS?) .*but got <class '([\w.]+)'>")
"""torch ``_weights_only_unpickler.py``; another wording merely means that such a file is refused."""


@dataclass(frozen=True, slots=True)
class Unpickled:
    """What a pickle holds, before tensors and stand-ins are resolved.

    Args:
        tree: The object; tensors are on the meta device, numpy objects are :mod:`.standins`.
        keys: Storage key by the ``_checkpoint_offset`` of a storage.
        containers: Which plain containers stand for others.
    """

    tree: Any
    keys: Mapping[int, str]
    containers: Containers


def unpickle(data: bytes, storage_keys: Collection[str], file: str, stubs: Collection[str] = ()) -> Unpickled:
    """Load the ``data.pkl`` of a torch-save zip without running anything of it.

    Args:
        data: The pickle.
        storage_keys: Keys of the storages that the zip holds.
        file: Name of the file, for messages.
        stubs: Full names of classes to load as stubs, besides those of the known frameworks.

    Raises:
        Untrusted: It asks for a class or function that is not allowed; all of them are named.
        Corrupt: It cannot be unpickled.
        Unsupported: Another pickle protocol than 2, or a torch that is too old.
    """
    if data[:1] == b"\x80" and data[1:2] != b"\2":
        raise Unsupported(
            f"{file}: its pickle has protocol {data[1] if len(data) > 1 else '?'}; "
            "torch's safe unpickler reads protocol 2 only.\n"
            "Save the file again without pickle_protocol=…, which is torch.save's default."
        )
    members = {"data.pkl": data, "byteorder": b"little", "version": b"3\n"}
    zipped, placed = archive("archive", members | {f"data/{key}": b"" for key in storage_keys})
    keys = {placed[f"data/{key}"].data_offset: key for key in storage_keys}
    without_data = _meta_loading()
    with _lock, _only_safe_globals({}):
        verdicts = require_trust(_globals(zipped, file), stubs, file)
        tree, containers = _load(zipped, verdicts, file, without_data)
    return Unpickled(tree, keys, containers)


def _globals(zipped: bytes, file: str) -> list[str]:
    from torch.serialization import get_unsafe_globals_in_checkpoint

    with _damage_named(file):
        return list(get_unsafe_globals_in_checkpoint(io.BytesIO(zipped)))


def _load(
    zipped: bytes,
    verdicts: Mapping[str, Verdict],
    file: str,
    without_data: Callable[[], AbstractContextManager[Any]],
) -> tuple[Any, Containers]:
    """Load; a stub that turns out to be a list or dictionary subclass is learnt from torch's refusal to fill
    it.
    """
    plain: dict[str, type[list[Any]] | type[OrderedDict[Any, Any]]] = {}
    while True:
        containers = Containers()
        allowed = {name: _object(name, verdict, containers, plain) for name, verdict in verdicts.items()}
        try:
            with _damage_named(file), _only_safe_globals(allowed), without_data():
                return _torch_load(zipped), containers
        except Corrupt as error:
            wish = _WANTS_CONTAINER.search(str(error.__cause__))
            if wish is None or wish[2] in plain or verdicts.get(wish[2]) is not Verdict.STUB:
                raise
            plain[wish[2]] = _PLAIN_CONTAINERS[wish[1]]


def _torch_load(zipped: bytes) -> Any:
    import torch

    return torch.load(io.BytesIO(zipped), map_location="meta", weights_only=True, mmap=False)


def _object(name: str, verdict: Verdict, containers: Containers, plain: Mapping[str, Any]) -> Any:
    """What torch's unpickler gets for a name."""
    if verdict is Verdict.STUB:
        stub = stub_class(name)
        return containers.subclass(stub, plain[name]) if name in plain else stub
    if name == "collections.defaultdict":
        return containers.defaultdict
    if name == "collections.deque":
        return containers.deque
    return _real_objects()[name]


@cache
def _real_objects() -> dict[str, Any]:
    """Everything of ``trust.REAL`` that is the same for every file."""
    import argparse

    real: dict[str, Any] = {"argparse.Namespace": argparse.Namespace, "numpy.ndarray": PickledArray}
    real |= {"_io.BytesIO": io.BytesIO, "io.BytesIO": io.BytesIO, "numpy.dtype": PickledDtype}
    real["builtins.bytes"] = empty_bytes
    for builtin in (list, dict, int, float, str, bool, tuple, frozenset):
        real[f"builtins.{builtin.__name__}"] = builtin
    for module in ("numpy.core.multiarray", "numpy._core.multiarray"):
        real |= {f"{module}._reconstruct": reconstruct, f"{module}.scalar": PickledScalar}
    return real


@contextmanager
def _only_safe_globals(allowed: Mapping[str, Any]) -> Iterator[None]:
    """Allow these names and no others. Names that someone else allowed in this process come back afterwards.

    Megatron allows its real classes when it is imported; with both, it would be chance which one torch takes.
    """
    from torch.serialization import add_safe_globals, clear_safe_globals, get_safe_globals

    before = get_safe_globals()
    clear_safe_globals()
    try:
        add_safe_globals([(value, name) for name, value in allowed.items()])
        yield
    finally:
        clear_safe_globals()
        add_safe_globals(before)


@contextmanager
def _damage_named(file: str) -> Iterator[None]:
    """Whatever a damaged or forged pickle makes the unpickler raise becomes one kind of error, which names
    the file.
    """
    try:
        yield
    except CheckpointError as error:
        raise type(error)(f"{file}: the pickle holds {error}.") from error
    except Exception as error:
        reason = str(error).split("WeightsUnpickler error:")[-1].split("Check the documentation")[0]
        reason = " ".join(reason.split())[-300:]
        raise Corrupt(
            f"{file}: the pickle inside cannot be read: {type(error).__name__}: {reason}\n"
            "The file is damaged, or was not written by torch.save. Copy it again, or use an older step."
        ) from error


@cache
def _meta_loading() -> Callable[[], AbstractContextManager[Any]]:
    """The context in which this torch gives meta storages their offsets; tried out once per process.

    Raises:
        Unsupported: There is none.
    """
    import torch

    if _gives_offsets(nullcontext):
        return nullcontext
    from torch._subclasses.fake_tensor import FakeTensorMode  # where torch 2.6 does it

    if _gives_offsets(FakeTensorMode):
        return FakeTensorMode
    raise Unsupported(
        f"torch {torch.__version__} cannot load a file's structure without its data; torch 2.6 or newer can."
    )


_ONE_TENSOR = (
    b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000"
    b"X\x03\x00\x00\x00cpuK\x01tQK\x00K\x01\x85K\x01\x85\x89ccollections\nOrderedDict\n)RtR."
)


def _gives_offsets(context: Callable[[], AbstractContextManager[Any]]) -> bool:
    zipped, placed = archive("archive", {"data.pkl": _ONE_TENSOR, "version": b"3\n", "data/0": b""})
    try:
        with context():
            tensor = _torch_load(zipped)
    except Exception:
        return False
    return getattr(tensor.untyped_storage(), "_checkpoint_offset", None) == placed["data/0"].data_offset
