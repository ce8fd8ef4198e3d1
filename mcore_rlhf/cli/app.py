"""The commands: their names, options and help. What they do is in modules of their own, imported when needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from mcore_rlhf import __version__
from mcore_rlhf.errors import UsageError

from . import options as o
from .completing import completion, names_of_configs, steps_of
from .guard import GuardedGroup


def _print_version(ctx: click.Context, param: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        click.echo(f"mcore-rlhf {__version__}")
        ctx.exit()


app = GuardedGroup(
    "mcore-rlhf",
    help="Inspect, reshape, convert and prove the checkpoints of RLHF runs on Megatron-core, DeepSpeed and FSDP.",
    epilog="Exit codes: 0 done, equal, intact; 1 damaged, different, lossy; 2 usage, not a checkpoint, I/O; 130 interrupted.",
    params=[
        o.flag("--version", help="Print the version.", callback=_print_version, is_eager=True, expose_value=False),
        o.DEBUG_OPTION,
        o.COMPLETION_OPTION,
    ],
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
app.command_class = o.Command

_ROOT = o.argument("ROOT", "The run's root, which holds global_step_N folders.")
_OF_THE_WATCHER = {"step", "newest_intact", "part", "finish", "plan", "overwrite", "verify", "executor", "address"}
"""What of ``convert`` a watcher decides by itself."""
_AT_LEAST_1 = o.Integer(1)
_STEP: dict[str, Any] = {"metavar": "STEP", "type": o.Integer(0), "shell_complete": completion(steps_of)}


class _PatternIsOptional(o.Command):
    """``--tensors`` alone means all of them."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
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


@app.command(
    cls=_PatternIsOptional,
    short_help="Say what a checkpoint is.",
    params=[
        o.CHECKPOINT,
        o.HeadedOption(
            "--tensors", help="List logical tensors; part of a name, or a pattern with *.", metavar="[PATTERN]"
        ),
        *o.table("inspect"),
        o.JSON_OPTION,
    ],
)
def inspect(path: Path, tensors: str | None, json: bool, **given: Any) -> None:
    """Say what a checkpoint is, without reading its tensors: layout, model, optimizer, files."""
    from .inspecting import run

    run(path, o.read_options(given), tensors, json)


@app.command(
    short_help="Print what convert would do, copy by copy.",
    params=[
        o.SOURCE,
        *o.table("plan"),
        o.CONFIG,
        o.flag("--copies", help="Print the copies themselves."),
        o.HeadedOption("--save", help="Save the plan, for convert --plan.", type=o.FOLDER, metavar="FILE"),
        o.PROGRESS_OPTION,
        o.JSON_OPTION,
    ],
)
def plan(config: Path | None, copies: bool, save: Path | None, json: bool, **given: Any) -> None:
    """Print what convert would do, copy by copy if wanted. Nothing is converted, and no tensor is read."""
    from .job import make_job
    from .planning import run

    run(make_job(given, config), copies, json, save)


@app.command(
    short_help="Write a checkpoint anew in another layout.",
    params=[o.SOURCE, o.TARGET, *o.table("convert"), o.CONFIG, o.PROGRESS_OPTION, o.JSON_OPTION],
)
def convert(config: Path | None, json: bool, **given: Any) -> None:
    """Write a checkpoint anew, in another layout, with optimizer and everything else. The source stays as it is."""
    from .converting import run
    from .job import make_job

    run(make_job(given, config), json)


@app.command(
    short_help="Check that a checkpoint is intact.",
    params=[
        o.CHECKPOINT,
        o.flag("--quick", help="Sizes and zip directories only."),
        o.flag("--deep", help="Also replicas, and masters against parameters."),
        *o.table("verify"),
        o.PROGRESS_OPTION,
        o.JSON_OPTION,
    ],
)
def verify(path: Path, quick: bool, deep: bool, json: bool, **given: Any) -> None:
    """Check a checkpoint: every byte's checksum, zip directories, and that the shards make whole tensors."""
    if quick and deep:
        raise UsageError("--quick and --deep contradict each other\nGive one of them, or neither.")
    from mcore_rlhf.verify.checkpoint import Depth

    from .verifying import run

    depth = Depth.QUICK if quick else Depth.DEEP if deep else Depth.FULL
    run(path, o.read_options(given), depth, given["workers"] or o.default_workers(), json)


@app.command(
    "will-resume",
    short_help="Say what a trainer would restore of a checkpoint.",
    params=[
        o.argument("CHECKPOINT", "The root of the trainer's run, or a step.", "path"),
        o.HeadedOption("--trainer", help="Whose loader is asked about.", metavar="NAME[@VERSION]", required=True),
        o.HeadedOption(
            "--config",
            help="The trainer's configuration: YAML, JSON, TOML or arguments.",
            metavar="FILE",
            type=o.FOLDER,
        ),
        o.HeadedOption(
            "--world-size", help="Ranks that are to load. [default: as many as saved]", metavar="N", type=_AT_LEAST_1
        ),
        o.JSON_OPTION,
    ],
)
def will_resume(path: Path, trainer: str, config: Path | None, world_size: int | None, json: bool) -> None:
    """Say what a trainer would restore of a checkpoint, ignore, start anew or refuse, without starting it.

    The exit code is 0 when everything goes on, 1 when something is lost or it cannot resume.
    """
    from .will_resume import run

    run(path, trainer, config, world_size, json)


@app.command(
    short_help="Compare two checkpoints, whatever their layouts.",
    params=[
        o.argument("A", "A checkpoint."),
        o.argument("B", "Another one, in any format and layout."),
        o.HeadedOption(
            "--atol",
            help="Absolute tolerance; without one, bits are compared.",
            metavar="X",
            type=o.Real(0.0),
            default=0.0,
            show_default=True,
        ),
        o.HeadedOption(
            "--rtol",
            help="Relative tolerance.",
            metavar="X",
            type=o.Real(0.0),
            default=0.0,
            show_default=True,
        ),
        o.HeadedOption(
            "--states", help="States to compare, such as param,exp_avg. [default: everything]", metavar="LIST"
        ),
        *o.table("diff"),
        o.PROGRESS_OPTION,
        o.JSON_OPTION,
    ],
)
def diff(a: Path, b: Path, atol: float, rtol: float, states: str | None, json: bool, **given: Any) -> None:
    """Compare two checkpoints: every logical tensor in every state, scheduler, param groups and counters."""
    from mcore_rlhf.verify.differ import Tolerance

    from .comparing import run

    run((a, b), o.read_options(given), Tolerance(atol, rtol), states, json)


@app.command(
    short_help="Draw a checkpoint, a conversion or a run on one HTML page.",
    params=[
        o.argument("PATH...", "A checkpoint, a step or a run's root; or two, to be compared.", "paths", nargs=-1),
        *o.options_of(o.ReportOptions),
        o.PROGRESS_OPTION,
        *o.table("inspect"),
        o.JSON_OPTION,
    ],
)
def report(paths: tuple[Path, ...], json: bool, **given: Any) -> None:
    """Draw a checkpoint, a conversion, a comparison or a run on one HTML page, which needs no network.

    Of one path: its shard map, what it is, and whether it is intact; of a run's root its timeline as well. Of two, both, what
    differs where, and the account, if the second was converted from the first. Drawing reads no tensor; comparing does.
    """
    from .reporting import run

    request = o.taken(o.ReportOptions, given)
    run(paths, o.read_options(given), request, json)


@app.command(
    short_help="Say what this machine and installation are good for.",
    params=[
        o.argument("FOLDER", "Where checkpoints are to lie. [default: here]", required=False, default="."),
        o.JSON_OPTION,
    ],
)
def doctor(folder: Path, json: bool) -> None:
    """Say what this machine, this installation and a folder are good for: versions, speed of checksums, locks, space, extras.

    Where a trainer's run lies in the folder, also what its loader would go on with: see will-resume.

    The exit code is 1 where something that is needed is missing, nothing can be written, or the run does not resume whole.
    """
    from .doctor import run

    run(folder, json)


@app.group(short_help="List and show the jobs and runs that come with it.", cls=o.CommandGroup)
def configs() -> None:
    """List and show the conversion jobs and run configurations that come with the package, for well-known deployments."""


@configs.command("list", params=[o.JSON_OPTION], cls=o.Command)
def list_configs(json: bool) -> None:
    """List them."""
    from .jobs import list_all

    list_all(json)


@configs.command(
    "show",
    params=[o.argument("NAME", "Its name, as the list has it.", kind=str, shell_complete=completion(names_of_configs))],
    cls=o.Command,
)
def show_config(name: str) -> None:
    """Print one."""
    from .jobs import show

    show(name)


@app.command(
    short_help="Train GRPO on real Megatron, kill it, resume, reshape, and prove it.",
    params=[
        o.HeadedOption(
            "folder",
            "--dir",
            help="Where to work, and to leave the checkpoints. [default: removed again]",
            metavar="DIR",
            type=o.FOLDER,
        )
    ],
)
def demo(folder: Path | None) -> None:
    """Train GRPO on real Megatron on the CPU, kill it in the middle of a save, resume and reshape, and show the proof."""
    from mcore_rlhf.demo.command import run_demo, table

    from .output import say

    report = run_demo(folder, lambda line: say(line, err=True))
    say("\n".join(table(report)))
    if not report.passed:
        raise click.exceptions.Exit(1)


@app.command(
    short_help="List the steps of a run, and what each is worth.",
    params=[
        _ROOT,
        o.HeadedOption("--quarantine", help="Tell resume to leave this step alone.", **_STEP),
        o.HeadedOption("--reason", help="Why, with --quarantine.", metavar="TEXT", default=""),
        o.HeadedOption("--release", help="Take this step out of quarantine.", **_STEP),
        *o.table("steps"),
        o.JSON_OPTION,
    ],
)
def steps(root: Path, quarantine: int | None, reason: str, release: int | None, json: bool) -> None:
    """List the steps of a run, oldest first, and what each is worth: committed, damaged, partial, foreign.

    The exit code is 0 when at least one step is committed, otherwise 1.
    """
    from .steps import list_steps

    list_steps(root, quarantine, reason, release, json)


@app.command(
    short_help="Say which finished rollouts wait between two saves.",
    params=[
        _ROOT,
        o.HeadedOption(
            "--max-staleness", help="Count those that are more versions old as stale.", metavar="N", type=o.Integer(0)
        ),
        o.JSON_OPTION,
    ],
)
def journal(root: Path, max_staleness: int | None, json: bool) -> None:
    """Say what producers of rollouts have written beside the steps of a run, and what of it the newest step has not trained on.

    The exit code is 1 where records are damaged, or of another run.
    """
    from .rollouts import show_journal

    show_journal(root, max_staleness, json)


@app.command(
    short_help="Delete the steps that no rule wants to keep.",
    params=[
        _ROOT,
        o.HeadedOption("--keep-last", help="Keep the newest N.", metavar="N", type=_AT_LEAST_1),
        o.HeadedOption("--keep-every", help="Keep multiples of N.", metavar="N", type=_AT_LEAST_1),
        o.HeadedOption(
            "--keep-best",
            help="Keep the best K (1) by a metric, largest (max) or smallest (min); may be repeated.",
            metavar="METRIC[:min|max[:K]]",
            multiple=True,
        ),
        o.HeadedOption("--max-size", help="Of what is kept, delete the oldest beyond this total.", metavar="SIZE"),
        o.flag("--include-damaged", help="Delete damaged and partial steps as well."),
        o.flag("--dry-run", help="Say what would be deleted; delete nothing."),
        o.flag("--no-verify", help="Do not read the newest step that stays before deleting others."),
        o.flag("--dead", help="In a store: remove what writers that are no more have left, after a day."),
        *o.table("prune"),
        o.JSON_OPTION,
    ],
)
def prune(
    root: Path,
    keep_last: int | None,
    keep_every: int | None,
    keep_best: tuple[str, ...],
    max_size: str | None,
    include_damaged: bool,
    dry_run: bool,
    no_verify: bool,
    dead: bool,
    json: bool,
) -> None:
    """Delete the steps that no --keep rule wants. Steps and their exports go together.

    Never deleted: the newest committed step and anything newer, steps in quarantine, steps of other trainers, and what is
    being written. Before anything goes, every byte of the newest step that stays is verified.
    """
    from . import steps

    if dead:
        steps.prune_dead(root, dry_run, json)
        return
    steps.prune(
        root,
        steps.retention_of(keep_last, keep_every, keep_best, max_size),
        include_damaged,
        dry_run,
        json,
        verified=not no_verify,
    )


@app.command(
    short_help="Convert every newly committed step of a run.",
    params=[
        _ROOT,
        *o.options_of(o.WatchOptions),
        *(option for option in o.table("convert") if option.name not in _OF_THE_WATCHER),
        o.CONFIG,
        o.JSON_OPTION,
    ],
)
def watch(root: Path, config: Path | None, json: bool, **given: Any) -> None:
    """Convert every newly committed step of a run, behind its training, into a folder of results.

    One at a time, the newest first, in a process of less priority; each is verified and appears whole. A watcher that was killed goes
    on where it was. It ends at SIGTERM.
    """
    from .watching import run

    watching = o.taken(o.WatchOptions, given)
    code = run(root, given, config, watching, json)
    if code:
        raise click.exceptions.Exit(code)


@app.command(
    short_help="Compute how often to save.",
    params=[
        o.HeadedOption(
            "--root", help="Measure step, save and size from the steps of a run.", metavar="ROOT", type=o.FOLDER
        ),
        *o.options_of(o.CostOptions),
        o.HeadedOption("--every", help="An interval of your own to compare.", metavar="N", type=_AT_LEAST_1),
        o.JSON_OPTION,
    ],
)
def interval(root: Path | None, every: int | None, json: bool, **given: Any) -> None:
    """Compute how often to save: the interval with the least expected cost, beside Young's and Daly's."""
    from .intervals import run

    run(root, o.taken(o.CostOptions, given), every, json)


@app.command(
    "resume-check",
    short_help="Prove that a trainer resumes exactly, by killing it.",
    params=[
        o.argument(
            "-- COMMAND...",
            "Behind --: the command, with {dir}, {steps}, {resume} and {metrics}.",
            "command",
            str,
            required=False,
            nargs=-1,
        ),
        *o.options_of(o.ResumeCheckOptions),
        *o.table("resume-check"),
        o.JSON_OPTION,
    ],
)
def resume_check(command: tuple[str, ...], json: bool, **given: Any) -> None:
    """Prove that a trainer resumes exactly: run it N+M steps, run it again, kill it after N, resume, and compare every bit.

    A third run resumes from a step of which one tensor was broken on purpose; if that is not noticed either, the check is
    blind and fails. The exit code is 0 when all is equal and the control was caught, 1 when not, 2 when the command failed.
    """
    from .resume_checking import dispatch

    request = o.taken(o.ResumeCheckOptions, given)
    dispatch(command, request, o.read_options(given).stubs, json)


@app.command(
    short_help="Verify another trainer's step, and commit it.",
    params=[
        o.argument("STEP", "A step's folder, global_step_N, without a manifest."),
        o.flag("--deep", help="Also compare replicas, and masters with parameters."),
        *o.table("adopt"),
        o.PROGRESS_OPTION,
        o.JSON_OPTION,
    ],
)
def adopt(step: Path, deep: bool, json: bool, **given: Any) -> None:
    """Verify a step that another trainer wrote, and give it a manifest, so that it counts as committed.

    Every model, state file and byte is checked first; a damaged step is refused, and nothing is written then.
    """
    from .steps import adopt_step

    adopt_step(step, o.read_options(given), deep, given["workers"] or o.default_workers(), json)
