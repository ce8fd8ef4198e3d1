"""Our own manifest beside a checkpoint of any format: damaged means refused, and what it lists is checked."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from zlib import crc32

import pytest

from mcore_rlhf.convert import convert
from mcore_rlhf.errors import Corrupt, Incomplete, Problems, Unsupported
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.formats.registry import open_checkpoint, open_without_manifest
from mcore_rlhf.storage.manifest import FileEntry, Manifest, crc_of_file
from mcore_rlhf.storage.reading import OpenFiles
from mcore_rlhf.verify.audit import Ledger
from mcore_rlhf.verify.checkpoint import verify
from tests.fuzz.mutators.zips import records
from tests.helpers.conversions import options
from tests.unit.formats.hf_by_hand import CONFIG, llama, write
from tests.unit.formats.refusal import refused

GOLDENS = Path(__file__).parents[2] / "goldens"
SOURCES = {
    "hf": GOLDENS / "huggingface" / "llama_tied_bf16_sharded",
    "peft": GOLDENS / "peft" / "adapter",
    "dcp": GOLDENS / "dcp" / "fsdp2_ws2" / "actor",
    "deepspeed": GOLDENS / "deepspeed" / "z2_bf16_ac_dp2" / "step3",
    "megatron": GOLDENS / "megatron" / "tp1_bf16_do",
    "megatron-dist": GOLDENS / "megatron_dist" / "tp2pp2dp2_fully_reshardable",
    "universal": GOLDENS / "deepspeed" / "z2_bf16_ac_dp2" / "step3_uni",
}


def _flip(path: Path, at: int = -3) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 4
    path.write_bytes(content)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def _empty(path: Path) -> None:
    path.write_text("{}")


@pytest.mark.parametrize("damage", [_flip, _cut, _empty])
@pytest.mark.parametrize("name", SOURCES)
def test_a_damaged_manifest_is_refused(name: str, damage: Callable[[Path], None], tmp_path: Path) -> None:
    convert(SOURCES[name], tmp_path / "out", replace(options(), to=name))
    assert open_checkpoint(tmp_path / "out", ReadOptions()).model.params
    damage(tmp_path / "out" / "mcore_rlhf.json")
    refused(tmp_path / "out", Corrupt, "mcore_rlhf.json", "remove")
    assert not verify(tmp_path / "out", ReadOptions()).intact


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    """A folder of ours with a tokenizer."""
    folder = write(tmp_path / "hf", llama(), CONFIG)
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    convert(folder, tmp_path / "out", replace(options(), to="hf"))
    return tmp_path / "out"


@pytest.mark.parametrize("file", ["tokenizer_config.json", "config.json", "model.safetensors"])
def test_a_flipped_byte_of_any_file_is_found_by_a_conversion(ours: Path, file: str) -> None:
    _flip(ours / file, at=20 if file == "tokenizer_config.json" else -3)
    refused(ours, Corrupt, file)


@pytest.mark.parametrize("name", ["megatron", "megatron-dist", "universal", "dcp", "deepspeed"])
def test_a_file_that_was_written_anew_is_found_although_its_own_checksums_are_right(name: str, tmp_path: Path) -> None:
    convert(SOURCES[name], tmp_path / "out", replace(options(), to=name))
    assert not _held_against_checksums(tmp_path / "out")
    path = next(path for path in sorted((tmp_path / "out").rglob("*")) if path.suffix in (".pt", ".distcp"))
    data = bytearray(path.read_bytes())
    record = max((one for one in records(bytes(data)) if one.name.startswith("data/")), key=lambda one: one.length)
    data[record.start] ^= 4
    for at in record.sums:
        data[at : at + 4] = crc32(data[record.start : record.start + record.length]).to_bytes(4, "little")
    path.write_bytes(data)
    (problem,) = _held_against_checksums(tmp_path / "out")
    assert f"{path.relative_to(tmp_path / 'out')}: is damaged" in problem
    assert "the manifest says" in problem


def _held_against_checksums(folder: Path) -> list[str]:
    problems, source = Problems(), open_checkpoint(folder, ReadOptions())
    with OpenFiles(source.root) as mapped:
        for task in Ledger(source.files).tasks(mapped, problems, lambda nbytes: None):
            task()
    return [problem.message for problem in problems.found]


def test_a_damaged_name_is_damage_and_not_an_unknown_model(ours: Path) -> None:
    """What cannot be understood because it was damaged is told as damage."""
    path = ours / "config.json"
    path.write_text(path.read_text().replace('"hidden_size": 8', '"hidden_size": 9'))
    refused(ours, Corrupt, "config.json: is damaged: CRC-32")


def test_a_text_that_is_not_there(ours: Path) -> None:
    (ours / "tokenizer_config.json").unlink()
    refused(ours, Incomplete, "tokenizer_config.json: is missing")


def test_a_manifest_of_a_newer_release_is_no_damage(ours: Path) -> None:
    content = json.loads((ours / "mcore_rlhf.json").read_text())
    del content["crc32"]
    (ours / "mcore_rlhf.json").write_text(json.dumps({**content, "version": 99}))
    refused(ours, Unsupported, "version 99", "Upgrade")


def test_a_run_that_goes_on_in_a_folder_of_ours_damages_nothing(tmp_path: Path) -> None:
    """Frameworks replace their trackers with every step that they save."""
    convert(SOURCES["deepspeed"], tmp_path / "out", replace(options(), to="deepspeed"))
    tag = (tmp_path / "out" / "latest").read_text()
    shutil.copytree(tmp_path / "out" / tag, tmp_path / "out" / "global_step99")
    (tmp_path / "out" / "latest").write_text("global_step99")
    convert(tmp_path / "out", tmp_path / "again", replace(options(), to="deepspeed"))


class TestStep:
    @pytest.fixture
    def step(self, tmp_path: Path) -> Path:
        """A step with one role and a manifest."""
        step = tmp_path / "renamed"
        write(step / "actor", llama(), CONFIG)
        files = {
            path.relative_to(step).as_posix(): FileEntry(path.stat().st_size, crc_of_file(path))
            for path in (step / "actor").iterdir()
        }
        (step / "manifest.json").write_text(Manifest(files, step=5).to_json())
        return step

    def test_it_vouches_for_its_roles(self, step: Path) -> None:
        assert open_checkpoint(step / "actor", ReadOptions()).state.iteration == 5
        _flip(step / "actor" / "model.safetensors")
        refused(step / "actor", Corrupt, "model.safetensors: whole file")

    def test_damaged_it_is_refused(self, step: Path) -> None:
        _cut(step / "manifest.json")
        refused(step / "actor", Corrupt, "manifest.json", "not valid JSON")

    @pytest.mark.parametrize("text", ["{]", '{"name": "an extension"}', "[]"])
    def test_another_program_has_such_a_file_too(self, step: Path, text: str) -> None:
        (step / "manifest.json").write_text(text)
        assert open_checkpoint(step / "actor", ReadOptions()).state.release


def _notes(folder: Path) -> str:
    return "\n".join(text for _, text in open_without_manifest(folder, ReadOptions()).notes.lines)


@pytest.mark.parametrize(
    ("file", "damage", "said"),
    [
        ("mcore_rlhf.json", _flip, "the manifest is"),
        ("tokenizer_config.json", _flip, "tokenizer_config.json: is damaged"),
    ],
)
def test_who_only_looks_is_told(ours: Path, file: str, damage: Callable[[Path], None], said: str) -> None:
    assert "manifest" not in _notes(ours)
    damage(ours / file)

    assert said in _notes(ours)
