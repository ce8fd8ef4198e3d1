"""The table of options: one row for each thing that a conversion, or the opening of a checkpoint, can be told.

The command line, the YAML jobs and the Python API are made of it: which options a command has, with their help; what a value
must be; and for which target formats an option means something, so that for all others it is refused and not passed over.

**To add an option**, add a row to :data:`OPTIONS`, and a field of the same name to ``ReadOptions`` or ``WriteOptions``
(:mod:`.base`) or ``ConvertOptions`` (:mod:`mcore_rlhf.convert`), with its default and type. Then use the field. Nothing
else: ``--some-name`` and the job's key ``some_name`` exist with the row; ``docs/reference/cli.md`` describes it (a test asks).
``at`` says where the value goes: ``write.some_name``, ``read.some_name``, ``run.some_name`` (``ConvertOptions``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcore_rlhf.core.dtype import FLOATING, dtype_of
from mcore_rlhf.errors import Problems, UsageError, shown
from mcore_rlhf.storage.sizes import parse_size

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

MEGATRON = ("megatron", "megatron-dist")
EVERY = (*MEGATRON, "deepspeed", "universal", "dcp", "hf", "peft")
"""All target formats, as the registry names them."""
READING = ("inspect", "plan", "convert", "verify", "diff")
PLANNING = ("plan", "convert")
CONVERTING = ("convert",)
PYTHON_ONLY = ()


@dataclass(frozen=True, slots=True)
class Kind:
    """What a value may be.

    Args:
        read: What the library takes, from what a command line, a YAML file or a caller in Python gives; what was read once
            is read again as itself. Raises ValueError.
        word: The type of one value on the command line.
        metavar: What stands for it in the help.
        least, most: Limits of a number.
        repeated: Whether the option may be given several times.
        path: Whether it is a path, in which a YAML job fills in environment variables.
    """

    read: Callable[[Any], object]
    word: type = str
    metavar: str | None = None
    least: int | None = None
    most: int | None = None
    repeated: bool = False
    path: bool = False


@dataclass(frozen=True, slots=True)
class Option:
    """A row of the table.

    Args:
        name: Key of a YAML job; the command line's has dashes.
        kind: What its value may be.
        help: One line for ``--help``, without the default.
        at: The fields that it sets, as ``section.field``: ``read``, ``write``, ``run`` (``ConvertOptions``) or ``job``.
        commands: The commands that have it.
        targets: The target formats for which it means something.
        default: What is done without it, where that is not obvious.
        opposite: A flag's other name, by which the command line takes back what a job file says.
        negated: Whether the field says the opposite of the option.
    """

    name: str
    kind: Kind
    help: str
    at: tuple[str, ...]
    commands: tuple[str, ...]
    targets: tuple[str, ...] = EVERY
    default: str = ""
    opposite: str = ""
    negated: bool = False

    @property
    def flag(self) -> str:
        """How the command line spells it."""
        return f"--{self.name.replace('_', '-')}"


def number(least: int = 1, most: int | None = None, metavar: str = "N") -> Kind:
    """A whole number within limits."""

    def read(value: Any) -> object:
        if type(value) is not int:
            raise ValueError("should be a valid integer")
        if value < least:
            raise ValueError(f"should be greater than or equal to {least}")
        if most is not None and value > most:
            raise ValueError(f"should be less than or equal to {most}")
        return value

    return Kind(read, int, metavar, least, most)


def size(least: int = 1) -> Kind:
    """Bytes: a number, or a text such as ``2GB``."""

    def read(value: Any) -> object:
        return number(least).read(parse_size(value) if isinstance(value, str) else value)

    return Kind(read, metavar="SIZE")


def one_of(*values: str) -> Kind:
    """One of a few words."""
    said = f"{', '.join(map(repr, values[:-1]))} or {values[-1]!r}"

    def read(value: Any) -> object:
        if value not in values:
            raise ValueError(f"should be {said}")
        return value

    return Kind(read, metavar="|".join(values))


def _flag(value: Any) -> object:
    if not isinstance(value, bool):
        raise ValueError("should be true or false")
    return value


def _text(value: Any) -> object:
    if not isinstance(value, str):
        raise ValueError("should be a text")
    return value


def _path(value: Any) -> object:
    if not isinstance(value, str | PathLike):
        raise ValueError("should be a path")
    return fspath(value)


def _texts(value: Any) -> object:
    """One, or a list."""
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list | tuple):
        raise ValueError("should be a text, or a list of texts")
    return tuple(_text(item) for item in listed)


def _dtype(value: Any) -> object:
    if dtype_of(value) not in FLOATING:
        raise ValueError("should be a floating-point type")
    return value


def _layout(value: Any) -> object:
    """``[3, 5, 4]`` is ``3,5,4``."""
    return ",".join(map(str, value)) if isinstance(value, list) else _text(value)


def _ids(value: Any) -> object:
    """``1,2``, ``[1, 2]`` and ``1`` are ids of tokens."""
    parts = value.split(",") if isinstance(value, str) else value if isinstance(value, list | tuple) else [value]
    texts = [part.strip() if isinstance(part, str) else part for part in parts]
    if not all(type(part) is int or (isinstance(part, str) and part.isdecimal()) for part in texts):
        raise ValueError(f"should be ids of tokens such as 1,2, found {value!r}")
    return tuple(number(0).read(int(part)) for part in texts)


def _rules(value: Any) -> object:
    from mcore_rlhf.models.rules import Rules, read_rules

    return value if isinstance(value, Rules) else read_rules(Path(str(_path(value))).expanduser())


FLAG = Kind(_flag, bool)
NAME = Kind(_text, metavar="NAME")
NAMES = Kind(_texts, metavar="NAME", repeated=True)
FOLDER = Kind(_path, metavar="DIR", path=True)
FILE = Kind(_path, metavar="FILE", path=True)
RULES = Kind(_rules, metavar="FILE", path=True)
COUNT = number()


def _write(
    name: str, kind: Kind, help: str, targets: tuple[str, ...] = EVERY, *, default: str = "", opposite: str = "",
    commands: tuple[str, ...] = PLANNING,
) -> Option:  # fmt: skip
    """What the target is to be."""
    return Option(name, kind, help, (f"write.{name}",), commands, targets, default, opposite)


def _run(name: str, kind: Kind, help: str, *, default: str = "", opposite: str = "") -> Option:
    """How a conversion runs."""
    return Option(name, kind, help, (f"run.{name}",), CONVERTING, default=default, opposite=opposite)


OPTIONS: tuple[Option, ...] = (
    Option("to", Kind(_text, metavar="FORMAT"), "Format to write.", ("run.to",), PLANNING, default="megatron"),
    _write("tp", COUNT, "Tensor-parallel degree. Omitted degrees keep the source's.", (*MEGATRON, "deepspeed")),
    _write("pp", COUNT, "Pipeline stages.", (*MEGATRON, "deepspeed")),
    _write("vpp", COUNT, "Model chunks per pipeline stage.", MEGATRON),
    _write("ep", COUNT, "Expert-parallel degree.", MEGATRON),
    _write("etp", COUNT, "Tensor-parallel degree of experts.", MEGATRON),
    _write(
        "dp", COUNT, "Data-parallel degree.", (*MEGATRON, "deepspeed", "dcp"), default="the source's ranks ÷ TP·PP·CP"
    ),
    _write(
        "pipeline_layout", Kind(_layout, metavar="S"), "Layers per chunk (3,5,4) or Megatron's own string (Et*3|t*5L).",
        MEGATRON,
    ),
    Option("role", NAME, "Whose model, where a step holds several: actor, critic, …", ("read.role",), READING),
    Option("step", number(0), "Which iteration, where the tracker does not decide.", ("read.step",), READING),
    Option(
        "newest_intact", FLAG, "Of a root: the newest step that is intact, though newer ones are damaged.",
        ("job.newest_intact",), PLANNING, opposite="--no-newest-intact",
    ),
    _write(
        "dtype", Kind(_dtype, metavar="bf16|fp16|fp32"), "Element type of the parameters.",
        (*MEGATRON, "deepspeed", "dcp", "hf", "peft"),
    ),
    _write("no_optimizer", FLAG, "Leave the optimizer out.", opposite="--keep-optimizer"),
    _write("optimizer", one_of("distributed", "plain"), "Kind of optimizer state to write.", MEGATRON),
    _write(
        "rng", one_of("keep", "derive", "drop"), "RNG states.", (*MEGATRON, "dcp"),
        default="keep for an unchanged layout, else derive",
    ),
    Option(
        "vocab_size", COUNT, "True number of words, where args lack it.", ("read.vocab_size", "write.vocab_size"), PLANNING
    ),
    _write("padded_vocab_size", COUNT, "Rows of the embedding.", MEGATRON, default="Megatron's own rule"),
    _write(
        "zero_stage", number(0, 3, "0-3"), "ZeRO stage of a DeepSpeed target.", ("deepspeed",), default="the source's"
    ),
    _write("reference_config", FOLDER, "The model's Hugging Face folder, or its config.json."),
    _write(
        "transformer_impl", one_of("local", "transformer_engine"),
        "Whose parameter names a Megatron target made of Hugging Face's has.", MEGATRON,
    ),
    _write("max_shard_size", size(), "Largest file of a Hugging Face folder.", ("hf",), default="5GB"),
    _write("tokenizer", FOLDER, "Folder whose tokenizer files go into a Hugging Face folder.", ("hf",)),
    _write("generation_config", FILE, "generation_config.json for a Hugging Face folder.", ("hf",)),
    _write("eos_token_ids", Kind(_ids, metavar="N,N"), "Tokens that end a text, for models with several.", ("hf",)),
    _write("masters", FLAG, "Take the parameters from their fp32 masters.", ("hf", "peft"), opposite="--params"),
    _write(
        "with_optimizer", FLAG, "Keep the optimizer beside a Hugging Face folder.", opposite="--without-optimizer"
    ),
    _write("merge_adapter", FLAG, "Add a LoRA adapter to its base weights.", opposite="--keep-adapter"),
    _write("base_model", FOLDER, "The model that an adapter belongs to."),
    _write(
        "dequantize", FLAG, "Make plain weights of fp8 elements and their scales.", opposite="--keep-quantized"
    ),
    _write("unused_patterns", FLAG, "Let patterns match no parameter.", ("universal",), commands=PYTHON_ONLY),
    Option(
        "only", Kind(_text, metavar="FILTER"),
        "A part of the model: role, attribute or both (actor.policy), or a pattern with *.", ("read.only",), READING,
    ),
    Option(
        "exclude_frozen", FLAG, "Leave out parameters that are not trained.", ("read.exclude_frozen",), READING,
        opposite="--include-frozen",
    ),
    Option(
        "ignore_field", NAMES, "Pass over an argument, or a field of config.json, that the other family cannot express.",
        ("write.ignore_fields",), PLANNING,
    ),
    Option(
        "rules", RULES, "YAML: how parameters are cut that no table knows.", ("read.rules", "write.rules"),
        (*READING, "adopt"),
    ),
    Option(
        "stub", NAMES, "A pickled class to load as an inert stub; may be repeated.", ("read.stubs",),
        (*READING, "adopt", "resume-check"),
    ),
    _run("trust_replicas", FLAG, "Take replicas as equal without comparing.", opposite="--compare-replicas"),
    Option(
        "workers", COUNT, "Files at a time.", ("run.workers",), ("convert", "verify", "adopt"),
        default="one per CPU, at most 8",
    ),
    _run("max_memory", size(1 << 20), "Memory for buffers and windows.", default="2GiB"),
    Option(
        "no_fsync", FLAG, "Do not wait for the disk before publishing.", ("run.fsync",), CONVERTING, opposite="--fsync",
        negated=True,
    ),
    Option(
        "verify", FLAG, "Afterwards verify the target deeply, and diff it with the source.", ("job.verify",), CONVERTING,
        opposite="--no-verify",
    ),
    Option(
        "strict", FLAG, "Refuse what loses anything (exit code 1).", ("run.strict",), PLANNING, opposite="--no-strict"
    ),
    _run("overwrite", FLAG, "Replace an existing checkpoint.", opposite="--no-overwrite"),
)  # fmt: skip
"""All options, in the order of the help."""


def of_command(command: str) -> tuple[Option, ...]:
    """The options that a command has."""
    return tuple(row for row in OPTIONS if command in row.commands)


def placed(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What values that were read mean for the library, by section: ``{"write": {"tp": 2}, "run": {"fsync": False}}``.

    Args:
        values: By option; what is not in it keeps its default.
    """
    made: dict[str, dict[str, Any]] = {"read": {}, "write": {}, "run": {}, "job": {}}
    for row in OPTIONS:
        for section, field in _places(row) if row.name in values else ():
            made[section][field] = not values[row.name] if row.negated else values[row.name]
    return made


def refuse(to: str, **sections: DataclassInstance) -> None:
    """Refuse options that mean nothing for a target, or have values that they cannot have.

    Args:
        to: The target's format. One that is unknown is refused elsewhere, with a better message.
        sections: ``read``, ``write``, ``run``: the options' objects.

    Raises:
        UsageError: All that are wrong, by their names on the command line.
    """
    problems = Problems()
    for row, value in given(**sections):
        _check(row, value, to, problems)
    problems.raise_if_any()


def given(**sections: DataclassInstance) -> Iterator[tuple[Option, object]]:
    """The options that objects of the library give: those whose fields are not at their defaults, with their values."""
    for row in OPTIONS:
        for section, field in _places(row):
            holder = sections.get(section)
            if holder is not None and (value := getattr(holder, field)) != _default(holder, field):
                yield row, value


def _places(row: Option) -> Iterator[tuple[str, str]]:
    for place in row.at:
        section, _, field = place.partition(".")
        yield section, field


def _default(holder: DataclassInstance, name: str) -> object:
    (field,) = (field for field in fields(holder) if field.name == name)
    return field.default_factory() if field.default_factory is not MISSING else field.default


def _check(row: Option, value: object, to: str, problems: Problems) -> None:
    if to in EVERY and to not in row.targets:
        meant = " or ".join(f"--to {name}" for name in row.targets)
        text = f"{row.flag}: means nothing with --to {to}; it is for {meant}"
        problems.add(UsageError, text, "Leave it out, or say which format is meant.")
    try:
        row.kind.read(value)
    except ValueError as error:
        problems.add(UsageError, wrong(row.flag, error, value))


def wrong(where: str, error: ValueError, value: object) -> str:
    """What is said of a value that an option cannot have."""
    return f"{where}: {error}" if "found" in str(error) else f"{where}: {error}, found {shown(value, 200)}"
