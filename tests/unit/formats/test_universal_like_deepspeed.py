"""What DeepSpeed's own ``ds_to_universal`` made of a checkpoint is what we make of it, file by file; differences have reasons."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rlhf.convert import ConvertOptions, convert
from tests.helpers.plain_load import plain_load, same

GOLDENS = Path(__file__).parents[2] / "goldens" / "deepspeed"
NAMES = sorted(path.parent.name for path in GOLDENS.glob("*/step3_uni"))
STAGE3 = "z3_bf16_frozen_dp2"
FLAT = [name for name in NAMES if name != STAGE3]

LAYOUT_OF_THE_SOURCE = {"zero_stage", "group_paddings", "param_alignment_paddings", "partition_count"}
"""DeepSpeed carries them along; no universal loader reads them, and after a load in another layout they are wrong."""


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """For each golden, DeepSpeed's folder and ours."""
    folder = tmp_path_factory.mktemp("universal")
    for name in NAMES:
        convert(GOLDENS / name / "step3", folder / name, ConvertOptions(to="universal", fsync=False, workers=1))
    return {name: (GOLDENS / name / "step3_uni", folder / name / "step3_uni") for name in NAMES}


def _files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*.pt")}


def _tensor(tree: Any) -> torch.Tensor:
    return tree if isinstance(tree, torch.Tensor) else tree["param"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", NAMES)
def test_the_tracker_names_it(pairs: dict[str, tuple[Path, Path]], name: str) -> None:
    ours = pairs[name][1]
    assert (ours.parent / "latest_universal").read_text() == (GOLDENS / name / "latest_universal").read_text().strip()


@pytest.mark.parametrize("name", FLAT)
def test_parameters_files_are_equal(pairs: dict[str, tuple[Path, Path]], name: str) -> None:
    """Every tensor, key, type and the order of keys, in every file that both have."""
    theirs, ours = pairs[name]
    both = [
        file
        for file in sorted(_files(theirs) & _files(ours))
        if file.startswith("zero/") and "optimizer_state" not in file
    ]
    assert len(both) > 90
    for file in both:
        assert same(plain_load(theirs / file), plain_load(ours / file)) == [], file


def test_the_stage_3_flavour_has_the_same_elements(pairs: dict[str, tuple[Path, Path]]) -> None:
    """DeepSpeed writes bare flat tensors there, which stages 1 and 2 cannot load; ours have shape and ``cat_dim``."""
    theirs, ours = pairs[STAGE3]
    files = [file for file in sorted(_files(theirs)) if file.startswith("zero/") and "optimizer_state" not in file]
    shapes = plain_load(ours / "mp_rank_00_model_states.pt")["param_shapes"]
    for file in files:
        made = plain_load(ours / file)
        wanted = next(group[file.split("/")[1]] for group in shapes if file.split("/")[1] in group)
        assert made["param"].shape == wanted
        assert same(plain_load(theirs / file), made["param"].reshape(-1)) == [], file
        assert made["cat_dim"] == 0


@pytest.mark.parametrize("name", NAMES)
def test_which_files_only_one_of_us_writes(pairs: dict[str, tuple[Path, Path]], name: str) -> None:
    theirs, ours = pairs[name]
    states = plain_load(ours / "mp_rank_00_model_states.pt")
    integers = [b for b in states["buffer_names"] if not states["module"][b].is_floating_point()]
    aliases = list(states["shared_params"])
    if name == STAGE3:
        frozen = list(states["frozen_param_shapes"])  # DeepSpeed loses them on this way
        trained = [param for group in states["param_shapes"] for param in group]
        floats = [b for b in states["buffer_names"] if b not in integers]
        assert _files(theirs) - _files(ours) == {"zero_pp_rank_1_mp_rank_00_model_states.pt"}  # no loader reads it
        assert _files(ours) - _files(theirs) == {
            "mp_rank_00_model_states.pt",  # for stages 1 and 2
            *(f"zero/{param}/step.pt" for param in trained),  # for stages 1 and 2
            *(f"zero/{param}/fp32.pt" for param in [*frozen, *floats]),
        }
    else:
        # An alias is the same parameter, and DeepSpeed writes its rounded weights there, not the masters; fp32 cannot
        # hold an integer buffer. Both are in the module, exact.
        module = plain_load(theirs / "mp_rank_00_model_states.pt")["module"]
        dropped = [*aliases, *integers] if module is not None else []
        assert _files(theirs) - _files(ours) == {f"zero/{param}/fp32.pt" for param in dropped}
        ranks = len(list(theirs.glob("mp_rank_*")))
        assert _files(ours) - _files(theirs) == {
            f"zero_pp_rank_0_mp_rank_{rank:02d}_model_states.pt" for rank in range(ranks)
        }


@pytest.mark.parametrize("name", NAMES)
def test_the_optimizers_own_values_are_equal(pairs: dict[str, tuple[Path, Path]], name: str) -> None:
    theirs, ours = (plain_load(folder / "zero" / "optimizer_state.pt") for folder in pairs[name])
    sharded = {"optimizer_state_dict", "fp32_flat_groups"}  # in stage 3 the whole shard of rank 0
    kept = {key: value for key, value in theirs.items() if key not in LAYOUT_OF_THE_SOURCE | sharded}
    made = {key: value for key, value in ours.items() if key not in sharded}
    if name == STAGE3:
        assert made.pop("ds_version") == "0.19.8"  # which stages 1 and 2 want
    assert same(dict(sorted(kept.items())), dict(sorted(made.items()))) == []


@pytest.mark.parametrize("name", NAMES)
def test_stage_3_reads_what_all_groups_agree_on(pairs: dict[str, tuple[Path, Path]], name: str) -> None:
    """It copies the first group over all others: weight decay [0.1, 0] would become [0.1, 0.1]."""
    made = plain_load(pairs[name][1] / "zero" / "optimizer_state.pt")
    inner = made["optimizer_state_dict"]
    (first,) = inner["param_groups"]
    assert float(inner["state"][0]["step"]) == 3.0
    for key, value in first.items():
        assert key == "params" or all(group[key] == value for group in made["param_groups"])
    several = len(made["param_groups"]) > 1
    assert set(made["param_groups"][0]) - set(first) == ({"weight_decay"} if several else set())


@pytest.mark.parametrize("name", FLAT)
def test_client_state_and_counters_are_equal(pairs: dict[str, tuple[Path, Path]], name: str) -> None:
    theirs, ours = pairs[name]
    for path in sorted(theirs.glob("mp_rank_*_model_states.pt")):
        old, new, stage3 = (
            plain_load(path),
            plain_load(ours / path.name),
            plain_load(ours / f"zero_pp_rank_0_{path.name}"),
        )
        assert list(old) == list(new) == list(stage3)
        own = {"module", "param_shapes", "frozen_param_shapes", "frozen_param_fragments"}
        for made in (new, stage3):
            assert (
                same({k: v for k, v in old.items() if k not in own}, {k: v for k, v in made.items() if k not in own})
                == []
            )


@pytest.mark.parametrize("name", ["z1_bf16acc32_untied_dp2", "z1_fp32_tied_dp2", "z2_bf16_ac_dp2"])
def test_the_module_is_equal_and_ties_share_storage(pairs: dict[str, tuple[Path, Path]], name: str) -> None:
    theirs, ours = (plain_load(folder / "mp_rank_00_model_states.pt") for folder in pairs[name])
    assert same(theirs["module"], ours["module"]) == []
    assert same(theirs["param_shapes"], ours["param_shapes"]) == []
    for alias, owner in ours["shared_params"].items():
        assert ours["module"][alias].data_ptr() == ours["module"][owner].data_ptr()


def test_what_stage_3_and_pipelines_lose_is_in_the_module(pairs: dict[str, tuple[Path, Path]]) -> None:
    module = plain_load(pairs[STAGE3][1] / "mp_rank_00_model_states.pt")["module"]
    assert module["model.step_buf"].dtype == torch.int64
    assert module["model.embed_tokens.weight"].shape == (67, 20)  # frozen
    assert module["lm_head.weight"].shape == (0,)  # trained: it is its master, rounded
    stages = plain_load(pairs["pp2_z1_fp32_dp2"][1] / "mp_rank_00_model_states.pt")["module"]
    assert len(stages) == 59


def test_everything_that_deepspeed_gathered_is_there(pairs: dict[str, tuple[Path, Path]]) -> None:
    for name in ("z0_fp32_untied_dp1", "z3_fp32_tied_subgroups_dp4"):
        folder = pairs[STAGE3][1].parents[1] / name
        convert(GOLDENS / name / "step3", folder, ConvertOptions(to="universal", fsync=False, workers=1))
        for key, tensor in torch.load(GOLDENS / name / "expected.pt", weights_only=True)["state"].items():
            assert torch.equal(_tensor(plain_load(folder / "step3_uni" / "zero" / f"{key}.pt")), tensor), key
