"""A format that says in one relation where its tensors lie: rows dealt out to files, behind heads, with a run of its own files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any

import pytest

from mcore_rlhf.convert import ConvertOptions, convert
from mcore_rlhf.errors import Incomplete, Untrusted
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.formats import registry
from mcore_rlhf.formats.whole import (
    Box,
    Chunk,
    DType,
    ModuleState,
    ParamGroup,
    ReadablePath,
    Record,
    Shape,
    Sidecar,
    Source,
    TensorEntry,
    TensorName,
    TrainingState,
    WholeFormat,
    WriteOptions,
    dtype_of,
    head_of,
    plain,
    read_head,
    read_json,
    row_major,
)  # fmt: skip
from mcore_rlhf.storage.publish import MANIFEST_NAME
from mcore_rlhf.storage.reading import opened as open_file
from mcore_rlhf.verify.checkpoint import Depth, verify

GOLDEN = Path(__file__).resolve().parents[2] / "goldens" / "transformers" / "checkpoint-2"
RUN, RANKS = "run.json", 3
HEAD = head_of({"dealt": 1})


class DealtFormat(WholeFormat):
    """Three ranks have the rows of every tensor; parameters are known by their numbers."""

    name, family, markers = "dealt", "module", (RUN,)

    def stored(self, path: ReadablePath, role: str) -> Iterator[TensorEntry]:
        run = read_json(path / RUN)
        for number, state, shape, dtype, places in run["tensors"]:
            yield _entry(TensorName(role, run["names"][number], state), tuple(shape), dtype, places)

    def laid(
        self, tensors: Sequence[tuple[TensorName, Shape, DType]], source: Source, options: WriteOptions
    ) -> Iterator[TensorEntry]:
        ends = [len(HEAD)] * RANKS
        for name, shape, dtype in tensors:
            rows, places = (*shape, 1)[0], []
            for rank in range(RANKS):
                start, stop = rows * rank // RANKS, rows * (rank + 1) // RANKS
                if start < stop:
                    places.append((f"rank{rank}.bin", start, stop - start, ends[rank]))
                    ends[rank] += (stop - start) * prod(shape[1:]) * dtype.itemsize
            yield _entry(name, shape, str(dtype), places)

    def head(self, records: Sequence[Record]) -> bytes:
        return HEAD

    def texts(self, entries: Sequence[TensorEntry], source: Source) -> dict[str, str | bytes]:
        names = list(dict.fromkeys(entry.name.param for entry in entries))
        tensors = [(names.index(e.name.param), e.name.state, e.global_shape, str(e.dtype), _places(e)) for e in entries]
        groups = [{**plain(group.fields), "params": [*map(names.index, group.params)]} for group in source.state.groups]
        run = {"step": source.state.iteration, "tied": dict(source.family.shared), "groups": groups}
        return {RUN: json.dumps({**run, "names": names, "tensors": tensors})}

    def run(self, path: ReadablePath, entries: Sequence[TensorEntry]) -> Sidecar | None:
        run = read_json(path / RUN)
        params = [tuple(run["names"][number] for number in group.pop("params")) for group in run["groups"]]
        groups = tuple(ParamGroup(group, params=of) for group, of in zip(run["groups"], params, strict=True))
        return Sidecar(state=TrainingState(run["step"], groups=groups), module=ModuleState(shared=run["tied"]))


def _entry(name: TensorName, shape: Shape, dtype: str, places: Sequence[tuple[str, int, int, int]]) -> TensorEntry:
    chunks, inner = [], (0,) * (len(shape) - 1)
    for file, start, rows, offset in places:
        box = Box((start, *inner), (rows, *shape[1:])) if shape else Box.whole(())
        record = Record(file, f"{name.param}:{name.state}", dtype_of(dtype), box.numel, offset)
        chunks.append(Chunk(box, record, 0, row_major(box.shape)))
    return TensorEntry(name, shape, dtype_of(dtype), tuple(chunks))


def _places(entry: TensorEntry) -> list[tuple[str, int, int, int]]:
    of = [(chunk.record, (*chunk.box.offset, 0)[0], (*chunk.box.shape, 1)[0]) for chunk in entry.chunks]
    return [(record.file, start, rows, record.byte_offset) for record, start, rows in of]


@pytest.fixture
def dealt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder of it, as its framework would have it: nothing of ours lies beside."""
    monkeypatch.setattr(registry, "FORMATS", (*registry.FORMATS, DealtFormat()))
    convert(GOLDEN, tmp_path / "dealt", ConvertOptions(to="dealt", fsync=False))
    shutil.rmtree(tmp_path / "dealt" / "mcore_rlhf")
    (tmp_path / "dealt" / MANIFEST_NAME).unlink()
    return tmp_path / "dealt"


def test_files_are_those_with_parts_of_tensors(dealt: Path) -> None:
    assert {path.name for path in dealt.iterdir()} == {"run.json", "rank0.bin", "rank1.bin", "rank2.bin"}
    for path in dealt.glob("*.bin"):
        with open_file(path) as file:
            assert read_head(file) == ({"dealt": 1}, len(HEAD))
    opened, golden = (registry.open_checkpoint(path, ReadOptions()) for path in (dealt, GOLDEN))
    assert [file.path for file in opened.files] == ["rank0.bin", "rank1.bin", "rank2.bin", "run.json"]
    assert (opened.state.iteration, opened.family.shared) == (2, golden.family.shared)
    assert [group.params for group in opened.state.groups] == [group.params for group in golden.state.groups]
    assert verify(dealt, ReadOptions(), Depth.DEEP).intact


@pytest.mark.parametrize("to", ["hf-trainer", "deepspeed", "universal", "dcp", "dealt"])
def test_it_goes_to_others_with_all_that_its_own_files_say(dealt: Path, tmp_path: Path, to: str) -> None:
    job = convert(dealt, tmp_path / "there", ConvertOptions(to=to, fsync=False))
    assert job.account.unaccounted == ()
    assert job.account.lost == []


def _told(folder: Path, **places: Any) -> None:
    run = json.loads((folder / RUN).read_text())
    run["tensors"][0][4][0] = [places.get("file", "rank0.bin"), 0, 16, places.get("offset", 8)]
    (folder / RUN).write_text(json.dumps(run))


@pytest.mark.parametrize("name", ["../run.bin", "/etc/hostname", "a//b", ""])
def test_a_file_that_is_no_plain_path_is_never_looked_at(dealt: Path, name: str) -> None:
    _told(dealt, file=name)
    (dealt.parent / "run.bin").write_bytes(b"x" * 4096)
    with pytest.raises(Untrusted, match="which is not a plain path inside its folder"):
        registry.open_checkpoint(dealt, ReadOptions())


def test_a_file_that_is_missing_or_ends_too_early_is_named(dealt: Path) -> None:
    _told(dealt, offset=1 << 30)
    with pytest.raises(Incomplete, match=r"rank0\.bin: ends at byte "):
        registry.open_checkpoint(dealt, ReadOptions())
    _told(dealt, file="rank9.bin")
    with pytest.raises(Incomplete, match=r"rank9\.bin: is missing, and belongs to a checkpoint of format dealt"):
        registry.open_checkpoint(dealt, ReadOptions())


@pytest.mark.parametrize("data", [b"", b"\x01\x02", HEAD[:-1], b"\xff" * 8 + b"{}"])
def test_a_head_that_no_file_has_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x.bin").write_bytes(data)
    with open_file(tmp_path / "x.bin") as file, pytest.raises(Incomplete, match=r"x\.bin: "):
        read_head(file)
