"""A process in which torch cannot be imported: everything that needs none is run in it.

``python -m tests.helpers.without_torch FOLDER`` writes checkpoints there, and prints every command that failed; ``FOLDER few`` takes of
the pairs of formats a sample in which each is read and written three times, and compared.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path

GOLDENS = Path(__file__).resolve().parents[1] / "goldens"
FORMATS = ("megatron", "megatron-dist", "deepspeed", "universal", "dcp", "hf")
MODEL = GOLDENS / "megatron/tp1_bf16_do"
OPTIONS = {"megatron": ["--tp", "2"], "deepspeed": ["--dp", "2"], "dcp": ["--dp", "2"], "hf": ["--with-optimizer"]}
WRITTEN_BY_OTHERS = (
    "megatron/ep2dp2_moe_seq_bf16_do", "megatron/tp2pp2dp2_bf16_nodo", "megatron_dist/tp2pp2dp2_fully_reshardable", "dcp/fsdp2_ws2",
    "deepspeed/z0_bf16_tied_dp2", "deepspeed/z2_bf16_ac_dp2", "deepspeed/z3_bf16_frozen_dp2", "huggingface/llama_tied_bf16_sharded",
    "verl/fsdp2_ws3",
)  # fmt: skip


class NoTorch(MetaPathFinder):
    """Refuses torch, as a machine does that has none."""

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)
        return None


def commands(folder: Path, few: bool = False) -> Iterator[list[str]]:
    """Every command, in an order in which what one needs is there; of the pairs of formats all or a few."""
    pairs = [
        pair
        for pair in itertools.product(FORMATS, FORMATS)
        if not few or (FORMATS.index(pair[1]) - FORMATS.index(pair[0])) % len(FORMATS) in (0, 1, 3)
    ]
    for name in FORMATS:
        yield ["convert", str(MODEL), str(folder / name), "--to", name, *OPTIONS.get(name, []), "--no-fsync"]
    for name in FORMATS:
        yield ["inspect", str(folder / name)]
        yield ["verify", "--deep", str(folder / name)]
    for one, other in itertools.combinations(FORMATS, 2):
        if (one, other) in pairs:
            yield ["diff", str(folder / one), str(folder / other)]
    for name, target in pairs:
        words = [str(folder / name), "--to", target]
        yield ["plan", *words]
        cast = [] if target == "universal" else ["--dtype", "fp16"]
        yield ["convert", words[0], str(folder / f"{name}-{target}"), *words[1:], "--no-fsync", *cast]
    yield ["will-resume", str(GOLDENS / "transformers" / "checkpoint-2"), "--trainer", "transformers"]
    run = str(GOLDENS / "trainers/rl_fsdp2/grpo/checkpoints")
    yield ["watch", run, "--to", "dcp", "--into", str(folder / "watched"), "--once"]
    for golden in WRITTEN_BY_OTHERS:
        yield ["inspect", str(GOLDENS / golden), "--tensors"]
        yield ["verify", "--deep", str(GOLDENS / golden)]
        yield ["convert", str(GOLDENS / golden), str(folder / golden.replace("/", "-")), "--to", "hf", "--no-fsync"]


def run(words: Sequence[str]) -> tuple[int, str]:
    """What a command exits with, and what it says."""
    from mcore_rlhf.cli import main

    said, code = io.StringIO(), 0
    sys.argv = ["mcore-rlhf", *words]
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            main()
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
    return code, said.getvalue()


def main() -> None:
    """Run everything."""
    sys.meta_path.insert(0, NoTorch())
    count = 0
    for words in commands(Path(sys.argv[1]), few=sys.argv[2:] == ["few"]):
        count += 1
        code, said = run(words)
        if code:
            print(f"{' '.join(words)}\nexits with {code}:\n{said}")
    base, adapter = str(GOLDENS / "peft/base"), str(GOLDENS / "peft/adapter")
    code, said = run(
        ["convert", adapter, f"{sys.argv[1]}/merged", "--to", "hf", "--merge-adapter", "--base-model", base]
    )
    print(f"merging exits with {code}: {said}")
    print(f"{count} commands; torch: {'torch' in sys.modules}")


if __name__ == "__main__":
    main()
