"""``mcore-rlhf resume-check``: prove that a trainer resumes exactly, by killing it."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast, get_args

import click

from mcore_rlhf.errors import UsageError
from mcore_rlhf.manager.prove.check import (
    SAYS,
    CheckOptions,
    CheckOutcome,
    Control,
    KilledRun,
    ResumeCheck,
    RunComparison,
    clear,
    compare_outputs,
)
from mcore_rlhf.manager.prove.command import RunPlaces, Template
from mcore_rlhf.manager.prove.compare import ComparisonTally, Finding
from mcore_rlhf.manager.prove.control import make_control
from mcore_rlhf.manager.prove.facts import facts_of, write_by_rank
from mcore_rlhf.manager.prove.killing import Moment
from mcore_rlhf.manager.prove.places import committed, root_of
from mcore_rlhf.manager.prove.profiles import EXACT, profile_named
from mcore_rlhf.storage.beneath import scratch_folder
from mcore_rlhf.storage.paths import local_path

from . import guard
from .options import ResumeCheckOptions
from .output import Column, count, duration, emit_json, print_facts, print_table, say

_SHOWN = 20
_DEMO_PLACES = ("--output-dir", "{dir}", "--steps", "{steps}", "--resume", "{resume}", "--metrics", "{metrics}")


def demo_template(algorithm: str, tp: int, pp: int, more: Sequence[str]) -> Template:
    """The command of the demo's trainer in place of the user's.

    Args:
        algorithm: ``grpo`` or ``ppo``.
        tp: Tensor-parallel ranks.
        pp: Pipeline stages.
        more: Further options of the user.
    """
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(tp * pp)]
    layout = ["--algorithm", algorithm, "--tp", str(tp), "--pp", str(pp)]
    saving = ["--save-interval", "1", "--async-save", "--dropout", "0.1"]
    return Template([*launcher, "-m", "mcore_rlhf.demo.train", *layout, *saving, *_DEMO_PLACES, *more])


def _check_options(request: ResumeCheckOptions, stubs: tuple[str, ...]) -> CheckOptions:
    """How to check.

    Raises:
        UsageError: A word is not one of those that are known.
    """
    _one_of("--kill-after", request.kill_after, get_args(Moment))
    return CheckOptions(
        steps=request.steps,
        more=request.more,
        kill_after=cast(Moment, request.kill_after),
        runs=request.runs,
        seed=request.seed,
        timeout=request.timeout,
        ignore=tuple(request.ignore or ()),
        stubs=stubs,
        profile=profile_named(request.profile),
    )


def _template(command: Sequence[str], request: ResumeCheckOptions) -> Template:
    """The command to run.

    Raises:
        UsageError: The demo's algorithm is not known.
    """
    if not request.demo:
        return Template(command, request.environment)
    _one_of("--algorithm", request.algorithm, ("grpo", "ppo"))
    return demo_template(request.algorithm, request.tp, request.pp, command)


def _one_of(option: str, word: str, known: Sequence[str]) -> None:
    if word not in known:
        raise UsageError(f"{option}: expected one of {', '.join(known)}, found {word!r}")


def dispatch(command: Sequence[str], request: ResumeCheckOptions, stubs: tuple[str, ...], json: bool) -> None:
    """Do what the command line asks for.

    Raises:
        UsageError: It asks for things that exclude each other.
        click.exceptions.Exit, CheckpointError: See the functions below.
    """
    modes = [request.print_commands, request.make_control is not None, request.compare is not None]
    if sum(modes) > 1:
        raise UsageError("--print-commands, --make-control and --compare exclude one another")
    if request.control is not None and request.compare is None:
        raise UsageError("--control names a finished control run; it goes with --compare")
    if (request.make_control or request.compare) and (command or request.demo):
        raise UsageError("--make-control and --compare run nothing: leave the command away")
    if request.make_control is not None:
        break_copy(*request.make_control, _check_options(request, stubs))
    elif request.compare is not None:
        compare(*request.compare, request.control, _check_options(request, stubs), json)
    elif request.print_commands:
        print_commands(
            _template(command, request), request.folder or Path("resume-check"), _check_options(request, stubs)
        )
    else:
        run(_template(command, request), request.folder, _check_options(request, stubs), request.keep, json)


def run(template: Template, folder: Path | None, options: CheckOptions, keep: bool, json: bool) -> None:
    """Do the runs, compare, and say what came of it.

    Args:
        template: The command.
        folder: Where to work; None for a folder that is removed again when all is well.
        options: How to check.
        keep: Whether checkpoints and metrics stay although all is well.
        json: For machines.

    Raises:
        click.exceptions.Exit: With code 1, where the resume is not exact, or the check is blind.
        CheckpointError: See :meth:`~.ResumeCheck.run`.
    """
    template.check()
    place = local_path(folder).absolute() if folder is not None else scratch_folder("resume-check-")
    try:
        outcome = ResumeCheck(template, place, options, _say).run()
    except KeyboardInterrupt as stop:
        signum = stop.args[0] if stop.args else signal.SIGINT
        raise guard.Interrupted(f"all processes were ended; logs are in {place}", signum) from None
    write_by_rank(outcome, place)
    if outcome.passed and not keep:
        clear(place, everything=folder is None)
        outcome.folder = folder
    _show(outcome, json)


def _say(line: str) -> None:
    say(line, err=True)


def compare(a: Path, b: Path, control: Path | None, options: CheckOptions, json: bool) -> None:
    """Compare runs that were done by hand.

    Args:
        a: Output folder of the uninterrupted run.
        b: Output folder of the one that was killed and resumed.
        control: Output folder of the broken control, or None.
        options: Steps, and what is ignored.
        json: For machines.

    Raises:
        click.exceptions.Exit: With code 1, where something differs, or the control does not.
        CheckpointError: A folder holds no such step, or a damaged one.
    """
    a, b = local_path(a).absolute(), local_path(b).absolute()
    other = KilledRun(compare_outputs(a, b, options.last, options))
    caught = (
        Control(compare_outputs(a, local_path(control).absolute(), options.last, options))
        if control is not None
        else None
    )
    _show(CheckOutcome(options.steps, options.more, [other], caught, profile=options.profile), json)


def break_copy(source: Path, target: Path, options: CheckOptions) -> None:
    """Make the broken control of a killed run, by hand.

    Raises:
        CheckpointError: The run has committed nothing, or the target exists.
    """
    source, target = local_path(source).absolute(), local_path(target).absolute()
    whole = committed(root_of(source))
    if not whole:
        raise UsageError(f"{source}: has committed no step yet")
    broken = make_control(source, target, whole[-1], options.stubs, coarse=options.coarse)
    say(f"{target}: a copy of {source} with step {whole[-1]} alone, and broken: {broken}")


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
    say(f"""\
# 1. On every node: run A, uninterrupted.
{commands["A"]}

# 2. On every node: run B. Once `mcore-rlhf steps` lists step {options.steps} of it as committed, and before
#    step {options.last} is: end all of its processes on all nodes at once with SIGKILL (kill -9).
{commands["B"]}

# 3. On one node: make the broken control from what the kill left.
mcore-rlhf resume-check --make-control {b} {c}

# 4. On every node: run B again. It must resume by itself.
{commands["B"]}

# 5. On every node: run C, the control.
{commands["C"]}

# 6. On one node: compare.
mcore-rlhf resume-check --compare {a} {b} --control {c} {numbers}""")


def _show(outcome: CheckOutcome, json: bool) -> None:
    if json:
        emit_json(facts_of(outcome))
    else:
        _print(outcome)
    if not outcome.passed:
        raise click.exceptions.Exit(1)


def _print(outcome: CheckOutcome) -> None:
    """Print a table of what was compared, what differs, and what to make of it."""
    print_facts(_runs(outcome))
    say()
    columns = [Column("compared with run A"), Column("values", True), Column("equal", True)]
    columns += [Column("within", True)] if outcome.profile != EXACT else []
    print_table([*columns, Column("different", True), Column("")], list(_rows(outcome)))
    if outcome.again is not None:
        _print_table("run D: what was loaded differs from what had been saved", outcome.again.states.tally, True)
    for run in outcome.interrupted:
        _print_findings(run.comparison)
    say()
    if outcome.profile != EXACT:
        say(_within(outcome))
    for note in outcome.notes:
        say(note)
    say(SAYS[outcome.verdict])
    if outcome.folder is not None:
        say(f"Logs and metrics: {outcome.folder}")


def _runs(outcome: CheckOutcome) -> Iterator[tuple[str, str]]:
    seconds = outcome.seconds
    if "A" in seconds:
        yield "run A", f"{outcome.steps + outcome.more} steps uninterrupted, {duration(seconds['A'])}"
    for run in outcome.interrupted:
        name, kill = run.comparison.name, run.kill
        if kill is not None:
            yield f"run {name}", f"killed after {duration(kill.seconds)}, {kill.phase}"
            again = duration(seconds.get(f"{name}-resumed", 0.0))
            yield "", f"resumed from step {kill.resumes_from}, {again}"
    if outcome.again is not None:
        yield "run D", f"loaded step {outcome.again.step} and saved it again, {duration(seconds.get('D', 0.0))}"
    if outcome.control is not None and outcome.control.broken is not None:
        yield "run C", f"resumed from a broken copy, {duration(seconds.get('C', 0.0))}"
        yield "", str(outcome.control.broken)


def _rows(outcome: CheckOutcome) -> Iterator[Sequence[str]]:
    last, exact = outcome.steps + outcome.more, outcome.profile == EXACT
    if (again := outcome.again) is not None:
        what = f"loaded: step {again.step}, {count(again.states.files, 'file')}"
        yield _row(what, again.states.tally, "exact" if again.states.tally.equal else "DIFFERENT", exact)
    for run in outcome.interrupted:
        good = "DIFFERENT" if not run.comparison.equal else "exact" if exact else "within"
        yield from _comparison_rows(f"run {run.comparison.name}", run.comparison, good, last, exact)
    if outcome.control is not None:
        caught = "caught" if outcome.control.caught else "NOT CAUGHT"
        yield from _comparison_rows("control", outcome.control.comparison, caught, last, exact)


def _comparison_rows(name: str, found: RunComparison, verdict: str, last: int, exact: bool) -> Iterator[Sequence[str]]:
    states = found.states
    yield _row(f"{name}: step {last}, {count(states.files, 'file')}", states.tally, verdict, exact)
    for rank, metrics in found.ranks.items():
        lines, repeated = count(metrics.lines, "line"), metrics.repeated
        again = f", {repeated} of them done again" if repeated else ""
        whose = f" of rank {rank}" if rank else ""
        yield _row(f"{name}: metrics{whose}, {lines}{again}", metrics.tally, "", exact)


def _row(what: str, tally: ComparisonTally, verdict: str, exact: bool) -> Sequence[str]:
    equal = count(tally.compared - tally.differing - tally.within)
    within = [] if exact else [count(tally.within)]
    return what, count(tally.compared), equal, *within, count(tally.differing), verdict


def _print_findings(found: RunComparison) -> None:
    for rank, metrics in found.ranks.items():
        whose = f" of rank {rank}" if rank else ""
        _print_table(f"run {found.name}: metrics{whose} that differ from run A's", metrics.tally, False)
    _print_table(f"run {found.name}: states that differ from run A's", found.states.tally, True)
    total = sum(tally.differing for tally in found.tallies)
    if total > _SHOWN:
        say(f"  {total:,} in all; --json lists up to 1,000 of each")


def _print_table(title: str, tally: ComparisonTally, with_files: bool) -> None:
    if not tally.findings:
        return
    say(f"\n{title}")
    rows = [
        (f"{finding.where}: {finding.key}" if with_files else finding.key, _said(finding)) for finding in tally.findings
    ]
    print_table([Column("where"), Column("run A, then this one")], rows, _SHOWN // 2)


def _within(outcome: CheckOutcome) -> str:
    """What the profile let pass, and how far the worst of it was off."""
    name, worst = outcome.profile.name, outcome.worst
    if worst is None:
        return f"profile {name}: nothing needed it"
    said = f"off by {worst.off:.3g}, allowed {worst.allowed:.3g}"
    return f"profile {name}: the value that takes most of what it allows is {worst.where}: {worst.key}, {said}"


def _said(finding: Finding) -> str:
    if finding.first == finding.second:
        return finding.detail
    return f"{finding.first} and {finding.second}{f' ({finding.detail})' if finding.detail else ''}"
