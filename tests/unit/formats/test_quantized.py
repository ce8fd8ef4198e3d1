"""Quantized weights are never converted as if they were plain: refused, kept as they are, or made of elements and scales."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from mcore_rlhf import WriteOptions, iter_weights
from mcore_rlhf.convert import Job, convert
from mcore_rlhf.dcp import AnyReader
from mcore_rlhf.errors import Corrupt, LayoutMismatch, Lossy, Unsupported, UsageError
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.formats.registry import open_checkpoint
from mcore_rlhf.verify.checkpoint import Depth, verify
from tests.helpers.conversions import options
from tests.unit.formats.hf_by_hand import CONFIG, Tensors, config_in, tensors_in, write

FP8 = torch.float8_e4m3fn
OTHERS = ("deepspeed", "universal", "dcp", "megatron", "megatron-dist")
SIZES = {
    "hidden_size": 144,
    "intermediate_size": 272,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
WIDE: dict[str, Any] = {
    **CONFIG, **SIZES, "head_dim": 72, "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
}  # fmt: skip
"""Sides that are no multiples of 128: the last blocks are cut off, as DeepSeek-V3's are."""


def plain(seed: int = 0) -> Tensors:
    made = torch.Generator().manual_seed(seed)
    shapes = {"model.embed_tokens.weight": (20, 144), "model.norm.weight": (144,), "lm_head.weight": (20, 144)}
    layer = "model.layers.0."
    shapes |= {f"{layer}self_attn.{part}_proj.weight": (rows, 144) for part, rows in (("q", 144), ("k", 72), ("v", 72))}
    shapes |= {f"{layer}self_attn.o_proj.weight": (144, 144), f"{layer}mlp.down_proj.weight": (144, 272)}
    shapes |= {f"{layer}mlp.{part}_proj.weight": (272, 144) for part in ("gate", "up")}
    shapes |= {f"{layer}{norm}_layernorm.weight": (144,) for norm in ("input", "post_attention")}
    return {name: torch.randn(shape, generator=made).bfloat16() for name, shape in shapes.items()}


def blocks(weight: torch.Tensor, seed: int) -> torch.Tensor:
    """Scales of blocks of 128 × 128, as DeepSeek's release files have them."""
    grid = tuple(-(-side // 128) for side in weight.shape)
    return torch.rand(grid, generator=torch.Generator().manual_seed(seed)) * 0.01 + 1e-4


def expected_of_blocks(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """DeepSeek's own arithmetic, block by block. Source: deepseek-ai/DeepSeek-V3, ``inference/kernel.py``."""
    found = torch.empty(weight.shape, dtype=torch.bfloat16)
    for row in range(0, weight.shape[0], 128):
        for column in range(0, weight.shape[1], 128):
            part = (slice(row, row + 128), slice(column, column + 128))
            found[part] = (weight[part].to(torch.float32) * scale[row // 128, column // 128]).to(torch.bfloat16)
    return found


def quantized(kind: str) -> tuple[Tensors, Tensors]:
    """Stored tensors, and what they are worth, by torch."""
    stored, worth = {}, {}
    for number, (name, tensor) in enumerate(plain().items()):
        stored[name], worth[name] = tensor, tensor
        if not name.endswith("_proj.weight"):
            continue
        weight = (tensor.float() * 50).to(FP8)
        stored[name] = weight
        if kind == "block":
            stored[f"{name}_scale_inv"] = scale = blocks(weight, number)
            worth[name] = expected_of_blocks(weight, scale)
        elif kind == "channel":  # compressed-tensors: bf16 scales, in whose type its own dequantize computes
            stored[f"{name}_scale"] = scale = torch.rand(weight.shape[0], 1).bfloat16()
            stored[name.replace(".weight", ".input_scale")] = torch.ones(1)
            worth[name] = weight.to(scale.dtype) * scale
        elif kind == "tensor":
            stored[f"{name}_scale"] = scale = torch.tensor(0.0123 * (number + 1))
            worth[name] = (weight.float() * scale).bfloat16()
        else:  # e8m0: powers of two
            stored[f"{name}_scale_inv"] = scale = blocks(weight, number).to(torch.float8_e8m0fnu)
            worth[name] = expected_of_blocks(weight, scale.to(torch.float32))
    return stored, worth


def converted(source: Path, target: Path, to: str, **write: Any) -> Job:
    return convert(source, target, replace(options(**write), to=to))


@pytest.fixture(params=["block", "channel", "tensor", "e8m0"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def unlike(found: Tensors, expected: Tensors) -> list[str]:
    assert found.keys() == expected.keys()
    return [name for name in expected if not torch.equal(found[name], expected[name])]


@pytest.mark.parametrize("middle", ["", *OTHERS])
def test_elements_times_scales_are_torchs_own(kind: str, middle: str, tmp_path: Path) -> None:
    stored, worth = quantized(kind)
    source = write(tmp_path / "hf", stored, WIDE)
    (source / "recipe.yaml").write_text("")
    if middle:
        converted(source, tmp_path / "middle", middle, dequantize=True)
        converted(tmp_path / "middle", tmp_path / "out", "hf")
    else:
        job = converted(source, tmp_path / "out", "hf", dequantize=True)
        assert job.casts
        assert not job.lossless
    assert unlike(tensors_in(tmp_path / "out"), worth) == []
    assert config_in(tmp_path / "out") == {key: value for key, value in WIDE.items() if key != "quantization_config"}
    assert not (tmp_path / "out" / "recipe.yaml").exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_weights_without_a_conversion_are_the_same(kind: str, tmp_path: Path) -> None:
    stored, worth = quantized(kind)
    source = write(tmp_path / "hf", stored, WIDE)
    with pytest.raises(Unsupported, match="a stored element is not its value"):
        iter_weights(source, dtype="float32")
    found = dict(iter_weights(source, write=WriteOptions(dequantize=True)))
    assert found.keys() == worth.keys()
    assert unlike(found, worth) == []
    filled = {name: torch.zeros_like(tensor) for name, tensor in worth.items()}
    dcp.load(filled, storage_reader=AnyReader(source, write_options=WriteOptions(dequantize=True)))
    assert unlike(filled, worth) == []


def test_another_type_is_rounded_once(tmp_path: Path) -> None:
    stored, _ = quantized("block")
    name = "model.layers.0.mlp.down_proj.weight"
    converted(write(tmp_path / "hf", stored, WIDE), tmp_path / "out", "hf", dequantize=True, dtype="fp32")
    scale = stored[f"{name}_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)[:144, :272]
    assert torch.equal(tensors_in(tmp_path / "out")[name], stored[name].float() * scale)


def test_more_rows_than_one_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mcore_rlhf.core.computed.WINDOW_BYTES", 144 * 4 * 7)  # seven rows
    stored, worth = quantized("block")
    converted(write(tmp_path / "hf", stored, WIDE), tmp_path / "out", "hf", dequantize=True)
    assert unlike(tensors_in(tmp_path / "out"), worth) == []


def test_a_flipped_byte_of_a_scale_is_found_where_a_manifest_lists_it(tmp_path: Path) -> None:
    stored, _ = quantized("block")
    converted(write(tmp_path / "hf", stored, WIDE), tmp_path / "ours", "hf")
    file = tmp_path / "ours" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    with pytest.raises(Corrupt, match="damaged"):
        converted(tmp_path / "ours", tmp_path / "out", "hf", dequantize=True)


class TestWithout:
    """Without the option nothing is ever cast."""

    @pytest.mark.parametrize("to", OTHERS)
    def test_other_formats_refuse(self, kind: str, to: str, tmp_path: Path) -> None:
        source = write(tmp_path / "hf", quantized(kind)[0], WIDE)
        with pytest.raises(Unsupported, match=r"quantized, by fp8[\s\S]*Give --dequantize"):
            converted(source, tmp_path / "out", to)
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize("config", [WIDE, {k: v for k, v in WIDE.items() if k != "quantization_config"}, None])
    def test_a_type_is_refused_whatever_the_config_says(self, config: dict[str, Any] | None, tmp_path: Path) -> None:
        source = write(tmp_path / "hf", quantized("channel")[0], config)
        with pytest.raises(Unsupported, match="--dequantize"):
            converted(source, tmp_path / "out", "hf", dtype="bf16")

    def test_a_folder_stays_as_it_is(self, kind: str, tmp_path: Path) -> None:
        stored, _ = quantized(kind)
        source = write(tmp_path / "hf", stored, WIDE)
        job = converted(source, tmp_path / "out", "hf", max_shard_size=100_000)
        assert job.lossless
        found = tensors_in(tmp_path / "out")
        assert found.keys() == stored.keys()
        assert all(
            torch.equal(found[n].view(torch.uint8), stored[n].view(torch.uint8)) for n in stored if stored[n].dim()
        )
        assert (tmp_path / "out" / "config.json").read_bytes() == (source / "config.json").read_bytes()
        assert verify(tmp_path / "out", ReadOptions(), Depth.DEEP).intact

    def test_strict_refuses_to_round(self, tmp_path: Path) -> None:
        source = write(tmp_path / "hf", quantized("block")[0], WIDE)
        with pytest.raises(Lossy, match="cannot be had back exactly"):
            convert(source, tmp_path / "out", replace(options(dequantize=True), to="hf", strict=True))


def packed(names: dict[str, tuple[torch.dtype, tuple[int, ...]]]) -> Tensors:
    """A model, one matrix of which is stored otherwise."""
    stored = plain()
    del stored["model.layers.0.mlp.up_proj.weight"]
    return stored | {
        f"model.layers.0.mlp.up_proj.{n}": torch.zeros(shape, dtype=kind) for n, (kind, shape) in names.items()
    }


I32, F16, F32 = torch.int32, torch.float16, torch.float32
_ZEROS = {"qzeros": (I32, (2, 34)), "scales": (F16, (2, 272))}
_SHAPE = {"weight_scale": (torch.bfloat16, (272, 2)), "weight_shape": (torch.int64, (2,))}
_ABSMAX = {"weight.absmax": (F32, (612,)), "weight.quant_map": (F32, (16,))}
PACKED = {
    "gptq": packed({"qweight": (I32, (18, 272)), "g_idx": (I32, (144,)), **_ZEROS}),
    "awq": packed({"qweight": (I32, (144, 34)), **_ZEROS}),
    "bitsandbytes": packed({"weight": (torch.uint8, (19584, 1)), **_ABSMAX}),
    "compressed-tensors": packed({"weight_packed": (I32, (272, 18)), **_SHAPE}),
}


class TestOtherMethods:
    @pytest.mark.parametrize("method", PACKED)
    @pytest.mark.parametrize("to", ["megatron", "dcp", "deepspeed", "hf"])
    def test_they_are_refused_or_stay_as_they_are(self, method: str, to: str, tmp_path: Path) -> None:
        config = {**WIDE, "quantization_config": {"quant_method": method}}
        source = write(tmp_path / "hf", PACKED[method], config)
        with pytest.raises(Unsupported, match=f"quantized, by {method}"):
            converted(source, tmp_path / "out", to, dtype="bf16" if to == "hf" else None)
        with pytest.raises(Unsupported, match="all that --dequantize knows"):
            converted(source, tmp_path / "out", to, dequantize=True)
        assert not (tmp_path / "out").exists()
        if to == "hf":
            converted(source, tmp_path / "out", to)
            assert unlike(tensors_in(tmp_path / "out"), PACKED[method]) == []

    def test_a_config_that_says_so_of_plain_weights(self, tmp_path: Path) -> None:
        """transformers quantizes such a folder when it loads it: nobody can know what was meant."""
        config = {**WIDE, "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
        source = write(tmp_path / "hf", plain(), config)
        with pytest.raises(Unsupported, match=r"take quantization_config out of config\.json"):
            converted(source, tmp_path / "out", "megatron")
        converted(source, tmp_path / "kept", "hf")
        assert config_in(tmp_path / "kept") == config

    def test_a_reference_of_the_quantized_release(self, tmp_path: Path) -> None:
        """A model is often trained in bf16 from an fp8 release, whose config is at hand."""
        clean = {key: value for key, value in WIDE.items() if key != "quantization_config"}
        converted(write(tmp_path / "hf", plain(), clean), tmp_path / "run", "megatron")
        release = tmp_path / "release"
        release.mkdir()
        (release / "config.json").write_text(json.dumps(WIDE))
        converted(tmp_path / "run", tmp_path / "out", "hf", reference_config=str(release))
        assert "quantization_config" not in config_in(tmp_path / "out")
        assert unlike(tensors_in(tmp_path / "out"), plain()) == []


class TestContradictions:
    def test_nothing_is_quantized(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="no weight of"):
            converted(write(tmp_path / "hf", plain(), None), tmp_path / "out", "hf", dequantize=True)

    def test_a_scale_that_is_missing_or_too_small(self, tmp_path: Path) -> None:
        stored, _ = quantized("block")
        del stored["model.layers.0.mlp.up_proj.weight_scale_inv"]
        source = write(tmp_path / "a", stored, WIDE)
        with pytest.raises(LayoutMismatch, match=r"up_proj\.weight is float8_e4m3fn, but has no scale"):
            converted(source, tmp_path / "out", "hf", dequantize=True)
        stored["model.layers.0.mlp.up_proj.weight_scale_inv"] = torch.ones(5, 1)
        save_file(stored, source / "model.safetensors", {"format": "pt"})
        with pytest.raises(LayoutMismatch, match="which fits no blocks of"):
            converted(source, tmp_path / "out", "hf", dequantize=True)

    def test_inspect_and_verify_take_it_as_it_is(self, tmp_path: Path) -> None:
        source = write(tmp_path / "hf", quantized("block")[0], WIDE)
        assert verify(source, ReadOptions(), Depth.DEEP).intact
        notes = [text for _, text in open_checkpoint(source, ReadOptions()).notes.lines]
        assert any("quantized, by fp8" in text for text in notes)
