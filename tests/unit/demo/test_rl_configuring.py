"""The trainer with a run's configuration: what it takes, what wins, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mcore_rlhf.demo.rl.options import Options, options_of, parse
from mcore_rlhf.demo.rl.settings import RlSettings
from mcore_rlhf.errors import Unsupported, UsageError

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
GRPO, PPO = CONFIGS / "grpo_megatron.yaml", CONFIGS / "ppo_megatron.yaml"


def test_a_configuration_of_grpo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RUN_DIR", str(tmp_path))
    assert parse(["--config", str(GRPO)]) == Options(
        algorithm="grpo", tp=2, steps=3, save_interval=20, output_dir=tmp_path, experiment_name="grpo-1.5b-16x128",
        async_save=True, keep_last=3, lr=1e-6, prompts_per_step=128, group_size=16, config=GRPO,
        hyper=RlSettings(updates=4, kl_coef=0.001, kl_target=0.05, kl_horizon=10000, entropy_coef=0.0),
    )  # fmt: skip


def test_a_configuration_of_ppo_has_a_fixed_coefficient_and_no_group() -> None:
    options = parse(["--config", str(PPO)])
    assert (options.algorithm, options.tp, options.pp, options.group_size) == ("ppo", 4, 2, 1)
    assert (options.settings.kl_target, options.settings.kl_coef, options.settings.value_clip) == (None, 0.01, 0.5)
    assert (options.settings.discount, options.settings.gae_lambda, options.settings.seed) == (1.0, 0.95, 42)


def test_the_command_line_wins() -> None:
    found = parse(["--config", str(GRPO), "--tp", "1", "--group-size", "4", "--resume", "none", "--steps", "7"])
    assert (found.tp, found.group_size, found.resume, found.steps) == (1, 4, "none", 7)
    assert found == replace(parse(["--config", str(GRPO)]), tp=1, group_size=4, resume="none", steps=7)


def changed(folder: Path, *changes: tuple[str, str]) -> Path:
    text = GRPO.read_text()
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    path = folder / "changed.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("value", "name", "expected"),
    [
        ("resume_dir: null", "resume", "none"),
        ("resume_dir: 1840", "resume", "1840"),
        ("resume_dir: /a/b", "resume", "/a/b"),
    ],
)
def test_where_to_resume_from(tmp_path: Path, value: str, name: str, expected: object) -> None:
    assert options_of(changed(tmp_path, ("resume_dir: auto", value)))[name] == expected


def test_the_number_of_steps(tmp_path: Path) -> None:
    assert options_of(changed(tmp_path, ("max_steps: -1", "max_steps: 11")))["steps"] == 11
    assert options_of(changed(tmp_path, ("save_interval: 20", "save_interval: -1")))["save_interval"] == 0


def test_all_that_the_trainer_has_not_is_named(tmp_path: Path) -> None:
    path = changed(tmp_path, ("precision: bf16", "precision: fp16"), ("    pp: 1", "    pp: 1\n    ep: 2"))
    with pytest.raises(Unsupported) as refused:
        options_of(path)
    assert "actor.precision is fp16" in str(refused.value)
    assert "actor.parallel.ep is 2" in str(refused.value)


def test_no_configuration(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("runner: {}\n")
    with pytest.raises(UsageError):
        parse(["--config", str(tmp_path / "c.yaml")])
