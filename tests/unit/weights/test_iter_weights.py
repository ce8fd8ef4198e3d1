"""Weights of any checkpoint, one after the other: those of the export, without one; parts as Megatron's ranks have them."""

from __future__ import annotations

import errno
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mcore_rlhf import iter_weights, weights
from mcore_rlhf.convert import ConvertOptions, convert
from mcore_rlhf.errors import CheckpointError, Unsupported, UsageError
from mcore_rlhf.families.options import WriteOptions
from mcore_rlhf.storage.reading import OpenFiles
from tests.helpers.plain_load import plain_load

GOLDENS = Path(__file__).parents[2] / "goldens"
MEGATRON = GOLDENS / "megatron" / "tp2pp2dp2_bf16_do"
MIXTURE = GOLDENS / "megatron" / "ep2dp2_moe_seq_bf16_do"
CONFIG = GOLDENS / "trainers" / "config.json"


def exported(source: Path, target: Path, **write: object) -> dict[str, torch.Tensor]:
    """What ``--to hf`` writes."""
    options = WriteOptions(no_optimizer=True, **write)  # type: ignore[arg-type]
    convert(source, target, ConvertOptions(to="hf", fsync=False, write=options))
    return {name: tensor for file in target.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize(
    "source",
    [MEGATRON, MIXTURE, "megatron_0_19/dist_tp2pp2_bf16_do_fullyreshardable", "deepspeed/z3_bf16_frozen_dp2", "dcp/fsdp2_ws3",
     "huggingface/llama_tied_bf16_sharded"],
    ids=lambda source: Path(source).name,
)  # fmt: skip
def test_they_are_what_an_export_holds(source: Path, tmp_path: Path) -> None:
    expected = exported(GOLDENS / source, tmp_path / "hf")
    found = dict(iter_weights(GOLDENS / source))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def test_another_type_and_a_part_of_the_names() -> None:
    whole = dict(iter_weights(MEGATRON))
    part = dict(iter_weights(MEGATRON, dtype="float32", names="model.layers.1.*"))
    assert part.keys() == {name for name in whole if name.startswith("model.layers.1.")}
    assert all(torch.equal(tensor, whole[name].float()) for name, tensor in part.items())
    assert {tensor.dtype for tensor in part.values()} == {torch.float32}


def test_its_own_names() -> None:
    found = dict(iter_weights(MEGATRON, spelling="native"))
    assert "decoder.layers.3.self_attention.linear_qkv.weight" in found
    assert found["decoder.layers.0.self_attention.linear_qkv.weight"].shape[0] > 0


@pytest.mark.parametrize("tp_rank", [0, 1])
def test_a_part_is_what_megatron_gave_that_rank(tp_rank: int) -> None:
    """Read by hand: torch.load of the rank's file, whose rows of query, key and value lie in turn, group after group."""
    found = dict(iter_weights(MEGATRON, tp_rank=tp_rank, tp_size=2))
    rank = plain_load(MEGATRON / "iter_0000002" / f"mp_rank_{tp_rank:02d}_000" / "model_optim_rng.pt")
    model, args = rank["model"], rank["args"]
    groups, width = args.num_query_groups // 2, args.kv_channels
    heads = args.num_attention_heads // args.num_query_groups
    qkv = model["decoder.layers.0.self_attention.linear_qkv.weight"].view(groups, heads + 2, width, -1)
    gate, up = model["decoder.layers.0.mlp.linear_fc1.weight"].chunk(2)
    layer = "model.layers.0"
    expected = {
        f"{layer}.self_attn.q_proj.weight": qkv[:, :heads].reshape(groups * heads * width, -1),
        f"{layer}.self_attn.k_proj.weight": qkv[:, heads].reshape(groups * width, -1),
        f"{layer}.self_attn.v_proj.weight": qkv[:, heads + 1].reshape(groups * width, -1),
        f"{layer}.self_attn.o_proj.weight": model["decoder.layers.0.self_attention.linear_proj.weight"],
        f"{layer}.mlp.gate_proj.weight": gate,
        f"{layer}.mlp.up_proj.weight": up,
        f"{layer}.mlp.down_proj.weight": model["decoder.layers.0.mlp.linear_fc2.weight"],
        f"{layer}.input_layernorm.weight": model["decoder.layers.0.input_layernorm.weight"],
    }
    assert {name: found[name].shape for name in expected} == {name: t.shape for name, t in expected.items()}
    assert [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)] == []


@pytest.mark.parametrize("tp_rank", [0, 1])
def test_words_are_dealt_as_megatron_deals_them(tp_rank: int) -> None:
    """132 words in 160 rows: the second rank has rows that are no words."""
    rank = plain_load(MEGATRON / "iter_0000002" / f"mp_rank_{tp_rank:02d}_000" / "model_optim_rng.pt")
    rows = rank["model"]["embedding.word_embeddings.weight"]
    padded = rank["args"].padded_vocab_size
    found = dict(iter_weights(MEGATRON, tp_rank=tp_rank, tp_size=2, padded_vocab_size=padded, names="*embed*"))
    part = found["model.embed_tokens.weight"]
    assert len(part) == [80, 52][tp_rank]
    assert torch.equal(part, rows[: len(part)])


@pytest.mark.parametrize(("padded", "expected"), [(None, [96, 36]), (132, [66, 66]), (264, [132, 0])])
def test_words_are_dealt_as_vllm_deals_them(padded: int | None, expected: list[int]) -> None:
    """Of 132 words and no more said 192 are dealt; by hand, after vLLM's ``VocabParallelEmbedding``."""
    (whole,) = dict(iter_weights(MEGATRON, names="*embed*")).values()
    rows = list[torch.Tensor]()
    for rank in range(2):
        rows += dict(
            iter_weights(MEGATRON, tp_rank=rank, tp_size=2, padded_vocab_size=padded, names="*embed*")
        ).values()
    assert [len(one) for one in rows] == expected
    assert torch.equal(torch.cat(rows), whole)


@pytest.mark.parametrize("source", [MEGATRON, MIXTURE], ids=lambda source: source.name)
def test_ranks_share_key_and_value_heads_where_there_are_more(source: Path) -> None:
    """Two heads of four ranks: as vLLM's ``QKVParallelLinear`` says, ranks in turn have the same one; queries are dealt as ever."""
    whole, layer = dict(iter_weights(source)), "model.layers.0.self_attn"
    parts = [dict(iter_weights(source, tp_rank=rank, tp_size=4)) for rank in range(4)]
    for part in ("k", "v"):
        name = f"{layer}.{part}_proj.weight"
        assert torch.equal(torch.cat([parts[0][name], parts[2][name]]), whole[name])
        assert torch.equal(torch.cat([parts[1][name], parts[3][name]]), whole[name])
    for name, dim in ((f"{layer}.q_proj.weight", 0), (f"{layer}.o_proj.weight", 1)):
        assert torch.equal(torch.cat([part[name] for part in parts], dim), whole[name])


@pytest.mark.parametrize("source", [MEGATRON, MIXTURE], ids=lambda source: source.name)
def test_parts_make_the_whole(source: Path) -> None:
    parts = [dict(iter_weights(source, tp_rank=rank, tp_size=2)) for rank in range(2)]
    cut = 0
    for name, whole in iter_weights(source):
        dims = [dim for dim, size in enumerate(parts[0][name].shape) if size != whole.shape[dim]]
        cut += len(dims)
        joined = torch.cat([part[name] for part in parts], dims[0]) if dims else parts[1][name]
        assert torch.equal(joined, whole), name
    assert cut > 20


def test_what_cannot_be_cut_is_named() -> None:
    with pytest.raises(Unsupported, match="2 key and value heads cannot be dealt to 3 ranks"):
        iter_weights(MEGATRON, tp_rank=0, tp_size=3)
    with pytest.raises(Unsupported, match="4 heads cannot be dealt to 8 ranks"):
        iter_weights(MEGATRON, tp_rank=0, tp_size=8)
    with pytest.raises(UsageError, match="tp_rank: expected a number from 0 to tp_size - 1, found 2 of 2"):
        iter_weights(MEGATRON, tp_rank=2, tp_size=2)
    with pytest.raises(UsageError, match=r"no weight of .* is called so: lm_heat"):
        iter_weights(MEGATRON, names="lm_heat*")
    with pytest.raises(Unsupported, match=r"embed_tokens\.weight: dimension 0 of \(132, 64\), 161 long, cannot be cut"):
        iter_weights(MEGATRON, tp_size=2, padded_vocab_size=161)
    with pytest.raises(UsageError, match=r"padded_vocab_size: expected at least 132, as .* has, found 130"):
        iter_weights(MEGATRON, tp_size=2, padded_vocab_size=130)
    for dtype in ("bf17", "int8"):
        with pytest.raises(UsageError, match=rf"dtype: .*{dtype}"):
            iter_weights(MEGATRON, dtype=dtype)
    with pytest.raises(Unsupported, match="native"):
        iter_weights(MEGATRON, spelling="native", tp_size=2)


def test_an_adapter_is_merged_into_its_base(tmp_path: Path) -> None:
    """peft merged it, too."""
    peft = GOLDENS / "peft"
    with pytest.raises(Unsupported, match="holds an adapter"):
        iter_weights(peft / "adapter")
    how = WriteOptions(merge_adapter=True, base_model=str(peft / "base"))
    found = dict(iter_weights(peft / "adapter", write=how))
    expected = load_file(peft / "merged" / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)
    parts = [dict(iter_weights(peft / "adapter", write=how, tp_rank=rank, tp_size=2)) for rank in range(2)]
    down = "model.layers.0.mlp.down_proj.weight"
    assert torch.equal(torch.cat([part[down] for part in parts], 1), found[down])


def test_torchtitans_own_names_need_a_config() -> None:
    own, config = GOLDENS / "torchtitan", GOLDENS / "torchtitan" / "config.json"
    with pytest.raises(Unsupported, match="reference_config"):
        iter_weights(own)
    assert "model.layers.0.self_attn.q_proj.weight" in dict(iter_weights(own, reference_config=str(config)))


def flip_in_fc2(path: Path) -> None:
    data, weight = bytearray(path.read_bytes()), plain_load(path)["model"]["decoder.layers.0.mlp.linear_fc2.weight"]
    data[data.index(weight.view(torch.uint8).numpy().tobytes()[:64])] ^= 1
    path.write_bytes(data)


def test_a_flipped_bit_is_found_by_the_end(tmp_path: Path) -> None:
    root = tmp_path / "run"
    shutil.copytree(MEGATRON, root)
    flip_in_fc2(root / "iter_0000002" / "mp_rank_01_001" / "model_optim_rng.pt")
    with pytest.raises(CheckpointError, match="mp_rank_01_001"):
        list(iter_weights(root))


def test_what_a_rank_reads_whole_is_checked_beside_parts(tmp_path: Path) -> None:
    """Records of norms, which are cut nowhere, in a checkpoint that has a record for each tensor."""
    root, norm = tmp_path / "hf", "model.layers.0.input_layernorm.weight"
    exported(MEGATRON, root)
    (file,) = root.glob("*.safetensors")
    convert(root, tmp_path / "megatron", ConvertOptions(to="megatron", fsync=False))
    path = next((tmp_path / "megatron").rglob("model_optim_rng.pt"))
    data, wanted = bytearray(path.read_bytes()), load_file(file)[norm].view(torch.uint8).numpy().tobytes()
    data[data.index(wanted)] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="model_optim_rng"):
        list(iter_weights(tmp_path / "megatron", tp_rank=1, tp_size=2))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_reads_what_is_its_own_and_checks_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """Each of Megatron's ranks keeps all in one record: of the other one's, norms and words are read, and not all for a checksum's sake."""
    nbytes, view = list[int](), OpenFiles.view

    def counting(files: OpenFiles, file: str, byte_offset: int, count: int) -> memoryview:
        nbytes.append(count)
        return view(files, file, byte_offset, count)

    with monkeypatch.context() as patch:
        patch.setattr(OpenFiles, "view", counting)
        given = sum(tensor.nbytes for _, tensor in iter_weights(MEGATRON, tp_rank=rank, tp_size=2))
    assert given <= sum(nbytes) <= 1.05 * given
    if rank == 0:  # the other one has norms and unused words of its own as well, a twentieth of so small a file
        shutil.copytree(MEGATRON, tmp_path / "run")
        flip_in_fc2(tmp_path / "run" / "iter_0000002" / "mp_rank_00_001" / "model_optim_rng.pt")
        with pytest.raises(CheckpointError, match="mp_rank_00_001"):
            list(iter_weights(tmp_path / "run", tp_rank=0, tp_size=2))


def test_who_stops_early_leaves_nothing_behind() -> None:
    weights = iter_weights(MEGATRON)
    next(weights)
    weights.close()  # type: ignore[attr-defined]
    end = time.monotonic() + 10
    while any(thread.name == "mcore_rlhf weights" for thread in threading.enumerate()):
        assert time.monotonic() < end
        time.sleep(0.01)


def test_gaps_are_said_once_however_often_the_disk_is_asked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    own, tries = weights._wanted, list[int]()

    def failing(*given: Any) -> Any:
        tries.append(1)
        if len(tries) < 3:
            raise OSError(errno.EIO, "Input/output error")
        return own(*given)

    monkeypatch.setattr(weights, "_wanted", failing)
    monkeypatch.setattr(weights, "gaps", lambda source: iter(["layer 3 is missing"]))
    next(iter_weights(MEGATRON))
    assert len(tries) == 3
    assert sum("layer 3 is missing" in record.message for record in caplog.records) == 1
