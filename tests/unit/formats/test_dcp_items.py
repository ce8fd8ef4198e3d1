"""Rank files of torch_checkpointing, "DCP v2": read with the optimizer by name, and nothing of metadata.pkl is run."""

from __future__ import annotations

import os
import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mcore_rlhf.convert import convert
from mcore_rlhf.errors import (
    CheckpointError,
    Corrupt,
    Incomplete,
    LayoutMismatch,
    NotACheckpoint,
    Unsupported,
    Untrusted,
)
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.families.source import Source
from mcore_rlhf.formats.registry import open_checkpoint
from mcore_rlhf.verify.checkpoint import Depth, verify
from tests.helpers.catalog_values import tensor_of
from tests.helpers.conversions import options

GOLDEN = Path(__file__).parents[2] / "goldens" / "torch_checkpointing"
WAYS = ("named", "numbered")


@pytest.fixture(params=WAYS)
def step(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / request.param / "step_3", tmp_path / "step_3"))


@pytest.fixture
def named(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / "named" / "step_3", tmp_path / "step_3"))


def opened(path: Path, **read: object) -> Source:
    return open_checkpoint(path, ReadOptions(**read))  # type: ignore[arg-type]


def metadata(path: Path, **changes: object) -> None:
    tree = pickle.loads((path / "metadata.pkl").read_bytes())
    (path / "metadata.pkl").write_bytes(pickle.dumps({**tree, **changes}))


def assert_whole(source: Source) -> None:
    expected = torch.load(GOLDEN / "expected.pt", weights_only=True)
    assert {spec.name for spec in source.model.params} == set(expected["model"])
    for name, states in expected["states"].items():
        assert torch.equal(tensor_of(source, name, "master"), expected["model"][name])
        assert torch.equal(tensor_of(source, name, "exp_avg"), states["exp_avg"])
        assert torch.equal(tensor_of(source, name, "exp_avg_sq"), states["exp_avg_sq"])


def test_it_is_read_with_its_optimizer(step: Path, tmp_path: Path) -> None:
    source = opened(step)
    assert (source.format, source.optimizer, source.state.iteration, source.parallel.dp) == (
        "fsdp-ranks",
        "fsdp-ranks",
        3,
        2,
    )
    assert source.state.other == {"train": {"step": 3, "tokens": 192}}
    assert [(g.fields["weight_decay"], g.params[0], len(g.params)) for g in source.state.groups] == [
        (0.1, "0.weight", 3), (0.0, "1.bias", 3),
    ]  # fmt: skip
    assert all("param_names" not in group.fields for group in source.state.groups)
    assert_whole(source)
    assert verify(step, ReadOptions(), Depth.DEEP).intact
    assert convert(step, tmp_path / "out", replace(options(), to="dcp", strict=True)).lossless
    assert_whole(opened(tmp_path / "out"))


def test_any_file_that_is_missing_is_named(step: Path) -> None:
    for path in sorted(step.glob("*.pt")):
        shutil.move(path, step.parent / "aside")
        said = "not a checkpoint" if path.name == "model_0.pt" else f"{path.name}: missing"
        with pytest.raises((Incomplete, NotACheckpoint), match=said):
            opened(step)
        shutil.move(step.parent / "aside", path)


def test_an_optimizer_that_metadata_names_and_nobody_has(named: Path) -> None:
    for path in named.glob("optimizer_*.pt"):
        path.unlink()
    with pytest.raises(Incomplete, match="an item 'optimizer', of which no file is there"):
        opened(named)


def test_files_of_another_run_and_of_swapped_ranks(named: Path) -> None:
    shutil.copy(named / "train_1.pt", named / "train_2.pt")
    with pytest.raises(LayoutMismatch, match=r"train_2.pt: of rank 2, and metadata.pkl says that 2 ranks wrote"):
        opened(named)
    (named / "train_2.pt").unlink()
    for kind in ("model", "optimizer"):
        os.rename(named / f"{kind}_0.pt", named / "aside")
        os.rename(named / f"{kind}_1.pt", named / f"{kind}_0.pt")
        os.rename(named / "aside", named / f"{kind}_1.pt")
    with pytest.raises(LayoutMismatch, match="written by rank 1"):
        opened(named)


def test_names_that_the_model_does_not_have(named: Path) -> None:
    for rank in (0, 1):
        torch.save({"other.weight": torch.ones(2)}, named / f"model_{rank}.pt")
    with pytest.raises(LayoutMismatch, match=r"the optimizer trains 0\.weight, which the model does not have"):
        opened(named)


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"world_size": 10**12}, LayoutMismatch, "no run has more than"),
        ({"world_size": "2"}, Corrupt, "expected a world_size"),
        ({"world_size": 0}, LayoutMismatch, "0 ranks"),
        ({"world_size": 3}, Incomplete, r"model_2\.pt: missing; 3 ranks"),
        ({"version": "9.0"}, Unsupported, r"its version is '9\.0'"),
        (
            {"metadata": {"model": {"rank_to_layout_info": {0: {"file_path": "../../x.pt"}}}}},
            Unsupported,
            "a layout of its own",
        ),
        ({"metadata": {"../x": {}}}, Incomplete, r"an item '\.\./x', of which no file"),
        ({"metadata": []}, Corrupt, "expected a world_size"),
    ],
)
def test_metadata_that_is_forged(
    named: Path, changes: dict[str, object], error: type[CheckpointError], match: str
) -> None:
    metadata(named, **changes)
    with pytest.raises(error, match=match):
        opened(named)


class Harm:
    def __reduce__(self) -> tuple[object, ...]:
        return os.system, ("touch harmed",)


def test_nothing_of_metadata_is_run(named: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(named)
    metadata(named, note=Harm())
    with pytest.raises(Untrusted, match="system"):
        opened(named)
    assert not (named / "harmed").exists()
    (named / "metadata.pkl").write_bytes(b"no pickle")
    with pytest.raises(CheckpointError, match=r"metadata\.pkl"):
        opened(named)


def test_a_folder_with_other_files_beside_a_model_is_none(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "model_0.pt")
    torch.save({"a": torch.ones(2)}, tmp_path / "best.pt")
    with pytest.raises(NotACheckpoint):
        opened(tmp_path)


@pytest.mark.parametrize("like", WAYS)
def test_another_format_becomes_its_files(tmp_path: Path, like: str) -> None:
    """As the run's own: names, groups and members of the optimizer, and what resharders ask; the package loads it in tests/trainers."""
    theirs = GOLDEN / like / "step_3"
    convert(GOLDEN / "numbered" / "step_3", tmp_path / "dcp", replace(options(), to="dcp"))
    how = replace(options(like=str(theirs)), to="fsdp-ranks", strict=True)
    assert convert(tmp_path / "dcp", tmp_path / "step_3", how).lossless
    ours = tmp_path / "step_3"
    assert {path.name for path in theirs.iterdir()} - {"metadata.pkl"} == {path.name for path in ours.glob("*.pt")}
    if like == "named":
        assert pickle.loads((ours / "metadata.pkl").read_bytes()) == pickle.loads(
            (theirs / "metadata.pkl").read_bytes()
        )
    assert_whole(opened(ours))
    found, wanted = (torch.load(folder / "optimizer_1.pt", weights_only=False) for folder in (ours, theirs))
    assert found.keys() == wanted.keys()
    assert found["param_groups"] == wanted["param_groups"]
    assert found["state"].keys() == wanted["state"].keys()
    for key, states in wanted["state"].items():
        for state, value in states.items():
            one, other = (getattr(part, "_local_tensor", part) for part in (found["state"][key][state], value))
            assert (torch.equal(one, other), one.dtype) == (True, other.dtype)


def test_a_run_that_trains_other_parameters_is_no_pattern(tmp_path: Path) -> None:
    like = Path(shutil.copytree(GOLDEN / "numbered" / "step_3", tmp_path / "like"))
    convert(GOLDEN / "named" / "step_3", tmp_path / "dcp", replace(options(), to="dcp"))
    for rank in (0, 1):
        state = torch.load(like / f"optimizer_{rank}.pt", weights_only=False)
        state["param_groups"][0]["param_names"][0] = "other.weight"
        torch.save(state, like / f"optimizer_{rank}.pt")
    with pytest.raises(LayoutMismatch, match=r"trains 0\.weight, which is in no param group of the run") as caught:
        convert(tmp_path / "dcp", tmp_path / "out", replace(options(like=str(like)), to="fsdp-ranks"))
    assert "has no other.weight, which the run that --like names trains" in str(caught.value)


def test_items_that_the_source_has_not_and_random_states(tmp_path: Path) -> None:
    like = Path(shutil.copytree(GOLDEN / "numbered" / "step_3", tmp_path / "like"))
    for rank in (0, 1):
        shutil.copy(like / f"train_{rank}.pt", like / f"loader_{rank}.pt")
    convert(GOLDEN / "named" / "step_3", tmp_path / "dcp", replace(options(), to="dcp"))
    job = convert(tmp_path / "dcp", tmp_path / "out", replace(options(like=str(like)), to="fsdp-ranks"))
    said = [line["text"] for line in job.target.report.as_json()]
    assert any(text.startswith("loader: the source has none; torch_checkpointing stops") for text in said), said
    assert sorted(path.name for path in (tmp_path / "out").glob("*_0.pt")) == [
        "model_0.pt", "optimizer_0.pt", "train_0.pt",
    ]  # fmt: skip


def test_the_weights_alone(named: Path, tmp_path: Path) -> None:
    convert(named, tmp_path / "out", replace(options(no_optimizer=True, dp=3), to="fsdp-ranks"))
    assert sorted(path.name for path in (tmp_path / "out").glob("*.pt")) == sorted(
        f"{item}_{rank}.pt" for item in ("model", "train") for rank in range(3)
    )
    assert [*pickle.loads((tmp_path / "out" / "metadata.pkl").read_bytes())["metadata"]] == ["model"]
    assert opened(tmp_path / "out").parallel.dp == 3
