"""Pieces of Hugging Face's weight files, one for each rank: ours are torch's own, and torch loads them and puts them together."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from mcore_rlhf.convert import ConvertOptions, convert
from mcore_rlhf.demo.workers import WorkerPool
from mcore_rlhf.families.options import WriteOptions
from tests.reference import dcp_jobs as jobs
from tests.reference.fsdp_jobs import Whole, differences
from tests.reference.fsdp_models import Wrapped

TIMEOUT = 100.0
_ANYWHERE = ("scale", "steps")
"""Buffers lie whole in the file of one rank, as do the empty pieces of ranks without rows: torch's planner deals them by size."""


def to_pieces(source: Path, target: Path, **write: Any) -> Path:
    convert(source, target, ConvertOptions(to="hf", fsync=False, workers=1, write=WriteOptions(**write)))
    return target


def held(folder: Path) -> dict[str, dict[str, tuple[list[int], torch.Tensor]]]:
    """What the safetensors library finds: by file, every piece with its offsets."""
    found: dict[str, dict[str, tuple[list[int], torch.Tensor]]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            about = file.metadata()
            assert {"DCP_VERSION", "format"} < about.keys()
            places = json.loads(about["DCP_SHARDING_INFO"])
            assert places.keys() == set(file.keys())
            found[path.name] = {n: (places[n]["saved_offsets"], file.get_tensor(n)) for n in file.keys()}  # noqa: SIM118
    return found


def model_of(whole: Whole) -> Whole:
    return {key: value for key, value in whole.items() if key.startswith("model.")}


_FIRST = ("scale", "steps", "embed.weight", "layers.0.weight", "layers.0.bias")
_SECOND = (
    "layers.1.weight",
    "layers.1.bias",
    "norm.weight",
    "norm.bias",
    "head.weight",
    "value_head.weight",
    "value_head.bias",
)
_FILES = {**dict.fromkeys(_FIRST, 1), **dict.fromkeys(_SECOND, 2)}


@pytest.mark.parametrize(("mesh", "files", "limit"), [((2,), None, None), ((3,), _FILES, 750)])
def test_pieces_are_those_of_torch(
    fsdp_pool: WorkerPool, tmp_path: Path, mesh: tuple[int, ...], files: Mapping[str, int] | None, limit: int | None
) -> None:
    how = Wrapped(mesh=mesh)
    ranks = fsdp_pool.run(jobs.save_pieces, how, str(tmp_path), files, world_size=how.world, timeout=TIMEOUT)
    whole = ranks[0]
    ours = to_pieces(tmp_path / "dcp", tmp_path / "ours", pieces=how.world, max_shard_size=limit)
    wanted, found = held(tmp_path / "pieces"), held(ours)
    assert wanted.keys() == found.keys()
    for file, pieces in wanted.items():
        cut, own = (
            {k: v for k, v in of.items() if k not in _ANYWHERE and v[1].numel()} for of in (pieces, found[file])
        )
        assert cut.keys() == own.keys(), file
        for name, (offsets, tensor) in cut.items():
            assert own[name][0] == offsets
            assert torch.equal(own[name][1], tensor)
    again = fsdp_pool.run(
        jobs.load_pieces, how.other(mesh=(5 - how.world,)), str(ours), world_size=5 - how.world, timeout=TIMEOUT
    )
    for rank in again:
        assert differences(model_of(whole), model_of(rank)) == []


def test_torch_puts_them_together_to_what_is_written_whole(fsdp_pool: WorkerPool, tmp_path: Path) -> None:
    from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files

    source = tmp_path / "dcp"
    fsdp_pool.run(jobs.save_pieces, Wrapped(), str(tmp_path), None, world_size=2, timeout=TIMEOUT)
    write = {"max_shard_size": 400}
    whole, pieces = (
        to_pieces(source, tmp_path / "whole", **write),
        to_pieces(source, tmp_path / "ours", pieces=5, **write),
    )
    index = json.loads((whole / "model.safetensors.index.json").read_text())["weight_map"]
    (tmp_path / "together").mkdir()
    numbers = {name: int(file.split("-")[1]) for name, file in index.items() if name != "steps"}
    consolidate_safetensors_files(str(pieces), str(tmp_path / "together"), numbers)
    for file in sorted(set(index.values())):
        ours, theirs = load_file(whole / file), load_file(tmp_path / "together" / file)
        ours.pop("steps", None)  # torch asks finfo about it, and takes a tensor without dimensions for an empty one
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
