"""``docs/reference/errors.md`` says what is said: every mistake on it is made here."""

from __future__ import annotations

import re

import pytest

from tests.helpers.mistakes import PAGE, SECTIONS, Mistake, page, said

MISTAKES = [mistake for mistakes in SECTIONS.values() for mistake in mistakes]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.what)
def test_what_is_said_begins_in_one_way_and_names_the_place(mistake: Mistake) -> None:
    text = said(mistake)
    if mistake.command.startswith("verify") and mistake.code == 1:
        assert "damaged: 1 problem" in text
        return
    assert len(re.findall(r"^error: ", text, re.MULTILINE)) == 1
    assert not re.search(r"/(tmp|work|home|root)/|Errno|object at 0x|<unicode string>", text)


def test_the_page_is_what_is_said() -> None:
    assert len(MISTAKES) >= 50
    assert PAGE.read_text(encoding="utf-8") == page(), "write it anew: python -m tests.helpers.mistakes"
