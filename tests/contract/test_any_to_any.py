"""Any format becomes any other, with optimizer, and what comes back is what went out, bit for bit."""

from __future__ import annotations

import pytest

from mcore_rlhf.core.account import Account
from mcore_rlhf.core.facts import Facts, Fate, Kind, same
from mcore_rlhf.families.crossing.alike import alike
from mcore_rlhf.families.inventory import inventory_of
from mcore_rlhf.formats.registry import FORMATS
from mcore_rlhf.storage.reading import OpenFiles
from mcore_rlhf.verify.differ import Differ
from tests.helpers.damage import snapshot
from tests.helpers.every_format import EVERY, MODEL, PAIRS, Zoo, compared, opened
from tests.helpers.support_matrix import PAGE, page

STATES = {"master", "exp_avg", "exp_avg_sq"}


def named(pair: tuple[str, str]) -> str:
    return f"{pair[0]}→{pair[1]}"


def test_all_are_there() -> None:
    assert set(EVERY) == {
        "megatron",
        "megatron-dist",
        "deepspeed",
        "universal",
        "dcp",
        "fsdp-ranks",
        "hf",
        "hf-trainer",
        "torch",
    }


def _is_sampled(pair: tuple[str, str]) -> bool:
    """Each format to itself and to two others, and from two others; the rest in `make test-all`."""
    return (EVERY.index(pair[1]) - EVERY.index(pair[0])) % len(EVERY) in (0, 1, 4)


@pytest.mark.parametrize(
    "pair",
    [pytest.param(pair, marks=[] if _is_sampled(pair) else [pytest.mark.slow]) for pair in PAIRS],
    ids=[named(pair) for pair in PAIRS],
)
def test_what_comes_back_is_what_went_out(pair: tuple[str, str], zoo: Zoo) -> None:
    source, target = pair
    before = snapshot(zoo.base(source))
    result = compared(zoo.base(source), zoo.back(source, target))
    assert result.equal, result.differences[:5]
    assert result.tensors >= len(STATES) * len(opened(zoo.base(source)).model.params)
    assert snapshot(zoo.base(source)) == before


@pytest.mark.parametrize("pair", PAIRS, ids=named)
def test_what_arrives_is_the_model_with_its_optimizer(pair: tuple[str, str], zoo: Zoo) -> None:
    """Compared under names of both sides with what the golden becomes directly: no way leads elsewhere."""
    there, job = zoo.pair(*pair)
    assert set(opened(there).states) >= STATES
    assert job.target.format == pair[1]
    result = compared(zoo.base(pair[1]), there, state=False)
    assert result.equal, result.differences[:5]


@pytest.mark.parametrize("pair", PAIRS, ids=named)
def test_what_is_said_to_be_kept_is_read_back(pair: tuple[str, str], zoo: Zoo) -> None:
    """The target is opened by its own reader: each item that the account calls kept is there, with the same value.

    Random states are left out: they are read when somebody asks for them, and other tests compare them.
    """
    there, job = zoo.pair(*pair)
    seen = job.seen or job.source
    told = Account.of(Facts.of(inventory_of(seen)).handed_on(job.target.holds, job.target.report.said).fates)
    kept = [item for item in told.of_fate(Fate.KEPT) if item.kind is not Kind.RNG]
    found = inventory_of(opened(there))
    wrong = {str(item) for item in kept if item not in found or not same(job.target.holds[item], found[item])}
    assert not wrong
    assert len(kept) > 10


def test_the_plan_and_the_manifest_show_the_account(zoo: Zoo) -> None:
    there, job = zoo.pair("megatron", "hf")
    shown = job.manifest({}).report["account"]
    assert isinstance(shown, dict)
    assert shown["items"] == sum(shown[fate] for fate in ("kept", "derived", "changed", "left_behind", "lost"))
    assert shown["unaccounted"] == []
    assert shown["told"]["lost"]
    assert '"account"' in (there / "mcore_rlhf.json").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", [known.name for known in FORMATS if known.name in EVERY and known.family == "module"])
def test_every_format_has_what_megatron_itself_wrote(name: str, zoo: Zoo) -> None:
    """Those of Megatron's family are made of one of these, with rows of padding that are not the golden's."""
    a, b = alike(opened(MODEL), opened(zoo.base(name)))
    with OpenFiles(a.root) as bytes_a, OpenFiles(b.root) as bytes_b:
        result = Differ(a, b, bytes_a, bytes_b, states=("param", *sorted(STATES))).compare()
    assert result.equal, result.differences[:5]
    assert result.tensors >= 3 * len(b.model.params)


def test_the_page_says_what_happens(zoo: Zoo) -> None:
    assert PAGE.read_text(encoding="utf-8") == page(zoo), "write it anew: python -m tests.helpers.support_matrix"
