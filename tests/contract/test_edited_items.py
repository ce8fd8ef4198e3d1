"""One item of a genuine checkpoint is edited: either it arrives in the target, or the account names it.

Whether it arrived is seen in the target's bytes, and not by our readers: what is added has a name that nothing else has.
"""

from __future__ import annotations

import copy
import dataclasses
import io
import json
import random
import re
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from mcore_rlhf.core.facts import Fate, Kind
from mcore_rlhf.errors import CheckpointError, Unforeseen
from mcore_rlhf.families.inventory import OPAQUE, UNLIKE
from mcore_rlhf.families.options import ConvertOptions, ReadOptions, WriteOptions
from mcore_rlhf.formats.registry import FORMATS
from mcore_rlhf.manager.convert_step import StepJob, convert_step, prepare_step
from mcore_rlhf.manager.subject import find
from mcore_rlhf.trainers.known import TRAINERS
from tests.helpers.damage import edited
from tests.helpers.plain_load import plain_load, plain_pickle, plain_save, plain_unpickle

GOLDENS = Path(__file__).parents[1] / "goldens"
SOURCES = {
    "megatron/tp1_bf16_do": "", "megatron/tp2pp2dp2_bf16_nodo": "", "megatron_0_19/muon_tp2_bf16": "", "megatron_0_13/dist_pp2": "",
    "megatron_dist/plain_tp2": "", "megatron_dist/experts_ep2": "", "megatron_fsdp/dp2_bf16": "", "megatron_torch_dcp/dp2_bf16": "",
    "deepspeed/z1_fp32_tied_dp2": "", "deepspeed/z0_fp32_untied_dp1": "", "deepspeed_muon/z2_bf16_dp2": "", "dcp/fsdp2_ws2": "actor",
    "huggingface/llama_tied_bf16_sharded": "", "torch/actor": "", "transformers/checkpoint-2": "",
    "transformers/step_2": "", "torchtitan/checkpoint": "step-3", "verl/fsdp1_lora_ws2": "", "trainers/ac_ds2": "step_3",
    "trainers/bridge": "", "trainers/open_instruct": "", "trainers/or_z2": "", "trainers/prime": "checkpoints/step_3",
    "trainers/rl_fsdp2": "grpo/checkpoints/global_step_3", "trainers/skyrl_fsdp2": "global_step_3", "trainers/swift": "checkpoint-4",
}  # fmt: skip
"""Goldens, with what in each is named as the source."""
TARGETS = [*(one.name for one in FORMATS), *(one.name for one in TRAINERS if one.formats)]
MARK = "zqmark"
_DEEP, _CASES = 6, 8
_NOT_READ = re.compile(
    r"rng|random|ds_config|metadata\.json|full_weights|latest_|param_slice_mappings|shared_params|content_metadata"
)
"""What is lost, or stays, as a whole, or is written anew by each layout: random states, an engine's settings, lists of files."""
_BESIDE = re.compile(r"expected|recipe|_uni")
"""What lies in some goldens beside the checkpoint."""
_READABLE = (".pt", ".pth", ".bin", ".json", ".metadata", ".pkl")


class Edit(NamedTuple):
    """What was added, where.

    Args:
        file: Relative to the copy.
        key: Of the item, by dots.
    """

    file: str
    key: str


def _inner(tree: Any) -> Any:
    return vars(tree) if type(tree).__name__ == "Namespace" else tree


def _places(tree: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Dictionaries of a nest that have texts as keys, and what holds arguments."""
    inner = _inner(tree)
    if isinstance(inner, dict) and all(isinstance(key, str) for key in inner):
        yield at
    below = inner.items() if isinstance(inner, dict) else enumerate(inner) if isinstance(inner, list) else ()
    for key, value in list(below)[:40] if len(at) < _DEEP else ():
        yield from _places(value, (*at, key))


def _add(tree: Any, at: tuple[Any, ...], value: object) -> None:
    for key in at:
        tree = _inner(tree)[key]
    _inner(tree)[MARK] = copy.deepcopy(value)


def _value(rng: random.Random, *, json_only: bool) -> object:
    values: list[object] = [41, 0.4375, "text", True, [1, 2], {"inner": 3}, {}]
    return rng.choice(values if json_only else [*values, torch.arange(3.0), (1, 2), np.float64(0.5), float("nan")])


def _edited(root: Path, rng: random.Random) -> Edit | None:
    """Add one item to one file of a copy, or to its like of every rank; nothing where a file has no place for one."""
    files = sorted(path for path in root.rglob("*") if path.is_file() and path.name.endswith(_READABLE))
    kinds = {re.sub(r"\d+|zero/[^/]*", "#", path.relative_to(root).as_posix()) for path in files}
    wanted = rng.choice(sorted(kinds))
    alike = [path for path in files if re.sub(r"\d+|zero/[^/]*", "#", path.relative_to(root).as_posix()) == wanted]
    if alike[0].name == ".metadata":
        return _with_object(alike[0].parent, rng, alike[0].relative_to(root).as_posix())
    if alike[0].suffix != ".json" and not zipfile.is_zipfile(alike[0]):
        return None
    trees = [_loaded(path) for path in (alike if rng.random() < 0.5 else alike[:1])]
    places = list(_places(trees[0]))
    if not places:
        return None
    at, value = rng.choice(places), _value(rng, json_only=alike[0].suffix == ".json")
    for path, tree in zip(alike, trees, strict=False):
        try:
            _add(tree, at, value)
        except (KeyError, IndexError):  # which this rank does not have
            continue
        if path.suffix == ".json":
            path.write_text(json.dumps(tree))
        else:
            plain_save(tree, path)
    return Edit(alike[0].relative_to(root).as_posix(), ".".join(map(str, at)))


def _loaded(path: Path) -> Any:
    return json.loads(path.read_text()) if path.suffix == ".json" else plain_load(path)


def _with_object(folder: Path, rng: random.Random, file: str) -> Edit | None:
    """A further object of a DCP folder, beside one that is there."""
    metadata = plain_unpickle(folder / ".metadata")
    objects = {
        index.fqn: index
        for index in metadata.storage_data
        if not hasattr(metadata.state_dict_metadata[index.fqn], "size")
    }
    if not objects:
        return None
    like = rng.choice(sorted(objects))
    name, written = ".".join([*like.split(".")[:-1], MARK]), io.BytesIO()
    torch.save(_value(rng, json_only=False), written)
    info = metadata.storage_data[objects[like]]
    end = (folder / info.relative_path).stat().st_size
    with (folder / info.relative_path).open("ab") as stored:
        stored.write(written.getvalue())
    metadata.state_dict_metadata[name] = metadata.state_dict_metadata[like]
    metadata.storage_data[dataclasses.replace(objects[like], fqn=name)] = dataclasses.replace(
        info, offset=end, length=len(written.getvalue())
    )
    if isinstance(metadata.planner_data, dict) and like in metadata.planner_data:
        path = metadata.planner_data[like]
        metadata.planner_data[name] = (*path[:-1], MARK) if isinstance(path, tuple) else name
    plain_pickle(metadata, folder / ".metadata")
    return Edit(file, name)


def _options(to: str) -> ConvertOptions:
    return ConvertOptions(to=to, fsync=False, workers=1, write=WriteOptions(with_optimizer=to == "hf"))


def _told(job: StepJob) -> tuple[set[str], set[str]]:
    """What the accounts say of items that are not simply kept, and which are lost or left behind."""
    accounts = [job.account, *(one.account for one in job.jobs.values())]
    said = [(f"{item} {one.text}", one.fate) for account in accounts for item, one in account.entries.items()]
    assert not any(account.unaccounted for account in accounts)
    gone = {text for text, fate in said if fate in (Fate.LOST, Fate.LEFT)}
    return {text for text, fate in said if fate is not Fate.KEPT}, gone


def _wrong(job: StepJob, edit: Edit, target: Path) -> str:
    """What the account and the target's bytes say otherwise; empty where they agree."""
    files = [
        path for path in target.rglob("*") if path.is_file() and path.name not in ("mcore_rlhf.json", "manifest.json")
    ]
    there = [path.name for path in files if MARK.encode() in path.read_bytes()]
    told, gone = _told(job)
    named = [text for text in gone if MARK in text]
    name = edit.file.rpartition("/")[2]
    for one in job.jobs.values():
        if set(one.report.lost) != set(one.account.lost) or one.lossless == bool(one.account.lost):
            return f"the lines say {one.report.lost}, and the account {one.account.lost}"
    if there and [text for text in named if UNLIKE not in text]:
        return f"in {there}, and {named}"
    role = next((one.strip("_") for one in edit.file.split("/") if one in ("_critic", "critic")), "-")
    whole = (
        *(f"value {key} " for key in edit.key.split(".")),
        str(OPAQUE),
        f"part the model of the role {role} ",
    )  # of which it is a part
    if not there and not any(MARK in text or name in text or text.startswith(whole) for text in told):
        return "is in no file of the target, and nothing is said of it"
    return ""


def _tried(source: str, to: str, seed: int, folder: Path) -> str | None:
    """What is wrong with one case; None where nothing came of it."""
    rng, root = random.Random(seed), folder / source.replace("/", "-")
    shutil.copytree(
        GOLDENS / source,
        root,
        ignore=lambda _, names: {n for n in names if _BESIDE.search(n)},
    )
    try:
        edit = _edited(root, rng)
        if edit is None or _NOT_READ.search(f"{edit.file} {edit.key}"):
            return None
        subject = find(root / SOURCES[source], ReadOptions())
        planned = prepare_step(subject, _options(to))
        done = convert_step(subject, folder / "target", _options(to))
        wrong = _wrong(done, edit, folder / "target")
        if not wrong and _told(planned) != _told(done):
            wrong = "the plan's account is another"
        return wrong and f"{source} → {to} (seed {seed}), {edit}: {wrong}"
    except Unforeseen as error:
        return f"{source} → {to} (seed {seed}): {error.__cause__!r}"
    except CheckpointError:
        return None  # refused, with a reason that other tests read
    finally:
        shutil.rmtree(root)
        shutil.rmtree(folder / "target", ignore_errors=True)


def _all_wrong(rng: random.Random, folder: Path, most: int) -> list[str]:
    found: list[str | None] = []
    while sum(one is not None for one in found) < most and len(found) < 6 * most:
        found.append(_tried(rng.choice(sorted(SOURCES)), rng.choice(TARGETS), rng.randrange(1 << 32), folder))
    judged = sum(one is not None for one in found)
    assert judged >= most // 2, f"{judged} of {len(found)} edits came to anything"
    return [one for one in found if one]


@pytest.mark.parametrize("seed", [1, 2])
def test_what_is_added_arrives_or_is_named(seed: int, tmp_path: Path) -> None:
    """The same cases every time; further ones are drawn where there is time to look at what they find."""
    assert _all_wrong(random.Random(seed), tmp_path, _CASES // 2) == []


def test_a_tensor_among_the_values_that_no_rank_has_of_its_own(tmp_path: Path) -> None:
    root = _copied("trainers/skyrl_fsdp2", tmp_path)
    (first, *_) = sorted((root / "global_step_3" / "policy").glob("extra_state_*.pt"))
    with edited(first) as tree:
        tree[MARK] = torch.arange(3.0)
    before, after = (_lost(one / "global_step_3", "megatron") for one in (GOLDENS / "trainers/skyrl_fsdp2", root))
    assert any(MARK in text for text in {*after} - {*before})


@pytest.mark.slow
def test_what_is_added_anywhere_arrives_or_is_named(rng: random.Random, tmp_path: Path) -> None:
    assert _all_wrong(rng, tmp_path, 100 * _CASES) == []


def _lost(root: Path, to: str) -> list[str]:
    return [
        text for job in prepare_step(find(root, ReadOptions()), _options(to)).jobs.values() for text in job.account.lost
    ]


def _copied(golden: str, folder: Path) -> Path:
    return Path(shutil.copytree(GOLDENS / golden, folder / "source"))


@pytest.mark.parametrize("to", ["hf", "dcp", "fsdp-ranks"])
def test_a_part_that_one_rank_has_in_another_type_is_said(to: str, tmp_path: Path) -> None:
    root = _copied("verl/fsdp2_tied_ws2", tmp_path)
    before = _lost(root, to)
    with edited(root / "model_world_size_2_rank_1.pt") as tree:
        part = tree["model.layers.1.self_attn.q_proj.weight"]
        part._local_tensor = part._local_tensor.double()
    (said,) = set(_lost(root, to)) - set(before)
    assert said.endswith(": converted to float32, and rounded")


def test_what_an_older_save_left_of_the_common_state_is_said(tmp_path: Path) -> None:
    """Megatron-core 0.19 has it among the objects, and loads a ``common.pt`` that is there before it."""
    root = _copied("megatron_0_19/dist_tp2pp2_bf16_do_fullyreshardable", tmp_path)
    (folder,) = root.glob("iter_*")
    metadata = plain_unpickle(folder / ".metadata")
    info = next(at for index, at in metadata.storage_data.items() if index.fqn.startswith("common_state/"))
    stored = (folder / info.relative_path).read_bytes()[info.offset : info.offset + info.length]
    (common,) = plain_load(io.BytesIO(stored))
    plain_save(common, folder / "common.pt")
    before = _lost(root, "hf")
    common["args"].lr = 7.0
    plain_save(common, folder / "common.pt")
    (said,) = set(_lost(root, "hf")) - set(before)
    assert said.startswith("args in ")
    assert "other than iter_0000006/common.pt says" in said


def test_what_an_index_says_besides_is_lost_by_name(tmp_path: Path) -> None:
    root = _copied("huggingface/llama_tied_bf16_sharded", tmp_path)
    index = root / "model.safetensors.index.json"
    said = json.loads(index.read_text())
    said["metadata"][MARK] = 1
    index.write_text(json.dumps(said))
    assert _lost(root, "megatron") == [f"metadata.{MARK} in {index.name}: not known, and not carried"]


def test_files_around_a_folder_of_rlinfs_are_accounted_for(tmp_path: Path) -> None:
    root = _copied("dcp/fsdp2_ws2", tmp_path) / "actor"
    (root / f"{MARK}.txt").write_text("beside the folder")
    (job,) = prepare_step(find(root, ReadOptions()), _options("dcp")).jobs.values()
    fates = {item.name: said.fate for item, said in job.account.entries.items() if item.kind is Kind.FILE}
    assert fates == {f"{MARK}.txt": Fate.LEFT, "model_state_dict/full_weights.pt": Fate.DERIVED}
