"""What real DeepSpeed saves with ``exclude_frozen_parameters=True`` is no whole model, and is said to be none wherever one is wanted."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from mcore_rlhf.cli.app import app
from mcore_rlhf.convert import ConvertOptions, convert
from mcore_rlhf.demo.workers import WorkerPool
from mcore_rlhf.errors import Incomplete, Unsupported
from mcore_rlhf.families.complete import UNSAID
from mcore_rlhf.families.options import ReadOptions, WriteOptions
from mcore_rlhf.formats.registry import open_checkpoint
from mcore_rlhf.weights import iter_weights

BASE = Path(__file__).parents[1] / "goldens" / "peft" / "base"
WHOLE = BASE.parents[1] / "deepspeed" / "z1_bf16acc32_untied_dp2"
MISSED = r"(?s)model\.layers\.0.*"
pytestmark = pytest.mark.reference


@pytest.fixture(scope="module")
def run(deepspeed_pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the worker leaves."""
    for package in ("peft", "transformers"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    folder = tmp_path_factory.mktemp("left_out")
    deepspeed_pool.run("tests.reference.left_out_worker:run", folder, world_size=1, timeout=200)
    return folder


def missing(path: Path) -> list[str]:
    """What ``verify`` says."""
    done = CliRunner().invoke(app, ["verify", "--json", str(path)])
    assert done.exit_code == 0, done.output
    return list(json.loads(done.stdout)["missing"])


@pytest.mark.parametrize("name", ["z2", "z3", "universal"])
def test_the_files_say_so(run: Path, name: str, tmp_path: Path) -> None:
    """From stage 2 on they have no list of frozen parameters, and with all parameters an empty or a full one."""
    assert any("model.layers.0" in text for text in missing(run / name))
    with pytest.raises(Incomplete, match=f"{MISSED}--exclude-frozen"):
        convert(run / name, tmp_path / "hf", ConvertOptions("hf", fsync=False))
    for spelling in ("hf", "native"):
        with pytest.raises(Incomplete, match=MISSED):
            next(iter_weights(run / name, spelling=spelling))
    convert(run / name, tmp_path / "dcp", ConvertOptions("dcp", fsync=False))
    assert any("model.layers.0" in text for text in missing(tmp_path / "dcp"))
    wanted = dict(iter_weights(run / name, read=ReadOptions(exclude_frozen=True)))
    assert wanted.keys() == {
        name for name, _ in iter_weights(run / "full2") if not name.startswith(("model.embed", "model.layers.0."))
    }


@pytest.mark.parametrize("stage", range(4))
def test_a_description_says_what_is_missing_at_any_stage(run: Path, stage: int, tmp_path: Path) -> None:
    described = WriteOptions(reference_config=str(BASE))
    with pytest.raises(Incomplete, match=r"lacks model\.embed_tokens\.weight, model\.layers\.0\."):
        convert(run / f"z{stage}", tmp_path / "hf", ConvertOptions("hf", write=described, fsync=False))
    with pytest.raises(Incomplete, match="lacks"):
        next(iter_weights(run / f"z{stage}", reference_config=str(BASE)))
    with pytest.raises(Unsupported, match=r"model\.embed_tokens\.weight"):
        convert(run / f"z{stage}", tmp_path / "mg", ConvertOptions("megatron-dist", write=described, fsync=False))


@pytest.mark.parametrize("stage", range(4))
def test_a_whole_one_is_one(run: Path, stage: int, tmp_path: Path) -> None:
    assert missing(run / f"full{stage}") == []
    convert(run / f"full{stage}", tmp_path / "hf", ConvertOptions("hf", fsync=False))
    assert len(list(iter_weights(run / f"full{stage}"))) == len(list(iter_weights(BASE)))


def test_adapters_say_which_layers_they_lack(run: Path, tmp_path: Path) -> None:
    assert missing(run / "lora") == [next(iter(missing(run / "lora")))]
    assert (
        "layers whose own weights are not there: base_model.model.model.layers.0.self_attn.q_proj"
        in missing(run / "lora")[0]
    )
    with pytest.raises(Incomplete, match="own weights are not there"):
        next(iter_weights(run / "lora", spelling="native"))
    with pytest.raises(Unsupported, match="--merge-adapter"):
        convert(run / "lora", tmp_path / "hf", ConvertOptions("hf", fsync=False))


def test_where_no_name_speaks_that_is_said(tmp_path: Path) -> None:
    """Stage 1 does not say whether a model has frozen weights, nor then does a stage 2 that is made of it; this one has all."""
    assert [spec.trainable for spec in open_checkpoint(WHOLE, ReadOptions()).model.params].count(True) > 20
    convert(WHOLE, tmp_path / "z2", ConvertOptions("deepspeed", write=WriteOptions(zero_stage=2), fsync=False))
    assert (missing(WHOLE), missing(tmp_path / "z2")) == ([], [UNSAID])
    convert(tmp_path / "z2", tmp_path / "hf", ConvertOptions("hf", fsync=False))
    assert next(iter_weights(tmp_path / "z2"))
