"""torchtitan 0.3 goes on, with equal losses, from what its runs became in other formats: its names, and queries, keys and values as one.

Its model is saved with three tensors where its optimizer has one parameter, unless ``fused`` is off; with tied weights its state dict has
both names. A second param group decays no norms.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rlhf.cli.comparing import compare_facts
from mcore_rlhf.convert import ConvertOptions, Progress, convert
from mcore_rlhf.errors import CheckpointError, Unsupported
from mcore_rlhf.families.module import read_config
from mcore_rlhf.families.options import ReadOptions, WriteOptions
from mcore_rlhf.formats.registry import open_checkpoint
from mcore_rlhf.manager.will_resume import forecast, loader_named
from mcore_rlhf.trainers.resuming import Settings
from mcore_rlhf.verify.checkpoint import verify
from mcore_rlhf.verify.differ import Tolerance
from tests.trainers import lab as labs
from tests.trainers.lessons import SIZES, Step

CASES: dict[str, dict[str, Any]] = {
    "llama": {"model": "llama"},
    "llama tied": {"model": "llama", "tied": True},
    "llama by parts": {"model": "llama", "fused": False},
    "qwen3": {"model": "qwen3"},
    "qwen3 in two groups": {"model": "qwen3", "groups": True},
}
BY: dict[str, dict[str, Any]] = {
    "dcp": {"dp": 3}, "hf": {"with_optimizer": True}, "megatron": {"tp": 2, "dp": 1}, "deepspeed": {"zero_stage": 2, "dp": 2},
}  # fmt: skip


class Lab(labs.Lab):
    """Runs of torchtitan's, each done once."""

    def carry_out(self, case: str, do: labs.Orders, **how: Any) -> list[Step]:
        """Carry orders out on two ranks."""
        return self.run("titan_03_job", ["torchtitan-0.3.0", "needs"], 2, do, **{**CASES[case], **how})

    def trained(self, case: str) -> tuple[Path, list[Step]]:
        """The folder of all steps of a run of three, and what it saw in two more."""
        return self.once(case, self.folder / case, lambda do: self.carry_out(case, do))

    def config(self, case: str) -> str:
        """What Hugging Face's libraries would call the model."""
        import transformers

        folder = self.folder / f"config of {case}"
        kind = {"llama": transformers.LlamaConfig, "qwen3": transformers.Qwen3Config}[CASES[case]["model"]]
        made = {**SIZES, "head_dim": 8, "tie_word_embeddings": CASES[case].get("tied", False)}
        name = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[CASES[case]["model"]]
        kind(**made, architectures=[name]).save_pretrained(folder)
        return str(folder)

    def made(self, source: Path, name: str, to: str, **write: Any) -> Path:
        target = self.folder / name
        convert(source, target, ConvertOptions(to=to, fsync=False, workers=1, write=WriteOptions(**write)))
        assert verify(target, ReadOptions()).intact
        return target


@pytest.fixture(scope="module")
def lab(trainers: Path, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(trainers, tmp_path_factory.mktemp("titan"))


@pytest.mark.parametrize("case", CASES)
def test_torchtitan_goes_on_from_what_became_of_its_run(lab: Lab, case: str) -> None:
    root, wanted = lab.trained(case)
    step, config = root / "step-3", lab.config(case)
    assert verify(step, ReadOptions()).intact
    do: list[tuple[str, object]] = []
    for name, write in BY.items():
        there = lab.made(step, f"{case}-{name}", name, reference_config=config, **write)
        back = lab.folder / f"{case}-from-{name}"
        lab.made(there, f"{case}-from-{name}/step-3", "dcp", dp=2, like=str(step), reference_config=config)
        do += [("load", back), ("train", 2)]
    seen = lab.carry_out(case, do, seed=7)
    for at, name in enumerate(BY):
        found = seen[2 * at : 2 * at + 2]
        assert [one["loss"] for one in found] == [one["loss"] for one in wanted], name
        assert [one["lr"] for one in found] == [one["lr"] for one in wanted], name


def test_weights_are_under_hugging_faces_names(lab: Lab) -> None:
    from transformers import AutoModelForCausalLM

    step, config = lab.trained("llama")[0] / "step-3", lab.config("llama")
    lab.made(step, "llama for others", "hf", reference_config=config)
    _, info = AutoModelForCausalLM.from_pretrained(lab.folder / "llama for others", output_loading_info=True)
    assert not any(info.values()), info


def test_who_does_not_say_how_heads_lie_gets_the_weights_alone(lab: Lab, tmp_path: Path) -> None:
    """Nothing in the folder says it; of Qwen3 the norm of a head's keys does."""
    step = lab.trained("llama")[0] / "step-3"
    assert "wqkv" in open_checkpoint(step, ReadOptions(), partial=True).unread
    with pytest.raises(Unsupported, match="--reference-config"):
        convert(step, tmp_path / "out", ConvertOptions(to="deepspeed", write=WriteOptions()))
    other = json.loads(Path(lab.config("llama"), "config.json").read_text()) | {"num_key_value_heads": 3}
    (tmp_path / "config.json").write_text(json.dumps(other))
    told = WriteOptions(reference_config=str(tmp_path / "config.json"))
    with pytest.raises(CheckpointError, match="groups of heads"):
        convert(step, tmp_path / "out", ConvertOptions(to="deepspeed", write=told))
    source = open_checkpoint(lab.trained("qwen3")[0] / "step-3", ReadOptions())
    assert source.states == ("master", "exp_avg", "exp_avg_sq")


@pytest.mark.parametrize("case", ["llama", "qwen3"])
def test_its_run_is_compared_with_what_became_of_it(lab: Lab, case: str) -> None:
    """As ``diff --reference-config`` does: in all states, under one's names, though the other has others and its heads as one."""
    step, config = lab.trained(case)[0] / "step-3", lab.config(case)
    there = lab.made(step, f"{case} compared", "universal", reference_config=config)

    def compared() -> dict[str, Any]:
        pair = [
            replace(open_checkpoint(path, ReadOptions(described_by=config)), told=read_config(config))
            for path in (step, there)
        ]
        return {**compare_facts(*pair, Tolerance(), None, Progress()), "parameters": len(pair[1].model.params)}

    found = compared()
    assert found["equal"], found
    assert found["tensors"] in (3 * found["parameters"], 4 * found["parameters"])
    _change_one_moment(there)
    assert not compared()["equal"]


def _change_one_moment(root: Path) -> None:
    file = next(root.glob("*/zero/*k_proj.weight/exp_avg.pt"))
    held = torch.load(file, weights_only=False)
    held["param"][-1, -1] += 1
    torch.save(held, file)
    (root / "mcore_rlhf.json").unlink()


@pytest.mark.parametrize("case", ["llama", "qwen3"])
def test_what_its_own_loader_restores(lab: Lab, case: str) -> None:
    root, _ = lab.trained(case)
    assert forecast(root, loader_named("torchtitan")[0], Settings()).resumes
