"""A LoRA run of miles' is called what it is, and where peft's own files of it lie."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mcore_rlhf.errors import Unsupported
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.formats.registry import open_checkpoint

GOLDEN = Path(__file__).parents[2] / "goldens" / "peft" / "adapter"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """As ``save_lora_checkpoint`` of miles 31f1ca9 leaves it, on one rank."""
    shutil.copytree(GOLDEN, tmp_path / "iter_0000003" / "adapter")
    for name in ("adapter_megatron_rank0.pt", "training_state_rank0.pt"):
        (tmp_path / "iter_0000003" / "adapter" / name).write_bytes(b"")
    return tmp_path


def test_the_run_names_the_folder_that_can_be_read(root: Path) -> None:
    with pytest.raises(Unsupported, match=r"a LoRA of miles' [^\n]*\n.*give .*iter_0000003/adapter, which has peft's"):
        open_checkpoint(root, ReadOptions())
    assert open_checkpoint(root / "iter_0000003" / "adapter", ReadOptions()).format == "peft"


def test_without_them_it_says_so(root: Path) -> None:
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (root / "iter_0000003" / "adapter" / name).unlink()
    for path in (root, root / "iter_0000003", root / "iter_0000003" / "adapter"):
        with pytest.raises(Unsupported, match="could not export peft's own files"):
            open_checkpoint(path, ReadOptions())
