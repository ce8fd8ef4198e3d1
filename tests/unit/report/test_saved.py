"""Roles whose files no reader knows as a model: what a page can say of them, and what hostile files can not make it do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mcore_rlhf import CheckpointManager, ManagerOptions, TorchEngine
from mcore_rlhf.manager.run import steps
from mcore_rlhf.report.saved import SavedRole, saved_roles
from tests.unit.manager.roots import make_step


def _told(folder: Path) -> dict[str, SavedRole]:
    return {role["role"]: role for role in saved_roles(folder, steps.read_manifest(folder), [])}


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``TorchEngine`` saved of a policy that was trained for a step, and of a value head that was not."""
    torch.manual_seed(0)
    policy = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Linear(4, 2, bias=False))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=0.25)
    policy(torch.ones(1, 6)).sum().backward()
    optimizer.step()
    roles = {
        "actor": TorchEngine(policy, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3)),
        "critic": TorchEngine(torch.nn.Linear(6, 1).bfloat16()),
    }
    root = tmp_path_factory.mktemp("saved") / "run"
    with CheckpointManager(root, roles, options=ManagerOptions(fsync=False, catch_signals=False)) as manager:
        manager.save(10, blocking=True)
    return root / "global_step_10"


def test_a_module_and_its_optimizer(step: Path) -> None:
    actor, critic = (_told(step)[role] for role in ("actor", "critic"))
    assert (actor["format"], actor["parallel"], actor["why"]) == ("torch", "DP1", "")
    assert actor["bytes"] == (step / "actor" / "state.pt").stat().st_size
    assert actor["parts"] == ["model", "optimizer", "scheduler"]
    assert [(t["name"], t["shape"]) for t in actor["tensors"]] == [
        ("0.weight", [4, 6]),
        ("0.bias", [4]),
        ("1.weight", [2, 4]),
    ]
    assert actor["dtypes"] == {"float32": 24 + 4 + 8}
    assert actor["optimizer"] is not None
    assert actor["optimizer"]["kind"] == "AdamW"
    assert actor["optimizer"]["states"].keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert actor["optimizer"]["groups"][0]["lr"] == 0.25
    assert actor["live"] is not None
    assert actor["live"]["tensors"] >= 9
    assert critic["dtypes"] == {"bfloat16": 7}
    assert critic["optimizer"] is None


def test_a_role_that_was_opened_as_a_model_is_not_told_again(step: Path) -> None:
    (left,) = saved_roles(step, steps.read_manifest(step), ["actor"])
    assert left["role"] == "critic"


def test_files_that_are_none_of_torch_are_counted(tmp_path: Path) -> None:
    (actor,) = _told(make_step(tmp_path, 10, nbytes=77)).values()
    assert (actor["files"], actor["bytes"], actor["tensors"], actor["optimizer"]) == (1, 77, [], None)


def _with_file(root: Path, tree: object) -> Path:
    folder = make_step(root, 10)
    (folder / "actor" / "weights.bin").unlink()
    torch.save(tree, folder / "actor" / "state.pt")
    text = (folder / "manifest.json").read_text().replace("weights.bin", "state.pt")
    (folder / "manifest.json").write_text(text)
    return folder


def test_a_file_that_cannot_be_opened_says_why(tmp_path: Path) -> None:
    folder = _with_file(tmp_path, {"model": {}})
    (folder / "actor" / "state.pt").write_bytes(b"PK\x03\x04 and then nothing")
    (actor,) = _told(folder).values()
    assert "state.pt" in actor["why"]
    assert actor["tensors"] == []


def test_what_is_not_of_the_expected_form_is_left_out(tmp_path: Path) -> None:
    odd = {"model": [torch.zeros(2), {3: torch.zeros(())}], "optimizer": {"param_groups": {"lr": 1}, "state": None}}
    (actor,) = _told(_with_file(tmp_path / "a", odd)).values()
    assert [(t["name"], t["shape"]) for t in actor["tensors"]] == [("0", [2]), ("1.3", [])]
    assert actor["optimizer"] == {"kind": None, "states": {}, "groups": []}
    (actor,) = _told(_with_file(tmp_path / "b", [torch.zeros(2)])).values()
    assert actor["parts"] == []


def test_a_tree_that_holds_itself_comes_to_an_end(tmp_path: Path) -> None:
    knot: dict[str, object] = {"weight": torch.zeros(2)}
    knot["again"] = knot
    (actor,) = _told(_with_file(tmp_path / "a", {"model": knot})).values()
    assert len(actor["tensors"]) <= 64
    shared: list[object] = [torch.zeros(1)]
    for _ in range(40):  # 2**40 ways to the one tensor
        shared = [shared, shared]
    (actor,) = _told(_with_file(tmp_path / "b", {"model": shared})).values()
    assert len(actor["tensors"]) <= 2_000


def test_no_more_is_listed_than_a_page_holds(tmp_path: Path) -> None:
    many = {f"w{number}": torch.zeros(1) for number in range(2_010)}
    (actor,) = _told(_with_file(tmp_path, {"model": many})).values()
    assert (len(actor["tensors"]), actor["omitted"], actor["dtypes"]) == (2_000, 10, {"float32": 2_010})
