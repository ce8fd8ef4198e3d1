"""Checkpoints written to an S3 store: the same bytes as on a disk, all of them or none, whatever is killed, lost, refused or raced."""

from __future__ import annotations

import itertools
import random
import shutil
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest

from mcore_rlhf.convert import ConvertOptions, convert
from mcore_rlhf.core.catalog import UINT8, Record
from mcore_rlhf.errors import CheckpointError, StorageError, UsageError
from mcore_rlhf.families.options import ReadOptions, WriteOptions
from mcore_rlhf.formats.registry import open_checkpoint
from mcore_rlhf.manager.convert_step import convert_step
from mcore_rlhf.manager.run import retention, steps
from mcore_rlhf.manager.run.adopt import adopt, why_not
from mcore_rlhf.manager.subject import find
from mcore_rlhf.storage import requests, upload
from mcore_rlhf.storage.checksum import crc32
from mcore_rlhf.storage.destination import LocalFolder
from mcore_rlhf.storage.manifest import Manifest, check
from mcore_rlhf.storage.objects import ObjectStore, open_url
from mcore_rlhf.storage.paths import ReadablePath, walk
from mcore_rlhf.storage.publish import MANIFEST_NAME
from mcore_rlhf.storage.reading import read_bytes
from mcore_rlhf.storage.record_file import Layout, Piece, Raw
from mcore_rlhf.storage.settings import StoreSettings, stores_with
from mcore_rlhf.storage.store import StorePath
from mcore_rlhf.storage.upload import StorePublication, dead, remove
from mcore_rlhf.storage.uploaded import part_nbytes
from tests.contract.test_store import GOLDENS, ONE_OF_EACH
from tests.helpers.object_store import BUCKET, S3, LostAnswer, Request, killed_at, url
from tests.helpers.store_child import convert_there
from tests.unit.manager.roots import make_step

SOURCE = GOLDENS / "megatron" / "tp1_bf16_do"
FAST: dict[str, Any] = {"fsync": False, "trust_replicas": True}


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test sees after a second what a user sees after three minutes; what a busy machine answers late is no fault."""
    monkeypatch.setattr(requests, "DEADLINE_S", 1.0)


def at(key: str) -> StorePath:
    """A folder, as it is now."""
    return open_url(url(key))


def contents(folder: ReadablePath) -> dict[str, bytes]:
    """Every file as a reader sees it; of the manifest, what does not depend on time and place."""
    found = {}
    for parent, names in walk(folder):
        for name in names:
            path = parent / name
            found[path.relative_to(folder).as_posix()] = read_bytes(path, 1 << 30)
    for name in found:
        if name.rpartition("/")[2] in (MANIFEST_NAME, steps.MANIFEST):
            manifest = Manifest.from_json(found[name], name)
            report = {key: value for key, value in manifest.report.items() if key != "converted_from"}
            said = (sorted(manifest.files.items()), manifest.step, manifest.parts, manifest.lossless, report)
            found[name] = repr(said).encode()
    return found


def keys(key: str) -> list[str]:
    """Everything that lies below a key."""
    store = at(key).store
    assert isinstance(store, ObjectStore)
    return sorted(item["path"] for item in store.objects(key))


@pytest.mark.parametrize("to", ["megatron", "megatron-dist", "deepspeed", "universal", "dcp", "hf"])
def test_every_format_is_written_as_on_a_disk(s3: S3, tmp_path: Path, to: str) -> None:
    options = ConvertOptions(to=to, **FAST)
    convert(SOURCE, tmp_path / "here", options)
    convert(SOURCE, Path(url(f"every/{to}")), options)
    assert contents(at(f"every/{to}")) == contents(tmp_path / "here")
    if to != "hf":
        back = ConvertOptions(to="megatron-dist", **FAST)
        convert(tmp_path / "here", tmp_path / "back", back)
        convert(url(f"every/{to}"), Path(url(f"every/{to}-back")), back)
        assert contents(at(f"every/{to}-back")) == contents(tmp_path / "back")


def test_sums_are_those_of_what_the_store_has(s3: S3, tmp_path: Path) -> None:
    options = ConvertOptions(to="megatron-dist", write=WriteOptions(integrity=True), **FAST)
    convert(SOURCE, tmp_path / "here", options)
    convert(SOURCE, Path(url("sums")), options)
    there = contents(at("sums"))
    assert there == contents(tmp_path / "here")
    assert any(name.endswith("integrity.json") for name in there)


def test_what_lies_in_a_published_folder_is_found_by_its_plain_name(s3: S3) -> None:
    convert(SOURCE, Path(url("inner")), ConvertOptions(to="megatron-dist", **FAST))
    (inner,) = [child.name for child in at("inner").iterdir() if child.is_dir()]
    assert inner.startswith("iter_")
    assert not any(".tx-" in path for path in contents(at("inner")))
    assert open_checkpoint(url(f"inner/{inner}"), ReadOptions()).format == "megatron-dist"
    assert read_bytes(at(f"inner/{inner}/metadata.json"))
    manifest = Manifest.read(at("inner") / MANIFEST_NAME)
    assert manifest.prefix.startswith(".tx-whole-")
    assert not check(at("inner"), manifest).found


@pytest.mark.parametrize("nbytes", [0, 1, 8 << 20, (20 << 20) + 3])
def test_a_file_is_sent_as_it_is_made(s3: S3, tmp_path: Path, nbytes: int) -> None:
    """In parts, with one buffer that is used again and again, a hole in it, and what follows from its CRC behind it."""
    record = Record("x", "all", UINT8, nbytes, 3)
    layout = Layout(
        nbytes + 7,
        {"all": (3, nbytes)},
        [Piece(0, b"top", "top")],
        lambda crcs: [Piece(3 + nbytes, f"{(crcs['all'] ^ crcs['top']) & 0xFFFF:04x}".encode())],
    )
    data = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
    data[5 << 20 : 11 << 20] = 0
    publication = StorePublication(at(f"sent/{nbytes}"))
    with publication:
        s3.requests.clear()
        entries, buffer = [], np.empty(1 << 20, np.uint8)
        for to in (publication, LocalFolder(tmp_path)):
            with to.writer("x", layout) as writer:
                for start in range(0, nbytes, 1 << 20):
                    piece = data[start : start + (1 << 20)]
                    buffer[: len(piece)] = piece
                    if piece.any() or nbytes < 1 << 20:
                        writer.write("all", start, buffer[: len(piece)].data)
                    buffer[:] = 0xFF
                entries.append(writer.finish({record.key: crc32(data)}))
        assert entries[0] == entries[1]
        sent = [request for request in s3.requests if request.key.endswith("/x")]
        publication.commit(Manifest({"x": entries[0]}))
    assert read_bytes(at(f"sent/{nbytes}") / "x", 1 << 30) == (tmp_path / "x").read_bytes()
    parts = sum("partNumber" in request.query for request in sent)
    assert parts == (-(-(nbytes + 7) // (8 << 20)) if nbytes >= 8 << 20 else 0)


def test_parts_of_the_largest_files() -> None:
    assert part_nbytes(1) == 8 << 20
    assert all(-(-nbytes // part_nbytes(nbytes)) <= 9000 for nbytes in (72 << 30, 100 << 30, 5 << 40))


def test_other_bytes_than_were_made_are_never_published(s3: S3) -> None:
    with pytest.raises(ValueError, match="other bytes were sent"), StorePublication(at("other")) as publication:  # noqa: PT012
        writer = publication.writer("x", Raw([Record("x", "all", UINT8, 2, 0)]).layout("x"))
        writer.write("all", 0, b"ab")
        writer.finish({"all": crc32(b"ac")})
    assert keys("other") == []


def _seen(key: str) -> dict[str, bytes] | None:
    """What a reader sees: None where there is nothing; whatever there is must be whole."""
    folder = at(key)
    if not any(True for _ in folder.iterdir()):
        return None
    manifest = Manifest.read(folder / MANIFEST_NAME)
    assert not check(folder, manifest).found
    assert open_checkpoint(folder, ReadOptions()).format == "hf"
    return contents(folder)


@pytest.mark.parametrize("plain", [False, True], ids=["overwriting", "plain"])
@pytest.mark.parametrize("nth", [4, pytest.param(1, marks=pytest.mark.slow)], ids=["one in four", "each"])
def test_a_kill_at_a_request_leaves_all_or_nothing(
    s3: S3, tmp_path: Path, plain: bool, nth: int, rng: random.Random
) -> None:
    """Before a request is carried out, which is after the one before it; a lost answer has a test of its own."""
    new = ConvertOptions(to="hf", write=WriteOptions(dtype="float32"), overwrite=True, workers=1, **FAST)
    first = f"killed/{plain}/first"
    convert(SOURCE, Path(url(first)), ConvertOptions(to="hf", **FAST))
    written = {path.removeprefix(first): s3.get(path) for path in keys(first)}
    convert(SOURCE, tmp_path / "old", ConvertOptions(to="hf", **FAST))
    convert(SOURCE, tmp_path / "new", new)
    old, whole = (None if plain else contents(tmp_path / "old")), contents(tmp_path / "new")
    outcomes = []
    for number in itertools.count(rng.randrange(nth), nth):
        key = f"killed/{plain}/{number}"
        if old is not None:
            for path, data in written.items():
                s3.put(key + path, data)
        write = {"overwrite": not plain, "write": {"dtype": "float32"}}
        was_killed = killed_at(s3, number, convert_there, str(SOURCE), url(key), plain, write)
        there = _seen(key)
        assert there in (old, whole)
        outcomes.append(there == whole)
        convert(SOURCE, Path(url(key)), new)
        assert _seen(key) == whole
        if not was_killed:
            break
    assert number >= 8
    assert outcomes == sorted(outcomes)  # from one request on, it is published
    assert (outcomes[0], outcomes[-1]) == (False, True)


@pytest.mark.parametrize("overwrite", [False, True])
def test_of_two_writers_exactly_one_wins(s3: S3, overwrite: bool) -> None:
    key = f"race/{overwrite}"
    if overwrite:
        convert(SOURCE, Path(url(key)), ConvertOptions(to="hf", **FAST))
    ready, said = threading.Barrier(2), dict[str, str]()

    def write(name: str) -> None:
        try:
            with StorePublication(at(key), overwrite, lambda path: True) as publication:
                entry = publication.put("who", name)
                ready.wait(30)
                publication.commit(Manifest({"who": entry}))
            said[name] = ""
        except StorageError as error:
            said[name] = str(error)

    threads = [threading.Thread(target=write, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    (winner,) = (name for name, error in said.items() if not error)
    (error,) = (error for error in said.values() if error)
    assert "another writer has published there meanwhile" in error
    assert contents(at(key))["who"] == winner.encode()
    prefix = Manifest.read(at(key) / MANIFEST_NAME).prefix
    assert keys(key) == [f"{key}/{prefix}/who", f"{key}/{MANIFEST_NAME}"]


def _publish_late(key: str, names: str, meanwhile: Callable[[StorePublication], None]) -> None:
    with StorePublication(at(key)) as writing:
        manifest = Manifest({name: writing.put(name, b"ours") for name in names})
        meanwhile(writing)
        writing.commit(manifest)


def test_what_was_sent_and_is_gone_is_not_published(s3: S3) -> None:
    """A rule of the bucket, or whoever prunes what is dead, took a slow writer's files."""
    with pytest.raises(StorageError, match="was not published: 1 of 2 files"):
        _publish_late(
            "slow", "xy", lambda writing: upload.object_store(at("slow")).remove([f"slow/{writing.prefix}/y"])
        )
    assert keys("slow") == []


def test_what_another_tool_wrote_meanwhile_is_left_alone(s3: S3) -> None:
    with (
        stores_with(StoreSettings(plain=True)),
        pytest.raises(StorageError, match="something else was written there meanwhile"),
    ):
        _publish_late("taken", "x", lambda writing: s3.put("taken/x", b"theirs"))
    assert keys("taken") == ["taken/x"]
    assert read_bytes(at("taken") / "x") == b"theirs"


@pytest.mark.usefixtures("impatient")
def test_a_lost_answer_is_no_failure(s3: S3) -> None:
    lost = []

    def lose(request: Request) -> None:
        if request.key == f"lost/{MANIFEST_NAME}" and request.method == "PUT":
            lost.append(request)
            raise LostAnswer

    s3.after = lose
    with StorePublication(at("lost")) as publication:
        publication.commit(Manifest({"x": publication.put("x", b"1")}))
    assert lost
    assert read_bytes(at("lost") / "x") == b"1"


@pytest.mark.usefixtures("impatient")
def test_a_manifest_that_may_still_arrive_finds_its_files(s3: S3) -> None:
    s3.fault = lambda request: (
        "500 Internal Server Error" if request.key == f"late/{MANIFEST_NAME}" and request.method == "PUT" else None
    )
    with (
        pytest.raises(StorageError, match=r"was not published\.") as raised,
        StorePublication(at("late")) as publication,
    ):
        publication.commit(Manifest({"x": publication.put("x", b"1")}))
    assert "mcore-rlhf prune --dead s3://bucket/late" in str(raised.value)
    assert f"late/{publication.prefix}/x" in keys("late")
    assert not any(True for _ in at("late").iterdir())


FAULTS: dict[str, tuple[Callable[[Request], str | None], str]] = {
    "no permission": (lambda r: "403 Forbidden" if r.method == "PUT" else None, "cannot write: the store refuses"),
    "no conditional puts": (lambda r: "501 Not Implemented" if r.conditional else None, "has no conditional puts"),
    "always busy": (lambda r: "503 Slow Down" if r.key.endswith("safetensors") else None, r"safetensors: cannot write"),
    "busy in the middle": (
        lambda r: "503 Slow Down" if r.key.endswith("config.json") else None,
        r"config.json: cannot write",
    ),
}


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("fault", FAULTS)
def test_what_a_store_refuses_leaves_nothing_but_what_is_finished(s3: S3, fault: str) -> None:
    s3.fault, message = FAULTS[fault]
    with pytest.raises(StorageError, match=message) as raised:
        convert(SOURCE, Path(url("refused")), ConvertOptions(to="hf", **FAST))
    assert "Traceback" not in str(raised.value)
    s3.fault = lambda request: None
    assert bool(keys("refused")) == (fault == "busy in the middle") == ("What is finished is kept" in str(raised.value))


def test_a_store_that_ignores_conditions_is_found_out(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ObjectStore, "put_if", lambda self, key, data, tag: self.put(key, data) or ("tag",))
    with pytest.raises(StorageError, match="two writers both would believe"):
        convert(SOURCE, Path(url("careless")), ConvertOptions(to="hf", **FAST))
    assert keys("careless") == []


def test_what_cannot_be_a_target(s3: S3) -> None:
    options = ConvertOptions(to="hf", **FAST)
    with pytest.raises(StorageError, match="NoSuchBucket"):
        convert(SOURCE, Path("s3://nowhere/out"), options)
    with pytest.raises(UsageError, match="is a whole bucket"):
        convert(SOURCE, Path(f"s3://{BUCKET}"), options)
    s3.put("mine/thesis.tex", b"years of work")
    with pytest.raises(StorageError, match="give --overwrite"):
        convert(SOURCE, Path(url("mine")), options)
    with pytest.raises(StorageError, match="does not look like a checkpoint"):
        convert(SOURCE, Path(url("mine")), ConvertOptions(to="hf", overwrite=True, **FAST))
    s3.upload(SOURCE, "own")
    for target in ("own", "own/inside"):
        with pytest.raises(UsageError, match="source"):
            convert(url("own"), Path(url(target)), options)
    assert keys("mine") == ["mine/thesis.tex"]


def test_a_source_that_changes_leaves_nothing(s3: S3) -> None:
    s3.upload(SOURCE, "moving")
    victim = next(path for path in keys("moving") if path.endswith("distrib_optim.pt"))
    calls = []

    def change(request: Request) -> None:
        if request.key.endswith("optimizer_state.pt") or ("/zero/" in request.key and not calls):
            calls.append(request)
            s3.put(victim, bytes(1 << 20))

    s3.after = change
    with pytest.raises(CheckpointError, match=r"has changed while it was read|damaged"):
        convert(url("moving"), Path(url("moved")), ConvertOptions(to="universal", **FAST))
    assert keys("moved") == []


def test_plain_names_for_other_loaders(s3: S3, tmp_path: Path) -> None:
    """Over an older one with a file that the new one lacks: the folder is what a disk would hold."""
    s3.upload(GOLDENS / ONE_OF_EACH["hf"], "plain")
    s3.put("plain/model-00009-of-00009.safetensors", b"of an older shard")
    options = ConvertOptions(to="hf", overwrite=True, **FAST)
    convert(SOURCE, tmp_path / "here", options)
    with stores_with(StoreSettings(plain=True)):
        convert(SOURCE, Path(url("plain")), options)
    assert contents(at("plain")) == contents(tmp_path / "here")
    assert keys("plain") == sorted(f"plain/{name}" for name in contents(tmp_path / "here"))
    assert Manifest.read(at("plain") / MANIFEST_NAME).prefix == ""


@pytest.mark.usefixtures("impatient")
def test_a_torn_plain_one_says_so(s3: S3) -> None:
    s3.fault = lambda request: "503 Slow Down" if request.key == "torn/config.json" else None
    with (
        stores_with(StoreSettings(plain=True)),
        pytest.raises(StorageError, match="other loaders must not read it") as told,
    ):
        convert(SOURCE, Path(url("torn")), ConvertOptions(to="hf", **FAST))
    assert "goes on there" not in str(told.value)  # it is published
    s3.fault = lambda request: None
    manifest = Manifest.read(at("torn") / MANIFEST_NAME)
    assert manifest.prefix
    assert _seen("torn") is not None


def test_what_is_dead_goes_and_nothing_else(s3: S3) -> None:
    convert(SOURCE, Path(url("dying/good")), ConvertOptions(to="hf", **FAST))
    before = keys("dying")
    s3.put("dying/good/.tx-0000000000001-dead/model.safetensors", b"12345")
    s3.put("dying/other/.tx-0000000000002-dead.writer", b"host")
    assert not any(True for _ in at("dying/other").iterdir())
    assert list(dead(at("dying"))) == []
    found = list(dead(at("dying"), timedelta(0)))
    assert [(one.path.rpartition("/")[2], one.nbytes) for one in found] == [
        (".tx-0000000000001-dead", 5),
        (".tx-0000000000002-dead", 4),
    ]
    for one in found:
        upload.object_store(at("dying")).remove(one.keys)
    assert keys("dying") == before


def test_a_bucket_by_its_other_name_is_the_same_one(s3: S3) -> None:
    convert(SOURCE, Path(url("alias")), ConvertOptions(to="hf", **FAST))
    with pytest.raises(UsageError, match="are the same folder"):
        convert(Path(f"s3a://{BUCKET}/alias"), Path(url("alias")), ConvertOptions(to="hf", overwrite=True, **FAST))


def test_a_deletion_takes_the_manifest_first(s3: S3) -> None:
    convert(SOURCE, Path(url("going")), ConvertOptions(to="hf", **FAST))
    s3.requests.clear()
    seen = []
    s3.after = lambda request: (
        seen.append(sorted(contents(at("going")))) if "delete" in request.query and len(seen) < 1 else None
    )  # type: ignore[func-returns-value]
    assert remove(at("going"))
    assert seen == [[]]
    assert keys("going") == []
    assert not remove(at("going"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's root with a step of one role."""
    root = tmp_path_factory.mktemp("stepped") / "run"
    folder = steps.step_folder(root, 2)
    shutil.copytree(SOURCE, folder / "actor")
    adopt(folder)
    return root


def test_roots_of_runs(s3: S3, run: Path, tmp_path: Path) -> None:
    """Step 1 lies there as it was copied from a disk, step 2 as it was published."""
    make_step(tmp_path / "run", 1)
    s3.upload(tmp_path / "run", "run")
    options = ConvertOptions(to="megatron", write=WriteOptions(tp=2), **FAST)
    for root in (at("run"), tmp_path / "run"):
        convert_step(find(run, ReadOptions()), root, options)
    assert [(step.step, step.state, step.roles) for step in steps.listed(at("run"))] == [
        (step.step, step.state, step.roles) for step in steps.listed(tmp_path / "run")
    ]
    assert contents(at("run")) == contents(tmp_path / "run")
    found = find(url("run"), ReadOptions())
    assert (found.step, list(found.models)) == (2, ["actor"])
    convert_step(found, tmp_path / "there", options)
    convert_step(find(tmp_path / "run", ReadOptions()), tmp_path / "here", options)
    assert contents(tmp_path / "there") == contents(tmp_path / "here")

    steps.quarantine(steps.step_folder(at("run"), 2), "reward collapsed")
    newest = steps.newest(at("run"))
    assert newest is not None
    assert newest.step == 1
    assert steps.listed(at("run"))[1].quarantined == "reward collapsed"
    assert steps.release(steps.step_folder(at("run"), 2))
    assert not steps.release(steps.step_folder(at("run"), 2))

    planned = retention.plan_deletions(at("run"), retention.Retention([retention.KeepLast(1)]))
    assert [deletion.step for deletion in planned] == [1]
    assert retention.apply(at("run"), planned) == planned
    assert [step.step for step in steps.listed(at("run"))] == [2]
    assert not [key for key in keys("run") if key.startswith("run/global_step_1/")]


def test_a_step_that_another_trainer_left_in_a_store_is_adopted(s3: S3, run: Path) -> None:
    s3.upload(run / "global_step_2", "left/global_step_2")
    upload.object_store(at("left")).remove(["left/global_step_2/manifest.json"])
    folder = at("left/global_step_2")
    (foreign,) = steps.listed(at("left"))
    assert (foreign.state, why_not(folder)) == ("foreign", "")
    adopted = adopt(folder)
    assert adopted.files == steps.read_manifest(run / "global_step_2").files
    assert [step.state for step in steps.listed(at("left"))] == ["committed"]
    victim = next(key for key in keys("left") if key.endswith("model_optim_rng.pt"))
    upload.object_store(at("left")).remove(["left/global_step_2/manifest.json"])
    s3.after = lambda request: s3.put(victim, b"torn") if request.key == victim and request.method == "GET" else None
    with pytest.raises(CheckpointError):
        adopt(at("left/global_step_2"))
    assert not steps.committed(at("left"))


def test_a_front_that_follows_from_the_end_is_staged(s3: S3, tmp_path: Path) -> None:
    layout = Layout(8, {"all": (4, 4)}, (), lambda crcs: [Piece(0, crcs["all"].to_bytes(4, "big"))], in_order=False)
    with pytest.raises(UsageError, match="--staging"), StorePublication(at("staged")) as publication:
        publication.writer("x", layout)
    with stores_with(StoreSettings(staging=tmp_path / "aside")), StorePublication(at("staged")) as publication:
        with publication.writer("x", layout) as writer:
            writer.write("all", 0, b"data")
            entry = writer.finish({"all": crc32(b"data")})
        assert list((tmp_path / "aside").iterdir()) == []
        publication.commit(Manifest({"x": entry}))
    assert read_bytes(at("staged") / "x") == crc32(b"data").to_bytes(4, "big") + b"data"
    too_much = Layout(1 << 60, {"all": (4, (1 << 60) - 4)}, (), layout.ending, in_order=False)
    with (
        stores_with(StoreSettings(staging=tmp_path / "aside")),
        pytest.raises(StorageError, match=r"only .* free there"),
        StorePublication(at("full")) as publication,
    ):
        publication.writer("x", too_much)
    assert keys("full") == []


def test_a_store_in_memory_keeps_the_same_promises() -> None:
    """obstore's own, to which no server belongs."""
    from obstore.store import MemoryStore

    client = MemoryStore()

    class InMemory(requests.Requests):
        def _made(self, answer: float, whole: float, retries: int) -> Any:
            return client

    def fresh() -> StorePath:
        return StorePath(ObjectStore(InMemory("memory:///", StoreSettings(), {})), PurePosixPath("run/ckpt"))

    with StorePublication(fresh()) as first:
        first.commit(Manifest({"deep/x": first.put("deep/x", "old")}))
    with pytest.raises(StorageError, match="exists already"), StorePublication(fresh()):
        pass
    loser = StorePublication(fresh(), True, lambda path: True)
    with loser, StorePublication(fresh(), True, lambda path: True) as winner:
        entries = {"x": winner.put("x", "new")}
        lost = {"x": loser.put("x", "lost")}
        winner.commit(Manifest(entries))
        with pytest.raises(StorageError, match="another writer has published"):
            loser.commit(Manifest(lost))
    assert contents(fresh())["x"] == b"new"
    assert set(contents(fresh())) == {"x", MANIFEST_NAME}
    store = fresh().store
    assert isinstance(store, ObjectStore)
    assert len(store.objects("run")) == 2
    assert remove(fresh())
    assert store.objects("") == []
