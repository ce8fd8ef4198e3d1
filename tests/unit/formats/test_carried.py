"""What a model's folder has besides weights goes along, through any format and back."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rlhf.convert import Job, convert, prepare
from mcore_rlhf.core.facts import Fate
from mcore_rlhf.errors import Corrupt
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.formats.registry import open_checkpoint
from mcore_rlhf.storage.manifest import Manifest
from mcore_rlhf.verify.checkpoint import verify
from tests.helpers.conversions import options
from tests.unit.formats.hf_by_hand import CONFIG, config_in, llama, tensors_in, write

VERL = Path(__file__).parents[2] / "goldens" / "verl" / "fsdp2_ws3"
OTHERS = ("deepspeed", "universal", "dcp", "megatron", "megatron-dist")
FILES = {
    "tokenizer.json": json.dumps({"model": {"vocab": {"a": 0, "b": 19}}}),
    "generation_config.json": '{"eos_token_id":  7, "odd": "spacing"}',
    "tiktoken.model": "IQ== 0\n", "tekken.json": "{}", "tokenizer.model.v3": "v3", "sentencepiece.model": "sp",
    "chat_templates/tool.jinja": "{{ x }}", "video_preprocessor_config.json": "{}", "tokenization_own.py": "raise SystemExit",
    "configuration_own.py": "raise SystemExit", "modeling_own.py": "raise SystemExit", "README.md": "# A model", "LICENSE": "",
}  # fmt: skip
ODD_CONFIG = {**CONFIG, "eos_token_id": 7, "bos_token_id": 1, "fine_tuners_note": [1, 2.5, None]}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder whose config is not spelled as we would."""
    folder = write(tmp_path / "model", llama(torch.bfloat16, tied=True))
    config = {**ODD_CONFIG, "tie_word_embeddings": True, "torch_dtype": "bfloat16"}
    for name, text in {**FILES, "config.json": json.dumps(config, indent=7)}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


def converted(source: Path, target: Path, to: str, **write: Any) -> Job:
    return convert(source, target, replace(options(**write), to=to))


def files_of(folder: Path) -> dict[str, bytes]:
    own = ("mcore_rlhf.json", "model.safetensors")
    paths = (path for path in folder.rglob("*") if path.is_file() and path.name not in own)
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def test_within_hugging_face_all_files_go_along(model: Path, tmp_path: Path) -> None:
    job = converted(model, tmp_path / "out", "hf")
    assert files_of(tmp_path / "out") == files_of(model)
    assert job.lossless
    listed = Manifest.read(tmp_path / "out" / "mcore_rlhf.json").files
    assert {*FILES, "config.json"} <= set(listed)
    assert verify(tmp_path / "out", ReadOptions()).intact


@pytest.mark.parametrize("middle", OTHERS)
def test_through_another_format_and_back(model: Path, tmp_path: Path, middle: str) -> None:
    there = converted(model, tmp_path / "there", middle)
    back = converted(tmp_path / "there", tmp_path / "back", "hf")
    assert files_of(tmp_path / "back") == files_of(model)
    before, after = tensors_in(model), tensors_in(tmp_path / "back")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert there.lossless
    assert back.lossless, back.report.lost
    assert not [text for _, text in back.report.lines if "not used" in text]
    assert verify(tmp_path / "there", ReadOptions()).intact


@pytest.mark.parametrize("middle", OTHERS)
def test_through_two_other_formats(model: Path, tmp_path: Path, middle: str) -> None:
    converted(model, tmp_path / "one", middle)
    converted(tmp_path / "one", tmp_path / "two", "dcp" if middle != "dcp" else "deepspeed")
    converted(tmp_path / "two", tmp_path / "back", "hf")
    assert files_of(tmp_path / "back") == files_of(model)


@pytest.mark.parametrize("middle", OTHERS)
def test_a_carried_file_is_checked(model: Path, tmp_path: Path, middle: str) -> None:
    converted(model, tmp_path / "there", middle)
    (path,) = (tmp_path / "there").rglob("tekken.json")
    path.write_text("[]")
    with pytest.raises(Corrupt, match=r"tekken\.json"):
        converted(tmp_path / "there", tmp_path / "back", "hf")


def test_what_stays_behind_is_named_with_its_reason(model: Path, tmp_path: Path) -> None:
    (model / "consolidated.safetensors").write_bytes(b"x")
    (model / ".git").mkdir()
    for to in ("hf", "deepspeed"):
        job = converted(model, tmp_path / to, to)
        behind = [text for fate, text in job.report.lines if fate is Fate.LEFT]
        assert behind == [
            "file consolidated.safetensors: holds weights, or says where they are, and was not opened",
            "file .git: belongs to a version control system or a cache",
        ]


def test_hugging_faces_cache_is_all_links(model: Path, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "models--o--m" / "blobs", tmp_path / "models--o--m" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    for number, path in enumerate(sorted(path for path in model.rglob("*") if path.is_file())):
        link = snapshot / path.relative_to(model)
        link.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, blobs / str(number))
        link.symlink_to(os.path.relpath(blobs / str(number), link.parent))
    converted(snapshot, tmp_path / "out", "hf")
    assert files_of(tmp_path / "out") == files_of(model)
    assert not any(path.is_symlink() for path in (tmp_path / "out").rglob("*"))


def test_another_tokenizer_takes_the_place_of_all_of_the_own_one(model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "tokenizer.json").write_text("{}")
    job = converted(model, tmp_path / "out", "hf", tokenizer=str(other))
    assert set(files_of(tmp_path / "out")) == {
        "README.md", "LICENSE", "config.json", "configuration_own.py", "generation_config.json", "modeling_own.py", "tokenizer.json",
    }  # fmt: skip
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    (changed,) = (text for text in (text for fate, text in job.report.lines if fate is Fate.CHANGED))
    assert "chat_templates/tool.jinja" in changed
    assert "tiktoken.model" in changed


def test_arguments_that_were_edited_win_over_the_config_that_travelled(model: Path, tmp_path: Path) -> None:
    converted(model, tmp_path / "there", "megatron")
    (file,) = (tmp_path / "there").rglob("model_optim_rng.pt")
    state = torch.load(file, weights_only=False)  # written a moment ago by our own conversion
    state["args"].rotary_base = 777
    torch.save(state, file)
    (tmp_path / "there" / "mcore_rlhf.json").unlink()
    job = converted(tmp_path / "there", tmp_path / "back", "hf")
    assert config_in(tmp_path / "back")["rope_theta"] == 777
    assert config_in(tmp_path / "back")["fine_tuners_note"] == ODD_CONFIG["fine_tuners_note"]
    assert any("args: rotary_base is 777, and was 10000" in text for _, text in job.report.lines)


def test_a_description_that_the_user_gives_travels_in_place_of_the_old_one(model: Path, tmp_path: Path) -> None:
    given = tmp_path / "given"
    given.mkdir()
    (given / "config.json").write_text(json.dumps({**ODD_CONFIG, "tie_word_embeddings": True, "rope_theta": 5.0}))
    converted(model, tmp_path / "one", "deepspeed")
    converted(tmp_path / "one", tmp_path / "two", "hf", reference_config=str(given))
    assert config_in(tmp_path / "two")["rope_theta"] == 5.0


def test_verls_own_folder_of_such_files(tmp_path: Path) -> None:
    run = Path(shutil.copytree(VERL, tmp_path / "run"))
    (actor,) = {path.parent for path in run.rglob("model_world_size_3_rank_0.pt")}
    (actor / "huggingface").mkdir(exist_ok=True)
    (actor / "huggingface" / "tokenizer_config.json").write_text("{}")
    source = open_checkpoint(actor, ReadOptions(optimizer=False))
    assert source.carried is not None
    assert "tokenizer_config.json" in source.carried.files


def test_verls_folder_beside_megatrons_files(tmp_path: Path) -> None:
    """``actor/{dist_ckpt,huggingface}``: what is beside the checkpoint is its model's all the same."""
    golden = Path(__file__).parents[2] / "goldens" / "megatron_dist" / "tp2pp2dp2_fully_reshardable"
    (inner,) = {path.parent for path in golden.rglob("common.pt")}
    shutil.copytree(inner, tmp_path / "actor" / "dist_ckpt")
    (tmp_path / "actor" / "huggingface").mkdir()
    (tmp_path / "actor" / "huggingface" / "tekken.json").write_text("{}")
    for given in (tmp_path / "actor", tmp_path / "actor" / "dist_ckpt"):
        source = open_checkpoint(given, ReadOptions(optimizer=False))
        assert source.carried is not None
        assert list(source.carried.files) == ["tekken.json"]


def test_an_adapters_own_files_go_along(tmp_path: Path) -> None:
    adapter = Path(shutil.copytree(Path(__file__).parents[2] / "goldens" / "peft" / "adapter", tmp_path / "adapter"))
    (adapter / "notes.txt").write_text("mine")
    converted(adapter, tmp_path / "out", "peft")
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"


def test_a_universal_checkpoint_within_a_run_has_them_in_its_own_folder(model: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "latest").write_text("global_step7")
    converted(model, run, "universal")
    (folder,) = (path for path in run.iterdir() if path.name.endswith("_uni"))
    assert (folder / "mcore_rlhf" / "carried" / "chat_templates" / "tool.jinja").is_file()
    converted(folder, tmp_path / "back", "hf")
    assert files_of(tmp_path / "back") == files_of(model)


@pytest.mark.parametrize("case", ["a folder that cannot be listed", "a pickle that calls"])
def test_what_would_go_along_and_may_not_is_lost(model: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    if case == "a pickle that calls":
        (model / "training_args.bin").write_bytes(b"\x80\x02cverl.utils.fs\ncopy\nX\x01\x00\x00\x00x\x85R.")
        name, why = "training_args.bin", "calls what is on no list"
    else:
        (model / "chat_templates" / "assets").mkdir()
        listing = Path.iterdir

        def refused(folder: Path) -> object:
            if folder.name == "assets":
                raise PermissionError(13, "Permission denied", str(folder))
            return listing(folder)

        monkeypatch.setattr(Path, "iterdir", refused)
        name, why = "chat_templates/assets", "cannot be read"
    job = prepare(model, replace(options(), to="dcp"))
    assert not job.lossless
    assert [text for text in job.account.lost if name in text and why in text]
