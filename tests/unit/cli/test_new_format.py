"""A format that nobody knew before: one object in the registry, and every command goes by what it says of itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mcore_rlhf.errors import Corrupt
from mcore_rlhf.families.option_types import Takes
from mcore_rlhf.families.options import ReadOptions, WriteOptions
from mcore_rlhf.families.source import Source
from mcore_rlhf.formats import registry
from mcore_rlhf.formats.base import Format, Target
from mcore_rlhf.formats.hf import FORMAT as HF
from mcore_rlhf.formats.known import KNOWN, KnownFormat
from mcore_rlhf.storage.paths import ReadablePath

from .conftest import Cli

TRACKER = "newest"


class Sheaf(Format):
    """Hugging Face's files under another name, and a tracker."""

    name = "sheaf"
    packs_experts = False
    weights_only = True
    model_folder = own_sidecar = True
    tracker = TRACKER

    def detect(self, path: ReadablePath) -> bool:
        """Whether it has the tracker."""
        return (path / TRACKER).is_file()

    def read(self, path: ReadablePath, options: ReadOptions) -> Source:
        """Open one."""
        return replace(HF.read(path, options), format=self.name)

    def target(self, source: Source, options: WriteOptions) -> Target:
        """Describe one."""
        made = HF.target(source, options)
        return replace(made, format=self.name, texts={**made.texts, TRACKER: str(source.state.iteration)})


@pytest.fixture
def sheaf(monkeypatch: pytest.MonkeyPatch) -> Sheaf:
    made = Sheaf()
    monkeypatch.setattr(registry, "FORMATS", (made, *registry.FORMATS))
    return made


def test_it_is_converted_to_planned_and_looked_at(
    cli: Cli, tp1: Path, tmp_path: Path, sheaf: Sheaf, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = cli("plan", tp1, "--to", "sheaf", "--dtype", "fp32")
    known = "--to megatron or --to megatron-dist or --to deepspeed or --to dcp or --to fsdp-ranks or --to hf or --to peft or --to torch"
    assert (refused.code, f"--dtype: means nothing with --to sheaf; it is for {known}\n" in refused.stderr) == (2, True)
    monkeypatch.setattr(Sheaf, "takes", (Takes.DTYPE,))
    wanted = (tp1, tmp_path / "out", "--to", "sheaf", "--dtype", "fp32")
    assert cli("plan", tp1, *wanted[2:], "--json").json["target"]["format"] == "sheaf"
    done = cli("convert", *wanted, "--no-fsync", "--verify", "--json")
    assert (done.code, done.json["proved"]) == (0, True), done.stderr
    facts = cli("inspect", tmp_path / "out", "--tensors", "--json").json
    assert facts["format"] == "sheaf"
    assert {tensor["dtype"] for tensor in facts["tensors"]} == {"float32"}
    refused = cli("convert", *wanted, "--tp", 2)
    assert (refused.code, "--tp: means nothing with --to sheaf" in refused.stderr) == (2, True)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (
            KnownFormat("hf", "megatron"),
            r"formats\.hf: its name and family are \('hf', 'module'\), and in KNOWN",
        ),
        (KnownFormat("sheaf", "module", module="hf"), "its name and family"),
        (KnownFormat("sheaf", "module", module="checksums"), "FORMAT"),
    ],
)
def test_a_line_says_what_the_format_says(row: KnownFormat, words: str) -> None:
    with pytest.raises((TypeError, AttributeError), match=words):
        registry._made(row)
    assert [registry._made(one).name for one in KNOWN] == [one.name for one in registry.FORMATS]


def test_a_run_writes_its_tracker_anew(
    cli: Cli, tp1: Path, tmp_path: Path, sheaf: Sheaf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any other file that is not as it was written is damaged."""
    assert cli("convert", tp1, tmp_path / "out", "--to", "sheaf", "--no-fsync").code == 0
    (tmp_path / "out" / TRACKER).write_text("777")
    assert registry.open_checkpoint(tmp_path / "out", ReadOptions()).format == "sheaf"
    monkeypatch.setattr(Sheaf, "tracker", "")
    with pytest.raises(Corrupt, match=TRACKER):
        registry.open_checkpoint(tmp_path / "out", ReadOptions())
