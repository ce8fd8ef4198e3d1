"""Broken conversions, to show that the comparison of the other tests can fail."""

from __future__ import annotations

import pytest

from mcore_rlhf.demo.configs import Parallel, TinyGPT, Training
from tests.reference.lab import Lab, Trained
from tests.reference.merge import differences
from tests.reference.observing import END, LOOK
from tests.reference.tampering import change_one_moment, rank_file, swap_gate_and_up

GPT = TinyGPT(vocab_size=190, dropout=0.0)
HERE, THERE = Parallel(tp=2), Parallel(dp=2)


@pytest.fixture(scope="module")
def source(lab: Lab) -> Trained:
    return lab.train(GPT, HERE, Training())


def test_one_changed_bit_of_a_moment_is_noticed(source: Trained, lab: Lab) -> None:
    root, _ = lab.reshape(source.root, tp=1, dp=2)
    change_one_moment(rank_file(root, "distrib_optim.pt"))
    resumed = lab.resume(root, GPT, THERE, Training())
    [difference] = differences(source.models[LOOK], resumed.models[LOOK])
    assert "exp_avg" in difference


def test_swapped_gate_and_up_are_noticed(source: Trained, lab: Lab) -> None:
    """On the layout of the source, where the slightest difference in the loss counts."""
    root, _ = lab.reshape(source.root)
    lab.pool.run(swap_gate_and_up, rank_file(root, "model_optim_rng.pt"), world_size=1)
    resumed = lab.resume(root, GPT, HERE, Training())
    [difference] = differences(source.models[LOOK], resumed.models[LOOK])
    assert "'param', 'decoder.layers.0.mlp.linear_fc1.weight'" in difference
    assert resumed.evaluation != source.evaluation


def test_a_lost_optimizer_is_noticed(source: Trained, lab: Lab) -> None:
    """What Megatron's own converter does: weights only. Training goes on, but not as before."""
    root, job = lab.reshape(source.root, no_optimizer=True)
    assert not job.lossless
    resumed = lab.resume(root, GPT, HERE, Training(optimizer="none"))
    assert {state for state, _ in resumed.models[LOOK]} == {"param"}
    assert any("exp_avg" in text for text in differences(source.models[LOOK], resumed.models[LOOK]))
    assert resumed.losses[4] != source.losses[4]
    assert differences(source.models[END], resumed.models[END]) != []
