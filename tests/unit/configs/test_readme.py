"""The README holds: its Python runs as it stands, and its links lead somewhere; tests/contract/test_pages.py runs its commands."""

from __future__ import annotations

import logging
import re
import shutil
from pathlib import Path

import pytest
import torch

PROJECT = Path(__file__).resolve().parents[3]
TEXT = (PROJECT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


def run_like(block: str, caplog: pytest.LogCaptureFixture) -> str:
    caplog.clear()
    with caplog.at_level(logging.INFO, "mcore_rlhf.manager"):
        exec(compile(block, "README.md", "exec"), {})
    return caplog.text


def test_the_first_example_runs_and_the_second_time_it_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    block = BLOCKS[0].replace("time.sleep(0.25)", "pass")
    assert block != BLOCKS[0]
    assert "nothing to resume" in run_like(block, caplog)
    final = torch.load("runs/first/checkpoints/global_step_40/actor/state.pt", weights_only=True)
    shutil.rmtree("runs/first/checkpoints/global_step_40")
    assert "resumed from global_step_30; next step 31" in run_like(block, caplog)
    again = torch.load("runs/first/checkpoints/global_step_40/actor/state.pt", weights_only=True)
    assert torch.equal(final["model"]["weight"], again["model"]["weight"])
    assert "resumed from global_step_20; next step 21" in TEXT


@pytest.mark.parametrize("block", BLOCKS)
def test_every_example_compiles(block: str) -> None:
    compile(block, "README.md", "exec")


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", TEXT)
    assert links
    assert [link for link in links if "://" not in link and not (PROJECT / link).exists()] == []


def test_no_line_is_too_long() -> None:
    prose = re.sub(r"```.*?```", "", TEXT, flags=re.DOTALL)
    assert [line for line in prose.splitlines() if len(line) > 140 and not line.startswith(("|", "!["))] == []
