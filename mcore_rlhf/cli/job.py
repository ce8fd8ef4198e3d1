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

import difflib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from mcore_rlhf.errors import CheckpointError, Problems, UsageError
from mcore_rlhf.storage.sizes import parse_size

from .options import default_workers

if TYPE_CHECKING:
    from mcore_rlhf.convert import ConvertOptions
    from mcore_rlhf.formats.base import ReadOptions, WriteOptions

_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
_PATHS = ("source", "target", "rules", "reference_config", "tokenizer", "generation_config", "base_model")


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _joined(value: Any) -> Any:
    """``[3, 5, 4]`` is ``3,5,4``."""
    return ",".join(map(str, value)) if isinstance(value, list) else value


def _nbytes(value: Any) -> Any:
    return parse_size(value) if isinstance(value, str) else value


def _ids(value: Any) -> Any:
    """``1,2``, ``[1, 2]`` and ``1`` are ids of tokens."""
    if isinstance(value, str):
        parts = [part.strip() for part in value.split(",")]
        if not all(part.isdecimal() for part in parts):
            raise ValueError(f"should be ids of tokens such as 1,2, found {value!r}")
        return tuple(map(int, parts))
    return (value,) if isinstance(value, int) else tuple(value) if isinstance(value, list) else value


def _dtype(value: Any) -> Any:
    from mcore_rlhf.core.dtype import FLOATING, dtype_of

    if isinstance(value, str) and dtype_of(value) not in FLOATING:
        raise ValueError(f"should be a floating-point type, found {value!r}")
    return value


Degree = Annotated[int, Field(ge=1)]


class ConversionJob(BaseModel):
    """Everything that ``convert`` can be told; None keeps what the source has, or follows the default.

    Every field but ``name`` and ``description`` is an option of the command line, and is explained there.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    name: str | None = None
    description: str | None = None
    source: str | None = None
    target: str | None = None
    to: str = "megatron"

    role: str | None = None
    step: Annotated[int, Field(ge=0)] | None = None
    rules: str | None = None
    stub: Annotated[list[str], BeforeValidator(_listed)] = []

    tp: Degree | None = None
    pp: Degree | None = None
    vpp: Degree | None = None
    ep: Degree | None = None
    etp: Degree | None = None
    dp: Degree | None = None
    pipeline_layout: Annotated[str, BeforeValidator(_joined)] | None = None
    dtype: Annotated[str, BeforeValidator(_dtype)] | None = None
    no_optimizer: bool = False
    optimizer: Literal["distributed", "plain"] | None = None
    rng: Literal["keep", "derive", "drop"] | None = None
    vocab_size: Degree | None = None
    padded_vocab_size: Degree | None = None
    zero_stage: Annotated[int, Field(ge=0, le=3)] | None = None
    reference_config: str | None = None
    transformer_impl: Literal["local", "transformer_engine"] | None = None
    max_shard_size: Annotated[int, BeforeValidator(_nbytes), Field(ge=1)] | None = None
    tokenizer: str | None = None
    generation_config: str | None = None
    eos_token_ids: Annotated[tuple[Annotated[int, Field(ge=0)], ...], BeforeValidator(_ids)] = ()
    masters: bool = False
    with_optimizer: bool = False
    merge_adapter: bool = False
    base_model: str | None = None
    only: str | None = None
    exclude_frozen: bool = False

    trust_replicas: bool = False
    workers: Degree = Field(default_factory=default_workers)
    max_memory: Annotated[int, BeforeValidator(_nbytes), Field(ge=1 << 20)] = 2 << 30
    no_fsync: bool = False
    verify: bool = False
    strict: bool = False
    overwrite: bool = False

    def source_folder(self) -> Path:
        """The source.

        Raises:
            UsageError: Neither the command line nor the job file names one.
        """
        return self._folder("source", "SRC")

    def target_folder(self) -> Path:
        """The target.

        Raises:
            UsageError: Neither the command line nor the job file names one.
        """
        return self._folder("target", "DST")

    def _folder(self, field: str, argument: str) -> Path:
        value = getattr(self, field)
        if not value:
            raise UsageError(
                f"no {field} was given\nGive {argument} on the command line, or '{field}:' in the --config file."
            )
        return Path(value).expanduser()

    def convert_options(self) -> ConvertOptions:
        """The options as the library takes them.

        Raises:
            UsageError: The rules file cannot be read.
        """
        from mcore_rlhf.convert import ConvertOptions
        from mcore_rlhf.models.rules import Rules, read_rules

        rules = read_rules(Path(self.rules).expanduser()) if self.rules is not None else Rules()
        return ConvertOptions(
            to=self.to, read=self._read(rules), write=self._write(rules), workers=self.workers,
            max_memory=self.max_memory, fsync=not self.no_fsync, strict=self.strict, overwrite=self.overwrite,
            trust_replicas=self.trust_replicas,
        )  # fmt: skip

    def _read(self, rules: Any) -> ReadOptions:
        from mcore_rlhf.formats.base import ReadOptions

        return ReadOptions(
            self.role, self.step, rules, tuple(self.stub), self.vocab_size, only=self.only, exclude_frozen=self.exclude_frozen
        )  # fmt: skip

    def _write(self, rules: Any) -> WriteOptions:
        from dataclasses import fields

        from mcore_rlhf.formats.base import WriteOptions

        ours = ConversionJob.model_fields  # what has no option of its own keeps its default
        named = {f.name: getattr(self, f.name) for f in fields(WriteOptions) if f.name in ours and f.name != "rules"}
        return WriteOptions(rules=rules, **named)


def make_job(given: Mapping[str, Any], config: Path | None = None) -> ConversionJob:
    """The job that a command line means.

    Args:
        given: What the command line says, by field name; None is what it does not say.
        config: A job file for everything else.

    Raises:
        UsageError: Something is unknown, impossible, or of no meaning for the target's format; all of it is named.
    """
    from mcore_rlhf.formats.registry import FORMATS

    from .option_targets import refuse_meaningless

    options = {name: value for name, value in given.items() if value is not None}
    from_file = read_job_file(config) if config is not None else {}
    try:
        job = ConversionJob.model_validate({**from_file, **options})
    except ValidationError as error:
        raise _explain(error, options, config) from None
    refuse_meaningless(job, tuple(known.name for known in FORMATS))
    return job


def read_job_file(path: Path) -> dict[str, Any]:
    """The keys of a YAML job, with environment variables filled in.

    Raises:
        UsageError: It cannot be read, is not a mapping, has unknown keys, or names a variable that is not set.
    """
    import yaml

    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UsageError(f"{path}: cannot read the conversion job: {error}") from None
    if not isinstance(document, dict):
        raise UsageError(f"{path}: expected a mapping such as 'tp: 8', found {type(document).__name__}")
    problems = Problems()
    _check_keys(path, document, problems)
    keys = {name: _filled(path, name, value, problems) if name in _PATHS else value for name, value in document.items()}
    problems.raise_if_any()
    if isinstance(keys.get("rules"), str):
        keys["rules"] = str(path.parent / Path(keys["rules"]).expanduser())
    return keys


def _check_keys(path: Path, keys: Iterable[object], problems: Problems) -> None:
    known = list(ConversionJob.model_fields)
    for key in keys:
        if key not in known:
            close = difflib.get_close_matches(str(key).replace("-", "_"), known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            problems.add(UsageError, f"{path}: unknown key {key!r}{hint}", f"Known keys: {', '.join(known)}")


def _filled(path: Path, key: str, value: Any, problems: Problems) -> Any:
    if not isinstance(value, str):
        return value

    def fill(match: re.Match[str]) -> str:
        name, default = match.groups()
        found = os.environ.get(name) or default
        if found is None:
            problems.add(
                UsageError,
                f"{path}: {key}: the environment variable {name} is not set (in {value!r})",
                f"Set it (export {name}=…), or give the {key} on the command line.",
            )
        return found or ""

    return _VARIABLE.sub(fill, value)


def _explain(error: ValidationError, options: Mapping[str, Any], config: Path | None) -> CheckpointError:
    problems = Problems()
    for item in error.errors():
        field = str(item["loc"][0])
        where = f"--{field.replace('_', '-')}" if field in options else f"{config}: {field}"
        text = item["msg"].removeprefix("Value error, ").removeprefix("Input ")
        found = "" if "found" in text else f", found {item['input']!r}"
        problems.add(UsageError, f"{where}: {text}{found}")
    return UsageError(problems.describe())
