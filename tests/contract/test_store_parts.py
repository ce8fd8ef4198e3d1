"""Parts of a conversion into an S3 store make the bytes that one process makes on a disk, whoever is killed, late or twice there."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

from mcore_rlhf.convert import ConvertOptions, convert
from mcore_rlhf.errors import Corrupt, Incomplete, StorageError, Unsupported
from mcore_rlhf.families.job_options import PartNumber
from mcore_rlhf.families.options import ReadOptions, WriteOptions
from mcore_rlhf.manager.convert_step import convert_part, finish_parts
from mcore_rlhf.manager.subject import find
from mcore_rlhf.storage.manifest import Manifest
from mcore_rlhf.storage.objects import ObjectStore
from mcore_rlhf.storage.publish import MANIFEST_NAME
from mcore_rlhf.storage.store import StorePath
from mcore_rlhf.storage.upload import StorePublication, dead
from tests.contract.test_store_writing import at, contents, keys
from tests.helpers.conversions import GOLDENS
from tests.helpers.object_store import S3, Request

SOURCE = GOLDENS / "tp2pp2dp2_bf16_do"
OPTIONS: dict[str, Any] = {"to": "megatron", "write": WriteOptions(tp=1, pp=4), "fsync": False, "workers": 1}
FILES = 8


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    target = tmp_path_factory.mktemp("whole") / "out"
    convert(SOURCE, target, ConvertOptions(**OPTIONS))
    return contents(target)


def do(target: str | StorePath, *parts: int, of: int = 3, **more: Any) -> list[str]:
    """The files of some parts."""
    there = at(target) if isinstance(target, str) else target
    source, options = find(SOURCE, ReadOptions()), ConvertOptions(**{**OPTIONS, **more})
    return [name for part in parts for name in convert_part(source, there, options, PartNumber(part, of))]


def join(key: str, **more: Any) -> None:
    finish_parts(find(SOURCE, ReadOptions()), at(key), ConvertOptions(**{**OPTIONS, **more}))


def sent(s3: S3) -> Counter[str]:
    """How often each file of a target was sent as a whole."""
    puts = [request for request in s3.requests if request.method == "PUT" and "partNumber" not in request.query]
    return Counter(
        request.key.rpartition("/.tx-")[2].partition("/")[2] for request in puts if request.key.endswith(".pt")
    )


def test_joined_they_are_what_one_process_makes_also_where_one_was_done_twice_at_once(
    s3: S3, whole: dict[str, bytes]
) -> None:
    do("joined", 2)
    do(pickle.loads(pickle.dumps(at("joined"))), 1)  # as a process on another host is given it
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda part: do("joined", part), (3, 3))
    assert first == second
    assert do("joined", 1)  # a third time: nothing is sent
    assert not list(at("joined").iterdir())
    with pytest.raises(Incomplete, match="no part has been done"):
        join("joined-elsewhere")
    join("joined")
    assert contents(at("joined")) == whole
    prefix = Manifest.read(at("joined") / MANIFEST_NAME).prefix
    assert {key.removeprefix("joined/").partition("/")[0] for key in keys("joined")} == {MANIFEST_NAME, prefix}
    assert set(sent(s3).values()) <= {1, 2}
    assert sum(sent(s3).values()) < 2 * FILES
    with pytest.raises(StorageError, match="exists already"):
        do("joined", 1)
    with pytest.raises(StorageError, match="exists already"):
        join("joined")


def test_a_part_that_failed_goes_on_where_it_was_and_takes_nothing_of_others(s3: S3, whole: dict[str, bytes]) -> None:
    others = do("failed", 2, of=2)
    mine: set[str] = set()

    def fault(request: Request) -> str | None:
        if request.method == "PUT" and request.key.endswith(".pt"):
            mine.add(request.key)
            return "403 Forbidden" if len(mine) > 2 else None
        return None

    s3.fault = fault
    with pytest.raises(StorageError, match="the store refuses"):
        do("failed", 1, of=2)
    s3.fault = lambda request: None
    with pytest.raises(Incomplete, match="parts are not done yet: 1/2"):
        join("failed")
    do("failed", 1, of=2)
    join("failed")
    assert contents(at("failed")) == whole
    again = {name for name, times in sent(s3).items() if times > 1}
    assert len(again) == 1  # the one that was refused
    assert not again & set(others)


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_is_no_longer_what_a_part_has_sent_is_done_again(s3: S3, whole: dict[str, bytes], overwrite: bool) -> None:
    key = f"damaged/{overwrite}"
    if overwrite:
        convert(SOURCE, at(key), ConvertOptions(to="megatron", write=WriteOptions(tp=2, pp=2), fsync=False))
    do(key, 1, 2, 3, overwrite=overwrite)
    victim = next(name for name in keys(key) if "/.tx-parts-" in name and name.endswith("model_optim_rng.pt"))
    store = at(key).store
    data = bytearray(store.pread(victim, 1 << 30, 0))
    s3.put(victim, bytes(data))  # the same bytes, sent again
    data[len(data) // 2] ^= 1
    s3.put(victim, bytes(data))
    with pytest.raises(
        Corrupt, match=r"(?s)model_optim_rng\.pt: is damaged.*is not what part \d/3 has left there"
    ) as told:
        join(key, overwrite=overwrite)
    number = int(str(told.value).partition("what part ")[2].partition("/")[0])
    with pytest.raises(Incomplete, match=f"parts are not done yet: {number}/3"):
        join(key, overwrite=overwrite)
    s3.requests.clear()
    do(key, number, overwrite=overwrite)
    assert sum(sent(s3).values()) == 1
    join(key, overwrite=overwrite)
    assert contents(at(key)) == whole


def test_other_options_are_another_plan(s3: S3) -> None:
    do("foreign", 1, 2, of=2)
    with pytest.raises(Unsupported, match="there are parts, and they are of other options: "):
        join("foreign", write=WriteOptions(tp=2, pp=2))


def test_replacing_leaves_what_is_there_until_all_parts_are_joined(s3: S3, whole: dict[str, bytes]) -> None:
    convert(SOURCE, at("replaced"), ConvertOptions(to="megatron", write=WriteOptions(tp=2, pp=2), fsync=False))
    before = contents(at("replaced"))
    for _ in range(2):
        do("replaced", 1, 2, of=2, overwrite=True)
        assert contents(at("replaced")) == before
        (lying,) = (
            one
            for one in dead(at("replaced"), timedelta(0))
            if "/.tx-parts-" in one.path and ".parts/" in "".join(one.keys)
        )
        assert not list(dead(at("replaced")))
        assert any(key.endswith(".pt") for key in lying.keys)
        join("replaced", overwrite=True)
        before = contents(at("replaced"))
        assert before == whole
    prefix = Manifest.read(at("replaced") / MANIFEST_NAME).prefix
    assert {key.removeprefix("replaced/").partition("/")[0] for key in keys("replaced")} == {MANIFEST_NAME, prefix}


@pytest.mark.parametrize("overwrite", [False, True])
def test_parts_that_were_joined_by_who_was_killed_then_are_tidied_up(
    s3: S3, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, overwrite: bool
) -> None:
    """The same command finds that all is done, and leaves no notes; a third time the target is taken."""
    key = f"tidied/{overwrite}"
    if overwrite:
        convert(SOURCE, at(key), ConvertOptions(to="megatron", write=WriteOptions(tp=2, pp=2), fsync=False))
    do(key, 1, 2, of=2, overwrite=overwrite)

    def killed(self: ObjectStore, keys: Sequence[str]) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as killing:
        killing.setattr(ObjectStore, "remove", killed)
        with pytest.raises(KeyboardInterrupt):
            join(key, overwrite=overwrite)
    assert contents(at(key)) == whole
    assert any(".parts/" in name for name in keys(key))
    join(key, overwrite=overwrite)
    prefix = Manifest.read(at(key) / MANIFEST_NAME).prefix
    assert contents(at(key)) == whole
    assert not [name for name in keys(key) if name.startswith((f"{key}/{prefix}.parts", f"{key}/{prefix}.writer"))]
    with pytest.raises((StorageError, Incomplete), match=r"exists already|no part has been done"):
        join(key, overwrite=overwrite)


def test_of_two_that_join_at_once_one_publishes_and_the_other_says_so(
    s3: S3, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    do("at-once", 1, 2, of=2)
    commit = StorePublication.commit

    def late(self: StorePublication, manifest: Manifest) -> StorePath:
        monkeypatch.setattr(StorePublication, "commit", commit)
        join("at-once")
        return commit(self, manifest)

    monkeypatch.setattr(StorePublication, "commit", late)
    with pytest.raises(StorageError, match="exists already"):
        join("at-once")
    assert contents(at("at-once")) == whole
    prefix = Manifest.read(at("at-once") / MANIFEST_NAME).prefix
    assert {name.removeprefix("at-once/").partition("/")[0] for name in keys("at-once")} == {MANIFEST_NAME, prefix}
