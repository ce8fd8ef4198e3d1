"""The account: fates follow from what is held, and from what is said of the rest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest

from mcore_rlhf.core.account import Account, Report
from mcore_rlhf.core.facts import Facts, Fate, Inventory, Item, Kind, Reason, Rule, Said, distinct, same

LR = Item(Kind.GROUP, "lr")
SEED = Item(Kind.ARGUMENT, "seed")
STATE = Item(Kind.VALUE, "state")


class Next(NamedTuple):
    """Who holds things next."""

    holds: Inventory
    said: Mapping[Item, Said] = {}
    moved: Mapping[Item, Item] = {}


def account(inventory: Inventory, holders: Sequence[Next]) -> Account:
    facts = Facts.of(inventory)
    for holder in holders:
        facts = facts.handed_on(*holder)
    return Account.of(facts.fates)


def test_what_is_there_with_the_same_value_is_kept() -> None:
    found = account({LR: (0.1,)}, [Next({LR: (0.1,)})])
    assert found.entries[LR].fate is Fate.KEPT
    assert found.lossless


def test_what_is_missing_or_other_without_a_word_is_unaccounted() -> None:
    found = account({LR: (0.1,), SEED: 1}, [Next({LR: (0.2,)})])
    assert set(found.unaccounted) == {LR, SEED}
    assert not found.lossless
    assert len(found.lost) == 2


@pytest.mark.parametrize("fate", [Fate.DERIVED, Fate.CHANGED, Fate.LOST])
def test_what_is_said_of_an_item_is_its_fate(fate: Fate) -> None:
    found = account({LR: 1}, [Next({}, {LR: Said(fate, "so")})])
    assert found.entries[LR] == Said(fate, "so")
    assert found.lossless == (fate is not Fate.LOST)


def test_what_is_said_of_a_kind_is_said_of_the_missing_ones_only() -> None:
    said = {Item(Kind.GROUP): Said(Fate.LOST, "all of them")}
    found = account({LR: 1, Item(Kind.GROUP, "eps"): 2}, [Next({LR: 1}, said)])
    assert found.entries[LR].fate is Fate.KEPT
    assert found.of_fate(Fate.LOST) == [Item(Kind.GROUP, "eps")]


def test_the_worst_stage_counts() -> None:
    stages = [Next({LR: 2}, {LR: Said(Fate.CHANGED, "rounded")}), Next({LR: 2})]
    assert account({LR: 1}, stages).entries[LR].fate is Fate.CHANGED
    assert account({LR: 1}, [*stages, Next({})]).unaccounted == (LR,)


def test_a_moved_item_has_the_fate_of_what_it_moved_to() -> None:
    there = Next({STATE: {}}, moved={SEED: STATE})
    assert account({SEED: 1}, [there, Next({STATE: {}})]).entries[SEED].fate is Fate.KEPT
    gone = Next({}, {Item(Kind.VALUE): Said(Fate.LOST, "no place")})
    assert account({SEED: 1}, [there, gone]).entries[SEED].fate is Fate.LOST
    of_its_kind = Next({}, {**gone.said, Item(Kind.ARGUMENT): Said(Fate.LEFT, "own", Reason.OF_ENGINE)})
    assert account({SEED: 1}, [there, of_its_kind]).entries[SEED].reason is Reason.OF_ENGINE


def test_nothing_is_left_behind_without_a_reason() -> None:
    report = Report()
    for fate in (Fate.LEFT, Fate.NOTE):
        with pytest.raises(AssertionError):
            report.settle(fate, "just so", LR)
    report.leave(Reason.NOT_ASKED, LR)
    assert report.said[LR].reason is Reason.NOT_ASKED


def test_a_loss_is_always_a_line() -> None:
    report = Report()
    report.settle(Fate.LOST, "gone", LR)
    report.settle(Fate.DERIVED, "follows", SEED)
    assert report.lines == [(Fate.LOST, "gone")]


def test_a_line_of_which_everything_is_gone_is_taken_back() -> None:
    report = Report()
    report.add(Fate.KEPT, "waits elsewhere", LR)
    report.add(Fate.NOTE, "a word")
    report.close(Account({LR: Said(Fate.LOST, "no place")}, ()))
    assert report.lines == [(Fate.NOTE, "a word"), (Fate.LOST, "no place")]


def test_a_part_that_is_lost_is_an_item_of_its_own() -> None:
    """A line of a loss of which no item is lost: the verdict, the numbers and the lines say one thing."""
    found = Account.of({LR: Said(Fate.KEPT, "")}, ["rows 5–9: cut", "rng: of rank 0 only"])
    assert not found.lossless
    assert found.of_fate(Fate.LOST) == [Item(Kind.PART, "rows 5–9"), Item(Kind.PART, "rng")]
    assert found.as_json()["lost"] == 2
    assert found.lost == ["rows 5–9: cut", "rng: of rank 0 only"]
    assert Account.of({LR: Said(Fate.LOST, "gone")}, ["gone"]).of_fate(Fate.LOST) == [LR]


@pytest.mark.parametrize(
    ("a", "b", "equal"),
    [
        ({"x": [1, (2, 3)]}, {"x": [1, [2, 3]]}, True),
        ({"x": 1}, {"x": 1, "y": None}, False),
        (np.arange(3), np.arange(3), True),
        (np.arange(3), np.arange(3.0), False),
        (np.arange(3), np.arange(4), False),
        (float("nan"), float("nan"), True),
        (float("nan"), 1.0, False),
        (True, 1, False),
        (None, 0, False),
    ],
)
def test_values_are_compared_whole(a: object, b: object, equal: bool) -> None:
    assert same(a, b) is equal


class Asked(NamedTuple):
    rows: Sequence[int]
    found: object = None


def rule(when: Callable[[Asked], object] = lambda _: True, why: str = "{0.rows}", **more: Any) -> Rule[Asked]:
    return Rule(Fate.LOST, why, when, **more)


@pytest.mark.parametrize(
    ("when", "why", "said"),
    [
        (lambda _: True, "rows {0.rows[0]}–{0.rows[1]}", ["rows 5–9"]),
        (lambda asked: asked.found, "never", []),
        (lambda _: [], "never", []),
        (lambda _: {"of": []}, "never", []),
        (lambda asked: list(asked.rows), "{found}", ["5, 9, 12, 3"]),
        (lambda asked: list(asked.rows), "{found:3}", ["5, 9, 12"]),
        (lambda asked: [{"row": row} for row in asked.rows[:2]], "row {row}", ["row 5", "row 9"]),
        (lambda _: {"name": "{0.rows}"}, "{name!r}", ["'{0.rows}'"]),
    ],
)
def test_a_rule_says_what_its_table_says(when: Callable[[Asked], object], why: str, said: list[str]) -> None:
    """Values of a checkpoint are never read as sentences themselves."""
    assert [text for text, _ in rule(when, why).said_of(Asked([5, 9, 12, 3]))] == said


def test_a_rule_is_about_its_items_and_those_that_are_found() -> None:
    found = Report.of([rule(lambda _: {"of": [SEED]}, "gone", of=[LR])], Asked([]))
    assert found.said == {LR: Said(Fate.LOST, "gone"), SEED: Said(Fate.LOST, "gone")}
    assert found.lines == [(Fate.LOST, "gone")]


def test_a_rule_of_a_part_is_meant_where_there_is_one() -> None:
    whole: Rule[Asked | None] = rule(why="gone").of_part(lambda asked: asked)
    assert Report.of([whole], None).lines == []
    assert Report.of([whole], Asked([])).lines == [(Fate.LOST, "gone")]


def test_what_is_the_same_is_there_once_however_many_there_are() -> None:
    """Each of a stranger's may be another one: comparing every one with every other took hours."""
    nan = float("nan")
    alike = {
        "a": {"lr": nan, "betas": [0.9, 1]},
        "b": {"betas": (0.9, 1), "lr": float("nan")},
        "c": {"lr": nan, "betas": [0.9, 1.0]},
    }
    assert [names for _, names in distinct(alike)] == [["a", "b"], ["c"]]
    assert [names for _, names in distinct({"a": np.ones(2), "b": np.zeros(2), "c": np.ones(2)})] == [["a", "c"], ["b"]]
    assert len(distinct({str(number): {"lr": float(number)} for number in range(30_000)})) == 30_000
