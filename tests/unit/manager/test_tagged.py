"""Tags that a trainer writes itself: what is published, named, replaced and refused. The trainer here writes two files."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mcore_rlhf.errors import Corrupt, Incomplete, StorageError, Untrusted, UsageError
from mcore_rlhf.manager.tagged import TagOptions, Tags

OPTIONS = TagOptions(fsync=False)


def writing(tag: str, text: str = "state") -> Callable[[Path], None]:
    def write(staging: Path) -> None:
        (staging / tag).mkdir()
        (staging / tag / "mp_rank_00_model_states.pt").write_text(text)
        (staging / "script.py").write_text("print()")

    return write


def save(root: Path, tag: str, text: str = "state", **named: Any) -> Path:
    return Tags("deepspeed", OPTIONS).save(
        root, tag, writing(tag, text), latest="latest", beside=("script.py",), **named
    )


def test_a_tag_is_named_when_it_is_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert save(tmp_path / "new", "epoch 1") == tmp_path / "new" / "epoch 1"
    assert sorted(os.listdir(tmp_path / "new")) == ["epoch 1", "latest", "script.py"]
    assert (tmp_path / "new" / "latest").read_text() == "epoch 1"
    assert "epoch 1: committed, 5 bytes" in caplog.text


def test_one_that_fails_leaves_the_name_as_it_was(tmp_path: Path) -> None:
    save(tmp_path, "a")

    def failing(staging: Path) -> None:
        writing("b")(staging)
        raise RuntimeError("the trainer's own")

    def nothing(staging: Path) -> None:
        (staging / "script.py").write_text("print()")

    def linking(staging: Path) -> None:
        writing("b")(staging)
        (staging / "b" / "weights").symlink_to("/etc/passwd")

    for write, kind, said in (
        (failing, RuntimeError, "the trainer's own"),
        (nothing, Incomplete, "nothing was written there"),
        (linking, Incomplete, "weights: is a link"),
    ):
        with pytest.raises(kind, match=said):
            Tags("deepspeed", OPTIONS).save(tmp_path, "b", write, latest="latest")
        assert sorted(os.listdir(tmp_path)) == ["a", "latest", "script.py"]
        assert (tmp_path / "latest").read_text() == "a"


def test_what_is_no_checkpoint_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.txt").write_text("years of work")
    with pytest.raises(StorageError, match="does not look like a checkpoint"):
        save(tmp_path, "thesis")
    save(tmp_path, "a", "one")
    save(tmp_path, "a", "two")
    assert (tmp_path / "a" / "mp_rank_00_model_states.pt").read_text() == "two"
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


@pytest.mark.parametrize("tag", ["", ".", "..", "a/b", "/etc", ".hidden"])
def test_tags_that_no_folder_can_have(tmp_path: Path, tag: str) -> None:
    with pytest.raises(UsageError, match="is to be the name of one folder"):
        save(tmp_path, tag)
    with pytest.raises(Untrusted):
        save(tmp_path, "two\nlines")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"check": "none"}, "check: expected 'bytes' or 'sizes'"),
        ({"timeout": 0}, "timeout: expected"),
        ({"timeout": float("inf")}, "1e\\+09 at most, found inf"),
        ({"fsync": "no"}, "fsync: expected bool, found 'no'"),
    ],
)
def test_options_that_cannot_be(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        TagOptions(**given)


def test_what_is_looked_at_before_a_load(tmp_path: Path) -> None:
    tags = Tags("deepspeed", OPTIONS)
    tags.check(tmp_path / "nowhere", None, "latest")
    tags.check(tmp_path, "nothing", "latest")
    save(tmp_path, "a")
    save(tmp_path, "b")
    (tmp_path / "b" / "mp_rank_00_model_states.pt").write_text("State")
    with pytest.raises(Corrupt, match=r"is damaged(.|\n)*there as a whole: a\. Give one"):
        tags.check(tmp_path, None, "latest")
    Tags("deepspeed", TagOptions(check="sizes")).check(tmp_path, None, "latest")
    tags.check(tmp_path, "a", "latest")
    (tmp_path / "a" / "mcore_rlhf.json").write_text("{")
    with pytest.raises(Corrupt, match=r"is damaged(.|\n)*there as a whole: none"):
        tags.check(tmp_path, "b", "latest")
    (tmp_path / "b" / "mcore_rlhf.json").write_text("{")
    with pytest.raises(Corrupt, match="not valid JSON"):
        tags.check(tmp_path, "b", "latest")
    (tmp_path / "latest").write_text("../elsewhere")
    with pytest.raises(Untrusted, match="not a plain path"):
        tags.check(tmp_path, None, "latest")
