"""One rank of real DeepSpeed with a LoRA of real peft: trains, saves, and loads what was converted.

It leaves ``run`` (DeepSpeed's own checkpoint), ``adapter``
(peft's own), and ``seen.json``: the losses of the uninterrupted run, and of one that went on from a checkpoint without its frozen
parameters.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from mcore_rlhf.convert import ConvertOptions, convert
from mcore_rlhf.families.options import ReadOptions, WriteOptions
from tests.reference.deepspeed_resident import begin

BASE = Path(__file__).parents[1] / "goldens" / "peft" / "base"
WORDS, STEPS = 61, 3


def engine_of(stage: int) -> Any:
    """A LoRA under DeepSpeed; a fresh one is always the same."""
    import deepspeed
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(BASE)
    lora = LoraConfig(
        r=3, lora_alpha=6, target_modules=["q_proj", "down_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM"
    )
    adapted = get_peft_model(model, lora)
    trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    zero: dict[str, Any] = {"stage": stage}
    if stage == 3:  # its own linear layer would round otherwise than stage 2's
        zero |= {"stage3_param_persistence_threshold": 0, "memory_efficient_linear": False}
    config = {
        "train_batch_size": 2, "train_micro_batch_size_per_gpu": 2, "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False, "steps_per_print": 10**9, "gradient_clipping": 1.0,
        "zero_optimization": zero,
    }  # fmt: skip
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    return deepspeed.initialize(model=adapted, optimizer=optimizer, config=config)[0]


def train(engine: Any, first: int) -> list[float]:
    losses = []
    for step in range(first, first + STEPS):
        words = torch.randint(0, WORDS, (2, 9), generator=torch.Generator().manual_seed(step))
        loss = engine(input_ids=words, labels=words).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def run(folder: Path, stage: int) -> None:
    """Train and save; convert; load and go on."""
    import deepspeed

    begin()
    engine = engine_of(stage)
    train(engine, 0)
    engine.save_checkpoint(folder / "run", tag=f"step{STEPS}")
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        engine.module.save_pretrained(folder / "adapter")
    expected = train(engine, STEPS)
    convert(
        folder / "run",
        folder / "lean",
        ConvertOptions("deepspeed", ReadOptions(exclude_frozen=True), WriteOptions(zero_stage=2), fsync=False),
    )
    again = engine_of(2)
    again.load_checkpoint(folder / "lean", load_module_strict=False)
    found = train(again, STEPS)
    (folder / "seen.json").write_text(json.dumps({"expected": expected, "found": found}))
