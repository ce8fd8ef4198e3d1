"""The GRPO and PPO trainer on real Megatron: it learns, on every layout, and twice the same to the last bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mcore_rlhf.demo.rl.options import Options
from mcore_rlhf.demo.rl.settings import Algorithm
from mcore_rlhf.demo.rl.task import EOS, PAD, Reversal
from mcore_rlhf.demo.workers import WorkerError, WorkerPool
from tests.reference import rl_runs
from tests.reference.rl_runs import Seen, numbers

TIMEOUT = 200.0
SMALL = Options(steps=2, prompts_per_step=4, group_size=4, dropout=0.1)
LAYOUTS = {
    "tp2": (SMALL, 2),
    "tp2-pp2-vpp2-dp2": (replace(SMALL, tp=2, pp=2, vpp=2, layers=4), 8),
    "ppo-tp2-pp2": (replace(SMALL, algorithm="ppo", tp=2, pp=2), 4),
    "ppo-plain-fp32-dp2": (replace(SMALL, algorithm="ppo", dtype="fp32", optimizer="plain"), 2),
}


def run(pool: WorkerPool, options: Options, world: int) -> list[Seen]:
    return pool.run(rl_runs.train, options, world_size=world, timeout=TIMEOUT)


@pytest.mark.parametrize("layout", ["tp2", "ppo-tp2-pp2"])  # the tests of resuming repeat the others
def test_a_run_repeats_itself_and_all_ranks_agree(pool: WorkerPool, layout: str) -> None:
    options, world = LAYOUTS[layout]
    first, second = (run(pool, options, world) for _ in range(2))
    assert [seen.lines for seen in first] == [seen.lines for seen in second]
    assert all((seen.lines, seen.state) == (first[0].lines, first[0].state) for seen in first)
    assert len({line["digest"] for line in first[0].lines}) == options.steps
    assert ("critic_digest" in first[0].lines[0]) == (options.algorithm == "ppo")
    assert all(seen.reference[0] == seen.reference[1] for seen in first)
    heads = [head for seen in first for head in seen.heads]
    assert all(torch.equal(head, heads[0]) for head in heads)
    assert bool(heads) == (options.algorithm == "ppo")


def test_another_seed_is_another_run(pool: WorkerPool) -> None:
    (first,), (second,) = (run(pool, replace(SMALL, seed=seed), 1) for seed in (1, 2))
    assert first.lines[0]["digest"] != second.lines[0]["digest"]
    assert first.lines[0]["prompt_ids"] != second.lines[0]["prompt_ids"]


@pytest.mark.parametrize(("algorithm", "steps", "reached"), [("grpo", 45, 0.6), ("ppo", 45, 0.6)])
def test_it_learns(pool: WorkerPool, algorithm: Algorithm, steps: int, reached: float) -> None:
    (seen,) = run(pool, Options(algorithm=algorithm, steps=steps), 1)
    rewards = numbers(seen.lines, "reward")
    assert rewards[0] < 0.15
    assert sum(rewards[-5:]) / 5 > reached
    kl = numbers(seen.lines, "kl")
    assert kl[0] == 0 < kl[-1]
    assert len(set(numbers(seen.lines, "kl_coef"))) == len(set(numbers(seen.lines, "lr"))) == steps


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_the_first_steps_do_not_depend_on_the_layout(pool: WorkerPool, algorithm: Algorithm) -> None:
    options = replace(SMALL, algorithm=algorithm, dtype="fp32", dropout=0.0, prompts_per_step=8)
    whole = run(pool, options, 1)[0].lines
    near_by_name = {"reward": 1e-12, "loss": 1e-5, "kl": 1e-5, "grad_norm": 1e-3}
    if algorithm == "ppo":
        near_by_name |= {"value_loss": 1e-5, "critic_grad_norm": 1e-3}
    for tp, world in ((1, 2), (2, 2), (2, 4)):
        cut = run(pool, replace(options, tp=tp), world)[0].lines
        for name, near in near_by_name.items():
            assert numbers(cut, name) == pytest.approx(numbers(whole, name), rel=near, abs=near), (tp, world, name)
        assert [line["prompt_ids"] for line in cut] == [line["prompt_ids"] for line in whole]


def test_a_sample_depends_on_its_seed_and_not_on_its_neighbours(pool: WorkerPool) -> None:
    options = replace(SMALL, tp=2, pp=2, micro_batches=2)
    ids, seeds = [42, 7, 42, 99], [11, 12, 13, 11]
    ranks = pool.run(rl_runs.sample, options, ids, seeds, world_size=4, timeout=TIMEOUT)
    (first, *others) = ranks
    assert all(torch.equal(first.tokens, other.tokens) for other in others)
    assert all(torch.equal(first.log_probs, other.log_probs) for other in others)
    turned = pool.run(rl_runs.sample, options, ids[::-1], seeds[::-1], world_size=4, timeout=TIMEOUT)[0]
    assert torch.equal(turned.tokens, first.tokens.flip(0))
    assert not torch.equal(first.tokens[0, 5:], first.tokens[2, 5:])  # the same prompt, another seed
    assert not any(rank.rng_moved for rank in ranks)


def test_what_was_sampled_is_what_the_policy_says_of_it(pool: WorkerPool) -> None:
    task = Reversal()
    (seen,) = pool.run(rl_runs.sample, SMALL, list(range(64)), list(range(64)), world_size=1, timeout=TIMEOUT)
    assert torch.allclose(seen.log_probs, seen.again, atol=1e-3)
    assert (seen.log_probs[seen.mask.bool()] < 0).all()
    for tokens, mask in zip(seen.tokens[:, task.prompt_length :].tolist(), seen.mask.tolist(), strict=True):
        length = int(sum(mask))
        assert mask == [1.0] * length + [0.0] * (len(mask) - length)
        assert tokens[length:] == [PAD] * (len(tokens) - length)
        assert EOS not in tokens[: length - 1]
        assert length == len(tokens) or tokens[length - 1] == EOS


def test_a_world_that_the_layout_does_not_fit_is_refused(pool: WorkerPool) -> None:
    with pytest.raises(WorkerError, match="2 processes cannot be divided into TP4×PP1"):
        run(pool, replace(SMALL, tp=4), 2)
