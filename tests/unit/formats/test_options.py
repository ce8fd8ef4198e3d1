"""The table of options against everything that is made of it: the formats, the library's options, the pages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from mcore_rlhf.cli.job import make_job
from mcore_rlhf.convert import ConvertOptions, prepare
from mcore_rlhf.errors import NotACheckpoint, UsageError
from mcore_rlhf.families.job_options import JobOptions, PartNumber
from mcore_rlhf.families.option_types import GROUPS, Option, Takes
from mcore_rlhf.families.options import OPTIONS, ReadOptions, StoreOptions, WriteOptions
from mcore_rlhf.formats.registry import FORMATS, named
from tests.helpers import option_tables
from tests.helpers.option_tables import TARGETS, titles, written

PAGE = option_tables.PAGE.read_text(encoding="utf-8")
INTERNAL = {
    "read.optimizer",
    "read.values",
    "run.read",
    "run.write",
    "run.trainer",
    "write.run_of",
}
"""Fields that follow from others, or from what is asked."""
SAMPLES: dict[str, Any] = {
    "to": "hf", "dtype": "bf16", "optimizer": "plain", "rng": "drop", "transformer_impl": "local", "pipeline_layout": "3,5",
    "eos_token_ids": (1, 2), "lr_limits": (1e-5, 0.0), "stub": ("a.B",), "ignore_field": ("a",), "max_memory": 1 << 20, "rules": None,
    "part": PartNumber(3, 16), "executor": "ray", "optimizer_sharding": "dp_reshardable",
    "store_option": ("region=eu-west-1",), "layout": "plain",
}  # fmt: skip


def sample(row: Option) -> Any:
    """A value that is not the default, as the library takes it."""
    if row.name in SAMPLES:
        return SAMPLES[row.name]
    return (
        True
        if row.kind.word is bool
        else 2
        if row.kind.least is not None
        else 3
        if row.kind.metavar == "SIZE"
        else "text"
    )


def refused() -> Iterator[Any]:
    """Every option with every target for which it means nothing."""
    for row in OPTIONS:
        for to in FORMATS:
            if not row.is_for(to.takes):
                yield pytest.param(row, to.name, id=f"{row.name}-{to.name}")


def test_some_format_takes_what_an_option_is_about() -> None:
    assert (
        {row.takes for row in OPTIONS} - {None} == set(Takes) == {taken for known in FORMATS for taken in known.takes}
    )


def test_every_field_of_the_library_has_one_row() -> None:
    kinds = {
        "read": ReadOptions,
        "write": WriteOptions,
        "run": ConvertOptions,
        "job": JobOptions,
        "store": StoreOptions,
    }
    known = {f"{section}.{field.name}" for section, kind in kinds.items() for field in fields(kind)}  # type: ignore[arg-type]
    counts = Counter(place for row in OPTIONS for place in row.at)
    assert set(counts) == known - INTERNAL
    assert max(counts.values()) == 1
    assert max(Counter(row.name for row in OPTIONS).values()) == 1


@pytest.mark.parametrize("row", OPTIONS, ids=lambda row: row.name)
def test_a_value_that_was_read_is_read_as_itself(row: Option) -> None:
    if row.name != "rules":
        assert row.kind.read(row.kind.read(sample(row))) == sample(row)


@pytest.mark.parametrize(("row", "to"), list(refused()))
def test_python_refuses_what_the_command_line_refuses(row: Option, to: str) -> None:
    """Before anything is opened: there is no such source."""
    (place,) = row.at
    write = WriteOptions(**{place.removeprefix("write."): sample(row)})
    meant = " or ".join(f"--to {known.name}" for known in named() if row.is_for(known.takes))
    with pytest.raises(UsageError) as error:
        prepare(Path("nowhere"), ConvertOptions(to=to, write=write))
    assert str(error.value).startswith(f"{row.flag}: means nothing with --to {to}; it is for {meant}\n")
    if row.commands:
        with pytest.raises(UsageError) as said:
            make_job({"to": to, row.name: sample(row)})
        assert str(said.value) == str(error.value)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (ConvertOptions(write=WriteOptions(tp=0, rng="keeep")), "- --rng: should be 'keep', 'derive' or 'drop', found 'keeep'"),
        (ConvertOptions(write=WriteOptions(zero_stage=4), to="deepspeed"), "--zero-stage: should be less than or equal to 3"),
        (ConvertOptions(write=WriteOptions(dtype="int8")), "--dtype: should be a floating-point type, found 'int8'"),
        (ConvertOptions(read=ReadOptions(step=-1)), "--step: should be greater than or equal to 0, found -1"),
        (ConvertOptions(workers=0), "--workers: should be greater than or equal to 1, found 0"),
        (ConvertOptions(fsync=3), "--no-fsync: should be true or false, found 3"),  # type: ignore[arg-type]
    ],
)  # fmt: skip
def test_python_refuses_impossible_values(options: ConvertOptions, text: str) -> None:
    with pytest.raises(UsageError) as error:
        prepare(Path("nowhere"), options)
    assert text in str(error.value)
    with pytest.raises(NotACheckpoint, match="nowhere"):  # with the defaults, it gets as far as the source
        prepare(Path("nowhere"), replace(ConvertOptions(), to=options.to))


def test_the_page_has_the_tables_that_the_rows_make() -> None:
    assert written(PAGE) == PAGE, "python -m tests.helpers.option_tables writes them"
    assert sorted(titles(PAGE)) == sorted([*GROUPS, TARGETS])
    assert {row.group for row in OPTIONS if row.commands} == set(GROUPS)
    assert all(f"| `{row.flag}` |" in PAGE for row in OPTIONS if row.commands)
