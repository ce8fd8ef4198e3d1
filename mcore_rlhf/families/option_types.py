"""What a row of a table of options says, and what the values of options may be."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from enum import Enum, auto
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from mcore_rlhf.core.catalog import FLOATING, dtype_of
from mcore_rlhf.models.spec import Rules, read_rules
from mcore_rlhf.storage.paths import parse_size

READING = ("inspect", "plan", "convert", "verify", "diff")
PLANNING = ("plan", "convert")
CONVERTING = ("convert",)
PYTHON_ONLY = ()

SOURCE, LAYOUT, CONTENT, HUGGING_FACE, ADAPTERS, SAFETY, SPEED, STORES = GROUPS = (
    "Source",
    "Layout of the target",
    "Parameters, optimizer, RNG states",
    "Hugging Face folders",
    "Adapters and quantized weights",
    "Safety",
    "Speed",
    "Object stores",
)
"""The headings under which the help shows options, in its order."""


class Takes(Enum):
    """What some formats can be told and others cannot: a format says what it takes, and an option what it is about.

    ``MEGATRON`` is what only a run of Megatron's is told, ``MODEL_FOLDER`` what only ``from_pretrained`` reads, and ``LIKE`` what of a
    target depends on the trainer's own run.
    """

    MODEL_PARALLEL = auto()
    DATA_PARALLEL = auto()
    MEGATRON = auto()
    TORCH_DIST = auto()
    ZERO_STAGE = auto()
    DTYPE = auto()
    RNG = auto()
    MASTERS = auto()
    MODEL_FOLDER = auto()
    PATTERNS = auto()
    LIKE = auto()


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
        words: All values that it may have, where there are few; a shell can complete them.
    """

    read: Callable[[Any], object]
    word: type = str
    metavar: str | None = None
    least: int | None = None
    most: int | None = None
    repeated: bool = False
    path: bool = False
    words: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Option:
    """A row of the table.

    Args:
        kind: What its value may be.
        help: One line for ``--help``, without the default.
        group: The heading under which it stands, one of ``GROUPS``.
        more: What the page on the command line says besides.
        name: Key of a YAML job; the command line's has dashes. Empty for the field's own.
        commands: The commands that have it.
        takes: What it is about, where it means something for those target formats alone that take this; None for all formats.
        default: What is done without it, where that is not obvious.
        opposite: A flag's other name, by which the command line takes back what a job file says.
        negated: Whether the field says the opposite of the option.
        at: The fields that it sets, as ``section.field``: ``read``, ``write``, ``run`` (:class:`ConvertOptions`), ``job`` or ``store``.
    """

    kind: OptionType
    help: str
    group: str = ""
    more: str = ""
    name: str = ""
    commands: tuple[str, ...] = PLANNING
    takes: Takes | None = None
    default: str = ""
    opposite: str = ""
    negated: bool = False
    at: tuple[str, ...] = ()

    @property
    def flag(self) -> str:
        """How the command line spells it."""
        return f"--{self.name.replace('_', '-')}"

    def is_for(self, takes: Collection[Takes]) -> bool:
        """Whether it means something for a target format, of which that is what it takes."""
        return self.takes is None or self.takes in takes


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

    return OptionType(read, metavar="|".join(values), words=values)


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


def _limits(value: Any) -> object:
    """``1e-5,0`` and ``[1e-5, 0]`` are the highest and the lowest learning rate."""
    parts = value.split(",") if isinstance(value, str) else value
    try:
        highest, lowest = (float(part) for part in parts)
    except (TypeError, ValueError):
        raise ValueError(f"should be two numbers such as 1e-5,0, found {value!r}") from None
    if not 0 <= lowest <= highest < float("inf"):
        raise ValueError(f"should be the highest and the lowest learning rate, found {value!r}")
    return highest, lowest


def _rules(value: Any) -> object:
    return value if isinstance(value, Rules) else read_rules(Path(str(_path(value))).expanduser())


def text(metavar: str) -> OptionType:
    """A text."""
    return OptionType(_text, metavar=metavar)


FLAG = OptionType(_flag, bool)
NAME = text("NAME")
NAMES = OptionType(_texts, metavar="NAME", repeated=True)
FOLDER = OptionType(_path, metavar="DIR", path=True)
FILE = OptionType(_path, metavar="FILE", path=True)
RULES = OptionType(_rules, metavar="FILE", path=True)
DTYPE = OptionType(_dtype, metavar="bf16|fp16|fp32")
PIPELINE = OptionType(_layout, metavar="S")
PATTERN = OptionType(_text, metavar="PATTERN")
WORD = OptionType(_word)
LIMITS = OptionType(_limits, metavar="MAX,MIN")
IDS = OptionType(_ids, metavar="N,N")
COUNT = number()


def option(kind: OptionType, help: str, value: Any = None, **rest: Any) -> Any:
    """A field with its row.

    Args:
        kind, help, rest: See :class:`Option`.
        value: The field's default.
    """
    return field(default=value, metadata={"option": Option(kind, help, **rest)})


def flag(help: str, opposite: str = "", value: bool = False, **rest: Any) -> Any:
    """A field with the row of a flag."""
    return option(FLAG, help, value, opposite=opposite, **rest)
