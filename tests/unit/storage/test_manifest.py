from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rlhf.errors import CheckpointError, Corrupt, Incomplete, NotACheckpoint, Unsupported, Untrusted
from mcore_rlhf.storage.manifest import FileEntry, Manifest, check, crc_of_file, provenance

ENTRIES = st.builds(FileEntry, st.integers(0, 2**60), st.integers(0, 2**32 - 1))
MANIFESTS = st.builds(
    Manifest,
    st.dictionaries(st.text(), ENTRIES),
    step=st.none() | st.integers(0),
    transaction=st.text(),
    parts=st.lists(st.dictionaries(st.text(), st.text())).map(tuple),
    lossless=st.sampled_from([None, True, False]),
    provenance=st.dictionaries(st.text(), st.text()),
    report=st.dictionaries(st.text(), st.lists(st.integers())),
)


@given(MANIFESTS)
@settings(max_examples=25)
def test_a_manifest_survives_the_round_trip(manifest: Manifest) -> None:
    assert Manifest.from_json(manifest.to_json(), "m") == manifest


def test_the_text_has_the_documented_fields_in_a_fixed_order() -> None:
    first = Manifest({"b": FileEntry(2, 3), "a": FileEntry(1, 2)}, step=50)
    second = Manifest({"a": FileEntry(1, 2), "b": FileEntry(2, 3)}, step=50)
    assert first.to_json() == second.to_json()
    content = json.loads(first.to_json())
    assert list(content) == [
        "format", "version", "step", "transaction", "parts", "files", "lossless", "provenance", "report",
    ]  # fmt: skip
    assert (content["format"], content["version"]) == ("mcore_rlhf", 1)
    assert content["files"] == {"a": {"bytes": 1, "crc32": 2}, "b": {"bytes": 2, "crc32": 3}}


def _changed(**changes: Any) -> str:
    content = json.loads(Manifest({"a": FileEntry(1, 2)}).to_json()) | changes
    return json.dumps({key: value for key, value in content.items() if value != "REMOVED"})


BAD = {
    "not json": ("{", Corrupt, "not valid JSON"),
    "another format": ('{"format": "x"}', NotACheckpoint, "not a manifest"),
    "a list": ("[]", NotACheckpoint, "not a manifest"),
    "newer": (_changed(version=2), Unsupported, "version 2 .* reads up to 1"),
    "unknown fields": (_changed(zeal=1, yes=2), Unsupported, "fields that are not known: yes, zeal"),
    "missing fields": (_changed(files="REMOVED"), Incomplete, "lacks the fields files"),
    "bad entry": (_changed(files={"a": {"bytes": "1", "crc32": 2}}), Corrupt, "whole numbers"),
    "bad files": (_changed(files=[1]), Corrupt, "wrong form"),
    "bad report": (_changed(report=3), Corrupt, "wrong form"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_manifests_say_what_is_wrong(case: str) -> None:
    text, kind, message = BAD[case]
    with pytest.raises(kind, match=message) as raised:
        Manifest.from_json(text, "/run/mcore_rlhf.json")
    assert "/run/mcore_rlhf.json" in str(raised.value)


@given(st.text())
@settings(max_examples=25)
def test_any_text_is_a_manifest_or_our_error(text: str) -> None:
    with pytest.raises(CheckpointError):
        Manifest.from_json(text, "m")


@pytest.fixture
def folder(tmp_path: Path) -> tuple[Path, Manifest]:
    (tmp_path / "sub").mkdir()
    files = {}
    for name, data in {"a": b"aaa", "sub/b": b"b" * 3_000_000, "empty": b""}.items():
        (tmp_path / name).write_bytes(data)
        files[name] = FileEntry(len(data), zlib.crc32(data))
    return tmp_path, Manifest(files)


def test_an_intact_folder_has_no_problems(folder: tuple[Path, Manifest]) -> None:
    seen: dict[str, int] = {}
    problems = check(*folder, progress=lambda name, nbytes: seen.update({name: seen.get(name, 0) + nbytes}))
    assert not problems
    assert seen == {"a": 3, "sub/b": 3_000_000}


def test_every_damage_is_listed(folder: tuple[Path, Manifest]) -> None:
    root, manifest = folder
    (root / "a").unlink()
    (root / "sub/b").write_bytes(b"b" * 2_999_999 + b"c")
    (root / "empty").write_bytes(b"x")
    problems = check(root, manifest)
    assert [problem.kind for problem in problems.found] == [Incomplete, Corrupt, Corrupt]
    text = problems.describe()
    assert "a: is missing" in text
    assert "sub/b: is damaged: CRC-32" in text
    assert "empty: has 1 bytes, the manifest says 0" in text
    assert len(check(root, manifest, sizes_only=True).found) == 2


def test_a_manifest_cannot_point_outside(folder: tuple[Path, Manifest]) -> None:
    root, _ = folder
    (root / "sub" / "link").symlink_to("/etc/passwd")
    problems = check(root, Manifest({"../a": FileEntry(3, 0), "sub/link": FileEntry(3, 0)}))
    assert [problem.kind for problem in problems.found] == [Untrusted, Untrusted]


def test_crc_of_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(NotACheckpoint):
        crc_of_file(tmp_path / "none")


def test_provenance_names_versions() -> None:
    found = provenance(git="abc")
    assert found["torch"][0].isdigit()
    assert found["git"] == "abc"
    assert found.keys() >= {"mcore_rlhf", "torch", "python", "time"}
