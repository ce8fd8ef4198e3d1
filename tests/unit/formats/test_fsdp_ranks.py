"""verl's rank files: parts find their places, what is missing or mixed is named, pickles run nothing."""

from __future__ import annotations

import json
import pickle
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rlhf.core.catalog import MASTER, PARAM, TensorName
from mcore_rlhf.core.facts import Fate
from mcore_rlhf.errors import CheckpointError, Corrupt, Incomplete, LayoutMismatch, Unsupported, Untrusted
from mcore_rlhf.families.fsdp.groups import choices
from mcore_rlhf.families.module import ModuleState
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.families.source import Source
from mcore_rlhf.formats.registry import open_checkpoint
from mcore_rlhf.storage.dcp.rankfile import Local, read_rank_file
from mcore_rlhf.storage.torchzip import read_directory
from mcore_rlhf.verify.checkpoint import verify
from tests.helpers.catalog_values import tensor_of
from tests.helpers.damage import edited

VERL = Path(__file__).parents[2] / "goldens" / "verl"


@pytest.fixture
def three(tmp_path: Path) -> Path:
    return Path(shutil.copytree(VERL / "fsdp2_ws3", tmp_path / "actor"))


def opened(path: Path, **read: Any) -> Source:
    return open_checkpoint(path, ReadOptions(**read))


def locals_of(name: str, kind: str, world: int) -> list[dict[str, Any]]:
    """Local tensors by torch itself, which takes DTensors apart where nobody has a process group."""
    from torch.distributed.tensor import DTensor

    ranks = []
    for rank in range(world):
        values = torch.load(VERL / name / f"{kind}_world_size_{world}_rank_{rank}.pt", weights_only=False)
        ranks.append({k: v._local_tensor if isinstance(v, DTensor) else v for k, v in values.items()})
    return ranks


@pytest.mark.parametrize(("name", "world"), [("fsdp2_ws3", 3), ("fsdp1_ws2", 2)])
def test_parts_lie_behind_one_another(name: str, world: int) -> None:
    source = opened(VERL / name, optimizer=False)
    ranks = locals_of(name, "model", world)
    assert {spec.name for spec in source.model.params} == set(ranks[0])
    for spec in source.model.params:
        parts = [values[spec.name] for values in ranks]
        wanted = parts[0] if not spec.trainable else torch.cat(parts)
        found = tensor_of(source, spec.name, PARAM)
        assert found.shape == spec.global_shape
        assert torch.equal(found, wanted), spec.name
    assert source.parallel.dp == world
    assert source.optimizer is None


def test_the_optimizer_has_names() -> None:
    source = opened(VERL / "fsdp2_ws3")
    assert source.states == (MASTER, "exp_avg", "exp_avg_sq")
    weights, vectors = source.state.groups
    assert all(name.endswith(".weight") for name in weights.params)
    assert vectors.fields["weight_decay"] == 0.0
    assert weights.fields["step"] == 2
    assert source.state.scheduler is not None
    assert source.state.scheduler["last_epoch"] == 2
    assert source.state.iteration == 2
    assert source.family.homeless[-1].fate is Fate.LOST, "random states of other ranks"
    assert {"steps", "scale"} == set(source.family.buffers)  # type: ignore[attr-defined]
    moment = source.catalog.get(TensorName("actor", "value_head.weight", "exp_avg"))
    assert moment is not None
    assert len(moment.chunks) == 1  # two ranks have no row of it


@pytest.mark.parametrize("optimizer", [True, False])
def test_an_output_layer_that_is_the_embedding_is_its_second_name(optimizer: bool) -> None:
    source = opened(VERL / "fsdp2_tied_ws2", optimizer=optimizer)
    module = ModuleState.needed(source, "a test")
    assert module.shared == {"lm_head.weight": "model.embed_tokens.weight"}
    assert source.model.tied
    assert "lm_head.weight" not in source.model.shapes


def test_without_an_optimizer_only_the_description_says_that_two_names_are_one_weight(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(VERL / "fsdp2_tied_ws2", tmp_path / "actor"))
    config = folder / "huggingface" / "config.json"
    config.write_text(config.read_text().replace('"tie_word_embeddings": true', '"tie_word_embeddings": false'))
    assert not opened(folder, optimizer=False).model.tied
    assert opened(folder).model.tied, "the optimizer has no state of the output layer"


def test_replicas_of_buffers_are_compared(three: Path) -> None:
    entry = opened(three).catalog.get(TensorName("actor", "scale", PARAM))
    assert entry is not None
    assert len(list(entry.replicas())) == 2


def test_pieces_of_original_parameters_are_put_together() -> None:
    """FSDP1 with ``use_orig_params``: bare pieces, and none on ranks that have nothing of a parameter; a frozen layer beside them."""
    source, truth = opened(VERL / "fsdp1_orig_ws2"), torch.load(VERL / "fsdp1_orig_ws2" / "expected.pt")
    trained = {spec.name for spec in source.model.params if spec.trainable}
    assert trained == set(truth["exp_avg"]) == {name for name in truth["model"] if not name.startswith("vision.")}
    for name, moment in truth["exp_avg"].items():
        assert torch.equal(tensor_of(source, name, "exp_avg"), moment), name
        assert torch.equal(tensor_of(source, name, MASTER), truth["model"][name]), name
    assert source.state.groups[0].fields["step"] == 2
    assert verify(VERL / "fsdp1_orig_ws2", ReadOptions()).intact


def test_pieces_that_fit_several_parameters_are_of_none(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(VERL / "fsdp1_orig_ws2", tmp_path / "actor"))
    for path in folder.glob("optim_*"):
        with edited(path) as optim:
            for number in (1, 2):  # a layer that was frozen: which of two equal ones nobody knows
                optim["state"].pop(number, None)
            optim["state"] = {max(0, number - 2): states for number, states in optim["state"].items()}
            optim["param_groups"][0]["params"] = list(range(5))
    with pytest.raises(Unsupported, match="flat pieces"):
        opened(folder)


def test_the_optimizer_of_fsdp1_is_refused_with_a_way_out() -> None:
    with pytest.raises(Unsupported, match="flat pieces"):
        opened(VERL / "fsdp1_ws2")


def test_every_missing_rank_is_named(three: Path) -> None:
    (three / "model_world_size_3_rank_1.pt").unlink()
    (three / "optim_world_size_3_rank_2.pt").unlink()
    (three / "extra_state_world_size_3_rank_1.pt").unlink()
    with pytest.raises(Incomplete) as caught:
        opened(three)
    assert "model_world_size_3_rank_1.pt: missing; 3 ranks" in str(caught.value)
    assert "optim_world_size_3_rank_2.pt: missing" in str(caught.value)
    assert "extra_state_world_size_3_rank_1.pt: missing" in str(caught.value)


def test_a_kind_that_no_rank_has_was_not_saved(three: Path) -> None:
    for path in three.glob("extra_state_*"):
        path.unlink()
    assert opened(three).state.other == {}


def test_every_file_of_every_rank_is_verified(three: Path) -> None:
    assert verify(three, ReadOptions()).intact
    for path in sorted(three.glob("*.pt")):
        sound = path.read_bytes()
        largest = max(read_directory(path).members.values(), key=lambda member: member.nbytes)
        at = largest.byte_offset + largest.nbytes // 2
        path.write_bytes(sound[:at] + bytes([sound[at] ^ 1]) + sound[at + 1 :])
        assert not verify(path.parent, ReadOptions()).intact, path.name
        path.write_bytes(sound)


def test_weights_without_an_optimizer(three: Path) -> None:
    for path in three.glob("optim_*"):
        path.unlink()
    source = opened(three)
    assert (source.optimizer, source.states) == (None, ())


def test_files_of_two_runs(three: Path) -> None:
    for path in (VERL / "fsdp1_ws2").glob("*.pt"):
        shutil.copy(path, three)
    assert opened(three).parallel.dp == 3
    (three / "fsdp_config.json").unlink()
    with pytest.raises(LayoutMismatch, match=r"world sizes \[2, 3\]"):
        opened(three)


def test_a_part_of_another_save(three: Path) -> None:
    shutil.copy(three / "model_world_size_3_rank_0.pt", three / "model_world_size_3_rank_2.pt")
    with pytest.raises(LayoutMismatch, match="rows together"):
        opened(three)


def test_a_cut_file(three: Path) -> None:
    path = three / "model_world_size_3_rank_1.pt"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="rank_1"):
        opened(three)


def test_config_and_step_come_from_around(tmp_path: Path) -> None:
    actor = Path(shutil.copytree(VERL / "fsdp2_ws3", tmp_path / "global_step_90" / "actor"))
    (actor / "huggingface").mkdir()
    (actor / "huggingface" / "config.json").write_text(json.dumps({"hidden_size": 8}))
    source = opened(tmp_path / "global_step_90")
    assert source.state.iteration == 90
    assert source.family.config == {"hidden_size": 8}  # type: ignore[attr-defined]


def rewritten(path: Path, tree: Any) -> None:
    """Another pickle in the same file."""
    with zipfile.ZipFile(path) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    stem = next(iter(members)).partition("/")[0]
    members[f"{stem}/data.pkl"] = pickle.dumps(tree, protocol=2)
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)


class Evil:
    def __reduce__(self) -> Any:
        import os

        return os.system, ("true",)


def test_code_in_a_rank_file_is_refused_and_never_run(three: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rewritten(three / "model_world_size_3_rank_0.pt", {"w": Evil()})
    monkeypatch.setattr("os.system", lambda command: pytest.fail("it was run"))
    with pytest.raises(Untrusted, match=r"posix\.system"):
        opened(three)


@pytest.mark.parametrize(
    ("file", "state"),
    [
        ("optim_world_size_3_rank_2.pt", "model_world_size_3_rank_1.pt"),
        ("optim_world_size_3_rank_1.pt", {"state": [1]}),
    ],
)
def test_an_optimizer_that_is_not_like_the_other_ranks(three: Path, file: str, state: Any) -> None:
    if isinstance(state, str):
        shutil.copy(three / state, three / file)
    else:
        rewritten(three / file, state)
    with pytest.raises((LayoutMismatch, Unsupported), match=rf"{file}: state of parameter"):
        opened(three)


@pytest.mark.parametrize("tree", [[1, 2], {"w": 3}, {}])
def test_something_else_in_a_rank_file(three: Path, tree: Any) -> None:
    for path in three.glob("model_*"):
        rewritten(path, tree)
    with pytest.raises(CheckpointError):
        opened(three)


def test_local_tensors_say_what_they_are_a_part_of() -> None:
    file = read_rank_file(VERL / "fsdp2_ws3", "model_world_size_3_rank_2.pt")
    part = file.tree["embed.weight"]
    assert isinstance(part, Local)
    assert (part.global_shape, part.dims, part.stored.shape) == ((11, 8), (0,), (3, 8))


def test_a_storage_that_is_too_short(three: Path) -> None:
    path = three / "model_world_size_3_rank_0.pt"
    data = path.read_bytes()
    at = data.index(b"_local_tensor")
    number = data.index(b"K\x20", at)  # 32 elements of its storage
    path.write_bytes(data[:number] + b"K\x40" + data[number + 2 :])
    with pytest.raises(Corrupt):
        opened(three)


@pytest.mark.parametrize(
    ("shapes", "wanted", "ways", "chosen"),
    [
        ([(2,), (3,), (2,)], [(3,), (2,)], 1, [1, 2]),
        ([(2,), (3,), (2,)], [(2,)], 2, [0]),
        ([(2,), (3,), (2,)], [(3,), None], 1, [1, 2]),
        ([(2,), (3,)], [(4,)], 0, []),
        ([(2,)] * 40, [(2,)] * 40, 1, list(range(40))),
        ([(2,)] * 40, [(2,)] * 39, 2, list(range(39))),
        ([], [], 1, []),
        (
            [(2,)] * 30_000,
            [(2,)] * 30_000,
            1,
            list(range(30_000)),
        ),  # a model of many experts: by the square of that it took minutes
    ],
)
def test_ways_to_choose_are_counted(
    shapes: list[tuple[int, ...]], wanted: list[tuple[int, ...] | None], ways: int, chosen: list[int]
) -> None:
    assert choices(shapes, wanted) == (ways, chosen)


def test_an_optimizer_of_another_step_is_found(three: Path) -> None:
    """Each rank has counted its own steps: one whose file is of another save has other moments as well."""
    with edited(three / "optim_world_size_3_rank_1.pt") as tree:
        for state in tree["state"].values():
            state["step"] += 5
    with pytest.raises(LayoutMismatch, match=r"rank_1\.pt: step of parameter 0 is 7, but 2 on rank 0"):
        opened(three)
    assert opened(three, optimizer=False).model.params


@pytest.mark.parametrize("kind", ["model", "optim"])
def test_files_of_ranks_that_were_swapped_are_found(three: Path, kind: str) -> None:
    """Parts of equal shapes would fit: torch's mesh says which rank wrote them."""
    first, second = (three / f"{kind}_world_size_3_rank_{rank}.pt" for rank in (0, 1))
    first.rename(three / "aside")
    second.rename(first)
    (three / "aside").rename(second)
    with pytest.raises(
        LayoutMismatch, match=rf"{kind}_world_size_3_rank_0\.pt: written by rank 1, but its name says rank 0"
    ):
        opened(three)


@pytest.mark.parametrize("kind", ["model", "optim"])
def test_a_file_that_is_a_copy_of_another_ranks_is_found(tmp_path: Path, kind: str) -> None:
    """Its parts have the shapes that are wanted."""
    run = Path(shutil.copytree(VERL.parent / "trainers/skyrl_fsdp2/global_step_3/policy", tmp_path / "policy"))
    shutil.copyfile(*(run / f"{kind}_world_size_2_rank_{rank}.pt" for rank in (0, 1)))
    (problem,) = verify(run, ReadOptions()).problems.found
    assert f"{kind}_world_size_2_rank_1.pt: is the same as {kind}_world_size_2_rank_0.pt" in problem.message


def test_what_a_file_says_of_its_rank_is_held_against_its_name(tmp_path: Path) -> None:
    """SkyRL's other files of two ranks, random states among them, swapped."""
    run = Path(shutil.copytree(VERL.parent / "trainers/skyrl_fsdp2/global_step_3/policy", tmp_path / "policy"))
    first, second = (run / f"extra_state_world_size_2_rank_{rank}.pt" for rank in (0, 1))
    first.rename(tmp_path / "aside")
    second.rename(first)
    (tmp_path / "aside").rename(second)
    with pytest.raises(LayoutMismatch, match=r"extra_state_world_size_2_rank_0\.pt: says that rank 1 of 2 wrote it"):
        opened(run)
