"""A tied output layer that one checkpoint stores apart, as a folder does whose model nobody describes, is held against the embedding."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from mcore_rlhf.convert import ConvertOptions, convert
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.formats.registry import open_checkpoint
from mcore_rlhf.storage.reading import OpenFiles
from mcore_rlhf.verify.differ import Comparison, Differ

GOLDENS = Path(__file__).parents[2] / "goldens" / "deepspeed"


def compared(a: Path, b: Path) -> Comparison:
    first, second = (open_checkpoint(path, ReadOptions()) for path in (a, b))
    with OpenFiles(first.root) as bytes_a, OpenFiles(second.root) as bytes_b:
        return Differ(first, second, bytes_a, bytes_b, states=("param",)).compare()


@pytest.mark.parametrize("name", ["z1_fp32_tied_dp2", "z3_fp32_tied_subgroups_dp4"])
def test_it_is_compared_with_the_embedding_and_may_differ_from_it(name: str, tmp_path: Path) -> None:
    tied, apart = GOLDENS / name, tmp_path / "hf"
    convert(tied, apart, ConvertOptions(to="hf", fsync=False, workers=1))
    file = apart / "model.safetensors"
    tensors = load_file(file)
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= tensors.keys()
    for pair, which in (((tied, apart), "first"), ((apart, tied), "second")):
        found = compared(*pair)
        assert found.equal, found.differences
        assert (
            f"lm_head.weight: the {which} ties it to model.embed_tokens.weight, which was compared with it"
            in found.notes
        )
    tensors["lm_head.weight"][1, 2] += 1
    save_file(tensors, file, {"format": "pt"})
    (apart / "mcore_rlhf.json").unlink()
    (differing,) = compared(tied, apart).differences
    assert (differing.name, differing.differing) == ("lm_head.weight (param)", 1)
    del tensors["model.embed_tokens.weight"]
    save_file(tensors, file, {"format": "pt"})
    assert {one.name: one.what for one in compared(tied, apart).differences}[
        "model.embed_tokens.weight (param)"
    ] == "only in the first"
