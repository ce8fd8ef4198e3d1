"""Forms of nests of values: what is not so is named by its place."""

from __future__ import annotations

from typing import Any

import pytest

from mcore_rlhf.errors import Unsupported
from mcore_rlhf.formats.deepspeed.form import (
    INT,
    SHAPES,
    TEXT,
    Form,
    by_key,
    by_name,
    check_form,
    each,
    either,
    fields,
    items,
    maybe,
)

FORM = fields(("a",), a=maybe(each(SHAPES)), b=items(INT, TEXT), c=either(INT, each(INT)), d=by_key(INT, by_name()))


@pytest.mark.parametrize(
    "value",
    [
        {"a": None},
        {"a": [{"x": (1, 2)}, {}], "b": [1, "y"], "c": 1},
        {"a": (), "c": [1, 2], "d": {1: {"z": object()}}, "e": 5},
    ],
)
def test_what_has_the_form_passes(value: Any) -> None:
    check_form(value, FORM, "file")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({}, "the saved object should be a dictionary with 'a', found {} (dict)"),
        ([], "the saved object should be a dictionary, found [] (list)"),
        ({"a": "text"}, "a should be a list, found 'text' (str)"),
        ({"a": [{}, {"x": (1, True)}]}, "a[1].x[1] should be a whole number, found True (bool)"),
        ({"a": [{3: ()}]}, "a key of a[0] should be a text, found 3 (int)"),
        ({"a": None, "b": [1]}, "b should be a list of 2, found [1] (list)"),
        ({"a": None, "b": [1, 2]}, "b[1] should be a text, found 2 (int)"),
        ({"a": None, "c": [None]}, "c[0] should be a whole number, found None (NoneType)"),
        ({"a": None, "d": {1: 2}}, "d.1 should be a dictionary, found 2 (int)"),
    ],
)
def test_what_has_not_is_named_by_its_place(value: Any, said: str) -> None:
    with pytest.raises(Unsupported) as caught:
        check_form(value, FORM, "some/file.pt")
    assert str(caught.value) == f"some/file.pt: {said}"


def test_nothing_long_is_shown() -> None:
    form: Form = each(INT)
    with pytest.raises(Unsupported) as caught:
        check_form(["x" * 1000], form, "file")
    assert len(str(caught.value)) < 200
