"""Three examples of every command, which its help shows."""

from __future__ import annotations

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
    "journal": (
        "mcore-rlhf journal runs/grpo/checkpoints",
        "mcore-rlhf journal runs/grpo/checkpoints --max-staleness 4",
        "mcore-rlhf journal runs/grpo/checkpoints --json",
    ),
    "watch": (
        "mcore-rlhf watch runs/grpo/checkpoints --to hf --into runs/grpo/hf --keep-last 3",
        "mcore-rlhf watch runs/grpo/checkpoints --to hf --role actor --into evals --run './eval.sh {path} {step}'",
        "mcore-rlhf watch runs/verl --to megatron --tp 8 --into runs/megatron --once",
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
    "will-resume": (
        "mcore-rlhf will-resume runs/grpo --trainer verl --config config.yaml",
        "mcore-rlhf will-resume outputs/checkpoint-500 --trainer trl@1.16.0 --json",
        "mcore-rlhf will-resume checkpoints --trainer megatron-lm --config arguments.txt --world-size 64",
    ),
    "adopt": (
        "mcore-rlhf adopt runs/grpo/checkpoints/global_step_1840",
        "mcore-rlhf adopt STEP --deep --workers 16",
        "mcore-rlhf adopt STEP --rules rules.yaml --json",
    ),
}
"""By command, what people type most."""
