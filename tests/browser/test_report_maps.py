"""The shard maps of ``mcore-rlhf report``: each its own controls, parts that can be told apart, experts by name, details on a phone."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest

from .colours import contrast, least_difference

TOLD_APART = 15.0
"""A CIEDE2000 of 2 is seen side by side; this is seen across a page."""


def _rgb(text: str) -> tuple[int, int, int]:
    numbers = [int(part) for part in text.partition("(")[2].rstrip(")").split(",")[:3]]
    return numbers[0], numbers[1], numbers[2]


def _stages(page: Any) -> tuple[Any, Any]:
    first, second = page.locator(".stage").all()
    return first, second


def _open_map(stage: Any) -> Any:
    return stage.locator(".role:not([hidden])")


def test_every_step_has_controls_of_its_own(visit: Any) -> None:
    page = visit("roles")
    first, second = _stages(page)
    untouched = second.inner_text()
    first.get_by_label("critic", exact=True).check()
    first.locator("[data-role=critic]").get_by_label("layer 1", exact=True).click()
    first.locator("[data-role=critic] input[value=exp_avg]").check()
    first.locator("[data-role=critic] input[value=file]").check()
    first.locator("[data-role=critic] input[type=search]").fill("fc1")
    assert second.inner_text() == untouched
    assert _open_map(second).get_attribute("data-role") == "actor"
    assert _open_map(second).locator("input[value=param]").is_checked()
    assert _open_map(second).locator("[aria-pressed=true].strip button").count() == 0
    second.get_by_label("expert 2", exact=True).click()
    assert first.locator("[data-role=critic] .tensor").count() == 1
    assert first.get_by_label("critic", exact=True).is_checked()


def test_every_role_keeps_its_own_choice(visit: Any) -> None:
    page = visit("roles")
    first, _ = _stages(page)
    first.get_by_label("layer 3", exact=True).locator("visible=true").click()
    first.get_by_label("critic", exact=True).check()
    assert first.locator("[data-role=critic] .strip [aria-pressed=true]").count() == 0
    assert first.locator("[data-role=actor]").is_hidden()
    first.get_by_label("actor", exact=True).check()
    assert first.locator("[data-role=actor] .strip [aria-pressed=true]").get_attribute("aria-label") == "layer 3"


@pytest.mark.parametrize("kind", ["roles", "comparison", "conversion", "checkpoint", "clumps"])
def test_no_two_groups_of_buttons_share_a_name(visit: Any, kind: str) -> None:
    """Buttons of one name unmake each other's choice, wherever on the page they stand."""
    page = visit(kind)
    shared = """() => { const of = new Map();
        document.querySelectorAll('input[type=radio]').forEach((i) =>
            of.set(i.name, (of.get(i.name) || new Set()).add(i.closest('fieldset'))));
        return [...of].filter(([, sets]) => sets.size > 1).map(([name]) => name); }"""
    assert page.evaluate(shared) == []
    unmade = "() => [...document.querySelectorAll('fieldset')].filter((f) => f.querySelectorAll('input:checked').length !== 1).length"
    assert page.evaluate(unmade) == 0
    assert (
        page.evaluate(
            "() => { const ids = [...document.querySelectorAll('[id]')].map((e) => e.id); return ids.length - new Set(ids).size; }"
        )
        == 0
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_parts_can_be_told_apart(visit: Any, scheme: str) -> None:
    """Also by people who lack a kind of cones, and each from the card that it lies on."""
    page = visit("conversion", 1400, scheme)
    colours = [
        _rgb(text)
        for text in page.evaluate("""() => PARTS.map((hex) => { const e = document.createElement('i');
        e.style.color = hex; document.body.append(e); const found = getComputedStyle(e).color; e.remove(); return found; })""")
    ]
    card = _rgb(page.evaluate("getComputedStyle(document.querySelector('.card')).backgroundColor"))
    assert len(colours) == 8
    for one, other in combinations([*colours, card], 2):
        assert least_difference(one, other) > TOLD_APART, (one, other)


@pytest.mark.parametrize("by", ["shard", "file"])
def test_parts_of_one_tensor_never_look_the_same(visit: Any, by: str) -> None:
    page = visit("conversion")
    page.locator(f".stage input[value={by}]").last.check()
    of_files = """(all) => all.map((drawing) => [...new Map([...drawing.querySelectorAll('.edge')]
        .map((part) => [part.dataset.file, part.getAttribute('fill')])).values()])"""
    for fills in page.locator(".tensor svg").evaluate_all(of_files):
        assert len(set(fills)) == len(fills)
    listed = page.locator(".map").last.locator(".legend").first.locator("li").all_inner_texts()
    assert (
        listed == [f"part {n}" for n in (1, 2, 3, 4)] if by == "shard" else all("mp_rank_0" in text for text in listed)
    )
    many = page.evaluate("() => [...Array(32).keys()].map((n) => [paint(n).fill, paint(n).css])")
    assert len({fill for fill, _ in many}) == len({css for _, css in many}) == 32


def test_the_numbers_in_the_cells_can_be_read(visit: Any) -> None:
    page = visit("checkpoint")
    cells = page.evaluate("() => [...Array(8).keys()].map((n) => [PARTS[n], paint(n).dark])")
    for hex_, dark in cells:
        ground = int(hex_[1:3], 16), int(hex_[3:5], 16), int(hex_[5:7], 16)
        assert contrast(ground, (255, 255, 255) if dark else (16, 21, 27)) > 3.9, hex_


@pytest.mark.parametrize(
    ("query", "experts", "names"),
    [
        ("experts.3", ["expert 3"], {"linear_fc1", "linear_fc2"}),
        ("expert 3", ["expert 3"], {"linear_fc1", "linear_fc2"}),
        ("local_experts.3.linear_fc2", ["expert 3"], {"linear_fc2"}),
        ("experts.1 fc1", ["expert 1"], {"linear_fc1"}),
        ("layers.2.mlp.experts.3.linear_fc1", ["layer 2", "expert 3"], {"linear_fc1"}),
        ("decoder.layers.2.mlp.experts.local_experts.0.linear_fc1.weight", ["layer 2", "expert 0"], {"linear_fc1"}),
        ("FC1", [], {"linear_fc1"}),
        ("qkv", [], {"linear_qkv"}),
    ],
)
def test_experts_and_parts_of_names_are_found(visit: Any, query: str, experts: list[str], names: set[str]) -> None:
    page = visit("checkpoint")
    page.locator("input[type=search]").fill(query)
    found = page.locator(".tensor .name").all_inner_texts()
    assert {name for name in ("linear_fc1", "linear_fc2", "linear_qkv") if any(name in text for text in found)} == names
    assert len(found) == len(names)
    pressed = page.locator(".strip [aria-pressed=true]").evaluate_all(
        "(all) => all.map((e) => e.getAttribute('aria-label'))"
    )
    assert pressed == experts
    assert "called like" in page.locator(".said").inner_text()
    if "expert 3" in experts:  # of the file that holds it, as layout and golden say
        assert "mp_rank_00_001" in page.locator(".detail").inner_text()


def test_what_is_not_there_is_not_found(visit: Any) -> None:
    page = visit("checkpoint")
    for query in ("experts.4", "experts.33", "layers.2.mlp.experts.9", "<img src=x onerror=alert(1)>"):
        page.locator("input[type=search]").fill(query)
        assert page.locator(".tensor").count() == 0
        assert f"called like “{query}”" in page.locator(".said").inner_text()
    page.keyboard.press("Escape")
    assert page.locator(".tensor").count() > 5


_READ = """([pattern, places, experts, shape, query]) => {
    const found = searched(query, { pattern, places, experts, shape }, null);
    return found && [Object.fromEntries(Object.entries(found.places).map(([k, v]) => [places[k], v])), found.index]; }"""


@pytest.mark.parametrize(
    ("pattern", "places", "experts", "query", "expected"),
    [
        ("decoder.layers.{}.mlp.experts.linear_fc1.weight{}", ["layer", "expert"], None, "experts.5", [{"expert": 5}, None]),
        ("h.{}.experts.linear_fc1.weight{}", ["layer", "expert"], None, "h.1.experts.5.linear_fc1", [{"layer": 1, "expert": 5}, None]),
        ("model.layers.{}.mlp.experts.{}.gate_proj.weight", ["layer", "expert"], None, "experts.5.gate", [{"expert": 5}, None]),
        ("model.layers.{}.mlp.experts.gate_up_proj", ["layer"], 0, "experts.5", [{}, 5]),
        ("model.layers.{}.mlp.experts.gate_up_proj", ["layer"], 0, "experts.8", None),
        ("model.layers.{}.mlp.experts.gate_up_proj", ["layer"], 0, "layers.3.mlp.experts.5.gate_up", [{"layer": 3}, 5]),
        ("model.layers.{}.self_attn.q_proj.weight", ["layer"], None, "experts.5", None),
        ("model.layers.{}.self_attn.q_proj.weight", ["layer"], None, "layer 7 q_proj", [{"layer": 7}, None]),
        ("embedding.weight", [], None, "bedd", [{}, None]),
    ],
)  # fmt: skip
def test_experts_are_found_however_their_names_say_it(
    visit: Any, pattern: str, places: list[str], experts: int | None, query: str, expected: object
) -> None:
    """Numbered within the name, at its end, or an index of a tensor that holds all eight."""
    assert visit("run").evaluate(_READ, [pattern, places, experts, [8, 4, 4], query]) == expected


def _box(node: Any) -> dict[str, float]:
    found: dict[str, float] = node.bounding_box()
    return found


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_a_phone_details_open_below_what_was_touched_and_close(visit: Any, scheme: str) -> None:
    page = visit("roles", 420, scheme)
    sheet = page.locator(".detail.open")
    assert page.locator(".detail").locator("visible=true").count() == 0
    cards = page.locator(".tensor").locator("visible=true")
    for number in (0, 2, cards.count() - 1):
        card = cards.nth(number)
        card.tap()
        assert sheet.count() == 1
        assert _box(sheet)["height"] < 900 / 3
        assert _box(card)["y"] >= 0
        assert _box(card)["y"] + _box(card)["height"] <= _box(sheet)["y"]
        assert page.evaluate("document.documentElement.scrollWidth") <= 420
    sheet.get_by_role("button", name="More").tap()
    assert _box(sheet)["height"] > 900 / 3
    sheet.get_by_role("button", name="Close the details").tap()
    assert sheet.count() == 0
    assert page.evaluate("document.activeElement.classList.contains('tensor')")
    cards.first.tap()
    page.keyboard.press("Escape")
    assert sheet.count() == 0


def test_beside_the_drawings_there_are_always_details(visit: Any) -> None:
    page = visit("checkpoint", 1400)
    assert page.locator(".detail").is_visible()
    assert page.locator(".handle").is_hidden()
    assert "word_embeddings.weight" in page.locator(".detail").inner_text()


def test_lossless_is_said_of_a_conversion_alone(visit: Any) -> None:
    assert "lossless\nyes: everything" in visit("conversion").inner_text("#trust")
    told = visit("plain").inner_text("#trust")
    assert "a training run, from live state" in told
    assert "lossless\ndoes not apply: nobody converted this" in told
    assert "lossless" not in visit("checkpoint").inner_text("#trust")
