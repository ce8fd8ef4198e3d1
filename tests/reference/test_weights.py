"""Weights that are read one after the other, in transformers' own model: the predictions of the export."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")

import torch
import transformers

from mcore_rlhf import iter_weights
from mcore_rlhf.convert import ConvertOptions, convert
from mcore_rlhf.families.options import WriteOptions

GOLDENS = Path(__file__).parents[1] / "goldens"


@pytest.mark.parametrize(
    "run", ["megatron/tp2pp2dp2_bf16_do", "megatron/tp2pp2dp2_tied_bf16_do", "megatron_0_19/tp2pp2_bf16_do"]
)
def test_from_pretrained_takes_them(run: str, tmp_path: Path) -> None:
    convert(GOLDENS / run, tmp_path / "hf", ConvertOptions(to="hf", fsync=False, write=WriteOptions(no_optimizer=True)))
    config = transformers.AutoConfig.from_pretrained(tmp_path / "hf")
    kind = getattr(transformers, config.architectures[0])
    expected = kind.from_pretrained(tmp_path / "hf").eval()
    weights = dict(iter_weights(GOLDENS / run))
    found = kind.from_pretrained(None, config=config, state_dict=weights).eval()
    tokens = torch.arange(24).reshape(2, 12) % config.vocab_size
    with torch.no_grad():
        assert torch.equal(found(tokens).logits, expected(tokens).logits)
