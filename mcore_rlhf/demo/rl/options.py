"""The command line of ``python -m mcore_rlhf.demo.train``, as plain values, and what is wrong with one.

Mistakes are told in the trainer's own words, before Megatron answers with an assertion.

Of a run's configuration (``--config configs/grpo_megatron.yaml``), everything that decides about checkpoints is taken: folders, when
to save, what to keep, what to resume from. Model and data stay the tiny ones: ``model_dir``, ``train_data_paths`` and lengths are not
looked at.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from mcore_rlhf.demo.configs import Parallel, TinyGPT, Training
from mcore_rlhf.demo.rl.settings import Algorithm, RlSettings
from mcore_rlhf.demo.rl.task import VOCABULARY, Reversal
from mcore_rlhf.errors import CheckpointError, Problems, Unsupported, UsageError

if TYPE_CHECKING:
    from mcore_rlhf.manager.config.run import RunConfig


_HEADS = TinyGPT().num_attention_heads

_LARGEST_SEED = 2**32 - 1  # NumPy's

_SCHEDULE = (
    "This trainer goes on with the schedule that the run began with: give --lr, --lr-decay-steps, --prompts-per-step and "
    "--group-size as then, or begin a new run: --resume none, and an --experiment-name of its own."
)


@dataclass(frozen=True, slots=True)
class Options:
    """One run of the trainer.

    Args:
        algorithm: GRPO or PPO.
        tp: Tensor-parallel ranks.
        pp: Pipeline stages.
        vpp: Model chunks per stage; None for one. The data-parallel size is what is left of the world.
        steps: The step to end at, counted from the start of the run, not of this process.
        save_interval: Steps between two checkpoints; 0 for none at all.
        output_dir: Where runs are; checkpoints go to ``output_dir/experiment_name/checkpoints``.
        experiment_name: Name of this one.
        async_save: Write checkpoints behind the training loop.
        resume: ``auto`` (the newest whole step, or a new run), ``none``, a step's number or its path.
        keep_last: Checkpoints that are kept; None for all.
        metrics: File to which rank 0 appends one line per step; None for none.
        seed: Of everything random.
        dropout: Hidden and attention dropout while training.
        dtype: Type of the parameters.
        optimizer: Megatron's distributed optimizer or the plain one.
        layers: Decoder layers.
        hidden_size: Width.
        lr: Highest learning rate.
        lr_decay_steps: Steps of its cosine; not the length of the run, which may change on resume.
        prompts_per_step: Prompts per step, over all ranks.
        group_size: Answers per prompt.
        micro_batches: Forward passes of one rank per update; None for one per pipeline stage.
        config: A run's configuration, whose values stand where the command line says nothing.
        must_exist: Whether ``resume auto`` without a step is an error; only a configuration changes it.
        hyper: Hyper-parameters that only a configuration changes.
    """

    algorithm: Algorithm = "grpo"
    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    steps: int = 60
    save_interval: int = 0
    output_dir: Path = Path("runs")
    experiment_name: str = "demo"
    async_save: bool = False
    resume: str = "auto"
    keep_last: int | None = None
    metrics: Path | None = None
    seed: int = 1234
    dropout: float = 0.0
    dtype: Literal["bf16", "fp32"] = "bf16"
    optimizer: Literal["distributed", "plain"] = "distributed"
    layers: int = 2
    hidden_size: int = 64
    lr: float = 2e-3
    lr_decay_steps: int = 500
    prompts_per_step: int = 16
    group_size: int = 8
    micro_batches: int | None = None
    config: Path | None = None
    must_exist: bool = False
    hyper: RlSettings = field(default_factory=RlSettings)

    @property
    def root(self) -> Path:
        """The manager's folder."""
        return self.output_dir / self.experiment_name / "checkpoints"

    @property
    def warmup_steps(self) -> int:
        """Steps in which the learning rate rises."""
        return 5

    @property
    def settings(self) -> RlSettings:
        """What the algorithm is told."""
        own = {name: getattr(self, name) for name in ("algorithm", "prompts_per_step", "group_size", "seed")}
        return replace(self.hyper, **own)

    @property
    def passes(self) -> int:
        """Micro-batches of one rank per update."""
        return self.micro_batches or self.pp

    def parallel(self, world_size: int) -> Parallel:
        """The layout on so many processes.

        Raises:
            UsageError: They cannot be divided, or the layers cannot.
        """
        dp, rest = divmod(world_size, self.tp * self.pp)
        if rest or not dp:
            raise UsageError(
                f"{world_size} processes cannot be divided into TP{self.tp}×PP{self.pp}\n"
                f"Start a multiple of {self.tp * self.pp} (torchrun --nproc-per-node), or change --tp and --pp."
            )
        chunks = self.pp * (self.vpp or 1)
        if self.layers % chunks:
            raise UsageError(
                f"{self.layers} layers cannot be divided into {chunks} model chunks; give --layers a multiple of {chunks}"
            )
        return Parallel(tp=self.tp, pp=self.pp, vpp=self.vpp, dp=dp)

    def model(self, task: Reversal) -> TinyGPT:
        """The policy."""
        return TinyGPT(
            num_layers=self.layers,
            hidden_size=self.hidden_size,
            kv_channels=self.hidden_size // 4,
            ffn_hidden_size=2 * self.hidden_size,
            seq_length=task.seq_length,
            vocab_size=len(VOCABULARY),
            make_vocab_size_divisible_by=4,
            position_embedding_type="learned_absolute",  # the task is about places: learned in half the steps
            dtype=self.dtype,
            dropout=self.dropout,
        )

    def training(self, dp: int) -> Training:
        """How the policy and the critic are trained."""
        settings = self.settings
        return Training(
            optimizer=self.optimizer,
            micro_batch_size=settings.micro_batch_size(dp, self.passes),
            global_batch_size=settings.samples_per_step,
            lr=self.lr,
            min_lr=self.lr / 20,
            lr_warmup_iters=self.warmup_steps,
            train_iters=self.lr_decay_steps,
            weight_decay=0.01,
            seed=self.seed,
        )


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Read a command line; ends the process on ``--help`` and on a mistake, as argparse does.

    Args:
        arguments: Without the program's name; those of the process if not given.

    Raises:
        UsageError: ``--config`` names no configuration.
        Unsupported: It asks for something that this trainer has not.
    """
    parser = _parser()
    given = parser.parse_args(arguments)
    if given.config is not None:
        parser.set_defaults(**options_of(given.config))
        given = parser.parse_args(arguments)
    names = (each.name for each in fields(Options))
    found = Options(**{name: getattr(given, name) for name in names if hasattr(given, name)})
    found = replace(found, vpp=None) if found.vpp == 1 else found
    if wrong := list(mistakes(found)):
        parser.error("\n".join(wrong))
    return found


def _parser() -> argparse.ArgumentParser:
    default = Options()
    parser = argparse.ArgumentParser(
        prog="python -m mcore_rlhf.demo.train",
        description="Train a tiny GPT to write numbers backwards, by GRPO or PPO on real megatron-core. Run it under torchrun.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    _add_layout(parser, default)
    _add_checkpoints(parser, default)
    _add_model(parser, default)
    return parser


def _add_layout(parser: argparse.ArgumentParser, default: Options) -> None:
    group = parser.add_argument_group("what and where")
    group.add_argument("--config", type=Path, metavar="FILE", help="as configs/grpo_megatron.yaml; options win over it")
    group.add_argument("--algorithm", choices=("grpo", "ppo"), default=default.algorithm, help="how to train")
    group.add_argument("--tp", type=_positive, default=default.tp, metavar="T", help="tensor-parallel ranks")
    group.add_argument("--pp", type=_positive, default=default.pp, metavar="P", help="pipeline stages")
    group.add_argument("--vpp", type=_positive, default=default.vpp, metavar="V", help="model chunks per stage")
    group.add_argument("--steps", type=_positive, default=default.steps, metavar="N", help="step to end at")
    group.add_argument("--seed", type=int, default=default.seed, help="of everything random")
    group.add_argument("--metrics", type=Path, default=default.metrics, metavar="FILE", help="one JSON line per step")


def _add_checkpoints(parser: argparse.ArgumentParser, default: Options) -> None:
    group = parser.add_argument_group("checkpoints")
    group.add_argument("--save-interval", type=_natural, default=default.save_interval, metavar="K", help="0: never")
    group.add_argument("--output-dir", type=Path, default=default.output_dir, metavar="D", help="where runs are")
    group.add_argument("--experiment-name", default=default.experiment_name, metavar="E", help="name of this run")
    group.add_argument("--async-save", action="store_true", help="write behind the training loop")
    group.add_argument("--resume", default=default.resume, metavar="auto|none|STEP|PATH", help="from where to go on")
    group.add_argument("--keep-last", type=_positive, default=default.keep_last, metavar="N", help="all if not given")


def _add_model(parser: argparse.ArgumentParser, default: Options) -> None:
    group = parser.add_argument_group("model and hyper-parameters")
    group.add_argument("--dropout", type=float, default=default.dropout, metavar="P", help="while training")
    group.add_argument("--dtype", choices=("bf16", "fp32"), default=default.dtype, help="of the parameters")
    group.add_argument("--optimizer", choices=("distributed", "plain"), default=default.optimizer, help="Megatron's")
    group.add_argument("--layers", type=_positive, default=default.layers, help="decoder layers")
    group.add_argument("--hidden-size", type=_positive, default=default.hidden_size, help="width, a multiple of 4 · TP")
    group.add_argument("--lr", type=float, default=default.lr, help="highest learning rate")
    group.add_argument("--lr-decay-steps", type=_positive, default=default.lr_decay_steps, help="steps of its cosine")
    group.add_argument("--prompts-per-step", type=_positive, default=default.prompts_per_step, help="over all ranks")
    group.add_argument("--group-size", type=_positive, default=default.group_size, help="answers per prompt")
    group.add_argument(
        "--micro-batches", type=_positive, default=default.micro_batches, help="one per stage if not given"
    )


def _positive(text: str) -> int:
    return _at_least(text, 1)


def _natural(text: str) -> int:
    return _at_least(text, 0)


def _at_least(text: str, least: int) -> int:
    number = int(text)
    if number < least:
        raise argparse.ArgumentTypeError(f"expected a number from {least}, found {number}")
    return number


def mistakes(options: Options) -> Iterator[str]:
    """All that cannot be, one line each, as far as the command line alone can tell."""
    yield from _of_numbers(options)
    yield from _of_layout(options)
    yield from _of_resume(options.resume)


def _of_numbers(options: Options) -> Iterator[str]:
    if not 0 <= options.dropout < 1:
        yield f"--dropout: expected a probability from 0 to less than 1, found {options.dropout}"
    if not (math.isfinite(options.lr) and options.lr > 0):
        yield f"--lr: expected a positive number, found {options.lr}"
    if options.lr_decay_steps <= options.warmup_steps:
        least = options.warmup_steps + 1
        yield f"--lr-decay-steps: expected at least {least}, one more than the warm-up takes, found {options.lr_decay_steps}"
    largest = _LARGEST_SEED - 100 * (options.pp - 1)  # Megatron adds 100 per pipeline stage
    if not 0 <= options.seed <= largest:
        yield f"--seed: expected a number from 0 to {largest}, found {options.seed}"


def _of_layout(options: Options) -> Iterator[str]:
    if _HEADS % options.tp:
        yield f"--tp: expected a divisor of the {_HEADS} attention heads, found {options.tp}"
    if options.hidden_size < _HEADS:
        yield f"--hidden-size: expected at least {_HEADS}, the number of attention heads, found {options.hidden_size}"
    if options.vpp is None:
        return
    if options.pp == 1:
        yield f"--vpp: {options.vpp} model chunks per stage need more than one stage: give --pp as well, or leave it out"
    elif options.passes % options.pp:
        yield f"--micro-batches: expected a multiple of --pp {options.pp} with --vpp, found {options.passes}"


def _of_resume(resume: str) -> Iterator[str]:
    """A run has several models, the frozen reference at least."""
    if resume.strip().lower() in ("", "auto", "none", "null") or resume.strip().isdecimal():
        return
    from mcore_rlhf.formats.registry import format_at

    path = Path(os.path.expandvars(resume.strip())).expanduser().absolute()
    if not path.is_dir() or format_at(path) is None:
        return
    step = _step_around(path)
    if step is None:
        where = "give a step's folder, global_step_N; mcore-rlhf convert writes one where no --role is given"
    else:
        where = f"give the step's folder: {step}"
    yield f"--resume: {path} is one model, and a run has several; {where}"


def _step_around(path: Path) -> Path | None:
    """The step that a role's folder, or an iteration in one, belongs to."""
    from mcore_rlhf.manager.run.steps import MANIFEST, step_of

    return next((each for each in path.parents[:2] if step_of(each) is not None or (each / MANIFEST).is_file()), None)


def in_own_words(error: CheckpointError) -> CheckpointError:
    """An error of a resume, without advice that only a trainer with more options could follow."""
    lines = str(error).splitlines()
    if not any("override_opt_param_scheduler" in line for line in lines):
        return error
    return type(error)("\n".join(_SCHEDULE if "override_opt_param_scheduler" in line else line for line in lines))


def options_of(path: Path) -> dict[str, object]:
    """The options of the command line, by name, that a configuration gives.

    Args:
        path: A YAML file.

    Raises:
        UsageError: It is no configuration.
        Unsupported: It asks for something that this trainer has not; everything is named.
    """
    from mcore_rlhf.manager.config.run import load_run_config  # pydantic and OmegaConf, for those who need them

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


def _settings(config: RunConfig) -> RlSettings:
    algorithm, default = config.algorithm, RlSettings()
    return RlSettings(
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
