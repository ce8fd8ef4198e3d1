"""What is written is built like what Megatron writes: the same tree for the same layout, down to types and order."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rlhf.convert import prepare
from tests.helpers.conversions import GOLDENS, NAMES, Conversions, options
from tests.helpers.plain_load import bits, plain_load, same


def files(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


@pytest.mark.parametrize("name", NAMES)
def test_an_unchanged_layout_is_the_same_checkpoint(conversions: Conversions, name: str) -> None:
    """Every value of every file, RNG states and args included; and who shares a storage with whom."""
    source, target = GOLDENS / name, conversions.of(GOLDENS / name)
    assert [f for f in files(target) if f != "mcore_rlhf.json"] == files(source)
    for file in files(source):
        if file.endswith(".pt"):
            a, b = plain_load(source / file), plain_load(target / file)
            assert same(a, b) == []
            assert places(a) == places(b)
        else:
            assert (source / file).read_bytes() == (target / file).read_bytes()


def places(tree: Any, path: str = "") -> dict[str, tuple[int, int, tuple[int, ...]]]:
    """Of every tensor: where it starts in its storage, how long that is, and its strides."""
    found = {}
    if isinstance(tree, torch.Tensor) and "rng" not in path:
        itemsize = tree.element_size()
        found[path] = (tree.storage_offset(), tree.untyped_storage().nbytes() // itemsize, tree.stride())
    elif isinstance(tree, dict):
        for key, value in tree.items():
            found |= places(value, f"{path}/{key}")
    elif isinstance(tree, list):
        for i, value in enumerate(tree):
            found |= places(value, f"{path}[{i}]")
    return found


def shape_of(tree: Any) -> Any:
    """A tree with tensors replaced by what they are, and values by their type."""
    if isinstance(tree, torch.Tensor):
        return (tuple(tree.shape), tree.dtype, tree.storage_offset(), tree.untyped_storage().nbytes())
    if isinstance(tree, dict):
        return [(type(tree).__name__, key, shape_of(value)) for key, value in tree.items()]
    if isinstance(tree, list | tuple):
        return [type(tree).__name__, *map(shape_of, tree)]
    if hasattr(tree, "__dict__") and type(tree).__name__ == "Namespace":
        return shape_of(vars(tree))
    return type(tree).__name__


PAIRS = [
    ("tp1_bf16_do", "tp2pp2dp2_bf16_do", {"tp": 2, "pp": 2, "dp": 2}),
    ("tp1_bf16_do", "pp2_vpp2_bf16_do", {"pp": 2, "vpp": 2}),
    ("tp1_bf16_do", "tp2pp2dp2_bf16_nodo", {"tp": 2, "pp": 2, "dp": 2, "optimizer": "plain"}),
    ("tp2pp2dp2_bf16_nodo", "tp2pp2dp2_bf16_do", {"optimizer": "distributed"}),
    ("tp2pp2dp2_bf16_do", "tp1_bf16_do", {"tp": 1, "pp": 1, "dp": 1}),
    ("pp2_vpp2_bf16_do", "tp1_bf16_do", {"pp": 1, "dp": 1}),
]
# Attributes that tell of one run, or of its machine, and not of a layout.
RUN = {"save", "load", "dump", "inprocess_active_world_size", "local_rank", "align_param_gather"}


@pytest.mark.parametrize(
    ("source", "genuine", "write"), PAIRS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_another_layout_is_built_like_megatrons_own(
    conversions: Conversions, source: str, genuine: str, write: dict[str, Any]
) -> None:
    """The goldens are one model: at a golden's layout, ours has its files, keys, shapes, dtypes, offsets and args."""
    made, real = conversions.of(GOLDENS / source, **write), GOLDENS / genuine
    assert [f for f in files(made) if f != "mcore_rlhf.json"] == files(real)
    for file in files(real):
        if file.endswith(".pt"):
            ours, theirs = plain_load(made / file), plain_load(real / file)
            if "args" in theirs:
                a, b = (dict(vars(tree.pop("args"))) for tree in (ours, theirs))
                assert list(a) == list(b)
                assert {k: (a[k], b[k]) for k in a if k not in RUN and a[k] != b[k]} == {}
                assert same(ours["opt_param_scheduler"], theirs["opt_param_scheduler"]) == []
                assert same(groups(ours), groups(theirs)) == []
            assert shape_of(ours) == shape_of(theirs)


@pytest.mark.parametrize("to", ["megatron", "megatron-dist"])
def test_a_plain_optimizer_of_an_fp32_run_loses_nothing(to: str) -> None:
    """Masters of fp32 parameters are those parameters."""
    job = prepare(GOLDENS / "tp2pp2dp2_fp32_do", replace(options(optimizer="plain"), to=to))
    assert job.lossless, job.report.lost


def groups(tree: dict[str, Any]) -> list[Any]:
    optimizer = tree["optimizer"]
    inner = optimizer.get("optimizer", optimizer)
    return list(inner["param_groups"])


def test_new_vocabulary_rows_repeat_the_last_one_in_every_state(conversions: Conversions) -> None:
    target = conversions.reading(conversions.of(GOLDENS / "tp1_bf16_do", tp=2, pp=2))
    for (name, state), tensor in target.tensors.items():
        if name.endswith(("word_embeddings.weight", "output_layer.weight")):
            assert len(tensor) == 160, state
            assert all(bits(row) == bits(tensor[143]) for row in tensor[144:])


def test_the_report_says_what_happened(conversions: Conversions) -> None:
    _, job = conversions.job(GOLDENS / "tp1_bf16_do", tp=2, pp=2)
    text = "\n".join(f"{fate.value}: {line}" for fate, line in job.report.lines)
    assert "changed: vocabulary rows 144–159 are new padding and repeat row 143" in text
    assert "derived: RNG states" in text
    assert job.lossless
    _, kept = conversions.job(GOLDENS / "tp1_bf16_do")
    assert [line for fate, line in kept.report.lines if fate.value != "kept"] == []
