"""A rollout as bytes and back, held against a reader that was written by hand."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import replace

import numpy as np
import pytest
import torch

from mcore_rlhf import PromptSampler, Rollout
from mcore_rlhf.errors import CheckpointError, Corrupt, UsageError
from mcore_rlhf.manager.rlhf.rollouts import read_place

TENSORS = {
    "tokens": np.arange(7, dtype=np.int32),
    "logprobs": torch.linspace(-1, 0, 7),
    "mask": np.array([True, False]),
    "bf16": torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16),
    "fp8": torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn),
    "strided": torch.arange(12).reshape(3, 4).t(),
    "big": np.arange(3, dtype=">i8"),
    "empty": np.zeros((0, 3), np.float32),
    "scalar": np.float64(0.5),
}
ROLLOUT = Rollout(
    "a/b", 1, 2, 3, version=-4, seed=2**63 - 1, reward=math.inf, tensors=TENSORS, extra={"why": ["x", None]}
)


def test_it_comes_back() -> None:
    found = Rollout.from_bytes(ROLLOUT.to_bytes(), "here")
    for name in ("prompt_id", "epoch", "position", "sample", "version", "seed", "reward", "extra", "key"):
        assert getattr(found, name) == getattr(ROLLOUT, name)
    assert list(found.tensors) == list(TENSORS)
    for name, value in TENSORS.items():
        one = found.tensors[name]
        assert tuple(one.shape) == tuple(value.shape), name
        if name in ("bf16", "fp8"):
            assert torch.equal(one.view(torch.uint8), value.view(torch.uint8))
        else:
            assert np.array_equal(one, np.asarray(value))
    found.tensors["tokens"][0] = 9  # its own, and not read-only


def test_the_bytes_are_what_the_docstring_says() -> None:
    data = Rollout(5, 0, 1, 2, version=3, reward=0.5, tensors={"t": np.array([1, 2], np.int16)}).to_bytes()
    (length,) = struct.unpack_from("<I", data)
    head = json.loads(data[4 : 4 + length])
    expected = {
        "prompt_id": 5,
        "epoch": 0,
        "position": 1,
        "sample": 2,
        "version": 3,
        "seed": 0,
        "reward": 0.5,
        "extra": {},
    }
    assert head == {**expected, "tensors": [["t", "int16", [2]]]}
    assert data[4 + length :] == b"\1\0\2\0"


def test_of_a_prompt() -> None:
    (prompt,) = PromptSampler(10, seed=1, group_size=4).next_batch(1)
    found = Rollout.of(prompt, 2, version=7, reward=torch.tensor(1.0), tokens=np.arange(3))  # type: ignore[arg-type]
    assert (found.key, found.seed) == ((0, 0, 2), prompt.sample_seeds[2])
    again = Rollout.from_bytes(found.to_bytes(), "here")
    assert (again.prompt_id, again.reward, again.version) == (prompt.prompt_id, 1.0, 7)


@pytest.mark.parametrize(
    "tensors", [{"x": np.array(["a"])}, {"x": object()}, {"x": np.array([None])}, {"x": torch.ones(2).to(torch.float8_e8m0fnu)}]
)  # fmt: skip
def test_what_is_no_tensor(tensors: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="rollout: x: expected numbers"):
        Rollout(0, 0, 0, 0, 0, tensors=tensors).to_bytes()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prompt_id", None), ("prompt_id", (1, 2)), ("epoch", 0.0), ("epoch", True), ("position", -1), ("sample", None),
        ("version", 1.5), ("version", None), ("seed", 0.5), ("reward", "x"), ("reward", [1.0]), ("extra", [1]), ("extra", None),
        ("tensors", {1: np.arange(3)}), ("tensors", dict.fromkeys(map(str, range(1025)), np.arange(1))),
    ],
)  # fmt: skip
def test_what_could_not_be_read_back_is_not_written(name: str, value: object) -> None:
    """It was, and counted as damage after every crash: all that a producer had made was made again."""
    with pytest.raises(UsageError, match="rollout"):
        replace(ROLLOUT, **{name: value}).to_bytes()  # type: ignore[arg-type]


def test_numbers_of_others_are_numbers() -> None:
    """Right and wrong are rewards, too."""
    one = Rollout(
        np.int64(5), np.int32(0), torch.tensor(1), np.int64(2), version=torch.tensor(3), reward=True  # type: ignore[arg-type]
    )  # fmt: skip
    found = Rollout.from_bytes(one.to_bytes(), "here")
    assert (found.prompt_id, found.key, found.version, found.reward) == (5, (0, 1, 2), 3, 1.0)
    assert read_place(one.to_bytes(), "here") == ((0, 1, 2), 5, 3)


def test_what_json_cannot_hold() -> None:
    with pytest.raises(UsageError, match="JSON cannot"):
        Rollout(0, 0, 0, 0, 0, extra={"x": object()}).to_bytes()


def forged(head: object, rest: bytes = b"") -> bytes:
    text = json.dumps(head).encode()
    return struct.pack("<I", len(text)) + text + rest


HEAD = json.loads(Rollout(5, 0, 1, 2, version=3).to_bytes()[4:])


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\xff\xff\xff\xff", struct.pack("<I", 4) + b"{", struct.pack("<I", 2) + b"{}", struct.pack("<I", 1 << 20) + b"[" * (1 << 20),
        forged([]), forged(7), forged({**HEAD, "position": -1}), forged({**HEAD, "version": "x"}), forged({**HEAD, "sample": True}),
        forged({**HEAD, "tensors": [["x", "int64", [1 << 60]]]}), forged({**HEAD, "tensors": [["x", "int64", [1] * 100]]}),
        forged({**HEAD, "tensors": [["x", "int64", [-1]]]}), forged({**HEAD, "tensors": [["x", "object", [1]]]}, b"x" * 8),
        forged({**HEAD, "tensors": [["x", "nn", [1]]]}, b"x"), forged(HEAD, b"more"), forged({**HEAD, "more": 1}),
        forged({**HEAD, "prompt_id": []}), forged({**HEAD, "tensors": [["x", "int64", [1 << 62, 4, 0]]]}),
        forged({**HEAD, "tensors": [["x", "bfloat16", [0, 1 << 40, 1 << 40]]]}), forged({**HEAD, "tensors": [["x", "bool", [10**30, 0]]]}),
    ],
)  # fmt: skip
def test_a_forged_one_is_refused(data: bytes) -> None:
    with pytest.raises(CheckpointError, match="here"):
        Rollout.from_bytes(data, "here")


def test_the_index_reads_what_it_needs() -> None:
    place = read_place(ROLLOUT.to_bytes(), "here")
    assert place == ((1, 2, 3), "a/b", -4)
    for head in ([], 7, {}, {**HEAD, "epoch": True}, {**HEAD, "version": 1.5}, {**HEAD, "prompt_id": None}):
        with pytest.raises(Corrupt, match="here"):
            read_place(forged(head), "here")
