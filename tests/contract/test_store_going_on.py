"""A conversion into an S3 store that was killed, or refused midway, goes on where it was; whose files are whose is never in doubt."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from mcore_rlhf.convert import ConvertOptions, convert
from mcore_rlhf.errors import CheckpointError, StorageError
from mcore_rlhf.execution.run import Progress
from mcore_rlhf.families.options import WriteOptions
from mcore_rlhf.storage.manifest import Manifest
from mcore_rlhf.storage.publish import MANIFEST_NAME
from mcore_rlhf.storage.upload import StorePublication, conversions_left
from tests.contract.test_store_parts import FILES, OPTIONS, SOURCE, sent, whole
from tests.contract.test_store_writing import at, contents, keys
from tests.helpers.object_store import S3, Request

__all__ = ["whole"]


class Heard(Progress):
    """What the user is told."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def refused_after(s3: S3, files: int, answer: str = "403 Forbidden") -> None:
    """Let the store take so many rank files, and no more."""
    taken: set[str] = set()

    def fault(request: Request) -> str | None:
        if request.method == "PUT" and request.key.endswith(".pt"):
            taken.add(request.key)
            return answer if len(taken) > files else None
        return None

    s3.fault = fault


def go(key: str, **more: Any) -> list[str]:
    """Convert; what was said on the way."""
    heard = Heard()
    convert(SOURCE, at(key), ConvertOptions(**{**OPTIONS, **more}), heard)
    return heard.notes


def interrupted(s3: S3, key: str, **more: Any) -> None:
    """A conversion that ends when three files are there."""
    refused_after(s3, 3)
    with pytest.raises(
        StorageError, match=r"(?s)the store refuses.*What is finished is kept in the store, in s3://"
    ) as told:
        go(key, **more)
    assert "the same command goes on there; with --no-resume it begins anew" in str(told.value)
    s3.fault = lambda request: None
    s3.requests.clear()


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_is_there_is_not_sent_again(s3: S3, whole: dict[str, bytes], overwrite: bool) -> None:
    key = f"on/{overwrite}"
    if overwrite:
        convert(SOURCE, at(key), ConvertOptions(to="megatron", write=WriteOptions(tp=2, pp=2), fsync=False))
    before = contents(at(key))
    interrupted(s3, key, overwrite=overwrite)
    assert contents(at(key)) == before
    (left,) = conversions_left(at(key))
    assert [note for note in go(key, overwrite=overwrite) if left in note]
    assert sum(sent(s3).values()) == FILES - 3
    assert contents(at(key)) == whole
    prefix = Manifest.read(at(key) / MANIFEST_NAME).prefix
    assert left.endswith(prefix)
    assert {name.removeprefix(f"{key}/").partition("/")[0] for name in keys(key)} == {MANIFEST_NAME, prefix}


def test_a_file_that_is_not_what_was_noted_is_made_again(s3: S3, whole: dict[str, bytes]) -> None:
    interrupted(s3, "touched")
    victim = next(key for key in keys("touched") if key.endswith(".pt"))
    s3.put(victim, b"\0" * len(s3.get(victim)))
    notes = (key for key in keys("touched") if ".parts/" in key and not key.endswith("/plan"))
    *_, note = (key for key in notes if victim.rpartition("/")[2].encode() not in s3.get(key))
    s3.put(note, b"{")
    s3.requests.clear()
    go("touched")
    assert sum(sent(s3).values()) == FILES - 1
    assert contents(at("touched")) == whole


def test_no_resume_starts_anew_and_another_plan_as_well(s3: S3, whole: dict[str, bytes]) -> None:
    interrupted(s3, "anew")
    go("anew", resume=False)
    assert sum(sent(s3).values()) == FILES
    assert contents(at("anew")) == whole
    interrupted(s3, "other")
    assert not go("other", write=WriteOptions(tp=4, pp=2))
    assert "TP4" in str(Manifest.read(at("other") / MANIFEST_NAME).parts)


def test_what_fails_for_another_reason_leaves_nothing(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    from mcore_rlhf.storage.uploaded import UploadedFile

    written = []
    finish = UploadedFile.finish

    def failing(self: UploadedFile, *args: Any, **more: Any) -> Any:
        written.append(self)
        if len(written) > 3:
            raise CheckpointError("the source is damaged")
        return finish(self, *args, **more)

    monkeypatch.setattr(UploadedFile, "finish", failing)
    with pytest.raises(CheckpointError, match="the source is damaged"):
        go("damaged-source")
    assert keys("damaged-source") == []


def test_who_fails_takes_nothing_of_whom_came_after(s3: S3) -> None:
    """Two with one plan: the first fails once the second is there."""
    first, second = StorePublication(at("shared")), StorePublication(at("shared"))
    with second:
        with pytest.raises(RuntimeError, match="fails"), first:  # noqa: PT012
            first.go_on("whole-x")
            manifest = Manifest({"x": first.put("x", "x")})
            second.go_on("whole-x")
            raise RuntimeError("fails")
        assert "shared/.tx-whole-x/x" in keys("shared")
        second.commit(manifest)
    assert contents(at("shared"))["x"] == b"x"
    assert keys("shared") == ["shared/.tx-whole-x/x", f"shared/{MANIFEST_NAME}"]


def test_who_fails_alone_lets_nobody_count_on_what_goes(s3: S3) -> None:
    first, second = StorePublication(at("going")), StorePublication(at("going"))
    arrived = []

    def arrive(request: Request) -> None:
        if request.method == "POST" and "delete" in request.query and not arrived:
            arrived.append(request)
            thread = threading.Thread(target=second.go_on, args=("whole-x",))
            thread.start()
            thread.join(30)

    with second:
        with pytest.raises(RuntimeError, match="fails"), first:  # noqa: PT012
            first.go_on("whole-x")
            first.put("x", "x")
            s3.after = arrive
            raise RuntimeError("fails")
        assert arrived
        assert second.prefix == ".tx-whole-x-anew"
        second.commit(Manifest({"x": second.put("x", "y")}))
    assert contents(at("going"))["x"] == b"y"
    assert keys("going") == [f"going/{second.prefix}/x", f"going/{MANIFEST_NAME}"]


def test_of_two_with_one_plan_one_publishes_and_the_other_takes_nothing_away(s3: S3) -> None:
    first, second = StorePublication(at("twice")), StorePublication(at("twice"))
    with pytest.raises(StorageError, match="another writer has published there meanwhile"), first:  # noqa: PT012
        first.go_on("whole-x")
        manifest = Manifest({"x": first.put("x", "x")})
        with second:
            second.go_on("whole-x")
            second.commit(manifest)
        first.commit(manifest)
    assert contents(at("twice"))["x"] == b"x"
    assert Manifest.read(at("twice") / MANIFEST_NAME).transaction == second.transaction
