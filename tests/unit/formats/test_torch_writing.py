"""``state.pt`` as a target: torch, a loop of one's own and ``TorchEngine`` go on from any other format as if nothing had been."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rlhf import CheckpointManager, TorchEngine
from mcore_rlhf.convert import ConvertOptions, Job, convert, prepare
from mcore_rlhf.core.catalog import MASTER, PARAM
from mcore_rlhf.errors import CheckpointError, LayoutMismatch, Lossy, Unsupported, UsageError
from mcore_rlhf.families.options import ReadOptions, WriteOptions
from mcore_rlhf.formats.registry import open_checkpoint
from mcore_rlhf.manager.convert_step import convert_step
from mcore_rlhf.manager.subject import find
from tests.helpers.catalog_values import tensor_of
from tests.unit.engines.plain_files import save, save_without_names

GOLDENS = Path(__file__).parents[2] / "goldens"
FORMATS = ("dcp", "deepspeed", "universal", "hf")


class Run:
    """A plain loop: two layers, AdamW in groups, a schedule."""

    def __init__(self, seed: int, *, groups: int = 2, kind: type[torch.optim.Optimizer] = torch.optim.AdamW) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
        every = [*self.model.parameters()]
        dealt: list[Any] = (
            [every] if groups == 1 else [[p for p in every if p.ndim > 1], [p for p in every if p.ndim < 2]]
        )
        self.optimizer = kind([{"params": params} for params in dealt], lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 0.9**step)

    @property
    def engine(self) -> TorchEngine:
        return TorchEngine(self.model, self.optimizer, self.scheduler)

    def losses(self, first: int, count: int) -> list[float]:
        found = []
        for step in range(first, first + count):
            made = torch.Generator().manual_seed(step)
            x, y = torch.randn(5, 4, generator=made), torch.randn(5, 3, generator=made)
            loss = (self.model(x) - y).square().mean()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            found.append(loss.item())
        return found

    def load(self, folder: Path) -> dict[str, Any]:
        """As any script does."""
        state: dict[str, Any] = torch.load(folder / "state.pt", weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        return state


def to_torch(source: Path, target: Path, **write: Any) -> Job:
    return convert(source, target, ConvertOptions(to="torch", fsync=False, write=WriteOptions(**write)))


def saved(folder: Path, run: Run) -> Path:
    folder.mkdir(parents=True)
    return save(run.engine, folder)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
@pytest.mark.parametrize("between", FORMATS)
def test_a_loop_goes_on_as_if_nothing_had_been(tmp_path: Path, between: str, kind: type[torch.optim.Optimizer]) -> None:
    run = Run(0, kind=kind)
    run.losses(0, 3)
    folder, wanted = saved(tmp_path / "global_step_3" / "actor", run), run.losses(3, 3)
    write = WriteOptions(with_optimizer=between == "hf")
    convert(folder, tmp_path / "between", ConvertOptions(to=between, fsync=False, write=write))
    job = to_torch(tmp_path / "between", tmp_path / "back")
    assert job.lossless
    other = Run(1, kind=kind)
    state = other.load(tmp_path / "back")
    assert state["optimizer_params"]["class"] == kind.__name__
    assert state["iteration"] == 3
    assert other.losses(3, 3) == wanted
    assert {path.name for path in (tmp_path / "back").iterdir()} == {"state.pt", "mcore_rlhf", "mcore_rlhf.json"}


def test_a_run_of_several_roles_comes_back_and_the_manager_resumes(tmp_path: Path) -> None:
    """A whole step through another engine's format and back: weights, optimizers, schedules, and what is not a model."""
    runs = {"actor": Run(0), "critic": Run(1, groups=1)}
    for run in runs.values():
        run.losses(0, 2)
    with CheckpointManager(tmp_path / "run", {role: run.engine for role, run in runs.items()}) as manager:
        manager.save(2)
    wanted = {role: run.losses(2, 3) for role, run in runs.items()}
    for source, target, to in (("run", "dcp", "dcp"), ("dcp", "back", "torch")):
        convert_step(find(tmp_path / source, ReadOptions()), tmp_path / target, ConvertOptions(to=to, fsync=False))
    others = {"actor": Run(2), "critic": Run(3, groups=1)}
    with CheckpointManager(tmp_path / "back", {role: run.engine for role, run in others.items()}) as manager:
        resumed = manager.load()
        assert resumed is not None
        assert resumed.step == 2
    assert {role: run.losses(2, 3) for role, run in others.items()} == wanted


def test_like_gives_the_groups_and_the_order_of_a_run(tmp_path: Path) -> None:
    """The source has two groups with nothing between them but weight decay, a loop one; torch stops at another number."""
    run, other = Run(0), Run(1, groups=1)
    for group in run.optimizer.param_groups:
        group["weight_decay"] = 0.01
    run.losses(0, 2)
    other.losses(0, 1)
    folder, wanted = saved(tmp_path / "step", run), run.losses(2, 2)
    (tmp_path / "own").mkdir()
    save_without_names(other.engine, tmp_path / "own")
    to_torch(folder, tmp_path / "plain")
    with pytest.raises(ValueError, match="different number of parameter groups"):
        other.load(tmp_path / "plain")
    to_torch(folder, tmp_path / "alike", like=str(tmp_path / "own"))
    other.load(tmp_path / "alike")
    assert other.losses(2, 2) == pytest.approx(wanted, rel=1e-6)
    run.optimizer.param_groups[0]["lr"] = 1.0
    saved(tmp_path / "apart", run)
    with pytest.raises(Lossy, match="in one param group with others, and it is trained with different lr"):
        to_torch(tmp_path / "apart", tmp_path / "no", like=str(tmp_path / "own"))


@pytest.mark.parametrize(
    ("make", "kind", "said"),
    [
        (lambda folder: None, UsageError, "--like: .* has no state.pt"),
        (lambda folder: torch.save({"model": Run(0).model.state_dict()}, folder / "state.pt"), UsageError, "has no optimizer"),
        (lambda folder: save(TorchEngine(small := torch.nn.Linear(4, 8), trained(small)), folder), LayoutMismatch,
         r"that of .* does not"),
    ],
)  # fmt: skip
def test_a_run_that_is_no_like_is_refused(
    tmp_path: Path, make: Callable[[Path], object], kind: type[CheckpointError], said: str
) -> None:
    run = Run(0)
    run.losses(0, 1)
    (tmp_path / "like").mkdir()
    make(tmp_path / "like")
    with pytest.raises(kind, match=said):
        to_torch(saved(tmp_path / "step", run), tmp_path / "no", like=str(tmp_path / "like"))


def trained(module: torch.nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(module.parameters())
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop])
def test_other_classes_of_torchs_stay_what_they_are(tmp_path: Path, kind: type[torch.optim.Optimizer]) -> None:
    run = Run(0, kind=kind)
    run.losses(0, 2)
    folder, wanted = saved(tmp_path / "step", run), run.losses(2, 3)
    assert to_torch(folder, tmp_path / "back").lossless
    before, after = (torch.load(path / "state.pt", weights_only=True) for path in (folder, tmp_path / "back"))
    assert after["optimizer_params"] == before["optimizer_params"]
    other = Run(1, kind=kind)
    other.load(tmp_path / "back")
    assert other.losses(2, 3) == wanted


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize(
    "kind",
    [
        torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.RAdam, torch.optim.NAdam,
        torch.optim.Adadelta, torch.optim.ASGD,
    ],
)  # fmt: skip
def test_a_class_is_known_by_the_settings_of_its_groups(
    tmp_path: Path, kind: type[torch.optim.Optimizer], steps: int
) -> None:
    """Where nothing else says it, as of another format's folder, and before the first step, too, when there are no states."""
    run = Run(0, kind=kind)
    run.losses(0, steps)
    folder, wanted = saved(tmp_path / "step", run), run.losses(steps, 3)
    convert(folder, tmp_path / "dcp", ConvertOptions(to="dcp", fsync=False))
    to_torch(tmp_path / "dcp", tmp_path / "back")
    other = Run(1, kind=kind)
    assert other.load(tmp_path / "back")["optimizer_params"]["class"] == kind.__name__
    assert other.losses(steps, 3) == wanted


def test_further_parts_of_a_loop_stay_in_the_file(tmp_path: Path) -> None:
    run = Run(0)
    run.losses(0, 1)
    tree = {
        **run.engine._parts(),
        "optimizer_params": None,
        "scaler": {"scale": 2.0},
        "seen": [1, (2, "a")],
        "rng": torch.get_rng_state(),
    }
    del tree["optimizer_params"]
    (tmp_path / "step").mkdir()
    torch.save(tree, tmp_path / "step" / "state.pt")
    assert to_torch(tmp_path / "step", tmp_path / "back").lossless
    back = torch.load(tmp_path / "back" / "state.pt", weights_only=True)
    assert (back["scaler"], back["seen"], torch.equal(back["rng"], tree["rng"])) == (
        {"scale": 2.0},
        [1, (2, "a")],
        True,
    )  # type: ignore[arg-type]


def test_a_model_in_half_precision(tmp_path: Path) -> None:
    """Masters are what is trained; ``--dtype`` gives a model without them, and says so."""
    source = GOLDENS / "deepspeed" / "z2_bf16_ac_dp2" / "step3"
    to_torch(source, tmp_path / "whole")
    job = to_torch(source, tmp_path / "half", dtype="bf16")
    assert any("fp32 masters" in text for text in job.account.lost)
    whole, half = (torch.load(tmp_path / name / "state.pt", weights_only=True)["model"] for name in ("whole", "half"))
    of = {name: (whole[name].dtype, half[name].dtype) for name in whole if name.endswith("q_proj.weight")}
    assert set(of.values()) == {(torch.float32, torch.bfloat16)}
    opened = open_checkpoint(tmp_path / "whole", ReadOptions())
    assert {spec.dtype.name for spec in opened.model.params if spec.trainable} == {"bfloat16"}
    assert MASTER in opened.states


def test_tied_weights_share_their_memory(tmp_path: Path) -> None:
    to_torch(GOLDENS / "deepspeed" / "z1_fp32_tied_dp2", tmp_path / "out")
    model = torch.load(tmp_path / "out" / "state.pt", weights_only=True)["model"]
    source = open_checkpoint(tmp_path / "out", ReadOptions())
    assert source.family.shared
    for alias, owner in source.family.shared.items():
        assert model[alias].data_ptr() == model[owner].data_ptr()


def test_what_no_class_of_torchs_keeps_is_refused_by_name(tmp_path: Path) -> None:
    source = next((GOLDENS / "deepspeed_muon").iterdir())
    with pytest.raises(
        Unsupported, match="of Muon's parameters and of Adam's, and no class of torch's is known that does"
    ):
        prepare(source, ConvertOptions(to="torch"))
    assert "optimizer" not in _written(source, tmp_path / "out", no_optimizer=True)


def test_classes_that_weights_only_refuses_are_left_beside(tmp_path: Path) -> None:
    """Whatever a stranger's client state holds, a script's ``torch.load`` gets tensors, numbers and texts."""
    for path in sorted((GOLDENS / "deepspeed").iterdir()):
        tree = _written(path, tmp_path / path.name)
        assert copy.deepcopy(tree)["model"], path
        assert tree["iteration"] == open_checkpoint(path, ReadOptions()).state.iteration


def _written(source: Path, target: Path, **write: Any) -> dict[str, Any]:
    to_torch(source, target, **write)
    found: dict[str, Any] = torch.load(target / "state.pt", weights_only=True)
    return found


def test_an_adapter_goes_there_and_back(tmp_path: Path) -> None:
    source = GOLDENS / "peft" / "adapter"
    assert to_torch(source, tmp_path / "torch").lossless
    assert convert(tmp_path / "torch", tmp_path / "peft", ConvertOptions(to="peft", fsync=False)).lossless
    first, back = (open_checkpoint(path, ReadOptions()) for path in (source, tmp_path / "peft"))
    assert first.model.params == back.model.params
    for spec in first.model.params:
        assert torch.equal(tensor_of(first, spec.name, PARAM), tensor_of(back, spec.name, PARAM)), spec.name
