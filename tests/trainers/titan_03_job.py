"""One rank of a torchtitan 0.3 run: its models, containers and ``CheckpointManager`` train, save and resume, as a list of orders says.

``python -m tests.trainers.titan_03_job ORDERS RANK``, with torchtitan 0.3.0 on the path. Its models are its own, Llama and Qwen3, whose
attention is torch's ``scaled_dot_product_attention`` in the place of kernels of a GPU. Queries, keys and values are one parameter, as they
are in its own configurations; ``fused`` off makes three of them. A second param group, with ``groups``, decays no norms.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.trainers.absent import stand_in
from tests.trainers.lessons import BATCH, BETAS, DECAY, LEAST, RATE, SIZES, VOCABULARY, WIDTH, Step, begin, seen_of
from tests.trainers.titan_jobs import TrainState

stand_in("torch.utils.tensorboard", "torchtitan.distributed.minimal_async_ep", instead=True)  # kernels of a GPU
stand_in("datasets", "einops", "wandb")


def _longest() -> str:
    """What the longest text is called: one way in 0.3, and another since."""
    from torchtitan.models.common import ComplexRoPE

    return next(
        name for name in ("max_seq_len", "max_context_length") if name in ComplexRoPE.Config.__dataclass_fields__
    )


def model_of(orders: dict[str, Any]) -> Any:
    """torchtitan's own model, of the sizes of all lessons."""
    from torchtitan.models.common import ComplexRoPE, CosSinRoPE, Embedding, Linear, RMSNorm
    from torchtitan.models.common import config_utils as made
    from torchtitan.models.common.attention import ScaledDotProductAttention

    is_llama = orders["model"] == "llama"
    if is_llama:
        from torchtitan.models.llama3.model import Llama3Model as Model
        from torchtitan.models.llama3.model import Llama3TransformerBlock as Block
    else:
        from torchtitan.models.qwen3.model import Qwen3Model as Model  # type: ignore[assignment]
        from torchtitan.models.qwen3.model import Qwen3TransformerBlock as Block  # type: ignore[assignment]
    dim, heads, vocabulary = SIZES["hidden_size"], SIZES["num_attention_heads"], SIZES["vocab_size"]
    begun = {"weight": lambda tensor: torch.nn.init.normal_(tensor, std=0.05)}
    norm = {"weight": lambda tensor: torch.nn.init.normal_(tensor, mean=1.0, std=0.05)}
    turns = ComplexRoPE if is_llama else CosSinRoPE
    rope = turns.Config(dim=dim // heads, theta=10000.0, **{_longest(): 64})

    def normed(width: int) -> Any:
        return RMSNorm.Config(normalized_shape=width, eps=SIZES["rms_norm_eps"], param_init=norm)

    layers = [
        Block.Config(
            attention_norm=normed(dim), ffn_norm=normed(dim),
            attention=made.make_gqa_config(
                dim=dim, n_heads=heads, n_kv_heads=SIZES["num_key_value_heads"], wqkv_param_init=begun, wo_param_init=begun,
                inner_attention=ScaledDotProductAttention.Config(), rope=rope, fuse_qkv=orders.get("fused", True),
                **({} if is_llama else {"head_dim": dim // heads, "qk_norm": normed(dim // heads)}),
            ),
            feed_forward=made.make_ffn_config(
                dim=dim, hidden_dim=SIZES["intermediate_size"], w1_param_init=begun, w2w3_param_init=begun
            ),
        )
        for _ in range(SIZES["num_hidden_layers"])
    ]  # fmt: skip
    config = Model.Config(
        dim=dim, vocab_size=vocabulary, enable_weight_tying=orders["tied"], norm=normed(dim), layers=layers,
        tok_embeddings=Embedding.Config(num_embeddings=vocabulary, embedding_dim=dim, param_init=begun),
        lm_head=Linear.Config(in_features=dim, out_features=vocabulary, param_init=begun),
    )  # fmt: skip
    torch.manual_seed(orders["seed"])
    model = config.build()
    with torch.no_grad():
        model.init_states()
    return model


def _of_packed(model: Any, rows: torch.Tensor) -> torch.Tensor:
    """What a model says since 0.3, which has the tokens of all rows as one; attention is to see each row by itself."""
    for layer in model.layers.values():
        attention = layer.attention.inner_attention
        own = type(attention).forward

        def by_rows(*heads: torch.Tensor, attention: Any = attention, own: Any = own, **given: Any) -> torch.Tensor:
            found: torch.Tensor = own(attention, *(one.unflatten(0, rows.shape) for one in heads), **given)
            return found.flatten(0, 1)

        attention.forward = by_rows
    positions = torch.arange(rows.shape[1]).repeat(rows.shape[0])
    found: torch.Tensor = model(rows.flatten(), positions=positions)
    return found.unflatten(0, rows.shape)


class Run:
    """A run of torchtitan's."""

    def __init__(self, orders: dict[str, Any]) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torchdata.stateful_dataloader import StatefulDataLoader
        from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig

        self.model = model_of(orders)
        self.by_rows = _longest() == "max_seq_len"
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in self.model.layers.values():
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        settings = {"lr": RATE, "betas": BETAS, "weight_decay": DECAY}
        groups = [ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs=settings)]
        if orders.get("groups"):
            groups.insert(
                0,
                ParamGroupConfig(
                    pattern="norm", optimizer_name="AdamW", optimizer_kwargs={**settings, "weight_decay": 0.0}
                ),
            )
        container = OptimizersContainer.Config(param_groups=groups, implementation="foreach")
        self.optimizers = container.build(model_parts=[self.model])
        self.schedules = LRSchedulersContainer(self.optimizers, lambda step: max(LEAST, 1 - step / 20))
        self.loader: Any = StatefulDataLoader(list(range(64)), batch_size=BATCH)
        self.state = TrainState()

    def step(self, number: int) -> Step:
        self.state.step = number
        words = torch.randint(0, VOCABULARY, (BATCH, WIDTH), generator=torch.Generator().manual_seed(1000 + number))
        share = words.chunk(dist.get_world_size())[dist.get_rank()]
        logits = self.model(share).float() if self.by_rows else _of_packed(self.model, share).float()
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), share[:, 1:].reshape(-1))
        loss.backward()
        self.optimizers.step()
        self.schedules.step()
        self.optimizers.zero_grad()
        self.state.ntokens_seen += words.numel()
        return seen_of(loss, [rate for one in self.schedules for rate in one.get_last_lr()])

    def save(self, path: str, at: int) -> None:
        self._manager(path).save(at)

    def load(self, path: str) -> None:
        assert self._manager(path).load(step=-1), f"{path}: passed over"

    def _manager(self, folder: str) -> Any:
        from torchtitan.components.checkpointer.dcp import CheckpointManager

        at = Path(folder)
        config = CheckpointManager.Config(enable=True, folder=at.name, interval=1, last_save_model_only=False)
        return config.build(
            dataloader=self.loader, model_parts=[self.model], optimizers=self.optimizers, lr_schedulers=self.schedules,
            states={"train_state": self.state}, sd_adapter=None, base_folder=str(at.parent),
        )  # fmt: skip


if __name__ == "__main__":
    begin(Run)
