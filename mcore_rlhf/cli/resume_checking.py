"""``mcore-rlhf resume-check``: prove that a trainer resumes exactly, by killing it."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import cast, get_args

import click

from mcore_rlhf.errors import UsageError
from mcore_rlhf.manager.prove.check import (
    CheckOptions,
    Control,
    KilledRun,
    Outcome,
    ResumeCheck,
    RunComparison,
    compare_outputs,
)
from mcore_rlhf.manager.prove.command import RunPlaces, Template
from mcore_rlhf.manager.prove.compare import Finding, Tally
from mcore_rlhf.manager.prove.control import make_control
from mcore_rlhf.manager.prove.killing import Kill, Moment, root_of
from mcore_rlhf.manager.run import steps as steps_of
from mcore_rlhf.storage.beneath import remove, scratch_folder
from mcore_rlhf.storage.paths import local_path

from . import guard
from .options import ResumeCheckOptions
from .output import Column, Facts, count, duration, emit_json, print_facts, print_table, say

_SHOWN = 20
_SAYS = {
    "exact": "EXACT: the resumed run is the uninterrupted one, bit for bit, and the broken control was caught",
    "different": "DIFFERENT: the resumed run is not the uninterrupted one",
    "blind": "BLIND: everything is equal, but so is the broken control: nothing is proved",
    "no control": "EQUAL, bit for bit; no broken control was compared",
}
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
    )


def _template(command: Sequence[str], request: ResumeCheckOptions) -> Template:
    """The command to run.

    Raises:
        UsageError: The demo's algorithm is not known.
    """
    if not request.demo:
        return Template(command, request.environment)
    _one_of("--algorithm", request.algorithm, ("grpo", "ppo"))
    return Demo(request.algorithm, request.tp, request.pp).template(command)


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
        break_copy(*request.make_control, stubs)
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
    if outcome.passed and not keep:
        _clear(place, everything=folder is None)
        outcome.folder = folder
    _show(outcome, json)


def _say(line: str) -> None:
    say(line, err=True)


def _clear(place: Path, everything: bool) -> None:
    """Remove the checkpoints; logs and metrics stay in a folder that the user named."""
    for path in [place] if everything else [path for path in place.iterdir() if path.is_dir()]:
        with suppress(OSError):
            remove(path)


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
    say(f"{target}: a copy of {source} with step {committed[-1].step} alone, and broken: {broken}")


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


def _show(outcome: Outcome, json: bool) -> None:
    if json:
        emit_json(_facts(outcome))
    else:
        _print(outcome)
    if not outcome.passed:
        raise click.exceptions.Exit(1)


def _facts(outcome: Outcome) -> Facts:
    """``verdict`` (``exact``, ``different``, ``blind``, ``no control``), ``passed``, ``steps``, ``more``, ``folder``;
    ``runs`` (``name``, ``equal``, ``kill``, ``repeatable``: whether the killed run was the
    other's equal until then, ``states``, ``metrics``); ``control`` or null (``caught``, ``broken``,
    ``states``, ``metrics``); ``seconds`` by start of the command; ``notes``.
    """
    return {
        "verdict": outcome.verdict,
        "passed": outcome.passed,
        "steps": outcome.steps,
        "more": outcome.more,
        "folder": None if outcome.folder is None else str(outcome.folder),
        "runs": [
            {
                "kill": None if run.kill is None else _kill_facts(run.kill),
                "repeatable": None if run.before is None else run.before.tally.equal,
                **_comparison_facts(run.comparison),
            }
            for run in outcome.interrupted
        ],
        "control": None if outcome.control is None else _control_facts(outcome.control),
        "seconds": outcome.seconds,
        "notes": outcome.notes,
    }


def _kill_facts(kill: Kill) -> Facts:
    return {
        "resumed_from": kill.resumes_from,
        "saving": None if kill.partial is None else kill.partial.step,
        "phase": kill.phase,
        "processes": kill.processes,
        "seconds": kill.seconds,
    }


def _control_facts(control: Control) -> Facts:
    broken = None if control.broken is None else str(control.broken)
    return {"caught": control.caught, "broken": broken, **_comparison_facts(control.comparison)}


def _comparison_facts(found: RunComparison) -> Facts:
    metrics = found.metrics
    lines = None
    if metrics is not None:
        lines = {
            "lines": metrics.lines,
            "equal_lines": metrics.equal,
            "repeated_lines": metrics.repeated,
            "began_again": metrics.began_again,
            **_tally_facts(metrics.tally),
        }
    states = {"files": found.states.files, **_tally_facts(found.states.tally)}
    return {"name": found.name, "equal": found.equal, "states": states, "metrics": lines}


def _tally_facts(tally: Tally) -> Facts:
    return {
        "values": tally.compared,
        "differing": tally.differing,
        "ignored": tally.ignored,
        "differences": [_finding_facts(finding) for finding in tally.findings],
    }


def _finding_facts(finding: Finding) -> Facts:
    return {
        "where": finding.where,
        "key": finding.key,
        "first": finding.first,
        "second": finding.second,
        "detail": finding.detail,
    }


def _print(outcome: Outcome) -> None:
    """Print a table of what was compared, what differs, and what to make of it."""
    print_facts(_runs(outcome))
    say()
    columns = [Column("compared with run A"), Column("values", True), Column("equal", True), Column("different", True)]
    print_table([*columns, Column("")], list(_rows(outcome)))
    for run in outcome.interrupted:
        _print_findings(run.comparison)
    say()
    for note in outcome.notes:
        say(note)
    say(_SAYS[outcome.verdict])
    if outcome.folder is not None:
        say(f"Logs and metrics: {outcome.folder}")


def _runs(outcome: Outcome) -> Iterator[tuple[str, str]]:
    seconds = outcome.seconds
    if "A" in seconds:
        yield "run A", f"{outcome.steps + outcome.more} steps uninterrupted, {duration(seconds['A'])}"
    for run in outcome.interrupted:
        name, kill = run.comparison.name, run.kill
        if kill is not None:
            yield f"run {name}", f"killed after {duration(kill.seconds)}, {kill.phase}"
            again = duration(seconds.get(f"{name}-resumed", 0.0))
            yield "", f"resumed from step {kill.resumes_from}, {again}"
    if outcome.control is not None and outcome.control.broken is not None:
        yield "run C", f"resumed from a broken copy, {duration(seconds.get('C', 0.0))}"
        yield "", str(outcome.control.broken)


def _rows(outcome: Outcome) -> Iterator[Sequence[str]]:
    for run in outcome.interrupted:
        good = "exact" if run.comparison.equal else "DIFFERENT"
        yield from _comparison_rows(f"run {run.comparison.name}", run.comparison, good, outcome.steps + outcome.more)
    if outcome.control is not None:
        caught = "caught" if outcome.control.caught else "NOT CAUGHT"
        yield from _comparison_rows("control", outcome.control.comparison, caught, outcome.steps + outcome.more)


def _comparison_rows(name: str, found: RunComparison, verdict: str, last: int) -> Iterator[Sequence[str]]:
    states = found.states
    yield _row(f"{name}: step {last}, {count(states.files, 'file')}", states.tally, verdict)
    if found.metrics is not None:
        lines, repeated = count(found.metrics.lines, "line"), found.metrics.repeated
        again = f", {repeated} of them done again" if repeated else ""
        yield _row(f"{name}: metrics, {lines}{again}", found.metrics.tally, "")


def _row(what: str, tally: Tally, verdict: str) -> Sequence[str]:
    return what, count(tally.compared), count(tally.compared - tally.differing), count(tally.differing), verdict


def _print_findings(found: RunComparison) -> None:
    metrics = found.metrics.tally.findings if found.metrics is not None else []
    total = found.states.tally.differing + (found.metrics.tally.differing if found.metrics is not None else 0)
    for title, findings in (("metrics", metrics), ("states", found.states.tally.findings)):
        if findings:
            say(f"\nrun {found.name}: {title} that differ from run A's")
            rows = [
                (f"{finding.where}: {finding.key}" if title == "states" else finding.key, _said(finding))
                for finding in findings
            ]
            print_table([Column("where"), Column("run A, then this one")], rows, _SHOWN // 2)
    if total > _SHOWN:
        say(f"  {total:,} in all; --json lists up to 1,000 of each")


def _said(finding: Finding) -> str:
    if finding.first == finding.second:
        return finding.detail
    return f"{finding.first} and {finding.second}{f' ({finding.detail})' if finding.detail else ''}"
