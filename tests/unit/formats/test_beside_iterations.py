"""What a trainer leaves in the root of Megatron's iterations for one of them: it goes along with that one, or is lost by name."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from mcore_rlhf.convert import Job, convert
from mcore_rlhf.core.facts import Fate
from mcore_rlhf.errors import Untrusted
from mcore_rlhf.families.options import ConvertOptions

PLAIN = Path(__file__).parents[2] / "goldens" / "megatron_dist" / "plain_tp2"
FILE = "rollout/global_dataset_state_dict_2.pt"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """As slime keeps where its data source is, a file for every rollout."""
    root = Path(shutil.copytree(PLAIN, tmp_path / "run"))
    (root / "rollout").mkdir()
    for rollout in (1, 2):
        torch.save(
            {"sample_offset": 4 * rollout, "metadata": {}}, root / "rollout" / f"global_dataset_state_dict_{rollout}.pt"
        )
    return root


def fates(job: Job) -> list[str]:
    return [f"{fate.value}: {text}" for fate, text in job.report.lines if "rollout/" in text]


@pytest.mark.parametrize("to", ["megatron", "megatron-dist"])
def test_it_goes_along_where_the_target_is_such_a_root(run: Path, to: str, tmp_path: Path) -> None:
    job = convert(run, tmp_path / "out", ConvertOptions(to=to))
    assert fates(job) == [f"{Fate.KEPT.value}: {FILE}: byte for byte"]
    assert (tmp_path / "out" / FILE).read_bytes() == (run / FILE).read_bytes()
    assert len(list((tmp_path / "out" / "rollout").iterdir())) == 1, "that of another rollout is another step's"


def test_it_is_lost_by_name_where_the_target_is_none(run: Path, tmp_path: Path) -> None:
    job = convert(run, tmp_path / "out", ConvertOptions(to="hf"))
    assert not job.lossless
    (line,) = fates(job)
    assert line.startswith(f"{Fate.LOST.value}: {FILE}: belongs beside")


def test_a_pickle_that_calls_stays_behind(run: Path, tmp_path: Path) -> None:
    torch.save({"metadata": print}, run / FILE)
    job = convert(run, tmp_path / "out", ConvertOptions(to="megatron"))
    assert not (tmp_path / "out" / FILE).exists()
    (line,) = fates(job)
    assert line.startswith(f"{Fate.LOST.value}: {FILE}")


@pytest.mark.parametrize("link", ["rollout", FILE])
@pytest.mark.parametrize("named", ["", "iter_0000002"])
def test_a_link_brings_in_nothing_whichever_folder_was_named(run: Path, tmp_path: Path, named: str, link: str) -> None:
    (run / link).rename(tmp_path / "elsewhere")
    (run / link).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Untrusted, match="a symbolic link"):
        convert(run / named, tmp_path / "out", ConvertOptions(to="megatron"))
    assert not (tmp_path / "out").exists()
