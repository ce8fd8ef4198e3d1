"""What the tests over all formats share: each conversion of the small model is made once."""

from __future__ import annotations

import pytest

from tests.helpers.every_format import Zoo


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return Zoo(tmp_path_factory.mktemp("every"))
