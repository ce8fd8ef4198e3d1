from __future__ import annotations

from pathlib import Path

from .conftest import Cli, everything_below


def test_the_plan_is_what_convert_then_does(cli: Cli, tp2pp2: Path, tmp_path: Path) -> None:
    plan = cli("plan", tp2pp2, "--tp", 4, "--pp", 1, "--json").json
    done = cli("convert", tp2pp2, tmp_path / "out", "--tp", 4, "--pp", 1, "--no-fsync", "--json").json
    assert (plan["totals"]["copies"], plan["totals"]["bytes"]) == (done["copies"], done["bytes"])
    assert plan["report"] == done["report"]
    assert plan["target"]["parallel"] == done["target"]["parallel"]
    assert {file["path"] for file in plan["files"]} == {
        path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*.pt")
    }


def test_totals_add_up_and_all_copies_are_in_the_json(cli: Cli, tp2pp2: Path) -> None:
    plan = cli("plan", tp2pp2, "--tp", 1, "--copies", "--json").json
    for key in ("records", "copies", "bytes", "casts"):
        assert plan["totals"][key] == sum(file[key] for file in plan["files"])
    assert all(len(file["copy_list"]) == file["copies"] for file in plan["files"])
    copy = plan["files"][0]["copy_list"][0]
    assert copy["source"].keys() == copy["target"].keys() == {"file", "record", "dtype", "start", "strides"}
    assert len(copy["shape"]) == len(copy["source"]["strides"])


def test_nothing_is_written(cli: Cli, tp2pp2: Path, tmp_path: Path) -> None:
    before = everything_below(tp2pp2)
    outcome = cli("plan", tp2pp2, "--tp", 1)
    assert "plan (nothing was written)" in outcome.stdout
    assert everything_below(tp2pp2) == before
    assert everything_below(tmp_path) == []


def test_people_see_files_copies_and_what_is_left_out(cli: Cli, tp2pp2: Path) -> None:
    outcome = cli("plan", tp2pp2, "--tp", 1, "--pp", 1, "--copies")
    text = outcome.words()
    assert "target megatron, TP1×PP1×DP8 (8 ranks)" in text
    assert "work 212 copies" in text
    assert "lossless yes" in text
    assert "changed data-parallel size: 2 → 8" in text
    assert "64×48 iter_0000002/mp_rank_01_001/model_optim_rng.pt:data/0 5,184 48×1 → data/0 9,328 96×1" in text
    assert "… and 43 more (all of them: --json)" in text
    assert "more (all" not in cli("plan", tp2pp2, "--tp", 1).stdout


def test_casts_and_losses_are_said(cli: Cli, tp2pp2: Path) -> None:
    plan = cli("plan", tp2pp2, "--dtype", "fp16", "--no-optimizer", "--json").json
    assert plan["totals"]["casts"] == plan["totals"]["copies"]
    assert plan["lossless"] is False
    assert "lost" in {line["fate"] for line in plan["report"]}


def test_strict_refuses_what_loses_something(cli: Cli, tp2pp2: Path) -> None:
    outcome = cli("plan", tp2pp2, "--no-optimizer", "--strict")
    assert (outcome.code, outcome.stdout) == (1, "")
    assert "--strict refuses what the target would lose" in outcome.stderr


def test_several_problems_are_told_together(cli: Cli, tp2pp2: Path) -> None:
    outcome = cli("plan", tp2pp2, "--tp", 3)
    assert outcome.code == 1
    assert outcome.stderr.startswith("error: 2 problems:\n  - --tp 3: ")
