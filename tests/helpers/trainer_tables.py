"""The table of ``docs/how-to/another-trainers-run.md``: ``python -m tests.helpers.trainer_tables`` writes it there."""

from __future__ import annotations

import re
from pathlib import Path

from mcore_rlhf.trainers.known import TRAINERS
from mcore_rlhf.trainers.table import HERE, Trainer

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "another-trainers-run.md"
_PLACE = re.compile(r"(<!-- trainers -->\n).*?(<!-- end -->\n)", re.DOTALL)
_RESUMES = {"tracker": "what its tracker names", "highest": "the highest number", "named": "what it is told"}


def written(page: str) -> str:
    """The page with its table as the trainers are now."""
    return _PLACE.sub(lambda found: f"{found[1]}{_table()}{found[2]}", page)


def _table() -> str:
    head = "| trainer | a step | models | position in the data | goes on from | `--to` writes |"
    return "\n".join([head, "|---|---|---|---|---|---|", *map(_row, TRAINERS), ""])


def _row(one: Trainer) -> str:
    steps = ", ".join(f"`{pattern.replace('{step}', 'N').replace('{step:07d}', 'NNNNNNN')}`" for pattern in one.steps)
    steps = steps or "the run itself, written over"
    models = ", ".join(
        f"{role}: {f'`{places[0]}/`' if places[0] != HERE else 'the step itself'}" for role, places in one.roles.items()
    )
    resumes = "its one step" if one.in_place else _RESUMES[one.resumes] + (f" (`{one.tracker}`)" if one.tracker else "")
    formats = ", ".join(f"`{name}`" for name in one.formats)
    wrote = f"`{one.name}`: {formats}" if formats else "read only"
    return f"| {one.title} | {steps} | {models} | {f'`{one.data}`' if one.data else 'not in a file of its own'} | {resumes} | {wrote} |"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
