"""``tools/zero_to_fp32.py`` and ``load_fp32_state_dict``: the weights of every stage, as one model under the model's own names."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file

import mcore_rlhf
from mcore_rlhf.errors import Corrupt, Incomplete, NotACheckpoint
from tests.helpers.damage import edited, flip
from tests.helpers.plain_load import plain_load
from tests.helpers.universal_by_hand import adam, write

PROJECT = Path(__file__).resolve().parents[3]
GOLDENS = PROJECT / "tests" / "goldens" / "deepspeed"
NAMES = sorted(path.name for path in GOLDENS.iterdir())
GATHERED = [name for name in NAMES if not name.startswith(("pp", "autotp"))]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "zero_to_fp32", PROJECT / "mcore_rlhf" / "cli" / "tools" / "zero_to_fp32.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", GATHERED)
def test_masters_are_what_deepspeed_gathered_from_the_engine(name: str) -> None:
    found = mcore_rlhf.load_fp32_state_dict(GOLDENS / name)
    expected = torch.load(GOLDENS / name / "expected.pt", weights_only=True)["state"]
    for key, tensor in expected.items():
        param, _, state = key.rpartition("/")
        assert state != "fp32" or torch.equal(found[param], tensor), param


@pytest.mark.parametrize("name", [name for name in NAMES if (GOLDENS / name / "step3_uni").is_dir()])
def test_native_and_universal_give_the_same(name: str) -> None:
    native, universal = (mcore_rlhf.load_fp32_state_dict(GOLDENS / name, tag) for tag in (None, "step3_uni"))
    assert set(native) == set(universal)
    assert all(torch.equal(native[key], universal[key]) and native[key].dtype == universal[key].dtype for key in native)


@pytest.mark.parametrize("name", ["z1_fp32_tied_dp2", "z2_bf16_ac_dp2", "z2_fp32_frozen_dp4"])
def test_keys_are_those_of_the_module_in_its_order(name: str) -> None:
    (path,) = (GOLDENS / name / "step3").glob("mp_rank_00_model_states.pt")
    module = plain_load(path)["module"]
    found = mcore_rlhf.load_fp32_state_dict(GOLDENS / name)
    assert list(found) == list(module)
    assert all(found[key].shape == module[key].shape for key in module)
    for key, tensor in found.items():
        assert tensor.dtype == (torch.float32 if module[key].is_floating_point() else module[key].dtype), key
        assert torch.equal(tensor.to(module[key].dtype), module[key]), key


def test_ties_are_one_tensor() -> None:
    found = mcore_rlhf.load_fp32_state_dict(GOLDENS / "z1_fp32_tied_dp2")
    assert found["lm_head.weight"] is found["model.embed_tokens.weight"]


def test_frozen_parameters_come_in_fp32_and_can_be_left_out() -> None:
    folder = GOLDENS / "z3_bf16_frozen_dp2"
    everything = mcore_rlhf.load_fp32_state_dict(folder)
    trained = mcore_rlhf.load_fp32_state_dict(folder, exclude_frozen_parameters=True)
    assert everything["model.embed_tokens.weight"].dtype == torch.float32
    assert len(everything) == 34
    assert set(everything) - set(trained) == {key for key in everything if "embed_tokens" in key or "layers.0." in key}


def test_damage_is_found_in_what_is_used_and_nowhere_else(tmp_path: Path) -> None:
    folder = write(tmp_path, {"w": adam(300), "v": adam(4)})
    flip(folder / "zero" / "w" / "exp_avg.pt", "data/0", 40)
    mcore_rlhf.load_fp32_state_dict(tmp_path)  # moments are not read
    flip(folder / "zero" / "w" / "fp32.pt", "data/0", 40)
    with pytest.raises(Corrupt, match=r"w/fp32\.pt"):
        mcore_rlhf.load_fp32_state_dict(tmp_path)


def test_an_unknown_tag(tmp_path: Path) -> None:
    write(tmp_path, {"w": adam(3)})
    with pytest.raises(NotACheckpoint, match="'step9'"):
        mcore_rlhf.load_fp32_state_dict(tmp_path, "step9")
    (tmp_path / "latest_universal").write_text("nothing")
    with pytest.raises(Incomplete, match="latest_universal"):
        mcore_rlhf.load_fp32_state_dict(tmp_path)


def _in(folder: Path) -> dict[str, torch.Tensor]:
    """Everything below a folder, as torch and safetensors read it."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.iterdir()):
        if path.suffix == ".safetensors":
            found |= load_file(path)
        elif path.suffix == ".bin":
            found |= torch.load(path, weights_only=True)
    return found


@pytest.mark.parametrize("flags", [[], ["--safe_serialization"]])
@pytest.mark.parametrize("size", ["5GB", "20KB", "1"])
def test_files_have_what_memory_has(tool: ModuleType, tmp_path: Path, flags: list[str], size: str) -> None:
    name = "z2_bf16_ac_dp2"
    assert tool.main([str(GOLDENS / name), str(tmp_path / "out"), "-t", "step3", "--max_shard_size", size, *flags]) == 0
    expected, found = mcore_rlhf.load_fp32_state_dict(GOLDENS / name), _in(tmp_path / "out")
    assert set(found) == set(expected)
    assert all(torch.equal(found[key], expected[key]) and found[key].dtype == expected[key].dtype for key in expected)
    _check_names(tmp_path / "out", "model.safetensors" if flags else "pytorch_model.bin", size, expected)


def _check_names(folder: Path, single: str, size: str, expected: dict[str, torch.Tensor]) -> None:
    """The names that Hugging Face's loaders look for."""
    stem, _, ending = single.rpartition(".")
    files = sorted(path.name for path in folder.iterdir() if path.suffix == f".{ending}")
    if size == "5GB":
        assert files == [single]
        assert not (folder / f"{single}.index.json").exists()
        return
    assert files == [f"{stem}-{n:05d}-of-{len(files):05d}.{ending}" for n in range(1, len(files) + 1)]
    index = json.loads((folder / f"{single}.index.json").read_text())
    assert set(index["weight_map"]) == set(expected)
    assert set(index["weight_map"].values()) == set(files)
    for file in files:
        names = [name for name, place in index["weight_map"].items() if place == file]
        owners = {expected[name].data_ptr(): expected[name].nbytes for name in names}
        assert sum(owners.values()) <= 20_000 or len(owners) == 1


def test_a_tie_takes_no_space_in_a_bin(tool: ModuleType, tmp_path: Path) -> None:
    assert tool.main([str(GOLDENS / "z1_fp32_tied_dp2"), str(tmp_path / "out")]) == 0
    found = torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True)
    assert found["lm_head.weight"].data_ptr() == found["model.embed_tokens.weight"].data_ptr()


def test_it_loads_into_a_model(tool: ModuleType, tmp_path: Path) -> None:
    """Strictly: every key of the state dict, buffers and ties included, and none too many."""
    write(tmp_path / "run", {"weight": adam(3, 4), "bias": adam(3)})
    assert tool.main([str(tmp_path / "run"), str(tmp_path / "out"), "--safe_serialization"]) == 0
    model = torch.nn.Linear(4, 3)
    model.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"), strict=True)
    assert torch.equal(model.weight, adam(3, 4)["fp32"])


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["{golden}", "{out}", "--max_shard_size", "many"], 2, "--max_shard_size: should be a size"),
        (["{golden}", "{out}", "-t", "step9"], 2, "'step9'"),
        (["{golden}", "{golden}/step3/x"], 2, "lies inside the source"),
        (["{tmp}/none", "{out}"], 2, "no such file or folder"),
        (["{empty}", "{out}"], 2, "not a checkpoint"),
    ],
)
def test_what_it_is_given_must_make_sense(
    tool: ModuleType, tmp_path: Path, arguments: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    values = {"golden": GOLDENS / "z1_fp32_tied_dp2", "out": tmp_path / "out", "tmp": tmp_path, "empty": tmp_path / "e"}
    (tmp_path / "e").mkdir()
    assert tool.main([argument.format(**values) for argument in arguments]) == code
    assert words in capsys.readouterr().err
    assert [path.name for path in tmp_path.rglob("*")] == ["e"]


def test_the_output_may_lie_in_the_run(tool: ModuleType, tmp_path: Path) -> None:
    """As in ``cd RUN; python zero_to_fp32.py . output``; but not in the checkpoint, and not in its place."""
    folder = write(tmp_path, {"w": adam(3)})
    assert tool.main([str(tmp_path), str(tmp_path / "output")]) == 0
    for wrong in (folder / "output", folder, tmp_path):
        assert tool.main([str(tmp_path), str(wrong), "--overwrite"]) == 2
    assert list(mcore_rlhf.load_fp32_state_dict(tmp_path)) == ["w"]


def test_an_existing_target_is_replaced_only_when_asked(tool: ModuleType, tmp_path: Path) -> None:
    write(tmp_path / "run", {"w": adam(3)})
    command = [str(tmp_path / "run"), str(tmp_path / "out")]
    assert [tool.main(command), tool.main(command), tool.main([*command, "--overwrite"])] == [0, 2, 0]


def test_parameters_that_are_nowhere_are_named(tmp_path: Path) -> None:
    folder = write(tmp_path, {"w": adam(3)}, top={"param_shapes": [{"w": torch.Size((3,)), "gone": torch.Size((2,))}]})
    with pytest.raises(Incomplete, match="gone"):
        mcore_rlhf.load_fp32_state_dict(tmp_path)
    with edited(folder / "mp_rank_00_model_states.pt") as tree:
        del tree["param_shapes"][0]["gone"]
    assert list(mcore_rlhf.load_fp32_state_dict(tmp_path)) == ["w"]
