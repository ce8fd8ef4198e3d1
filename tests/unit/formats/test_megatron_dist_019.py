"""What megatron-core 0.19.2 wrote as torch_dist: no ``common.pt``, Muon, its layer-wise optimizer, remainders for masters."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from mcore_rlhf.convert import ConvertOptions, Job, convert
from mcore_rlhf.core.facts import Fate, Item, Kind, Reason
from mcore_rlhf.errors import Incomplete, Unsupported
from mcore_rlhf.families.options import ReadOptions, WriteOptions
from mcore_rlhf.families.source import Source, bytes_of
from mcore_rlhf.formats.registry import detect, open_checkpoint
from mcore_rlhf.verify.checkpoint import Depth, verify
from mcore_rlhf.verify.differ import Differ, Difference
from tests.helpers.conversions import GOLDENS
from tests.helpers.dist_reader import check_every_state, read_tensors, states_of
from tests.helpers.plain_load import plain_load
from tests.reference.merge import bits_equal

GENUINE = GOLDENS.parent / "megatron_0_19"
RUN = "tp2pp2_bf16_do"
FULLY = GENUINE / f"dist_{RUN}_fullyreshardable"
PAIRS = {
    f"dist_{RUN}_fullyreshardable": RUN,
    f"dist_{RUN}_dpreshardable": RUN,
    "dist_muon_tp2_bf16": "muon_tp2_bf16",
    "dist_muon_pingpong_dp2_bf16": "muon_pingpong_dp2_bf16",
    "dist_precisionaware_dp2_bf16_do": "precisionaware_dp2_bf16_do",
}
ALL = [*PAIRS, "dist_muon_layerwise_dp2_bf16"]


def opened(path: Path, **options: Any) -> Source:
    return open_checkpoint(path, ReadOptions(**options))


def differences(a: Source, b: Source) -> list[Difference]:
    with bytes_of(a) as files_a, bytes_of(b) as files_b:
        return Differ(a, b, files_a, files_b).compare().differences


def converted(source: Path, target: Path, to: str = "megatron-dist", **write: Any) -> Job:
    return convert(source, target, ConvertOptions(to, write=WriteOptions(**write), fsync=False))


@pytest.mark.parametrize("name", PAIRS)
def test_it_is_the_run_that_the_legacy_format_holds(name: str) -> None:
    """Written by Megatron itself at the same iteration of the same run: every tensor in every state, and all else that a run needs."""
    dist, legacy = opened(GENUINE / name), opened(GENUINE / PAIRS[name])
    assert differences(dist, legacy) == []
    for field in ("model", "parallel", "states", "optimizer"):
        assert getattr(dist, field) == getattr(legacy, field), field
    for field in ("iteration", "release", "groups", "scheduler", "grad_scaler"):
        assert getattr(dist.state, field) == getattr(legacy.state, field), field
    assert {name.param for name in dist.catalog} == {spec.name for spec in legacy.model.params}
    same = {
        k: v
        for k, v in legacy.state.args.items()
        if "ckpt" not in k and k not in ("dump", "save", "load", "rank", "report")
    }
    assert {key: dist.state.args[key] for key in same} == same


@pytest.mark.parametrize("name", [name for name in ALL if "muon" in name or "fully" in name])
def test_every_state_is_what_torchs_own_reader_finds(name: str) -> None:
    check_every_state(opened(GENUINE / name), states_of(GENUINE / name))


@pytest.mark.parametrize("name", ALL)
def test_it_is_intact(name: str) -> None:
    verdict = verify(GENUINE / name, ReadOptions(), Depth.DEEP)
    assert verdict.intact, verdict.problems.describe()


def test_random_states_are_those_of_the_same_ranks() -> None:
    dist, legacy = (opened(path).family.shards for path in (FULLY, GENUINE / RUN))  # type: ignore[attr-defined]
    for ours, theirs in zip(dist, legacy, strict=True):
        a, b = (shard.materialize(shard.top["rng_state"])[0] for shard in (ours, theirs))
        assert a["random_rng_state"] == b["random_rng_state"]
        assert bytes(a["torch_rng_state"].numpy()) == bytes(b["torch_rng_state"].numpy())


def test_what_the_rerun_machine_did_not_do_is_no_loss(tmp_path: Path) -> None:
    """It was not running: Megatron does not restore it, at any layout."""
    job = converted(FULLY, tmp_path / "target", tp=1, pp=1)
    assert job.lossless, job.account.lost
    assert job.account.entries[Item(Kind.VALUE, "rerun_state_machine_state")].fate is Fate.LEFT
    assert not list((tmp_path / "target").rglob("integrity.json"))


def test_a_folder_without_its_metadata_json_is_known(tmp_path: Path) -> None:
    root = tmp_path / "root"
    shutil.copytree(FULLY, root)
    (root / "iter_0000006" / "metadata.json").unlink()
    assert detect(root).name == "megatron-dist"
    with pytest.raises(Incomplete, match=r"metadata\.json: missing or empty"):
        opened(root)


def test_a_version_that_nobody_knows_is_refused_by_name(tmp_path: Path) -> None:
    root = tmp_path / "root"
    shutil.copytree(FULLY, root)
    (root / "iter_0000006" / "metadata.json").write_text(
        json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 2})
    )
    with pytest.raises(Unsupported, match="sharded_backend_version is 2, and only 1 is known"):
        opened(root)


MUON = [name for name in ALL if "muon" in name]


@pytest.mark.parametrize("name", MUON)
def test_muon_is_written_under_the_keys_that_megatron_has(name: str, tmp_path: Path) -> None:
    """Torch's own reader finds in our folder what it finds in Megatron's: every key, every element.

    The prefixes of chained optimizers are Megatron's for a sharding that does not reshape, which is said in the folder itself.
    """
    job = converted(GENUINE / name, tmp_path / "target", dp=1)
    assert job.lossless, job.account.lost
    ours, theirs = read_tensors(tmp_path / "target"), read_tensors(GENUINE / name)
    expected = {re.sub(r"^chained_\d\.", "", key): tensor for key, tensor in theirs.items()}
    assert ours.keys() == expected.keys()
    for key, tensor in expected.items():
        assert bits_equal(ours[key], tensor), key
    members = plain_load(tmp_path / "target" / "iter_0000006" / "common.pt")["optimizer"]
    assert [list(member) for member in members.values()] == [
        ["optimizer"],
        ["optimizer", "param_state_sharding_type"] if "layerwise" in name else ["optimizer"],
    ]
    assert [len(member["optimizer"]["param_groups"]) for member in members.values()] == [1, 2]


@pytest.mark.parametrize("name", MUON)
@pytest.mark.parametrize("layout", [{"tp": 4, "dp": 1}, {"tp": 1, "pp": 2, "padded_vocab_size": 0}], ids=["tp4", "pp2"])
def test_muon_at_another_layout_and_back(name: str, layout: dict[str, int], tmp_path: Path) -> None:
    old = opened(GENUINE / name)
    rows = old.model.padded_vocab_size
    there = {key: value or rows for key, value in layout.items()}
    converted(GENUINE / name, tmp_path / "there", **there)
    back = {"tp": old.parallel.tp, "pp": 1, "dp": old.parallel.dp, "padded_vocab_size": rows}
    converted(tmp_path / "there", tmp_path / "back", **back)
    check_every_state(opened(tmp_path / "back"), states_of(GENUINE / name))


def with_integrity(root: Path) -> Path:
    """As ``save_integrity_manifest`` of megatron-core 0.19.2 makes it: last, of every file beside it."""
    folder = root / "iter_0000006"
    sums = {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir()) if file.is_file()
    }
    (folder / "integrity.json").write_text(json.dumps({"algorithm": "sha256", "files": sums}))
    return folder


def test_a_list_of_sums_is_checked_file_by_file(tmp_path: Path) -> None:
    root = tmp_path / "root"
    shutil.copytree(FULLY, root)
    folder = with_integrity(root)
    verdict = verify(root, ReadOptions())
    assert verdict.intact, verdict.problems.describe()
    assert any("SHA-256 of 6 files" in text for text in verdict.checked)
    (folder / "metadata.json").write_text((folder / "metadata.json").read_text() + " ")  # which has no other checksum
    (problem,) = verify(root, ReadOptions()).problems.found
    assert "iter_0000006/metadata.json: its SHA-256 is" in problem.message
    (folder / "metadata.json").rename(folder / "elsewhere")
    shutil.copy(folder / "elsewhere", folder / "metadata.json")
    (folder / "integrity.json").write_text(json.dumps({"algorithm": "sha256", "files": {"gone.distcp": "00"}}))
    with pytest.raises(Incomplete, match=r"gone\.distcp: missing; integrity\.json lists it"):
        opened(root)


def test_a_list_of_sums_is_not_taken_along(tmp_path: Path) -> None:
    """Its files are others here; a run with ``--verify-integrity`` makes its own."""
    shutil.copytree(FULLY, tmp_path / "root")
    with_integrity(tmp_path / "root")
    job = converted(tmp_path / "root", tmp_path / "target")
    assert not list((tmp_path / "target").rglob("integrity.json"))
    assert job.account.entries[Item(Kind.FILE, "integrity.json")].reason is Reason.OF_LAYOUT


@pytest.mark.parametrize("had", [True, False])
def test_a_list_of_sums_is_made_where_it_is_wanted(had: bool, tmp_path: Path) -> None:
    """Of every file beside it, as ``save_integrity_manifest`` makes it, and accounted for."""
    shutil.copytree(FULLY, tmp_path / "root")
    if had:
        with_integrity(tmp_path / "root")
    job = converted(tmp_path / "root", tmp_path / "target", integrity=True)
    assert job.lossless
    written = next((tmp_path / "target").rglob("integrity.json"))
    found = json.loads(written.read_text())
    expected = {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in written.parent.iterdir() if f != written}
    assert found == {"algorithm": "sha256", "files": expected}
    assert {".metadata", "common.pt", "metadata.json", "__0_0.distcp"} <= expected.keys()
    assert (Item(Kind.FILE, "integrity.json") in job.account.entries) == had
    if had:
        assert job.account.entries[Item(Kind.FILE, "integrity.json")].fate is Fate.DERIVED
    assert verify(tmp_path / "target", ReadOptions(), Depth.DEEP).intact


@pytest.mark.parametrize(("to", "place"), [("megatron-dist", "tokenizer"), ("megatron", "mcore_rlhf/carried")])
def test_the_tokenizer_goes_along(to: str, place: str, tmp_path: Path) -> None:
    """What Megatron-LM's main branch leaves in the step's folder."""
    shutil.copytree(FULLY, tmp_path / "root")
    tokenizer = tmp_path / "root" / "iter_0000006" / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text("{}")
    (tokenizer / "tokenizer.model").write_bytes(bytes(range(256)))
    job = converted(tmp_path / "root", tmp_path / "target", to)
    assert job.lossless, job.account.lost
    copied = tmp_path / "target" / "iter_0000006" / place
    assert {path.name: path.read_bytes() for path in copied.iterdir()} == {
        path.name: path.read_bytes() for path in tokenizer.iterdir()
    }
    assert not [item for item in job.account.entries if item.name.startswith("tokenizer/")]
