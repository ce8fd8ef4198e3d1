"""Holding the files against the stored arguments, before anything is believed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mcore_rlhf.core.account import Fate, Report
from mcore_rlhf.core.box import Shape
from mcore_rlhf.errors import CheckpointError, Incomplete, LayoutMismatch, Problems
from mcore_rlhf.layouts.parallel import ParallelConfig
from mcore_rlhf.layouts.pipeline import ModelChunk, model_chunks
from mcore_rlhf.models.megatron import second_matrix
from mcore_rlhf.models.spec import ModelSpec

from .arguments import Arguments
from .buffers import EMBEDDING
from .folders import file_ranks, numbers_in


def check_folders(args: Arguments, args_file: str, folders: Sequence[str], notes: Report) -> ParallelConfig:
    """The degrees that the arguments give, checked against the rank folders that are there.

    Raises:
        Incomplete: Folders are missing.
        LayoutMismatch: There are more folders than the arguments know, or other ones.
    """
    parallel = args.parallel() if args.values else _from_names(folders)
    if not args.values:
        notes.add(Fate.NOTE, f"{args_file} stores no args; the folder names are read as {parallel}")
    expected = {at.folder for at in file_ranks(parallel)}
    missing, extra = sorted(expected - set(folders)), sorted(set(folders) - expected)
    where = f"args in {args_file} say {parallel}, which is {len(expected)} rank folders"
    problems = Problems()
    if missing and extra:
        problems.add(
            LayoutMismatch,
            f"{where} ({_some(sorted(expected))}); found {len(folders)} ({_some(folders)})",
            "The files are of another layout than their args, or files of two checkpoints are mixed.",
        )
    elif missing:
        problems.add(
            Incomplete, f"{where}; missing: {_some(missing)}", "Copy the missing folders from the run's storage."
        )
    elif extra:
        problems.add(
            LayoutMismatch,
            f"{where}; not expected: {_some(extra)}",
            "Move them away if they are left over from another run.",
        )
    problems.raise_if_any()
    _note_ambiguous(parallel, folders, notes)
    return parallel


def _note_ambiguous(parallel: ParallelConfig, folders: Sequence[str], notes: Report) -> None:
    if parallel.ep > 1 and parallel.pp == 1:
        notes.add(
            Fate.NOTE, f"{folders[-1]}: its last number is an expert-parallel rank, not a pipeline stage, as args say"
        )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:6]) + (f", … ({len(names)})" if len(names) > 6 else "")


def _from_names(folders: Sequence[str]) -> ParallelConfig:
    """Degrees from folder names alone: two numbers are read as tensor and pipeline ranks."""
    numbers = [numbers_in(folder) for folder in folders]
    width = max(map(len, numbers))
    if width > 2:
        raise LayoutMismatch("the files store no args, and three numbers in folder names need them to be understood")
    tp = 1 + max(parts[0] for parts in numbers)
    pp = 1 + max(parts[1] for parts in numbers) if width == 2 else 1
    return ParallelConfig(tp=tp, pp=pp, etp=tp)


def check_against_arguments(
    args: Arguments, file: str, model: ModelSpec, chunks: Sequence[ModelChunk] | None, parallel: ParallelConfig
) -> None:
    """The model as found in the files must be the one that the arguments describe.

    Args:
        args: The arguments.
        file: Where they are stored.
        model: What the files hold.
        chunks: How the files deal the layers to model chunks; None where they do not.
        parallel: The degrees.

    Raises:
        LayoutMismatch: It is not; every contradiction is listed.
    """
    problems = Problems()

    def compare(what: str, found: int | None, name: str) -> None:
        said = args.optional(name)
        if said is not None and found is not None and found != said:
            problems.add(LayoutMismatch, f"{what}: found {found} in the files, but args.{name} is {said} in {file}")

    embedding = model.get(EMBEDDING)
    compare("decoder layers", model.num_layers, "num_layers")
    if embedding is not None:
        compare("embedding rows", embedding.global_shape[0], "padded_vocab_size")
        compare("hidden size", embedding.global_shape[1], "hidden_size")
    _check_qkv(args, file, model, problems)
    if not problems and chunks is not None:
        _check_chunks(args, file, model, chunks, parallel, problems)
    problems.raise_if_any()


def _check_qkv(args: Arguments, file: str, model: ModelSpec, problems: Problems) -> None:
    heads, channels = args.optional("num_attention_heads"), args.optional("kv_channels")
    if heads is None or channels is None or args.flag("attention_output_gate"):
        return
    groups = args.integer("num_query_groups", heads) if args.flag("group_query_attention") else heads
    rows = (heads + 2 * groups) * channels
    for spec in model.params:
        if spec.name.endswith("self_attention.linear_qkv.weight") and spec.global_shape[0] != rows:
            problems.add(
                LayoutMismatch,
                f"{spec.name}: {spec.global_shape[0]} rows, but {heads} heads and {groups} query groups of {channels} in the args "
                f"of {file} make {rows}",
            )
            return


def _check_chunks(
    args: Arguments,
    file: str,
    model: ModelSpec,
    chunks: Sequence[ModelChunk],
    parallel: ParallelConfig,
    problems: Problems,
) -> None:
    """Layers per chunk as the arguments would deal them, where they say enough to know."""
    if args.optional("num_layers") is None or args.values.get("heterogeneous_layers_config_path"):
        return
    try:
        expected = model_chunks(model.num_layers, parallel.pp, parallel.vpp, args.pipeline_split, args.mtp_layers)
    except CheckpointError as error:
        problems.add(LayoutMismatch, f"args in {file} cannot deal the layers that the files hold: {error}")
        return
    found = [chunk.num_layers for chunk in chunks]
    said = [chunk.num_layers for chunk in expected]
    if found != said:
        problems.add(LayoutMismatch, f"layers per model chunk: found {found} in the files, args in {file} say {said}")


def is_gated(shapes: Mapping[str, Shape], args: Arguments) -> bool:
    """Whether feed-forwards are gated, as their own shapes say: the first matrix is then twice as wide.

    Args:
        shapes: Of all parameters; stacked experts as they are stored, or as (experts, rows, columns).
        args: The run's arguments.

    Raises:
        LayoutMismatch: The arguments say otherwise: ``[gate; up]`` would be cut in the wrong places.
    """
    for name, first in shapes.items():
        second = shapes.get(second_matrix(name) or "")
        if second is None:
            continue
        width, inner = (first[-1], second[-2]) if name.endswith("weight1") else (first[0], second[1])
        gated = width == 2 * inner
        if "swiglu" in args.values and gated != args.gated:
            raise LayoutMismatch(
                f"{name} has shape {first} and {second_matrix(name)} {second}: the feed-forward is {'' if gated else 'not '}gated, "
                f"but args.swiglu is {args.values['swiglu']}\nThe args are not those of this model."
            )
        return gated
    return args.gated
