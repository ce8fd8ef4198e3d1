"""Checkpoints of megatron-core 0.13.1, as they are: what later releases store otherwise, read, and written so that 0.13.1 takes it."""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.metadata import Metadata

from mcore_rlhf.convert import ConvertOptions, Job, convert
from mcore_rlhf.errors import UsageError
from mcore_rlhf.families.options import ReadOptions, WriteOptions
from mcore_rlhf.families.source import Source
from mcore_rlhf.formats.registry import format_named, open_checkpoint
from mcore_rlhf.storage.dcp import METADATA_FILE
from mcore_rlhf.storage.reading import OpenFiles
from mcore_rlhf.verify.differ import Differ
from tests.helpers.plain_load import plain_load

GOLDENS = Path(__file__).parents[2] / "goldens" / "megatron_0_13"
MODEL_SPACE = "fully_sharded_model_space"
CASES = ("experts_tp2ep2", "pp2")


def opened(path: Path) -> Source:
    return open_checkpoint(path, ReadOptions())


def assert_equal(a: Source, b: Source) -> None:
    with OpenFiles(a.root) as files_a, OpenFiles(b.root) as files_b:
        result = Differ(a, b, files_a, files_b).compare()
    assert result.equal, result.differences[:3]
    assert (a.optimizer, a.states, a.state.groups, a.state.scheduler) == (
        b.optimizer,
        b.states,
        b.state.groups,
        b.state.scheduler,
    )


def converted(source: Path, target: Path, to: str, **write: Any) -> Job:
    return convert(source, target, ConvertOptions(to=to, write=WriteOptions(**write), fsync=False))


@pytest.mark.parametrize("case", CASES)
def test_flattened_states_are_those_of_the_legacy_save(case: str) -> None:
    assert_equal(opened(GOLDENS / f"dist_{case}"), opened(GOLDENS / case))


class _Unpickler(pickle.Unpickler):
    """Of plans that 0.13.1 leaves in ``.metadata``, too, nothing is wanted."""

    def find_class(self, module: str, name: str) -> Any:
        return super().find_class(module, name) if module.startswith(("torch", "collections")) else OrderedDict


def metadata(root: Path) -> Metadata:
    with next(root.glob("iter_*/.metadata")).open("rb") as file:
        found: Metadata = _Unpickler(file).load()
    return found


def stored(root: Path) -> dict[str, tuple[object, ...]]:
    """Of every state: the stored shape, the cells, and the shape that 0.13.1 cuts anew for another layout."""
    found = metadata(root)
    mcore: dict[str, Any] = found.mcore_data  # type: ignore[attr-defined]
    return {
        key: (tuple(one.size), sorted({tuple(chunk.offsets[:-1]) for chunk in one.chunks}), mcore[key])  # type: ignore[union-attr]
        for key, one in found.state_dict_metadata.items()
        if ".state." in key
    }


def members(root: Path) -> object:
    """What ``common.pt`` has of the chained optimizers."""
    return plain_load(next(root.glob("iter_*/common.pt")))["optimizer"]


@pytest.mark.parametrize("case", CASES)
def test_torch_dist_of_its_runs_is_stored_as_0_13_stores_it(case: str, tmp_path: Path) -> None:
    """Same keys, cells and shapes as in the file that 0.13.1 wrote at that step, which also its own loader asks for."""
    job = converted(GOLDENS / case, tmp_path / "out", "megatron-dist", optimizer_sharding=MODEL_SPACE)
    assert job.lossless
    assert stored(tmp_path / "out") == stored(GOLDENS / f"dist_{case}")
    assert_equal(opened(tmp_path / "out"), opened(GOLDENS / case))
    assert members(tmp_path / "out") == members(GOLDENS / f"dist_{case}")


def test_cells_of_another_layout_hold_the_same(tmp_path: Path) -> None:
    converted(
        GOLDENS / "experts_tp2ep2",
        tmp_path / "one",
        "megatron-dist",
        optimizer_sharding=MODEL_SPACE,
        tp=1,
        ep=1,
        dp=1,
    )
    keys = stored(tmp_path / "one")
    assert not any(key.startswith("chained_") for key in keys), "one optimizer alone has no number"
    qkv = keys["optimizer.state.exp_avg.decoder.layers.self_attention.linear_qkv.weight"]
    assert qkv[0] == (2, 1, 1, 32 * 16 + 16 * 16)
    converted(tmp_path / "one", tmp_path / "back", "megatron-dist", tp=2, ep=2, dp=2)
    assert_equal(opened(tmp_path / "back"), opened(GOLDENS / "dist_experts_tp2ep2"))


def test_a_parameter_without_elements_has_one_cell_without_any() -> None:
    source, none = opened(GOLDENS / "pp2"), "decoder.final_layernorm.weight"
    params = [replace(spec, global_shape=(0,)) if spec.name == none else spec for spec in source.model.params]
    source.model = replace(source.model, params=tuple(params), _index={})
    target = format_named("megatron-dist").target(source, WriteOptions(optimizer_sharding=MODEL_SPACE))
    directory = next(text for name, text in target.texts.items() if name.endswith(METADATA_FILE))
    assert isinstance(directory, bytes)
    found = _Unpickler(io.BytesIO(directory)).load()
    key = f"optimizer.state.exp_avg.{none}"
    one = found.state_dict_metadata[key]
    assert (tuple(one.size), found.mcore_data[key]) == ((1, 0), {"nd_reformulated_orig_global_shape": (0,)})
    assert [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in one.chunks] == [((0, 0), (1, 0))]
    assert sum(len(file.layout().records) for file in target.files), "every file can be laid out"


def test_what_older_releases_take_is_said(tmp_path: Path) -> None:
    job = converted(GOLDENS / "dist_pp2", tmp_path / "out", "megatron-dist")
    assert any(
        "an older one takes --optimizer-sharding fully_sharded_model_space" in line for _, line in job.report.lines
    )


def test_states_that_are_no_distributed_optimizers_have_no_ranges(tmp_path: Path) -> None:
    plain = Path(__file__).parents[2] / "goldens" / "megatron" / "tp2pp2dp2_bf16_nodo"
    with pytest.raises(UsageError, match="fully_sharded_model_space"):
        converted(plain, tmp_path / "out", "megatron-dist", optimizer_sharding=MODEL_SPACE)


def decays(root: Path) -> dict[str, list[float]]:
    """By rank, how the groups of its file decay, in order: a release before 0.14 loads them by position."""
    files = sorted(root.glob("iter_*/mp_rank_*/model_optim_rng.pt"))
    trees = {path.parent.name: plain_load(path)["optimizer"]["optimizer"] for path in files}
    return {rank: [group["wd_mult"] for group in tree["param_groups"]] for rank, tree in trees.items()}


def test_groups_stay_in_the_order_in_which_each_stage_meets_them(tmp_path: Path) -> None:
    """The last stage begins with a norm: its first group is the one that does not decay."""
    theirs = decays(GOLDENS / "pp2")
    assert theirs == {"mp_rank_00_000": [1.0, 0.0], "mp_rank_00_001": [0.0, 1.0]}
    converted(GOLDENS / "pp2", tmp_path / "same", "megatron")
    assert decays(tmp_path / "same") == theirs
    converted(GOLDENS / "pp2", tmp_path / "one", "megatron", pp=1)
    converted(tmp_path / "one", tmp_path / "back", "megatron", pp=2)
    assert decays(tmp_path / "back") == theirs
