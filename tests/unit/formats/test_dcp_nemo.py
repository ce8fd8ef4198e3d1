"""NeMo-RL's DTensor v2: weights in pieces, or a DCP folder, and the optimizer in a DCP folder beside them, are one checkpoint."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mcore_rlhf.convert import convert
from mcore_rlhf.core.facts import Fate
from mcore_rlhf.errors import Corrupt, Incomplete, Unsupported
from mcore_rlhf.families.module import ModuleState
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.families.source import Source
from mcore_rlhf.formats.registry import open_checkpoint
from mcore_rlhf.verify.checkpoint import Depth, verify
from tests.helpers.catalog_values import tensor_of
from tests.helpers.conversions import options
from tests.helpers.damage import truncate

GOLDEN = Path(__file__).parents[2] / "goldens" / "nemo_rl" / "v2_ws2"
POLICY = Path("step_3/policy")
PIECES = POLICY / "weights" / "model"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
FIRST = "shard-00001-model-00001-of-00001.safetensors"


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN, tmp_path / "run"))


def opened(path: Path, **read: object) -> Source:
    return open_checkpoint(path, ReadOptions(**read))  # type: ignore[arg-type]


def assert_whole(source: Source) -> None:
    """Every value that the trainer's own gathering gave."""
    expected = torch.load(GOLDEN / "expected.pt", weights_only=True)
    names = {spec.name for spec in source.model.params}
    assert names == set(expected["model"]) - {HEAD} == set(expected["states"])
    for name in names:
        assert torch.equal(tensor_of(source, name, "master"), expected["model"][name])
        for state in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(tensor_of(source, name, state), expected["states"][name][state])


@pytest.mark.parametrize("given", ["step_3", POLICY, POLICY / "weights", PIECES])
def test_pieces_and_optimizer_are_one_checkpoint(given: str | Path) -> None:
    source = opened(GOLDEN / given)
    assert (source.format, source.optimizer, source.state.iteration) == ("dcp", "dcp", 3)
    assert_whole(source)
    assert isinstance(source.family, ModuleState)
    assert source.family.shared == {HEAD: EMBEDDING}  # which is stored nowhere
    assert source.unplaced == ()
    (group,) = source.state.groups
    assert (group.fields["betas"], group.fields["step"], group.fields["initial_lr"]) == ((0.9, 0.95), 3, 0.01)
    schedule = source.state.scheduler
    assert schedule is not None
    assert schedule["last_epoch"] == 3
    assert verify(GOLDEN / given, ReadOptions(), Depth.DEEP).intact


def test_weights_alone_are_those_of_a_hugging_face_folder(golden: Path) -> None:
    shutil.rmtree(golden / POLICY / "optimizer")
    source = opened(golden / PIECES)
    assert (source.format, source.optimizer) == ("hf", None)
    without = opened(GOLDEN / POLICY, optimizer=False)
    assert (without.optimizer, without.states) == (None, ())
    assert all(
        torch.equal(tensor_of(source, s.name, "param"), tensor_of(without, s.name, "param"))
        for s in source.model.params
    )


@pytest.mark.parametrize("to", ["hf", "universal", "deepspeed", "megatron", "megatron-dist", "dcp"])
def test_it_becomes_every_format_with_its_optimizer(tmp_path: Path, to: str) -> None:
    write = {"with_optimizer": True} if to == "hf" else {"zero_stage": 2} if to == "deepspeed" else {}
    job = convert(GOLDEN / POLICY, tmp_path / "out", replace(options(**write), to=to))
    wanted = (
        [
            "lr_scheduler: is not like Megatron's; one is made, of a constant rate, at num_steps 3 (steps, since nobody says how many "
            "samples these were): with --override-opt-param-scheduler the rates of the run's arguments go on from there"
        ]
        if "megatron" in to
        else []
    )
    assert job.report.lost == wanted
    assert job.lossless == (not wanted)
    back = tmp_path / "back"
    convert(tmp_path / "out", back, replace(options(with_optimizer=True), to="hf"))
    assert_whole(opened(back))
    assert json.loads((back / "config.json").read_text())["tie_word_embeddings"] is True
    beside = PIECES / ".hf_metadata" / "generation_config.json"
    assert (back / "generation_config.json").read_bytes() == (GOLDEN / beside).read_bytes()
    assert not [text for fate, text in job.report.lines if fate is Fate.LEFT and "hf_metadata" in text]


def test_what_is_missing_or_of_another_run_is_named(golden: Path) -> None:
    second = golden / PIECES / FIRST.replace("00001-model", "00002-model")
    second.rename(golden / "aside")
    for optimizer in (True, False):
        with pytest.raises(Incomplete, match=r"model: pieces and config\.json: .* more tensors"):
            opened(golden / POLICY, optimizer=optimizer)
    (golden / PIECES / ".hf_metadata" / "config.json").rename(golden / "config.json")
    with pytest.raises(Incomplete, match=r"embed_tokens.weight reach to \[12, 8\], its exp_avg to \[24, 8\]"):
        opened(golden / POLICY)
    (golden / "aside").rename(second)
    optimizer = golden / POLICY / "optimizer" / "optim"
    (optimizer / "__1_0.distcp").rename(golden / "aside")
    with pytest.raises(Incomplete, match=r"__1_0\.distcp: missing"):
        opened(golden / POLICY)
    (golden / "aside").rename(optimizer / "__1_0.distcp")
    tensors = load_file(golden / PIECES / FIRST)
    places = {name: {"saved_offsets": [0] * tensor.dim()} for name, tensor in tensors.items()}
    about = {"DCP_SHARDING_INFO": json.dumps(places), "DCP_VERSION": "1.0", "format": "pt"}
    save_file({name: tensor for name, tensor in tensors.items() if name != EMBEDDING}, golden / PIECES / FIRST, about)
    with pytest.raises(Incomplete, match=r"embed_tokens\.weight reach|are not"):
        opened(golden / POLICY)
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, golden / PIECES / FIRST, about)
    with pytest.raises(Corrupt, match="not of one tensor"):
        opened(golden / POLICY)


def test_pieces_of_another_model_than_the_optimizers(golden: Path) -> None:
    for path in (golden / PIECES).glob("*.safetensors"):
        path.unlink()
    places = {"model.other.weight": {"saved_offsets": [0, 0]}}
    save_file(
        {"model.other.weight": torch.ones(2, 2)}, golden / PIECES / FIRST, {"DCP_SHARDING_INFO": json.dumps(places)}
    )
    shutil.rmtree(golden / PIECES / ".hf_metadata")  # whose index would say so first
    with pytest.raises((Incomplete, Unsupported), match="the optimizer trains"):
        opened(golden / POLICY)


def test_a_tensor_that_the_index_lists_and_no_rank_has_is_missing(golden: Path) -> None:
    path = golden / PIECES / ".hf_metadata" / "fqn_to_file_index_mapping.json"
    path.write_text(json.dumps({**json.loads(path.read_bytes()), "model.layers.9.mlp.up_proj.weight": 1}))
    with pytest.raises(Incomplete, match=r"lists model\.layers\.9\.mlp\.up_proj\.weight, of which no file has a piece"):
        opened(golden / "step_3")


def test_a_cut_index_or_description_is_damage(golden: Path, tmp_path: Path) -> None:
    """A cut ``config.json`` was taken for none: the folder that became of it had no description, and nothing said why."""
    beside = golden / PIECES / ".hf_metadata"
    truncate(beside / "config.json", 0.3)
    with pytest.raises(Corrupt, match=r"config\.json: is no JSON"):
        convert(golden / "step_3", tmp_path / "out", replace(options(), to="hf"))
    truncate(beside / "fqn_to_file_index_mapping.json", 0.3)
    with pytest.raises(Corrupt, match=r"fqn_to_file_index_mapping\.json: is no JSON"):
        opened(golden / "step_3")
