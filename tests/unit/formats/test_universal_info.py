"""How tensor parallelism cuts parameters, as universal_checkpoint_info says it: against tensors cut and joined by torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mcore_rlhf.core.catalog import Shape
from mcore_rlhf.errors import LayoutMismatch, Unsupported, Untrusted
from mcore_rlhf.families.universal_info import CutTensor, UniversalCheckpointInfo
from mcore_rlhf.models.spec import GATED, REPLICATED, ROW, VOCABULARY, ParamRule, Partition, Rules

INFO = {
    "vocabulary_parameter_patterns": [r"\d+.word_embeddings.weight"],
    "tp_replicated_parameter_patterns": [r".*layernorm.weight", r".*dense.bias"],
    "parameter_with_row_parallelism_patterns": [r".*dense.weight"],
    "parameter_with_2_sub_params_cat_dim_0": [r".*h_to_4h.weight"],
    "parameter_to_average_patterns": [r".*router.bias"],
}


def joined(cut: CutTensor, parts: list[torch.Tensor]) -> torch.Tensor:
    """The whole tensor by the cut's pieces; elements that no piece has are -1."""
    whole = torch.full(cut.global_shape, -1, dtype=parts[0].dtype)
    for layout, part in zip(cut.layouts, parts, strict=True):
        for piece in layout.pieces:
            local = part[tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.box.shape, strict=True))]
            whole[tuple(slice(a, b) for a, b in zip(piece.box.offset, piece.box.stop, strict=True))] = local
    return whole


def cut_of(
    name: str, shapes: list[Shape], *rules: ParamRule, info: dict[str, Any] = INFO, buffer: bool = False
) -> CutTensor:
    return UniversalCheckpointInfo(info).cut(name, shapes, Rules(rules), buffer=buffer)


@pytest.mark.parametrize(
    ("name", "partition", "dim"),
    [
        ("1.word_embeddings.weight", VOCABULARY, 0),
        ("3.self_attention.dense.weight", ROW, 1),
        ("3.self_attention.query_key_value.weight", Partition(0), 0),
    ],
)
def test_patterns_say_along_which_dimension(name: str, partition: Partition, dim: int) -> None:
    whole = torch.arange(48).reshape(8, 6)
    parts = list(whole.chunk(2, dim))
    cut = cut_of(name, [tuple(part.shape) for part in parts])
    assert cut.partition == partition
    assert torch.equal(joined(cut, parts), whole)


def test_fused_halves_are_cut_each() -> None:
    gate, up = torch.arange(24).reshape(4, 6), torch.arange(100, 124).reshape(4, 6)
    parts = [torch.cat([gate[:2], up[:2]]), torch.cat([gate[2:], up[2:]])]
    cut = cut_of("3.mlp.dense_h_to_4h.weight", [(4, 6), (4, 6)])
    assert cut.partition == GATED
    assert torch.equal(joined(cut, parts), torch.cat([gate, up]))


@pytest.mark.parametrize("name", ["3.input_layernorm.weight", "3.router.bias", "3.mlp.dense.bias"])
def test_replicated_parameters_are_whole_everywhere(name: str) -> None:
    cut = cut_of(name, [(6,), (6,)])
    assert (cut.partition, cut.global_shape) == (REPLICATED, (6,))
    assert [layout.pieces for layout in cut.layouts] == [cut.layouts[0].pieces] * 2


def test_one_rank_has_all_and_buffers_are_not_cut() -> None:
    assert cut_of("anything", [(3, 4)], info={}).global_shape == (3, 4)
    assert cut_of("running.dense.weight", [(3, 4), (3, 4)], buffer=True).partition == REPLICATED


def test_the_users_rules_come_first() -> None:
    assert cut_of("3.dense.weight", [(4, 4)] * 2, ParamRule("*.dense.weight", REPLICATED)).partition == REPLICATED


def _affine(**piece: Any) -> dict[str, Any]:
    usual = {"shape": [3, 4], "source": [0, [4, 1]], "dest": [0, [4, 1]], "locations": [0]}
    ranks = {
        0: {"shard_shape": [3, 4], "pieces": [{**usual, **piece}]},
        1: {"shard_shape": [2, 4], "pieces": [{**usual, "shape": [2, 4], "source": [12, [4, 1]]}]},
    }
    return {"affine_map": {"version": 1, "params": {"^w$": {"logical_shape": [5, 4], "ranks": ranks}}}}


def test_an_affine_map_may_cut_unevenly() -> None:
    whole = torch.arange(20).reshape(5, 4)
    cut = cut_of("w", [(3, 4), (2, 4)], info=_affine())
    assert torch.equal(joined(cut, [whole[:3], whole[3:]]), whole)
    assert cut.partition == Partition(0)


@pytest.mark.parametrize("piece", [{"scale": 0.5}, {"source": [0, [1, 5]]}, {"dest": [0, [1, 3]]}])
def test_affine_pieces_that_are_no_boxes_are_refused(piece: dict[str, Any]) -> None:
    with pytest.raises(Unsupported, match="no set of plain boxes"):
        cut_of("w", [(3, 4), (2, 4)], info=_affine(**piece))


@pytest.mark.parametrize(
    ("info", "shapes", "kind", "words"),
    [
        (_affine(), [(3, 4), (3, 4)], LayoutMismatch, "affine_map says shape"),
        ({"tp_replicated_parameter_patterns": []}, [(3, 4), (2, 4)], LayoutMismatch, "different shapes"),
        (
            {"tp_replicated_parameter_patterns": ["w"], "parameter_with_row_parallelism_patterns": ["w"]},
            [(3, 4)] * 2, LayoutMismatch, "both",
        ),
        ({"parameter_with_sub_params": [{"patterns": ["w"], "shape": (1,), "partition_dim": 0}]}, [(3, 4)] * 2, Unsupported, "sub_params"),
        ({"autotp_unsupported_parameter_patterns": {"^w$": "odd"}}, [(3, 4)] * 2, Unsupported, "AutoTP itself"),
    ],
)  # fmt: skip
def test_contradictions_are_refused(
    info: dict[str, Any], shapes: list[Shape], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        cut_of("w", shapes, info=info)


@pytest.mark.parametrize(
    "pattern",
    [
        "(a+)+$",
        "((a|a)|a)*$",
        ".*.*.*.*.*x",
        "a?" * 30 + "a" * 30,
        "(a|a)" * 30,
        "(?:a{1,9}){1,9}$",
        "a" * 2000,
        r"[^\]]+(\w+){9}",
    ],
)
def test_a_pattern_that_takes_for_ever_is_refused(pattern: str) -> None:
    with pytest.raises(Untrusted, match="may take for ever"):
        cut_of("a" * 60, [(3, 4)] * 2, info={"tp_replicated_parameter_patterns": [pattern]})


@pytest.mark.parametrize("pattern", ["(", "a**", "[z-a]", "(?P<1>a)"])
def test_what_is_no_pattern_is_said(pattern: str) -> None:
    with pytest.raises((LayoutMismatch, Untrusted), match="pattern"):
        cut_of("a", [(3, 4)] * 2, info={"tp_replicated_parameter_patterns": [pattern]})


@pytest.mark.parametrize(
    "pattern",
    [r"^model\.layers\.\d+\.mlp\.(gate|up|down)_proj\.weight$", r"(?:.*\.)?\d+\..*[+*]?.weight", r"a\*\+\*\+\*\+b"],
)
def test_honest_patterns_are_taken(pattern: str) -> None:
    assert cut_of("w", [(3, 4)] * 2, info={"parameter_with_row_parallelism_patterns": [pattern, "w"]}).partition == ROW


def test_without_any_word_nothing_is_guessed() -> None:
    with pytest.raises(LayoutMismatch, match="--rules"):
        cut_of("w", [(3, 4)] * 2, info={})
