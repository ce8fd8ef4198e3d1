"""Conversions are shared by all tests of this folder."""

from __future__ import annotations

import pytest

from tests.helpers.conversions import Conversions


@pytest.fixture(scope="session")
def conversions(tmp_path_factory: pytest.TempPathFactory) -> Conversions:
    """Converted goldens, each made once."""
    return Conversions(tmp_path_factory.mktemp("converted"))
