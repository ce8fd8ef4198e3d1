"""The Megatron engine with critics, frozen parameters and models that do not match what was saved."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mcore_rlhf.demo.configs import Parallel, TinyGPT, Training
from mcore_rlhf.demo.placed_state import assembled
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.verify.checkpoint import Depth, verify
from tests.reference import engine_jobs
from tests.reference import engine_model_jobs as jobs
from tests.reference.engine_lab import ADAM, BUCKETS, CUBE, GPT, MOE, PLAIN, SAME_ROWS, TIED, EngineLab
from tests.reference.lab import TIMEOUT, Lab
from tests.reference.merge import bits_equal, differences, merged
from tests.reference.observing import LOOK, Observation, Session

slow = pytest.mark.slow
CRITIC = replace(SAME_ROWS, value_head=True, dropout=0.0)
FROZEN = ("embedding", "layers.0.")


@pytest.fixture(scope="module")
def engine_lab(lab: Lab) -> EngineLab:
    return EngineLab(lab)


def run(lab: Lab, job: Any, session: Session, *args: Any, **options: Any) -> list[Any]:
    return lab.pool.run(job, session, *args, world_size=session.parallel.world_size, timeout=TIMEOUT, **options)


def saved_after_noise(
    lab: Lab, model: TinyGPT, parallel: Parallel, training: Training, **options: Any
) -> tuple[Any, ...]:
    ours, theirs = lab.new_root(), lab.new_root()
    session = Session(model, parallel, training, save=str(theirs))
    return run(lab, jobs.save_after_noise, session, str(ours), **options), ours, theirs


def same_states(ours: list[Observation], theirs: list[Observation]) -> list[str]:
    """What differs, rank by rank, on one layout."""
    return [
        f"rank {rank}: {key}"
        for rank, (a, b) in enumerate(zip(ours, theirs, strict=True))
        for key in a.states[LOOK].keys() | b.states[LOOK].keys()
        if not bits_equal(a.states[LOOK][key], b.states[LOOK][key])
    ]


@pytest.mark.parametrize(("parallel", "training"), [
    (Parallel(tp=2, dp=2), ADAM),
    pytest.param(Parallel(pp=2), PLAIN, marks=slow),
])  # fmt: skip
def test_a_critic_is_saved_and_loaded(parallel: Parallel, training: Training, engine_lab: EngineLab) -> None:
    lab = engine_lab.lab
    saved, ours, _ = saved_after_noise(lab, CRITIC, parallel, training)
    session = Session(CRITIC, parallel, training, load=str(ours))
    assert same_states(saved, run(lab, jobs.load_over_noise, session)) == []
    assert same_states(saved, run(lab, jobs.load_with_megatron, session)) == []
    assert verify(ours, ReadOptions(), Depth.DEEP).intact
    one = run(lab, jobs.load_over_noise, Session(CRITIC, Parallel(), training, load=str(ours)))[0]
    heads = {key: t for key, t in saved[-1].states[LOOK].items() if key[1] == "output_layer.weight"}
    assert {state for state, _ in heads} == {"param", "master", "exp_avg", "exp_avg_sq"}
    assert all(bits_equal(one.states[LOOK][key], tensor) for key, tensor in heads.items())
    whole = merged([without_head(rank) for rank in saved], LOOK, CRITIC)
    assert all(bits_equal(one.states[LOOK][key], tensor) for key, tensor in whole.items())


def without_head(rank: Observation) -> Observation:
    kept = {key: tensor for key, tensor in rank.states[LOOK].items() if key[1] != "output_layer.weight"}
    return replace(rank, states={LOOK: kept})


@slow
def test_a_critic_of_a_tied_model(engine_lab: EngineLab) -> None:
    """Its last stage has a value head where the actor's has a copy of the embedding."""
    lab, model = engine_lab.lab, replace(TIED, value_head=True, dropout=0.0)
    saved, ours, _ = saved_after_noise(lab, model, Parallel(tp=2), ADAM)
    again = run(lab, jobs.load_over_noise, Session(model, Parallel(tp=2), ADAM, load=str(ours)))
    assert same_states(saved, again) == []


@pytest.mark.parametrize("training", [ADAM, pytest.param(PLAIN, marks=slow)])
def test_frozen_parameters(training: Training, engine_lab: EngineLab) -> None:
    lab, parallel = engine_lab.lab, Parallel(tp=2, dp=2)
    saved, ours, theirs = saved_after_noise(lab, GPT, parallel, training, frozen=FROZEN)
    session = Session(GPT, parallel, training, load=str(ours))
    assert ("master", "embedding.word_embeddings.weight") not in saved[0].states[LOOK]
    assert same_states(saved, run(lab, jobs.load_with_megatron, session, frozen=FROZEN)) == []
    if training is ADAM:  # offline, the plain optimizer's states cannot be matched to parameters without --rules
        assert same_states(saved, run(lab, jobs.load_over_noise, session, frozen=FROZEN)) == []
    assert engine_lab.file_differences_of(ours, theirs) == []


@pytest.mark.parametrize(
    ("model", "parallel", "frozen"), [(MOE, Parallel(ep=2, dp=2), (".experts.",)), (GPT, Parallel(tp=2), ("norm",))],
    ids=["experts", "norms"],
)  # fmt: skip
def test_a_frozen_kind_has_no_optimizer_and_no_group(
    model: TinyGPT, parallel: Parallel, frozen: tuple[str, ...], engine_lab: EngineLab
) -> None:
    """Megatron makes none for experts of which none is trained, and no param group for vectors."""
    lab = engine_lab.lab
    saved, _, theirs = saved_after_noise(lab, model, parallel, ADAM, frozen=frozen)
    verdict = verify(theirs, ReadOptions(), Depth.DEEP)
    assert verdict.intact, verdict.problems
    again, job = lab.reshape(theirs)
    assert job.lossless
    found = run(lab, jobs.load_with_megatron, Session(model, parallel, ADAM, load=str(again)), frozen=frozen)
    assert same_states(saved, found) == []


@slow
@pytest.mark.parametrize("target", [Parallel(tp=4), Parallel(pp=2, dp=2), Parallel(tp=2, pp=2, vpp=2)])
def test_pieces_lie_where_megatron_itself_places_them(target: Parallel, engine_lab: EngineLab) -> None:
    """Independent of all names and tables of ours: offsets are those of ``sharded_state_dict``."""
    model = replace(SAME_ROWS, dropout=0.0)
    saved = engine_lab.save(model, CUBE, ADAM)
    expected = placed(engine_lab, Session(model, CUBE, ADAM, load=str(saved.theirs)), engine=False)
    found = placed(engine_lab, Session(model, target, ADAM, load=str(saved.ours)), engine=True)
    assert expected.keys() == found.keys()
    assert [key for key in expected if not bits_equal(expected[key], found[key])] == []


def placed(engine_lab: EngineLab, session: Session, engine: bool) -> dict[Any, Any]:
    pieces = run(engine_lab.lab, jobs.placed_pieces, session, engine=engine)
    return assembled(piece for rank in pieces for piece in rank)


def test_weights_alone(engine_lab: EngineLab) -> None:
    """Masters are copies of the weights, and nothing is left of what the optimizer had gathered."""
    parallel = Parallel(dp=2)
    saved = engine_lab.save(GPT, parallel, ADAM)
    ranks = run(
        engine_lab.lab, jobs.load_over_noise, Session(GPT, parallel, ADAM, load=str(saved.ours)), optimizer=False
    )
    for rank in ranks:
        states = rank.states[LOOK]
        for (state, name), tensor in states.items():
            if state == "master":
                assert bits_equal(tensor, states["param", name].float())
            elif state.startswith("exp_avg"):
                assert not tensor.any()
    whole, expected = merged(ranks, LOOK, GPT), saved.run.models[LOOK]
    assert all(bits_equal(whole[key], expected[key]) for key in expected if key[0] == "param")


WRONG = {
    "another_width": (replace(GPT, ffn_hidden_size=128), Parallel(tp=2), ADAM, "LayoutMismatch",
                      ["decoder.layers.0.mlp.linear_fc1.weight", "decoder.layers.3.mlp.linear_fc2.weight", "(64, 64)"]),
    "other_heads": (replace(GPT, num_attention_heads=8, num_query_groups=4, kv_channels=8), CUBE, ADAM, "LayoutMismatch",
                    ["num_attention_heads: live 8, checkpoint 4", "kv_channels: live 8, checkpoint 16"]),
    "more_layers": (replace(GPT, num_layers=6), Parallel(dp=2), ADAM, "LayoutMismatch",
                    ["decoder layers: live 6, checkpoint 4", "decoder.layers.5.input_layernorm.weight"]),
    "biases": (replace(GPT, add_qkv_bias=True), Parallel(tp=2), ADAM, "LayoutMismatch",
               ["decoder.layers.3.self_attention.linear_qkv.bias", "not in the checkpoint"]),
    "another_schedule": (GPT, CUBE, replace(ADAM, lr=3e-3), "LayoutMismatch", ["learning rate", "0.003", "0.001"]),
    "a_decoupled_rate": (GPT, CUBE, replace(ADAM, decoupled_lr=1e-4), "LayoutMismatch", ["max_lr 0.0001", "0 groups"]),
}  # fmt: skip


@pytest.mark.parametrize("name", ["another_width", *(pytest.param(n, marks=slow) for n in list(WRONG)[1:])])
def test_a_model_that_does_not_match_is_refused_and_left_alone(name: str, engine_lab: EngineLab) -> None:
    saved = engine_lab.save(GPT, CUBE, ADAM)
    model, parallel, training, kind, texts = WRONG[name]
    told = engine_lab.refuse(saved.ours, model, parallel, training)
    assert {error for error, _, _ in told} == {kind}
    assert all(unchanged for _, _, unchanged in told)
    together = "\n".join(message for _, message, _ in told)
    assert [text for text in texts if text not in together] == []


def test_random_states_of_another_layout(engine_lab: EngineLab) -> None:
    """Equal within a tensor-parallel group, apart from the model-parallel one; others for other stages and steps."""
    ranks = run(engine_lab.lab, jobs.derived, Session(GPT, CUBE, ADAM))
    at = {(r["place"]["tp_rank"], r["place"]["pp_rank"], r["place"]["dp_rank"]): r for r in ranks}

    def state(tp: int, pp: int, dp: int, name: str, when: str = "derived") -> bytes:
        value = at[tp, pp, dp][when]
        found = value[name] if name in value else value["tracker"][name]
        return bytes(found.numpy().tobytes())

    assert state(0, 0, 0, "torch") == state(1, 0, 0, "torch") == state(1, 0, 1, "torch") != state(0, 1, 0, "torch")
    assert state(0, 0, 0, "model-parallel-rng") == state(0, 0, 1, "model-parallel-rng")
    assert len({state(tp, pp, 0, "model-parallel-rng") for tp in (0, 1) for pp in (0, 1)}) == 4
    assert state(0, 0, 0, "torch") != state(0, 0, 0, "torch", "later")
    for rank in ranks:
        assert set(rank["derived"]) == {"python", "numpy", "torch", "cuda", "tracker"}
        assert rank["own"].keys() == rank["changed"].keys()
        assert all(bits_equal(rank["changed"][name], value) for name, value in rank["derived"]["tracker"].items())


@pytest.mark.parametrize(("parallel", "training"), [
    (Parallel(tp=2), PLAIN),
    pytest.param(CUBE, ADAM, marks=slow),
    pytest.param(Parallel(ep=2, dp=2), ADAM, marks=slow),
])  # fmt: skip
def test_back_to_a_checkpoint_from_before_the_first_step(
    parallel: Parallel, training: Training, engine_lab: EngineLab
) -> None:
    model = replace(MOE if parallel.ep > 1 else GPT, dropout=0.0)
    root = engine_lab.lab.new_root()
    started = engine_lab.save_at_once(root, model, parallel, training)
    again = run(engine_lab.lab, engine_jobs.load_at_once, Session(model, parallel, training, load=str(root)))
    for first, second in zip(started, again, strict=True):
        assert all(bits_equal(second.states[0][key], tensor) for key, tensor in first.states[0].items())
        assert second.losses == first.losses


@pytest.mark.parametrize(("model", "parallel", "target", "training"), [
    (GPT, Parallel(tp=2), Parallel(pp=2), ADAM),
    pytest.param(MOE, Parallel(pp=2, ep=2, dp=2), Parallel(), BUCKETS, marks=slow),
    pytest.param(TIED, Parallel(pp=2, vpp=2, dp=2), Parallel(tp=2), BUCKETS, marks=slow),
    pytest.param(GPT, Parallel(tp=2, pp=2, pipeline_layout="Et|t|tt|L"), Parallel(), PLAIN, marks=slow),
])  # fmt: skip
def test_a_script_without_args(
    model: TinyGPT, parallel: Parallel, target: Parallel, training: Training, engine_lab: EngineLab
) -> None:
    """What the live objects tell is enough for Megatron's loader, the offline reader, and another layout."""
    lab, root = engine_lab.lab, engine_lab.lab.new_root()
    saved = run(lab, engine_jobs.save_without_args, Session(model, parallel, training), str(root))
    assert verify(root, ReadOptions(), Depth.DEEP).intact
    session = Session(model, parallel, training, load=str(root))
    assert same_states(saved, run(lab, jobs.load_with_megatron, session)) == []
    assert same_states(saved, run(lab, jobs.load_over_noise, session)) == []
    there = run(lab, jobs.load_over_noise, Session(model, target, training, load=str(root)))
    assert differences(merged(saved, LOOK, model), merged(there, LOOK, model)) == []


def test_parameters_that_are_still_to_be_gathered(engine_lab: EngineLab) -> None:
    """With ``--overlap-param-gather`` a rank's parameters are stale between two steps; what is saved is not."""
    lab, parallel, training = engine_lab.lab, Parallel(dp=2), Training(overlap_grad_reduce=True)
    model, root = replace(GPT, dropout=0.0), lab.new_root()
    expected = engine_lab.save(model, parallel, training).run
    ranks = run(lab, jobs.save_while_gathering, Session(model, parallel, training), str(root))
    for rank in ranks:
        assert differences(expected.models[LOOK], merged([rank], LOOK, model)) == []
        assert rank.losses == {**rank.losses, 3: expected.losses[3], 4: expected.losses[4]}
    assert any(differences(expected.models[LOOK], merged([rank], 0, model)) for rank in ranks)
    assert verify(root, ReadOptions(), Depth.DEEP).intact


@slow
def test_states_that_go_in_through_megatrons_own_method(engine_lab: EngineLab) -> None:
    saved, ours, _ = saved_after_noise(engine_lab.lab, GPT, Parallel(tp=2, dp=2), ADAM)
    session = Session(GPT, Parallel(tp=2, dp=2), ADAM, load=str(ours))
    assert same_states(saved, run(engine_lab.lab, jobs.load_through_buffers, session)) == []
