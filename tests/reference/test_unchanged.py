"""A conversion that changes nothing: with dropout and the saved random states, training cannot be told from before."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mcore_rlhf.demo.configs import Parallel, TinyGPT, Training
from tests.reference.lab import Lab
from tests.reference.merge import differences
from tests.reference.observing import END, LOOK

GPT = TinyGPT(dropout=0.1)
RUNS = {
    "cube": (GPT, Parallel(tp=2, pp=2, dp=2), Training()),
    "tied_virtual_stages": (replace(GPT, untie_embeddings_and_output_weights=False), Parallel(pp=2, vpp=2), Training()),
    "plain": (GPT, Parallel(tp=2), Training(optimizer="plain")),
    "experts": (
        replace(GPT, num_experts=4),
        Parallel(ep=2, dp=2),
        Training(overlap_grad_reduce=True, ddp_bucket_size=5000),
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_losses_are_equal_to_the_last_bit(name: str, lab: Lab) -> None:
    model, parallel, training = RUNS[name]
    source = lab.train(model, parallel, training)
    root, job = lab.reshape(source.root)
    resumed = lab.resume(root, model, parallel, training)
    assert job.lossless
    assert differences(source.models[LOOK], resumed.models[LOOK]) == []
    assert resumed.losses == {step: source.losses[step] for step in (3, 4)}
    assert differences(source.models[END], resumed.models[END]) == []
    assert resumed.wrong_arguments == [{}] * parallel.world_size
    assert (resumed.groups, resumed.scheduler) == (source.groups, source.scheduler)


def test_dropout_makes_the_random_states_matter(lab: Lab) -> None:
    """Otherwise the test above would prove nothing about them."""
    model, parallel, training = RUNS["plain"]
    source = lab.train(model, parallel, training)
    root, _ = lab.reshape(source.root, rng="derive")
    resumed = lab.resume(root, model, parallel, training)
    assert differences(source.models[LOOK], resumed.models[LOOK]) == []
    assert resumed.evaluation == source.evaluation
    assert resumed.losses[3] != source.losses[3]
