"""The whole state: its JSON, its tensor files, and resuming from them."""

from __future__ import annotations

import io
import json
import math
import random
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mcore_rlhf.errors import Incomplete, Problems, UsageError
from mcore_rlhf.manager.rlhf.controls import (
    KL_CONTROLLERS,
    AdaptiveKL,
    ConstantSchedule,
    CosineSchedule,
    FixedKL,
    KLController,
    LinearSchedule,
)
from mcore_rlhf.manager.rlhf.json_values import decode, dumps, loads
from mcore_rlhf.manager.rlhf.pieces import BestMetric, Buffer, InFlightPrompt, RunningStatistics
from mcore_rlhf.manager.rlhf.state import RlhfState, tensor_file_stems
from mcore_rlhf.manager.rlhf.state_json import COUNTERS

WHERE = "/run/rlhf/rlhf_state.json"


def _full() -> RlhfState:
    state = RlhfState("ppo", kl={"actor": AdaptiveKL(0.1, 6.0, 10_000.0), "reference": FixedKL(math.nan)})
    for number, name in enumerate((*COUNTERS, "weight_version"), start=1):
        setattr(state, name, number)
    state.reward.update([0.1, 0.7, -math.inf])
    state.schedules = {
        "clip": LinearSchedule(0.2, 0.1, 100, position=3),
        "entropy": CosineSchedule(0.01, 0.0, 50),
        "value_clip": ConstantSchedule(0.2),
    }
    state.best = BestMetric("accuracy", "max", 0.5, 4)
    state.in_flight = [
        InFlightPrompt(0, 7, (0, 3), 5),
        InFlightPrompt(1, "p-8", (), 5, attempt=2, tensors={"tokens": torch.arange(4)}),
    ]
    state.buffers = {"replay": Buffer({"obs": torch.rand(2, 3), "done": torch.tensor(True)}, {"capacity": 2})}
    state.extra = {
        "note": "ä",
        "nest": {"a/b": [1, (2.5, math.inf), torch.ones(2)]},
        "a": {1: "x", "1": torch.zeros(1)},
    }
    return state


def _refuse(constant: str) -> NoReturn:
    raise AssertionError(f"{constant} is not JSON")


def _strict(text: str) -> Any:
    return json.loads(text, parse_constant=_refuse)


def _same(first: object, second: object) -> bool:
    """Equal down to types, bits and the order of dicts."""
    if isinstance(first, torch.Tensor):
        return isinstance(second, torch.Tensor) and first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, dict) and isinstance(second, dict):
        return list(first) == list(second) and _same(list(first.values()), list(second.values()))
    if isinstance(first, (list, tuple)):
        return type(first) is type(second) and all(map(_same, first, second)) and len(first) == len(second)  # type: ignore[arg-type]
    return type(first) is type(second) and repr(first) == repr(second)


def _parts(state: RlhfState) -> list[object]:
    names = ("algorithm", "weight_version", *COUNTERS, "kl", "statistics", "schedules", "best", "extra")
    held = [vars(item) for item in (*state.in_flight, *state.buffers.values())]
    return [*(getattr(state, name) for name in names), list(state.buffers), held]


def test_the_json_is_strict_and_says_what_the_documentation_says() -> None:
    content = _strict(_full().to_json())
    assert list(content) == [
        "format", "version", "algorithm", "counters", "weight_version", "kl", "statistics", "schedules", "best",
        "in_flight", "buffers", "extra", "tensors",
    ]  # fmt: skip
    assert (content["format"], content["version"]) == ("mcore_rlhf.rlhf_state", 1)
    assert content["counters"] == {name: number for number, name in enumerate(COUNTERS, start=1)}
    assert content["kl"] == {
        "actor": {"kind": "adaptive", "coefficient": 0.1, "target": 6.0, "horizon": 10000.0},
        "reference": {"kind": "fixed", "coefficient": {"$float": "NaN"}},
    }
    assert content["statistics"]["reward"]["min"] == {"$float": "-Infinity"}
    assert content["schedules"]["clip"] == {"kind": "linear", "position": 3, "start": 0.2, "end": 0.1, "steps": 100}
    assert content["best"] == {"name": "accuracy", "mode": "max", "value": 0.5, "step": 4}
    assert content["in_flight"][1] == {
        "epoch": 1, "prompt_id": "p-8", "samples": [], "weight_version": 5, "attempt": 2, "tensors": {"tokens": "int64[4]"},
    }  # fmt: skip
    assert content["buffers"]["replay"] == {
        "meta": {"capacity": 2},
        "tensors": {"obs": "float32[2, 3]", "done": "bool[]"},
    }
    assert content["extra"]["nest"]["a/b"][1:] == [
        {"$tuple": [2.5, {"$float": "Infinity"}]},
        {"$tensor": ["/nest/a~1b/2", "float32[2]"]},
    ]
    assert content["tensors"] == ["extra", "in_flight", "replay"]


def test_the_text_depends_on_the_state_alone() -> None:
    torch.manual_seed(1)
    first = _full().to_json()
    torch.manual_seed(1)
    assert first == _full().to_json()


def test_everything_comes_back() -> None:
    state = _full()
    back = RlhfState.from_json(state.to_json(), WHERE, state.tensor_files())
    assert _same(_parts(back), _parts(state))


def test_the_empty_state_comes_back() -> None:
    text = RlhfState().to_json()
    assert tensor_file_stems(text, WHERE) == ()
    assert RlhfState.from_json(text, WHERE).to_json() == text


def test_the_tensor_files_hold_the_live_tensors() -> None:
    state = _full()
    files = state.tensor_files()
    assert tensor_file_stems(state.to_json(), WHERE) == tuple(sorted(files))
    assert files["replay"]["obs"] is state.buffers["replay"].tensors["obs"]
    assert files["in_flight"] == {"1": {"tokens": state.in_flight[1].tensors["tokens"]}}
    assert files["extra"]["/nest/a~1b/2"] is state.extra["nest"]["a/b"][2]  # type: ignore[index]


@pytest.mark.parametrize("way", ["files", "state_dict"])
def test_pt_files_load_with_weights_only(way: str) -> None:
    state, back = _full(), RlhfState()

    def through_torch(content: object) -> Any:
        file = io.BytesIO()
        torch.save(content, file)
        file.seek(0)
        return torch.load(file, weights_only=True)

    if way == "files":
        back.load_from(
            state.to_json(), {stem: through_torch(file) for stem, file in state.tensor_files().items()}, WHERE
        )
    else:
        back.load_state_dict(through_torch(state.state_dict()))
    assert _same(_parts(back), _parts(state))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.just("$float") | st.integers() | st.booleans(), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(VALUES)
@example({"$float": "NaN"})
@example({"$items": [1], "b": {2: {True: -0.0}}})
@settings(max_examples=30)
def test_any_plain_value_survives_strict_json(value: object) -> None:
    text, problems = dumps(value, "value: "), Problems()
    _strict(text)
    assert _same(decode(loads(text, "value"), "value", problems), value)
    assert not problems


def _train(state: RlhfState, steps: int, rng: np.random.Generator) -> Iterator[tuple[str, ...]]:
    """Some training; everything that it computes, to the last bit."""
    for _ in range(steps):
        state.reward.update(torch.from_numpy(rng.normal(size=9)))
        state.kl["actor"].update(float(rng.gamma(2.0)), 64)
        values = (state.kl["actor"].value, state.reward.mean, state.reward.std(), state.reward.min)
        schedules = [schedule.step() for schedule in state.schedules.values()]
        yield tuple(float(number).hex() for number in (*values, *schedules))


@given(st.integers(0, 2**32 - 1), st.integers(0, 12))
@settings(max_examples=20)
def test_resuming_anywhere_continues_to_the_last_bit(seed: int, interrupted_after: int) -> None:
    def fresh() -> RlhfState:
        schedules = {"clip": LinearSchedule(0.2, 0.1, 7), "entropy": CosineSchedule(0.01, 0.0, 9)}
        return RlhfState("grpo", kl={"actor": AdaptiveKL(0.1, 1.5, 1000)}, schedules=dict(schedules))

    rng = np.random.default_rng(seed)
    whole = list(_train(fresh(), 12, rng))
    rng, first, second = np.random.default_rng(seed), fresh(), fresh()
    parts = list(_train(first, interrupted_after, rng))
    second.load_from(first.to_json(), first.tensor_files(), WHERE)
    assert [*parts, *_train(second, 12 - interrupted_after, rng)] == whole


def test_references_stay_valid() -> None:
    stored, live = _full(), _full()
    live.in_flight, live.extra, live.buffers["replay"].meta = [], {"old": 1}, {"old": 2}
    live.best = BestMetric("accuracy")
    before = {
        name: getattr(live, name) for name in ("kl", "statistics", "schedules", "best", "in_flight", "buffers", "extra")
    }
    inner = [*live.kl.values(), *live.statistics.values(), *live.schedules.values(), live.buffers["replay"]]
    tensor = live.buffers["replay"].tensors["obs"]
    live.kl["actor"].coefficient = 99.0
    live.load_from(stored.to_json(), stored.tensor_files(), WHERE)
    assert all(getattr(live, name) is item for name, item in before.items())
    after = [*live.kl.values(), *live.statistics.values(), *live.schedules.values(), live.buffers["replay"]]
    assert all(one is other for one, other in zip(inner, after, strict=True))
    assert live.buffers["replay"].tensors["obs"] is tensor
    assert _same(_parts(live), _parts(stored))


@pytest.mark.parametrize("kind", ["shape", "dtype", "expanded", "inference"])
def test_a_buffer_tensor_that_cannot_take_the_stored_one_is_replaced(kind: str) -> None:
    stored, live = _full(), _full()
    with torch.inference_mode(kind == "inference"):
        live.buffers["replay"].tensors["obs"] = {
            "shape": torch.zeros(5),
            "dtype": torch.zeros(2, 3, dtype=torch.float64),
            "expanded": torch.zeros(1, 1).expand(2, 3),
            "inference": torch.zeros(2, 3),
        }[kind]
    live.load_from(stored.to_json(), stored.tensor_files(), WHERE)
    assert torch.equal(live.buffers["replay"].tensors["obs"], stored.buffers["replay"].tensors["obs"])


def test_load_state_dict_shares_no_tensor() -> None:
    stored, live = _full(), RlhfState()
    live.load_state_dict(stored.state_dict())
    stored.buffers["replay"].tensors["obs"].zero_()
    stored.in_flight[1].tensors["tokens"].zero_()
    assert live.buffers["replay"].tensors["obs"].any()
    assert live.in_flight[1].tensors["tokens"].any()


def test_what_the_run_lacks_is_added_and_unused_statistics_may_be_missing() -> None:
    stored, live = _full(), RlhfState()
    del stored.statistics["value"]
    stored.statistics["length"] = RunningStatistics.of([3.0])
    live.load_from(stored.to_json(), stored.tensor_files(), WHERE)
    assert set(live.statistics) == {"reward", "value", "advantage", "length"}
    assert live.statistics["length"].count == 1
    assert set(live.kl) == {"actor", "reference"}
    live.value.update(1.0)
    with pytest.raises(Incomplete, match="statistics/value: is missing in the checkpoint"):
        live.load_from(stored.to_json(), stored.tensor_files(), WHERE)


def test_keys_of_extra_that_look_alike_are_kept_apart() -> None:
    lookalikes: list[list[Any]] = [["a/b", "a~1b", "a~b", ""], ["1", 1, 0, "0", (1,), None, "None"]]
    extra: dict[str, object] = {
        str(which): {key: torch.tensor(number) for number, key in enumerate(keys)}
        for which, keys in enumerate(lookalikes)
    }
    state = RlhfState(extra=extra)
    back = RlhfState.from_json(state.to_json(), WHERE, state.tensor_files())
    assert _same(back.extra, extra)


def test_a_lone_controller_is_the_actors() -> None:
    controller = FixedKL(0.1)
    assert RlhfState(kl=controller).kl == {"actor": controller}  # type: ignore[arg-type]


def test_numbers_of_numpy_and_torch_are_numbers() -> None:
    state = RlhfState(iteration=np.int64(3), epoch=torch.tensor(2), extra={"lr": np.float32(0.5)})  # type: ignore[arg-type]
    state.kl["actor"] = FixedKL(np.float64(0.1))
    content = _strict(state.to_json())
    assert (content["counters"]["iteration"], content["counters"]["epoch"], content["extra"]["lr"]) == (3, 2, 0.5)
    assert content["kl"]["actor"]["coefficient"] == 0.1
    whole = RlhfState(kl={"actor": AdaptiveKL(1, 6, 100)}).to_json()
    assert '"target": 6.0' in whole


def test_a_kind_of_ones_own(monkeypatch: pytest.MonkeyPatch, rng: random.Random) -> None:
    monkeypatch.setattr(KL_CONTROLLERS, "_classes", dict(KL_CONTROLLERS._classes))

    @KL_CONTROLLERS.register("windowed")
    @dataclass
    class Windowed(KLController):
        window: list[float]
        limits: tuple[float, ...] | None = None
        updates: int = field(default=0, init=False)

        def update(self, current: float, n_steps: int) -> None:
            self.window.append(current)
            self.updates += 1

    state = RlhfState(kl={"actor": Windowed(0.1, [], (0.0, 1.0))})
    state.kl["actor"].update(rng.random(), 1)
    back = RlhfState.from_json(state.to_json(), WHERE)
    assert back.kl == state.kl
    assert isinstance(back.kl["actor"], Windowed)
    assert back.kl["actor"].updates == 1


@dataclass
class _Counted(RunningStatistics):
    batches: int = 0


PAGE = (Path(__file__).parents[3] / "docs" / "reference" / "rlhf-state.md").read_text(encoding="utf-8")


def test_the_json_of_the_documentation_loads() -> None:
    (text,) = re.findall(r"^```json\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    files = {
        "replay": {"log_probs": torch.zeros(1).expand(4096, 512)},
        "in_flight": {"0": {"tokens": torch.arange(181)}},
        "extra": {"/ema": torch.arange(8.0)},
    }
    state = RlhfState.from_json(text, WHERE, files)
    assert (state.tokens_consumed, state.kl["actor"].value, state.schedules["clip"].position) == (9830400, 0.1038, 50)
    assert state.extra["ema"] is files["extra"]["/ema"]
    assert set(re.findall(r"^\| `(\w+)`", PAGE, re.MULTILINE)) >= set(json.loads(text)) - {"version"}


def test_the_python_of_the_documentation_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KL_CONTROLLERS, "_classes", dict(KL_CONTROLLERS._classes))
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    module = ModuleType("rlhf_state_page")  # where @dataclass looks annotations up
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(code, "rlhf-state.md", "exec"), module.__dict__)


def test_everything_that_cannot_be_stored_is_named() -> None:
    state = RlhfState(iteration="3", kl={"actor": object()})  # type: ignore[arg-type, dict-item]
    state.statistics["reward"] = 0.5  # type: ignore[assignment]
    state.statistics["length"] = _Counted()
    state.buffers = {"../up": Buffer(), "extra": Buffer(), "b": Buffer({"t": [1]}), "c": []}  # type: ignore[dict-item]
    with pytest.raises(UsageError) as raised:
        state.to_json()
    text = str(raised.value)
    for expected in (
        "RlhfState: iteration: expected a whole number, found '3'",
        "kl/actor: object is not a KL controller that can be stored; known are adaptive, fixed",
        "statistics/reward: expected a RunningStatistics, found 0.5",
        "statistics/length: expected a RunningStatistics, found _Counted(",
        "buffers/../up: a buffer's name must be a plain file name",
        "buffers/extra: a buffer's name must be",
        "buffers/b/t: expected a tensor under a string, found [1]",
        "buffers/c: expected a Buffer, found []",
    ):
        assert expected in text
    with pytest.raises(UsageError, match="expected a RunningStatistics"):
        state.tensor_files()


def test_extra_that_is_no_json_is_named() -> None:
    with pytest.raises(UsageError, match=r"extra/a/0 \(set\): cannot be kept in JSON"):
        RlhfState(extra={"a": [{1}]}).to_json()
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(UsageError, match="nested too deeply"):
        RlhfState(extra={"loop": loop}).to_json()
    with pytest.raises(UsageError, match="nested too deeply"):
        RlhfState(buffers={"b": Buffer(meta={"loop": loop})}).to_json()
    with pytest.raises(UsageError, match=r"meta/t \(Tensor\): cannot be kept in JSON"):
        RlhfState(buffers={"b": Buffer(meta={"t": torch.zeros(1)})}).to_json()
