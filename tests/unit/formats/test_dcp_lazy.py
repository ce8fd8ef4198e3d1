"""What is read of a DCP or ``torch_dist`` folder only when it is wanted is still looked at before anything is written."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from mcore_rlhf.convert import convert
from mcore_rlhf.core.catalog import MASTER, TensorName
from mcore_rlhf.errors import Corrupt
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.formats.registry import open_checkpoint
from mcore_rlhf.storage.dcp import METADATA_FILE
from mcore_rlhf.storage.dcp.folder import DcpFolder
from mcore_rlhf.verify.checkpoint import Depth, verify
from tests.helpers.conversions import options

GOLDENS = Path(__file__).parents[2] / "goldens"
TRAINED = {"dcp": "layers.1.weight", "megatron-dist": "decoder.layers.1.mlp.linear_fc2.weight"}


@pytest.fixture(params=["dcp/fsdp2_ws3/actor", "megatron_dist/tp2pp2dp2_fully_reshardable"])
def damaged(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder with a flipped bit in the header of one tensor's zip."""
    root = Path(shutil.copytree(GOLDENS / request.param, tmp_path / "source"))
    folder = next(root.rglob(METADATA_FILE)).parent
    places = DcpFolder.open(folder, folder).metadata.places
    place = next(place for (fqn, offset), place in places.items() if offset and "exp_avg_sq" in fqn)
    path = folder / place.file
    data = bytearray(path.read_bytes())
    data[place.offset] ^= 1
    path.write_bytes(data)
    return root


def test_opening_reads_no_item_that_it_does_not_need(damaged: Path) -> None:
    source = open_checkpoint(damaged, ReadOptions())
    sizes = {file.path: file.nbytes for file in source.files}
    assert sizes == {path: (damaged / path).stat().st_size for path in sizes}
    entry = source.catalog.get(TensorName(source.role, TRAINED[source.format], MASTER))
    assert entry is not None
    assert entry.chunks
    with pytest.raises(Corrupt, match="exp_avg_sq"):
        [tuple(file.records) for file in source.files]


def test_verify_looks_at_every_item_however_quick(damaged: Path) -> None:
    found = verify(damaged, ReadOptions(), Depth.QUICK).problems
    assert len(found.found) == 1
    assert "exp_avg_sq" in found.describe()


def test_nothing_is_written_of_a_damaged_folder(damaged: Path, tmp_path: Path) -> None:
    """Not even without the optimizer, whose items lie in files of the weights."""
    for no_optimizer in (False, True):
        to = open_checkpoint(damaged, ReadOptions()).format
        with pytest.raises(Corrupt, match="exp_avg_sq"):
            convert(damaged, tmp_path / "target", replace(options(no_optimizer=no_optimizer), to=to, workers=1))
        assert [path.name for path in tmp_path.iterdir()] == ["source"]
