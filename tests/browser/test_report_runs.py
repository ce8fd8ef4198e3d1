"""The page of a run: a timeline whose labels and saves can be told apart, curves of its metrics, and roles of the plain engine."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.unit.manager.roots import make_step

from .colours import contrast
from .conftest import run_cli

RUNS = ("run", "clumps", "same_seconds", "plain")
LOOKS = [(width, scheme) for width in (1400, 420) for scheme in ("light", "dark")]

_TEXTS = """(root) => [...document.querySelectorAll(`${root} .number, ${root} .tick, ${root} .lane-name, ${root} .many, ${root} svg text`)]
    .filter((e) => e.textContent && e.getClientRects().length)
    .map((e) => { const range = document.createRange(); range.selectNodeContents(e);
        const box = range.getBoundingClientRect(), card = e.closest('.card').getBoundingClientRect();
        return { text: e.textContent, left: box.left, right: box.right, top: box.top, bottom: box.bottom,
            cut: e.scrollWidth > e.clientWidth + 1 && e.clientWidth > 0 && !(e instanceof SVGElement),
            outside: box.left < card.left || box.right > card.right || box.right > innerWidth }; })"""


def _faults(texts: list[dict[str, Any]]) -> list[str]:
    """Labels that are cut, or lie over one another."""
    wrong = [f"{one['text']} is cut" for one in texts if one["cut"] or one["outside"]]
    for at, a in enumerate(texts):
        for b in texts[at + 1 :]:
            across = min(a["right"], b["right"]) - max(a["left"], b["left"])
            along = min(a["bottom"], b["bottom"]) - max(a["top"], b["top"])
            if across > 0.5 and along > 2:
                wrong.append(f"{a['text']} and {b['text']}")
    return wrong


@pytest.mark.parametrize(("width", "scheme"), LOOKS)
@pytest.mark.parametrize("kind", RUNS)
def test_labels_are_whole_and_apart(visit: Any, kind: str, width: int, scheme: str) -> None:
    page = visit(kind, width, scheme)
    texts = page.evaluate(_TEXTS, ".timeline") + page.evaluate(_TEXTS, "#metrics")
    assert len(texts) > 4
    assert _faults(texts) == []
    for value in ("order", "time"):
        page.locator(f".timeline input[value={value}]").check()
        assert _faults(page.evaluate(_TEXTS, ".timeline")) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width


_MARKS = """() => [...document.querySelectorAll('.timeline .track')].map((track) => [...track.querySelectorAll('.mark')]
    .map((m) => m.getBoundingClientRect()).map((b) => [b.left, b.right]).sort((a, b) => a[0] - b[0]))"""


@pytest.mark.parametrize("width", [1400, 420, 320])
@pytest.mark.parametrize("kind", RUNS)
def test_marks_do_not_lie_over_one_another(visit: Any, kind: str, width: int) -> None:
    page = visit(kind, width)
    for scale in ("time", "order"):
        page.locator(f".timeline input[value={scale}]").check()
        for track in page.evaluate(_MARKS):
            assert all(a[1] <= b[0] + 0.5 for a, b in pairwise(track))
            assert all(left >= 0 and right <= width for left, right in track)


@pytest.mark.parametrize("width", [1400, 420])
def test_ten_saves_in_three_seconds_are_told_apart(visit: Any, width: int) -> None:
    """By time they are one mark that says how many it is; opened, by the keyboard too, each is one of its own."""
    page = visit("clumps", width)
    page.locator(".timeline input[value=time]").check()
    clump = page.locator(".mark.many", has_text="saves").last
    assert int(clump.inner_text().split()[0]) >= 10
    label = clump.get_attribute("aria-label")
    assert "220: show them apart" in label
    for _ in range(3):
        if not page.locator(".mark.many", has_text="saves").count():
            break
        page.locator(".mark.many", has_text="saves").last.press("Enter")
    numbers = page.locator(".timeline .number").all_inner_texts()
    assert numbers[-1] == "220"
    assert page.locator(".mark.save").count() >= 5
    page.locator(".mark.save").first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    assert f"step {numbers[1]}" in page.locator(".told").inner_text()
    while page.locator(".back").count():
        page.locator(".mark").first.focus()
        page.keyboard.press("Escape")
    assert page.locator(".mark.many", has_text="saves").count() > 0


def test_saves_in_the_same_seconds_stand_in_their_order(visit: Any) -> None:
    page = visit("same_seconds", 420)
    assert page.locator(".timeline .number").all_inner_texts() == [str(10 * n) for n in range(1, 11)]
    assert "distances are not times" in page.locator(".crumbs").inner_text()


def test_texts_of_events_are_texts(visit: Any) -> None:
    page = visit("clumps")
    page.locator(".mark.cross").click()
    assert "<b>disk full</b>" in page.locator(".told").inner_text()


@pytest.mark.parametrize("width", [1400, 420])
def test_metrics_are_drawn_and_can_be_read(visit: Any, pages: dict[str, Path], width: int) -> None:
    page = visit("clumps", width)
    charts = page.locator("#metrics figure")
    assert charts.locator("h3").all_inner_texts() == ["reward", "loss", "kl"]
    loss = charts.nth(1)
    points = loss.locator(".dot").evaluate_all(
        "(all) => all.map((d) => [+d.getAttribute('cx'), +d.getAttribute('cy')])"
    )
    assert len(points) == 22
    assert points == sorted(points, key=lambda at: (at[0], at[1]))  # it falls, and the page's y grows downwards
    assert loss.locator("path.curve").get_attribute("d").count("L") == 21
    plot = loss.locator(".plot")
    plot.focus()
    page.keyboard.press("Home")
    stored = json.loads((pages["clumps"].parent / "clumps/global_step_10/manifest.json").read_text())["report"][
        "metrics"
    ]
    assert plot.get_attribute("aria-valuetext") == f"step 10: {stored['loss']:.4g}"
    page.keyboard.press("ArrowRight")
    assert loss.locator(".reading").inner_text().startswith("step 20: ")
    kl = charts.nth(2)  # of which one is infinite
    assert kl.locator("path.curve").get_attribute("d").count("M") == 2
    assert (kl.locator(".odd").count(), kl.locator(".dot").count()) == (1, 21)
    assert "1 not a finite number" in kl.inner_text()


def test_metrics_are_a_table_too(visit: Any) -> None:
    page = visit("run")
    assert page.locator("#metrics .dot.hollow").count() == 1  # the damaged step's
    page.locator("#metrics summary").click()
    rows = page.locator("#metrics tbody tr").all_inner_texts()
    assert [row.split() for row in rows] == [["30", "0.6"], ["20", "0.7"], ["10", "0.5"]]


@pytest.mark.parametrize(("width", "scheme"), LOOKS)
def test_a_run_of_the_plain_engine_has_an_overview(visit: Any, pages: dict[str, Path], width: int, scheme: str) -> None:
    page = visit("plain", width, scheme)
    actor, critic, rest = page.locator("#overview .card").all()
    assert actor.locator("[data-key='model.parameters']").inner_text() == f"{64 * 64 + 64 + 64 * 8 + 8:,}"
    assert critic.locator("[data-key='model.parameters']").inner_text() == "65"
    assert "torch AdamW" in actor.inner_text()
    told = rest.inner_text()  # an engine without a module
    assert "AdamW" in told
    assert "lr 0.01" in told
    assert (pages["plain"].parent / "plain/global_step_40/actor/state.pt").is_file()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_on_the_page_can_be_read(visit: Any, scheme: str) -> None:
    page = visit("clumps", 420, scheme)
    for selector in (".tick", ".number", ".many", ".reading", ".crumbs", ".told", "#metrics .soft", "summary"):
        found = page.evaluate(
            """(selector) => { const e = document.querySelector(selector); if (!e) return null;
            let ground = e; while (getComputedStyle(ground).backgroundColor === 'rgba(0, 0, 0, 0)') ground = ground.parentElement;
            return [getComputedStyle(e).color, getComputedStyle(ground).backgroundColor]; }""",
            selector,
        )
        colours = [tuple(int(part) for part in text[4:-1].split(",")) for text in found]
        assert contrast(colours[0], colours[1]) > 4.5, selector


_LAID_OUT = """([items, width, scale]) => { const placed = places(items, width, scale);
    const label = (m) => (m.text ? wide(m.text, '600 12px system-ui, sans-serif') : 0);
    return clustered(placed, 'saves', width).map((m) => [m.x, m.w, m.items.length, label(m)]); }"""


@pytest.mark.parametrize("width", [1400, 420])
def test_whatever_the_times_are_marks_stay_apart_and_none_is_lost(visit: Any, width: int) -> None:
    """Runs at random: dense, sparse, in clumps, at the same instant, and saves that overlap."""
    page = visit("run", width)
    draw = random.Random(random.random())
    for _ in range(120):
        many, spread = draw.randint(1, 80), draw.choice([0, 1e-3, 3, 3600, 1e6])
        centres = [draw.uniform(0, 1e5) for _ in range(draw.randint(1, 6))]
        ends = sorted(draw.choice(centres) + draw.uniform(0, spread) for _ in range(many))
        items = [{"lane": "saves", "from": end - draw.choice([0, 0.2, 60]), "to": end, "step": 1} for end in ends]
        for scale in ("time", "order"):
            room = draw.randint(240, width)
            marks = page.evaluate(_LAID_OUT, [items, room, scale])
            assert sum(count for _, _, count, _ in marks) == many
            assert all(x >= 0 and x + w <= room + 0.01 for x, w, _, _ in marks)
            assert all(a[0] + a[1] <= b[0] + 0.01 for a, b in pairwise(marks)), (items, room, scale)
            assert all(text <= w for _, w, _, text in marks), (items, room, scale)


def test_a_strangers_texts_are_shown_and_never_run(browser: Any, tmp_path: Path) -> None:
    """Names of metrics, roles and events of a run are whatever its files say."""
    evil = "<img src=x onerror=document.title=1>"
    for number in (10, 20):
        metrics = {evil: 0.5, "constructor": number, "__proto__": 3.0} if number == 20 else {evil: 0.25}
        make_step(tmp_path / "run", number, metrics=metrics)
    told = {"time": 1772352245.0, "kind": "constructor", "step": 10, "text": evil}
    nowhen = {"time": float("nan"), "kind": "failed", "step": 10, "text": evil}
    (tmp_path / "run" / "events.jsonl").write_text(json.dumps(told) + "\n" + json.dumps(nowhen) + "\n")
    manifest = tmp_path / "run" / "global_step_20" / "manifest.json"
    content = json.loads(manifest.read_text())
    content["parts"][0].update(format=evil, parallel={evil: evil})
    manifest.write_text(json.dumps(content))
    run_cli("report", tmp_path / "run", "-o", tmp_path / "page.html")
    page = browser.new_page(viewport={"width": 420, "height": 900}, offline=True)
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto((tmp_path / "page.html").as_uri())
    page.wait_for_selector("html[data-ready=yes]", state="attached")
    assert page.locator("img").count() == 0
    assert page.locator("#metrics figure h3").all_inner_texts() == [evil, "constructor", "__proto__"]
    assert page.locator("#metrics figure").nth(1).locator(".dot").count() == 1
    assert evil in page.inner_text("#overview")
    assert page.evaluate("document.documentElement.scrollWidth") <= 420
    assert (page.title(), said) == ("run", [])
    page.close()
