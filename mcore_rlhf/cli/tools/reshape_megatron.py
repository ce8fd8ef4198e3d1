r"""Change the TP, PP and EP of a Megatron checkpoint, with the flags of Megatron-LM's ``tools/checkpoint/convert.py``.

    python tools/reshape_megatron.py --model-type GPT --load-dir OLD --save-dir NEW \
        --target-tensor-parallel-size 4 --target-pipeline-parallel-size 2

The optimizer, the scheduler and the counters come along, which Megatron's own script drops. All other options are those
of ``mcore-rlhf convert``, which this script is a thin front of.

Source of the flags and their defaults: Megatron-LM core_v0.16.1, ``tools/checkpoint/{convert,loader_core,saver_core}.py``.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mcore_rlhf.cli.output import say
from mcore_rlhf.cli.scripts import command_line, exit_code_of, once_in_a_job
from mcore_rlhf.convert import Job, convert, prepare
from mcore_rlhf.errors import NotACheckpoint, Unsupported, UsageError
from mcore_rlhf.families.options import ConvertOptions, ReadOptions, WriteOptions
from mcore_rlhf.models.spec import Rules, read_rules
from mcore_rlhf.storage.reading import read_json

KINDS = {"core": "core", "mcore": "core", "legacy": "legacy", "megatron": "legacy"}
"""Megatron's loaders and savers that read and write its own files, with their old names."""

IGNORED = {
    "megatron_path": "Megatron is not needed",
    "max_queue_size": "there is no queue: tensors are copied from file to file",
    "no_checking": "checks are always on",
    "position_embedding_type": "the files say it",
    "loader_transformer_impl": "the files say it",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script; returns the exit code."""
    args = parser().parse_args(argv)
    return exit_code_of(lambda: run(args), "interrupted; nothing was written")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = command_line(__doc__)
    add = made.add_argument
    add("--model-type", required=True, choices=["GPT", "BERT"], help="GPT; BERT is refused")
    add("--loader", default="core", help="core, mcore, legacy or megatron; the files themselves say which they are")
    add("--saver", default=None, help="the same as --loader")
    add("--load-dir", type=Path, required=True, help="root of the checkpoint, or one iter_XXXXXXX folder")
    add("--save-dir", type=Path, required=True, help="root of the new checkpoint; must not exist")
    add("--target-tensor-parallel-size", type=int, help="default: the source's")
    add("--target-pipeline-parallel-size", type=int, help="default: the source's")
    add("--target-expert-parallel-size", type=int, default=1, help="default: 1, as in Megatron")
    add("--true-vocab-size", type=int, help="words of the tokenizer; decides the padding of the embedding")
    add("--vocab-file", type=Path, help="vocab.json whose entries are counted instead")
    add("--saver-transformer-impl", choices=["local", "transformer_engine"], help="must be the source's")
    ours = made.add_argument_group("not in Megatron's script")
    add = ours.add_argument
    add("--target-virtual-pipeline-parallel-size", type=int, default=1, help="model chunks per stage; default: 1")
    add("--target-expert-tensor-parallel-size", type=int, help="default: as the source, relative to TP")
    add("--target-data-parallel-size", type=int, help="default: the source's ranks / (TP x PP x CP)")
    add("--rules", type=Path, help="rules for parameters that no table knows")
    add("--workers", type=int, default=2, help="files written at the same time")
    add("--overwrite", action="store_true", help="replace an existing checkpoint")
    ignored = made.add_argument_group("accepted and ignored")
    for name in IGNORED:
        flag = "--" + name.replace("_", "-")
        if name == "no_checking":
            ignored.add_argument(flag, action="store_true", default=None)
        else:
            ignored.add_argument(flag)
    return made


def run(args: argparse.Namespace) -> None:
    """Refuse what cannot be done, convert, and say what came along."""
    refuse(args)
    for name, why in IGNORED.items():
        if getattr(args, name) is not None:
            say(f"note: --{name.replace('_', '-')} is ignored: {why}")
    rules = read_rules(args.rules) if args.rules else Rules()
    words = true_vocab_size(args.true_vocab_size, args.vocab_file)
    write = WriteOptions(
        tp=args.target_tensor_parallel_size,
        pp=args.target_pipeline_parallel_size,
        ep=args.target_expert_parallel_size,
        etp=args.target_expert_tensor_parallel_size,
        vpp=args.target_virtual_pipeline_parallel_size,
        dp=args.target_data_parallel_size,
        vocab_size=words,
        rules=rules,
    )
    read = ReadOptions(rules=rules, vocab_size=words)
    options = ConvertOptions(read=read, write=write, workers=args.workers, overwrite=args.overwrite)
    if args.saver_transformer_impl is not None:
        refuse_other_names(args.saver_transformer_impl, args.load_dir, options)
    once_in_a_job(
        args,
        [args.save_dir],
        [args.load_dir],
        lambda: tell(convert(args.load_dir, args.save_dir, options), args.save_dir),
    )


def refuse(args: argparse.Namespace) -> None:
    """Refuse what Megatron's script may do and this one does not."""
    if args.model_type != "GPT":
        raise Unsupported(f"--model-type {args.model_type}: only GPT models (decoders) are converted")
    saver = args.saver or args.loader
    for flag, value in (("--loader", args.loader), ("--saver", saver)):
        if value not in KINDS:
            raise Unsupported(
                f"{flag} {value}: this script reshapes Megatron's own checkpoints; known: {', '.join(sorted(KINDS))}\n"
                "For other formats see `mcore-rlhf convert --to FORMAT`."
            )
    if KINDS[args.loader] != KINDS[saver]:
        raise Unsupported(
            f"--loader {args.loader} --saver {saver}: parameter names are kept as they are, so both must be the same kind\n"
            "core and mcore are one kind, legacy and megatron the other."
        )


def refuse_other_names(wanted: str, source: Path, options: ConvertOptions) -> None:
    """Refuse a transformer implementation that names its parameters in another way than the source's."""
    stored = prepare(source, replace(options, write=WriteOptions())).source.state.args.get("transformer_impl")
    if stored is not None and stored != wanted:
        raise Unsupported(
            f"--saver-transformer-impl {wanted}: the checkpoint was written with {stored}, and names are kept as they are\n"
            f"Leave the option out, and load the result with --transformer-impl {stored}."
        )


def true_vocab_size(given: int | None, vocab_file: Path | None) -> int | None:
    """Words of the tokenizer, from the number or from a JSON vocabulary; both must agree.

    Raises:
        CheckpointError: They do not, or the file is no JSON vocabulary.
    """
    if vocab_file is None:
        return given
    try:
        words = read_json(vocab_file)
    except FileNotFoundError:
        raise NotACheckpoint(f"--vocab-file {vocab_file}: no such file") from None
    except ValueError:
        words = None
    if not isinstance(words, dict) or not all(isinstance(index, int) for index in words.values()):
        raise Unsupported(
            f"--vocab-file {vocab_file}: expected JSON that maps words to numbers (vocab.json)\n"
            "For every other kind of tokenizer give the number of words with --true-vocab-size."
        )
    if given is not None and given != len(words):
        raise UsageError(f"--true-vocab-size {given}, but --vocab-file {vocab_file} has {len(words)} words")
    return len(words)


def tell(job: Job, target: Path) -> None:
    """Say what was converted, and what of it Megatron's own converter would have dropped."""
    source = job.source
    say(
        f"{source.parallel} -> {job.target.parallel}: {job.nbytes / 1e9:.2f} GB of tensors in {len(job.target.files)} files"
    )
    say("kept, which Megatron's own converter drops:")
    trained = sum(param.trainable for param in source.model.params)
    kept = [f"{', '.join(source.states)} of {trained} parameters"] if source.states else []
    kept += [f"{len(source.state.groups)} param groups with their step"] if source.state.groups else []
    kept += ["the learning-rate scheduler"] if source.state.scheduler is not None else []
    kept += ["the loss scaler"] if source.state.grad_scaler is not None else []
    kept += ["RNG states"] if any(fate.value == "kept" and "RNG" in text for fate, text in job.report.lines) else []
    say("\n".join(f"  {line}" for line in kept or ["nothing: the source has weights only"]))
    for fate, text in job.report.lines:
        say(f"{fate.value}: {text}")
    say(f"written: {target}")
