from __future__ import annotations

import json
from pathlib import Path

import pytest

from mcore_rlhf.manager import convert_step as converting
from tests.helpers.conversions import GOLDENS

from .conftest import Cli, everything_below


def test_the_summary_says_what_happened_and_how_to_load_it(cli: Cli, tp2pp2: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    outcome = cli("convert", tp2pp2, target, "--tp", 1, "--pp", 2)
    text = outcome.words()
    assert outcome.code == 0
    assert f"source {tp2pp2}: megatron, iteration 2, TP2×PP2×DP2 (8 ranks)" in text
    assert f"target {target}: megatron, TP1×PP2×DP4 (8 ranks)" in text
    assert "tensors 108 in all states" in text
    assert "lossless yes" in text
    assert f"load --load {target}" in text
    assert "derived RNG states" in text
    assert "converting (stage 1 of 2): done" in outcome.stderr


def test_the_target_is_the_checkpoint_that_was_asked_for(cli: Cli, tp2pp2: Path, tmp_path: Path) -> None:
    done = cli("convert", tp2pp2, tmp_path / "out", "--tp", 4, "--pp", 1, "--dp", 3, "--no-fsync", "--json").json
    found = cli("inspect", tmp_path / "out", "--json").json
    assert found["parallel"] == done["target"]["parallel"]
    assert (found["parallel"]["tp"], found["parallel"]["pp"], found["parallel"]["dp"]) == (4, 1, 3)
    assert done["lossless"] is True
    assert done["bytes_per_second"] > 0
    assert "proved" not in done


@pytest.mark.parametrize(
    "options",
    [
        ["--tp", "1", "--pp", "4"],
        ["--no-optimizer"],
        ["--dtype", "fp16"],
        ["--dtype", "fp32", "--no-optimizer"],
        ["--optimizer", "plain", "--tp", "1"],
    ],
    ids=" ".join,
)
def test_verify_proves_the_target(cli: Cli, tp2pp2: Path, tmp_path: Path, options: list[str]) -> None:
    outcome = cli("convert", tp2pp2, tmp_path / "out", "--verify", "--no-fsync", "--json", *options)
    done = outcome.json
    assert (outcome.code, done["proved"]) == (0, True)
    assert (done["verify"]["intact"], done["verify"]["depth"]) == (True, "deep")
    assert done["diff"]["tensors"] == (27 if "--no-optimizer" in options else 108)
    assert done["diff"]["differences"] == []


def test_masters_beside_a_buffer_are_compared_bit_for_bit(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A DCP folder's weights are the fp32 that is trained, and a buffer of whole numbers beside them changes no type."""
    honest = converting.convert

    def convert_and_round(source: Path, target: Path, *rest: object) -> object:
        job = honest(source, target, *rest)  # type: ignore[arg-type]
        data = bytearray((target / "model.safetensors").read_bytes())
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        start = next(one["data_offsets"][0] for one in header.values() if one.get("dtype") == "F32")
        data[8 + length + start] ^= 1  # the last bit of a number
        (target / "model.safetensors").write_bytes(data)
        return job

    monkeypatch.setattr(converting, "convert", convert_and_round)
    source = GOLDENS.parent / "dcp" / "fsdp2_ws2" / "actor"
    done = cli("convert", source, tmp_path / "out", "--to", "hf", "--verify", "--no-fsync", "--json").json
    assert len(done["diff"]["differences"]) == 1
    assert not any("type was changed" in note for note in done["diff"]["notes"])


def test_verify_finds_a_target_that_is_wrong(
    cli: Cli, tp2pp2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is damaged between publishing and proving."""
    from tests.helpers.damage import flip_a_bit

    honest = converting.convert

    def convert_and_damage(source: Path, target: Path, *rest: object) -> object:
        job = honest(source, target, *rest)  # type: ignore[arg-type]
        flip_a_bit(target / "iter_0000002" / "mp_rank_00" / "distrib_optim.pt")
        return job

    monkeypatch.setattr(converting, "convert", convert_and_damage)
    outcome = cli("convert", tp2pp2, tmp_path / "out", "--tp", 1, "--pp", 1, "--verify", "--no-fsync")
    assert outcome.code == 1
    assert "verify damaged" in outcome.words()
    assert "different" in outcome.words()


def test_a_job_file_says_everything_and_options_win(
    cli: Cli, tp2pp2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THE_RUN", str(tp2pp2))
    job = tmp_path / "job.yaml"
    job.write_text(f"name: to-one\nsource: ${{THE_RUN}}\ntarget: {tmp_path}/out\ntp: 1\npp: 1\nno_fsync: true\n")
    done = cli("convert", "--config", job, "--pp", 4, "--json").json
    assert (done["name"], done["target"]["path"]) == ("to-one", f"{tmp_path}/out")
    assert (done["target"]["parallel"]["tp"], done["target"]["parallel"]["pp"]) == (1, 4)
    again = cli("convert", "--config", job)
    assert again.code == 2
    assert "exists already" in again.stderr
    assert cli("plan", "--config", job, "--json").json["target"]["parallel"]["pp"] == 1


def test_without_source_or_target_the_message_says_where_they_may_come_from(cli: Cli, tp2pp2: Path) -> None:
    nothing, no_target = cli("convert"), cli("convert", tp2pp2)
    assert (nothing.code, no_target.code) == (2, 2)
    assert nothing.stderr.startswith("error: no source was given\nGive SRC on the command line")
    assert no_target.stderr.startswith("error: no target was given")


def test_an_existing_target_is_refused_and_stays(cli: Cli, tp2pp2: Path, tp1: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    cli("convert", tp2pp2, target, "--tp", 1, "--pp", 1, "--no-fsync")
    before = (target / "mcore_rlhf.json").read_bytes()
    outcome = cli("convert", tp1, target, "--no-fsync")
    assert (outcome.code, outcome.stdout) == (2, "")
    assert "--overwrite" in outcome.stderr
    assert (target / "mcore_rlhf.json").read_bytes() == before
    assert cli("convert", tp1, target, "--overwrite", "--no-fsync").code == 0
    assert cli("diff", tp1, target).code == 0


def test_a_damaged_source_leaves_nothing_behind(cli: Cli, damaged: Path, tmp_path: Path) -> None:
    target = tmp_path / "results" / "out"
    outcome = cli("convert", damaged, target, "--tp", 2, "--json")
    assert outcome.code == 1
    assert "distrib_optim.pt: data/" in outcome.stderr
    assert outcome.json["error"]["kind"] == "Corrupt"
    assert everything_below(tmp_path / "results") == []


def test_an_interrupt_says_that_nothing_was_published(
    cli: Cli, tp1: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt(2)

    monkeypatch.setattr(converting, "convert", interrupted)
    outcome = cli("convert", tp1, tmp_path / "out")
    assert (outcome.code, outcome.stdout) == (130, "")
    assert (
        outcome.stderr
        == f"interrupted: nothing was published at {tmp_path}/out; what was half-written has been removed\n"
    )


def test_an_interrupt_after_publishing_says_so(
    cli: Cli, tp1: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = converting.convert

    def interrupted(*args: object) -> None:
        honest(*args)  # type: ignore[arg-type]
        raise KeyboardInterrupt(15)

    monkeypatch.setattr(converting, "convert", interrupted)
    outcome = cli("convert", tp1, tmp_path / "out", "--no-fsync")
    assert outcome.code == 128 + 15
    assert outcome.stderr.endswith(f"interrupted: {tmp_path}/out had just been published, and is complete\n")
