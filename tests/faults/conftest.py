"""The shim, compiled once a session."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.disk import compiled


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is preloaded into processes whose disk is to fail."""
    library = compiled(tmp_path_factory.mktemp("shim"))
    if library is None:
        pytest.skip("no C compiler: disks that fail are not tried")
    return library
