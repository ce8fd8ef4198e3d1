"""The table of passes: what is not meant is neither asked nor loaded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mcore_rlhf.errors import Unsupported
from mcore_rlhf.families.lora.names import OF_ADAPTER, in_memory
from mcore_rlhf.families.options import ReadOptions, WriteOptions
from mcore_rlhf.families.passes import CONVERTED, Pass, Passage, through
from mcore_rlhf.formats.registry import format_named, open_checkpoint
from tests.unit.formats.test_peft import FILE_AND_MEMORY

PROJECT = Path(__file__).resolve().parents[3]
GOLDENS = PROJECT / "tests" / "goldens"
MEGATRON = GOLDENS / "megatron" / "tp2pp2dp2_bf16_do"


def asked(path: Path, to: str, **write: object) -> list[str]:
    """The rows that a conversion runs."""
    found: list[str] = []

    def noted(one: Pass) -> Pass:
        return one._replace(apply=lambda p: found.append(one.name) or one.apply(p))

    options = WriteOptions(**write)  # type: ignore[arg-type]
    through(tuple(map(noted, CONVERTED)), Passage(open_checkpoint(path, ReadOptions()), format_named(to), options))
    return found


ROWS = [
    ("megatron/tp2pp2dp2_bf16_do", "megatron", {}, []),
    ("megatron/tp2pp2dp2_bf16_do", "megatron-dist", {"dtype": "bf16"}, []),
    ("megatron/tp2pp2dp2_bf16_do", "megatron", {"hybrid_layer_pattern": "gpt"}, []),
    ("megatron/tp2pp2dp2_bf16_do", "megatron", {"hybrid_layer_pattern": "*-*-*-*-"}, ["a GPTModel as a hybrid one"]),
    ("megatron/tp2pp2dp2_bf16_do", "deepspeed", {}, ["Hugging Face's names"]),
    ("megatron/ep2dp2_moe_seq_bf16_do", "hf", {}, ["Hugging Face's names"]),
    ("megatron/ep2dp2_moe_seq_bf16_do", "deepspeed", {}, ["Hugging Face's names", "experts packed"]),
    ("deepspeed/z1_fp32_tied_dp2", "universal", {}, []),
    ("peft/base_moe", "universal", {"dtype": "bf16"}, ["experts packed"]),
    ("peft/base_moe", "hf", {"dtype": "bf16"}, ["experts one by one"]),
    ("peft/base_moe", "megatron", {}, ["Megatron's names"]),
    ("peft/adapter", "universal", {}, []),
    ("peft/adapter", "peft", {}, ["an adapter alone"]),
]


@pytest.mark.parametrize(("path", "to", "write", "rows"), ROWS)
def test_what_is_not_meant_is_not_asked(path: str, to: str, write: dict[str, object], rows: list[str]) -> None:
    assert asked(GOLDENS / path, to, **write) == rows


@pytest.mark.parametrize("to", ["hf", "megatron"])
def test_a_target_without_a_place_for_adapters_is_not_made_of_one(to: str) -> None:
    with pytest.raises(Unsupported, match="has no place for one"):
        asked(GOLDENS / "peft/adapter", to)


NAMES = [memory for _, memory in FILE_AND_MEMORY]


@pytest.mark.parametrize("name", [*NAMES, *(f"module.base_model.model.{name}" for name in NAMES), "model.norm.weight"])
def test_the_names_of_an_adapter_are_those_that_the_table_knows(name: str) -> None:
    assert (in_memory(name) is not None) == (OF_ADAPTER.fullmatch(name) is not None)


def test_the_modules_of_what_is_not_meant_are_not_loaded(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom mcore_rlhf import ConvertOptions, convert_checkpoint\n"
        f"convert_checkpoint({str(MEGATRON)!r}, {str(tmp_path / 'out')!r}, ConvertOptions(to='megatron'))\n"
        "rooms = ('mcore_rlhf.families.crossing.', 'mcore_rlhf.families.lora.', 'mcore_rlhf.families.megatron.hybrid',\n"
        "         'mcore_rlhf.families.extra_states')\n"
        "print(sorted(name for name in sys.modules if name.startswith(rooms)))"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True)
    assert (run.stdout.strip(), run.returncode) == ("['mcore_rlhf.families.lora.names']", 0), run.stderr
