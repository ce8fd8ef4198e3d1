"""Conversions that several files look at are made once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.helpers.conversions import Conversions


@pytest.fixture(scope="session")
def conversions(tmp_path_factory: pytest.TempPathFactory) -> Conversions:
    """Converted goldens, each made once."""
    from tests.helpers.conversions import Conversions  # it imports torch, which not every file needs

    return Conversions(tmp_path_factory.mktemp("converted"))
