"""The documentation holds: links lead somewhere, YAML parses, and the Python in it runs."""

from __future__ import annotations

import json
import os
import re
import shutil
import tarfile
import textwrap
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

import mcore_rlhf
from mcore_rlhf.cli.app import app
from mcore_rlhf.convert import ConvertOptions, convert
from mcore_rlhf.core.catalog import PARAM, Box, Chunk, TensorEntry, dtype_of
from mcore_rlhf.core.facts import same
from mcore_rlhf.errors import (
    CheckpointError,
    Corrupt,
    Incomplete,
    Lossy,
    NotACheckpoint,
    StorageError,
    Unforeseen,
    Unsupported,
    Untrusted,
    UsageError,
)
from mcore_rlhf.families.megatron.state import MegatronState, saved_rng
from mcore_rlhf.families.options import ReadOptions, WriteOptions
from mcore_rlhf.families.sidecar import STATE, Sidecar
from mcore_rlhf.families.source import ParamGroup, TrainingState
from mcore_rlhf.formats import registry
from mcore_rlhf.models.spec import read_rules
from mcore_rlhf.storage import containers, urls
from mcore_rlhf.storage.publish import MANIFEST_NAME
from mcore_rlhf.storage.reading import OpenFiles
from mcore_rlhf.verify.checkpoint import Depth, verify
from mcore_rlhf.verify.differ import Differ
from tests.helpers.object_store import S3, url

PROJECT = Path(__file__).resolve().parents[3]
DOCS = PROJECT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
GOLDEN = PROJECT / "tests" / "goldens" / "megatron" / "tp2pp2dp2_bf16_do"
GOLDEN_OF_MODULE = PROJECT / "tests" / "goldens" / "transformers" / "checkpoint-2"
MODEL = PROJECT / "tests" / "goldens" / "huggingface" / "llama_tied_bf16_sharded"

_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^( *)```(\w+)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
# Written when `make bench` has run.
_MADE_ELSEWHERE = {PROJECT / "benchmarks" / "RESULTS.md"}


def _page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def _blocks(text: str, language: str) -> Iterator[str]:
    for indent, found, body in _FENCE.findall(text):
        if found == language:
            yield textwrap.dedent(body) if indent else body


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def _broken_links(page: Path) -> Iterator[str]:
    text = page.read_text(encoding="utf-8")
    for link in _LINK.findall(re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        if link.startswith(("http://", "https://")):
            continue
        name, _, anchor = link.partition("#")
        target = Path(os.path.normpath(page.parent / name)) if name else page
        if not target.exists() and target not in _MADE_ELSEWHERE:
            yield f"{page.name} → {link}"
        elif anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            if anchor not in map(_anchor, headings):
                yield f"{page.name} → {link}"


def test_links_lead_somewhere() -> None:
    assert [line for page in PAGES for line in _broken_links(page)] == []


def test_every_page_is_reached_from_the_start() -> None:
    reached, open_pages = set[Path](), [DOCS / "README.md"]
    while open_pages:
        at = open_pages.pop()
        if at in reached or at.suffix != ".md" or not at.is_relative_to(DOCS):
            continue
        reached.add(at)
        links = _LINK.findall(at.read_text(encoding="utf-8"))
        open_pages += [
            Path(os.path.normpath(at.parent / link.partition("#")[0])) for link in links if "://" not in link
        ]
    assert [page for page in PAGES if page not in reached] == []


def test_pages_name_no_machine_and_no_long_lines() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert not re.search(r"(?<![\w.])/(work|tmp|root|home)/", text), page
        prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
        long = [line for line in prose.splitlines() if len(line) > 140 and not line.lstrip().startswith("|")]
        assert not long, (page, long)


def _kind(block: str, file: Path) -> str:
    """Read a block as what it is: rules, a run's configuration, or a conversion job."""
    from mcore_rlhf.cli.job import make_job
    from mcore_rlhf.manager.config.run import load_run_config

    document = yaml.safe_load(block)
    if "jobs" in document:
        return _workflow(document)
    if "runner" in document:
        assert load_run_config(file).runner.experiment_name
        return "run"
    if isinstance(document.get("rules"), list):
        assert read_rules(file).rules
        return "rules"
    assert make_job({}, file).source
    return "job"


def _workflow(document: dict[str, Any]) -> str:
    """A workflow that runs, by our Action, the very command that the page shows; each of its inputs is one that the Action has."""
    steps = [step for job in document["jobs"].values() for step in job["steps"]]
    assert all(("uses" in step) != ("run" in step) for step in steps)
    assert True in document, "`on` is YAML's true"
    folder = ".github/actions/resume-check"
    (ours,) = [step["with"] for step in steps if step.get("uses", "").endswith(folder)]
    action = yaml.safe_load((PROJECT / folder / "action.yml").read_text(encoding="utf-8"))
    assert ours.keys() <= action["inputs"].keys()
    command = (
        f"mcore-rlhf resume-check --steps {ours['steps']} --more {ours['more']} --dir resume-check -- {ours['command']}"
    )
    assert command in re.findall(r"^\$ (mcore-rlhf .*)$", _page("how-to/check-resume-in-ci.md"), re.MULTILINE)
    return "workflow"


def test_yaml_parses_as_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUN", "/data")
    kinds = set()
    for page in PAGES:
        for block in _blocks(page.read_text(encoding="utf-8"), "yaml"):
            file = tmp_path / "block.yaml"
            file.write_text(block, encoding="utf-8")
            kinds.add(_kind(block, file))
    assert kinds == {"rules", "job", "run", "workflow"}


def test_the_site_has_every_page_once_and_no_other() -> None:
    nav = re.findall(
        r"^ +- (?:[\w ]+: )?([\w/-]+\.md)$", (PROJECT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE
    )
    decisions = {
        page for page in PAGES if page.parent.name == "decisions" and page.name != "README.md"
    }  # its README lists them
    assert sorted(nav) == sorted(str(page.relative_to(DOCS)) for page in set(PAGES) - decisions)


def test_the_page_of_public_names_has_all_of_them() -> None:
    text = _page("reference/python.md")
    names = set(re.findall(r"`(\w+)`", "".join(line for line in text.splitlines() if line.startswith("| "))))
    assert names == {name for name in mcore_rlhf.__all__ if not name.startswith("__")}
    assert "<!-- public names -->" in text


@pytest.fixture
def flat(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The format that the documentation adds, in the registry."""
    (block,) = _blocks(_page("how-to/add-a-format.md"), "python")
    module = ModuleType("flat")
    monkeypatch.setitem(__import__("sys").modules, "flat", module)
    exec(compile(block, "add-a-format.md", "exec"), module.__dict__)
    monkeypatch.setattr(registry, "FORMATS", (*registry.FORMATS, module.FORMAT))
    return module


ELSEWHERE: dict[str, dict[str, Any]] = {
    "megatron": {"tp": 2}, "megatron-dist": {"pp": 2}, "hf": {"with_optimizer": True}, "deepspeed": {"zero_stage": 2, "dp": 2},
    "universal": {}, "dcp": {"dp": 2}, "torch": {}, "fsdp-ranks": {"dp": 2},
}  # fmt: skip


@pytest.mark.parametrize("family", ["megatron", "module"])
@pytest.mark.parametrize("to", ELSEWHERE)
def test_the_format_of_the_documentation_crosses(
    flat: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str, family: str
) -> None:
    """To every other, with a closed account, and every value back as it was, under either family's names."""
    monkeypatch.setattr(flat.FlatFormat, "family", family)
    golden, count = (GOLDEN, 27) if family == "megatron" else (GOLDEN_OF_MODULE, 26)
    convert(golden, tmp_path / "flat", ConvertOptions(to="flat", fsync=False))
    there = convert(
        tmp_path / "flat",
        tmp_path / "there",
        ConvertOptions(to=to, fsync=False, workers=1, write=WriteOptions(**ELSEWHERE[to])),
    )
    assert there.account.unaccounted == ()
    assert verify(tmp_path / "there", ReadOptions(), Depth.FULL).intact
    convert(
        tmp_path / "there",
        tmp_path / "back",
        ConvertOptions(to="flat", fsync=False, workers=1),
    )
    a, b = (registry.open_checkpoint(tmp_path / name, ReadOptions()) for name in ("flat", "back"))
    with OpenFiles(a.root) as bytes_a, OpenFiles(b.root) as bytes_b:
        comparison = Differ(a, b, bytes_a, bytes_b, states=("param", *a.states)).compare()
    padded = {"embedding.word_embeddings.weight", "output_layer.weight"}  # of which others keep the words' rows alone
    assert {one.tensor.param for one in comparison.differences if one.tensor} <= (
        set() if to.startswith("megatron") or family == "module" else padded
    )
    assert comparison.tensors == 4 * count


def test_the_format_of_the_documentation_takes_options(flat: ModuleType, tmp_path: Path) -> None:
    """What is rounded and what is left out is said line by line."""
    half = convert(GOLDEN, tmp_path / "half", ConvertOptions(to="flat", write=WriteOptions(dtype="fp16")))
    said = "parameters: converted to float16 from their fp32 masters, which are kept"
    assert said in [text for _, text in half.report.lines]
    weights = convert(GOLDEN, tmp_path / "weights", ConvertOptions(to="flat", write=WriteOptions(no_optimizer=True)))
    assert weights.account.unaccounted == ()
    assert "the optimizer: left out, as --no-optimizer asks" in weights.account.lost
    assert registry.open_checkpoint(tmp_path / "weights", ReadOptions()).states == ()
    state = json.loads((tmp_path / "half" / STATE).read_text())
    del state["groups"]
    (tmp_path / "half" / STATE).write_text(json.dumps(state))
    (tmp_path / "half" / MANIFEST_NAME).unlink()
    with pytest.raises(Incomplete, match="no param groups, without which no run can load them"):
        registry.open_checkpoint(tmp_path / "half", ReadOptions())


@pytest.mark.parametrize("family", ["megatron", "module"])
def test_the_format_of_the_documentation_has_every_command_in_an_object_store(
    flat: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, s3: S3, family: str
) -> None:
    """Nobody has to write anything for it there: neither for parts, nor for a plan that is kept, nor for plain names."""
    monkeypatch.setattr(flat.FlatFormat, "family", family)
    golden, there = GOLDEN if family == "megatron" else GOLDEN_OF_MODULE, url("flat")

    def run(*args: object, code: int = 0) -> str:
        done = CliRunner().invoke(app, [*map(str, args), "--quiet"])
        assert done.exit_code == code, (args, done.output)
        return str(done.stdout)

    run("convert", golden, there, "--to", "flat", "--verify")
    assert json.loads(run("inspect", there, "--json"))["format"] == "flat"
    run("verify", there, "--deep")
    run("diff", golden, there)
    run("report", there, "-o", tmp_path / "page.html")
    assert "flat" in (tmp_path / "page.html").read_text(encoding="utf-8")
    run("convert", there, url("parts"), "--to", "flat", "--tp", 2, code=2)
    plan, to = tmp_path / "plan", ("--to", "flat", "--dtype", "fp16")
    run("plan", there, *to, "--save", plan)
    run("convert", there, url("parts"), *to, "--part", "1/2", "--plan", plan)
    run("convert", there, url("parts"), *to, "--part", "2/2", "--plan", plan)
    run("convert", there, url("parts"), *to, "--finish")
    run("convert", there, tmp_path / "here", *to, "--no-resume")
    run("diff", tmp_path / "here", url("parts"))
    run("convert", there, url("parts"), "--to", "flat", "--no-optimizer", "--layout", "plain", code=2)
    told = run(
        "convert", there, url("parts"), "--to", "flat", "--no-optimizer", "--layout", "plain", "--overwrite", "--json"
    )
    assert json.loads(told)["account"]["unaccounted"] == []
    assert {"flat.json", "weights.bin"} < {path.name for path in urls.checkpoint_path(url("parts")).iterdir()}
    run("convert", url("parts"), tmp_path / "hf" if family == "module" else tmp_path / "tp", *(
        ("--to", "hf") if family == "module" else ("--to", "megatron", "--tp", 2)
    ))  # fmt: skip


DAMAGES = {
    "an index of another kind": (lambda index: {"tensors": index}, "cannot be read as flat: "),
    "a type that there is none of": (lambda index: _changed(index, dtype="bfloat17"), "unknown dtype 'bfloat17'"),
    "a length that is no number": (lambda index: _changed(index, shape=[64.5]), "cannot be read as flat: TypeError"),
    "a length below 0": (lambda index: _changed(index, shape=[-64]), "no file has those"),
    "a tensor before the file": (lambda index: _changed(index, offset=-4), "no file has those"),
    "an offset that is no number": (lambda index: _changed(index, offset=1.5), "cannot be read as flat: TypeError"),
    "a length that no machine has": (lambda index: _changed(index, shape=[1 << 70]), "weights.bin: ends at byte "),
    "an offset that no machine has": (lambda index: _changed(index, offset=1 << 90), "weights.bin: ends at byte "),
    "a part below 0": (lambda index: _changed(index, more=[["weights.bin", 0, [-8], [8]]]), "lies outside the tensor"),
    "a part twice": (lambda index: _changed(index, more=[["weights.bin", 0, [1], [8]]]), "8 elements are stored in overlapping pieces"),
    "parts that overlap": (
        lambda index: _changed(index, start=[0], size=[40], more=[["weights.bin", 0, [16], [24]]]),
        "its parts overlap, and leave a gap, from element (16,) of dimensions (0,) on",
    ),
    "a part less": (lambda index: _changed(index, size=[40]), "24 of 64 elements are stored nowhere"),
    "the bytes of another": (lambda index: _changed(index, offset=0), "are both said to be at byte 0"),
    "bytes of two others": (lambda index: _changed(index, offset=2), "are both said to be at byte "),
    "a tensor beyond the file": (lambda index: _changed(index, offset=1 << 40), "weights.bin: ends at byte "),
    "a name that is a path": (lambda index: _changed(index, name="../../x"), "decoder.final_layernorm.weight is missing"),
    "a weight gone": (lambda index: _without(index, "decoder.layers.2.mlp.linear_fc2.weight"), "layer 2 has no mlp.linear_fc2.weight"),
    "a norm gone": (lambda index: _without(index, "decoder.final_layernorm.weight"), "decoder.final_layernorm.weight is missing"),
    "a layer gone": (lambda index: [one for one in index if ".layers.3." not in one[0]], "found 3 in the files, but args.num_layers is 4"),
    "a moment gone": (lambda index: _without(index, "output_layer.weight", "exp_avg"), "no exp_avg of output_layer.weight"),
    "a tensor twice": (lambda index: [*index, index[0]], "(param)' is there twice: its index is damaged"),
    "an orphan": (
        lambda index: [*index, ["output_layer.bias", "exp_avg", [0], "float32", []]], "has exp_avg of 'output_layer.bias'",
    ),
}  # fmt: skip


def _changed(index: list[Any], **to: Any) -> list[Any]:
    """The final norm's weight is said to be otherwise."""
    (at,) = (number for number, one in enumerate(index) if one[:2] == ["decoder.final_layernorm.weight", "param"])
    name, state, shape, dtype, ((file, offset, start, size),) = index[at]
    place = [file, to.get("offset", offset), to.get("start", start), to.get("size", to.get("shape", size))]
    changed = [
        to.get("name", name),
        state,
        to.get("shape", shape),
        to.get("dtype", dtype),
        [place, *to.get("more", [])],
    ]
    return [*index[:at], changed, *index[at + 1 :]]


def _without(index: list[Any], name: str, state: str = "") -> list[Any]:
    return [one for one in index if one[0] != name or state not in ("", one[1])]


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_format_of_the_documentation_believes_no_stranger(flat: ModuleType, tmp_path: Path, damage: str) -> None:
    """What its reader of few lines takes for granted is looked at by whoever it hands it to."""
    change, words = DAMAGES[damage]
    convert(GOLDEN, tmp_path / "flat", ConvertOptions(to="flat", fsync=False))
    (tmp_path / "flat" / MANIFEST_NAME).unlink()
    index = tmp_path / "flat" / "flat.json"
    index.write_text(json.dumps(change(json.loads(index.read_text()))))
    with pytest.raises(CheckpointError) as refused:
        registry.open_checkpoint(tmp_path / "flat", ReadOptions())
    assert words in str(refused.value)


CHUNKS: dict[str, tuple[Callable[[Chunk], Chunk], str]] = {
    "before the tensor": (lambda c: replace(c, box=Box((-1,), (64,))), "[-1:63] lies outside the tensor, whose shape is (64,)"),
    "behind it": (lambda c: replace(c, box=Box((1,), (64,))), "[1:65] lies outside the tensor, whose shape is (64,)"),
    "of another rank": (lambda c: replace(c, box=Box((0, 0), (1, 64))), "[0:1, 0:64] lies outside the tensor"),
    "beyond its record": (lambda c: replace(c, start=1), ".weight:param' are said to be [0:64], and it has 64"),
    "before its record": (lambda c: replace(c, strides=(-1,)), "elements -63 to 0 of"),
    "of another type": (
        lambda c: replace(c, record=replace(c.record, dtype=dtype_of("float16"))), "is said to be of bfloat16, and ",
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", CHUNKS)
def test_parts_of_tensors_that_are_nowhere_are_refused(
    flat: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    """A plan said that it was damaged itself, or elements of one type were taken for another's."""
    change, words = CHUNKS[damage]
    convert(GOLDEN, tmp_path / "flat", ConvertOptions(to="flat", fsync=False))
    own = flat.entry_of

    def entry(role: str, row: Any) -> TensorEntry:
        made: TensorEntry = own(role, row)
        norm = made.name[1:] == ("decoder.final_layernorm.weight", PARAM)
        return replace(made, chunks=tuple(map(change, made.chunks))) if norm else made

    monkeypatch.setattr(flat, "entry_of", entry)
    with pytest.raises(Corrupt) as refused:
        registry.open_checkpoint(tmp_path / "flat", ReadOptions())
    assert words in str(refused.value)
    assert str(refused.value).endswith(": its index is damaged")


def test_a_format_says_itself_whose_models_it_has_and_what_its_files_say_of_the_run(
    flat: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two models in one folder, without anything of ours beside: param groups and counters stand in files of the format's own."""
    convert(GOLDEN_OF_MODULE, tmp_path / "flat", ConvertOptions(to="flat", fsync=False))
    shutil.rmtree(tmp_path / "flat" / "mcore_rlhf")
    (tmp_path / "flat" / MANIFEST_NAME).unlink()
    monkeypatch.setattr(flat.FlatFormat, "family", "module")
    with pytest.raises(Incomplete, match="no param groups"):
        registry.open_checkpoint(tmp_path / "flat", ReadOptions())
    state = TrainingState(7, groups=(ParamGroup({"lr": 0.5}),))
    monkeypatch.setattr(flat.FlatFormat, "run", lambda self, path, entries: Sidecar(state=state))
    monkeypatch.setattr(flat.FlatFormat, "roles", lambda self, path: ("actor", "critic"))
    with pytest.raises(UsageError, match="holds several checkpoints: actor, critic\nName one with --role"):
        registry.open_checkpoint(tmp_path / "flat", ReadOptions())
    with pytest.raises(NotACheckpoint, match="has no model of the role 'reward'; it has: actor, critic"):
        registry.open_checkpoint(tmp_path / "flat", ReadOptions(role="reward"))
    opened = registry.open_checkpoint(tmp_path / "flat", ReadOptions(role="critic"))
    assert (opened.role, opened.state.iteration, opened.state.groups) == ("critic", 7, state.groups)
    assert registry.roles_in(tmp_path / "flat") == ["actor", "critic"]
    for roles, kind, words in (
        (lambda: ["../x"], Untrusted, "the checkpoint names the role '../x', which is not a plain path"),
        (lambda: {}["models"], Unforeseen, "cannot be read as flat: KeyError"),
    ):
        with monkeypatch.context() as forged:
            forged.setattr(flat.FlatFormat, "roles", lambda self, path, roles=roles: roles())
            with pytest.raises(kind, match=re.escape(words)):
                registry.open_checkpoint(tmp_path / "flat", ReadOptions())
    own = flat.entry_of
    for change, words in (
        (lambda role, row: own("reward", row), "is read as critic, and has tensors of 'reward'"),
        (own, "has no tensor of critic"),
    ):
        monkeypatch.setattr(flat, "entry_of", change)
        if "no tensor" in words:
            (tmp_path / "flat" / "flat.json").write_text("[]")
        with pytest.raises(Incomplete, match=words):
            registry.open_checkpoint(tmp_path / "flat", ReadOptions(role="critic"))


@pytest.mark.parametrize(
    "golden", ["megatron/tp2pp2dp2_bf16_do", "deepspeed/z1_fp32_tied_dp2", "huggingface/llama_tied_bf16_sharded"]
)
@pytest.mark.parametrize("no_optimizer", [False, True])
def test_files_of_weights_alone_close_the_account(
    flat: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: str, no_optimizer: bool
) -> None:
    """It said of each tensor of the optimizer that nothing accounts for it, and that this should be reported."""
    monkeypatch.setattr(flat.FlatFormat, "family", "module")
    monkeypatch.setattr(flat.FlatFormat, "weights_alone", True)
    options = ConvertOptions(to="flat", fsync=False, write=WriteOptions(no_optimizer=no_optimizer))
    job = convert(GOLDEN.parents[1] / golden, tmp_path / "flat", options)
    assert job.account.unaccounted == ()
    said = [text for text in job.account.lost if "optimizer" in text]
    left_out = "the optimizer: left out, as --no-optimizer asks"
    expected = left_out if no_optimizer else "the optimizer: files of weights alone have no place for it"
    assert said == ([] if golden.startswith("huggingface") else [expected])
    back = convert(tmp_path / "flat", tmp_path / "hf", ConvertOptions(to="hf", fsync=False))
    assert back.lossless


def test_the_format_of_the_documentation_misses_a_file(flat: ModuleType, tmp_path: Path) -> None:
    convert(GOLDEN, tmp_path / "flat", ConvertOptions(to="flat", fsync=False))
    (tmp_path / "flat" / "weights.bin").unlink()
    with pytest.raises(Incomplete, match=r"weights\.bin: is missing, and belongs to a checkpoint of format flat"):
        registry.open_checkpoint(tmp_path / "flat", ReadOptions())


@pytest.mark.parametrize("to", ["flat", "megatron", "megatron-dist"])
def test_a_part_of_a_model_is_no_model_of_megatrons(flat: ModuleType, tmp_path: Path, to: str) -> None:
    """It was written, and nobody could open it."""
    for only, lost in (
        ("decoder.layers.0.*", "embedding.word_embeddings.weight"),
        ("!*.layers.3.*", "3 decoder layers are there"),
    ):
        with pytest.raises(Unsupported, match=f"is a part of a model, which .* cannot hold: {lost}"):
            convert(GOLDEN, tmp_path / "part", ConvertOptions(to=to, read=ReadOptions(only=only)))
    assert not (tmp_path / "part").exists()


def test_the_format_of_the_documentation_works(flat: ModuleType, tmp_path: Path) -> None:
    job = convert(GOLDEN, tmp_path / "flat", ConvertOptions(to="flat", strict=True))
    assert job.account.unaccounted == ()
    assert verify(tmp_path / "flat", ReadOptions(), Depth.FULL).intact
    a, b = registry.open_checkpoint(GOLDEN, ReadOptions()), registry.open_checkpoint(tmp_path / "flat", ReadOptions())
    assert (b.format, b.state.iteration, b.states) == ("flat", 2, ("master", "exp_avg", "exp_avg_sq"))
    with OpenFiles(a.root) as bytes_a, OpenFiles(b.root) as bytes_b:
        comparison = Differ(a, b, bytes_a, bytes_b, states=("param", *b.states)).compare()
    assert comparison.equal, comparison.differences
    assert comparison.tensors == 4 * 27
    convert(tmp_path / "flat", tmp_path / "megatron", ConvertOptions(to="megatron", strict=True))
    back = registry.open_checkpoint(tmp_path / "megatron", ReadOptions())
    assert (a.parallel, back.parallel) == (b.parallel, a.parallel)
    random = [[saved_rng(shard) for shard in MegatronState.needed(one).shards] for one in (a, b, back)]
    assert same(random[0], random[1])
    assert same(random[0], random[2])
    again = convert(tmp_path / "flat", tmp_path / "again", ConvertOptions(to="flat", strict=True))
    assert (again.lossless, again.account.lost) == (True, [])  # of no item, nothing is said to be lost
    (tmp_path / "again" / "mcore_rlhf.json").unlink()  # its own index is no file of another program's
    assert convert(tmp_path / "again", tmp_path / "third", ConvertOptions(to="flat", strict=True)).lossless
    assert (tmp_path / "again" / "weights.bin").read_bytes() == (tmp_path / "flat" / "weights.bin").read_bytes()


def test_the_format_of_the_documentation_is_honest(flat: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(Lossy, match="rng: left out, as --rng drop asks"):
        convert(GOLDEN, tmp_path / "flat", ConvertOptions(to="flat", strict=True, write=WriteOptions(rng="drop")))
    convert(GOLDEN, tmp_path / "flat", ConvertOptions(to="flat"))
    data = bytearray((tmp_path / "flat" / "weights.bin").read_bytes())
    data[1000] ^= 1
    (tmp_path / "flat" / "weights.bin").write_bytes(data)
    assert "CRC-32" in verify(tmp_path / "flat", ReadOptions(), Depth.FULL).problems.describe()


@pytest.fixture
def tar(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The storage backend that the documentation adds, under its scheme."""
    (block,) = _blocks(_page("how-to/add-a-storage-backend.md"), "python")
    module = ModuleType("tar")
    monkeypatch.setitem(__import__("sys").modules, "tar", module)
    exec(compile(block, "add-a-storage-backend.md", "exec"), module.__dict__)
    monkeypatch.setitem(urls.BACKENDS, "tar", module.TAR)
    return module


def test_the_backend_of_the_documentation_is_read(tar: ModuleType, tmp_path: Path) -> None:
    """An archive that another program made."""
    with tarfile.open(tmp_path / "golden.tar", "w") as archive:
        archive.add(GOLDEN, ".")
    there = f"tar://{tmp_path}/golden.tar"
    assert verify(urls.checkpoint_path(there), ReadOptions(), Depth.DEEP).intact
    for source, target in ((GOLDEN, "here"), (there, "there")):
        convert(source, tmp_path / target, ConvertOptions(write=WriteOptions(tp=4, pp=1)))
    assert _files(tmp_path / "there") == _files(tmp_path / "here")
    (tmp_path / "cut.tar").write_bytes((tmp_path / "golden.tar").read_bytes()[:100_000])
    with pytest.raises(CheckpointError):
        convert(f"tar://{tmp_path}/cut.tar", tmp_path / "cut", ConvertOptions())


def test_the_backend_of_the_documentation_is_written(tar: ModuleType, tmp_path: Path) -> None:
    options, there = ConvertOptions(write=WriteOptions(tp=4, pp=1)), f"tar://{tmp_path}/made.tar"
    convert(GOLDEN, there, options)
    convert(GOLDEN, tmp_path / "here", options)
    with tarfile.open(tmp_path / "made.tar") as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    assert _files(tmp_path / "unpacked") == _files(tmp_path / "here")
    assert verify(urls.checkpoint_path(there), ReadOptions(), Depth.FULL).intact
    before = (tmp_path / "made.tar").read_bytes()
    with pytest.raises(StorageError, match="exists already"):
        convert(GOLDEN, there, options)
    with pytest.raises(CheckpointError):
        convert(tmp_path / "nowhere", there, replace(options, overwrite=True))
    assert (tmp_path / "made.tar").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "made.tar", "unpacked"]


def _files(root: Path) -> dict[str, bytes]:
    """All but the manifest, which has the times."""
    files = (path for path in root.rglob("*") if path.is_file() and path.name != MANIFEST_NAME)
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in files}


def test_the_container_of_the_documentation_works(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (block,) = _blocks(_page("how-to/add-a-container.md"), "python")
    module = ModuleType("lined")
    monkeypatch.setitem(__import__("sys").modules, "lined", module)
    exec(compile(block, "add-a-container.md", "exec"), module.__dict__)
    monkeypatch.setattr(containers, "CONTAINERS", (*containers.CONTAINERS, module.Lined))
    source = containers.open_tensors(MODEL, "model-00001-of-00002.safetensors")
    with OpenFiles(MODEL) as files:
        data = {
            name: bytes(files.view(tensor.record.file, tensor.record.byte_offset, tensor.record.nbytes))
            for name, tensor in source.tensors.items()
        }
    with module.Lined(list(source.tensors.values())).create(tmp_path / "x.lined") as writer:
        for name in reversed(data):
            writer.write(name, 0, data[name])
        entry = writer.finish({name: zlib.crc32(content) for name, content in data.items()}, fsync=True)
    whole = (tmp_path / "x.lined").read_bytes()
    assert (entry.nbytes, entry.crc32) == (len(whole), zlib.crc32(whole))
    found = containers.open_tensors(tmp_path, "x.lined")
    assert {name: tensor.shape for name, tensor in found.tensors.items()} == {
        name: tensor.shape for name, tensor in source.tensors.items()
    }
    for name, tensor in found.tensors.items():
        assert whole[tensor.record.byte_offset :][: tensor.record.nbytes] == data[name]
    (tmp_path / "x.lined").write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match="first line says"):
        containers.open_tensors(tmp_path, "x.lined")
    with pytest.raises(Unsupported, match=r"known are .*\.lined"):
        containers.open_tensors(tmp_path, "x.other")
