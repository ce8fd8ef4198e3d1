"""A fake Megatron-LM around a real manager."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from mcore_rlhf.integrations import megatron_lm
from tests.unit.integrations import fake_engine
from tests.unit.integrations.fake_megatron import FakeMegatron


@pytest.fixture
def megatron(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeMegatron]:
    fake = FakeMegatron()
    for name, module in fake.modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "mcore_rlhf.integrations.megatron_engine", fake_engine.module())
    yield fake
    megatron_lm.uninstall()
