"""Kinds of checkpoints that the goldens lack, made of them: other expert names, opaque states, loss scalers, old keys."""

from __future__ import annotations

import io
import pickle
import re
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rlhf.convert import convert
from mcore_rlhf.core.facts import Fate, Item, Kind
from mcore_rlhf.errors import Lossy
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.formats.registry import open_checkpoint
from mcore_rlhf.storage.urls import open_files
from mcore_rlhf.verify.differ import Comparison, Differ
from tests.helpers.conversions import GOLDENS, golden, options
from tests.helpers.damage import ITERATION, MODEL, copied, edited
from tests.helpers.independent_reader import Reading, differences, read
from tests.helpers.plain_load import plain_load, same

EXPERTS, PLAIN, MANY = "ep2dp2_moe_seq_bf16_do", "tp2pp2dp2_bf16_nodo", "tp2pp2dp2_bf16_do"
LOCAL = re.compile(r"(.*\.experts)\.local_experts\.(\d+)\.(linear_fc[12])\.weight")


def transformer_engine_grouped(model: dict[str, Any]) -> dict[str, Any]:
    """``experts.linear_fc1.weight0``, ``weight1``, …, then those of linear_fc2."""
    made: dict[str, Any] = OrderedDict()
    for layer in _by_layer(model):
        experts = [(m, value) for key, value in layer.items() if (m := LOCAL.fullmatch(key))]
        made.update((key, value) for key, value in layer.items() if ".local_experts." not in key)
        for matrix in ("linear_fc1", "linear_fc2"):
            made.update((f"{m[1]}.{matrix}.weight{m[2]}", value) for m, value in experts if m[3] == matrix)
    return made


def grouped(model: dict[str, Any]) -> dict[str, Any]:
    """``experts.weight1`` and ``weight2``: all local experts transposed in one matrix, used through ``view``."""
    made: dict[str, Any] = OrderedDict()
    for layer in _by_layer(model):
        experts = [(m, value) for key, value in layer.items() if (m := LOCAL.fullmatch(key))]
        made.update((key, value) for key, value in layer.items() if ".local_experts." not in key)
        for number, matrix in ((1, "linear_fc1"), (2, "linear_fc2")):
            each = [value.t() for m, value in experts if m[3] == matrix]
            if each:
                stacked = torch.stack(each)  # (experts, in, out)
                flat = stacked.reshape(stacked.shape[1], -1) if number == 1 else stacked.reshape(-1, stacked.shape[2])
                made[f"{experts[0][0][1]}.weight{number}"] = flat.contiguous()
    return made


def _by_layer(model: dict[str, Any]) -> list[dict[str, Any]]:
    parts: dict[str, dict[str, Any]] = {}
    for key, value in model.items():
        parts.setdefault(".".join(key.split(".")[:3]) if key.startswith("decoder.layers.") else key, {})[key] = value
    return list(parts.values())


@pytest.fixture(scope="module", params=[transformer_engine_grouped, grouped], ids=lambda change: change.__name__)
def renamed(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> tuple[Path, Reading]:
    """The weights of the mixture golden under other expert names."""
    source = tmp_path_factory.mktemp("renamed") / "source"
    convert(GOLDENS / EXPERTS, source, options(no_optimizer=True))
    (source / "mcore_rlhf.json").unlink()
    change: Callable[[dict[str, Any]], dict[str, Any]] = request.param
    for path in source.rglob(MODEL):
        with edited(path) as tree:
            tree["model"] = change(tree["model"])
            tree["args"].moe_grouped_gemm = True
    return source, read(source)


@pytest.mark.parametrize("write", [{"ep": 1}, {"ep": 4, "tp": 2, "pp": 2}, {"tp": 2, "etp": 1, "ep": 2}], ids=str)
def test_grouped_experts(tmp_path: Path, renamed: tuple[Path, Reading], write: dict[str, int]) -> None:
    source, before = renamed
    convert(source, tmp_path / "target", options(**write))
    assert differences(before, read(tmp_path / "target")) == []
    if len(write) == 3:
        return
    convert(tmp_path / "target", tmp_path / "back", options(ep=2, dp=2))
    for old, new in zip(before.ranks, read(tmp_path / "back").ranks, strict=True):
        assert same(old.model["model"], new.model["model"]) == []


def test_the_reader_sees_the_same_experts_in_grouped_form(renamed: tuple[Path, Reading]) -> None:
    """That the reader, too, understands the transposed form is checked against the golden that it was made of."""
    _, reading = renamed
    sequential = golden(EXPERTS).tensors
    for layer in range(4):
        base = f"decoder.layers.{layer}.mlp.experts."
        for matrix, number in (("linear_fc1", 1), ("linear_fc2", 2)):
            stacked = reading.tensors.get((f"{base}weight{number}", "param"))
            for expert in range(4):
                one = sequential[f"{base}local_experts.{expert}.{matrix}.weight", "param"]
                if stacked is None:
                    assert torch.equal(reading.tensors[f"{base}{matrix}.weight{expert}", "param"], one)
                else:
                    assert torch.equal(stacked[expert], one.t())


def test_a_loss_scaler_is_carried(tmp_path: Path) -> None:
    source = copied(PLAIN, tmp_path)
    scaler = {"scale": torch.tensor([4096.0]), "growth_tracker": 2, "hysteresis_tracker": 2}
    for path in source.rglob(MODEL):
        with edited(path) as tree:
            tree["optimizer"]["grad_scaler"] = scaler
    convert(source, tmp_path / "target", options(tp=4, pp=1, optimizer="distributed"))
    for path in (tmp_path / "target").rglob(MODEL):
        assert same(plain_load(path)["optimizer"]["grad_scaler"], scaler) == []


def test_steps_that_torch_keeps_as_tensors_are_carried(tmp_path: Path) -> None:
    """torch's AdamW has a 0-d ``step`` for each parameter."""
    source = copied(PLAIN, tmp_path)
    for path in source.rglob(MODEL):
        with edited(path) as tree:
            for state in tree["optimizer"]["optimizer"]["state"].values():
                state["step"] = torch.tensor(2.0)
    convert(source, tmp_path / "target", options(tp=1, pp=4))
    assert differences(golden(PLAIN), read(tmp_path / "target")) == []
    for path in (tmp_path / "target").rglob(MODEL):
        for state in plain_load(path)["optimizer"]["optimizer"]["state"].values():
            assert torch.equal(torch.as_tensor(state["step"]), torch.tensor(2.0))


def test_opaque_states_stay_with_their_tensor_parallel_rank(tmp_path: Path) -> None:
    source = copied(MANY, tmp_path)
    for path in source.rglob(MODEL):
        with edited(path) as tree:
            for key in tree["model"]:
                if key.endswith("linear_qkv._extra_state"):
                    tree["model"][key] = torch.tensor([int(path.parent.name[8:10]), len(key)], dtype=torch.uint8)
    convert(source, tmp_path / "stages", options(pp=4))
    for path in (tmp_path / "stages").rglob(MODEL):
        model = plain_load(path)["model"]
        value = model["decoder.layers.0.self_attention.linear_qkv._extra_state"]
        assert value.tolist() == [int(path.parent.name[8:10]), 55]
    job = convert(source, tmp_path / "ranks", options(tp=1))
    for path in (tmp_path / "ranks").rglob(MODEL):
        model = plain_load(path)["model"]
        assert [v for k, v in model.items() if k.endswith("linear_qkv._extra_state")] == [None, None]
    names = [f"decoder.layers.{layer}.self_attention.linear_qkv._extra_state" for layer in range(4)]
    (said,) = (line for fate, line in job.report.lines if fate is Fate.LOST)
    assert said.endswith(f"and are set to None: {', '.join(names)}")
    assert all(job.account.entries[Item(Kind.MODEL, name)].fate is Fate.LOST for name in names)
    assert not job.lossless
    with pytest.raises(Lossy):
        convert(source, tmp_path / "strict", replace(options(tp=1), strict=True))
    dist = convert(source, tmp_path / "dist", replace(options(), to="megatron-dist"))
    assert any(text.endswith(f"that of the first: {', '.join(names)}") for text in dist.account.lost)
    for target in ("ranks", "dist"):
        found = compare(source, tmp_path / target)
        assert [difference.name for difference in found.differences] == names, target
    assert compare(source, tmp_path / "stages").equal


def test_opaque_states_of_dense_modules_stay_with_their_expert_parallel_rank(tmp_path: Path) -> None:
    name, head = "decoder.layers.0.self_attention.linear_qkv._extra_state", "output_layer._extra_state"
    source = copied("ep2dp2_moe_seq_bf16_do", tmp_path)
    for path in source.rglob(MODEL):
        with edited(path) as tree:
            tree["model"][name] = torch.tensor([int(path.parent.name[-1])], dtype=torch.uint8)
            tree["model"][head] = torch.tensor([7], dtype=torch.uint8)
    assert convert(source, tmp_path / "same", options()).lossless
    assert compare(source, tmp_path / "same").equal
    for path in (tmp_path / "same").rglob(MODEL):
        assert plain_load(path)["model"][name].tolist() == [int(path.parent.name[-1])]
    lost = convert(source, tmp_path / "one", options(ep=1)).account.lost
    assert any(text.endswith(f"all have those of the first: {name}") for text in lost)
    lost = convert(source, tmp_path / "dist", replace(options(), to="megatron-dist")).account.lost
    assert any(text.endswith(f"that of the first: {name}") for text in lost)
    assert any(text.endswith(f"leaves out of torch_dist: {head}") for text in lost)
    assert [one.name for one in compare(source, tmp_path / "one").differences] == [name]
    assert {one.name for one in compare(source, tmp_path / "dist").differences} == {name, head}


@pytest.mark.parametrize(
    "empty", [torch.empty(0, dtype=torch.uint8), "saved", "pickled"], ids=["none", "saved", "pickled"]
)
def test_opaque_states_that_say_nothing_are_no_loss(empty: object, tmp_path: Path) -> None:
    """As Transformer Engine's modules have them without fp8: no elements, and None, saved or pickled."""
    saved = io.BytesIO()
    torch.save(None, saved)
    made = {"saved": saved, "pickled": torch.frombuffer(bytearray(pickle.dumps(None)), dtype=torch.uint8)}
    value = made.get(empty) if isinstance(empty, str) else empty
    source = copied(MANY, tmp_path)
    for path in source.rglob(MODEL):
        with edited(path) as tree:
            tree["model"].update({key: value for key in tree["model"] if key.endswith("linear_qkv._extra_state")})
    for to in ("megatron", "megatron-dist", "hf"):
        job = convert(
            source,
            tmp_path / to,
            replace(options(tp=1 if to != "hf" else None, no_optimizer=True, vocab_size=132), to=to),
        )
        assert not [text for text in job.account.lost if "opaque" in text or "no parameters" in text]
    assert compare(source, tmp_path / "megatron").equal


def compare(a: Path, b: Path) -> Comparison:
    """The differences between two checkpoints' parameters and values."""
    sources = [open_checkpoint(path, ReadOptions(optimizer=False)) for path in (a, b)]
    with open_files(sources[0].root) as bytes_a, open_files(sources[1].root) as bytes_b:
        return Differ(*sources, bytes_a, bytes_b).compare()


def test_a_buffer_that_no_optimizer_owns(tmp_path: Path) -> None:
    """The router's expert bias: fp32, replicated, in no buffer and no optimizer."""
    source = copied(EXPERTS, tmp_path)
    bias = torch.arange(4.0)
    for path in source.rglob(MODEL):
        with edited(path) as tree:
            model = tree["model"]
            tree["args"].moe_router_enable_expert_bias = True
            for key in [k for k in model if k.endswith("router.weight")]:
                model[key.replace("router.weight", "router.expert_bias")] = bias
    convert(source, tmp_path / "target", options(ep=4, tp=2))
    after = read(tmp_path / "target")
    assert differences(read(source), after) == []
    assert torch.equal(after.tensors["decoder.layers.3.mlp.router.expert_bias", "param"], bias)


def test_old_names_are_understood(tmp_path: Path) -> None:
    source = copied(PLAIN, tmp_path)
    for path in source.rglob(MODEL):
        with edited(path) as tree:
            tree["lr_scheduler"] = tree.pop("opt_param_scheduler")
            optimizer = tree["optimizer"]
            optimizer["fp32_from_fp16"] = optimizer.pop("fp32_from_fp16_params")
        path.rename(path.with_name("model_rng.pt"))
    convert(source, tmp_path / "target", options(tp=1))
    assert differences(golden(PLAIN), read(tmp_path / "target")) == []
    tree = plain_load(next((tmp_path / "target").rglob(MODEL)))
    assert tree["opt_param_scheduler"]["max_lr"] == pytest.approx(1e-3)


def test_without_args_the_folders_speak(tmp_path: Path) -> None:
    source = tmp_path / "source"
    convert(GOLDENS / MANY, source, options(no_optimizer=True))
    (source / "mcore_rlhf.json").unlink()
    for path in source.rglob(MODEL):
        with edited(path) as tree:
            del tree["args"]
    opened = open_checkpoint(source, ReadOptions())
    assert (opened.parallel.tp, opened.parallel.pp) == (2, 2)
    assert any("no args" in line for _, line in opened.notes.lines)
    assert opened.state.args == {}


def test_unknown_values_of_a_model_file_are_kept_or_said_to_be_lost(tmp_path: Path) -> None:
    source = copied(MANY, tmp_path)
    for number, path in enumerate(sorted(source.rglob(MODEL))):
        with edited(path) as tree:
            tree["run_name"] = "grpo"
            tree["of_this_rank"] = number
    job = convert(source, tmp_path / "target", options(tp=1))
    tree = plain_load(next((tmp_path / "target" / ITERATION).rglob(MODEL)))
    assert tree["run_name"] == "grpo"
    assert "of_this_rank" not in tree
    assert [line for line in job.report.lost if "of_this_rank" in line]
    assert not job.lossless
