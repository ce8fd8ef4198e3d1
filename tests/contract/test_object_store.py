"""Checkpoints in an S3 store: the same as on a disk, in few requests, each byte once; and what can go wrong there."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_rlhf.convert import ConvertOptions, convert
from mcore_rlhf.errors import NotACheckpoint, StorageError, UsageError
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.formats.registry import open_checkpoint
from mcore_rlhf.storage.objects import open_url
from mcore_rlhf.storage.publish import MANIFEST_NAME
from mcore_rlhf.storage.reading import read_bytes
from mcore_rlhf.storage.requests import said
from mcore_rlhf.storage.settings import StoreSettings, stores_with
from mcore_rlhf.storage.torchzip import read_directory
from mcore_rlhf.verify.checkpoint import Depth, verify
from tests.contract.test_store import GOLDENS, ONE_OF_EACH, contents
from tests.helpers.object_store import S3, Request, url


@pytest.mark.parametrize("path", ONE_OF_EACH.values(), ids=list(ONE_OF_EACH))
def test_every_format_is_read_as_on_a_disk(s3: S3, path: str) -> None:
    s3.upload(GOLDENS / path, f"one/{path}")
    here, there = open_checkpoint(GOLDENS / path, ReadOptions()), open_checkpoint(url(f"one/{path}"), ReadOptions())
    assert contents(there) == contents(here)
    assert (there.format, there.parallel, there.states) == (here.format, here.parallel, here.states)


def test_a_rank_file_is_opened_in_three_requests(s3: S3, tmp_path: Path) -> None:
    """Its directory, its pickle, and nothing of its tensors: headers between them are worked out."""
    import torch

    torch.save({f"layer.{n}": torch.full((1 << 18,), n) for n in range(12)}, tmp_path / "rank.pt")
    data = (tmp_path / "rank.pt").read_bytes()
    s3.put("opened/rank.pt", data)
    root = open_url(url("opened"))
    found = read_directory(root / "rank.pt")
    assert [request.method for request in s3.requests if request.method != "PUT"].count("GET") <= 3
    assert sum(request.nbytes for request in s3.gets) < len(data) // 10
    here = read_directory(tmp_path / "rank.pt")
    assert list(found.members.values()) == list(here.members.values())
    assert found.read("data.pkl") == here.read("data.pkl")
    assert len(s3.gets) == 2


def test_a_conversion_fetches_every_byte_once(s3: S3, tmp_path: Path) -> None:
    folder = GOLDENS / ONE_OF_EACH["megatron"]
    s3.upload(folder, "run")
    s3.requests.clear()
    convert(url("run"), tmp_path / "there", ConvertOptions(to="universal", fsync=False))
    nbytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    assert sum(request.nbytes for request in s3.gets) <= 1.05 * nbytes
    assert len({(request.key, request.first) for request in s3.gets}) == len(s3.gets)
    assert all(request.if_match for request in s3.gets)

    convert(folder, tmp_path / "here", ConvertOptions(to="universal", fsync=False))
    written = {p.relative_to(tmp_path / "here") for p in (tmp_path / "here").rglob("*") if p.is_file()}
    assert written == {p.relative_to(tmp_path / "there") for p in (tmp_path / "there").rglob("*") if p.is_file()}
    for path in written - {Path(MANIFEST_NAME)}:
        assert (tmp_path / "here" / path).read_bytes() == (tmp_path / "there" / path).read_bytes()


def test_verify_reads_every_byte_once(s3: S3) -> None:
    folder = GOLDENS / ONE_OF_EACH["megatron"]
    s3.upload(folder, "checked")
    s3.requests.clear()
    assert not verify(url("checked"), ReadOptions(), Depth.DEEP).problems
    nbytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    assert sum(request.nbytes for request in s3.gets) <= 1.05 * nbytes


def test_a_damaged_object_is_found(s3: S3) -> None:
    folder = GOLDENS / ONE_OF_EACH["megatron"]
    s3.upload(folder, "damaged")
    victim = next(folder.rglob("distrib_optim.pt"))
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    s3.put(f"damaged/{victim.relative_to(folder).as_posix()}", bytes(data))
    problems = verify(url("damaged"), ReadOptions(), Depth.FULL).problems
    assert "distrib_optim.pt" in str(problems.found[0].message)


def test_an_object_that_changes_is_an_error(s3: S3) -> None:
    s3.put("changing/a", bytes(3 << 20))
    root = open_url(url("changing"))
    assert [path.name for path in root.iterdir()] == ["a"]
    s3.put("changing/a", bytes([1]) * (3 << 20))
    with pytest.raises(StorageError, match=r"s3://bucket/changing/a: has changed while it was read"):
        read_bytes(root / "a")


def test_a_store_that_is_busy_is_asked_again(s3: S3) -> None:
    s3.put("busy/a", b"word")
    failed: set[Request] = set()

    def once(request: Request) -> str | None:
        if request in failed:
            return None
        failed.add(request)
        return "503 Slow Down"

    s3.fault = once
    root = open_url(url("busy"))
    assert {path.name for path in root.iterdir()} == {"a"}
    assert read_bytes(root / "a") == b"word"
    assert len(failed) == 2


def test_no_right_to_look_above_the_checkpoint(s3: S3) -> None:
    """Rights are often given below a prefix: what lies above is asked for, and counts as nothing."""
    folder = GOLDENS / ONE_OF_EACH["megatron"]
    s3.upload(folder, "mine/run")
    s3.fault = lambda request: (
        "403 Forbidden" if "list-type" in request.query and "prefix=mine%2Frun" not in request.query else None
    )
    assert open_checkpoint(url("mine/run"), ReadOptions()).format == "megatron"


def test_a_file_that_the_listing_lacks(s3: S3) -> None:
    s3.put("late/a", b"1")
    root = open_url(url("late"))
    assert [path.name for path in root.iterdir()] == ["a"]
    s3.put("late/b", b"2")
    assert read_bytes(root / "b") == b"2"


def test_refusals(s3: S3) -> None:
    with pytest.raises(StorageError, match=r"s3://nowhere/run: cannot list\.\nNoSuchBucket") as raised:
        open_checkpoint("s3://nowhere/run", ReadOptions())
    assert "AWS_ENDPOINT_URL" in str(raised.value)
    with pytest.raises(NotACheckpoint, match="s3://bucket/nothing: no such file or folder"):
        open_checkpoint(url("nothing"), ReadOptions())
    s3.fault = lambda request: "403 Forbidden"
    with pytest.raises(StorageError, match="the store refuses"):
        open_checkpoint(url("run"), ReadOptions())
    with pytest.raises(UsageError, match="is a URL of a kind that is not read"):
        open_checkpoint("ftp://host/run", ReadOptions())


@pytest.mark.parametrize(
    ("status", "code", "advice"),
    [
        ("404 Not Found", "NoSuchBucket", "Check the bucket's name"),
        ("301 Moved", "PermanentRedirect", "lies in another region: name that one, by AWS_REGION"),
        ("400 Bad Request", "AuthorizationHeaderMalformed", "lies in another region"),
        ("403 Forbidden", "RequestTimeTooSkewed", "this machine's clock is wrong"),
        ("400 Bad Request", "ExpiredToken", "get new ones"),
        ("503 Slow Down", "SlowDown", "fewer --connections"),
        ("403 Forbidden", "AccessDenied", "Credentials, region and endpoint come from AWS_ACCESS_KEY_ID"),
    ],
)
def test_what_a_store_says_has_its_own_advice(s3: S3, status: str, code: str, advice: str) -> None:
    s3.fault = lambda request: (
        f"{status}\n<?xml version='1.0'?><Error><Code>{code}</Code><Message>why</Message></Error>"
    )
    with stores_with(StoreSettings(patience=0.1)):
        for action in (
            lambda: list(open_url(url("advised")).iterdir()),
            lambda: convert(GOLDENS / ONE_OF_EACH["hf"], open_url(url("advised-out")), ConvertOptions(to="hf")),
        ):
            with pytest.raises(StorageError) as told:
                action()
            assert advice in str(told.value)
            assert str(told.value).count("\n") <= 2


def test_a_web_page_is_no_empty_store(s3: S3) -> None:
    s3.fault = lambda request: "200 OK\n<html><body>MinIO Console</body></html>"
    with pytest.raises(StorageError, match=r"no object store\.\nDoes the endpoint .* name a web page"):
        list(open_url(url("run")).iterdir())


def test_a_file_url_is_a_path(tmp_path: Path) -> None:
    folder = GOLDENS / ONE_OF_EACH["hf"]
    assert open_checkpoint(f"file://{folder}", ReadOptions()).root == folder


@pytest.mark.parametrize(
    "asked",
    [
        "PUT http://169.254.169.254/latest/api/token in 7ms - Server returned non-2xx status code: 403 Forbidden",
        "GET http://metadata.google.internal/computeMetadata/v1/instance/service-accounts/default/token: error sending request",
    ],
)
def test_a_machine_without_credentials_hears_that_and_not_of_its_metadata_service(asked: str) -> None:
    """What obstore 0.12.1 says where the environment has none: it asks the cloud's machine for a role."""
    assert said(OSError(f"Generic S3 error: Error performing {asked}")).startswith("No credentials: ")
