"""One rank of real DeepSpeed that saves with ``exclude_frozen_parameters``: a model whose first layer is frozen, and a LoRA."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from tests.reference.deepspeed_resident import begin
from tests.reference.lora_worker import BASE, engine_of, train

FROZEN = ("model.embed_tokens.", "model.layers.0.")


def run(folder: Path) -> None:
    """Leave ``z<stage>`` of the model, ``full<stage>`` with all of it, ``lora`` and ``universal``."""
    from deepspeed.checkpoint import ds_to_universal

    begin()
    for stage in range(4):
        engine = _engine(stage)
        train(engine, 0)
        engine.save_checkpoint(folder / f"z{stage}", exclude_frozen_parameters=True)
        engine.save_checkpoint(folder / f"full{stage}")
        engine.destroy()
    engine = engine_of(2)
    train(engine, 0)
    engine.save_checkpoint(folder / "lora", exclude_frozen_parameters=True)
    engine.destroy()
    tag = (folder / "z2" / "latest").read_text()
    given = [
        "",
        "--input_folder",
        str(folder / "z2" / tag),
        "--output_folder",
        str(folder / "universal" / f"{tag}_uni"),
    ]
    argv, sys.argv = (
        sys.argv,
        [*given, "--num_extract_workers", "1", "--num_merge_workers", "1", "--inject_missing_state"],
    )
    try:
        ds_to_universal.main(ds_to_universal.parse_arguments())
    finally:
        sys.argv = argv
    (folder / "universal" / "latest_universal").write_text(f"{tag}_uni")


def _engine(stage: int) -> Any:
    import deepspeed
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(BASE)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(FROZEN))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    zero: dict[str, Any] = {"stage": stage}
    if stage == 3:
        zero |= {"stage3_param_persistence_threshold": 0, "memory_efficient_linear": False}
    config = {
        "train_batch_size": 2, "train_micro_batch_size_per_gpu": 2, "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False, "steps_per_print": 10**9, "zero_optimization": zero,
    }  # fmt: skip
    return deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(trained, lr=1e-2), config=config)[0]
