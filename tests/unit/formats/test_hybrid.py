"""Hybrid models at other layouts: an independent slicing, written from Megatron's own splits, finds every tensor of every state.

The sources are checkpoints of megatron-core 0.19.2 itself; the reader also asserts that ``distrib_optim.pt`` has every parameter at
the offset that follows from the order in which Megatron registers it.
"""

from __future__ import annotations

import json
import shutil
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from mcore_rlhf.convert import convert
from mcore_rlhf.errors import CheckpointError, Lossy
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.formats.registry import open_checkpoint
from mcore_rlhf.storage.paths import local_path
from mcore_rlhf.verify.checkpoint import Depth, verify
from tests.helpers.conversions import Conversions, options
from tests.helpers.damage import MODEL, edit_args, edited
from tests.helpers.dist_reader import read_whole
from tests.helpers.independent_merge import Rank
from tests.helpers.independent_reader import Reading, _flat, differences, read
from tests.helpers.plain_load import plain_load, plain_save, same

GOLDENS = Path(__file__).parents[2] / "goldens" / "megatron_0_19"
ATTENTION, MAMBA, DELTA = (f"hybrid_{kind}_tp2_bf16_do" for kind in ("attn_mlp", "mamba", "gdn"))

CASES: list[tuple[str, dict[str, Any], str]] = [
    (ATTENTION, {"tp": 4}, "*-*-"),
    (ATTENTION, {"tp": 1, "pp": 2, "vpp": 2}, "*|-|*|-"),
    (MAMBA, {"tp": 1}, "M-*-"),
    (MAMBA, {"tp": 1, "pp": 2}, "M-|*-"),
    (MAMBA, {"pp": 2, "pipeline_layout": "1,3"}, "M|-*-"),
    (MAMBA, {"tp": 1, "pp": 2, "vpp": 2, "pipeline_layout": "Et|tt||tL"}, "M|-*||-"),
    (MAMBA, {"tp": 1, "optimizer": "plain"}, "M-*-"),
    (DELTA, {"tp": 1, "pp": 4}, "G|-|*|-"),
    (DELTA, {"tp": 4}, "G-*-"),
    (DELTA, {"pp": 2, "dp": 2}, "G-|*-"),
]


def label(case: tuple[str, dict[str, Any], str]) -> str:
    return "-".join([case[0], *(f"{k}={v}" for k, v in case[1].items())])


@pytest.mark.parametrize("case", CASES, ids=label)
def test_every_tensor_of_every_state_arrives(conversions: Conversions, case: tuple[str, dict[str, Any], str]) -> None:
    name, write, pattern = case
    source, there = read(GOLDENS / name), conversions.of(GOLDENS / name, **write)
    target = conversions.reading(there)
    assert differences(source, target) == []
    assert target.args.hybrid_layer_pattern == pattern
    assert target.args.num_layers_per_virtual_pipeline_stage is None
    assert target.args.pipeline_model_parallel_layout is None
    found = [_symbols(rank, v) for v in range(write.get("vpp", 1)) for rank in target.ranks if rank.tp == 0]
    assert "|".join(found) == (pattern if "|" in pattern else "|".join(found))
    home = {"tp": 2, "pp": 1, "dp": 1, "optimizer": "distributed", "padded_vocab_size": 160}
    back = conversions.reading(conversions.of(there, **home))
    if target.args.padded_vocab_size >= 160:
        for old, new in zip(source.ranks, back.ranks, strict=True):
            assert same(old.distrib, new.distrib) == []
            assert list(old.model["model"]) == list(new.model["model"])
            assert new.model["args"].hybrid_layer_pattern == old.model["args"].hybrid_layer_pattern


def _symbols(rank: Rank, chunk: int) -> str:
    """The kinds of a chunk's layers, by the names that only they have."""
    marks = {
        "M": "mixer.A_log", "G": "self_attention.A_log", "*": "self_attention.linear_qkv.weight", "-": "mlp.linear_fc1.weight",
    }  # fmt: skip
    names = [name.split(".", 3)[2:4] for name in rank.chunks()[chunk] if name.startswith("decoder.layers.")]
    found = {int(layer): mark for layer, inside in names for mark, end in marks.items() if inside == end}
    return "".join(found[layer] for layer in sorted(found))


@pytest.mark.parametrize(
    ("name", "write", "words"),
    [
        (MAMBA, {"tp": 4}, "2 Mamba groups cannot be divided"),
        (DELTA, {"tp": 8, "pp": 1}, "4 key heads of the gated delta net cannot be divided"),
        (MAMBA, {"tp": 1, "pp": 3}, "4 layers cannot be divided equally over 3 pipeline stages"),
    ],
)
def test_what_megatron_cannot_build_is_refused(tmp_path: Path, name: str, write: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        convert(GOLDENS / name, tmp_path / "there", options(**write))
    assert not (tmp_path / "there").exists()


@pytest.fixture
def copied(tmp_path: Path) -> Callable[[str], Path]:
    """Makes a golden that may be changed."""
    return lambda name: Path(shutil.copytree(GOLDENS / name, tmp_path / "source"))


@pytest.mark.parametrize(
    ("name", "attributes", "words"),
    [
        (MAMBA, {"mamba_state_dim": None}, "mixer.in_proj.weight: args.mamba_state_dim is None"),
        (MAMBA, {"mamba_state_dim": 8}, "200 elements of dim 0 are not z 64 . x 64 . B 16 . C 16 . dt 8"),
        (DELTA, {"linear_value_head_dim": 16}, "are not query 32 . key 32 . value 128"),
        (MAMBA, {"hybrid_layer_pattern": "M-*"}, "M-. in .* has 3"),
        (MAMBA, {"hybrid_layer_pattern": "-M*-"}, "layer 0 .* calls it feed-forward"),
        (MAMBA, {"hybrid_layer_pattern": "M-*Q"}, "unknown Q; known are M Mamba"),
    ],
)
def test_arguments_that_are_not_the_models_are_said(
    copied: Callable[[str], Path], name: str, attributes: dict[str, object], words: str
) -> None:
    """Sizes of blocks come from the arguments: a wrong one would cut in the wrong places, without a word."""
    root = copied(name)
    edit_args(root, **attributes)
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(local_path(root), ReadOptions())


def test_a_lost_tensor_of_one_of_several_equal_layers_is_missed(copied: Callable[[str], Path]) -> None:
    root = copied(ATTENTION)
    for path in root.rglob(MODEL):
        with edited(path) as tree:
            del tree["model"]["decoder.layers.3.mlp.linear_fc1.layer_norm_weight"]
    with pytest.raises(CheckpointError, match=r"decoder layer 3 has no .*layer_norm_weight, which layer 1 has"):
        open_checkpoint(local_path(root), ReadOptions(optimizer=False))


@pytest.mark.parametrize("tp", [1, 4])
def test_mamba_of_more_groups_is_cut_further(copied: Callable[[str], Path], tmp_path: Path, tp: int) -> None:
    """The same blocks as 4 groups of 8 instead of 2 of 16; and home again, every file's states at their offsets."""
    root = copied(MAMBA)
    edit_args(root, mamba_num_groups=4, mamba_state_dim=8)
    source = read(root)
    convert(root, tmp_path / "there", options(tp=tp, dp=1, padded_vocab_size=160))
    assert differences(source, read(tmp_path / "there")) == []
    convert(tmp_path / "there", tmp_path / "back", options(tp=2, dp=1, padded_vocab_size=160))
    for old, new in zip(source.ranks, read(tmp_path / "back").ranks, strict=True):
        assert same(old.distrib, new.distrib) == []


OLD_ORDER = ("dt_bias", "A_log", "D", "in_proj.", "conv1d.", "norm.", "out_proj.")
"""How a Mamba mixer registered until 0.18, where its convolution was a module: megatron-core 0.18.2, ``ssm/mamba_mixer.py``."""


@pytest.fixture
def older(copied: Callable[[str], Path]) -> Path:
    """The Mamba golden with the names, the order and so the offsets that Megatron had until 0.18."""
    root = copied(MAMBA)
    source = read(root)
    for rank in source.ranks:
        old = rank.model["model"]
        names = sorted(old, key=lambda name: _place(name, list(old)))
        chunk = {name.replace("conv1d_", "conv1d."): old[name] for name in names}
        owned = [name for name, value in chunk.items() if isinstance(value, torch.Tensor)]
        in_file, in_buffer, unpadded, padded = _flat(chunk, owned, source.args, rank, 0, expert=False)
        ((states,),) = (list(content.values()) for content in [rank.distrib[0]])
        buffer = torch.zeros(padded, dtype=torch.bfloat16)
        flats = {state: torch.zeros(unpadded) for state in ("param", "exp_avg", "exp_avg_sq")}
        for name in owned:
            local = rank.local[0, name.replace("mixer.conv1d.", "mixer.conv1d_")]
            view = buffer[in_buffer[name] : in_buffer[name] + local["param"].numel()].view(local["param"].shape)
            chunk[name] = view.copy_(local["param"])
            for state, flat in flats.items():
                whole = local["master" if state == "param" else state]
                flat[in_file[name] : in_file[name] + whole.numel()] = whole.flatten()
        rank.model["model"] = OrderedDict(chunk)
        states.update(flats, numel_unpadded=unpadded)
        folder = root / "iter_0000006" / rank.folder
        plain_save(rank.model, folder / "model_optim_rng.pt")
        plain_save(rank.distrib, folder / "distrib_optim.pt")
    return root


def _place(name: str, names: list[str]) -> tuple[int, int, int]:
    first, _, rest = name.partition(".mixer.")
    if not rest:
        return names.index(name), 0, 0
    inside = next(i for i, part in enumerate(OLD_ORDER) if rest.replace("conv1d_", "conv1d.").startswith(part))
    return min(i for i, other in enumerate(names) if other.startswith(first)), inside, names.index(name)


@pytest.mark.parametrize("write", [{"tp": 1}, {"pp": 2}])
def test_the_names_and_the_order_of_older_megatrons_stay(older: Path, tmp_path: Path, write: dict[str, Any]) -> None:
    """Their offsets follow from their order; the elements are those of the newer file, bit for bit."""
    source = read(older)
    renamed = {(n.replace("conv1d.", "conv1d_"), s): t for (n, s), t in source.tensors.items()}
    assert differences(read(GOLDENS / MAMBA), Reading(source.args, source.iteration, source.ranks, renamed)) == []
    convert(older, tmp_path / "there", options(**write))
    there = read(tmp_path / "there")
    assert differences(source, there) == []
    (mixer,) = [list(rank.model["model"]) for rank in there.ranks if rank.tp == rank.pp == 0]
    inside = [name.partition("mixer.")[2] for name in mixer if "mixer." in name]
    assert (
        inside.index("D") < inside.index("in_proj.weight") < inside.index("conv1d.weight") < inside.index("norm.weight")
    )


OUT_NORM = "decoder.layers.0.self_attention.out_norm.weight"


@pytest.fixture
def drifted(tmp_path: Path) -> Path:
    """The gated delta net's output norm as it is after a run without sequence parallelism: rank 1's copy is another one."""
    root = tmp_path / "drifted"
    shutil.copytree(GOLDENS / DELTA, root)
    rank = read(root).ranks[1]
    for tensor in rank.local[0, OUT_NORM].values():
        tensor.mul_(1.5)
    param = rank.local[0, OUT_NORM]["param"]
    param.copy_(rank.local[0, OUT_NORM]["master"].to(param.dtype))
    folder = root / "iter_0000006" / rank.folder
    plain_save(rank.model, folder / "model_optim_rng.pt")
    plain_save(rank.distrib, folder / "distrib_optim.pt")
    return root


def test_copies_that_drifted_apart_are_kept_where_they_can_be(drifted: Path, tmp_path: Path) -> None:
    """Never one of them for both, and never a mean."""
    source = open_checkpoint(local_path(drifted), ReadOptions())
    assert any("copies of the 2 tensor-parallel ranks differ" in text for _, text in source.notes.lines)
    assert verify(local_path(drifted), ReadOptions(), Depth.DEEP).intact
    convert(drifted, tmp_path / "pp2", options(pp=2))
    for rank in (0, 1):
        old = plain_load(drifted / f"iter_0000006/mp_rank_0{rank}/model_optim_rng.pt")["model"][OUT_NORM]
        new = plain_load(tmp_path / f"pp2/iter_0000006/mp_rank_0{rank}_000/model_optim_rng.pt")["model"][OUT_NORM]
        assert torch.equal(old, new)
    with pytest.raises(Lossy, match="have 2 copies that differ"):
        convert(drifted, tmp_path / "tp1", options(tp=1))
    with pytest.raises(Lossy, match="have 2 copies that differ"):
        convert(drifted, tmp_path / "dist", replace(options(), to="megatron-dist"))


BLOCKS = {
    "mixer.in_proj.weight": (("z", 64), ("x", 64), ("B", 32), ("C", 32), ("dt", 8)),
    "mixer.conv1d_weight": (("x", 64), ("B", 32), ("C", 32)),
    "mixer.conv1d_bias": (("x", 64), ("B", 32), ("C", 32)),
    "self_attention.in_proj.weight": (
        ("query", 32), ("key", 32), ("value", 96), ("z", 96), ("beta", 8), ("alpha", 8),
    ),
    "self_attention.conv1d.weight": (("query", 32), ("key", 32), ("value", 96)),
}  # fmt: skip
"""Of the two goldens. Sources: megatron-core 0.19.2, ssm/mamba_mixer.py, ssm/gated_delta_net/common.py (sharded_state_dict)."""


@pytest.mark.parametrize("name", [ATTENTION, MAMBA, DELTA])
@pytest.mark.parametrize("write", [{}, {"tp": 1, "pp": 2}], ids=["same", "tp=1-pp=2"])
def test_torch_dist_has_every_block_by_itself(tmp_path: Path, name: str, write: dict[str, Any]) -> None:
    """As torch's own DCP reads it: keys, shapes and every element, in all states."""
    source = read(GOLDENS / name)
    convert(GOLDENS / name, tmp_path / "dist", replace(options(padded_vocab_size=160, **write), to="megatron-dist"))
    found = read_whole(tmp_path / "dist")
    expected: dict[str, torch.Tensor] = {}
    for (param, state), whole in source.tensors.items():
        stored = {"master": "param"}.get(state, state)
        key = param.replace("conv1d_", "conv1d.")
        key = key if state == "param" else f"optimizer.state.{stored}.{key}"
        blocks = next((blocks for end, blocks in BLOCKS.items() if param.endswith(end)), ())
        parts = torch.split(whole, [size for _, size in blocks] or len(whole))
        names = [f"{key}.{block}" for block, _ in blocks] or [key]
        expected |= dict(zip(names, parts, strict=True))
    assert set(found.tensors) == set(expected)
    assert [key for key, tensor in expected.items() if not torch.equal(found.tensors[key], tensor)] == []
    extra = {key for key in found.objects if "_extra_state" in key}
    opaque = {n for rank in source.ranks for n in rank.model["model"] if n.endswith("._extra_state")}
    assert extra == {f"{n}/shard_0_1" for n in opaque}
    assert "output_layer._extra_state/shard_0_1" in extra


@pytest.mark.parametrize("name", [MAMBA, DELTA])
def test_torch_dist_and_back_is_the_same_tree(tmp_path: Path, name: str) -> None:
    source = read(GOLDENS / name)
    convert(GOLDENS / name, tmp_path / "dist", replace(options(pp=2), to="megatron-dist"))
    convert(tmp_path / "dist", tmp_path / "back", options(pp=1))
    back = read(tmp_path / "back")
    assert differences(source, back) == []
    for old, new in zip(source.ranks, back.ranks, strict=True):
        assert same(old.distrib, new.distrib) == []
        assert list(old.model["model"]) == list(new.model["model"])
        assert new.model["args"].hybrid_layer_pattern == old.model["args"].hybrid_layer_pattern


def test_older_names_come_back_by_the_version_of_the_arguments(older: Path, tmp_path: Path) -> None:
    """Megatron 0.18 has no ``mamba_training_ssm_states_dtype``; torch_dist has one name for both."""
    for path in older.rglob(MODEL):
        with edited(path) as tree:
            del tree["args"].mamba_training_ssm_states_dtype
    convert(older, tmp_path / "dist", replace(options(), to="megatron-dist"))
    convert(tmp_path / "dist", tmp_path / "back", options())
    back = read(tmp_path / "back")
    assert differences(read(older), back) == []
    assert [list(r.model["model"]) for r in back.ranks] == [list(r.model["model"]) for r in read(older).ranks]


def test_a_block_that_is_missing_or_of_another_size_is_said(tmp_path: Path) -> None:
    convert(GOLDENS / MAMBA, tmp_path / "dist", replace(options(), to="megatron-dist"))
    common = tmp_path / "dist/iter_0000006/common.pt"
    with edited(common) as tree:
        tree["args"].mamba_state_dim = 8
    with pytest.raises(CheckpointError, match=r"are not z 64 .*; found .*in_proj.weight.z 64, .*weight.dt 8"):
        open_checkpoint(local_path(tmp_path / "dist"), ReadOptions())


GPT = GOLDENS / "tp2pp2_bf16_do"
NORMS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}


def hybrid_name(name: str) -> str:
    """What Megatron's migration reads into: layer i's attention is layer 2·i, its feed-forward 2·i + 1."""
    parts = name.split(".", 3)
    if parts[:2] != ["decoder", "layers"]:
        return name.replace("final_layernorm", "final_norm")
    inside = NORMS.get(parts[3], parts[3])
    return f"decoder.layers.{2 * int(parts[2]) + (not inside.startswith('self_attention'))}.{inside}"


@pytest.mark.parametrize("to", ["megatron", "megatron-dist"])
def test_a_gptmodel_becomes_a_hybrid_one_and_again_a_gptmodel(tmp_path: Path, to: str) -> None:
    source = read(GPT)
    pattern = "*-*-*-|*-"
    job = convert(GPT, tmp_path / "there", replace(options(hybrid_layer_pattern=pattern), to=to))
    assert job.lossless
    if to == "megatron":
        there = read(tmp_path / "there")
        renamed = {(hybrid_name(name), state): tensor for (name, state), tensor in source.tensors.items()}
        assert differences(Reading(source.args, 6, source.ranks, renamed), there) == []
        assert (there.args.hybrid_layer_pattern, there.args.num_layers) == (pattern, 8)
        golden = read(GOLDENS / ATTENTION).args
        assert (there.args.spec, there.args.transformer_impl) == (golden.spec, golden.transformer_impl)
        inside = [n.split(".", 3)[3] for n in there.ranks[0].model["model"] if n.startswith("decoder.layers.0.")]
        assert inside == [
            n.split(".", 3)[3] for n in read(GOLDENS / ATTENTION).ranks[0].model["model"] if ".layers.0." in n
        ]
    else:
        assert "decoder.layers.7.mlp.linear_fc1._extra_state/shard_0_1" in read_whole(tmp_path / "there").objects
    convert(tmp_path / "there", tmp_path / "back", options(hybrid_layer_pattern="gpt"))
    back = read(tmp_path / "back")
    spelled = {
        name: hybrid_name(name).split(".", 3)[-1] for name in source.names if "norm" in name and ".layers." in name
    }
    expected = {
        (".".join([*name.split(".", 3)[:3], spelled[name]]) if name in spelled else name, state): tensor
        for (name, state), tensor in source.tensors.items()
    }
    assert differences(Reading(source.args, 6, source.ranks, expected), back) == []
    assert (back.args.hybrid_layer_pattern, back.args.num_layers, back.args.spec) == (None, 4, None)


def test_experts_become_grouped_ones(tmp_path: Path) -> None:
    """HybridModel has no others: every expert's matrices are those that it had."""
    golden = GOLDENS / "ep2_moe_bf16_do"
    source = read(golden)
    convert(golden, tmp_path / "there", options(hybrid_layer_pattern="*E*E*E*E"))
    there = read(tmp_path / "there")
    name = "decoder.layers.{}.mlp.experts.{}"
    for (layer, expert), state in product(product(range(4), range(4)), ("param", "master", "exp_avg", "exp_avg_sq")):
        old = source.tensors[name.format(layer, f"local_experts.{expert}.linear_fc1.weight"), state]
        new = there.tensors[name.format(2 * layer + 1, f"linear_fc1.weight{expert}"), state]
        assert torch.equal(old, new)
    assert there.args.moe_grouped_gemm
    assert any(name.endswith("pre_mlp_layernorm.weight") for name in there.names)


@pytest.mark.parametrize(
    ("source", "pattern", "words"),
    [
        (GPT, "M*-*-*-*-", "M is a Mamba layer, for which a GPTModel has no weights"),
        (GPT, "**--*-*-", r"the 4 layers of this GPTModel are \*-\*-\*-\*-"),
        (GPT, "*-*-*E*-", r"the 4 layers of this GPTModel are \*-\*-\*-\*-"),
        (GPT, "*-*-*-*-/*-", "multi-token prediction"),
        (GOLDENS / MAMBA, "gpt", "are not attention and feed-forward in turn"),
        (GOLDENS / ATTENTION, "*-*-", "is a hybrid model already"),
    ],
)
def test_models_that_are_not_the_same_are_refused(tmp_path: Path, source: Path, pattern: str, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        convert(source, tmp_path / "there", options(hybrid_layer_pattern=pattern))


@pytest.mark.parametrize(
    ("write", "marked"),
    [
        ({}, "*-*-|*-*-"),
        ({"pp": 3}, "*-*-*|-*|-"),
        ({"pp": 2, "pipeline_layout": "2,6"}, "*-|*-*-*-"),
        ({"pp": 1}, "*-*-*-*-"),
    ],
)
def test_marks_that_do_not_fit_the_stages_are_made_anew(tmp_path: Path, write: dict[str, Any], marked: str) -> None:
    convert(GPT, tmp_path / "there", options(hybrid_layer_pattern="*-*-*|-*|-", **write))
    assert read(tmp_path / "there").args.hybrid_layer_pattern == marked


def test_a_hybrid_model_goes_by_gpts_names_to_hugging_face(tmp_path: Path) -> None:
    convert(GOLDENS / ATTENTION, tmp_path / "hf", replace(options(vocab_size=132), to="hf"))
    config = json.loads((tmp_path / "hf/config.json").read_text())
    assert (config["model_type"], config["num_hidden_layers"]) == ("llama", 2)
    source = read(GOLDENS / ATTENTION).tensors
    with safe_open(tmp_path / "hf/model.safetensors", "pt") as file:
        down = file.get_tensor("model.layers.1.mlp.down_proj.weight")
        norm = file.get_tensor("model.layers.1.post_attention_layernorm.weight")
    assert torch.equal(down, source["decoder.layers.3.mlp.linear_fc2.weight", "param"])
    assert torch.equal(norm, source["decoder.layers.3.mlp.linear_fc1.layer_norm_weight", "param"])
    with pytest.raises(CheckpointError, match="are not attention and feed-forward in turn"):
        convert(GOLDENS / MAMBA, tmp_path / "mamba", replace(options(vocab_size=132), to="hf"))
