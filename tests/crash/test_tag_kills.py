"""Saves of tags, killed with SIGKILL at every change of the file system: a tag is whole or not there, and ``latest`` names a whole one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.crash.tag_kills import NEW, OLD

PROJECT = Path(__file__).parents[2]


def test_a_save_is_killed_anywhere(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.crash.tag_kills", str(tmp_path)]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    whole = [one for one in found if one["at"] < 0]
    assert [one["after"][1] for one in whole] == [{"latest": "b", "a": OLD, "b": NEW}, {"latest": "a", "a": NEW}]
    assert len(found) == 2 + sum(one["changes"] for one in whole) > 30
    for one in found:
        assert one["status"] == (9 if one["at"] > 0 else 0), one
        for code, seen in (one["at_once"], one["after"]):
            assert code == 0, one
            allowed = ({"a": OLD}, {"a": NEW}) if one["again"] else ({"a": OLD}, {"a": OLD, "b": NEW})
            latest = seen.pop("latest")
            between_renames = seen == {} and one["again"] and seen is one["at_once"][1]
            assert seen in allowed or between_renames, one
            assert latest in seen or seen == {}, one
        assert one["left"] == [], one
    last = [one["after"][1] for one in found if one["at"] > 0]
    assert {tuple(sorted(seen.items())) for seen in last} == {(("a", OLD),), (("a", NEW),), (("a", OLD), ("b", NEW))}
