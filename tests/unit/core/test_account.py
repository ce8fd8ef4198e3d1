"""The account: fates follow from what is held, and from what is said of the rest."""

from __future__ import annotations

import numpy as np
import pytest

from mcore_rlhf.core.account import Account, Fate, Item, Kind, Reason, Report, Said, Stage, same

LR = Item(Kind.GROUP, "lr")
SEED = Item(Kind.ARGUMENT, "seed")
STATE = Item(Kind.VALUE, "state")


def test_what_is_there_with_the_same_value_is_kept() -> None:
    account = Account.of({LR: (0.1,)}, [Stage({LR: (0.1,)})])
    assert account.entries[LR].fate is Fate.KEPT
    assert account.lossless


def test_what_is_missing_or_other_without_a_word_is_unaccounted() -> None:
    account = Account.of({LR: (0.1,), SEED: 1}, [Stage({LR: (0.2,)})])
    assert set(account.unaccounted) == {LR, SEED}
    assert not account.lossless
    assert len(account.lost) == 2


@pytest.mark.parametrize("fate", [Fate.DERIVED, Fate.CHANGED, Fate.LOST])
def test_what_is_said_of_an_item_is_its_fate(fate: Fate) -> None:
    account = Account.of({LR: 1}, [Stage({}, {LR: Said(fate, "so")})])
    assert account.entries[LR] == Said(fate, "so")
    assert account.lossless == (fate is not Fate.LOST)


def test_what_is_said_of_a_kind_is_said_of_the_missing_ones_only() -> None:
    said = {Item(Kind.GROUP): Said(Fate.LOST, "all of them")}
    account = Account.of({LR: 1, Item(Kind.GROUP, "eps"): 2}, [Stage({LR: 1}, said)])
    assert account.entries[LR].fate is Fate.KEPT
    assert account.of_fate(Fate.LOST) == [Item(Kind.GROUP, "eps")]


def test_the_worst_stage_counts() -> None:
    stages = [Stage({LR: 2}, {LR: Said(Fate.CHANGED, "rounded")}), Stage({LR: 2})]
    assert Account.of({LR: 1}, stages).entries[LR].fate is Fate.CHANGED
    assert Account.of({LR: 1}, [*stages, Stage({})]).unaccounted == (LR,)


def test_a_moved_item_has_the_fate_of_what_it_moved_to() -> None:
    there = Stage({STATE: {}}, moved={SEED: STATE})
    assert Account.of({SEED: 1}, [there, Stage({STATE: {}})]).entries[SEED].fate is Fate.KEPT
    gone = Stage({}, {Item(Kind.VALUE): Said(Fate.LOST, "no place")})
    assert Account.of({SEED: 1}, [there, gone]).entries[SEED].fate is Fate.LOST
    of_its_kind = Stage({}, {**gone.said, Item(Kind.ARGUMENT): Said(Fate.LEFT, "own", Reason.OF_ENGINE)})
    assert Account.of({SEED: 1}, [there, of_its_kind]).entries[SEED].reason is Reason.OF_ENGINE


def test_nothing_is_left_behind_without_a_reason() -> None:
    report = Report()
    with pytest.raises(AssertionError):
        report.settle(Fate.LEFT, "just so", LR)
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


def test_a_part_that_is_lost_makes_it_lossy_though_every_item_is_kept() -> None:
    assert not Account({LR: Said(Fate.KEPT, "")}, (), ("rows 5–9",)).lossless


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
