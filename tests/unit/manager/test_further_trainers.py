"""slime, prime-rl, open-instruct and Bridge: their saves re-enacted, listed, opened, adopted and converted from. None of them was run."""

from __future__ import annotations

import shutil
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.stateful import Stateful

from mcore_rlhf.convert import convert
from mcore_rlhf.errors import LayoutMismatch
from mcore_rlhf.families.options import ConvertOptions, ReadOptions, WriteOptions
from mcore_rlhf.formats.dcp.state import DcpState
from mcore_rlhf.formats.registry import open_checkpoint
from mcore_rlhf.manager.convert_step import convert_step
from mcore_rlhf.manager.run.adopt import adopt
from mcore_rlhf.manager.runs import listed_steps, run_at
from mcore_rlhf.manager.subject import find
from mcore_rlhf.verify.checkpoint import verify
from tests.helpers.catalog_values import tensor_of
from tests.unit.formats.test_bridge_run import bridged

GOLDENS = Path(__file__).parents[2] / "goldens"


def slime(root: Path) -> Path:
    """Megatron-LM's save, and ``RolloutDataSource.save`` (018ff18)."""
    shutil.copytree(GOLDENS / "megatron_dist" / "tp2pp2dp2_fully_reshardable", root)
    held = {"sample_offset": 8, "epoch_id": 0, "sample_group_index": 8, "sample_index": 64, "metadata": {}}
    (root / "rollout").mkdir()
    torch.save(held, root / "rollout" / "global_dataset_state_dict_2.pt")
    return root


class AppState(Stateful):
    """As ``prime_rl/trainer/ckpt.py`` has it (047eeea)."""

    def __init__(
        self, model: torch.nn.Module, optimizers: list[torch.optim.Optimizer], scheduler: Any, progress: Any
    ) -> None:
        self.model, self.optimizers, self.scheduler, self.progress = model, optimizers, scheduler, progress

    def state_dict(self) -> dict[str, Any]:
        model, optimizers = get_state_dict(self.model, self.optimizers)
        states = {"scheduler": self.scheduler.state_dict(), "progress": asdict(self.progress)}
        return {"model": model, "optimizers": optimizers, **states}


@dataclass
class Progress:
    step: int = 0
    total_tokens: int = 0
    total_samples: int = 0


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    for _ in range(3):
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return model, optimizer, scheduler


def prime_rl(root: Path) -> Path:
    """``CheckpointManager.save_to_path`` and the orchestrator's ``progress.pt``."""
    step = root / "step_3"
    model, optimizer, scheduler = trained()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of a process without a group
        state = {"app": AppState(model, [optimizer], scheduler, Progress(3, 100, 10))}
        dcp.save(state, checkpoint_id=step / "trainer", no_dist=True)
    (step / "trainer" / "dataloader").mkdir()
    torch.save({"_snapshot": {"_snapshot_step": 3}}, step / "trainer" / "dataloader" / "rank_0.pt")
    (step / "orchestrator").mkdir()
    torch.save({"progress": asdict(Progress(3))}, step / "orchestrator" / "progress.pt")
    return root


def open_instruct(root: Path) -> Path:
    """DeepSpeed's ``save_checkpoint``, and the reference policy (d526c5d)."""
    shutil.copytree(GOLDENS / "trainers" / "or_z2" / "_actor", root)
    (root / "ref_policy").mkdir()
    torch.save({"weight": torch.ones(2)}, root / "ref_policy" / "pytorch_model.bin")
    return root


def bridge(root: Path) -> Path:
    """``save_checkpoint`` of Megatron-Bridge (067f987)."""
    return bridged("tp2pp2dp2_dp_reshardable", root)


RUNS = {
    "slime": (slime, "iter_0000002", 2),
    "prime-rl": (prime_rl, "step_3", 3),
    "open-instruct": (open_instruct, "global_step3", 3),
}


@pytest.fixture(params=RUNS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def root(name: str, tmp_path: Path) -> Path:
    return RUNS[name][0](tmp_path / "run")


def test_its_steps_are_listed_and_opened(name: str, root: Path) -> None:
    _, folder, number = RUNS[name]
    found = run_at(root)
    assert found is not None
    assert (found.trainer.name, [*found.found]) == (name, [number])
    (step,) = listed_steps(root)
    assert (step.step, step.state, step.roles, step.path.name) == (number, "foreign", ("actor",), folder)
    subject = find(root, ReadOptions())
    ((role, place),) = subject.models.items()
    source = open_checkpoint(place, subject.reading(role))
    assert source.state.iteration == number
    assert {"exp_avg", "exp_avg_sq"} <= {*source.states}
    assert verify(place, subject.reading(role)).intact


def test_it_is_converted_from_and_adopted(name: str, root: Path, tmp_path: Path) -> None:
    _, folder, number = RUNS[name]
    job = convert_step(find(root, ReadOptions()), tmp_path / "out", ConvertOptions(to="torch", fsync=False))
    assert job.published is not None
    manifest = adopt(root / folder)
    assert manifest.step == number
    assert [step.state for step in listed_steps(root)] == ["committed"]
    (root / folder / next(iter(manifest.files))).write_bytes(b"")
    assert [step.state for step in listed_steps(root)] == ["damaged"]


def test_a_step_of_slimes_whose_data_nobody_kept_is_its_own_all_the_same(tmp_path: Path) -> None:
    root = slime(tmp_path / "run")
    shutil.copytree(root / "iter_0000002", root / "iter_0000005")
    found = run_at(root)
    assert found is not None
    assert (found.trainer.name, [*found.found]) == ("slime", [2, 5])


def test_steps_of_two_that_share_nothing_are_refused(tmp_path: Path) -> None:
    root = prime_rl(tmp_path / "run")
    (root / "step_4").mkdir()
    (root / "step_4" / "training_info.json").write_text("{}")
    with pytest.raises(LayoutMismatch, match="holds steps of two trainers"):
        run_at(root)


def test_a_step_that_prime_rl_passes_over_is_partial(tmp_path: Path) -> None:
    root = prime_rl(tmp_path / "run")
    shutil.copytree(root / "step_3", root / "step_4")
    (root / "step_4" / "trainer" / ".metadata").unlink()
    assert [(step.step, step.state) for step in listed_steps(root)] == [(3, "foreign"), (4, "partial")]
    assert find(root, ReadOptions()).step == 3


def test_prime_rls_files_are_its_run_by_name(tmp_path: Path) -> None:
    root, (model, optimizer, _) = prime_rl(tmp_path / "run"), trained()
    source = open_checkpoint(root / "step_3" / "trainer", ReadOptions())
    for name, parameter in model.named_parameters():
        assert torch.equal(tensor_of(source, name, "master"), parameter.detach()), name
        assert torch.equal(tensor_of(source, name, "exp_avg"), optimizer.state[parameter]["exp_avg"]), name
    assert find(root, ReadOptions()).others == ("orchestrator/progress.pt",)
    assert source.state.scheduler is not None
    assert source.state.scheduler["last_epoch"] == 3
    assert source.state.other["progress"] == {"step": 3, "total_tokens": 100, "total_samples": 10}


def test_accelerates_schedule_beside_the_tag_is_the_runs(tmp_path: Path) -> None:
    """``scheduler.bin`` is torch's own; DeepSpeed's files have none. Where it cannot be whose it is said to be, it stays a file."""
    root = tmp_path / "step_3"
    shutil.copytree(GOLDENS / "trainers" / "ac_ds2" / "step_3", root)
    stored = torch.load(root / "scheduler.bin", weights_only=True)
    source = open_checkpoint(root, ReadOptions())
    assert source.state.scheduler == stored
    assert "scheduler.bin" in [file.path for file in source.files]
    assert open_checkpoint(root, ReadOptions(optimizer=False)).state.scheduler is None
    damage = bytearray((root / "scheduler.bin").read_bytes())
    damage[damage.index(b"base_lrs")] ^= 1
    (root / "scheduler.bin").write_bytes(damage)
    assert not verify(root, ReadOptions()).intact
    shutil.copytree(root / "pytorch_model", root / "another")
    assert open_checkpoint(root, ReadOptions()).state.scheduler is None


NEMO = GOLDENS / "trainers" / "nm_v1" / "step_3" / "policy"


def test_nemo_rls_schedule_goes_on_in_torchs(tmp_path: Path) -> None:
    """DTensor v1's ``optim.sched``, of a warm-up and what follows it: torch's own takes it, and goes on as it would have."""
    convert(NEMO, tmp_path / "out", ConvertOptions(to="torch", fsync=False))
    state = torch.load(tmp_path / "out" / "state.pt", weights_only=True)["scheduler"]
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], lr=0.01)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=4)
    constant = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0, total_iters=10**10)
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm_up, constant], milestones=[4])
    scheduler.load_state_dict(state)
    assert scheduler.get_last_lr() == pytest.approx([0.00775])
    optimizer.step()
    scheduler.step()
    assert scheduler.get_last_lr() == pytest.approx([0.01])


def test_nemo_rls_schedule_comes_back_and_is_nobody_elses(tmp_path: Path) -> None:
    for between in ("deepspeed", "torch"):
        convert(NEMO, tmp_path / between, ConvertOptions(to=between, fsync=False))
        like = ConvertOptions(to="dcp", fsync=False, write=WriteOptions(like=str(NEMO)))
        convert(tmp_path / between, tmp_path / f"{between}-back", like)
        first, back = open_checkpoint(NEMO, ReadOptions()), open_checkpoint(tmp_path / f"{between}-back", ReadOptions())
        assert isinstance(first.family, DcpState)
        assert isinstance(back.family, DcpState)
        assert back.family.rest["optim"] == first.family.rest["optim"]
        assert back.state.scheduler == first.state.scheduler
    job = convert(NEMO, tmp_path / "verl", ConvertOptions(to="fsdp-ranks", fsync=False))
    assert any(text.startswith("lr_scheduler: torch's, at last_epoch 3") for _, text in job.report.lines)
    state = torch.load(next((tmp_path / "verl").glob("extra_state_*rank_0.pt")), weights_only=False)["lr_scheduler"]
    assert {"base_lrs", "last_epoch", "lr_lambdas"} <= state.keys()
    assert "_schedulers" not in state
