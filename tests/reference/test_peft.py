"""Real peft and transformers: what they save is read, what is written they load, and a merge is what they make of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file

from mcore_rlhf.core.catalog import TensorName
from mcore_rlhf.errors import Unsupported
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.formats.registry import open_checkpoint
from mcore_rlhf.storage.reading import OpenFiles
from tests.helpers.universal_by_hand import write
from tests.reference.peft_lab import (
    BASE,
    GOLDENS,
    adapted,
    base,
    convert_to,
    engine,
    from_folder,
    logits,
    saved,
    theirs,
    trained,
    transformers,
)
from tests.reference.test_architectures import VISION

pytestmark = pytest.mark.reference

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "all linear, rslora": {"target_modules": "all-linear", "use_rslora": True},
    "modules_to_save": {"modules_to_save": ["lm_head"]},
    "patterns": {"rank_pattern": {"up_proj": 2}, "alpha_pattern": {r"layers\.0\..*q_proj": 9}},
    "embeddings": {"target_modules": ["q_proj", "embed_tokens"]},
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "norms by their end": {"modules_to_save": ["norm"]},  # of post_attention_layernorm, too
    "biases": {"bias": "all"},
    "dora": {"use_dora": True},
}


@pytest.mark.parametrize("variant", VARIANTS, ids=list(VARIANTS))
def test_there_and_back(tmp_path: Path, variant: str) -> None:
    """peft saves, we read the names of its memory, we write, peft loads: the same bytes, the same logits."""
    model = adapted(**VARIANTS[variant])
    folder = saved(model, tmp_path / "a")
    source = open_checkpoint(folder, ReadOptions())
    live = model.state_dict()
    with OpenFiles(source.root) as files:
        for spec in source.model.params:
            entry = source.catalog.get(TensorName("actor", spec.name))
            assert entry is not None
            (chunk,) = entry.chunks
            data = bytearray(files.view(chunk.record.file, chunk.record.byte_offset, chunk.record.nbytes))
            stored = torch.frombuffer(data, dtype=torch.float32).reshape(spec.global_shape)
            assert torch.equal(stored, live[spec.name]), spec.name
    convert_to(folder, tmp_path / "b", "peft")
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "b" / name).read_bytes() == (folder / name).read_bytes()
    assert torch.equal(logits(from_folder(tmp_path / "b")), logits(model))


@pytest.mark.parametrize("variant", ["plain", "modules_to_save", "embeddings"])
def test_from_a_checkpoint_of_the_whole_model(tmp_path: Path, variant: str) -> None:
    """A training checkpoint holds base and adapter under the names of memory; the configuration comes from a file."""
    model = adapted(**VARIANTS[variant])
    state = {f"module.{name}": tensor.clone() for name, tensor in model.state_dict().items()}
    run = tmp_path / "run"
    (run / "global_step7_uni" / "zero").mkdir(parents=True)
    write(run, {}, step=None, top={"module": state, "param_shapes": []})
    folder = saved(model, tmp_path / "a")
    convert_to(run, tmp_path / "b", "peft", reference_config=str(folder))
    ours, own = (load_file(path / "adapter_model.safetensors") for path in (tmp_path / "b", folder))
    assert ours.keys() == own.keys()
    assert all(torch.equal(ours[name], own[name]) for name in own)
    assert torch.equal(logits(from_folder(tmp_path / "b")), logits(model))


def test_from_a_dcp_that_torch_wrote(tmp_path: Path) -> None:
    """Base, adapter and the adapter's optimizer, as FSDP runs save them."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model = adapted(modules_to_save=["lm_head"])
    _, optimizer = engine(model)
    trained(model, optimizer, range(2))
    weights, states = get_state_dict(model, optimizer)
    with theirs():
        dcp.save({"model": weights, "optim": states}, checkpoint_id=tmp_path / "run", no_dist=True)
    folder = saved(model, tmp_path / "a")
    convert_to(tmp_path / "run", tmp_path / "b", "peft", reference_config=str(folder))
    assert (tmp_path / "b" / "adapter_model.safetensors").read_bytes() == (
        folder / "adapter_model.safetensors"
    ).read_bytes()
    convert_to(tmp_path / "run", tmp_path / "m", "hf", merge_adapter=True, reference_config=str(folder))
    convert_to(folder, tmp_path / "n", "hf", merge_adapter=True, base_model=str(BASE))
    ours, own = (load_file(tmp_path / name / "model.safetensors") for name in ("m", "n"))
    assert ours.keys() == own.keys()
    assert all(torch.equal(ours[name], own[name]) for name in own)


def test_what_was_inferred_is_enough_for_peft(tmp_path: Path) -> None:
    """Only lora_alpha is said: rank, targets and everything else follow from the tensors."""
    model = adapted(modules_to_save=["lm_head"], rank_pattern={"up_proj": 2})
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    run = tmp_path / "run"
    (run / "global_step7_uni" / "zero").mkdir(parents=True)
    write(run, {}, step=None, top={"module": state, "param_shapes": []})
    (tmp_path / "alpha.json").write_text('{"lora_alpha": 6}')
    convert_to(run, tmp_path / "b", "peft", reference_config=str(tmp_path / "alpha.json"))
    assert torch.equal(logits(from_folder(tmp_path / "b")), logits(model))


MERGED = ("plain", "all linear, rslora", "modules_to_save", "patterns", "embeddings", "head", "norms by their end")


@pytest.mark.parametrize("variant", MERGED)
def test_a_merge_is_pefts(tmp_path: Path, variant: str) -> None:
    """fp32: every weight within one rounding of peft's; logits as close as fp32 gets."""
    folder = saved(adapted(**VARIANTS[variant]), tmp_path / "a")
    lost = convert_to(folder, tmp_path / "m", "hf", merge_adapter=True, base_model=str(BASE)).account.lost
    assert ["the adapter by itself" in text for text in lost] == [True]
    with theirs():
        own = from_folder(folder).merge_and_unload()
        ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    wanted, found = own.state_dict(), ours.state_dict()
    assert wanted.keys() == found.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=2e-7, atol=1e-7)
    torch.testing.assert_close(logits(ours), logits(own), rtol=1e-5, atol=1e-5)
    assert (logits(ours) - logits(base())).abs().max() > 1e-2, "the adapter does nothing: this test cannot fail"


def test_a_part_of_the_base_is_not_added_twice(tmp_path: Path) -> None:
    """PiSSA begins by taking its matrices out of the base: they go onto what is left, which a run's own checkpoint has."""
    model = adapted(init_lora_weights="pissa")
    folder, run = saved(model, tmp_path / "a"), tmp_path / "run"
    with pytest.raises(Unsupported, match="init_lora_weights is 'pissa'"):
        convert_to(folder, tmp_path / "m", "hf", merge_adapter=True, base_model=str(BASE))
    (run / "global_step7_uni" / "zero").mkdir(parents=True)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    write(run, {}, step=None, top={"module": state, "param_shapes": []})
    convert_to(run, tmp_path / "n", "hf", merge_adapter=True, reference_config=str(folder))
    ours, untouched = load_file(tmp_path / "n" / "model.safetensors"), base().state_dict()
    name = "model.layers.0.self_attn.q_proj"
    left = state[f"base_model.model.{name}.base_layer.weight"] - untouched[f"{name}.weight"]
    assert left.abs().max() > 1e-2, "nothing was taken out: this test cannot fail"
    with theirs():
        wanted = model.merge_and_unload().state_dict()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, wanted[name], rtol=2e-6, atol=1e-6)


def test_a_merge_into_bf16_is_rounded_once(tmp_path: Path) -> None:
    """Nearer to the exact sum than peft's own merge, which adds in bf16."""
    folder = saved(adapted(target_modules="all-linear"), tmp_path / "a")
    with theirs():
        base(torch.bfloat16).save_pretrained(tmp_path / "base")
        exact = from_folder(folder, base(torch.bfloat16).float()).merge_and_unload().state_dict()
        low = base(torch.bfloat16)
        own = from_folder(folder, low).merge_and_unload().state_dict()
    convert_to(folder, tmp_path / "m", "hf", merge_adapter=True, base_model=str(tmp_path / "base"))
    ours = load_file(tmp_path / "m" / "model.safetensors")
    for name, tensor in ours.items():
        assert tensor.dtype == torch.bfloat16
        torch.testing.assert_close(tensor, exact[name].bfloat16(), rtol=2**-8, atol=0)
    errors = [sum((exact[name] - state[name].float()).abs().sum().item() for name in ours) for state in (ours, own)]
    assert errors[0] <= errors[1]


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft asks for it
@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_an_adapter_of_a_model_of_images_is_merged_into_its_base(kind: str, tmp_path: Path) -> None:
    """Whose modules have other names than the folder of Qwen2.5-VL; peft's own merge is the witness."""
    torch.manual_seed(2)
    text = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    text |= {"num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
    vision = {**VISION[kind], "out_hidden_size": 32}
    described = transformers.AutoConfig.for_model(kind, text_config=text, vision_config=vision)
    model = transformers.AutoModelForImageTextToText.from_config(described)
    model.save_pretrained(tmp_path / "base")
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj", "qkv"]))
    with torch.no_grad():
        for name, param in adapted.named_parameters():
            param.copy_(torch.randn_like(param) * 0.3) if "lora_" in name else None
    adapted.save_pretrained(tmp_path / "adapter")
    convert_to(tmp_path / "adapter", tmp_path / "merged", "hf", merge_adapter=True, base_model=str(tmp_path / "base"))
    found = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "merged").state_dict()
    for name, tensor in adapted.merge_and_unload().state_dict().items():
        assert torch.allclose(found[name], tensor, atol=1e-5), name
    assert safetensors_names(tmp_path / "merged") == safetensors_names(tmp_path / "base")


def safetensors_names(folder: Path) -> set[str]:
    return set(load_file(folder / "model.safetensors"))


def test_packed_experts_are_kept(tmp_path: Path) -> None:
    """transformers 5 packs experts, and peft adapts the packed parameters: ranks are multiples, and patterns say so."""
    convert_to(GOLDENS / "adapter_moe", tmp_path / "b", "peft")
    name = "adapter_model.safetensors"
    assert (tmp_path / "b" / name).read_bytes() == (GOLDENS / "adapter_moe" / name).read_bytes()
    found = json.loads((tmp_path / "b" / "adapter_config.json").read_text())
    assert found["rank_pattern"] == {".*\\.gate_up_proj": 4}
    with theirs():
        models = [transformers.AutoModelForCausalLM.from_pretrained(GOLDENS / "base_moe") for _ in range(2)]
    ours, own = from_folder(tmp_path / "b", models[0]), from_folder(GOLDENS / "adapter_moe", models[1])
    assert torch.equal(logits(ours), logits(own))


def test_packed_experts_are_merged(tmp_path: Path) -> None:
    """The base has its experts one by one on disk, the adapter has them packed; the result is on disk again."""
    merge = {"merge_adapter": True, "base_model": str(GOLDENS / "base_moe")}
    convert_to(GOLDENS / "adapter_moe", tmp_path / "m", "hf", **merge)
    assert (
        load_file(tmp_path / "m" / "model.safetensors").keys()
        == load_file(GOLDENS / "base_moe" / "model.safetensors").keys()
    )
    with theirs():
        ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m")
        base = transformers.AutoModelForCausalLM.from_pretrained(GOLDENS / "base_moe")
        before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
        own = from_folder(GOLDENS / "adapter_moe", base).merge_and_unload()
    found, wanted = ours.state_dict(), own.state_dict()
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-6)
    changed = [name for name, tensor in before.items() if not torch.equal(tensor, found[name])]
    assert {name.rpartition("layers.0.")[2] for name in changed} == {
        "mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight",
        *(f"self_attn.{part}_proj.weight" for part in "qkvo"),
    }  # fmt: skip


def test_a_head_that_peft_ties_to_a_saved_embedding_goes_along(tmp_path: Path) -> None:
    """peft writes it beside the embedding, and a whole model's base stays out of an adapter's folder all the same."""
    with theirs():
        config = transformers.LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, tie_word_embeddings=True
        )  # fmt: skip
        plain = transformers.LlamaForCausalLM(config)
        plain.save_pretrained(tmp_path / "base")
        how = peft.LoraConfig(
            task_type="CAUSAL_LM", target_modules=["q_proj"], modules_to_save=["embed_tokens"], ensure_weight_tying=True
        )
        model = peft.get_peft_model(plain, how)
    whole = {name: value.detach().clone() for name, value in model.named_parameters()}
    folder = saved(model, tmp_path / "adapter")
    names = {*load_file(folder / "adapter_model.safetensors")}
    assert "base_model.model.lm_head.weight" in names
    job = convert_to(folder, tmp_path / "dcp", "dcp")
    again = convert_to(tmp_path / "dcp", tmp_path / "back", "peft")
    assert not [text for text in (*job.account.lost, *again.account.lost) if "accounts for it" in text]
    assert {*load_file(tmp_path / "back" / "adapter_model.safetensors")} == names
    (tmp_path / "whole").mkdir()
    torch.save({"model": whole}, tmp_path / "whole" / "state.pt")
    convert_to(tmp_path / "whole", tmp_path / "part", "peft", reference_config=str(folder))
    assert not [name for name in load_file(tmp_path / "part" / "adapter_model.safetensors") if "layernorm" in name]
