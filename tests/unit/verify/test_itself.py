"""Files of a trainer's run that no reader opens: sound or damaged as they say themselves, and lost by name in every account.

Named and made as transformers' Trainer and accelerate do, who call ``torch.save`` for each: transformers 5.23.0, ``trainer.py``
(``_save_optimizer_and_scheduler``, ``_save_rng_state``); accelerate 1.15.0, ``checkpointing.py`` (``save_accelerator_state``).
"""

from __future__ import annotations

import json
import pickle
import random
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from mcore_rlhf.convert import ConvertOptions, prepare
from mcore_rlhf.core.facts import Fate, Item, Kind
from mcore_rlhf.errors import CheckpointError, Lossy
from mcore_rlhf.families.options import ReadOptions, WriteOptions
from mcore_rlhf.formats.registry import open_checkpoint
from mcore_rlhf.manager.run.adopt import adopt, why_not
from mcore_rlhf.storage.manifest import Manifest
from mcore_rlhf.verify.checkpoint import Depth, verify
from tests.unit.formats.hf_by_hand import CONFIG, llama, write

GOLDENS = Path(__file__).parents[2] / "goldens"
TRAINER = ("optim.pt", "scheduler.pt", "scaler.pt", "rng_state_0.pth")
OTHER_RANK = {"rng_state_0.pth": "rng_state_1.pth", "random_states_1.pkl": "random_states_0.pkl"}
ACCELERATE = ("optimizer_3.bin", "scheduler.bin", "sampler.bin", "dl_state_dict_1.bin", "random_states_1.pkl")


def save(folder: Path, *names: str) -> None:
    parameter = torch.nn.Parameter(torch.randn(4, 3))
    optimizer = torch.optim.AdamW([parameter])
    parameter.grad = torch.randn(4, 3)
    optimizer.step()
    rng = {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.get_rng_state()}
    for name in names:
        torch.save(rng if name.startswith(("rng", "random")) else optimizer.state_dict(), folder / name)


@pytest.fixture(params=[TRAINER, ACCELERATE], ids=["trainer", "accelerate"])
def names(request: pytest.FixtureRequest) -> tuple[str, ...]:
    return tuple(request.param)


@pytest.fixture
def run(tmp_path: Path, names: tuple[str, ...]) -> Path:
    """A model's folder with a trainer's files in it, as one process or DDP writes them."""
    folder = write(tmp_path / "global_step_3", llama(), CONFIG)
    save(folder, *names)
    (folder / "all_results.json").write_text(json.dumps({"global_step": 3, "epoch": 0.5}))
    return folder


@pytest.fixture
def beside_a_tag(tmp_path: Path, names: tuple[str, ...]) -> Path:
    """The same of a run with DeepSpeed, where the tag has weights and optimizer, and no config lies beside it."""
    folder = tmp_path / "checkpoint-3"
    shutil.copytree(GOLDENS / "deepspeed" / "z2_bf16_ac_dp2", folder)
    save(folder, *names, OTHER_RANK[names[-1]])
    if names == TRAINER:  # whose save is done when these are there
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": 3}))
    return folder


def damages(path: Path) -> dict[str, bytes]:
    data = path.read_bytes()
    at = data.index(b"PK\1\2")  # its directory
    return {"zeros": bytes(len(data)), "cut": data[: len(data) // 2], "flipped": data[:at] + bytes(4) + data[at + 4 :]}


def looked(folder: Path, depth: Depth = Depth.FULL) -> str:
    return verify(folder, ReadOptions(), depth).problems.describe()


def test_what_is_damaged_is_named_and_not_adopted(run: Path, names: tuple[str, ...]) -> None:
    assert (verify(run, ReadOptions()).intact, why_not(run)) == (True, "")
    for name in names:
        whole = (run / name).read_bytes()
        for data in damages(run / name).values():
            (run / name).write_bytes(data)
            assert name in looked(run)
            assert name in looked(run, Depth.QUICK)
            with pytest.raises(CheckpointError, match=name):
                adopt(run)
        (run / name).write_bytes(whole)
    assert isinstance(adopt(run), Manifest)


def test_a_byte_of_a_record_is_found(run: Path, names: tuple[str, ...]) -> None:
    for name in names:
        data = bytearray((run / name).read_bytes())
        at = data.index(b"data/0") + 70
        data[at] ^= 1
        (run / name).write_bytes(data)
    found = looked(run)
    assert all(name in found for name in names)


def test_texts_that_are_no_json_are_damaged(run: Path) -> None:
    (run / "all_results.json").write_text('{"global_step": 3, "epo')
    assert "all_results.json: is not valid JSON" in looked(run)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("training_args.bin", None),
        ("custom_checkpoint_0.pkl", pickle.dumps({"a": 1})),
        ("vocab.bin", b"\x80\2\3\0\0"),
        ("optimizer/README.md", b"what is here"),
        ("before_1_6.pt", None),
        ("script.pt", None),
        ("COMPLETED", b""),
        ("other.pkl", pickle.dumps(Fate.LOST)),
    ],
)
def test_what_nobody_understands_is_no_damage(run: Path, name: str, data: bytes | None) -> None:
    (run / name).parent.mkdir(exist_ok=True)
    if data is None and name == "script.pt":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            torch.jit.save(torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(1, 2)), run / name)
    elif data is None:  # an object of a class that is on no list
        torch.save(Fate.LOST, run / name, _use_new_zipfile_serialization=name == "training_args.bin")
    else:
        (run / name).write_bytes(data)
    assert verify(run, ReadOptions()).intact


@pytest.mark.parametrize("name", ["custom_checkpoint_0.pkl", "vocab.bin", "tokenizer.model"])
def test_a_file_of_zeros_is_damaged_whatever_it_should_be(run: Path, name: str) -> None:
    (run / name).write_bytes(bytes(5000))
    assert f"{name}: all of its 5,000 bytes are zero" in looked(run)


def test_a_pickle_that_is_cut_off_is_damaged(run: Path) -> None:
    (run / "custom_checkpoint_0.pkl").write_bytes(pickle.dumps({"a": 1})[:-2])
    assert "custom_checkpoint_0.pkl" in looked(run)


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: path.write_bytes(bytes(99))])
def test_the_optimizers_own_folder_is_looked_into(run: Path, damage: Callable[[Path], None]) -> None:
    """That of FSDP, beside weights that were saved whole."""
    shutil.copytree(GOLDENS / "dcp" / "fsdp2_ws2" / "actor" / "dcp_checkpoint", run / "optimizer_0")
    assert verify(run, ReadOptions()).intact
    damage(next((run / "optimizer_0").glob("__1_*.distcp")))
    assert "optimizer_0" in looked(run)


def test_whole_weights_say_that_their_optimizer_is_there(run: Path, names: tuple[str, ...]) -> None:
    notes = [text for _, text in open_checkpoint(run, ReadOptions()).notes.lines]
    assert f"the optimizer lies beside the weights, and is not read: {names[0]}" in notes


@pytest.mark.parametrize("to", ["hf", "dcp", "deepspeed", "universal", "megatron"])
def test_a_trainers_state_is_lost_by_name(run: Path, names: tuple[str, ...], to: str) -> None:
    said = prepare(run, ConvertOptions(to=to)).account
    assert not said.lossless
    for name in names:
        assert said.entries[Item(Kind.FILE, name)].fate is Fate.LOST
    assert f"{names[0]}: the optimizer; the file lies beside what was read, and was not opened" in said.lost
    with pytest.raises(Lossy, match=names[0]):
        prepare(run, ConvertOptions(to=to, strict=True))


def test_what_lies_beside_a_tag_is_checked_and_lost_by_name(beside_a_tag: Path, names: tuple[str, ...]) -> None:
    """``scheduler.bin`` and ``random_states_0.pkl`` of accelerate vanished, and the conversion was lossless."""
    assert verify(beside_a_tag, ReadOptions()).intact
    account = prepare(beside_a_tag, ConvertOptions(to="universal")).account
    assert {item.name for item in account.of_fate(Fate.LOST)} >= set(names)
    (beside_a_tag / names[1]).write_bytes(bytes(1000))
    assert names[1] in looked(beside_a_tag)


def test_random_states_are_not_left_out_with_the_optimizer(run: Path, names: tuple[str, ...]) -> None:
    said = prepare(run, ConvertOptions(to="dcp", write=WriteOptions(no_optimizer=True))).account.entries
    assert "--no-optimizer" in said[Item(Kind.FILE, names[0])].text
    assert "random states of a rank" in said[Item(Kind.FILE, names[-1])].text


def test_the_loaders_state_at_the_top_of_a_step_is_checked(run: Path) -> None:
    """Verl's ``data.pt``, beside roles and in no folder of its own."""
    step = run.with_name("global_step_0")
    run.rename(step.with_name("moved"))
    shutil.copytree(step.with_name("moved"), step / "actor")
    torch.save({"_snapshot": torch.arange(9)}, step / "data.pt")
    assert why_not(step) == ""
    whole = (step / "data.pt").read_bytes()
    for data in damages(step / "data.pt").values():
        (step / "data.pt").write_bytes(data)
        assert "data.pt" in why_not(step)
    with pytest.raises(CheckpointError, match=r"data\.pt"):
        adopt(step)
    (step / "data.pt").write_bytes(whole)
    adopt(step)
