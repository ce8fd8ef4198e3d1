"""Rank files that we write: pickled as torch does, cut as torch cuts, numbered in the module's order; what cannot be so is refused."""

from __future__ import annotations

import json
import pickletools
import shutil
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from mcore_rlhf.convert import ConvertOptions, Job, convert
from mcore_rlhf.core.catalog import FLOAT32, MASTER, Record
from mcore_rlhf.core.facts import Fate
from mcore_rlhf.errors import (
    Corrupt,
    Incomplete,
    LayoutMismatch,
    Unsupported,
    Untrusted,
    UsageError,
)
from mcore_rlhf.families.fsdp.groups import without_frozen
from mcore_rlhf.families.fsdp.order import Unit, by_table, ordered, units_of
from mcore_rlhf.families.options import ReadOptions, WriteOptions
from mcore_rlhf.families.source import Source
from mcore_rlhf.formats.fsdp_ranks.manner import Manner
from mcore_rlhf.formats.fsdp_ranks.state import RanksState
from mcore_rlhf.formats.fsdp_ranks.writer import ranks_target
from mcore_rlhf.formats.registry import open_checkpoint
from mcore_rlhf.layouts.fsdp import part
from mcore_rlhf.manager.will_resume import forecast, loader_named
from mcore_rlhf.models.spec import ParamRule, Rules
from mcore_rlhf.storage.dcp.sharded import Release, SavingMesh, dtensor
from mcore_rlhf.storage.pickling import pickle_tree
from mcore_rlhf.storage.stored import Made, StoredTensor, TorchName
from mcore_rlhf.trainers.resuming import Outcome, Settings, Thing
from mcore_rlhf.verify.checkpoint import verify
from tests.helpers.catalog_values import tensor_of
from tests.helpers.damage import edited

GOLDENS = Path(__file__).parents[2] / "goldens"
VERL, MEGATRON = GOLDENS / "verl", GOLDENS / "megatron" / "tp2pp2dp2_bf16_do"
FLAT = VERL / "fsdp1_flat_ws3"


def opened(path: Path, **read: Any) -> Source:
    return open_checkpoint(path, ReadOptions(**read))


def made(source: Path, target: Path, to: str = "fsdp-ranks", **write: Any) -> Job:
    return convert(source, target, ConvertOptions(to=to, fsync=False, workers=1, write=WriteOptions(**write)))


def loaded(folder: Path, kind: str) -> list[Any]:
    """The files of all ranks, by torch."""
    world = json.loads((folder / "fsdp_config.json").read_text())["world_size"]
    names = (folder / f"{kind}_world_size_{world}_rank_{rank}.pt" for rank in range(world))
    return [torch.load(name, weights_only=False) for name in names]


@contextmanager
def world_of(world: int, rank: int) -> Iterator[Any]:
    """A mesh of torch's own, of which only one rank is there."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
    finally:
        dist.destroy_process_group()


def opcodes(data: bytes) -> list[tuple[str, Any]]:
    """What a pickle does, but for its memo, and for whether a text is the same object as another."""
    found = [(op.name, arg) for op, arg, _ in pickletools.genops(data)]
    return [one for one in found if "PUT" not in one[0] and "GET" not in one[0] and one[1] not in ("cpu", "0")]


@pytest.mark.parametrize(("world", "rank", "dim"), [(3, 2, 0), (3, 0, 1), (1, 0, 0)])
def test_a_part_is_pickled_as_torch_does_it(tmp_path: Path, world: int, rank: int, dim: int) -> None:
    shape = (8, 6)
    box = part(shape, dim, world, rank)
    with world_of(world, rank) as mesh:
        own = DTensor.from_local(
            torch.arange(box.numel, dtype=torch.float32).view(box.shape), mesh, [Shard(dim)], run_check=False,
            shape=torch.Size(shape), stride=(6, 1),
        )  # fmt: skip
        torch.save(OrderedDict(a=own), tmp_path / "theirs.pt")
        record = Record("ours.pt", "data/0", FLOAT32, box.numel, 0)
        release = Release.of(vars(mesh), vars(mesh._layout))
        ours = dtensor(
            StoredTensor.whole(record, box.shape), shape, dim, SavingMesh("cpu", world, rank, release=release)
        )
        pickled = pickle_tree(OrderedDict(a=ours), "ours.pt").data
    with zipfile.ZipFile(tmp_path / "theirs.pt") as file:
        theirs = file.read(next(name for name in file.namelist() if name.endswith("data.pkl")))
    assert opcodes(pickled) == opcodes(theirs)


@pytest.mark.parametrize("release", Release)
def test_what_a_mesh_says_is_read_back(tmp_path: Path, release: Release) -> None:
    """Torch of another release than the installed one cannot be asked; a run of 2.11 on 3.11 loaded what ``2.10`` stands for."""
    source = opened(FLAT)
    own = RanksState.needed(source)
    assert own.manner is not None
    family = replace(own, manner=replace(own.manner, release=release, device="xpu", axis="shards"))
    target = ranks_target(replace(source, family=family), WriteOptions(dp=2))
    layout = next(file for file in target.files if file.path.startswith("model")).layout()
    data = pickle_tree(layout.container.make(), "model_world_size_2_rank_0.pt").data  # type: ignore[attr-defined]
    names = {arg for name, arg in opcodes(data) if name == "GLOBAL"}
    assert ("torch.distributed._mesh_layout _MeshLayout" in names) == (release is not Release.T2_8)
    assert ("torch.distributed._mesh_layout _FlatLayout" in names) == (release in (Release.T2_13, Release.T2_15))


def test_names_of_torch_are_a_closed_list() -> None:
    with pytest.raises(ValueError, match="no name that we write"):
        pickle_tree(Made(TorchName("os.system"), ("true",), None, new=False), "a.pt")


@pytest.mark.parametrize("dp", [1, 2, 5])
def test_flat_pieces_are_those_of_all_parameters_one_behind_the_other(tmp_path: Path, dp: int) -> None:
    """Read from verl's own files and written for other numbers of ranks, beside what torch gathered of its own."""
    truth = torch.load(FLAT / "expected.pt", weights_only=False)
    source = opened(FLAT)
    for name, states in truth["state"].items():
        assert torch.equal(tensor_of(source, name, MASTER), truth["model"][name]), name
        for state in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(tensor_of(source, name, state), states[state]), name
    job = made(FLAT, tmp_path / "new", dp=dp)
    assert [text.partition(":")[0] for text in job.account.lost] in ([], ["expected.pt"])
    optim = loaded(tmp_path / "new", "optim")
    layers = [[n for n in truth["model"] if n.startswith(f"model.layers.{i}.")] for i in range(2)]
    root = [name for name in truth["model"] if ".layers." not in name]
    for number, names in enumerate([root, *layers]):
        whole = torch.cat([truth["state"][name]["exp_avg"].flatten() for name in names])
        pieces = [rank["state"][number]["exp_avg"] for rank in optim]
        assert {piece.shape for piece in pieces} == {(-(-whole.numel() // dp),)}
        assert torch.equal(torch.cat(pieces)[: whole.numel()], whole)
        assert not torch.cat(pieces)[whole.numel() :].any()
        assert float(optim[0]["state"][number]["step"]) == 2
    assert [group["params"] for group in optim[0]["param_groups"]] == [[0, 1, 2]]


@pytest.mark.parametrize("rules", [Rules(), Rules((ParamRule("model.layers.0.*", trainable=False),))], ids=["", "said"])
def test_a_layer_that_is_not_trained_has_no_flat_states_and_its_number(rules: Rules, tmp_path: Path) -> None:
    """Both layers are of one size: by the numbers in the group, and by nothing else, the states are the second one's."""
    truth = torch.load(FLAT / "expected.pt", weights_only=False)
    folder = Path(shutil.copytree(FLAT, tmp_path / "actor"))
    for path in folder.glob("optim_*"):
        with edited(path) as optim:
            del optim["state"][1]
    source = without_frozen(opened(folder, rules=rules))
    assert {spec.name for spec in source.model.params if spec.trainable} == {
        name for name in truth["model"] if ".layers.0." not in name
    }
    for spec in source.model.params:
        if spec.trainable:
            assert torch.equal(tensor_of(source, spec.name, "exp_avg"), truth["state"][spec.name]["exp_avg"]), spec.name
    made(folder, tmp_path / "dcp", "dcp")
    for at in (folder, tmp_path / "dcp"):
        made(at, tmp_path / f"new-{at.name}", dp=3, like=str(folder))
        for found, wanted in zip(loaded(tmp_path / f"new-{at.name}", "optim"), loaded(folder, "optim"), strict=True):
            assert found["param_groups"][0]["params"] == [0, 1, 2]
            assert found["state"].keys() == wanted["state"].keys() == {0, 2}
            for number, states in wanted["state"].items():
                assert all(torch.equal(found["state"][number][key], value) for key, value in states.items())
    with edited(next(folder.glob("optim_*_rank_1.pt"))) as optim:
        del optim["state"][2]
    with pytest.raises(Unsupported, match="flat pieces"):
        opened(folder)


def test_a_part_of_a_layer_that_is_not_trained_is_flattened_by_no_fsdp1(tmp_path: Path) -> None:
    source = opened(FLAT)
    specs = (replace(spec, trainable=spec.name != "model.norm.weight") for spec in source.model.params)
    part = replace(source, model=source.model.having(specs))
    with pytest.raises(
        Unsupported, match=r"model\.norm\.weight is not trained, and others are with which FSDP1 flattens it"
    ):
        ranks_target(part, WriteOptions()).files[1].layout()


def test_parts_are_those_of_torch_chunk(tmp_path: Path) -> None:
    """FSDP2's files, of a model with fewer rows than ranks, buffers, and two groups as the source's run has them."""
    job = made(VERL / "fsdp2_ws3", tmp_path / "new", dp=5)
    source, model, optim = (
        opened(VERL / "fsdp2_ws3"),
        loaded(tmp_path / "new", "model"),
        loaded(tmp_path / "new", "optim"),
    )
    names = [name for group in source.state.groups for name in group.params]
    for spec in source.model.params:
        whole = tensor_of(source, spec.name, MASTER if spec.trainable else "param")
        parts = [rank[spec.name] for rank in model]
        if not spec.trainable:
            assert all(torch.equal(one, whole) for one in parts)
            continue
        moment = tensor_of(source, spec.name, "exp_avg")
        for rank, one in enumerate(parts):
            chunks = whole.chunk(5)
            assert torch.equal(one._local_tensor, chunks[rank] if rank < len(chunks) else whole[:0])
            assert (one.shape, one._spec.placements) == (whole.shape, (Shard(0),))
            held = optim[rank]["state"][names.index(spec.name)]
            assert held["exp_avg"].shape == moment.shape
    assert [len(group["params"]) for group in optim[0]["param_groups"]] == [len(g.params) for g in source.state.groups]
    assert optim[0]["param_groups"][1]["weight_decay"] == 0.0
    assert job.target.report.lost == []


def test_random_states_of_every_rank_are_kept_or_derived(tmp_path: Path) -> None:
    made(FLAT, tmp_path / "same")
    for ours, theirs in zip(loaded(tmp_path / "same", "extra_state"), loaded(FLAT, "extra_state"), strict=True):
        assert torch.equal(ours["rng"]["cpu"], theirs["rng"]["cpu"])
        assert ours["rng"]["random"] == theirs["rng"]["random"]
        assert ours["lr_scheduler"] == theirs["lr_scheduler"]
    job = made(FLAT, tmp_path / "other", dp=4)
    others = [rank["rng"] for rank in loaded(tmp_path / "other", "extra_state")]
    assert len({one["cpu"].numpy().tobytes() for one in others}) == 4
    assert set(others[0]) == {"cpu", "numpy", "random", "cuda"}
    torch.Generator().set_state(others[3]["cpu"])
    assert any(
        fate is Fate.DERIVED and text.startswith("rng: of every rank its own") for fate, text in job.report.lines
    )
    dropped = made(FLAT, tmp_path / "none", rng="drop")
    assert all("rng" not in rank for rank in loaded(tmp_path / "none", "extra_state"))
    assert any(text.startswith("rng: left out") for text in dropped.account.lost)


def test_several_groups_become_the_one_that_verl_has_and_wait_beside(tmp_path: Path) -> None:
    """Megatron deals by weight decay; verl's optimizer has all parameters in one group, and stops at another number."""
    job = made(MEGATRON, tmp_path / "new", dp=2)
    line = next(text for fate, text in job.report.lines if fate is Fate.CHANGED and text.startswith("param groups: 2"))
    assert "weight_decay 0.1, not 0.0" in line
    (group,) = loaded(tmp_path / "new", "optim")[0]["param_groups"]
    assert len(group["params"]) == len(opened(tmp_path / "new").model.params)
    fields = set(torch.optim.AdamW([torch.zeros(1)]).state_dict()["param_groups"][0])
    assert fields <= set(group)
    assert group["initial_lr"] > 0
    assert len(opened(tmp_path / "new").state.groups) == 2
    extra = loaded(tmp_path / "new", "extra_state")[1]["lr_scheduler"]
    assert (len(extra["base_lrs"]), extra["last_epoch"]) == (1, 2)
    made(tmp_path / "new", tmp_path / "again", dp=3)
    assert len(loaded(tmp_path / "again", "optim")[0]["param_groups"]) == 1, "as the run has them that wrote the source"


def test_what_depends_on_the_run_is_as_in_the_folder_that_is_named(tmp_path: Path) -> None:
    made(FLAT, tmp_path / "hf", "hf", with_optimizer=True)
    made(tmp_path / "hf", tmp_path / "plain", dp=2)
    like = Path(shutil.copytree(FLAT, tmp_path / "run" / "actor"))
    for path in like.glob("optim_*"):
        with edited(path) as tree:
            tree["param_groups"][0] |= {"fused": True, "lr": 0.5}
    made(tmp_path / "hf", tmp_path / "as-run", dp=2, like=str(tmp_path / "run"))
    ours, plain = (loaded(tmp_path / name, "optim")[1] for name in ("as-run", "plain"))
    assert isinstance(plain["state"][3]["exp_avg"], DTensor)
    assert ours["state"][0]["exp_avg"].ndim == 1
    assert json.loads((tmp_path / "plain" / "fsdp_config.json").read_text()) == {"FSDP_version": 2, "world_size": 2}
    assert json.loads((tmp_path / "as-run" / "fsdp_config.json").read_text()) == {"FSDP_version": 1, "world_size": 2}
    assert (ours["param_groups"][0]["fused"], plain["param_groups"][0]["fused"]) == (True, None)
    assert ours["param_groups"][0]["lr"] == plain["param_groups"][0]["lr"] != 0.5
    devices = [loaded(tmp_path / n, "model")[0]["lm_head.weight"]._spec.mesh.device_type for n in ("as-run", "plain")]
    assert devices == ["cpu", "cuda"]


def test_config_and_tokenizer_lie_where_verl_has_them(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(FLAT, tmp_path / "actor"))
    (folder / "huggingface" / "tokenizer.json").write_text('{"version": "1.0"}')
    made(folder, tmp_path / "new", dp=1)
    assert (tmp_path / "new" / "huggingface" / "tokenizer.json").read_text() == '{"version": "1.0"}'
    assert verify(tmp_path / "new", ReadOptions()).intact
    names = {path.name for path in (tmp_path / "new").iterdir()}
    assert names >= {
        "model_world_size_1_rank_0.pt",
        "optim_world_size_1_rank_0.pt",
        "extra_state_world_size_1_rank_0.pt",
    }


def test_weights_alone(tmp_path: Path) -> None:
    job = made(FLAT, tmp_path / "new", no_optimizer=True, dtype="bf16")
    assert not list((tmp_path / "new").glob("optim_*"))
    assert loaded(tmp_path / "new", "model")[0]["lm_head.weight"].dtype == torch.bfloat16
    assert not job.lossless
    assert opened(tmp_path / "new").optimizer is None


def test_pieces_of_original_parameters_are_what_flat_ones_are_made_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """verl's own flat pieces have, one behind the other, what a rank has of each parameter with ``use_orig_params``."""
    source, new = opened(FLAT), tmp_path / "new"
    manner = RanksState.needed(source).manner
    assert manner is not None
    shown = replace(manner, original=True), "as in a run with original parameters"
    monkeypatch.setattr("mcore_rlhf.formats.fsdp_ranks.writer._manner", lambda *_: shown)
    with pytest.raises(Unsupported, match=r"k_proj\.bias has 4 elements; behind such a number"):
        made(FLAT, tmp_path / "of any type")
    monkeypatch.setattr("mcore_rlhf.formats.fsdp_ranks.pieces._ALIGNED", 4)  # as where a run computes in fp32
    made(FLAT, new)
    numbers = {name: number for number, name in enumerate(source.model.shapes)}
    for own, flat in zip(loaded(new, "optim"), loaded(FLAT, "optim"), strict=True):
        assert own["param_groups"][0]["params"] == [*numbers.values()]
        for number, unit in enumerate(units_of(source.model.shapes)):
            held = [own["state"].get(numbers[name]) for name in unit.shapes]
            whole = torch.cat([states["exp_avg"] for states in held if states is not None])
            piece = flat["state"][number]["exp_avg"]
            assert torch.equal(whole, piece[: len(whole)])
            assert not piece[len(whole) :].any(), "padding"
    again = opened(new)
    for name in source.model.shapes:
        assert torch.equal(tensor_of(again, name, "exp_avg_sq"), tensor_of(source, name, "exp_avg_sq")), name


def test_an_optimizer_by_name_is_read_and_written_so(tmp_path: Path) -> None:
    """``state.NAME.exp_avg`` and ``param_groups.NAME.lr``, as VeOmni's several optimizers have it in verl's files."""
    plain, folder = VERL / "fsdp2_ws3", tmp_path / "global_step_2" / "actor"
    shutil.copytree(plain, folder)
    groups = opened(plain).state.groups
    for path in folder.glob("optim_*"):
        own = torch.load(path, weights_only=False)
        names = {
            n: name
            for of, group in zip(own["param_groups"], groups, strict=True)
            for n, name in zip(of["params"], group.params, strict=True)
        }
        made_of = {
            f"state.{names[n]}.{key}": value for n, states in own["state"].items() for key, value in states.items()
        }
        for group in own["param_groups"]:
            listed = group.pop("params")
            made_of |= {f"param_groups.{names[n]}.{key}": value for n in listed for key, value in group.items()}
        torch.save(made_of, path)
    for strategy, outcome in (("veomni", Outcome.RESTORED), ("fsdp2", Outcome.REFUSED)):
        settings = Settings({"actor.strategy": strategy})
        told = forecast(folder.parent, loader_named("verl")[0], settings).roles["actor"]
        assert {one.thing: one.row.outcome for one in told}[Thing.OPTIMIZER] is outcome
    source = opened(folder)
    assert [(group.params, group.fields) for group in source.state.groups] == [
        (group.params, group.fields) for group in groups
    ]
    made(folder, tmp_path / "same")
    made(plain, tmp_path / "like", like=str(folder))
    made(folder, tmp_path / "numbered", like=str(plain))
    for name, wanted in (("same", folder), ("like", folder), ("numbered", plain)):
        for found, own in zip(loaded(tmp_path / name, "optim"), loaded(wanted, "optim"), strict=True):
            assert found.keys() == own.keys()
            for key in own.keys() - {"state", "param_groups"}:
                assert same_here(found[key], own[key]), key
        for state in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(
                tensor_of(opened(tmp_path / name), "head.weight", state), tensor_of(source, "head.weight", state)
            )


def same_here(one: Any, other: Any) -> bool:
    """Whether two values are the same, of tensors on this rank."""
    if not isinstance(one, torch.Tensor):
        return bool(one == other)
    one, other = (value.to_local() if isinstance(value, DTensor) else value for value in (one, other))
    return torch.equal(one, other)


def test_what_cannot_be_written_is_refused_by_name(tmp_path: Path) -> None:
    source = opened(FLAT)
    family = replace(RanksState.needed(source), order=(), config={"model_type": "no such"})
    with pytest.raises(Unsupported, match=r"no table has lm_head\.weight.*\n.*--reference-config"):
        ranks_target(replace(source, family=family), WriteOptions())
    with pytest.raises(UsageError, match="no run has more than"):
        ranks_target(source, WriteOptions(dp=10**9))
    with pytest.raises(UsageError, match="holds no rank files of verl's"):
        ranks_target(source, WriteOptions(like=str(tmp_path)))
    with pytest.raises(
        Unsupported, match=r"embed\.weight has 66 elements; behind such a number FSDP1 with use_orig_params"
    ):
        made(VERL / "fsdp1_orig_ws2", tmp_path / "new")
    with pytest.raises(
        LayoutMismatch, match=r"trains lm_head\.weight, which is in no param group of the run that --like"
    ):
        ranks_target(source, WriteOptions(like=str(VERL / "fsdp2_ws3")))
    two = replace(source.state.groups[0], params=source.state.groups[0].params[:3])
    rest = replace(source.state.groups[0], params=source.state.groups[0].params[3:])
    manner = replace(Manner(version=1), groups=({}, {}))
    apart = replace(
        source,
        state=replace(source.state, groups=(two, rest)),
        family=replace(family, manner=manner, order=family.order),
    )
    apart.family.order = RanksState.needed(source).order  # type: ignore[attr-defined]
    target = ranks_target(apart, WriteOptions())
    with pytest.raises(Unsupported, match="there are 2 param groups"):
        next(file for file in target.files if file.path.startswith("optim")).layout()


def test_pieces_of_other_lengths_are_not_taken_apart(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(FLAT, tmp_path / "actor"))
    for path in folder.glob("optim_*"):
        with edited(path) as tree:
            tree["state"][1] = {key: value[:-1] if value.ndim else value for key, value in tree["state"][1].items()}
    with pytest.raises(Unsupported, match="other lengths"):
        opened(folder)
    (folder / "huggingface" / "config.json").write_text('{"model_type": "no such"}')
    with pytest.raises(Unsupported, match=r"no table has"):
        opened(folder)
    assert opened(folder, optimizer=False).model.params


@pytest.mark.parametrize("kind", ["model", "optim", "extra_state"])
def test_a_missing_rank_or_a_damaged_byte_of_a_run_that_is_named(tmp_path: Path, kind: str) -> None:
    folder = Path(shutil.copytree(FLAT, tmp_path / "actor"))
    path = folder / f"{kind}_world_size_3_rank_0.pt"
    sound = path.read_bytes()
    at = sound.index(b"data.pkl") + 200
    path.write_bytes(sound[:at] + bytes([sound[at] ^ 1]) + sound[at + 1 :])
    with pytest.raises(Corrupt):
        made(FLAT, tmp_path / "new", like=str(folder))
    path.unlink()
    if kind == "model":
        with pytest.raises((Incomplete, UsageError)):
            made(FLAT, tmp_path / "new", like=str(folder))
    assert not (tmp_path / "new").exists()


class _Calls:
    def __reduce__(self) -> Any:
        import os

        return os.system, ("touch /tmp/called",)


def test_a_named_run_whose_pickles_call_something_runs_nothing(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(FLAT, tmp_path / "actor"))
    torch.save({"lr_scheduler": _Calls()}, folder / "extra_state_world_size_3_rank_0.pt")
    with pytest.raises(Untrusted, match=r"os|posix"):
        made(FLAT, tmp_path / "new", like=str(folder))


def test_a_shape_that_nothing_has_is_no_loop_and_no_memory(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(VERL / "fsdp2_ws3", tmp_path / "actor"))
    for rank in range(3):
        with world_of(3, rank) as mesh:
            huge = DTensor.from_local(
                torch.zeros(2, 4), mesh, [Shard(0)], run_check=False, shape=torch.Size((10**12, 4)), stride=(4, 1)
            )
            torch.save(OrderedDict({"../../up": huge}), folder / f"model_world_size_3_rank_{rank}.pt")
    with pytest.raises(LayoutMismatch, match=r"the parts of \.\./\.\./up on ranks 0 to 2 have 6 rows together"):
        opened(folder, optimizer=False)


def test_names_that_climb_become_no_paths(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(VERL / "fsdp2_ws3", tmp_path / "in" / "actor"))
    for path in [*folder.glob("model_*")]:
        with edited(path) as tree:
            tree["../../escaped.weight"] = tree.pop("layers.1.weight")
    made(folder, tmp_path / "out" / "new", dp=2, no_optimizer=True)
    assert "../../escaped.weight" in opened(tmp_path / "out" / "new").model.shapes
    assert {path.name for path in tmp_path.iterdir()} == {"in", "out"}


def test_the_order_is_the_tables_where_it_has_all_and_else_the_modules_own() -> None:
    config = json.loads((FLAT / "huggingface" / "config.json").read_text())
    names = list(torch.load(FLAT / "expected.pt", weights_only=False)["model"])
    assert by_table(sorted(names), config) == names
    assert ordered(sorted(names), config, ()) == (names, [])
    assert ordered([*names, "v_head"], config, ("v_head", *names)) == (["v_head", *names], [])
    assert ordered([*names, "v_head"], config, ())[1] == sorted([*names, "v_head"])
    assert by_table(names, {"model_type": "no such"}) == []


def test_a_piece_of_a_unit_ends_anywhere() -> None:
    unit = Unit({"a": (3, 4), "b": (5,), "c": (2, 2, 2)})
    record = Record("f", "k", FLOAT32, 100, 0)
    for world in (1, 2, 3, 7, 30):
        found: dict[str, int] = {}
        for rank in range(world):
            for name in unit.shapes:
                for chunk in unit.chunks(name, world, rank, record):
                    found[name] = found.get(name, 0) + chunk.box.numel
                    assert 0 <= chunk.start < unit.piece(world)
        assert found == {"a": 12, "b": 5, "c": 8}
