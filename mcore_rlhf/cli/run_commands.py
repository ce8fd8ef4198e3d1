"""The commands for a run's root: their names, options and help. Each does its work in a module of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from . import options as o

Root = Annotated[
    Path, typer.Argument(help="The run's root, which holds global_step_N folders.", metavar="ROOT", show_default=False)
]


def steps(
    root: Root,
    quarantine: Annotated[
        int | None, typer.Option(help="Tell resume to leave this step alone.", metavar="STEP", min=0)
    ] = None,
    reason: Annotated[str, typer.Option(help="Why, with --quarantine.", metavar="TEXT", show_default=False)] = "",
    release: Annotated[
        int | None, typer.Option(help="Take this step out of quarantine.", metavar="STEP", min=0)
    ] = None,
    json: o.Json = False,
) -> None:
    """List the steps of a run, oldest first, and what each is worth: committed, damaged, partial, foreign.

    The exit code is 0 when at least one step is committed, otherwise 1.

    Example: mcore-rlhf steps runs/grpo/checkpoints --quarantine 1840 --reason "reward collapsed"
    """
    from .steps import run

    run(root, quarantine, reason, release, json)


def prune(
    root: Root,
    keep_last: Annotated[int | None, typer.Option(help="Keep the newest N.", metavar="N", min=1)] = None,
    keep_every: Annotated[int | None, typer.Option(help="Keep multiples of N.", metavar="N", min=1)] = None,
    keep_best: Annotated[
        list[str] | None,
        typer.Option(
            help="Keep the best K (1) by a metric, largest (max) or smallest (min); may be repeated.",
            metavar="METRIC[:min|max[:K]]",
        ),
    ] = None,
    max_size: Annotated[
        str | None, typer.Option(help="Of what is kept, delete the oldest beyond this total.", metavar="SIZE")
    ] = None,
    include_damaged: Annotated[
        bool, typer.Option("--include-damaged", help="Delete damaged and partial steps as well.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be deleted; delete nothing.")] = False,
    json: o.Json = False,
) -> None:
    """Delete the steps that no --keep rule wants. Steps and their exports go together.

    Never deleted: the newest committed step and anything newer, steps in quarantine, steps of other trainers, and what is
    being written.

    Example: mcore-rlhf prune runs/grpo/checkpoints --keep-last 3 --keep-best reward:max:2 --max-size 500GB --dry-run
    """
    from .pruning import rules, run

    run(root, rules(keep_last, keep_every, keep_best or [], max_size), include_damaged, dry_run, json)


def interval(
    root: Annotated[
        Path | None, typer.Option(help="Measure step, save and size from the steps of a run.", metavar="ROOT")
    ] = None,
    step_seconds: Annotated[float | None, typer.Option(help="Time of a training step.", metavar="S")] = None,
    save_seconds: Annotated[
        float | None, typer.Option(help="Time from the start of a save until it is committed.", metavar="S")
    ] = None,
    stall_seconds: Annotated[
        float | None,
        typer.Option(help="How long an asynchronous save stops training. [default: all of it]", metavar="S"),
    ] = None,
    mtbf_hours: Annotated[
        float | None, typer.Option(help="Mean time between failures of the whole job.", metavar="H")
    ] = None,
    restart_seconds: Annotated[float, typer.Option(help="From a failure until training goes on.", metavar="S")] = 0.0,
    steps: Annotated[int, typer.Option(help="Length of the run.", metavar="N")] = 1000,
    size: Annotated[str | None, typer.Option(help="Size of one step, such as 1.2TB.", metavar="SIZE")] = None,
    keep_last: Annotated[int | None, typer.Option(help="Steps kept at a time, for the disk use.", metavar="N")] = None,
    every: Annotated[int | None, typer.Option(help="An interval of your own to compare.", metavar="N", min=1)] = None,
    json: o.Json = False,
) -> None:
    """Compute how often to save: the interval with the least expected cost, beside Young's and Daly's.

    Example: mcore-rlhf interval --step-seconds 45 --save-seconds 60 --stall-seconds 2 --mtbf-hours 8 --size 1.2TB
    """
    from .intervals import Given, run

    given = Given(step_seconds, save_seconds, stall_seconds, mtbf_hours, restart_seconds, steps, size, keep_last)
    run(root, given, every, json)


def adopt(
    step: Annotated[
        Path,
        typer.Argument(help="A step's folder, global_step_N, without a manifest.", metavar="STEP", show_default=False),
    ],
    deep: Annotated[bool, typer.Option("--deep", help="Also compare replicas, and masters with parameters.")] = False,
    rules: o.RulesFile = None,
    stub: o.Stubs = None,
    workers: o.Workers = None,
    json: o.Json = False,
) -> None:
    """Verify a step that another trainer wrote, and give it a manifest, so that it counts as committed.

    Every model, state file and byte is checked first; a damaged step is refused, and nothing is written then.

    Example: mcore-rlhf adopt runs/grpo/checkpoints/global_step_1840
    """
    from .adopting import run

    run(step, o.read_options(None, None, rules, stub), deep, workers or o.default_workers(), json)


COMMANDS: tuple[tuple[Callable[..., None], str], ...] = (
    (steps, "List the steps of a run, and what each is worth."),
    (prune, "Delete the steps that no rule wants to keep."),
    (interval, "Compute how often to save."),
    (adopt, "Verify another trainer's step, and commit it."),
)
