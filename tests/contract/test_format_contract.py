"""What every format promises, whatever it is: a new one adds its goldens here, and passes."""

from __future__ import annotations

import fnmatch
import json
import pickle
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from mcore_rlhf.convert import convert, prepare
from mcore_rlhf.core.catalog import PARAM, TensorName
from mcore_rlhf.core.facts import Fate
from mcore_rlhf.core.plan import check_tiles
from mcore_rlhf.errors import CheckpointError, NotACheckpoint
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.families.source import Source
from mcore_rlhf.formats.base import Format
from mcore_rlhf.formats.registry import FORMATS, detect, format_at, format_named, open_checkpoint
from mcore_rlhf.storage.reading import OpenFiles
from mcore_rlhf.verify.differ import Differ
from tests.helpers.conversions import options
from tests.helpers.damage import snapshot

GOLDENS = Path(__file__).parents[1] / "goldens"
# One small, genuine checkpoint of each format, written by its own framework.
GOLDEN_OF = {
    "megatron": GOLDENS / "megatron" / "tp2pp2dp2_tied_bf16_do",
    "megatron-dist": GOLDENS / "megatron_dist" / "tp2pp2dp2_fully_reshardable",
    "universal": GOLDENS / "deepspeed" / "z2_bf16_ac_dp2" / "step3_uni",
    "deepspeed": GOLDENS / "deepspeed" / "z2_bf16_ac_dp2" / "step3",
    "hf": GOLDENS / "huggingface" / "llama_tied_bf16_sharded",
    "peft": GOLDENS / "peft" / "adapter",
    "dcp": GOLDENS / "dcp" / "fsdp2_ws3" / "actor",
    "hf-trainer": GOLDENS / "transformers" / "checkpoint-2",
    "hf-accelerate": GOLDENS / "transformers" / "step_2",
    "fsdp-ranks": GOLDENS / "verl" / "fsdp2_ws3",
    "torch": GOLDENS / "torch" / "actor",
}
ITERATION_OF = {
    "megatron": 2, "megatron-dist": 2, "universal": 3, "deepspeed": 3, "peft": 0, "hf": 0, "dcp": 2, "hf-trainer": 2,
    "hf-accelerate": 2, "fsdp-ranks": 2, "torch": 2,
}  # fmt: skip
WITHIN = {"hf-trainer": "hf", "hf-accelerate": "hf"}
"""Formats that have a folder of another in theirs, which is one by itself, too; the registry asks them first."""

WEIGHTS_ALONE = {"hf", "peft"}
"""Formats whose golden has no optimizer, since their own framework stores none."""


def test_every_format_has_a_golden_and_a_name_of_its_own() -> None:
    names = [known.name for known in FORMATS]
    assert len(set(names)) == len(names)
    assert set(GOLDEN_OF) == set(names)
    assert [format_named(name) for name in names] == list(FORMATS)
    with pytest.raises(CheckpointError, match="gguf"):
        format_named("gguf")


@pytest.fixture(scope="module", params=FORMATS, ids=lambda known: known.name)
def known(request: pytest.FixtureRequest) -> Format:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def golden(known: Format) -> Path:
    return GOLDEN_OF[known.name]


@pytest.fixture(scope="module")
def source(known: Format, golden: Path) -> Source:
    return known.read(golden, ReadOptions())


@pytest.fixture(scope="module")
def rewritten(known: Format, golden: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The golden, written by us in its own format."""
    target = tmp_path_factory.mktemp("contract") / "target"
    convert(golden, target, replace(options(), to=known.name))
    return target


class TestFormat:
    """Each test holds for each format."""

    def test_it_detects_its_own_and_nothing_else(
        self, known: Format, golden: Path, rewritten: Path, tmp_path: Path
    ) -> None:
        for name, path in GOLDEN_OF.items():
            assert known.detect(path) == (known.name in (name, WITHIN.get(name)))
        assert detect(golden) is known
        assert detect(rewritten) is known
        assert not known.detect(tmp_path)
        (tmp_path / "notes.txt").write_text("")
        assert not known.detect(tmp_path)
        assert not known.detect(tmp_path / "nowhere")

    def test_nobody_looks_into_a_folder_that_has_none_of_its_markers(
        self, known: Format, golden: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        there = {path.name for path in golden.iterdir()}
        for other in FORMATS:
            if other.markers and not any(fnmatch.filter(there, mark) for mark in other.markers):
                assert other is not known
                monkeypatch.setattr(other, "detect", lambda path: pytest.fail(f"{path} was looked into"))
        assert format_at(golden) is known
        passed_over = [one.name for one in FORMATS if "detect" in vars(one)]
        assert known.name != "hf" or passed_over == ["megatron-dist", "megatron", "universal", "torch"]

    def test_a_folder_without_a_checkpoint_is_said_to_be_one(self, known: Format, tmp_path: Path) -> None:
        with pytest.raises(NotACheckpoint, match=str(tmp_path)):
            known.read(tmp_path, ReadOptions())

    def test_reading_changes_nothing(self, known: Format, golden: Path) -> None:
        before = snapshot(golden)
        known.read(golden, ReadOptions())
        assert snapshot(golden) == before

    def test_its_source_says_what_it_is(self, known: Format, golden: Path, source: Source) -> None:
        assert source.format == known.name
        assert source.role == "actor"
        assert open_checkpoint(golden, ReadOptions(role="critic")).role == "critic"
        assert source.state.iteration == ITERATION_OF[known.name]
        assert source.model.params
        if known.name in WEIGHTS_ALONE:
            assert (source.states, source.optimizer, source.state.groups) == ((), None, ())
            return
        assert source.states[0] == "master"
        assert {"exp_avg", "exp_avg_sq"} <= set(source.states)
        assert source.state.groups

    def test_names_are_unique_and_counted(self, source: Source) -> None:
        names = list(source.catalog)
        assert [name for name, count in Counter(names).items() if count > 1] == []
        assert len(source.catalog) == len(names)
        assert {name.role for name in names} == {source.role}
        assert {name.param for name in names} == {param.name for param in source.model.params}
        assert {name.state for name in names} | {PARAM} == {PARAM, *source.states}

    def test_every_name_is_an_entry_that_tiles_its_tensor(self, source: Source) -> None:
        for name in source.catalog:
            entry = source.catalog.get(name)
            assert entry is not None
            assert entry.name == name
            assert check_tiles(entry) is None, name
            spec = source.model.get(name.param)
            assert spec is not None
            assert entry.global_shape == spec.global_shape

    def test_chunks_lie_inside_their_records_and_records_inside_files(self, source: Source) -> None:
        sizes = {file.path: file.nbytes for file in source.files}
        for name in source.catalog:
            entry = source.catalog.get(name)
            for chunk in entry.chunks if entry else ():
                last = chunk.start + sum((n - 1) * s for n, s in zip(chunk.box.shape, chunk.strides, strict=True))
                assert 0 <= chunk.start <= last < chunk.record.numel, name
                assert chunk.record.byte_offset + chunk.record.nbytes <= sizes[chunk.record.file]
                assert not Path(chunk.record.file).is_absolute()
                assert (source.root / chunk.record.file).stat().st_size == sizes[chunk.record.file]

    def test_unknown_names_have_no_entry(self, source: Source) -> None:
        first = next(iter(source.catalog))
        for unknown in (
            first._replace(param="no.such.weight"), first._replace(state="momentum"), first._replace(role="stranger"),
            TensorName("", ""),
        ):  # fmt: skip
            assert source.catalog.get(unknown) is None

    def test_looking_up_twice_gives_the_same(self, source: Source) -> None:
        for name in list(source.catalog)[:5]:
            assert source.catalog.get(name) == source.catalog.get(name)

    def test_what_it_writes_reads_equal(self, golden: Path, rewritten: Path) -> None:
        a, b = (open_checkpoint(path, ReadOptions()) for path in (golden, rewritten))
        with OpenFiles(a.root) as files_a, OpenFiles(b.root) as files_b:
            result = Differ(a, b, files_a, files_b).compare()
        assert result.equal, result.differences[:3]
        assert result.tensors == len(a.catalog)
        assert (b.states, b.optimizer, b.model) == (a.states, a.optimizer, a.model)

    def test_writing_twice_gives_the_same_bytes(
        self, known: Format, golden: Path, rewritten: Path, tmp_path: Path
    ) -> None:
        """Derived random states and all: a conversion is a function of its source and options."""
        convert(golden, tmp_path / "again", replace(options(), to=known.name, workers=1, max_memory=1 << 20))
        files = [path.relative_to(rewritten) for path in rewritten.rglob("*") if path.is_file()]
        assert len(files) > 2
        for file in files:
            if file.name != "mcore_rlhf.json":
                assert (rewritten / file).read_bytes() == (tmp_path / "again" / file).read_bytes(), file

    def test_a_target_is_data(self, known: Format, golden: Path) -> None:
        """It can be planned again and again, file by file; plans are picklable and the report is plain JSON."""
        job = prepare(golden, replace(options(), to=known.name))
        plans = [planned.plan for planned in job.plans()]
        assert [p.file for p in plans] == [file.path for file in job.target.files]
        assert len({p.file for p in plans}) == len(plans)
        assert [[*planned.plan.copies] for planned in job.plans()] == [[*p.copies] for p in plans]
        assert all([*pickle.loads(pickle.dumps(p)).copies] == [*p.copies] for p in plans)
        assert not any(p.problems for p in plans)
        lines = json.loads(json.dumps(job.report.as_json()))
        assert {line["fate"] for line in lines} <= {fate.value for fate in Fate}
        for file in job.target.files:
            layout = file.layout()
            assert {record.file for record in layout.records} <= {file.path}
            assert len({record.key for record in layout.records}) == len(layout.records)
            held = {chunk.record for entry in layout.holds.entries() for chunk in entry.chunks}
            assert held <= set(layout.records)
