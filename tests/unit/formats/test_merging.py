"""``--merge-adapter``: base and adapter become ordinary weights; what does not fit is refused before anything is written."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mcore_rlhf.convert import ConvertOptions, Job, convert, prepare
from mcore_rlhf.core.catalog import PARAM, TensorName
from mcore_rlhf.errors import CheckpointError, LayoutMismatch, Unsupported, UsageError
from mcore_rlhf.families.lora.base_model import BaseModel, SavedAdapter, fingerprint, sampled
from mcore_rlhf.families.options import ReadOptions, WriteOptions
from mcore_rlhf.families.source import bytes_of
from mcore_rlhf.formats.registry import open_checkpoint
from mcore_rlhf.storage.reading import OpenFiles
from tests.helpers import lora_by_hand as lora

GOLDENS = Path(__file__).parents[2] / "goldens" / "peft"
BASE, ADAPTER = GOLDENS / "base", GOLDENS / "adapter"


def merge(source: Path, target: Path, to: str = "hf", only: str | None = None, **write: Any) -> Job:
    options = WriteOptions(merge_adapter=True, **write)
    return convert(source, target, ConvertOptions(to, ReadOptions(only=only), options, fsync=False))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        torch.testing.assert_close(
            found[name], tensor, rtol=2e-6 if tensor.dtype == torch.float32 else 2**-7, atol=1e-6
        )


@pytest.fixture
def base(tmp_path: Path) -> Path:
    lora.write_base(tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return lora.write_adapter(tmp_path / "adapter")


def test_it_is_what_peft_makes_of_both(tmp_path: Path) -> None:
    """Ranks and alphas of their own, and a module that the adapter has whole; the golden was merged by peft."""
    job = merge(ADAPTER, tmp_path / "out", base_model=str(BASE))
    found, wanted = weights(tmp_path / "out"), weights(GOLDENS / "merged")
    same(found, wanted)
    untouched = [name for name in wanted if torch.equal(wanted[name], weights(BASE)[name])]
    assert len(untouched) == 12
    assert all(torch.equal(found[name], wanted[name]) for name in (*untouched, "lm_head.weight"))
    assert not job.lossless
    assert not job.account.unaccounted
    assert job.casts
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["model_type"], config["vocab_size"]) == ("llama", 61)


def test_a_running_models_checkpoint_has_both(tmp_path: Path, adapter: Path) -> None:
    """From the adapter's fp32 masters; the result has no optimizer, which is said."""
    lora.write_both(tmp_path / "run", wrapper="module.")
    job = merge(tmp_path / "run", tmp_path / "out", reference_config=str(adapter))
    same(weights(tmp_path / "out"), lora.merged_by_torch(lora.base_model(), lora.adapter()))
    assert any("optimizer" in text for text in job.report.lost)
    assert any("adapter" in text for text in job.report.lost)


def test_both_ways_give_the_same_bits(tmp_path: Path, adapter: Path, base: Path) -> None:
    lora.write_both(tmp_path / "run")
    merge(tmp_path / "run", tmp_path / "a", reference_config=str(adapter))
    merge(adapter, tmp_path / "b", base_model=str(base))
    a, b = weights(tmp_path / "a"), weights(tmp_path / "b")
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_bits_do_not_depend_on_workers_and_memory(tmp_path: Path, adapter: Path, base: Path) -> None:
    options = ConvertOptions("hf", write=WriteOptions(merge_adapter=True, base_model=str(base)), fsync=False)
    convert(adapter, tmp_path / "a", options)
    convert(adapter, tmp_path / "b", replace(options, workers=1, max_memory=1 << 20))
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()


def test_a_wider_type_is_not_rounded_twice(tmp_path: Path, adapter: Path, base: Path) -> None:
    merge(adapter, tmp_path / "out", base_model=str(base), dtype="fp32")
    wanted = {name: tensor.float() for name, tensor in lora.base_model().items()}
    same(weights(tmp_path / "out"), lora.merged_by_torch(wanted, lora.adapter()))


def test_rslora_and_fan_in_fan_out(tmp_path: Path, base: Path) -> None:
    folder = lora.write_adapter(tmp_path / "rs", use_rslora=True)
    merge(folder, tmp_path / "out", base_model=str(base))
    scale = lora.ALPHA / lora.RANK**0.5
    same(weights(tmp_path / "out"), lora.merged_by_torch(lora.base_model(), lora.adapter(), scale))
    folder = lora.write_adapter(tmp_path / "fan", fan_in_fan_out=True)
    with pytest.raises(LayoutMismatch, match=rf"shape \({lora.ROWS}, {lora.COLUMNS}\)"):
        merge(folder, tmp_path / "fan_out", base_model=str(base))


def test_an_adapted_embedding(tmp_path: Path, base: Path) -> None:
    """Its matrices are those of the transposed table; an embedding of its own comes with the adapter."""
    a, b = torch.randn(2, lora.WORDS), torch.randn(lora.COLUMNS, 2)
    prefix = f"{lora.PREFIX}model.embed_tokens"
    own = lora.base_model()["model.embed_tokens.weight"]
    tensors = {
        f"{prefix}.lora_embedding_A": a, f"{prefix}.lora_embedding_B": b, f"{prefix}.base_layer.weight": own
    }  # fmt: skip
    folder = lora.write_adapter(tmp_path / "e", tensors, r=2, lora_alpha=3)
    merge(folder, tmp_path / "out", base_model=str(base))
    wanted = {**lora.base_model(), "model.embed_tokens.weight": (own.float() + 1.5 * (b @ a).T).bfloat16()}
    same(weights(tmp_path / "out"), wanted)


def test_biases_that_were_trained_take_the_place_of_the_bases(tmp_path: Path, base: Path) -> None:
    name = f"{lora.ADAPTED[0]}.bias"
    own = torch.randn(lora.ROWS)
    tensors = {**lora.adapter(), f"{lora.PREFIX}{lora.ADAPTED[0]}.base_layer.bias": own}
    for bias in ("all", "lora_only"):
        merge(lora.write_adapter(tmp_path / bias, tensors, bias=bias), tmp_path / f"out-{bias}", base_model=str(base))
        found = weights(tmp_path / f"out-{bias}")
        assert torch.equal(found[name].float(), own.bfloat16().float())
        assert torch.equal(found[f"{lora.ADAPTED[1]}.bias"], lora.base_model()[f"{lora.ADAPTED[1]}.bias"])


def test_a_head_that_the_base_had_tied(tmp_path: Path) -> None:
    tied = {name: tensor for name, tensor in lora.base_model().items() if name != "lm_head.weight"}
    lora.write_base(tmp_path / "base", tied)
    own = torch.randn(lora.WORDS, lora.COLUMNS)
    tensors = {**lora.adapter(), f"{lora.PREFIX}lm_head.weight": own}
    folder = lora.write_adapter(tmp_path / "a", tensors, modules_to_save=["lm_head"])
    merge(folder, tmp_path / "out", base_model=str(tmp_path / "base"))
    assert torch.equal(weights(tmp_path / "out")["lm_head.weight"], own)


def test_an_embedding_that_the_base_ties_to_its_head(tmp_path: Path) -> None:
    """peft's own merge changes the head with it, and the model computes something else than the adapter did."""
    base, name = Path(__file__).parents[2] / "goldens/huggingface/llama_tied_bf16_sharded", "model.embed_tokens"
    tensors = {
        f"{lora.PREFIX}{name}.lora_embedding_A": torch.ones(lora.RANK, 72),
        f"{lora.PREFIX}{name}.lora_embedding_B": torch.ones(32, lora.RANK),
    }
    folder = lora.write_adapter(tmp_path / "a", tensors, target_modules=["embed_tokens"])
    with pytest.raises(Unsupported, match=r"the base ties it to lm_head\.weight"):
        merge(folder, tmp_path / "out", base_model=str(base))


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ({"use_dora": True}, Unsupported, "DoRA"),
        ({"lora_bias": True}, Unsupported, "bias"),
        ({"alora_invocation_tokens": [3]}, Unsupported, "certain tokens only"),
        ({"init_lora_weights": "pissa_niter_4"}, Unsupported, "took a part out of the base's weights"),
        ({"lora_alpha": None}, UsageError, "lora_alpha"),
        ({"r": lora.RANK + 1}, LayoutMismatch, "rank 3, but"),
    ],
)
def test_what_cannot_be_added_is_refused(
    tmp_path: Path, base: Path, change: dict[str, Any], kind: type[CheckpointError], words: str
) -> None:
    folder = lora.write_adapter(tmp_path / "a", **change)
    with pytest.raises(kind, match=words):
        merge(folder, tmp_path / "out", base_model=str(base))
    assert not (tmp_path / "out").exists()


def test_without_a_base(tmp_path: Path, adapter: Path) -> None:
    with pytest.raises(UsageError, match="--base-model"):
        merge(adapter, tmp_path / "out")


def test_a_base_that_is_an_adapter_itself(tmp_path: Path, adapter: Path) -> None:
    other = lora.write_adapter(tmp_path / "other")
    with pytest.raises(UsageError, match=f"^{other}: holds an adapter and nothing of its base"):
        merge(adapter, tmp_path / "out", base_model=str(other))


def test_a_whole_model_has_nothing_to_merge(tmp_path: Path, base: Path) -> None:
    """The message names what the user gave, and not a folder that it has in common with the base."""
    (tmp_path / "far").mkdir()
    lora.write_base(tmp_path / "far" / "whole")
    with pytest.raises(Unsupported, match=f"^{tmp_path / 'far' / 'whole'}: no tensor of this universal checkpoint"):
        merge(tmp_path / "far" / "whole", tmp_path / "out", base_model=str(base))


def test_a_base_is_for_merging_and_a_merge_is_no_adapter(tmp_path: Path, adapter: Path, base: Path) -> None:
    unmerged = ConvertOptions("dcp", ReadOptions(), WriteOptions(base_model=str(base)), fsync=False)
    with pytest.raises(UsageError, match="--base-model: nothing is merged"):
        convert(adapter, tmp_path / "out", unmerged)
    with pytest.raises(UsageError, match="--merge-adapter makes a whole model, and --to peft"):
        merge(adapter, tmp_path / "out", "peft", base_model=str(base))
    assert not (tmp_path / "out").exists()


def test_of_another_model(tmp_path: Path, adapter: Path) -> None:
    other = {name.replace("q_proj", "query"): tensor[:, :3] if "down" in name and tensor.ndim == 2 else tensor
             for name, tensor in lora.base_model().items()}  # fmt: skip
    lora.write_base(tmp_path / "base", other)
    with pytest.raises(LayoutMismatch) as caught:
        merge(adapter, tmp_path / "out", base_model=str(tmp_path / "base"))
    assert "q_proj.weight: the adapter changes it" in str(caught.value)
    assert f"shape ({lora.ROWS}, 3)" in str(caught.value)


def with_fingerprint(adapter: Path, base: Path) -> None:
    source = open_checkpoint(base, ReadOptions(optimizer=False))
    with OpenFiles(source.root) as files:
        found = fingerprint(sampled(source.catalog, source.role, [spec.name for spec in source.model.params], files))
    (adapter / "mcore_rlhf").mkdir(exist_ok=True)
    for name, text in SavedAdapter(5, BaseModel("where/it/was", found)).texts().items():
        assert isinstance(text, str)
        (adapter / name).write_text(text)


def test_the_base_must_be_the_adapters_own(tmp_path: Path, adapter: Path, base: Path) -> None:
    with_fingerprint(adapter, base)
    job = merge(adapter, tmp_path / "out", base_model=str(base))
    assert any("fingerprints are equal" in text for _, text in job.report.lines)
    assert job.source.root == adapter
    lora.write_base(tmp_path / "other", lora.base_model(seed=9))
    with pytest.raises(LayoutMismatch, match=r"not the model on which the adapter was trained \(where/it/was\)"):
        merge(adapter, tmp_path / "wrong", base_model=str(tmp_path / "other"))


def test_a_damaged_base_is_found(tmp_path: Path, adapter: Path, base: Path) -> None:
    file = base / "global_step7_uni" / "mp_rank_00_model_states.pt"
    data = bytearray(file.read_bytes())
    at = data.index(lora.base_model()["lm_head.weight"].view(torch.uint8).numpy().tobytes()[:32])
    data[at] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match="mp_rank_00_model_states"):
        merge(adapter, tmp_path / "out", base_model=str(base))
    assert not (tmp_path / "out").exists()


def test_the_plan_says_what_is_computed(adapter: Path, base: Path) -> None:
    job = prepare(adapter, ConvertOptions("hf", write=WriteOptions(merge_adapter=True, base_model=str(base))))
    computed = [copy for planned in job.plans() for copy in planned.plan.copies if copy.source.computed]
    assert len(computed) == len(lora.ADAPTED)
    assert any(copy.source.key == f"{lora.ADAPTED[0]}.weight + 4·B·A" for copy in computed)


def test_the_merged_model_can_be_read_like_any_other(adapter: Path, base: Path) -> None:
    job = prepare(adapter, ConvertOptions("hf", write=WriteOptions(merge_adapter=True, base_model=str(base))))
    seen = job.seen
    assert seen is not None
    entry = seen.catalog.get(TensorName(seen.role, f"{lora.ADAPTED[0]}.weight", PARAM))
    assert entry is not None
    with bytes_of(seen) as files:
        data = files.view(entry.chunks[0].record.file, 0, entry.chunks[0].record.nbytes)
        found = torch.frombuffer(bytearray(data), dtype=torch.bfloat16).reshape(lora.ROWS, lora.COLUMNS)
    torch.testing.assert_close(
        found, lora.merged_by_torch(lora.base_model(), lora.adapter())[f"{lora.ADAPTED[0]}.weight"], rtol=2**-7, atol=0
    )
