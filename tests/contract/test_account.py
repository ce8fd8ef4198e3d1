"""Every item of every source is accounted for in every target, and what is said to be kept is really there."""

from __future__ import annotations

import copy
import importlib
import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mcore_rlhf.convert import ConvertOptions, Job, prepare
from mcore_rlhf.core.account import Report
from mcore_rlhf.core.catalog import EXP_AVG
from mcore_rlhf.core.facts import Fate, Item, Kind, Reason
from mcore_rlhf.errors import CheckpointError, Lossy
from mcore_rlhf.families.inventory import ELEMENTS, state_dict_of
from mcore_rlhf.families.megatron.new_run import NewRun
from mcore_rlhf.families.options import ReadOptions, WriteOptions
from mcore_rlhf.families.source import Source
from mcore_rlhf.formats import registry
from mcore_rlhf.formats.base import Format
from mcore_rlhf.formats.hf.writer import Weights
from mcore_rlhf.formats.registry import FORMATS
from mcore_rlhf.storage.paths import ReadablePath
from tests.helpers.conversions import GOLDENS
from tests.helpers.every_format import MODEL

ALL = GOLDENS.parent
OF_RUNS = {
    "nemo_rl/v2_ws2": "step_3/policy", "trainers/nm_v1": "step_3/policy", "trainers/or_z2": "_actor",
    "trainers/rl_fsdp2": "grpo/checkpoints/global_step_3/actor", "trainers/skyrl_fsdp2": "global_step_3/policy",
    "trainers/swift": "checkpoint-4", "trainers/roll": "checkpoint-3",
    "areal/trial": "default/recover_checkpoint", "trainers/prime": "checkpoints/step_3/trainer",
}  # fmt: skip
"""A model of each run of a trainer's."""
SOURCES = sorted(
    path / OF_RUNS.get(path.relative_to(ALL).as_posix(), "")
    for path in ALL.glob("*/*")
    if path.is_dir() and path.parent.name != "megatron_core"
)
LLAMA = ALL / "huggingface" / "llama_tied_bf16_sharded"


def planned(path: Path, to: str, **write: object) -> Job:
    return prepare(path, ConvertOptions(to=to, write=replace(WriteOptions(), **write)))  # type: ignore[arg-type]


@pytest.fixture
def read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint is read once with its optimizer and once without, whatever is made of it; who plans gets notes of his own."""
    read, found = registry._read, dict[tuple[str, ReadOptions], Source]()

    def once(folder: ReadablePath, options: ReadOptions, partial: bool) -> Source:
        key = str(folder), options
        if key not in found:
            found[key] = read(folder, options, partial)
        return replace(found[key], notes=copy.deepcopy(found[key].notes))

    monkeypatch.setattr(registry, "_read", once)


def all_accounted(path: Path, of: Iterable[Format], most: int) -> None:
    """The inventory minus the account is empty, with the optimizer and without, in as many targets as take the source."""
    checked = 0
    for known in of:
        before = checked
        for no_optimizer in (False, True):
            try:
                job = planned(path, known.name, no_optimizer=no_optimizer)
            except CheckpointError:
                continue  # refused, with a reason that other tests read
            checked += 1
            assert not job.account.unaccounted, known.name
            left = [said for said in job.account.entries.values() if said.fate is Fate.LEFT]
            assert all(isinstance(said.reason, Reason) for said in left)
            assert job.lossless == (not job.account.lost)
            assert {text for fate, text in job.report.lines if fate is Fate.LOST} == set(job.account.lost)
        most -= checked > before
        if not most:
            break
    assert checked


def of_golden(path: Path) -> str:
    return "-".join(path.relative_to(ALL).parts)


@pytest.mark.usefixtures("read_once")
@pytest.mark.parametrize("path", SOURCES, ids=of_golden)
def test_nothing_is_unaccounted(path: Path) -> None:
    """Every golden through two of the targets that take it, of each the next ones."""
    first = SOURCES.index(path) % len(FORMATS)
    all_accounted(path, (*FORMATS[first:], *FORMATS[:first]), most=2)


@pytest.mark.slow
@pytest.mark.usefixtures("read_once")
@pytest.mark.parametrize("path", SOURCES, ids=of_golden)
def test_nothing_is_unaccounted_in_any_target(path: Path) -> None:
    all_accounted(path, FORMATS, most=len(FORMATS))


def test_a_forgotten_argument_makes_a_conversion_lossy(monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten = Item(Kind.ARGUMENT, "rotary_base")
    holds = NewRun.holds
    monkeypatch.setattr(NewRun, "holds", lambda run: {k: v for k, v in holds(run).items() if k != forgotten})
    job = planned(MODEL, "megatron", tp=1)
    assert job.account.unaccounted == (forgotten,)
    assert not job.lossless
    assert any("rotary_base" in line["text"] and line["fate"] == "lost" for line in job.report.as_json())
    with pytest.raises(Lossy, match="rotary_base: nothing accounts for it"):
        prepare(MODEL, ConvertOptions(to="megatron", strict=True))


def test_a_forgotten_tensor_makes_a_conversion_lossy(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = Weights.state_parts
    monkeypatch.setattr(
        Weights, "state_parts", lambda weights, state: parts(weights, state)[: -1 if state == EXP_AVG else None]
    )
    job = planned(MODEL, "hf", with_optimizer=True)
    assert job.account.unaccounted == (Item(Kind.TENSOR, f"output_layer.weight ({EXP_AVG})"),)
    assert not job.lossless


@pytest.mark.parametrize("name", ["dcp/fsdp2_ws2", "deepspeed/z0_fp32_untied_dp1", "deepspeed/z2_fp32_frozen_dp4"])
def test_an_optimizer_that_is_left_out_is_lost(name: str) -> None:
    """Though it was not read: the option says so for every target."""
    job = planned(ALL / name, "deepspeed", no_optimizer=True, zero_stage=0)
    assert any("--no-optimizer" in text for text in job.account.lost)
    assert not job.lossless


@pytest.mark.parametrize(
    ("source", "to", "read", "write"),
    [
        ("deepspeed/z3_bf16_frozen_dp2", "universal", {"only": "model.layers.0"}, {}),
        ("deepspeed/z2_fp32_frozen_dp4", "deepspeed", {"only": "model.layers.0"}, {}),
        ("deepspeed/z2_fp32_frozen_dp4", "hf", {"only": "model.layers.0"}, {}),
        ("deepspeed/z1_fp32_tied_dp2", "deepspeed", {}, {"zero_stage": 0}),
        ("deepspeed/z2_bf16_ac_dp2", "dcp", {}, {"rng": "drop"}),
    ],
)
def test_what_an_option_leaves_of_a_run_is_accounted_for(
    source: str, to: str, read: dict[str, Any], write: dict[str, Any]
) -> None:
    """A part in which nothing is trained, fp32 masters that become the parameters, random states under a run's own key."""
    options = ConvertOptions(to=to, read=ReadOptions(**read), write=WriteOptions(**write))
    account = prepare(ALL / source, options).account
    assert account.unaccounted == ()
    assert account.lossless == (not account.of_fate(Fate.LOST))


def test_rows_that_are_cut_without_a_word_make_a_conversion_lossy(monkeypatch: pytest.MonkeyPatch) -> None:
    assert planned(MODEL, "deepspeed").account.entries[ELEMENTS].fate is Fate.CHANGED
    crossing = importlib.import_module("mcore_rlhf.families.crossing.to_huggingface")
    silent = [rule for rule in crossing._RULES if not rule.why.startswith("vocabulary rows")]
    monkeypatch.setattr(crossing, "_RULES", silent)
    assert planned(MODEL, "deepspeed").account.unaccounted == (ELEMENTS,)


def test_files_that_nobody_reads_are_items(tmp_path: Path) -> None:
    """A trainer's state is lost, version control is left behind, everything else goes along: each by name."""
    source = shutil.copytree(LLAMA, tmp_path / "model")
    (source / ".git").mkdir()
    (source / ".git" / "HEAD").write_text("ref")
    (source / "optim.pt").write_bytes(b"state")
    (source / "notes").mkdir()
    (source / "notes" / "tekken.json").write_text("{}")
    job = planned(source, "megatron")
    entries = job.account.entries
    assert entries[Item(Kind.FILE, "optim.pt")].fate is Fate.LOST
    assert entries[Item(Kind.FILE, ".git")].reason is Reason.VERSION_CONTROL
    assert entries[Item(Kind.FILE, "notes/tekken.json")].fate is Fate.KEPT
    assert not job.lossless
    assert planned(LLAMA, "megatron").lossless
    told = [f"{line['fate']} {line['text']}" for line in job.report.as_json()]
    assert any(line.startswith("lost optim.pt: ") for line in told)
    assert any(line.startswith("left behind file .git: ") for line in told)


def test_weights_that_are_no_copy_of_the_models_are_lost(tmp_path: Path) -> None:
    """A reward model's head lies in a file of its own; the same weights for other programs do not count."""
    source = shutil.copytree(LLAMA, tmp_path / "model")
    for name in (
        "value_head.safetensors",
        "mm_projector.bin",
        "original/consolidated.00.pth",
        "model-q4.gguf",
        "pytorch_model.bin",
    ):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_bytes(b"...")
    for to in ("hf", "deepspeed"):
        job = planned(source, to)
        lost = {item.name for item in job.account.of_fate(Fate.LOST)}
        assert lost == {"value_head.safetensors", "mm_projector.bin"}
        assert not job.lossless


def test_texts_in_the_header_of_weights_are_items(tmp_path: Path) -> None:
    source = tmp_path / "model"
    source.mkdir()
    save_file(
        {"up.weight": torch.zeros(2, 2)},
        source / "model.safetensors",
        {"format": "pt", "tied": "up.weight", "step": "7"},
    )
    assert planned(source, "hf").account.lost == ["metadata.step in model.safetensors: not known, and not carried"]


def test_what_transformers_trainer_leaves_beside_a_tag_is_an_item(tmp_path: Path) -> None:
    """A ``checkpoint-N``: DeepSpeed's tag, and beside it config, tokenizer, the trainer's states, the weights once more."""
    source = shutil.copytree(ALL / "deepspeed" / "z2_fp32_frozen_dp4", tmp_path / "checkpoint-3")
    for name in ("tokenizer.json", "trainer_state.json", "config.json"):
        (source / name).write_text("{}")
    for name in ("rng_state_0.pth", "model.safetensors"):
        (source / name).write_bytes(b"...")
    for name in ("expected.pt", "recipe.json"):  # the golden's own
        (source / name).unlink()
    entries = planned(source, "universal").account.entries
    assert {item.name: said.fate for item, said in entries.items() if item.kind is Kind.FILE} == {
        "config.json": Fate.KEPT, "tokenizer.json": Fate.KEPT, "trainer_state.json": Fate.KEPT,
        "rng_state_0.pth": Fate.LOST, "model.safetensors": Fate.LEFT,
    }  # fmt: skip


def test_a_scheduler_that_is_no_state_dict_is_lost_by_name() -> None:
    notes = Report()
    assert state_dict_of({"step": 1}, "lr_scheduler", notes) == {"step": 1}
    assert state_dict_of(None, "lr_scheduler", notes) is None
    assert not notes.lost
    assert state_dict_of([1, 2], "lr_scheduler", notes) is None
    assert notes.lost == ["lr_scheduler: a list, where a scheduler's state dict is expected"]
