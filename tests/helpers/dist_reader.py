"""A second reader of ``torch_dist`` checkpoints: torch's own DCP, and ``torch.load`` for ``common.pt``; and a check against it."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from mcore_rlhf.core.catalog import MASTER
from mcore_rlhf.families.source import Source
from tests.helpers.catalog_values import tensor_of
from tests.helpers.plain_load import plain_load
from tests.reference.merge import bits_equal


@dataclass
class DistReading:
    """A whole checkpoint: tensors and objects by key."""

    tensors: dict[str, torch.Tensor]
    objects: dict[str, Any]
    common: dict[str, Any]


def read_whole(root: Path) -> DistReading:
    """Read the checkpoint that a root's tracker names."""
    tracker = (root / "latest_checkpointed_iteration.txt").read_text()
    folder = root / (tracker if tracker == "release" else f"iter_{int(tracker):07d}")
    reader = dcp.FileSystemReader(folder)
    known = reader.read_metadata().state_dict_metadata
    state: dict[str, Any] = {
        key: torch.empty(stored.size, dtype=stored.properties.dtype)
        for key, stored in known.items()
        if isinstance(stored, TensorStorageMetadata)
    }
    keys = set(state)
    state |= dict.fromkeys(key for key in known if key not in state)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        dcp.load(state, storage_reader=reader, no_dist=True)
    tensors = {key: state[key] for key in keys}
    objects = {key: value for key, value in state.items() if key not in keys}
    common = folder / "common.pt"
    return DistReading(
        tensors, objects, plain_load(common) if common.exists() else objects["common_state/shard_0_1"][0]
    )


def read_tensors(root: Path) -> dict[str, torch.Tensor]:
    """The tensors alone, of which no class of the framework needs to be there; the tracker names an iteration."""
    folder = root / f"iter_{int((root / 'latest_checkpointed_iteration.txt').read_text()):07d}"
    reader = dcp.FileSystemReader(folder)
    state = {
        key: torch.empty(stored.size, dtype=stored.properties.dtype)
        for key, stored in reader.read_metadata().state_dict_metadata.items()
        if isinstance(stored, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        dcp.load(state, storage_reader=reader, no_dist=True)
    return state


NORMS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}


def stored_as(name: str) -> tuple[str, int | None]:
    """A parameter's key in ``torch_dist``, and the layer that it is there."""
    parts = name.split(".")
    if parts[1] != "layers":
        return name, None
    rest = ".".join(parts[3:])
    return f"decoder.layers.{NORMS.get(rest, rest)}", int(parts[2])


def states_of(root: Path) -> dict[tuple[str, str], torch.Tensor]:
    """Every tensor of a ``torch_dist`` folder by (key, state), as torch reads it."""
    found = {}
    for key, tensor in read_tensors(root).items():
        _, is_state, rest = key.rpartition("optimizer.state.")
        state, _, param = rest.partition(".") if is_state else ("param", "", rest)
        found[param, MASTER if is_state and state in ("fp32_param", "param") else state] = tensor
    return found


def check_every_state(source: Source, theirs: dict[tuple[str, str], torch.Tensor]) -> None:
    """Assert that a catalogue has these tensors, in these states, and no other."""
    names = list(source.catalog)
    for name in names:
        key, layer = stored_as(name.param)
        their = theirs[key, name.state]
        their = their if layer is None else their[layer]
        assert bits_equal(tensor_of(source, name.param, name.state), their), name
    assert {(stored_as(name.param)[0], name.state) for name in names} == set(theirs)
