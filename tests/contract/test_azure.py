"""The same promises in Azure's Blob storage, played by azurite, where that is installed: AZURITE names its ``azurite-blob``."""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest

from mcore_rlhf.convert import ConvertOptions, WriteOptions, convert
from mcore_rlhf.errors import StorageError
from mcore_rlhf.families.job_options import PartNumber
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.manager.convert_step import convert_part, finish_parts
from mcore_rlhf.manager.subject import find
from mcore_rlhf.storage.manifest import Manifest
from mcore_rlhf.storage.objects import open_url
from mcore_rlhf.storage.store import StorePath
from mcore_rlhf.storage.upload import StorePublication, dead, remove
from mcore_rlhf.verify.checkpoint import Depth, verify
from tests.contract.test_store_writing import contents
from tests.helpers.conversions import GOLDENS

AZURITE = os.environ.get("AZURITE") or shutil.which("azurite-blob")
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Those that everybody's azurite has. Source: Azurite 3.35.0, README, Default Storage Account."""

pytestmark = pytest.mark.skipif(AZURITE is None, reason="azurite-blob, which plays Azure, is not installed")

SOURCE = GOLDENS / "tp2pp2dp2_bf16_do"
OPTIONS: dict[str, Any] = {"to": "megatron", "write": WriteOptions(tp=1, pp=4), "fsync": False, "workers": 1}


@pytest.fixture(scope="module")
def azure() -> Iterator[None]:
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
            _make_container(named["AZURE_STORAGE_ENDPOINT"], "box")
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


def at(key: str) -> StorePath:
    """A folder, as it is now."""
    return open_url(f"az://box/{key}")


@pytest.mark.usefixtures("azure")
def test_a_conversion_there_and_back_is_that_of_a_disk(tmp_path: Path) -> None:
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


@pytest.mark.usefixtures("azure")
def test_parts_there_are_what_one_process_makes(tmp_path: Path) -> None:
    convert(SOURCE, tmp_path / "here", ConvertOptions(**OPTIONS))
    source = find(SOURCE, ReadOptions())
    for number in (2, 1, 3):
        convert_part(source, at("parts"), ConvertOptions(**OPTIONS), PartNumber(number, 3))
    finish_parts(source, at("parts"), ConvertOptions(**OPTIONS))
    assert contents(at("parts")) == contents(tmp_path / "here")


@pytest.mark.usefixtures("azure")
def test_of_two_writers_exactly_one_wins_and_what_is_dead_is_found() -> None:
    with StorePublication(at("raced")) as first, StorePublication(at("raced")) as second:
        files = {each.prefix: {"a": each.put("a", f"by {each.transaction}")} for each in (first, second)}
        first.commit(Manifest(files[first.prefix]))
        with pytest.raises(StorageError, match="another writer has published"):
            second.commit(Manifest(files[second.prefix]))
        second.leave()
    (left,) = dead(at("raced"), timedelta(0))
    assert left.path.endswith(second.prefix)
    assert Manifest.read(at("raced") / "mcore_rlhf.json").transaction == first.transaction


@pytest.mark.usefixtures("azure")
def test_a_container_that_is_missing() -> None:
    with pytest.raises(StorageError, match=r"(?s)ContainerNotFound.*Check the bucket's name"):
        list(open_url("az://nowhere/run").iterdir())
