"""verl itself loads what was made of its runs, and of others', and trains on with the losses that the source's run had."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rlhf.convert import ConvertOptions, convert
from mcore_rlhf.errors import UsageError
from mcore_rlhf.families.options import ReadOptions, WriteOptions
from mcore_rlhf.formats.registry import open_checkpoint
from mcore_rlhf.verify.checkpoint import Depth, verify
from tests.helpers.catalog_values import tensor_of
from tests.trainers import lab as labs

RELEASES = ("0.9.1", "0.8.0", "0.7.0")
Seen = list[dict[str, Any]]


class Lab(labs.Lab):
    """Runs of verl's, each done once."""

    def carry_out(self, release: str, world: int, do: Sequence[tuple[str, object]], **how: Any) -> Seen:
        """Carry orders out in processes of their own, by a release of verl."""
        return self.run("verl_job", [f"verl-{release}", "needs"], world, do, **{"strategy": "fsdp2", **how})

    def trained(self, release: str, **how: Any) -> tuple[Path, Seen]:
        """A run of three steps, saved by verl, and what it saw in two more."""
        key = f"{release}-{sorted(how.items())}"
        path = self.folder / f"run-{abs(hash(key))}" / "global_step_3" / "actor"
        world = how.pop("world", 2)
        return self.once(key, path, lambda do: self.carry_out(release, world, do, **how))

    def made(self, source: Path, name: str, to: str = "fsdp-ranks", **write: Any) -> Path:
        target = self.folder / name
        convert(source, target, ConvertOptions(to=to, fsync=False, workers=1, write=WriteOptions(**write)))
        assert verify(target, ReadOptions()).intact
        return target


@pytest.fixture(scope="module")
def lab(trainers: Path, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(trainers, tmp_path_factory.mktemp("verl"))


def losses(seen: Seen) -> list[float]:
    return [step["loss"] for step in seen]


@pytest.mark.parametrize("release", RELEASES)
def test_verl_goes_on_from_what_every_format_became(lab: Lab, release: str) -> None:
    """The same number of ranks: the same losses to the last bit, and from its own files the same random numbers."""
    run, wanted = lab.trained(release)
    by: dict[str, dict[str, Any]] = {
        "megatron": {"tp": 2, "dp": 1},
        "megatron-dist": {"pp": 2, "dp": 1},
        "deepspeed": {"zero_stage": 2, "dp": 2},
        "universal": {},
        "dcp": {"dp": 3},
        "hf": {"with_optimizer": True},
    }
    folders = [lab.made(run, f"{release}-same")]
    for name, write in by.items():
        there = lab.made(run, f"{release}-{name}", name, **write)
        folders.append(lab.made(there, f"{release}-from-{name}", dp=2, like=str(run)))
    do = [order for folder in folders for order in (("load", folder), ("train", 2))]
    seen = lab.carry_out(release, 2, do, seed=7)
    for number, folder in enumerate(folders):
        found = seen[2 * number : 2 * number + 2]
        assert losses(found) == losses(wanted), folder
        assert [step["lr"] for step in found] == [step["lr"] for step in wanted], folder
    assert [step["drawn"] for step in seen[:2]] == [step["drawn"] for step in wanted]


@pytest.mark.parametrize("model", ["qwen2", "llama"])
@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_verl_goes_on_with_another_number_of_ranks(lab: Lab, model: str, strategy: str) -> None:
    """Uneven parts, flat pieces that end inside a row, tied weights; the batch is the same, shared by other ranks."""
    how = {"model": model, "strategy": strategy, "tied": model == "llama"}
    run, wanted = lab.trained("0.9.1", **how)
    for world in (1, 3) if strategy == "fsdp" else (3,):
        cut = lab.made(run, f"{model}-{strategy}-{world}", dp=world)
        seen = lab.carry_out("0.9.1", world, [("load", cut), ("train", 2)], seed=7, **how)
        assert losses(seen) == pytest.approx(losses(wanted), abs=2e-6)
        back = lab.made(cut, f"{model}-{strategy}-{world}-back", dp=2, like=str(run))
        assert losses(lab.carry_out("0.9.1", 2, [("load", back), ("train", 2)], seed=7, **how)) == losses(wanted)


def test_verl_goes_on_where_its_placement_is_another(lab: Lab) -> None:
    """Releases up to 0.7 cut along the first dimension that the ranks divide: ``--like`` shows it."""
    run, wanted = lab.trained("0.7.0", placement=True, world=3)
    weights = lab.made(run, "placed-hf", "hf", with_optimizer=True)
    cut = lab.made(weights, "placed", dp=3, like=str(run))
    seen = lab.carry_out("0.7.0", 3, [("load", cut), ("train", 2)], seed=7, placement=True)
    assert losses(seen) == losses(wanted)


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_verl_goes_on_where_its_optimizer_was_given_frozen_weights(lab: Lab, strategy: str) -> None:
    """A tied embedding among them, of which no state says that the output layer is the same; FSDP1 has a layer frozen as a whole."""
    flat = strategy == "fsdp"
    how = {"frozen": ["layers.0."] if flat else ["embed_tokens", "layers.0."], "tied": not flat, "strategy": strategy}
    run, wanted = lab.trained("0.9.1", **how)
    there = lab.made(run, f"{strategy}-frozen-megatron", "megatron", tp=2, dp=1)
    assert open_checkpoint(there, ReadOptions()).model.tied is not flat
    folders = [
        lab.made(run, f"{strategy}-frozen-same"),
        lab.made(there, f"{strategy}-frozen-back", dp=2, like=str(run)),
    ]
    do = [order for folder in folders for order in (("load", folder), ("train", 2))]
    seen = lab.carry_out("0.9.1", 2, do, seed=7, **how)
    assert losses(seen[:2]) == losses(seen[2:]) == losses(wanted)


@pytest.mark.parametrize(
    ("release", "world", "more"),
    [
        ("0.9.1", 2, {}),
        ("0.7.0", 2, {"frozen": ["embed_tokens", "layers.0."]}),
        pytest.param("0.9.1", 3, {"tied": True, "model": "llama"}, marks=pytest.mark.slow),
    ],
)
def test_verl_goes_on_with_original_parameters(lab: Lab, release: str, world: int, more: dict[str, Any]) -> None:
    """FSDP1 with ``use_orig_params``: pieces end inside parameters, and a rank without anything of one has no state of it."""
    how = {"strategy": "fsdp", "original": True, **more}
    run, wanted = lab.trained(release, world=world, **how)
    name = f"original-{release}-{world}"
    there = lab.made(run, f"{name}-megatron", "megatron", tp=2, dp=1)
    folders = [lab.made(run, f"{name}-same"), lab.made(there, f"{name}-back", dp=world, like=str(run))]
    do = [order for folder in folders for order in (("load", folder), ("train", 2))]
    assert losses(lab.carry_out(release, world, do, seed=7, **how)) == losses(wanted) * 2
    other = lab.made(run, f"{name}-other", dp=5 - world)
    seen = lab.carry_out(release, 5 - world, [("load", other), ("train", 2)], seed=7, **how)
    assert losses(seen) == pytest.approx(losses(wanted), abs=2e-6)


def test_verl_goes_on_with_an_optimizer_by_name(lab: Lab) -> None:
    """As verl's engine of VeOmni has it, where that has several optimizers."""
    how = {"by_name": True}
    run, wanted = lab.trained("0.9.1", **how)
    plain, _ = lab.trained("0.9.1")
    there = lab.made(run, "by-name-megatron", "megatron", tp=2, dp=1)
    folders = [lab.made(run, "by-name-same"), lab.made(there, "by-name-back", dp=2, like=str(run))]
    do = [order for folder in folders for order in (("load", folder), ("train", 2))]
    assert losses(lab.carry_out("0.9.1", 2, do, seed=7, **how)) == losses(wanted) * 2
    numbered = lab.made(run, "by-name-numbered", like=str(plain))
    assert losses(lab.carry_out("0.9.1", 2, [("load", numbered), ("train", 2)], seed=7)) == losses(wanted)


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
@pytest.mark.parametrize("lora", ["whole", "alone"])
def test_verl_goes_on_with_a_lora(lab: Lab, strategy: str, lora: str) -> None:
    """FSDP1 has each matrix of the adapter as a flat parameter of its own; without the base its optimizer counts the base all the same."""
    how = {"strategy": strategy, "lora": lora}
    run, wanted = lab.trained("0.9.1", **how)
    there = lab.made(run, f"{strategy}-{lora}-universal", "universal")
    folders = [
        lab.made(run, f"{strategy}-{lora}-same"),
        lab.made(there, f"{strategy}-{lora}-back", dp=2, like=str(run)),
    ]
    seed = 1 if lora == "alone" else 7  # the base is what a run begins with
    do = [order for folder in folders for order in (("load", folder), ("train", 2))]
    assert losses(lab.carry_out("0.9.1", 2, do, seed=seed, **how)) == losses(wanted) * 2
    other = lab.made(run, f"{strategy}-{lora}-three", dp=3)
    seen = lab.carry_out("0.9.1", 3, [("load", other), ("train", 2)], seed=seed, **how)
    assert losses(seen) == pytest.approx(losses(wanted), abs=2e-6)
    lab.made(run, f"{strategy}-{lora}-peft", "peft")
    said = [json.loads((folder / "lora_train_meta.json").read_text()) for folder in (run, other)]
    assert said[0] == said[1] == {"r": 2, "lora_alpha": 6, "task_type": "CAUSAL_LM"}


def test_what_verl_saves_after_a_resume_is_read(lab: Lab) -> None:
    """The other way round: verl's own files, of a run that went on from ours."""
    run, _ = lab.trained("0.9.1", strategy="fsdp")
    later = lab.folder / "global_step_5" / "actor"
    cut = lab.made(run, "resumed", dp=3)
    lab.carry_out("0.9.1", 3, [("load", cut), ("train", 2), ("save", later)], strategy="fsdp")
    source = open_checkpoint(later, ReadOptions())
    assert source.state.iteration == 5
    assert source.state.groups[0].fields["step"] == 5
    moment = tensor_of(source, "model.norm.weight", "exp_avg")
    assert moment.abs().max() > 0
    assert verify(later, ReadOptions()).intact


@pytest.mark.timeout(900)
@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_verl_goes_on_with_copies_of_the_model(lab: Lab, strategy: str) -> None:
    """``fsdp_size`` smaller than the world: files name the groups of their mesh, in which FSDP1 gathers. Such files were not written."""
    how = {"strategy": strategy, "fsdp_size": 2}
    run, wanted = lab.trained("0.9.1", world=4, **how)
    there = lab.made(run, f"{strategy}-copies-there", "megatron", tp=2)
    folders = [lab.made(run, f"{strategy}-copies-same"), lab.made(there, f"{strategy}-copies", like=str(run))]
    seen = lab.carry_out("0.9.1", 4, [one for at in folders for one in (("load", at), ("train", 2))], seed=7, **how)
    assert losses(seen) == losses(wanted) * 2
    with pytest.raises(UsageError, match="has 4 ranks, 2 of them to a copy of the model, and 2 are to be written"):
        lab.made(there, f"{strategy}-copies-fewer", like=str(run), dp=2)
    lab.made(run, f"{strategy}-one", dp=3)  # other ranks have one copy together


@pytest.mark.parametrize("original", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["flat", "original"])
def test_copies_of_a_smaller_fsdp_size_are_read(lab: Lab, original: bool) -> None:
    """Each copy has the whole optimizer of FSDP1; what torch puts together itself is what is read, and another copy is damage."""
    run, told = lab.folder / f"hybrid-{original}" / "global_step_3" / "actor", lab.folder / f"hybrid-{original}.pt"
    how = {"strategy": "fsdp", "fsdp_size": 2, "original": original}
    lab.carry_out("0.9.1", 4, [("train", 3), ("save", run), ("tell", told)], **how)
    source, whole = open_checkpoint(run, ReadOptions()), torch.load(told)
    assert source.states == ("master", "exp_avg", "exp_avg_sq")
    for name, states in whole["state"].items():
        for state in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(tensor_of(source, name, state), states[state]), name
    file = run / "optim_world_size_4_rank_2.pt"
    other = torch.load(file, weights_only=False)
    next(iter(other["state"].values()))["exp_avg"].add_(1)
    torch.save(other, file)
    assert "differ between the copies" in str(verify(run, ReadOptions(), Depth.DEEP).problems)
