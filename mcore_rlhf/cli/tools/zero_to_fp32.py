r"""Write the fp32 weights of a DeepSpeed checkpoint as one model, with the flags of DeepSpeed's ``zero_to_fp32.py``.

    python tools/zero_to_fp32.py RUN OUTPUT                                 pytorch_model.bin, or shards with an index
    python tools/zero_to_fp32.py RUN OUTPUT --safe_serialization -t global_step100

RUN is the folder that has `latest`; a tag's folder or a universal checkpoint will do as well. Every ZeRO stage is read, 0 and
BF16_Optimizer included; frozen parameters and buffers come along, in fp32. Where all ranks of a job run it with one OUTPUT, one
writes, and the others wait for it.

Source of the flags: DeepSpeed 0.19.8, ``utils/zero_to_fp32.py``.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from mcore_rlhf.cli.output import say
from mcore_rlhf.cli.scripts import command_line, exit_code_of, once_in_a_job
from mcore_rlhf.consolidate import consolidate
from mcore_rlhf.errors import UsageError
from mcore_rlhf.families.options import ConvertOptions, ReadOptions, WriteOptions
from mcore_rlhf.storage.paths import parse_size


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script; returns the exit code."""
    args = parser().parse_args(argv)
    return exit_code_of(lambda: run(args), "interrupted; nothing was written", debug=args.debug)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = command_line(__doc__)
    add = made.add_argument
    add("checkpoint_dir", type=Path, help="the run's folder, which has `latest`")
    add("output_dir", type=Path, help="folder of the new files; must not exist")
    add("--max_shard_size", default="5GB", help="largest size of a file before another is begun; default: 5GB")
    add("--safe_serialization", action="store_true", help="safetensors instead of .bin")
    add("-t", "--tag", help="which checkpoint; default: that in `latest`")
    add("--exclude_frozen_parameters", action="store_true", help="leave frozen parameters out")
    add("-d", "--debug", action="store_true", help="show the traceback of an error")
    ours = made.add_argument_group("not in DeepSpeed's script")
    ours.add_argument("--workers", type=int, default=2, help="files written at the same time")
    ours.add_argument("--overwrite", action="store_true", help="replace what an earlier run wrote")
    ours.add_argument(
        "--stub", action="append", default=[], metavar="NAME", help="a pickled class to load as an inert stub"
    )
    return made


def run(args: argparse.Namespace) -> None:
    """Write the files, and say which."""
    try:
        largest = parse_size(args.max_shard_size)
    except ValueError as error:
        raise UsageError(f"--max_shard_size: {error}") from None
    options = ConvertOptions(
        read=ReadOptions(stubs=tuple(args.stub)),
        write=WriteOptions(max_shard_size=largest),
        workers=max(1, args.workers),
        overwrite=args.overwrite,
    )
    safetensors, frozen = args.safe_serialization, not args.exclude_frozen_parameters

    def write() -> None:
        for name in consolidate(
            args.checkpoint_dir, args.output_dir, options, safetensors=safetensors, frozen=frozen, tag=args.tag
        ):
            say(f"written: {args.output_dir / name}")

    once_in_a_job(args, [args.output_dir], [args.checkpoint_dir], write)
