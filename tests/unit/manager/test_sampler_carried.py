"""Other people's loaders: carried as they are, per rank or once, and refused where that cannot work."""

from __future__ import annotations

import collections
import io
from typing import Any

import pytest
import torch

from mcore_rlhf.errors import CheckpointError, Incomplete, LayoutMismatch, Unsupported, UsageError
from mcore_rlhf.manager.rlhf.carried import Carried
from mcore_rlhf.manager.rlhf.sampler import PromptSampler


class Loader:
    """Counts like torchdata's StatefulDataLoader, whose state is a nest of plain values and tensors."""

    def __init__(self, at: int = 0) -> None:
        self.at = at

    def state_dict(self) -> dict[str, Any]:
        return {"_num_yielded": self.at, "_snapshot": {"workers": [None, (1.5, "x")], "rng": torch.tensor([self.at])}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["_snapshot"]["rng"].tolist() == [state["_num_yielded"]]
        self.at = state["_num_yielded"]


def _stored(saved: dict[str, Any]) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(saved, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def test_the_drivers_loader_goes_on_where_it_was() -> None:
    saved = _stored(Carried(Loader(5)).state_dict())
    assert {name: saved[name] for name in ("version", "kind", "fingerprint")} == {
        "version": 1, "kind": "stateful", "fingerprint": None,
    }  # fmt: skip
    assert list(saved["state"]) == ["driver"]
    loader = Loader()
    Carried(loader).load_state_dict(saved)
    assert loader.at == 5


def _of_ranks(num_ranks: int) -> dict[str, Any]:
    every = [Carried(Loader(10 + rank), scope="rank", rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)]
    return _stored(every[0].combine([carried.local_state() for carried in every]))


def test_each_rank_gets_its_own_state_back() -> None:
    saved = _of_ranks(12)
    for rank in range(12):
        loader = Loader()
        Carried(loader, scope="rank", rank=rank, num_ranks=12).load_state_dict(saved)
        assert loader.at == 10 + rank


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_another_number_of_ranks_is_refused(num_ranks: int) -> None:
    loader = Loader(1)
    with pytest.raises(LayoutMismatch, match=f"expected the state of {num_ranks} ranks' loaders, found that of 3"):
        Carried(loader, scope="rank", num_ranks=num_ranks).load_state_dict(_of_ranks(3))
    assert loader.at == 1


def test_another_scope_is_refused() -> None:
    with pytest.raises(LayoutMismatch, match=r"expected the state of one loader for all ranks.*found that of 3 ranks'"):
        Carried(Loader()).load_state_dict(_of_ranks(3))
    with pytest.raises(LayoutMismatch, match="expected the state of 1 ranks' loaders, found that of one loader for"):
        Carried(Loader(), scope="rank").load_state_dict(Carried(Loader()).state_dict())


def test_one_rank_does_not_pretend_to_know_the_others() -> None:
    carried = Carried(Loader(), scope="rank", rank=1, num_ranks=2)
    with pytest.raises(UsageError, match=r"rank 1 knows only its own loader of 2\nGather local_state"):
        carried.state_dict()
    with pytest.raises(UsageError, match="expected the states of 2 loaders, found 1"):
        carried.combine([carried.local_state()])
    assert Carried(Loader(3), scope="rank").state_dict()["state"]["0"]["_num_yielded"] == 3


def test_rlinfs_bare_state_is_taken_as_the_drivers() -> None:
    loader = Loader()
    Carried(loader).load_state_dict(_stored(Loader(9).state_dict()))
    assert loader.at == 9
    with pytest.raises(Incomplete, match=r"has no version.*\n.*RLinf.*Carried"):
        PromptSampler(3, seed=1).load_state_dict(Loader(9).state_dict())


@pytest.mark.parametrize(
    ("saved", "error", "text"),
    [
        (PromptSampler(3, seed=1).state_dict(), LayoutMismatch, "expected 'stateful', found 'prompt_sampler'"),
        ({"version": 9, "kind": "stateful", "state": {}, "fingerprint": None}, Unsupported, "version 9"),
        ({"version": 1, "kind": "stateful", "state": {}}, Incomplete, "missing fields: fingerprint"),
    ],
)
def test_the_state_of_something_else_is_refused(saved: dict[str, Any], error: type[CheckpointError], text: str) -> None:
    with pytest.raises(error, match=text):
        Carried(Loader()).load_state_dict(saved)


class Odd(Loader):
    def state_dict(self) -> dict[str, Any]:
        return {"ok": [1, {"seen": {1, 2}}], "counter": collections.deque([1])}


def test_a_state_that_cannot_be_loaded_safely_is_refused_at_the_save() -> None:
    with pytest.raises(UsageError) as caught:
        Carried(Odd()).state_dict()
    text = str(caught.value)
    assert "Odd['ok'][1]['seen'] is a builtins.set" in text
    assert "Odd['counter'] is a collections.deque" in text


def test_what_is_not_a_loader_is_refused() -> None:
    with pytest.raises(UsageError, match="list has no state_dict and no load_state_dict"):
        Carried([1, 2])  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{"scope": "node"}, {"rank": 2, "num_ranks": 2}])
def test_impossible_ranks_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="expected scope 'driver' or 'rank'"):
        Carried(Loader(), **options)
