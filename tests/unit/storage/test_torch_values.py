"""What stands for torch's values without torch: it pickles to the same bytes, and says the same of itself."""

from __future__ import annotations

import copy
import io
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rlhf.core.catalog import dtype_of
from mcore_rlhf.engines.stateful import torch_values
from mcore_rlhf.storage.pickling import pickle_tree
from mcore_rlhf.storage.torch_values import (
    SmallTensor,
    TorchSize,
    cpu_generator_state,
    cuda_generator_state,
    inert,
    torch_device,
    torch_dtype,
)

STEP = SmallTensor.of(3.0, dtype_of("float32"))


def of_torch(tree: Any) -> bytes:
    """The pickle that torch.save makes."""
    buffer = io.BytesIO()
    torch.save(tree, buffer)
    with zipfile.ZipFile(buffer) as saved:
        return saved.read("archive/data.pkl")


TREES = {
    "step": {"a": STEP, "b": copy.deepcopy(STEP), "c": SmallTensor.of([1, 2], dtype_of("int64"))},
    "state": {"rng": SmallTensor.of_bytes(bytes(range(16))), "none": SmallTensor.empty(dtype_of("bfloat16"))},
    "two empty ones": [SmallTensor.empty(dtype_of("float32")), SmallTensor.empty(dtype_of("float32"))],
    "names": [torch_dtype("bfloat16"), {torch_dtype("float32"): torch_dtype("bfloat16")}, torch_dtype("quint8")],
    "sizes": {"a": TorchSize((2, 3)), "b": TorchSize(()), "c": TorchSize((1, 2, 3, 4))},
    "devices": [torch_device("cpu"), torch_device("cuda", 1), torch_device("cuda:3")],
    "float8": SmallTensor(b"\x38\x40", dtype_of("float8_e4m3fn"), (2,), (1,)),
}


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_pickles_are_torchs_byte_for_byte(tree: Any) -> None:
    expected = of_torch(torch_values(tree))
    assert pickle_tree(tree, "x").data == expected
    assert pickle_tree(torch_values(tree), "x").data == expected  # a live trainer's own
    assert pickle_tree(copy.deepcopy(tree), "x").data == of_torch(torch_values(copy.deepcopy(tree)))


@pytest.mark.parametrize("seed", [0, 1, 1234, 2**32 - 1, 2**32, 2**62 + 12345])
def test_generators_begin_as_torchs_do(seed: int) -> None:
    assert torch.equal(torch_values(cpu_generator_state(seed)), torch.Generator().manual_seed(seed).get_state())
    assert cuda_generator_state(seed).data == seed.to_bytes(8, "little") + bytes(8)


def test_every_element_type_of_torch_is_known() -> None:
    for dtype in {value for value in vars(torch).values() if isinstance(value, torch.dtype)}:
        assert (repr(torch_dtype(dtype)), torch_values(torch_dtype(dtype))) == (repr(dtype), dtype)
    with pytest.raises(ValueError, match="no element type float7"):
        torch_dtype("torch.float7")


@pytest.mark.parametrize("value", [3.0, 0.5, 1e-5, 3, True, [1.0, 2.5], -2.0], ids=str)
def test_it_prints_as_torchs_do(value: Any) -> None:
    tensor = torch.tensor(value)
    ours = inert(tensor)
    assert torch.equal(torch_values(ours), tensor)
    if not isinstance(value, list):
        assert (repr(ours), ours.item(), ours.tolist()) == (repr(tensor), tensor.item(), tensor.tolist())
    for one in (torch.device("cuda", 1), torch.device("cpu"), torch.Size([2, 3]), torch.bfloat16):
        assert (repr(inert(one)), str(inert(one)), torch_values(inert(one))) == (repr(one), str(one), one)


@pytest.mark.parametrize("name", ["tpu", "cuda:x", "cuda:-1", "", "cuda:1:2"])
def test_devices_that_torch_does_not_know(name: str) -> None:
    with pytest.raises(ValueError, match="no device"):
        torch_device(name)


def test_strides_are_kept(tmp_path: Path) -> None:
    tensor = SmallTensor(bytes(range(6)), dtype_of("uint8"), (3, 2), (1, 3))
    assert tensor.tolist() == [[0, 3], [1, 4], [2, 5]]
    assert torch_values(tensor).tolist() == tensor.tolist()
    assert torch_values(tensor).stride() == (1, 3)
    assert tensor == SmallTensor(bytes([0, 3, 1, 4, 2, 5]), dtype_of("uint8"), (3, 2), (2, 1))
