"""The commands: their names, options and help. What they do is in modules of their own, imported when needed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from mcore_rlhf import __version__
from mcore_rlhf.errors import UsageError

from . import options as o
from .guard import GuardedGroup

app = typer.Typer(
    cls=GuardedGroup,
    help="Inspect, reshape, convert and prove the checkpoints of RLHF runs on Megatron-core and DeepSpeed.",
    epilog="Exit codes: 0 done, equal, intact; 1 damaged, different, lossy; 2 usage, not a checkpoint, I/O; 130 interrupted.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # with it, --help would load rich
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)

Root = Annotated[
    Path, typer.Argument(help="The run's root, which holds global_step_N folders.", metavar="ROOT", show_default=False)
]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"mcore-rlhf {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
    debug: o.Debug = False,
) -> None:
    pass


class _PatternIsOptional(TyperCommand):
    """``--tensors`` alone means all of them."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Fill in the pattern where it was left out."""
        return super().parse_args(ctx, with_pattern(args))


def with_pattern(args: list[str]) -> list[str]:
    """Arguments in which ``--tensors`` has a pattern: what follows it is none if it is an option or the checkpoint."""
    if "--tensors" not in args:
        return args
    at = args.index("--tensors") + 1
    before, after = args[:at], args[at:]
    has_path = any(Path(arg).exists() for arg in before)
    if not after or after[0].startswith("-") or (not has_path and Path(after[0]).exists()):
        return [*before, "*", *after]
    return args


@app.command(cls=_PatternIsOptional, short_help="Say what a checkpoint is.")
@o.takes("inspect")
def inspect(
    path: o.CheckpointPath,
    tensors: Annotated[
        str | None,
        typer.Option(help="List logical tensors; part of a name, or a pattern with *.", metavar="[PATTERN]"),
    ] = None,
    json: o.Json = False,
    **given: Any,
) -> None:
    """Say what a checkpoint is, without reading its tensors: layout, model, optimizer, files."""
    from .inspecting import run

    run(path, o.read_options(given), tensors, json)


@app.command(short_help="Print what convert would do, copy by copy.")
@o.takes("plan")
def plan(
    source: o.SourceFolder = None,
    config: o.Config = None,
    copies: Annotated[bool, typer.Option("--copies", "-v", help="Print the copies themselves.")] = False,
    json: o.Json = False,
    **given: Any,
) -> None:
    """Print what convert would do, copy by copy if wanted. Nothing is written, and no tensor is read."""
    from .job import make_job
    from .planning import run

    run(make_job({"source": source, **given}, config), copies, json)


@app.command(short_help="Write a checkpoint anew in another layout.")
@o.takes("convert")
def convert(
    source: o.SourceFolder = None,
    target: o.TargetFolder = None,
    config: o.Config = None,
    json: o.Json = False,
    **given: Any,
) -> None:
    """Write a checkpoint anew, in another layout, with optimizer and everything else. The source stays as it is."""
    from .converting import run
    from .job import make_job

    run(make_job({"source": source, "target": target, **given}, config), json)


@app.command(short_help="Check that a checkpoint is intact.")
@o.takes("verify")
def verify(
    path: o.CheckpointPath,
    quick: Annotated[bool, typer.Option("--quick", help="Sizes and zip directories only.")] = False,
    deep: Annotated[bool, typer.Option("--deep", help="Also replicas, and masters against parameters.")] = False,
    json: o.Json = False,
    **given: Any,
) -> None:
    """Check a checkpoint: every byte's checksum, zip directories, and that the shards make whole tensors."""
    if quick and deep:
        raise UsageError("--quick and --deep contradict each other\nGive one of them, or neither.")
    from mcore_rlhf.verify.checkpoint import Depth

    from .verifying import run

    depth = Depth.QUICK if quick else Depth.DEEP if deep else Depth.FULL
    run(path, o.read_options(given), depth, given["workers"] or o.default_workers(), json)


@app.command(short_help="Compare two checkpoints, whatever their layouts.")
@o.takes("diff")
def diff(
    a: Annotated[Path, typer.Argument(help="A checkpoint.", metavar="A", show_default=False)],
    b: Annotated[Path, typer.Argument(help="Another one, in any format and layout.", metavar="B", show_default=False)],
    atol: Annotated[
        float, typer.Option(help="Absolute tolerance; without one, bits are compared.", metavar="X", min=0.0)
    ] = 0.0,
    rtol: Annotated[float, typer.Option(help="Relative tolerance.", metavar="X", min=0.0)] = 0.0,
    states: Annotated[
        str | None, typer.Option(help="States to compare, such as param,exp_avg. [default: everything]", metavar="LIST")
    ] = None,
    json: o.Json = False,
    **given: Any,
) -> None:
    """Compare two checkpoints: every logical tensor in every state, scheduler, param groups and counters."""
    from mcore_rlhf.verify.differ import Tolerance

    from .comparing import run

    run((a, b), o.read_options(given), Tolerance(atol, rtol), states, json)


@app.command(short_help="Train GRPO on real Megatron, kill it, resume, reshape, and prove it.")
def demo(
    folder: Annotated[
        Path | None,
        typer.Option(
            "--dir", metavar="DIR", help="Where to work, and to leave the checkpoints. [default: removed again]"
        ),
    ] = None,
) -> None:
    """Train GRPO on real Megatron on the CPU, kill it in the middle of a save, resume and reshape, and show the proof."""
    from mcore_rlhf.demo.command import run_demo, table

    report = run_demo(folder, lambda line: typer.echo(line, err=True))
    typer.echo("\n".join(table(report)))
    if not report.passed:
        raise typer.Exit(1)


@app.command(short_help="List the steps of a run, and what each is worth.")
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
    from .steps import list_steps

    list_steps(root, quarantine, reason, release, json)


@app.command(short_help="Delete the steps that no rule wants to keep.")
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
    no_verify: Annotated[
        bool, typer.Option("--no-verify", help="Do not read the newest step that stays before deleting others.")
    ] = False,
    json: o.Json = False,
) -> None:
    """Delete the steps that no --keep rule wants. Steps and their exports go together.

    Never deleted: the newest committed step and anything newer, steps in quarantine, steps of other trainers, and what is
    being written. Before anything goes, every byte of the newest step that stays is verified.

    Example: mcore-rlhf prune runs/grpo/checkpoints --keep-last 3 --keep-best reward:max:2 --max-size 500GB --dry-run
    """
    from . import steps

    steps.prune(
        root,
        steps.retention_of(keep_last, keep_every, keep_best or [], max_size),
        include_damaged,
        dry_run,
        json,
        verified=not no_verify,
    )


@app.command(short_help="Compute how often to save.")
@o.takes("interval", o.CostOptions, before="every")
def interval(
    root: Annotated[
        Path | None, typer.Option(help="Measure step, save and size from the steps of a run.", metavar="ROOT")
    ] = None,
    every: Annotated[int | None, typer.Option(help="An interval of your own to compare.", metavar="N", min=1)] = None,
    json: o.Json = False,
    **given: Any,
) -> None:
    """Compute how often to save: the interval with the least expected cost, beside Young's and Daly's.

    Example: mcore-rlhf interval --step-seconds 45 --save-seconds 60 --stall-seconds 2 --mtbf-hours 8 --size 1.2TB
    """
    from .intervals import run

    run(root, o.taken(o.CostOptions, given), every, json)


@app.command("resume-check", short_help="Prove that a trainer resumes exactly, by killing it.")
@o.takes("resume-check", o.ResumeCheckOptions)
def resume_check(
    command: Annotated[
        list[str] | None,
        typer.Argument(
            help="Behind --: the command, with {dir}, {steps}, {resume} and {metrics}.",
            metavar="-- COMMAND",
            show_default=False,
        ),
    ] = None,
    json: o.Json = False,
    **given: Any,
) -> None:
    """Prove that a trainer resumes exactly: run it N+M steps, run it again, kill it after N, resume, and compare every bit.

    A third run resumes from a step of which one tensor was broken on purpose; if that is not noticed either, the check is
    blind and fails. The exit code is 0 when all is equal and the control was caught, 1 when not, 2 when the command failed.

    Example: mcore-rlhf resume-check --steps 3 -- torchrun --nproc-per-node 2 train.py --output-dir {dir} --steps {steps}
    """
    from .resume_checking import dispatch

    request = o.taken(o.ResumeCheckOptions, given)
    dispatch(command or [], request, o.read_options(given).stubs, json)


@app.command(short_help="Verify another trainer's step, and commit it.")
@o.takes("adopt")
def adopt(
    step: Annotated[
        Path,
        typer.Argument(help="A step's folder, global_step_N, without a manifest.", metavar="STEP", show_default=False),
    ],
    deep: Annotated[bool, typer.Option("--deep", help="Also compare replicas, and masters with parameters.")] = False,
    json: o.Json = False,
    **given: Any,
) -> None:
    """Verify a step that another trainer wrote, and give it a manifest, so that it counts as committed.

    Every model, state file and byte is checked first; a damaged step is refused, and nothing is written then.

    Example: mcore-rlhf adopt runs/grpo/checkpoints/global_step_1840
    """
    from .steps import adopt_step

    adopt_step(step, o.read_options(given), deep, given["workers"] or o.default_workers(), json)
