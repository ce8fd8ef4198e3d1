"""``will-resume`` says what the real loaders do: each runs on folders from which one thing was taken, and what it restored is compared.

What a loader restored is read off the live objects after it: weights, moments, the scheduler's place, the step, the random states, the
first batch that is trained on. Nothing here asks the rows what they expect.
"""

from __future__ import annotations

import json
import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from mcore_rlhf.manager.will_resume import Forecast, forecast, loader_named
from mcore_rlhf.trainers.resuming import Outcome, Settings, Thing
from mcore_rlhf.trainers.settings_file import read_settings
from tests.helpers.one_key import copies_without
from tests.reference.forked_ranks import ForkedRanks
from tests.trainers import hf_runs
from tests.trainers.hf_runs import HALF, STEPS, model, on_cpu, train

GOLDENS = Path(__file__).parents[1] / "goldens" / "transformers"
Restored = dict[Thing, bool]
"""Of each thing that was looked at whether the run went on with it."""


Change = Callable[[Path], object]


def gone(*names: str) -> Change:
    return lambda folder: [(folder / name).unlink() for name in names]


def zeroed(name: str) -> Change:
    return lambda folder: (folder / name).write_bytes(bytes((folder / name).stat().st_size))


def cut(name: str) -> Change:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-100])


def emptied(name: str) -> Change:
    return lambda folder: (folder / name).write_bytes(b"")


def without(name: str, *path: str | int) -> Change:
    """Take one key out of what a file holds."""

    def change(folder: Path) -> None:
        is_json = name.endswith(".json")
        tree = json.loads((folder / name).read_text()) if is_json else torch.load(folder / name, weights_only=False)
        inner = tree
        for key in path[:-1]:
            inner = inner[key]
        del inner[path[-1]]
        if is_json:
            (folder / name).write_text(json.dumps(tree))
        else:
            torch.save(tree, folder / name)

    return change


def of_no_parameter(name: str) -> Change:
    def change(folder: Path) -> None:
        torch.save({**torch.load(folder / name, weights_only=False), "state": {}}, folder / name)

    return change


def of_no_group(name: str) -> Change:
    def change(folder: Path) -> None:
        torch.save({**torch.load(folder / name, weights_only=False), "param_groups": []}, folder / name)

    return change


def agree(found: Forecast, seen: Restored | None) -> None:
    """What is said and what was seen: None where the loader stopped with an error."""
    (prospects,) = found.roles.values()
    told = {one.thing: one.row.outcome for one in prospects}
    assert found.stops == (seen is None), told
    for thing, restored in (seen or {}).items():
        assert (told[thing] is Outcome.RESTORED) == restored, (thing, told[thing])
    if seen is not None:
        assert found.resumes == all(seen.values())


def drawn_otherwise() -> None:
    random.seed(77)
    np.random.seed(77)
    torch.manual_seed(77)


def has_random_states(python: Any, numpy: Any, cpu: torch.Tensor) -> bool:
    same = random.getstate() == python and torch.equal(torch.get_rng_state(), cpu)
    return same and np.array_equal(np.random.get_state()[1], numpy[1])


class Watched(transformers.Trainer):
    """A Trainer that keeps what it had when it began to train."""

    def __init__(self, saved: Path, **given: Any) -> None:
        super().__init__(**given)
        self.saved, self.seen = saved, Restored()

    def _load_rng_state(self, checkpoint: str | None) -> None:
        drawn_otherwise()
        super()._load_rng_state(checkpoint)
        wanted = torch.load(self.saved / "rng_state.pth", weights_only=False)
        self.seen[Thing.RNG] = has_random_states(wanted["python"], wanted["numpy"], wanted["cpu"])

    def training_step(self, model: Any, inputs: Any, *rest: Any, **more: Any) -> Any:
        if Thing.WEIGHTS not in self.seen:
            self._look(model, inputs["input_ids"])
        return super().training_step(model, inputs, *rest, **more)

    def _look(self, trained: Any, words: torch.Tensor) -> None:
        weights = load_file(self.saved / "model.safetensors")
        params = dict(trained.named_parameters())
        moments = torch.load(self.saved / "optimizer.pt", weights_only=True)["state"]
        assert self.optimizer is not None
        assert self.lr_scheduler is not None
        live = self.optimizer.state_dict()["state"]
        self.seen |= {
            Thing.WEIGHTS: all(torch.equal(params[name], weights[name]) for name in params),
            Thing.OPTIMIZER: len(live) == len(moments)
            and all(torch.equal(live[at]["exp_avg"], one["exp_avg"]) for at, one in moments.items()),
            Thing.SCHEDULER: self.lr_scheduler.state_dict()["last_epoch"] == HALF,
            Thing.COUNTERS: self._counts_on(),
            Thing.DATA: words.tolist() == third_batch(),
        }

    def _counts_on(self) -> bool:
        """Whether what Trainer counts, logs and compares is what was saved."""
        wanted = json.loads((self.saved / "trainer_state.json").read_text())
        return all(getattr(self.state, name) == wanted[name] for name in _COUNTED)


_COUNTED = (
    "global_step", "epoch", "log_history", "best_metric", "best_global_step", "best_model_checkpoint", "total_flos",
    "num_input_tokens_seen", "stateful_callbacks", "logging_steps", "eval_steps", "save_steps",
)  # fmt: skip
_FIRST: list[list[list[int]]] = []


def third_batch() -> list[list[int]]:
    """What a run that was not interrupted trains on third."""
    if not _FIRST:
        before = hf_runs._batch
        seen: list[list[list[int]]] = []

        def watch(rows: Any) -> Any:
            seen.append(before(rows)["input_ids"].tolist())
            return before(rows)

        with tempfile.TemporaryDirectory() as out:
            _trainer(GOLDENS / "checkpoint-2", Path(out), watch, save_strategy="no", cls=transformers.Trainer).train()
        _FIRST.append(seen[HALF])
    return _FIRST[0]


def _trainer(saved: Path, out: Path, batch: Any = hf_runs._batch, cls: Any = Watched, **arguments: Any) -> Any:
    wanted = transformers.TrainingArguments(
        **{
            "output_dir": str(out), "use_cpu": True, "per_device_train_batch_size": 2, "max_steps": STEPS, "learning_rate": 1e-2,
            "weight_decay": 0.01, "lr_scheduler_type": "cosine", "warmup_steps": 1, "report_to": [], "seed": 3, "data_seed": 3,
            "disable_tqdm": True, "dataloader_pin_memory": False, "save_strategy": "no", **arguments,
        }
    )  # fmt: skip
    more = {} if cls is transformers.Trainer else {"saved": saved}
    return cls(
        model=model(9, tie_word_embeddings=True),
        args=wanted,
        train_dataset=hf_runs._data(),
        data_collator=batch,
        **more,
    )


TRAINER_CASES: dict[str, tuple[Change, dict[str, Any]]] = {
    "whole": (lambda folder: None, {}),
    "no optimizer.pt": (gone("optimizer.pt"), {}),
    "no scheduler.pt": (gone("scheduler.pt"), {}),
    "neither": (gone("optimizer.pt", "scheduler.pt"), {}),
    "no random states": (gone("rng_state.pth"), {}),
    "no counters": (gone("trainer_state.json"), {}),
    "no weights": (gone("model.safetensors"), {}),
    "optimizer.pt of zeros": (zeroed("optimizer.pt"), {}),
    "optimizer.pt of zeros and no scheduler.pt": (lambda f: (zeroed("optimizer.pt")(f), gone("scheduler.pt")(f)), {}),
    "scheduler.pt cut": (cut("scheduler.pt"), {}),
    "random states empty": (emptied("rng_state.pth"), {}),
    "weights of zeros": (zeroed("model.safetensors"), {}),
    "counters cut": (cut("trainer_state.json"), {}),
    "data begin again": (lambda folder: None, {"ignore_data_skip": True}),
    **{
        f"{file} without {'/'.join(map(str, path))}": (without(file, *path), {})
        for file, path in [
            ("optimizer.pt", ("state",)), ("optimizer.pt", ("param_groups",)), ("optimizer.pt", ("state", 0)),
            ("optimizer.pt", ("state", 1, "exp_avg")), ("scheduler.pt", ("last_epoch",)), ("rng_state.pth", ("python",)),
            ("rng_state.pth", ("numpy",)), ("rng_state.pth", ("cpu",)), ("trainer_state.json", ("global_step",)),
            ("optimizer.pt", ("param_groups", 0, "betas")), ("optimizer.pt", ("param_groups", 1, "lr")),
            ("optimizer.pt", ("param_groups", 0)), ("optimizer.pt", ("param_groups", 1, "params", 0)),
            ("optimizer.pt", ("state", 0, "step")), ("scheduler.pt", ("lr_lambdas",)), ("scheduler.pt", ("_step_count",)),
            ("scheduler.pt", ("base_lrs",)), ("scheduler.pt", ("base_lrs", 0)), ("scheduler.pt", ("lr_lambdas", 0)),
            ("trainer_state.json", ("train_batch_size",)), ("trainer_state.json", ("max_steps",)),
        ]
    },
    "optimizer.pt of no parameter": (of_no_parameter("optimizer.pt"), {}),
    "optimizer.pt of no group": (of_no_group("optimizer.pt"), {}),
    "random states of two ranks": (lambda f: (f / "rng_state.pth").rename(f / "rng_state_0.pth"), {}),
}  # fmt: skip


def _trained(folder: Path, out: Path, saved: Path = GOLDENS / "checkpoint-2", **arguments: Any) -> Restored | None:
    with on_cpu():
        torch.manual_seed(1)
        third_batch()
        trainer = _trainer(saved, out, **arguments)
        try:
            trainer.train(resume_from_checkpoint=str(folder))
        except Exception:
            return None
        seen: Restored = trainer.seen
        return seen


@pytest.mark.parametrize("name", TRAINER_CASES)
def test_trainer(name: str, tmp_path: Path) -> None:
    change, arguments = TRAINER_CASES[name]
    folder, config = tmp_path / "checkpoint-2", tmp_path / "args.json"
    shutil.copytree(GOLDENS / "checkpoint-2", folder)
    change(folder)
    config.write_text(json.dumps(arguments))
    seen = _trained(folder, tmp_path / "out", **arguments)
    found = forecast(folder, loader_named("trl")[0], read_settings(config), world=1)
    agree(found, seen)
    if name == "whole":
        assert found.resumes
        assert seen is not None
        assert len(seen) == 6


def _counting(step: Path) -> Path:
    """A step of a run whose accelerator had counted."""
    states = torch.load(step / "random_states_0.pkl", weights_only=False)
    torch.save({**states, "step": 5}, step / "random_states_0.pkl")
    return step


def _accelerated(folder: Path, saved: Path) -> Restored | None:
    from accelerate import Accelerator

    weights, moments = load_file(saved / "model.safetensors"), torch.load(saved / "optimizer.bin", weights_only=False)
    states = torch.load(saved / "random_states_0.pkl", weights_only=False)
    with on_cpu():
        accelerator, trained = Accelerator(cpu=True), model(9, tie_word_embeddings=False)
        optimizer = torch.optim.AdamW(hf_runs._groups(trained), lr=1e-2, betas=(0.9, 0.95))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        trained, optimizer, schedule = accelerator.prepare(trained, optimizer, schedule)
        drawn_otherwise()
        try:
            accelerator.load_state(str(folder))
        except Exception:
            return None
        live, params = optimizer.state_dict()["state"], dict(trained.named_parameters())
        seen = {
            Thing.WEIGHTS: all(torch.equal(params[name], weights[name]) for name in params),
            Thing.OPTIMIZER: len(live) == len(moments["state"])
            and all(
                "exp_avg" in live[at] and torch.equal(live[at]["exp_avg"], one["exp_avg"])
                for at, one in moments["state"].items()
            ),
            Thing.SCHEDULER: schedule.state_dict()["last_epoch"] == HALF,
            Thing.COUNTERS: accelerator.step == states["step"],
            Thing.RNG: has_random_states(
                states["random_state"], states["numpy_random_seed"], states["torch_manual_seed"]
            ),
        }
        try:
            for parameter in trained.parameters():
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            schedule.step()
        except Exception:
            return None
        return seen


ACCELERATE_CASES: dict[str, Change] = {
    "whole": lambda folder: None,
    **{f"no {name}": gone(name) for name in ("model.safetensors", "optimizer.bin", "scheduler.bin", "random_states_0.pkl")},
    **{f"{name} of zeros": zeroed(name) for name in ("model.safetensors", "optimizer.bin", "scheduler.bin", "random_states_0.pkl")},
    "optimizer.bin cut": cut("optimizer.bin"),
    **{
        f"{name} without {key}": without(name, key)
        for name, keys in {
            "scheduler.bin": ("last_epoch", "lr_lambdas", "_step_count", "base_lrs"),
            "random_states_0.pkl": ("random_state", "numpy_random_seed", "torch_manual_seed"),
        }.items()
        for key in keys
    },
    "optimizer.bin without state": without("optimizer.bin", "state"),
    "optimizer.bin without param groups": without("optimizer.bin", "param_groups"),
    "optimizer.bin without a group": without("optimizer.bin", "param_groups", 0),
    "optimizer.bin without the members of a group": without("optimizer.bin", "param_groups", 0, "params"),
    "optimizer.bin of no parameter": of_no_parameter("optimizer.bin"),
    "optimizer.bin of no group": of_no_group("optimizer.bin"),
    "scheduler.bin with the rate of one group": without("scheduler.bin", "base_lrs", 0),
    "scheduler.bin with a function less": without("scheduler.bin", "lr_lambdas", 0),
    "weights in several files": lambda f: (f / "model.safetensors").rename(f / "model-00001-of-00001.safetensors"),
}  # fmt: skip


@pytest.mark.parametrize("name", ACCELERATE_CASES)
def test_accelerate(name: str, tmp_path: Path) -> None:
    saved = _counting(Path(shutil.copytree(GOLDENS / "step_2", tmp_path / "saved" / "step_2")))
    folder = Path(shutil.copytree(saved, tmp_path / "step_2"))
    ACCELERATE_CASES[name](folder)
    seen = _accelerated(folder, saved)
    agree(forecast(folder, loader_named("accelerate")[0], Settings()), seen)
    if name == "whole":
        assert seen == dict.fromkeys((Thing.WEIGHTS, Thing.OPTIMIZER, Thing.SCHEDULER, Thing.COUNTERS, Thing.RNG), True)


_OF_SOME = ("decoupled_weight_decay", "_is_initial")
"""What not every release of torch has: whether a run asks for it no file says."""


def _measured(step: Path) -> Path:
    """A step of a run that had a best one, counted words, and had callbacks that remember."""
    file = step / "trainer_state.json"
    state = json.loads(file.read_text())
    state |= {
        "best_metric": 0.5,
        "best_global_step": 1,
        "best_model_checkpoint": str(step),
        "num_input_tokens_seen": 7,
        "eval_steps": 3,
    }
    file.write_text(json.dumps(state))
    return step


def test_an_optimizer_that_nothing_else_can_have_goes_on(tmp_path: Path) -> None:
    """Nobody here can convert it, which is said; Trainer goes on with it, and nothing says that this is in doubt."""
    straight = train(model(1, tie_word_embeddings=True), tmp_path / "run", optim="adafactor")
    step = tmp_path / "run" / f"checkpoint-{HALF}"
    found = forecast(step, loader_named("transformers")[0], Settings())
    assert found.resumes
    assert any("cannot be opened with its optimizer" in note for note in found.notes)
    assert train(model(9, tie_word_embeddings=True), tmp_path / "on", step, optim="adafactor") == straight[HALF:]


@pytest.mark.slow
@pytest.mark.parametrize(("step", "name"), [("checkpoint-2", "trl"), ("step_2", "accelerate")])
def test_each_file_and_each_key_of_each_taken(step: str, name: str, tmp_path: Path) -> None:
    saved = Path(shutil.copytree(GOLDENS / step, tmp_path / "saved" / step))
    wrong, unsaid, count = [], list[str](), 0
    (_measured if name == "trl" else _counting)(saved)
    for count, (folder, what) in enumerate(copies_without(saved, tmp_path), 1):  # noqa: B007
        seen = _trained(folder, tmp_path / "out", saved) if name == "trl" else _accelerated(folder, saved)
        found = forecast(folder, loader_named(name)[0], Settings(), world=1)
        try:
            agree(found, seen)
        except AssertionError as error:
            if found.doubtful:
                unsaid.append(what)
            elif not what.endswith(_OF_SOME):
                wrong.append((what, seen, str(error).partition("\n")[0]))
        shutil.rmtree(folder)
    print(f"{len(unsaid)} of {count} cannot be opened: {unsaid}")
    assert not wrong, "\n".join(map(str, wrong))
    assert count > 50


@pytest.mark.parametrize(
    "kind",
    ["SHARDED_STATE_DICT", "FULL_STATE_DICT", "ZERO-2", pytest.param("ZERO-3", marks=pytest.mark.slow)],
)
def test_accelerate_with_fsdp_or_deepspeed_each_file_and_each_key_taken(
    kind: str, forked_ranks: ForkedRanks, tmp_path: Path
) -> None:
    printed = forked_ranks.run(1, "tests.reference.accelerate_less", kind, str(tmp_path), store=False)
    found = json.loads(next((line for line in printed.splitlines() if line.startswith("{")), "{}"))
    assert (found.get("whole"), found.get("wrong")) == (True, [])
    assert found["count"] > 40


@pytest.mark.parametrize(
    ("version", "kind", "what"),
    [
        ("2", "FULL_STATE_DICT", "frozen"),
        ("2", "FULL_STATE_DICT", "tied"),
        ("2", "SHARDED_STATE_DICT", "frozen"),
        ("1", "FULL_STATE_DICT", "frozen"),
        ("1", "SHARDED_STATE_DICT", "tied"),
    ],
)
def test_accelerate_with_fsdp_goes_on_from_what_we_write(
    version: str, kind: str, what: str, forked_ranks: ForkedRanks, tmp_path: Path
) -> None:
    """Whole tensors in one file were "not a checkpoint", frozen layers "Missing optimizer state"; the first FSDP loads no shards."""
    printed = forked_ranks.run(1, "tests.reference.accelerate_whole", version, kind, what, str(tmp_path), store=False)
    found = json.loads(next((line for line in printed.splitlines() if line.startswith("{")), "{}"))
    assert found["intact"]
    same = [found[by] == found["whole"] for by in ("own", "hf-accelerate", "dcp", "deepspeed")]
    restored = (version, kind) != ("1", "SHARDED_STATE_DICT")
    assert same == [restored] * 4, found
    assert (found["said"] == Outcome.RESTORED.value) == restored, found["doubt"]
    assert all(found[by][0] == found["whole"][0] for by in ("own", "hf-accelerate", "dcp", "deepspeed"))


@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_trainer_with_fsdp_goes_on_with_an_adapter(kind: str, forked_ranks: ForkedRanks, tmp_path: Path) -> None:
    """Its shards have peft's names, and the optimizer the model's: "the optimizer trains …, but the model does not have it"."""
    printed = forked_ranks.run(1, "tests.reference.trainer_fsdp", kind, str(tmp_path), store=False)
    found = json.loads(next((line for line in printed.splitlines() if line.startswith('{"whole')), "{}"))
    assert found["intact"]
    assert found["resumes"]
    assert [found[by] == found["whole"] for by in ("own", "hf-trainer", "dcp", "deepspeed")] == [True] * 4, found


def test_accelerate_on_another_backend_than_the_steps(forked_ranks: ForkedRanks, tmp_path: Path) -> None:
    """Alone, with FSDP, with DeepSpeed: each loads its own, and stops at what the others saved; as is said of each."""
    kinds = ("NO", "SHARDED_STATE_DICT", "ZERO-2")
    for kind in (*kinds, *kinds[:2]):
        printed = forked_ranks.run(1, "tests.reference.accelerate_less", kind, str(tmp_path), "others", store=False)
        found = json.loads(next(line for line in printed.splitlines() if line.startswith("{")))
        assert found == {other: [other != kind, other != kind] for other in found}, kind
    assert {*found} == {*kinds}
