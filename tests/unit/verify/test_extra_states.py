"""Bytes among the tensors that a module would unpickle."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from mcore_rlhf.convert import ConvertOptions, prepare
from mcore_rlhf.errors import Untrusted

NAME = "layers.0._extra_state"
HARMFUL = b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85R."
FRAMEWORKS = b"\x80\x02cverl.utils.fs\ncopy\nX\x04\x00\x00\x00true\x85R."


def source(folder: Path, kind: str, state: bytes, name: str = NAME, dtype: torch.dtype = torch.uint8) -> Path:
    tensors = {"layers.0.weight": torch.ones(2, 2), name: torch.frombuffer(bytearray(state), dtype=dtype)}
    if kind == "dcp":
        dcp.save({"model": tensors}, checkpoint_id=folder, no_dist=True)
    else:
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kind", ["dcp", "hf"])
@pytest.mark.parametrize("state", [HARMFUL, FRAMEWORKS])
def test_what_calls_anything_is_refused_by_name(tmp_path: Path, kind: str, state: bytes) -> None:
    with pytest.raises(Untrusted, match=r"layers\.0\._extra_state holds a pickle that calls '(os\.system|verl\.utils)"):
        prepare(source(tmp_path / "source", kind, state), ConvertOptions(kind))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kind", ["dcp", "hf"])
@pytest.mark.parametrize("state", [pickle.dumps({"amax": [1.0]}), b"\x00" * 64, b"\x81"])
def test_others_are_bytes_as_before(tmp_path: Path, kind: str, state: bytes) -> None:
    assert prepare(source(tmp_path / "source", kind, state), ConvertOptions(kind)).lossless


@pytest.mark.parametrize(
    ("name", "dtype"), [(NAME, torch.int64), (f"{NAME}0", torch.uint8), ("_extra_state", torch.float16)]
)
def test_whatever_its_type_and_number_it_is_looked_into(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    """Transformer Engine takes the bytes of any tensor, and those of the parts of a grouped module are numbered."""
    state = HARMFUL.ljust(64, b"\0")
    with pytest.raises(Untrusted, match=r"_extra_state0? holds a pickle that calls 'os\.system'"):
        prepare(source(tmp_path / "source", "hf", state, name, dtype), ConvertOptions("hf"))
