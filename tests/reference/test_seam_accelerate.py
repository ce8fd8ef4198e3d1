"""accelerate's own ``save_state`` with our commit: what was registered goes along, and a loop goes on as it would have."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from mcore_rlhf.cli.app import app
from mcore_rlhf.convert import convert
from mcore_rlhf.errors import Corrupt, Incomplete, StorageError, Unsupported
from mcore_rlhf.families.options import ConvertOptions, ReadOptions, WriteOptions
from mcore_rlhf.integrations.accelerate_state import CommittedState, StepOptions, TagOptions, attach
from mcore_rlhf.manager.convert_step import convert_step
from mcore_rlhf.manager.run.retention import KeepBest, KeepLast, Retention
from mcore_rlhf.manager.runs import listed_steps
from mcore_rlhf.manager.subject import find
from tests.reference.forked_ranks import ForkedRanks
from tests.trainers import hf_runs

LAST = 5


class Counter:
    """Something of the user's own."""

    def __init__(self) -> None:
        self.seen = 0

    def state_dict(self) -> dict[str, int]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


def loop(root: Path, seed: int, options: StepOptions | None = None, stop: int = LAST, hook: Any = None) -> hf_runs.Seen:
    """A loop of one's own: a step's number, loss, a random number, and what was counted."""
    from accelerate import Accelerator

    seen: hf_runs.Seen = []
    with hf_runs.on_cpu():
        accelerator = Accelerator(cpu=True)
        model, counter = hf_runs.model(seed, tie_word_embeddings=False), Counter()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
        accelerator.register_for_checkpointing(counter)
        if hook is not None:
            accelerator.register_save_state_pre_hook(hook)
        saved = CommittedState(accelerator, root, options)
        try:
            for step in range(saved.load() + 1, stop + 1):
                loss = model(**hf_runs._batch(hf_runs._data()[2 * step : 2 * step + 2])).loss
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                counter.seen += 2
                seen.append((step, loss.item(), torch.rand(()).item(), counter.seen))
                saved.save(step, {"loss": loss.item()})
        finally:
            saved.close()
    return seen


def test_it_goes_on_as_it_would_have(tmp_path: Path) -> None:
    whole = loop(tmp_path / "whole", 1)
    assert loop(tmp_path / "run", 1, stop=3) == whole[:3]
    assert loop(tmp_path / "run", 9) == whole[3:]
    file = tmp_path / "run" / "checkpoint_5" / "custom_checkpoint_0.pkl"
    file.write_bytes(file.read_bytes()[:-1])
    assert loop(tmp_path / "run", 9) == whole[4:]
    assert [(step.step, step.state) for step in listed_steps(tmp_path / "run")] == [
        (n, "committed") for n in range(1, 6)
    ]


def test_what_is_kept(tmp_path: Path) -> None:
    whole = loop(tmp_path, 1, StepOptions(keep=Retention([KeepLast(1), KeepBest("loss", "max")])))
    best = max(whole, key=lambda step: step[1])[0]
    assert [step.step for step in listed_steps(tmp_path)] == sorted({best, LAST})


def test_a_hook_that_raises(tmp_path: Path) -> None:
    def hook(models: Any, weights: Any, folder: str) -> None:
        Path(folder, "half").write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(StorageError, match="No space left"):
        loop(tmp_path / "a", 1, hook=hook)
    with pytest.raises(
        Incomplete, match=rf"step {LAST} was not saved, nor any after it.*No space left"
    ):  # it came to its end
        loop(tmp_path / "b", 1, StepOptions(on_error="continue"), hook=hook)
    for run in ("a", "b"):
        assert sorted(path.name for path in (tmp_path / run).iterdir()) == [
            ".mcore_rlhf.lock", "events.jsonl", "failed_save.json",
        ]  # fmt: skip


def test_folders_that_accelerate_chooses(tmp_path: Path) -> None:
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    with hf_runs.on_cpu():
        chosen = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True)
        with pytest.raises(Unsupported, match="automatic_checkpoint_naming"):
            CommittedState(Accelerator(cpu=True, project_config=chosen), tmp_path)
        with pytest.raises(Unsupported, match="automatic_checkpoint_naming"):
            attach(Accelerator(cpu=True, project_config=chosen))


def test_a_script_that_stays_as_it_is(tmp_path: Path) -> None:
    """Folders are the script's own; what was killed between two renames is put back before accelerate looks for it."""
    from accelerate import Accelerator

    with hf_runs.on_cpu():
        accelerator, counter = Accelerator(cpu=True), Counter()
        kind = type(accelerator)
        accelerator.prepare(torch.nn.Linear(3, 2))
        accelerator.register_for_checkpointing(counter)
        attach(accelerator, TagOptions(check="sizes"))
        attach(accelerator)
        assert accelerator._mcore_rlhf_tags.options.check == "sizes"
        attach(accelerator, TagOptions(fsync=False))
        assert accelerator._mcore_rlhf_tags.options == TagOptions(fsync=False)
        assert type(accelerator).__mro__[2] is kind
        for counter.seen in (1, 2):
            for name in ("epoch_1", "last"):
                assert accelerator.save_state(tmp_path / name) == tmp_path / name
        assert {path.name for path in tmp_path.iterdir()} == {"epoch_1", "last"}
        done = CliRunner().invoke(app, ["verify", str(tmp_path / "last")])
        assert done.exit_code == 0, done.output
        assert "the CRC-32 of every file in the manifest" in done.output
        counter.seen = 9
        os.rename(tmp_path / "last", tmp_path / ".last.old-1700000000000-0123abcd")
        accelerator.load_state(tmp_path / "last")
        assert counter.seen == 2
        counter.seen = 9
        with (tmp_path / "last" / "custom_checkpoint_0.pkl").open("r+b") as file:
            file.write(b"?")
        with pytest.raises(Corrupt, match=r"custom_checkpoint_0.pkl: is damaged(.|\n)*as a whole: epoch_1"):
            accelerator.load_state(str(tmp_path / "last"))
        assert counter.seen == 9
        with pytest.raises(ValueError, match="does not exist"):  # accelerate's own
            accelerator.load_state(tmp_path / "nowhere")


@pytest.mark.parametrize("how", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp2"])
def test_two_ranks(forked_ranks: ForkedRanks, tmp_path: Path, how: str) -> None:
    forked_ranks.run(2, "tests.reference.accelerate_ranks", how, str(tmp_path))
    for rank in (0, 1):
        seen = json.loads((tmp_path / f"seen-{rank}.json").read_text())
        assert seen["resumed"] == seen["whole"]
        assert seen["failed"].startswith("StorageError: writing")
        assert "Input/output error" in seen["failed"]
        assert rank == 1 or "failed on rank 1" in seen["failed"]
        assert seen["there"] == ["a", "b"]
        assert seen["again"] == seen["whole"]
    wrote = {path.name for path in (tmp_path / "runs" / "a").iterdir()}
    assert ("model.safetensors" in wrote, "pytorch_model_fsdp_0" in wrote) == (how == "ddp", how == "fsdp2")


def test_two_ranks_with_deepspeed_go_on_from_what_we_write(forked_ranks: ForkedRanks, tmp_path: Path) -> None:
    """Random states, schedule and what was registered lie beside the tag; ``load_state`` takes each of them."""
    written, back = tmp_path / "written", tmp_path / "back"
    forked_ranks.run(2, "tests.reference.accelerate_zero", "save", str(tmp_path))
    write = WriteOptions(zero_stage=2)
    assert convert(
        tmp_path / "step_3", back / "step_3", ConvertOptions(to="deepspeed", fsync=False, write=write)
    ).lossless
    again = convert(back / "step_3", written / "step_3", ConvertOptions(to="deepspeed", fsync=False, write=write))
    assert again.lossless, again.account.lost
    forked_ranks.run(2, "tests.reference.accelerate_zero", "load", str(written))
    for rank in (0, 1):
        whole = json.loads((tmp_path / f"save-{rank}.json").read_text())
        assert json.loads((written / f"load-{rank}.json").read_text()) == whole[3:]
        assert len({tuple(step[3:6]) for step in whole}) == LAST


def test_two_ranks_go_on_with_two_models_that_we_wrote(forked_ranks: ForkedRanks, tmp_path: Path) -> None:
    """Each rank finds its random states, and the schedules have counted once for every rank, as accelerate's do."""
    saved, job = tmp_path / "step_2", "tests.reference.accelerate_several"
    whole = json.loads(forked_ranks.run(2, job, "save", str(saved)))
    source = saved
    for to, like in (("dcp", None), ("accelerate", str(saved))):
        options = ConvertOptions(to=to, fsync=False, workers=1, write=WriteOptions(like=like))
        source = convert_step(find(source, ReadOptions()), tmp_path / to, options).published
    written = tmp_path / "accelerate" / "checkpoint_2"
    assert {*(path.name for path in saved.iterdir())} < {*(path.name for path in written.iterdir())}
    assert json.loads(forked_ranks.run(2, job, "resume", str(written))) == whole[2:]
