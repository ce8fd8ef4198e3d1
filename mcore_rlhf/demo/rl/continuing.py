"""A stretch of an RL run as a job for :class:`~mcore_rlhf.demo.workers.WorkerPool`: plain values in, plain values out.

This module does not import Megatron until a job runs, so the owner of a pool need not either.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mcore_rlhf.demo import placed_state
from mcore_rlhf.demo.placed_state import PlacedPiece
from mcore_rlhf.demo.rl.options import Options

if TYPE_CHECKING:
    import torch

    from mcore_rlhf.demo.rl.metrics import Value
    from mcore_rlhf.demo.rl.run import Run


@dataclass(frozen=True, slots=True)
class StretchReport:
    """What one rank saw.

    Args:
        lines: The metrics of every step.
        pieces: The actor's parameters, masters and moments at the step that was looked at.
        log_probs: What it said there of fixed answers, by the precision in which it was computed, ``fp64`` and ``fp32``.
    """

    lines: list[dict[str, Value]] = field(default_factory=list)
    pieces: list[PlacedPiece] = field(default_factory=list)
    log_probs: dict[str, torch.Tensor] = field(default_factory=dict)


def go(options: Options, look_at: int, actor: str | None = None) -> StretchReport:
    """Do it, on this rank.

    Args:
        options: The run: where it resumes, and to which step it goes.
        look_at: The step at which the actor is looked at.
        actor: Root of a Megatron checkpoint from which Megatron's own code loads the actor over what was resumed; None
            to leave that as it is.
    """
    from mcore_rlhf.demo.rl.evaluating import fixed_log_probs
    from mcore_rlhf.demo.rl.run import Run

    report = StretchReport()

    def look(run: Run) -> None:
        first = not report.lines and not report.pieces
        if first and actor is not None:
            _replace_actor(run, actor)
        if run.state.iteration == look_at:
            report.pieces.extend(placed_state.pieces(run.models.actor))
            report.log_probs["fp64"] = fixed_log_probs(run.models.actor, "fp64")
            report.log_probs["fp32"] = fixed_log_probs(run.models.actor, "fp32")

    report.lines.extend(Run(options).train(look))
    return report


def _replace_actor(run: Run, root: str) -> None:
    """Load the actor with megatron-core's methods alone, so that what they read is what trains on."""
    import torch

    from mcore_rlhf.demo import megatron_checkpoint

    actor = run.models.actor
    with torch.no_grad():
        for chunk in actor.chunks:
            for param in chunk.parameters():
                param.fill_(torch.nan)  # what is not loaded will be seen
    if actor.scheduler is not None:
        actor.scheduler.num_steps = 0  # Megatron's load_state_dict adds the steps that it loads
    megatron_checkpoint.load(actor, root, rng=False)
