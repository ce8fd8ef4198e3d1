"""The live account: what is alive is counted from the objects themselves, and what no file has is named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rlhf.engines.base import LiveFile, LiveState, Segment, StateTensor
from mcore_rlhf.engines.plain import TorchEngine
from mcore_rlhf.engines.save import (
    Alive,
    LiveTree,
    MemoryRanges,
    RankAccount,
    account_of,
    as_json,
    compare,
    details,
    explain,
    makes_its_state,
    of_module,
    of_optimizer,
)
from mcore_rlhf.errors import Incomplete, Problems, Unsupported
from mcore_rlhf.manager.run.manager import CheckpointManager, ManagerOptions
from mcore_rlhf.manager.run.steps import read_manifest

OPTIONS = ManagerOptions(asynchronous=False, fsync=False, catch_signals=False)


def held(
    name: str, *, here: bool = True, among: str | None = None, state: str = "exp_avg", nbytes: int = 8
) -> StateTensor:
    return StateTensor(name, state, "float32 (2,)", nbytes, here, among)


def accounts(*ranks: list[StateTensor]) -> list[RankAccount]:
    problems = Problems()
    found = [account_of(held, rank, "actor", problems) for rank, held in enumerate(ranks)]
    problems.raise_if_any()
    return found


def test_what_several_ranks_hold_alike_counts_once() -> None:
    ranks = accounts(
        [held("a", among="all"), held("b", among="all"), held("shard 0", state="master")],
        [held("b", among="all", here=False), held("a", among="all", here=False), held("shard 1", state="master")],
    )
    total, wrong = compare(ranks)
    assert not wrong
    assert as_json(total) == {"tensors": 4, "bytes": 32, "states": {"exp_avg": [2, 16], "master": [2, 16]}}


@pytest.mark.parametrize(("other", "told"), [
    ([held("a", among="all", here=False)], r"rank 1 holds 1 × exp_avg .*rank 0 writes 2 × exp_avg .*it lacks exp_avg of b"),
    ([held("a", among="all", here=False), held("c", among="all", here=False)],
     r"rank 1 holds 2 × exp_avg .*only rank 1 has exp_avg of c; it lacks exp_avg of b"),
    ([held("a", among="none", here=False)], "no rank writes it; only rank 1 has exp_avg of a"),
])  # fmt: skip
def test_a_copy_of_what_nobody_writes_is_told(other: list[StateTensor], told: str) -> None:
    ranks = [[held("a", among="all"), held("b", among="all")], other]
    _, wrong = compare(accounts(*ranks))
    problems = Problems()
    explain(wrong, [details(rank, wrong) for rank in ranks], "actor", problems)
    with pytest.raises(Incomplete, match=told):
        problems.raise_if_any()


@pytest.mark.parametrize("among", [None, "all"])
def test_what_a_rank_alone_has_and_does_not_write_is_named(among: str | None) -> None:
    with pytest.raises(Unsupported, match=r"actor: rank 0: .*exp_avg of lost"):
        accounts([held("a", among=among), held("lost", here=False, among=among)])


def test_memory_is_what_segments_and_trees_are_made_of() -> None:
    big, small, other = torch.zeros(40_000), torch.zeros(6), torch.zeros(6)
    tree = LiveTree("f.pt")
    tree.placed({"big": big[:10], "small": small.view(2, 3).T})
    memory = MemoryRanges.of(
        [LiveFile("f.pt", (0,), [*tree.segments, Segment("x", 0, other[:3]), Segment("y", 0, other[3:5])])], [tree]
    )
    assert memory.has(big)
    assert memory.has(small)
    assert memory.has(other[1:5]), "two segments that touch"
    assert not memory.has(other)
    assert not memory.has(torch.zeros(6))
    assert memory.has(torch.zeros(0))


def test_a_module_is_counted_each_tensor_once() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    module[0].register_buffer("transient", torch.ones(1), persistent=False)
    module.append(module[0])
    names = [(alive.name, alive.state) for alive in of_module(module, "model.")]
    assert names == [
        ("model.0.weight", "param"), ("model.0.bias", "param"), ("model.1.weight", "param"), ("model.1.bias", "param"),
        ("model.1.running_mean", "buffer"), ("model.1.running_var", "buffer"), ("model.1.num_batches_tracked", "buffer"),
    ]  # fmt: skip
    assert not makes_its_state(module)


def test_states_at_any_depth_are_counted_and_objects_refused() -> None:
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([param], lr=0.1)
    optimizer.state[param] = {"factors": [torch.ones(2), {"q": torch.ones(3)}], "step": 3}
    found = list(of_optimizer(optimizer, lambda held: "w"))
    assert [(one.name, one.state) for one in found] == [("w", "factors[0]"), ("w", "factors[1].q")]
    optimizer.state[param]["quantized"] = object()
    with pytest.raises(Unsupported, match="SGD: quantized of w is a object"):
        list(of_optimizer(optimizer, lambda held: "w"))


class Forgetful(TorchEngine):
    """An engine that does not know a state of its optimizer."""

    def _parts(self) -> dict[str, object]:
        parts = super()._parts()
        state: Any = parts["optimizer"]
        kept = {number: {"exp_avg": one["exp_avg"]} for number, one in state["state"].items()}
        return {**parts, "optimizer": {**state, "state": kept}}


def stepped(kind: type[TorchEngine]) -> TorchEngine:
    module = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return kind(module, optimizer)


def test_a_step_that_lacks_a_state_is_not_committed(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, stepped(Forgetful), options=OPTIONS) as manager:
        with pytest.raises(Unsupported, match=r"not 4 of its live tensors .*exp_avg_sq of weight"):
            manager.save(1)
        assert not list(tmp_path.glob("global_step_*"))


class OwnForm(torch.optim.Adam):
    """An optimizer whose own code gives moments in another form, and may give others than it has."""

    spoil: Callable[[dict[int, dict[str, Any]]], None] | None = None

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        kept = {number: {**one, "exp_avg": one["exp_avg"].to(torch.bfloat16)} for number, one in state["state"].items()}
        if self.spoil is not None:
            self.spoil(kept)
        return {**state, "state": kept}


def own_form(spoil: Callable[[dict[int, dict[str, Any]]], None] | None) -> TorchEngine:
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 3))
    optimizer = OwnForm(module.parameters())
    module(torch.tensor([[1.0, 2.0, 4.0]])).square().sum().backward()
    optimizer.step()
    optimizer.spoil = spoil
    return TorchEngine(module, optimizer)


def forget(states: dict[int, dict[str, Any]]) -> None:
    del states[1]["exp_avg_sq"]


def give_another(states: dict[int, dict[str, Any]]) -> None:
    """Right names, types and sizes: those of the other matrix."""
    states[0]["exp_avg_sq"] = states[2]["exp_avg_sq"].T.contiguous()


def give_zeros(states: dict[int, dict[str, Any]]) -> None:
    states[3]["exp_avg"] = torch.zeros_like(states[3]["exp_avg"])


def flip_a_bit(states: dict[int, dict[str, Any]]) -> None:
    states[2]["exp_avg_sq"] = states[2]["exp_avg_sq"].clone()
    states[2]["exp_avg_sq"].view(torch.int32)[0, 1] ^= 1


@pytest.mark.parametrize(
    ("spoil", "lost"),
    [
        (forget, "exp_avg_sq of 0.bias"), (give_another, "exp_avg_sq of 0.weight"), (give_zeros, "exp_avg of 1.bias"),
        (flip_a_bit, "exp_avg_sq of 1.weight"),
    ],
)  # fmt: skip
def test_what_an_optimizers_own_code_leaves_out_or_mistakes_is_named(
    tmp_path: Path, spoil: Callable[[dict[int, dict[str, Any]]], None], lost: str
) -> None:
    with CheckpointManager(tmp_path, own_form(spoil), options=OPTIONS) as manager:
        with pytest.raises(Unsupported, match=rf"rank 0: 1 live tensors \({lost}\)"):
            manager.save(1)
        assert not list(tmp_path.glob("global_step_*"))


def test_a_form_with_fewer_bits_is_the_optimizers_own_affair_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with CheckpointManager(tmp_path, own_form(None), options=OPTIONS) as manager:
        manager.save(1)
    assert any(
        "4 tensors with fewer bits than they have (the first: exp_avg of 0.weight)" in m for m in caplog.messages
    )


def test_the_manifest_says_how_much_is_alive(tmp_path: Path) -> None:
    with CheckpointManager(
        tmp_path, {"actor": stepped(TorchEngine), "reward": torch.nn.Linear(1, 1)}, options=OPTIONS
    ) as manager:
        manager.save(1)
    live = read_manifest(tmp_path / "global_step_1").report["live"]
    assert live["actor"]["states"] == {"exp_avg": [2, 32], "exp_avg_sq": [2, 32], "param": [2, 32], "step": [2, 8]}
    assert live["reward"] == {"tensors": 2, "bytes": 8, "states": {"param": [2, 8]}}


class Lion(torch.optim.SGD):
    """Somebody's optimizer."""


def test_what_is_not_known_is_said_when_the_engine_is_made(caplog: pytest.LogCaptureFixture) -> None:
    model, other = torch.nn.Linear(2, 2), torch.nn.Linear(3, 3)
    TorchEngine(model, torch.optim.SGD(model.parameters()))
    assert not caplog.records
    TorchEngine(model, Lion([*model.parameters(), other.weight]))
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 2
    assert "Lion is not known" in texts[0]
    assert "trains 1 tensors that are not the model's (the first: (3, 3))" in texts[1]


class Uncounted:
    """Somebody's engine that does not count."""

    def __init__(self) -> None:
        self.engine = TorchEngine(torch.nn.Linear(1, 1))
        self.ranks, self.layout, self.prepare_load = (0,), "DP1", self.engine.prepare_load

    def live(self, step: int) -> LiveState:
        state = self.engine.live(step)
        return LiveState(state.format, state.parallel, state.files)


def test_an_engine_that_does_not_count_can_be_saved(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, {"actor": Uncounted()}, options=OPTIONS) as manager:  # type: ignore[dict-item]
        manager.save(1)
    assert read_manifest(tmp_path / "global_step_1").report["live"] == {}


def test_a_lazy_account_is_one_pass() -> None:
    def alive() -> Iterator[Alive]:
        yield Alive("w", "param", torch.zeros(2))

    assert [one.here for one in MemoryRanges().counted(alive())] == [False]
