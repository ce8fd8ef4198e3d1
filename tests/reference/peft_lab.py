"""A tiny Llama with a LoRA of real peft, and what the tests of adapters do with it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rlhf.convert import ConvertOptions, Job, convert
from mcore_rlhf.engines.adapter import AdapterEngine
from mcore_rlhf.families.options import ReadOptions, WriteOptions

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

GOLDENS = Path(__file__).parents[1] / "goldens" / "peft"
BASE, ADAPTER = GOLDENS / "base", GOLDENS / "adapter"
WORDS = 61


@contextmanager
def theirs() -> Iterator[None]:
    """Their own warnings are theirs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def base(dtype: torch.dtype = torch.float32) -> Any:
    with theirs():
        return transformers.AutoModelForCausalLM.from_pretrained(BASE, dtype=dtype)


def adapted(**config: Any) -> Any:
    """A new model with an adapter of random values."""
    lora = peft.LoraConfig(
        **{"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "up_proj"], "task_type": "CAUSAL_LM", **config}
    )
    with theirs():
        model = peft.get_peft_model(base(), lora)
    torch.manual_seed(5)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3 if "lora" in name else 0.1)
    return model


def from_folder(folder: Path, model: Any = None) -> Any:
    with theirs():
        return peft.PeftModel.from_pretrained(model or base(), folder)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(2 * 17).reshape(2, 17) % WORDS).logits  # type: ignore[no-any-return]


def convert_to(source: Path, target: Path, to: str, **write: Any) -> Job:
    return convert(source, target, ConvertOptions(to, ReadOptions(), WriteOptions(**write), fsync=False))


def saved(model: Any, folder: Path) -> Path:
    with theirs():
        model.save_pretrained(folder)
    return folder


def trained(model: Any, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        words = torch.randint(0, WORDS, (2, 9), generator=torch.Generator().manual_seed(step))
        loss = model(input_ids=words, labels=words).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def engine(model: Any) -> tuple[AdapterEngine, torch.optim.Optimizer]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    return AdapterEngine(model, optimizer, base=BASE), optimizer
