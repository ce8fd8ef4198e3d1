"""Adapters in peft's format: names, configuration, reading, writing, and what damaged ones get."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mcore_rlhf.convert import ConvertOptions, Job, convert, prepare
from mcore_rlhf.core.catalog import TensorName
from mcore_rlhf.errors import (
    CheckpointError,
    Corrupt,
    Incomplete,
    LayoutMismatch,
    Unsupported,
    Untrusted,
    UsageError,
)
from mcore_rlhf.families.lora.names import in_base, in_file, in_memory
from mcore_rlhf.families.options import ReadOptions, WriteOptions
from mcore_rlhf.formats.registry import open_checkpoint
from tests.helpers import lora_by_hand as lora
from tests.helpers.damage import snapshot

GOLDEN = Path(__file__).parents[2] / "goldens" / "peft" / "adapter"


def to_peft(source: Path, target: Path, only: str | None = None, **write: Any) -> Job:
    return convert(
        source,
        target,
        ConvertOptions("peft", ReadOptions(only=only), WriteOptions(**write), fsync=False, overwrite=True),
    )


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


def config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "adapter_config.json").read_text())  # type: ignore[no-any-return]


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


P = "base_model.model."
FILE_AND_MEMORY = [
    ("model.layers.0.q_proj.lora_A.weight", "model.layers.0.q_proj.lora_A.default.weight"),
    ("model.layers.0.q_proj.lora_B.bias", "model.layers.0.q_proj.lora_B.default.bias"),
    ("model.embed_tokens.lora_embedding_B", "model.embed_tokens.lora_embedding_B.default"),
    ("q_proj.lora_magnitude_vector", "q_proj.lora_magnitude_vector.default.weight"),
    ("lm_head.weight", "lm_head.modules_to_save.default.weight"),
    ("model.score.dense.bias", "model.score.modules_to_save.default.dense.bias"),
    ("mlp.experts.base_layer.lora_A.weight", "mlp.experts.base_layer.lora_A.default.weight"),
]


@pytest.mark.parametrize(("file", "memory"), FILE_AND_MEMORY)
def test_a_name_reads_both_ways(file: str, memory: str) -> None:
    assert in_file(P + file, ["lm_head", "score"]).memory == P + memory
    found = in_memory(P + memory)
    assert found is not None
    assert (found.file, found.adapter) == (P + file, "default")


@pytest.mark.parametrize("wrapper", ["", "module.", "policy.", "_fsdp_wrapped_module.base_model.", P, "module." + P])
def test_wrappers_are_not_in_the_file(wrapper: str) -> None:
    found = in_memory(f"{wrapper}model.q_proj.lora_A.other.weight")
    assert found is not None
    assert found.adapter == "other"
    if wrapper.endswith(P) or not wrapper:
        assert (found.file, found.module) == (f"{P}model.q_proj.lora_A.weight", "model.q_proj")


def test_what_the_base_calls_its_own() -> None:
    assert in_base(f"module.{P}model.q_proj.base_layer.weight") == "model.q_proj.weight"
    assert in_base(f"{P}lm_head.original_module.weight") is None
    assert in_base("model.norm.weight") == "model.norm.weight"
    assert in_memory(f"{P}model.q_proj.base_layer.weight") is None


def test_an_adapter_has_the_names_that_it_has_in_memory(tmp_path: Path) -> None:
    source = open_checkpoint(lora.write_adapter(tmp_path / "a"), ReadOptions(role="critic"))
    assert source.format == "peft"
    assert {spec.name for spec in source.model.params} == {
        key.replace(".weight", ".default.weight") for key in lora.adapter()
    }
    assert source.catalog.get(TensorName("critic", source.model.params[0].name)) is not None
    assert source.model.num_layers == len(lora.LAYERS)


def test_from_a_running_model(tmp_path: Path) -> None:
    """Base and adapter lie in one checkpoint, below a wrapper, with Adam's states."""
    lora.write_both(tmp_path / "run", wrapper="module.")
    given = lora.write_adapter(tmp_path / "given")
    job = to_peft(tmp_path / "run", tmp_path / "out", reference_config=str(given))
    assert any("11 tensors of the base model are left out" in text for _, text in job.report.lines)
    assert equal(tensors(tmp_path / "out"), lora.adapter())
    assert {key: config(tmp_path / "out")[key] for key in lora.CONFIG} == lora.CONFIG
    with safe_open(tmp_path / "out" / "adapter_model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert any("optimizer" in text for text in job.report.lost)
    assert json.loads((tmp_path / "out" / "mcore_rlhf" / "state.json").read_text())["iteration"] == 7


def test_alpha_is_asked_for_and_everything_else_follows(tmp_path: Path) -> None:
    lora.write_both(tmp_path / "run")
    with pytest.raises(UsageError, match=r"lora_alpha.*\n.*--reference-config"):
        to_peft(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "alpha.json").write_text('{"lora_alpha": 32}')
    to_peft(tmp_path / "run", tmp_path / "out", reference_config=str(tmp_path / "alpha.json"))
    found = config(tmp_path / "out")
    assert (found["r"], found["lora_alpha"], found["peft_type"]) == (lora.RANK, 32, "LORA")
    assert found["target_modules"] == ["down_proj", "q_proj"]


def test_another_ranks_configuration_is_refused(tmp_path: Path) -> None:
    lora.write_both(tmp_path / "run")
    given = lora.write_adapter(tmp_path / "given", r=lora.RANK + 1)
    with pytest.raises(LayoutMismatch, match=rf"rank {lora.RANK}, but .* says {lora.RANK + 1}"):
        to_peft(tmp_path / "run", tmp_path / "out", reference_config=str(given))


def test_adapters_of_one_model_are_told_apart(tmp_path: Path) -> None:
    both = {**lora.adapter(1), **{k.replace(".lora_", ".b.lora_"): v for k, v in lora.adapter(3).items()}}
    renamed = {
        k.replace(".b.lora_", ".lora_").replace(".weight", ".b.weight"): v for k, v in both.items() if ".b." in k
    }
    first = {k.replace(".weight", ".a.weight"): v for k, v in lora.adapter(1).items()}
    folder = tmp_path / "run"
    (folder / "global_step7_uni" / "zero").mkdir(parents=True)
    lora.write(folder, {}, step=None, top={"module": {**first, **renamed}, "param_shapes": []})
    (tmp_path / "alpha.json").write_text('{"lora_alpha": 1}')
    with pytest.raises(UsageError, match=r"2 adapters: a, b"):
        to_peft(folder, tmp_path / "out", reference_config=str(tmp_path / "alpha.json"))
    to_peft(folder, tmp_path / "out", only="*.b*", reference_config=str(tmp_path / "alpha.json"))
    assert equal(tensors(tmp_path / "out"), lora.adapter(3))


@pytest.mark.parametrize("to", ["deepspeed", "universal", "dcp"])
def test_there_and_back_through_another_format_keeps_everything(tmp_path: Path, to: str) -> None:
    folder = lora.write_adapter(
        tmp_path / "a", base_model_name_or_path="x/y", lora_dropout=0.25, alpha_pattern={"q_proj": 5}
    )
    convert(folder, tmp_path / "u", ConvertOptions(to, fsync=False))
    to_peft(tmp_path / "u", tmp_path / "b")
    assert equal(tensors(tmp_path / "b"), lora.adapter())
    assert config(tmp_path / "b") == {**config(tmp_path / "b"), **config(folder)}


def test_types_as_asked_for(tmp_path: Path) -> None:
    to_peft(lora.write_adapter(tmp_path / "a"), tmp_path / "b", dtype="bf16")
    assert equal(tensors(tmp_path / "b"), {key: value.bfloat16() for key, value in lora.adapter().items()})


def test_it_has_no_layout(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"--tp: means nothing with --to peft; .*\n.*--zero-stage: means nothing with --to peft"
    ):
        to_peft(lora.write_adapter(tmp_path / "a"), tmp_path / "b", tp=2, zero_stage=1)


def test_a_whole_model_is_no_adapter(tmp_path: Path) -> None:
    lora.write_base(tmp_path / "base")
    with pytest.raises(Unsupported, match="belongs to an adapter"):
        to_peft(tmp_path / "base", tmp_path / "out")


def test_a_hugging_face_folder_has_no_place_for_an_adapter(tmp_path: Path) -> None:
    lora.write_both(tmp_path / "run")
    for source in (lora.write_adapter(tmp_path / "a"), tmp_path / "run"):
        with pytest.raises(Unsupported, match="--merge-adapter"):
            convert(source, tmp_path / "out", ConvertOptions("hf", fsync=False))


def test_bin_files_are_read(tmp_path: Path) -> None:
    folder = lora.write_adapter(tmp_path / "a")
    (folder / "adapter_model.safetensors").unlink()
    torch.save(lora.adapter(), folder / "adapter_model.bin")
    to_peft(folder, tmp_path / "b")
    assert equal(tensors(tmp_path / "b"), lora.adapter())


class Evil:
    def __reduce__(self) -> Any:
        import os

        return os.system, ("true",)


def cut_off(folder: Path) -> None:
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[:-4])


def with_code(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    torch.save({"x": Evil()}, folder / "adapter_model.bin")


def resaved(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, folder / WEIGHTS)


WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
DAMAGE: dict[str, Callable[[Path], object]] = {
    "no weights": lambda folder: (folder / WEIGHTS).unlink(),
    "no config": lambda folder: (folder / CONFIG).unlink(),
    "cut off": cut_off,
    "no json": lambda folder: (folder / CONFIG).write_text("{"),
    "no object": lambda folder: (folder / CONFIG).write_text("[1]"),
    "text for r": lambda folder: (folder / CONFIG).write_text(json.dumps({"r": "16", "rank_pattern": 3})),
    "other kind": lambda folder: (folder / CONFIG).write_text(json.dumps({**lora.CONFIG, "peft_type": "IA3"})),
    "lone A": lambda folder: resaved(
        folder, {k: v for k, v in lora.adapter().items() if "layers.1.mlp.down_proj.lora_B" not in k}
    ),
    "two ranks": lambda folder: resaved(
        folder, {**lora.adapter(), f"{P}{lora.ADAPTED[0]}.lora_A.weight": torch.zeros(lora.RANK + 1, lora.COLUMNS)}
    ),
    "code": with_code,
    "foreign names": lambda folder: resaved(folder, {k.removeprefix(P): v for k, v in lora.adapter().items()}),
}


@pytest.mark.parametrize(
    ("how", "kind", "words"),
    [
        ("no weights", Incomplete, "neither adapter_model.safetensors"),
        ("no config", Incomplete, "adapter_config.json"),
        ("cut off", Incomplete, "cut off"),
        ("no json", Corrupt, "no JSON"),
        ("no object", Unsupported, "expected an object"),
        ("text for r", Unsupported, "rank_pattern is 3"),
        ("other kind", Unsupported, "IA3"),
        ("lone A", Incomplete, "no counterpart"),
        ("two ranks", Corrupt, "has rank 4"),
        ("code", Untrusted, "system"),
        ("foreign names", Unsupported, "base_model.model."),
    ],
)
def test_damage_is_named_and_nothing_is_written(
    tmp_path: Path, how: str, kind: type[CheckpointError], words: str
) -> None:
    folder = lora.write_adapter(tmp_path / "a")
    DAMAGE[how](folder)
    before = snapshot(folder)
    with pytest.raises(kind, match=words):
        to_peft(folder, tmp_path / "b")
    assert snapshot(folder) == before
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_the_golden_is_kept_byte_for_byte(tmp_path: Path) -> None:
    """Written by peft itself: header, order of tensors and all."""
    to_peft(GOLDEN, tmp_path / "b")
    for name in (WEIGHTS, CONFIG):
        assert (tmp_path / "b" / name).read_bytes() == (GOLDEN / name).read_bytes()


def test_a_plan_of_an_adapter_is_lossless(tmp_path: Path) -> None:
    job = prepare(lora.write_adapter(tmp_path / "a"), ConvertOptions("peft"))
    assert job.lossless
    assert not job.casts


def test_what_the_engine_keeps_beside_an_adapter_is_lost_and_said(tmp_path: Path) -> None:
    """A value head that is trained with the adapter lies in ``state.pt``; no conversion may pass over it in silence."""
    folder = tmp_path / "adapter"
    shutil.copytree(GOLDEN, folder)
    (folder / "state.pt").write_bytes(b"only AdapterEngine looks at it")
    job = prepare(folder, ConvertOptions("peft"))
    assert [text for text in job.report.lost if text.startswith("state.pt beside the adapter")]
