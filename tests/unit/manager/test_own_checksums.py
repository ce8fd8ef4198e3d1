"""Files that no manifest speaks for are checked by what they carry themselves."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mcore_rlhf.errors import CheckpointError, Corrupt
from mcore_rlhf.manager.run.checks import check_itself

GOLDEN = Path(__file__).parents[2] / "goldens" / "dcp" / "fsdp2_ws3" / "actor" / "dcp_checkpoint"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(GOLDEN, tmp_path / "dcp_checkpoint")
    return tmp_path / "dcp_checkpoint"


def test_sound_files_pass(folder: Path) -> None:
    for path in sorted(folder.iterdir()):
        check_itself(path)


def test_one_bit_of_a_tensor_is_found(folder: Path) -> None:
    from mcore_rlhf.storage.dcp.folder import DcpFolder

    opened = DcpFolder.open(folder, folder)
    chunk = opened.tensors["fsdp_checkpoint.model.embed.weight"].chunks()[1]
    path = folder / chunk.record.file
    data = bytearray(path.read_bytes())
    data[chunk.record.byte_offset + 5] ^= 4
    path.write_bytes(bytes(data))
    with pytest.raises(Corrupt, match=r"model\.embed\.weight\[4,0\]"):
        check_itself(path)
    check_itself(folder / "__0_0.distcp")


def test_a_file_without_its_metadata_is_refused(folder: Path) -> None:
    (folder / ".metadata").unlink()
    with pytest.raises(CheckpointError, match="metadata"):
        check_itself(folder / "__0_0.distcp")
