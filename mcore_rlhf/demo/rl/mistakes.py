"""What is wrong with a command line of the trainer, in its own words, before Megatron answers with an assertion."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from mcore_rlhf.demo.configs import TinyGPT
from mcore_rlhf.errors import CheckpointError

if TYPE_CHECKING:
    from mcore_rlhf.demo.rl.options import Options

_HEADS = TinyGPT().num_attention_heads
_LARGEST_SEED = 2**32 - 1  # NumPy's
_SCHEDULE = (
    "This trainer goes on with the schedule that the run began with: give --lr, --lr-decay-steps, --prompts-per-step and "
    "--group-size as then, or begin a new run: --resume none, and an --experiment-name of its own."
)


def mistakes(options: Options) -> Iterator[str]:
    """All that cannot be, one line each, as far as the command line alone can tell."""
    yield from _of_numbers(options)
    yield from _of_layout(options)
    yield from _of_resume(options.resume)


def _of_numbers(options: Options) -> Iterator[str]:
    if not 0 <= options.dropout < 1:
        yield f"--dropout: expected a probability from 0 to less than 1, found {options.dropout}"
    if not (math.isfinite(options.lr) and options.lr > 0):
        yield f"--lr: expected a positive number, found {options.lr}"
    if options.lr_decay_steps <= options.warmup_steps:
        least = options.warmup_steps + 1
        yield f"--lr-decay-steps: expected at least {least}, one more than the warm-up takes, found {options.lr_decay_steps}"
    largest = _LARGEST_SEED - 100 * (options.pp - 1)  # Megatron adds 100 per pipeline stage
    if not 0 <= options.seed <= largest:
        yield f"--seed: expected a number from 0 to {largest}, found {options.seed}"


def _of_layout(options: Options) -> Iterator[str]:
    if _HEADS % options.tp:
        yield f"--tp: expected a divisor of the {_HEADS} attention heads, found {options.tp}"
    if options.hidden_size < _HEADS:
        yield f"--hidden-size: expected at least {_HEADS}, the number of attention heads, found {options.hidden_size}"
    if options.vpp is None:
        return
    if options.pp == 1:
        yield f"--vpp: {options.vpp} model chunks per stage need more than one stage: give --pp as well, or leave it out"
    elif options.passes % options.pp:
        yield f"--micro-batches: expected a multiple of --pp {options.pp} with --vpp, found {options.passes}"


def _of_resume(resume: str) -> Iterator[str]:
    """A run has several models, the frozen reference at least."""
    if resume.strip().lower() in ("", "auto", "none", "null") or resume.strip().isdecimal():
        return
    from mcore_rlhf.formats.registry import FORMATS

    path = Path(os.path.expandvars(resume.strip())).expanduser().absolute()
    if not path.is_dir() or not any(known.detect(path) for known in FORMATS):
        return
    step = _step_around(path)
    if step is None:
        where = "give a step's folder, global_step_N; mcore-rlhf convert writes one where no --role is given"
    else:
        where = f"give the step's folder: {step}"
    yield f"--resume: {path} is one model, and a run has several; {where}"


def _step_around(path: Path) -> Path | None:
    """The step that a role's folder, or an iteration in one, belongs to."""
    from mcore_rlhf.manager.run.steps import MANIFEST, step_of

    return next((each for each in path.parents[:2] if step_of(each) is not None or (each / MANIFEST).is_file()), None)


def in_own_words(error: CheckpointError) -> CheckpointError:
    """An error of a resume, without advice that only a trainer with more options could follow."""
    lines = str(error).splitlines()
    if not any("override_opt_param_scheduler" in line for line in lines):
        return error
    return type(error)("\n".join(_SCHEDULE if "override_opt_param_scheduler" in line else line for line in lines))
