"""What several files convert: a copy of a genuine checkpoint, on the file system of the targets."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.helpers.conversions import GOLDENS


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TP2×PP2×DP2; nobody changes it."""
    copy = tmp_path_factory.mktemp("source") / "run"
    return Path(shutil.copytree(GOLDENS / "tp2pp2dp2_bf16_do", copy))
