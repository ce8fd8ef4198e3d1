"""``report``: what stands in a page is what the other commands print."""

from __future__ import annotations

import json
import re
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest

from mcore_rlhf.report.page import rendered

from .conftest import GOLDENS, Cli


def data_of(path: Path) -> Any:
    """The JSON in a page."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', path.read_text("utf-8"), re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_a_checkpoint(cli: Cli, tp2pp2: Path, tmp_path: Path) -> None:
    page = tmp_path / "a.html"
    assert cli("report", tp2pp2, "-o", page).code == 0
    data = data_of(page)
    (subject,) = data["subjects"]
    expected = cli("inspect", tp2pp2, "--json").json
    files = expected.pop("files")
    facts = subject["models"]["actor" if "actor" in subject["models"] else next(iter(subject["models"]))]["facts"]
    assert facts.pop("file_count") == len(files)
    assert facts == {key: value for key, value in expected.items() if key != "chosen"}
    listed = cli("inspect", tp2pp2, "--tensors", "--json").json["tensors"]
    shards = next(iter(subject["models"].values()))["shards"]
    assert shards["tensors"] == len(listed)
    assert shards["bytes"] == sum(tensor["bytes"] for tensor in listed)
    assert shards["replicas"] == sum(tensor["replicas"] for tensor in listed)
    assert data["diff"] is data["run"] is None


def test_a_conversion_has_its_account_and_proves_equality(cli: Cli, tp2pp2: Path, tmp_path: Path) -> None:
    done = cli("convert", tp2pp2, tmp_path / "new", "--tp", 4, "--pp", 1, "--verify", "--json").json
    page = tmp_path / "b.html"
    assert cli("report", tp2pp2, tmp_path / "new", "-o", page).code == 0
    data = data_of(page)
    assert [subject["label"] for subject in data["subjects"]] == ["before", "after"]
    conversion = data["subjects"][1]["conversion"]
    assert conversion["accounts"] == {"": done["account"]}
    assert conversion["lines"] == {"": done["report"]}
    (diff,) = data["diff"]["models"].values()
    rows = diff.pop("heat")["rows"]
    assert diff == {key: value for key, value in done["diff"].items() if key != "chosen"}
    assert not any(row["cells"] for row in rows)


def test_a_comparison_says_where_and_how_much(cli: Cli, tp1: Path, tp2pp2: Path, tmp_path: Path) -> None:
    expected = cli("diff", tp1, tp2pp2, "--json").json
    data = cli("report", tp1, tp2pp2, "--json").json
    (diff,) = data["diff"]["models"].values()
    rows = diff.pop("heat")["rows"]
    assert diff == expected
    worst = {found["name"]: found for found in diff["differences"]}
    for row in rows:
        for cell in row["cells"]:
            found = worst[f"{row['pattern'].replace('{}', str(cell['column']))} ({row['state']})"]
            assert (cell["ulps"], cell["max_rel"]) == (found["max_ulps"], found["max_rel"])
    assert sum(len(row["cells"]) for row in rows) == sum("(" in name for name in worst)


def test_units_in_the_last_place(cli: Cli, tmp_path: Path) -> None:
    """The bits of one stored number, raised by three."""
    original = GOLDENS.parent / "huggingface" / "llama_tied_bf16_sharded"
    copy = tmp_path / "copy"
    shutil.copytree(original, copy)
    path = sorted(copy.glob("*.safetensors"))[0]
    path.chmod(0o644)
    data = bytearray(path.read_bytes())
    (length,) = struct.unpack_from("<Q", data)
    name, tensor = next(item for item in json.loads(data[8 : 8 + length]).items() if item[0] != "__metadata__")
    at = 8 + length + tensor["data_offsets"][0] + 2 * 5
    (bits,) = struct.unpack_from("<H", data, at)
    struct.pack_into("<H", data, at, bits + 3)
    path.write_bytes(data)
    (found,) = cli("diff", original, copy, "--json").json["differences"]
    before, after = (struct.unpack("<f", struct.pack("<I", word << 16))[0] for word in (bits, bits + 3))
    assert (found["name"], found["differing"], found["max_ulps"]) == (f"{name} (param)", 1, 3)
    assert (found["max_abs"], found["max_rel"]) == pytest.approx((abs(after - before), abs((after - before) / after)))


def test_a_file_of_others_is_not_replaced_and_a_page_is(cli: Cli, tp1: Path, tmp_path: Path) -> None:
    mine = tmp_path / "notes.html"
    mine.write_text("my notes")
    outcome = cli("report", tp1, "-o", mine)
    assert outcome.code == 2
    assert "is no page of mcore-rlhf report" in outcome.stderr
    assert mine.read_text() == "my notes"
    page = tmp_path / "page.html"
    assert [cli("report", tp1, "-o", page).code for _ in range(2)] == [0, 0]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--trace", "t.json"], "--trace writes the timeline of a run"),
        (["--events", "e.jsonl"], "--events is about a run"),
        (["--resume-check", "nothing.json"], "nothing.json: cannot read: No such file or directory\n"),
    ],
)
def test_what_cannot_be_is_refused(
    cli: Cli, tp1: Path, tmp_path: Path, args: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = cli("report", tp1, *args)
    assert outcome.code == 2
    assert said in outcome.stderr
    assert not list(tmp_path.iterdir())


def test_texts_of_a_checkpoint_cannot_end_the_script() -> None:
    text = rendered("<b>", json.dumps({"evil": "</script><script>alert(1)</script> @JS@ @DATA@"}))
    assert "</script><script>alert" not in text
    assert "<title>&lt;b&gt;</title>" in text
    found = re.search(r'id="data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    assert json.loads(found[1])["evil"].startswith("</script>")


def test_a_page_asks_no_network() -> None:
    text = rendered("t", "{}")
    assert "default-src 'none'" in text
    assert not re.search(r"(src|href)=\"?https?:", text.replace("http://www.w3.org/2000/svg", ""))


def test_a_run(cli: Cli, tmp_path: Path) -> None:
    from tests.unit.manager.roots import make_step

    for number in (10, 20):
        make_step(tmp_path / "run", number, metrics={"reward": number / 10})
    (tmp_path / "run" / "global_step_10" / "actor" / "weights.bin").unlink()
    trace = tmp_path / "trace.json"
    data = cli("report", tmp_path / "run", "--json", "--trace", trace).json
    listed = cli("steps", tmp_path / "run", "--json").json
    assert [{key: step[key] for key in listed[0]} for step in data["run"]["steps"]] == listed
    assert json.loads(trace.read_text())["traceEvents"]
    assert data["kind"] == "Run"


@pytest.mark.parametrize(
    ("report", "origin"),
    [
        ({"metrics": {}, "save_seconds": 1.0, "live": {}}, "run"),
        ({"metrics": {}, "verified": "full"}, "adoption"),
        ({"converted_from": "/a", "account": {}, "lines": {}}, "conversion"),
        ({"metrics": {}}, "unknown"),
    ],
)
def test_who_wrote_it_says_whether_anything_could_be_lost(
    cli: Cli, tmp_path: Path, report: dict[str, object], origin: str
) -> None:
    from tests.unit.manager.roots import make_step

    step = make_step(tmp_path / "run", 10, report=report)
    (subject,) = cli("report", step, "--json").json["subjects"]
    assert subject["origin"] == origin


def test_a_checkpoint_of_others_has_no_origin_and_a_conversion_has(cli: Cli, tp2pp2: Path, tmp_path: Path) -> None:
    assert cli("convert", tp2pp2, tmp_path / "new", "--tp", 1, "--pp", 1).code == 0
    before, after = cli("report", tp2pp2, tmp_path / "new", "--no-values", "--json").json["subjects"]
    assert (before["origin"], after["origin"]) == (None, "conversion")
