"""One rank of real DeepSpeed on the CPU: runs the cases that it is given, and tells what it saw.

DeepSpeed is compared with itself here: what the manager saves against ``engine.save_checkpoint``, what it loads against
``engine.load_checkpoint``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from mcore_rlhf.convert import ConvertOptions, convert
from mcore_rlhf.engines.deepspeed import DeepSpeedEngine
from mcore_rlhf.errors import CheckpointError
from mcore_rlhf.manager.rlhf.state import RlhfState
from mcore_rlhf.manager.run.manager import CheckpointManager, ManagerOptions
from mcore_rlhf.storage import host_pool
from tests.helpers.latest import copied_at_the_latest
from tests.reference.deepspeed_resident import begin

VOCAB, LENGTH, BATCH, WIDTH, INNER = 61, 7, 4, 96, 256
STATE = RlhfState(iteration=7, weight_version=3)
CLIENT = {"epoch": 3, "ema": torch.arange(5.0), "rlhf": STATE.state_dict()}


class Tiny(nn.Module):
    """Tied embeddings, a frozen layer, buffers, dropout, and a parameter of two elements in a group of its own."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.up = nn.Linear(WIDTH, inner)
        self.down = nn.Linear(inner, WIDTH, bias=False)
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor([1.0, 0.5]))
        self.drop = nn.Dropout(0.1)
        self.register_buffer("shift", torch.zeros(3))
        self.register_buffer("count", torch.tensor(0, dtype=torch.int64))
        self.frozen.requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        x = x + self.down(F.silu(self.drop(self.up(x)))) * self.scale[0]
        x = self.norm(x + self.frozen(x) * self.scale[1] + self.shift.sum().to(x.dtype))
        logits = self.head(self.drop(x)).float()
        return F.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), ids[:, 1:].reshape(-1))


def config(case: dict[str, Any]) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": case["stage"]}
    if case["stage"] == 3:
        zero |= {"stage3_param_persistence_threshold": 300, "memory_efficient_linear": False, "sub_group_size": 9000}
    zero |= case.get("zero", {})
    found: dict[str, Any] = {
        "train_batch_size": BATCH, "train_micro_batch_size_per_gpu": BATCH // dist.get_world_size(),
        "steps_per_print": 10**9, "gradient_clipping": 1.0, "zero_optimization": zero,
        "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 3e-3, "warmup_max_lr": 1e-2, "warmup_num_steps": 10}},
    }  # fmt: skip
    if case.get("reference"):
        del found["scheduler"]
    if case["dtype"] != "fp32":
        found["bf16"] = {"enabled": True}
    if case["dtype"] == "bf16acc32":
        found["data_types"] = {"grad_accum_dtype": "fp32"}
    return found


def build(case: dict[str, Any], seed: int, inner: int = INNER) -> Any:
    import deepspeed

    torch.manual_seed(seed)
    model = Tiny(inner)
    if case.get("reference"):
        return deepspeed.initialize(model=model, config=config(case))[0]
    trained = [param for param in model.parameters() if param.requires_grad and param is not model.scale]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
        {"params": [model.scale], "weight_decay": 0.01},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config(case))
    return engine


def train(engine: Any, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        ids = torch.randint(0, VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(step))
        loss = engine(ids.chunk(dist.get_world_size())[dist.get_rank()])
        engine.backward(loss)
        engine.step()
        engine.module.shift += step
        engine.module.count += 1
        total = loss.detach().float().clone()
        dist.all_reduce(total)
        losses.append(total.item())
    return losses


def tree(path: Path) -> Any:
    return torch.load(path, weights_only=False)  # DeepSpeed's own objects, of files made a moment ago


def differences(a: Any, b: Any, where: str = "") -> list[str]:
    """Where two nests differ; tensors to the bit, objects by what they hold."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        same = a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.detach(), b.detach())
        return [] if same else [f"{where}: {tuple(a.shape)} {tuple(b.shape)}"]
    if type(a) is not type(b):
        return [f"{where}: {type(a).__name__} {type(b).__name__}"]
    if isinstance(a, dict):
        if list(a) != list(b):
            return [f"{where}: keys {sorted(map(str, set(a) ^ set(b)))}"]
        return [line for key in a for line in differences(a[key], b[key], f"{where}/{key}")]
    if isinstance(a, list | tuple) and not isinstance(a, torch.Size):
        if len(a) != len(b):
            return [f"{where}: {len(a)} {len(b)}"]
        return [line for n, (x, y) in enumerate(zip(a, b, strict=True)) for line in differences(x, y, f"{where}/{n}")]
    if hasattr(a, "__dict__") and not isinstance(a, type) and type(a).__module__.startswith("deepspeed"):
        return [] if a == b else differences(vars(a), vars(b), where)
    return [] if a == b else [f"{where}: {a!r} {b!r}"]


def compare_folders(ours: Path, theirs: Path) -> list[str]:
    """Files of two tags: names, and contents."""
    names = [sorted(path.name for path in folder.iterdir()) for folder in (ours, theirs)]
    if names[0] != names[1]:
        return [f"files {names[0]} {names[1]}"]
    found = []
    for name in names[0]:
        a, b = tree(ours / name), tree(theirs / name)
        if a.get("optimizer") and a.get("param_shapes"):
            a["param_shapes"] = None  # stage 0: names, which DeepSpeed does not store
        found += differences(a, b, name)
    return found


def save_and_resume(case: dict[str, Any], root: Path) -> dict[str, Any]:
    """Train, save by the manager and by DeepSpeed, train on; then do the same again from either."""
    lean, seen = bool(case.get("lean")), dict[str, Any]()
    options = {"tag": "mine", "exclude_frozen_parameters": True} if lean else {}
    tag = options.get("tag", "global_step2")
    engine = build(case, 1)
    train(engine, 0, 2)
    ours = DeepSpeedEngine(engine, client_state=lambda: CLIENT, save_latest=not lean, **options)
    lazy = ManagerOptions(lazy_snapshot=True, max_host_memory=1 if case.get("waves") else None)
    with (
        patch.object(host_pool, "LEAST", 32 << 10),
        CheckpointManager(root / "ours", {"actor": ours}, options=lazy) as manager,
        copied_at_the_latest() as waited,
    ):
        manager.save(2)
        engine.save_checkpoint(str(root / "theirs"), client_state=CLIENT, **{"tag": tag, **options})
        seen["straight"] = train(engine, 2, 4)
        (stream,) = waited  # by the first update
        assert stream.wraps == (bool(case.get("waves")) and stream.nbytes > 0)
        manager.wait()
    role = root / "ours" / "global_step_2" / "actor"
    seen["files"] = compare_folders(role / tag, root / "theirs" / tag)
    seen["beside"] = sorted(path.name for path in role.iterdir())
    again = build(case, 1 if lean else 9)  # frozen parameters that are left out come from where they came from
    if case.get("dirty"):
        train(again, 7, 8)
    loaded = DeepSpeedEngine(again)
    with CheckpointManager(root / "ours", {"actor": loaded}) as manager:
        seen["report"] = lines(manager.load())
    seen["client"] = differences(loaded.loaded_client_state, CLIENT)
    again.save_checkpoint(str(root / "again"), client_state=CLIENT, **{"tag": tag, **options})
    seen["loaded"] = compare_folders(root / "again" / tag, root / "theirs" / tag)
    seen["resumed"] = train(again, 2, 4)
    seen["by_deepspeed"] = loaded_by_deepspeed(case, root, tag, options)
    return seen


def loaded_by_deepspeed(case: dict[str, Any], root: Path, tag: str, options: dict[str, Any]) -> list[str]:
    """Where DeepSpeed itself, loading the manager's folder, comes to another state than it saved."""
    lean = bool(options)
    engine = build(case, 1 if lean else 5)
    role = root / "ours" / "global_step_2" / "actor"
    try:
        path, client = engine.load_checkpoint(str(role), tag if lean else None, load_module_strict=not lean)
    except AssertionError:
        return ["AssertionError"]
    if path is None:
        return ["not loaded"]
    state = RlhfState()
    state.load_state_dict(client["rlhf"])  # as the engine's docstring tells people without the manager
    found = [] if state.to_json() == STATE.to_json() != RlhfState().to_json() else ["RLHF state"]
    engine.save_checkpoint(str(root / "other"), client_state=CLIENT, **{"tag": tag, **options})
    found += differences({key: client[key] for key in CLIENT}, CLIENT)
    return found + compare_folders(root / "other" / tag, root / "theirs" / tag)


def change_layout(case: dict[str, Any], root: Path) -> dict[str, Any]:
    """Load a step of another layout, or a universal checkpoint; save what came of it, and let DeepSpeed save it too."""
    engine = build(case, 9)
    if case.get("dirty"):
        train(engine, 7, 8)
    loaded = DeepSpeedEngine(engine, client_state=lambda: CLIENT)
    with CheckpointManager(root / "ours", {"actor": loaded}) as manager:
        report = lines(manager.load(case["source"], optimizer=case.get("optimizer", True)))
        manager.save(2, blocking=True)
    engine.save_checkpoint(str(root / "theirs"), tag="global_step2", client_state=CLIENT)
    states = _inner(engine).state.values()
    steps = [id(state["step"]) for state in states if isinstance(state.get("step"), torch.Tensor)]
    return {
        "report": report,
        "client": differences(loaded.loaded_client_state, CLIENT),
        "files": compare_folders(
            root / "ours" / "global_step_2" / "actor" / "global_step2", root / "theirs" / "global_step2"
        ),
        "own_steps": len(set(steps)) == len(steps) == len(states),
        "losses": train(engine, 2, 4),
    }


def refuse(case: dict[str, Any], root: Path) -> dict[str, Any]:
    """Load into another model: nothing may change."""
    engine = build(case, 9, inner=INNER + 1)
    before = {name: value.clone() for name, value in engine.module.state_dict().items()}
    with CheckpointManager(root / "ours", {"actor": DeepSpeedEngine(engine)}) as manager:
        try:
            manager.load(case["source"])
            said = "loaded"
        except CheckpointError as error:
            said = str(error)
        engine.is_lora_fused = True
        try:
            manager.save(5)
            fused = "saved"
        except CheckpointError as error:
            fused = str(error)
    return {"said": said, "fused": fused, "changed": differences(dict(engine.module.state_dict()), before)}


def two_roles(case: dict[str, Any], root: Path) -> dict[str, Any]:
    """An actor and a critic of different stages, in one step; and a reference, which is one file of two steps."""
    stages = {"actor": {**case, "stage": 3}, "critic": {**case, "stage": 1}}
    stages["reference"] = {**case, "stage": 0, "reference": True}
    seen, weights = [], []
    for first, seed in ((0, 1), (2, 9)):
        engines = {role: build(one, seed + int(one["stage"])) for role, one in stages.items()}
        roles = {role: DeepSpeedEngine(engine, client_state={"role": role}) for role, engine in engines.items()}
        with CheckpointManager(root, roles, options=ManagerOptions(link_unchanged=True)) as manager:
            if first:
                manager.load()
            else:
                manager.save(1)
                for role in ("actor", "critic"):
                    train(engines[role], 0, 2)
                manager.save(2)
            seen.append([train(engines[role], 2, 4) for role in ("actor", "critic")])
            weights.append(dict(engines["reference"].module.state_dict()))
    shared = sorted(
        path.relative_to(root).parts[1] for path in root.glob("global_step_2/*/*/*.pt") if path.stat().st_nlink > 1
    )
    kept = {name: tensor.clone() for name, tensor in weights[-1].items()}
    with torch.no_grad():
        for param in engines["reference"].module.parameters():
            param.fill_(0.5)
    engines["reference"].load_checkpoint(str(root / "global_step_2" / "reference"), load_module_only=True)
    return {
        "shared": shared,
        "theirs": differences(kept, dict(engines["reference"].module.state_dict())),
        "losses": seen,
        "reference": differences(*weights),
        "clients": [one.loaded_client_state["role"] for one in roles.values()],
    }


def to_universal(case: dict[str, Any], root: Path) -> dict[str, Any]:
    """Convert a checkpoint, on the first rank."""
    if dist.get_rank() == 0:
        convert(Path(case["source"]), root, ConvertOptions(to="universal"))
    dist.barrier()
    return {}


def lines(found: Any) -> list[str]:
    return [f"{fate.value}: {text}" for fate, text in found.report.lines]


def _inner(engine: Any) -> Any:
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


JOBS = {
    "save_and_resume": save_and_resume,
    "change_layout": change_layout,
    "refuse": refuse,
    "two_roles": two_roles,
    "to_universal": to_universal,
}


def run(root: str, cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What this rank saw of each case."""
    begin()
    results = {}
    for name, case in cases.items():
        try:
            results[name] = JOBS[case["job"]](case, Path(root) / name)
        except BaseException as error:
            raise RuntimeError(f"case {name}") from error
    return results
