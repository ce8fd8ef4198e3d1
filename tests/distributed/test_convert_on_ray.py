"""A conversion on a real Ray cluster of two nodes, one of which is killed in the middle of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.conversions import GOLDENS
from tests.helpers.killed import PROJECT, content, run

pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")

SOURCE = GOLDENS / "tp2pp2dp2_bf16_do"
TO = ("--tp", 4, "--pp", 1, "--no-fsync", "--workers", 1)

_PROGRAM = """
import json, os, signal, sys
from pathlib import Path
from ray.cluster_utils import Cluster
from mcore_rlhf.execution import parts
from mcore_rlhf.cli import main

target = Path(sys.argv[3])
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
other = cluster.add_node(num_cpus=1)
pids = [info.process.pid for infos in other.all_processes.values() for info in infos]
Path(os.environ["PIDS"]).write_text(json.dumps(pids))
sys.argv += ["--executor", "ray", "--address", cluster.address]
try:
    main()
finally:
    cluster.shutdown()
"""


def kill_the_second_node(process: subprocess.Popen[str], target: Path) -> None:
    """Its raylet and its workers, as soon as a part is done, as a machine that loses its power."""
    until = time.monotonic() + 240
    while not list(target.parent.glob(f".{target.name}.parts-*/part-*/part.json")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.05)
    pids = json.loads((target.parent / "pids").read_text())
    children = [int(pid) for one in pids for pid in _children(one)]
    for pid in (*pids, *children):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def _children(pid: int) -> list[str]:
    found = Path(f"/proc/{pid}/task/{pid}/children")
    return found.read_text().split() if found.exists() else []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_one_of_two_nodes_is_killed_midway(tmp_path: Path) -> None:
    target = tmp_path / "out"
    code = [sys.executable, "-c", _PROGRAM, "convert", str(SOURCE), str(target), *map(str, TO)]
    environ = {**os.environ, "RAY_DEDUP_LOGS": "0", "RAY_USAGE_STATS_ENABLED": "0", "PIDS": str(tmp_path / "pids")}
    process = subprocess.Popen(
        code, cwd=PROJECT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ
    )
    kill_the_second_node(process, target)
    stdout, stderr = process.communicate(timeout=500)
    assert process.returncode == 0, stderr
    assert "Traceback" not in stdout
    assert run("convert", SOURCE, tmp_path / "whole", *TO)[0] == 0
    assert content(target) == content(tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "pids", "whole"]
