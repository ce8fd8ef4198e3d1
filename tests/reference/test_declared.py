"""The stored snapshot of what the frameworks declare, against the installed ones: a new release shows its new fields here."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.reference.declared import REGENERATE, STORED


@pytest.fixture(scope="module")
def installed() -> Any:
    """In a process of its own: importing Megatron warns of much."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.reference.declared", "--show"]
    return json.loads(
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=200).stdout.splitlines()[-1]
    )


def test_megatron_core_declares_what_is_stored(installed: Any) -> None:
    """Each version by itself: those that are not installed here are compared where they are."""
    ((version, found),) = installed["megatron-core"].items()
    assert version in of_megatron(), f"megatron-core {version} is in no snapshot: {REGENERATE}"
    assert changes(of_megatron()[version], found) == []


def test_transformers_declares_what_is_stored(installed: Any) -> None:
    found = installed["transformers"]["classes"]
    assert changes({k: v["fields"] for k, v in stored("transformers").items()}, fields(found)) == []
    rest = ("rope_parameters", "aliases")
    for name, known in stored("transformers").items():
        assert {key: known.get(key) for key in rest} == {key: found[name].get(key) for key in rest}, say(name)


def test_a_new_field_would_show() -> None:
    known = of_megatron()["0.19.2"]
    newer = {**known, "TransformerConfig": {**known["TransformerConfig"], "made_up": 3, "qk_l2_norm": True}}
    assert set(changes(known, newer)) == {
        say("TransformerConfig.made_up = 3"),
        say("TransformerConfig.qk_l2_norm = True"),
    }


def of_megatron() -> Any:
    return json.loads(STORED.read_text(encoding="utf-8"))["megatron-core"]


def stored(package: str) -> Any:
    return json.loads(STORED.read_text(encoding="utf-8"))[package]["classes"]


def fields(classes: dict[str, Any]) -> dict[str, Any]:
    return {name: found["fields"] for name, found in classes.items()}


def changes(known: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """What is new, gone or another, as text that says what to do."""
    before, after = flat(known), flat(found)
    names = [name for name in {**before, **after} if before.get(name, ...) != after.get(name, ...)]
    return [say(f"{name} = {after[name]}" if name in after else f"{name} is gone") for name in names]


def flat(classes: dict[str, Any]) -> dict[str, Any]:
    return {f"{kind}.{name}": value for kind, inside in classes.items() for name, value in inside.items()}


def say(text: str) -> str:
    return f"{text}: give it a row in mcore_rlhf/models/meaning, then {REGENERATE}"
