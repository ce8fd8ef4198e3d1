"""Pages of ``mcore-rlhf report`` in a real browser: no error, nothing that overflows, and the numbers of ``--json``.

Needs playwright and a Chromium (``apt-get install chromium``, or ``playwright install chromium``); skipped where there is none.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from mcore_rlhf.cli.app import app

from .conftest import KINDS, MOE, TP1, TP2, run_cli

WIDTHS = (1400, 420)
SCHEMES = ("light", "dark")


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_it_opens_and_nothing_overflows_or_is_empty(
    visit: Any, browser: Any, kind: str, width: int, scheme: str
) -> None:
    page = visit(kind, width, scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    outside = """() => [...document.querySelectorAll('h1, h2, h3, h4, p, dd, .banner, .tensor, .figures div, .legend li')]
        .filter((e) => e.getClientRects().length && e.scrollWidth > e.clientWidth + 1 && getComputedStyle(e).display !== 'inline')
        .map((e) => e.textContent.slice(0, 60))"""
    assert page.evaluate(outside) == []
    seen = _colours(browser, page.screenshot(full_page=True))
    assert (seen["dark"] / seen["all"] > 0.6) == (scheme == "dark")
    # The palette's first colour is the first part of a tensor, and what is committed or kept.
    assert seen["blue"] > 100


@pytest.mark.parametrize("kind", ["checkpoint", "conversion", "comparison", "roles"])
def test_cards_do_not_lie_over_one_another(visit: Any, kind: str) -> None:
    for width in WIDTHS:
        page = visit(kind, width)
        overlaps = """() => [...document.querySelectorAll('.tensors')].flatMap((group) => {
            const boxes = [...group.children].map((c) => c.getBoundingClientRect());
            return boxes.flatMap((a, i) => boxes.slice(i + 1).filter((b) =>
                a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1));
        }).length"""
        assert page.evaluate(overlaps) == 0


def _shown(page: Any, key: str) -> str:
    return str(page.locator(f"[data-key='{key}']").first.inner_text())


def test_the_numbers_are_those_of_json(visit: Any, pages: dict[str, Path]) -> None:
    facts = json.loads(run_cli("inspect", MOE, "--json"))
    listed = json.loads(run_cli("inspect", MOE, "--tensors", "--json"))["tensors"]
    page = visit("checkpoint")
    assert _shown(page, "model.parameters") == f"{facts['model']['parameters']:,}"
    assert _shown(page, "model.num_experts") == str(facts["model"]["num_experts"])
    assert _shown(page, "tensors") == str(len(listed))
    diff = json.loads(CliRunner().invoke(app, ["diff", str(TP1), str(TP2), "--json"]).stdout)
    page = visit("comparison")
    assert _shown(page, "diff.tensors") == str(diff["tensors"])
    assert _shown(page, "diff.elements") == f"{diff['elements']:,}"
    assert _shown(page, "diff.differences") == str(len(diff["differences"]))
    page = visit("conversion")
    account = json.loads((pages["conversion"].parent / "converted" / "mcore_rlhf.json").read_text())["report"][
        "account"
    ]
    assert _shown(page, "account.items") == str(account["items"])
    assert _shown(page, "account.kept") == str(account["kept"])
    assert "Equal." in page.inner_text("#diff")
    page = visit("run")
    assert (_shown(page, "run.steps"), _shown(page, "run.committed")) == ("3", "2")
    assert "keeps no history" in page.inner_text("#run")
    assert page.locator("#shards").count() == 0


def test_searching_choosing_and_the_keyboard(visit: Any) -> None:
    page = visit("checkpoint")
    cards = page.locator(".tensor")
    everything = cards.count()
    page.keyboard.press("/")
    page.keyboard.type("layers.2.mlp.experts.local_experts.3")
    assert 0 < cards.count() < everything
    page.keyboard.press("Escape")
    assert cards.count() == everything
    page.locator(".tensor", has_text="linear_fc1").first.click()
    assert "gate 48 | up 48" in page.locator(".detail").inner_text()
    page.get_by_label("expert 3", exact=True).click()
    page.locator(".tensor", has_text="linear_fc1").first.click()
    assert "mp_rank_00_001" in page.locator(".detail").inner_text()
    page.get_by_label("layer 0", exact=True).focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    assert page.get_by_label("layer 1", exact=True).get_attribute("aria-pressed") == "true"
    page.locator("input[value=exp_avg_sq]").first.check()
    assert page.locator("input[value=exp_avg_sq]").is_checked()


def test_it_prints(visit: Any, tmp_path: Path) -> None:
    page = visit("conversion")
    page.pdf(path=tmp_path / "page.pdf")
    assert (tmp_path / "page.pdf").read_bytes().count(b"/Type /Page\n") <= 12


_HISTOGRAM = """async (png) => {
    const image = new Image();
    image.src = "data:image/png;base64," + png;
    await image.decode();
    const canvas = Object.assign(document.createElement("canvas"), { width: image.width, height: image.height });
    const context = canvas.getContext("2d");
    context.drawImage(image, 0, 0);
    const data = context.getImageData(0, 0, image.width, image.height).data, found = { all: 0, dark: 0, blue: 0 };
    for (let i = 0; i < data.length; i += 4) {
        found.all += 1;
        found.dark += data[i] + data[i + 1] + data[i + 2] < 200;
        found.blue += Math.abs(data[i]) < 24 && Math.abs(data[i + 1] - 114) < 24 && Math.abs(data[i + 2] - 178) < 24;
    }
    return found;
}"""


def _colours(browser: Any, picture: bytes) -> dict[str, int]:
    """Pixels of a screenshot: all, dark ones, and those of the palette's first colour."""
    page = browser.new_page()
    try:
        return dict(page.evaluate(_HISTOGRAM, base64.b64encode(picture).decode()))
    finally:
        page.close()
