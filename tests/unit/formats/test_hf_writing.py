"""Writing Hugging Face folders: files that the safetensors library reads, configs, tokenizers, types, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rlhf.convert import ConvertOptions, Job, convert
from mcore_rlhf.core.facts import Fate
from mcore_rlhf.errors import CheckpointError, Incomplete, LayoutMismatch, UsageError
from mcore_rlhf.families.options import WriteOptions
from tests.helpers import universal_by_hand
from tests.helpers.plain_load import bits
from tests.unit.formats.hf_by_hand import CONFIG, Tensors, config_in, index_of, llama, tensors_in, write

GOLDENS = Path(__file__).parents[2] / "goldens"
GOLDEN = GOLDENS / "huggingface" / "llama_tied_bf16_sharded"
DEEPSPEED = GOLDENS / "deepspeed"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def to_hf(source: Path, target: Path, **write: Any) -> Job:
    return convert(source, target, ConvertOptions(to="hf", workers=1, fsync=False, write=WriteOptions(**write)))


def said(job: Job, fate: Fate) -> str:
    return "\n".join(text for found, text in job.report.lines if found == fate)


def unequal(found: Tensors, expected: Tensors) -> list[str]:
    return sorted(found.keys() ^ expected.keys()) + [
        name for name in found.keys() & expected.keys()
        if (found[name].dtype, found[name].shape, bits(found[name]))
        != (expected[name].dtype, expected[name].shape, bits(expected[name]))
    ]  # fmt: skip


def test_one_folder_becomes_an_equal_one(tmp_path: Path) -> None:
    job = to_hf(GOLDEN, tmp_path / "out")
    assert unequal(tensors_in(tmp_path / "out"), tensors_in(GOLDEN)) == []
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (GOLDEN / name).read_bytes(), name
    assert job.lossless
    assert not job.casts


@pytest.mark.parametrize("limit", [1, 600, 2000, 10**9])
def test_shards(limit: int, tmp_path: Path) -> None:
    tensors = llama()
    to_hf(write(tmp_path / "hf", tensors, CONFIG), tmp_path / "out", max_shard_size=limit)
    assert unequal(tensors_in(tmp_path / "out"), tensors) == []
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    if limit == 10**9:
        assert [file.name for file in files] == ["model.safetensors"]
        assert not (tmp_path / "out" / "model.safetensors.index.json").exists()
        return
    assert [f.name for f in files] == [
        f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)
    ]
    where = index_of(tmp_path / "out")
    assert set(where) == set(tensors)
    for file in files:
        sizes = [tensors[name].nbytes for name, place in where.items() if place == file.name]
        assert sum(sizes) <= limit or len(sizes) == 1
    index = config_in(tmp_path / "out", "model.safetensors.index.json")
    numel = sum(tensor.numel() for tensor in tensors.values())
    assert index["metadata"] == {"total_parameters": numel, "total_size": 4 * numel}


def test_tensors_lie_at_multiples_of_their_width(tmp_path: Path) -> None:
    """A byte more or less before an fp32 tensor, and readers that map the file would trip over it."""
    odd = {"model.a": torch.ones(3, dtype=torch.bool), "model.b": torch.ones(3), "model.c": torch.ones(3).half()}
    to_hf(write(tmp_path / "hf", odd), tmp_path / "out")
    content = (tmp_path / "out" / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    assert header.pop("__metadata__") == {"format": "pt"}
    widths = {"BOOL": 1, "F32": 4, "F16": 2}
    assert all((start + entry["data_offsets"][0]) % widths[entry["dtype"]] == 0 for entry in header.values())
    assert unequal(tensors_in(tmp_path / "out"), odd) == []


def test_scalars_and_empty_tensors(tmp_path: Path) -> None:
    odd = {
        **llama(),
        "model.scale": torch.tensor(2.5),
        "model.none": torch.empty(0, 4),
        "model.seen": torch.tensor([7]),
    }
    to_hf(write(tmp_path / "hf", odd, CONFIG), tmp_path / "out")
    assert unequal(tensors_in(tmp_path / "out"), odd) == []


class TestTypes:
    @pytest.mark.parametrize(
        ("options", "fields"),
        [({"dtype": "fp32"}, ["torch_dtype", "param"]), ({"eos_token_ids": (3, 4)}, ["eos_token_id"])],
    )
    def test_a_field_that_is_changed_is_accounted_for(
        self, options: dict[str, Any], fields: list[str], tmp_path: Path
    ) -> None:
        tensors = {name: tensor.bfloat16() for name, tensor in llama().items()}
        config = {**CONFIG, "torch_dtype": "bfloat16", "eos_token_id": 2}
        job = to_hf(write(tmp_path / "hf", tensors, config), tmp_path / "out", **options)
        assert job.account.unaccounted == ()
        assert [item.name for item in job.account.of_fate(Fate.CHANGED)] == fields
        assert job.lossless

    @pytest.mark.parametrize(("dtype", "lost"), [("bf16", True), ("fp32", False)])
    def test_another_type(self, dtype: str, lost: bool, tmp_path: Path) -> None:
        kind = torch.bfloat16 if dtype == "bf16" else torch.float32
        origin = torch.float32 if dtype == "bf16" else torch.bfloat16
        tensors = {**llama(origin), "model.seen": torch.tensor([3])}
        job = to_hf(write(tmp_path / "hf", tensors, CONFIG), tmp_path / "out", dtype=dtype)
        expected = {name: t.to(kind) if t.is_floating_point() else t for name, t in tensors.items()}
        assert unequal(tensors_in(tmp_path / "out"), expected) == []
        assert config_in(tmp_path / "out")["torch_dtype"] == str(kind).removeprefix("torch.")
        assert ("converted to bfloat16, and rounded" in said(job, Fate.LOST)) == lost

    def test_a_config_without_a_type_gets_both_spellings(self, tmp_path: Path) -> None:
        config = {key: value for key, value in CONFIG.items() if key != "torch_dtype"}
        to_hf(write(tmp_path / "hf", llama(torch.float16), config), tmp_path / "out")
        found = config_in(tmp_path / "out")
        assert (found["dtype"], found["torch_dtype"]) == ("float16", "float16")

    def test_what_must_stay_fp32_does(self, tmp_path: Path) -> None:
        name = "model.layers.1.mlp.own.e_score_correction_bias"
        bias = torch.randn(4)
        to_hf(write(tmp_path / "hf", {**llama(), name: bias}, CONFIG), tmp_path / "out", dtype="bf16")
        assert torch.equal(tensors_in(tmp_path / "out")[name], bias)

    def test_masters(self, tmp_path: Path) -> None:
        source = DEEPSPEED / "z1_bf16acc32_untied_dp2"
        gathered = torch.load(source / "expected.pt", weights_only=True)["state"]
        masters = {key.removesuffix("/fp32"): t for key, t in gathered.items() if key.endswith("/fp32")}
        job = to_hf(source / "step3", tmp_path / "masters", masters=True)
        found = tensors_in(tmp_path / "masters")
        assert {name: found[name].dtype for name in masters} == dict.fromkeys(masters, torch.float32)
        assert [name for name, tensor in masters.items() if not torch.equal(found[name], tensor)] == []
        assert "float32, from their fp32 masters" in said(job, Fate.DERIVED)
        to_hf(source / "step3", tmp_path / "half", masters=True, dtype="bf16")
        half = tensors_in(tmp_path / "half")
        assert [name for name, tensor in masters.items() if not torch.equal(half[name], tensor.bfloat16())] == []

    def test_frozen_parameters_have_no_masters_and_are_rounded(self, tmp_path: Path) -> None:
        job = to_hf(DEEPSPEED / "z3_bf16_frozen_dp2" / "step3", tmp_path / "out", with_optimizer=True, dtype="fp16")
        assert "float16, from their fp32 masters" in said(job, Fate.DERIVED)
        assert "converted to float16, and rounded" in said(job, Fate.LOST)

    def test_masters_that_are_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(Incomplete, match="--masters asks for its fp32 master"):
            to_hf(write(tmp_path / "hf", llama(torch.bfloat16), CONFIG), tmp_path / "out", masters=True)
        assert not (tmp_path / "out").exists()

    def test_fp32_weights_are_their_own_masters(self, tmp_path: Path) -> None:
        to_hf(write(tmp_path / "hf", llama(), CONFIG), tmp_path / "out", masters=True)
        assert unequal(tensors_in(tmp_path / "out"), llama()) == []


class TestWithoutDescription:
    """A run of a model that nobody knows: its weights under its own names, as ``tools/zero_to_fp32.py`` writes them."""

    @pytest.mark.parametrize("name", ["z2_bf16_ac_dp2", "z3_bf16_frozen_dp2", "z2_fp32_frozen_dp4"])
    def test_weights_under_their_own_names(self, name: str, tmp_path: Path) -> None:
        job = to_hf(DEEPSPEED / name / "step3", tmp_path / "out")
        gathered = torch.load(DEEPSPEED / name / "expected.pt", weights_only=True)["state"]
        found = tensors_in(tmp_path / "out")
        for key, tensor in gathered.items():
            param, _, state = key.rpartition("/")
            assert state != "fp32" or torch.equal(found[param], tensor.to(found[param].dtype)), param
        assert not (tmp_path / "out" / "config.json").exists()
        assert "--reference-config gives one" in said(job, Fate.NOTE)
        assert "--with-optimizer keeps it beside the weights" in said(job, Fate.LOST)

    def test_ties_are_written_under_both_names(self, tmp_path: Path) -> None:
        to_hf(DEEPSPEED / "z1_fp32_tied_dp2" / "step3", tmp_path / "out")
        found = tensors_in(tmp_path / "out")
        assert torch.equal(found[HEAD], found[EMBEDDING])

    def test_with_a_config_they_are_not(self, tmp_path: Path) -> None:
        config = {"num_hidden_layers": 2, "hidden_size": 16, "tie_word_embeddings": True, "vocab_size": 50}
        rows, hidden = tensors_of(DEEPSPEED / "z1_fp32_tied_dp2", tmp_path)[EMBEDDING].shape
        path = tmp_path / "config.json"
        path.write_text(json.dumps({**config, "vocab_size": rows, "hidden_size": hidden}))
        to_hf(DEEPSPEED / "z1_fp32_tied_dp2" / "step3", tmp_path / "out", reference_config=str(path))
        assert HEAD not in tensors_in(tmp_path / "out")
        path.write_text(json.dumps({**config, "vocab_size": rows, "hidden_size": hidden, "tie_word_embeddings": False}))
        with pytest.raises(LayoutMismatch, match=f"tie_word_embeddings is false, but {HEAD} is the embedding itself"):
            to_hf(DEEPSPEED / "z1_fp32_tied_dp2" / "step3", tmp_path / "out2", reference_config=str(path))


def tensors_of(golden: Path, tmp_path: Path) -> Tensors:
    to_hf(golden / "step3", tmp_path / "plain")
    return tensors_in(tmp_path / "plain")


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        (
            {"tp": 2, "zero_stage": 1},
            UsageError,
            "--tp: means nothing with --to hf; .*\n.*--zero-stage: means nothing",
        ),
        ({"with_optimizer": True}, Incomplete, "has no optimizer, which --with-optimizer asks for"),
        ({"with_optimizer": True, "no_optimizer": True}, UsageError, "contradict each other"),
        ({"reference_config": "nowhere"}, UsageError, "cannot read the model's config"),
    ],
)
def test_what_is_refused(options: dict[str, Any], kind: type[CheckpointError], text: str, tmp_path: Path) -> None:
    with pytest.raises(kind, match=text):
        to_hf(GOLDEN, tmp_path / "out", **options)
    assert list(tmp_path.iterdir()) == []


def test_a_reference_of_another_model(tmp_path: Path) -> None:
    write(tmp_path / "other", {}, {**CONFIG, "hidden_size": 999})
    with pytest.raises(
        LayoutMismatch, match=r"hidden_size is 999, but model.embed_tokens.weight is \[72, 32\]"
    ) as error:
        to_hf(GOLDEN, tmp_path / "out", reference_config=str(tmp_path / "other"))
    assert str(tmp_path / "other") in str(error.value)


def test_weights_that_are_stored_nowhere(tmp_path: Path) -> None:
    """Stage 3 keeps frozen parameters only where it was not told to leave them out."""
    states = {"a.weight": universal_by_hand.adam(3, 2)}
    shapes = [{"a.weight": torch.Size((3, 2)), "b.weight": torch.Size((2,))}]
    universal_by_hand.write(tmp_path / "uni", states, top={"param_shapes": shapes})
    with pytest.raises(CheckpointError, match=r"b\.weight"):
        to_hf(tmp_path / "uni", tmp_path / "out")


def test_strict_refuses_what_the_folder_has_no_place_for(tmp_path: Path) -> None:
    from mcore_rlhf.errors import Lossy

    chosen = ConvertOptions(to="hf", fsync=False, strict=True, workers=1)
    source = DEEPSPEED / "z0_fp32_untied_dp1" / "step3"
    with pytest.raises(Lossy, match="the optimizer"):
        convert(source, tmp_path / "out", chosen)
    kept = replace(chosen, write=WriteOptions(with_optimizer=True))
    assert convert(source, tmp_path / "out", kept).lossless


@pytest.mark.parametrize("dtype", [None, "bf16"])
def test_tensors_that_lie_at_odd_places(dtype: str | None, tmp_path: Path) -> None:
    """Nothing in the format asks for alignment; a file by hand has an fp32 tensor at a byte that no multiple of 4 is."""
    header = {
        "odd": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        "w": {"dtype": "F32", "shape": [40, 5], "data_offsets": [3, 803]},
        "turned": {"dtype": "F32", "shape": [7], "data_offsets": [803, 831]},
    }
    text = json.dumps(header).encode()
    w, turned = torch.randn(40, 5), torch.randn(7)
    (tmp_path / "hf").mkdir()
    path = tmp_path / "hf" / "model.safetensors"
    data = b"abc" + w.numpy().tobytes() + turned.numpy().tobytes()
    path.write_bytes((len(text) + 1).to_bytes(8, "little") + text + b" " + data)
    to_hf(tmp_path / "hf", tmp_path / "out", dtype=dtype)
    kind = torch.float32 if dtype is None else torch.bfloat16
    expected = {"odd": torch.tensor(list(b"abc"), dtype=torch.uint8), "w": w.to(kind), "turned": turned.to(kind)}
    assert unequal(tensors_in(tmp_path / "out"), expected) == []
