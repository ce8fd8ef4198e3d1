"""The table of options: one row for each thing that a conversion, or the opening of a checkpoint, can be told.

The rows are the fields of :class:`ReadOptions`, :class:`WriteOptions` and :class:`ConvertOptions`. The command line, the YAML
jobs and the Python API are made of them: which options a command has, with their help; what a value must be; and for which
target formats an option means something, so that for all others it is refused and not passed over.

**To add an option**, add a field with its row, and use it. Nothing else: ``--some-name`` and the job's key ``some_name`` exist
with the row; ``docs/reference/cli.md`` describes it (a test asks).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcore_rlhf.core.dtype import FLOATING, dtype_of
from mcore_rlhf.errors import Problems, UsageError, shown
from mcore_rlhf.models.rules import Rules, read_rules
from mcore_rlhf.storage.paths import ReadablePath, local_path, parse_size

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
class OptionType:
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
        kind: What its value may be.
        help: One line for ``--help``, without the default.
        name: Key of a YAML job; the command line's has dashes. Empty for the field's own.
        commands: The commands that have it.
        targets: The target formats for which it means something.
        default: What is done without it, where that is not obvious.
        opposite: A flag's other name, by which the command line takes back what a job file says.
        negated: Whether the field says the opposite of the option.
        at: The fields that it sets, as ``section.field``: ``read``, ``write``, ``run`` (:class:`ConvertOptions`), or ``job``.
    """

    kind: OptionType
    help: str
    name: str = ""
    commands: tuple[str, ...] = PLANNING
    targets: tuple[str, ...] = EVERY
    default: str = ""
    opposite: str = ""
    negated: bool = False
    at: tuple[str, ...] = ()

    @property
    def flag(self) -> str:
        """How the command line spells it."""
        return f"--{self.name.replace('_', '-')}"


def number(least: int = 1, most: int | None = None, metavar: str = "N") -> OptionType:
    """A whole number within limits."""

    def read(value: Any) -> object:
        if type(value) is not int:
            raise ValueError("should be a valid integer")
        if value < least:
            raise ValueError(f"should be greater than or equal to {least}")
        if most is not None and value > most:
            raise ValueError(f"should be less than or equal to {most}")
        return value

    return OptionType(read, int, metavar, least, most)


def size(least: int = 1) -> OptionType:
    """Bytes: a number, or a text such as ``2GB``."""

    def read(value: Any) -> object:
        return number(least).read(parse_size(value) if isinstance(value, str) else value)

    return OptionType(read, metavar="SIZE")


def one_of(*values: str) -> OptionType:
    """One of a few words."""
    said = f"{', '.join(map(repr, values[:-1]))} or {values[-1]!r}"

    def read(value: Any) -> object:
        if value not in values:
            raise ValueError(f"should be {said}")
        return value

    return OptionType(read, metavar="|".join(values))


def _flag(value: Any) -> object:
    if not isinstance(value, bool):
        raise ValueError("should be true or false")
    return value


def _text(value: Any) -> object:
    if not isinstance(value, str):
        raise ValueError("should be a text")
    return value


def _word(value: Any) -> object:
    return _text(str(value) if isinstance(value, PathLike) else value)


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
    return value if isinstance(value, Rules) else read_rules(Path(str(_path(value))).expanduser())


FLAG = OptionType(_flag, bool)
NAME = OptionType(_text, metavar="NAME")
NAMES = OptionType(_texts, metavar="NAME", repeated=True)
FOLDER = OptionType(_path, metavar="DIR", path=True)
FILE = OptionType(_path, metavar="FILE", path=True)
RULES = OptionType(_rules, metavar="FILE", path=True)
COUNT = number()


def _row(kind: OptionType, help: str, value: Any = None, **more: Any) -> Any:
    """A field with its row.

    Args:
        kind, help, more: See :class:`Option`.
        value: The field's default.
    """
    return field(default=value, metadata={"option": Option(kind, help, **more)})


def _flag_row(help: str, opposite: str = "", value: bool = False, **more: Any) -> Any:
    return _row(FLAG, help, value, opposite=opposite, **more)


_RULES = Option(RULES, "YAML: how parameters are cut that no table knows.", commands=(*READING, "adopt"))
_VOCABULARY = Option(COUNT, "True number of words, where args lack it.")


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How a source is to be read.

    Args:
        optimizer: Whether the optimizer is read at all; without it, its files may be missing or damaged.
    """

    role: str | None = _row(NAME, "Whose model, where a step holds several: actor, critic, …", commands=READING)
    step: int | None = _row(number(0), "Which iteration, where the tracker does not decide.", commands=READING)
    only: str | None = _row(
        OptionType(_text, metavar="FILTER"),
        "A part of the model: role, attribute or both (actor.policy), or a pattern with *.",
        commands=READING,
    )
    exclude_frozen: bool = _flag_row("Leave out parameters that are not trained.", "--include-frozen", commands=READING)
    vocab_size: int | None = field(default=None, metadata={"option": _VOCABULARY})
    rules: Rules = field(default_factory=Rules, metadata={"option": _RULES})
    stubs: tuple[str, ...] = _row(
        NAMES,
        "A pickled class to load as an inert stub; may be repeated.",
        (),
        name="stub",
        commands=(*READING, "adopt", "resume-check"),
    )
    optimizer: bool = True


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """What a target is to be; None keeps what the source has.

    Raises:
        UsageError: A folder is a URL.
    """

    tp: int | None = _row(
        COUNT, "Tensor-parallel degree. Omitted degrees keep the source's.", targets=(*MEGATRON, "deepspeed")
    )
    pp: int | None = _row(COUNT, "Pipeline stages.", targets=(*MEGATRON, "deepspeed"))
    vpp: int | None = _row(COUNT, "Model chunks per pipeline stage.", targets=MEGATRON)
    ep: int | None = _row(COUNT, "Expert-parallel degree.", targets=MEGATRON)
    etp: int | None = _row(COUNT, "Tensor-parallel degree of experts.", targets=MEGATRON)
    dp: int | None = _row(
        COUNT,
        "Data-parallel degree.",
        targets=(*MEGATRON, "deepspeed", "dcp"),
        default="the source's ranks ÷ TP·PP·CP",
    )
    pipeline_layout: str | None = _row(
        OptionType(_layout, metavar="S"),
        "Layers per chunk (3,5,4) or Megatron's own string (Et*3|t*5L).",
        targets=MEGATRON,
    )
    dtype: str | None = _row(
        OptionType(_dtype, metavar="bf16|fp16|fp32"),
        "Element type of the parameters.",
        targets=(*MEGATRON, "deepspeed", "dcp", "hf", "peft"),
    )
    no_optimizer: bool = _flag_row("Leave the optimizer out.", "--keep-optimizer")
    optimizer: str | None = _row(
        one_of("distributed", "plain"), "OptionType of optimizer state to write.", targets=MEGATRON
    )
    rng: str | None = _row(
        one_of("keep", "derive", "drop"),
        "RNG states.",
        targets=(*MEGATRON, "dcp"),
        default="keep for an unchanged layout, else derive",
    )
    vocab_size: int | None = field(default=None, metadata={"option": _VOCABULARY})
    padded_vocab_size: int | None = _row(
        COUNT, "Rows of the embedding.", targets=MEGATRON, default="Megatron's own rule"
    )
    zero_stage: int | None = _row(
        number(0, 3, "0-3"), "ZeRO stage of a DeepSpeed target.", targets=("deepspeed",), default="the source's"
    )
    reference_config: str | None = _row(FOLDER, "The model's Hugging Face folder, or its config.json.")
    transformer_impl: str | None = _row(
        one_of("local", "transformer_engine"),
        "Whose parameter names a Megatron target made of Hugging Face's has.",
        targets=MEGATRON,
    )
    max_shard_size: int | None = _row(size(), "Largest file of a Hugging Face folder.", targets=("hf",), default="5GB")
    tokenizer: str | None = _row(FOLDER, "Folder whose tokenizer files go into a Hugging Face folder.", targets=("hf",))
    generation_config: str | None = _row(FILE, "generation_config.json for a Hugging Face folder.", targets=("hf",))
    eos_token_ids: tuple[int, ...] = _row(
        OptionType(_ids, metavar="N,N"), "Tokens that end a text, for models with several.", (), targets=("hf",)
    )
    masters: bool = _flag_row("Take the parameters from their fp32 masters.", "--params", targets=("hf", "peft"))
    with_optimizer: bool = _flag_row("Keep the optimizer beside a Hugging Face folder.", "--without-optimizer")
    merge_adapter: bool = _flag_row("Add a LoRA adapter to its base weights.", "--keep-adapter")
    base_model: str | None = _row(FOLDER, "The model that an adapter belongs to.")
    dequantize: bool = _flag_row("Make plain weights of fp8 elements and their scales.", "--keep-quantized")
    unused_patterns: bool = _flag_row("Let patterns match no parameter.", targets=("universal",), commands=PYTHON_ONLY)
    ignore_fields: tuple[str, ...] = _row(
        NAMES,
        "Pass over an argument, or a field of config.json, that the other family cannot express.",
        (),
        name="ignore_field",
    )
    rules: Rules = field(default_factory=Rules, metadata={"option": _RULES})

    def __post_init__(self) -> None:
        for given in (self.reference_config, self.tokenizer, self.generation_config, self.base_model):
            if given is not None:
                local_path(given)  # refuses URLs


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """How a conversion runs.

    Args:
        read: How the source is read.
        write: What the target is to be.
    """

    to: str = _row(OptionType(_text, metavar="FORMAT"), "Format to write.", "megatron", default="megatron")
    read: ReadOptions = field(default_factory=ReadOptions)
    write: WriteOptions = field(default_factory=WriteOptions)
    workers: int = _row(
        COUNT, "Files at a time.", 2, commands=("convert", "verify", "adopt"), default="one per CPU, at most 8"
    )
    max_memory: int = _row(
        size(1 << 20), "Memory for buffers and windows.", 2 << 30, commands=CONVERTING, default="2GiB"
    )
    fsync: bool = _flag_row(
        "Do not wait for the disk before publishing.",
        "--fsync",
        True,
        name="no_fsync",
        commands=CONVERTING,
        negated=True,
    )
    strict: bool = _flag_row("Refuse what loses anything (exit code 1).", "--no-strict")
    overwrite: bool = _flag_row("Replace an existing checkpoint.", "--no-overwrite", commands=CONVERTING)
    trust_replicas: bool = _flag_row(
        "Take replicas as equal without comparing.", "--compare-replicas", commands=CONVERTING
    )


@dataclass(frozen=True, slots=True)
class JobOptions:
    """What the command line and its job files can ask for besides a conversion."""

    newest_intact: bool = _flag_row(
        "Of a root: the newest step that is intact, though newer ones are damaged.", "--no-newest-intact"
    )
    verify: bool = _flag_row(
        "Afterwards verify the target deeply, and diff it with the source.", "--no-verify", commands=CONVERTING
    )


_SECTIONS = {"read": ReadOptions, "write": WriteOptions, "run": ConvertOptions, "job": JobOptions}


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
    for section, place in (*_fields("run"), *_fields("job")):
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
        given: By option, as a command line or a job file says it; None and what is empty is not said. What is no option, such
            as a job's name, is a text.
        files: The job file, of those that it says.

    Raises:
        UsageError: Values that an option cannot have, each by the option, or by file and key.
    """
    problems, found, rows = Problems(), dict[str, Any](), {row.name: row for row in OPTIONS}
    for name, value in given.items():
        try:
            if value not in (None, [], ()):
                found[name] = (rows[name].kind.read if name in rows else _word)(value)
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
