"""A fingerprint changes with the content, and with nothing else."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mcore_rlhf.errors import CheckpointError, StorageError, UsageError
from mcore_rlhf.manager.rlhf.data_state import Fingerprint, fingerprint, pack, unpack

# All different: neither types, nor borders between values, nor shapes run into each other.
DIFFERENT: list[list[Any]] = [
    [], [""], ["", ""], ["ab"], ["a", "b"], ["b", "a"], [b"ab"], [1], ["1"], [True], [1.0], [None], ["None"],
    [["a", "b"]], [["a"], "b"], [[["a"], "b"]], [{"a": "b"}], [{"a": "b", "c": 1}], [{"ac": "b"}], [{1: "b"}], [{"1": "b"}],
    [np.array([1, 2])], [np.array([[1], [2]])], [np.array([1, 2], dtype=np.int32)], [np.float32(2.0)],
    [torch.tensor([1.0])], [torch.tensor([1.0], dtype=torch.bfloat16)], [torch.tensor(1.0)], [torch.zeros(0)],
]  # fmt: skip


def test_different_datasets_have_different_fingerprints() -> None:
    assert len({fingerprint(dataset).sha256 for dataset in DIFFERENT}) == len(DIFFERENT)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([{"a": 1, "b": [2, "x"]}], [{"b": (2, "x"), "a": 1}]),
        ([np.arange(6).reshape(2, 3)], [np.asfortranarray(np.arange(6).reshape(2, 3))]),
        ([torch.arange(6).reshape(2, 3).t()], [torch.arange(6).reshape(2, 3).t().contiguous()]),
        ([0.1], [np.float64(0.1)]),
        (["é"], ("é",)),
        ([b"x"], [bytearray(b"x")]),
        ([np.ones((2, 1), dtype=np.float32)], [torch.ones(2, 1)]),
    ],
)
def test_the_same_content_has_the_same_fingerprint(one: Any, other: Any) -> None:
    assert fingerprint(one) == fingerprint(other)


def test_it_is_fixed_for_ever() -> None:
    saved = {"length": 2, "method": "items", "sha256": fingerprint([{"prompt": "1+1", "answer": 2}, "é"]).sha256}
    text = b"2|dict2:str6:answerint1:2str6:promptstr3:1+1str2:\xc3\xa9"
    assert fingerprint([{"prompt": "1+1", "answer": 2}, "é"]) == Fingerprint(**saved)
    assert saved["sha256"] == hashlib.sha256(text).hexdigest()
    assert unpack(pack("stateful", {}, Fingerprint(**saved)), "stateful") == ({}, Fingerprint(**saved))


def test_a_file_is_hashed_by_its_content(tmp_path: Path) -> None:
    data = bytes(range(256)) * 10_000
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(data)
    found = fingerprint(file)
    assert found == fingerprint(str(file)) == Fingerprint(len(data), hashlib.sha256(data).hexdigest(), "file")
    copy = tmp_path / "copy"
    copy.write_bytes(data)
    assert fingerprint([file]) == fingerprint([copy])
    copy.write_bytes(data[:-1] + b"x")
    assert fingerprint([file]) != fingerprint([copy])


class Counting:
    """A dataset that notes which items were read, and has no slices."""

    def __init__(self, length: int, changed: int = -1) -> None:
        self.length, self.changed, self.read = length, changed, list[int]()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> str:
        self.read.append(index)
        return "changed" if index == self.changed else f"prompt {index}"


def test_a_long_dataset_is_sampled_evenly_with_both_ends() -> None:
    dataset = Counting(1001)
    found = fingerprint(dataset, all_items_up_to=11)
    assert (found.method, found.length) == ("sampled", 1001)
    assert dataset.read == [*range(0, 1001, 100)]
    assert fingerprint(Counting(1001, changed=1000), all_items_up_to=11) != found
    assert fingerprint(Counting(1001, changed=1), all_items_up_to=11) == found, "the documented gap"
    assert fingerprint(Counting(1002), all_items_up_to=11) != found
    assert fingerprint(Counting(11), all_items_up_to=11).method == "items"


def test_every_changed_item_is_seen_where_all_are_hashed() -> None:
    assert len({fingerprint(Counting(50, changed=index)) for index in range(-1, 50)}) == 51


@pytest.mark.parametrize(
    ("dataset", "text"),
    [
        ([{"messages": [{"content": {1, 2}}]}], r"item 0\['messages'\]\[0\]\['content'\] .* of type set"),
        (["a", np.array([object()])], "item 1 of the dataset is of type ndarray"),
        ((x for x in "ab"), "generator.* has no length"),
    ],
)
def test_what_has_no_fingerprint_is_named(dataset: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        fingerprint(dataset)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"nowhere\.jsonl: cannot read: No such file"):
        fingerprint(tmp_path / "nowhere.jsonl")
    with pytest.raises(StorageError, match="is a folder, expected a file"):
        fingerprint(tmp_path)


@pytest.mark.parametrize("saved", [1, [], {}, {"length": "1", "sha256": "", "method": "items"}])
def test_a_damaged_fingerprint_is_refused(saved: object) -> None:
    with pytest.raises(CheckpointError, match=r"data/data\.pt: fingerprint"):
        unpack({"version": 1, "kind": "stateful", "state": {}, "fingerprint": saved}, "stateful")
