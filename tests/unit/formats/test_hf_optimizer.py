"""``--with-optimizer``: what has no place in a Hugging Face folder lies beside the weights, and comes back exactly."""

from __future__ import annotations

import json
import math
import shutil
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from mcore_rlhf.convert import ConvertOptions, Job, convert
from mcore_rlhf.core.catalog import dtype_of
from mcore_rlhf.core.facts import Fate
from mcore_rlhf.engines.stateful import torch_values
from mcore_rlhf.errors import CheckpointError, Corrupt, Incomplete, LayoutMismatch, Unsupported, Untrusted
from mcore_rlhf.families.options import ReadOptions, WriteOptions
from mcore_rlhf.formats.registry import open_checkpoint
from mcore_rlhf.storage.exact_json import MAX_ARRAY_NBYTES, Encoder, decode
from mcore_rlhf.storage.stored import Namespace, new_stub, stub_class
from mcore_rlhf.storage.torch_values import SmallTensor, TorchDtype, TorchSize
from tests.helpers import universal_by_hand
from tests.helpers.conversions import golden
from tests.helpers.independent_reader import read
from tests.helpers.plain_load import bits, plain_load, same
from tests.helpers.universal_by_hand import adam
from tests.unit.formats.hf_by_hand import CONFIG
from tests.unit.formats.test_crossing_values import GOLDENS as MEGATRON
from tests.unit.formats.test_crossing_values import split_by_hand

DEEPSPEED = Path(__file__).parents[2] / "goldens" / "deepspeed"
RUNS = ("z0_fp32_untied_dp1", "z1_bf16acc32_untied_dp2", "z1_fp32_tied_dp2", "z2_bf16_ac_dp2", "z3_bf16_frozen_dp2")


def converted(source: Path, target: Path, to: str, *, read: ReadOptions | None = None, **write: Any) -> Job:
    options = ConvertOptions(to=to, workers=1, fsync=False, read=read or ReadOptions(), write=WriteOptions(**write))
    return convert(source, target, options)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an optimizer beside its weights."""
    folder = tmp_path_factory.mktemp("kept") / "hf"
    converted(DEEPSPEED / "z2_bf16_ac_dp2" / "step3", folder, "hf", with_optimizer=True)
    return folder


@pytest.fixture
def mine(kept: Path, tmp_path: Path) -> Path:
    """A copy of it to be damaged."""
    return Path(shutil.copytree(kept, tmp_path / "hf"))


@pytest.mark.parametrize("name", RUNS)
def test_by_way_of_a_folder_or_directly_deepspeeds_files_are_the_same(name: str, tmp_path: Path) -> None:
    """Every object in every file: tensors, groups, steps, scheduler, loss scaler, client state, and their order."""
    source = DEEPSPEED / name / "step3"
    converted(source, tmp_path / "direct", "deepspeed")
    job = converted(source, tmp_path / "hf", "hf", with_optimizer=True)
    assert job.report.lost == []
    converted(tmp_path / "hf", tmp_path / "back", "deepspeed", dp=int(name[-1]))
    direct = {path.name: plain_load(path) for path in (tmp_path / "direct" / "step3").iterdir()}
    back = {path.name: plain_load(path) for path in (tmp_path / "back" / "step3").iterdir()}
    assert set(direct) == set(back)
    assert [line for file in direct for line in same(direct[file], back[file], file)] == []


def test_a_run_of_megatrons_comes_back(tmp_path: Path) -> None:
    """States are those that a split by hand finds, and back in Megatron all are as they were."""
    name = "tp2pp2dp2_bf16_do"
    job = converted(MEGATRON / name, tmp_path / "hf", "hf", with_optimizer=True)
    expected = split_by_hand(golden(name).tensors)
    for state in ("master", "exp_avg", "exp_avg_sq"):
        found = load_file(tmp_path / "hf" / "optimizer" / f"{state}.safetensors")
        assert set(found) == {key for key, of in expected if of == state}
        assert [key for key in found if not torch.equal(found[key], expected[key, state])] == []
    assert "the optimizer (master, exp_avg, exp_avg_sq), param groups" in str(job.report.lines)
    converted(tmp_path / "hf", tmp_path / "back", "megatron", tp=2, pp=2, dp=2, transformer_impl="local")
    before, after = golden(name), read(tmp_path / "back")
    assert set(before.tensors) == set(after.tensors)
    words = ("embedding.word_embeddings.weight", "output_layer.weight")

    def cut(key: tuple[str, str], tensor: torch.Tensor) -> torch.Tensor:
        return tensor[:132] if key[0] in words else tensor

    assert [
        key for key, t in before.tensors.items() if not torch.equal(cut(key, t), cut(key, after.tensors[key]))
    ] == []
    groups = [rank.ranks[0].model["optimizer"]["optimizer"]["param_groups"] for rank in (before, after)]
    assert [(g["step"], g["lr"], g["weight_decay"], g["wd_mult"]) for g in groups[0]] == [
        (g["step"], g["lr"], g["weight_decay"], g["wd_mult"]) for g in groups[1]
    ]
    assert after.ranks[0].model["iteration"] == before.ranks[0].model["iteration"]


def test_frozen_parameters_and_buffers_keep_what_they_are(tmp_path: Path) -> None:
    source = open_checkpoint(DEEPSPEED / "z3_bf16_frozen_dp2" / "step3", ReadOptions())
    converted(source.root / "step3", tmp_path / "hf", "hf", with_optimizer=True)
    found = open_checkpoint(tmp_path / "hf", ReadOptions())
    assert [(s.name, s.trainable, s.dtype) for s in found.model.params] == [
        (s.name, s.trainable, s.dtype) for s in source.model.params
    ]
    assert (found.states, found.optimizer) == (source.states, source.optimizer)


def test_without_the_optimizer_its_files_may_be_damaged(mine: Path, tmp_path: Path) -> None:
    (mine / "optimizer" / "exp_avg.safetensors").write_bytes(b"")
    with pytest.raises(Incomplete, match=r"exp_avg\.safetensors"):
        open_checkpoint(mine, ReadOptions())
    assert open_checkpoint(mine, ReadOptions(optimizer=False)).states == ()
    (mine / "mcore_rlhf" / "state.json").write_text("{")
    (mine / "mcore_rlhf.json").unlink()
    job = converted(mine, tmp_path / "out", "hf", no_optimizer=True)
    assert "state.json" in "".join(text for fate, text in job.report.lines if fate == Fate.LOST)


def test_weights_without_the_folder_are_a_model(mine: Path) -> None:
    shutil.rmtree(mine / "optimizer")
    source = open_checkpoint(mine, ReadOptions())
    assert (source.optimizer, source.states, source.state.iteration) == (None, (), 3)


def edit(folder: Path, **values: Any) -> None:
    path = folder / "mcore_rlhf" / "state.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, **values}))
    (folder / "mcore_rlhf.json").unlink(missing_ok=True)  # which vouches for what was there


@pytest.mark.parametrize(
    ("values", "kind", "text"),
    [
        ({"format": "torch"}, Unsupported, "was not written by mcore_rlhf"),
        ({"version": 2}, Unsupported, "version 2; this release reads 1"),
        ({"iteration": "3"}, Corrupt, "iteration: expected a whole number, found '3'"),
        ({"states": [1]}, Corrupt, "states/0: expected a string, found 1"),
        ({"groups": [{"fields": 1}]}, Corrupt, "groups/0/fields: expected an object, found 1"),
        ({"states": ["../../x"]}, Untrusted, "plain path inside"),
        ({"states": ["master", "momentum"]}, CheckpointError, "momentum"),
        (
            {"other": {"a": {"$stub": ["os.system", ["x"], True, None, None]}}},
            Untrusted,
            r"'os\.system', which can run code",
        ),
        ({"other": {"a": {"$stub": {"$tuple": ["os.system", [], True, None, None]}}}}, Untrusted, r"os\.system"),
        ({"other": {"a": {"$class": "builtins.list"}}}, Untrusted, "is no class of a training framework"),
        ({"other": {"a": {"$thing": 1}}}, Unsupported, r"other/a: the mark \$thing is not known"),
        ({"other": {"a": {"$tensor": ["float32", [3], "AAAA"]}}}, Corrupt, "does not have 3 bytes"),
        ({"other": {"a": {"$tensor": ["nothing", [], "AAAA"]}}}, Corrupt, "unknown dtype"),
        ({"other": {"a": {"$array": ["|O8", [1], "AAAAAAAAAAA="]}}}, Corrupt, "is no numbers"),
    ],
)
def test_a_state_that_is_wrong(values: Any, kind: type[CheckpointError], text: str, mine: Path) -> None:
    edit(mine, **values)
    with pytest.raises(kind, match=text):
        open_checkpoint(mine, ReadOptions())


def test_states_of_another_model(mine: Path) -> None:
    file = mine / "optimizer" / "exp_avg.safetensors"
    tensors = load_file(file)
    first, second = list(tensors)[:2]
    save_file({**tensors, first: torch.ones(1, 2, 3), "ghost": tensors[second].clone()}, file)
    with pytest.raises(LayoutMismatch, match="2 problems") as error:
        open_checkpoint(mine, ReadOptions())
    assert f"exp_avg of {first} has the shape (1, 2, 3), but the weight has" in str(error.value)
    assert "exp_avg of ghost has the shape" in str(error.value)
    assert "Weights and optimizer are of different models" in str(error.value)


def test_a_group_of_another_model(mine: Path) -> None:
    group = {"fields": {}, "expert": False, "params": ["ghost"], "scalars": []}
    edit(mine, groups=[group])
    with pytest.raises(LayoutMismatch, match="a param group holds ghost"):
        open_checkpoint(mine, ReadOptions())


@pytest.mark.parametrize("shared", [{"a": ["b"]}, {"model.norm.weight": 3}])
def test_ties_that_are_none(shared: Any, mine: Path) -> None:
    edit(mine, shared=shared)
    with pytest.raises(Corrupt, match=r"shared/.*: expected a string"):
        open_checkpoint(mine, ReadOptions())


def test_ties_that_lead_in_circles_are_none(mine: Path) -> None:
    names = [spec.name for spec in open_checkpoint(mine, ReadOptions()).model.params][:2]
    edit(mine, shared={names[0]: names[1], names[1]: names[0], "x": "x"})
    assert not open_checkpoint(mine, ReadOptions()).model.tied


def test_an_embedding_that_is_the_heads_second_name(tmp_path: Path) -> None:
    """Some modules list the head first; the tie is the same one."""
    tensors = {"lm_head.weight": adam(20, 8), "model.norm.weight": adam(8, seed=1)}
    shared = {"shared_params": {"model.embed_tokens.weight": "lm_head.weight"}}
    universal_by_hand.write(tmp_path / "uni", tensors, top=shared)
    config = {**CONFIG, "num_hidden_layers": 0, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for number, kept in enumerate((True, False)):
        folder, described = tmp_path / f"hf{number}", str(tmp_path / "config.json")
        converted(tmp_path / "uni", folder, "hf", with_optimizer=kept, reference_config=described)
        weights = load_file(folder / "model.safetensors")
        assert torch.equal(weights["model.embed_tokens.weight"], tensors["lm_head.weight"]["fp32"])
        source = open_checkpoint(folder, ReadOptions())
        assert source.model.tied
        assert [state for state in source.states if kept] == (["master", "exp_avg", "exp_avg_sq"] if kept else [])


def round_trip(value: Any) -> tuple[Any, list[str]]:
    encoder = Encoder()
    text = json.dumps(encoder.encode(value, "top"), allow_nan=False)
    return decode(json.loads(text), "file"), encoder.lost


class TestExactJson:
    def test_every_kind_of_value(self) -> None:
        stub = new_stub("deepspeed.runtime.fp16.loss_scaler.LossScaler", {"cur_scale": 1.0}, 3)
        value = {
            "plain": [1, 2.5, "ä\ud800", None, True, -0.0, 10**40], "floats": [math.inf, -math.inf, 5e-324],
            "tuple": (1, (2, [3])), "sets": [{1, 2}, frozenset(["a"])], "bytes": b"\0\xff", 3: "number", "$x": "dollar",
            "ordered": OrderedDict([("b", 1), ("a", 2)]), "space": Namespace({"x": 1}), "stub": stub,
            "class": stub_class("megatron.core.enums.ModelType"), "size": TorchSize([2, 3]), "dtype": TorchDtype("bfloat16"),
            "scalar": np.float32(0.1), "empty": {}, "true": np.bool_(True),
        }  # fmt: skip
        found, lost = round_trip(value)
        assert lost == []
        assert found == value
        assert list(found) == list(value)
        assert [type(found[key]) for key in found] == [type(value[key]) for key in value]
        assert math.copysign(1, found["plain"][5]) == -1

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8])
    @pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
    def test_tensors_and_arrays(self, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        tensor = torch.rand(shape).mul(5).to(dtype)
        small = SmallTensor(bits(tensor), dtype_of(str(dtype)[6:]), shape, tensor.stride())
        turned = replace(small, shape=shape[::-1], strides=tensor.stride()[::-1])
        found, lost = round_trip([small, turned])
        assert lost == []
        assert same([tensor, tensor.T if tensor.dim() == 2 else tensor], torch_values(found)) == []
        array = np.arange(6, dtype=">i4").reshape(2, 3)
        (again,), _ = round_trip([array])
        assert (again.dtype, again.shape, again.tobytes()) == (array.dtype, array.shape, array.tobytes())

    def test_what_cannot_be_kept_is_said_with_its_place(self) -> None:
        big = SmallTensor.of(np.zeros(MAX_ARRAY_NBYTES // 4 + 1), dtype_of("float32"))
        found, lost = round_trip({"a": {"b": print, "c": 1}, "d": [1, object(), 2], "big": big, "odd": np.array(["x"])})
        assert found == {"a": {"c": 1}, "d": [1, None, 2]}
        assert lost == [
            "top/big (SmallTensor)",
            "top/odd (ndarray)",
            "top/a/b (builtin_function_or_method)",
            "top/d/1 (object)",
        ]

    @settings(max_examples=150, deadline=None)
    @given(
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(max_size=8),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.lists(inner, max_size=3).map(tuple)
                | st.dictionaries(
                    st.text(max_size=4) | st.integers() | st.sampled_from(["$tuple", "$stub"]), inner, max_size=3
                )
            ),
            max_leaves=12,
        )
    )
    def test_any_nest(self, value: Any) -> None:
        found, lost = round_trip(value)
        assert lost == []
        assert repr(found) == repr(value)
