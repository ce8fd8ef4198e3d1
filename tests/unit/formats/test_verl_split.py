"""verl's layout v2: a role's model, optimizer and random states in folders of their own are one checkpoint, and no part is taken for it."""

from __future__ import annotations

import json
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mcore_rlhf.convert import convert
from mcore_rlhf.core.facts import Fate
from mcore_rlhf.errors import Corrupt, Incomplete, LayoutMismatch, Unsupported, Untrusted, UsageError
from mcore_rlhf.families.options import ConvertOptions, ReadOptions, WriteOptions
from mcore_rlhf.families.source import Source
from mcore_rlhf.formats.registry import open_checkpoint, roles_in
from mcore_rlhf.manager.runs import goes_without
from mcore_rlhf.storage.reading import OpenFiles
from mcore_rlhf.verify.checkpoint import verify
from mcore_rlhf.verify.differ import Differ, Difference
from tests.helpers.damage import edited

GOLDENS = Path(__file__).parents[2] / "goldens"
WHOLE = {
    "fully": GOLDENS / "megatron_dist" / "tp2pp2dp2_fully_reshardable" / "iter_0000002",
    "buckets": GOLDENS / "megatron_dist" / "tp2pp2dp2_dp_reshardable" / "iter_0000002",
}
MODEL = GOLDENS / "huggingface" / "llama_tied_bf16_sharded"


def part(whole: Path, folder: Path, has: Callable[[str], bool], top: tuple[str, ...]) -> None:
    """A folder that lists some of what another one has."""
    shutil.copytree(whole, folder)
    with (folder / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    metadata.state_dict_metadata = {k: v for k, v in metadata.state_dict_metadata.items() if has(k)}
    metadata.storage_data = {k: v for k, v in metadata.storage_data.items() if has(k.fqn)}
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with edited(folder / "common.pt") as common:
        for key in set(common) - set(top):
            del common[key]


def split(whole: Path, role: Path) -> None:
    """As verl saves it: model, optimizer with scheduler, random states."""

    def of_optimizer(key: str) -> bool:
        return key.startswith("optimizer.")

    part(
        whole,
        role / "model" / "dist_ckpt",
        lambda key: not of_optimizer(key) and "rng_state" not in key,
        ("args", "content_metadata"),
    )
    part(
        whole, role / "optimizer" / "dist_ckpt", of_optimizer, ("optimizer", "opt_param_scheduler", "content_metadata")
    )
    part(whole, role / "extra" / "dist_ckpt", lambda key: "rng_state" in key, ("content_metadata",))


def migrated(whole: Path, role: Path) -> None:
    """As verl's script makes it of the older layout: every part has all files."""
    for name in ("model", "optimizer", "extra"):
        shutil.copytree(whole, role / name / "dist_ckpt")


def differences(a: Source, b: Source) -> list[Difference]:
    with OpenFiles(a.root) as files_a, OpenFiles(b.root) as files_b:
        return [*Differ(a, b, files_a, files_b).compare().differences]


@pytest.mark.parametrize("made", [split, migrated])
@pytest.mark.parametrize("kind", WHOLE)
def test_the_parts_are_one_checkpoint(kind: str, made: Callable[[Path, Path], None], tmp_path: Path) -> None:
    role = tmp_path / "global_step_2" / "actor"
    made(WHOLE[kind], role)
    source, whole = open_checkpoint(role, ReadOptions()), open_checkpoint(WHOLE[kind], ReadOptions())
    assert differences(source, whole) == []
    assert (source.state.iteration, source.state.groups) == (2, whole.state.groups)
    assert source.state.scheduler == whole.state.scheduler
    assert (source.states, len(roles_in(role))) == (whole.states, 0)
    assert verify(role, ReadOptions()).intact
    assert open_checkpoint(role / "model", ReadOptions()).states == whole.states
    assert open_checkpoint(role.parent, ReadOptions()).states == whole.states


@pytest.mark.parametrize("name", ["optimizer", "extra", "optimizer/dist_ckpt"])
def test_a_part_without_a_model_is_no_checkpoint(name: str, tmp_path: Path) -> None:
    split(WHOLE["fully"], tmp_path / "actor")
    with pytest.raises(UsageError, match=r"Give .*actor, which has both"):
        open_checkpoint(tmp_path / "actor" / name, ReadOptions())


def test_a_part_that_is_said_to_be_there_and_is_not(tmp_path: Path) -> None:
    split(WHOLE["fully"], role := tmp_path / "actor")
    (role / "ckpt_contents.json").write_text(json.dumps({"contents": {"optimizer": {"path": "optimizer/dist_ckpt"}}}))
    assert open_checkpoint(role, ReadOptions()).states
    shutil.rmtree(role / "optimizer")
    with pytest.raises(Incomplete, match=r"optimizer/dist_ckpt/.metadata: missing"):
        open_checkpoint(role, ReadOptions())


@pytest.mark.parametrize("name", [".metadata", "metadata.json"])
@pytest.mark.parametrize("folder", ["model", "optimizer", "extra"])
def test_each_part_has_both_its_lists(name: str, folder: str, tmp_path: Path) -> None:
    """Megatron-core writes them behind all files of a part, and loads none without them."""
    split(WHOLE["fully"], (step := tmp_path / "global_step_2") / "actor")
    assert goes_without(step)[-2].startswith("actor/ckpt_contents.json: verl writes it last")
    (step / "actor" / folder / "dist_ckpt" / name).unlink()
    with pytest.raises(Incomplete, match=rf"{folder}/dist_ckpt/{re.escape(name)}: missing"):
        open_checkpoint(step / "actor", ReadOptions())


def test_weights_beside_another_models_optimizer_are_converted_alone(tmp_path: Path) -> None:
    role = tmp_path / "global_step_2" / "actor"
    split(WHOLE["fully"], role)
    shutil.rmtree(role / "model")
    shutil.copytree(MODEL, role / "model" / "huggingface")
    with pytest.raises(Unsupported, match=r"the optimizer of these weights.*\nGive .*actor, which has both"):
        open_checkpoint(role / "model" / "huggingface", ReadOptions())
    with pytest.raises(Incomplete, match="--no-optimizer"):  # they are of another model
        open_checkpoint(role, ReadOptions())
    source = open_checkpoint(role, ReadOptions(optimizer=False))
    assert any(fate is Fate.LOST and "optimizer/dist_ckpt" in text for fate, text in source.notes.lines)
    assert len(roles_in(role.parent)) == 1


@pytest.mark.parametrize("named", ["", "model/dist_ckpt"])
def test_no_part_is_a_link_to_elsewhere(tmp_path: Path, named: str) -> None:
    split(WHOLE["fully"], tmp_path / "actor")
    file = tmp_path / "actor" / "optimizer" / "dist_ckpt" / "common.pt"
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Untrusted, match="a symbolic link leads out of"):
        convert(tmp_path / "actor" / named, tmp_path / "out", ConvertOptions(to="megatron"))


FIELDS = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "transformer_impl",
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "bf16", "normalization", "layernorm_epsilon",
)  # fmt: skip


def unsaid(whole: Path, role: Path, **changes: object) -> Path:
    """As verl saves it, without arguments: the fields of a configuration stand beside the parts."""
    split(whole, role)
    with edited(role / "model" / "dist_ckpt" / "common.pt") as common:
        args = vars(common.pop("args"))
    fields = {name: args[name] for name in FIELDS} | {"gated_linear_unit": args["swiglu"], "num_moe_experts": None}
    fields |= {
        "params_dtype": "torch.bfloat16",
        "attention_backend": "AttnBackend.auto",
        "recompute_modules": ["core_attn"],
    }
    (role / "transformer_config.json").write_text(json.dumps({**fields, **changes}))
    (role / "ckpt_contents.json").write_text(json.dumps({"world_size": args["world_size"], "contents": {}}))
    return role


@pytest.mark.parametrize("kind", WHOLE)
def test_a_transformer_config_is_what_arguments_are(kind: str, tmp_path: Path) -> None:
    role = unsaid(WHOLE[kind], tmp_path / "global_step_2" / "actor")
    source, whole = open_checkpoint(role, ReadOptions()), open_checkpoint(WHOLE[kind], ReadOptions())
    assert [one for one in differences(source, whole) if one.tensor is not None] == []
    assert (source.model.params, source.parallel) == (whole.model.params, whole.parallel)
    assert "attention_backend" not in source.state.args
    assert verify(role, ReadOptions()).intact
    assert any("those of transformer_config.json" in text for _, text in source.notes.lines)


def test_positions_of_which_nobody_says_anything_are_not_made_up(tmp_path: Path) -> None:
    """The base of rotary positions is no field of a ``TransformerConfig``."""
    role = unsaid(WHOLE["fully"], tmp_path / "actor")
    wanted = WriteOptions(vocab_size=130)
    with pytest.raises(UsageError, match="--reference-config"):
        convert(role, tmp_path / "out", ConvertOptions(to="hf", write=wanted))


@pytest.mark.parametrize(
    ("text", "error", "match"),
    [
        ("{", Corrupt, r"transformer_config\.json: cannot be read"),
        ("[1]", Corrupt, "expected an object, found a list"),
        (
            '{"num_layers": 3}',
            LayoutMismatch,
            r"found 4 in the files, but args.num_layers is 3 in transformer_config\.json",
        ),
        ('{"tensor_model_parallel_size": 4}', LayoutMismatch, "should have 36416 elements, has 36096"),
    ],
)
def test_a_configuration_that_is_damaged_or_anothers(
    text: str, error: type[Exception], match: str, tmp_path: Path
) -> None:
    role = unsaid(WHOLE["buckets"], tmp_path / "actor")
    (role / "transformer_config.json").write_text(text)
    with pytest.raises(error, match=match):
        open_checkpoint(role, ReadOptions())
