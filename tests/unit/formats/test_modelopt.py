"""ModelOpt's state: where ``restore_modelopt_state`` and ``restore_sharded_modelopt_state`` look for it, or lost by name.

ModelOpt itself needs a GPU's toolchain and is not installed: what it does with the files (``torch.load`` of a key, or of
``modelopt_state/common.pt``) is done here as its source has it; see :mod:`mcore_rlhf.families.megatron.modelopt`.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rlhf.convert import Job, convert
from mcore_rlhf.core.facts import Fate, Item, Kind
from mcore_rlhf.errors import Lossy
from mcore_rlhf.formats.megatron_dist.folders import is_dist_folder
from tests.helpers.conversions import options
from tests.helpers.damage import MODEL, copied, edited
from tests.helpers.plain_load import plain_load

GOLDEN, CHUNKS = "tp2pp2dp2_bf16_do", "pp2_vpp2_bf16_do"
STATE: dict[str, Any] = {
    "modelopt_state_dict": [("quantize", {"config": {"quant_cfg": {"*": {"num_bits": 8}}, "algorithm": "max"}, "metadata": {}})],
    "modelopt_version": "0.39.0",
}  # fmt: skip
ITEM = Item(Kind.VALUE, "modelopt_state")


def legacy(
    tmp_path: Path, golden: str = GOLDEN, keys: tuple[str, ...] = ("modelopt_state",), **metadata: object
) -> Path:
    """A golden with ModelOpt's state on every rank."""
    source = copied(golden, tmp_path)
    for path in source.rglob(MODEL):
        with edited(path) as tree:
            for key in keys:
                tree[key] = copy.deepcopy(STATE)
                tree[key]["modelopt_state_dict"][0][1]["metadata"].update(metadata)
    return source


def to(target: str, source: Path, folder: Path, **write: Any) -> Job:
    """Convert."""
    return convert(source, folder, replace(options(**write), to=target))


def restored(root: Path) -> object:
    """What ``restore_sharded_modelopt_state`` loads, given the folder of an iteration."""
    (folder,) = root.glob("iter_*")
    assert is_dist_folder(folder / "modelopt_state")
    assert "modelopt_state" not in plain_load(folder / "common.pt")
    return torch.load(folder / "modelopt_state" / "common.pt", weights_only=True)


def test_it_is_where_each_format_has_it(tmp_path: Path) -> None:
    source = legacy(tmp_path)
    job = to("megatron-dist", source, tmp_path / "dist", tp=1)
    assert job.lossless
    assert job.account.entries[ITEM].fate is Fate.KEPT
    assert restored(tmp_path / "dist") == STATE
    again = to("megatron-dist", tmp_path / "dist", tmp_path / "again", tp=2, pp=1)
    assert again.account.entries[ITEM].fate is Fate.KEPT
    assert restored(tmp_path / "again") == STATE
    back = to("megatron", tmp_path / "again", tmp_path / "back", pp=2)
    assert back.account.entries[ITEM].fate is Fate.KEPT
    assert all(plain_load(path)["modelopt_state"] == STATE for path in (tmp_path / "back").rglob(MODEL))


def test_every_model_chunk_has_one(tmp_path: Path) -> None:
    chunks = ("modelopt_state_0", "modelopt_state_1")
    source = legacy(tmp_path, CHUNKS, chunks)
    one = to("megatron", source, tmp_path / "one", vpp=1)
    assert one.account.entries[ITEM].fate is Fate.KEPT
    for path in (tmp_path / "one").rglob(MODEL):
        assert [key for key in plain_load(path) if "modelopt" in key] == ["modelopt_state"]
    to("megatron", tmp_path / "one", tmp_path / "two", vpp=2)
    for path in (tmp_path / "two").rglob(MODEL):
        assert tuple(key for key in plain_load(path) if "modelopt" in key) == chunks
    lost = to("megatron-dist", source, tmp_path / "dist")
    assert lost.account.entries[ITEM] == (Fate.LOST, lost.account.entries[ITEM].text, None)
    assert "one model chunk per stage alone" in lost.account.entries[ITEM].text


def test_what_belongs_to_modules_is_lost_by_name(tmp_path: Path) -> None:
    source = legacy(tmp_path, quantizer_state={"decoder.layers.0.mlp.linear_fc1.input_quantizer": {"_amax": 1.0}})
    job = to("megatron-dist", source, tmp_path / "dist")
    assert "modelopt_state: quantize.quantizer_state: what belongs to single modules" in " ".join(job.account.lost)
    assert restored(tmp_path / "dist") == STATE
    same = to("megatron", source, tmp_path / "same", dp=1)
    assert not any("modelopt" in text for text in same.account.lost)
    assert any(
        "quantize.quantizer_state names modules" in text
        for text in to("megatron", source, tmp_path / "pp", pp=4).account.lost
    )
    with pytest.raises(Lossy, match="modelopt_state"):
        convert(source, tmp_path / "strict", replace(options(), to="megatron-dist", strict=True))


def test_states_of_which_every_rank_has_its_own_are_lost_by_name(tmp_path: Path) -> None:
    source = legacy(tmp_path)
    with edited(sorted(source.rglob(MODEL))[-1]) as tree:
        tree["modelopt_state"]["modelopt_state_dict"][0][1]["metadata"]["quantizer_state"] = {
            "decoder.layers.1.mlp": {}
        }
    for target in ("megatron", "megatron-dist"):
        lost = to(target, source, tmp_path / target).account.lost
        assert any("modelopt_state: ModelOpt's, of which every rank has another" in text for text in lost)
