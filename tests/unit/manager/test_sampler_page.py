"""The pages about the sampler and the configuration: their Python runs, and their file is what is written."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from mcore_rlhf.manager.rlhf.sampler import PromptSampler

PROJECT = Path(__file__).resolve().parents[3]


def _blocks(page: str, language: str) -> list[str]:
    text = (PROJECT / "docs" / "reference" / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(("page", "name"), [("data-sampler.md", "rollouts"), ("run-config.md", "kl")])
def test_the_python_runs(page: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PROJECT)
    (block,) = _blocks(page, "python")
    names: dict[str, Any] = {}
    exec(compile(block, page, "exec"), names)
    assert names[name]


def test_the_file_is_one_that_a_sampler_loads() -> None:
    (block,) = _blocks("data-sampler.md", "json")
    saved = json.loads(block)
    sampler = PromptSampler(100, seed=1234, group_size=8)
    assert set(saved) == set(sampler.state_dict())
    assert set(saved["state"]) == set(sampler.state_dict()["state"])
    saved["fingerprint"] = None
    sampler.load_state_dict(saved)
    assert sampler.num_consumed == 63
    assert [prompt.prompt_id for prompt in sampler.in_flight()] == [12]
