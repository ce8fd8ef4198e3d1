"""Trainers themselves load what we write: their packages lie in a folder of their own, which ``--trainers`` names.

Below it, each of a trainer's releases is a folder of ``pip install --no-deps --target FOLDER/verl-0.9.1 verl==0.9.1``, and what they need
and this repository does not is in ``FOLDER/verl-needs``, as ``tests/trainers/verl-needs.txt`` lists it:
``pip install --no-deps --target FOLDER/verl-needs -r tests/trainers/verl-needs.txt``. Nothing is installed beside the pinned packages.
"""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def trainers(request: pytest.FixtureRequest) -> Path:
    """The folder with the trainers' packages; without it the tests are skipped."""
    given = request.config.getoption("--trainers")
    if given is None:
        pytest.skip("needs the trainers' own packages: --trainers FOLDER (see tests/trainers/conftest.py)")
    return Path(given).resolve()
