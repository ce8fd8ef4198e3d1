"""Megatron's other optimizers than Adam, plain, dealt out and distributed: every state of every rank, bit for bit, and never half."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rlhf.convert import ConvertOptions, convert
from mcore_rlhf.demo.configs import Parallel, TinyGPT
from mcore_rlhf.families.options import ReadOptions, WriteOptions
from mcore_rlhf.manager.convert_step import convert_step
from mcore_rlhf.manager.subject import find
from mcore_rlhf.verify.checkpoint import Depth, verify
from tests.reference import muon_jobs
from tests.reference.cases import LOSS_TOLERANCE
from tests.reference.engine_lab import ADAM, PLAIN, SAME_ROWS
from tests.reference.lab import TIMEOUT, Lab
from tests.reference.merge import bits_equal, differences, merged
from tests.reference.muon_jobs import LAYER_WISE, OFFLOAD, PRECISE, Seen
from tests.reference.observing import END, LOOK, Session
from tests.reference.precise_adam import joined

MODEL = replace(SAME_ROWS, dropout=0.0, num_layers=2)
TWO = Parallel(dp=2)


HALF, WHOLE = PRECISE + ", fp16", PRECISE + ", masters"
MUON, PING_PONG, LAID_OUT = "muon", LAYER_WISE + "ping-pong", LAYER_WISE + "by layout"
NEWER = muon_jobs.megatron() >= (0, 18)
SINCE_018 = [
    LAID_OUT, LAID_OUT + ", lion", "muon, lion", "adaptive_muon", "normuon", "soap", LAYER_WISE + "soap", "lion", "sgd",
]  # fmt: skip
OF_ADAM = [PRECISE, HALF, OFFLOAD, pytest.param(OFFLOAD + ", half", marks=pytest.mark.slow)]


CUT = (PRECISE, OFFLOAD)


def run(
    lab: Lab, job: Any, parallel: Parallel, root: Path, kind: str, *, model: TinyGPT = MODEL, **options: Any
) -> list[Seen]:
    session = Session(model, parallel, ADAM if kind.startswith(CUT) else PLAIN)
    world = parallel.world_size
    return lab.pool.run(job, session, str(root), kind, world_size=world, timeout=TIMEOUT, **options)


@pytest.fixture(scope="module", params=[MUON, PING_PONG, *(SINCE_018 if NEWER else []), *OF_ADAM])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def saved(lab: Lab, kind: str) -> tuple[Path, list[Seen]]:
    root = lab.new_root()
    return root, run(lab, muon_jobs.save, TWO, root, kind)


def same(a: Seen, b: Seen, step: int) -> bool:
    ours, theirs = a.states[step], b.states[step]
    return ours.keys() == theirs.keys() and all(bits_equal(ours[key], theirs[key]) for key in ours)


def test_it_resumes_bit_for_bit(lab: Lab, saved: tuple[Path, list[Seen]], kind: str) -> None:
    root, ranks = saved
    for rank, again in zip(ranks, run(lab, muon_jobs.load, TWO, root, kind), strict=True):
        assert again.told == ("", "")
        assert any(key.endswith(("momentum_buffer", "exp_avg")) for key in rank.states[LOOK])
        assert same(rank, again, LOOK)
        assert {step: again.losses[step] for step in (3, 4)} == {step: rank.losses[step] for step in (3, 4)}
        assert same(rank, again, END)
        assert any("optimizer" in text for text in again.report)


def test_it_is_named_when_the_engine_is_made(saved: tuple[Path, list[Seen]], kind: str) -> None:
    for rank in saved[1]:
        assert rank.said
        assert all("are reshaped where they are elementwise" in line for line in rank.said)
        assert ("rank by rank" in rank.said[0]) == kind.startswith(LAYER_WISE)


def test_the_manifest_has_every_state_of_every_rank(saved: tuple[Path, list[Seen]], kind: str) -> None:
    """The test's own count of what the ranks hold: each their own where parameters are dealt out, otherwise the same."""
    root, ranks = saved
    live = json.loads((root / f"global_step_{LOOK}" / "manifest.json").read_text())["report"]["live"]["actor"]["states"]
    each = kind.startswith((LAYER_WISE, *CUT))
    names = {key.rpartition(" ")[2] for key in ranks[0].states[LOOK] if not key.startswith("param")} - {"held", "step"}
    assert names
    for state in names:
        held = [
            t for rank in ranks[: 2 if each else 1] for key, t in rank.states[LOOK].items() if key.endswith(f" {state}")
        ]
        assert live[state] == [len(held), sum(t.numel() * t.element_size() for t in held)]


def actor(root: Path) -> Path:
    return root / f"global_step_{LOOK}" / "actor"


@pytest.mark.parametrize("kind", [PING_PONG], indirect=True)
def test_megatrons_own_loader_takes_it(lab: Lab, saved: tuple[Path, list[Seen]], kind: str) -> None:
    again = run(lab, muon_jobs.go_on_with_megatron, TWO, actor(saved[0]), kind)
    for rank, resumed in zip(saved[1], again, strict=True):
        assert same(rank, resumed, LOOK)
        assert resumed.losses == {step: rank.losses[step] for step in (3, 4)}


CONVERTED = [
    pytest.param(None, None, TWO, PING_PONG, id="as-it-is"),
    pytest.param("megatron", WriteOptions(tp=2, dp=1), Parallel(tp=2), PING_PONG, id="tp2"),
    pytest.param("megatron-dist", WriteOptions(tp=2, dp=1), Parallel(tp=2), LAID_OUT, id="torch-dist"),
]


@pytest.mark.skipif(not NEWER, reason="parameters are dealt by layout since 0.18")
@pytest.mark.parametrize("kind", [LAID_OUT], indirect=True)
@pytest.mark.parametrize(("to", "write", "other", "runs"), CONVERTED)
def test_what_was_dealt_by_layout_goes_on_in_megatron(
    lab: Lab,
    saved: tuple[Path, list[Seen]],
    to: str | None,
    write: WriteOptions | None,
    other: Parallel,
    runs: str,
) -> None:
    """Megatron itself cannot write such a step in the torch format; what it loads of ours is the run that was saved."""
    source, ranks = actor(saved[0]), saved[1]
    assert verify(source, ReadOptions(), Depth.DEEP).intact
    root = source if to is None else lab.new_root()
    if to is not None and write is not None:
        job = convert(source, root, ConvertOptions(to, write=write, fsync=False))
        assert not [item for item in job.account.lost if "optim" in str(item)]
    again = run(lab, muon_jobs.go_on_with_megatron, other, root, runs)
    before, after = (merged([one.look for one in some if one.look], LOOK, MODEL) for some in (ranks, again))
    assert differences(before, after) == []
    expected = {step: ranks[0].losses[step] for step in (3, 4)}
    assert again[0].losses == pytest.approx(expected, rel=LOSS_TOLERANCE["bf16"])


UNEQUAL = {"soap": " L (", LAYER_WISE + "soap": " L (", "normuon": "moment2_buffer ("}
"""States that are not shaped like their parameters, by which they are refused in another layout."""


@pytest.mark.parametrize("other", [Parallel(), Parallel(tp=2)], ids=["dp1", "tp2"])
def test_another_layout_is_loaded_through_a_plan(
    lab: Lab, saved: tuple[Path, list[Seen]], kind: str, other: Parallel
) -> None:
    """Every whole tensor of every state is the saved one, put together by the tests' own code."""
    root, _ = saved
    ranks = run(lab, muon_jobs.load, other, root, kind)
    whole = kind in UNEQUAL and (other != Parallel() or kind.startswith(LAYER_WISE))
    if whole:
        for rank in ranks:
            assert rank.told[0] in ("Unsupported", "Lossy", "Incomplete")
            assert UNEQUAL.get(kind, "") in rank.told[1]
            assert all(bits_equal(rank.states[0][key], rank.states[LOOK][key]) for key in rank.states[0]), "left alone"
        for rank in run(lab, muon_jobs.load, other, root, kind, optimizer=False):
            assert rank.told == ("", "")
        return
    for rank in ranks:
        assert rank.told == ("", "")
    before, after = (merged([one.look for one in some if one.look], LOOK, MODEL) for some in (saved[1], ranks))
    assert {state for state, _ in before} > {"param", "master"}
    if kind == HALF:  # a scale for every part of a tensor
        assert all(any("rounded anew" in text for text in rank.report) for rank in ranks)
        for key, one in before.items():
            torch.testing.assert_close(after[key], one, rtol=0, atol=float(one.float().abs().max()) * 2**-10)
        return
    assert differences(before, after) == []


def test_a_step_that_lacks_half_of_it_is_not_committed(lab: Lab) -> None:
    for number, rank in enumerate(run(lab, muon_jobs.forgetful, TWO, lab.new_root(), PING_PONG)):
        kind, text = rank.told
        assert kind == "Incomplete"
        assert "rank 1 holds" in text
        assert "momentum_buffer of model.decoder" in text.partition("only rank 1 has")[2]
        assert rank.report == [], number


@pytest.mark.parametrize("kind", [OFFLOAD, PRECISE], indirect=True)
def test_without_its_optimizer_masters_are_the_weights(lab: Lab, saved: tuple[Path, list[Seen]], kind: str) -> None:
    """In a run that has gone a step: masters that lie among the states are not emptied with them."""
    ranks = run(lab, muon_jobs.load, TWO, saved[0], kind, optimizer=False)
    found = merged([one.look for one in ranks if one.look], LOOK, MODEL)
    for state, name in found:
        value = found[state, name]
        if state == "master" and kind == OFFLOAD:
            assert bits_equal(value, found["param", name].float()), name
        elif state != "param":
            assert not value.any(), (state, name)
    assert abs(ranks[0].losses[3] - saved[1][0].losses[3]) < 0.1


@pytest.mark.parametrize("kind", [PRECISE], indirect=True)
@pytest.mark.parametrize(
    ("to", "other"),
    [("megatron", Parallel(tp=2)), pytest.param("megatron-dist", TWO, marks=pytest.mark.slow)],
)
def test_remainders_become_masters_with_which_megatron_goes_on(
    lab: Lab, saved: tuple[Path, list[Seen]], to: str, other: Parallel
) -> None:
    """Megatron's own optimizer with fp32 masters, which takes no remainders, has what the run had: bits joined by the test's own hand."""
    source, ranks = actor(saved[0]), saved[1]
    root = lab.new_root()
    job = convert(source, root, ConvertOptions(to, write=WriteOptions(tp=other.tp, dp=other.dp), fsync=False))
    assert any("joined with the parameters they are the masters again" in text for _, text in job.report.lines)
    assert "for runs without --use-precision-aware-optimizer" in job.target.needs
    again = run(lab, muon_jobs.go_on_with_megatron, other, root, WHOLE)
    before, after = (merged([one.look for one in some if one.look], LOOK, MODEL) for some in (ranks, again))
    by_hand = {key: joined(before["param", key[1]], one) if key[0] == "master" else one for key, one in before.items()}
    assert any(not bits_equal(by_hand[key], before["param", key[1]].float()) for key in before if key[0] == "master")
    assert differences(by_hand, after) == []
    expected = {step: ranks[0].losses[step] for step in (3, 4)}
    assert again[0].losses == pytest.approx(expected, rel=LOSS_TOLERANCE["bf16"])


@pytest.mark.parametrize("kind", [PRECISE], indirect=True)
def test_in_flat_buckets_remainders_stay_what_megatron_keeps(
    lab: Lab, saved: tuple[Path, list[Seen]], kind: str
) -> None:
    """Where it asks for 16 bits, masters in fp32 would all become 0, without a word."""
    root, write = lab.new_root(), WriteOptions(optimizer_sharding="dp_reshardable")
    done = convert(actor(saved[0]), root, ConvertOptions("megatron-dist", write=write, fsync=False))
    assert done.lossless, done.account.lost
    assert "for runs with --use-precision-aware-optimizer" in done.target.needs
    assert verify(root, ReadOptions(), Depth.DEEP).intact
    for rank, again in zip(saved[1], run(lab, muon_jobs.go_on_with_megatron, TWO, root, kind), strict=True):
        assert any(value.any() for key, value in again.states[LOOK].items() if key.endswith("master_param"))
        assert same(rank, again, LOOK)
        assert again.losses == {step: rank.losses[step] for step in (3, 4)}


STEPS = [
    pytest.param("converted", TWO, id="masters-of-a-conversion"),
    pytest.param(WHOLE, TWO, id="masters-of-an-older-transformer-engine"),
    pytest.param(WHOLE, Parallel(tp=2), id="at-another-layout"),
]


@pytest.mark.parametrize("kind", [PRECISE], indirect=True)
@pytest.mark.parametrize(("stored", "other"), STEPS)
def test_a_run_that_keeps_remainders_takes_masters(
    lab: Lab, saved: tuple[Path, list[Seen]], kind: str, stored: str, other: Parallel
) -> None:
    """By its arguments each is this run's own: the values say that it is not."""
    root, ranks = lab.new_root(), saved[1]
    if stored == "converted":
        convert_step(find(saved[0], ReadOptions()), root, ConvertOptions("megatron", fsync=False))
    else:
        ranks = run(lab, muon_jobs.save, TWO, root, stored)
    again = run(lab, muon_jobs.load, other, root, kind)
    assert [one.told for one in again] == [("", "")] * 2
    before, after = (merged([one.look for one in some if one.look], LOOK, MODEL) for some in (ranks, again))
    joins = {key: joined(after["param", key[1]], one) for key, one in after.items() if key[0] == "master"}
    assert joins
    for key, found in {**after, **joins}.items():
        want = before[key]
        if key in joins and stored == WHOLE:
            found, want = _without_halves(found, before["param", key[1]], want)
        elif key in joins:
            want = joined(before["param", key[1]], want)
        assert bits_equal(found, want), key
    if stored == WHOLE:
        assert any("half way between two bf16 numbers" in text for text in again[0].report)


@pytest.mark.parametrize("kind", [WHOLE], indirect=True)
def test_states_that_are_rounded_to_a_narrower_type_are_named(
    lab: Lab, saved: tuple[Path, list[Seen]], kind: str
) -> None:
    """At the layout that was saved too, where each rank reads its own file."""
    said = "rounded to the types in which this run keeps them: "
    halves = ["master in float16, exp_avg in float16, exp_avg_sq in float16"]
    for live, kinds in ((HALF, halves), (kind, [])):
        for rank in run(lab, muon_jobs.load, TWO, saved[0], live):
            assert rank.told == ("", "")
            assert [text.partition(said)[2] for text in rank.report if said in text] == kinds


def _without_halves(found: Any, param: Any, master: Any) -> tuple[Any, Any]:
    """All but masters half way between two bf16 numbers that were rounded to the lower: of those 16 bits hold one less."""
    bits = master.view(torch.int32)
    half = ((bits & 0xFFFF) == 0x8000) & (param.view(torch.int16) == (bits >> 16).to(torch.int16))
    assert half.sum() <= 8
    assert torch.equal(found.view(torch.int32)[half], bits[half] - 1)
    return found[~half], master[~half]


@pytest.mark.slow
@pytest.mark.skipif(not NEWER, reason="run on one version")
def test_groups_that_differ_in_their_rates_alone(lab: Lab) -> None:
    """Of muP: the plain optimizer's file does not say who is in which, and both have the same weight decay."""
    root = lab.new_root()
    ranks = run(lab, muon_jobs.save, TWO, root, muon_jobs.MUP)
    assert verify(actor(root), ReadOptions(), Depth.DEEP).intact
    for other in (TWO, Parallel(tp=2)):
        again = run(lab, muon_jobs.load, other, root, muon_jobs.MUP)
        assert [rank.told for rank in again] == [("", "")] * 2
        before, after = (merged([one.look for one in some if one.look], LOOK, MODEL) for some in (ranks, again))
        assert differences(before, after) == []
        expected = {step: ranks[0].losses[step] for step in (3, 4)}
        assert again[0].losses == (expected if other == TWO else pytest.approx(expected, rel=LOSS_TOLERANCE["bf16"]))


@pytest.mark.slow
def test_an_offloaded_optimizer_in_megatrons_own_files(lab: Lab) -> None:
    """Its groups name classes of torch. Megatron 0.19 goes on right from one kind of its files, 0.16 to 0.18 from none: ours does."""
    root, became = lab.new_root(), lab.new_root()
    through, *again = run(lab, muon_jobs.by_megatron_alone, TWO, root, OFFLOAD)[0]
    expected = {step: through.losses[step] for step in (3, 4)}
    refused = ["Unsupported global: GLOBAL torch.optim.adamw.AdamW" in one.told[1] for one in again]
    assert refused == [
        False,
        muon_jobs.megatron() < (0, 19),
        False,
    ]  # before 0.19 common.pt has its groups, and is read with weights_only
    assert [one.losses == expected for one in again] == [False, not any(refused), False]
    for kind in ("legacy", "fully_reshardable", "dp_reshardable"):
        assert verify(root / kind, ReadOptions(), Depth.DEEP).intact
        assert convert(root / kind, lab.new_root(), ConvertOptions("megatron", fsync=False)).lossless
    assert convert(root / "legacy", became, ConvertOptions("megatron-dist", fsync=False)).lossless
    resumed = run(lab, muon_jobs.go_on_with_megatron, TWO, became, OFFLOAD)[0]
    assert same(through, resumed, LOOK)
    assert resumed.losses == expected


IN_BUCKETS = WriteOptions(optimizer_sharding="dp_reshardable")


@pytest.mark.parametrize("kind", [PRECISE, HALF])
def test_a_precision_aware_run_in_megatrons_own_files(lab: Lab, kind: str) -> None:
    """With remainders Megatron goes on from flat buckets alone; what is made of any of its files it goes on from, bit for bit."""
    root = lab.new_root()
    through, *again = run(lab, muon_jobs.by_megatron_alone, TWO, root, kind)[0]
    expected = {step: through.losses[step] for step in (3, 4)}
    assert [one.told[0] for one in again] == (["AssertionError"] * 2 if kind == PRECISE else [""] * 2) + [""]
    assert [one.losses == expected for one in again] == [kind == HALF] * 2 + [True]
    for stored in ("legacy", "fully_reshardable", "dp_reshardable"):
        assert verify(root / stored, ReadOptions(), Depth.DEEP).intact
        for to, write in (
            ("megatron", WriteOptions()),
            ("megatron-dist", WriteOptions()),
            ("megatron-dist", IN_BUCKETS),
        ):
            became = lab.new_root()
            assert convert(root / stored, became, ConvertOptions(to, write=write, fsync=False)).lossless
            assert verify(became, ReadOptions(), Depth.DEEP).intact
            if kind == HALF or write is IN_BUCKETS:
                resumed = run(lab, muon_jobs.go_on_with_megatron, TWO, became, kind)[0]
                assert same(through, resumed, LOOK), (stored, to, write)
                assert resumed.losses == expected


EXPERTS = replace(MODEL, num_experts=4)


THIN = [Parallel(tp=2, ep=2, etp=1, dp=2, sequence_parallel=True), Parallel(tp=2, etp=1, dp=2, sequence_parallel=True)]


def experts(at: Parallel, *kinds: str) -> Iterator[Any]:
    """Cases of which one is quick."""
    for kind in kinds:
        quick = at.tp == 1 and kind == LAID_OUT
        yield pytest.param(kind, at, id=f"{kind}-ep{at.ep}-etp{at.etp}", marks=[] if quick else pytest.mark.slow)


EXPERT_CASES = [
    case
    for at in (Parallel(dp=2, ep=2), *(THIN if NEWER else []))
    for case in experts(at, *([LAID_OUT] if NEWER else []), PING_PONG, MUON)
] + ([*experts(Parallel(tp=2, ep=2, etp=1, sequence_parallel=True), LAID_OUT)] if NEWER else [])


@pytest.mark.parametrize(("kind", "both"), EXPERT_CASES)
def test_experts_that_are_dealt_too(lab: Lab, kind: str, both: Parallel) -> None:
    """At EP 2 bit for bit, and at EP 1, where the experts' own data-parallel ranks are others."""
    root = lab.new_root()
    ranks = run(lab, muon_jobs.save, both, root, kind, model=EXPERTS)
    assert verify(actor(root), ReadOptions(), Depth.DEEP).intact
    for rank, again in zip(ranks, run(lab, muon_jobs.load, both, root, kind, model=EXPERTS), strict=True):
        assert again.told == ("", "")
        assert same(rank, again, LOOK)
        assert again.losses.items() <= rank.losses.items()
    others = run(lab, muon_jobs.load, TWO, root, kind, model=EXPERTS)
    assert [rank.told for rank in others] == [("", "")] * 2
    before, after = (merged([one.look for one in some if one.look], LOOK, EXPERTS) for some in (ranks, others))
    assert any(".experts." in name for state, name in before if state == "momentum_buffer")
    assert differences(before, after) == []


@pytest.mark.slow
@pytest.mark.skipif(muon_jobs.megatron() < (0, 19), reason="experts that are cut otherwise are apart since 0.19")
def test_masters_that_megatron_lets_go_stale(lab: Lab) -> None:
    """Where one rank has the dense parameters and two an expert, both train all of it: what they hold resumes, and reshapes not."""
    root, thin = lab.new_root(), Parallel(tp=2, etp=1, sequence_parallel=True)
    ranks = run(lab, muon_jobs.save, thin, root, LAID_OUT, model=EXPERTS)
    for rank, again in zip(ranks, run(lab, muon_jobs.load, thin, root, LAID_OUT, model=EXPERTS), strict=True):
        assert again.told == ("", "")
        assert same(rank, again, LOOK)
        assert again.losses.items() <= rank.losses.items()
    for rank in run(lab, muon_jobs.load, TWO, root, LAID_OUT, model=EXPERTS):
        assert rank.told[0] == "Unsupported"
        assert "at the layout that was saved" in rank.told[1]
