r"""Convert DeepSpeed ZeRO checkpoints to universal ones, with the flags of DeepSpeed's ``ds_to_universal``.

    python tools/zero_to_universal.py --input_folder RUN/global_step100 --output_folder RUN/global_step100_uni
    python tools/zero_to_universal.py CKPT

The second form takes a run as OpenRLHF leaves it: for CKPT/_actor and CKPT/_critic, or for CKPT itself, the tag in `latest` becomes
`<tag>_uni`, and `latest_universal` names it once the conversion is complete. All ZeRO stages are read, 0 included; what is written loads
in stages 1, 2 and 3.

Source of the flags: DeepSpeed 0.19.8, ``checkpoint/ds_to_universal.py``; of the folders: OpenRLHF,
``examples/scripts/ckpt_ds_zero_to_universal.sh``.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from mcore_rlhf.cli.output import say
from mcore_rlhf.cli.scripts import command_line, exit_code_of, once_in_a_job
from mcore_rlhf.convert import Job, add_to_run, name_latest, prepare, publish_tag
from mcore_rlhf.errors import Incomplete, NotACheckpoint, Untrusted, UsageError
from mcore_rlhf.families.options import ConvertOptions, ReadOptions, WriteOptions
from mcore_rlhf.formats.universal import FORMAT
from mcore_rlhf.formats.universal.files import SUFFIX
from mcore_rlhf.storage.paths import beneath, cannot_open
from mcore_rlhf.storage.reading import read_line

ROLES = ("_actor", "_critic")
IGNORED = {
    "num_extract_workers": "nothing is extracted to disk: tensors are copied from file to file",
    "keep_temp_folder": "there is no temporary folder",
    "inject_missing_state": "what the files lack is always derived, or said",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script; returns the exit code."""
    args = parser().parse_args(argv)
    return exit_code_of(lambda: run(args), "interrupted; what was being converted was not published")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = command_line(__doc__)
    add = made.add_argument
    add("ckpt", nargs="?", type=Path, help="a run: its _actor and _critic, or itself, by the tag in latest")
    add("--input_folder", type=Path, help="one ZeRO checkpoint, such as RUN/global_step100")
    add("--output_folder", type=Path, help="the universal checkpoint; must not exist")
    add("--num_merge_workers", default=2, type=int, help="files written at the same time")
    add(
        "--no_strict",
        dest="strict",
        action="store_false",
        help="let patterns of universal_checkpoint_info match nothing",
    )
    ours = made.add_argument_group("not in DeepSpeed's script")
    ours.add_argument("--overwrite", action="store_true", help="replace an existing universal checkpoint")
    ours.add_argument(
        "--stub", action="append", default=[], metavar="NAME", help="a pickled class to load as an inert stub"
    )
    ours.add_argument("--no_fsync", action="store_true", help="do not wait for the disk before publishing")
    ignored = made.add_argument_group("accepted and ignored")
    ignored.add_argument("--num_extract_workers", type=int)
    ignored.add_argument("--keep_temp_folder", action="store_true", default=None)
    ignored.add_argument("--inject_missing_state", action="store_true", default=None)
    return made


def run(args: argparse.Namespace) -> None:
    """Convert one checkpoint, or those of a run."""
    pair = (args.input_folder, args.output_folder)
    if (args.ckpt is None) == (pair == (None, None)) or (None in pair and pair != (None, None)):
        raise UsageError("give either one run, or both --input_folder and --output_folder")
    for name, why in IGNORED.items():
        if getattr(args, name) is not None:
            say(f"note: --{name} is ignored: {why}")
    options = ConvertOptions(
        to=FORMAT.name,
        read=ReadOptions(stubs=tuple(args.stub)),
        write=WriteOptions(unused_patterns=not args.strict),
        workers=max(1, args.num_merge_workers),
        overwrite=args.overwrite,
        fsync=not args.no_fsync,
    )
    if args.ckpt is None:
        once_in_a_job(
            args,
            [args.output_folder],
            [args.input_folder],
            lambda: tell(convert_folder(args.input_folder, args.output_folder, options), args.output_folder),
        )
        return
    sources = {folder: tag_folder(folder) for folder in run_folders(args.ckpt)}
    targets = [folder / f"{source.name}{SUFFIX}" for folder, source in sources.items()]
    once_in_a_job(args, targets, list(sources.values()), lambda: convert_run(sources, options))


def convert_run(sources: Mapping[Path, Path], options: ConvertOptions) -> None:
    """The checkpoint of each folder into that folder."""
    jobs = {folder: add_to_run(source, folder, options) for folder, source in sources.items()}
    for folder, job in jobs.items():  # actor and critic go on together, from the same step
        name_latest(folder, job, options)
        tell(job, folder / job.tag)


def convert_folder(source: Path, target: Path, options: ConvertOptions) -> Job:
    """One checkpoint to exactly that folder, as ds_to_universal does; no tracker is written."""
    if source.resolve() == target.resolve():
        raise UsageError(f"{target}: --input_folder and --output_folder are the same")
    job = prepare(source, options)
    publish_tag(job, target, options)
    return job


def run_folders(ckpt: Path) -> list[Path]:
    """The folders of a run that have checkpoints of their own."""
    found = [ckpt / role for role in ROLES if (ckpt / role).is_dir()]
    return found or [ckpt]


def tag_folder(folder: Path) -> Path:
    """The checkpoint that ``latest`` names.

    Raises:
        NotACheckpoint: There is no ``latest``.
        Incomplete: It names nothing that is there.
    """
    latest = folder / "latest"
    if not latest.is_file():
        raise NotACheckpoint(
            f"{folder}: there is no file `latest`; expected a run of DeepSpeed, or one with _actor or _critic in it"
        )
    try:
        tag = read_line(latest)
    except OSError as error:
        raise cannot_open(error, latest) from error
    try:
        found = beneath(folder, tag)
    except Untrusted as error:
        raise Incomplete(f"{latest}: {error}") from None
    if not found.is_dir():
        raise Incomplete(
            f"{latest}: names {tag!r}, but there is no such folder\nWrite the tag of a checkpoint that is there into it."
        )
    return found


def tell(job: Job, target: Path) -> None:
    """Say what was converted."""
    source = job.source
    trained = sum(param.trainable for param in source.model.params)
    say(
        f"{source.format} {source.parallel} -> universal: {job.nbytes / 1e9:.2f} GB of tensors in {len(job.target.files)} files"
    )
    say(
        f"  {', '.join(source.states)} of {trained} parameters; {len(source.model.params) - trained} frozen ones and buffers"
    )
    for fate, text in job.report.lines:
        say(f"{fate.value}: {text}")
    say(f"written: {target}")
