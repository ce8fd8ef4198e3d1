"""``state.pt``, which ``TorchEngine`` saved: looked at, compared and converted, with the optimizer by name; damaged, it is said so."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rlhf import CheckpointManager, TorchEngine
from mcore_rlhf.convert import ConvertOptions, convert, prepare
from mcore_rlhf.core.catalog import EXP_AVG, EXP_AVG_SQ, MASTER, PARAM
from mcore_rlhf.errors import CheckpointError, Corrupt, Incomplete, LayoutMismatch, NotACheckpoint, Unsupported
from mcore_rlhf.families.options import ReadOptions, WriteOptions
from mcore_rlhf.families.source import Source
from mcore_rlhf.formats.registry import open_checkpoint, roles_in
from mcore_rlhf.manager.convert_step import convert_step
from mcore_rlhf.manager.subject import find
from mcore_rlhf.verify.checkpoint import Depth, verify
from tests.helpers.catalog_values import tensor_of
from tests.helpers.dcp_by_torch import differences, load, new_run, state_of
from tests.unit.engines.plain_files import save
from tests.unit.formats.hf_by_hand import CONFIG, llama


class Net(torch.nn.Module):
    """A module under a Llama's names, without its arithmetic."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        for name, tensor in llama(tied=tied).items():
            *path, last = name.split(".")
            at: torch.nn.Module = self
            for part in path:
                if part not in dict(at.named_children()):
                    at.add_module(part, torch.nn.Module())
                at = at.get_submodule(part)
            at.register_parameter(last, torch.nn.Parameter(tensor))
        if tied:
            self.add_module("lm_head", torch.nn.Module())
            self.lm_head.register_parameter("weight", self.get_parameter("model.embed_tokens.weight"))


def trained(module: torch.nn.Module, *, reverse: bool = False) -> TorchEngine:
    """Two steps of two groups, whose order is not the module's."""
    matrices = [parameter for parameter in module.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in module.parameters() if parameter.ndim < 2]
    groups: list[dict[str, Any]] = [{"params": vectors, "weight_decay": 0.0}] if vectors else []
    optimizer = torch.optim.AdamW([*groups, {"params": matrices[::-1] if reverse else matrices}], lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    made = torch.Generator().manual_seed(1)
    for _ in range(2):
        for parameter in module.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=made)
        optimizer.step()
        scheduler.step()
    return TorchEngine(module, optimizer, scheduler)


def saved(folder: Path, engine: TorchEngine) -> Path:
    folder.mkdir(parents=True)
    return save(engine, folder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return saved(tmp_path / "global_step_7" / "actor", trained(Net(), reverse=True))


def values(source: Source, state: str) -> dict[str, torch.Tensor]:
    names = (spec.name for spec in source.model.params)
    return {name: tensor_of(source, name, state) for name in names}


def same_as_live(source: Source, engine: TorchEngine) -> None:
    assert engine.module is not None
    assert engine.optimizer is not None
    for name, parameter in engine.module.named_parameters():
        live = {MASTER: parameter.detach(), **engine.optimizer.state[parameter]}
        for state in (MASTER, EXP_AVG, EXP_AVG_SQ):
            assert torch.equal(tensor_of(source, name, state), live[state]), (name, state)


def test_it_is_what_was_live_by_name(tmp_path: Path) -> None:
    engine = trained(Net(), reverse=True)
    source = open_checkpoint(saved(tmp_path / "global_step_7" / "actor", engine), ReadOptions())
    assert (source.format, source.state.iteration, source.states) == ("torch", 7, (MASTER, EXP_AVG, EXP_AVG_SQ))
    assert source.optimizer == "torch AdamW"
    same_as_live(source, engine)
    assert [(len(group.params), group.fields["weight_decay"]) for group in source.state.groups] == [
        (5, 0.0),
        (16, 0.01),
    ]
    assert source.state.scheduler is not None
    assert source.state.scheduler["last_epoch"] == 2


@pytest.mark.parametrize("to", ["hf", "dcp", "deepspeed", "universal", "megatron", "megatron-dist"])
def test_it_becomes_every_other_format_with_its_optimizer(folder: Path, tmp_path: Path, to: str) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    options = ConvertOptions(to=to, fsync=False, write=WriteOptions(with_optimizer=to == "hf"))
    job = convert(folder, tmp_path / "target", options)
    assert job.lossless == (not to.startswith("megatron"))
    back = convert(tmp_path / "target", tmp_path / "back", ConvertOptions(to="dcp", fsync=False))
    first, second = open_checkpoint(folder, ReadOptions()), open_checkpoint(tmp_path / "back", ReadOptions())
    assert back.target.parallel.world_size == 1
    for state in (MASTER, EXP_AVG, EXP_AVG_SQ):
        for name, value in values(first, state).items():
            assert torch.equal(tensor_of(second, name, state), value), (name, state)


def test_torch_loads_what_it_becomes(tmp_path: Path) -> None:
    """With a frozen layer, buffers and a LambdaLR: torch's own ``dcp.load`` fills another run with all that was live."""
    run, other = new_run(0), new_run(3)
    folder = saved(tmp_path / "global_step_2" / "actor", TorchEngine(run.model, run.optimizer, run.scheduler))
    assert convert(folder, tmp_path / "out", ConvertOptions(to="dcp", fsync=False)).lossless
    wanted, found = state_of(run, "rlinf"), load(state_of(other, "rlinf"), tmp_path / "out" / "dcp_checkpoint")
    assert [path for path in differences(wanted, found) if ".rng" not in path] == []


def test_tied_weights_are_one(tmp_path: Path) -> None:
    engine = trained(Net(tied=True))
    source = open_checkpoint(saved(tmp_path / "actor", engine), ReadOptions())
    assert source.family.shared == {"lm_head.weight": "model.embed_tokens.weight"}
    assert source.model.tied
    same_as_live(source, engine)


def test_a_file_that_torch_wrote_is_named_by_its_shapes_where_they_tell(tmp_path: Path) -> None:
    """As ``torch.save({"model": …, "optimizer": …})`` of anybody's; where the shapes do not tell, the weights alone are read."""
    module = torch.nn.Linear(3, 2)
    engine = trained(module)
    torch.save(engine._parts(), tmp_path / "state.pt")
    source = open_checkpoint(tmp_path, ReadOptions())
    same_as_live(source, engine)
    torch.save(trained(Net(), reverse=True)._parts(), tmp_path / "state.pt")
    with pytest.raises(Unsupported, match="shapes fit in no way, or in several"):
        open_checkpoint(tmp_path, ReadOptions())
    assert open_checkpoint(tmp_path, ReadOptions(), partial=True).unread
    assert not prepare(tmp_path, ConvertOptions(to="dcp", write=WriteOptions(no_optimizer=True))).lossless


def test_what_is_no_tensor_of_the_model_is_named(tmp_path: Path) -> None:
    engine = trained(Net())
    tree = {**engine._parts(), "counter": {"seen": 5}}
    tree["model"]["layer._extra_state"] = {"scale": 2}  # type: ignore[index]
    torch.save(tree, tmp_path / "state.pt")
    job = prepare(tmp_path, ConvertOptions(to="dcp", write=WriteOptions(no_optimizer=True)))
    assert "model.layer._extra_state in state.pt: not known, and not carried" in job.account.lost
    assert open_checkpoint(tmp_path, ReadOptions(optimizer=False)).state.other == {"counter": {"seen": 5}}


def _factored(tree: dict[str, Any]) -> None:
    tree["optimizer"]["state"][5]["exp_avg"] = torch.zeros(3)


def _unnamed(tree: dict[str, Any]) -> None:
    del tree["optimizer_params"]["names"][0][0]


def _names_of_nothing(tree: dict[str, Any]) -> None:
    tree["optimizer_params"]["names"][0][0] = ["a", "list"]


def _words(tree: dict[str, Any]) -> None:
    tree["optimizer"]["state"][5]["step"] = "three"


def _no_optimizer_of_torch(tree: dict[str, Any]) -> None:
    tree["optimizer"] = {"state": [1, 2]}


@pytest.mark.parametrize(
    ("change", "kind", "said"),
    [
        (_factored, Unsupported, "only states with one value per element"),
        (_unnamed, LayoutMismatch, "does not describe the parameters of 'optimizer'"),
        (_names_of_nothing, LayoutMismatch, "does not describe the parameters of 'optimizer'"),
        (_words, Unsupported, "'step' of the optimizer's parameter 5 is a str"),
        (_no_optimizer_of_torch, Unsupported, "not the state dict of one of torch's optimizers"),
    ],
)
def test_an_optimizer_that_does_not_fit_is_refused_by_name(
    folder: Path, change: Callable[[dict[str, Any]], None], kind: type[CheckpointError], said: str
) -> None:
    tree = torch.load(folder / "state.pt", weights_only=True)
    change(tree)
    torch.save(tree, folder / "state.pt")
    with pytest.raises(kind, match=said):
        open_checkpoint(folder, ReadOptions())
    assert open_checkpoint(folder, ReadOptions(optimizer=False)).states == ()


@pytest.mark.parametrize("said", [-5, 10**40])
def test_an_iteration_where_no_run_comes_is_refused(folder: Path, said: int) -> None:
    torch.save({**torch.load(folder / "state.pt", weights_only=True), "iteration": said}, folder / "state.pt")
    with pytest.raises(LayoutMismatch, match="where no run comes"):
        open_checkpoint(folder, ReadOptions())


@pytest.mark.parametrize("said", [float("nan"), float("inf"), -1.0, "7", {"counted": 3}])
def test_what_is_no_iteration_is_a_value_of_the_programs_own(tmp_path: Path, said: object) -> None:
    (folder := tmp_path / "step").mkdir()
    torch.save({"model": {"weight": torch.ones(2)}, "iteration": said}, folder / "state.pt")
    convert(folder, tmp_path / "out", ConvertOptions(to="torch", fsync=False))
    assert open_checkpoint(folder, ReadOptions()).state.iteration == 0
    assert repr(torch.load(tmp_path / "out" / "state.pt", weights_only=True)["iteration"]) == repr(said)


def test_a_tensor_without_a_name_is_refused(tmp_path: Path) -> None:
    torch.save({"model": {0: torch.ones(2)}}, tmp_path / "state.pt")
    with pytest.raises(Unsupported, match="has a tensor under 0, which is no name of a parameter"):
        open_checkpoint(tmp_path, ReadOptions())


def test_states_of_nobodys_parameters_are_lost_by_name(tmp_path: Path) -> None:
    module, other = torch.nn.Linear(3, 2), torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.Adam([*module.parameters(), other])
    for parameter in (*module.parameters(), other):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    job = prepare(saved(tmp_path / "actor", TorchEngine(module, optimizer)), ConvertOptions(to="dcp"))
    assert "param group 0: the model has no number 2; their states are not carried" in job.account.lost


def test_damage_is_found(folder: Path) -> None:
    whole = (folder / "state.pt").read_bytes()
    assert verify(folder, ReadOptions(), Depth.DEEP).intact
    at = whole.index(b"data/5") + 100
    for data, kind in ((whole[: len(whole) // 2], Incomplete), (bytes(len(whole)), Corrupt)):
        (folder / "state.pt").write_bytes(data)
        with pytest.raises(kind, match=r"state\.pt"):
            open_checkpoint(folder, ReadOptions())
        assert not verify(folder, ReadOptions()).intact
    (folder / "state.pt").write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    assert "CRC-32" in verify(folder, ReadOptions()).problems.describe()


def test_without_a_model_it_is_none(tmp_path: Path) -> None:
    save(TorchEngine(None, torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])), tmp_path)
    with pytest.raises(NotACheckpoint):
        open_checkpoint(tmp_path, ReadOptions())


def test_a_whole_step_of_it_is_converted_and_beside_another_model_it_goes_along(tmp_path: Path) -> None:
    engine = trained(Net())
    with CheckpointManager(
        tmp_path / "run", {"actor": engine, "critic": TorchEngine(torch.nn.Linear(3, 1))}
    ) as manager:
        manager.save(1)
    step = tmp_path / "run" / "global_step_1"
    assert roles_in(step) == ["actor", "critic"]
    job = convert_step(find(step, ReadOptions()), tmp_path / "dcp", ConvertOptions(to="dcp", fsync=False))
    assert set(job.jobs) == {"actor", "critic"}
    same_as_live(open_checkpoint(tmp_path / "dcp" / "global_step_1", ReadOptions(role="actor")), engine)
    mixed = tmp_path / "mixed" / "global_step_1"
    convert(step / "actor", mixed / "actor", ConvertOptions(to="universal", fsync=False))
    (mixed / "critic").mkdir()
    (mixed / "critic" / "state.pt").write_bytes((step / "critic" / "state.pt").read_bytes())
    whole = find(mixed, ReadOptions())
    assert (list(whole.models), whole.others) == (["actor"], ("critic/state.pt",))
    assert list(find(mixed, ReadOptions(role="critic")).models) == ["critic"]
    assert values(open_checkpoint(mixed / "critic", ReadOptions(role="actor")), PARAM).keys() == {"weight", "bias"}
