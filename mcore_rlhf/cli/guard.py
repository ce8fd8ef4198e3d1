"""Every way in which a command can end becomes a message for people and an exit code; never a traceback.

0 done, equal, intact · 1 damaged, incomplete, mismatched, different, lossy under ``--strict`` · 2 usage, not a
checkpoint, unsupported, target exists, I/O · 128 + signal where one stopped it: 130 after Ctrl-C.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import click

from mcore_rlhf import __version__
from mcore_rlhf.errors import CheckpointError, StorageError, clean, printable

from .mistyped import answered, typed_as
from .output import OutputError, emit_json, printing, reason

JSON, DEBUG, PROGRESS = "mcore_rlhf.json", "mcore_rlhf.debug", "mcore_rlhf.progress"
"""Keys of a context's ``meta``: whether ``--json`` and ``--debug`` were given, and what ``--progress`` says."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LATER_S = 0.02
"""When an interrupt that had to wait looks again."""


class Interrupted(KeyboardInterrupt):
    """A command was interrupted, and can say what that left.

    Args:
        message: What is the case now.
        signum: The signal.
    """

    def __init__(self, message: str, signum: int) -> None:
        super().__init__(signum)
        self.message = message


class GuardedGroup(click.Group):
    """The group of all commands, each of which runs under guard."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read what stands before the command."""
        with guarded(ctx), answered(ctx, args):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command."""
        with guarded(ctx):
            return super().invoke(ctx)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order in which they are told."""
        return list(self.commands)


@contextmanager
def guarded(ctx: click.Context) -> Iterator[None]:
    """Turn whatever is raised inside into a message on standard error and an exit code.

    Raises:
        click.exceptions.Exit: With the code.
    """
    debug = ctx.meta.get(DEBUG, False) or os.environ.get("MCORE_RLHF_DEBUG", "") not in ("", "0")
    try:
        with stopped_by_signals():
            yield
        with printing():
            sys.stdout.flush()
    except BrokenPipeError:  # the reader of our output has seen enough
        _leave_pipe()
    except KeyboardInterrupt as stop:
        _interrupted(stop)
    except Exception as error:
        if isinstance(error, OutputError) or _is_of_output(error):
            _leave_output(error)
        if isinstance(error, click.Abort | click.exceptions.Exit | click.exceptions.NoArgsIsHelpError):
            raise  # click's own: commands that are done
        if debug:
            _print_traceback()
        _fail(ctx, error)


def _show_usage(error: click.UsageError) -> None:
    """How a command is typed, before it is said what was typed wrongly."""
    if error.ctx is not None:
        click.echo(error.ctx.get_usage(), err=True)
        click.echo(f"Try '{error.ctx.command_path} {error.ctx.help_option_names[-1]}' for help.\n", err=True)


def _fail(ctx: click.Context, error: Exception) -> NoReturn:
    code, text = explain(error)
    if isinstance(error, click.UsageError):
        _show_usage(error)
    click.echo(f"{click.style('error:', fg='red', bold=True)} {text}", err=True)
    if ctx.meta.get(JSON):
        try:
            emit_json({"error": {"kind": type(error).__name__, "message": text, "exit_code": code}})
            with printing():
                sys.stdout.flush()
        except (OutputError, BrokenPipeError):
            _forget_output()  # the error has been said
    raise click.exceptions.Exit(code) from None


def explain(error: Exception) -> tuple[int, str]:
    """The exit code and the message for an error."""
    code, text = _explained(error)
    return code, clean(text)


def _explained(error: Exception) -> tuple[int, str]:
    if isinstance(error, CheckpointError):
        return error.exit_code, str(error)
    if isinstance(error, click.BadParameter) and error.param is not None and error.message:
        return error.exit_code, f"{typed_as(error.param)}: {error.message}"
    if isinstance(error, click.ClickException):
        return error.exit_code, _as_ours(error.format_message())
    if isinstance(error, OSError):
        return StorageError.exit_code, explain_os_error(error)
    if isinstance(error, MemoryError):
        return 2, "out of memory\nGive fewer --workers, or a smaller --max-memory."
    return 1, (
        f"{type(error).__name__}{_place(error)}: {error}\n"
        f"This is a bug in mcore_rlhf {__version__}. `mcore-rlhf --debug …` (or MCORE_RLHF_DEBUG=1) shows the traceback to report with it."
    )


def _as_ours(text: str) -> str:
    """What click says (``No such command 'x'. Did you mean 'y'?``), spelled as everything else is."""
    return f"{text[:1].lower()}{text[1:]}".replace(". Did you mean ", "; did you mean ").removesuffix(".")


def _place(error: Exception) -> str:
    """Where an unexpected error was raised."""
    import traceback

    frames = traceback.extract_tb(error.__traceback__)
    return f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""


def explain_os_error(error: OSError) -> str:
    """What the file system refused, and what helps."""
    from mcore_rlhf.storage.paths import storage_error

    if error.filename is None:
        return error.strerror or str(error)
    return str(storage_error(error, Path(os.fsdecode(error.filename)), "read or write"))


def _print_traceback() -> None:
    import traceback

    click.echo(printable(traceback.format_exc()), err=True)


def _forget_output() -> None:
    """Let the interpreter not try again to print what could not be printed."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _is_of_output(error: Exception) -> bool:
    """Whether click failed to print the help or the version; errors of files name the file."""
    return isinstance(error, OSError) and error.filename is None and error.errno in (errno.ENOSPC, errno.EBADF)


def _leave_output(error: Exception) -> NoReturn:
    """Say what is wrong with standard output; what was printed is lost."""
    _forget_output()
    click.echo(f"{click.style('error:', fg='red', bold=True)} standard output: cannot write: {reason(error)}", err=True)
    raise click.exceptions.Exit(StorageError.exit_code) from None


def _leave_pipe() -> NoReturn:
    """End quietly, as a program does that SIGPIPE kills; the interpreter must not flush into the pipe again."""
    _forget_output()
    raise click.exceptions.Exit(128 + signal.SIGPIPE) from None


def _interrupted(stop: KeyboardInterrupt) -> NoReturn:
    signum = stop.args[0] if stop.args and isinstance(stop.args[0], int) else signal.SIGINT
    click.echo(f"interrupted: {clean(stop.message)}" if isinstance(stop, Interrupted) else "interrupted", err=True)
    raise click.exceptions.Exit(128 + signum) from None


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP all raise KeyboardInterrupt, once; a second one does not disturb the cleaning up.

    Signals that are ignored (``nohup``) stay so. While a module is being loaded, the interrupt waits until it is: native code
    (torch, NumPy) does not bear an exception out of its own set-up, and aborts the process, or swallows it. Where Python has
    nobody to raise it to (in a ``__del__``, or what a weak reference calls), it is raised again a little later.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    defaults = (signal.SIG_DFL, signal.default_int_handler)
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    taken = [number for number, handler in before.items() if handler in defaults]
    loading, alarm = _imports(sys._getframe()), signal.getsignal(signal.SIGALRM)
    timer = signal.getitimer(signal.ITIMER_REAL)

    def stop(signum: int, frame: FrameType | None) -> None:
        for number in taken:
            signal.signal(number, _be_patient)
        if _imports(frame) <= loading:
            raise KeyboardInterrupt(signum)
        stop_later(signum)

    def stop_later(signum: int) -> None:
        signal.signal(signal.SIGALRM, lambda _, later: stop(signum, later))
        signal.setitimer(signal.ITIMER_REAL, _LATER_S)

    try:
        for number in taken:
            signal.signal(number, stop)
        with _none_lost(stop_later):
            yield
    finally:
        if signal.getsignal(signal.SIGALRM) is not alarm:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, alarm)
            signal.setitimer(signal.ITIMER_REAL, *timer)
        for number in taken:
            signal.signal(number, before[number])


@contextmanager
def _none_lost(stop_later: Callable[[int], None]) -> Iterator[None]:
    """An interrupt that Python drops, since nobody called where it was raised, comes again, and is not printed as an ignored error."""
    hook = sys.unraisablehook

    def unheard(lost: sys.UnraisableHookArgs) -> None:
        if isinstance(lost.exc_value, KeyboardInterrupt) and lost.exc_value.args:
            stop_later(lost.exc_value.args[0])
        else:
            hook(lost)

    sys.unraisablehook = unheard
    try:
        yield
    finally:
        sys.unraisablehook = hook


def _imports(frame: FrameType | None) -> int:
    """How many imports are under way in a stack."""
    count = 0
    while frame is not None:
        count += frame.f_code.co_filename == "<frozen importlib._bootstrap>"
        frame = frame.f_back
    return count


def _be_patient(signum: int, frame: object) -> None:
    """The second signal: say what is going on; the third one ends the process as it is."""
    os.write(2, b"cleaning up; once more leaves at once, and the half-written folder to the next conversion\n")
    signal.signal(signum, lambda number, frame: os._exit(128 + number))
