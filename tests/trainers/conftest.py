"""Trainers themselves load what we write: their packages lie in a folder of their own, which ``--trainers`` names.

``make test-trainers`` puts them there (``scripts/add_trainers.sh`` has the releases), each in a folder of its own and what they need in
``needs``, and runs the tests of this folder. Nothing is installed beside the pinned packages. A trainer that a registry has may not skip
then; those that only a repository has do where it could not be fetched, and the run says of each trainer how many tests ran.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest

TITAN = "torchtitan-0.2.2"
_OF_FILES = {
    "test_verl": "verl", "test_torchtitan": "torchtitan", "test_trl": "TRL", "test_transformers": "transformers and accelerate",
    "test_grpo": "TRL, at our seam", "test_resume_check_grpo": "TRL, under resume-check", "test_titan_seam": "torchtitan, at our seam",
    "test_verl_megatron": "verl, on Megatron", "test_verl_sft": "verl, its SFT", "test_torchtitan_newer": "torchtitan 0.3",
    "test_skyrl": "SkyRL", "test_slime": "slime and miles, as will-resume says",
    "test_run_seams": "verl, NeMo-RL and Megatron-Bridge, at our seams",
    "test_lightning_seam": "Lightning, at our seam", "test_ray_seam": "Ray Train, at our seam",
    "test_torchdata": "torchdata", "test_nemo_replay": "NeMo-RL, its replay buffer",
    "test_will_resume_titan": "torchtitan, as will-resume says",
    "test_will_resume_bridge": "Megatron-Bridge, as will-resume says of each key",
    "test_will_resume_keys": "verl and OpenRLHF, as will-resume says of each key",
    "test_will_resume_verl": "verl, as will-resume says",
    "test_will_resume_verl_megatron": "verl on Megatron, as will-resume says",
    "test_ms_swift": "ms-swift on Megatron", "test_roll": "ROLL on Megatron",
    "test_areal": "AReaL", "test_nemo_v2": "NeMo-RL on DTensor v2",
    "test_prime": "prime-rl",
    "test_torch_checkpointing": "torch_checkpointing (DCP v2)",
    "test_each_other": "verl, OpenRLHF, RLinf, NeMo-RL and open-instruct, from each other",
}  # fmt: skip
_MAY_SKIP = ("repository",)
"""Words in a reason for which a test may be skipped where packages are given."""


def _given(config: pytest.Config) -> Path | None:
    given = config.getoption("--trainers")
    return None if given is None else Path(given).resolve()


def pytest_configure(config: pytest.Config) -> None:
    """torchtitan and an optimizer of Trainer's are imported by the tests' own processes, and what they need; ours come first."""
    folder = _given(config)
    if folder is not None:
        sys.path += [str(folder / name) for name in (TITAN, "schedulefree-1.4.1", "needs")]


@pytest.fixture(scope="session")
def trainers(request: pytest.FixtureRequest) -> Path:
    """The folder with the trainers' packages; without it the tests are skipped."""
    found = _given(request.config)
    if found is None:
        pytest.skip("needs the trainers' own packages: make test-trainers (see tests/trainers/conftest.py)")
    return found


def _told(reports: list[pytest.TestReport]) -> dict[str, int]:
    """Of each trainer how many tests there are."""
    files = Counter(Path(report.nodeid.partition("::")[0]).stem for report in reports)
    return {_OF_FILES[name]: count for name, count in files.items() if name in _OF_FILES}


def _unexcused(config: pytest.Config, skipped: list[pytest.TestReport]) -> list[pytest.TestReport]:
    """Tests that may not be skipped where packages are given, and were."""
    if _given(config) is None:
        return []
    ours = [one for one in skipped if Path(one.nodeid.partition("::")[0]).stem in _OF_FILES]
    return [one for one in ours if not any(word in str(one.longrepr) for word in _MAY_SKIP)]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say of each trainer how many tests ran, how many did not, and why."""
    if _given(config) is None:
        return
    stats = terminalreporter.stats
    skipped = stats.get("skipped", [])
    ran, left = _told([*stats.get("passed", []), *stats.get("failed", [])]), _told(skipped)
    terminalreporter.section("trainers")
    for name in sorted({*ran, *left}):
        terminalreporter.line(f"{name}: {ran.get(name, 0)} run, {left.get(name, 0)} skipped")
    for reason, count in Counter(str(one.longrepr[-1]) for one in skipped).items():
        terminalreporter.line(f"{count} {reason}")
    for one in _unexcused(config, skipped):
        terminalreporter.line(f"may not be skipped: {one.nodeid}", red=True)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail where a trainer of the registry was skipped."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if (
        reporter is not None
        and _unexcused(session.config, reporter.stats.get("skipped", []))
        and not session.exitstatus
    ):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
