"""Parts that go by a saved plan make the bytes of one process, and a plan that is not what it was is refused, or does no harm."""

from __future__ import annotations

import base64
import hashlib
import json
import random
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mcore_rlhf import convert as whole_conversion
from mcore_rlhf.convert import ConvertOptions
from mcore_rlhf.errors import CheckpointError, Corrupt, Unsupported, Untrusted
from mcore_rlhf.execution import saved
from mcore_rlhf.execution.fingerprint import digest, identity
from mcore_rlhf.execution.run import Execution
from mcore_rlhf.execution.saved import SavedPlan, tail_of
from mcore_rlhf.execution.spool import PlannedFile, SpoolLine, line_of
from mcore_rlhf.families.job_options import PartNumber
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.formats.megatron import writer
from mcore_rlhf.manager import subject
from mcore_rlhf.manager.convert_step import convert_part, convert_step, finish_parts, prepare_step, save_plan
from mcore_rlhf.storage import pt
from mcore_rlhf.storage.record_file import StoredFile
from tests.helpers.conversions import GOLDENS, options
from tests.helpers.killed import content, run

SOURCE = GOLDENS / "tp2pp2dp2_bf16_do"
OPTIONS = options(tp=4, pp=1)
ALL = GOLDENS.parent
PARTS = 2


def planned(source: Path, path: Path, given: ConvertOptions) -> Path:
    job = prepare_step(subject.find(source, ReadOptions()), replace(given, resume=True), by_parts=True)
    assert save_plan(job, path, given) == path.stat().st_size
    return path


def carried_out(source: Path, target: Path, given: ConvertOptions, plan: Path | None, of: int = PARTS) -> None:
    found = subject.find(source, ReadOptions())
    for number in range(1, of + 1):
        convert_part(found, target, given, PartNumber(number, of), plan=plan)
    finish_parts(found, target, given)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(SOURCE, tmp_path_factory.mktemp("source") / "run"))


@pytest.fixture(scope="module")
def plan(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return planned(source, tmp_path_factory.mktemp("plan") / "the.plan", OPTIONS)


@pytest.fixture(scope="module")
def whole(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("whole") / "out"
    convert_step(subject.find(source, ReadOptions()), target, OPTIONS)
    return target


CASES = {
    "megatron": ("megatron/ep2dp2_moe_seq_bf16_do", options(ep=1)),
    "megatron-dist": ("megatron/tp2pp2dp2_bf16_do", replace(options(tp=1), to="megatron-dist")),
    "universal": ("deepspeed/z2_bf16_ac_dp2", replace(options(), to="universal")),
    "dcp": ("deepspeed/z2_bf16_ac_dp2", replace(options(), to="dcp")),
    "hf": ("deepspeed/z2_bf16_ac_dp2", replace(options(), to="hf")),
}


@pytest.mark.parametrize("case", CASES)
def test_the_bytes_are_those_of_one_process(case: str, tmp_path: Path) -> None:
    name, given = CASES[case]
    carried_out(ALL / name, tmp_path / "out", given, planned(ALL / name, tmp_path / "plan", given), of=3)
    convert_step(subject.find(ALL / name, ReadOptions()), tmp_path / "whole", given)
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_of_a_step_with_two_models(tmp_path: Path) -> None:
    step = tmp_path / "run" / "global_step_2"
    shutil.copytree(GOLDENS / "tp1_bf16_do", step / "actor")
    shutil.copytree(SOURCE, step / "critic")
    given = options(tp=2, pp=1)
    carried_out(step, tmp_path / "out", given, planned(step, tmp_path / "plan", given), of=3)
    convert_step(subject.find(step, ReadOptions()), tmp_path / "whole", given)
    assert content(tmp_path / "out" / step.name) == content(tmp_path / "whole" / step.name)


def test_a_part_opens_no_file_of_the_source_before_it_copies(
    source: Path, plan: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts that went by it, and one that planned by itself, are joined."""
    found = subject.find(source, ReadOptions())
    with monkeypatch.context() as patch:
        patch.setattr(whole_conversion, "open_checkpoint", None)
        for number in (1, 3):
            convert_part(found, tmp_path / "out", OPTIONS, PartNumber(number, 3), plan=plan)
    convert_part(found, tmp_path / "out", OPTIONS, PartNumber(2, 3))
    finish_parts(found, tmp_path / "out", OPTIONS)
    assert content(tmp_path / "out") == content(whole)


def test_on_the_command_line(source: Path, whole: Path, tmp_path: Path) -> None:
    to, at = ("--tp", 4, "--pp", 1), tmp_path / "plan"
    code, stdout, stderr = run("plan", source, *to, "--save", at, "--json")
    assert (code, json.loads(stdout)["saved"]) == (0, {"path": str(at), "bytes": at.stat().st_size}), stderr
    for part in ("1/2", "2/2"):
        code, _, stderr = run("convert", source, tmp_path / "out", *to, "--no-fsync", "--plan", at, "--part", part)
        assert code == 0, stderr
    assert run("convert", source, tmp_path / "out", *to, "--no-fsync", "--finish")[0] == 0
    assert content(tmp_path / "out") == content(whole)
    code, _, stderr = run("convert", source, tmp_path / "other", *to, "--plan", at)
    assert (code, "Give --part K/N" in stderr) == (2, True), stderr


def test_a_plan_for_other_options(source: Path, plan: Path) -> None:
    with pytest.raises(CheckpointError, match="--tp is 4 in the plan, and 2 here"):
        SavedPlan(plan).load(source, options(tp=2, pp=1))
    with pytest.raises(CheckpointError, match="--trust-replicas is False in the plan, and True here"):
        SavedPlan(plan).load(source, replace(OPTIONS, trust_replicas=True))


def test_a_plan_of_another_source(plan: Path, tmp_path: Path) -> None:
    shutil.copytree(SOURCE, tmp_path / "run")
    with pytest.raises(Unsupported, match=f"and not for {tmp_path / 'run'}"):
        SavedPlan(plan).load(tmp_path / "run", OPTIONS)


@pytest.mark.parametrize("how", ["touched", "longer", "gone"])
def test_a_source_that_changed_since(tmp_path: Path, how: str) -> None:
    """What of it is said; a part that began before it changed cannot be joined."""
    source = Path(shutil.copytree(SOURCE, tmp_path / "run"))
    plan = planned(source, tmp_path / "plan", OPTIONS)
    file = max(source.rglob("model_optim_rng.pt"))
    if how == "gone":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes() + b"\0" * (how == "longer"))
    with pytest.raises(Corrupt, match="the source has changed since the plan was saved") as caught:
        convert_part(subject.find(source, ReadOptions()), tmp_path / "out", OPTIONS, PartNumber(1, 2), plan=plan)
    assert str(file.relative_to(source)) in str(caught.value)


def test_a_plan_of_another_release(source: Path, plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved, "__version__", "9.9")
    with pytest.raises(Unsupported, match=r"and this is 9\.9"):
        SavedPlan(plan).load(source, OPTIONS)


def test_what_is_computed_on_the_way_cannot_be_saved(tmp_path: Path) -> None:
    given = replace(options(merge_adapter=True, base_model=ALL / "peft" / "base"), to="hf")
    job = prepare_step(
        subject.find(ALL / "peft" / "adapter", ReadOptions()), replace(given, resume=True), by_parts=True
    )
    with pytest.raises(Unsupported, match="computed on the way"):
        save_plan(job, tmp_path / "plan", given)
    assert not list(tmp_path.iterdir())


def everything(path: Path, source: Path) -> Any:
    """All that parts would ask of a plan."""
    conversion = SavedPlan(path).load(source, OPTIONS)
    (work,) = conversion.works
    files = [(file.path, file.nbytes, _plain(work.planned(file))) for file in work.files]
    blocks = [(block.name, block.nbytes, block.items()) for block in (*work.compared(None), *work.readings)]  # type: ignore[arg-type]
    return conversion.fingerprint, conversion.space, work.name, work.nbytes, work.distrust, files, blocks


def _plain(planned: PlannedFile) -> Any:
    return planned.plan.file, [*planned.plan.copies], planned.records, planned.container


def test_a_flipped_byte_or_a_missing_end_is_found(source: Path, plan: Path, tmp_path: Path, rng: random.Random) -> None:
    before, data = everything(plan, source), plan.read_bytes()
    for _ in range(60):
        at = rng.choice([rng.randrange(len(data)), len(data) - 1 - rng.randrange(5000)])
        mutated = (
            data[:at] if rng.random() < 0.2 else data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
        )
        (tmp_path / "plan").write_bytes(mutated)
        try:
            found = everything(tmp_path / "plan", source)
        except CheckpointError:
            continue
        else:
            assert found == before, at


def edited(plan: Path, to: Path, edit: Callable[[list[Any], dict[str, Any]], None]) -> Path:
    """A plan with other tasks or another head, every checksum of a line that of what stands in it now."""
    *tasks, head, _ = [json.loads(line.partition(b" ")[2]) for line in plan.read_bytes().splitlines()]
    edit(tasks, head)
    lines: list[bytes] = []

    def add(line: bytes) -> SpoolLine:
        lines.append(line)
        return SpoolLine(sum(map(len, lines[:-1])), len(line))

    of_tasks = head["tasks"] if isinstance(head["tasks"], list) else []
    for told, task in zip_longest(of_tasks, tasks):
        place = add(line_of(task))
        if isinstance(told, list):
            told[4:6] = place
    add(tail_of(add(line_of(head))))
    to.write_bytes(b"".join(lines))
    return to


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every place in a nest of lists and dictionaries: what holds it, and under which key."""
    keys = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, below in keys for place in ((value, key), *places(below))]


def changed(value: Any, rng: random.Random) -> Any:
    """Something else: near to it, or of another kind."""
    near = [value + rng.choice([1, -1, 64, 1 << 40])] if type(value) is int else []
    near += [value + "x", value[:-1], ""] if isinstance(value, str) else []
    near += [value[:-1], value * 2] if isinstance(value, list) else []
    return rng.choice([*near, *near, None, -1, 1.5, True, "1", [], {}, {"": 0}, {"Record": [1]}])


@pytest.mark.parametrize("edits", [15, pytest.param(500, marks=pytest.mark.slow)])
def test_an_edited_plan_is_refused_or_does_no_harm(
    source: Path, plan: Path, whole: Path, tmp_path: Path, rng: random.Random, edits: int
) -> None:
    """Somebody edits it, and makes every checksum of a line good: the target is what it should be, or is not there."""
    for number in range(edits):

        def edit(tasks: list[Any], head: dict[str, Any]) -> None:
            holder, key = rng.choice(places(rng.choice([rng.choice(tasks), head])))
            holder[key] = changed(holder[key], rng)

        target, mutated = tmp_path / str(number) / "out", edited(plan, tmp_path / "plan", edit)
        try:
            carried_out(source, target, OPTIONS, mutated)
        except CheckpointError:
            assert not target.exists()
        else:
            assert content(target) == content(whole)


def test_a_plan_that_agrees_with_itself_is_still_not_joined(
    source: Path, plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy is taken from elsewhere, and the digests are computed anew: the parts are done, and are of another plan."""

    def edit(tasks: list[Any], head: dict[str, Any]) -> None:
        number = next(number for number, task in enumerate(tasks) if "copies" in task)
        starts = np.frombuffer(base64.b64decode(tasks[number]["copies"]["source_start"]), "<i8").copy()
        starts[starts > 0] -= 1
        tasks[number]["copies"]["source_start"] = base64.b64encode(starts.tobytes()).decode()
        old, new = head["tasks"][number][6], hashlib.sha256(line_of(tasks[number])).hexdigest()
        head["tasks"][number][6] = new
        lines = head["works"][0]["lines"]
        lines[:] = [line.replace(old, new) for line in lines]
        head["fingerprint"]["layouts"] = digest(lines)
        assert old != new

    mutated = edited(plan, tmp_path / "plan", edit)
    with pytest.raises(Unsupported, match="they are of another plan"):
        carried_out(source, tmp_path / "out", OPTIONS, mutated)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("root", ["{source}-other", "{source}/../run-other", "/"])
def test_a_model_that_lies_elsewhere(source: Path, plan: Path, tmp_path: Path, root: str) -> None:
    """The files there are what the plan says of them, and are not of the source all the same."""
    other = source.with_name("run-other")
    shutil.copytree(source, other, dirs_exist_ok=True)

    def edit(tasks: list[Any], head: dict[str, Any]) -> None:
        (work,) = head["works"]
        work["files"] = identity(other, [StoredFile(name, 0, ()) for name in work["files"]])
        work["root"] = root.format(source=source.resolve())

    with pytest.raises((Corrupt, Untrusted), match=r"outside|not a plain path"):
        everything(edited(plan, tmp_path / "plan", edit), source)


@pytest.mark.parametrize(("field", "value"), [(0, []), (2, [1]), (2, [1, 0])])
def test_a_box_that_is_none(source: Path, plan: Path, tmp_path: Path, field: int, value: list[int]) -> None:
    """It would be compared all the same, and could not be named where something differs."""

    def edit(tasks: list[Any], head: dict[str, Any]) -> None:
        items = next(task["items"] for task in tasks if task.get("name", "").startswith("compared "))
        next(a for _, a, _, _ in items if len(a[1]) == 2)[field] = value

    with pytest.raises(Corrupt, match="is no such task"):
        everything(edited(plan, tmp_path / "plan", edit), source)


def test_what_was_compared_otherwise_is_compared_anew(
    source: Path, plan: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[str] = []
    compare = Execution._compare
    monkeypatch.setattr(
        Execution, "_compare", lambda self, block, *more: (compared.append(block.name), compare(self, block, *more))[1]
    )
    found = subject.find(source, ReadOptions())

    def edit(tasks: list[Any], head: dict[str, Any]) -> None:
        next(task for task in tasks if task.get("name", "").startswith("compared "))["items"].pop()

    mutated = edited(plan, tmp_path / "edited", edit)
    for number, by in ((1, plan), (2, mutated)):
        before = len(compared)
        for part in (1, 2):
            convert_part(found, tmp_path / str(number) / "out", OPTIONS, PartNumber(part, 2), plan=by)
        done = compared[before:]
        finish_parts(found, tmp_path / str(number) / "out", OPTIONS)
        assert compared[before:] == done * number
        assert content(tmp_path / str(number) / "out") == content(whole)


@pytest.mark.parametrize("resume", [True, False])
def test_every_file_is_laid_out_pickled_and_planned_once(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resume: bool
) -> None:
    counted: Counter[str] = Counter()

    def counting(what: str, call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given, **named: (counted.update([what]), call(*given, **named))[1]

    monkeypatch.setattr(whole_conversion, "plan_file", counting("planned", whole_conversion.plan_file))
    monkeypatch.setattr(pt, "pickle_tree", counting("pickled", pt.pickle_tree))
    monkeypatch.setattr(writer, "RankLayout", counting("laid out", writer.RankLayout))
    whole_conversion.convert(source, tmp_path / "out", replace(OPTIONS, resume=resume))
    files = len(list((tmp_path / "out").rglob("*.pt")))
    assert files == 8
    assert counted == {"planned": files, "pickled": files, "laid out": files}
