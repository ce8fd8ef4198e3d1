"""The same promises in Azure's Blob storage, which azurite plays if AZURITE names its ``azurite-blob``, and in Google's, which moto plays
behind Google's headers.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest

from mcore_rlhf.convert import ConvertOptions, convert
from mcore_rlhf.errors import StorageError
from mcore_rlhf.families.job_options import PartNumber
from mcore_rlhf.families.options import ReadOptions, WriteOptions
from mcore_rlhf.manager.convert_step import convert_part, finish_parts
from mcore_rlhf.manager.subject import find
from mcore_rlhf.storage.manifest import Manifest
from mcore_rlhf.storage.objects import open_url
from mcore_rlhf.storage.settings import StoreSettings, stores_with
from mcore_rlhf.storage.store import StorePath
from mcore_rlhf.storage.upload import StorePublication, dead, remove
from mcore_rlhf.verify.checkpoint import Depth, verify
from tests.contract.test_store_writing import contents
from tests.helpers.conversions import GOLDENS
from tests.helpers.object_store import BUCKET, Google, serving

AZURITE = os.environ.get("AZURITE") or shutil.which("azurite-blob")
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Those that everybody's azurite has. Source: Azurite 3.35.0, README, Default Storage Account."""

SOURCE = GOLDENS / "tp2pp2dp2_bf16_do"
OPTIONS: dict[str, Any] = {"to": "megatron", "write": WriteOptions(tp=1, pp=4), "fsync": False, "workers": 1}


Place = Callable[[str], StorePath]
"""A folder of a bucket, as it is now."""


@pytest.fixture(scope="module", params=["az", "gs"])
def at(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with azure() if request.param == "az" else google(tmp_path_factory.mktemp("google") / "account.json"):
        yield lambda key: open_url(f"{request.param}://{BUCKET}/{key}")


@contextmanager
def google(account: Path) -> Iterator[None]:
    keys = dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
    account.write_text(json.dumps({**keys, "disable_oauth": True}))
    with serving(Google) as server, pytest.MonkeyPatch.context() as patch:
        server.forget()
        patch.setenv("GOOGLE_BASE_URL", server.url)
        patch.setenv("GOOGLE_SERVICE_ACCOUNT", str(account))
        yield
        server.forget()


@contextmanager
def azure() -> Iterator[None]:
    if AZURITE is None:
        pytest.skip("azurite-blob, which plays Azure, is not installed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    named = {
        "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
        "AZURE_STORAGE_ACCOUNT_KEY": KEY,
        "AZURE_STORAGE_ENDPOINT": f"http://127.0.0.1:{port}/{ACCOUNT}",
    }
    words = [str(AZURITE), "--inMemoryPersistence", "--skipApiVersionCheck", "--silent", "--blobPort", str(port)]
    with pytest.MonkeyPatch.context() as patch, subprocess.Popen(words) as process:
        for name, value in named.items():
            patch.setenv(name, value)
        try:
            _make_container(named["AZURE_STORAGE_ENDPOINT"], BUCKET)
            yield
        finally:
            process.terminate()


def _make_container(endpoint: str, name: str) -> None:
    """Source: Azure, Authorize with Shared Key; Create Container."""
    now = datetime.now(timezone.utc).strftime("%a, %d %b %Y %H:%M:%S GMT")
    told = f"x-ms-date:{now}\nx-ms-version:2021-08-06\n/{ACCOUNT}/{ACCOUNT}/{name}\nrestype:container"
    signed = hmac.new(base64.b64decode(KEY), f"PUT{12 * chr(10)}{told}".encode(), hashlib.sha256).digest()
    headers = {
        "x-ms-date": now,
        "x-ms-version": "2021-08-06",
        "Authorization": f"SharedKey {ACCOUNT}:{base64.b64encode(signed).decode()}",
    }
    for _ in range(150):
        try:
            urlopen(Request(f"{endpoint}/{name}?restype=container", method="PUT", headers=headers), timeout=10).close()
            return
        except URLError:
            time.sleep(0.2)
    pytest.fail("azurite did not answer")


def test_a_conversion_there_and_back_is_that_of_a_disk(at: Place, tmp_path: Path) -> None:
    convert(SOURCE, tmp_path / "here", ConvertOptions(**OPTIONS))
    convert(SOURCE, at("there"), ConvertOptions(**OPTIONS))
    assert contents(at("there")) == contents(tmp_path / "here")
    assert verify(at("there"), ReadOptions(), Depth.FULL, 2).intact
    back = ConvertOptions(to="megatron-dist", fsync=False)
    convert(tmp_path / "here", tmp_path / "back", back)
    convert(at("there"), tmp_path / "again", back)
    assert contents(tmp_path / "again") == contents(tmp_path / "back")
    with pytest.raises(StorageError, match="exists already"):
        convert(SOURCE, at("there"), ConvertOptions(**OPTIONS))
    convert(SOURCE, at("there"), ConvertOptions(**OPTIONS, overwrite=True))
    assert contents(at("there")) == contents(tmp_path / "here")
    assert remove(at("there"))
    assert not at("there").is_dir()


def test_parts_there_are_what_one_process_makes(at: Place, tmp_path: Path) -> None:
    convert(SOURCE, tmp_path / "here", ConvertOptions(**OPTIONS))
    source = find(SOURCE, ReadOptions())
    for number in (2, 1, 3):
        convert_part(source, at("parts"), ConvertOptions(**OPTIONS), PartNumber(number, 3))
    finish_parts(source, at("parts"), ConvertOptions(**OPTIONS))
    assert contents(at("parts")) == contents(tmp_path / "here")


def test_of_two_writers_exactly_one_wins_and_what_is_dead_is_found(at: Place) -> None:
    with StorePublication(at("raced")) as first, StorePublication(at("raced")) as second:
        files = {each.prefix: {"a": each.put("a", f"by {each.transaction}")} for each in (first, second)}
        first.commit(Manifest(files[first.prefix]))
        with pytest.raises(StorageError, match="another writer has published"):
            second.commit(Manifest(files[second.prefix]))
        second.leave()
    (left,) = dead(at("raced"), timedelta(0))
    assert left.path.endswith(second.prefix)
    assert Manifest.read(at("raced") / "mcore_rlhf.json").transaction == first.transaction


def test_a_bucket_that_is_missing(at: Place) -> None:
    scheme = str(at("run").store).partition(":")[0]
    with pytest.raises(StorageError, match=r"(?s)(ContainerNotFound|NoSuchBucket).*Check the bucket's name"):
        list(open_url(f"{scheme}://nowhere/run").iterdir())


def test_who_comes_after_a_kill_goes_on_and_who_failed_before_takes_nothing_away(at: Place) -> None:
    with StorePublication(at("shared")) as second:
        with pytest.raises(RuntimeError, match="fails"), StorePublication(at("shared")) as first:  # noqa: PT012
            first.go_on("whole-x")
            manifest = Manifest({"x": first.put("x", "x")})
            second.go_on("whole-x")
            raise RuntimeError("fails")
        second.commit(manifest)
    assert contents(at("shared"))["x"] == b"x"
    with pytest.raises(RuntimeError, match="fails"), StorePublication(at("alone")) as alone:  # noqa: PT012
        alone.go_on("whole-x")
        alone.put("x", "x")
        raise RuntimeError("fails")
    assert list(dead(at("alone"), timedelta(0))) == []


def test_plain_names_for_other_loaders(at: Place, tmp_path: Path) -> None:
    convert(SOURCE, tmp_path / "here", ConvertOptions(**OPTIONS))
    with stores_with(StoreSettings(plain=True)):
        convert(SOURCE, at("plain"), ConvertOptions(**OPTIONS))
    assert Manifest.read(at("plain") / "mcore_rlhf.json").prefix == ""
    assert contents(at("plain")) == contents(tmp_path / "here")
