"""What several commands say of a checkpoint, a chosen step, a report or a problem: as facts with keys that stay, and in words."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from mcore_rlhf.errors import CheckpointError

from .output import Facts, count, say

if TYPE_CHECKING:
    from mcore_rlhf.errors import Problem
    from mcore_rlhf.families.source import Source
    from mcore_rlhf.layouts.parallel import ParallelConfig
    from mcore_rlhf.manager.subject import ChosenStep, Subject
    from mcore_rlhf.report.page import Origin

_SHOWN_PROBLEMS, _SHOWN_STEPS = 20, 10
_OF_CONVERSIONS = ("account", "lines", "source", "converted_from")
_OF_RUNS = ("save_seconds", "stall_seconds", "live")
_REASONS = {
    "named": "one that was named",
    "newest committed": "newest that is committed",
    "newest intact": "newest that is intact",
    "tracker": "one that its tracker names",
    "only one": "only one that is whole",
}


def parallel_facts(parallel: ParallelConfig) -> Facts:
    """``tp``, ``pp``, ``vpp``, ``cp``, ``ep``, ``etp``, ``dp``, ``world_size``, ``pipeline_layout``, ``text``."""
    degrees = {name: getattr(parallel, name) for name in ("tp", "pp", "vpp", "cp", "ep", "etp", "dp")}
    return {
        **degrees,
        "world_size": parallel.world_size,
        "pipeline_layout": parallel.pipeline_layout,
        "text": str(parallel),
    }


def source_facts(source: Source) -> Facts:
    """``path``, ``format``, ``role``, ``iteration``, ``release``, ``parallel``."""
    return {
        "path": str(source.root),
        "format": source.format,
        "role": source.role,
        "iteration": source.state.iteration,
        "release": source.state.release,
        "parallel": parallel_facts(source.parallel),
    }


def layout_text(parallel: Facts) -> str:
    """``TP2×PP2×DP2 (8 ranks)``, with the pipeline layout where there is one."""
    ranks = parallel["world_size"]
    split = f", pipeline layout {parallel['pipeline_layout']}" if parallel["pipeline_layout"] else ""
    return f"{parallel['text']} ({ranks} {'rank' if ranks == 1 else 'ranks'}){split}"


def iteration_text(facts: Facts) -> str:
    """``iteration 50``, or ``release``."""
    return "release" if facts["release"] else f"iteration {facts['iteration']:,}"


def layout_line(source: Facts) -> str:
    """``megatron, iteration 50, TP2×PP2×DP2 (8 ranks)``."""
    return f"{source['format']}, {iteration_text(source)}, {layout_text(source['parallel'])}"


def source_text(source: Facts) -> str:
    """``/runs/a: megatron, iteration 50, TP2×PP2×DP2 (8 ranks)``."""
    return f"{source['path']}: {layout_line(source)}"


def chosen_facts(chosen: ChosenStep | None) -> Facts | None:
    """``root``, ``step``, ``path``, ``why``, ``passed_over`` (``step``, ``path``, ``state``, ``why``); null where no root was given."""
    if chosen is None:
        return None
    over = [
        {"step": step.step, "path": str(step.path), "state": step.state, "why": step.quarantined or step.why}
        for step in chosen.passed_over
    ]
    return {
        "root": str(chosen.root),
        "step": chosen.step,
        "path": str(chosen.folder),
        "why": chosen.why,
        "passed_over": over,
    }


def print_choice(chosen: ChosenStep | None) -> None:
    """Say which step of a root is worked on, where newer ones are passed over."""
    if chosen is None or not chosen.passed_over:
        return
    say(f"{chosen.root}: {chosen.folder.name} is taken, the {_REASONS[chosen.why]}; newer, and passed over:")
    for step in chosen.passed_over[:_SHOWN_STEPS]:
        say(f"  {step.describe()}")
    if len(chosen.passed_over) > _SHOWN_STEPS:
        say(f"  … {len(chosen.passed_over) - _SHOWN_STEPS} more: mcore-rlhf steps lists them")


def step_facts(step: Subject) -> Facts:
    """``path``, ``step``, ``chosen``, ``manifest`` (``time``, ``metrics``, ``files``, ``bytes``, ``lossless``, ``live`` state; or null),
    ``roles``, ``others`` (files beside the models).
    """
    manifest = step.manifest
    return {
        "path": str(step.folder),
        "step": step.step,
        "chosen": chosen_facts(step.chosen),
        "roles": [dict(part) for part in manifest.parts] if manifest else [{"role": role} for role in step.models],
        "others": list(step.others),
        "manifest": manifest
        and {
            "time": manifest.provenance.get("time"),
            "metrics": manifest.metrics,
            "files": len(manifest.files),
            "bytes": sum(entry.nbytes for entry in manifest.files.values()),
            "lossless": manifest.lossless,
            "live": manifest.live,
        },
    }


def origin_of(report: Mapping[str, object]) -> Origin:
    """What wrote a checkpoint.

    Only a conversion can be lossless: a run's own save and an adoption have no source that anything could be lost of.

    Args:
        report: What its manifest reports.
    """
    if any(key in report for key in _OF_CONVERSIONS):
        return "conversion"
    return "run" if any(key in report for key in _OF_RUNS) else "adoption" if "verified" in report else "unknown"


def of_each(subject: Subject, look: Callable[[str], Facts]) -> dict[str, Facts]:
    """What is found of every model, by role; ``error`` (``kind``, ``message``, ``exit_code``) of a step's that cannot be read.

    Raises:
        CheckpointError: A lone checkpoint cannot be read.
    """
    found: dict[str, Facts] = {}
    for role in subject.models:
        try:
            found[role] = look(role)
        except CheckpointError as error:
            if subject.alone:
                raise
            told = {"kind": type(error).__name__, "message": str(error), "exit_code": error.exit_code}
            found[role] = {"error": told, "intact": None}
    return found


def print_report(report: list[Facts]) -> None:
    """Print what is kept, derived, changed and lost."""
    width = max((len(line["fate"]) for line in report), default=0)
    for line in report:
        say(f"  {line['fate']:<{width}}  {line['text']}")


def account_text(account: Facts) -> str:
    """``205 items: 203 kept, 2 derived``."""
    fates = ("kept", "derived", "changed", "left_behind", "lost")
    counts = [f"{count(account[fate])} {fate.replace('_', ' ')}" for fate in fates if account[fate]]
    if account["unaccounted"]:
        counts.append(f"{count(len(account['unaccounted']))} not accounted for")
    return f"{count(account['items'], 'item')}: {', '.join(counts)}"


def yes_no(value: bool) -> str:
    """``yes`` or ``no``."""
    return "yes" if value else "no"


def problem_facts(problems: Iterable[Problem]) -> list[Facts]:
    """``kind``, ``message``, ``advice`` of every problem."""
    return [{"kind": item.kind.__name__, "message": item.message, "advice": item.advice} for item in problems]


def print_problems(problems: list[Facts]) -> None:
    """Print problems, and each piece of advice once."""
    for problem in problems[:_SHOWN_PROBLEMS]:
        say(f"  {problem['kind']}: " + problem["message"].replace("\n", "\n    "))
    if len(problems) > _SHOWN_PROBLEMS:
        say(f"  … and {len(problems) - _SHOWN_PROBLEMS:,} more (all of them: --json)")
    for advice in dict.fromkeys(problem["advice"] for problem in problems if problem["advice"]):
        say(advice)
