"""What is given to the manager is checked when it is given."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mcore_rlhf.errors import LayoutMismatch, UsageError
from mcore_rlhf.manager.run import steps
from mcore_rlhf.manager.run.manager import CheckpointManager, ManagerOptions
from mcore_rlhf.manager.run.policies import SignalFlag
from mcore_rlhf.manager.run.rng import file_content

QUIET = ManagerOptions(catch_signals=False, fsync=False, asynchronous=False)


def test_options_that_cannot_be_are_named_together() -> None:
    with pytest.raises(UsageError) as caught:
        ManagerOptions(check="byte", on_busy="nope", rng="x", timeout=-1, keep=5, save=3)  # type: ignore[arg-type]
    for part in ("check", "'byte'", "on_busy", "rng", "timeout", "keep", "save"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "given",
    [{"save_timeout": "900"}, {"timeout": "9"}, {"link_unchanged": "no"}, {"deadline": "10m"}, {"worlds": "actor"}],
    ids=lambda given: next(iter(given)),
)
def test_what_is_of_another_kind_is_named(given: dict[str, Any]) -> None:
    ((name, value),) = given.items()
    with pytest.raises(UsageError, match=rf"^{name}: expected .*, found {value!r}"):
        ManagerOptions(**given)


def test_metrics_are_numbers(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, torch.nn.Linear(2, 2), options=QUIET) as manager:
        manager.save(1, {"a": torch.tensor(1.5), "b": np.float32(0.5), "c": True})  # type: ignore[dict-item]
        with pytest.raises(UsageError) as caught:
            manager.save(2, {"good": 1.0, "word": "x", "none": None, "two": torch.ones(2)})  # type: ignore[dict-item]
        assert all(name in str(caught.value) for name in ("word", "none", "two"))
        assert "good" not in str(caught.value)
        manager.save(3, {"inf": float("inf"), "nan": float("nan")})
    found = {step.step: step.metrics for step in steps.committed(tmp_path)}
    assert found[1] == {"a": 1.5, "b": 0.5, "c": 1.0}
    assert set(found) == {1, 3}

    def strict(constant: str) -> object:
        raise AssertionError(constant)

    json.loads((tmp_path / "global_step_3" / "manifest.json").read_text(), parse_constant=strict)


@pytest.mark.parametrize("role", ["iter_1", "mp_rank_00", "actor.", "data", "a/b", "", "global_step_3"])
def test_names_that_no_role_can_have(tmp_path: Path, role: str) -> None:
    with pytest.raises(UsageError, match="role"):
        CheckpointManager(tmp_path, {role: torch.nn.Linear(2, 2)}, options=QUIET)


def test_no_roles(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no roles"):
        CheckpointManager(tmp_path, {}, options=QUIET)


def test_after_close(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, torch.nn.Linear(2, 2), options=QUIET)
    manager.close()
    for call in (lambda: manager.save(1), lambda: manager.maybe_save(1), lambda: manager.load("auto")):
        with pytest.raises(UsageError, match="closed"):
            call()


def test_both_models_of_a_step_say_what_differs(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, {r: torch.nn.Linear(2, 2) for r in ("actor", "critic")}, options=QUIET) as manager:
        manager.save(1)
    with (
        CheckpointManager(tmp_path, {r: torch.nn.Linear(3, 2) for r in ("actor", "critic")}, options=QUIET) as manager,
        pytest.raises(LayoutMismatch) as caught,
    ):
        manager.load("auto")
    assert "actor: " in str(caught.value)
    assert "critic: " in str(caught.value)


def test_random_states_are_kept_where_a_role_goes_or_comes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    both = {r: torch.nn.Linear(2, 2) for r in ("actor", "critic")}
    refuse = ManagerOptions(catch_signals=False, fsync=False, asynchronous=False, rng="refuse")
    with CheckpointManager(tmp_path, both, options=refuse) as manager:
        manager.save(1)
        expected = torch.rand(3)
    with CheckpointManager(tmp_path, {"actor": both["actor"]}, options=refuse) as manager:
        assert manager.load("auto") is not None
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(
    ("saved", "live", "same"),
    [
        ("actor TP2×PP1×DP1", "actor TP2×PP1×DP1", True),
        ("actor TP2×PP1×DP1, critic DP2", "actor TP2×PP1×DP1", True),
        ("actor TP2×PP1×DP1", "actor TP2×PP1×DP1, critic TP1×PP2×DP1", True),
        ("actor TP2×PP1×DP1", "actor TP1×PP2×DP1", False),
        ("actor TP2×PP1×DP1, critic TP2×PP1×DP1", "actor TP2×PP1×DP1, critic TP1×PP2×DP1", False),
        ("critic DP2", "actor DP2", False),
        ("a: actor DP2", "b: actor DP2", False),
        ("a: actor DP2", "a: actor DP2", True),
    ],
)
def test_which_layouts_have_the_same_ranks(saved: str, live: str, same: bool) -> None:
    from mcore_rlhf.core.account import Report
    from mcore_rlhf.core.facts import Fate
    from mcore_rlhf.manager.run.rng import RngKeeper, captured

    report = Report()
    RngKeeper(0, 1, live, None).chosen(file_content([captured()], saved), "rng", 1, report)
    assert [fate for fate, _ in report.lines] == [Fate.KEPT if same else Fate.DERIVED]


def test_a_reader_does_not_listen_to_signals(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    options = ManagerOptions(read_only=True)
    with CheckpointManager(tmp_path, torch.nn.Linear(2, 2), options=options):
        assert signal.getsignal(signal.SIGTERM) is before


def test_a_run_that_never_looks_can_still_be_ended(tmp_path: Path) -> None:
    """By a second signal, some seconds later; the echo of the first one does nothing."""
    script = textwrap.dedent("""
        import os, signal, sys, time
        from mcore_rlhf.manager.run import policies as signals
        signals._IMPATIENT_S = 0.3
        flag = signals.SignalFlag().install()
        for pause in (0, 0, 0.5):
            time.sleep(pause)
            os.kill(os.getpid(), signal.SIGTERM)
            print("alive", flush=True)
        time.sleep(30)
    """)
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert run.stdout.split() == ["alive"] * 2
    assert run.returncode == -signal.SIGTERM


def test_a_signal_that_was_noticed_is_obeyed_in_peace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mcore_rlhf.manager.run.policies._IMPATIENT_S", 0.0)
    with SignalFlag() as flag:
        os.kill(os.getpid(), signal.SIGUSR1)
        flag.noticed = True
        os.kill(os.getpid(), signal.SIGUSR1)
        assert flag.received == signal.SIGUSR1


def test_a_load_says_how_much_and_how_long(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with CheckpointManager(tmp_path, torch.nn.Linear(2, 2), options=QUIET) as manager:
        manager.save(1)
        with caplog.at_level(logging.INFO, "mcore_rlhf.manager"):
            manager.load("auto")
    (line,) = [record.message for record in caplog.records if "resumed from" in record.message]
    for part in (
        "rank=0",
        "step=1",
        "event=load",
        "seconds=",
        "bytes=",
        "gb_per_s=",
        "resumed from global_step_1; next step 2",
    ):
        assert part in line
