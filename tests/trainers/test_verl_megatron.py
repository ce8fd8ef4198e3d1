"""verl's own ``MegatronCheckpointManager`` saves what is read whole: model, optimizer, scheduler and random states, in its layout."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mcore_rlhf.convert import ConvertOptions, convert
from mcore_rlhf.demo.configs import Training
from mcore_rlhf.errors import Unsupported
from mcore_rlhf.families.options import ReadOptions, WriteOptions
from mcore_rlhf.families.run_folders import SPLIT_MODEL
from mcore_rlhf.formats.registry import open_checkpoint
from mcore_rlhf.manager.will_resume import forecast, loader_named
from mcore_rlhf.trainers.resuming import Outcome, Settings, Thing
from mcore_rlhf.verify.checkpoint import verify
from tests.trainers import lab as labs

RELEASE, BRIDGE = "0.9.1", "mbridge-0.15.1"
Seen = list[dict[str, Any]]
CASES: dict[str, dict[str, Any]] = {
    "buckets": {"parallel": {"tp": 2}},
    "parameters": {"parallel": {"pp": 2}, "fully": True, "tied": True},
    "experts": {"parallel": {"ep": 2, "dp": 2}, "experts": 4},
    "chunks": {"parallel": {"pp": 2, "vpp": 2}, "layers": 4},
    "bridged critic": {"parallel": {"pp": 2}, "critic": True, "bridge": True},
    "bridged critic by rows": {"parallel": {"tp": 2}, "critic": True, "bridge": True},
    "critic by batches": {"parallel": {"dp": 2}, "critic": True},
    "bridged": {"parallel": {"tp": 2}, "bridge": True},
    "bridged parameters": {"parallel": {"pp": 2}, "fully": True, "tied": True, "bridge": True},
}  # fmt: skip
"""How verl stores the optimizer: flat buckets, which is its default, parameter by parameter, and in chunks of a pipeline's stages; experts,
with one of their own; and the weights: Megatron's, or, which is its default, Hugging Face's by a bridge."""
DENSE = tuple(case for case in CASES if case != "experts")
BY_SAMPLES = WriteOptions(global_batch_size=Training().global_batch_size)
"""Megatron-LM's schedule counts samples, verl's steps, and verl does not store how many a step has."""


class Lab(labs.Lab):
    """Runs of verl on Megatron, each done once."""

    def carry_out(self, world: int, do: Sequence[tuple[str, object]], release: str = RELEASE, **how: Any) -> Seen:
        """Carry orders out in processes of their own."""
        return self.run("verl_megatron_job", [f"verl-{release}", BRIDGE, "needs"], world, do, **how)

    def trained(self, case: str) -> tuple[Path, Seen]:
        """The role's folder of a run of three steps, and what it saw in two more."""
        path = self.folder / case / "global_step_3" / "actor"
        return self.once(case, path, lambda do: self.carry_out(2, do, **self.how(case)))

    def how(self, case: str) -> dict[str, Any]:
        """What its orders say of a case."""
        return {**CASES[case], **({"base": str(self.base(case))} if CASES[case].get("bridge") else {})}

    def base(self, case: str) -> Path:
        """The folder of the model that is trained, as Hugging Face has it: without weights."""
        from transformers import LlamaConfig

        tied, layers = CASES[case].get("tied", False), CASES[case].get("layers", 2)
        sizes = {
            "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": layers, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-5,
        }  # fmt: skip
        folder = self.folder / f"base-{case}"
        LlamaConfig(**sizes, tie_word_embeddings=tied, architectures=["LlamaForCausalLM"]).save_pretrained(folder)
        return folder


@pytest.fixture(scope="module")
def lab(trainers: Path, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(trainers, tmp_path_factory.mktemp("verl-megatron"))


@pytest.mark.parametrize("case", DENSE)
def test_what_verl_saves_is_read_whole(lab: Lab, case: str) -> None:
    """Megatron goes on from what it became: equal losses and rates."""
    run, wanted = lab.trained(case)
    assert verify(run, ReadOptions()).intact
    source = open_checkpoint(run, ReadOptions())
    assert (source.state.iteration, source.states) == (3, ("master", "exp_avg", "exp_avg_sq"))
    assert [group.fields["step"] for group in source.state.groups] == [3, 3]
    assert source.state.scheduler is not None
    assert source.parallel.world_size == 2
    target = lab.folder / f"{case}-megatron"
    job = convert(run, target, ConvertOptions(to="megatron", fsync=False, workers=1, write=BY_SAMPLES))
    assert job.lossless
    seen = lab.carry_out(2, [("load", target), ("train", 2)], **{**CASES[case], "seed": 7})
    assert seen == wanted
    bridged = bool(CASES[case].get("bridge"))
    assert ("model/huggingface/model.safetensors" in {file.path for file in source.files}) == bridged


@pytest.mark.parametrize("case", DENSE)
def test_verl_goes_on_from_what_was_made_of_its_run(lab: Lab, case: str) -> None:
    """As its own files, and through Megatron's and Hugging Face's: the losses of the run that went on."""
    run, wanted = lab.trained(case)
    layout = {"like": str(run)} if CASES[case].get("bridge") else {"tp": 1, "dp": 1, **CASES[case]["parallel"]}
    there: dict[str, dict[str, Any]] = {
        "megatron": {"tp": 1, "pp": 1, "dp": 1},
        "hf": {"with_optimizer": True, "reference_config": str(lab.base(case))},
    }
    roots = {"verl": lab.convert(run, "verl", f"{case}-same", **layout)[0]}
    for to, write in there.items():
        made = lab.folder / f"{case}-{to}-there"
        convert(run, made, ConvertOptions(to=to, fsync=False, workers=1, write=WriteOptions(**write)))
        roots[to] = lab.convert(made, "verl", f"{case}-{to}-back", **layout)[0]
    for to, root in roots.items():  # one after the other, each in a new run: Megatron's scheduler adds what it loads
        contents = ["model", "optimizer", *([] if to == "hf" else ["extra"])]  # new random states are those of a GPU
        do = [("load", root / "global_step_3" / "actor"), ("train", 2)]
        seen = lab.carry_out(2, do, **{**lab.how(case), "seed": 7, "load_contents": contents})
        assert seen == wanted, to


def test_verl_goes_on_with_experts_that_have_an_optimizer_of_their_own(lab: Lab) -> None:
    run, wanted = lab.trained("experts")
    assert verify(run, ReadOptions()).intact
    root, _ = lab.convert(run, "verl", "experts-same", ep=2, dp=2)
    do = [("load", root / "global_step_3" / "actor"), ("train", 2)]
    assert lab.carry_out(2, do, **{**CASES["experts"], "seed": 7}) == wanted


@pytest.mark.parametrize("kind", ["alone", "whole"])
def test_adapters_that_are_trained_on_megatron(lab: Lab, kind: str) -> None:
    """With a bridge verl saves the adapter alone, and loads it from ``model/dist_ckpt``: it was said that the loader stops."""
    root, how = lab.folder / f"lora-{kind}", {"parallel": {"tp": 2}, "lora": kind}
    run = root / "global_step_3" / "actor"
    seen = lab.carry_out(2, [("train", 3), ("save", run), ("train", 2)], **how)
    (root / "latest_checkpointed_iteration.txt").write_text("3")
    assert verify(run, ReadOptions()).intact
    assert lab.carry_out(2, [("load", run), ("train", 2)], **how) == seen[3:]
    told = Settings({"actor_rollout_ref.actor.megatron.use_dist_checkpointing": kind == "whole"})
    found = forecast(root, loader_named("verl")[0], told)
    assert {one.thing: one.row.outcome for one in found.roles["actor"]}[Thing.WEIGHTS] is Outcome.RESTORED
    target = lab.folder / f"lora-{kind}-megatron"
    options = ConvertOptions(to="megatron", fsync=False, workers=1, write=BY_SAMPLES)
    if kind == "alone":
        with pytest.raises(Unsupported, match="holds an adapter"):
            convert(run, target, options)
        shutil.rmtree(run / SPLIT_MODEL)
        found = forecast(root, loader_named("verl")[0], told)
        assert {one.thing: one.row.outcome for one in found.roles["actor"]}[Thing.WEIGHTS] is Outcome.REFUSED
    else:
        assert convert(run, target, options).lossless
        assert lab.carry_out(2, [("load", target), ("train", 2)], **how, seed=7) == seen[3:]


def test_the_layout_of_0_7_is_read_and_becomes_that_of_0_9(lab: Lab) -> None:
    """Its distributed optimizer needs megatron-core up to 0.15, so the plain one is saved, which 0.9.1 cannot load beside weights."""
    run, how = lab.folder / "older" / "global_step_3" / "actor", {"parallel": {"tp": 2}, "optimizer": "plain"}
    wanted = lab.carry_out(2, [("train", 3), ("save", run), ("train", 2)], "0.7.0", **how)[3:]
    assert (run / "dist_ckpt").is_dir()
    there, later = lab.folder / "older-megatron", [("train", 2)]
    job = convert(run, there, ConvertOptions(to="megatron", fsync=False, workers=1, write=BY_SAMPLES))
    assert job.lossless
    assert lab.carry_out(2, [("load", there), *later], **{**how, "seed": 7}) == wanted
    newer, _ = lab.convert(run, "verl", "newer", tp=2)
    loaded = {**how, "seed": 7, "load_contents": ["model", "extra"], "schedule": False}
    seen = lab.carry_out(2, [("load", newer / "global_step_3" / "actor"), *later], **loaded)
    assert seen[0]["loss"] == wanted[0]["loss"]


@pytest.mark.parametrize("case", ["buckets", "bridged"])
def test_the_layout_of_0_8_is_written_where_a_run_shows_it(lab: Lab, case: str) -> None:
    """All in ``dist_ckpt``, or the weights in ``huggingface``; through Megatron's as well, and without a step of the run as 0.9 has it."""
    run, how = lab.folder / f"eight-{case}" / "global_step_3" / "actor", {**lab.how(case), "seed": 7}
    lab.carry_out(2, [("train", 3), ("save", run)], "0.8.0", **lab.how(case))
    wanted = lab.carry_out(2, [("load", run), ("train", 2)], "0.8.0", **how)
    there = lab.folder / f"eight-{case}-megatron"
    assert convert(run, there, ConvertOptions(to="megatron", fsync=False, workers=1, write=BY_SAMPLES)).lossless
    for number, source in enumerate((run, there)):
        root, _ = lab.convert(source, "verl", f"eight-{case}-{number}", like=str(run))
        found = root / "global_step_3" / "actor"
        assert {path.name for path in found.iterdir()} <= {"dist_ckpt", "huggingface", "mcore_rlhf"}
        contents = {"load_contents": ["model", "optimizer", *(["extra"] if source is run else [])]}
        assert lab.carry_out(2, [("load", found), ("train", 2)], "0.8.0", **how, **contents) == wanted, source
    newer, job = lab.convert(run, "verl", f"eight-{case}-newer", tp=2, dp=1)
    assert (newer / "global_step_3" / "actor" / "ckpt_contents.json").is_file()
    assert "for a run of 0.8, --like FOLDER names a step of its own" in str(job.jobs["actor"].target.report)


def test_verl_goes_on_with_other_ranks(lab: Lab) -> None:
    """Two data-parallel ranks in the place of two tensor-parallel ones, and what verl saves then is read."""
    run, wanted = lab.trained("buckets")
    root, _ = lab.convert(run, "verl", "data-parallel", tp=1, dp=2)
    later = lab.folder / "later" / "global_step_5" / "actor"
    do = [("load", root / "global_step_3" / "actor"), ("train", 2), ("save", later)]
    seen = lab.carry_out(2, do, parallel={"dp": 2}, seed=7)
    assert [step["lr"] for step in seen] == [step["lr"] for step in wanted]
    assert [step["loss"] for step in seen] == pytest.approx([step["loss"] for step in wanted], abs=1e-3)
    source = open_checkpoint(later, ReadOptions())
    assert (source.state.iteration, str(source.parallel)) == (5, "TP1×PP1×DP2")
    assert verify(later, ReadOptions()).intact
