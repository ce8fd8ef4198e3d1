"""Hints on what to install name what is there: a checkout, a wheel, a URL, or else the packages themselves."""

from __future__ import annotations

import json
import shlex
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from mcore_rlhf import installation
from mcore_rlhf.installation import to_install, to_upgrade

PROJECT = Path(__file__).resolve().parents[2]
REQUIRES = [
    "numpy>=1.26", "torch>=2.6; extra == 'torch'", 'mcore-rlhf[torch]; extra == "megatron"',
    'megatron-core<0.20,>=0.16.1; extra == "megatron"',
]  # fmt: skip


class Installed:
    """A distribution as pip leaves it."""

    requires = REQUIRES

    def __init__(self, direct_url: object) -> None:
        self.text = None if direct_url is None else json.dumps(direct_url)

    def read_text(self, name: str) -> str | None:
        return self.text if name == "direct_url.json" else None


@pytest.fixture
def came_from(monkeypatch: pytest.MonkeyPatch):
    def set_to(direct_url: object, imported_from: Path) -> None:
        monkeypatch.setattr(installation, "distribution", lambda name: Installed(direct_url))
        monkeypatch.setattr(installation, "__file__", str(imported_from / "mcore_rlhf" / "installation.py"))

    return set_to


def argument(command: str) -> str:
    """What is given to pip."""
    *words, last = shlex.split(command)
    assert words[:2] == ["pip", "install"]
    return last


@pytest.mark.parametrize("editable", [True, False])
def test_a_checkout_is_installed_again(came_from, tmp_path: Path, editable: bool) -> None:
    checkout = tmp_path / "with blank"
    checkout.mkdir()
    (checkout / "pyproject.toml").touch()
    came_from(
        {"url": checkout.as_uri(), "dir_info": {"editable": True} if editable else {}}, tmp_path / "site-packages"
    )
    assert argument(to_install("torch")) == f"{checkout}[torch]"
    assert ("-e" in shlex.split(to_install("torch"))) is editable
    assert str(checkout) in to_upgrade()


def test_a_wheel_is_taken_from_where_it_lies_while_it_lies_there(came_from, tmp_path: Path) -> None:
    wheel = tmp_path / "mcore_rlhf-0.2.0-py3-none-any.whl"
    wheel.touch()
    came_from({"url": wheel.as_uri(), "archive_info": {}}, tmp_path / "site-packages")
    asked = Requirement(argument(to_install("torch")))
    assert (asked.name, asked.extras, asked.url) == ("mcore_rlhf", {"torch"}, wheel.as_uri())
    wheel.unlink()
    assert to_install("torch") == "pip install 'torch>=2.6'"
    assert to_install("megatron") == "pip install 'torch>=2.6' 'megatron-core<0.20,>=0.16.1'"
    assert "newer release" in to_upgrade()


def test_a_repository_is_asked_again(came_from, tmp_path: Path) -> None:
    url = "https://example.org/mcore_rlhf.git"
    came_from({"url": url, "vcs_info": {"vcs": "git", "commit_id": "abc123"}}, tmp_path)
    asked = Requirement(argument(to_install("object")))
    assert (asked.extras, asked.url) == ({"object"}, f"git+{url}@abc123")


def test_without_a_note_the_checkout_counts_that_is_imported_from(came_from, tmp_path: Path) -> None:
    came_from(None, PROJECT)
    assert argument(to_install("ray")) == f"{PROJECT}[ray]"
    came_from(None, tmp_path)
    assert to_install("torch") == "pip install 'torch>=2.6'"


def test_what_is_not_installed_at_all_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def none(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(installation, "distribution", none)
    monkeypatch.setattr(installation, "__file__", str(tmp_path / "mcore_rlhf" / "installation.py"))
    assert to_install("torch") == "pip install torch"


def test_no_hint_names_a_package_index_that_has_not_got_the_project() -> None:
    files = [*PROJECT.glob("mcore_rlhf/**/*.py"), *PROJECT.glob("docs/**/*.md"), PROJECT / "README.md"]
    hints = ("install 'mcore_rlhf", 'install "mcore_rlhf', "install mcore_rlhf", "install --upgrade mcore_rlhf")
    assert not [f"{path}: {hint}" for path in files for hint in hints if hint in path.read_text(encoding="utf-8")]
