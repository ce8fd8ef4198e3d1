"""The options of all commands: each one is written down once, with its help.

All options of a conversion default to None, which means *not given*: then the ``--config`` file decides, and after it
the defaults of :class:`~.job.ConversionJob`, whose fields have the same names.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .guard import DEBUG, JSON

if TYPE_CHECKING:
    from mcore_rlhf.formats.base import ReadOptions


def _remember_json(ctx: typer.Context, value: bool) -> bool:
    ctx.meta[JSON] = value
    return value


def _remember_debug(ctx: typer.Context, value: bool) -> bool:
    ctx.meta[DEBUG] = value
    return value


def _option(*names: str, help: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, show_default=False, **more)


# Everywhere
Debug = Annotated[bool, _option("--debug", help="Show the traceback of an error.", callback=_remember_debug)]
Json = Annotated[
    bool, _option("--json", help="Print JSON alone on standard output.", callback=_remember_json, is_eager=True)
]
CheckpointPath = Annotated[
    Path,
    typer.Argument(
        help="A run's root, a step, a role's folder, or a checkpoint's own folder.", metavar="PATH", show_default=False
    ),
]

# Reading
Role = Annotated[
    str | None, _option("--role", help="Whose model, where a step holds several: actor, critic, …", metavar="NAME")
]
Step = Annotated[
    int | None, _option("--step", help="Which iteration, where the tracker does not decide.", metavar="N", min=0)
]
RulesFile = Annotated[
    Path | None, _option("--rules", help="YAML: how parameters are cut that no table knows.", metavar="FILE")
]
Stubs = Annotated[
    list[str] | None,
    _option("--stub", help="A pickled class to load as an inert stub; may be repeated.", metavar="NAME"),
]
Workers = Annotated[
    int | None, _option("--workers", help="Files at a time. [default: one per CPU, at most 8]", metavar="N", min=1)
]

# What the target is to be
SourceFolder = Annotated[
    str | None,
    typer.Argument(
        help="A run's root, a step, a role's folder, or a checkpoint's own; may come from --config.",
        metavar="SRC",
        show_default=False,
    ),
]
TargetFolder = Annotated[
    str | None,
    typer.Argument(
        help="The folder to write, as its framework is given it to load; may come from --config.",
        metavar="DST",
        show_default=False,
    ),
]
To = Annotated[str | None, _option("--to", help="Format to write. [default: megatron]", metavar="FORMAT")]
Tp = Annotated[
    int | None, _option("--tp", help="Tensor-parallel degree. Omitted degrees keep the source's.", metavar="N", min=1)
]
Pp = Annotated[int | None, _option("--pp", help="Pipeline stages.", metavar="N", min=1)]
Vpp = Annotated[int | None, _option("--vpp", help="Model chunks per pipeline stage.", metavar="N", min=1)]
Ep = Annotated[int | None, _option("--ep", help="Expert-parallel degree.", metavar="N", min=1)]
Etp = Annotated[int | None, _option("--etp", help="Tensor-parallel degree of experts.", metavar="N", min=1)]
Dp = Annotated[
    int | None,
    _option("--dp", help="Data-parallel degree. [default: the source's ranks ÷ TP·PP·CP]", metavar="N", min=1),
]
PipelineLayout = Annotated[
    str | None,
    _option("--pipeline-layout", help="Layers per chunk (3,5,4) or Megatron's own string (Et*3|t*5L).", metavar="S"),
]
Dtype = Annotated[str | None, _option("--dtype", help="Element type of the parameters.", metavar="bf16|fp16|fp32")]
NoOptimizer = Annotated[bool | None, _option("--no-optimizer/--keep-optimizer", help="Leave the optimizer out.")]
Optimizer = Annotated[
    str | None, _option("--optimizer", help="Kind of optimizer state to write.", metavar="distributed|plain")
]
Rng = Annotated[
    str | None,
    _option(
        "--rng", help="RNG states. [default: keep for an unchanged layout, else derive]", metavar="keep|derive|drop"
    ),
]
VocabSize = Annotated[
    int | None, _option("--vocab-size", help="True number of words, where args lack it.", metavar="N", min=1)
]
PaddedVocabSize = Annotated[
    int | None,
    _option("--padded-vocab-size", help="Rows of the embedding. [default: Megatron's own rule]", metavar="N", min=1),
]

ZeroStage = Annotated[
    int | None,
    _option(
        "--zero-stage", help="ZeRO stage of a DeepSpeed target. [default: the source's]", metavar="0-3", min=0, max=3
    ),
]
ReferenceConfig = Annotated[
    Path | None,
    _option("--reference-config", help="The model's Hugging Face folder, or its config.json.", metavar="DIR"),
]
TransformerImpl = Annotated[
    str | None,
    _option(
        "--transformer-impl",
        help="Whose parameter names a Megatron target made of Hugging Face's has.",
        metavar="local|transformer_engine",
    ),
]

# A Hugging Face folder, adapters, and parts of a model
MaxShardSize = Annotated[
    str | None,
    _option("--max-shard-size", help="Largest file of a Hugging Face folder. [default: 5GB]", metavar="SIZE"),
]
Tokenizer = Annotated[
    Path | None,
    _option("--tokenizer", help="Folder whose tokenizer files go into a Hugging Face folder.", metavar="DIR"),
]
GenerationConfig = Annotated[
    Path | None,
    _option("--generation-config", help="generation_config.json for a Hugging Face folder.", metavar="FILE"),
]
EosTokenIds = Annotated[
    str | None, _option("--eos-token-ids", help="Tokens that end a text, for models with several.", metavar="N,N")
]
Masters = Annotated[bool | None, _option("--masters/--params", help="Take the parameters from their fp32 masters.")]
WithOptimizer = Annotated[
    bool | None,
    _option("--with-optimizer/--without-optimizer", help="Keep the optimizer beside a Hugging Face folder."),
]
MergeAdapter = Annotated[
    bool | None, _option("--merge-adapter/--keep-adapter", help="Add a LoRA adapter to its base weights.")
]
BaseModel = Annotated[Path | None, _option("--base-model", help="The model that an adapter belongs to.", metavar="DIR")]
Only = Annotated[
    str | None,
    _option(
        "--only",
        help="A part of the model: role, attribute or both (actor.policy), or a pattern with *.",
        metavar="FILTER",
    ),
]
ExcludeFrozen = Annotated[
    bool | None, _option("--exclude-frozen/--include-frozen", help="Leave out parameters that are not trained.")
]

# How a conversion runs
Config = Annotated[
    Path | None,
    _option("--config", help="YAML conversion job; options given here win over the file.", metavar="FILE"),
]
TrustReplicas = Annotated[
    bool | None, _option("--trust-replicas/--compare-replicas", help="Take replicas as equal without comparing.")
]
MaxMemory = Annotated[
    str | None, _option("--max-memory", help="Memory for buffers and windows. [default: 2GiB]", metavar="SIZE")
]
NoFsync = Annotated[bool | None, _option("--no-fsync/--fsync", help="Do not wait for the disk before publishing.")]
Verify = Annotated[
    bool | None,
    _option("--verify/--no-verify", help="Afterwards verify the target deeply, and diff it with the source."),
]
Strict = Annotated[bool | None, _option("--strict/--no-strict", help="Refuse what loses anything (exit code 1).")]
Overwrite = Annotated[bool | None, _option("--overwrite/--no-overwrite", help="Replace an existing checkpoint.")]


def read_options(
    role: str | None,
    step: int | None,
    rules: Path | None,
    stubs: list[str] | None,
    only: str | None = None,
    exclude_frozen: bool | None = None,
) -> ReadOptions:
    """How the commands that only read open a checkpoint."""
    from mcore_rlhf.formats.base import ReadOptions
    from mcore_rlhf.models.rules import Rules, read_rules

    read = read_rules(rules) if rules is not None else Rules()
    return ReadOptions(role, step, read, tuple(stubs or ()), only=only, exclude_frozen=bool(exclude_frozen))


def default_workers() -> int:
    """One per CPU that this process may use, at most 8: more do not make a disk faster."""
    import os

    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(8, usable)
