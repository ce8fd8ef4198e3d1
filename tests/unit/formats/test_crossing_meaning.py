"""What a model computes goes along between the families, is refused, or is said to be lost: never anything else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mcore_rlhf.convert import ConvertOptions, Job, convert
from mcore_rlhf.core.account import Report
from mcore_rlhf.core.facts import Fate
from mcore_rlhf.errors import Lossy, Unsupported
from mcore_rlhf.families.crossing.groups import OF_HUGGINGFACE, DealtGroups
from mcore_rlhf.families.module import ModuleState
from mcore_rlhf.families.options import ReadOptions, WriteOptions
from mcore_rlhf.families.passes import crossed
from mcore_rlhf.families.source import ParamGroup, Source
from mcore_rlhf.formats.registry import format_named, open_checkpoint
from tests.helpers.conversions import GOLDENS
from tests.unit.formats.hf_by_hand import CONFIG, llama, write

MISTRAL = {**CONFIG, "architectures": ["MistralForCausalLM"], "model_type": "mistral"}
ORIGIN = "mcore_rlhf_origin"


def megatron(**args: object) -> Source:
    """A genuine checkpoint of Megatron's with a Llama's tensors, as if it had been trained with other arguments."""
    source = open_checkpoint(GOLDENS / "tp1_bf16_do", ReadOptions())
    source.state.args.update(args)
    return source


def config_of(source: Source, **options: Any) -> dict[str, Any]:
    native = crossed(source, format_named("hf"), WriteOptions(**options)).family
    assert isinstance(native, ModuleState)
    return dict(native.config)


def lines(source: Source, fate: Fate, **options: Any) -> str:
    notes = crossed(source, format_named("hf"), WriteOptions(**options)).notes
    return "\n".join(text for found, text in notes.lines if found is fate)


def to(source: Path, target: Path, to: str, *, strict: bool = False, **options: Any) -> Job:
    write = WriteOptions(**options)
    return convert(source, target, ConvertOptions(to=to, fsync=False, workers=1, strict=strict, write=write))


def args_in(root: Path) -> dict[str, Any]:
    return dict(open_checkpoint(root, ReadOptions()).state.args)


@pytest.mark.parametrize(
    ("args", "could"),
    [
        ({"softmax_type": "off-by-one"}, "no architecture"),
        ({"qk_l2_norm": True}, "no architecture"),
        ({"glu_linear_offset": 1.0}, "no architecture"),
        ({"activation_func_clamp_value": 7.0}, "no architecture"),
        ({"window_size": (4, 3)}, "no architecture"),
        ({"position_embedding_type": "none"}, "no architecture"),
        ({"rotary_percent": 0.5, "no_rope_freq": 4}, "these could say it: SmolLM3ForCausalLM"),
        ({"layernorm_zero_centered_gamma": True}, "no architecture"),
    ],
)
def test_what_transformers_cannot_compute_is_refused(args: dict[str, Any], could: str) -> None:
    name, value = next(iter(args.items()))
    with pytest.raises(Unsupported) as caught:
        config_of(megatron(**args))
    message = str(caught.value)
    assert name in message
    assert str(value) in message
    assert could in message
    assert "--ignore-field" in message
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("args", "model_type"),
    [
        ({"no_rope_freq": 4}, "smollm3"),
        ({"no_rope_freq": 4, "window_size": (4, 0)}, "smollm3"),
        ({"rotary_percent": 0.5}, "phi3"),
        ({"window_size": (4, 0), "window_attn_skip_freq": 2}, "ministral"),
        ({"rotary_interleaved": True}, "ernie4_5"),
    ],
)
def test_another_class_says_what_llama_cannot(args: dict[str, Any], model_type: str) -> None:
    assert config_of(megatron(**args))["model_type"] == model_type


def test_a_window_makes_a_mistral_of_llamas_tensors() -> None:
    config = config_of(megatron(window_size=(4095, 0)))
    assert (config["model_type"], config["architectures"], config["sliding_window"]) == (
        "mistral", ["MistralForCausalLM"], 4096,
    )  # fmt: skip
    assert config_of(megatron())["model_type"] == "llama"
    assert config_of(megatron(window_size=(-1, 0)))["model_type"] == "llama"


def test_what_the_user_says_to_ignore_is_lost_and_said() -> None:
    source = megatron(qk_l2_norm=True, window_size=(4, 0))
    ignored = ("qk_l2_norm", "window_size", "no_such")
    assert config_of(source, ignore_fields=ignored)["model_type"] == "llama"
    said = lines(source, Fate.LOST, ignore_fields=ignored)
    assert "qk_l2_norm True: passed over" in said
    assert "window_size (4, 0): passed over" in said
    assert "no_such: the source has nothing of that name" in lines(source, Fate.NOTE, ignore_fields=ignored)


def test_arguments_that_are_not_there_have_megatrons_default() -> None:
    source = megatron()
    del source.state.args["layernorm_epsilon"]
    assert config_of(source)["rms_norm_eps"] == 1e-5  # transformers' own is 1e-6


def test_arguments_of_older_megatron_are_understood() -> None:
    """Before 0.16 the epsilon and the zero-centred norms had other names."""
    source = megatron(norm_epsilon=3e-6, apply_layernorm_1p=False)
    del source.state.args["layernorm_epsilon"], source.state.args["layernorm_zero_centered_gamma"]
    assert config_of(source)["rms_norm_eps"] == 3e-6
    assert "do not say" not in lines(source, Fate.DERIVED)
    source.state.args["apply_layernorm_1p"] = True
    with pytest.raises(Unsupported, match="layernorm_zero_centered_gamma is True"):
        config_of(source)


def test_arguments_that_are_not_there_are_said() -> None:
    source = megatron()
    del source.state.args["rotary_base"]
    assert "do not say rotary_base: taken as Megatron's own" in lines(source, Fate.DERIVED)


def test_arguments_of_a_fork_wait_in_the_config_and_are_said() -> None:
    source = megatron(rlinf_rollout={"top_p": 0.9}, slime_mode="async")
    waiting = config_of(source)[ORIGIN]["args"]
    assert (waiting["rlinf_rollout"], waiting["slime_mode"]) == ({"top_p": 0.9}, "async")
    assert "lr" not in waiting
    assert "slime_mode" in lines(source, Fate.KEPT)
    assert "slime_thing" in lines(megatron(slime_thing=object()), Fate.LOST)


def test_a_reference_config_counts_and_what_it_changes_is_said(tmp_path: Path) -> None:
    reference = config_of(megatron())
    (tmp_path / "config.json").write_text(json.dumps({**reference, "rope_theta": 7e5}))
    source = megatron(rotary_base=10000)
    assert config_of(source, reference_config=str(tmp_path))["rope_theta"] == 7e5
    assert "rotary_base is 10000" in lines(source, Fate.CHANGED, reference_config=str(tmp_path))
    with pytest.raises(Unsupported, match="qk_l2_norm"):
        config_of(megatron(qk_l2_norm=True), reference_config=str(tmp_path))


@pytest.mark.parametrize("window", [7, None, "absent"])
def test_mistral_stays_mistral_with_its_window(window: object, tmp_path: Path) -> None:
    config = {**MISTRAL, "bos_token_id": 7, "my_own": [1, 2]} | (
        {} if window == "absent" else {"sliding_window": window}
    )
    write(tmp_path / "hf", llama(), config)
    job = to(tmp_path / "hf", tmp_path / "mcore", "megatron", strict=True)
    assert any("my_own" in text for fate, text in job.report.lines if fate is Fate.KEPT)
    expected = {7: (6, 0), None: None, "absent": (4095, 0)}
    assert args_in(tmp_path / "mcore")["window_size"] == expected[window]
    to(tmp_path / "mcore", tmp_path / "back", "hf", strict=True)
    back = json.loads((tmp_path / "back" / "config.json").read_text())
    assert back == config


def test_what_megatron_changed_since_is_in_the_config_and_said(tmp_path: Path) -> None:
    write(tmp_path / "hf", llama(), {**MISTRAL, "sliding_window": 7, "bos_token_id": 7})
    to(tmp_path / "hf", tmp_path / "mcore", "megatron")
    source = open_checkpoint(tmp_path / "mcore", ReadOptions())
    source.state.args["window_size"] = (11, 0)
    config = config_of(source)
    assert (config["model_type"], config["sliding_window"], config["bos_token_id"]) == ("mistral", 12, 7)
    assert "window_size is (11, 0), and was (6, 0)" in lines(source, Fate.CHANGED)
    source.state.args.update(window_size=None, window_attn_skip_freq=None)
    assert config_of(source)["sliding_window"] is None


def test_a_window_that_a_llama_got_makes_a_mistral_of_it(tmp_path: Path) -> None:
    write(tmp_path / "hf", llama(), {**CONFIG, "bos_token_id": 7})
    to(tmp_path / "hf", tmp_path / "mcore", "megatron")
    source = open_checkpoint(tmp_path / "mcore", ReadOptions())
    source.state.args["window_size"] = (11, 0)
    config = config_of(source)
    assert (config["model_type"], config["sliding_window"], "bos_token_id" in config) == ("mistral", 12, False)


def test_a_class_of_another_name_is_known(tmp_path: Path) -> None:
    config = {**CONFIG, "model_type": "my_llama", "auto_map": {"AutoModelForCausalLM": "modeling_my.Mine"}}
    write(tmp_path / "hf", llama(), config)
    to(tmp_path / "hf", tmp_path / "mcore", "megatron", strict=True)
    to(tmp_path / "mcore", tmp_path / "back", "hf", strict=True)
    back = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (back["model_type"], back["auto_map"]) == (config["model_type"], config["auto_map"])


def test_arguments_of_a_fork_come_back(tmp_path: Path) -> None:
    write(tmp_path / "hf", llama(), {**CONFIG, ORIGIN: {"args": {"slime_mode": "async", "lr": 1.0}}})
    to(tmp_path / "hf", tmp_path / "mcore", "megatron")
    assert args_in(tmp_path / "mcore")["slime_mode"] == "async"


def test_strict_refuses_what_is_ignored(tmp_path: Path) -> None:
    write(tmp_path / "hf", llama(), {**CONFIG, "hidden_act": "gelu"})
    with pytest.raises(Unsupported, match="hidden_act gelu"):
        to(tmp_path / "hf", tmp_path / "no", "megatron")
    with pytest.raises(Lossy, match="hidden_act 'gelu': passed over"):
        to(tmp_path / "hf", tmp_path / "no", "megatron", strict=True, ignore_fields=("hidden_act",))
    job = to(tmp_path / "hf", tmp_path / "mcore", "megatron", ignore_fields=("hidden_act",))
    assert not job.lossless


@pytest.mark.parametrize(
    ("fields", "lost"), [(["lion", "adam"], True), (["lion", "lion"], False), (["adam", "muon"], False)]
)
def test_lion_beside_adam_trains_so_in_megatron_alone(fields: list[str], lost: bool) -> None:
    kinds: dict[str, dict[str, object]] = {
        "lion": {"betas": (0.9, 0.99)}, "adam": {"betas": (0.9, 0.999), "eps": 1e-8}, "muon": {"momentum": 0.9},
    }  # fmt: skip
    groups = [ParamGroup({"lr": 1e-3, **kinds[kind]}, params=(f"{at}.weight",)) for at, kind in enumerate(fields)]
    said = Report.of(OF_HUGGINGFACE, DealtGroups(groups)).lost
    assert any("Lion of 1 param groups beside Adam" in text for text in said) is lost
