"""What is written of sources that DeepSpeed's own converter cannot have made: patterns, padded vocabularies, other optimizers."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rlhf.convert import ConvertOptions, Job, convert
from mcore_rlhf.core.catalog import MASTER, TensorName
from mcore_rlhf.core.chunks import Chunks
from mcore_rlhf.errors import CheckpointError, Incomplete, LayoutMismatch, Unsupported, UsageError
from mcore_rlhf.families.options import ReadOptions, WriteOptions
from mcore_rlhf.families.universal_info import UniversalCheckpointInfo
from mcore_rlhf.formats.registry import format_named, open_checkpoint
from mcore_rlhf.formats.universal import FORMAT
from mcore_rlhf.verify.checkpoint import verify
from tests.helpers.damage import edited
from tests.helpers.plain_load import plain_load, same
from tests.helpers.universal_by_hand import FIELDS, adam, write
from tests.helpers.zero_reader import read_zero

GOLDENS = Path(__file__).parents[2] / "goldens"
ROW = "parameter_with_row_parallelism_patterns"
REPLICATED = "tp_replicated_parameter_patterns"
HALVES = "parameter_with_2_sub_params_cat_dim_0"
VOCABULARY = "vocabulary_parameter_patterns"


def _convert(source: Path, target: Path, **write_options: Any) -> Job:
    options = ConvertOptions(to="universal", fsync=False, workers=1, write=WriteOptions(**write_options))
    return convert(source, target, options)


def _zero(root: Path) -> Path:
    (folder,) = root.glob("*_uni")
    return folder / "zero"


@pytest.fixture
def native(tmp_path: Path) -> Path:
    """A copy of a native checkpoint, for patterns to be put into."""
    return Path(shutil.copytree(GOLDENS / "deepspeed" / "z1_fp32_tied_dp2" / "step3", tmp_path / "run" / "step3"))


def _say(native: Path, **info: Any) -> None:
    with edited(native / "mp_rank_00_model_states.pt") as tree:
        tree["universal_checkpoint_info"] = {"universal_checkpoint_version": 0.2, **info}


def test_patterns_become_keys(native: Path, tmp_path: Path) -> None:
    """As in ``merge_tp_slices``: row parallel ones are joined along dimension 1, replicated ones not at all."""
    _say(
        native,
        **{
            ROW: [r".*\.(o_proj|down_proj)\.weight"],
            REPLICATED: [r".*norm\.(weight|bias)"],
            HALVES: [r".*\.gate_proj\.weight"],
        },
    )
    _convert(native, tmp_path / "out")
    zero = _zero(tmp_path / "out")
    for param, keys in {
        "model.layers.1.self_attn.o_proj.weight": {"cat_dim": 1},
        "model.layers.0.mlp.down_proj.weight": {"cat_dim": 1},
        "model.layers.0.self_attn.q_proj.bias": {"cat_dim": 0},
        "model.layers.0.input_layernorm.bias": {},
        "model.layers.0.mlp.gate_proj.weight": {"cat_dim": 0, "param_n_sub_params": 2},
    }.items():
        for state in ("fp32", "exp_avg", "exp_avg_sq"):
            tree = plain_load(zero / param / f"{state}.pt")
            assert {key: value for key, value in tree.items() if key != "param"} == keys, (param, state)


@pytest.mark.parametrize(("given", "rows"), [(None, 61), (50, 50), (99, 67)])
def test_padding_of_a_vocabulary_is_cut_in_every_state(
    native: Path, tmp_path: Path, given: int | None, rows: int
) -> None:
    _say(native, **{VOCABULARY: [r"model\.embed_tokens\.weight"], "original_vocab_size": 61})
    _convert(native, tmp_path / "out", vocab_size=given)
    expected = torch.load(GOLDENS / "deepspeed" / "z1_fp32_tied_dp2" / "expected.pt", weights_only=True)["state"]
    for state in ("fp32", "exp_avg", "exp_avg_sq"):
        tree = plain_load(_zero(tmp_path / "out") / "model.embed_tokens.weight" / f"{state}.pt")
        assert list(tree) == ["cat_dim", "vocab_tensor", "param"]
        assert torch.equal(tree["param"], expected[f"model.embed_tokens.weight/{state}"][:rows])
    again = open_checkpoint(tmp_path / "out", ReadOptions())
    spec = again.model.get("model.embed_tokens.weight")
    assert spec is not None
    assert (spec.global_shape, spec.partition.vocabulary) == ((rows, 20), True)


@pytest.mark.parametrize("kind", [ROW, REPLICATED, VOCABULARY, HALVES])
def test_a_pattern_that_matches_nothing(native: Path, tmp_path: Path, kind: str) -> None:
    _say(native, **{kind: [r".*\.no_such\.weight"], "original_vocab_size": 61})
    with pytest.raises(LayoutMismatch, match=rf"{kind}: '.*no_such.*' matches no parameter"):
        _convert(native, tmp_path / "out")
    _convert(native, tmp_path / "out", unused_patterns=True)


@pytest.mark.parametrize("kind", [ROW, REPLICATED, VOCABULARY, HALVES])
def test_patterns_that_match_twice(native: Path, tmp_path: Path, kind: str) -> None:
    _say(native, **{kind: [r".*\.o_proj\.weight", r"model\.layers\.1\..*_proj\.weight"], "original_vocab_size": 61})
    with pytest.raises(LayoutMismatch, match=r"layers\.1\.self_attn\.o_proj\.weight matches .* and "):
        _convert(native, tmp_path / "out", unused_patterns=True)


def test_layouts_that_cannot_be_written_are_refused() -> None:
    sub = UniversalCheckpointInfo(
        {"parameter_with_sub_params": [{"patterns": ["qkv"], "shape": (3, -1), "partition_dim": 0}]}
    )
    with pytest.raises(Unsupported, match="sub-parameters"):
        sub.keys("qkv.weight")
    assert sub.keys("dense.weight") == {"cat_dim": 0}
    with pytest.raises(Unsupported, match="cannot be converted"):
        UniversalCheckpointInfo({"autotp_unsupported_parameter_patterns": {"conv": "why"}}).keys("conv.weight")


def test_an_affine_map_takes_precedence() -> None:
    info = {"affine_map": {"version": 1, "params": {r"^q\.weight$": {}}}, ROW: [r"q\.weight", r"o\.weight"]}
    found = UniversalCheckpointInfo.of({"universal_checkpoint_info": info})
    assert (found.keys("q.weight"), found.keys("o.weight")) == ({}, {"cat_dim": 1})


def test_a_universal_sources_keys_are_kept(tmp_path: Path) -> None:
    keys = {"cat_dim": 1, "param_n_sub_params": 2, "vocab_tensor": True, "is_expert_param": True, "ep_num_experts": 4}
    source = write(tmp_path / "a", {"w": adam(4, 3)}, keys=keys)
    _convert(source, tmp_path / "b")
    for state in ("fp32", "exp_avg", "exp_avg_sq"):
        assert (
            same(
                plain_load(source / "zero" / "w" / f"{state}.pt"),
                plain_load(_zero(tmp_path / "b") / "w" / f"{state}.pt"),
            )
            == []
        )


@pytest.mark.parametrize("step", [7, 7.0, None])
def test_other_optimizers_and_odd_shapes_come_through(tmp_path: Path, step: float | None) -> None:
    shapes: dict[str, tuple[int, ...]] = {
        "scalar": (),
        "one": (1,),
        "none": (0, 3),
        "cube": (2, 3, 4),
        "a/b.weight": (5,),
    }
    states = ("fp32", "momentum_buffer", "ema.slow")
    made = {name: {state: torch.randn(shape) for state in states} for name, shape in shapes.items()}
    groups = [{**FIELDS, "weight_decay": w, "params": [i]} for i, w in enumerate((0.1, 0.0))]
    top = {
        "param_shapes": [
            {n: torch.Size(shapes[n]) for n in list(shapes)[:2]},
            {n: torch.Size(shapes[n]) for n in list(shapes)[2:]},
        ]
    }
    source = write(tmp_path / "a", made, step=step, groups=groups, top=top)
    job = _convert(source, tmp_path / "b")
    folder = _zero(tmp_path / "b")
    for name in shapes:
        for state in states:
            assert (
                same(plain_load(source / "zero" / name / f"{state}.pt"), plain_load(folder / name / f"{state}.pt"))
                == []
            )
        assert (folder / name / "step.pt").exists() == (step is not None)
        if step is not None:
            assert same(plain_load(source / "zero" / name / "step.pt"), plain_load(folder / name / "step.pt")) == []
    made_groups = plain_load(folder / "optimizer_state.pt")["param_groups"]
    assert same(groups, made_groups) == []
    assert any("stage 3 restores Adam's states only" in text for _, text in job.report.lines)


@pytest.mark.parametrize("scheduler", [None, {"last_batch_iteration": 6}])
def test_stage_3_gets_the_first_groups_rate_where_a_scheduler_sets_the_others(
    tmp_path: Path, scheduler: dict[str, int] | None
) -> None:
    made = {name: adam(4, 3) for name in ("a", "b")}
    groups = [
        {**FIELDS, "weight_decay": w, "lr": r, "params": [i]} for i, (w, r) in enumerate([(0.1, 2e-3), (0.0, 1e-3)])
    ]
    shapes = [{name: torch.Size((4, 3))} for name in made]
    source = write(tmp_path / "a", made, groups=groups, top={"param_shapes": shapes, "lr_scheduler": scheduler})
    job = _convert(source, tmp_path / "b")
    stored = plain_load(_zero(tmp_path / "b") / "optimizer_state.pt")
    (found,) = stored["optimizer_state_dict"]["param_groups"]
    assert found.get("lr") == (None if scheduler is None else 2e-3)
    assert "weight_decay" not in found
    assert found.get("eps") == FIELDS["eps"]
    assert [group["lr"] for group in stored["param_groups"]] == [2e-3, 1e-3]
    said = [text for _, text in job.report.lines if "differ" in text]
    assert any(text.startswith("lr differs") for text in said) is (scheduler is not None)
    assert any(
        "weight_decay" in text and ("lr" in text) is (scheduler is None) for text in said if "are left out" in text
    )


def test_without_the_optimizer_there_are_weights_alone(tmp_path: Path) -> None:
    source = write(tmp_path / "a", {"w": adam(4, 3)})
    job = _convert(source, tmp_path / "b", no_optimizer=True)
    assert sorted(
        path.relative_to(_zero(tmp_path / "b")).as_posix() for path in _zero(tmp_path / "b").rglob("*.pt")
    ) == ["w/fp32.pt"]
    assert not job.lossless
    assert torch.equal(
        plain_load(_zero(tmp_path / "b") / "w" / "fp32.pt")["param"], plain_load(source / "zero/w/fp32.pt")["param"]
    )


@pytest.mark.parametrize("name", ["z2_bf16_ac_dp2", "z0_fp32_untied_dp1", "z3_bf16_frozen_dp2"])
def test_a_checkpoint_of_weights_alone_is_read_again(name: str, tmp_path: Path) -> None:
    """What has no optimizer is complete without one; and goes on to native files of the same weights."""
    read = ReadOptions(optimizer=False)
    options = ConvertOptions(to="universal", fsync=False, read=read, write=WriteOptions(no_optimizer=True))
    convert(GOLDENS / "deepspeed" / name / "step3", tmp_path / "uni", options)
    source = open_checkpoint(tmp_path / "uni", ReadOptions())
    assert (source.optimizer, source.states, source.state.groups) == (None, (), ())
    assert verify(tmp_path / "uni", ReadOptions()).intact
    job = _convert(tmp_path / "uni", tmp_path / "again")
    assert job.lossless
    assert any("the source has none" in text for _, text in job.report.lines)
    convert(tmp_path / "uni", tmp_path / "native", replace(options, to="deepspeed", read=ReadOptions()))
    expected = GOLDENS / "deepspeed" / name / "expected.pt"
    merged = read_zero(tmp_path / "native" / "step3").param
    masters = {key: value for key, value in plain_load(expected)["state"].items() if key.endswith("/fp32")}
    assert masters
    for key, value in masters.items():
        weight = merged[key.removesuffix("/fp32")]
        assert torch.equal(weight, value.to(weight.dtype)), key


def test_states_without_the_optimizers_file_are_incomplete(tmp_path: Path) -> None:
    source = write(tmp_path / "a", {"w": adam(4, 3)})
    (source / "zero" / "optimizer_state.pt").unlink()
    with pytest.raises(Incomplete, match=r"optimizer_state\.pt"):
        open_checkpoint(source, ReadOptions())


def _without_masters(catalog: Chunks, params: set[str]) -> Chunks:
    """A table that lost the masters of some parameters."""
    return Chunks.of(e for e in catalog.entries() if e.name.state != MASTER or e.name.param not in params)


def test_parameters_without_masters_are_refused_by_name() -> None:
    source = open_checkpoint(GOLDENS / "deepspeed" / "z2_bf16_ac_dp2" / "step3", ReadOptions())
    lost = {"critic.value_head.weight", "actor.model.norm.bias"}
    with pytest.raises(
        Incomplete,
        match=r"(?s)2 problems.*actor\.model\.norm\.bias: has no fp32 master.*critic\.value_head\.weight.*--no-opt",
    ):
        FORMAT.target(replace(source, catalog=_without_masters(source.catalog, lost)), WriteOptions())


def test_fp32_parameters_are_their_own_masters() -> None:
    source = open_checkpoint(GOLDENS / "deepspeed" / "z1_fp32_tied_dp2" / "step3", ReadOptions())
    everything = {spec.name for spec in source.model.params}
    target = FORMAT.target(replace(source, catalog=_without_masters(source.catalog, everything)), WriteOptions())
    assert any("copies of the parameters" in text for _, text in target.report.lines)
    entry = target.source.get(TensorName("actor", "lm_head.weight", MASTER)) or target.source.get(
        TensorName("actor", "model.embed_tokens.weight", MASTER)
    )
    assert entry is not None


@pytest.mark.parametrize(
    "option", [{"tp": 2}, {"dp": 4}, {"zero_stage": 3}, {"dtype": "bf16"}, {"rng": "drop"}, {"optimizer": "plain"}]
)
def test_options_about_a_layout_have_no_meaning(tmp_path: Path, option: dict[str, Any]) -> None:
    source = write(tmp_path / "a", {"w": adam(2)})
    flag = "--" + next(iter(option)).replace("_", "-")
    with pytest.raises(UsageError, match=f"{flag}: means nothing with --to universal"):
        _convert(source, tmp_path / "b", **option)


def test_other_families_are_not_this_formats_business(tmp_path: Path) -> None:
    megatron = open_checkpoint(GOLDENS / "megatron" / "tp1_bf16_do", ReadOptions())
    with pytest.raises(Unsupported, match="from megatron to universal: this pair"):
        FORMAT.target(megatron, WriteOptions())
    source = open_checkpoint(write(tmp_path / "a", {"w": adam(2)}), ReadOptions())
    with pytest.raises(CheckpointError, match="from universal to megatron"):
        format_named("megatron").target(source, WriteOptions())


def test_writing_is_bounded_in_memory_and_order_does_not_matter(tmp_path: Path) -> None:
    """Many workers and tiny windows give the same bytes as one worker with large ones."""
    source = GOLDENS / "deepspeed" / "z3_fp32_tied_subgroups_dp4" / "step3"
    many = ConvertOptions(to="universal", fsync=False, workers=4, max_memory=1 << 20)
    convert(source, tmp_path / "many", many)
    _convert(source, tmp_path / "one")
    files = [path.relative_to(tmp_path / "one") for path in (tmp_path / "one").rglob("*.pt")]
    assert len(files) > 120
    assert all((tmp_path / "one" / file).read_bytes() == (tmp_path / "many" / file).read_bytes() for file in files)
