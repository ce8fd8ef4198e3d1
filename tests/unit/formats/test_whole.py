"""A format that says in one relation where its tensors lie: rows dealt out to files, behind heads, with a run of its own files."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import torch

from mcore_rlhf.convert import ConvertOptions, convert
from mcore_rlhf.core.facts import same
from mcore_rlhf.errors import Corrupt, Incomplete, LayoutMismatch, Unsupported, Untrusted, UsageError
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.families.sidecar import STATE
from mcore_rlhf.formats import registry
from mcore_rlhf.formats.readback import differences
from mcore_rlhf.formats.whole import (
    ModuleState,
    ParamGroup,
    ReadablePath,
    Record,
    Sidecar,
    Source,
    StoredFile,
    Takes,
    TensorEntry,
    TensorName,
    Tensors,
    TrainingState,
    WholeFormat,
    WriteOptions,
    dtype_of,
    entry_of,
    head_of,
    lay,
    parts_of_ranks,
    plain,
    read_head,
    read_json,
    row_of,
    rows_of_ranks,
    run_of,
    told_run,
)  # fmt: skip
from mcore_rlhf.storage.publish import MANIFEST_NAME
from mcore_rlhf.storage.reading import opened as open_file
from mcore_rlhf.verify.checkpoint import Depth, verify

GOLDEN = Path(__file__).resolve().parents[2] / "goldens" / "transformers" / "checkpoint-2"
MEGATRON = GOLDEN.parents[1] / "megatron" / "tp2pp2dp2_bf16_do"
RUN, RANKS = "run.json", 3
HEAD = head_of({"dealt": 1})


class DealtFormat(WholeFormat):
    """Ranks have the rows of every tensor; parameters are known by their numbers."""

    name, family, markers = "dealt", "module", (RUN,)
    takes = (*WholeFormat.takes, Takes.MODEL_PARALLEL, Takes.DATA_PARALLEL)

    def stored(self, path: ReadablePath, role: str) -> Iterator[TensorEntry]:
        run = read_json(path / RUN)
        return (entry_of(role, [run["names"][number], *of]) for number, *of in run["tensors"])

    def laid(self, tensors: Tensors, source: Source, options: WriteOptions) -> Iterator[TensorEntry]:
        for name, shape, dtype in tensors:
            parts = rows_of_ranks(shape, options.dp or RANKS)
            yield lay(name, shape, dtype, [(f"rank{rank}.bin", box) for rank, box in parts])

    def head(self, records: Sequence[Record]) -> bytes:
        return HEAD

    def texts(self, entries: Sequence[TensorEntry], source: Source) -> dict[str, str | bytes]:
        names = list(dict.fromkeys(entry.name.param for entry in entries))
        tensors = [(names.index(param), *of) for param, *of in map(row_of, entries)]
        groups = [{**plain(group.fields), "params": [*map(names.index, group.params)]} for group in source.state.groups]
        run = {"step": source.state.iteration, "tied": dict(source.family.shared), "groups": groups}
        return {RUN: json.dumps({**run, "names": names, "tensors": tensors})}

    def run(self, path: ReadablePath, entries: Sequence[TensorEntry]) -> Sidecar | None:
        run = read_json(path / RUN)
        params = [tuple(run["names"][number] for number in group.pop("params")) for group in run["groups"]]
        groups = tuple(ParamGroup(group, params=of) for group, of in zip(run["groups"], params, strict=True))
        return Sidecar(state=TrainingState(run["step"], groups=groups), module=ModuleState(shared=run["tied"]))


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


def _index(format_: WholeFormat, change: Callable[[dict[str, Any]], object]) -> None:
    """Let a format write something else into its index."""
    own = format_.texts

    def texts(entries: Sequence[TensorEntry], source: Source) -> dict[str, str | bytes]:
        run = json.loads(own(entries, source)[RUN])
        change(run)
        return {RUN: json.dumps(run)}

    format_.texts = texts  # type: ignore[method-assign]


def _laid(format_: WholeFormat, change: Callable[[TensorEntry], TensorEntry | None]) -> None:
    """Let a format lay its tensors otherwise."""
    own = format_.laid

    def laid(tensors: Any, source: Source, options: WriteOptions) -> Iterator[TensorEntry]:
        return (made for entry in own(tensors, source, options) if (made := change(entry)) is not None)

    format_.laid = laid  # type: ignore[method-assign]


def _stored(format_: WholeFormat, change: Callable[[TensorEntry], TensorEntry | None]) -> None:
    own = format_.stored
    format_.stored = lambda path, role: (e for e in map(change, own(path, role)) if e is not None)  # type: ignore[method-assign]


def _run(format_: WholeFormat, change: Callable[[Sidecar], Sidecar]) -> None:
    """Let a format's own files say something else of the run."""
    own = format_.run

    def run(path: ReadablePath, entries: Sequence[TensorEntry]) -> Sidecar:
        said = own(path, entries)
        assert said is not None
        return change(said)

    format_.run = run  # type: ignore[method-assign]


def _module(own: Sidecar, **more: Any) -> Sidecar:
    return replace(own, module=replace(own.module, **more))


def _cast(entry: TensorEntry, state: str, dtype: str) -> TensorEntry:
    if entry.name.state != state:
        return entry
    chunks = (replace(c, record=replace(c.record, dtype=dtype_of(dtype))) for c in entry.chunks)
    return replace(entry, dtype=dtype_of(dtype), chunks=tuple(chunks))


def _swap(entry: TensorEntry) -> TensorEntry:
    other = {"exp_avg": "exp_avg_sq", "exp_avg_sq": "exp_avg"}.get(entry.name.state, entry.name.state)
    return replace(entry, name=entry.name._replace(state=other))


MISTAKES: dict[str, tuple[Callable[[WholeFormat], object], str]] = {
    "a step that the source has not": (lambda f: _index(f, lambda run: run.update(step=9)), "value iteration: run says '9', and it is '2'"),
    "a group's rate": (lambda f: _index(f, lambda run: run["groups"][0].update(lr=7)), "param group lr: run says "),
    "members of a group": (lambda f: _index(f, lambda run: run["groups"][0]["params"].pop()), "param group parameters: run says "),
    "a name that is not written": (lambda f: _index(f, lambda run: run.pop("tied")), "KeyError at test_whole.py:"),
    "a shape": (
        lambda f: _index(f, lambda run: run["tensors"][0].__setitem__(2, [9, 9])), "as stored gives it, [0:16, 0:16] lies outside",
    ),
    "a type": (lambda f: _index(f, lambda run: run["tensors"][0].__setitem__(3, "float16")), "laid says float32, and stored says float16"),
    "a place": (lambda f: _index(f, lambda run: run["tensors"][0][4][0].__setitem__(1, 999)), "elsewhere than laid puts them"),
    "states the other way round": (lambda f: _stored(f, _swap), "elsewhere than laid puts them"),
    "a state that is passed over": (lambda f: _stored(f, lambda e: e if e.name.state != "exp_avg" else None), "stored does not give it"),
    "a weight that is left out": (
        lambda f: _laid(f, lambda e: e if e.name[1:] != ("model.norm.weight", "param") else None), "given, and not laid",
    ),
    "half of a tensor": (lambda f: _laid(f, lambda e: replace(e, chunks=e.chunks[:1])), "elements are stored nowhere"),
    "another shape": (
        lambda f: _laid(f, lambda e: replace(e, global_shape=(*e.global_shape, 1))), "and it is (48, 16)",
    ),
    "a type that rounds": (lambda f: _laid(f, lambda e: _cast(e, "exp_avg", "float16")), "laid says float16, and it is to be float32"),
    "members of a group in another order": (
        lambda f: _index(f, lambda run: run["groups"][0]["params"].reverse()), "param group parameters: run says ",
    ),
    "names in another order": (lambda f: _run(f, lambda own: _module(own, order=("b", "a"))), "model order: run says "),
    "a model's description": (lambda f: _run(f, lambda own: _module(own, config={"hidden_size": 7})), "config hidden_size: run says '7'"),
    "parameters that are trained": (lambda f: _run(f, lambda own: replace(own, optimizer="zero2")), "optimizer optimizer: run says "),
    "random states": (lambda f: _run(f, lambda own: replace(own, ranks=({"python": 7},))), "rng rank 0: run says "),
    "random states of more ranks": (lambda f: _run(f, lambda own: replace(own, ranks=({}, {}))), "rng ranks: run says '[2, {}]'"),
    "how long a file is": (
        lambda f: setattr(f, "file", lambda path, file: StoredFile(file, 7)), "file says 'rank0.bin' of 7 bytes, and it is rank0.bin of ",
    ),
    "a file of another name": (lambda f: setattr(f, "file", lambda path, file: StoredFile("x", 7)), "file says 'x' of 7 bytes"),
    "no index": (lambda f: setattr(f, "texts", lambda entries, source: {}), "nothing of it is called run.json"),
    "an index that is none": (lambda f: setattr(f, "texts", lambda entries, source: {RUN: 7}), "fails at what it is to write: "),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_format_that_does_not_read_what_it_writes_writes_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mistake: str
) -> None:
    """All of it was written, and most of it was found out by nobody: the sidecar beside hid it."""
    change, words = MISTAKES[mistake]
    form = DealtFormat()
    change(form)
    monkeypatch.setattr(registry, "FORMATS", (*registry.FORMATS, form))
    with pytest.raises(LayoutMismatch, match=r"^format dealt ") as refused:
        convert(GOLDEN, tmp_path / "dealt", ConvertOptions(to="dealt", fsync=False))
    assert words in str(refused.value)
    assert not (tmp_path / "dealt").exists()


def test_what_a_formats_own_files_leave_out_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """``plain`` leaves out what is no plain value, and the sidecar has it: nobody heard that the framework finds none."""
    form = DealtFormat()
    _index(form, lambda run: [group.pop("betas") for group in run["groups"]])
    monkeypatch.setattr(registry, "FORMATS", (*registry.FORMATS, form))
    job = convert(GOLDEN, tmp_path / "dealt", ConvertOptions(to="dealt", fsync=False))
    (said,) = [text for _, text in job.report.lines if "in mcore_rlhf/ alone, since files of dealt itself" in text]
    assert "param groups betas, scalars, step" in said
    assert job.account.unaccounted == ()
    states = DealtFormat()
    own = states.laid
    less = lambda tensors, *of: own([one for one in tensors if one[0].state != "exp_avg_sq"], *of)  # noqa: E731
    monkeypatch.setattr(states, "laid", less)
    monkeypatch.setattr(registry, "FORMATS", (*registry.FORMATS[:-1], states))
    job = convert(GOLDEN, tmp_path / "no-moment", ConvertOptions(to="dealt", fsync=False))
    assert "exp_avg_sq: format dealt lays out none of it" in job.account.lost
    assert job.account.unaccounted == ()


def test_a_folder_whose_framework_went_on_in_it_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its own files had the new step, and what lies beside was taken: the old one's."""
    monkeypatch.setattr(registry, "FORMATS", (*registry.FORMATS, DealtFormat()))
    convert(GOLDEN, tmp_path / "dealt", ConvertOptions(to="dealt", fsync=False))
    (tmp_path / "dealt" / MANIFEST_NAME).unlink()
    run = json.loads((tmp_path / "dealt" / RUN).read_text())
    (tmp_path / "dealt" / RUN).write_text(json.dumps({**run, "step": 9}))
    with pytest.raises(
        LayoutMismatch, match=r"value iteration: '9' in the format's own files, '2' in mcore_rlhf/state"
    ):
        registry.open_checkpoint(tmp_path / "dealt", ReadOptions())
    shutil.rmtree(tmp_path / "dealt" / "mcore_rlhf")
    assert registry.open_checkpoint(tmp_path / "dealt", ReadOptions()).state.iteration == 9


def test_what_a_formats_own_files_make_up_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    form = DealtFormat()
    _run(form, lambda own: replace(own, state=replace(own.state, grad_scaler={"scale": 1.0})))
    monkeypatch.setattr(registry, "FORMATS", (*registry.FORMATS, form))
    job = convert(GOLDEN, tmp_path / "dealt", ConvertOptions(to="dealt", fsync=False))
    assert "made, as files of dealt have it, and the source has not" in " ".join(text for _, text in job.report.lines)


def test_degrees_are_gone_by_or_refused(dealt: Path, tmp_path: Path) -> None:
    """``--tp 2`` and ``--pp 2`` were taken, and the files were those of one rank."""
    for axis in ("tp", "pp"):
        with pytest.raises(
            Unsupported, match=f"--{axis} 2: format dealt lays the same files with --{axis} 1, for this"
        ):
            convert(dealt, tmp_path / axis, ConvertOptions(to="dealt", write=WriteOptions(**{axis: 2})))
        assert not (tmp_path / axis).exists()
    convert(dealt, tmp_path / "two", ConvertOptions(to="dealt", fsync=False, write=WriteOptions(dp=2, tp=1, pp=1)))
    assert {path.name for path in (tmp_path / "two").glob("*.bin")} == {"rank0.bin", "rank1.bin"}
    assert registry.open_checkpoint(tmp_path / "two", ReadOptions()).parallel.dp == 2


def test_who_cannot_lay_other_degrees_goes_by_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Only what the user asked for is tried, each once, up to the first tensor that lies elsewhere; what fails there refuses nothing."""
    form, asked, given = DealtFormat(), list[tuple[int | None, ...]](), Counter[tuple[int | None, ...]]()
    own = form.laid

    def laid(tensors: Tensors, source: Source, options: WriteOptions) -> Iterator[TensorEntry]:
        at = (options.tp, options.pp, options.dp)
        asked.append((*at, source.parallel.tp, source.parallel.pp, source.parallel.dp))
        if options.pp == 1:
            raise LayoutMismatch("not with one stage") if options.dp == 2 else KeyError("stage")
        for entry in own(tensors, source, options):
            given[at] += 1
            yield entry

    monkeypatch.setattr(form, "laid", laid)
    monkeypatch.setattr(registry, "FORMATS", (*registry.FORMATS, form))
    for dp in (2, 4):
        asked.clear()
        convert(GOLDEN, tmp_path / f"dp{dp}", ConvertOptions(to="dealt", fsync=False, write=WriteOptions(pp=2, dp=dp)))
        assert asked == [(None, 2, dp, 1, 2, dp), (None, 1, dp, 1, 1, dp), (None, 2, 1, 1, 2, 1)]
        assert given[None, 2, dp] > given[None, 2, 1] >= 1
        given.clear()


def test_random_states_of_ranks_go_along(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """They were lost by name in every format of whole tensors."""
    monkeypatch.setattr(registry, "FORMATS", (*registry.FORMATS, DealtFormat()))

    def states(path: Path) -> tuple[Any, ...]:
        return ModuleState.needed(registry.open_checkpoint(path, ReadOptions())).rng

    golden = states(GOLDEN)
    assert len(golden) == 1
    job = convert(GOLDEN, tmp_path / "dealt", ConvertOptions(to="dealt", fsync=False, strict=True))
    assert job.account.lost == []
    convert(tmp_path / "dealt", tmp_path / "back", ConvertOptions(to="hf-trainer", fsync=False, strict=True))
    assert same(states(tmp_path / "dealt"), golden)
    assert same(states(tmp_path / "back"), golden)
    more = ConvertOptions(to="dealt", fsync=False, write=WriteOptions(dp=3))
    assert "rng: new states of the ranks of TP1×PP1×DP3" in [
        text for _, text in convert(GOLDEN, tmp_path / "more", more).report.lines
    ]
    assert len(states(tmp_path / "more")) == 3
    with pytest.raises(UsageError, match="--rng keep: TP1×PP1×DP1 has states of other ranks than TP1×PP1×DP3"):
        convert(GOLDEN, tmp_path / "no", replace(more, write=WriteOptions(dp=3, rng="keep")))
    dropped = convert(GOLDEN, tmp_path / "none", replace(more, write=WriteOptions(rng="drop")))
    assert dropped.account.lost == ["rng: left out, as --rng drop asks"]
    assert states(tmp_path / "none") == ()


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"ranks": [7]}, "ranks/0: expected an object, found 7"),
        ({"parallel": {"tp": -4}}, "what is said of its degrees: parallel degrees must be at least 1: tp"),
        ({"parallel": {"tp": "2"}}, "what is said of its degrees: tp is '2'"),
        ({"parallel": {"dp": 2.0}}, "what is said of its degrees: dp is 2.0"),
        ({"parallel": {"dp": True}}, "what is said of its degrees: dp is True"),
        ({"parallel": {"pp": None}}, "what is said of its degrees: pp is None"),
        ({"parallel": {"pipeline_layout": ["E"]}}, "what is said of its degrees: pipeline_layout is ['E']"),
        ({"parallel": {"dp": 1 << 60}}, "what is said of its degrees: degrees of 1152921504606846976 ranks"),
    ],
)
def test_ranks_that_no_run_has_are_damage(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, said: Any, words: str
) -> None:
    with pytest.raises(Corrupt) as refused:
        _opened_saying(monkeypatch, tmp_path, said)
    assert words in str(refused.value)


def test_degrees_are_as_a_run_has_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A degree of a newer release is none that is damaged."""
    said = {"parallel": {"dp": 2, "pipeline_layout": None}}
    assert _opened_saying(monkeypatch, tmp_path, said).parallel.dp == 2
    with pytest.raises(Unsupported, match="degrees: 'hsdp' is not known; a newer release may have written it"):
        _opened_saying(monkeypatch, tmp_path / "newer", {"parallel": {"dp": 2, "hsdp": 2}})


def _opened_saying(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, said: Any) -> Source:
    """A folder of which what lies beside says something else."""
    monkeypatch.setattr(registry, "FORMATS", (*registry.FORMATS, DealtFormat()))
    convert(GOLDEN, tmp_path / "dealt", ConvertOptions(to="dealt", fsync=False))
    (tmp_path / "dealt" / MANIFEST_NAME).unlink()
    state = tmp_path / "dealt" / STATE
    state.write_text(json.dumps({**json.loads(state.read_text()), **said}))
    return registry.open_checkpoint(tmp_path / "dealt", ReadOptions())


@pytest.mark.parametrize(
    ("there", "here", "alike"),
    [
        (2**53, 2**53 + 1, False), (float(2**53), 2**53 + 1, False), (10**400, 1.0, False), (10**400, 10**400, True), (2, 2.0, True),
        (True, 1, False), (math.nan, math.nan, True), ([2**53, (1,)], (2**53, [1.0]), True), ({"a": 10**400}, {"a": math.inf}, False),
    ],
)  # fmt: skip
def test_what_stands_twice_is_compared_exactly(there: Any, here: Any, alike: bool) -> None:
    """Numbers went through a float: two of them were one, and a long one was an OverflowError."""
    own, kept = (Sidecar(state=TrainingState(7, other={"seen": value})) for value in (there, here))
    missing, made, other = differences(own, kept)
    assert (missing, made, not other) == ([], [], alike)


def test_a_run_told_whole_is_what_its_framework_stored() -> None:
    """Nothing of it goes through our reader a second time: it is held against what torch reads of the framework's own files."""
    source = registry.open_checkpoint(GOLDEN, ReadOptions())
    run = run_of(json.loads(json.dumps(told_run(source))))
    groups = torch.load(GOLDEN / "optimizer.pt", weights_only=False)["param_groups"]
    trained = [name for group in run.state.groups for name in group.params]
    assert [[trained[number] for number in group["params"]] for group in groups] == [
        list(group.params) for group in run.state.groups
    ]
    settings = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    assert same([{key: group.fields[key] for key in settings[0]} for group in run.state.groups], settings)
    assert same(dict(run.state.scheduler or {}), torch.load(GOLDEN / "scheduler.pt", weights_only=False))
    assert run.state.iteration == json.loads((GOLDEN / "trainer_state.json").read_text())["global_step"] == 2
    (ours,), theirs = run.ranks, torch.load(GOLDEN / "rng_state.pth", weights_only=False)
    assert same((ours["random"], ours["numpy"]), (theirs["python"], theirs["numpy"]))


def test_the_run_of_every_rank_is_told() -> None:
    """Four ranks of Megatron's store random states, which differ; their degrees and arguments are those of the folder's name."""
    run = run_of(json.loads(json.dumps(told_run(registry.open_checkpoint(MEGATRON, ReadOptions())))))
    assert {"tp": 2, "pp": 2, "dp": 2}.items() <= run.parallel.items()
    assert {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "bf16": True,
    }.items() <= run.state.args.items()
    states = [one["rng_state"][0]["rng_tracker_states"]["model-parallel-rng"] for one in run.ranks]
    assert len({str(state) for state in states}) == 4


def test_parts_of_ranks_are_megatrons() -> None:
    """Each rank has what Megatron's files of it hold, in their order; what is not cut, every rank has."""
    source = registry.open_checkpoint(MEGATRON, ReadOptions())
    for spec in source.model.params:
        name = TensorName(source.role, spec.name)
        entry = source.catalog.get(name)
        assert entry is not None
        of_ranks = [(int(PurePosixPath(chunk.record.file).parent.name.split("_")[2]), chunk) for chunk in entry.chunks]
        stored = sorted(of_ranks, key=lambda one: (one[0], one[1].start))
        assert [*parts_of_ranks(source, name, spec.global_shape, 2)] == [(rank, chunk.box) for rank, chunk in stored]
    gate_and_up = TensorName(source.role, "decoder.layers.0.mlp.linear_fc1.weight")
    rows = [(rank, box.offset[0], box.shape) for rank, box in parts_of_ranks(source, gate_and_up, (192, 64), 2)]
    assert rows == [(0, 0, (48, 64)), (0, 96, (48, 64)), (1, 48, (48, 64)), (1, 144, (48, 64))]
    words = next(spec for spec in source.model.params if spec.partition.vocabulary)
    with pytest.raises(LayoutMismatch, match=r"word_embeddings.* cannot be divided equally over 7"):
        list(parts_of_ranks(source, TensorName(source.role, words.name), words.global_shape, 7))


def test_a_family_that_there_is_none_of_is_no_format() -> None:
    with pytest.raises(TypeError, match="family is 'hf'; it is one of megatron, module"):
        type("Other", (DealtFormat,), {"family": "hf"})


def _told(folder: Path, **places: Any) -> None:
    run = json.loads((folder / RUN).read_text())
    run["tensors"][0][4][0] = [places.get("file", "rank0.bin"), places.get("offset", 8), [0, 0], [16, 16]]
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


def test_a_master_that_is_missing_beside_others_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It was made of its rounded weight, and the account said that nothing was lost."""
    monkeypatch.setattr(registry, "FORMATS", (*registry.FORMATS, DealtFormat()))
    convert(MEGATRON, tmp_path / "dealt", ConvertOptions(to="dealt", fsync=False))
    (tmp_path / "dealt" / MANIFEST_NAME).unlink()
    run = json.loads((tmp_path / "dealt" / RUN).read_text())
    at = next(at for at, (_, state, *_) in enumerate(run["tensors"]) if state == "master")
    name = run["names"][run["tensors"].pop(at)[0]]
    (tmp_path / "dealt" / RUN).write_text(json.dumps(run))
    with pytest.raises(Incomplete, match=rf"'{re.escape(name)}' has exp_avg, exp_avg_sq and no master, which others"):
        registry.open_checkpoint(tmp_path / "dealt", ReadOptions())


@pytest.mark.parametrize("data", [b"", b"\x01\x02", HEAD[:-1], b"\xff" * 8 + b"{}"])
def test_a_head_that_no_file_has_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x.bin").write_bytes(data)
    with open_file(tmp_path / "x.bin") as file, pytest.raises(Incomplete, match=r"x\.bin: "):
        read_head(file)
