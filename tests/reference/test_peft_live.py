"""A LoRA of real peft in the manager: saved alone, loaded bit for bit on its own base, and merged into it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mcore_rlhf import CheckpointManager
from mcore_rlhf.engines.adapter import AdapterEngine
from mcore_rlhf.errors import CheckpointError
from tests.reference.peft_lab import (
    BASE,
    GOLDENS,
    adapted,
    convert_to,
    engine,
    from_folder,
    logits,
    peft,
    theirs,
    trained,
    transformers,
)

pytestmark = pytest.mark.reference


def test_a_live_adapter(tmp_path: Path) -> None:
    """The manager saves only the adapter; the run goes on bit for bit, peft loads the step, and it merges into the base."""
    model = adapted(modules_to_save=["lm_head"])
    live, optimizer = engine(model)
    trained(model, optimizer, range(2))
    with CheckpointManager(tmp_path / "run", {"actor": live}) as manager:
        manager.save(2, blocking=True)
    step = tmp_path / "run" / "global_step_2" / "actor"
    at_save = logits(model)
    expected = trained(model, optimizer, range(2, 5))
    again = adapted(modules_to_save=["lm_head"])
    fresh, fresh_optimizer = engine(again)
    with CheckpointManager(tmp_path / "run", {"actor": fresh}) as manager:
        assert manager.load() is not None
    assert torch.equal(logits(again), at_save)
    assert trained(again, fresh_optimizer, range(2, 5)) == expected
    assert torch.equal(logits(from_folder(step)), at_save)
    job = convert_to(step, tmp_path / "m", "hf", merge_adapter=True, base_model=str(BASE))
    assert any("fingerprints are equal" in text for _, text in job.report.lines), "a live base and a stored one are one"
    with theirs():
        merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    torch.testing.assert_close(logits(merged), at_save, rtol=1e-5, atol=1e-5)


def test_another_base_is_refused(tmp_path: Path) -> None:
    model = adapted()
    live, _ = engine(model)
    with CheckpointManager(tmp_path / "run", {"actor": live}) as manager:
        manager.save(1, blocking=True)
    step = tmp_path / "run" / "global_step_1" / "actor"
    other = adapted()
    with torch.no_grad():
        other.base_model.model.model.norm.weight[0] += 0.01
    with (
        CheckpointManager(tmp_path / "run", {"actor": engine(other)[0]}) as manager,
        pytest.raises(CheckpointError, match="not the model on which"),
    ):
        manager.load()
    with pytest.raises(CheckpointError, match="not the model on which"):
        convert_to(step, tmp_path / "m", "hf", merge_adapter=True, base_model=str(GOLDENS / "merged"))
    assert not (tmp_path / "m").exists()


def test_while_merged_nothing_is_saved(tmp_path: Path) -> None:
    model = adapted()
    live, _ = engine(model)
    model.merge_adapter()
    with CheckpointManager(tmp_path / "run", {"actor": live}) as manager:
        with pytest.raises(CheckpointError, match="unmerge_adapter"):
            manager.save(1, blocking=True)
        model.unmerge_adapter()
        manager.save(1, blocking=True)


@pytest.mark.parametrize("kind", ["tied", "tied, head saved whole", "experts packed in memory"])
def test_a_live_base_and_a_stored_one_have_one_fingerprint(tmp_path: Path, kind: str) -> None:
    """Tied tensors count once, and experts are packed in a running model; the merged model computes as the live one does."""
    stored = GOLDENS / "base_moe"
    if kind.startswith("tied"):
        stored = tmp_path / "base"
        config = transformers.AutoConfig.from_pretrained(BASE, tie_word_embeddings=True)
        with theirs():
            transformers.AutoModelForCausalLM.from_config(config).save_pretrained(stored)
    whole = ["lm_head"] if "head" in kind else None
    lora = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj"], modules_to_save=whole, task_type="CAUSAL_LM")
    with theirs():
        model = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(stored), lora)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.2)
    with CheckpointManager(tmp_path / "run", {"actor": AdapterEngine(model, base=stored)}) as manager:
        manager.save(1, blocking=True)
    step = tmp_path / "run" / "global_step_1" / "actor"
    job = convert_to(step, tmp_path / "m", "hf", merge_adapter=True, base_model=str(stored))
    assert any("fingerprints are equal" in text for _, text in job.report.lines)
    with theirs():
        merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    assert merged.config.tie_word_embeddings == (kind == "tied")
    torch.testing.assert_close(logits(merged), logits(model), rtol=1e-5, atol=1e-5)
