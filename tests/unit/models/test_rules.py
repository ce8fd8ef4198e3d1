"""Reading the user's rules, and saying what is wrong with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_rlhf.core.catalog import BFLOAT16
from mcore_rlhf.errors import UsageError
from mcore_rlhf.models.spec import (
    COLUMN,
    GATED,
    REPLICATED,
    ROW,
    VOCABULARY,
    ModelSpec,
    ParamRule,
    ParamSpec,
    Partition,
    Rules,
    read_rules,
)


def rules_file(folder: Path, text: str) -> Path:
    path = folder / "rules.yaml"
    path.write_text(text)
    return path


def test_every_kind_of_rule(tmp_path: Path) -> None:
    rules = read_rules(
        rules_file(
            tmp_path,
            """
rules:
  - {pattern: value_head.weight, partition: replicated}
  - {pattern: "*.lora_a", partition: column, wd_mult: 0}
  - {pattern: "*.lora_b", partition: row}
  - {pattern: "*.gate_up", partition: gated}
  - {pattern: "lm.head", partition: vocabulary}
  - {pattern: "*.three", partition: {dim: 1, blocks: 3}}
  - {pattern: "vision.*", trainable: false}
  - {pattern: "*", wd_mult: 1.5}
""",
        )
    )
    assert rules.partition("value_head.weight") == REPLICATED
    assert rules.partition("decoder.layers.0.lora_a") == COLUMN
    assert rules.partition("x.lora_b") == ROW
    assert rules.partition("x.gate_up") == GATED
    assert rules.partition("lm.head") == VOCABULARY
    assert rules.partition("x.three") == Partition(1, blocks=3)
    assert rules.partition("vision.conv.weight") is None
    assert rules.trainable("vision.conv.weight") is False
    assert rules.trainable("value_head.weight") is None
    assert rules.wd_mult("x.lora_a") == 0
    assert rules.wd_mult("x.lora_b") == 1.5


def test_the_first_rule_that_speaks_wins() -> None:
    rules = Rules(
        (ParamRule("*head*", trainable=True), ParamRule("value_*", partition=ROW), ParamRule("*", partition=COLUMN))
    )
    assert rules.partition("value_head") == ROW
    assert rules.partition("Value_head") == COLUMN, "patterns tell capitals apart"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- pattern: x", "a list under 'rules'"),
        ("rules: {pattern: x}", "a list under 'rules'"),
        ("", "a list under 'rules'"),
        ("rules: [", "YAML"),
        ("rules: [x]", "rule 1"),
        ("rules: [{partition: row}]", "'pattern'"),
        ("rules: [{pattern: x, partition: row}, {pattern: y, partition: diagonal}]", "rule 2.*'diagonal'"),
        ("rules: [{pattern: x, split: 0}]", "unknown split"),
        ("rules: [{pattern: x, partition: {dim: a}}]", "rule 1"),
        ("rules: [{pattern: x, trainable: perhaps}]", "'trainable'"),
        ("rules: [{pattern: x, wd_mult: heavy}]", "'wd_mult'"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        read_rules(rules_file(tmp_path, text))
    assert "rules.yaml" in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere\.yaml"):
        read_rules(tmp_path / "nowhere.yaml")


def test_a_model_finds_its_parameters_by_name() -> None:
    one = ParamSpec("one", (2, 3), BFLOAT16, ROW)
    model = ModelSpec((one,), num_layers=1, tied=False)
    assert model.get("one") is one
    assert model.get("two") is None
    assert [str(p) for p in (REPLICATED, ROW, GATED, VOCABULARY)] == [
        "replicated", "split(1)", "split(0) in 2 blocks", "vocabulary(0)",
    ]  # fmt: skip
