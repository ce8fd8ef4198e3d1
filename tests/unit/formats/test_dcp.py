"""DCP folders of FSDP runs: keys of every kind of run, any number of parts, to other formats and back."""

from __future__ import annotations

import json
import pickle
import shutil
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mcore_rlhf.convert import Job, convert, prepare
from mcore_rlhf.core.catalog import FLOAT32, MASTER, PARAM, TensorName
from mcore_rlhf.core.facts import Fate
from mcore_rlhf.errors import (
    CheckpointError,
    Corrupt,
    Incomplete,
    Lossy,
    NotACheckpoint,
    Unsupported,
    UsageError,
)
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.families.source import Source
from mcore_rlhf.formats.dcp.keys import KeyLayout, Style, find_layout, flattened, guess_paths, joined, unflattened
from mcore_rlhf.formats.dcp.reader import _DcpReader
from mcore_rlhf.formats.dcp.state import DcpState
from mcore_rlhf.formats.registry import open_checkpoint
from mcore_rlhf.layouts.fsdp import cut
from mcore_rlhf.storage.dcp.folder import DcpFolder
from mcore_rlhf.storage.reading import OpenFiles
from mcore_rlhf.verify.checkpoint import Depth, verify
from mcore_rlhf.verify.differ import Differ
from tests.helpers.catalog_values import tensor_of
from tests.helpers.conversions import options
from tests.helpers.dcp_by_torch import STYLES, Run, differences, load, new_run, save, state_of

GOLDENS = Path(__file__).parents[2] / "goldens"
DCP = GOLDENS / "dcp"
ZERO = GOLDENS / "deepspeed" / "z2_bf16_ac_dp2" / "step3"
"""bf16 parameters with fp32 masters, tied, two groups, client state."""


def opened(path: Path, **read: Any) -> Source:
    return open_checkpoint(path, ReadOptions(**read))


def run_to(source: Path, target: Path, to: str = "dcp", strict: bool = False, **write: Any) -> Job:
    return convert(source, target, replace(options(**write), to=to, workers=1, strict=strict, max_memory=1 << 20))


def lines(job: Job, fate: Fate) -> list[str]:
    return [text for found, text in job.report.lines if found is fate]


def assert_same(a: Path, b: Path) -> None:
    """Every tensor and all values; rounded copies of masters are not in a DCP folder."""
    one, other = opened(a), opened(b)
    with OpenFiles(one.root) as left, OpenFiles(other.root) as right:
        result = Differ(one, other, left, right).compare()
    assert result.equal, result.differences[:5]
    kept = {name for name in one.catalog if name.state != PARAM or name._replace(state=MASTER) not in set(one.catalog)}
    assert result.tensors >= len(kept)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Run, Path]]:
    """A run's checkpoint under the keys of each style, written by torch."""
    made = {}
    for style in STYLES:
        run = new_run(groups=1 if style == "plain" else 2)
        folder = tmp_path_factory.mktemp("runs") / style
        save(state_of(run, style), folder)
        made[style] = run, folder
    return made


def test_what_torch_2_15_wrote_becomes_what_any_torch_reads(tmp_path: Path) -> None:
    """Strides stand in its metadata, at which the torch of before stumbles."""
    folder = GOLDENS / "dcp_2_15"
    convert(folder / "checkpoint", tmp_path / "ours", replace(options(), to="dcp", workers=1))
    state = state_of(new_run(4), "top")
    assert differences(load(state, tmp_path / "ours"), torch.load(folder / "state.pt", weights_only=False)) == []
    assert state["optimizer"]["state.embed.weight.step"] == 2


@pytest.mark.parametrize("style", STYLES)
def test_every_kind_of_keys_is_the_same_run(runs: dict[str, tuple[Run, Path]], style: str) -> None:
    run, folder = runs[style]
    source = opened(folder)
    names = dict(run.model.named_parameters())
    assert {spec.name for spec in source.model.params if spec.trainable} == set(names)
    assert [spec.name for spec in source.model.params] == list(run.model.state_dict())
    assert not (set(names) & set(source.family.buffers))  # type: ignore[attr-defined]
    assert source.states == (MASTER, "exp_avg", "exp_avg_sq")
    for name, param in names.items():
        state = run.optimizer.state[param]
        assert torch.equal(tensor_of(source, name, MASTER), param.detach())
        assert torch.equal(tensor_of(source, name, "exp_avg_sq"), state["exp_avg_sq"])
    assert torch.equal(tensor_of(source, "scale", PARAM), run.model.get_buffer("scale"))
    groups = [{k: v for k, v in g.items() if k != "params"} for g in run.optimizer.param_groups]
    for group in source.state.groups:
        own = {key: value for key, value in group.fields.items() if key != "step"}
        assert own in groups
        for name in group.params:
            assert names[name] is not None
            of = next(g for g in run.optimizer.param_groups if any(p is names[name] for p in g["params"]))
            assert of["lr"] == group.fields["lr"]
        assert group.fields["step"] == 2
        assert group.scalars == ("step",)
    assert len(source.state.groups) == len(groups)
    assert source.state.iteration == (7 if style == "flat" else 2)


@pytest.mark.parametrize("style", STYLES)
def test_without_planner_data_keys_are_understood_all_the_same(
    runs: dict[str, tuple[Run, Path]], style: str, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(runs[style][1], tmp_path / "dcp"))
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.planner_data = None
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    one, other = opened(runs[style][1]), opened(folder)
    assert isinstance(one.family, DcpState)
    assert isinstance(other.family, DcpState)
    assert other.family.layout == one.family.layout
    assert {*other.catalog} == {*one.catalog}
    if style != "plain":  # in which the order of the model decides
        assert {frozenset(g.params) for g in other.state.groups} == {frozenset(g.params) for g in one.state.groups}


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("style", STYLES)
def test_torch_loads_what_we_cut_anew(
    runs: dict[str, tuple[Run, Path]], style: str, parts: int, tmp_path: Path
) -> None:
    """A run of other weights loads our folder as it would its own, every key that it asks for, and goes on as the first."""
    run, folder = runs[style]
    job = run_to(folder, tmp_path / "new", dp=parts, strict=True)
    assert len(list((tmp_path / "new").glob("*.distcp"))) == parts
    assert job.lossless
    other = new_run(seed=5, groups=1 if style == "plain" else 2, steps=3)
    loaded, wanted = load(state_of(other, style), tmp_path / "new"), state_of(run, style)
    assert differences(wanted, loaded) == []
    assert_same(folder, tmp_path / "new")


def test_numbers_of_two_groups_are_named_where_shapes_agree(tmp_path: Path) -> None:
    run = new_run(groups=2)
    state = state_of(run, "plain")
    save(state, tmp_path / "ambiguous")
    with pytest.raises(Unsupported, match="in several"):  # the buffer could be a bias
        opened(tmp_path / "ambiguous")
    del state["model"]["scale"]
    save(state, tmp_path / "dcp")
    source = opened(tmp_path / "dcp")
    assert [len(group.params) for group in source.state.groups] == [4, 3]
    assert all(name.endswith("weight") for name in source.state.groups[0].params)
    assert any("biases and norms are in group 1, all else in group 0" in text for _, text in source.notes.lines)
    vector = tensor_of(source, "layers.1.bias", "exp_avg")
    assert torch.equal(vector, run.optimizer.state[run.model.get_parameter("layers.1.bias")]["exp_avg"])


def test_numbers_that_fit_no_order_are_refused(tmp_path: Path) -> None:
    run = new_run(groups=1)
    params = list(run.model.parameters())
    run.optimizer = torch.optim.AdamW(params[::-1], lr=1e-2)
    run.optimizer.step()
    for param in params:
        run.optimizer.state[param] = {
            "step": torch.tensor(1.0),
            "exp_avg": param.detach(),
            "exp_avg_sq": param.detach(),
        }
    save(state_of(run, "plain"), tmp_path / "dcp")
    with pytest.raises(Unsupported, match=r"numbered \(0 to 6\)(.|\n)*get_state_dict"):
        opened(tmp_path / "dcp")
    assert opened(tmp_path / "dcp", optimizer=False).optimizer is None


def test_steps_of_parameters_are_kept_one_by_one(tmp_path: Path) -> None:
    run = new_run()
    late = run.optimizer.state[run.model.get_parameter("value_head.weight")]
    late["step"] = torch.tensor(1.0)
    save(state_of(run, "rlinf"), tmp_path / "dcp")
    job = run_to(tmp_path / "dcp", tmp_path / "new", dp=2, strict=True)
    assert differences(state_of(run, "rlinf"), load(state_of(new_run(3), "rlinf"), tmp_path / "new")) == []
    assert job.lossless
    with pytest.raises(Lossy, match=r"value_head\.weight at 1"):
        run_to(tmp_path / "dcp", tmp_path / "uni", "universal", strict=True)


# Genuine folders, and RLinf's


@pytest.mark.parametrize("name", ["fsdp1_ws2", "fsdp2_ws2", "fsdp2_ws3"])
def test_a_genuine_folder_to_universal_and_back(name: str, tmp_path: Path) -> None:
    actor = DCP / name / "actor"
    source = opened(actor)
    full = torch.load(actor / "model_state_dict" / "full_weights.pt", weights_only=True)
    for spec in source.model.params:
        stored = tensor_of(source, spec.name, MASTER if spec.trainable else PARAM)
        assert torch.equal(stored, full[spec.name]), spec.name
    run_to(actor, tmp_path / "uni", "universal")
    run_to(tmp_path / "uni", tmp_path / "back", dp=4)
    assert_same(actor, tmp_path / "uni")
    assert_same(actor, tmp_path / "back")
    ours = torch.load(tmp_path / "back" / "model_state_dict" / "full_weights.pt", weights_only=True)
    assert differences(full, ours) == []
    again = opened(tmp_path / "back")
    assert again.state.scheduler == source.state.scheduler
    assert again.state.other["fsdp_version"] == source.state.other["fsdp_version"]
    assert again.state.other["rng"]["cpu"] == source.state.other["rng"]["cpu"]  # type: ignore[index]


def test_every_key_of_a_genuine_folder_comes_back(tmp_path: Path) -> None:
    actor = DCP / "fsdp2_ws3" / "actor"
    run_to(actor, tmp_path / "uni", "universal")
    run_to(tmp_path / "uni", tmp_path / "back", dp=2)
    old, new = (
        pickle.loads((path / "dcp_checkpoint" / ".metadata").read_bytes()) for path in (actor, tmp_path / "back")
    )
    assert set(new.planner_data) - set(old.planner_data) == set()
    assert set(old.planner_data) <= set(new.planner_data)
    assert {key: path for key, path in new.planner_data.items() if key in old.planner_data} == old.planner_data


def test_rng_is_said_not_to_be_exact() -> None:
    source = opened(DCP / "fsdp2_ws3" / "actor")
    assert any(text.startswith("rng: not bit-exact") for _, text in source.notes.lines)


def test_the_step_comes_from_the_folders_name_and_stays(tmp_path: Path) -> None:
    step = tmp_path / "global_step_1840"
    shutil.copytree(DCP / "fsdp2_ws2", step)
    assert opened(step).state.iteration == 1840
    run_to(step / "actor", tmp_path / "elsewhere", dp=1)
    assert opened(tmp_path / "elsewhere").state.iteration == 1840
    (tmp_path / "titan").mkdir()
    for number in (10, 20):
        shutil.copytree(DCP / "fsdp2_ws2" / "actor" / "dcp_checkpoint", tmp_path / "titan" / f"step-{number}")
    with pytest.raises(UsageError, match=r"10, 20(.|\n)*--step"):
        opened(tmp_path / "titan")
    assert opened(tmp_path / "titan", step=20).state.iteration == 20
    with pytest.raises(NotACheckpoint, match="no step 15"):
        opened(tmp_path / "titan", step=15)


def test_plain_weights_are_the_last_resort(tmp_path: Path) -> None:
    actor = Path(shutil.copytree(DCP / "fsdp2_ws2" / "actor", tmp_path / "actor"))
    shutil.rmtree(actor / "dcp_checkpoint")
    source = opened(actor)
    assert (source.optimizer, source.states) == (None, ())
    assert any(fate is Fate.LOST and "full_weights.pt" in text for fate, text in source.notes.lines)
    job = run_to(actor, tmp_path / "new", dp=2)
    assert not job.lossless
    full = torch.load(actor / "model_state_dict" / "full_weights.pt", weights_only=True)
    state = load(
        {"fsdp_checkpoint": {"model": {k: torch.zeros_like(v) for k, v in full.items()}}},
        tmp_path / "new" / "dcp_checkpoint",
    )
    assert differences(full, state["fsdp_checkpoint"]["model"]) == []


def test_rank_files_without_offsets_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "local_shard_checkpoint"
    folder.mkdir()
    torch.save({"model": {}}, folder / "checkpoint_rank_0.pt")
    with pytest.raises(Unsupported, match="checkpoint_format: dcp"):
        opened(tmp_path)


def test_an_unfinished_save_is_a_dcp_folder_and_incomplete(tmp_path: Path) -> None:
    actor = Path(shutil.copytree(DCP / "fsdp2_ws2" / "actor", tmp_path / "actor"))
    (actor / "dcp_checkpoint" / ".metadata").unlink()
    with pytest.raises(Incomplete, match="writes it last"):
        opened(actor)


def test_a_flipped_byte_of_a_small_value_is_found_when_it_is_read(tmp_path: Path) -> None:
    """Steps are read when the folder is opened, and decide what the target's groups are at."""
    actor = Path(shutil.copytree(DCP / "fsdp2_ws2" / "actor", tmp_path / "actor"))
    folder = DcpFolder.open(actor / "dcp_checkpoint", actor)
    step = next(tensor for name, tensor in folder.tensors.items() if name.endswith(".step"))
    record = step.chunks()[0].record
    path = actor / record.file
    data = bytearray(path.read_bytes())
    data[record.byte_offset + 2] ^= 4
    path.write_bytes(bytes(data))
    with pytest.raises(Corrupt, match=r"\.step.*CRC-32"):
        opened(actor)


def test_a_flipped_byte_stops_a_conversion(tmp_path: Path) -> None:
    actor = Path(shutil.copytree(DCP / "fsdp2_ws2" / "actor", tmp_path / "actor"))
    entry = opened(actor).catalog.get(TensorName("actor", "head.weight", "exp_avg"))
    assert entry is not None
    record = entry.chunks[-1].record
    data = bytearray((actor / record.file).read_bytes())
    data[record.byte_offset + 3] ^= 4
    (actor / record.file).write_bytes(bytes(data))
    with pytest.raises(CheckpointError, match=r"optimizers\.state\.head\.weight\.exp_avg\[3,0\].*CRC-32"):
        run_to(actor, tmp_path / "new", "universal")
    assert not (tmp_path / "new").exists()


# From other formats


@pytest.fixture(scope="module")
def of_zero(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Job]:
    target = tmp_path_factory.mktemp("zero") / "dcp"
    return target, run_to(ZERO, target, dp=3)


def test_masters_become_the_parameters_and_come_back(of_zero: tuple[Path, Job], tmp_path: Path) -> None:
    dcp, job = of_zero
    assert any("fp32 masters, which FSDP trains" in text for text in lines(job, Fate.DERIVED))
    assert job.lossless
    assert_same(ZERO, dcp)
    run_to(dcp, tmp_path / "zero", "deepspeed", zero_stage=2, dp=2)
    assert_same(ZERO, tmp_path / "zero")
    old, new = opened(ZERO), opened(tmp_path / "zero")
    assert new.model.params == old.model.params
    assert new.state.other.keys() == old.state.other.keys()
    assert new.state.other["ppo_iteration"] == old.state.other["ppo_iteration"]


def test_rlinf_finds_every_key_that_it_asks_for(of_zero: tuple[Path, Job]) -> None:
    """Names of the model, tied ones twice; AdamW's settings; a schedule; random states."""
    source, folder = opened(ZERO), of_zero[0] / "dcp_checkpoint"
    assert isinstance(source.family.shared, dict)  # type: ignore[attr-defined]
    shapes = {spec.name: spec.global_shape for spec in source.model.params}
    aliases = source.family.shared  # type: ignore[attr-defined]
    model = {name: torch.zeros(shapes[aliases.get(name, name)]) for name in (*shapes, *aliases)}
    state = {
        name: {"step": torch.tensor(0.0), "exp_avg": torch.zeros(shapes[name]), "exp_avg_sq": torch.zeros(shapes[name])}
        for group in source.state.groups for name in group.params
    }  # fmt: skip
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in source.state.groups]
    optimizer = torch.optim.AdamW([{"params": [p]} for p in parameters], lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    groups = [{**group, "params": []} for group in optimizer.param_groups]
    rng = {"cpu": torch.get_rng_state(), "numpy": (), "random": (), "cuda": torch.zeros(16, dtype=torch.uint8)}
    asked = {
        "model": model, "optimizers": {"state": state, "param_groups": groups}, "fsdp_version": "",
        "lr_schedulers": [schedule.state_dict()], "rng": rng,
    }  # fmt: skip
    found = load({"fsdp_checkpoint": asked}, folder)["fsdp_checkpoint"]
    assert [group["params"] for group in found["optimizers"]["param_groups"]] == [
        list(g.params) for g in source.state.groups
    ]
    for old, new in zip(source.state.groups, found["optimizers"]["param_groups"], strict=True):
        assert new["lr"] == old.fields["lr"]
        assert new["weight_decay"] == old.fields["weight_decay"]
        assert new["initial_lr"] >= new["lr"]
    for name, states in found["optimizers"]["state"].items():
        assert torch.equal(states["exp_avg"], tensor_of(source, name, "exp_avg"))
        assert states["step"] == float(source.state.groups[0].fields["step"])  # type: ignore[arg-type]
        assert torch.equal(found["model"][name], tensor_of(source, name, MASTER))
    assert found["fsdp_version"] == "fsdp2"
    assert found["lr_schedulers"][0]["last_epoch"] == source.state.iteration
    torch.Generator().set_state(found["rng"]["cpu"])
    assert found["rng"]["numpy"][0] == "MT19937"
    assert found["rng"]["cuda"].shape == (16,)


@pytest.mark.parametrize(
    ("write", "dtype"),
    [({"dtype": "bf16"}, torch.bfloat16), ({"no_optimizer": True}, torch.bfloat16), ({}, torch.float32)],
)
def test_the_type_of_the_parameters(write: dict[str, Any], dtype: torch.dtype, tmp_path: Path) -> None:
    job = run_to(ZERO, tmp_path / "new", **write)
    full = torch.load(tmp_path / "new" / "model_state_dict" / "full_weights.pt", weights_only=True)
    trained = {spec.name for spec in opened(ZERO).model.params if spec.trainable}
    assert {tensor.dtype for name, tensor in full.items() if name in trained} == {dtype}
    assert job.lossless == (write == {})


@pytest.mark.parametrize(("rng", "there"), [(None, True), ("derive", True), ("drop", False), ("keep", False)])
def test_random_states_are_made_kept_or_left_out(rng: str | None, there: bool) -> None:
    job = prepare(ZERO, replace(options(rng=rng), to="dcp"))
    metadata = job.target.texts["dcp_checkpoint/.metadata"]
    assert isinstance(metadata, bytes)
    assert (b"fsdp_checkpoint.rng.cuda" in metadata) == there
    assert bool([text for text in lines(job, Fate.DERIVED) if text.startswith("rng")]) == there


def test_dropping_random_states_that_are_there_is_said(tmp_path: Path) -> None:
    job = run_to(DCP / "fsdp2_ws2" / "actor", tmp_path / "new", rng="drop")
    assert lines(job, Fate.LOST) == ["rng: left out, as --rng drop asks"]


@pytest.mark.parametrize("write", [{"tp": 2}, {"zero_stage": 3}, {"padded_vocab_size": 64}])
def test_options_without_a_meaning_are_refused(write: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="means nothing with --to dcp"):
        run_to(DCP / "fsdp2_ws2" / "actor", tmp_path / "new", **write)


def test_writing_twice_gives_the_same_bytes(of_zero: tuple[Path, Job], tmp_path: Path) -> None:
    run_to(ZERO, tmp_path / "again", dp=3)
    for path in sorted(of_zero[0].rglob("*")):
        if path.is_file() and path.name != "mcore_rlhf.json":
            assert path.read_bytes() == (tmp_path / "again" / path.relative_to(of_zero[0])).read_bytes(), path


def test_tied_weights_of_a_run_are_found_by_their_bytes(tmp_path: Path) -> None:
    embed = torch.nn.Parameter(torch.randn(5, 4))
    optimizer = torch.optim.AdamW([embed])
    embed.sum().backward()
    optimizer.step()
    state = {"exp_avg": torch.ones(5, 4), "exp_avg_sq": torch.ones(5, 4), "step": torch.tensor(1.0)}
    groups = [{**optimizer.param_groups[0], "params": ["model.embed_tokens.weight"]}]
    weight = embed.detach()
    other = weight.clone()
    other[0, 0] += 1
    for head, aliases in ((weight.clone(), {"lm_head.weight": "model.embed_tokens.weight"}), (other, {})):
        model = {"model.embed_tokens.weight": weight, "lm_head.weight": head}
        folder = tmp_path / f"dcp{len(aliases)}"
        save({"model": model, "optim": {"state": {"model.embed_tokens.weight": state}, "param_groups": groups}}, folder)
        source = opened(folder)
        assert source.family.shared == aliases  # type: ignore[attr-defined]
        assert source.model.tied == bool(aliases)
        run_to(folder, folder.with_suffix(".new"), dp=2)
        found = load({"model": {k: torch.zeros_like(v) for k, v in model.items()}}, folder.with_suffix(".new"))
        assert differences(model, found["model"]) == []


# Keys and nests


@pytest.mark.parametrize("style", list(Style))
def test_a_layout_reads_what_it_writes(style: Style) -> None:
    layout = KeyLayout(("a", "model"), ("a", "optim"), style)
    param = "7" if style is Style.NUMBERED else "x.0.weight"
    key = layout.parse(layout.state_path("x.0.weight", "exp_avg", 7))
    assert (key.kind, key.param, key.name) == ("state", param, "exp_avg")
    key = layout.parse(layout.group_path(3, "lr", "x.0.weight"))
    assert (key.kind, key.name) == ("group", "lr")
    assert key.group == (-1 if style is Style.FLAT else 3)
    assert layout.parse(layout.model_path("x.0.weight")).param == "x.0.weight"
    assert layout.parse(("a", "rng", "cpu")).path == ("rng", "cpu")


def test_a_model_with_confusing_names_is_understood() -> None:
    """A module called ``state``, one called ``model``, and keys that begin with numbers."""
    params = ["0.state.weight", "model.model.weight", "optimizer.state.x"]
    layout = KeyLayout(("model",), ("optim",))
    paths = [layout.model_path(name) for name in params]
    paths += [layout.state_path(name, "exp_avg") for name in params]
    everything = [*paths, layout.group_path(0, "lr"), layout.group_path(0, "params")]
    assert find_layout(everything, paths) == layout
    guessed = guess_paths([joined(path) for path in everything])
    assert {guessed[joined(path)] for path in everything} == set(everything)


def test_nests_are_taken_apart_as_torch_does(tmp_path: Path) -> None:
    tree = {
        "a": {"b": [1, 2], "c": [{"d": 1}, {"d": torch.zeros(1)}]},
        "e": (1, {"f": 2}),
        "g": [[1], [{"h": 2}]],
        "i": {},
    }
    save(tree, tmp_path)
    paths = pickle.loads((tmp_path / ".metadata").read_bytes()).planner_data
    assert {joined(path): path for path, _ in flattened(tree)} == paths
    back = unflattened(dict(flattened(tree)))
    assert back.pop("a")["c"][0] == {"d": 1}
    assert back == {"e": (1, {"f": 2}), "g": [[1], [{"h": 2}]]}


@pytest.mark.parametrize(("rows", "parts"), [(11, 3), (11, 2), (1, 2), (0, 2), (8, 5), (3, 8)])
def test_cuts_are_those_of_torch(rows: int, parts: int) -> None:
    wanted = [len(chunk) for chunk in torch.zeros(rows, 2).chunk(parts) if len(chunk)]
    boxes = list(cut((rows, 2), parts))
    assert [box.shape[0] for box in boxes] == wanted + [0] * (len(wanted) < parts)
    assert [box.offset[0] for box in boxes] == [sum(wanted[:at]) for at in range(len(boxes))]


def test_a_config_beside_the_folder_describes_the_model(tmp_path: Path) -> None:
    actor = Path(shutil.copytree(DCP / "fsdp2_ws2" / "actor", tmp_path / "actor"))
    (actor / "huggingface").mkdir()
    (actor / "huggingface" / "config.json").write_text(json.dumps({"hidden_size": 8}))
    assert opened(actor).family.config == {"hidden_size": 8}  # type: ignore[attr-defined]


def test_an_object_among_the_weights_stays_there(tmp_path: Path) -> None:
    """A module's ``_extra_state`` is no tensor: a loader asks for it under the model's own key."""
    import torch.distributed.checkpoint as dcp

    weight = torch.rand(4, 4)
    group = {"lr": 0.1, "params": ["up.weight"]}
    state = {"up.weight": {"step": torch.tensor(1.0), "exp_avg": weight, "exp_avg_sq": weight}}
    optimizer = {"state": state, "param_groups": [group]}
    model = {"up.weight": weight, "up._extra_state": b"scale"}
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({"app": {"model": model, "optimizer": optimizer}}, checkpoint_id=tmp_path / "run", no_dist=True)
    run_to(tmp_path / "run", tmp_path / "again", dp=2)
    found = DcpFolder.open(tmp_path / "again", tmp_path / "again")
    assert "app.model.up._extra_state" in found.objects
    assert found.objects["app.model.up._extra_state"].load() == b"scale"


@pytest.mark.parametrize("parts", [1, 2])
def test_tens_of_thousands_of_small_tensors_take_no_longer_each(parts: int) -> None:
    """Weights without an optimizer: what is a buffer is told of each, and of all only once."""
    reader = _DcpReader.__new__(_DcpReader)
    tensor = SimpleNamespace(dtype=FLOAT32, cut=parts > 1)
    names = [f"layers.{n}.weight" for n in range(20_000)]
    reader.opened = SimpleNamespace(tensors=dict.fromkeys(names, tensor))  # type: ignore[assignment]
    reader.model_keys = {name: name for name in names}
    began = time.perf_counter()
    assert all(reader._may_be_trained(name) for name in names)
    assert time.perf_counter() - began < 5  # one look at all of them for each took minutes


def test_a_parameter_that_never_took_a_step_becomes_zeros_in_a_universal_checkpoint(tmp_path: Path) -> None:
    """ZeRO has states of all: the folder that we make is whole, and what has no elements is nothing that could be lost."""
    import torch.distributed.checkpoint as dcp

    model = {"up.weight": torch.rand(4, 4), "up.bias": torch.rand(4), "none": torch.empty(0, 4)}
    stepped = {"step": torch.tensor(3.0), "exp_avg": torch.rand(4, 4), "exp_avg_sq": torch.rand(4, 4)}
    none = {**stepped, "exp_avg": torch.empty(0, 4), "exp_avg_sq": torch.empty(0, 4)}
    optimizer = {"state": {"up.weight": stepped, "none": none}, "param_groups": [{"lr": 0.1, "params": list(model)}]}
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path / "run", no_dist=True)
    job = run_to(tmp_path / "run", tmp_path / "universal", "universal", strict=True)
    assert any("zeros for states that were never made: up.bias" in text for text in lines(job, Fate.DERIVED))
    assert verify(tmp_path / "universal", ReadOptions(), Depth.DEEP).intact
    moment = tensor_of(opened(tmp_path / "universal"), "up.bias", "exp_avg")
    assert torch.equal(moment, torch.zeros(4))
    assert run_to(tmp_path / "run", tmp_path / "again", strict=True).lossless


@pytest.mark.parametrize("lost", [("exp_avg_sq",), ("exp_avg", "exp_avg_sq")])
def test_a_parameter_that_took_a_step_has_all_states(tmp_path: Path, lost: tuple[str, ...]) -> None:
    """A name that one flipped bit changes in ``.metadata`` takes its tensor out of the optimizer."""
    state = state_of(new_run(), "rlinf")
    for name in lost:
        del next(iter(state["fsdp_checkpoint"]["optimizers"]["state"].values()))[name]
    save(state, tmp_path / "run")
    with pytest.raises(Incomplete, match=f"{', '.join(lost)} of .* is missing, which others of its group have"):
        opened(tmp_path / "run")


def test_states_that_matrices_alone_have_are_named_and_not_missed_in_others(tmp_path: Path) -> None:
    state = state_of(new_run(), "rlinf")
    for of_param in state["fsdp_checkpoint"]["optimizers"]["state"].values():
        if of_param["exp_avg"].dim() == 2:
            of_param["GG"] = torch.eye(3)
    save(state, tmp_path / "run")
    with pytest.raises(Unsupported, match=r"its GG \(3, 3\); only states with one value per element"):
        opened(tmp_path / "run")
