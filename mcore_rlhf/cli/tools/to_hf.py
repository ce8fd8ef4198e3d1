r"""Write the weights of a training checkpoint as a Hugging Face folder, with the flags of slime's ``convert_torch_dist_to_hf.py``.

    python tools/to_hf.py --input-dir RUN --output-dir MODEL --origin-hf-dir THE_MODEL_THAT_WAS_TRAINED

RUN is whatever ``mcore-rlhf inspect`` takes: Megatron's root or one iteration, in either of its formats, DeepSpeed's,
universal or DCP. Files are written under a hidden name and published at once; every byte of the source is checked.

Source of the flags: THUDM/slime, ``tools/convert_torch_dist_to_hf.py``.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from mcore_rlhf.cli.output import say
from mcore_rlhf.cli.scripts import command_line, exit_code_of, once_in_a_job
from mcore_rlhf.convert import convert
from mcore_rlhf.errors import UsageError
from mcore_rlhf.families.options import ConvertOptions, ReadOptions, WriteOptions
from mcore_rlhf.formats.hf import FORMAT
from mcore_rlhf.storage.paths import parse_size

DEFAULT_CHUNK = "5GiB"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script; returns the exit code."""
    args = parser().parse_args(argv)
    return exit_code_of(lambda: run(args), "interrupted; nothing was written")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = command_line(__doc__)
    add = made.add_argument
    add("--input-dir", type=Path, required=True, help="the checkpoint: a root, a step, one iteration or tag")
    add("--output-dir", type=Path, required=True, help="folder of the new files; must not exist")
    add("--origin-hf-dir", type=Path, help="the model that was trained: its config.json and tokenizer are taken")
    add("-f", "--force", action="store_true", help="replace what an earlier run wrote")
    add(
        "--chunk-size",
        default=DEFAULT_CHUNK,
        help=f"largest size of a file before another is begun; default: {DEFAULT_CHUNK}",
    )
    add("--vocab-size", type=int, help="words without padding, where neither the checkpoint nor its config says it")
    add("--model-name", help="accepted and ignored: the files and the config say what it is")
    ours = made.add_argument_group("not in slime's script")
    ours.add_argument("--role", help="whose model, where a step holds several: actor, critic, ...")
    ours.add_argument("--dtype", help="bf16, fp16 or fp32; default: as the run computes")
    ours.add_argument("--workers", type=int, default=2, help="files written at the same time")
    return made


def run(args: argparse.Namespace) -> None:
    """Write the folder, and say what is in it."""
    try:
        largest = parse_size(args.chunk_size)
    except ValueError as error:
        raise UsageError(f"--chunk-size: {error}") from None
    origin = str(args.origin_hf_dir) if args.origin_hf_dir is not None else None
    write = WriteOptions(
        no_optimizer=True,
        vocab_size=args.vocab_size,
        reference_config=origin,
        tokenizer=origin,
        dtype=args.dtype,
        max_shard_size=largest,
    )
    read = ReadOptions(role=args.role, vocab_size=args.vocab_size)
    options = ConvertOptions(FORMAT.name, read, write, workers=max(1, args.workers), overwrite=args.force)

    def write_folder() -> None:
        job = convert(args.input_dir, args.output_dir, options)
        for fate, text in job.report.lines:
            say(f"{fate.value}: {text}")
        for name in (*(file.path for file in job.target.files), *job.target.texts):
            say(f"written: {args.output_dir / name}")

    once_in_a_job(args, [args.output_dir], [args.input_dir], write_folder)
