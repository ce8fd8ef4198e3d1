"""Pages of every kind, and a browser that opens them; skipped where there is no playwright, or no Chromium."""

from __future__ import annotations

import calendar
import json
import math
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from mcore_rlhf.cli.app import app
from tests.unit.manager.roots import make_step

GOLDENS = Path(__file__).parents[1] / "goldens" / "megatron"
MOE, TP1, TP2 = (GOLDENS / name for name in ("ep2dp2_moe_seq_bf16_do", "tp1_bf16_do", "tp2pp2dp2_bf16_do"))
MORNING = calendar.timegm((2026, 3, 1, 8, 0, 0))
KINDS = ("checkpoint", "conversion", "comparison", "run", "roles", "clumps", "same_seconds", "plain")


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
    names = ("chromium", "chromium-browser", "google-chrome")
    own = os.environ.get("CHROMIUM") or next((path for name in names if (path := shutil.which(name))), None)
    with sync_api.sync_playwright() as started:
        if own is None and not Path(started.chromium.executable_path).exists():
            pytest.skip("there is no Chromium: apt-get install chromium, or playwright install chromium")
        opened = started.chromium.launch(executable_path=own, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="session")
def pages(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A page of each kind."""
    del browser  # without one nobody looks at them
    folder = tmp_path_factory.mktemp("pages")
    run_cli("convert", TP2, folder / "converted", "--tp", 4, "--pp", 1)
    shown = {
        "checkpoint": [MOE],
        "conversion": [TP2, folder / "converted"],
        "comparison": [TP1, TP2],
        "run": [_short_run(folder / "run")],
        "roles": [_step_of_roles(folder / name) for name in ("a", "b")],
        "clumps": [_long_run(folder / "clumps")],
        "same_seconds": [_run_of(folder / "same_seconds", [(MORNING + 0.3 * n, 0.2) for n in range(10)])],
        "plain": [_plain_run(folder / "plain")],
    }
    made = {kind: folder / f"{kind}.html" for kind in shown}
    for kind, paths in shown.items():
        run_cli("report", *paths, "-o", made[kind])
    return made


def run_cli(*args: object) -> str:
    """What a command prints that must succeed."""
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    assert result.exit_code == 0, result.output
    return result.stdout


def _short_run(root: Path) -> Path:
    """Three steps, of which one is damaged."""
    for number, reward in ((10, 0.5), (20, 0.7), (30, 0.6)):
        make_step(root, number, metrics={"reward": reward})
    (root / "global_step_20" / "actor" / "weights.bin").unlink()
    return root


def _step_of_roles(root: Path) -> Path:
    """An actor that is a mixture of experts, a critic that is cut, and a reward model."""
    step = root / "global_step_2"
    for role, golden in (("actor", MOE), ("critic", TP2), ("reward", TP1)):
        shutil.copytree(golden, step / role)
    return step


def _run_of(root: Path, saves: Sequence[tuple[float, float]], events: Sequence[Mapping[str, object]] = ()) -> Path:
    """A run whose steps were committed at these seconds, each after so many of writing."""
    for number, (at, saving) in enumerate(saves, 1):
        # No gain of a step is like that before it, so that every point of a curve is at a height of its own.
        measured = {
            "reward": math.sin(number / 4), "loss": 3 * math.exp(-number / 6), "kl": "inf" if number == 4 else number / 100,
        }  # fmt: skip
        report = {"save_seconds": saving, "stall_seconds": saving / 5, "live": {}}
        step = make_step(root, 10 * number, metrics=measured, report=report, roles=("actor", "critic"))
        manifest = json.loads((step / "manifest.json").read_text())
        manifest["provenance"]["time"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))
        (step / "manifest.json").write_text(json.dumps(manifest))
    if events:
        (root / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return root


def _long_run(root: Path) -> Path:
    """Half-hourly saves, then ten within three seconds; a failure, resumes, and deletions in a row."""
    saves = [(MORNING + 1800 * n, 40.0 + 3 * n) for n in range(12)]
    saves += [(MORNING + 1800 * 12 + 0.3 * n, 0.2) for n in range(10)]
    events: list[dict[str, object]] = [
        {"time": MORNING - 5, "kind": "load", "step": None, "text": "nothing to resume"},
        {"time": MORNING + 7300, "kind": "failed", "step": 45, "text": "<b>disk full</b>"},
        {"time": MORNING + 7330, "kind": "load", "step": 40, "text": "resumed"},
    ]
    events += [{"time": MORNING + 1800 * 11 + n, "kind": "delete", "step": n + 1} for n in range(6)]
    return _run_of(root, saves, events)


def _plain_run(root: Path) -> Path:
    """A genuine run of :class:`~mcore_rlhf.TorchEngine`."""
    import torch

    from mcore_rlhf import CheckpointManager, ManagerOptions, TorchEngine

    torch.manual_seed(0)
    policy = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=0.01)
    policy(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    roles = {
        "actor": TorchEngine(policy, optimizer),
        "critic": TorchEngine(torch.nn.Linear(64, 1)),
        "rest": TorchEngine(None, optimizer),
    }
    with CheckpointManager(root, roles, options=ManagerOptions(fsync=False, catch_signals=False)) as manager:
        for number in range(1, 5):
            manager.save(10 * number, metrics={"reward": number / 10, "loss": 1 / number}, blocking=True)
    return root


@pytest.fixture
def visit(browser: Any, pages: dict[str, Path]) -> Iterator[Any]:
    """Opens a page, and fails if anything was said on its console."""
    said: list[str] = []
    contexts = []

    def go(kind: str, width: int = 1400, scheme: str = "light") -> Any:
        size = {"width": width, "height": 900}
        context = browser.new_context(viewport=size, color_scheme=scheme, offline=True, has_touch=width < 500)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto(pages[kind].as_uri())
        page.wait_for_selector("html[data-ready=yes]", state="attached")
        page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        return page

    yield go
    for context in contexts:
        context.close()
    assert said == []
