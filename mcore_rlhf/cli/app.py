"""The commands: their names, options and help. What they do is in modules of their own, imported when needed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from mcore_rlhf import __version__
from mcore_rlhf.errors import UsageError

from . import options as o
from . import run_commands
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


for _command, _summary in run_commands.COMMANDS:
    app.command(short_help=_summary)(_command)
