"""Losses of GRPO and PPO on tensors of (samples, answer), averaged over an answer's tokens, then over answers."""

from __future__ import annotations

import torch


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
