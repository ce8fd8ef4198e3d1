"""YAML that would recurse for ever or stand for billions of values is refused before it is loaded."""

from __future__ import annotations

import pytest
import yaml

from mcore_rlhf.core.yaml_text import MAX_DEPTH, check_yaml, wrong_yaml

BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{chr(98 + n)}: &{chr(98 + n)} [{', '.join([f'*{chr(97 + n)}'] * 10)}]\n" for n in range(8)
)

TALL = "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n} {{x: *a{n - 1}}}\n" for n in range(1, MAX_DEPTH))
"""No line of it is deep."""


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("rules: " + "[" * 20_000, "levels deep"), ("[" * 20_000 + "]" * 20_000, "levels deep"),
        ("{a: " * 20_000, "levels deep"), ("- " * 20_000 + "a", "levels deep"), (BOMB, "aliases"),
        ("a: &a [*a]", "stands within"), ("a: &a\n  b: {c: [1, *a]}", "stands within"), (TALL, "levels deep"),
        ("a: [*b]", None), ("a: &a [1]\nb: &a [*a]", "stands within"),
    ],
)  # fmt: skip
def test_what_costs_too_much_is_refused(text: str, why: str | None) -> None:
    if why is None:
        check_yaml(text)
        return
    with pytest.raises(yaml.YAMLError, match=why):
        check_yaml(text)


def test_honest_files_pass() -> None:
    check_yaml("base: &base {lr: 1.0e-5}\nactor:\n  <<: *base\n  layers: [1, 2, {x: y}]\n")
    check_yaml("[" * MAX_DEPTH + "]" * MAX_DEPTH)
    check_yaml("")
    check_yaml("a: &a [1]\nb: &b [*a, *a]\nc: [*b, {d: *b}, &a 3, *a]\n")
    check_yaml("a: &a {x: 1}\nb: &b {y: 2}\nc: {<<: *a, <<: *b, a: x, x: a}\nd: [a, a, {a: a}, {a: a}]\n")


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("tp: 2\npp: 1\ntp: 4\n", "line 3, column 1: the key 'tp' is there twice"),
        ("a: {x: 1, 'x': 2}\n", "line 1, column 11: the key 'x' is there twice"),
        ("- a: [1, 2]\n  b: {c: d}\n  a: 3\n", "line 3, column 3: the key 'a' is there twice"),
    ],
)
def test_what_is_said_twice_is_refused(text: str, where: str) -> None:
    with pytest.raises(yaml.YAMLError) as raised:
        check_yaml(text)
    assert wrong_yaml(raised.value) == where
