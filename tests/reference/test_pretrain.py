"""Megatron-LM's own scripts on the CPU, killed, and resumed with the drop-in and without, against the run that nobody interrupted."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mcore_rlhf.demo import versions
from mcore_rlhf.manager.run import steps

PROJECT = Path(__file__).parents[2]
MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --group-query-attention --num-query-groups 2 --seq-length 32 "
    "--max-position-embeddings 32 --swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope "
    "--untie-embeddings-and-output-weights --bf16 --use-distributed-optimizer --transformer-impl local --attention-backend unfused "
    "--no-rope-fusion --no-masked-softmax-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-persist-layer-norm "
    "--no-gradient-accumulation-fusion --distributed-backend gloo"
)
TRAINING = (
    "--micro-batch-size 1 --global-batch-size 4 --train-iters 6 --lr 1e-3 --min-lr 1e-5 --lr-decay-style cosine --lr-warmup-iters 1 "
    "--weight-decay 0.1 --log-interval 1 --eval-iters 0 --eval-interval 100 --ckpt-format torch --save-interval 2 --num-workers 0 "
    "--tokenizer-type NullTokenizer --vocab-size 131 --tensor-model-parallel-size 2"
)
PRETRAIN = [*MODEL.split(), *TRAINING.split(), "--mock-data"]
KILLED_BEHIND = 5
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
Seen = list[dict[str, list[float]]]


class Scripts:
    """Runs a script on some ranks, and remembers nothing.

    Args:
        checkout: A checkout of Megatron-LM, or None for the package's ``megatron.training`` and a script of ours.
        folder: For jobs and logs.
    """

    def __init__(self, checkout: Path | None, folder: Path) -> None:
        self.checkout, self.folder, self.runs = checkout, folder, 0

    def run(self, script: str, args: list[str], world: int = 2, **job: Any) -> Seen:
        """What every rank saw: losses and gradient norm, by iteration."""
        self.runs += 1
        out = self.folder / f"run_{self.runs}"
        ours = "pretrain_mock.py" if script == "pretrain_gpt.py" else script
        path = Path(__file__).with_name(ours)
        if self.checkout is not None and not path.with_name(script).exists():
            path = self.checkout / script
        job |= {"script": str(path), "args": args, "world": world, "port": _free_port(), "out": str(out)}
        out.with_suffix(".json").write_text(json.dumps(job))
        checkout = [] if self.checkout is None else [str(self.checkout)]
        paths = [*checkout, str(PROJECT), *filter(None, [os.environ.get("PYTHONPATH")])]
        worker = [
            sys.executable,
            "-W",
            "ignore",
            str(Path(__file__).with_name("script_worker.py")),
            str(out.with_suffix(".json")),
        ]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        ranks = []
        for rank in range(world):
            with Path(f"{out}.log{rank}").open("wb") as log:
                ranks.append(
                    subprocess.Popen([*worker, str(rank)], env=environment, stdout=log, stderr=log, cwd=self.folder)
                )
        try:
            codes = [rank.wait(timeout=400) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        expected = -signal.SIGKILL if "kill" in job else 0
        assert codes == [expected] * world, "".join(
            Path(f"{out}.log{rank}").read_text()[-3000:] for rank in range(world)
        )
        return [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(world)]


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


@pytest.fixture(scope="module")
def scripts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Scripts:
    given = request.config.getoption("--megatron-lm")
    if given is None and versions.MEGATRON < (0, 19):
        pytest.skip(
            "needs --megatron-lm with a checkout of Megatron-LM of this release: the package has no such scripts"
        )
    return Scripts(None if given is None else Path(given).absolute(), tmp_path_factory.mktemp("scripts"))


@pytest.fixture(scope="module")
def whole(scripts: Scripts) -> Seen:
    """A run that nobody interrupts, by Megatron alone; its checkpoints are in ``theirs``."""
    return scripts.run("pretrain_gpt.py", [*PRETRAIN, "--save", str(scripts.folder / "theirs")])


@dataclass(frozen=True)
class Killed:
    """A run with the drop-in that was killed behind its fifth iteration.

    Args:
        root: Of the run.
        step: A copy of its newest step.
        number: Of that.
        drop_in: How the drop-in is installed.
    """

    root: Path
    step: Path
    number: int
    drop_in: dict[str, Any]


@pytest.fixture(scope="module", params=[False, True], ids=["waiting", "behind"])
def killed(request: pytest.FixtureRequest, scripts: Scripts, whole: Seen) -> Killed:
    root, drop_in = scripts.folder / f"ours_{request.param}", {"asynchronous": request.param}
    seen = scripts.run("pretrain_gpt.py", [*PRETRAIN, "--save", str(root)], install=drop_in, kill=KILLED_BEHIND)
    assert seen == [{step: of_rank[step] for step in map(str, range(1, KILLED_BEHIND + 1))} for of_rank in whole]
    newest = steps.newest(root)
    assert newest is not None
    assert newest.step in ((2, 4) if request.param else (4,))  # the kill may come before the second commit
    copy = scripts.folder / f"copy_{request.param}" / newest.path.name
    shutil.copytree(newest.path, copy)
    return Killed(root, copy, newest.step, drop_in)


def goes_on(whole: Seen, resumed: Seen, first: int) -> None:
    """Whether a resumed run has every loss and every gradient norm of the whole one, to the last bit."""
    for of_whole, of_resumed in zip(whole, resumed, strict=True):
        assert min(map(int, of_resumed)) == first
        assert of_resumed == {step: seen for step, seen in of_whole.items() if int(step) >= first}


def test_a_run_with_the_drop_in_is_megatrons(whole: Seen, killed: Killed) -> None:
    """Its losses up to the kill are compared as it is made."""
    assert all(sorted(map(int, seen)) == list(range(1, 7)) for seen in whole)
    assert next(iter(steps.committed(killed.root))).step == 2


def test_megatron_alone_goes_on_from_a_killed_run(scripts: Scripts, whole: Seen, killed: Killed) -> None:
    resumed = scripts.run("pretrain_gpt.py", [*PRETRAIN, "--load", str(killed.step / "actor")])
    goes_on(whole, resumed, killed.number + 1)


def test_a_killed_run_goes_on(scripts: Scripts, whole: Seen, killed: Killed) -> None:
    """After the test before, since it goes on writing to the run."""
    both = [*PRETRAIN, "--save", str(killed.root), "--load", str(killed.root)]
    goes_on(whole, scripts.run("pretrain_gpt.py", both, install=killed.drop_in), killed.number + 1)
    assert [step.step for step in steps.committed(killed.root)][-1] == 6


MUON = [*PRETRAIN, "--tensor-model-parallel-size", "1", "--optimizer", "muon"]
BY_SIZE = ["--no-use-layer-wise-param-layout"]


@pytest.mark.parametrize("dealing", [[], BY_SIZE], ids=["by-layout", "ping-pong"])
def test_muon_that_is_dealt_to_ranks_goes_on(scripts: Scripts, dealing: list[str]) -> None:
    """Killed, and resumed with the drop-in; and by Megatron alone, which loads what it cannot write where it deals by layout."""
    if versions.MEGATRON < (0, 19):
        pytest.skip("other names of the options")
    pytest.importorskip("emerging_optimizers")
    args, root = [*MUON, *dealing], scripts.folder / f"muon_{len(dealing)}"
    whole = scripts.run("pretrain_gpt.py", args)
    killed = scripts.run("pretrain_gpt.py", [*args, "--save", str(root)], install={}, kill=KILLED_BEHIND)
    assert killed == [{step: of_rank[step] for step in map(str, range(1, KILLED_BEHIND + 1))} for of_rank in whole]
    actor = root / "global_step_4" / "actor"
    alone = scripts.run("pretrain_gpt.py", [*MUON, *BY_SIZE, "--load", str(actor)])
    goes_on(whole, alone, 5)
    resumed = scripts.run("pretrain_gpt.py", [*args, "--save", str(root), "--load", str(root)], install={})
    goes_on(whole, resumed, 5)


ROLLOUTS = (
    "--perform-rl-step --grpo-prompts-per-step 2 --grpo-group-size 2 --grpo-iterations 1 --null-tokenizer-pad-id 0 "
    "--calculate-per-token-loss --no-create-attention-mask-in-dataloader --inference-max-seq-length 32 --train-iters 4"
)
ENVIRONMENT = "- agent_type: EvenTokens\n  agent_args: {}\n  weight: 1.0\n"


def test_train_rl_goes_on(scripts: Scripts) -> None:
    """``train_rl.py`` samples its rollouts with the model that it trains: losses are equal only if weights are, and all random states."""
    if scripts.checkout is None or versions.MEGATRON < (0, 19):
        pytest.skip("needs --megatron-lm with a checkout of Megatron-LM 0.19, for train_rl.py and megatron.rl")
    pytest.importorskip("pydantic")
    environment, save = scripts.folder / "environment.yaml", str(scripts.folder / "rl")
    environment.write_text(ENVIRONMENT)
    args = [*PRETRAIN[:-3], *ROLLOUTS.split(), "--langrl-env-config", str(environment)]
    whole = scripts.run("train_rl.py", args, rollouts=True)
    assert all(sorted(map(int, seen)) == [1, 2, 3, 4] for seen in whole)
    assert len({seen[0] for seen in whole[0].values()}) == 4
    killed = scripts.run("train_rl.py", [*args, "--save", save], rollouts=True, install={}, kill=3)
    assert killed == [{step: seen[step] for step in ("1", "2", "3")} for seen in whole]
    resumed = scripts.run("train_rl.py", [*args, "--save", save, "--load", save], rollouts=True, install={})
    goes_on(whole, resumed, 3)
    assert [step.step for step in steps.committed(Path(save))] == [2, 4]


def test_megatrons_own_folder_goes_on_with_the_drop_in(scripts: Scripts, whole: Seen) -> None:
    load = ["--load", str(scripts.folder / "theirs"), "--ckpt-step", "2", "--save", str(scripts.folder / "new")]
    goes_on(whole, scripts.run("pretrain_gpt.py", [*PRETRAIN, *load], install={}), 3)
