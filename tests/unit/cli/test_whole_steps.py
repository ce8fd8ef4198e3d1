"""Whole steps: genuine models of two roles, with data and RLHF state beside them."""

from __future__ import annotations

import errno
import json
import os
import shutil
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rlhf import CheckpointManager, TorchEngine
from mcore_rlhf.manager.rlhf.controls import AdaptiveKL
from mcore_rlhf.manager.rlhf.state import RlhfState
from mcore_rlhf.manager.run import steps
from mcore_rlhf.manager.run.adopt import adopt
from mcore_rlhf.storage import patience
from mcore_rlhf.storage.torchzip import archive
from tests.helpers.damage import flip_a_bit
from tests.helpers.independent_reader import differences, read
from tests.unit.manager.roots import make_step

from .conftest import GOLDENS, Cli


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's root with step 2: actor TP2×PP2×DP2, critic TP1, as their trainer left them."""
    root = tmp_path_factory.mktemp("whole") / "run"
    folder = root / "global_step_2"
    shutil.copytree(GOLDENS / "tp2pp2dp2_bf16_do", folder / "actor")
    shutil.copytree(GOLDENS / "tp1_bf16_do", folder / "critic")
    for name in ("data", "rlhf"):
        (folder / name).mkdir()
    torch.save(
        {"version": 1, "kind": "stateful", "state": {"driver": {"at": 7}}, "fingerprint": None}, folder / "data/data.pt"
    )
    state = RlhfState(algorithm="grpo", kl=AdaptiveKL(0.25, 6.0, 1000))
    (folder / "rlhf/rlhf_state.json").write_text(state.to_json())
    adopt(folder)
    return root


@pytest.fixture
def root(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "run")
    return tmp_path / "run"


def test_a_root_means_its_newest_committed_step(cli: Cli, root: Path) -> None:
    (root / "global_step_9").mkdir()
    (root / steps.MANIFEST.replace("manifest", "latest")).write_text("9")
    facts = cli("inspect", root, "--json").json
    assert facts["step"] == 2
    assert {role: model["parallel"]["text"] for role, model in facts["models"].items()} == {
        "actor": "TP2×PP2×DP2",
        "critic": "TP1×PP1×DP1",
    }
    assert facts["others"] == ["data/data.pt", "rlhf/rlhf_state.json"]
    assert (
        facts["manifest"]["files"] == len([path for path in (root / "global_step_2").rglob("*") if path.is_file()]) - 1
    )
    assert "actor" in cli("inspect", root).stdout


def test_converting_a_step_gives_a_step(cli: Cli, root: Path, tmp_path: Path) -> None:
    outcome = cli("convert", root, tmp_path / "new", "--tp", "1", "--pp", "1", "--dp", "2", "--verify", "--json")
    assert outcome.code == 0, outcome.stderr
    folder = tmp_path / "new" / "global_step_2"
    assert steps.is_committed(folder)
    assert (tmp_path / "new" / "latest_checkpointed_iteration.txt").read_text() == "2"
    manifest = steps.read_manifest(folder)
    assert {part["role"]: part["parallel"] for part in manifest.parts} == {
        "actor": "TP1×PP1×DP2",
        "critic": "TP1×PP1×DP2",
    }
    for role in ("actor", "critic"):  # as another reader sees them
        assert not differences(read(root / "global_step_2" / role), read(folder / role))
    for name in ("data/data.pt", "rlhf/rlhf_state.json"):
        assert (folder / name).read_bytes() == (root / "global_step_2" / name).read_bytes()
    assert cli("diff", root, tmp_path / "new").code == 0


def test_what_the_manifest_does_not_list_is_left_behind_by_name(cli: Cli, root: Path, tmp_path: Path) -> None:
    (root / "global_step_2" / "notes").mkdir()
    (root / "global_step_2" / "notes" / "why.txt").write_text("a good one")
    outcome = cli("convert", root, tmp_path / "new", "--tp", "1", "--pp", "1", "--json")
    assert outcome.code == 0, outcome.stderr
    (line,) = [line for line in outcome.json["report"]["step"] if "notes/why.txt" in line["text"]]
    assert line["fate"] == "left behind"
    assert not (tmp_path / "new" / "global_step_2" / "notes").exists()


@pytest.mark.parametrize("kept", [True, False], ids=["a manifest", "none"])
def test_a_folder_that_cannot_be_listed_is_not_taken_for_empty(
    cli: Cli, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    """A step that is converted without what nobody could see would be called lossless."""
    more = root / "global_step_2" / "data" / "more"
    more.mkdir()
    if not kept:
        (root / "global_step_2" / steps.MANIFEST).unlink()
    real = os.scandir

    def scandir(path: Any = ".") -> Any:
        if str(path) == str(more):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(more))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    monkeypatch.setattr(patience, "_PAUSES", (0.0,))
    done = cli("convert", root / "global_step_2", tmp_path / "out" / "global_step_2", "--tp", 1, "--pp", 1)
    assert done.code == 2
    assert "more: cannot read: Input/output error" in done.stderr
    assert not (tmp_path / "out" / "global_step_2").exists()


def test_a_relative_target_is_named_as_it_was_given(
    cli: Cli, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = cli("convert", root, "new", "--tp", "1", "--pp", "1", "--json")
    assert outcome.json["target"] == "new/global_step_2"
    assert Path("new/latest_checkpointed_iteration.txt").read_text() == "2"


def test_the_tracker_of_a_root_never_goes_back(cli: Cli, root: Path, tmp_path: Path) -> None:
    make_step(tmp_path / "new", 7)
    (tmp_path / "new" / "latest_checkpointed_iteration.txt").write_text("7")
    assert cli("convert", root, tmp_path / "new", "--tp", "1", "--pp", "1").code == 0
    assert (tmp_path / "new" / "latest_checkpointed_iteration.txt").read_text() == "7"
    assert [step.step for step in steps.committed(tmp_path / "new")] == [2, 7]


def test_one_role_gives_one_model(cli: Cli, root: Path, tmp_path: Path) -> None:
    outcome = cli("convert", root, tmp_path / "critic", "--role", "critic", "--tp", "2", "--dp", "1")
    assert outcome.code == 0, outcome.stderr
    assert (tmp_path / "critic" / "iter_0000002" / "mp_rank_01" / "distrib_optim.pt").is_file()
    assert not (tmp_path / "critic" / "global_step_2").exists()


def test_a_plan_writes_nothing(cli: Cli, root: Path) -> None:
    before = sorted(root.rglob("*"))
    outcome = cli("plan", root, "--tp", "1", "--pp", "1")
    assert outcome.code == 0
    assert "nothing was written" in outcome.stdout
    assert sorted(root.rglob("*")) == before


@pytest.mark.parametrize(
    "name", ["actor/iter_0000002/mp_rank_01_001/model_optim_rng.pt", "rlhf/rlhf_state.json", "data/data.pt"]
)
def test_a_flipped_byte_anywhere_is_found_and_not_converted(cli: Cli, root: Path, tmp_path: Path, name: str) -> None:
    flip_a_bit(root / "global_step_2" / name)
    verdict = cli("verify", root, "--json")
    assert verdict.code == 1
    assert any(name in problem["message"] for problem in verdict.json["problems"])
    assert cli("convert", root, tmp_path / "new", "--tp", "1", "--pp", "1").code == 1
    assert not (tmp_path / "new" / "global_step_2").exists()


def _manifest(folder: Path) -> dict[str, Any]:
    """The manifest without its checksum of itself, as if it had been written by hand."""
    content: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    return {key: value for key, value in content.items() if key != "crc32"}


def _relisted(folder: Path, name: str) -> None:
    """Let the manifest vouch for a file as it is now."""
    manifest = _manifest(folder)
    data = (folder / name).read_bytes()
    manifest["files"][name] = {"bytes": len(data), "crc32": zlib.crc32(data)}
    (folder / "manifest.json").write_text(json.dumps(manifest))


class Shell:
    """Runs a command when it is unpickled carelessly."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("false",)


def _torn(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


SPOILED = {
    "torn": ("data/data.pt", _torn, "Incomplete"),
    "no json": ("rlhf/rlhf_state.json", lambda path: path.write_text("{not json"), "Corrupt"),
    "deep json": ("rlhf/rlhf_state.json", lambda path: path.write_text("[" * 100_000), "Corrupt"),
    "runs code": ("data/data.pt", lambda path: torch.save({"state": Shell()}, path), "Untrusted"),
}


@pytest.mark.parametrize("listed", [True, False], ids=["manifest", "no manifest"])
@pytest.mark.parametrize("case", SPOILED)
def test_what_cannot_be_loaded_is_found_and_not_carried(
    cli: Cli, root: Path, tmp_path: Path, case: str, listed: bool
) -> None:
    name, spoil, kind = SPOILED[case]
    folder = root / "global_step_2"
    spoil(folder / name)
    if listed:
        _relisted(folder, name)
    else:
        (folder / "manifest.json").unlink()
    verdict = cli("verify", folder, "--json")
    assert (verdict.code, verdict.json["intact"]) == (1, False)
    assert [problem["kind"] for problem in verdict.json["problems"]] == [kind]
    assert name in verdict.json["problems"][0]["message"]
    assert all(model["intact"] for model in verdict.json["models"].values())
    assert name in cli("verify", folder, "--quick").stdout
    outcome = cli("convert", folder, tmp_path / "new", "--tp", "1", "--pp", "1")
    assert outcome.code == 1
    assert name in outcome.stderr
    assert not list((tmp_path / "new").glob("global_step_*"))


@pytest.mark.parametrize("name", ["data/data.pt", "data/loader.pkl", "rlhf/own"])
def test_what_calls_a_frameworks_function_is_read_and_not_carried(
    cli: Cli, root: Path, tmp_path: Path, name: str
) -> None:
    """Any class of a framework may be read, as a stub; what is carried byte for byte is run by whoever loads it."""
    call = b"\x80\x02cverl.utils.fs\ncopy\nX\x04\x00\x00\x00true\x85R."
    folder = root / "global_step_2"
    data, _ = archive("data", {"data.pkl": call, "byteorder": b"little", "version": b"3\n"})
    (folder / name).write_bytes(data if name.endswith(".pt") else call)
    _relisted(folder, name)
    assert cli("verify", folder).code == 0
    target = tmp_path / "new"
    outcome = cli("convert", folder, target, "--tp", "1", "--pp", "1")
    assert (outcome.code, list(target.glob("global_step_*"))) == (1, [])
    assert f"{name}: whoever loads it would call 'verl.utils.fs.copy'" in outcome.stderr
    assert cli("convert", folder, target, "--tp", "1", "--pp", "1", "--stub", "verl.utils.fs.copy").code == 0


def test_without_a_manifest_every_record_is_verified(cli: Cli, root: Path, tmp_path: Path) -> None:
    folder = root / "global_step_2"
    (folder / "manifest.json").unlink()
    (folder / "rng").mkdir()
    torch.save({"states": torch.arange(1 << 14)}, folder / "rng" / "rng_state.pt")
    assert cli("verify", folder).code == 0
    flip_a_bit(folder / "rng" / "rng_state.pt")
    verdict = cli("verify", folder, "--json")
    assert (verdict.code, len(verdict.json["problems"])) == (1, 1)
    assert "rng_state.pt" in verdict.json["problems"][0]["message"]
    assert cli("verify", folder, "--quick").code == 0
    assert cli("convert", folder, tmp_path / "new", "--tp", "1", "--pp", "1").code == 1


def test_a_step_of_one_model_is_verified_with_what_is_beside_it(cli: Cli, root: Path) -> None:
    folder = root / "global_step_2"
    (folder / "manifest.json").unlink()
    shutil.rmtree(folder / "critic")
    assert cli("verify", folder, "--json").json["problems"] == []
    _torn(folder / "data" / "data.pt")
    assert "data.pt" in cli("verify", folder, "--json").json["problems"][0]["message"]


def test_a_damaged_file_is_one_problem(cli: Cli, root: Path) -> None:
    path = root / "global_step_2" / "rlhf" / "rlhf_state.json"
    path.write_text("x" * path.stat().st_size)
    (problem,) = cli("verify", root, "--json").json["problems"]
    assert "CRC-32" in problem["message"]


def test_a_manifest_nested_too_deep_is_damage(cli: Cli, root: Path) -> None:
    (root / "global_step_2" / "manifest.json").write_text("[" * 100_000)
    outcome = cli("verify", root / "global_step_2")
    assert outcome.code == 1
    assert "manifest.json: the manifest is not valid JSON" in outcome.stderr
    assert "bug" not in outcome.stderr


def test_metrics_that_are_no_numbers_are_shown(cli: Cli, root: Path) -> None:
    folder = root / "global_step_2"
    manifest = _manifest(folder)
    manifest["report"]["metrics"] = {"kl": "nan", "best": "-inf", "odd": ["x"], "text": "x", "reward": 0.5}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert "kl nan, best -inf, reward 0.5" in cli("inspect", root).stdout
    assert cli("inspect", root, "--json").json["manifest"]["metrics"] == {"kl": "nan", "best": "-inf", "reward": 0.5}


def test_a_damaged_step_is_named(cli: Cli, root: Path) -> None:
    (root / "global_step_2" / "data" / "data.pt").unlink()
    outcome = cli("inspect", root / "global_step_2")
    assert outcome.code == 1
    assert "data.pt: is missing" in outcome.stderr
    for command in (["inspect", root], ["verify", root], ["convert", root, root.with_name("x")]):
        outcome = cli(*command)
        assert outcome.code == 1
        assert "no committed step in it: global_step_2 is damaged" in outcome.stderr


def test_steps_are_compared_in_everything(cli: Cli, root: Path, tmp_path: Path) -> None:
    shutil.copytree(root, tmp_path / "other")
    folder = tmp_path / "other" / "global_step_2"
    text = (folder / "rlhf/rlhf_state.json").read_text()
    (folder / "rlhf/rlhf_state.json").write_text(text.replace("0.25", "0.26"))
    outcome = cli("diff", root, tmp_path / "other", "--json")
    assert outcome.code == 1
    assert outcome.json["others"] == {"data/data.pt": "equal", "rlhf/rlhf_state.json": "different"}
    assert all(model["equal"] for model in outcome.json["models"].values())


def test_mistakes(cli: Cli, root: Path, tmp_path: Path) -> None:
    for args, said in [
        (("convert", root, tmp_path / "x", "--role", "reward"), "no model of the role 'reward'; it has: actor, critic"),
        (("convert", root, tmp_path / "global_step_3", "--tp", "1", "--pp", "1"), "called global_step_2"),
        (("inspect", root, "--step", "5"), "global_step_5: does not exist"),
        (("diff", root, root / "global_step_2" / "actor"), "Name one of its models with --role"),
        (("convert", root, root, "--tp", "1", "--pp", "1"), "same folder"),
        (("inspect", root, "--tensors"), "Name one of its models with --role"),
    ]:
        outcome = cli(*args)
        assert outcome.code == 2, (args, outcome)
        assert said in outcome.stderr, (args, outcome.stderr)


def test_a_step_says_how_much_state_was_live_when_it_was_saved(cli: Cli, tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    with CheckpointManager(tmp_path / "run", {"actor": TorchEngine(model, optimizer)}) as manager:
        manager.save(1)
    live = cli("inspect", tmp_path / "run", "--json").json["manifest"]["live"]
    assert live == {
        "actor": {"tensors": 8, "bytes": 3 * (4 * 3 + 3) * 4 + 2 * 4}
    }  # two tensors: weights, moments, steps
    assert "actor 8 tensors, 188 bytes" in cli("inspect", tmp_path / "run").stdout
    with CheckpointManager(tmp_path / "other", {"loader": TorchEngine(None, optimizer)}) as manager:
        manager.save(1)
    refused = cli("convert", tmp_path / "other", tmp_path / "x", "--to", "universal", "--role", "loader")
    assert (refused.code, "what an engine of 'torch' saves goes back to such an engine" in refused.stderr) == (2, True)
    assert "It has none in a format that is known" in cli("inspect", tmp_path / "other", "--tensors").stderr


def test_what_a_plain_engine_saved_is_looked_at_compared_and_converted(cli: Cli, tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.Adam(model.parameters())
    with CheckpointManager(tmp_path / "run", {"actor": TorchEngine(model, optimizer)}) as manager:
        for step in (1, 2):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            manager.save(step)
    steps = [tmp_path / "run" / f"global_step_{step}" for step in (1, 2)]
    assert "exp_avg_sq" in cli("inspect", tmp_path / "run", "--tensors").stdout
    assert cli("verify", tmp_path / "run").code == 0
    assert cli("diff", *steps).code == 1
    assert cli("diff", steps[0], steps[0]).code == 0
    done = cli("convert", tmp_path / "run", tmp_path / "dcp", "--to", "dcp", "--verify", "--strict")
    assert (done.code, "diff    equal: 6 tensors" in done.stdout) == (0, True)
    assert cli("report", tmp_path / "run", "-o", tmp_path / "page.html").code == 0
    assert "exp_avg" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.Adafactor])
def test_what_nobody_reads_of_a_plain_engines_file_is_compared_too(
    cli: Cli, tmp_path: Path, kind: type[torch.optim.Optimizer]
) -> None:
    """A further part of the program's, and an optimizer whose states have no parameter's shape."""
    for name, seen in (("one", 1), ("same", 1), ("other", 2)):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 3)
        optimizer = kind(model.parameters())
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        counter = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=seen)
        with CheckpointManager(tmp_path / name, {"actor": TorchEngine(model, optimizer, counter=counter)}) as manager:
            torch.manual_seed(1)
            manager.save(1)
    assert cli("diff", tmp_path / "one", tmp_path / "same").code == 0
    apart = cli("diff", tmp_path / "one", tmp_path / "other", "--json")
    assert (apart.code, apart.json["others"]["actor/state.pt"]) == (1, "different")
