"""Written DeepSpeed checkpoints: read back by the naive merge, bit for bit, and compared with DeepSpeed's own files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from mcore_rlhf.cli.app import app
from mcore_rlhf.convert import ConvertOptions, convert
from mcore_rlhf.core.catalog import PARAM
from mcore_rlhf.core.facts import Fate
from mcore_rlhf.errors import Unsupported
from mcore_rlhf.families.options import ReadOptions, WriteOptions
from mcore_rlhf.formats.deepspeed import FORMAT
from mcore_rlhf.verify.checkpoint import Depth, verify
from tests.helpers.conversions import options
from tests.helpers.deepspeed_goldens import NAMES, opened, tag, tensor
from tests.helpers.plain_load import plain_load, same
from tests.helpers.zero_reader import MASTER, Merged, read_zero

MODEL_PARALLEL = ("pp2_z1_fp32_dp2", "autotp2_z1_bf16_dp1")
ALONE = tuple(name for name in NAMES if name not in MODEL_PARALLEL)
TARGETS = ((0, 1), (1, 3), (2, 1), (2, 4), (3, 3))


def written(name: str, folder: Path, **write: object) -> Path:
    """A golden, converted; the root."""
    convert(tag(name), folder / "target", _to_deepspeed(**write))
    return folder / "target"


def _to_deepspeed(**write: object) -> ConvertOptions:
    return replace(options(**write), to="deepspeed")


def assert_states_equal(name: str, merged: Merged, stage: int) -> None:
    """Every master and state of a golden, as its catalogue has it, is in the merged target, and nothing else is."""
    source = opened(name)
    trained = [spec for spec in source.model.params if spec.trainable]
    fp32 = all(spec.dtype.name == "float32" for spec in trained)
    states = [s for s in dict.fromkeys((MASTER, *source.states)) if not (stage == 0 and fp32 and s == MASTER)]
    assert set(merged.states) == {(spec.name, state) for spec in trained for state in states}
    for (param, state), found in merged.states.items():
        whole = tensor(source, param, state)
        whole = tensor(source, param, PARAM) if whole is None else whole
        assert whole is not None
        assert torch.equal(found, whole), (param, state)


def _pairs() -> list[Any]:
    """Every golden at two of the targets, or at one; the others are slow."""
    return [
        pytest.param(name, stage, dp, marks=[] if (row + column) % 3 == 0 else [pytest.mark.slow])
        for row, name in enumerate(ALONE)
        for column, (stage, dp) in enumerate(TARGETS)
    ]


@pytest.mark.parametrize(("name", "stage", "dp"), _pairs())
def test_any_stage_and_degree_holds_the_same(name: str, stage: int, dp: int, tmp_path: Path) -> None:
    root = written(name, tmp_path, zero_stage=stage, dp=dp)
    assert (root / "latest").read_text() == "step3"
    source, merged = opened(name), read_zero(root / "step3")
    assert_states_equal(name, merged, stage)
    for spec in source.model.params:
        whole = tensor(source, spec.name, PARAM)
        if whole is None:
            master = tensor(source, spec.name, MASTER)
            assert master is not None
            whole = master.to(getattr(torch, spec.dtype.name))
        if stage < 3 or not spec.trainable:
            assert torch.equal(merged.param[spec.name], whole), spec.name
    assert merged.groups == [list(group.params) for group in source.state.groups]
    for group, settings in zip(source.state.groups, merged.settings, strict=True):
        assert settings == {key: value for key, value in group.fields.items() if key != "step"}
        assert {merged.step[param] for param in group.params} == {float(group.fields["step"])}  # type: ignore[arg-type]
    top = merged.top
    assert (top["dp_world_size"], top["global_steps"], top["global_samples"]) == (dp, 3, 24)
    assert (top["ppo_iteration"], top["lr_scheduler"]) == (21, {"last_batch_iteration": 2})
    assert verify(root, ReadOptions(), Depth.DEEP).intact


@pytest.mark.parametrize("name", NAMES)
def test_unchanged_files_are_those_that_deepspeed_wrote(name: str, tmp_path: Path) -> None:
    """Keys, their order, types, values and tensors: only what a comment here says differs."""
    root = written(name, tmp_path)
    theirs, ours = (sorted(path.name for path in folder.iterdir()) for folder in (tag(name), root / "step3"))
    assert ours == theirs
    differing = [
        line for file in ours for line in same(plain_load(tag(name) / file), plain_load(root / "step3" / file), file)
    ]
    expected = []
    if name.startswith("z0"):  # names of the numbered states, which DeepSpeed leaves out and ignores
        expected = ["mp_rank_00_model_states.pt/param_shapes: NoneType and list"]
    assert differing == expected


@pytest.mark.parametrize(("name", "stage", "dp"), [("pp2_z1_fp32_dp2", 1, 3), ("autotp2_z1_bf16_dp1", 2, 2)])
def test_model_parallel_ranks_stay_and_their_optimizers_are_cut_anew(
    name: str, stage: int, dp: int, tmp_path: Path
) -> None:
    root = written(name, tmp_path, zero_stage=stage, dp=dp)
    for mp_rank in range(2):
        before, after = read_zero(tag(name), mp_rank), read_zero(root / "step3", mp_rank)
        assert before.states.keys() == after.states.keys()
        assert all(torch.equal(value, after.states[key]) for key, value in before.states.items())
        assert torch.equal(before.top["rng_state"], after.top["rng_state"])
        assert all(torch.equal(value, after.param[key]) for key, value in before.param.items())
    layers = sorted(path.name for path in tag(name).glob("layer_*"))
    assert layers == sorted(path.name for path in (root / "step3").glob("layer_*"))
    for layer in layers:
        assert same(plain_load(tag(name) / layer), plain_load(root / "step3" / layer)) == []


def test_there_and_back_is_the_genuine_file_again(tmp_path: Path) -> None:
    """Stage 2 → 3 on three ranks → 0 → 2: in the end every file is as DeepSpeed wrote it.

    But for one thing: stage 0 does not say whether the model has frozen parameters that were left out, and None is right for
    both, where an empty dictionary is not.
    """
    name, path = "z2_bf16_ac_dp2", tag("z2_bf16_ac_dp2")
    for number, (stage, dp) in enumerate([(3, 3), (0, 1), (2, 2)]):
        convert(path, tmp_path / str(number), _to_deepspeed(zero_stage=stage, dp=dp))
        path = tmp_path / str(number) / "step3"
    for file in sorted(item.name for item in path.iterdir()):
        both = ("frozen_param_shapes", "frozen_param_fragments") if "model_states" in file else ()
        unsaid = [f"{file}/{key}: OrderedDict and NoneType" for key in both]
        assert same(plain_load(tag(name) / file), plain_load(path / file), file) == unsaid


def test_every_step_is_an_object_of_its_own(tmp_path: Path) -> None:
    """Torch counts steps in place: parameters that shared one would count it as often as there are parameters."""
    for number, (stage, dp) in enumerate([(0, 1), (3, 1)]):
        folder = tmp_path / str(number)
        root = written("z3_fp32_tied_subgroups_dp4", folder, zero_stage=stage, dp=dp)
        if stage == 0:
            states = plain_load(root / "step3" / "mp_rank_00_model_states.pt")["optimizer"]["state"]
        else:
            file = root / "step3" / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
            states = plain_load(file)["optimizer_state_dict"]["optimizer_state_dict"]["state"]
        assert len({state["step"].data_ptr() for state in states.values()}) == len(states) > 1


def test_aliases_share_their_owners_storage(tmp_path: Path) -> None:
    module = plain_load(written("z1_fp32_tied_dp2", tmp_path) / "step3" / "mp_rank_00_model_states.pt")["module"]
    assert module["lm_head.weight"].data_ptr() == module["model.embed_tokens.weight"].data_ptr()


def test_weights_alone(tmp_path: Path) -> None:
    root = written("z3_bf16_frozen_dp2", tmp_path, no_optimizer=True)
    assert [path.name for path in (root / "step3").iterdir()] == ["mp_rank_00_model_states.pt"]
    source = FORMAT.read(root, ReadOptions())
    assert (source.optimizer, source.states) == (None, ())
    before = opened("z3_bf16_frozen_dp2")
    for spec in before.model.params:
        whole = tensor(before, spec.name, MASTER if spec.trainable else PARAM)
        assert whole is not None
        assert torch.equal(tensor(source, spec.name, PARAM), whole.to(getattr(torch, spec.dtype.name)))  # type: ignore[arg-type]


def test_another_dtype_rounds_masters_and_keeps_them(tmp_path: Path) -> None:
    root = written("z1_fp32_tied_dp2", tmp_path, zero_stage=2, dp=2, dtype="bf16")
    assert len(list((root / "step3").glob("bf16_zero_pp_rank_*"))) == 2
    merged = read_zero(root / "step3")
    for (param, state), whole in merged.states.items():
        if state == MASTER:
            assert torch.equal(merged.param[param], whole.bfloat16())
    assert merged.param["model.scale_buf"].dtype == torch.float32


def test_the_report_says_what_became_of_what() -> None:
    target = FORMAT.target(opened("z3_bf16_frozen_dp2"), WriteOptions(zero_stage=2, dp=4))
    lines = {text: fate for fate, text in target.report.lines}
    assert lines["ZeRO 3 on DP 2 becomes ZeRO 2 on DP 4"] is Fate.CHANGED
    assert any("rounded from their fp32 masters" in text for text in lines)
    lost = FORMAT.target(opened("z2_bf16_ac_dp2"), WriteOptions(no_optimizer=True)).report.lost
    assert lost == ["the optimizer: left out, as --no-optimizer asks"]


@pytest.mark.parametrize(
    ("name", "write", "kind", "words"),
    [
        ("z2_bf16_ac_dp2", {"tp": 2}, Unsupported, "--tp 2"),
        ("z2_bf16_ac_dp2", {"pp": 2}, Unsupported, "--to universal"),
        ("z2_bf16_ac_dp2", {"zero_stage": 3, "no_optimizer": True}, Unsupported, "stage 3 keeps the weights"),
        ("pp2_z1_fp32_dp2", {"zero_stage": 2}, Unsupported, "PipelineModule"),
        ("pp2_z1_fp32_dp2", {"zero_stage": 0}, Unsupported, "PipelineModule"),
    ],
)
def test_what_deepspeed_has_no_files_for_is_refused(
    name: str, write: dict[str, object], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        FORMAT.target(opened(name), WriteOptions(**write))  # type: ignore[arg-type]


def test_a_pipeline_modules_layer_files_are_made_of_native_ones_alone(tmp_path: Path) -> None:
    source = tag("pp2_z1_fp32_dp2").parent
    convert(source, tmp_path / "torch", ConvertOptions(to="torch", fsync=False))
    with pytest.raises(Unsupported, match=r"a PipelineModule.*\n.*--to universal"):
        convert(tmp_path / "torch", tmp_path / "back", _to_deepspeed(dp=2))


def test_other_families_are_refused() -> None:
    from tests.helpers.conversions import GOLDENS

    source = __import__("mcore_rlhf.formats.megatron", fromlist=["FORMAT"]).FORMAT.read(
        GOLDENS / "tp1_bf16_do", ReadOptions()
    )
    with pytest.raises(Unsupported, match="from megatron to deepspeed"):
        FORMAT.target(source, WriteOptions())


@pytest.mark.parametrize(("stage", "dp"), [(1, 2), (3, 3), (0, 1)])
def test_tensor_parallel_parts_can_be_put_together(stage: int, dp: int, tmp_path: Path) -> None:
    name = "autotp2_z1_bf16_dp1"
    root = written(name, tmp_path, zero_stage=stage, dp=dp, tp=1)
    merged = read_zero(root / "step3")
    assert_states_equal(name, merged, stage)
    assert (merged.top["mp_world_size"], "universal_checkpoint_info" in merged.top) == (1, False)


def test_diff_sees_through_stages(tmp_path: Path) -> None:
    from mcore_rlhf.storage.reading import OpenFiles
    from mcore_rlhf.verify.differ import Differ

    root = written("z2_bf16_ac_dp2", tmp_path, zero_stage=3, dp=3)
    a, b = opened("z2_bf16_ac_dp2"), FORMAT.read(root, ReadOptions())
    with OpenFiles(a.root) as files_a, OpenFiles(b.root) as files_b:
        result = Differ(a, b, files_a, files_b).compare()
    assert result.equal, result.differences
    assert result.tensors == len(a.catalog)
    assert any("masters only" in note for note in result.notes)


@pytest.mark.parametrize(
    "name", ["z1_fp32_tied_dp2", "z2_bf16_ac_dp2", "z3_bf16_frozen_dp2", "z1_bf16acc32_untied_dp2"]
)
def test_universal_checkpoints_of_deepspeed_become_native_again(name: str, tmp_path: Path) -> None:
    """Both flavours of DeepSpeed's own converter; the frozen parameters that it leaves out are found in its model files."""
    universal = tag(name).with_name("step3_uni")
    convert(universal, tmp_path / "native", replace(options(zero_stage=2, dp=3), to="deepspeed"))
    merged = read_zero(tmp_path / "native" / "step3")
    assert_states_equal(name, merged, 2)
    for spec in opened(name).model.params:
        whole = tensor(opened(name), spec.name, PARAM)
        assert whole is None or torch.equal(merged.param[spec.name], whole), spec.name
    assert merged.groups == [list(group.params) for group in opened(name).state.groups]


def test_the_command_line_takes_a_stage(tmp_path: Path) -> None:
    runner = CliRunner()
    source, target = str(tag("z1_fp32_tied_dp2")), tmp_path / "target"
    given = ["convert", source, str(target), "--to", "deepspeed", "--zero-stage", "0", "--dp", "1", "--no-fsync"]
    done = runner.invoke(app, given)
    assert done.exit_code == 0, done.output
    assert [path.name for path in (target / "step3").iterdir()] == ["mp_rank_00_model_states.pt"]
    wrong = runner.invoke(app, ["plan", source, "--to", "deepspeed", "--zero-stage", "4"])
    assert wrong.exit_code == 2
    assert "zero-stage" in wrong.output
