"""Megatron-Bridge's LoRA: adapters of fused layers become peft's, whatever the layout, and merge as Megatron would compute."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mcore_rlhf.convert import ConvertOptions, Job, convert
from mcore_rlhf.errors import CheckpointError, LayoutMismatch, Unsupported, UsageError
from mcore_rlhf.families.options import WriteOptions
from tests.helpers.conversions import GOLDENS, options
from tests.helpers.damage import ITERATION, MODEL, edited

LAYERS, HIDDEN, HEADS, GROUPS, HEAD, FFN, RANK, ALPHA = 4, 64, 4, 2, 16, 96, 4, 8
QKV, PROJ = "self_attention.linear_qkv", "self_attention.linear_proj"
FC1, FC2 = "mlp.linear_fc1", "mlp.linear_fc2"
SHAPES = {
    QKV: ((HEADS + 2 * GROUPS) * HEAD, HIDDEN), PROJ: (HIDDEN, HEADS * HEAD), FC1: (2 * FFN, HIDDEN), FC2: (HIDDEN, FFN),
}  # fmt: skip
CANONICAL = {QKV: {"q": HEADS * HEAD, "k": GROUPS * HEAD, "v": GROUPS * HEAD}, FC1: {"gate": FFN, "up": FFN}}

Adapters = dict[str, torch.Tensor]


def adapters(canonical: bool) -> Adapters:
    """The adapters of the whole model under Megatron-Bridge's names."""
    made, found = torch.Generator().manual_seed(3), {}
    for layer in range(LAYERS):
        for linear, (rows, columns) in SHAPES.items():
            parts = CANONICAL.get(linear, {"": rows}) if canonical else {"": rows}
            for part, height in parts.items():
                at = f"decoder.layers.{layer}.{linear}.adapter.{f'adapter_{part}.' if part else ''}"
                found[f"{at}linear_in.weight"] = torch.randn(RANK, columns, generator=made).bfloat16()
                found[f"{at}linear_out.weight"] = torch.randn(height, RANK, generator=made).bfloat16()
    return found


def local(name: str, tensor: torch.Tensor, tp: int, rank: int) -> torch.Tensor:
    """A rank's part, as Megatron-Bridge cuts it."""
    if ("linear_proj" in name or "linear_fc2" in name) and "linear_in" in name:
        return tensor.chunk(tp, 1)[rank]
    if "linear_fc1.adapter.linear_out" in name:
        return torch.cat([half.chunk(tp)[rank] for half in tensor.chunk(2)])
    return tensor.chunk(tp)[rank]


def added(folder: Path, tensors: Adapters, tp: int, pp: int) -> Path:
    """The golden in a layout, weights alone, with adapters in every rank's file."""
    convert(GOLDENS / "tp1_bf16_do", folder, options(tp=tp, pp=pp, no_optimizer=True))
    (folder / "mcore_rlhf.json").unlink()
    each = LAYERS // pp
    for rank in range(tp):
        for stage in range(pp):
            where = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if pp > 1 else "")
            with edited(folder / ITERATION / where / MODEL) as tree:
                for name, tensor in tensors.items():
                    layer = int(name.split(".")[2])
                    if layer // each == stage:
                        here = name.replace(f"layers.{layer}.", f"layers.{layer % each}.")
                        tree["model"][here] = local(name, tensor, tp, rank).contiguous().clone()
    return folder


def deltas(tensors: Adapters) -> Iterator[tuple[str, torch.Tensor]]:
    """What is added to each of Megatron's weights: for a fused layer in Megatron's own order of rows."""
    for layer in range(LAYERS):
        for linear in SHAPES:
            at = f"decoder.layers.{layer}.{linear}"
            parts = [name for name in tensors if name.startswith(f"{at}.") and name.endswith("linear_out.weight")]
            each = [tensors[name].float() @ tensors[name.replace("_out.", "_in.")].float() for name in parts]
            if linear == QKV and len(each) == 3:
                blocks = [delta.chunk(GROUPS) for delta in each]
                each = [block[group] for group in range(GROUPS) for block in blocks]
            yield f"{at}.weight", ALPHA / RANK * torch.cat(each)


def to(source: Path, target: Path, name: str, **write: object) -> Job:
    chosen = WriteOptions(vocab_size=131, **write)  # type: ignore[arg-type]
    return convert(source, target, ConvertOptions(name, write=chosen, fsync=False))


@pytest.fixture
def alpha(tmp_path: Path) -> str:
    (tmp_path / "alpha.json").write_text(json.dumps({"lora_alpha": ALPHA}))
    return str(tmp_path / "alpha.json")


@pytest.mark.parametrize("canonical", [False, True], ids=["fused", "canonical"])
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 2)])
def test_a_merge_is_what_megatron_would_compute(tmp_path: Path, alpha: str, tp: int, pp: int, canonical: bool) -> None:
    """By way of peft's names, and by adding in Megatron's own order of rows and converting the sum."""
    tensors = adapters(canonical)
    to(added(tmp_path / "run", tensors, tp, pp), tmp_path / "a", "hf", merge_adapter=True, reference_config=alpha)
    convert(GOLDENS / "tp1_bf16_do", tmp_path / "sum", options(no_optimizer=True))
    (tmp_path / "sum" / "mcore_rlhf.json").unlink()
    with edited(tmp_path / "sum" / ITERATION / "mp_rank_00" / MODEL) as tree:
        for name, delta in deltas(tensors):
            weight = tree["model"][name]
            weight.copy_((weight.float() + delta).bfloat16())
    to(tmp_path / "sum", tmp_path / "b", "hf")
    ours, wanted = (load_file(tmp_path / name / "model.safetensors") for name in ("a", "b"))
    assert ours.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(ours[name], tensor, rtol=2**-7, atol=1e-5, msg=name)


def test_the_fused_adapter_becomes_several(tmp_path: Path, alpha: str) -> None:
    tensors = adapters(canonical=False)
    job = to(added(tmp_path / "run", tensors, 2, 2), tmp_path / "a", "peft", reference_config=alpha)
    found = load_file(tmp_path / "a" / "adapter_model.safetensors")
    at = "base_model.model.model.layers.3"
    qkv, fc1 = (f"decoder.layers.3.{linear}.adapter.linear_" for linear in (QKV, FC1))
    for part in "qkv":
        assert torch.equal(found[f"{at}.self_attn.{part}_proj.lora_A.weight"], tensors[f"{qkv}in.weight"])
    out = tensors[f"{qkv}out.weight"].reshape(GROUPS, -1, HEAD, RANK)
    each = HEADS // GROUPS
    assert torch.equal(found[f"{at}.self_attn.q_proj.lora_B.weight"], out[:, :each].reshape(-1, RANK))
    assert torch.equal(found[f"{at}.self_attn.v_proj.lora_B.weight"], out[:, each + 1].reshape(-1, RANK))
    assert torch.equal(found[f"{at}.mlp.up_proj.lora_B.weight"], tensors[f"{fc1}out.weight"][FFN:])
    assert len(found) == LAYERS * 2 * 7
    assert any("12 matrices A are copies" in text for _, text in job.report.lines)
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (RANK, ALPHA)
    assert config["target_modules"] == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]


def test_with_the_base_in_another_format_too(tmp_path: Path, alpha: str) -> None:
    """The frozen base has the names that it has in a model with an adapter."""
    source = added(tmp_path / "run", adapters(canonical=False), 1, 1)
    to(source, tmp_path / "both", "deepspeed", zero_stage=0, reference_config=alpha)
    to(tmp_path / "both", tmp_path / "a", "hf", merge_adapter=True, reference_config=alpha)
    to(source, tmp_path / "b", "hf", merge_adapter=True, reference_config=alpha)
    ours, wanted = (load_file(tmp_path / name / "model.safetensors") for name in ("a", "b"))
    assert ours.keys() == wanted.keys()
    assert all(torch.equal(ours[name], wanted[name]) for name in wanted)


def test_alpha_must_be_said(tmp_path: Path) -> None:
    source = added(tmp_path / "run", adapters(canonical=False), 1, 1)
    for write in ({"merge_adapter": True}, {}):
        with pytest.raises(UsageError, match="lora_alpha"):
            to(source, tmp_path / "a", "hf" if write else "peft", **write)
        assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("decoder.layers.0.mlp.router.adapter.linear_in.weight", (4, HIDDEN), "no layer of this model"),
        (f"decoder.layers.0.{QKV}.adapter.adapter_z.linear_in.weight", (4, HIDDEN), "no layer of this model"),
        (f"decoder.layers.0.{QKV}.adapter.linear_out.weight", (7, RANK), "has 7 rows"),
    ],
)
def test_what_fits_no_layer_is_refused(
    tmp_path: Path, alpha: str, name: str, shape: tuple[int, int], words: str
) -> None:
    source = added(tmp_path / "run", {**adapters(canonical=False), name: torch.ones(shape).bfloat16()}, 1, 1)
    with pytest.raises(CheckpointError, match=words) as caught:
        to(source, tmp_path / "a", "peft", reference_config=alpha)
    assert isinstance(caught.value, LayoutMismatch)


def test_from_megatron_to_megatron_they_are_kept(tmp_path: Path) -> None:
    """Within the family nothing passes through peft's names."""
    tensors = adapters(canonical=False)
    source = added(tmp_path / "run", tensors, 2, 2)
    convert(source, tmp_path / "one", options(tp=1, pp=1))
    with edited(tmp_path / "one" / ITERATION / "mp_rank_00" / MODEL) as tree:
        assert all(torch.equal(tree["model"][name], tensor) for name, tensor in tensors.items())


def by_verl(folder: Path, tensors: Adapters, tp: int, pp: int, chunks: int = 1) -> Path:
    """What verl writes: a file per rank, local layer numbers, with virtual stages the first chunk only."""
    folder.mkdir()
    each = LAYERS // (pp * chunks)
    for rank in range(tp):
        for stage in range(pp):
            held = {}
            for name, tensor in tensors.items():
                layer = int(name.split(".")[2])
                if layer // each == stage:
                    here = name.replace(f"layers.{layer}.", f"layers.{layer % each}.")
                    held[here] = local(name, tensor, tp, rank).contiguous().clone()
            name = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if pp > 1 else "") + "_adapter.pt"
            torch.save({"adapter_state_dict": held}, folder / name)
    return folder


@pytest.fixture
def described(tmp_path: Path) -> str:
    """A folder with the model's config.json and the adapter's."""
    folder = tmp_path / "described"
    folder.mkdir()
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": LAYERS, "hidden_size": HIDDEN,
        "intermediate_size": FFN, "num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "head_dim": HEAD,
        "vocab_size": 131, "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "adapter_config.json").write_text(json.dumps({"lora_alpha": ALPHA}))
    return str(folder)


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2), (2, 4)])
def test_verls_files_are_the_same_adapter(tmp_path: Path, alpha: str, described: str, tp: int, pp: int) -> None:
    tensors = adapters(canonical=False)
    to(added(tmp_path / "run", tensors, 1, 1), tmp_path / "a", "peft", reference_config=alpha)
    to(by_verl(tmp_path / "verl", tensors, tp, pp), tmp_path / "b", "peft", reference_config=described)
    ours, wanted = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("b", "a"))
    assert ours.keys() == wanted.keys()
    assert all(torch.equal(ours[name], wanted[name]) for name in wanted)


def test_verls_adapter_merges_into_a_base_in_any_format(tmp_path: Path, alpha: str, described: str) -> None:
    tensors = adapters(canonical=False)
    to(added(tmp_path / "run", tensors, 2, 1), tmp_path / "a", "hf", merge_adapter=True, reference_config=alpha)
    verl, base = by_verl(tmp_path / "verl", tensors, 2, 2), GOLDENS / "tp1_bf16_do"
    to(verl, tmp_path / "b", "hf", merge_adapter=True, base_model=str(base), reference_config=described)
    ours, wanted = (load_file(tmp_path / name / "model.safetensors") for name in ("b", "a"))
    assert ours.keys() == wanted.keys()
    assert all(torch.equal(ours[name], wanted[name]) for name in wanted)


def broken(folder: Path, how: str) -> None:
    file = folder / "mp_rank_01_001_adapter.pt"
    if how == "rank missing":
        file.unlink()
    elif how == "other tensors":
        torch.save({"adapter_state_dict": {"decoder.layers.0.x.adapter.linear_in.weight": torch.ones(1, 1)}}, file)
    else:
        torch.save({"state": 1}, file)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("rank missing", "no file of tensor-parallel rank 1, pipeline rank 1"),
        ("other tensors", "hold other names or shapes"),
        ("other tree", "adapter_state_dict"),
    ],
)
def test_verls_files_must_be_whole(tmp_path: Path, described: str, how: str, words: str) -> None:
    folder = by_verl(tmp_path / "verl", adapters(canonical=False), 2, 2)
    broken(folder, how)
    with pytest.raises(CheckpointError, match=words):
        to(folder, tmp_path / "a", "peft", reference_config=described)
    assert not (tmp_path / "a").exists()


def test_virtual_stages_are_noticed(tmp_path: Path, described: str) -> None:
    """verl saves the first chunk of each rank and no other."""
    folder = by_verl(tmp_path / "verl", adapters(canonical=False), 1, 2, chunks=2)
    with pytest.raises(LayoutMismatch, match=r"adapters of 2 layers, and the model has 4(.|\n)*virtual pipeline"):
        to(folder, tmp_path / "a", "peft", reference_config=described)


def test_a_model_must_be_described(tmp_path: Path, alpha: str) -> None:
    folder = by_verl(tmp_path / "verl", adapters(canonical=False), 1, 1)
    for reference in ({"reference_config": alpha}, {}):
        with pytest.raises(UsageError, match="nothing that describes it"):
            to(folder, tmp_path / "a", "peft", **reference)


def test_megatrons_formats_have_no_place_for_an_adapter(tmp_path: Path, described: str) -> None:
    folder = by_verl(tmp_path / "verl", adapters(canonical=False), 1, 1)
    to(folder, tmp_path / "a", "peft", reference_config=described)
    for source in (folder, tmp_path / "a"):
        with pytest.raises(Unsupported, match="--merge-adapter"):
            to(source, tmp_path / "b", "megatron")
