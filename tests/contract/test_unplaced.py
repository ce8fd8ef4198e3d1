"""A value that a reader does not know is an item of the account wherever in a file it stands: it is lost by name, and never dropped."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rlhf.convert import ConvertOptions, Job, prepare
from mcore_rlhf.core.facts import Fate, Item, Kind
from mcore_rlhf.errors import Lossy
from mcore_rlhf.families.inventory import OPAQUE
from mcore_rlhf.families.options import ReadOptions, WriteOptions
from mcore_rlhf.formats.registry import open_checkpoint
from mcore_rlhf.verify.checkpoint import Depth, verify
from tests.contract.test_account import ALL, SOURCES
from tests.helpers.damage import edited

STRANGE = "ema_decay"
Z2, Z0 = "deepspeed/z2_fp32_frozen_dp4", "deepspeed/z0_bf16_tied_dp2"
LEGACY, PLAIN = "megatron/tp2pp2dp2_bf16_do", "megatron/tp2pp2dp2_bf16_nodo"
ADDED = [
    (Z2, "zero_pp_rank_1_*optim_states.pt", ()),
    (Z2, "zero_pp_rank_1_*optim_states.pt", ("optimizer_state_dict",)),
    (Z2, "zero_pp_rank_0_*optim_states.pt", ("optimizer_state_dict", "base_optimizer_state")),
    (Z2, "zero_pp_rank_3_*optim_states.pt", ("optimizer_state_dict", "base_optimizer_state", "state")),
    (Z2, "zero_pp_rank_3_*optim_states.pt", ("optimizer_state_dict", "base_optimizer_state", "param_groups", 0)),
    (Z0, "mp_rank_00_model_states.pt", ("optimizer", "optimizer_state_dict")),
    (LEGACY, "mp_rank_01_000/model_optim_rng.pt", ()),
    (LEGACY, "mp_rank_01_000/model_optim_rng.pt", ("optimizer",)),
    (LEGACY, "mp_rank_00_000/model_optim_rng.pt", ("optimizer", "optimizer")),
    (LEGACY, "mp_rank_01_001/model_optim_rng.pt", ("opt_param_scheduler",)),
    (LEGACY, "mp_rank_00_000/distrib_optim.pt", ()),
    (LEGACY, "mp_rank_00_001/distrib_optim.pt", (0, "only")),
    (PLAIN, "mp_rank_00_000/model_optim_rng.pt", ("optimizer", "optimizer", "state")),
    ("megatron_dist/tp2pp2dp2_fully_reshardable", "common.pt", ("optimizer",)),
    ("verl/fsdp2_ws3", "extra_state_world_size_3_rank_1.pt", ()),
]  # fmt: skip


def added(golden: str, file: str, inside: Sequence[str | int], folder: Path) -> Path:
    """A copy of a golden, with a value more in one dictionary of one file."""
    root = Path(shutil.copytree(ALL / golden, folder / "source"))
    (path,) = (found for found in root.rglob(Path(file).name) if found.match(file) and "_uni" not in str(found.parent))
    with edited(path) as tree:
        at: Any = tree
        for key in inside:
            at = next(iter(at.values())) if key == "only" else at[key]
        at[STRANGE] = 0.999
    return root


def planned(root: Path, to: str, **write: Any) -> Job:
    return prepare(root, ConvertOptions(to=to, write=WriteOptions(**write)))


@pytest.mark.parametrize(("golden", "file", "inside"), ADDED)
def test_a_value_that_nobody_knows_is_lost_by_name(
    golden: str, file: str, inside: tuple[str | int, ...], tmp_path: Path
) -> None:
    root = added(golden, file, inside, tmp_path)
    job = planned(root, open_checkpoint(root, ReadOptions()).format)
    expected = inside[0] if inside == ("opt_param_scheduler",) else STRANGE
    assert any(fate is Fate.LOST and str(expected) in text for fate, text in job.report.lines)
    with pytest.raises(Lossy, match=str(expected)):
        prepare(root, ConvertOptions(to=job.target.format, strict=True))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_genuine_files_have_nothing_that_nobody_knows(path: Path) -> None:
    assert not open_checkpoint(path, ReadOptions(), partial=True).unplaced


def test_an_optimizer_that_is_left_out_is_not_looked_into(tmp_path: Path) -> None:
    root = added(LEGACY, "mp_rank_00_000/distrib_optim.pt", (), tmp_path)
    assert not open_checkpoint(root, ReadOptions(optimizer=False)).unplaced


def test_a_value_of_the_module_that_is_no_tensor_stays_with_deepspeed_only(tmp_path: Path) -> None:
    root = added(Z2, "mp_rank_00_model_states.pt", ("module",), tmp_path)
    kept, lost = planned(root, "deepspeed", dp=2), planned(root, "universal")
    assert kept.account.entries[OPAQUE].fate is Fate.KEPT
    assert kept.lossless
    assert lost.account.entries[OPAQUE].fate is Fate.LOST
    assert not lost.lossless


def test_the_item_has_the_path_and_the_file(tmp_path: Path) -> None:
    root = added(Z2, "zero_pp_rank_1_*optim_states.pt", ("optimizer_state_dict", "base_optimizer_state"), tmp_path)
    (path,) = (file.relative_to(root) for file in root.rglob("zero_pp_rank_1_*optim_states.pt"))
    name = f"optimizer_state_dict.base_optimizer_state.{STRANGE} in {path}"
    assert planned(root, "deepspeed").account.entries[Item(Kind.VALUE, name)].fate is Fate.LOST


def everywhere(golden: str, pattern: str, folder: Path, change: Callable[[Any, int], None]) -> Path:
    """A copy of a golden, with the trees of some files changed; each is told its number."""
    root = Path(shutil.copytree(ALL / golden, folder / "source"))
    for number, path in enumerate(sorted(root.rglob(pattern))):
        with edited(path) as tree:
            change(tree, number)
    return root


def lost(job: Job) -> list[str]:
    return [text for fate, text in job.report.lines if fate is Fate.LOST]


def test_what_a_state_dict_has_beside_tensors_is_lost_by_name(tmp_path: Path) -> None:
    """verl's rank files and universal ones have no place for it in any target."""
    verl = everywhere("verl/fsdp2_ws3", "model_*.pt", tmp_path / "a", lambda tree, _: tree.update(_extra_state="fp8"))
    assert any("_extra_state in model_world_size_3_rank_0.pt and 2 more" in text for text in lost(planned(verl, "dcp")))
    golden = "deepspeed/z2_bf16_ac_dp2/step3_uni"
    universal = everywhere(
        golden, "mp_rank_*.pt", tmp_path / "b", lambda tree, _: tree["module"].update(x_extra_state="fp8")
    )
    assert any("module.x_extra_state" in text for text in lost(planned(universal, "universal")))
    assert not planned(universal, "universal").lossless


@pytest.mark.parametrize("to", ["universal", "dcp", "hf", "deepspeed"])
def test_what_ranks_of_stage_3_have_of_their_own_is_lost_where_it_is_kept_once(to: str, tmp_path: Path) -> None:
    root = everywhere(
        "deepspeed/z3_bf16_frozen_dp2/step3", "*model_states.pt", tmp_path, lambda tree, rank: tree.update(seen=rank)
    )
    more = {"with_optimizer": True} if to == "hf" else {"dp": 4} if to == "deepspeed" else {}
    assert any("only rank 0's" in text and "seen" in text for text in lost(planned(root, to, **more)))
    if to == "deepspeed":
        assert planned(root, to).lossless


def test_a_buffer_of_which_ranks_of_stage_3_have_their_own_is_no_damage(tmp_path: Path) -> None:
    def change(tree: Any, rank: int) -> None:
        tree["module"]["seen"] = torch.full((3,), float(rank))
        tree["buffer_names"].append("seen")

    root = everywhere("deepspeed/z3_bf16_frozen_dp2/step3", "*model_states.pt", tmp_path, change)
    assert verify(root, ReadOptions(), Depth.DEEP).intact
    assert any("buffers that differ" in text and "seen" in text for text in lost(planned(root, "deepspeed")))
