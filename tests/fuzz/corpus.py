"""What is mutated: every golden, some of them converted by us, and a run's root; each with the commands that suit it."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from . import runs
from .child import Limits, run

GOLDENS = Path(__file__).parents[1] / "goldens"
FORMATS = ("megatron", "megatron-dist", "deepspeed", "universal", "dcp", "hf")
_NO_PART_OF_IT = {"expected.pt", "recipe.json", "model_state_dict"}


@dataclass(frozen=True)
class Specimen:
    """One checkpoint of the corpus.

    Args:
        name: For people, and to draw by.
        folder: Holds ``source``, and ``beside`` where commands take a second folder.
        commands: Lines, with ``{pristine}`` for this very folder.
    """

    name: str
    folder: Path
    commands: tuple[str, ...]

    def copy(self, target: Path) -> None:
        """A case's own copy: links, which mutators replace and commands only read."""
        shutil.copytree(self.folder, target, copy_function=os.link)

    def command(self, rng: random.Random) -> str:
        """One of the commands; conversions do the most, and are drawn more often than their share."""
        kind = rng.choice(sorted({command.partition(" ")[0] for command in self.commands} | {"convert"}))
        return rng.choice([command for command in self.commands if command.startswith(kind)] or self.commands)


_READING = (
    "inspect source", "inspect source --json", "inspect source --tensors --json", "verify source", "verify source --deep --json",
    "verify source --deep", "verify source --quick", "diff source {pristine}/source",
    "diff {pristine}/source source --json", "steps source",
    "plan source --to hf", "plan source --to dcp --json", "plan source --to universal --copies",
)  # fmt: skip
_LAYOUTS = {
    "megatron": ("--tp 1 --pp 1", "--tp 2 --pp 1 --dp 1", "--tp 1 --pp 2 --optimizer plain", "--rng derive", "--no-optimizer"),
    "megatron-dist": ("--tp 1 --pp 1", "--tp 2 --pp 1", ""),
    "deepspeed": ("--dp 2", "--dp 1 --zero-stage 1", "--dp 3 --zero-stage 3"),
    "universal": ("", "--no-optimizer"),
    "dcp": ("", "--dp 3"),
    "hf": ("", "--max-shard-size 20KB", "--with-optimizer", "--masters"),
}  # fmt: skip
_ANY, _MODULE = tuple(_LAYOUTS), ("deepspeed", "universal", "dcp", "hf")
_MEGATRON = ("megatron", "megatron_dist", "huggingface", "ours.hf", "ours.megatron", "ours.megatron-dist")
_TARGETS = dict.fromkeys(_MEGATRON, _ANY)
"""What a specimen can become, by the beginning of its name; all others are of modules that Megatron has no place for."""


def converting(targets: tuple[str, ...]) -> Iterator[str]:
    """Conversions to some formats, in several layouts."""
    for to in targets:
        for layout in _LAYOUTS[to]:
            yield " ".join(f"convert source out/target --to {to} {layout} --no-fsync --workers 2".split())


@dataclass(frozen=True)
class Corpus:
    """All specimens, in one folder.

    Args:
        folder: Where they lie; the mutated copies must be on the same file system.
    """

    folder: Path

    def make(self) -> None:
        """Copy the goldens, and make everything else of them."""
        for name, golden, parts in _goldens():
            for part in parts:
                _copy(golden / part, self.folder / name / "source" / part)
        for name, source, line in _OURS:
            self._run(line, self.folder / name, self.folder / source / "source")
        self._make_root()
        (self.folder / _JOB / "beside").mkdir(parents=True)
        for name, text in _JOBS.items():
            (self.folder / _JOB / "beside" / name).write_text(text)
        _copy(self.folder / _JOB.partition("+")[0] / "source", self.folder / _JOB / "source")
        for name, one in runs.RUNS.items():
            self._make_run(self.folder / f"{runs.OF}{name}", one)
        runs.make_journal(self.folder / runs.JOURNAL / "source")
        for name, beside in _BESIDE.items():
            _copy(self.folder / name.partition("+")[0] / "source", self.folder / name / "source")
            _copy(beside, self.folder / name / "beside")

    def specimen(self, rng: random.Random) -> Specimen:
        """One of them; every kind alike, however many goldens it has."""
        names = sorted(path.name for path in self.folder.iterdir())
        kind = rng.choice(sorted({name.partition(".")[0] for name in names}))
        name = rng.choice([name for name in names if name.partition(".")[0] == kind])
        return Specimen(name, self.folder / name, tuple(_commands(name)))

    def specimens(self) -> list[Specimen]:
        """All of them, in the same order always."""
        return [Specimen(path.name, path, tuple(_commands(path.name))) for path in sorted(self.folder.iterdir())]

    def _run(self, line: str, folder: Path, source: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        ended = run(line.format(source=source).split(), folder, Limits())
        if ended.code != 0:
            raise RuntimeError(f"{line}: {ended.output}")
        for name in ("stdout", "stderr"):
            (self.folder / name).unlink()

    def _make_run(self, folder: Path, run: runs.Run) -> None:
        """A trainer's run, and beside it the one that it is to be like, and a configuration."""
        for root in (folder / "source", folder / "beside" / "run"):
            _copy(GOLDENS / run.golden, root / run.inside)
            for name, text in run.beside:
                (root / name).write_text(text)
        if run.config:
            (folder / "beside" / "config.yaml").write_text(run.config)

    def _make_root(self) -> None:
        """A run's root: step 2 of two roles, which was adopted, and step 3 as another trainer left it."""
        root = self.folder / "run" / "source"
        for role, golden in _ROLES.items():
            _copy(self.folder / golden / "source", root / role)
        for name, text in _BESIDE_THE_MODELS.items():
            (root / name).parent.mkdir(exist_ok=True)
            (root / name).write_text(text)
        self._run("adopt source/global_step_2", self.folder / "run", root)


_ROLES = {
    "global_step_2/actor": "megatron.tp1_bf16_do",
    "global_step_2/critic": "megatron_dist.plain_tp2",
    "global_step_3/actor": "deepspeed.z1_fp32_tied_dp2",
}
_BESIDE_THE_MODELS = {
    "global_step_2/rlhf/rlhf_state.json": '{"version": 1, "algorithm": "grpo"}',
}


_KINDS = (
    "dcp", "dcp_2_15", "deepspeed", "deepspeed_muon", "huggingface", "megatron", "megatron_0_13", "megatron_0_19", "megatron_dist",
    "megatron_fsdp", "megatron_torch_dcp", "nemo_rl", "peft", "torch", "torch_checkpointing", "torchtitan", "verl",
)  # fmt: skip


def _goldens() -> Iterator[tuple[str, Path, list[str]]]:
    """Name, folder, and what of it belongs to one checkpoint: some hold one of DeepSpeed's and a universal one."""
    for kind in _KINDS:
        for golden in sorted(path for path in (GOLDENS / kind).iterdir() if path.is_dir()):
            parts = sorted(path.name for path in golden.iterdir() if path.name not in _NO_PART_OF_IT)
            universal = [part for part in parts if part.endswith(("_uni", "_universal"))]
            yield f"{kind}.{golden.name}", golden, [part for part in parts if part not in universal]
            if universal:
                yield f"universal.{golden.name}", golden, universal


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, ignore=lambda _, names: _NO_PART_OF_IT.intersection(names))
    else:
        shutil.copy2(source, target)


_OURS = (
    ("ours.hf", "megatron.tp2pp2dp2_bf16_do", "convert {source} source --to hf --max-shard-size 40KB"),
    ("ours.megatron", "megatron.tp2pp2dp2_bf16_do", "convert {source} source --to megatron --tp 1 --dp 1"),
    ("ours.universal", "deepspeed.z1_fp32_tied_dp2", "convert {source} source --to universal"),
    ("ours.dcp", "huggingface.llama_tied_bf16_sharded", "convert {source} source --to dcp"),
    ("ours.megatron-dist", "megatron_dist.plain_tp2", "convert {source} source --to megatron-dist"),
)
_JOB = "huggingface.llama_tied_bf16_sharded+job"
_JOBS = {
    "megatron.yaml": """\
name: a job
description: every kind of value
to: megatron
tp: 2
pp: 2
pipeline_layout: [1, 1]
dtype: fp32
stub: [my.own.Config, other]
workers: 2
max_memory: 1GB
no_fsync: true
strict: false
""",
    "hf.yaml": """\
to: hf
eos_token_ids: [1, 2]
max_shard_size: 20KB
dtype: bf16
trust_replicas: true
""",
}
_CONFIG = Path(__file__).parents[2] / "configs" / "rules"
_BESIDE = {
    "megatron.tp1_bf16_do+config": GOLDENS / "huggingface" / "llama_tied_bf16_sharded",
    "megatron.tp1_bf16_do+rules": _CONFIG,
    "peft.adapter+base": GOLDENS / "peft" / "base",
}


def _commands(name: str) -> Iterator[str]:
    if name == "run":
        yield from _OF_ROOTS
    elif name == runs.JOURNAL:
        yield from runs.OF_JOURNALS
    elif name.startswith(runs.OF):
        yield from runs.commands(runs.RUNS[name.removeprefix(runs.OF)])
    elif name in _WITH_BESIDE:
        yield from _WITH_BESIDE[name]
    else:
        yield from _READING
        yield from converting(_TARGETS.get(name, _TARGETS.get(name.partition(".")[0], _MODULE)))


_OF_ROOTS = (
    "steps source", "steps source --json", "verify source", "verify source --deep --json", "inspect source --json",
    "verify source/global_step_2", "inspect source/global_step_3", "adopt source/global_step_3", "adopt source/global_step_3 --deep",
    "prune source --keep-last 1 --dry-run", "prune source --keep-last 1 --include-damaged --dry-run --json",
    "diff source/global_step_2 {pristine}/source/global_step_2", "plan source --role actor --to hf", "plan source --to megatron",
    "convert source out/target --to megatron --tp 1 --no-fsync", "convert source out/target --role critic --to universal --no-fsync",
    "convert source out/target --to megatron-dist --step 2 --no-fsync", "interval --root source", "diff source {pristine}/source",
)  # fmt: skip
_WITH_BESIDE = {
    _JOB: tuple(
        f"{command} --config beside/{job}" for command in ("plan source", "convert source out/target") for job in _JOBS
    ),
    "megatron.tp1_bf16_do+config": (
        "convert source out/target --to hf --reference-config beside --no-fsync",
        "convert source out/target --to hf --tokenizer beside --no-fsync",
        "convert source out/target --to hf --generation-config beside/generation_config.json --no-fsync",
        "convert source out/target --to universal --reference-config beside/config.json --no-fsync",
    ),
    "megatron.tp1_bf16_do+rules": tuple(
        f"{command} --rules beside/{rules.name}"
        for rules in sorted(_CONFIG.iterdir())
        for command in (
            "inspect source",
            "verify source",
            "plan source --tp 2",
            "convert source out/target --tp 2 --no-fsync",
        )
    ),
    "peft.adapter+base": (
        "convert source out/target --merge-adapter --base-model beside --to hf --no-fsync",
        "convert source out/target --merge-adapter --base-model beside --to megatron --no-fsync",
        "plan source --merge-adapter --base-model beside --to hf",
        "inspect source",
        "convert source out/target --to megatron --base-model beside --no-fsync",
    ),
}
