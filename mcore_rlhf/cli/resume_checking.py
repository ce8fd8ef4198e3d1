"""``mcore-rlhf resume-check``: prove that a trainer resumes exactly, by killing it."""

from __future__ import annotations

import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast, get_args

import typer

from mcore_rlhf.errors import UsageError
from mcore_rlhf.manager.prove.check import CheckOptions, ResumeCheck, compare_outputs
from mcore_rlhf.manager.prove.control import make_control
from mcore_rlhf.manager.prove.killing import Moment
from mcore_rlhf.manager.prove.outcome import Control, Interrupted, Outcome
from mcore_rlhf.manager.prove.template import RunPlaces, Template
from mcore_rlhf.manager.prove.watching import root_of
from mcore_rlhf.manager.run import steps as steps_of
from mcore_rlhf.storage.paths import local_path

from . import guard
from .output import console, emit_json
from .render_resume_check import facts_of, print_outcome

_DEMO_PLACES = ("--output-dir", "{dir}", "--steps", "{steps}", "--resume", "{resume}", "--metrics", "{metrics}")


@dataclass(frozen=True, slots=True)
class Demo:
    """The demo's trainer in place of the user's.

    Args:
        algorithm: ``grpo`` or ``ppo``.
        tp: Tensor-parallel ranks.
        pp: Pipeline stages.
    """

    algorithm: str
    tp: int
    pp: int

    def template(self, more: Sequence[str]) -> Template:
        """Its command, with further options of the user."""
        launcher = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(self.tp * self.pp),
        ]
        layout = ["--algorithm", self.algorithm, "--tp", str(self.tp), "--pp", str(self.pp)]
        saving = ["--save-interval", "1", "--async-save", "--dropout", "0.1"]
        return Template([*launcher, "-m", "mcore_rlhf.demo.train", *layout, *saving, *_DEMO_PLACES, *more])


@dataclass(frozen=True, slots=True)
class Request:
    """The command line, as it was given; the names are those of the options."""

    command: Sequence[str]
    steps: int
    more: int
    folder: Path | None
    kill_after: str
    runs: int
    seed: int
    timeout: float
    ignore: tuple[str, ...]
    environment: bool
    keep: bool
    demo: bool
    algorithm: str
    tp: int
    pp: int
    print_commands: bool
    make_control: tuple[Path, Path] | None
    compare: tuple[Path, Path] | None
    control: Path | None
    stubs: tuple[str, ...]
    json: bool

    def options(self) -> CheckOptions:
        """How to check.

        Raises:
            UsageError: A word is not one of those that are known.
        """
        _one_of("--kill-after", self.kill_after, get_args(Moment))
        moment = cast(Moment, self.kill_after)
        return CheckOptions(self.steps, self.more, moment, self.runs, self.seed, self.timeout, self.ignore, self.stubs)

    def template(self) -> Template:
        """The command.

        Raises:
            UsageError: The demo's algorithm is not known.
        """
        if not self.demo:
            return Template(self.command, self.environment)
        _one_of("--algorithm", self.algorithm, ("grpo", "ppo"))
        return Demo(self.algorithm, self.tp, self.pp).template(self.command)


def _one_of(option: str, word: str, known: Sequence[str]) -> None:
    if word not in known:
        raise UsageError(f"{option}: expected one of {', '.join(known)}, found {word!r}")


def dispatch(request: Request) -> None:
    """Do what the command line asks for.

    Raises:
        UsageError: It asks for things that exclude each other.
        typer.Exit, CheckpointError: See the functions below.
    """
    modes = [request.print_commands, request.make_control is not None, request.compare is not None]
    if sum(modes) > 1:
        raise UsageError("--print-commands, --make-control and --compare exclude one another")
    if request.control is not None and request.compare is None:
        raise UsageError("--control names a finished control run; it goes with --compare")
    if (request.make_control or request.compare) and (request.command or request.demo):
        raise UsageError("--make-control and --compare run nothing: leave the command away")
    if request.make_control is not None:
        break_copy(*request.make_control, request.stubs)
    elif request.compare is not None:
        compare(*request.compare, request.control, request.options(), request.json)
    elif request.print_commands:
        print_commands(request.template(), request.folder or Path("resume-check"), request.options())
    else:
        run(request.template(), request.folder, request.options(), request.keep, request.json)


def run(template: Template, folder: Path | None, options: CheckOptions, keep: bool, json: bool) -> None:
    """Do the runs, compare, and say what came of it.

    Args:
        template: The command.
        folder: Where to work; None for a folder that is removed again when all is well.
        options: How to check.
        keep: Whether checkpoints and metrics stay although all is well.
        json: For machines.

    Raises:
        typer.Exit: With code 1, where the resume is not exact, or the check is blind.
        CheckpointError: See :meth:`~.ResumeCheck.run`.
    """
    template.check()
    place = local_path(folder).absolute() if folder is not None else Path(tempfile.mkdtemp(prefix="resume-check-"))
    try:
        outcome = ResumeCheck(template, place, options, _say).run()
    except KeyboardInterrupt as stop:
        signum = stop.args[0] if stop.args else signal.SIGINT
        raise guard.Interrupted(f"all processes were ended; logs are in {place}", signum) from None
    if outcome.passed and not keep:
        _clear(place, everything=folder is None)
        outcome.folder = folder
    _show(outcome, json)


def _say(line: str) -> None:
    typer.echo(line, err=True)


def _clear(place: Path, everything: bool) -> None:
    """Remove the checkpoints; logs and metrics stay in a folder that the user named."""
    for path in [place] if everything else [path for path in place.iterdir() if path.is_dir()]:
        shutil.rmtree(path, ignore_errors=True)


def compare(a: Path, b: Path, control: Path | None, options: CheckOptions, json: bool) -> None:
    """Compare runs that were done by hand.

    Args:
        a: Output folder of the uninterrupted run.
        b: Output folder of the one that was killed and resumed.
        control: Output folder of the broken control, or None.
        options: Steps, and what is ignored.
        json: For machines.

    Raises:
        typer.Exit: With code 1, where something differs, or the control does not.
        CheckpointError: A folder holds no such step, or a damaged one.
    """
    a, b = local_path(a).absolute(), local_path(b).absolute()
    other = Interrupted(compare_outputs(a, b, options.last, options))
    caught = (
        Control(compare_outputs(a, local_path(control).absolute(), options.last, options))
        if control is not None
        else None
    )
    _show(Outcome(options.steps, options.more, [other], caught), json)


def break_copy(source: Path, target: Path, stubs: tuple[str, ...]) -> None:
    """Make the broken control of a killed run, by hand.

    Raises:
        CheckpointError: The run has committed nothing, or the target exists.
    """
    source, target = local_path(source).absolute(), local_path(target).absolute()
    committed = steps_of.committed(root_of(source))
    if not committed:
        raise UsageError(f"{source}: has committed no step yet")
    broken = make_control(source, target, committed[-1].step, stubs)
    typer.echo(f"{target}: a copy of {source} with step {committed[-1].step} alone, and broken: {broken}")


def print_commands(template: Template, folder: Path, options: CheckOptions) -> None:
    """Print what to run by hand, where the check cannot start the command itself: on several nodes.

    Args:
        template: The command.
        folder: Where the runs are to work; every node must see it.
        options: How to check.
    """
    template.check()
    runs = {name: RunPlaces(local_path(folder).absolute(), name) for name in "ABC"}
    commands = {name: template.shell(places, options.last) for name, places in runs.items()}
    a, b, c = (shlex.quote(str(runs[name].output)) for name in "ABC")
    numbers = f"--steps {options.steps} --more {options.more}"
    console().print(
        "\n".join(
            [
                "# 1. On every node: run A, uninterrupted.", commands["A"], "",
                f"# 2. On every node: run B. Once `mcore-rlhf steps` lists step {options.steps} of it as committed, and before",
                f"#    step {options.last} is: end all of its processes on all nodes at once with SIGKILL (kill -9).",
                commands["B"], "",
                "# 3. On one node: make the broken control from what the kill left.",
                f"mcore-rlhf resume-check --make-control {b} {c}", "",
                "# 4. On every node: run B again. It must resume by itself.", commands["B"], "",
                "# 5. On every node: run C, the control.", commands["C"], "",
                "# 6. On one node: compare.",
                f"mcore-rlhf resume-check --compare {a} {b} --control {c} {numbers}",
            ]
        )
    )  # fmt: skip


def _show(outcome: Outcome, json: bool) -> None:
    if json:
        emit_json(facts_of(outcome))
    else:
        print_outcome(outcome)
    if not outcome.passed:
        raise typer.Exit(1)
