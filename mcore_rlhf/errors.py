"""Every error that mcore_rlhf raises, and the exit code that each one means.

::

    CheckpointError                    exit 1
    ├── NotACheckpoint                 exit 2   there is no checkpoint at this path, or not one that we read
    ├── Unsupported                    exit 2   a checkpoint, but something that cannot be done with it
    │   └── Unportable                 exit 2   its own framework goes on with it, and it has no place elsewhere
    ├── UsageError                     exit 2   options that contradict each other or the files
    ├── StorageError                   exit 2   the file system said no: full disk, permissions, target exists
    │   └── Unreadable                 exit 2   an I/O error, of which nothing follows for what could not be read
    ├── Untrusted                      exit 1   a pickle asks for a class or function that is not allowed
    ├── Incomplete                     exit 1   files, ranks or tensors are missing
    ├── Corrupt                        exit 1   bytes are not what their checksum, copy or master says
    │   └── Unforeseen                 exit 1   what lies there is not what its reader takes for granted
    ├── LayoutMismatch                 exit 1   shapes, degrees or args contradict each other
    ├── CoverageError                  exit 1   elements of a target have no source, or more than one
    └── Lossy                          exit 1   the target cannot hold something, and ``--strict`` was given

A message says *what* is wrong, *where* (file and tensor), what was expected and found, and what to do next. Work that
checks many things gathers a :class:`Problems` and raises once.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from reprlib import Repr


class CheckpointError(Exception):
    """Base of all errors that a user of mcore_rlhf is meant to read."""

    exit_code = 1


class NotACheckpoint(CheckpointError):
    """There is no checkpoint at a path, or not in a format that is known."""

    exit_code = 2


class Unsupported(CheckpointError):
    """A checkpoint is sound, but what was asked of it cannot be done."""

    exit_code = 2


class Unportable(Unsupported):
    """What its own framework goes on with and nothing else can: an optimizer whose states nobody can name, or cut. No damage is known."""


class UsageError(CheckpointError):
    """Options contradict each other, or what the files say."""

    exit_code = 2


class StorageError(CheckpointError):
    """The file system refused: no space, no permission, the target exists."""

    exit_code = 2


class Unreadable(StorageError):
    """A disk or file system did not give what is there: whether that is sound, nobody knows. It is never called damaged."""


class Untrusted(CheckpointError):
    """A pickle names a class or function that may not be loaded."""


class Incomplete(CheckpointError):
    """Files, ranks or tensors that belong to the checkpoint are missing."""


class Corrupt(CheckpointError):
    """Stored bytes contradict their checksum, their replica or their master copy."""


class Unforeseen(Corrupt):
    """What lies in a checkpoint is not what its format's reader takes for granted; damage, or a writer that nobody here knows."""


class LayoutMismatch(CheckpointError):
    """Shapes, parallel degrees or stored arguments contradict each other."""


class CoverageError(CheckpointError):
    """Elements of a target tensor have no source, or more than one."""


class Lossy(CheckpointError):
    """The target cannot hold something that the source has, and that was not allowed."""


def headline(text: str) -> str:
    """The first line of a message; of a list of problems, the first of them."""
    lines = text.strip().splitlines() or [""]
    return lines[1].strip(" -") if lines[0].endswith("problems:") and len(lines) > 1 else lines[0]


def in_a_line(error: BaseException) -> str:
    """What to say of any error in one line; whoever raises others' classes may give them no text, or half a sentence."""
    text = headline(str(error))
    return text if isinstance(error, CheckpointError) else f"{type(error).__name__}: {text}".removesuffix(": ")


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong.

    Args:
        kind: The error class that the problem would be on its own.
        message: What is wrong, where, expected and found; one line.
        advice: What the reader can do about it; may be empty.
    """

    kind: type[CheckpointError]
    message: str
    advice: str = ""


@dataclass(slots=True)
class Problems:
    """Gathers problems so that the user sees all of them at once, and raises once."""

    found: list[Problem] = field(default_factory=list)

    def add(self, kind: type[CheckpointError], message: str, advice: str = "") -> None:
        """Note one problem."""
        self.found.append(Problem(kind, message, advice))

    def add_error(self, error: CheckpointError) -> None:
        """Note an error that was raised elsewhere."""
        self.found.append(Problem(type(error), str(error)))

    def extend(self, problems: Iterable[Problem]) -> None:
        """Note several problems."""
        self.found.extend(problems)

    def __bool__(self) -> bool:
        return bool(self.found)

    def raise_if_any(self, limit: int = 20) -> None:
        """Raise one error that lists the problems, of the first problem's class; do nothing if there are none.

        Args:
            limit: How many problems are spelled out; the rest are counted.

        Raises:
            CheckpointError: The class of the first problem that was noted.
        """
        if self.found:
            raise self.found[0].kind(self.describe(limit))

    def raise_if_unread(self) -> None:
        """Raise where all that is wrong is that something could not be read: then nothing is known to be.

        Raises:
            Unreadable: So it is.
        """
        if all(problem.kind is Unreadable for problem in self.found):
            self.raise_if_any()

    def describe(self, limit: int = 20) -> str:
        """The problems as lines of text, each piece of advice once, at the end."""
        messages = list(dict.fromkeys(problem.message for problem in self.found))
        advice = list(dict.fromkeys(problem.advice for problem in self.found if problem.advice))
        if len(messages) == 1:
            return "\n".join([*messages, *advice])
        shown = [f"  - {message}" for message in messages[:limit]]
        if len(messages) > limit:
            shown.append(f"  … and {len(messages) - limit} more")
        return "\n".join([f"{len(messages)} problems:", *shown, *advice])


_REPR = Repr()
_REPR.maxlevel, _REPR.maxstring, _REPR.maxother, _REPR.maxlong = 3, 120, 120, 60


def shown(value: object, width: int = 120) -> str:
    """A value from a file for a message: short however large or often nested it is, on one line, without control characters.

    Args:
        value: It.
        width: Most characters.
    """
    try:
        text = " ".join(_REPR.repr(value).split())
    except Exception:  # an integer of more digits than Python prints
        text = f"a {type(value).__name__}"
    return text if len(text) <= width else f"{text[: width - 1]}…"


_MAX_LINE, _MAX_TEXT = 2_000, 20_000
UNPRINTABLE = re.compile(
    r"[\x00-\x09\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202f\u2060-\u206f\ufeff\ufff9-\ufffb"
    r"\ud800-\udfff\U000e0000-\U000e007f]"
)
"""Everything that moves the cursor, hides or turns text round, or is no character at all; only ends of lines are kept."""
_FRAMES = re.compile(r"\s*Exception raised from [^\n]*(\n(frame #\d|<)[^\n]*)*")
"""What torch appends to messages of its C++ code (``c10/util/Exception.cpp``)."""


def printable(text: str) -> str:
    """A text with parts of the input in it, with control characters and marks that turn text round written out as escapes."""
    return UNPRINTABLE.sub(_written_out, text)


def clean(text: str) -> str:
    """A message with parts of the input in it: printable, without stack frames of C++, and cut where it is endless.

    Args:
        text: It; ends of lines are its own.
    """
    text = printable(_FRAMES.sub("", text[: 50 * _MAX_TEXT]))
    text = "\n".join(line if len(line) <= _MAX_LINE else f"{line[:_MAX_LINE]}… (cut)" for line in text.split("\n"))
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}… (cut)"


def log_of(name: str) -> logging.Logger:
    """A logger of this package: its records name files, metrics and notes of other people, and none commands a terminal.

    Args:
        name: ``mcore_rlhf`` and what follows.
    """
    found = logging.getLogger(name)
    found.addFilter(_made_printable)
    return found


def _made_printable(record: logging.LogRecord) -> bool:
    record.msg, record.args = printable(record.getMessage()), ()
    if record.exc_info:
        record.exc_text = printable(logging.Formatter().formatException(record.exc_info))
    return True


def _written_out(match: re.Match[str]) -> str:
    return " " if match[0] == "\t" else match[0].encode("unicode_escape").decode("ascii")
