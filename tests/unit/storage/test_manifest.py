from __future__ import annotations

import json
import math
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
    st.dictionaries(st.text("ab.-é", min_size=3), ENTRIES),
    step=st.none() | st.integers(0, 10**18 - 1),
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
        "format", "version", "step", "transaction", "parts", "files", "lossless", "provenance", "report", "crc32",
    ]  # fmt: skip
    assert (content["format"], content["version"]) == ("mcore_rlhf", 1)
    assert content["files"] == {"a": {"bytes": 1, "crc32": 2}, "b": {"bytes": 2, "crc32": 3}}


def _changed(**changes: Any) -> str:
    content = json.loads(Manifest({"a": FileEntry(1, 2)}).to_json()) | changes
    del content["crc32"]  # as if it had been written so
    return json.dumps({key: value for key, value in content.items() if value != "REMOVED"})


def test_any_flipped_bit_of_a_manifest_is_found() -> None:
    """Except in blanks, which mean nothing."""
    manifest = Manifest({"a": FileEntry(1, 2)}, step=3, provenance={"time": "now"}, report={"metrics": {"reward": 0.5}})
    text = manifest.to_json().encode()
    for position in range(len(text)):
        for bit in range(8):
            damaged = bytearray(text)
            damaged[position] ^= 1 << bit
            try:
                found = Manifest.from_json(bytes(damaged), "m")
            except CheckpointError:
                continue
            assert found == manifest, damaged


def test_a_manifest_without_a_checksum_of_its_own_is_read() -> None:
    assert Manifest.from_json(_changed(), "m") == Manifest({"a": FileEntry(1, 2)})
    assert Manifest.from_json(_changed(report="REMOVED"), "m") == Manifest({"a": FileEntry(1, 2)})


BAD = {
    "not json": ("{", Corrupt, "not valid JSON"),
    "another format": ('{"format": "x"}', NotACheckpoint, "not a manifest"),
    "a list": ("[]", NotACheckpoint, "not a manifest"),
    "newer": (_changed(version=3), Unsupported, "version 3 .* reads up to 2"),
    "unknown fields": (_changed(zeal=1, yes=2), Unsupported, "fields that are not known: yes, zeal"),
    "missing fields": (_changed(files="REMOVED"), Incomplete, "lacks the fields files"),
    "bad entry": (_changed(files={"a": {"bytes": "1", "crc32": 2}}), Corrupt, "whole numbers"),
    "bad files": (_changed(files=[1]), Corrupt, "wrong form"),
    "a step that is a path": (_changed(step="../../x"), Corrupt, "step must be int or NoneType, not"),
    "a step below zero": (_changed(step=-1), Corrupt, "step must be int or NoneType, not"),
    "a transaction that is a list": (_changed(transaction=[1]), Corrupt, "transaction must be str, not"),
    "a verdict in words": (_changed(lossless="yes"), Corrupt, "lossless must be bool or NoneType, not"),
    "a role that is a path": (_changed(parts=[{"role": "../actor"}]), Untrusted, "the role '../actor'"),
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


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000])
def test_a_deeply_nested_manifest_is_damaged(text: str) -> None:
    with pytest.raises(Corrupt, match="m: the manifest is not valid JSON"):
        Manifest.from_json(text, "m")


def _no_constant(name: str) -> float:
    raise AssertionError(f"{name} is not JSON")


def test_what_json_has_no_number_for_becomes_text() -> None:
    odd = {"nan": math.nan, "up": [math.inf], "down": ({"x": -math.inf},), "other": Path("p"), "half": 0.5, "one": True}
    text = Manifest(
        {}, parts=[{"role": "a", "x": math.nan}], provenance={"n": math.inf}, report={"metrics": odd}
    ).to_json()
    content = json.loads(text, parse_constant=_no_constant)
    assert content["report"]["metrics"] == {
        "nan": "nan", "up": ["inf"], "down": [{"x": "-inf"}], "other": "p", "half": 0.5, "one": True,
    }  # fmt: skip
    assert content["provenance"] == {"n": "inf"}
    assert content["parts"] == [{"role": "a", "x": "nan"}]
    assert Manifest.from_json(text, "m").to_json() == text


def test_numbers_that_older_releases_wrote_are_read() -> None:
    text = _changed(report={"metrics": {"reward": math.nan}})
    assert "NaN" in text
    assert math.isnan(Manifest.from_json(text, "m").report["metrics"]["reward"])


@pytest.mark.parametrize("depth", range(970, 1000))
def test_no_depth_is_too_much_for_the_checksum_alone(depth: int) -> None:
    """What can just be read may be too deep to be written again."""
    with pytest.raises(CheckpointError):
        Manifest.from_json('{"crc32": 0, "x": ' + "[" * depth + "]" * depth + "}", "m")
