"""The table of options: one row for each thing that a conversion, or the opening of a checkpoint, can be told.

The rows are fields of what ``_SECTIONS`` lists. Command line, YAML jobs, Python API and ``docs/reference/cli.md`` are made of them: which
options a command has, with help and headings; what a value must be; what a target format must take for an option to mean something.

**To add an option**, add a field with its row, and use it. Nothing else: ``--some-name`` and the job's key ``some_name`` exist
with the row; ``python -m tests.helpers.option_tables`` writes the page's tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from mcore_rlhf.errors import Problems, UsageError, shown
from mcore_rlhf.models.spec import Rules
from mcore_rlhf.storage.paths import ReadablePath, local_path

from .dist_parts import DistParts
from .format_options import FormatOptions
from .job_options import JobOptions
from .option_types import (
    ADAPTERS,
    CONTENT,
    CONVERTING,
    COUNT,
    DTYPE,
    FILE,
    FOLDER,
    HUGGING_FACE,
    IDS,
    LAYOUT,
    LIMITS,
    NAMES,
    PATTERN,
    PIPELINE,
    PYTHON_ONLY,
    SAFETY,
    SPEED,
    WORD,
    Option,
    Takes,
    flag,
    number,
    one_of,
    option,
    size,
    text,
)
from .read_options import DESCRIPTION_ROW, RULES_ROW, VOCABULARY_ROW
from .read_options import ReadOptions as ReadOptions
from .store_options import StoreOptions as StoreOptions

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from .source import Names
    from .trainer_files import RunFiles


@dataclass(frozen=True, slots=True)
class RunOf:
    """For whose run a target is: what its trainer makes, whatever the run is; empty for none.

    Args:
        name: The trainer.
        second_group: Parts of the names of parameters that its optimizer has in a param group of their own; None where nobody knows.
        wants_schedule: Whether it takes a scheduler's state from every file with an optimizer.
        parts: Where it has the parts of a ``torch_dist`` checkpoint; None where that is one folder.
        counts: Whether Megatron's iteration is its step; it looks for iteration 0 in every step otherwise.
        tag: What it calls DeepSpeed's tags, with ``{step}`` where that is the iteration; empty where any name is as good.
        shown: The folder of a run of the same trainer's that shows what it wants beside its models; empty where none was named.
        strategy: What its rank files say of their strategy; empty where they do not.
        beside: What is called how beside the tag of DeepSpeed's files; None where nothing lies there.
        shift: What is added to the source's iteration, where one of the two trainers has numbered it from 0.
        step: The number of the step where that is not DeepSpeed's count of updates; zero where nobody says.
        number: Which of several models it is whose files lie in one folder, from 0.
        trained: How many of those before it have an optimizer.
    """

    name: str = ""
    second_group: tuple[str, ...] | None = None
    wants_schedule: bool = False
    parts: DistParts | None = None
    counts: bool = True
    tag: str = ""
    shown: str = ""
    strategy: str = ""
    beside: RunFiles | None = None
    shift: int = 0
    step: int = 0
    number: int = 0
    trained: int = 0

    @property
    def adapted(self) -> bool:
        """See :class:`DistParts`."""
        return self.parts is not None and self.parts.adapted

    @property
    def arguments(self) -> Mapping[str, object]:
        """Arguments that its runs on Megatron have, whatever the source's has."""
        return {} if self.parts is None else self.parts.arguments


@dataclass(frozen=True, slots=True)
class WriteOptions(FormatOptions):
    """What a target is to be, and for whose run (``run_of``); None keeps what the source has. A folder that is a URL is a UsageError."""

    tp: int | None = option(
        COUNT, "Tensor-parallel degree. Omitted degrees keep the source's.", group=LAYOUT, more="For `deepspeed`: the source's, or 1.",
        takes=Takes.MODEL_PARALLEL,
    )  # fmt: skip
    pp: int | None = option(
        COUNT, "Pipeline stages.", group=LAYOUT, more="For `deepspeed`: the source's.", takes=Takes.MODEL_PARALLEL
    )
    vpp: int | None = option(
        COUNT, "Model chunks per pipeline stage.", group=LAYOUT, more="1 with one stage.", takes=Takes.MEGATRON
    )
    ep: int | None = option(COUNT, "Expert-parallel degree.", group=LAYOUT, takes=Takes.MEGATRON)
    etp: int | None = option(
        COUNT, "Tensor-parallel degree of experts.", group=LAYOUT, more="Without it, it follows TP where it did in the source.",
        takes=Takes.MEGATRON,
    )  # fmt: skip
    dp: int | None = option(
        COUNT,
        "Data-parallel degree.",
        group=LAYOUT,
        more="Where the default is not whole, or cannot hold the experts, the smallest that can. In Megatron's files it decides only "
        "how optimizer buckets are padded and what `args` say; for `deepspeed` it is the number of ranks, for `dcp` that of parts, and "
        "of files.",
        takes=Takes.DATA_PARALLEL,
        default="the source's ranks ÷ TP·PP·CP",
    )
    pipeline_layout: str | None = option(
        PIPELINE,
        "Layers per chunk (3,5,4) or Megatron's own string (Et*3|t*5L).",
        group=LAYOUT,
        more="Chunks stand in the order in which a token passes them. Counts that differ only in the first and last stage become "
        "Megatron's first/last options, others a string.",
        takes=Takes.MEGATRON,
    )
    hybrid_layer_pattern: str | None = option(
        PATTERN,
        "Make a GPTModel a HybridModel of these layers (*-*-), or such a one a GPTModel again (gpt).",
        group=LAYOUT,
        more="`|` marks stages. Attention and feed-forward in turn, as the model has them: see "
        "[hybrid models](formats-megatron.md#hybrid-models).",
        takes=Takes.MEGATRON,
    )
    dtype: str | None = option(
        DTYPE, "Element type of the parameters.", group=CONTENT, more="Rounded from their masters.", takes=Takes.DTYPE
    )
    no_optimizer: bool = flag("Leave the optimizer out.", "--keep-optimizer", group=CONTENT, more="It counts as lost.")
    optimizer: str | None = option(
        one_of("distributed", "plain"),
        "Kind of optimizer state to write.",
        group=CONTENT,
        takes=Takes.MEGATRON,
        default="the source's",
    )
    rng: str | None = option(
        one_of("keep", "derive", "drop"),
        "RNG states.",
        group=CONTENT,
        more="See [what is exact](../explanation/exactness.md).",
        takes=Takes.RNG,
        default="keep for an unchanged layout, else derive",
    )
    vocab_size: int | None = field(default=None, metadata={"option": VOCABULARY_ROW})
    padded_vocab_size: int | None = option(
        COUNT, "Rows of the embedding.", group=LAYOUT, takes=Takes.MEGATRON, default="Megatron's own rule",
        more="The rule: a multiple of `make_vocab_size_divisible_by` × TP; unchanged where TP is.",
    )  # fmt: skip
    zero_stage: int | None = option(
        number(0, 3, "0-3"),
        "ZeRO stage of a DeepSpeed target.",
        group=LAYOUT,
        more="Or that of its `ds_config`.",
        takes=Takes.ZERO_STAGE,
        default="the source's",
    )
    reference_config: str | None = field(default=None, metadata={"option": DESCRIPTION_ROW})
    like: str | None = option(
        FOLDER,
        "A checkpoint that the trainer itself wrote, or its run: what depends on that run is as there.",
        group=LAYOUT,
        more="Without it as in the source, or what the trainer does by default, and the report says so.",
        takes=Takes.LIKE,
    )
    transformer_impl: str | None = option(
        one_of("local", "transformer_engine"),
        "Whose parameter names a Megatron target made of Hugging Face's has.",
        group=LAYOUT,
        more="Without it: as before, otherwise Transformer Engine's.",
        takes=Takes.MEGATRON,
    )
    lr_limits: tuple[float, float] | None = option(
        LIMITS,
        "max_lr and min_lr of param groups that have none.",
        group=CONTENT,
        more="Megatron-core 0.19 finds a group by them: the `--lr` and `--min-lr` of the run that goes on.",
        takes=Takes.MEGATRON,
    )
    global_batch_size: int | None = option(
        COUNT, "Samples of a step, where the source's schedule counts steps and Megatron-LM's counts samples.", group=CONTENT,
        more="verl's, SkyRL's and AReaL's count steps, and say nowhere how many samples one has.", takes=Takes.MEGATRON,
        default="that of its `args`",
    )  # fmt: skip
    max_shard_size: int | None = option(
        size(),
        "Largest file of a Hugging Face folder.",
        group=HUGGING_FACE,
        more="Such as `2GB` or `512MiB`. No tensor is ever cut.",
        takes=Takes.MODEL_FOLDER,
        default="5GB",
    )
    tokenizer: str | None = option(
        FOLDER,
        "Folder whose tokenizer files go into a Hugging Face folder.",
        group=HUGGING_FACE,
        more="Without it, the source's own.",
        takes=Takes.MODEL_FOLDER,
    )
    generation_config: str | None = option(
        FILE,
        "generation_config.json for a Hugging Face folder.",
        group=HUGGING_FACE,
        more="Without it, that beside the tokenizer, then the source's.",
        takes=Takes.MODEL_FOLDER,
    )
    eos_token_ids: tuple[int, ...] = option(
        IDS,
        "Tokens that end a text, for models with several.",
        (),
        group=HUGGING_FACE,
        more="`1,2`: into `generation_config.json` and `config.json`.",
        takes=Takes.MODEL_FOLDER,
    )
    masters: bool = flag(
        "Take the parameters from their fp32 masters.",
        "--params",
        group=CONTENT,
        more="The masters themselves, as parameters.",
        takes=Takes.MASTERS,
    )
    with_optimizer: bool = flag(
        "Keep the optimizer beside a Hugging Face folder.",
        "--without-optimizer",
        group=HUGGING_FACE,
        more="Masters, moments, param groups and counters, in `optimizer/`.",
    )
    merge_adapter: bool = flag(
        "Add a LoRA adapter to its base weights.",
        "--keep-adapter",
        group=ADAPTERS,
        more="Computed in fp32 and rounded once, so that it counts as lossy. Not with `--to peft`.",
    )
    base_model: str | None = option(
        FOLDER,
        "The model that an adapter belongs to.",
        group=ADAPTERS,
        more="In any format, where the source is an adapter alone. With `--to peft`: what is written as the base's path.",
    )
    dequantize: bool = flag(
        "Make plain weights of fp8 elements and their scales.",
        "--keep-quantized",
        group=ADAPTERS,
        more="Computed in fp32 and rounded once, so that it counts as lossy. Without it quantized weights are refused, unless "
        "`--to hf` keeps them as they are.",
    )
    unused_patterns: bool = flag("Let patterns match no parameter.", takes=Takes.PATTERNS, commands=PYTHON_ONLY)
    ignore_fields: tuple[str, ...] = option(
        NAMES,
        "Pass over an argument, or a field of config.json, that the other family cannot express.",
        (),
        group=SAFETY,
        more="The target computes something else without it: it stands in the report as lost. May be repeated. "
        "[What they mean](what-fields-mean.md).",
        name="ignore_field",
    )
    rules: Rules = field(default_factory=Rules, metadata={"option": RULES_ROW})
    run_of: RunOf = field(default_factory=RunOf)

    def __post_init__(self) -> None:
        for given in (self.reference_config, self.tokenizer, self.generation_config, self.base_model, self.like):
            if given is not None:
                local_path(given)  # refuses URLs


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """How a conversion runs: ``read`` says how the source is read, ``write`` what the target is to be, ``trainer`` whose run it is for."""

    to: str = option(
        text("FORMAT"),
        "Format to write, or a trainer whose run to write.",
        "megatron",
        group=LAYOUT,
        more="A trainer (`rlinf`, `openrlhf`, …) gets a whole run folder to go on from: see [trainers](../how-to/another-trainers-run.md).",
        default="megatron",
    )
    read: ReadOptions = field(default_factory=ReadOptions)
    write: WriteOptions = field(default_factory=WriteOptions)
    workers: int = option(
        COUNT,
        "Files at a time.",
        2,
        group=SPEED,
        commands=("convert", "verify", "adopt"),
        default="one per CPU, at most 8",
    )
    max_memory: int = option(
        size(1 << 20),
        "Memory for buffers and windows.",
        2 << 30,
        group=SPEED,
        more="Of all workers together: `500MB`, `2GiB`.",
        commands=CONVERTING,
        default="2GiB",
    )
    fsync: bool = flag(
        "Do not wait for the disk before publishing.",
        "--fsync",
        True,
        group=SPEED,
        name="no_fsync",
        commands=CONVERTING,
        negated=True,
    )
    strict: bool = flag("Refuse what loses anything (exit code 1).", "--no-strict", group=SAFETY)
    overwrite: bool = flag(
        "Replace an existing checkpoint.",
        "--no-overwrite",
        group=SAFETY,
        more="By renaming; other folders are never replaced.",
        commands=CONVERTING,
    )
    resume: bool = flag(
        "Start anew where a conversion was killed.",
        "--resume",
        True,
        group=SPEED,
        more="Without it, the same conversion of the same source goes on there: at most one file per worker is made again.",
        name="no_resume",
        commands=CONVERTING,
        negated=True,
    )
    trust_replicas: bool = flag(
        "Take replicas as equal without comparing.",
        "--compare-replicas",
        group=SPEED,
        more="Replicas are copies of one tensor on several ranks.",
    )
    trainer: str = ""


_SECTIONS = {"read": ReadOptions, "write": WriteOptions, "run": ConvertOptions, "job": JobOptions}
_SECTIONS["store"] = StoreOptions


def _fields(section: str) -> Iterator[tuple[str, Field[Any]]]:
    """The fields of a section, those of ``read`` and ``write`` where ``run`` has them."""
    for place in fields(_SECTIONS[section]):
        if place.name in _SECTIONS:
            yield from _fields(place.name)
        else:
            yield section, place


def _collected() -> tuple[Option, ...]:
    """All rows, each with its name and the fields that it sets."""
    found: dict[str, Option] = {}
    for section, place in (*_fields("run"), *_fields("job"), *_fields("store")):
        row: Option | None = place.metadata.get("option")
        if row is not None:
            name = row.name or place.name
            at = found[name].at if name in found else ()
            found[name] = replace(row, name=name, at=(*at, f"{section}.{place.name}"))
    return tuple(found.values())


OPTIONS = _collected()
"""All options, in the order of the help."""


def of_command(command: str) -> tuple[Option, ...]:
    """The options that a command has."""
    return tuple(row for row in OPTIONS if command in row.commands)


def read_values(given: Mapping[str, Any], files: Mapping[str, ReadablePath] | None = None) -> dict[str, Any]:
    """Values as the library takes them.

    Args:
        given: By option, as a command line or a job file says it; None and what is empty is not said. What is no option is a text.
        files: The job file, of those that it says.

    Raises:
        UsageError: Values that an option cannot have, each by the option, or by file and key.
    """
    problems, found, rows = Problems(), dict[str, Any](), {row.name: row for row in OPTIONS}
    for name, value in given.items():
        try:
            if value not in (None, [], ()):
                found[name] = (rows[name].kind if name in rows else WORD).read(value)
        except ValueError as error:
            where = f"{files[name]}: {name}" if files and name in files else f"--{name.replace('_', '-')}"
            problems.add(UsageError, wrong(where, error, value))
    problems.raise_if_any()
    return found


def placed(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What values that were read mean for the library, by section: ``{"write": {"tp": 2}, "run": {"fsync": False}}``.

    Args:
        values: By option; what is not in it keeps its default.
    """
    made: dict[str, dict[str, Any]] = {section: {} for section in _SECTIONS}
    for row in OPTIONS:
        for section, place in _places(row) if row.name in values else ():
            made[section][place] = not values[row.name] if row.negated else values[row.name]
    return made


def refuse(to: Names, known: Sequence[Names], **sections: DataclassInstance) -> None:
    """Refuse options that mean nothing for a target, or have values that they cannot have.

    Args:
        to: The target's format.
        known: All formats, in the order in which they are named.
        sections: ``read``, ``write``, ``run``: the options' objects.

    Raises:
        UsageError: All that are wrong, by their names on the command line.
    """
    problems = Problems()
    for row, value in given(**sections):
        _check(row, value, to, known, problems)
    problems.raise_if_any()


def given(**sections: DataclassInstance) -> Iterator[tuple[Option, object]]:
    """The options that objects of the library give: those whose fields are not at their defaults, with their values."""
    for row in OPTIONS:
        for section, place in _places(row):
            holder = sections.get(section)
            if holder is not None and (value := getattr(holder, place)) != _default(holder, place):
                yield row, value


def _places(row: Option) -> Iterator[tuple[str, str]]:
    for at in row.at:
        section, _, place = at.partition(".")
        yield section, place


def _default(holder: DataclassInstance, name: str) -> object:
    (place,) = (place for place in fields(holder) if place.name == name)
    return place.default_factory() if place.default_factory is not MISSING else place.default


def _check(row: Option, value: object, to: Names, known: Sequence[Names], problems: Problems) -> None:
    if not row.is_for(to.takes):
        meant = " or ".join(f"--to {one.name}" for one in known if row.is_for(one.takes))
        text = f"{row.flag}: means nothing with --to {to.name}; it is for {meant}"
        problems.add(UsageError, text, "Leave it out, or say which format is meant.")
    try:
        row.kind.read(value)
    except ValueError as error:
        problems.add(UsageError, wrong(row.flag, error, value))


def wrong(where: str, error: ValueError, value: object) -> str:
    """What is said of a value that an option cannot have."""
    return (
        f"{where}: {error}"
        if "found" in str(error) or repr(value) in str(error)
        else f"{where}: {error}, found {shown(value, 200)}"
    )
