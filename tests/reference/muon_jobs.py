"""Jobs with Megatron-core's own Muon, plain and layer-wise, on a stand-in for the package that has its kernels."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from pickle import UnpicklingError
from types import ModuleType
from typing import TYPE_CHECKING, Any

from mcore_rlhf.errors import CheckpointError
from mcore_rlhf.manager.run.manager import CheckpointManager, ManagerOptions
from tests.helpers.latest import copied_at_the_latest
from tests.reference import engine_jobs, observing
from tests.reference.engine_jobs import new_trainer
from tests.reference.observing import END, LOOK, Observation, Session

if TYPE_CHECKING:
    import torch

    from mcore_rlhf.demo.trainer import DemoTrainer
    from mcore_rlhf.engines.megatron.engine import MegatronEngine

OPTIONS = ManagerOptions(timeout=60, fsync=False, catch_signals=False)


@dataclass
class Seen:
    """What a rank saw: losses and all states by step, what it said, what it was told."""

    losses: dict[int, float] = field(default_factory=dict)
    states: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    told: tuple[str, str] = ("", "")
    report: list[str] = field(default_factory=list)
    look: Observation | None = None


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

    if megatron() >= (0, 17) and find_spec("emerging_optimizers") is not None:
        return
    package, inner = ModuleType("emerging_optimizers"), ModuleType("emerging_optimizers.orthogonalized_optimizers")
    utils = ModuleType("emerging_optimizers.orthogonalized_optimizers.muon_utils")
    inner.OrthogonalizedOptimizer = OrthogonalizedOptimizer  # type: ignore[attr-defined]
    inner.get_muon_scale_factor = lambda rows, columns, mode: max(rows, columns) ** 0.5  # type: ignore[attr-defined]
    utils.newton_schulz_tp = newton_schulz_tp  # type: ignore[attr-defined]
    for module in (package, inner, utils):
        sys.modules.setdefault(module.__name__, module)


LAYER_WISE, PRECISE, OFFLOAD = "layer-wise, ", "precision-aware", "offloaded"
DEEPSPEEDS, MUP = "muon, as DeepSpeed's", "muP"
KINDS: dict[str, dict[str, Any]] = {
    "muon": {"optimizer": "muon"},
    LAYER_WISE + "ping-pong": {"optimizer": "muon"},
    LAYER_WISE + "by layout": {"optimizer": "muon"},
    LAYER_WISE + "by layout, lion": {"optimizer": "muon", "muon_scalar_optimizer": "lion"},
    "muon, lion": {"optimizer": "muon", "muon_scalar_optimizer": "lion"},
    "adaptive_muon": {"optimizer": "adaptive_muon"},
    "normuon": {"optimizer": "adaptive_muon", "adaptive_muon_moment2_method": "normuon"},
    "soap": {"optimizer": "soap"},
    LAYER_WISE + "soap": {"optimizer": "soap"},
    "lion": {"optimizer": "lion"},
    "sgd": {"optimizer": "sgd", "sgd_momentum": 0.9},
    PRECISE: {
        "use_precision_aware_optimizer": True,
        "exp_avg_dtype": "bfloat16",
        "exp_avg_sq_dtype": "bfloat16",
    },
    PRECISE + ", masters": {
        "use_precision_aware_optimizer": True,
        "exp_avg_dtype": "bfloat16",
        "exp_avg_sq_dtype": "bfloat16",
        "store_param_remainders": False,
    },
    PRECISE + ", fp16": {
        "use_precision_aware_optimizer": True,
        "main_params_dtype": "float16",
        "exp_avg_dtype": "float16",
        "exp_avg_sq_dtype": "float16",
    },
    DEEPSPEEDS: {
        "optimizer": "muon",
        "muon_momentum": 0.9,
        "muon_nesterov": True,
        "muon_scale_mode": "shape_scaling",
        "muon_coefficient_type": "simple",
    },
    MUP: {},
    OFFLOAD: {
        "use_precision_aware_optimizer": True,
        "optimizer_cpu_offload": True,
        "optimizer_offload_fraction": 1.0,
    },
    OFFLOAD + ", half": {
        "use_precision_aware_optimizer": True,
        "optimizer_cpu_offload": True,
        "optimizer_offload_fraction": 0.5,
    },
}
"""What Megatron's configuration says of an optimizer, by what it is called here."""


def megatron() -> tuple[int, ...]:
    """The release of megatron-core: (0, 19)."""
    return tuple(map(int, version("megatron-core").split(".")[:2]))


@contextmanager
def with_optimizer(kind: str) -> Iterator[None]:
    """Trainers that are built inside have such an optimizer."""
    import torch

    from mcore_rlhf.demo import trainer

    names = ("get_megatron_optimizer", "OptimizerConfig", "DistributedDataParallel", "get_standard_config_overrides")
    usual = {name: getattr(trainer, name) for name in names}
    layer_wise, given = kind.startswith(LAYER_WISE), dict(KINDS[kind])
    if megatron() < (0, 18) and "optimizer" in given:
        emerging_optimizers()
        trainer.get_megatron_optimizer = partial(_by_0_16, layer_wise=layer_wise)  # type: ignore[assignment]
        given = {}
    given |= {key: getattr(torch, value) for key, value in given.items() if key.endswith("_dtype")}
    given |= {"use_layer_wise_distributed_optimizer": True} if layer_wise and megatron() >= (0, 18) else {}
    trainer.OptimizerConfig = lambda **fields: usual["OptimizerConfig"](**{**fields, **given})  # type: ignore[assignment, misc]
    if kind == MUP:
        trainer.get_standard_config_overrides = partial(_with_mup, usual["get_standard_config_overrides"])  # type: ignore[assignment]
    if "by layout" in kind:
        trainer.DistributedDataParallel = partial(_laid_out, usual["DistributedDataParallel"])  # type: ignore[assignment, misc]
    if (
        KINDS[kind].get("optimizer") == "adaptive_muon"
    ):  # looks for what Megatron 0.19.2 does not give emerging_optimizers 0.3.0
        from megatron.core.optimizer.emerging_optimizers import TensorParallelAdaptiveMuon

        TensorParallelAdaptiveMuon.scale_mode, TensorParallelAdaptiveMuon.extra_scale_factor = "spectral", 1.0
    try:
        with remainders() if kind.startswith(PRECISE) else offloading() if kind.startswith(OFFLOAD) else nullcontext():
            yield
    finally:
        vars(trainer).update(usual)


def _by_0_16(config: Any, chunks: Any, config_overrides: Any, layer_wise: bool) -> Any:
    from megatron.core.optimizer.muon import get_megatron_muon_optimizer

    return get_megatron_muon_optimizer(
        config, chunks, config_overrides=config_overrides, layer_wise_distributed_optimizer=layer_wise
    )


def _with_mup(usual: Any, config: Any) -> Any:
    """As ``get_megatron_optimizer_config`` of megatron/training/training.py, 0.19.2, does for a model four times as wide as its base."""
    from megatron.core.optimizer import get_mup_config_overrides

    return {**usual(config), **get_mup_config_overrides(config, 4.0, "adam")}


def _laid_out(ddp: Any, config: Any, ddp_config: Any, module: Any, disable_bucketing: bool) -> Any:
    """As ``wrap_model_chunks_with_ddp`` of megatron/training/training.py, 0.19.2, does."""
    from megatron.core import parallel_state
    from megatron.core.optimizer.layer_wise_optimizer import (
        LayerWiseDistributedOptimizer,
        tag_params_for_buffer_routing,
    )

    ddp_config.use_distributed_optimizer = True
    tag_params_for_buffer_routing([module])
    layout = LayerWiseDistributedOptimizer.compute_full_param_layout(
        [p for p in module.parameters() if p.requires_grad], ddp_config.bucket_size,
        parallel_state.get_data_parallel_world_size(with_context_parallel=True), ddp_config,
        expert_data_parallel_world_size=parallel_state.get_expert_data_parallel_world_size(),
    )  # fmt: skip
    return ddp(config, ddp_config, module, disable_bucketing, full_param_layout=layout)


@contextmanager
def remainders() -> Iterator[None]:
    """:class:`.precise_adam.PreciseAdam` where Megatron looks for Transformer Engine's ``FusedAdam``."""
    from megatron.core import optimizer
    from megatron.core.optimizer import optimizer_config

    from tests.reference.precise_adam import PreciseAdam

    engine = ModuleType("transformer_engine.pytorch.optimizers")
    engine.FusedAdam = PreciseAdam  # type: ignore[attr-defined]
    usual = optimizer.Adam, optimizer.is_te_min_version, optimizer_config.is_te_min_version
    sys.modules[engine.__name__], optimizer.Adam = engine, PreciseAdam
    optimizer.is_te_min_version = optimizer_config.is_te_min_version = lambda *_, **__: True
    try:
        yield
    finally:
        del sys.modules[engine.__name__]
        optimizer.Adam, optimizer.is_te_min_version, optimizer_config.is_te_min_version = usual


@contextmanager
def offloading() -> Iterator[None]:
    """What Megatron asks of a tensor before it moves it to the CPU: all are on a GPU, but those that it has moved. On a GPU they are.

    And remainders are on by default, as with Transformer Engine 2.1; who offloads keeps none.
    """
    import torch
    from megatron.core import optimizer
    from megatron.core.optimizer import optimizer_config
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    dealt = HybridDeviceOptimizer._get_sub_optimizer_param_groups
    kept = {name: getattr(torch.Tensor, name) for name in ("detach", "clone", "float")}
    stands_in: dict[str, Any] = {name: partial(_as_it_came, method) for name, method in kept.items()}
    stands_in |= {"cpu": _moved, "pin_memory": lambda one: one}
    usual = {name: getattr(torch.Tensor, name) for name in stands_in}

    def as_on_a_gpu(hybrid: Any, fraction: float) -> Any:
        for name, method in stands_in.items():
            setattr(torch.Tensor, name, lambda one, method=method: method(one))
        torch.Tensor.is_cuda = property(lambda one: not hasattr(one, "is_moved"))  # type: ignore[assignment]
        try:
            return dealt(hybrid, fraction)
        finally:
            for name, method in usual.items():
                setattr(torch.Tensor, name, method)
            del torch.Tensor.is_cuda

    if (
        dealt.__name__ != as_on_a_gpu.__name__ and not torch.cuda.is_available()
    ):  # lasts as long as the process: a load deals them anew
        HybridDeviceOptimizer._get_sub_optimizer_param_groups = as_on_a_gpu  # type: ignore[method-assign]
    asked = optimizer_config.is_te_min_version, optimizer.Adam
    optimizer_config.is_te_min_version = lambda *_, **__: True
    # Megatron tells by the class which of its optimizers are on the CPU: where some are not, theirs has to be another than AdamW
    optimizer.Adam = torch.optim.Adam if torch.cuda.is_available() else torch.optim.AdamW
    try:
        yield
    finally:
        optimizer_config.is_te_min_version, optimizer.Adam = asked


def _moved(tensor: Any) -> Any:
    tensor.is_moved = True
    return tensor


def _as_it_came(method: Any, tensor: Any) -> Any:
    made = method(tensor)
    return _moved(made) if hasattr(tensor, "is_moved") else made


def said_of(kind: str) -> dict[str, Any]:
    """What Megatron-LM's arguments say of a precision-aware optimizer."""
    import torch

    given = KINDS[kind]
    precise = bool(given.get("use_precision_aware_optimizer"))
    kinds = ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype") if precise else ()
    return {
        "use_precision_aware_optimizer": precise,
        **{name: getattr(torch, given.get(name, "float32")) for name in kinds},
    }


@contextmanager
def arguments(kind: str) -> Iterator[None]:
    """What Megatron saves inside has such arguments."""
    from mcore_rlhf.demo import megatron_args

    usual = megatron_args.build

    def build(*given: Any) -> Any:
        found = usual(*given)
        vars(found).update(said_of(kind))
        return found

    megatron_args.build = build
    try:
        yield
    finally:
        megatron_args.build = usual


def engine_of(trainer: DemoTrainer, kind: str) -> MegatronEngine:
    """The engine, with arguments as Megatron-LM's are for such an optimizer."""
    engine = engine_jobs.engine_of(trainer)
    usual, optimizer = engine._args, KINDS[kind].get("optimizer", "adam")
    layer_wise = kind.startswith(LAYER_WISE)
    said = {"optimizer": f"dist_{optimizer}" if layer_wise and megatron() < (0, 18) else optimizer}
    if optimizer not in ("adam", "sgd"):
        said |= {"use_distributed_optimizer": False}
        newer = {"use_layer_wise_distributed_optimizer": layer_wise, "use_layer_wise_param_layout": "by layout" in kind}
        said |= newer if megatron() >= (0, 18) else {}
    said |= {"use_mup": True} if kind == MUP else {}
    said |= said_of(kind)

    def args() -> Any:
        assert callable(usual)
        found: Any = usual()
        vars(found).update(said)
        return found

    engine._args = args
    return engine


def states_of(trainer: DemoTrainer) -> dict[str, torch.Tensor]:
    """Every tensor of the model and of every optimizer of the chain, by where it stands: the test's own count of them."""
    import torch

    found = {f"param {name}": p.detach().clone() for c in trainer.chunks for name, p in c.named_parameters()}
    assert trainer.optimizer is not None
    for number, member in enumerate(_members(trainer.optimizer)):
        for g, group in enumerate(member.optimizer.param_groups):
            for i, held in enumerate(group["params"]):
                found[f"{number}.{g}.{i} held"] = held.detach().clone()
                for key, value in member.optimizer.state[held].items():
                    found[f"{number}.{g}.{i} {key}"] = (
                        value.clone() if isinstance(value, torch.Tensor) else torch.tensor(value)
                    )
    return found


def look(trainer: DemoTrainer, session: Session) -> Observation:
    """The same by state and name, what data-parallel ranks share out whole again where it is cut."""
    import torch

    from mcore_rlhf.demo import live_state

    parameters = live_state._named_parameters(trainer)
    found = {("param", name): param.detach().clone() for name, param in parameters.items()}
    for member in _members(trainer.optimizer):
        if hasattr(member, "gbuf_ranges"):
            found |= live_state._distributed_state(member, parameters)
            continue
        held = {param for group in member.optimizer.param_groups for param in group["params"]}
        for name, master in ((name, getattr(param, "main_param", param)) for name, param in parameters.items()):
            if master is not None and master in held:
                kept = {"master": master, **member.optimizer.state[master]}
                found |= {
                    (key, name): v.detach().clone()
                    for key, v in kept.items()
                    if isinstance(v, torch.Tensor) and v.dim()
                }
    at = live_state.coordinates(), observing.layer_numbers(trainer), observing.experts_per_rank(session)
    return Observation(*at, states={LOOK: found})


def _members(optimizer: Any) -> list[Any]:
    chained = getattr(optimizer, "chained_optimizers", None)
    return [optimizer] if chained is None else [inner for one in chained for inner in _members(one)]


def train_on(trainer: DemoTrainer, seen: Seen, until: int) -> None:
    while trainer.iteration < until:
        loss = trainer.train_step()
        seen.losses[trainer.iteration] = loss
    if until == END:
        seen.losses[END + 1] = trainer.evaluate()


def save(session: Session, root: str, kind: str) -> Seen:
    """Save at step 2, and train to the end."""
    seen = Seen()
    with with_optimizer(kind):
        trainer, _ = new_trainer(session)
    with listening(seen):
        engine = engine_of(trainer, kind)
    train_on(trainer, seen, LOOK)
    lazy = replace(OPTIONS, lazy_snapshot=True)
    with CheckpointManager(Path(root), {"actor": engine}, options=lazy) as manager, copied_at_the_latest():
        manager.save(LOOK)
        seen.states[LOOK], seen.look = states_of(trainer), look(trainer, session)
        train_on(trainer, seen, END)
        manager.before_step()
    seen.states[END] = states_of(trainer)
    return seen


def load(session: Session, root: str, kind: str, optimizer: bool = True) -> Seen:
    """Load over a run that has gone a step of its own, and train to the end."""
    seen = Seen()
    with with_optimizer(kind):
        trainer, _ = new_trainer(session)
    trainer.train_step()
    before = states_of(trainer)
    with CheckpointManager(Path(root), {"actor": engine_of(trainer, kind)}, options=OPTIONS) as manager:
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
    seen.states[LOOK], seen.look = states_of(trainer), look(trainer, session)
    train_on(trainer, seen, END)
    seen.states[END] = states_of(trainer)
    return seen


def by_megatron_alone(session: Session, root: str, kind: str) -> list[Seen]:
    """A run that Megatron saves at step 2 in its own files of three kinds and goes on with, and what it does after loading each."""
    from mcore_rlhf.demo import megatron_checkpoint
    from tests.reference import dist_jobs

    shardings = (dist_jobs.FULLY_RESHARDABLE, dist_jobs.DP_RESHARDABLE)
    runs = []
    for resumes in (None, "legacy", *shardings):
        seen = Seen()
        runs.append(seen)
        with with_optimizer(kind):
            trainer, _ = new_trainer(session)
        if resumes is not None:
            try:
                if resumes == "legacy":
                    megatron_checkpoint.load(trainer, f"{root}/legacy")
                else:
                    dist_jobs.load(trainer, Path(root) / resumes, rng=False)
            except (UnpicklingError, AssertionError) as error:
                seen.told = type(error).__name__, str(error)
                continue
        else:
            train_on(trainer, seen, LOOK)
            with arguments(kind):
                megatron_checkpoint.save(trainer, f"{root}/legacy")
                for sharding in shardings:
                    dist_jobs.save(trainer, Path(root) / sharding, sharding, {})
        seen.states[LOOK], seen.look = states_of(trainer), look(trainer, session)
        train_on(trainer, seen, END)
    return runs


def go_on_with_megatron(session: Session, root: str, kind: str) -> Seen:
    """As Megatron-LM's ``load_checkpoint`` does, and then train to the end.

    The format is the folder's: a layer-wise optimizer has its own method and its own file of every rank; or it is ``torch_dist``.
    The scheduler is as ``--override-opt-param-scheduler`` leaves it, where it was made too.
    """
    import torch
    from megatron.core import parallel_state

    from mcore_rlhf.demo import megatron_checkpoint
    from tests.reference import dist_jobs

    seen = Seen()
    with with_optimizer(kind):
        trainer, _ = new_trainer(session)
    folder = Path(root) / f"iter_{LOOK:07d}"
    assert trainer.optimizer is not None
    assert trainer.scheduler is not None
    if (folder / "metadata.json").exists():
        dist_jobs.load(trainer, Path(root), rng=False)
    else:
        folder /= megatron_checkpoint.rank_folder()
        model = torch.load(folder / "model_optim_rng.pt", weights_only=False)
        megatron_checkpoint._load_model(trainer, model)
        megatron_checkpoint._load_progress(trainer, model, release=False)
        own = folder / f"layer_wise_optimizer_{parallel_state.get_data_parallel_rank()}.pt"
        if own.exists():
            trainer.optimizer.load_state_dict_from_file(str(own))
        else:
            trainer.optimizer.load_state_dict(model["optimizer"])
        if (folder / "distrib_optim.pt").exists():
            trainer.optimizer.load_parameter_state(str(folder / "distrib_optim.pt"))
        trainer.scheduler.override_opt_param_scheduler = True
        trainer.scheduler.load_state_dict(model["opt_param_scheduler"])
    seen.states[LOOK], seen.look = states_of(trainer), look(trainer, session)
    train_on(trainer, seen, END)
    return seen


def forgetful(session: Session, root: str, kind: str) -> Seen:
    """An engine that thinks the layer-wise optimizer a plain chain, as this one did: what the manager says."""
    from dataclasses import replace

    seen = Seen()
    with with_optimizer(kind):
        trainer, _ = new_trainer(session)
    trainer.train_step()
    engine = engine_of(trainer, kind)
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
