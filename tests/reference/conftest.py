"""One resident pool of workers for the whole session: importing Megatron takes seconds, so it happens once."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from mcore_rlhf.demo import versions
from mcore_rlhf.demo.workers import WorkerPool
from tests.reference import releases
from tests.reference.forked_ranks import ForkedRanks
from tests.reference.lab import Lab

HERE = Path(__file__).parent
LARGEST_WORLD = 8


@pytest.hookimpl(tryfirst=True)  # before pytest looks at -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Fit the tests of this folder to the release that runs; where one was asked for, leave out what does not run Megatron."""
    release = releases.running(versions.MEGATRON)
    asked, needless = config.getoption("--megatron") is not None, []
    for item in items:
        if item.path.parent.name == "reference" and item.path.stem in releases.ROWS:
            releases.mark(item, release)
        elif asked:
            needless.append(item)
    if needless:
        config.hook.pytest_deselected(items=needless)
        items[:] = [item for item in items if item not in needless]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files that do not run Megatron are not even imported where a release was asked for."""
    asked = config.getoption("--megatron") is not None and collection_path.parent == HERE
    return True if asked and collection_path.match("test_*.py") and collection_path.stem not in releases.ROWS else None


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """``make test ARGS="-k name"`` is no failure because no test of that name runs on another Megatron."""
    if session.config.getoption("--megatron") is not None and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(LARGEST_WORLD, preload="tests.reference.megatron_preload") as workers:
        yield workers


@pytest.fixture(scope="session")
def lab(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(pool, tmp_path_factory.mktemp("reference"))


@pytest.fixture(scope="session")
def deepspeed_pool() -> Iterator[WorkerPool]:
    """Ranks with DeepSpeed imported, which is not done here since it changes the process."""
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed")
    with WorkerPool(4, preload="tests.reference.deepspeed_preload") as workers:
        yield workers


@pytest.fixture(scope="session")
def fsdp_pool() -> Iterator[WorkerPool]:
    """Ranks that wrap models in FSDP."""
    with WorkerPool(4, preload="tests.reference.dcp_jobs") as workers:
        yield workers


@pytest.fixture(scope="session")
def kernels_pool() -> Iterator[WorkerPool]:
    """Ranks with a Megatron that has Mamba and the gated delta net."""
    with WorkerPool(2, preload="tests.reference.kernels_preload") as workers:
        yield workers


@pytest.fixture(scope="session")
def forked_ranks() -> Iterator[ForkedRanks]:
    """Ranks of transformers' and accelerate's, each forked for its run."""
    ranks = ForkedRanks()
    yield ranks
    ranks.close()
