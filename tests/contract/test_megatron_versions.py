"""The page that says on which Megatron what is run, and the table that it is made of."""

from __future__ import annotations

import re

from tests.reference import releases

FOLDER = releases.PAGE.parents[2] / "tests" / "reference"


def test_the_page_is_what_the_table_says() -> None:
    assert releases.PAGE.read_text() == releases.page(), f"write it anew: {releases.WRITE}"


def test_every_file_whose_tests_use_the_pool_of_megatrons_workers_has_its_row() -> None:
    """A file that makes a pool of its own, without Megatron, has none."""
    uses = re.compile(r"^def test_\w+\([^)]*\b(lab: (Engine)?Lab|pool: WorkerPool)|^def \w+\(lab: Lab", re.MULTILINE)
    own = re.compile(r"^def pool\(|^def lab\(tmp_path_factory", re.MULTILINE)
    files = {path.stem: path.read_text() for path in FOLDER.glob("test_*.py")}
    found = {name for name, text in files.items() if uses.search(text) and not own.search(text)}
    assert found <= releases.ROWS.keys() <= files.keys()
