"""Jobs with Megatron-core's own Muon, plain and layer-wise, on a stand-in for the package that has its kernels."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from mcore_rlhf.errors import CheckpointError
from mcore_rlhf.manager.run.manager import CheckpointManager, ManagerOptions
from tests.reference.engine_jobs import engine_of, new_trainer
from tests.reference.observing import END, LOOK, Session

if TYPE_CHECKING:
    import torch

    from mcore_rlhf.demo.trainer import Trainer

OPTIONS = ManagerOptions(timeout=60, fsync=False, catch_signals=False)


@dataclass
class Seen:
    """What a rank saw: losses and all states by step, what it said, what it was told."""

    losses: dict[int, float] = field(default_factory=dict)
    states: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    told: tuple[str, str] = ("", "")
    report: list[str] = field(default_factory=list)


def emerging_optimizers() -> None:
    """What megatron-core 0.16.1 imports of ``emerging_optimizers``, small: momentum, and Newton-Schulz without tensor parallelism.

    Source: emerging_optimizers 0.3.0, ``orthogonalized_optimizers/orthogonalized_optimizer.py``, ``muon_utils.py``.
    """
    import torch

    class OrthogonalizedOptimizer(torch.optim.Optimizer):
        def __init__(self, params: Any, lr: float, momentum_beta: float, *, use_nesterov: bool, weight_decay: float,
                     weight_decay_method: str, fp32_matmul_prec: str, scaled_orthogonalize_fn: Callable[..., Any]) -> None:  # fmt: skip
            del weight_decay_method, fp32_matmul_prec
            self.scaled_orthogonalize_fn = scaled_orthogonalize_fn
            super().__init__(
                params,
                {"lr": lr, "momentum_beta": momentum_beta, "use_nesterov": use_nesterov, "weight_decay": weight_decay},
            )

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        kept = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p.grad))
                        p.mul_(1 - group["lr"] * group["weight_decay"])
                        kept.lerp_(p.grad, 1 - group["momentum_beta"])
                        grad = p.grad.lerp(kept, group["momentum_beta"]) if group["use_nesterov"] else kept
                        p.add_(self.orthogonalize(p, grad), alpha=-group["lr"])  # type: ignore[attr-defined]

    def newton_schulz_tp(x: torch.Tensor, steps: int, **_: Any) -> torch.Tensor:
        x = x / (x.norm() + 1e-7)
        for _step in range(steps):
            a = x @ x.mT
            x = 3.4445 * x + (-4.7750 * a + 2.0315 * (a @ a)) @ x
        return x

    package, inner = ModuleType("emerging_optimizers"), ModuleType("emerging_optimizers.orthogonalized_optimizers")
    utils = ModuleType("emerging_optimizers.orthogonalized_optimizers.muon_utils")
    inner.OrthogonalizedOptimizer = OrthogonalizedOptimizer  # type: ignore[attr-defined]
    inner.get_muon_scale_factor = lambda rows, columns, mode: max(rows, columns) ** 0.5  # type: ignore[attr-defined]
    utils.newton_schulz_tp = newton_schulz_tp  # type: ignore[attr-defined]
    for module in (package, inner, utils):
        sys.modules.setdefault(module.__name__, module)


@contextmanager
def with_muon(layer_wise: bool) -> Iterator[None]:
    """Trainers that are built inside have Muon for their matrices."""
    emerging_optimizers()
    from megatron.core.optimizer.muon import get_megatron_muon_optimizer

    from mcore_rlhf.demo import trainer

    def build(config: Any, chunks: Any, config_overrides: Any) -> Any:
        return get_megatron_muon_optimizer(
            config, chunks, config_overrides=config_overrides, layer_wise_distributed_optimizer=layer_wise
        )

    usual = trainer.get_megatron_optimizer
    trainer.get_megatron_optimizer = build  # type: ignore[assignment]
    try:
        yield
    finally:
        trainer.get_megatron_optimizer = usual


def states_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Every tensor of the model and of every optimizer of the chain, by where it stands: the test's own count of them."""
    found = {f"param {name}": p.detach().clone() for c in trainer.chunks for name, p in c.named_parameters()}
    assert trainer.optimizer is not None
    for number, member in enumerate(trainer.optimizer.chained_optimizers):
        for g, group in enumerate(member.optimizer.param_groups):
            for i, held in enumerate(group["params"]):
                found[f"{number}.{g}.{i} held"] = held.detach().clone()
                for key, value in member.optimizer.state[held].items():
                    found[f"{number}.{g}.{i} {key}"] = value.clone()
    return found


def train_on(trainer: Trainer, seen: Seen, until: int) -> None:
    while trainer.iteration < until:
        loss = trainer.train_step()
        seen.losses[trainer.iteration] = loss


def save(session: Session, root: str, layer_wise: bool) -> Seen:
    """Save at step 2, and train to the end."""
    seen = Seen()
    with with_muon(layer_wise):
        trainer, _ = new_trainer(session)
    with listening(seen):
        engine = engine_of(trainer)
    train_on(trainer, seen, LOOK)
    with CheckpointManager(Path(root), {"actor": engine}, options=OPTIONS) as manager:
        manager.save(LOOK)
        seen.states[LOOK] = states_of(trainer)
        train_on(trainer, seen, END)
    seen.states[END] = states_of(trainer)
    return seen


def load(session: Session, root: str, layer_wise: bool, optimizer: bool = True) -> Seen:
    """Load over a run that has gone a step of its own, and train to the end."""
    seen = Seen()
    with with_muon(layer_wise):
        trainer, _ = new_trainer(session)
    trainer.train_step()
    before = states_of(trainer)
    with CheckpointManager(Path(root), {"actor": engine_of(trainer)}, options=OPTIONS) as manager:
        try:
            resumed = manager.load(optimizer=optimizer)
        except CheckpointError as error:
            seen.told = type(error).__name__, str(error)
            seen.states = {0: before, LOOK: states_of(trainer)}
            return seen
    assert resumed is not None
    seen.report = [text for _, text in resumed.report.lines]
    trainer.iteration = resumed.step
    trainer.consumed_train_samples = resumed.step * session.training.global_batch_size
    seen.states[LOOK] = states_of(trainer)
    train_on(trainer, seen, END)
    seen.states[END] = states_of(trainer)
    return seen


def load_with_megatron(session: Session, root: str) -> Seen:
    """As Megatron-LM's ``load_checkpoint`` does with a layer-wise optimizer: its own method, and its own file of every rank."""
    import torch
    import torch.distributed as dist

    seen = Seen()
    with with_muon(layer_wise=True):
        trainer, _ = new_trainer(session)
    folder = Path(root) / f"global_step_{LOOK}" / "actor" / f"iter_{LOOK:07d}" / "mp_rank_00"
    model = torch.load(folder / "model_optim_rng.pt", weights_only=False)
    trainer.chunks[0].module.load_state_dict(model["model"])
    assert trainer.optimizer is not None
    trainer.optimizer.load_state_dict_from_file(str(folder / f"layer_wise_optimizer_{dist.get_rank()}.pt"))
    seen.states[LOOK] = states_of(trainer)
    return seen


def forgetful(session: Session, root: str) -> Seen:
    """An engine that thinks the layer-wise optimizer a plain chain, as this one did: what the manager says."""
    from dataclasses import replace

    seen = Seen()
    with with_muon(layer_wise=True):
        trainer, _ = new_trainer(session)
    trainer.train_step()
    engine = engine_of(trainer)
    engine.chain = tuple(member and replace(member, layer_wise=False) for member in engine.chain)
    with CheckpointManager(Path(root), {"actor": engine}, options=OPTIONS) as manager:
        try:
            manager.save(1, blocking=True)
        except CheckpointError as error:
            seen.told = type(error).__name__, str(error)
    seen.report = sorted(path.name for path in Path(root).glob("global_step_*"))
    return seen


@contextmanager
def listening(seen: Seen) -> Iterator[None]:
    """What the package's log says."""
    handler = logging.Handler()
    handler.emit = lambda record: seen.said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("mcore_rlhf").addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger("mcore_rlhf").removeHandler(handler)
