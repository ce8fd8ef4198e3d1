"""Runs of verl's on Megatron, written: the parts of a role, what each holds, and what a trainer's row decides of it."""

from __future__ import annotations

import json
import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from mcore_rlhf.convert import convert
from mcore_rlhf.core.account import Report
from mcore_rlhf.core.facts import Fate
from mcore_rlhf.errors import CheckpointError
from mcore_rlhf.families.megatron.schedule import counted_as
from mcore_rlhf.families.options import ConvertOptions, ReadOptions, WriteOptions
from mcore_rlhf.families.source import bytes_of
from mcore_rlhf.formats.registry import open_checkpoint
from mcore_rlhf.manager.convert_step import StepJob, convert_step
from mcore_rlhf.manager.subject import find
from mcore_rlhf.manager.will_resume import loader_named
from mcore_rlhf.storage.pt import read_pt
from mcore_rlhf.trainers.resuming import Held, Outcome, Seen, Settings, Thing
from mcore_rlhf.verify.checkpoint import Depth, verify
from mcore_rlhf.verify.differ import Differ

GOLDENS = Path(__file__).parents[2] / "goldens"
MEGATRON = GOLDENS / "megatron_dist" / "tp2pp2dp2_fully_reshardable"
LAYOUT = {"tp": 2, "pp": 2, "dp": 2}
PARTS = ("model", "optimizer", "extra")


def into(source: Path, root: Path, **write: object) -> StepJob:
    options = ConvertOptions(to="verl", fsync=False, write=WriteOptions(**write))  # type: ignore[arg-type]
    return convert_step(find(source, ReadOptions()), root, options)


@pytest.fixture(scope="module")
def role(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The actor of a step that was made of Megatron's."""
    root = tmp_path_factory.mktemp("verl")
    done = into(MEGATRON, root, **LAYOUT)
    assert done.told.endswith("actor_rollout_ref.actor.optim.use_checkpoint_opt_param_scheduler=True")
    assert f"dist_checkpointing_path={root}/global_step_2/actor/model/dist_ckpt" in done.told
    assert (root / "latest_checkpointed_iteration.txt").read_text() == "2"
    return root / "global_step_2" / "actor"


def shared_of(role: Path, part: str) -> dict[str, object]:
    file = read_pt(role, f"{part}/dist_ckpt/common.pt")
    found: dict[str, object] = file.materialize(file.tree)
    return found


def keys_of(role: Path, part: str) -> set[str]:
    return {*pickle.loads((role / part / "dist_ckpt" / ".metadata").read_bytes()).state_dict_metadata}


def test_each_part_holds_what_verl_looks_for_there(role: Path) -> None:
    assert all((role / part / "dist_ckpt" / "metadata.json").is_file() for part in PARTS)
    assert not (role / "latest_checkpointed_iteration.txt").exists()
    assert {"optimizer", "lr_scheduler", "content_metadata"} == {*shared_of(role, "optimizer")}
    assert {*shared_of(role, "extra")} == {"content_metadata"}
    assert "opt_param_scheduler" not in shared_of(role, "model")
    kinds = [shared_of(role, part)["content_metadata"] for part in PARTS]
    assert [kind["distrib_optim_sharding_type"] for kind in kinds] == ["dp_reshardable"] * 3  # type: ignore[index]
    assert not any(key.startswith(("optimizer", "rng_state")) for key in keys_of(role, "model"))
    assert all(key.startswith("optimizer.distributed.") for key in keys_of(role, "optimizer"))
    assert keys_of(role, "extra") == {f"rng_state/shard_{pp}.{tp}_2.2" for pp in (0, 1) for tp in (0, 1)}


@pytest.mark.parametrize("weights", ["dist_ckpt", "huggingface"])
def test_a_run_of_0_8_shows_its_own_layout(role: Path, tmp_path: Path, weights: str) -> None:
    """All in one folder, the weights too, or as Hugging Face's files beside it; 0.9's is said where nobody shows another."""
    like, root = tmp_path / "global_step_1" / "actor", tmp_path / "run"
    shutil.copytree(role / "model" / "dist_ckpt", like / "dist_ckpt")
    if weights == "huggingface":
        (like / "huggingface").mkdir()
        (like / "huggingface" / "model.safetensors").write_bytes(b"")
    done, found = into(MEGATRON, root, **LAYOUT, like=str(like)), root / "global_step_2" / "actor"
    assert ("dist_checkpointing_path" in done.told) == (weights == "dist_ckpt")
    assert "/actor/dist_ckpt " in done.told or weights == "huggingface"
    assert not (found / "ckpt_contents.json").exists()
    assert {"optimizer", "lr_scheduler"} <= {*shared_of(found.parent, "actor")}
    assert "opt_param_scheduler" not in shared_of(found.parent, "actor")
    keys = keys_of(found.parent, "actor")
    assert {key.partition(".")[0].partition("/")[0] for key in keys} >= {"optimizer", "rng_state"}
    assert any(key.startswith("decoder.") for key in keys) == (weights == "dist_ckpt")
    assert (found / "huggingface" / "model.safetensors").is_file() == (weights == "huggingface")
    there, back = open_checkpoint(MEGATRON, ReadOptions()), open_checkpoint(found, ReadOptions())
    with bytes_of(there) as bytes_a, bytes_of(back) as bytes_b:
        differ = Differ(there, back, bytes_a, bytes_b).compare()
    assert (back.states, [one.name for one in differ.differences if one.tensor is not None]) == (there.states, [])
    assert "for a run of 0.8" not in str(done.jobs["actor"].target.report)
    assert "for a run of 0.8" in str(into(MEGATRON, tmp_path / "newer", **LAYOUT).jobs["actor"].target.report)


@pytest.fixture(scope="module")
def bridged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, into a run that has its weights as a bridge writes them."""
    like = tmp_path_factory.mktemp("like") / "global_step_1" / "actor"
    for name in ("model/huggingface/model.safetensors", "optimizer/dist_ckpt/metadata.json", "ckpt_contents.json"):
        (like / name).parent.mkdir(parents=True, exist_ok=True)
        (like / name).write_text('{"sharded_backend": "torch_dist"}')
    (like / "model" / "dist_ckpt").mkdir()  # verl makes the folders of all parts
    root = tmp_path_factory.mktemp("bridged")
    done = into(MEGATRON, root, **LAYOUT, like=str(like))
    assert "use_dist_checkpointing" not in done.told
    return root / "global_step_2" / "actor"


def test_weights_lie_where_a_step_of_the_run_has_them(bridged: Path, tmp_path: Path) -> None:
    """Those that ``--to hf`` writes; with the optimizer they are one checkpoint, of which nothing is lost."""
    from safetensors.torch import load_file

    convert(MEGATRON, tmp_path / "hf", ConvertOptions(to="hf", fsync=False))
    written, wanted = (load_file(f / "model.safetensors") for f in (bridged / "model" / "huggingface", tmp_path / "hf"))
    assert written.keys() == wanted.keys()
    assert all(bool((written[name] == wanted[name]).all()) for name in wanted)
    assert not (bridged / "model" / "dist_ckpt").exists()
    there, back = open_checkpoint(MEGATRON, ReadOptions()), open_checkpoint(bridged, ReadOptions())
    assert (back.state.iteration, str(back.parallel), back.states) == (2, str(there.parallel), there.states)
    with bytes_of(there) as bytes_a, bytes_of(back) as bytes_b:
        found = Differ(there, back, bytes_a, bytes_b).compare()
    assert [one.name for one in found.differences if one.tensor is not None] == []
    assert verify(bridged, ReadOptions(), Depth.DEEP).intact
    alone = open_checkpoint(bridged, ReadOptions(optimizer=False))
    assert (alone.format, alone.state.iteration, alone.states) == ("hf", 2, ())


def test_weights_of_another_step_beside_an_optimizer_are_found(bridged: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    role = Path(shutil.copytree(bridged, tmp_path / "global_step_2" / "actor"))
    weights = load_file(file := role / "model" / "huggingface" / "model.safetensors")
    weights["model.norm.weight"] += 1
    save_file(weights, file)
    assert not verify(role, ReadOptions(), Depth.DEEP).intact
    del weights["model.norm.weight"]
    save_file(weights, file)
    assert not verify(role, ReadOptions()).intact


def test_nothing_is_lost_on_the_way(role: Path) -> None:
    there, back = open_checkpoint(MEGATRON, ReadOptions()), open_checkpoint(role, ReadOptions())
    with bytes_of(there) as bytes_a, bytes_of(back) as bytes_b:
        found = Differ(there, back, bytes_a, bytes_b).compare()
    assert [one.name for one in found.differences if one.tensor is not None] == []
    had, has = there.state.scheduler or {}, back.state.scheduler or {}
    assert back.state.iteration == has["num_steps"] == 2, "verl counts steps, Megatron-LM samples"
    each = had["num_steps"] // 2
    assert each > 1
    counts = {name for name, value in had.items() if value != has[name]}
    assert counts <= {"num_steps", "lr_warmup_steps", "lr_decay_steps", "wd_incr_steps"}
    assert all(has[name] * each == had[name] for name in counts)
    assert [group.fields for group in back.state.groups] == [group.fields for group in there.state.groups]
    assert verify(role, ReadOptions()).intact
    said = json.loads((role / "ckpt_contents.json").read_text())
    assert (said["global_step"], said["world_size"], {one["path"] for one in said["contents"].values()}) == (
        2, 8, {f"{part}/dist_ckpt" for part in PARTS},
    )  # fmt: skip


def test_a_schedule_of_steps_counts_samples_again_where_somebody_says_how_many_a_step_has(
    role: Path, tmp_path: Path
) -> None:
    """verl's own runs have no ``args`` that would say it."""
    there, back = open_checkpoint(MEGATRON, ReadOptions()), open_checkpoint(role, ReadOptions())
    convert(role, tmp_path / "megatron", ConvertOptions(to="megatron", fsync=False))
    assert open_checkpoint(tmp_path / "megatron", ReadOptions()).state.scheduler == there.state.scheduler
    silent = replace(back, state=replace(back.state, args={}))
    for given, fate, steps in ((8, Fate.DERIVED, 16), (None, Fate.LOST, 2), (1 << 62, Fate.LOST, 2)):
        report = Report()
        counted = counted_as(silent, given, report, by_steps=False)
        assert (counted.state.scheduler or {})["num_steps"] == steps
        assert [of for of, text in report.lines if "lr_scheduler" in text] == [fate]
    for args in ({"global_batch_size": 8, "rampup_batch_size": [2, 2, 8]}, {"global_batch_size": "8"}):
        odd = replace(back, state=replace(back.state, args=args))
        assert counted_as(odd, None, Report(), by_steps=False).state.scheduler == back.state.scheduler
    assert counted_as(counted_as(silent, 8, Report(), by_steps=False), None, Report(), by_steps=True) == silent


def test_will_resume_names_a_schedule_that_counts_what_the_loader_does_not() -> None:
    nothing = Seen("", frozenset(), frozenset(), {}, Held(), Settings({}), step=2)
    args = open_checkpoint(MEGATRON, ReadOptions()).state.args
    for name, counted, right in (("megatron-lm", 2, 16), ("verl", 16, 2)):
        files = frozenset() if name == "megatron-lm" else frozenset({"optimizer/dist_ckpt/metadata.json"})
        settings = Settings({"optim.use_checkpoint_opt_param_scheduler": True, "use_dist_checkpointing": True})
        for at, outcome in ((counted, Outcome.IGNORED), (right, Outcome.RESTORED)):
            held = Held(scheduler=True, optimizer=True, counted=at, args=args)
            seen = replace(nothing, held=held, files=files, settings=settings)
            loader = loader_named(name)[0]
            of_schedules = tuple(
                row for row in loader.rows if Thing.SCHEDULER in row.things
            )  # there are no weights here
            said = next(iter(replace(loader, rows=of_schedules).prospects(seen)))
            assert said.row.outcome is outcome, (name, at, said.why)


def test_what_counts_steps_is_known_beyond_another_family(role: Path, tmp_path: Path) -> None:
    """DeepSpeed's files have no place for Megatron's schedule: it waits beside them."""
    zero, back = tmp_path / "zero", tmp_path / "back"
    convert(role, zero, ConvertOptions(to="deepspeed", fsync=False, write=WriteOptions(zero_stage=1, dp=2)))
    convert(zero, back, ConvertOptions(to="megatron", fsync=False, write=WriteOptions(tp=1)))
    wanted = open_checkpoint(MEGATRON, ReadOptions()).state.scheduler
    assert open_checkpoint(back, ReadOptions()).state.scheduler == wanted


def test_another_sharding_is_written_where_it_is_asked_for(tmp_path: Path) -> None:
    into(MEGATRON, tmp_path, **LAYOUT, optimizer_sharding="fully_reshardable")
    keys = keys_of(tmp_path / "global_step_2" / "actor", "optimizer")
    assert keys
    assert all(key.startswith("optimizer.state.") for key in keys)


def test_without_an_optimizer_there_is_no_folder_for_one(tmp_path: Path) -> None:
    into(MEGATRON, tmp_path, **LAYOUT, no_optimizer=True)
    role = tmp_path / "global_step_2" / "actor"
    assert not (role / "optimizer").exists()
    assert json.loads((role / "ckpt_contents.json").read_text())["save_contents"] == ["model", "extra"]
    assert open_checkpoint(role, ReadOptions()).optimizer is None


def test_of_a_folder_of_hugging_faces_the_config_goes_along_and_decides_the_rows(tmp_path: Path) -> None:
    """verl builds its model of ``config.json``, and pads no rows."""
    model = GOLDENS / "huggingface" / "llama_tied_bf16_sharded"
    into(model, tmp_path, tp=2)
    (step,) = tmp_path.glob("global_step_*")
    described = json.loads((step / "actor" / "model" / "huggingface" / "config.json").read_text())
    source = open_checkpoint(step / "actor", ReadOptions())
    assert source.model.padded_vocab_size == described["vocab_size"]
    assert source.carried is not None
    assert "config.json" in source.carried.files


def test_degrees_say_which_backend_is_meant(tmp_path: Path) -> None:
    model = GOLDENS / "huggingface" / "llama_tied_bf16_sharded"
    done = into(model, tmp_path, dp=2)
    assert [job.target.format for job in done.jobs.values()] == ["fsdp-ranks"]
    assert "use_dist_checkpointing" not in done.told


def test_buffers_are_cut_as_verls_ddp_cuts_them(tmp_path: Path) -> None:
    """A source whose gradients overlap has several buckets: verl's runs have one, unless they are told otherwise."""
    source = GOLDENS / "megatron_dist" / "corrupt_dp3"
    with pytest.raises(CheckpointError):
        into(source, tmp_path / "distrusted", tp=1, dp=3)
    role = tmp_path / "global_step_2" / "actor"
    into(MEGATRON, tmp_path, **LAYOUT)
    assert {
        key.rpartition(".bucket_idx_")[2].partition(".")[0] for key in keys_of(role, "optimizer") if "bucket_idx" in key
    } == {"0"}
    args = shared_of(role, "model")["args"]
    assert args.__dict__["overlap_grad_reduce"] is False


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("what", ["common", "shard", "gone"])
def test_damage_in_any_part_is_found(role: Path, tmp_path: Path, part: str, what: str) -> None:
    copy = Path(shutil.copytree(role.parent, tmp_path / "global_step_2")) / "actor"
    (copy.parent / "manifest.json").unlink()
    folder = copy / part / "dist_ckpt"
    shard = max(folder.glob("*.distcp"), key=lambda path: path.stat().st_size)
    if what == "gone":
        shard.unlink()
    else:
        file = folder / "common.pt" if what == "common" else shard
        content = bytearray(file.read_bytes())
        at = content.index(b"content_metadata") if what == "common" else len(content) // 2
        content[at] ^= 1
        file.write_bytes(content)
    try:
        found = verify(copy, ReadOptions())
    except CheckpointError:
        return
    assert not found.intact


def test_a_description_of_an_unknown_class_is_carried_and_asked_about_nothing(role: Path, tmp_path: Path) -> None:
    """Within Megatron's family no table of architectures is looked into; a Hugging Face folder needs one, and says so."""
    copy = Path(shutil.copytree(role.parent, tmp_path / "global_step_2")) / "actor"
    (copy / "model" / "huggingface").mkdir()
    (copy / "model" / "huggingface" / "config.json").write_text(
        json.dumps({"model_type": "zebra", "architectures": ["ZebraLM"]})
    )
    done = into(copy, tmp_path / "out", **LAYOUT)
    assert (tmp_path / "out" / "global_step_2" / "actor" / "model" / "huggingface" / "config.json").is_file()
    assert not [text for job in done.jobs.values() for fate, text in job.report.lines if fate is Fate.LOST]
    assert open_checkpoint(copy, ReadOptions()).states
