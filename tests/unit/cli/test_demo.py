"""The command around the demonstration; the demonstration itself has its own tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_rlhf.demo import command
from mcore_rlhf.demo.command import DemoReport, ProofRow
from mcore_rlhf.installation import to_install

from .conftest import Cli


def report(*, equal: int) -> DemoReport:
    return DemoReport((ProofRow("TP1×PP1", 10, equal, {3: 5.0}, {3: 5.0}, True, None),), 1.0)


@pytest.mark.parametrize(("equal", "code", "word"), [(10, 0, "Proved"), (9, 1, "FAILED")])
def test_the_proof_is_printed_and_decides_the_code(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, equal: int, code: int, word: str
) -> None:
    def run_demo(folder: Path | None, say) -> DemoReport:  # type: ignore[no-untyped-def]
        assert folder == tmp_path
        say("training")
        return report(equal=equal)

    monkeypatch.setattr(command, "run_demo", run_demo)
    outcome = cli("demo", "--dir", tmp_path)
    assert outcome.code == code
    assert f"TP1×PP1 {equal} of 10" in outcome.words()
    assert word in outcome.stdout
    assert outcome.stderr == "training\n"


def test_without_megatron_the_message_says_how_to_install_it(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    outcome = cli("demo")
    assert (outcome.code, outcome.stdout) == (2, "")
    assert to_install("megatron") in outcome.stderr
