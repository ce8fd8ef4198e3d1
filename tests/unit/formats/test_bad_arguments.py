"""Args that contradict the files, layouts that do not fit the model, and options that contradict each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mcore_rlhf.convert import convert
from mcore_rlhf.errors import CheckpointError, Corrupt, Incomplete, LayoutMismatch, UsageError
from tests.helpers.conversions import Conversions, options
from tests.helpers.damage import copied, edit_args
from tests.unit.formats.refusal import refused

MANY, EXPERTS, ONE = "tp2pp2dp2_bf16_do", "ep2dp2_moe_seq_bf16_do", "tp1_bf16_do"


@pytest.mark.parametrize(
    ("name", "args", "kind", "words"),
    [
        (MANY, {"tensor_model_parallel_size": 1}, LayoutMismatch, ["mp_rank_01_000", "TP1×PP2"]),
        (MANY, {"tensor_model_parallel_size": 4}, Incomplete, ["mp_rank_02_000", "TP4×PP2"]),
        (MANY, {"pipeline_model_parallel_size": 4}, Incomplete, ["mp_rank_00_002"]),
        (EXPERTS, {"expert_model_parallel_size": 4}, Incomplete, ["mp_rank_00_003"]),
        (EXPERTS, {"num_experts": 8}, LayoutMismatch, ["2 experts", "args.num_experts is 8"]),
        (MANY, {"num_layers": 6}, LayoutMismatch, ["decoder layers", "found 4", "args.num_layers is 6"]),
        (MANY, {"hidden_size": 128}, LayoutMismatch, ["hidden size", "found 64", "args.hidden_size is 128"]),
        (MANY, {"padded_vocab_size": 320}, LayoutMismatch, ["args.padded_vocab_size is 320"]),
        (MANY, {"num_attention_heads": 8}, LayoutMismatch, ["linear_qkv.weight", "8 heads", "128 rows"]),
        (MANY, {"num_query_groups": 4}, LayoutMismatch, ["linear_qkv.weight", "4 query groups"]),
        (
            MANY,
            {"decoder_first_pipeline_num_layers": 3},
            LayoutMismatch,
            ["layers per model chunk", "[2, 2]", "[3, 1]"],
        ),
        (MANY, {"pipeline_model_parallel_layout": "Et|tttL"}, LayoutMismatch, ["[2, 2]", "[1, 3]"]),
        ("pp2_vpp2_bf16_do", {"virtual_pipeline_model_parallel_size": None}, LayoutMismatch, ["model1"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_args_that_contradict_the_files(
    tmp_path: Path, name: str, args: dict[str, Any], kind: type[CheckpointError], words: list[str]
) -> None:
    source = copied(name, tmp_path)
    edit_args(source, **args)
    refused(source, kind, *words)


def test_a_head_of_its_own_that_args_take_for_the_embedding(tmp_path: Path) -> None:
    """Of several stages a tied model has the embedding twice, under both names: equality alone tells which it is."""
    source = copied(MANY, tmp_path)
    edit_args(source, untie_embeddings_and_output_weights=False)
    with pytest.raises(Corrupt) as caught:
        convert(source, tmp_path / "target", options())
    assert "embedding.word_embeddings.weight (param): 5115 elements of" in str(caught.value)
    assert (
        "with untie_embeddings_and_output_weights false in args, output_layer.weight of the last stage is one"
        in str(caught.value)
    )


def test_contradictions_are_listed_together(tmp_path: Path) -> None:
    source = copied(MANY, tmp_path)
    edit_args(source, num_layers=6, hidden_size=128)
    refused(source, LayoutMismatch, "2 problems", "args.num_layers is 6", "args.hidden_size is 128")


@pytest.mark.parametrize(
    ("name", "write", "kind", "words"),
    [
        (ONE, {"tp": 3}, LayoutMismatch, ["--tp 3", "4 attention heads", "2 query groups"]),
        (ONE, {"tp": 8}, LayoutMismatch, ["--tp 8", "4 attention heads"]),
        (ONE, {"pp": 3}, LayoutMismatch, ["4 layers", "3 pipeline stages", "--pipeline-layout"]),
        (ONE, {"pp": 2, "vpp": 4}, LayoutMismatch, ["4 model chunks"]),
        (ONE, {"vpp": 2}, UsageError, ["--vpp 2", "--pp"]),
        (ONE, {"pp": 2, "pipeline_layout": "3,2"}, UsageError, ["--pipeline-layout 3,2", "4 layers"]),
        (ONE, {"pp": 2, "pipeline_layout": "Ett|ttt"}, LayoutMismatch, ["5 × t instead of 4", "end with L"]),
        (ONE, {"pp": 2, "pipeline_layout": "EttxttL"}, UsageError, ["unknown x"]),
        (ONE, {"ep": 2}, UsageError, ["--ep", "no"]),
        (EXPERTS, {"ep": 3}, LayoutMismatch, ["--ep 3", "4 experts"]),
        (EXPERTS, {"ep": 4, "dp": 3}, LayoutMismatch, ["EP 4", "multiple of 4"]),
        (ONE, {"padded_vocab_size": 100}, UsageError, ["100", "132"]),
        (ONE, {"padded_vocab_size": 145, "tp": 2}, UsageError, ["145 rows", "2 tensor-parallel"]),
        (ONE, {"vocab_size": 200}, UsageError, ["200 words", "144 rows"]),
        (ONE, {"dtype": "float99"}, UsageError, ["--dtype", "float99"]),
        (ONE, {"dtype": "int8"}, UsageError, ["--dtype", "int8"]),
        (ONE, {"optimizer": "adafactor"}, UsageError, ["adafactor", "'distributed' or 'plain'"]),
        (ONE, {"optimizer": "plain", "no_optimizer": True}, UsageError, ["--no-optimizer", "--optimizer"]),
        (ONE, {"tp": 2, "rng": "keep"}, UsageError, ["--rng keep", "--rng derive"]),
    ],
    ids=str,
)
def test_layouts_that_cannot_be(
    tmp_path: Path, name: str, write: dict[str, Any], kind: type[CheckpointError], words: list[str]
) -> None:
    refused(copied(name, tmp_path), kind, *words, **write)


def test_an_optimizer_that_is_not_there(tmp_path: Path, conversions: Conversions) -> None:
    without = conversions.of(copied(ONE, tmp_path), no_optimizer=True)
    reading = conversions.reading(without)
    assert {state for _, state in reading.tensors} == {"param"}
    assert not list(without.rglob("distrib_optim.pt"))
    assert "optimizer" not in reading.ranks[0].model
    refused(without, UsageError, "--optimizer plain", "no optimizer state", optimizer="plain")


def test_a_vocabulary_of_unknown_size_is_not_guessed(tmp_path: Path) -> None:
    source = copied(MANY, tmp_path)
    edit_args(source, vocab_size=None)
    refused(source, UsageError, "160 rows at TP 2", "--vocab-size", "--padded-vocab-size", tp=1)
