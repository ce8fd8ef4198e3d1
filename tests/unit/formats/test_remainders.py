"""Masters that a precision-aware optimizer stored as remainders, joined with their parameters."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mcore_rlhf.convert import ConvertOptions, convert
from mcore_rlhf.core.cast import differing_after_rounding
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
from mcore_rlhf.core.computed import words_of
from mcore_rlhf.core.facts import Fate
from mcore_rlhf.errors import Corrupt
from mcore_rlhf.families.megatron.remainders import Joins, joined_masters
from mcore_rlhf.families.options import ReadOptions, WriteOptions
from mcore_rlhf.families.source import Computed, Source, bytes_of
from mcore_rlhf.formats.registry import open_checkpoint
from mcore_rlhf.models.spec import REPLICATED, ModelSpec, ParamSpec
from mcore_rlhf.verify.checkpoint import Depth, verify
from mcore_rlhf.verify.differ import Differ
from tests.helpers.damage import flip_a_bit
from tests.helpers.plain_load import plain_load

GOLDEN = Path(__file__).parents[2] / "goldens" / "megatron_0_19" / "precisionaware_dp2_bf16_do"


def masters_of(source: Source, name: str) -> torch.Tensor:
    entry = source.catalog.get(TensorName(source.role, name, MASTER))
    assert entry is not None
    with bytes_of(source) as files:
        words = words_of(entry, Box.whole(entry.global_shape), FLOAT32, files)
    return torch.from_numpy(words.view(np.float32).copy())


def split(masters: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As Transformer Engine does: the upper half, one more where the lower is negative, and the lower."""
    halves = masters.view(torch.int16).view(*masters.shape, 2)
    low, high = halves[..., 0], halves[..., 1]
    return (high + (low < 0).to(torch.int16)).view(torch.bfloat16), low


def joined_by_hand(parameter: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    low = remainder.to(torch.int16)
    high = parameter.view(torch.int16) - (low < 0).to(torch.int16)
    return torch.stack([low, high], dim=-1).view(torch.float32).squeeze(-1)


def test_masters_of_a_run_are_those_that_torch_joins() -> None:
    """A parameter's place in ``distrib_optim.pt`` is its storage offset in the model file: there is one bucket."""
    folder = GOLDEN / "iter_0000006" / "mp_rank_00"
    model: dict[str, Any] = plain_load(folder / "model_optim_rng.pt")["model"]
    ((_, stored),) = ((k, v) for k, v in torch.load(folder / "distrib_optim.pt", weights_only=True)[0].items())
    source = open_checkpoint(GOLDEN, ReadOptions())
    compared = 0
    for name, tensor in model.items():
        if not isinstance(tensor, torch.Tensor):
            continue
        start = tensor.storage_offset()
        remainder = stored["param"][start : start + tensor.numel()].view(tensor.shape)
        assert torch.equal(masters_of(source, name), joined_by_hand(tensor, remainder)), name
        compared += 1
    assert compared == len(source.model.params)
    assert any(fate is Fate.DERIVED and "store_param_remainders" in text for fate, text in source.notes.lines)
    assert any("rounds up what lies half way" in text for _, text in source.notes.lines)


def test_what_lies_half_way_is_rounded_up_by_the_one_and_to_even_by_the_other() -> None:
    """One of 131,072 bit patterns between two powers of two, which the account says."""
    masters = torch.arange(0x3F800000, 0x3F840000, dtype=torch.int32).view(torch.float32)
    parameter, _ = split(masters)
    other = (parameter != masters.to(torch.bfloat16)).nonzero().flatten()
    assert other.tolist() == [0x8000, 0x28000]


def forged(tmp_path: Path, masters: torch.Tensor, bad: bool = False) -> Source:
    parameter, remainder = split(masters)
    values = remainder.to(torch.float32)
    if bad:
        values[-1, -1] += 0.5
    (tmp_path / "p").write_bytes(parameter.contiguous().view(torch.int16).numpy().tobytes())
    (tmp_path / "r").write_bytes(values.contiguous().numpy().tobytes())
    shape = tuple(masters.shape)
    entries = {
        TensorName("actor", "w", state): TensorEntry(
            TensorName("actor", "w", state),
            shape,
            dtype,
            (Chunk.whole(Record(file, file, dtype, masters.numel(), 0), shape),),
        )
        for state, dtype, file in ((PARAM, BFLOAT16, "p"), (MASTER, FLOAT32, "r"))
    }
    catalog = Chunks.of(entries.values())
    model = ModelSpec((ParamSpec("w", shape, BFLOAT16, REPLICATED),), 1, tied=False)
    return Source(
        "megatron", tmp_path, model, joined_masters(catalog), computed=Computed(tmp_path, Joins(catalog, "actor"))
    )


def test_any_master_comes_back_bit_for_bit(tmp_path: Path, seed: int) -> None:
    """In several blocks, ties and numbers that rounding carries over a power of two among them."""
    bits = np.random.default_rng(seed).integers(0, 1 << 32, (1200, 700), np.uint64).astype(np.uint32)
    bits[0, :4] = 0x3F808000, 0x3F818000, 0x3FFFFFFF, 0x80000000
    masters = torch.from_numpy(bits.view(np.float32))
    found = masters_of(forged(tmp_path, masters), "w")
    assert torch.equal(found.view(torch.int32), masters.view(torch.int32))


def test_a_value_that_is_no_remainder_is_refused(tmp_path: Path) -> None:
    source = forged(tmp_path, torch.randn(3, 5), bad=True)
    with pytest.raises(Corrupt, match=r"w \(master\).*no remainders of 16 bits"):
        masters_of(source, "w")


def test_what_was_written_holds_masters_which_are_not_joined_again(tmp_path: Path) -> None:
    convert(GOLDEN, tmp_path / "tp2", ConvertOptions("megatron", write=WriteOptions(tp=2), fsync=False))
    first, again = open_checkpoint(GOLDEN, ReadOptions()), open_checkpoint(tmp_path / "tp2", ReadOptions())
    assert again.computed is None
    with bytes_of(first) as a, bytes_of(again) as b:
        found = Differ(first, again, a, b).compare()
    assert not [d for d in found.differences if "args" not in d.name], found.differences


def test_verifying_finds_a_step_with_remainders_intact_and_a_damaged_one_damaged(tmp_path: Path) -> None:
    found = verify(GOLDEN, ReadOptions(), Depth.DEEP)
    assert found.intact, found.problems.found
    shutil.copytree(GOLDEN, tmp_path / "copy")
    file = tmp_path / "copy" / "iter_0000006" / "mp_rank_00" / "distrib_optim.pt"
    flip_a_bit(file)
    assert not verify(tmp_path / "copy", ReadOptions(), Depth.FULL).intact


def test_one_value_that_is_no_remainder_is_not_overlooked(tmp_path: Path) -> None:
    """Its kind is told by the first parameters; verify looks at all of them."""
    shutil.copytree(GOLDEN, tmp_path / "run")
    (path,) = (tmp_path / "run").rglob("distrib_optim.pt")
    path.chmod(0o644)
    tree = torch.load(path, weights_only=False)
    buckets = [bucket for buffer in tree.values() if isinstance(buffer, dict) for bucket in buffer.values()]
    (last,) = (bucket for bucket in buckets if isinstance(bucket, dict) and "param" in bucket)
    last["param"][int(torch.nonzero(last["param"])[-1])] = 0.5
    torch.save(tree, path)
    problems = verify(tmp_path / "run", ReadOptions(), Depth.DEEP).problems
    assert "no remainders of 16 bits" in str(problems.found[0].message)


def test_half_way_either_neighbour_is_the_master_rounded() -> None:
    """What is written of remainders is verified as any masters are: Transformer Engine rounds halves away from 0, torch to even."""
    masters = np.array([0x3F808000, 0x3F818000, 0x3F808000, 0x3F808001, 0x3F808000], np.uint32)
    params = np.array([0x3F81, 0x3F82, 0x3F80, 0x3F80, 0x3F82], np.uint16)
    assert [differing_after_rounding(masters[i : i + 1], params[i : i + 1], FLOAT32, BFLOAT16) for i in range(5)] == [
        0,
        0,
        0,
        1,
        1,
    ]
