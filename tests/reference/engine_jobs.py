"""Jobs for the worker pool that save and load through the Megatron engine, beside Megatron's own files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcore_rlhf.engines.base import LoadRequest, apply
from tests.helpers.latest import copied_at_the_latest
from tests.reference.live_writing import write_live
from tests.reference.observing import END, LOOK, Observation, Session, end, experts_per_rank, layer_numbers, look

if TYPE_CHECKING:
    from mcore_rlhf.demo.trainer import DemoTrainer
    from mcore_rlhf.engines.megatron.engine import MegatronEngine


@dataclass(frozen=True)
class Loaded:
    """What a rank saw that loaded through the engine."""

    seen: Observation
    report: list[tuple[str, str]]
    files: list[str]
    args: dict[str, Any] = field(default_factory=dict)
    needed: int = 0
    read: int = 0


def engine_of(trainer: DemoTrainer) -> MegatronEngine:
    """The engine as a training script makes it."""
    from mcore_rlhf.demo import megatron_args, megatron_checkpoint
    from mcore_rlhf.engines.megatron import MegatronEngine

    def args() -> Any:
        started, consumed = trainer.loaded_iteration, trainer.consumed_train_samples
        return megatron_args.build(trainer.model, trainer.parallel, trainer.training, started, consumed)

    def further() -> dict[str, object]:
        return {"num_floating_point_operations_so_far": megatron_checkpoint._flops(trainer)}

    return MegatronEngine(trainer.chunks, trainer.optimizer, trainer.scheduler, args=args, further=further)


def save_without_args(session: Session, root: str) -> Observation:
    """Save from a script that has no ``args``, but knows its vocabulary."""
    from mcore_rlhf.demo import live_state
    from mcore_rlhf.engines.megatron import MegatronEngine

    trainer, seen = new_trainer(session)
    while trainer.iteration < LOOK:
        trainer.train_step()
    told = {
        "vocab_size": session.model.vocab_size,
        "make_vocab_size_divisible_by": 16,
        "consumed_train_samples": LOOK * session.training.global_batch_size,
    }
    write_live(MegatronEngine(trainer.chunks, trainer.optimizer, trainer.scheduler, args=told).live(LOOK), Path(root))
    seen.states[LOOK] = live_state.full_state(trainer)
    return seen


def save_a_third_moment(session: Session, root: str) -> int:
    """Save with a state of its own name beside Adam's two, half as large as the first; how many parts have it on this rank."""
    trainer, _ = new_trainer(session)
    while trainer.iteration < LOOK:
        trainer.train_step()
    engine, count = engine_of(trainer), 0
    for member in filter(None, engine.chain):
        for owned in member.owned():
            state = member.optimizer.optimizer.state[member.main_param(owned)]
            state["exp_avg_slow"] = state["exp_avg"] * 0.5
            count += bool(state["exp_avg"].any())
    write_live(engine.live(LOOK), Path(root))
    return count


def load_a_third_moment(session: Session) -> list[str]:
    """Load that into a trainer that has made no step; the parameters whose third moment is not half of their first."""
    import torch

    trainer, _ = new_trainer(session)
    engine = engine_of(trainer)
    assert session.load is not None
    apply(engine.prepare_load(LoadRequest(Path(session.load), "actor")))
    states = [member.tensors(owned) for member in filter(None, engine.chain) for owned in member.owned()]
    assert any(state["exp_avg"].any() for state in states)
    return [
        f"part {number}"
        for number, state in enumerate(states)
        if not torch.equal(state["exp_avg_slow"], state["exp_avg"] * 0.5)
    ]


def load_at_once(session: Session) -> Observation:
    """Load what :func:`save_at_once` saved over a trainer that has gone two steps, and make the first steps."""
    from mcore_rlhf.demo import live_state

    trainer, seen = new_trainer(session)
    for _ in range(2):
        trainer.train_step()
    engine = engine_of(trainer)
    assert session.load is not None
    apply(engine.prepare_load(LoadRequest(Path(session.load), "actor")))
    trainer.iteration = engine.loaded_iteration
    seen.states[0] = live_state.full_state(trainer)
    for _ in range(2):
        loss = trainer.train_step()
        seen.losses[trainer.iteration] = loss
    return seen


def new_trainer(session: Session) -> tuple[DemoTrainer, Observation]:
    from mcore_rlhf.demo import live_state
    from mcore_rlhf.demo.trainer import DemoTrainer

    trainer = DemoTrainer(session.model, session.parallel, session.training)
    return trainer, Observation(live_state.coordinates(), layer_numbers(trainer), experts_per_rank(session))


def train_and_save(session: Session, root: str) -> Observation:
    """Train to the end without interruption; at iteration 2 save with the engine, and with Megatron's own methods."""
    from mcore_rlhf.demo import megatron_checkpoint

    trainer, seen = new_trainer(session)
    while trainer.iteration < END:
        loss = trainer.train_step()
        seen.losses[trainer.iteration] = loss
        if trainer.iteration == LOOK:
            assert session.save is not None
            megatron_checkpoint.save(trainer, session.save)
            save_with_engine(trainer, Path(root))
            look(trainer, seen)
    end(trainer, seen)
    return seen


def save_lazily(session: Session, root: str) -> list[str]:
    """Save at once, and behind training as late as may be, which a step follows; then once more.

    Returns:
        What is not as it should be: files of the first two that differ, files of the third that do not, copies that nobody waited for.
    """
    from mcore_rlhf.manager.run.manager import CheckpointManager, ManagerOptions

    trainer, _ = new_trainer(session)
    while trainer.iteration < LOOK:
        trainer.train_step()
    engine, options = engine_of(trainer), ManagerOptions(lazy_snapshot=True, catch_signals=False, timeout=60)
    now, later, after = Path(root, "now"), Path(root, "later"), Path(root, "after")
    with CheckpointManager(later, engine, options=options) as manager, copied_at_the_latest() as waited:
        write_live(engine.live(LOOK), now)
        manager.save(LOOK)
        trainer.train_step()
    write_live(engine.live(LOOK), after)
    names = [path.relative_to(now) for path in now.rglob("*.pt")]
    content = {
        name: [(folder / name).read_bytes() for folder in (now, later / f"global_step_{LOOK}/actor", after)]
        for name in names
    }
    wrong = [f"{name} differs" for name, (one, two, _) in content.items() if one != two]
    wrong += [f"{name} did not change" for name, (one, _, three) in content.items() if one == three]
    return [*wrong, *([] if names and len(waited) == 1 else [f"{len(names)} files, {len(waited)} waited"])]


def save_with_engine(trainer: DemoTrainer, root: Path) -> None:
    """Write what the engine describes, and what the manager keeps of every rank's random states."""
    import torch
    import torch.distributed as dist

    from mcore_rlhf.demo import megatron_checkpoint

    write_live(engine_of(trainer).live(trainer.iteration), root)
    torch.save(megatron_checkpoint.rng_state(), root / f"rng_{dist.get_rank()}.pt")
    dist.barrier()


def save_at_once(session: Session, root: str) -> Observation:
    """Save a trainer that has not made a step, twice, and load that; report its states and the losses of the first steps."""
    from mcore_rlhf.demo import live_state, megatron_checkpoint

    trainer, seen = new_trainer(session)
    save_with_engine(trainer, Path(root) / "first")
    save_with_engine(trainer, Path(root))
    own_rng = megatron_checkpoint.rng_state()
    apply(engine_of(trainer).prepare_load(LoadRequest(Path(root), "actor")))
    megatron_checkpoint.set_rng_state(own_rng)
    seen.states[0] = live_state.full_state(trainer)
    for _ in range(2):
        loss = trainer.train_step()
        seen.losses[trainer.iteration] = loss
    return seen


def start_from(session: Session) -> Observation:
    """Load with Megatron's own methods what :func:`save_at_once` saved, and make the first steps."""
    from mcore_rlhf.demo import live_state, megatron_checkpoint

    trainer, seen = new_trainer(session)
    assert session.load is not None
    assert megatron_checkpoint.load(trainer, session.load) == 0
    seen.states[0] = live_state.full_state(trainer)
    for _ in range(2):
        loss = trainer.train_step()
        seen.losses[trainer.iteration] = loss
    return seen


@contextmanager
def torchs_adam() -> Iterator[None]:
    """Let Megatron be as it is on a GPU without Transformer Engine and apex: with torch's Adam, which counts steps by parameter."""
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer
    from torch.optim import AdamW

    asked = optimizer.Adam, optimizer.USING_PYTORCH_OPTIMIZER, distrib_optimizer.HAVE_APEX_OR_TE
    optimizer.Adam, optimizer.USING_PYTORCH_OPTIMIZER, distrib_optimizer.HAVE_APEX_OR_TE = AdamW, True, False
    try:
        yield
    finally:
        optimizer.Adam, optimizer.USING_PYTORCH_OPTIMIZER, distrib_optimizer.HAVE_APEX_OR_TE = asked


def resume_with_torchs_adam(session: Session, root: str) -> tuple[dict[int, float], dict[int, float], set[float]]:
    """Train to the end, saving on the way, then go on from there; the losses of both, and the steps that were counted in the end."""
    with torchs_adam():
        trainer, whole = new_trainer(session)
        while trainer.iteration <= END:
            loss = trainer.train_step()
            whole.losses[trainer.iteration] = loss
            if trainer.iteration == LOOK:
                save_with_engine(trainer, Path(root))
        trainer, rest = new_trainer(session)
        engine = engine_of(trainer)
        apply(engine.prepare_load(LoadRequest(Path(root), "actor", LOOK)))
        trainer.iteration = engine.loaded_iteration
        while trainer.iteration <= END:
            loss = trainer.train_step()
            rest.losses[trainer.iteration] = loss
        states = trainer.optimizer.chained_optimizers[0].optimizer.state.values()
        return whole.losses, rest.losses, {float(state["step"]) for state in states}


def swap_halves(file: str) -> None:
    """Exchange the masters of two data-parallel ranks in a ``distrib_optim.pt``."""
    import torch

    content = torch.load(file, weights_only=True)
    (states,) = content[0].values()
    masters = states["param"]
    half = len(masters) // 2
    masters.copy_(torch.cat([masters[half : 2 * half], masters[:half], masters[2 * half :]]))
    torch.save(content, file)


def go_on(trainer: DemoTrainer, seen: Observation) -> None:
    while trainer.iteration < END:
        loss = trainer.train_step()
        seen.losses[trainer.iteration] = loss
    end(trainer, seen)


def load_and_train(session: Session, steps_before: int = 0, restore_rng: bool = True, optimizer: bool = True) -> Loaded:
    """Load through the engine, look, and train on. ``steps_before``: steps of a run whose state must vanish."""
    import torch
    import torch.distributed as dist

    from mcore_rlhf.demo import megatron_checkpoint

    assert session.load is not None
    trainer, seen = new_trainer(session)
    for _ in range(steps_before):
        trainer.train_step()
    engine, root = engine_of(trainer), Path(session.load)
    prepared = engine.prepare_load(LoadRequest(root, "actor", LOOK, optimizer=optimizer))
    apply(prepared)
    trainer.iteration = trainer.loaded_iteration = engine.loaded_iteration
    trainer.consumed_train_samples = engine.loaded_args["consumed_train_samples"]
    own_rng = root / f"rng_{dist.get_rank()}.pt"
    if restore_rng and own_rng.exists():
        megatron_checkpoint.set_rng_state(torch.load(own_rng, weights_only=False))
    look(trainer, seen)
    go_on(trainer, seen)
    lines = [(fate.value, text) for fate, text in prepared.report.lines]
    needed = sum(slot.record.numel for slot in prepared.slots)
    read = sum(copy.numel for copy in prepared.plan.copies if 0 not in copy.source_strides)
    return Loaded(seen, lines, [str(path) for path in prepared.files], dict(engine.loaded_args), needed, read)


def refused(session: Session) -> tuple[str, str, bool]:
    """The error that loading ends in, and whether nothing was changed by it."""
    from mcore_rlhf.demo import live_state
    from mcore_rlhf.errors import CheckpointError

    assert session.load is not None
    trainer, _ = new_trainer(session)
    trainer.train_step()
    before = live_state.full_state(trainer)
    try:
        engine_of(trainer).prepare_load(LoadRequest(Path(session.load), "actor", LOOK))
    except CheckpointError as error:
        after = live_state.full_state(trainer)
        same = all(torch_equal(after[key], tensor) for key, tensor in before.items())
        return type(error).__name__, str(error), same
    return "", "", False


def torch_equal(a: Any, b: Any) -> bool:
    import torch

    return torch.equal(a, b)


def file_differences(ours: str, theirs: str) -> list[str]:
    """What differs between two checkpoints, file by file: keys, types, values, and where tensors lie in their storage."""
    import torch

    import mcore_rlhf.demo.with_megatron  # noqa: F401

    names = [sorted(str(p.relative_to(root)) for p in Path(root).rglob("*.pt") if "rng_" not in p.name or "optim" in p.name)
             for root in (ours, theirs)]  # fmt: skip
    if names[0] != names[1]:
        return [f"files differ: {names}"]
    found: list[str] = []
    for name in names[0]:
        a, b = (torch.load(Path(root) / name, map_location="cpu", weights_only=False) for root in (ours, theirs))
        compare(a, b, name, found.append)
    return found


def compare(a: Any, b: Any, where: str, say: Callable[[str], None]) -> None:
    """Walk through two nests together."""
    import torch

    if type(a) is not type(b):
        say(f"{where}: {type(a)} and {type(b)}")
    elif isinstance(a, torch.Tensor):
        compare_tensors(a, b, where, say)
    elif children(a) is None:
        if not equal_values(a, b):
            say(f"{where}: {a!r} and {b!r}")
    else:
        ours, theirs = children(a) or {}, children(b) or {}
        if list(ours) != list(theirs):
            say(f"{where}: keys {list(ours)} and {list(theirs)}")
        for key in ours.keys() & theirs.keys():
            compare(ours[key], theirs[key], f"{where}/{key}", say)


def children(value: Any) -> dict[Any, Any] | None:
    if isinstance(value, dict):
        return value
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    return vars(value) if type(value).__name__ == "Namespace" else None


def compare_tensors(a: Any, b: Any, where: str, say: Callable[[str], None]) -> None:
    import torch

    place = [(t.dtype, t.shape, t.stride(), t.storage_offset(), t.untyped_storage().nbytes()) for t in (a, b)]
    if place[0] != place[1] or not torch.equal(a, b):
        say(f"{where}: {place}, values equal: {a.shape == b.shape and torch.equal(a, b)}")


def equal_values(a: Any, b: Any) -> bool:
    import numpy as np

    return np.array_equal(a, b) if isinstance(a, np.ndarray) else bool(a == b)
