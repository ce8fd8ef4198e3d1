"""One resident pool of workers for the whole session: importing Megatron takes seconds, so it happens once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mcore_rlhf.demo.workers import WorkerPool
from tests.reference.lab import Lab

LARGEST_WORLD = 8


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(LARGEST_WORLD) as workers:
        yield workers


@pytest.fixture(scope="session")
def lab(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(pool, tmp_path_factory.mktemp("reference"))
