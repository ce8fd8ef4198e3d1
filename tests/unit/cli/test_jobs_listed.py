"""``configs list`` and ``configs show``."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from .conftest import Cli

CONFIGS = Path(__file__).parents[3] / "configs"


def test_all_of_them_are_listed(cli: Cli) -> None:
    found = cli("configs", "list", "--json").json
    assert [one["name"] for one in found] == sorted(path.stem for path in CONFIGS.glob("*.yaml"))
    for one in found:
        targets = yaml.safe_load((CONFIGS / f"{one['name']}.yaml").read_text()).get("to")
        assert one["kind"] == (f"job, to {targets}" if targets else "run")
    assert "qwen2.5-7b-eval-tp1" in cli("configs", "list").stdout


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_one_is_shown_as_it_stands(cli: Cli, path: Path) -> None:
    assert cli("configs", "show", path.stem).stdout == path.read_text(encoding="utf-8")


def test_an_unknown_one_names_those_that_there_are(cli: Cli) -> None:
    outcome = cli("configs", "show", "llama-4")
    assert outcome.code == 2
    assert "llama-3-8b-eval-tp1" in outcome.stderr
