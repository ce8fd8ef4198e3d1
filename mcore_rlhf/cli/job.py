"""A conversion job: the options of ``convert`` as one checked object, from the command line, a YAML file or both.

::

    name: qwen2.5-7b-to-tp8
    source: ${RUN}/checkpoints/global_step_1840/actor     # ${NAME} is an environment variable; ${NAME:-x} has a default
    target: ${RUN}/reshaped
    to: megatron
    tp: 8
    pp: 1
    no_optimizer: false

Keys are the options' long names with underscores. What the command line gives wins over the file. Relative folders
count from where the command runs, the ``rules`` file from where the job file lies.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcore_rlhf.core.yaml_text import MAX_NBYTES, check_yaml, wrong_yaml
from mcore_rlhf.errors import NotACheckpoint, Problems, UsageError, shown
from mcore_rlhf.families.job_options import JobOptions
from mcore_rlhf.families.options import (
    ConvertOptions,
    ReadOptions,
    StoreOptions,
    WriteOptions,
    of_command,
    placed,
    read_values,
)
from mcore_rlhf.formats.registry import wanted_format
from mcore_rlhf.manager.into_run import resolved
from mcore_rlhf.storage import reading
from mcore_rlhf.storage.paths import ReadablePath
from mcore_rlhf.storage.settings import SETTINGS
from mcore_rlhf.storage.urls import checkpoint_path
from mcore_rlhf.suggestions import FLAGS, did_you_mean

from .options import default_workers
from .progress import shown_progress

if TYPE_CHECKING:
    from mcore_rlhf.manager.subject import Subject

_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
_ROWS = {row.name: row for row in of_command("convert")}
_TEXTS = ("name", "description", "source", "target")
_PATHS = ("source", "target", *(name for name, row in _ROWS.items() if row.kind.path))


@dataclass(frozen=True, slots=True)
class ConversionJob(JobOptions):
    """Everything that ``convert`` can be told.

    Args:
        options: As the library takes them.
        source, target: The folders; None where nobody named one.
        name, description: What a job file calls it.
    """

    options: ConvertOptions = field(default_factory=ConvertOptions)
    source: str | None = None
    target: str | None = None
    name: str | None = None
    description: str | None = None

    def source_folder(self) -> ReadablePath:
        """The source.

        Raises:
            UsageError: Neither the command line nor the job file names one.
        """
        path = checkpoint_path(self._named("source", "SRC"))
        return path.expanduser() if isinstance(path, Path) else path

    def subject(self) -> Subject:
        """What the source means: never an older step than the newest, unless that was asked for.

        Raises:
            UsageError: Neither the command line nor the job file names one.
            Corrupt: The newest step is damaged, and neither ``--step`` nor ``--newest-intact`` was given.
            CheckpointError: See :func:`mcore_rlhf.manager.subject.find`.
        """
        from mcore_rlhf.manager.subject import chosen_step, find

        path, options = self.source_folder(), self.options.read
        if self.newest_intact:
            with shown_progress() as progress:
                return find(path, options, chosen_step(path, newest_intact=True, progress=progress))
        try:
            found = find(path, options)
        except NotACheckpoint as error:
            raise NotACheckpoint(f"{error}{self._swapped(path)}") from None
        if found.chosen is not None:
            found.chosen.require_newest()
        return found

    def _swapped(self, source: ReadablePath) -> str:
        """Whether source and target may have been given in the wrong order; a line of advice, or nothing."""
        if not self.target or source.exists() or not Path(self.target).is_dir():
            return ""
        return f"\nAre the two swapped? {self.target}, given as the target, is there; SRC comes before DST."

    def target_folder(self) -> ReadablePath:
        """The target.

        Raises:
            UsageError: Neither the command line nor the job file names one.
        """
        path = checkpoint_path(self._named("target", "DST"))
        return path.expanduser() if isinstance(path, Path) else path

    def _named(self, end: str, argument: str) -> str:
        value: str | None = getattr(self, end)
        if not value:
            raise UsageError(
                f"no {end} was given\nGive {argument} on the command line, or '{end}:' in the --config file."
            )
        return value


def make_job(given: Mapping[str, Any], config: Path | None = None) -> ConversionJob:
    """The job that a command line means.

    Args:
        given: What the command line says, by field name; None is what it does not say.
        config: A job file for everything else.

    Raises:
        UsageError: Something is unknown, impossible, or of no meaning for the target's format; all of it is named.
    """
    said = {name: value for name, value in given.items() if value not in (None, [], ())}
    from_file = read_job_file(config) if config is not None else {}
    values = read_values({**from_file, **said}, {name: config for name in from_file.keys() - said.keys() if config})
    texts = {name: values.pop(name) for name in _TEXTS if name in values}
    at = placed({"workers": default_workers(), **values})
    SETTINGS.set(StoreOptions(**at["store"]).settings())
    options = resolved(ConvertOptions(read=ReadOptions(**at["read"]), write=WriteOptions(**at["write"]), **at["run"]))
    wanted_format(options)
    if at["job"].get("newest_intact") and options.read.step is not None:
        raise UsageError(f"--newest-intact and --step {options.read.step} contradict each other\nGive one of them.")
    if at["job"].get("part") and (at["job"].get("finish") or at["job"].get("verify")):
        raise UsageError(
            "--part: what --finish and --verify ask for can be done once all parts are\nGive --part alone."
        )
    if at["job"].get("plan") and not at["job"].get("part"):
        raise UsageError(
            "--plan: is what --part goes by; one process plans by itself, and so does --finish\nGive --part K/N."
        )
    if at["job"].get("executor") == "ray" and (at["job"].get("part") or at["job"].get("finish")):
        raise UsageError("--executor ray: does all parts, and joins them\nLeave --part and --finish out.")
    return ConversionJob(**at["job"], options=options, **texts)


def read_job_file(path: Path) -> dict[str, Any]:
    """The keys of a YAML job, with environment variables filled in.

    Raises:
        UsageError: It cannot be read, is not a mapping, has unknown keys, or names a variable that is not set.
    """
    import yaml

    try:
        text = reading.read_text(path, MAX_NBYTES)
        check_yaml(text)
        document = yaml.safe_load(text)
    except OSError as error:
        raise UsageError(f"{path}: cannot read the conversion job: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"{path}: cannot read the conversion job: {error}") from None
    except yaml.YAMLError as error:
        raise UsageError(f"{path}: the conversion job is not valid YAML: {wrong_yaml(error)}") from None
    if not isinstance(document, dict):
        raise UsageError(f"{path}: expected a mapping such as 'tp: 8', found {shown(document)}")
    problems = Problems()
    _check_keys(path, document, problems)
    keys = {name: _filled(path, name, value, problems) if name in _PATHS else value for name, value in document.items()}
    problems.raise_if_any()
    if isinstance(keys.get("rules"), str):
        keys["rules"] = str(path.parent / Path(keys["rules"]).expanduser())
    return keys


_ENDS = {"SRC": "source", "DST": "target"}
_OTHERS = {word: _ENDS.get(option, option.removeprefix("--").replace("-", "_")) for word, option in FLAGS.items()}


def _check_keys(path: Path, keys: Iterable[object], problems: Problems) -> None:
    known = [*_TEXTS, *_ROWS]
    for key in keys:
        if key not in known:
            hint = did_you_mean(str(key), known, _OTHERS)
            problems.add(UsageError, f"{path}: unknown key {shown(key)}{hint}", f"Known keys: {', '.join(known)}")


def _filled(path: Path, key: str, value: Any, problems: Problems) -> Any:
    if not isinstance(value, str):
        return value

    def fill(match: re.Match[str]) -> str:
        name, default = match.groups()
        found = os.environ.get(name) or default
        if found is None:
            problems.add(
                UsageError,
                f"{path}: {key}: the environment variable {name} is not set (in {shown(value)})",
                f"Set it (export {name}=…), or give the {key} on the command line.",
            )
        return found or ""

    return _VARIABLE.sub(fill, value)
