"""Three examples for the help of every command, and the installation of completion: what a newcomer asks first."""

from __future__ import annotations

import os
from pathlib import Path

import click
from click.shell_completion import get_completion_class

from mcore_rlhf.errors import UsageError
from mcore_rlhf.storage.paths import storage_error

FORMATS = "Formats: megatron, megatron-dist (torch_dist), deepspeed (ZeRO 0 to 3), universal, dcp (FSDP), hf, peft; they are detected."

EXAMPLES: dict[str, tuple[str, ...]] = {
    "inspect": (
        "mcore-rlhf inspect runs/grpo/checkpoints",
        "mcore-rlhf inspect CHECKPOINT --tensors linear_qkv",
        "mcore-rlhf inspect s3://bucket/run/global_step_50 --role actor --json",
    ),
    "plan": (
        "mcore-rlhf plan RUN --tp 4 --pp 1",
        "mcore-rlhf plan RUN --to hf --dtype bf16 --no-optimizer --reference-config MODEL",
        "mcore-rlhf plan --config job.yaml --copies",
    ),
    "convert": (
        "mcore-rlhf convert RUN NEW --tp 4 --pp 1 --verify",
        "mcore-rlhf convert RUN MODEL --to hf --dtype bf16 --no-optimizer --tokenizer BASE --reference-config BASE",
        "mcore-rlhf convert --config job.yaml --progress json",
    ),
    "verify": (
        "mcore-rlhf verify runs/grpo/checkpoints --deep",
        "mcore-rlhf verify CHECKPOINT --quick",
        "mcore-rlhf verify STEP --role actor --workers 16 --json",
    ),
    "diff": (
        "mcore-rlhf diff BEFORE AFTER",
        "mcore-rlhf diff MEGATRON_RUN HF_MODEL --states param --rtol 0.004",
        "mcore-rlhf diff RUN_A/global_step_50 RUN_B/global_step_50 --json",
    ),
    "report": (
        "mcore-rlhf report CHECKPOINT -o checkpoint.html",
        "mcore-rlhf report BEFORE AFTER -o conversion.html",
        "mcore-rlhf report runs/grpo/checkpoints -o run.html --trace run.json",
    ),
    "doctor": (
        "mcore-rlhf doctor",
        "mcore-rlhf doctor /scratch/runs",
        "mcore-rlhf doctor /scratch/runs --json",
    ),
    "configs": (
        "mcore-rlhf configs list",
        "mcore-rlhf configs show qwen2.5-7b-eval-tp1",
        "mcore-rlhf configs list --json",
    ),
    "demo": (
        "mcore-rlhf demo",
        "mcore-rlhf demo --dir /tmp/demo",
        "mcore-rlhf --debug demo --dir /tmp/demo",
    ),
    "steps": (
        "mcore-rlhf steps runs/grpo/checkpoints",
        'mcore-rlhf steps runs/grpo/checkpoints --quarantine 1840 --reason "reward collapsed"',
        "mcore-rlhf steps runs/grpo/checkpoints --release 1840",
    ),
    "prune": (
        "mcore-rlhf prune runs/grpo/checkpoints --keep-last 3 --dry-run",
        "mcore-rlhf prune runs/grpo/checkpoints --keep-last 3 --keep-best reward:max:2 --max-size 500GB",
        "mcore-rlhf prune runs/grpo/checkpoints --keep-every 100 --include-damaged --json",
    ),
    "interval": (
        "mcore-rlhf interval --root runs/grpo/checkpoints --mtbf-hours 8",
        "mcore-rlhf interval --step-seconds 45 --save-seconds 60 --stall-seconds 2 --mtbf-hours 8 --size 1.2TB",
        "mcore-rlhf interval --step-seconds 45 --save-seconds 60 --mtbf-hours 8 --every 50",
    ),
    "resume-check": (
        "mcore-rlhf resume-check --demo",
        "mcore-rlhf resume-check --steps 3 -- python train.py --output-dir {dir} --steps {steps} --resume {resume}",
        "mcore-rlhf resume-check --compare RUN_A RUN_B --control BROKEN --json",
    ),
    "adopt": (
        "mcore-rlhf adopt runs/grpo/checkpoints/global_step_1840",
        "mcore-rlhf adopt STEP --deep --workers 16",
        "mcore-rlhf adopt STEP --rules rules.yaml --json",
    ),
}
"""By command, what people type most."""

_PLACES = {
    "bash": "~/.local/share/bash-completion/completions/mcore-rlhf",
    "zsh": "~/.zfunc/_mcore-rlhf",
    "fish": "~/.config/fish/completions/mcore-rlhf.fish",
}
_THEN = {
    "bash": "New shells have it (with the package bash-completion).",
    "zsh": "Put this into ~/.zshrc, once: fpath+=~/.zfunc; autoload -Uz compinit; compinit",
    "fish": "New shells have it.",
}


def install_completion(ctx: click.Context, param: click.Parameter, shell: str | None) -> None:
    """Write a shell's completion script where the shell looks for it, and say so.

    Raises:
        UsageError: The shell is none that is known.
    """
    if shell is None or ctx.resilient_parsing:
        return
    name = Path(os.environ.get("SHELL", "")).name if shell == "auto" else shell
    maker = get_completion_class(name)
    if name not in _PLACES or maker is None:
        raise UsageError(f"--install-completion: {name or 'no shell'} is not known\nName one: {', '.join(_PLACES)}.")
    place = Path(_PLACES[name]).expanduser()
    text = maker(ctx.command, {}, "mcore-rlhf", "_MCORE_RLHF_COMPLETE").source()
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text, encoding="utf-8")
    except OSError as error:
        raise storage_error(error, place, "write") from error
    click.echo(f"{place} is written. {_THEN[name]}")
    ctx.exit()
