"""What decides a target's bytes decides its plan's fingerprint: whoever goes on elsewhere would mix two checkpoints in silence."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from mcore_rlhf.convert import ConvertOptions, prepare
from mcore_rlhf.execution.fingerprint import PlanFingerprint, identity
from mcore_rlhf.families.options import WriteOptions
from mcore_rlhf.storage.record_file import StoredFile
from mcore_rlhf.storage.store import StorePath
from tests.contract.test_store import Memory
from tests.helpers.conversions import GOLDENS as MEGATRON

GOLDENS = MEGATRON.parent


def fingerprint(source: Path, options: ConvertOptions) -> PlanFingerprint:
    found = prepare(source, options).binding
    assert found is not None
    return found.fingerprint()


def test_the_scale_of_an_adapter_that_is_merged(tmp_path: Path) -> None:
    adapter = Path(shutil.copytree(GOLDENS / "peft" / "adapter", tmp_path / "adapter"))
    options = ConvertOptions(to="hf", write=WriteOptions(merge_adapter=True, base_model=GOLDENS / "peft" / "base"))
    before = fingerprint(adapter, options)
    assert fingerprint(adapter, options) == before
    config = adapter / "adapter_config.json"
    told = json.loads(config.read_text())
    config.write_text(json.dumps({**told, "lora_alpha": 3 * told["lora_alpha"]}))
    assert fingerprint(adapter, options).differs(before) == "another plan"


def test_whether_replicas_are_compared() -> None:
    """Blocks of comparisons have numbers: with and without replicas they are other ones."""
    options = ConvertOptions(write=WriteOptions(tp=1, pp=1))
    source = MEGATRON / "tp2pp2dp2_bf16_do"
    trusting = fingerprint(source, replace(options, trust_replicas=True))
    assert fingerprint(source, options).differs(trusting) == "other options"


@dataclass
class Versioned(Memory):
    """A store that says which version of its files is there."""

    now: str = "first"

    def version(self, path: str) -> str:
        return self.now


def test_versions_of_a_store_tell_files_of_one_length_apart() -> None:
    store = Versioned({"run/weights": b"0123"})
    root, stored = StorePath(store, PurePosixPath("run")), [StoredFile("weights", 4, ())]
    before = identity(root, stored)
    store.now = "second"
    assert identity(root, stored) != before
