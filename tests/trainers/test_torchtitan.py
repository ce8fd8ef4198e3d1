"""torchtitan goes on, with equal losses, from what was in another format; its own names are Hugging Face's, read both ways.

What needs torchtitan runs where it is installed (with torchdata and tyro): 0.2.2 is in the registry. All else stands on its golden.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rlhf.convert import ConvertOptions, Job, convert
from mcore_rlhf.core.facts import Fate
from mcore_rlhf.demo.workers import WorkerPool
from mcore_rlhf.errors import CheckpointError, LayoutMismatch, Unsupported, UsageError
from mcore_rlhf.families.options import ReadOptions, WriteOptions
from mcore_rlhf.formats.registry import open_checkpoint
from tests.helpers.catalog_values import tensor_of
from tests.trainers import titan_jobs as jobs
from tests.trainers.titan_jobs import CONFIG, SAVED, WORDS, Seen

GOLDEN = Path(__file__).parents[1] / "goldens" / "torchtitan"
STEP = GOLDEN / "checkpoint" / "step-3"
_MISSING = [name for name in ("torchtitan", "torchdata", "tyro") if importlib.util.find_spec(name) is None]
needs_torchtitan = pytest.mark.skipif(bool(_MISSING), reason=f"not installed: {', '.join(_MISSING)}")
BY: dict[str, dict[str, Any]] = {
    "hf": {"with_optimizer": True},
    "megatron": {"tp": 2},
    "megatron-dist": {"pp": 2},
    "deepspeed": {"zero_stage": 2},
    "universal": {},
    "dcp": {"dp": 3},
}


@pytest.fixture(scope="module")
def titan() -> Iterator[WorkerPool]:
    with WorkerPool(2, preload="tests.trainers.titan_jobs") as pool:
        yield pool


@pytest.fixture
def config(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path / "config.json")


def to(source: Path, target: Path, name: str, **write: Any) -> Job:
    return convert(source, target, ConvertOptions(to=name, fsync=False, workers=1, write=WriteOptions(**write)))


def golden_goes_on() -> Seen:
    """What the run saw that wrote the golden, from there on."""
    return [tuple(step) for step in json.loads((GOLDEN / "seen.json").read_text())[SAVED:]]  # type: ignore[misc]


def changed(job: Job) -> list[str]:
    return [text for fate, text in job.report.lines if fate is Fate.CHANGED]


def assert_huggingface(folder: Path) -> None:
    """Every value where torchtitan's own adapter has it."""
    expected, source = torch.load(GOLDEN / "expected.pt", weights_only=True), open_checkpoint(folder, ReadOptions())
    assert {spec.name for spec in source.model.params} == set(expected["master"])
    for state, tensors in expected.items():
        assert all(torch.equal(tensor_of(source, name, state), tensors[name]) for name in tensors), state


@pytest.mark.parametrize("by", ["hf", "megatron", "deepspeed"])
def test_own_names_become_hugging_faces_in_every_state(tmp_path: Path, config: str, by: str) -> None:
    to(STEP, tmp_path / "there", by, reference_config=config, **BY[by])
    if by != "hf":
        to(tmp_path / "there", tmp_path / "hf", "hf", with_optimizer=True, vocab_size=WORDS)
    assert_huggingface(tmp_path / ("there" if by == "hf" else "hf"))


def test_transformers_computes_the_next_loss(tmp_path: Path, config: str) -> None:
    """Rows of queries and keys that lay wrong would show here: the trainer rounds otherwise, and no more."""
    from transformers import LlamaForCausalLM

    to(STEP, tmp_path / "hf", "hf", reference_config=config)
    model = LlamaForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    losses = []
    for rank in range(2):
        words = torch.randint(0, WORDS, (2, 12), generator=torch.Generator().manual_seed(1000 * (SAVED + 1) + rank))
        losses.append(float(model(input_ids=words, labels=words).loss.detach()))
    assert sum(losses) == pytest.approx(golden_goes_on()[0][0], abs=5e-6)


@needs_torchtitan
def test_the_golden_goes_on_as_it_did(titan: WorkerPool, tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "checkpoint", tmp_path / "checkpoint")
    assert titan.run(jobs.resume, str(tmp_path), world_size=2)[0] == golden_goes_on()


@needs_torchtitan
@pytest.mark.parametrize("by", BY)
def test_torchtitan_goes_on_from_what_came_back(titan: WorkerPool, tmp_path: Path, config: str, by: str) -> None:
    own = {} if by == "dcp" else {"reference_config": config}
    to(STEP, tmp_path / "there", by, **own, **BY[by])
    back = to(tmp_path / "there", tmp_path / "checkpoint" / "step-3", "dcp", like=str(STEP), dp=2, **own)
    assert not [text for text in back.report.lost if not text.startswith("RNG")]
    assert titan.run(jobs.resume, str(tmp_path), world_size=2)[0] == golden_goes_on()
    if by.startswith("megatron"):
        assert "weight_decay of 5 parameters: 0.0 → 0.1, as the run has it" in changed(back)


@needs_torchtitan
@pytest.mark.parametrize("by", ["megatron", "deepspeed"])
def test_without_what_waited_the_run_says_what_is_not_known(
    titan: WorkerPool, tmp_path: Path, config: str, by: str
) -> None:
    """As from a run that was never torchtitan's: counters and data are the other checkpoint's, and named."""
    to(STEP, tmp_path / "there", by, reference_config=config, **BY[by])
    for path in (tmp_path / "there").rglob("mcore_rlhf*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    back = to(
        tmp_path / "there", tmp_path / "checkpoint" / "step-3", "dcp", like=str(STEP), dp=2, reference_config=config
    )
    said = [text for fate, text in back.report.lines if fate is Fate.DERIVED]
    if by == "megatron":
        assert any(text.startswith("train_state: step 3; ntokens_seen as in") for text in said)
        assert any(text.startswith("dataloader: as in") for text in said)
        assert any(text.startswith("lr_scheduler: the run's, at last_epoch 3") for text in said)
    assert titan.run(jobs.resume, str(tmp_path), world_size=2)[0] == golden_goes_on()


def test_a_run_that_was_megatrons_finds_its_names_again(tmp_path: Path, config: str) -> None:
    """Without --like: what waited says how the run had its keys and names."""
    to(STEP, tmp_path / "there", "megatron", reference_config=config)
    to(tmp_path / "there", tmp_path / "back", "dcp")
    before, after = (open_checkpoint(path, ReadOptions()) for path in (STEP, tmp_path / "back"))
    assert after.model.shapes == before.model.shapes
    for name in before.catalog:
        assert torch.equal(tensor_of(after, name.param, name.state), tensor_of(before, name.param, name.state))
    assert {"dataloader", "train_state"} <= after.state.other.keys()


def _like(folder: Path, how: str) -> Path:
    if how == "nothing":
        return folder / "nothing"
    if how == "hf":
        to(STEP, folder / "like", "hf")
    else:
        to(GOLDEN.parent / "dcp" / "fsdp2_ws2" / "actor", folder / "like", "dcp")
    return folder / "like"


@pytest.mark.parametrize(
    ("how", "error", "match"),
    [
        ("nothing", CheckpointError, "no such file"),
        ("hf", UsageError, "is of the format hf"),
        ("another", Unsupported, "Give a checkpoint of the same model"),
    ],
)
def test_what_no_run_can_be_like(
    tmp_path: Path, config: str, how: str, error: type[CheckpointError], match: str
) -> None:
    with pytest.raises(error, match=match):
        to(STEP, tmp_path / "out", "dcp", like=str(_like(tmp_path, how)), reference_config=config)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"num_attention_heads": 4}, LayoutMismatch, "expected 4 heads of 8 rows"),
        ({"num_key_value_heads": 2}, LayoutMismatch, r"attention\.wk\.weight: is \[8, 16\], expected 2 heads"),
        ({"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}, Unsupported, "known of llama and qwen3"),
    ],
)
def test_a_config_of_another_model(
    tmp_path: Path, config: str, changes: dict[str, object], error: type[CheckpointError], match: str
) -> None:
    Path(config).write_text(json.dumps({**CONFIG, **changes}))
    with pytest.raises(error, match=match):
        to(STEP, tmp_path / "out", "hf", reference_config=config)


def test_heads_that_nobody_says(tmp_path: Path, config: str) -> None:
    to(STEP, tmp_path / "hf", "hf", with_optimizer=True, reference_config=config)
    (tmp_path / "hf" / "config.json").unlink()
    (tmp_path / "hf" / "mcore_rlhf.json").unlink()
    with pytest.raises(UsageError, match="how many heads the model has"):
        to(tmp_path / "hf", tmp_path / "back", "dcp", like=str(STEP))
