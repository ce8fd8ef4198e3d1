"""One case: drawn from seed and number, carried out, and judged."""

from __future__ import annotations

import hashlib
import os
import pickle
import random
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from .child import Limits, run
from .corpus import Corpus, Specimen
from .mutators.change import Change
from .mutators.table import mutate
from .verdict import CONTRADICTION_SAID, DAMAGE_SAID, SILENT, Fingerprint, fingerprint, judge, listing


@dataclass(frozen=True)
class Result:
    """What came of a case.

    Args:
        number: Of the case.
        specimen: What was mutated.
        changes: How.
        command: What was run on it.
        code: Its exit code.
        found: Broken promises by kind, with what shows each.
        folder: Where everything lies, if anything was found.
    """

    number: int
    specimen: str
    changes: tuple[Change, ...]
    command: str
    code: int | None
    found: dict[str, str]
    folder: Path


@dataclass(frozen=True)
class Fuzzer:
    """Carries out cases.

    Args:
        seed: Of the whole run.
        folder: Where it works.
        limits: What a command may use.
        keep: Whether a case's folder stays although nothing was found.
    """

    seed: int
    folder: Path
    limits: Limits = field(default_factory=Limits)
    keep: bool = False

    @property
    def corpus(self) -> Corpus:
        """What is mutated."""
        return Corpus(self.folder / "corpus")

    def case(self, number: int) -> Result:
        """Draw a case, carry it out and judge it."""
        rng = random.Random(f"{self.seed}:{number}")
        specimen = self.corpus.specimen(rng)
        command = specimen.command(rng)
        here = self.folder / f"case-{number}" / "here"
        shutil.rmtree(here.parent, ignore_errors=True)
        specimen.copy(here)
        changes = tuple(mutate(here, rng))
        (here / "out").mkdir()
        before = listing(here)
        ended = run(_arguments(command, specimen), here, self.limits)
        found = judge(command, ended, here, before, self.limits)
        silent = ended.code == 0 and not any(words in ended.output for words in DAMAGE_SAID)
        if (
            silent
            and any(change.witnessed for change in changes)
            and command in ("verify source", "verify source --deep")
        ):
            found |= (
                {SILENT: "two places contradict each other, and nothing was said"} if not _said(ended.output) else {}
            )
        if silent and _all_checked(changes, command):
            found |= self._accepted(command, specimen, fingerprint(command, ended, here))
        if not found and not self.keep:
            shutil.rmtree(here.parent)
        return Result(number, specimen.name, changes, command, ended.code, found, here.parent)

    def _accepted(self, command: str, specimen: Specimen, made: Fingerprint) -> dict[str, str]:
        """What shows that bytes below a checksum were changed and nobody said so."""
        if command.startswith(("verify", "adopt")) and "--quick" not in command:
            return {SILENT: "verified, and nothing was said"}
        expected = self._expected(command, specimen)
        names = made.files.keys() | expected.files.keys()
        if differ := sorted(name for name in names if made.files.get(name) != expected.files.get(name)):
            return {SILENT: f"the target differs in {differ[:5]}"}
        return {SILENT: "the output differs"} if made.stdout != expected.stdout else {}

    def _expected(self, command: str, specimen: Specimen) -> Fingerprint:
        """What the same command makes of the unchanged specimen."""
        key = hashlib.sha256(f"{specimen.name} {command}".encode()).hexdigest()[:24]
        stored, here = self.folder / "expected" / key, self.folder / f"expected-{os.getpid()}" / "here"
        if stored.exists():
            return pickle.loads(stored.read_bytes())  # type: ignore[no-any-return]
        specimen.copy(here)
        (here / "out").mkdir()
        made = fingerprint(command, run(_arguments(command, specimen), here, self.limits), here)
        shutil.rmtree(here.parent)
        stored.parent.mkdir(exist_ok=True)
        aside = stored.with_name(f"{key}-{os.getpid()}")
        aside.write_bytes(pickle.dumps(made))
        aside.rename(stored)
        return made


def _said(output: str) -> bool:
    return any(words in output for words in CONTRADICTION_SAID)


def _all_checked(changes: tuple[Change, ...], command: str) -> bool:
    """Whether all that differs from the specimen contradicts a checksum, in files that the command answers for.

    Below a root only the newest step with a manifest is looked at. Who reads no tensors looks at sizes and texts of a manifest.
    """
    verb, source = command.split()[:2]
    apart = "/global_step_3/" if source == "source" else None
    for change in changes:
        weights = change.path.endswith((".pt", ".distcp", ".safetensors", ".metadata"))
        checked = change.checked or (change.listed and not (weights and verb in ("plan", "inspect")))
        if not checked or not change.path.startswith(source) or (apart and apart in change.path):
            return False
    return bool(changes)


def _arguments(command: str, specimen: Specimen) -> list[str]:
    return command.format(pristine=specimen.folder).split()
