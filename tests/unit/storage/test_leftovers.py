"""Files that no reader opens: each is carried, or stays behind for one reason of a closed list."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from mcore_rlhf.errors import Corrupt, StorageError, Untrusted
from mcore_rlhf.storage.checksum import crc32
from mcore_rlhf.storage.destination import LocalFolder
from mcore_rlhf.storage.leftovers import MAX_CARRIED, Reason, leftovers
from mcore_rlhf.storage.manifest import FileEntry, crc_of_file
from mcore_rlhf.storage.torchzip import archive

CARRIED = (
    "tokenizer.json", "tiktoken.model", "tekken.json", "tokenizer.model.v3", "sentencepiece.model", "chat_templates/tool.jinja",
    "video_preprocessor_config.json", "tokenization_own.py", "configuration_own.py", "modeling_own.py", "README.md", "LICENSE",
    "training_args.bin", "trainer_state.json", "original/params.json", "a b/ü.txt", "vocab.bpe", "params.json", ".env.example",
)  # fmt: skip
BEHIND = {
    "consolidated.safetensors": Reason.WEIGHTS,
    "pytorch_model.bin": Reason.WEIGHTS,
    "pytorch_model.bin.index.json": Reason.WEIGHTS,
    "model.safetensors.index.fp32.json": Reason.WEIGHTS,
    "original/consolidated.00.pth": Reason.WEIGHTS,
    "model-q4.gguf": Reason.WEIGHTS,
    "dcp/.metadata": Reason.WEIGHTS,
    "dcp/__0_0.distcp": Reason.WEIGHTS,
    "optimizer.pt": Reason.TRAINER,
    "scheduler.pt": Reason.TRAINER,
    "checkpoint-5/rng_state_0.pth": Reason.TRAINER,
    "optimizer/state.json": Reason.TRAINER,
    "optimizer_0/part.json": Reason.TRAINER,
    ".gitattributes": Reason.VERSION_CONTROL,
    "back\\slash": Reason.ODD_NAME,
    "bell\x07": Reason.ODD_NAME,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    for name in (*CARRIED, *BEHIND, "model.safetensors", "config.json", "mcore_rlhf.json"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return folder


def reasons(folder: Path, *opened: str) -> dict[str, Reason | None]:
    return {item.path: item.reason for item in leftovers(folder, opened)}


def test_everything_that_nobody_opened_is_in_it_once(folder: Path) -> None:
    found = leftovers(folder, {"model.safetensors", "config.json"})
    assert [item.path for item in found] == sorted({*CARRIED, *BEHIND})
    assert {item.path: item.reason for item in found} == {**dict.fromkeys(CARRIED), **BEHIND}
    assert all(item.nbytes == len(item.path.encode()) for item in found)


def test_version_control_is_not_entered(folder: Path) -> None:
    (folder / ".git" / "objects").mkdir(parents=True)
    (folder / ".git" / "objects" / "pack").write_text("")
    (folder / "code" / "__pycache__").mkdir(parents=True)
    (folder / "code" / "__pycache__" / "x.pyc").write_text("")
    found = reasons(folder)
    assert (found[".git"], found["code/__pycache__"]) == (Reason.VERSION_CONTROL, Reason.VERSION_CONTROL)
    assert not any("/objects" in name or name.endswith(".pyc") for name in found)


def test_a_large_file_stays_behind(folder: Path) -> None:
    for name, nbytes in (("fits.json", MAX_CARRIED), ("large.json", MAX_CARRIED + 1)):
        with (folder / name).open("wb") as file:
            file.truncate(nbytes)
    found = reasons(folder)
    assert (found["fits.json"], found["large.json"]) == (None, Reason.TOO_LARGE)


def test_links_to_files_are_followed_and_nothing_else_is(folder: Path, tmp_path: Path) -> None:
    (folder / "blob").write_text("content")
    (folder / "linked.json").symlink_to(folder / "blob")
    (folder / "dangling.json").symlink_to(tmp_path / "nothing")
    (folder / "up").symlink_to(tmp_path)
    (folder / "zero").symlink_to("/dev/zero")
    os.mkfifo(folder / "pipe.json")
    found = reasons(folder)
    assert found["linked.json"] is None
    assert next(item.nbytes for item in leftovers(folder, ()) if item.path == "linked.json") == 7
    assert found["dangling.json"] == Reason.DANGLING
    assert found["up"] == Reason.LINKED_FOLDER
    assert found["zero"] == found["pipe.json"] == Reason.NOT_REGULAR


def test_links_that_lead_out_are_refused_together(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    for name in ("merges.txt", "vocab.json"):
        (folder / name).symlink_to(tmp_path / "secret")
    with pytest.raises(Untrusted, match=r"(?s)2 problems.*merges\.txt.*vocab\.json.*--follow-links"):
        leftovers(folder, ())


def test_a_name_that_is_no_text(folder: Path) -> None:
    Path(os.fsdecode(os.fsencode(folder) + b"/\xff.json")).write_text("")
    assert Reason.ODD_NAME in {reason for name, reason in reasons(folder).items() if not name.isprintable()}


def test_a_home_folder_is_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mcore_rlhf.storage.leftovers.MAX_FILES", 2)
    for name in "abc":
        (tmp_path / name).write_text("")
    assert reasons(tmp_path) == {"a": None, "b": None, "c": Reason.TOO_MANY}


def test_carrying_is_byte_for_byte(folder: Path, tmp_path: Path) -> None:
    content = os.urandom(3 << 20)
    (folder / "tokenizer.json").write_bytes(content)
    (tmp_path / "out").mkdir()
    entry = LocalFolder(tmp_path / "out").put("deep/tokenizer.json", folder / "tokenizer.json")
    written = tmp_path / "out" / "deep" / "tokenizer.json"
    assert written.read_bytes() == content
    assert (entry.nbytes, entry.crc32) == (len(content), crc_of_file(written))


def test_a_file_that_became_a_pipe_does_not_hang(folder: Path, tmp_path: Path) -> None:
    os.mkfifo(folder / "pipe")
    with pytest.raises(StorageError, match="a regular file was expected"):
        LocalFolder(tmp_path / "out").put("pipe", folder / "pipe")
    with pytest.raises(StorageError, match=r"missing.*cannot copy|cannot copy.*missing"):
        LocalFolder(tmp_path / "out").put("missing", folder / "missing")


def test_what_is_not_as_the_manifest_says_never_becomes_a_file(folder: Path, tmp_path: Path) -> None:
    content = os.urandom((1 << 20) + 3)
    (folder / "a.json").write_bytes(content)
    true = FileEntry(len(content), crc32(content))
    (tmp_path / "out").mkdir()
    out = LocalFolder(tmp_path / "out")
    for wrong, said in (
        (replace(true, nbytes=7), f"a.json: has {len(content)} bytes, the manifest says 7"),
        (replace(true, crc32=1), f"a.json: is damaged: CRC-32 {true.crc32:08x}, the manifest says 00000001"),
    ):
        for content_of in (folder / "a.json", content):
            with pytest.raises(Corrupt, match=said):
                out.put("a.json", content_of, wrong)
            assert not (tmp_path / "out" / "a.json").exists()
    assert out.put("a.json", folder / "a.json", true) == true


@pytest.mark.parametrize("nbytes", [1 << 20, 5 << 20])
def test_a_file_that_shrinks_or_grows_while_it_is_copied(folder: Path, tmp_path: Path, nbytes: int) -> None:
    (folder / "a.json").write_bytes(bytes(3 << 20))
    (tmp_path / "out").mkdir()

    def other_program(_: int) -> None:
        os.truncate(folder / "a.json", nbytes)

    with pytest.raises(StorageError, match=f"has changed while it was copied: {3 << 20} bytes, then {nbytes}"):
        LocalFolder(tmp_path / "out").put("a.json", folder / "a.json", tick=other_program)
    assert not (tmp_path / "out" / "a.json").exists()


def pickled(name: str) -> bytes:
    """Protocol 2, by hand: pickle itself writes only what can be imported."""
    module, _, last = name.rpartition(".")
    return b"\x80\x02c" + f"{module}\n{last}\n".encode() + b"X\x01\x00\x00\x00x\x85R."


def zipped(data: bytes) -> bytes:
    """As a file of ``torch.save``."""
    return archive("archive", {"data.pkl": data, "byteorder": b"little", "version": b"3\n"})[0]


@pytest.mark.parametrize("name", ["training_args.bin", "tokenizer.pkl", "vocab.bin", "odd", "data.dat"])
@pytest.mark.parametrize(
    "call", ["os.system", "transformers.utils.hub.cached_file", "verl.utils.fs.copy", "my.own.Class"]
)
@pytest.mark.parametrize("in_zip", [False, True])
def test_pickles_that_call_what_is_on_no_list_stay_behind(tmp_path: Path, name: str, call: str, in_zip: bool) -> None:
    data = pickled(call)
    (tmp_path / name).write_bytes(zipped(data) if in_zip else data)
    assert reasons(tmp_path) == {name: Reason.CALLS}
    # Somebody may vouch for a class of his own, and for nothing that reaches the system.
    (found,) = leftovers(tmp_path, (), [call])
    assert found.reason is (Reason.CALLS if call == "os.system" else None)


def test_a_file_in_which_pickles_cannot_be_found_stays_behind(tmp_path: Path) -> None:
    (tmp_path / "training_args.bin").write_bytes(zipped(pickled("os.system"))[:-30])
    assert reasons(tmp_path) == {"training_args.bin": Reason.CALLS}


def test_a_trainers_own_arguments_go_along(tmp_path: Path) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    arguments = transformers.TrainingArguments(output_dir=str(tmp_path / "out"), use_cpu=True)
    assert arguments.device.type == "cpu"
    torch.save(arguments, tmp_path / "training_args.bin")
    torch.save(arguments, tmp_path / "vocab.bin", _use_new_zipfile_serialization=False)
    assert reasons(tmp_path) == {"training_args.bin": None, "vocab.bin": None}
