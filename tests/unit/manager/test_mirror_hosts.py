"""Who sends what of a step, and whom rank 0 waits for."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from mcore_rlhf.manager.run import mirror_hosts
from mcore_rlhf.manager.run.mirror_hosts import TALK, Helpers, HelperState, shares
from mcore_rlhf.storage.manifest import FileEntry, Manifest

HOSTS = ("a", "b", "c")
MANIFEST = Manifest(
    {f"f{number}": FileEntry(number * 100, 0) for number in range(1, 10)},
    report={"hosts": {"a": ["f1", "f2"], "b": ["f9"], "gone": ["f3", "f8"]}},
)


@pytest.mark.parametrize("hosts", [HOSTS, ("b", "a"), ("elsewhere",), ("a", "elsewhere")])
def test_every_file_has_one_sender_and_its_writers_host_where_that_is_there(hosts: tuple[str, ...]) -> None:
    found = shares(MANIFEST, hosts)
    assert Counter(name for jobs in found.values() for name, _ in jobs) == Counter(list(MANIFEST.files))
    for host, own in MANIFEST.report["hosts"].items():
        if host in hosts:
            assert set(own) <= {name for name, _ in found[host]}
    assert found == shares(Manifest.from_json(MANIFEST.to_json(), "m"), list(hosts))


def test_what_nobodys_ranks_wrote_is_dealt_out_by_bytes() -> None:
    sums = [sum(entry.nbytes for _, entry in jobs) for jobs in shares(MANIFEST, HOSTS).values()]
    assert max(sums) - min(sums) <= 300


@pytest.mark.parametrize(
    ("told", "complete"),
    [
        ({"state": "done"}, True),
        ({"state": "gave up", "why": "no credentials"}, False),
        ({"state": "closed", "why": "its process has ended", "attempt": "of another time"}, False),
        ({"state": "sending"}, False),
        ({"state": "done", "attempt": "of another time"}, False),
        (None, False),
    ],
    ids=["done", "gave up", "closed", "silent", "an old word", "never there"],
)
def test_who_is_done_counts_and_who_gives_up_or_falls_silent_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: dict[str, Any] | None, complete: bool
) -> None:
    monkeypatch.setattr(mirror_hosts, "_LOOK_S", 0.02)
    monkeypatch.setattr(mirror_hosts, "_DEAD_S", 0.1)
    monkeypatch.setattr(mirror_hosts, "_ENDING_S", 0.1)
    helpers = Helpers(tmp_path, "a", {8: "b"})
    assert helpers.wait(lambda: None)  # nothing was asked for
    helpers.ask(1, "t")
    asked = json.loads((tmp_path / TALK / "asked.json").read_text())
    assert (asked["step"], asked["transaction"], asked["hosts"]) == (1, "t", ["a", "b"])
    if told is not None:
        text = json.dumps(asdict(HelperState(**{"attempt": asked["attempt"], **told})))
        (tmp_path / TALK / "00008.json").write_text(text)
    assert helpers.wait(lambda: None) is complete
    helpers.withdraw()
    assert json.loads((tmp_path / TALK / "asked.json").read_text()).get("attempt") is None
