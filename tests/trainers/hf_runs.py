"""Short runs of transformers' own Trainer, and with accelerate's own ``save_state`` and ``load_state``, on the CPU: what each step saw."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file

WORDS, STEPS, HALF = 48, 4, 2
SIZES: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip
MOE = {"moe_intermediate_size": 12, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 4}
Seen = list[tuple[float, ...]]
"""Of each step: loss, learning rate, norm of the gradient as far as it is known."""


def model(seed: int, kind: str = "qwen2", dtype: torch.dtype = torch.float32, **config: Any) -> Any:
    """A tiny model with weights of its own; no vector in it is another's equal."""
    torch.manual_seed(seed)
    made = transformers.AutoConfig.for_model(kind, **{**SIZES, **config})
    found = transformers.AutoModelForCausalLM.from_config(made).to(dtype)
    for name, parameter in found.named_parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter.data, mean=1.0 if "norm" in name else 0.0, std=0.05)
    return found


def adapted(seed: int) -> Any:
    """The same base for every seed, with an adapter of its own."""
    from peft import LoraConfig, get_peft_model

    base = model(1, tie_word_embeddings=False)
    torch.manual_seed(seed)
    wanted = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft 0.21.2 calls what transformers 5.23.0 deprecates
        found = get_peft_model(base, wanted)
    for name, parameter in found.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter.data, std=0.1)
    return found


def adapted_experts(seed: int) -> Any:
    """The same of a model with packed experts: each of their two parameters gets a layer around their one module."""
    from peft import LoraConfig, get_peft_model

    base = model(1, "qwen3_moe", **MOE)
    torch.manual_seed(seed)
    packed = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    wanted = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], target_parameters=packed, task_type="CAUSAL_LM")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = get_peft_model(base, wanted)
    for name, parameter in found.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter.data, std=0.1)
    return found


class Headed(torch.nn.Module):
    """A model with a value head upon it, which its state dict does not show, as TRL had it until 0.24 and LLaMA-Factory has it.

    Source: trl 0.24.0, ``models/modeling_value_head.py`` (``AutoModelForCausalLMWithValueHead``); LLaMA-Factory 0.9.5, ``model/patcher.py``
    (``patch_valuehead_model``).
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.pretrained_model = model(seed, tie_word_embeddings=False)
        self.v_head = torch.nn.ModuleDict({"summary": torch.nn.Linear(SIZES["hidden_size"], 1)})
        self.config = self.pretrained_model.config
        self._keys_to_ignore_on_save = [
            f"pretrained_model.{name}" for name, _ in self.pretrained_model.named_parameters()
        ]

    def tie_weights(self) -> None:
        """As LLaMA-Factory has it."""

    def forward(self, input_ids: Any, labels: Any) -> dict[str, Any]:
        found = self.pretrained_model(input_ids=input_ids, labels=labels, output_hidden_states=True)
        values = self.v_head["summary"](found.hidden_states[-1])
        return {"loss": found.loss + (values - 0.5).square().mean(), "logits": found.logits}

    def state_dict(self, *args: Any, **given: Any) -> Any:
        own = self.v_head.state_dict(*args, **given)
        return {
            **self.pretrained_model.state_dict(*args, **given),
            **{f"v_head.{name}": value for name, value in own.items()},
        }

    def take(self, folder: Path) -> None:
        """Make the model of a step, as a script does: ``Trainer`` finds none of its weights under the names of the state dict."""
        state = load_file(folder / "model.safetensors")
        own = {name: value for name, value in state.items() if not name.startswith("v_head.")}
        self.pretrained_model.load_state_dict(own)


def compiled(trained: Any) -> Any:
    """The model as ``torch.compile`` wraps it, and nothing compiled."""
    return torch.compile(trained, backend="eager")


def _data() -> list[dict[str, list[int]]]:
    words = torch.randint(0, WORDS, (16, 8), generator=torch.Generator().manual_seed(7))
    return [{"input_ids": row.tolist(), "labels": row.tolist()} for row in words]


def _batch(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    return {key: torch.tensor([row[key] for row in rows]) for key in rows[0]}


@contextmanager
def on_cpu() -> Iterator[None]:
    """accelerate keeps for the whole process on what it runs."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    states: tuple[Any, ...] = (AcceleratorState, GradientState, PartialState)
    before = os.environ.get("ACCELERATE_USE_CPU")
    os.environ["ACCELERATE_USE_CPU"] = "true"
    for state in states:
        state._reset_state()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_num_threads(threads)
        for state in states:
            state._reset_state()
        os.environ.pop("ACCELERATE_USE_CPU")
        os.environ |= {} if before is None else {"ACCELERATE_USE_CPU": before}


def train(trained: Any, folder: Path, resume: Path | None = None, **arguments: Any) -> Seen:
    """Train with ``Trainer``; saved at half of the steps, and at the end.

    Args:
        trained: The model.
        folder: ``output_dir``.
        resume: The checkpoint from which it goes on.
        arguments: Further ``TrainingArguments``.
    """
    seen: Seen = []

    class Watch(transformers.TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
            if "loss" in logs:
                seen.append((logs["loss"], logs["learning_rate"], float(logs["grad_norm"])))

    with on_cpu():
        wanted = transformers.TrainingArguments(
            **{
                "output_dir": str(folder), "use_cpu": True, "per_device_train_batch_size": 2, "max_steps": STEPS, "save_steps": HALF,
                "learning_rate": 1e-2, "adam_beta2": 0.95, "weight_decay": 0.01, "lr_scheduler_type": "cosine", "warmup_steps": 1,
                "logging_steps": 1, "report_to": [], "seed": 3, "data_seed": 3, "disable_tqdm": True, "dataloader_pin_memory": False,
                **arguments,
            }
        )  # fmt: skip
        trainer = transformers.Trainer(
            model=trained, args=wanted, train_dataset=_data(), data_collator=_batch, callbacks=[Watch()]
        )
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return seen


def imported(folder: Path) -> None:
    """Import what a run imports as it begins, and no more: threads of a backward pass do not outlive a fork."""
    with on_cpu():
        transformers.Trainer(
            model=model(1),
            args=transformers.TrainingArguments(str(folder), use_cpu=True, report_to=[], save_strategy="no"),
        )


def accelerated(trained: Any, save: Path | None = None, resume: Path | None = None, *, scheduled: bool = True) -> Seen:
    """Train with a loop of one's own around accelerate.

    Args:
        trained: The model.
        save: Where ``save_state`` goes at half of the steps; None for nowhere.
        resume: What ``load_state`` takes.
        scheduled: Whether there is a schedule.
    """
    from accelerate import Accelerator

    seen: Seen = []
    with on_cpu():
        accelerator = Accelerator(cpu=True)
        optimizer = torch.optim.AdamW(_groups(trained), lr=1e-2, betas=(0.9, 0.95))
        schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))] if scheduled else []
        trained, optimizer, *schedules = accelerator.prepare(trained, optimizer, *schedules)
        if resume is not None:
            accelerator.load_state(str(resume))
        for step in range(0 if resume is None else HALF, STEPS):
            loss = trained(**_batch(_data()[2 * step : 2 * step + 2])).loss
            accelerator.backward(loss)
            rates = [group["lr"] for group in optimizer.param_groups]
            seen.append((loss.item(), *rates, torch.rand(()).item()))
            for one in (optimizer, *schedules):
                one.step()
            optimizer.zero_grad()
            if save is not None and step + 1 == HALF:
                accelerator.save_state(str(save))
    return seen


def critic(seed: int) -> Any:
    """A tiny model that gives each word a value."""
    torch.manual_seed(seed)
    wanted = transformers.Qwen2Config(**SIZES, num_labels=1, classifier_dropout=0.0)
    return transformers.Qwen2ForTokenClassification(wanted)


def actor_and_critic(
    save: Path | None = None, resume: Path | None = None, of: tuple[str, ...] = ("actor", "critic")
) -> Seen:
    """Train an actor and a critic, or one of them, that one Accelerator prepared, each with its optimizer and schedule.

    Args:
        save, resume: See :func:`accelerated`.
        of: Which, in the order in which they are prepared; a ``reference`` or a ``reward`` model among them has no optimizer, and of it the
            mean of what it gives is seen.
    """
    from accelerate import Accelerator

    seen: Seen = []
    with on_cpu():
        accelerator, seed = Accelerator(cpu=True), 1 if resume is None else 9
        actors, critics = {"actor": seed, "reference": seed + 50}, {"critic": seed, "reward": seed + 50}
        made = {name: model(own, tie_word_embeddings=False) for name, own in actors.items()}
        made |= {name: critic(own) for name, own in critics.items()}
        models = [made[role] for role in of]
        rates = {"actor": 1e-2, "critic": 2e-2}
        optimizers = [
            torch.optim.AdamW(_groups(made[role]) if role == "actor" else made[role].parameters(), lr=rates[role])
            for role in of
            if role in rates
        ]
        schedules = [torch.optim.lr_scheduler.LambdaLR(one, lambda step: 1 / (1 + step)) for one in optimizers]
        prepared = accelerator.prepare(*models, *optimizers, *schedules)
        count = len(optimizers)
        models, steppers = prepared[: len(of)], prepared[len(of) :]
        if resume is not None:
            accelerator.load_state(str(resume))
        for step in range(0 if resume is None else HALF, STEPS):
            batch = _batch(_data()[2 * step : 2 * step + 2])
            losses = []
            for role, trained in zip(of, models, strict=True):
                found = trained(**batch) if role == "actor" else trained(input_ids=batch["input_ids"])
                losses.append(found.loss if role == "actor" else (found.logits - 0.5).square().mean())
                if role in rates:
                    accelerator.backward(losses[-1])
            seen.append((*(loss.item() for loss in losses), *(one.get_last_lr()[0] for one in steppers[count:])))
            for one in steppers:
                one.step()
            for one in steppers[:count]:
                one.zero_grad()
            if save is not None and step + 1 == HALF:
                accelerator.save_state(str(save))
    return seen


def _groups(trained: Any) -> list[dict[str, Any]]:
    still = ("bias", "norm.weight")
    named = list(trained.named_parameters())
    return [
        {"params": [p for n, p in named if not n.endswith(still)], "weight_decay": 0.01},
        {"params": [p for n, p in named if n.endswith(still)], "weight_decay": 0.0},
    ]
