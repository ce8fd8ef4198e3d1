"""What every test gets: a seed that is printed and can be replayed, its folder's marker, and the megatron-core that was asked for."""

from __future__ import annotations

import argparse
import gc
import os
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from tests.helpers.object_store import S3

# No deadline: two busy cores make single examples slow. The blob in a failure replays it.
settings.register_profile("default", deadline=None, print_blob=True)
settings.load_profile("default")
# Before torch is imported, here or in a process that a test starts: threads that wait for each other on a core of three workers turn in
# circles meanwhile, which made two fifths of what unit tests with torch took.
os.environ.setdefault("OMP_NUM_THREADS", "1")

TESTS = Path(__file__).parent
FOLDER_MARKERS = ("gpu", "reference")
SEED = pytest.StashKey[int]()
TOGETHER = (
    ("transformers", r"^tests/reference/test_(zero_runs|seam_|will_resume\.|accelerate)"),
    ("megatron's", r"^tests/reference/test_(megatron_dist|declared|releases|integration|engine_muon|rl_|demo)"),
    ("megatron", r"^tests/reference/test_(?!\w*deepspeed|dcp|engine_fsdp)"),
    ("ranks", r"^tests/distributed/test_(?!resume|convert)"),
    ("deepspeed", r"^tests/reference/test_\w*deepspeed"),
    ("fsdp", r"^tests/reference/test_(dcp|engine_fsdp)"),
    ("formats", r"^tests/contract/test_(any_to_any|any_reader|account|no_calls)"),
)
"""Files that share ranks with a framework in them, or conversions: name of the group, and of the files; Megatron's are two halves.
They begin in this order: the longest first, and ranks, which mostly wait, while others compute."""


def _asked_for() -> Path | None:
    """The folder of ``--megatron``, before pytest has read the option: other conftests ask for Megatron's version as they are imported."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--megatron")
    version = parser.parse_known_args()[0].megatron
    folder = Path(sys.prefix) / f"megatron-{version}"
    return folder if version and folder.is_dir() else None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, help="replay the random seed that an earlier run printed")
    parser.addoption(
        "--megatron", metavar="VERSION", help="run on the megatron-core that lies beside the installed one"
    )
    parser.addoption(
        "--megatron-lm",
        metavar="FOLDER",
        help="a checkout of Megatron-LM of the release that runs, whose scripts are run",
    )
    parser.addoption("--trainers", metavar="FOLDER", help="where trainers' packages lie, each release in a folder")


def pytest_configure(config: pytest.Config) -> None:
    gc.set_threshold(50_000, 10, 10)  # 700 looks at what a test has made again and again: a sixteenth of the time
    if config.getoption("--seed") is None:  # set as an option, which the worker processes are given
        config.option.seed = random.SystemRandom().getrandbits(32)
    config.stash[SEED] = config.getoption("--seed")
    if config.getoption("--megatron") is not None and _asked_for() is None:  # given otherwise than in the command line
        put_first(Path(sys.prefix) / f"megatron-{config.getoption('--megatron')}")


def put_first(folder: Path) -> None:
    """Have this process and all that it starts import Megatron from a folder that ``scripts/add_megatron.sh`` has made."""
    if not folder.is_dir():
        version = folder.name.partition("-")[2]
        raise pytest.UsageError(f"{folder} is not there: scripts/add_megatron.sh {version}")
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


if (_folder := _asked_for()) is not None:
    put_first(_folder)


def pytest_report_header(config: pytest.Config) -> str:
    return f"random seed: {config.stash[SEED]} (replay with --seed)"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test in ``tests/gpu`` and ``tests/reference`` by its folder's name, and begin with what takes longest."""
    for item in items:
        folder = item.path.relative_to(TESTS).parts[0]
        if folder in FOLDER_MARKERS:
            item.add_marker(folder)
    turns: dict[str, tuple[int, int]] = {}
    for item in items:
        file = item.path.relative_to(TESTS.parent).as_posix()
        if file not in turns:
            turns[file] = _turn(file, [*turns])
    items.sort(key=lambda item: turns[item.path.relative_to(TESTS.parent).as_posix()])


def _turn(file: str, before: list[str]) -> tuple[int, int]:
    """The many short files come last: they fill up what the long ones leave. Of the others each folder has its turn, since some wait."""
    long = [number for number, (_, names) in enumerate(TOGETHER) if re.search(names, file)]
    if long or file.startswith("tests/unit/"):
        return long[0] if long else len(TOGETHER) + 1, 0
    folder = file.rpartition("/")[0]
    return len(TOGETHER), sum(one.startswith(f"{folder}/") for one in before)


def pytest_collection_finish() -> None:
    """What was imported and collected lives as long as the process: the collector need not look at all of it again and again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give a file to one process, and files that share ranks of a framework too: what is imported and trained there is so once."""
    from xdist.scheduler import LoadFileScheduling

    class Together(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return next((group for group, names in TOGETHER if re.search(names, file)), file)

    return Together(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        torch = pytest.importorskip("torch")
        if not torch.cuda.is_available():
            pytest.skip("needs a GPU")


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A seed of this test's own, derived from the run's printed seed."""
    where = request.path.relative_to(TESTS).as_posix()
    return random.Random(f"{request.config.stash[SEED]}:{where}:{request.node.name}").getrandbits(32)


@pytest.fixture
def rng(seed: int) -> random.Random:
    """Random numbers that ``--seed`` replays."""
    return random.Random(seed)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3]:
    """One for all tests of a process, as moto's buckets are."""
    from tests.helpers.object_store import serving

    with serving() as server:
        yield server


@pytest.fixture
def s3(s3_server: S3, monkeypatch: pytest.MonkeyPatch) -> S3:
    """An S3 server with one empty bucket, which the environment names."""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    s3_server.forget()
    return s3_server
