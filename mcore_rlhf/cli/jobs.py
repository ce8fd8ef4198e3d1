"""``mcore-rlhf configs``: the jobs and runs that come with the package, for well-known deployments."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from mcore_rlhf.errors import UsageError
from mcore_rlhf.suggestions import did_you_mean

from .output import Column, emit_json, print_table, say

_PACKAGE = __name__.partition(".")[0]


def folder() -> Path:
    """Where they lie: in an installed package, or beside it in a clone.

    Raises:
        UsageError: Nowhere.
    """
    package = Path(str(files(_PACKAGE)))
    for place in (package / "configs", package.parent / "configs"):
        if place.is_dir():
            return place
    raise UsageError("configs: this installation came without them\nInstall the wheel, or use a clone.")


def known() -> dict[str, Path]:
    """All of them, by name."""
    return {path.stem: path for path in sorted(folder().glob("*.yaml"))}


def list_all(json: bool) -> None:
    """Print name, what it is (a job's target, or a run) and its description, which is its first comment."""
    found = [{"name": name, "kind": _kind(path), "about": _about(path)} for name, path in known().items()]
    if json:
        emit_json(found)
    else:
        print_table([Column("name"), Column("is"), Column("about")], [list(one.values()) for one in found])


def show(name: str) -> None:
    """Print one as it stands, to be put into a file.

    Raises:
        UsageError: There is none of that name.
    """
    there = known()
    if name not in there:
        raise UsageError(f"configs: there is no {name!r}{did_you_mean(name, there)}\nThere are: {', '.join(there)}.")
    say(there[name].read_text(encoding="utf-8"), nl=False)


def _kind(path: Path) -> str:
    targets = [
        line.partition(":")[2].strip() for line in path.read_text("utf-8").splitlines() if line.startswith("to:")
    ]
    return f"job, to {targets[0]}" if targets else "run"


def _about(path: Path) -> str:
    first = path.read_text(encoding="utf-8").splitlines()[0]
    return first.removeprefix("#").strip() if first.startswith("#") else ""
