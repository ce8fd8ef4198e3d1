"""The sampler's cursors, its batches at an epoch's end, and what a saved state accepts and refuses."""

from __future__ import annotations

import copy
import io
import json
import logging
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
import torch

from mcore_rlhf.errors import CheckpointError, Corrupt, Incomplete, LayoutMismatch, Unsupported, UsageError
from mcore_rlhf.manager.rlhf.data_state import fingerprint
from mcore_rlhf.manager.rlhf.prompts import Prompt, shard
from mcore_rlhf.manager.rlhf.sampler import Cursor, PromptSampler


def _sampler(num_prompts: int = 10, **options: Any) -> PromptSampler:
    return PromptSampler(num_prompts, **{"seed": 7, "epochs": 2, "batch_size": 4, **options})


def _stored(sampler: PromptSampler) -> dict[str, Any]:
    """The state as a file gives it back, by torch's safe unpickler."""
    buffer = io.BytesIO()
    torch.save(sampler.state_dict(), buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def _resumed(sampler: PromptSampler, **options: Any) -> PromptSampler:
    fresh = _sampler(**options)
    fresh.load_state_dict(_stored(sampler))
    return fresh


def _places(batch: list[Prompt]) -> list[tuple[int, int]]:
    return [(prompt.epoch, prompt.position) for prompt in batch]


def _ids(batch: list[Prompt]) -> list[int]:
    return [prompt.prompt_id for prompt in batch]


# Batches


def test_carry_fills_a_batch_from_the_next_epoch() -> None:
    places = [_places(batch) for batch in _sampler()]
    assert places[2] == [(0, 8), (0, 9), (1, 0), (1, 1)]
    assert [len(batch) for batch in places] == [4, 4, 4, 4, 4]


def test_short_ends_a_batch_with_the_epoch() -> None:
    assert [len(batch) for batch in _sampler(last_batch="short")] == [4, 4, 2, 4, 4, 2]


def test_drop_leaves_the_rest_of_each_epoch_out() -> None:
    batches = list(_sampler(last_batch="drop"))
    assert [len(batch) for batch in batches] == [4, 4, 4, 4]
    whole = [_ids(batch) for batch in _sampler(last_batch="short")]
    assert [_ids(batch) for batch in batches] == [whole[0], whole[1], whole[3], whole[4]]


def test_pad_repeats_prompts_from_the_epochs_beginning_and_marks_them() -> None:
    batches = list(_sampler(last_batch="pad"))
    assert [len(batch) for batch in batches] == [4] * 6
    assert [prompt.padding for prompt in batches[2]] == [False, False, True, True]
    assert _ids(batches[2])[2:] == _ids(batches[0])[:2]
    assert sorted(prompt.prompt_id for batch in batches[:3] for prompt in batch if not prompt.padding) == [*range(10)]


def test_padding_may_be_longer_than_the_dataset() -> None:
    (batch,) = _sampler(3, batch_size=8, epochs=1, last_batch="pad")
    assert _ids(batch) == (_ids(batch)[:3] * 3)[:8]
    assert [prompt.padding for prompt in batch] == [False] * 3 + [True] * 5


def test_a_batch_may_span_several_epochs() -> None:
    batch = _sampler(3, epochs=None).next_batch(8)
    assert [prompt.epoch for prompt in batch] == [0, 0, 0, 1, 1, 1, 2, 2]


def test_without_shuffling_every_epoch_has_the_datasets_order() -> None:
    assert [_ids(batch) for batch in _sampler(4, shuffle=False)] == [[0, 1, 2, 3], [0, 1, 2, 3]]


def test_epochs_have_different_orders() -> None:
    first, second = _sampler(50, batch_size=50)
    assert sorted(_ids(first)) == sorted(_ids(second)) == [*range(50)]
    assert _ids(first) != _ids(second)


def test_the_order_does_not_depend_on_the_batches() -> None:
    one, other = _sampler(), _sampler()
    a = [prompt for n in (1, 7, 3, 9) for prompt in one.next_batch(n)]
    b = [prompt for batch in other for prompt in batch]
    assert a == b


@pytest.mark.parametrize("how", ["contiguous", "strided"])
@pytest.mark.parametrize("dp", [1, 2, 3, 4, 7, 12])
def test_shards_are_disjoint_and_cover_the_batch(how: Any, dp: int) -> None:
    batch = _sampler().next_batch(10)
    parts = [shard(batch, rank, dp, how) for rank in range(dp)]
    assert sorted(_ids([prompt for part in parts for prompt in part])) == sorted(_ids(batch))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    order = [prompt for part in parts for prompt in part]
    assert how == "strided" or order == batch


def test_a_strided_shard_takes_every_nth() -> None:
    assert shard([*range(10)], 1, 4, "strided") == [1, 5, 9]
    assert shard([*range(10)], 1, 4) == [2, 3, 4]


@pytest.mark.parametrize(("rank", "dp", "how"), [(2, 2, "contiguous"), (-1, 2, "strided"), (0, 0, "strided")])
def test_a_rank_that_does_not_exist_has_no_shard(rank: int, dp: int, how: Any) -> None:
    with pytest.raises(UsageError, match=f"rank {rank} of {dp}"):
        shard([1, 2], rank, dp, how)
    with pytest.raises(UsageError, match="'contiguous' or 'strided', found 'blocks'"):
        shard([1, 2], 0, 1, "blocks")  # type: ignore[arg-type]


# Cursors


def test_consumed_follows_the_first_prompt_that_is_in_flight() -> None:
    sampler = _sampler()
    batch = sampler.next_batch()
    assert (sampler.yielded, sampler.consumed, sampler.num_consumed) == (Cursor(0, 4), Cursor(0, 0), 0)
    sampler.acknowledge_all([batch[2], batch[3]])
    assert (sampler.consumed, sampler.num_consumed) == (Cursor(0, 0), 2)
    sampler.acknowledge(batch[0])
    assert sampler.consumed == Cursor(0, 1)
    sampler.acknowledge(batch[1])
    assert sampler.consumed == sampler.yielded == Cursor(0, 4)


def test_a_group_is_consumed_when_its_last_sample_is() -> None:
    sampler = _sampler(group_size=3)
    (prompt,) = sampler.next_batch(1)
    sampler.acknowledge(prompt, 2)
    sampler.acknowledge(prompt, [0])
    assert (sampler.num_consumed, sampler.in_flight()[0].pending) == (0, (1,))
    sampler.acknowledge(prompt, 1)
    assert (sampler.num_consumed, sampler.in_flight()) == (1, [])


def test_acknowledging_twice_names_the_prompt_and_the_sample() -> None:
    sampler = _sampler(group_size=2)
    first, second = sampler.next_batch(2)
    sampler.acknowledge(first)
    with pytest.raises(UsageError, match=rf"prompt {first.prompt_id} \(epoch 0, position 0\) was acknowledged already"):
        sampler.acknowledge(first)
    sampler.acknowledge(second, 1)
    with pytest.raises(UsageError, match=rf"sample 1 of prompt {second.prompt_id} .* was acknowledged already"):
        sampler.acknowledge(second)
    with pytest.raises(UsageError, match=r"sample 0 of .* was acknowledged already"):
        sampler.acknowledge(second, [0, 0])
    with pytest.raises(UsageError, match="has 2 samples, and no sample 2"):
        sampler.acknowledge(second, 2)
    assert sampler.in_flight()[0].pending == (0,)


def test_what_was_never_handed_out_cannot_be_acknowledged() -> None:
    sampler, other = _sampler(), _sampler(seed=8)
    with pytest.raises(UsageError, match="has never been handed out"):
        sampler.acknowledge(other.next_batch(1)[0])
    theirs = next(prompt for prompt in other.next_batch(9) if prompt.prompt_id != sampler.next_batch(1)[0].prompt_id)
    sampler.next_batch(20)
    with pytest.raises(UsageError, match="that place holds prompt"):
        sampler.acknowledge(theirs)


def test_a_batch_is_acknowledged_wholly_or_not_at_all() -> None:
    sampler = _sampler()
    batch = sampler.next_batch()
    sampler.acknowledge(batch[1])
    with pytest.raises(UsageError, match="was acknowledged already"):
        sampler.acknowledge_all(batch)
    with pytest.raises(UsageError, match="appears twice"):
        sampler.acknowledge_all([batch[0], batch[0]])
    assert sampler.num_consumed == 1


def test_the_state_stays_small_whatever_was_consumed_out_of_order() -> None:
    sampler = _sampler(5000, epochs=None)
    stuck, *others = sampler.next_batch(4000)
    sampler.acknowledge_all(reversed(others))
    assert len(json.dumps(sampler.state_dict())) < 500
    assert _places(sampler.in_flight()) == _places([stuck])


# The ends


@pytest.mark.parametrize("last_batch", ["carry", "short", "drop", "pad"])
def test_resuming_at_every_boundary_gives_the_uninterrupted_rest(last_batch: Any) -> None:
    whole = list(_sampler(last_batch=last_batch))
    for done in range(len(whole) + 1):
        sampler = _sampler(last_batch=last_batch)
        for _ in range(done):
            sampler.acknowledge_all(sampler.next_batch())
        rest = _resumed(sampler, last_batch=last_batch)
        assert list(rest) == whole[done:]
        assert sampler.exhausted == sampler.finished == (done == len(whole))


def test_the_cursor_at_an_epochs_end_is_the_beginning_of_the_next() -> None:
    sampler = _sampler()
    sampler.acknowledge_all(sampler.next_batch(10))
    assert sampler.yielded == sampler.consumed == Cursor(1, 0)
    assert _places(_resumed(sampler).next_batch(2)) == [(1, 0), (1, 1)]


def test_after_the_last_epoch_there_is_nothing_but_what_is_in_flight() -> None:
    sampler = _sampler()
    *_, last = sampler
    assert sampler.exhausted
    assert not sampler.finished
    assert (sampler.next_batch(), sampler.yielded) == ([], Cursor(2, 0))
    resumed = _resumed(sampler)
    assert not resumed.exhausted
    again = resumed.next_batch(100)
    assert len(again) == 20
    assert resumed.exhausted
    resumed.acknowledge_all(again)
    assert resumed.finished
    assert _resumed(resumed).finished
    assert last[-1].position == again[-1].position


def test_more_epochs_continue_a_finished_run() -> None:
    sampler = _sampler()
    for batch in sampler:
        sampler.acknowledge_all(batch)
    resumed = _resumed(sampler, epochs=3)
    assert _places(resumed.next_batch(1)) == [(2, 0)]
    assert resumed.next_batch(1) == _sampler(epochs=None).next_batch(22)[21:]


def test_in_flight_prompts_of_two_epochs_come_first_in_their_order() -> None:
    sampler = _sampler(group_size=2)
    batch = sampler.next_batch(14)
    sampler.acknowledge_all([prompt for prompt in batch if _places([prompt])[0] not in ((0, 3), (0, 9), (1, 2))])
    sampler.acknowledge(batch[9], 0)
    resumed = _resumed(sampler, group_size=2)
    again = resumed.next_batch(5)
    assert _places(again) == [(0, 3), (0, 9), (1, 2), (1, 4), (1, 5)]
    assert [prompt.reissued for prompt in again] == [True, True, True, False, False]
    assert [prompt.pending for prompt in again] == [(0, 1), (1,), (0, 1), (0, 1), (0, 1)]
    assert [prompt.sample_seeds for prompt in again[:3]] == [batch[index].sample_seeds for index in (3, 9, 12)]


def test_what_was_claimed_is_not_issued_again() -> None:
    sampler = _sampler()
    batch = sampler.next_batch()
    resumed = _resumed(sampler)
    with pytest.raises(UsageError, match="waits to be issued again"):
        resumed.acknowledge(batch[0])
    resumed.claim(resumed.in_flight()[:2])
    assert _places(resumed.next_batch(3)) == [(0, 2), (0, 3), (0, 4)]
    resumed.acknowledge(batch[0])
    with pytest.raises(UsageError, match=r"claim: .* does not wait"):
        resumed.claim([batch[1]])
    assert _places(_resumed(resumed).next_batch(2)) == [(0, 1), (0, 2)]


# A saved state


def test_it_is_what_the_design_says_and_a_person_can_read_it() -> None:
    sampler = _sampler(dataset=fingerprint(["a"] * 10), group_size=2)
    (prompt,) = sampler.next_batch(1)
    sampler.acknowledge(prompt, 0)
    saved = _stored(sampler)
    assert saved == json.loads(json.dumps(saved)) == sampler.state_dict()
    assert list(saved) == ["version", "kind", "state", "fingerprint"]
    assert (saved["version"], saved["kind"]) == (1, "prompt_sampler")
    assert saved["fingerprint"] == asdict(fingerprint(["a"] * 10))
    assert saved["state"] == {
        "order": 1, "seed": 7, "group_size": 2, "shuffle": True, "num_prompts": 10, "epoch_length": 10,
        "next": {"epoch": 0, "position": 1}, "consumed": 0,
        "in_flight": [{"epoch": 0, "position": 0, "prompt_id": prompt.prompt_id, "pending": [1]}],
    }  # fmt: skip


def test_the_state_does_not_change_with_the_sampler() -> None:
    sampler = _sampler()
    saved = sampler.state_dict()
    before = copy.deepcopy(saved)
    sampler.next_batch()
    assert saved == before


def test_all_changed_settings_are_named_at_once_and_nothing_is_changed() -> None:
    source = _sampler()
    source.next_batch()
    target = _sampler(seed=8, group_size=4, shuffle=False)
    expected = target.state_dict()
    with pytest.raises(LayoutMismatch) as caught:
        target.load_state_dict(source.state_dict())
    text = str(caught.value)
    for name, now, saved in (("seed", 8, 7), ("group_size", 4, 1), ("shuffle", False, True)):
        assert f"{name}: expected {now}, as this run has, found {saved}" in text
    assert target.state_dict() == expected


def test_another_batch_size_matters_only_where_it_makes_an_epochs_length() -> None:
    sampler = _sampler(last_batch="drop")
    with pytest.raises(LayoutMismatch, match=r"epoch_length \(of batch_size and last_batch\): expected 9, .* found 8"):
        _resumed(sampler, last_batch="drop", batch_size=3)
    assert _resumed(_sampler(), batch_size=3, last_batch="short").yielded == Cursor(0, 0)


def test_fewer_epochs_than_were_handed_out_are_refused() -> None:
    sampler = _sampler(epochs=3)
    sampler.next_batch(21)
    with pytest.raises(LayoutMismatch, match="the run has 2 now, but prompts of epoch 2"):
        _resumed(sampler)
    at_the_end = _sampler(epochs=3)
    at_the_end.next_batch(20)
    assert _resumed(at_the_end).yielded == Cursor(2, 0)


def test_a_changed_dataset_is_refused_with_the_options() -> None:
    sampler = PromptSampler.for_dataset([str(n) for n in range(10)], seed=7)
    changed = PromptSampler.for_dataset([str(n) for n in range(9)] + ["x"], seed=7)
    shorter = PromptSampler.for_dataset([str(n) for n in range(9)], seed=7)
    with pytest.raises(LayoutMismatch, match=r"dataset changed: expected 10 items, .* found 10 items") as caught:
        changed.load_state_dict(sampler.state_dict())
    assert "on_dataset_change='restart'" in str(caught.value)
    with pytest.raises(LayoutMismatch, match=r"dataset changed: expected 9 prompts, .* found 10"):
        shorter.load_state_dict(sampler.state_dict())


@pytest.mark.parametrize("last_batch", ["carry", "pad"])
def test_a_changed_dataset_can_restart_the_data_loudly(caplog: pytest.LogCaptureFixture, last_batch: Any) -> None:
    options: dict[str, Any] = {"seed": 7, "batch_size": 4, "last_batch": last_batch, "on_dataset_change": "restart"}
    sampler = PromptSampler.for_dataset(["a"] * 10, **options)
    sampler.next_batch(5)
    for new in (["b"] * 10, ["a"] * 20):
        caplog.clear()
        restarted = PromptSampler.for_dataset(new, **options)
        restarted.next_batch(1)
        restarted.load_state_dict(sampler.state_dict())
        assert (restarted.yielded, restarted.in_flight()) == (Cursor(0, 0), [])
        (record,) = caplog.records
        assert record.levelno == logging.WARNING
        assert "the dataset changed" in record.message
        assert "5 prompts in flight are dropped" in record.message
    caplog.clear()
    same = PromptSampler.for_dataset(["a"] * 10, **options)
    same.load_state_dict(sampler.state_dict())
    assert (same.yielded, caplog.records) == (Cursor(0, 5), [])


def test_a_missing_fingerprint_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with_one = PromptSampler.for_dataset(["a"] * 10, seed=7)
    _sampler().load_state_dict(with_one.state_dict())
    with_one.load_state_dict(_sampler().state_dict())
    assert ["was given no fingerprint" in caplog.messages[0], "has no fingerprint" in caplog.messages[1]] == [True] * 2


Change = Callable[[dict[str, Any]], object]
BAD: list[tuple[Change, type[CheckpointError], str]] = [
    (lambda s: s.update(version=2), Unsupported, "version 2 of the data state; this release reads up to 1"),
    (lambda s: s.update(version=True), Unsupported, "version True"),
    (lambda s: s.pop("version"), Incomplete, "has no version; this is another program's state"),
    (lambda s: s.update(kind="stateful"), LayoutMismatch, "kind: expected 'prompt_sampler', found 'stateful'"),
    (lambda s: s.update(extra=1), Unsupported, "unknown fields: extra"),
    (lambda s: s.pop("fingerprint"), Incomplete, "missing fields: fingerprint"),
    (lambda s: s.update(state=[1]), Corrupt, "state: expected a dictionary, found list"),
    (lambda s: s.update(fingerprint={"length": 1}), Incomplete, "fingerprint: missing fields: sha256, method"),
    (lambda s: (s["state"].pop("seed"), s["state"].pop("next")), Incomplete, "missing fields: seed, next"),
    (lambda s: s["state"].update(mood="good"), Unsupported, "state: unknown fields: mood"),
    (lambda s: s["state"].update(seed="7"), Corrupt, "state/seed: expected a whole number, found '7'"),
    (lambda s: s["state"].update(order=2), LayoutMismatch, "order: expected 1, as this run has, found 2"),
    (lambda s: s["state"]["next"].update(position=-1), Corrupt, "state/next/position: expected a whole number from 0"),
    (lambda s: s["state"]["next"].update(position=10), Corrupt, "expected a position below 10, found 10"),
    (lambda s: s["state"].update(in_flight={}), Corrupt, "state/in_flight: expected a list, found {}"),
    (lambda s: s["state"]["in_flight"][0].pop("epoch"), Incomplete, "in_flight/0: missing fields: epoch"),
    (lambda s: s["state"]["in_flight"][0].update(position=9), Corrupt, "epoch 0, position 9 was never handed out"),
    (lambda s: s["state"]["in_flight"][0].update(position=1), Corrupt, "position 1 appears twice"),
    (lambda s: s["state"]["in_flight"][0].update(pending=[0, 2]), Corrupt, "expected samples below 2, each once"),
    (lambda s: s["state"]["in_flight"][0].update(pending=[]), Corrupt, "expected samples below 2, each once"),
    (lambda s: s["state"]["in_flight"][0].update(prompt_id=99), Corrupt, r"position 0 holds prompt \d, found 99"),
    (lambda s: s["state"].update(consumed=3), Corrupt, r"consumed: expected 0 \(handed out − in flight\), found 3"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "error", "text"), BAD)
def test_a_damaged_state_is_refused_and_changes_nothing(
    change: Change, error: type[CheckpointError], text: str
) -> None:
    source = _sampler(group_size=2)
    source.next_batch(2)
    saved = source.state_dict()
    change(saved)
    target = _sampler(group_size=2)
    target.next_batch(3)
    before = target.state_dict()
    with pytest.raises(error, match=text):
        target.load_state_dict(saved)
    assert target.state_dict() == before


def test_the_state_of_something_else_is_refused() -> None:
    with pytest.raises(Corrupt, match="expected a dictionary with version, kind, state, fingerprint, found list"):
        _sampler().load_state_dict([])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_prompts": 0}, "num_prompts: expected a whole number of at least 1, found 0"),
        ({"group_size": 0, "epochs": 0}, "(?s)group_size: .* found 0.*epochs: .* found 0"),
        ({"batch_size": 2.5}, "batch_size: .* found 2.5"),
        ({"last_batch": "keep"}, "last_batch: expected carry, short, drop, pad; found 'keep'"),
        ({"last_batch": "drop", "batch_size": None}, "last_batch='drop' needs the batch_size"),
        ({"last_batch": "drop", "batch_size": 11}, "leaves nothing of 10 prompts with batch_size=11"),
        ({"on_dataset_change": "ignore"}, "on_dataset_change: expected 'refuse' or 'restart', found 'ignore'"),
    ],
)
def test_impossible_settings_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        _sampler(**options)


def test_a_batch_needs_a_size() -> None:
    with pytest.raises(UsageError, match="at least 1, found None"):
        _sampler(batch_size=None).next_batch()
    with pytest.raises(UsageError, match="at least 1, found 0"):
        _sampler().next_batch(0)
