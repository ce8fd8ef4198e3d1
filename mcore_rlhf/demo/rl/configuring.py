"""What the trainer takes from a run's configuration (``--config configs/grpo_megatron.yaml``), and what it cannot.

Model and data stay the tiny ones: ``model_dir``, ``train_data_paths`` and lengths are not looked at. Everything that
decides about checkpoints is taken: folders, when to save, what to keep, what to resume from.
"""

from __future__ import annotations

from pathlib import Path

from mcore_rlhf.demo.rl.settings import Settings
from mcore_rlhf.demo.rl.task import Reversal
from mcore_rlhf.errors import Problems, Unsupported
from mcore_rlhf.manager.config.run import RunConfig, load_run_config


def options_of(path: Path) -> dict[str, object]:
    """The options of the command line, by name, that a configuration gives.

    Args:
        path: A YAML file.

    Raises:
        UsageError: It is no configuration.
        Unsupported: It asks for something that this trainer has not; everything is named.
    """
    config = load_run_config(path)
    _require_supported(config, path)
    runner, parallel, optim = config.runner, config.actor.parallel, config.actor.optim
    return {
        "algorithm": config.algorithm.name,
        "tp": parallel.tp,
        "pp": parallel.pp,
        "vpp": parallel.vpp if parallel.vpp > 1 else None,
        "steps": _steps(config),
        "save_interval": config.save_every or 0,
        "output_dir": Path(runner.output_dir),
        "experiment_name": runner.experiment_name,
        "async_save": config.checkpoint.asynchronous,
        "resume": "none" if runner.resume_dir is None else str(runner.resume_dir),
        "keep_last": config.checkpoint.keep.last,
        "seed": config.data.seed,
        "dtype": config.actor.precision,
        "lr": optim.lr,
        "lr_decay_steps": optim.lr_decay_iters or 500,
        "prompts_per_step": config.data.rollout_batch_size,
        "group_size": config.algorithm.group_size,
        "must_exist": config.checkpoint.must_exist,
        "hyper": _settings(config),
    }


def _settings(config: RunConfig) -> Settings:
    algorithm, default = config.algorithm, Settings()
    return Settings(
        updates=algorithm.n_minibatches,
        clip_ratio=algorithm.clip.low,
        value_clip=algorithm.clip.value or default.value_clip,
        kl_coef=algorithm.kl.coefficient,
        kl_target=algorithm.kl.target,
        kl_horizon=algorithm.kl.horizon or default.kl_horizon,
        entropy_coef=algorithm.entropy_bonus,
        discount=default.discount if algorithm.gamma is None else algorithm.gamma,
        gae_lambda=default.gae_lambda if algorithm.gae_lambda is None else algorithm.gae_lambda,
        temperature=algorithm.sampling_params.temperature,
    )


def _steps(config: RunConfig) -> int:
    """``max_steps``, or the whole steps of all epochs."""
    if config.runner.max_steps > 0:
        return config.runner.max_steps
    prompts = (config.runner.max_epochs or 1) * len(Reversal())
    return max(1, prompts // config.data.rollout_batch_size)


def _require_supported(config: RunConfig, path: Path) -> None:
    parallel = config.actor.parallel
    problems = Problems()
    for name, found, wanted in (
        ("actor.training_backend", config.actor.training_backend, "megatron"),
        ("actor.parallel.cp", parallel.cp, 1),
        ("actor.parallel.ep", parallel.ep, 1),
        ("actor.parallel.etp", parallel.etp, 1),
        ("actor.parallel.pipeline_layout", parallel.pipeline_layout, None),
        ("critic.parallel", config.critic.parallel if config.critic else parallel, parallel),
    ):
        if found != wanted:
            problems.add(Unsupported, f"{path}: {name} is {found}; this trainer has only {wanted}")
    if config.actor.precision not in ("bf16", "fp32"):
        problems.add(
            Unsupported, f"{path}: actor.precision is {config.actor.precision}; this trainer has bf16 and fp32"
        )
    if config.algorithm.sampling_params.temperature == 0:
        problems.add(Unsupported, f"{path}: algorithm.sampling_params.temperature is 0; this trainer samples")
    problems.raise_if_any()
