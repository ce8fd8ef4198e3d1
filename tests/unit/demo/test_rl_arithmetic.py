"""Advantages and losses, against their definitions written out in another way."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mcore_rlhf.demo.rl import losses
from mcore_rlhf.demo.rl.trainer import gumbel

REWARDS = st.lists(st.floats(-2, 2, width=32), min_size=12, max_size=12)


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def mask_of(lengths: list[int], width: int) -> torch.Tensor:
    return (torch.arange(width) < torch.tensor(lengths)[:, None]).float()


def test_group_advantages_by_hand() -> None:
    found = losses.group_advantages(torch.tensor([0.0, 1.0, 1.0, 0.0, 5.0, 5.0, 5.0, 5.0]), 4)
    assert found.tolist() == pytest.approx([-1, 1, 1, -1, 0, 0, 0, 0], abs=1e-5)


@given(REWARDS)
def test_group_advantages_are_standard_scores(rewards: list[float]) -> None:
    found = losses.group_advantages(torch.tensor(rewards), 4).numpy().reshape(3, 4)
    groups = np.array(rewards).reshape(3, 4)
    expected = (groups - groups.mean(1, keepdims=True)) / (groups.std(1, keepdims=True) + 1e-6)
    assert np.allclose(found, expected, rtol=1e-3, atol=1e-2)  # fp32 against fp64: spreads near the epsilon


def test_the_reward_comes_with_the_last_token_and_the_penalty_with_all() -> None:
    mask = mask_of([1, 3, 2], 3)
    kl = torch.tensor([[1.0, 9.0, 9.0], [1.0, 2.0, 3.0], [-1.0, 2.0, 9.0]])
    found = losses.token_rewards(torch.tensor([10.0, 20.0, 0.0]), kl, 0.5, mask)
    assert found.tolist() == [[9.5, 0, 0], [-0.5, -1, 18.5], [0.5, -1, 0]]


@given(st.integers(0, 2**31), st.floats(0, 1), st.floats(0, 1), st.lists(st.integers(1, 5), min_size=3, max_size=3))
def test_gae_is_the_discounted_sum_of_errors(seed: int, discount: float, trace: float, lengths: list[int]) -> None:
    mask = mask_of(lengths, 5)
    rewards, values = random(seed, 3, 5) * mask, random(seed + 1, 3, 5)
    found, returns = losses.gae(rewards, values, mask, discount, trace)
    for row, length in enumerate(lengths):
        reward, value = rewards[row].tolist()[:length], [*values[row].tolist()[:length], 0.0]
        errors = [reward[at] + discount * value[at + 1] - value[at] for at in range(length)]
        for at in range(length):
            expected = sum((discount * trace) ** (later - at) * errors[later] for later in range(at, length))
            assert found[row, at].item() == pytest.approx(expected, abs=1e-4)
            assert returns[row, at].item() == pytest.approx(expected + value[at], abs=1e-4)
        assert not found[row, length:].any()
        assert not returns[row, length:].any()


def test_what_the_critic_says_after_the_end_does_not_count() -> None:
    mask, rewards, values = mask_of([2], 4), torch.zeros(1, 4), torch.ones(1, 4)
    changed = torch.tensor([[1.0, 1.0, 1e9, torch.finfo(torch.float32).max]])
    assert torch.equal(*(losses.gae(rewards, each, mask, 1.0, 0.9)[0] for each in (values, changed)))


@given(st.integers(0, 2**31), st.integers(1, 3))
def test_whitening_sees_all_ranks_and_only_what_counts(seed: int, ranks: int) -> None:
    parts = [(random(seed + rank, 4, 3) * 3 + 2, mask_of([1, 2, 3, 3], 3)) for rank in range(ranks)]
    total = sum((losses.moments(values, mask) for values, mask in parts), torch.zeros(3, dtype=torch.float64))
    white = [losses.whiten(values, mask, total) for values, mask in parts]
    counted = np.concatenate([w[m.bool()].numpy() for w, (_, m) in zip(white, parts, strict=True)]).astype(float)
    assert counted.mean() == pytest.approx(0, abs=1e-5)
    assert counted.std() == pytest.approx(1, abs=1e-4)
    assert not any(w[~m.bool()].any() for w, (_, m) in zip(white, parts, strict=True))


def test_whitening_of_equal_values_is_zero() -> None:
    values, mask = torch.full((2, 2), 0.1), torch.ones(2, 2)
    assert losses.whiten(values, mask, losses.moments(values, mask)).abs().max() < 1e-3


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_log_probs_are_those_of_the_softmax(temperature: float) -> None:
    logits, tokens = random(3, 2, 4, 7), torch.tensor([[0, 6, 3, 3], [1, 2, 3, 4]])
    found = losses.log_probs(logits.bfloat16().float(), tokens, temperature)
    weights = np.exp(logits.bfloat16().double().numpy() / temperature)
    table = np.log(weights / weights.sum(-1, keepdims=True))
    assert np.allclose(found.numpy(), np.take_along_axis(table, tokens.numpy()[..., None], -1)[..., 0], atol=1e-5)


def test_entropy_of_known_distributions() -> None:
    logits = torch.tensor([[[0.0] * 16, [1000.0] + [0.0] * 15]])
    assert losses.entropy(logits, 1.0).tolist() == [[pytest.approx(math.log(16)), pytest.approx(0.0, abs=1e-6)]]


def test_every_answer_has_the_same_weight_however_long() -> None:
    values = torch.tensor([[6.0, 9.0, 9.0], [1.0, 2.0, 3.0]])
    assert losses.masked_mean(values, mask_of([1, 3], 3)).item() == 4.0


def test_the_kl_estimate_is_unbiased_and_never_negative() -> None:
    policy, reference = (torch.log_softmax(random(seed, 9).double(), 0) for seed in (1, 2))
    estimates = losses.kl_estimate(policy, reference)
    assert (estimates >= 0).all()
    assert (policy.exp() * estimates).sum().item() == pytest.approx((policy.exp() * (policy - reference)).sum().item())


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "moves"),
    [(1.0, 2.0, -2.0, True), (1.5, 2.0, -2.4, False), (0.5, 2.0, -1.0, True), (0.5, -2.0, 1.6, False), (1.5, -2.0, 3.0, True)],
)  # fmt: skip
def test_the_policy_moves_no_further_than_the_clip(ratio: float, advantage: float, loss: float, moves: bool) -> None:
    new = torch.tensor([[math.log(ratio)]], requires_grad=True)
    found = losses.policy_losses(new, torch.zeros(1, 1), torch.tensor([[advantage]]), 0.2)
    found.sum().backward()
    assert found.item() == pytest.approx(loss)
    assert new.grad is not None
    assert bool(new.grad.any()) == moves


@pytest.mark.parametrize(
    ("new", "returns", "loss", "moves"), [(0.1, 1.0, 0.405, True), (0.9, 1.0, 0.32, False), (0.9, 0.0, 0.405, True)]
)
def test_the_critic_moves_no_further_than_the_clip(new: float, returns: float, loss: float, moves: bool) -> None:
    value = torch.tensor([[new]], requires_grad=True)
    found = losses.value_losses(value, torch.zeros(1, 1), torch.tensor([[returns]]), 0.2)
    found.sum().backward()
    assert found.item() == pytest.approx(loss)
    assert value.grad is not None
    assert bool(value.grad.any()) == moves


@given(st.lists(st.integers(0, 2**63 - 1), min_size=2, max_size=6))
def test_the_noise_of_a_sample_depends_on_its_seed_alone(seeds: list[int]) -> None:
    before = torch.get_rng_state()
    together = gumbel(seeds, 2, 5)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(gumbel([seed], 2, 5)[0], row) for seed, row in zip(seeds, together, strict=True))
    assert torch.equal(gumbel(seeds[::-1], 2, 5), together.flip(0))
    assert together.isfinite().all()


def test_the_largest_of_logits_plus_noise_is_a_sample_of_the_softmax() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    drawn = (logits + gumbel(range(5000), 1, 4)[:, 0]).argmax(-1).bincount(minlength=4) / 5000
    assert np.allclose(drawn.numpy(), logits.softmax(0).numpy(), atol=0.03)  # four standard errors
