"""What ranks do and tell in the tests of the RL trainer; Megatron is imported only when a worker runs a job."""

from __future__ import annotations

import contextlib
import io
import logging
import os
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from mcore_rlhf.demo import placed_state
from mcore_rlhf.demo.placed_state import PlacedPiece
from mcore_rlhf.demo.rl.options import Options

if TYPE_CHECKING:
    import torch

    from mcore_rlhf.demo.rl.run import Run

Lines = list[dict[str, Any]]


@dataclass(frozen=True)
class Seen:
    """What one rank saw of a run.

    Args:
        lines: The metrics of every step.
        coordinates: Its place in the layout.
        reference: Digest of the reference policy before and after training.
        state: The RLHF state at the end.
        heads: The critic's value head, where it is.
    """

    lines: Lines
    coordinates: dict[str, int] = field(default_factory=dict)
    reference: tuple[str, str] = ("", "")
    state: str = ""
    heads: list[torch.Tensor] = field(default_factory=list)
    pieces: list[PlacedPiece] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)


def train(options: Options, look_at: int = -1) -> Seen:
    """A whole run, and the pieces of all models as they are at a step."""
    from mcore_rlhf.demo import live_state
    from mcore_rlhf.demo.rl.run import Run

    run = Run(options)
    before = digest_of(run.models.reference)
    pieces: list[PlacedPiece] = []
    steps: list[int] = []

    def look(run: Run) -> None:
        steps.append(run.state.iteration)
        if run.state.iteration == look_at:
            pieces.extend(pieces_of(run))

    lines = run.train(look)
    return Seen(
        lines,
        live_state.coordinates(),
        (before, digest_of(run.models.reference)),
        run.state.to_json(),
        value_heads(run),
        pieces,
        steps,
    )


def pieces_of(run: Run) -> list[PlacedPiece]:
    """This rank's pieces of every trained model, under names that begin with the role."""
    return [
        replace(piece, key=(piece.key[0], f"{role}.{piece.key[1]}"))
        for role, trainer in run.models.trained.items()
        for piece in placed_state.pieces(trainer)
    ]


def disturbed(options: Options) -> Lines:
    """A run in which a single random number too many is drawn at the start, after it has resumed."""
    import torch

    from mcore_rlhf.demo.rl.run import Run

    drawn: list[torch.Tensor] = []
    return Run(options).train(lambda run: None if drawn else drawn.append(torch.rand(1)))


def with_environment(environment: dict[str, str], options: Options) -> Seen:
    """A whole run with variables set."""
    os.environ.update(environment)
    return train(options)


def digest_of(chunks: list[torch.nn.Module]) -> str:
    import hashlib

    import torch

    values = b"".join(
        param.detach().view(torch.uint8).numpy().tobytes() for chunk in chunks for param in chunk.parameters()
    )
    return hashlib.sha256(values).hexdigest()


def value_heads(run: Run) -> list[torch.Tensor]:
    if run.models.critic is None:
        return []
    named = [pair for chunk in run.models.critic.chunks for pair in chunk.named_parameters()]
    return [param.detach().clone() for name, param in named if name.endswith("output_layer.weight")]


@dataclass(frozen=True)
class Sampled:
    """Answers and their log-probabilities, and what another pass says of the latter."""

    tokens: torch.Tensor
    mask: torch.Tensor
    log_probs: torch.Tensor
    again: torch.Tensor
    rng_moved: bool


def sample(options: Options, prompt_ids: list[int], seeds: list[int]) -> Sampled:
    """Sample with new weights, the dropout of training in force."""
    import torch

    from mcore_rlhf.demo.rl.run import Run

    run = Run(options)
    before = torch.get_rng_state()
    rollouts = run.trainer._sampler.rollouts(run.models.actor.chunks, prompt_ids, seeds)
    moved = not torch.equal(before, torch.get_rng_state())
    again = run.trainer._policy.forward(run.models.actor.chunks, {"tokens": rollouts.tokens}, run.trainer._log_probs)
    return Sampled(rollouts.tokens, rollouts.mask, rollouts.log_probs, again * rollouts.mask, moved)


def numbers(lines: Lines, name: str) -> list[float]:
    """A number of every step."""
    return [float(line[name]) for line in lines]


def command(words: list[str]) -> tuple[int, str]:
    """Exit code and output of ``python -m mcore_rlhf.demo.train``, by what it calls; it makes its process group itself."""
    import torch
    import torch.distributed as dist

    from mcore_rlhf.demo.train import main

    dist.destroy_process_group()
    root, said = logging.getLogger(), io.StringIO()
    before, root.handlers = root.handlers, []
    try:
        with contextlib.redirect_stdout(said):
            return main(words), said.getvalue()
    finally:
        root.handlers = before
        torch.use_deterministic_algorithms(False)
