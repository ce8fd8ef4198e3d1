"""A mixture of Megatron's goes on in a run of DeepSpeed's whose experts are modules one by one, in param groups of its own: ``--like``."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from mcore_rlhf.convert import ConvertOptions, convert
from mcore_rlhf.demo.workers import WorkerPool
from mcore_rlhf.errors import Unsupported
from mcore_rlhf.families.options import ReadOptions, WriteOptions
from mcore_rlhf.formats.registry import open_checkpoint
from tests.helpers.conversions import GOLDENS, golden
from tests.reference.deepspeed_matrix import same
from tests.reference.deepspeed_named import Named

JOBS = "tests.reference.deepspeed_named"
MIXTURE = "ep2dp2_moe_seq_bf16_do"
EXPERT = re.compile(r"decoder\.layers\.(\d+)\.mlp\.experts\.local_experts\.(\d+)\.linear_fc([12])\.weight")
TIMEOUT = 100.0


def converted(target: Path, to: str, **write: object) -> Path:
    options = WriteOptions(**write)  # type: ignore[arg-type]
    convert(GOLDENS / MIXTURE, target, ConvertOptions(to=to, workers=1, fsync=False, write=options))
    return target


def experts_by_hand() -> dict[tuple[str, str], torch.Tensor]:
    """Each expert's three matrices under Mixtral's names, of Megatron's two."""
    found = {}
    for (name, state), value in golden(MIXTURE).tensors.items():
        if match := EXPERT.fullmatch(name):
            layer, expert, number = match.groups()
            parts = {"w1": value.chunk(2)[0], "w3": value.chunk(2)[1]} if number == "1" else {"w2": value}
            place = f"model.layers.{layer}.block_sparse_moe.experts.{expert}"
            found |= {(f"{place}.{part}.weight", state): one for part, one in parts.items()}
    return found


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> Named:
    """What the model's parameters are called on disk, which is how transformers 4 has them in memory."""
    folder = converted(tmp_path_factory.mktemp("named") / "hf", "hf")
    return {spec.name: spec.global_shape for spec in open_checkpoint(folder, ReadOptions()).model.params}


@pytest.mark.parametrize(("stage", "to"), [(2, "deepspeed"), (1, "universal")])
def test_experts_one_by_one_and_groups_are_the_runs(
    stage: int, to: str, named: Named, deepspeed_pool: WorkerPool, tmp_path: Path
) -> None:
    run, root = tmp_path / "run", tmp_path / "new"
    deepspeed_pool.run(f"{JOBS}:save_one", named, stage, str(run), world_size=2, timeout=TIMEOUT)
    layout = {} if to == "universal" else {"zero_stage": stage, "dp": 2}
    converted(root, to, like=str(run), **layout)
    ranks = deepspeed_pool.run(
        f"{JOBS}:load", named, stage, str(root), world_size=2, timeout=TIMEOUT, universal=to == "universal"
    )
    live, losses = ranks[0]
    assert losses == ranks[1][1]
    expected, states = experts_by_hand(), {"fp32": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
    held = {(name, states[state]): value for (name, state), value in live.states.items()}
    assert {name for name, _ in held} == {*named}
    held |= {(name, "param"): value for name, value in live.param.items()}
    assert {key for key in held if ".experts." in key[0]} == expected.keys()
    assert [key for key, value in expected.items() if not same(held[key], value)] == []
    assert live.steps == [2.0]
    ours = open_checkpoint(root, ReadOptions()).state.groups
    theirs = open_checkpoint(run, ReadOptions()).state.groups
    assert [group.params for group in ours] == [group.params for group in theirs]


def test_a_run_of_another_model_is_refused(named: Named, deepspeed_pool: WorkerPool, tmp_path: Path) -> None:
    run, fewer = tmp_path / "run", dict([*named.items()][:-1])
    deepspeed_pool.run(f"{JOBS}:save_one", fewer, 2, str(run), world_size=2, timeout=TIMEOUT)
    with pytest.raises(Unsupported, match=f"--like: {[*named][-1]} is not there in"):
        converted(tmp_path / "new", "deepspeed", like=str(run), zero_stage=2, dp=2)


def test_what_differs_without_it(named: Named, tmp_path: Path) -> None:
    opened = open_checkpoint(converted(tmp_path / "new", "deepspeed", zero_stage=2, dp=2), ReadOptions())
    assert {name for name in named if ".experts." in name}.isdisjoint(opened.model.shapes)
