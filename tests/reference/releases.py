"""Which releases of megatron-core the tests of this folder run on: one table, for pytest and for the page that readers see.

``python -m tests.reference.releases --write`` writes the page anew.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "megatron-versions.md"
WRITE = "python -m tests.reference.releases --write"

OLDEST, NEWEST = "0.16.1", "0.19.2"
ALL = (OLDEST, "0.17.1", "0.18.2", NEWEST)
BEFORE = ("0.13.1", "0.14.0", "0.15.3")
"""Releases of which runs are left, though neither the demonstration nor most of these tests can run on them."""


@dataclass(frozen=True)
class Row:
    """The tests of one file.

    Args:
        shows: What they show, as a phrase.
        quick_on_oldest: Names of the tests, with their cases' ids, of which ``make test`` runs those that contain one on the oldest
            release too; it runs all that are quick on the newest.
        only: Releases that they can be run on at all.
        because: Why no others.
        before: Names of those that run on the releases before these, too.
    """

    shows: str
    quick_on_oldest: tuple[str, ...] = ()
    only: tuple[str, ...] = ALL
    because: str = ""
    before: tuple[str, ...] = ()


_UNCHANGED = ("[cube]", "[plain]", "[experts]", "[tied_v", "dropout")
_RESHAPED = ("tied_to_one", "experts_to_ep1", "fp32_to_pp2")
ROWS = {
    "test_architectures": Row("transformers writes a folder, Megatron computes the same logits", ("[llama]",)),
    "test_bridge_lora": Row("LoRA with an optimizer of the adapters alone, as Megatron-Bridge writes it"),
    "test_crossing_deepspeed": Row("Megatron to DeepSpeed and back"),
    "test_crossing_experts": Row("experts, latent attention and further tokens through Hugging Face's names"),
    "test_declared": Row("fields of `TransformerConfig` are the stored ones", ("megatron",), (OLDEST, NEWEST), "those are stored"),
    "test_decoupled_lr": Row("groups with a learning rate of their own"),
    "test_demo": Row("`mcore-rlhf demo` on a smaller model"),
    "test_edited_arguments": Row("arguments that change the arithmetic are carried or refused"),
    "test_engine_megatron_load": Row("the engine loads at the same layout, bit for bit, and at others", ("[plain]", "cube")),
    "test_engine_megatron_models": Row("critics, frozen parameters, models that do not match"),
    "test_engine_megatron_save": Row("the engine's files are Megatron's", ("[cube]", "[plain]")),
    "test_engine_muon": Row("Muon, Lion and others through the engine", ("[muon]",)),
    "test_fields": Row("fields without meaning for the function change no logit", ("",)),
    "test_frozen_reference": Row("a frozen reference is one file of all steps", ("bit_for_bit[as a whole",)),
    "test_hf": Row("Hugging Face folders, both ways"),
    "test_hybrid_megatron": Row("HybridModel, reshaped", (), (NEWEST,), "gated delta nets came with 0.19; one test starts 0.18.2 itself"),
    "test_integration_megatron_lm": Row("the drop-in on Megatron's own models", ("",)),
    "test_megatron_dist": Row("`torch_dist`, both ways", ("tied]", "tied-", "cube]", "cube-", "cube_buckets"), before=("_space",)),
    "test_megatron_dist_muon": Row("Muon in `torch_dist`", (), ALL[2:], "Muon of this kind came with 0.18"),
    "test_megatron_fsdp": Row("what Megatron-FSDP of 0.19.2 wrote goes on without it"),
    "test_negative_control": Row("broken conversions are noticed"),
    "test_pretrain": Row("Megatron-LM's own scripts, killed and resumed", (), (OLDEST, NEWEST), "0.16.1 needs `--megatron-lm`"),
    "test_public_arguments": Row("public models' flags say what `config.json` does", (), (NEWEST,), "it has the parser"),
    "test_public_configs": Row("public models without any option"),
    "test_qwen3_next": Row("Qwen3-Next and Qwen3.5 through Hugging Face's names", (), (NEWEST,), "its stand-ins are for 0.19"),
    "test_refusing_role": Row("a role that refuses leaves everything as it was"),
    "test_releases": Row("files of 0.16.1 in the newest, and back", (), (NEWEST,), "it runs two releases at a time"),
    "test_reshape": Row("`torch` at any TP, PP, EP, DP", _RESHAPED, before=_RESHAPED),
    "test_rl_resume": Row("GRPO and PPO, saved and resumed"),
    "test_rl_training": Row("GRPO and PPO learn, on every layout"),
    "test_unchanged": Row("a conversion that changes nothing cannot be told from none", ("",), before=_UNCHANGED),
    "test_torch_and_deepspeed": Row("a plain loop's `state.pt` becomes Megatron's and DeepSpeed's, and comes back"),
    "test_vocabulary": Row("padding of the vocabulary"),
}  # fmt: skip
"""By the name of the file, every test that runs Megatron."""

_FULL_QUERY = (
    ALL[:-1],
    "0.19 puts a norm before a full query projection of latent attention, which these models do not have",
)
CASES = {
    "packed": ((OLDEST,), "experts in two tensors (`GroupedMLP`) without Transformer Engine went with 0.17"),
    "deepseek_v3_full_q": _FULL_QUERY,
    "further_tokens_are_the_layer_after_the_last": (
        ALL[1:],
        "0.16 calls the layer in it otherwise (`transformer_layer`)",
    ),
    "_space": (BEFORE, "0.15 is the last that can write an optimizer so (`fully_sharded_model_space`)"),
    "stages_space": (BEFORE[1:], "0.13 gives later stages the groups of the first by position"),
    "DeepSeek-V2-Lite": _FULL_QUERY,
    "Moonlight-16B-A3B": _FULL_QUERY,
}
"""By a part of their names, single cases that not all releases can run: on which they can, and why no others."""


def running(installed: tuple[int, int]) -> str:
    """The release of the table that has the first two numbers of the installed one; the newest for one that is newer."""
    return next((release for release in (*BEFORE, *ALL) if release.startswith("{}.{}.".format(*installed))), NEWEST)


def mark(item: pytest.Item, release: str) -> None:
    """Mark a test that belongs to the part for the oldest release, and skip one that a release cannot run."""
    row = ROWS[item.path.stem]
    if any(part in item.name for part in row.quick_on_oldest):
        item.add_marker("oldest")
    only = row.only + (BEFORE if any(part in item.name for part in row.before) else ())
    limits = [(only, row.because), *(limit for part, limit in CASES.items() if part in item.name)]
    for only, because in limits:
        if release not in only:
            item.add_marker(pytest.mark.skip(reason=f"runs on megatron-core {', '.join(only)}: {because}"))


def page() -> str:
    """``docs/reference/megatron-versions.md``."""
    return "\n".join([*_INTRODUCTION, *map(_line, ROWS), *_AFTER, *map(_case, CASES), *_SCRIPTS, ""])


_INTRODUCTION = [
    "# On which Megatron what is run",
    "",
    f"Written by `{WRITE}`; `make test` compares. `make test` runs all quick tests on the newest",
    f"megatron-core that the interpreter takes ({NEWEST} from Python 3.11 on, {OLDEST} on 3.10) and a part of them on {OLDEST};",
    "`make test-all` runs all, slow ones too, on every release below. `make demo MEGATRON=0.17.1` and",
    '`make test ARGS="--megatron 0.17.1"` run on another one.',
    "",
    "* **all**: every test of the file, in `make test` as far as it is quick, otherwise in `make test-all`",
    "* **part**: some in `make test`, every one in `make test-all`",
    "* **later**: every test, in `make test-all` only",
    "* **–**: none, for the reason given",
    "",
    f"Runs of megatron-core before 0.16 are left, too: on {', '.join(BEFORE)} some tests run, where it is said, in `make test-all`;",
    f"those that reshape on {BEFORE[0]} in `make test`.",
    "",
    "| file in `tests/reference` | shows | " + " | ".join(ALL) + " | |",
    "|---|---|" + "---|" * len(ALL) + "---|",
]

_AFTER = ["", "Cases that not all releases can run:", "", "| cases named | run on | because |", "|---|---|---|"]

_SCRIPTS = [
    "",
    "## Megatron-LM's own scripts",
    "`tests/reference/test_pretrain.py` runs them on two ranks on the CPU; losses and gradient norms are compared to the last bit.",
    "Without `--megatron-lm FOLDER`, a checkout of Megatron-LM of the release that runs, a script of ours stands in for",
    "`pretrain_gpt.py`: the package has `pretrain`, and no script that calls it.",
    "",
    "* `pretrain_gpt.py` on 0.16.1 and 0.19.2: killed; resumed with the drop-in, by Megatron alone from our step, and with the drop-in",
    "  from Megatron's folder.",
    "* The same on 0.19.2 with Muon, dealt by layout and in ping-pong; Megatron alone goes on from both with",
    "  `--no-use-layer-wise-param-layout`, which it cannot write by layout.",
    "* `train_rl.py` on 0.19.2: GRPO, killed and resumed with the drop-in. The inference engine is a stand-in, which samples with the",
    "  model that is trained: Megatron's needs a GPU. Plain attention takes its packed sequences, for which Megatron wants Transformer",
    "  Engine. Scripts and `megatron.rl` were those of core_v0.19.0, all else 0.19.2's.",
    "* `--rl-durable-rollout-bank`: not run. 0.19.2 has no such option; it is on Megatron-LM's main branch (2a30ffb), and the drop-in",
    "  calls its compaction behind a commit.",
]


def _line(name: str) -> str:
    row = ROWS[name]
    older = f"some on {', '.join(BEFORE)}, too" if row.before else ""
    cells = [f"`{name}.py`", row.shows, *(_when(row, release) for release in ALL), row.because or older]
    return "| " + " | ".join(cells) + " |"


def _when(row: Row, release: str) -> str:
    if release not in row.only:
        return "–"
    if release == NEWEST:
        return "all"
    return "part" if release == OLDEST and row.quick_on_oldest else "later"


def _case(part: str) -> str:
    only, because = CASES[part]
    return f"| `{part}` | {', '.join(only)} | {because} |"


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(f"usage: {WRITE}")
    PAGE.write_text(page())
