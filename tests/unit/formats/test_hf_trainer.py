"""Checkpoints of transformers' Trainer and accelerate, damaged and forged: refused by name, never guessed; and their weights alone."""

from __future__ import annotations

import json
import pickle
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mcore_rlhf.convert import ConvertOptions, convert, prepare
from mcore_rlhf.errors import (
    CheckpointError,
    Corrupt,
    Incomplete,
    LayoutMismatch,
    Lossy,
    Unportable,
    Unsupported,
    Untrusted,
    UsageError,
)
from mcore_rlhf.families.options import ReadOptions, WriteOptions
from mcore_rlhf.formats.registry import open_checkpoint
from mcore_rlhf.manager.convert_step import convert_step
from mcore_rlhf.manager.runs import step_at
from mcore_rlhf.manager.subject import find
from mcore_rlhf.manager.will_resume import forecast, loader_named
from mcore_rlhf.trainers.resuming import Settings
from mcore_rlhf.verify.checkpoint import Depth, verify

GOLDENS = Path(__file__).parents[2] / "goldens" / "transformers"
TRAINER, ACCELERATE = GOLDENS / "checkpoint-2", GOLDENS / "step_2"
OF_4 = GOLDENS.with_name("transformers_4") / "checkpoint-2"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Trainer's, to be spoiled."""
    shutil.copytree(TRAINER, tmp_path / "checkpoint-2")
    return tmp_path / "checkpoint-2"


def edit(file: Path, change: Callable[[Any], object]) -> None:
    tree = torch.load(file, weights_only=True)
    change(tree)
    torch.save(tree, file)


def options(to: str = "megatron", **write: Any) -> ConvertOptions:
    return ConvertOptions(to=to, fsync=False, workers=1, write=WriteOptions(**write))


def _one_more(tree: Any) -> None:
    tree["param_groups"][1]["params"].append(26)


def _twice(tree: Any) -> None:
    tree["param_groups"][1]["params"][0] = 0


def _of_nobody(tree: Any) -> None:
    tree["state"][999] = tree["state"].pop(0)


def _one_group(tree: Any) -> None:
    """As many numbers, dealt as nobody deals them: norms among the decayed."""
    first, second = (group["params"] for group in tree["param_groups"])
    first.append(second.pop(0))


def _more_groups(tree: Any) -> None:
    """As a run deals them whose layers learn at rates of their own."""
    for group in list(tree["param_groups"]):
        half = len(group["params"]) // 2
        tree["param_groups"].append({**group, "lr": 1e-3, "params": group["params"][half:]})
        group["params"] = group["params"][:half]


def _other_shape(tree: Any) -> None:
    tree["state"][0]["exp_avg_sq"] = torch.zeros(3, 5)


def _factored(tree: Any) -> None:
    for states in tree["state"].values():
        states["exp_avg_sq_row"] = states.pop("exp_avg_sq").sum(-1)


def _wrapped(tree: Any) -> None:
    """As bitsandbytes 0.50.2 keeps moments, of 8 bits or 32, so that FSDP lets them be (``optim/optimizer.py``, ``state_dict``)."""
    for number, of in tree["state"].items():
        kept = {"state1": of["exp_avg"], "state2": of["exp_avg_sq"]}
        tree["state"][number] = {"step": 2, "__bnb_optimizer_quant_state__": kept}


def _huge(tree: Any) -> None:
    tree["state"][0]["exp_avg"] = torch.zeros(1).expand(10**12)


def _texts(tree: Any) -> None:
    tree["param_groups"][0]["params"] = ["model.embed_tokens.weight"]


def _no_groups(tree: Any) -> None:
    tree["param_groups"] = 3


HEADED = GOLDENS / "llama_factory" / "checkpoint-2"


def test_a_value_head_in_a_file_of_its_own_goes_along(tmp_path: Path) -> None:
    """LLaMA-Factory's reward models: its step was of "two runs", damaged, and without the optimizer the head was lost."""
    assert verify(HEADED, ReadOptions(), depth=Depth.DEEP).intact
    wanted = load_file(HEADED / "value_head.safetensors")
    for name, source, to, like in (
        ("same", HEADED, "hf-trainer", HEADED),
        ("dcp", HEADED, "dcp", None),
        ("back", tmp_path / "dcp", "hf-trainer", HEADED),
    ):
        write = WriteOptions(like=None if like is None else str(like))
        job = convert(source, tmp_path / name, ConvertOptions(to=to, fsync=False, workers=1, write=write))
        assert not job.account.unaccounted
        assert not [item for item in job.account.lost if "head" in item]
    for name in ("same", "back"):
        found = torch.load(tmp_path / name / "value_head.bin", weights_only=True)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[key], value) for key, value in wanted.items())
        assert not any("head" in key for key in load_file(tmp_path / name / "adapter_model.safetensors"))
        own, new = (torch.load(at / "optimizer.pt", weights_only=True)["state"] for at in (HEADED, tmp_path / name))
        assert own.keys() == new.keys()
        for number, states in own.items():
            assert all(torch.equal(value, new[number][key]) for key, value in states.items()), number
        assert verify(tmp_path / name, ReadOptions()).intact


def test_a_value_head_of_another_kind_is_refused_where_an_optimizer_may_train_it(tmp_path: Path) -> None:
    shutil.copytree(HEADED, tmp_path / "checkpoint-2")
    head = tmp_path / "checkpoint-2" / "value_head.safetensors"
    save_file({"v_head.summary.weight": torch.zeros(1, 16), "../other": torch.zeros(1)}, head)
    with pytest.raises(Unsupported, match=r"expected v_head\.summary\.weight and v_head\.summary\.bias alone"):
        open_checkpoint(tmp_path / "checkpoint-2", ReadOptions())
    assert len(open_checkpoint(tmp_path / "checkpoint-2", ReadOptions(optimizer=False)).catalog) > 0
    head.write_bytes(b"none")
    assert not verify(tmp_path / "checkpoint-2", ReadOptions()).intact
    head.unlink()
    with pytest.raises(LayoutMismatch, match="has 10 parameters, and the model beside it 8"):
        open_checkpoint(tmp_path / "checkpoint-2", ReadOptions())


def test_the_trainer_stops_at_an_adapter_under_a_value_head() -> None:
    found = forecast(HEADED, loader_named("transformers")[0], Settings(), None)
    assert not found.resumes


FREE = {"r": 0.0, "k": 2, "train_mode": True, "weight_sum": 1e-4, "lr_max": 1e-2, "scheduled_lr": 1e-2, "weight_lr_power": 2.0}  # fmt: skip


@pytest.mark.parametrize("key", ["z", "exp_avg_sq", ""])
def test_a_schedule_free_adam_keeps_no_first_moment(key: str, tmp_path: Path) -> None:
    """It was damaged by verify, and no Trainer went on with it by will-resume; schedulefree 1.4.1, ``adamw_schedulefree.py``."""
    shutil.copytree(TRAINER, tmp_path / "checkpoint-2")
    file = tmp_path / "checkpoint-2" / "optimizer.pt"
    tree = torch.load(file, weights_only=True)
    for number, of in tree["state"].items():
        tree["state"][number] = {"z": of["exp_avg"], "exp_avg_sq": of["exp_avg_sq"]}
    for group in tree["param_groups"]:
        kept = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay", "params")}
        group.clear()
        group.update({**kept, **FREE, "warmup_steps": 1, "foreach": True})
    if key:
        del tree["state"][3][key]
    torch.save(tree, file)
    if not key:
        assert verify(tmp_path / "checkpoint-2", ReadOptions()).intact
    found = forecast(tmp_path / "checkpoint-2", loader_named("transformers")[0], Settings(), None)
    assert found.resumes == (not key)


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        (_one_more, LayoutMismatch, "has 27 parameters, and the model beside it 26"),
        (_twice, LayoutMismatch, "number 0 is in param groups twice"),
        (_of_nobody, LayoutMismatch, "has states of number 999, which is in no param group"),
        (_one_group, Unsupported, "their shapes fit in no way, or in several"),
        (_more_groups, Unportable, "their shapes fit in no way, or in several"),  # the run itself goes on with it
        (_other_shape, CheckpointError, r"shape"),
        (_factored, Unsupported, "only states with one value per element"),
        (_wrapped, Unportable, "keeps __bnb_optimizer_quant_state__ of model.embed_tokens.weight, which is no number"),
        (_huge, CheckpointError, "shape"),
        (_texts, Unsupported, "does not list its parameters by number"),
        (_no_groups, Unsupported, "is not the state dict of one of torch's optimizers"),
    ],
    ids=lambda value: value.__name__.strip("_") if callable(value) else "",
)
def test_a_forged_optimizer_is_refused_and_the_weights_can_be_had(
    folder: Path, change: Any, kind: type[CheckpointError], text: str, tmp_path: Path
) -> None:
    edit(folder / "optimizer.pt", change)
    with pytest.raises(kind, match=text) as caught:
        open_checkpoint(folder, ReadOptions())
    assert str(folder) in str(caught.value)
    with pytest.raises(CheckpointError, match=text):
        convert(folder, tmp_path / "out", options())
    assert not (tmp_path / "out").exists()
    assert convert(folder, tmp_path / "weights", options(no_optimizer=True)).seen is not None


def test_what_no_optimizer_of_megatrons_keeps_is_said_and_never_put_where_it_cannot_be(
    folder: Path, tmp_path: Path
) -> None:
    """NAdam's product of momenta; and SGD's momentum, of which Megatron's distributed optimizer has none."""

    def sgd(tree: Any) -> None:
        for number, of in tree["state"].items():
            tree["state"][number] = {"momentum_buffer": of["exp_avg"]}

    edit(folder / "optimizer.pt", lambda tree: [of.update(mu_product=torch.ones(())) for of in tree["state"].values()])
    for to in ("megatron", "universal"):
        job = convert(folder, tmp_path / f"nadam-{to}", options(to))
        assert any(text.startswith("mu_product: ") for text in job.account.lost)
    edit(folder / "optimizer.pt", sgd)
    with pytest.raises(Unsupported, match="keeps moments of Adam, and the source has momentum_buffer"):
        convert(folder, tmp_path / "sgd", options(optimizer="distributed"))


@pytest.mark.parametrize("back", [0.5, 0.25])
def test_a_loss_scale_that_goes_back_by_more_than_it_grows_is_said(back: float, folder: Path, tmp_path: Path) -> None:
    kept = {"scale": 1024.0, "growth_factor": 2.0, "backoff_factor": back, "growth_interval": 3, "_growth_tracker": 2}
    torch.save(kept, folder / "scaler.pt")
    job = convert(folder, tmp_path / "same" / "checkpoint-2", options("hf-trainer"))
    assert any("backoff_factor 0.25" in text for text in job.account.lost) == (back != 0.5)
    assert (torch.load(tmp_path / "same" / "checkpoint-2" / "scaler.pt") == kept) == (back == 0.5)


@pytest.mark.parametrize("to", ["megatron", "megatron-dist"])
def test_sgd_without_momentum_comes_back_with_its_groups(to: str, folder: Path, tmp_path: Path) -> None:
    """It has no state of its own; ``torch_dist`` of it was "not understood"."""

    def sgd(tree: Any) -> None:
        tree["state"] = {}
        for group in tree["param_groups"]:
            for key in ("betas", "amsgrad", "eps"):
                del group[key]
            group.update(momentum=0, dampening=0, nesterov=False)

    edit(folder / "optimizer.pt", sgd)
    there = convert(folder, tmp_path / "there", options(to))
    assert there.seen is not None
    assert verify(tmp_path / "there", ReadOptions()).intact
    back = replace(options("hf-trainer"), write=WriteOptions(like=str(folder)))
    convert(tmp_path / "there", tmp_path / "back" / "checkpoint-2", back)
    was, now = (torch.load(path / "optimizer.pt") for path in (folder, tmp_path / "back" / "checkpoint-2"))
    assert [group["params"] for group in now["param_groups"]] == [group["params"] for group in was["param_groups"]]


@pytest.mark.parametrize(
    ("states", "strange", "then"),
    [
        ({"sum": "exp_avg"}, "sum", "It stops where it loads them"),  # Adagrad's
        ({"exp_avg": "exp_avg", "exp_inf": "exp_avg_sq"}, "exp_inf", "It stops where it loads them"),  # Adamax's
        (dict.fromkeys(("exp_avg", "exp_avg_sq", "max_exp_avg_sq"), "exp_avg_sq"), "max_exp_avg_sq", "It goes on as Adam"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("to", ["megatron", "megatron-dist"])
def test_states_with_which_megatron_cannot_go_on_are_lost_by_name(
    states: dict[str, str], strange: str, then: str, to: str, folder: Path, tmp_path: Path
) -> None:
    """They lie in the files all the same, and come back."""

    def other(tree: Any) -> None:
        for number, of in tree["state"].items():
            tree["state"][number] = {"step": of["step"], **{new: of[old] for new, old in states.items()}}

    edit(folder / "optimizer.pt", other)
    job = convert(folder, tmp_path / "out", options(to))
    (lost,) = (text for text in job.account.lost if text.startswith(f"{strange}: no optimizer of Megatron's"))
    assert then in lost
    with pytest.raises(Lossy, match=f"{strange}: no optimizer of Megatron's"):
        convert(folder, tmp_path / "strict", replace(options(to), strict=True))
    assert {*open_checkpoint(tmp_path / "out", ReadOptions()).states} - {"master"} == {*states}


@pytest.mark.parametrize(
    ("change", "lost"),
    [
        ({"amsgrad": None, "fused": None}, "RAdam: none of Megatron's optimizers steps so"),
        ({"amsgrad": None, "fused": None, "momentum_decay": 4e-3}, "NAdam: none of Megatron's optimizers steps so"),
        ({"maximize": True}, "maximize: Megatron's run goes up"),
        ({"decoupled_weight_decay": False, "weight_decay": 0.1}, "weight decay 0.1, which Adam adds to the gradients"),
        ({"decoupled_weight_decay": False, "weight_decay": 0}, ""),
    ],
)  # fmt: skip
def test_settings_by_which_megatron_steps_otherwise_are_lost_by_name(
    change: dict[str, Any], lost: str, folder: Path, tmp_path: Path
) -> None:
    """The moments are Adam's all the same; each class's groups have the fields that torch 2.13 gives them."""

    def other(tree: Any) -> None:
        for group in tree["param_groups"]:
            group.update(change)
            for key, value in change.items():
                if value is None:
                    del group[key]

    edit(folder / "optimizer.pt", other)
    found = [text for text in convert(folder, tmp_path / "out", options()).account.lost if "lr_scheduler" not in text]
    assert [text for text in found if "random states" not in text] == [
        text for text in found if lost and text.startswith(lost)
    ]
    assert any(text.startswith(lost) for text in found) or not lost


def test_a_step_without_a_count_of_its_own_has_that_of_its_schedule(folder: Path, tmp_path: Path) -> None:
    """SGD counts nothing; accelerate has no counters, and steps a schedule once for every process."""
    convert(folder, tmp_path / "step", options("hf-accelerate"))
    edit(tmp_path / "step" / "optimizer.bin", lambda tree: [of.pop("step") for of in tree["state"].values()])
    shutil.rmtree(tmp_path / "step" / "mcore_rlhf")
    (tmp_path / "step" / "mcore_rlhf.json").unlink()
    assert (
        open_checkpoint(tmp_path / "step", ReadOptions()).state.iteration
        == open_checkpoint(folder, ReadOptions()).state.iteration
    )


class OptimState8bit(torch.Tensor):
    """torchao's, as far as a file shows it (0.18.0, ``optim/subclass_8bit.py``)."""

    codes: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor) -> OptimState8bit:
        made = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)
        assert isinstance(made, OptimState8bit)
        made.codes = codes
        return made

    __torch_dispatch__ = None  # type: ignore[assignment]  # nothing computes with it


def test_moments_of_eight_bits_are_not_understood_and_not_damaged(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "torchao.optim.subclass_8bit"
    module = ModuleType(name)
    module.OptimState8bit = OptimState8bit  # type: ignore[attr-defined]
    for known in ("torchao", "torchao.optim"):
        monkeypatch.setitem(sys.modules, known, ModuleType(known))
    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(OptimState8bit, "__module__", name)
    edit(folder / "optimizer.pt", lambda tree: tree["state"][0].update(exp_avg=OptimState8bit(torch.zeros(48, 16))))
    with pytest.raises(
        Unportable, match=r"exp_avg is a tensor of the class torchao\.optim\.subclass_8bit\.OptimState8bit"
    ):
        open_checkpoint(folder, ReadOptions())
    assert verify(folder, ReadOptions()).intact
    assert forecast(folder, loader_named("transformers")[0], Settings()).resumes


def test_an_optimizer_of_another_model_is_refused(folder: Path) -> None:
    """As many parameters, other sizes."""
    shapes = {0: (99, 16)}
    edit(
        folder / "optimizer.pt",
        lambda tree: [
            tree["state"][n].update(exp_avg=torch.zeros(s), exp_avg_sq=torch.zeros(s)) for n, s in shapes.items()
        ],
    )
    with pytest.raises(Unsupported, match="their shapes fit in no way"):
        open_checkpoint(folder, ReadOptions())


def test_a_class_that_no_table_knows_keeps_its_weights(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]})
    )
    with pytest.raises(Unsupported, match=r"optimizer.pt: the optimizer has numbers .*model_type gpt2 is in no table"):
        open_checkpoint(folder, ReadOptions())
    opened = open_checkpoint(folder, ReadOptions(), partial=True)
    assert (opened.format, opened.state.iteration, opened.optimizer) == ("hf-trainer", 2, None)
    job = convert(folder, tmp_path / "hf", options("hf"))
    assert any("the optimizer, which is there and not understood" in text for text in job.account.lost)
    with pytest.raises(Unsupported, match="--no-optimizer converts the weights alone"):
        convert(folder, tmp_path / "dcp", options("dcp"))


def test_without_a_config_the_tables_must_agree(folder: Path) -> None:
    (folder / "config.json").unlink()
    assert open_checkpoint(folder, ReadOptions()).state.groups == open_checkpoint(TRAINER, ReadOptions()).state.groups
    tensors = load_file(folder / "model.safetensors")
    save_file({f"transformer.{name}": tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    with pytest.raises(Unsupported, match=r"Put the model's own config\.json beside the weights"):
        open_checkpoint(folder, ReadOptions())


def test_frozen_parameters_are_found_by_shape_or_not_at_all(folder: Path) -> None:
    """Without the embedding there is one way; without one of two equal layers' norms there are several."""

    def without(number: int) -> Callable[[Any], None]:
        def change(tree: Any) -> None:
            for group in tree["param_groups"]:
                group["params"] = [n - (n > number) for n in group["params"] if n != number]
            tree["state"] = {n - (n > number): states for n, states in tree["state"].items() if n != number}

        return change

    edit(folder / "optimizer.pt", without(0))
    source = open_checkpoint(folder, ReadOptions())
    assert [spec.name for spec in source.model.params if not spec.trainable] == ["model.embed_tokens.weight"]
    edit(folder / "optimizer.pt", without(20))
    with pytest.raises(Unsupported, match="fit in no way, or in several"):
        open_checkpoint(folder, ReadOptions())


@pytest.mark.parametrize(
    ("name", "near"), [("optimizer.pt", b""), ("scheduler.pt", b"base_lrs"), ("rng_state.pth", b"")]
)
def test_a_flipped_byte_is_found(folder: Path, name: str, near: bytes, tmp_path: Path) -> None:
    data = bytearray((folder / name).read_bytes())
    data[data.index(near) if near else len(data) // 2] ^= 0xFF
    (folder / name).write_bytes(data)
    with pytest.raises(CheckpointError, match=name):
        convert(folder, tmp_path / "out", options("hf-trainer"))


def test_verify_looks_at_every_byte_of_the_optimizer(folder: Path) -> None:
    assert not verify(folder, ReadOptions(), Depth.DEEP).problems
    data = bytearray((folder / "optimizer.pt").read_bytes())
    data[len(data) // 2] ^= 0xFF
    (folder / "optimizer.pt").write_bytes(data)
    assert verify(folder, ReadOptions(), Depth.FULL).problems


@pytest.mark.parametrize("golden", [TRAINER, ACCELERATE], ids=["trainer", "accelerate"])
def test_a_zeroed_optimizer_is_damaged(golden: Path, tmp_path: Path) -> None:
    shutil.copytree(golden, tmp_path / golden.name)
    (file,) = (tmp_path / golden.name).glob("optimizer.*")
    file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(CheckpointError, match=file.name):
        open_checkpoint(tmp_path / golden.name, ReadOptions())


def test_weights_alone_are_a_step_of_accelerates(folder: Path, tmp_path: Path) -> None:
    """It writes random states beside any model, by which its steps are known; how many were made, nothing else of such a step says."""
    given = ConvertOptions(to="accelerate", fsync=False, write=WriteOptions(no_optimizer=True))
    step = Path(str(convert_step(find(folder, ReadOptions()), tmp_path / "run", given).published))
    assert step_at(step) is not None
    assert (
        open_checkpoint(step, ReadOptions()).state.iteration == open_checkpoint(folder, ReadOptions()).state.iteration
    )


def test_a_pickle_is_never_run(folder: Path, tmp_path: Path) -> None:
    class Harm:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    (folder / "training_args.bin").write_bytes(pickle.dumps(Harm()))
    job = convert(folder, tmp_path / "same", options("hf-trainer"))
    assert "training_args.bin" in "".join(job.account.lost)
    torch.save({"state": {}, "param_groups": [Harm()]}, folder / "optimizer.pt")
    with pytest.raises(Untrusted, match=r"optimizer\.pt"):
        open_checkpoint(folder, ReadOptions())
    assert not (tmp_path / "ran").exists()


def test_an_index_that_leads_out_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder.parent / "secret.safetensors")
    weights = {"model.norm.weight": "../secret.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    with pytest.raises(Untrusted, match=r"\.\."):
        open_checkpoint(folder, ReadOptions())


def test_counters_that_contradict_are_named(folder: Path) -> None:
    state = json.loads((folder / "trainer_state.json").read_text())
    (folder / "trainer_state.json").write_text(json.dumps({**state, "global_step": 7}))
    with pytest.raises(LayoutMismatch, match="global_step is 7, and the folder is called checkpoint-2"):
        open_checkpoint(folder, ReadOptions())
    for wrong in (-1, "2", None, 10**18, True):
        (folder / "trainer_state.json").write_text(json.dumps({**state, "global_step": wrong}))
        with pytest.raises(Unsupported, match="expected an object whose global_step is a number of steps"):
            open_checkpoint(folder, ReadOptions())
    (folder / "trainer_state.json").write_text("{")
    with pytest.raises(Corrupt, match="is no JSON"):
        open_checkpoint(folder, ReadOptions())


def test_random_states_of_missing_ranks_are_named(folder: Path) -> None:
    for rank in (0, 2):
        shutil.copy(folder / "rng_state.pth", folder / f"rng_state_{rank}.pth")
    with pytest.raises(Incomplete, match=r"rng_state_1.pth: missing"):
        open_checkpoint(folder, ReadOptions())
    (folder / "rng_state_2.pth").rename(folder / "rng_state_1.pth")
    assert open_checkpoint(folder, ReadOptions()).parallel.dp == 2


def test_two_optimizers_are_not_guessed_apart(tmp_path: Path) -> None:
    shutil.copytree(ACCELERATE, tmp_path / "step_2")
    shutil.copy(ACCELERATE / "optimizer.bin", tmp_path / "step_2" / "optimizer_1.bin")
    with pytest.raises(Unsupported, match=r"optimizer_1.bin: a second optimizer; no file says which trains what"):
        open_checkpoint(tmp_path / "step_2", ReadOptions())


@pytest.mark.timeout(120)
def test_a_stranger_cannot_make_the_ways_to_pair_optimizers_endless(tmp_path: Path) -> None:
    """Fifteen optimizers of thirty models, of which all but the last may be of any: 155 million ways, none of which leads anywhere."""
    step = Path(shutil.copytree(ACCELERATE, tmp_path / "step_2"))
    for number in range(1, 30):
        shutil.copy(step / "model.safetensors", step / f"model_{number}.safetensors")
    for number in range(1, 15):
        shutil.copy(step / "optimizer.bin", step / f"optimizer_{number}.bin")
    found = open_checkpoint(step, ReadOptions(role="actor"))
    assert [text for _, text in found.notes.lines if "the first is taken" in text and text.endswith("scheduler_1.bin")]
    (step / "optimizer_14.bin").write_bytes(b"")
    assert open_checkpoint(step, ReadOptions(role="model_29")).optimizer is None


def test_without_a_schedule_the_reader_is_told(folder: Path) -> None:
    (folder / "scheduler.pt").unlink()
    lines = [text for _, text in open_checkpoint(folder, ReadOptions()).notes.lines]
    assert "scheduler.pt is not there, without which the trainer does not load its optimizer, and says nothing" in lines


@pytest.mark.parametrize("source", [TRAINER, GOLDENS / "adapter"], ids=lambda path: path.name)
def test_random_states_are_kept_derived_or_left_out(source: Path, tmp_path: Path) -> None:
    for rng, ranks, names in (
        ("keep", None, ["rng_state.pth"]),
        ("derive", 2, ["rng_state_0.pth", "rng_state_1.pth"]),
        ("drop", None, []),
    ):
        target = tmp_path / rng
        job = convert(source, target, options("hf-trainer", rng=rng, dp=ranks))
        assert sorted(path.name for path in target.glob("rng_state*")) == names
        assert job.lossless == (rng != "drop")
    first, second = (torch.load(tmp_path / "derive" / f"rng_state_{rank}.pth", weights_only=False) for rank in (0, 1))
    assert not torch.equal(first["cpu"], second["cpu"])
    torch.Generator().set_state(first["cpu"])
    same = torch.load(tmp_path / "keep" / "rng_state.pth", weights_only=False)
    assert torch.equal(same["cpu"], torch.load(source / "rng_state.pth", weights_only=False)["cpu"])


def test_the_loss_scale_goes_there_and_back(folder: Path, tmp_path: Path) -> None:
    scaler = {
        "scale": 1024.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
        "_growth_tracker": 1,
    }
    torch.save(scaler, folder / "scaler.pt")
    convert(folder, tmp_path / "zero", options("deepspeed"))
    convert(tmp_path / "zero", tmp_path / "back", options("hf-trainer"))
    assert torch.load(tmp_path / "back" / "scaler.pt") == scaler


def test_like_must_be_of_the_same_trainer_and_model(tmp_path: Path) -> None:
    for like, error, text in (
        (ACCELERATE, UsageError, "has no optimizer.pt"),
        (GOLDENS / "adapter", CheckpointError, "fit in no way"),
        (tmp_path / "nothing", UsageError, "has no optimizer.pt"),
    ):
        with pytest.raises(error, match=text):
            prepare(TRAINER, options("hf-trainer", like=str(like)))


def test_groups_that_the_trainer_deals_otherwise(tmp_path: Path) -> None:
    """One group of all, as many loops have it: biases and norms are in the Trainer's second, and their decay is said to change or not."""
    shutil.copytree(ACCELERATE, tmp_path / "step_2")

    def all_in_one(tree: Any) -> None:
        order = [*range(27)]
        first = tree["param_groups"][0]
        tree["param_groups"] = [{**first, "params": order}]

    file = tmp_path / "step_2" / "optimizer.bin"
    made = torch.load(file, weights_only=True)
    source = open_checkpoint(ACCELERATE, ReadOptions())
    names = [name for group in source.state.groups for name in group.params]
    place = {name: number for number, name in enumerate(names)}
    known = source.family
    order = [name for name in known.order if name in place]  # type: ignore[attr-defined]
    made["state"] = {number: made["state"][place[name]] for number, name in enumerate(order)}
    all_in_one(made)
    torch.save(made, file)
    assert [len(group.params) for group in open_checkpoint(tmp_path / "step_2", ReadOptions()).state.groups] == [27]
    convert(tmp_path / "step_2", tmp_path / "dcp", options("dcp"))
    convert(tmp_path / "dcp", tmp_path / "trainer", options("hf-trainer"))
    groups = torch.load(tmp_path / "trainer" / "optimizer.pt", weights_only=True)["param_groups"]
    assert [(len(group["params"]), group["weight_decay"]) for group in groups] == [(16, 0.01), (11, 0.01)]
    assert torch.load(tmp_path / "trainer" / "scheduler.pt", weights_only=True)["base_lrs"] == [0.01, 0.01]


@pytest.mark.parametrize("by", ["megatron", "universal", "hf-trainer"])
def test_experts_of_transformers_4_stay_one_by_one(by: str, tmp_path: Path) -> None:
    """Its optimizer counts each expert's matrices, and so does what goes back to it, number by number, whatever it was meanwhile."""
    run = tmp_path / "run"
    shutil.copytree(OF_4, run / "checkpoint-2")
    like = {} if by == "hf-trainer" else {"like": str(run)}
    convert(OF_4, tmp_path / "there", options(by, **({"tp": 1} if by == "megatron" else {})))
    convert_step(find(tmp_path / "there", ReadOptions()), tmp_path / "new", options("transformers", **like))
    new, old = (torch.load(at / "optimizer.pt", weights_only=True) for at in (tmp_path / "new" / "checkpoint-2", OF_4))
    assert [group["params"] for group in new["param_groups"]] == [group["params"] for group in old["param_groups"]]
    assert new["state"].keys() == old["state"].keys()
    for number, states in old["state"].items():
        assert all(torch.equal(new["state"][number][name], value) for name, value in states.items())
    mine, theirs = (load_file(at / "model.safetensors") for at in (tmp_path / "new" / "checkpoint-2", OF_4))
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], value) for name, value in theirs.items())


def test_an_expert_that_no_token_has_reached_is_no_frozen_one(folder: Path, tmp_path: Path) -> None:
    """Torch makes no states without a gradient; Megatron has them of all experts, or of none that is frozen."""
    shutil.rmtree(folder)
    shutil.copytree(OF_4, folder)
    source = open_checkpoint(folder, ReadOptions())
    names = [name for group in source.state.groups for name in group.params]
    experts = [number for number, name in enumerate(names) if ".layers.0.mlp.experts.1." in name]
    edit(folder / "optimizer.pt", lambda tree: [tree["state"].pop(number) for number in experts])
    job = convert(folder, tmp_path / "there", options("megatron", tp=1))
    (text,) = [text for text in job.report.lost if "experts" in text]
    assert text.startswith(
        "3 of these are of experts that no token has reached, since others of their layer have states"
    )
    zeros = convert(folder, tmp_path / "zero", options("deepspeed"))
    assert any(
        text.startswith("zeros for states that were never made")
        and text.endswith("; they count the steps of their group")
        for _, text in zeros.report.lines
    ), zeros.report.lines
