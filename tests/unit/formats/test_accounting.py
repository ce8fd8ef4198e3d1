"""Tensors in the account: what is said of an optimizer, and masters, excuse nothing that they have no part in."""

from __future__ import annotations

from collections.abc import Iterable

from mcore_rlhf.core.catalog import EXP_AVG, FLOAT32, MASTER, PARAM, TensorEntry, TensorName
from mcore_rlhf.core.chunks import Chunks
from mcore_rlhf.core.facts import Fate, Item, Kind, Said
from mcore_rlhf.core.plan import plan_file
from mcore_rlhf.formats.accounting import Tally, tensors_of

TRAINED, FROZEN = "layers.0.weight", "embed.weight"


def tally(*planned: tuple[str, str]) -> Tally:
    """Two parameters, of which one is trained, and a plan of some of their tensors."""
    stored = [(TRAINED, PARAM), (TRAINED, MASTER), (TRAINED, EXP_AVG), (FROZEN, PARAM)]
    opened, wanted = (_table(names) for names in (stored, planned))
    found = Tally(opened)
    found.add(plan_file("file", wanted, opened), wanted, opened)
    return found


def _table(names: Iterable[tuple[str, str]]) -> Chunks:
    return Chunks.of(TensorEntry(TensorName("actor", *name), (4,), FLOAT32, ()) for name in names)


def test_a_parameter_is_rounded_from_a_master_that_is_kept() -> None:
    told = tensors_of(tally((TRAINED, MASTER), (TRAINED, EXP_AVG), (FROZEN, PARAM)), {})
    said = told[Item(Kind.TENSOR, PARAM)]
    assert said is not None
    assert said.fate is Fate.DERIVED


def test_a_frozen_parameter_has_no_master_to_be_rounded_from() -> None:
    told = tensors_of(tally((TRAINED, MASTER), (TRAINED, EXP_AVG)), {})
    assert told[Item(Kind.TENSOR, f"{FROZEN} (param)")] is None


def test_an_optimizer_that_is_lost_does_not_excuse_a_parameter() -> None:
    lost = {Item(Kind.TENSOR): Said(Fate.LOST, "the optimizer")}
    told = tensors_of(tally((TRAINED, PARAM)), lost)
    assert told[Item(Kind.TENSOR, EXP_AVG)] == lost[Item(Kind.TENSOR)]
    assert told[Item(Kind.TENSOR, f"{FROZEN} (param)")] is None


def test_nothing_is_planned_of_a_tensor_without_elements() -> None:
    told = tensors_of(tally((TRAINED, PARAM), (TRAINED, MASTER), (TRAINED, EXP_AVG)), {}, {FROZEN})
    assert {item.name: said is not None and said.fate for item, said in told.items() if item.name == PARAM} == {
        PARAM: Fate.KEPT
    }
