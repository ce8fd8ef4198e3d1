"""``dcp.save`` through our writer, killed with SIGKILL at every change of the file system: what was there, or what was to be, is there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.crash.dcp_writer_kills import NEW, OLD

PROJECT = Path(__file__).parents[2]


def test_a_save_that_replaces_is_killed_anywhere(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.crash.dcp_writer_kills", str(tmp_path)]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    whole, *kills = json.loads(done.stdout.splitlines()[-1])
    assert whole["at_once"] == [0, [OLD, NEW]]
    assert whole["left"] == []
    assert len(kills) == whole["changes"] > 8
    for one in kills:
        assert one["status"] == 9, one
        code, (older, folder) = one["at_once"]
        assert (code, older) == (0, OLD), one
        assert folder in (OLD, NEW, None), one  # None: between two renames
        code, (older, folder) = one["after"]
        assert (code, older) == (0, OLD), one
        assert folder in (OLD, NEW), one
        assert one["left"] == [], one
    assert {one["after"][1][1] for one in kills} == {OLD, NEW}
    assert [one for one in kills if one["at_once"][1][1] is None]
