"""A second reader of ``torch_dist`` checkpoints: torch's own DCP, and ``torch.load`` for ``common.pt``."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tests.helpers.plain_load import plain_load


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
    return DistReading(tensors, objects, plain_load(folder / "common.pt"))


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
