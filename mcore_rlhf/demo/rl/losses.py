"""Advantages and losses of GRPO and PPO.

Advantages say how good an answer was, compared with what was to be expected: GRPO's groups and PPO's GAE. Losses are of tensors
of (samples, answer), averaged over an answer's tokens, then over answers.
"""

from __future__ import annotations

import torch

_EPSILON = 1e-6


def group_advantages(rewards: torch.Tensor, group_size: int) -> torch.Tensor:
    """GRPO: rewards as standard scores within the answers of one prompt.

    Args:
        rewards: fp32, (prompts · group_size,); a prompt's answers are neighbours.
        group_size: Answers per prompt.

    Returns:
        The same shape. A group whose rewards are all equal has advantage 0: nothing can be learned from it.
    """
    groups = rewards.view(-1, group_size)
    centred = groups - groups.mean(dim=1, keepdim=True)
    return (centred / (groups.std(dim=1, keepdim=True, unbiased=False) + _EPSILON)).view(-1)


def token_rewards(rewards: torch.Tensor, kl: torch.Tensor, kl_coef: float, mask: torch.Tensor) -> torch.Tensor:
    """PPO: what each token earns, the KL penalty at every token and the answer's reward at the last.

    Args:
        rewards: fp32, (samples,).
        kl: log π − log π_ref of every sampled token; fp32, (samples, answer).
        kl_coef: Coefficient of the penalty.
        mask: 1 up to the answer's end; fp32, (samples, answer).

    Returns:
        fp32, (samples, answer), 0 after the end.
    """
    earned = -kl_coef * kl * mask
    last = mask.sum(dim=1).long() - 1
    return earned.scatter_add(1, last[:, None], rewards[:, None])


def gae(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, discount: float, gae_lambda: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalized advantage estimation (Schulman et al., 2015).

    Args:
        rewards: Per token; fp32, (samples, answer).
        values: The critic's, before each token; the same shape.
        mask: 1 up to the answer's end; the same shape. Nothing after it is bootstrapped from.
        discount: Discount of later rewards.
        gae_lambda: 0 trusts the critic alone, 1 the rewards alone.

    Returns:
        Advantages and returns (advantages + values), both 0 after the end.
    """
    values = values * mask
    following = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], dim=1)
    errors = (rewards + discount * following - values) * mask
    advantages = torch.zeros_like(values)
    running = torch.zeros_like(values[:, 0])
    for position in reversed(range(values.shape[1])):
        running = errors[:, position] + discount * gae_lambda * running
        advantages[:, position] = running
    advantages = advantages * mask
    return advantages, advantages + values


def moments(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Sum, sum of squares and number of the masked values: what ranks add up before :func:`whiten`.

    Returns:
        fp64, (3,).
    """
    wide = values.double() * mask
    return torch.stack([wide.sum(), (wide * wide).sum(), mask.double().sum()])


def whiten(values: torch.Tensor, mask: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Shift and scale to mean 0 and variance 1 over the global batch.

    Args:
        values: fp32, (samples, answer).
        mask: 1 up to the answer's end; the same shape.
        total: Sum over all ranks of their :func:`moments`.
    """
    mean = total[0] / total[2]
    variance = (total[1] / total[2] - mean * mean).clamp(min=0.0)
    return ((values.double() - mean) / (variance + _EPSILON).sqrt()).float() * mask


def log_probs(logits: torch.Tensor, tokens: torch.Tensor, temperature: float) -> torch.Tensor:
    """Logarithms of the probabilities of tokens.

    Args:
        logits: Over the whole vocabulary, (samples, length, vocabulary).
        tokens: int64, (samples, length).
        temperature: Divides the logits.

    Returns:
        fp32, (samples, length).
    """
    table = torch.log_softmax(logits.float() / temperature, dim=-1)
    return table.gather(-1, tokens[..., None]).squeeze(-1)


def entropy(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Entropy of the distribution of each token, in nats; fp32, (samples, length).

    Args:
        logits: Over the whole vocabulary, (samples, length, vocabulary).
        temperature: Divides the logits.
    """
    table = torch.log_softmax(logits.float() / temperature, dim=-1)
    return -(table.exp() * table).sum(dim=-1)


def masked_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean over the tokens of each answer, then over the answers.

    Args:
        values: fp32, (samples, answer).
        mask: 1 up to the answer's end; the same shape. Every answer has at least one token.

    Returns:
        fp32, ().
    """
    return ((values * mask).sum(dim=1) / mask.sum(dim=1)).mean()


def kl_estimate(new: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Unbiased, never negative estimate of KL(π ‖ π_ref) per token: r − 1 − log r with r = π_ref / π.

    The k3 estimator of http://joschu.net/blog/kl-approx.html, which GRPO uses (DeepSeekMath, equation 4).

    Args:
        new: Log-probabilities of the sampled tokens; fp32, (samples, answer).
        reference: The same of the reference policy.
    """
    difference = reference - new
    return torch.exp(difference) - 1.0 - difference


def policy_losses(new: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, clip_ratio: float) -> torch.Tensor:
    """PPO's clipped surrogate loss per token (Schulman et al., 2017, equation 7), which GRPO shares.

    Args:
        new: Log-probabilities under the policy that is trained; fp32, (samples, answer).
        old: The same under the policy that sampled.
        advantages: fp32, (samples, answer).
        clip_ratio: How far the ratio counts on either side of 1.
    """
    ratio = torch.exp(new - old)
    clipped = ratio.clamp(1.0 - clip_ratio, 1.0 + clip_ratio)
    return -torch.minimum(ratio * advantages, clipped * advantages)


def value_losses(new: torch.Tensor, old: torch.Tensor, returns: torch.Tensor, value_clip: float) -> torch.Tensor:
    """Half the squared error of the values per token, clipped as in PPO's first implementation (openai/baselines).

    Args:
        new: Values of the critic that is trained; fp32, (samples, answer).
        old: The same at sampling.
        returns: What they should have been.
        value_clip: How far a value counts from the old one.
    """
    clipped = old + (new - old).clamp(-value_clip, value_clip)
    return 0.5 * torch.maximum((new - returns) ** 2, (clipped - returns) ** 2)
