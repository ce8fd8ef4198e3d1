"""What a state file that is not as it should be gets: names, and a live state that is as it was."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rlhf.errors import CheckpointError, Corrupt, Incomplete, NotACheckpoint, Unsupported, UsageError
from mcore_rlhf.manager.rlhf import state_json as versions
from mcore_rlhf.manager.rlhf.controls import AdaptiveKL, ConstantSchedule, FixedKL, LinearSchedule
from mcore_rlhf.manager.rlhf.pieces import BestMetric, Buffer, InFlightPrompt
from mcore_rlhf.manager.rlhf.state import RlhfState, tensor_file_stems

WHERE = "/run/rlhf/rlhf_state.json"
Document = dict[str, Any]


def _state() -> RlhfState:
    return RlhfState(
        "grpo",
        iteration=5,
        kl={"actor": AdaptiveKL(0.1, 6.0, 100)},
        schedules={"clip": LinearSchedule(0.2, 0.1, 10)},
        best=BestMetric("reward", value=1.0, step=2),
        in_flight=[InFlightPrompt(0, 1, (0,), 2, tensors={"tokens": torch.arange(3)})],
        buffers={"replay": Buffer({"obs": torch.ones(2)})},
        extra={"t": torch.zeros(1)},
    )


def _set(*path: Any, to: object) -> Callable[[Document], object]:
    def change(content: Document) -> None:
        for key in path[:-1]:
            content = content[key]
        content[path[-1]] = to

    return change


def _delete(*path: Any) -> Callable[[Document], object]:
    def change(content: Document) -> None:
        for key in path[:-1]:
            content = content[key]
        del content[path[-1]]

    return change


BAD_JSON = {
    "unknown field": (_set("zeal", to=1), Unsupported, "rlhf_state.json: unknown fields: zeal"),
    "unknown counter": (_set("counters", "yes", to=1), Unsupported, "counters: unknown fields: yes"),
    "unknown in a controller": (_set("kl", "actor", "gain", to=1), Unsupported, "kl/actor: unknown fields: gain"),
    "missing field": (_delete("kl"), Incomplete, "rlhf_state.json: missing fields: kl"),
    "missing counter": (_delete("counters", "epoch"), Incomplete, "counters: missing fields: epoch"),
    "missing kind": (_delete("kl", "actor", "kind"), Incomplete, "kl/actor: missing fields: kind"),
    "missing tensors": (_delete("tensors"), Incomplete, "missing fields: tensors"),
    "missing in a prompt": (_delete("in_flight", 0, "epoch"), Incomplete, "in_flight/0: missing fields: epoch"),
    "unknown kind": (
        _set("kl", "actor", "kind", to="pid"), Unsupported,
        "kl/actor: unknown kind of KL controller 'pid'; known are adaptive, fixed",
    ),
    "kind of another thing": (
        _set("schedules", "clip", "kind", to="fixed"), Unsupported, "'fixed'; known are constant, cosine, linear",
    ),
    "kind is a list": (_set("kl", "actor", "kind", to=[]), Unsupported, r"unknown kind of KL controller \[\]"),
    "unknown mark": (_set("extra", "x", to={"$date": 1}), Unsupported, r"extra/x: the mark \$date is not known"),
    "bad mark": (_set("extra", "x", to={"$float": "1.5"}), Corrupt, r"extra/x: \$float is followed by '1.5'"),
    "bad items": (_set("extra", "x", to={"$items": [[1]]}), Corrupt, r"extra/x: \$items is followed by"),
    "unhashable key": (_set("extra", "x", to={"$items": [[[], 1]]}), Corrupt, r"extra/x: \$items is followed by"),
    "string for a number": (
        _set("kl", "actor", "target", to="6"), Corrupt, "kl/actor/target: expected a number, found '6'",
    ),
    "float for a counter": (
        _set("counters", "epoch", to=1.5), Corrupt, "counters/epoch: expected a whole number, found 1.5",
    ),
    "bool for a counter": (_set("counters", "epoch", to=True), Corrupt, "epoch: expected a whole number, found True"),
    "huge number": (_set("kl", "actor", "target", to=10**400), Corrupt, "kl/actor/target: expected a number"),
    "impossible target": (_set("kl", "actor", "target", to=0), Corrupt, "kl/actor: AdaptiveKL: target must be"),
    "object for a list": (_set("in_flight", to={}), Corrupt, "in_flight: expected a list, found {}"),
    "list for an object": (_set("kl", to=[]), Corrupt, r"kl: expected an object, found \[\]"),
    "number for a record": (_set("best", to=3), Corrupt, "best: expected an object, found 3"),
    "bad samples": (
        _set("in_flight", 0, "samples", to=[0, "1"]), Corrupt,
        "in_flight/0/samples/1: expected a whole number, found '1'",
    ),
    "bad prompt id": (
        _set("in_flight", 0, "prompt_id", to=None), Corrupt, "prompt_id: expected a whole number or a string, found None",
    ),
    "bad mode": (_set("best", "mode", to="most"), Corrupt, "best: BestMetric 'reward': mode must be"),
    "bad forms": (_set("buffers", "replay", "tensors", to=[1]), Corrupt, "buffers/replay/tensors: expected an object"),
    "a name that leads out": (_set("tensors", to=["../../etc/x"]), Corrupt, "tensors: expected a list of file names"),
    "a buffer that leads out": (
        _set("buffers", to={"../a/replay": {"meta": {}, "tensors": {}}}), Corrupt,
        "buffers/../a/replay: a buffer's name must be a plain file name",
    ),
    "file not named": (_set("tensors", to=["extra", "in_flight"]), Unsupported, "/run/rlhf/replay.pt: is not named"),
    "newer": (_set("version", to=2), Unsupported, "version 2 of the RLHF state; this release reads up to 1.\nUpgrade: "),
    "version is a string": (_set("version", to="1"), Corrupt, "version: expected a whole number from 1, found '1'"),
    "version 0": (_set("version", to=0), Corrupt, "version: expected a whole number from 1, found 0"),
    "another format": (_set("format", to="x"), NotACheckpoint, "not an RLHF state"),
}  # fmt: skip


def _loads_and_changes_nothing(live: RlhfState, text: str, files: dict[str, Any]) -> CheckpointError:
    before, tensors = live.to_json(), {name: item.clone() for name, item in live.buffers["replay"].tensors.items()}
    with pytest.raises(CheckpointError) as asked:
        live.check_load(text, files, WHERE)
    with pytest.raises(CheckpointError) as raised:
        live.load_from(text, files, WHERE)
    assert (type(asked.value), str(asked.value)) == (type(raised.value), str(raised.value))
    assert live.to_json() == before
    assert all(torch.equal(live.buffers["replay"].tensors[name], item) for name, item in tensors.items())
    return raised.value


@pytest.mark.parametrize("case", BAD_JSON)
def test_bad_json_is_refused_by_name_and_nothing_is_changed(case: str) -> None:
    change, kind, message = BAD_JSON[case]
    stored, live = _state(), _state()
    stored.iteration = 77
    content = json.loads(stored.to_json())
    change(content)
    error = _loads_and_changes_nothing(live, json.dumps(content), stored.tensor_files())
    assert type(error) is kind
    with pytest.raises(kind, match=message):
        RlhfState.from_json(json.dumps(content), WHERE, stored.tensor_files())
    assert WHERE.rpartition("/")[0] in str(error)


def _drop(stem: str) -> Callable[[Document], object]:
    return lambda files: files.pop(stem)


BAD_FILES = {
    "file missing": (_drop("replay"), Incomplete, "/run/rlhf/replay.pt: is missing; rlhf_state.json names it"),
    "in_flight missing": (_drop("in_flight"), Incomplete, "/run/rlhf/in_flight.pt: is missing"),
    "prompt missing": (_delete("in_flight", "0"), Incomplete, "in_flight.pt: 0: tensor 'tokens' is missing"),
    "tensor missing": (_delete("replay", "obs"), Incomplete, "replay.pt: tensor 'obs' is missing"),
    "tensor unknown": (_set("replay", "new", to=torch.ones(1)), Unsupported, "replay.pt: tensor 'new' is not named"),
    "file unknown": (_set("rollout", to={}), Unsupported, "/run/rlhf/rollout.pt: is not named"),
    "another shape": (
        _set("replay", "obs", to=torch.ones(3)), Corrupt, r"'obs': expected float32\[2\], found float32\[3\]",
    ),
    "another dtype": (_set("extra", "/t", to=torch.ones(1).int()), Corrupt, r"'/t': expected float32\[1\], found int32\[1\]"),
    "no tensor": (_set("replay", "obs", to=[1]), Corrupt, r"'obs': expected float32\[2\], found \[1\]"),
    "no dict": (_set("replay", to=torch.ones(1)), Corrupt, r"replay.pt: expected a dict of tensors, found tensor"),
    "no dict of prompts": (_set("in_flight", to=[1]), Corrupt, r"in_flight.pt: 0: expected a dict of tensors"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_tensor_files_are_refused_by_name_and_nothing_is_changed(case: str) -> None:
    change, kind, message = BAD_FILES[case]
    stored, live = _state(), _state()
    stored.iteration = 77
    files = stored.tensor_files()
    change(files)
    error = _loads_and_changes_nothing(live, stored.to_json(), files)
    assert type(error) is kind
    with pytest.raises(kind, match=message):
        RlhfState.from_json(stored.to_json(), WHERE, files)


BAD_RUN = {
    "algorithm": (lambda s: setattr(s, "algorithm", "ppo"), UsageError, "this run is 'ppo', the checkpoint is of 'grpo'"),
    "kind": (
        lambda s: s.kl.update(actor=FixedKL(0.1)), UsageError,
        "kl/actor: this run has a KL controller of kind 'fixed', the checkpoint one of kind 'adaptive'",
    ),
    "controller": (lambda s: s.kl.update(critic=FixedKL(0.1)), Incomplete, "kl/critic: is missing in the checkpoint"),
    "schedule": (lambda s: s.schedules.update(x=ConstantSchedule(1.0)), Incomplete, "schedules/x: is missing"),
    "buffer": (lambda s: s.buffers.update(x=Buffer()), Incomplete, "buffers/x: is missing"),
    "best": (lambda s: setattr(s.best, "mode", "min"), UsageError, "keeps the min of 'reward', the checkpoint the max"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_RUN)
def test_a_run_that_is_another_is_refused_and_nothing_is_changed(case: str) -> None:
    change, kind, message = BAD_RUN[case]
    stored, live = _state(), _state()
    stored.iteration = 77
    change(live)
    error = _loads_and_changes_nothing(live, stored.to_json(), stored.tensor_files())
    assert type(error) is kind
    assert message in str(error)


def test_a_best_metric_that_the_checkpoint_lacks() -> None:
    stored = _state()
    stored.best = None
    with pytest.raises(Incomplete, match="best: is null in the checkpoint; this run has 'reward'"):
        _state().load_from(stored.to_json(), stored.tensor_files(), WHERE)


def test_asking_changes_nothing() -> None:
    stored, live = _state(), _state()
    stored.iteration = 77
    live.check_load(stored.to_json(), stored.tensor_files(), WHERE)
    assert live.iteration == 5


def test_all_problems_are_in_one_error() -> None:
    stored = _state()
    content, files = json.loads(stored.to_json()), stored.tensor_files()
    for change in (
        _set("zeal", to=1),
        _delete("counters", "epoch"),
        _set("kl", "actor", "target", to="6"),
        _delete("best"),
    ):
        change(content)
    del files["replay"]
    with pytest.raises(CheckpointError, match="5 problems") as raised:
        RlhfState.from_json(json.dumps(content), WHERE, files)
    for expected in ("zeal", "epoch", "kl/actor/target", "missing fields: best", "replay.pt"):
        assert expected in str(raised.value)


def test_the_tensor_files_must_be_given() -> None:
    with pytest.raises(Incomplete, match=r"3 problems:\n.*extra.pt: is missing.*\n.*in_flight.pt.*\n.*replay.pt"):
        RlhfState.from_json(_state().to_json(), WHERE)


@pytest.mark.parametrize("text", ["{", '{"a": NaN}', "[" * 100_000, b"\xff", ""])
def test_what_is_not_json_is_corrupt(text: str | bytes) -> None:
    for read in (RlhfState.from_json, tensor_file_stems):
        with pytest.raises(Corrupt, match=r"rlhf_state.json: is not valid JSON"):
            read(text, WHERE)


@pytest.mark.parametrize(
    "depth",
    [pytest.param(900, marks=pytest.mark.skipif(sys.version_info >= (3, 12), reason="so deep is read")), 50_000],
)
def test_deep_nesting_is_corrupt(depth: int) -> None:
    text = _state().to_json().replace('"extra": {', '"extra": {"deep": ' + "[" * depth + "]" * depth + ",")
    with pytest.raises(Corrupt, match=r"nested too deeply|not valid JSON"):
        RlhfState.from_json(text, WHERE, _state().tensor_files())


JSON = st.recursive(
    st.none() | st.integers() | st.text(max_size=3), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=5
)  # fmt: skip


@given(st.sampled_from(sorted(json.loads(_state().to_json()))), JSON)
@settings(max_examples=60)
def test_any_content_of_a_field_is_read_or_refused_by_our_error(name: str, content: object) -> None:
    stored = _state()
    document = json.loads(stored.to_json()) | {name: content}
    with suppress(CheckpointError):
        RlhfState.from_json(json.dumps(document), WHERE, stored.tensor_files()).to_json()


@pytest.mark.parametrize(
    "bad", [{}, {"rlhf_state": {}}, {"rlhf_state": {1}, "tensors": {}}, {"rlhf_state": {}, "tensors": 1}]
)
def test_a_state_dict_of_something_else_is_refused(bad: dict[str, object]) -> None:
    with pytest.raises(Corrupt, match="client_state: "):
        RlhfState().load_state_dict(bad, "client_state")


def test_an_older_version_is_upgraded_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The seam: two invented future versions, the second of which renames a counter."""
    text = _state().to_json()
    files = _state().tensor_files()

    def second_to_third(document: dict[str, object]) -> dict[str, object]:
        assert document["version"] == 2
        counters = {**document["counters"]}  # type: ignore[dict-item]
        counters["epoch"] = counters.pop("round")
        return document | {"counters": counters}

    def first_to_second(document: dict[str, object]) -> dict[str, object]:
        counters = {**document["counters"]}  # type: ignore[dict-item]
        counters["round"] = counters.pop("epoch") + 40
        return document | {"counters": counters}

    monkeypatch.setattr(versions, "VERSION", 3)
    monkeypatch.setattr(versions, "UPGRADES", {1: first_to_second, 2: second_to_third})
    assert RlhfState.from_json(text, WHERE, files).epoch == 40


def test_every_older_version_can_be_upgraded() -> None:
    assert sorted(versions.UPGRADES) == list(range(1, versions.VERSION))
