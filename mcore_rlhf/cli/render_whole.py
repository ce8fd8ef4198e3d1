"""Whole steps, for people."""

from __future__ import annotations

from .describe import iteration_text, layout_text
from .output import Facts, console, print_facts
from .render_plan import print_report_lines, source_text
from .render_verify import comparison_line, print_differences, print_problems, verdict_line
from .units import count, duration, rate, size


def print_step(facts: Facts) -> None:
    """Print what a step is."""
    out = console()
    out.print(facts["path"])
    models = [(role, _model_line(model)) for role, model in facts["models"].items()]
    manifest = facts["manifest"]
    lines = [("step", str(facts["step"])), ("manifest", _manifest(manifest)), ("live state", _live(manifest))]
    print_facts(out, [*lines, *models, *_others(facts)])
    out.print("\nOne model in detail: mcore-rlhf inspect … --role ROLE")


def _model_line(model: Facts) -> str:
    if "error" in model:
        return f"cannot be read: {model['error']['message']}"
    none = "an optimizer that is not understood" if model["unread"] else "no optimizer"
    optimizer = model["optimizer"]["kind"] + " optimizer" if model["optimizer"] else none
    parameters = f"{count(model['model']['parameters'])} parameters"
    return f"{model['format']}, {layout_text(model['parallel'])}, {parameters}, {optimizer}, {size(model['bytes'])}"


def _manifest(manifest: Facts | None) -> str:
    if manifest is None:
        return "none: another trainer's step (mcore-rlhf adopt verifies it and writes one)"
    metrics = ", ".join(f"{name} {value:.6g}" for name, value in manifest["metrics"].items())
    text = f"{count(manifest['files'], 'file')}, {size(manifest['bytes'])}, {manifest['time']}"
    return f"{text}; {metrics}" if metrics else text


def _live(manifest: Facts | None) -> str:
    """How much state the roles held when the step was saved, all of which is in it."""
    held = manifest["live"] if manifest else {}
    return "; ".join(f"{role} {count(own['tensors'], 'tensor')}, {size(own['bytes'])}" for role, own in held.items())


def _others(facts: Facts) -> list[tuple[str, str]]:
    unknown = [f"{role['role']} ({role['format']})" for role in facts["roles"] if role["role"] not in facts["models"]]
    return [("models of formats that are not read", ", ".join(unknown)), ("beside", ", ".join(facts["others"]))]


def print_step_verdict(facts: Facts) -> None:
    """Print what ``verify`` found."""
    out = console()
    word = "intact" if facts["intact"] else "damaged"
    out.print(f"{facts['path']}: step {facts['step']}, {word}")
    out.print(f"  files  {_looked_at(facts)}: {_problem_count(facts)}")
    print_problems(out, facts["problems"])
    for role, verdict in facts["models"].items():
        if "error" in verdict:
            out.print(f"  {role}  cannot be read: {verdict['error']['message']}")
            continue
        found = verdict["checkpoint"]
        text = (
            f"{found['format']}, {iteration_text(found)}, {layout_text(found['parallel'])}" if found else "not opened"
        )
        out.print(f"  {role}  {text}: {verdict_line(verdict)}")
        if verdict["unread"]:
            out.print("    not understood  " + verdict["unread"].replace("\n", "\n      "))
        print_problems(out, verdict["problems"])


def _looked_at(facts: Facts) -> str:
    beside = "those beside the models opened"
    if facts["manifest"] is None:
        return f"no manifest, {beside}"
    what = "sizes" if facts["depth"] == "quick" else "CRC-32"
    return f"{what} of {count(facts['manifest']['files'], 'file')} of the manifest, {beside}"


def _problem_count(facts: Facts) -> str:
    return count(len(facts["problems"]), "problem") if facts["problems"] else "no problem"


def print_step_comparison(facts: Facts) -> None:
    """Print what ``diff`` found."""
    out = console()
    print_facts(out, [("first", facts["a"]["path"]), ("second", facts["b"]["path"])])
    out.print("equal" if facts["equal"] else "different")
    for role, comparison in facts["models"].items():
        out.print(f"  {role}  {comparison_line(comparison)}")
        print_differences(out, comparison)
    for name, verdict in facts["others"].items():
        out.print(f"  {name}  {verdict}")


def print_step_conversion(facts: Facts) -> None:
    """Print what ``convert``, or ``plan``, did or would do."""
    out = console()
    out.print("converted" if facts["target"] else "plan (nothing was written)")
    lines = [("source", facts["path"]), ("target", facts["target"] or "")]
    for role, model in facts["models"].items():
        lines.append((role, f"{source_text(model['source'])} → {layout_text(model['target']['parallel'])}"))
    if "seconds" in facts:
        nbytes, seconds = facts["bytes"], facts["seconds"]
        lines.append(("written", f"{size(nbytes)}, {duration(seconds)}, {rate(nbytes, seconds)}"))
    lines += [("lossless", "yes" if facts["lossless"] else "no"), ("load", facts.get("load", ""))]
    print_facts(out, lines)
    for role, report in facts["report"].items():
        if report:
            out.print(f"\n{role}")
        print_report_lines(out, report)
    for role, proof in facts.get("proofs", {}).items():
        out.print(f"\n{role}: verify  {verdict_line(proof['verify'])}")
        print_problems(out, proof["verify"]["problems"])
        if proof["diff"] is not None:
            out.print(f"{role}: diff    {comparison_line(proof['diff'])}")
            print_differences(out, proof["diff"])
