"""A norm that counts from another number: the parameter is rounded from its shifted master, and a shift may follow a shift."""

from __future__ import annotations

from pathlib import Path

import torch

from mcore_rlhf.core.catalog import (
    BFLOAT16,
    FLOAT32,
    MASTER,
    PARAM,
    Box,
    Chunk,
    Record,
    TensorEntry,
    TensorName,
)
from mcore_rlhf.core.chunks import Chunks
from mcore_rlhf.core.computed import gather
from mcore_rlhf.families.crossing.shifting import SHIFTED, shifted
from mcore_rlhf.families.source import Source, bytes_of
from mcore_rlhf.models.spec import REPLICATED, ModelSpec, ParamSpec
from mcore_rlhf.storage.paths import local_path

KINDS = {PARAM: (BFLOAT16, torch.bfloat16), MASTER: (FLOAT32, torch.float32)}


def stored(root: Path, masters: torch.Tensor, *states: str) -> Source:
    """A tensor of one dimension, with a file for each state."""
    entries = {}
    for state in states:
        dtype, kind = KINDS[state]
        (root / state).write_bytes(masters.to(kind).view(torch.uint8).numpy().tobytes())
        name, shape = TensorName("actor", "norm.weight", state), tuple(masters.shape)
        record = Record(state, state, dtype, masters.numel(), 0)
        entries[name] = TensorEntry(name, shape, dtype, (Chunk.whole(record, shape),))
    model = ModelSpec((ParamSpec("norm.weight", tuple(masters.shape), BFLOAT16, REPLICATED),), 1, tied=False)
    return Source("megatron", local_path(root), model, Chunks.of(entries.values()))


def read(source: Source, state: str) -> torch.Tensor:
    entry = source.catalog.get(TensorName("actor", "norm.weight", state))
    assert entry is not None
    with bytes_of(source) as files:
        data = gather(entry, [Box.whole(entry.global_shape)], entry.dtype, files)
    return torch.frombuffer(data, dtype=KINDS[state][1])


def test_a_parameter_is_rounded_from_its_shifted_master(tmp_path: Path) -> None:
    """1.00123 is 1 in bf16, and less 1 it is 0; of the master it is 0.00123."""
    masters = torch.tensor([1.00123, 0.5, 1.75, -3.0, 1.0 + 2**-20])
    source = shifted(stored(tmp_path, masters, PARAM, MASTER), {"norm.weight": -1.0})
    assert torch.equal(read(source, MASTER), masters - 1)
    assert torch.equal(read(source, PARAM), (masters - 1).to(torch.bfloat16))
    assert read(source, PARAM)[0] != 0
    said = [text for text, _ in SHIFTED.said_of({"norm.weight": -1.0})]
    assert any("norm.weight: -1 on every element" in text for text in said)
    back = shifted(source, {"norm.weight": 1.0})
    assert torch.equal(read(back, MASTER), (masters - 1) + 1)


def test_without_a_master_the_parameter_itself_is_shifted(tmp_path: Path) -> None:
    weights = torch.linspace(0.5, 2, 97).to(torch.bfloat16)
    source = shifted(stored(tmp_path, weights.float(), PARAM), {"norm.weight": -1.0})
    assert torch.equal(read(source, PARAM).float(), weights.float() - 1)
    assert source.catalog.get(TensorName("actor", "norm.weight", MASTER)) is None
    again = shifted(source, {"norm.weight": 1.0})
    assert torch.equal(read(again, PARAM), weights)
