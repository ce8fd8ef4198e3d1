"""Every golden at many other layouts: an independent reader finds each tensor of each state, bit for bit, and back again.

The reader also asserts, for source and target alike, that parameters are views of one padded buffer at their computed
places, that ``numel_unpadded`` and the file's lengths follow from them, and that masters round to their parameters.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.conversions import GOLDENS, Conversions, golden
from tests.helpers.independent_merge import Rank, degrees
from tests.helpers.independent_reader import Reading, differences
from tests.helpers.plain_load import same

ONE, MANY, PLAIN, FP32, TIED, VIRTUAL, EXPERTS = (
    "tp1_bf16_do", "tp2pp2dp2_bf16_do", "tp2pp2dp2_bf16_nodo", "tp2pp2dp2_fp32_do", "tp2pp2dp2_tied_bf16_do",
    "pp2_vpp2_bf16_do", "ep2dp2_moe_seq_bf16_do",
)  # fmt: skip

# (golden, options, decoder layers per chunk in passing order)
CASES: list[tuple[str, dict[str, Any], list[int]]] = [
    (ONE, {"tp": 2, "pp": 2}, [2, 2]),
    (ONE, {"tp": 4, "dp": 3}, [4]),
    (ONE, {"pp": 2, "pipeline_layout": "3,1"}, [3, 1]),
    (ONE, {"pp": 2, "vpp": 2, "pipeline_layout": "Et|t|tt|L"}, [1, 1, 2, 0]),
    (ONE, {"pp": 4, "pipeline_layout": "E|tt|tt|L", "tp": 2}, [0, 2, 2, 0]),
    (MANY, {"tp": 1, "pp": 1}, [4]),
    (MANY, {"tp": 4}, [2, 2]),
    (MANY, {"tp": 1, "pp": 3, "pipeline_layout": "1,1,2"}, [1, 1, 2]),
    (PLAIN, {"tp": 1, "pp": 4}, [1, 1, 1, 1]),
    (PLAIN, {"optimizer": "distributed", "tp": 4, "pp": 1}, [4]),
    (FP32, {"tp": 1, "pp": 4}, [1, 1, 1, 1]),
    (TIED, {"tp": 1, "pp": 1}, [4]),
    (TIED, {"tp": 4}, [2, 2]),
    (TIED, {"optimizer": "plain", "vpp": 2}, [1, 1, 1, 1]),
    (VIRTUAL, {"pp": 2, "vpp": 1, "tp": 2}, [2, 2]),
    (EXPERTS, {"ep": 4, "tp": 2}, [4]),
    (EXPERTS, {"ep": 4, "tp": 2, "etp": 1}, [4]),
    (EXPERTS, {"ep": 1, "tp": 2, "optimizer": "plain"}, [4]),
    (EXPERTS, {"ep": 2, "pp": 2, "vpp": 2}, [1, 1, 1, 1]),
]
ROUND_TRIPS = [
    case
    for case in CASES
    if (case[0], *case[1]) in {
        (MANY, "tp"), (MANY, "tp", "pp", "pipeline_layout"), (TIED, "tp"), (TIED, "optimizer", "vpp"),
        (VIRTUAL, "pp", "vpp", "tp"), (EXPERTS, "ep", "tp"), (PLAIN, "optimizer", "tp", "pp"),
    }
]  # fmt: skip


def label(case: tuple[str, dict[str, Any], list[int]]) -> str:
    return "-".join([case[0], *(f"{k}={v}" for k, v in case[1].items())])


def layers(rank: Rank) -> list[int]:
    """Decoder layers in each chunk of a rank."""
    return [len({key.split(".")[2] for key in chunk if key.startswith("decoder.layers.")}) for chunk in rank.chunks()]


@pytest.mark.parametrize("case", CASES, ids=label)
def test_every_tensor_of_every_state_arrives(
    conversions: Conversions, case: tuple[str, dict[str, Any], list[int]]
) -> None:
    name, write, per_chunk = case
    source, target = golden(name), conversions.reading(conversions.of(GOLDENS / name, **write))
    assert differences(source, target) == []
    assert target.iteration == source.iteration == 2
    pp, vpp = degrees(target.args)[1], target.args.virtual_pipeline_model_parallel_size or 1
    assert [layers(next(r for r in target.ranks if r.pp == p))[v] for v in range(vpp) for p in range(pp)] == per_chunk
    _check_args(source, target, write)


def _check_args(source: Reading, target: Reading, write: dict[str, Any]) -> None:
    old, new = source.args, target.args
    asked = {
        "tensor_model_parallel_size": "tp", "pipeline_model_parallel_size": "pp", "data_parallel_size": "dp",
        "expert_model_parallel_size": "ep", "expert_tensor_parallel_size": "etp",
        "virtual_pipeline_model_parallel_size": "vpp",
    }  # fmt: skip
    for attribute, option in asked.items():
        if option in write:
            assert (getattr(new, attribute) or 1) == write[option], attribute
    tp, pp, ep, etp = degrees(new)
    assert new.world_size == tp * pp * new.data_parallel_size * new.context_parallel_size
    assert new.world_size // pp % (ep * etp) == 0
    multiple = new.make_vocab_size_divisible_by * tp
    assert new.padded_vocab_size == -(-132 // multiple) * multiple
    assert new.use_distributed_optimizer == (write.get("optimizer", "") or old_kind(old)).startswith("distributed")
    assert [r.model["args"].rank for r in target.ranks if r.tp == r.pp == r.ep == 0] == [0]
    ranks = [rank.model["args"].rank for rank in target.ranks]
    assert len(set(ranks)) == len(ranks)
    assert max(ranks) < new.world_size
    assert new.consumed_train_samples == old.consumed_train_samples
    assert new.iteration == old.iteration


def old_kind(args: Any) -> str:
    return "distributed" if args.use_distributed_optimizer else "plain"


@pytest.mark.parametrize("case", ROUND_TRIPS, ids=label)
def test_there_and_back_is_the_same_tree(conversions: Conversions, case: tuple[str, dict[str, Any], list[int]]) -> None:
    """Everything but the RNG states, which belong to ranks that were gone in between."""
    name, write, _ = case
    source = golden(name)
    there = conversions.of(GOLDENS / name, **write)
    args = source.args
    tp, pp, ep, etp = degrees(args)
    home: dict[str, Any] = {"tp": tp, "pp": pp, "vpp": args.virtual_pipeline_model_parallel_size or 1}
    home |= {"dp": args.data_parallel_size, "optimizer": old_kind(args), "padded_vocab_size": args.padded_vocab_size}
    home |= {"ep": ep, "etp": etp} if args.num_experts else {}
    shrunk = conversions.reading(there).args.padded_vocab_size < args.padded_vocab_size
    back = conversions.reading(conversions.of(there, **home))
    if shrunk:
        assert differences(conversions.reading(there), back) == []
        return
    assert differences(source, back) == []
    for old, new in zip(source.ranks, back.ranks, strict=True):
        assert old.folder == new.folder
        assert same(old.distrib, new.distrib) == []
        assert same(_comparable(old, write), _comparable(new, write)) == []


_HISTORY = {"overlap_p2p_comm", "num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank",
            "sequence_parallel", "local_rank"}  # fmt: skip


def _comparable(rank: Rank, write: dict[str, Any]) -> dict[str, Any]:
    """A model file without what depends on the way: RNG states, and the count of operations, which is a maximum."""
    tree = {k: v for k, v in rank.model.items() if k not in ("rng_state", "num_floating_point_operations_so_far")}
    tree["args"] = {k: v for k, v in vars(tree["args"]).items() if k not in _HISTORY}
    if write.get("ep") == 1:
        tree.pop("optimizer")  # see test_groups
    return tree
