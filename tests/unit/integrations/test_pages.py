"""The how-to pages about the manager hold: their Python runs, with stand-ins for other people's trainers and trackers."""

from __future__ import annotations

import re
import shlex
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from mcore_rlhf import CheckpointManager
from mcore_rlhf.cli.app import app
from mcore_rlhf.errors import NotACheckpoint
from mcore_rlhf.integrations import megatron_lm
from mcore_rlhf.manager.run import steps
from mcore_rlhf.manager.run.options import Event
from mcore_rlhf.storage.pt import Pt, read_pt

PROJECT = Path(__file__).resolve().parents[3]
HOW_TO = PROJECT / "docs" / "how-to"
GOLDEN = PROJECT / "tests" / "goldens" / "megatron" / "tp2pp2dp2_bf16_do"
DIST = PROJECT / "tests" / "goldens" / "megatron_dist" / "tp2pp2dp2_fully_reshardable" / "iter_0000002"
PAGES = (
    "use-in-megatron-lm.md", "save-and-resume-a-run.md", "save-before-a-deadline.md", "for-rlinf-users.md",
    "for-verl-users.md", "for-openrlhf-users.md", "report-to-trackers.md",
)  # fmt: skip
_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: str, language: str) -> list[str]:
    return [body for found, body in _FENCE.findall((HOW_TO / page).read_text(encoding="utf-8")) if found == language]


def run(page: str, names: dict[str, Any] | None = None) -> dict[str, Any]:
    names = {} if names is None else names
    for block in blocks(page, "python"):
        exec(compile(block, page, "exec"), names)
    return names


def commands(page: str) -> Iterator[list[str]]:
    for block in blocks(page, "bash"):
        yield from (shlex.split(line)[1:] for line in block.splitlines() if line.startswith("mcore-rlhf "))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


class Loader:
    """A data loader of somebody else."""

    def __init__(self) -> None:
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


@pytest.mark.parametrize("page", PAGES)
def test_every_block_is_python(page: str) -> None:
    assert blocks(page, "python")
    for block in blocks(page, "python"):
        compile(block, page, "exec")


def test_the_page_about_the_manager_runs_and_resumes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    uninterrupted = run("save-and-resume-a-run.md")
    assert [step.step for step in steps.committed(folder / "run" / "checkpoints")][-2:] == [4, 6]
    shutil.rmtree(folder / "run" / "checkpoints" / "global_step_6")
    resumed = run("save-and-resume-a-run.md")  # a new process would begin like this: with models and data anew
    assert torch.equal(uninterrupted["policy"].weight, resumed["policy"].weight)
    first, second = capsys.readouterr().out.split("loss ")[1:]
    assert first == second


def test_the_page_about_signals_runs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    run("save-before-a-deadline.md")
    out = capsys.readouterr().out
    assert "stopped after step 7 because of: " in out
    assert "SIGUSR1" in out
    assert "committed: [7]" in out
    assert re.search(r"saved because of: .*deadline", out)
    assert signal.getsignal(signal.SIGUSR1) == before


def test_the_page_about_megatron_lm_hands_over_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []
    monkeypatch.setattr(megatron_lm, "install", lambda **named: given.append(named))
    names = run("use-in-megatron-lm.md")
    assert given[0] == {}
    assert given[1]["state"] is names["state"]
    assert given[1]["options"].keep is names["keep"]


def test_the_blocks_for_rlinf_users_say_what_exists() -> None:
    names = run("for-rlinf-users.md")
    loader = names["LoaderState"]()
    loader.load_state_dict({"at": 3})
    assert loader.state_dict() == {"at": 3}
    waited: list[tuple[str, int, Any]] = []

    def role(name: str) -> SimpleNamespace:
        def save(step: int, transaction: str, state: dict[str, int]) -> SimpleNamespace:
            return SimpleNamespace(wait=lambda: waited.append((transaction, step, state)))

        return SimpleNamespace(name=name, save=save)

    runner = SimpleNamespace(actor=role("actor"), critic=role("critic"), global_steps=5, train_dataloader=Loader())
    names["save_checkpoint"](runner)
    assert len(waited) == 2
    assert len({transaction for transaction, _, _ in waited}) == 1
    assert waited[0][1:] == (5, {"at": 0})


def test_the_page_for_verl_users(folder: Path) -> None:
    names = run("for-verl-users.md")

    def trainer() -> SimpleNamespace:
        kl = SimpleNamespace(kl_coef=0.1, target_kl=6.0, horizon=10000)
        config = SimpleNamespace(algorithm=SimpleNamespace(kl_ctrl=kl))
        controller = SimpleNamespace(value=kl.kl_coef)
        return SimpleNamespace(config=config, kl_ctrl_in_reward=controller, train_dataloader=Loader(), global_steps=20)

    one, other = trainer(), trainer()
    one.kl_ctrl_in_reward.value, one.train_dataloader.at = 0.137, 5
    with names["beside_verl"](one, folder / "state") as manager:
        names["save_beside"](manager, one)
    with names["beside_verl"](other, folder / "state") as manager:
        names["load_beside"](manager, other)
        other.global_steps = 21
        with pytest.raises(NotACheckpoint, match="does not exist"):
            names["load_beside"](manager, other)
    assert (other.kl_ctrl_in_reward.value, other.train_dataloader.at) == (0.137, 5)


def test_the_page_for_verl_users_reads_a_dist_ckpt_without_arguments(folder: Path) -> None:
    """As verl calls megatron-core: a genuine torch_dist folder whose common.pt has no args."""
    convert, _ = commands("for-verl-users.md")
    shutil.copytree(DIST, folder / convert[1])
    common = folder / convert[1] / "common.pt"
    tree = read_pt(common.parent, common.name).tree
    written = Pt.of({k: v for k, v in tree.items() if k != "args"}).create(folder / "common.pt", "common.pt")
    written.finish({})
    shutil.move(folder / "common.pt", common)
    assert CliRunner().invoke(app, ["convert", str(GOLDEN), "base", "--to", "hf", "--no-optimizer"]).exit_code == 0
    done = CliRunner().invoke(app, convert)
    assert done.exit_code == 0, done.output
    assert CliRunner().invoke(app, ["diff", "model", "base", "--states", "param"]).exit_code == 0


def test_the_page_for_openrlhf_users(folder: Path) -> None:
    names = run("for-openrlhf-users.md")

    def trainer() -> SimpleNamespace:
        kl = SimpleNamespace(init_coef=0.1, target=6.0, horizon=10000)
        args = SimpleNamespace(algo=SimpleNamespace(kl=kl))
        return SimpleNamespace(args=args, experience_maker=SimpleNamespace(), prompts_dataloader=Loader())

    one, other = trainer(), trainer()
    with names["beside_openrlhf"](one, folder / "ckpt" / "_state") as manager:
        one.kl_ctl.update(8.0, 64)
        one.prompts_dataloader.at = 5
        manager.save(20, blocking=True)
    with names["beside_openrlhf"](other, folder / "ckpt" / "_state") as manager:
        manager.load(20)
    assert other.kl_ctl.value == one.kl_ctl.value == other.experience_maker.kl_ctl.value != 0.1
    assert other.prompts_dataloader.at == 5
    for command in commands("for-openrlhf-users.md"):
        assert CliRunner().invoke(app, command).exit_code == 0
    deepspeed = folder / "ckpt" / "_actor"
    (deepspeed / "global_step20").mkdir(parents=True)
    (deepspeed / "latest").write_text("global_step20")
    (deepspeed / "global_step20" / "mp_rank_00_model_states.pt").write_bytes(b"x")
    assert CliRunner().invoke(app, ["inspect", str(deepspeed)]).exit_code == 1  # read, and found to be no checkpoint


class Tracker:
    """Stands for TensorBoard's SummaryWriter, W&B's Run and MLflow's client: keeps what it is told, and from which thread."""

    def __init__(self) -> None:
        self.told: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        if name not in {"add_scalar", "add_text", "define_metric", "log", "alert", "log_metric", "set_tag"}:
            raise AttributeError(name)  # not what the page calls
        return lambda *given, **named: self.told.append((name, given, named))

    def of(self, name: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        return [(given, named) for found, given, named in self.told if found == name]


def _saved_with(names: dict[str, Any], folder: Path, on_event: Any) -> None:
    with CheckpointManager(folder, torch.nn.Linear(2, 2), options=names["options_with"](on_event)) as manager:
        for step in range(1, 21):
            manager.maybe_save(step)
    on_event(Event("failed", 30, 0, {}, "the disk is full"))
    on_event(Event("save", 30, 1, {"stall_s": 1.0}))  # another rank's
    on_event(Event("load", None, 0, {}, "nothing to resume"))


def test_the_page_about_trackers_reports_every_save(folder: Path) -> None:
    names = run("report-to-trackers.md")
    board, wandb, mlflow = Tracker(), Tracker(), Tracker()
    _saved_with(names, folder / "board", names["to_tensorboard"](board))
    _saved_with(names, folder / "wandb", names["to_wandb"](wandb))
    _saved_with(names, folder / "mlflow", names["to_mlflow"](mlflow, "run-1"))
    scalars = {(given[0], given[2]) for given, _ in board.of("add_scalar")}
    assert {
        ("checkpoint/save/stall_s", 10),
        ("checkpoint/commit/seconds", 20),
        ("checkpoint/commit/bytes", 20),
    } <= scalars
    assert board.of("add_text") == [(("checkpoint/failed", "the disk is full", 30), {})]
    assert wandb.of("define_metric") == [(("checkpoint/*",), {"step_metric": "checkpoint/step"})]
    logged = [given[0] for given, _ in wandb.of("log")]
    assert {row["checkpoint/step"] for row in logged if "checkpoint/commit/seconds" in row} == {10, 20}
    assert [named["text"] for _, named in wandb.of("alert")] == ["the disk is full"]
    metrics = {(*given[:2], named["step"]) for given, named in mlflow.of("log_metric")}
    assert {("run-1", "checkpoint/save/stall_s", 10), ("run-1", "checkpoint/commit/seconds", 20)} <= metrics
    assert mlflow.of("set_tag") == [(("run-1", "checkpoint.failed", "step 30: the disk is full"), {})]
    assert not {step for _, step in scalars} & {30}
