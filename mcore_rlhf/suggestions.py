"""What somebody may have meant who typed a word that is not known: one that is nearly it, or what another program calls the same thing."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

FORMATS: Mapping[str, str] = {
    "huggingface": "hf", "hugging_face": "hf", "safetensors": "hf", "hf_checkpoint": "hf",
    "fsdp": "dcp", "fsdp1": "dcp", "fsdp2": "dcp", "distcp": "dcp", "torch_dcp": "dcp", "distributed_checkpoint": "dcp",
    "torch_dist": "megatron-dist", "dist": "megatron-dist", "mcore": "megatron-dist", "megatron_core": "megatron-dist",
    "mcore_dist": "megatron-dist", "legacy": "megatron", "megatron_lm": "megatron",
    "zero": "deepspeed", "zero0": "deepspeed", "zero1": "deepspeed", "zero2": "deepspeed", "zero3": "deepspeed", "ds": "deepspeed",
    "ucp": "universal", "uni": "universal", "deepspeed_universal": "universal", "ds_universal": "universal",
    "torch_save": "torch", "state_dict": "torch", "state.pt": "torch",
    "lora": "peft", "adapter": "peft", "fsdp_ranks": "fsdp-ranks", "rank_files": "fsdp-ranks",
    "trl": "transformers", "trainer": "transformers", "hf_trainer": "hf-trainer", "nemo": "nemo-rl", "nemorl": "nemo-rl",
    "open_rlhf": "openrlhf", "titan": "torchtitan",
}  # fmt: skip
"""Formats, and trainers whose runs are written, by what others call them."""

FLAGS: Mapping[str, str] = {
    **dict.fromkeys(("tp", "tp-size", "tensor-parallel-size", "tensor-model-parallel-size", "target-tensor-parallel-size",
                     "target-tp", "tensor-parallel", "train-tensor-parallel"), "--tp"),
    **dict.fromkeys(("pp", "pp-size", "pipeline-parallel-size", "pipeline-model-parallel-size", "target-pipeline-parallel-size",
                     "target-pp", "pipeline-parallel"), "--pp"),
    **dict.fromkeys(("vpp", "virtual-pipeline-model-parallel-size", "num-layers-per-virtual-pipeline-stage",
                     "num-virtual-stages-per-pipeline-rank"), "--vpp"),
    **dict.fromkeys(("ep", "expert-parallel-size", "expert-model-parallel-size", "target-expert-parallel-size"), "--ep"),
    **dict.fromkeys(("etp", "expert-tensor-parallel-size"), "--etp"),
    **dict.fromkeys(("dp", "data-parallel-size"), "--dp"),
    **dict.fromkeys(("stage", "zero", "target-zero-stage"), "--zero-stage"),
    **dict.fromkeys(("ckpt-format", "format", "target-format", "output-format", "dist-ckpt-format", "backend"), "--to"),
    **dict.fromkeys(("ckpt-step", "iteration", "iter", "global-step", "tag"), "--step"),
    **dict.fromkeys(("params-dtype", "torch-dtype", "precision", "bf16", "fp16", "fp32"), "--dtype"),
    **dict.fromkeys(("model", "component", "name"), "--role"),
    **dict.fromkeys(("true-vocab-size", "vocab"), "--vocab-size"),
    **dict.fromkeys(("tokenizer-model", "tokenizer-dir", "tokenizer-name-or-path", "tokenizer-path"), "--tokenizer"),
    **dict.fromkeys(("hf-model-path", "origin-hf-dir", "hf-config", "hf-path", "reference-model"), "--reference-config"),
    **dict.fromkeys(("num-extract-workers", "num-merge-workers", "num-workers", "jobs", "threads", "num-proc"), "--workers"),
    **dict.fromkeys(("force", "overwrite-output-dir", "exist-ok"), "--overwrite"),
    **dict.fromkeys(("no-load-optim", "no-save-optim", "weights-only", "exclude-optimizer"), "--no-optimizer"),
    **dict.fromkeys(("use-distributed-optimizer", "no-use-distributed-optimizer"), "--optimizer"),
    **dict.fromkeys(("max-memory-bytes", "memory"), "--max-memory"),
    **dict.fromkeys(("dist-ckpt-optim-fully-reshardable", "dist-ckpt-optim-sharding"), "--optimizer-sharding"),
    **dict.fromkeys(("merge-lora", "merge-peft", "merge"), "--merge-adapter"),
    **dict.fromkeys(("load", "load-dir", "input-dir", "input-folder", "checkpoint-dir", "load-path", "local-dir", "src", "source", "input",
                     "checkpoint", "ckpt", "ckpt-dir", "path", "root"), "SRC"),
    **dict.fromkeys(("save", "save-dir", "output-dir", "output-folder", "target-dir", "save-path", "dst", "dest",
                     "destination", "target", "output", "out", "o"), "DST"),
}  # fmt: skip
"""Options and arguments, by what Megatron-LM, DeepSpeed and the converters of the trainers call them, without dashes in front."""


_ALIKE = 0.7
"""From how much of two words that is the same they are taken for one: of 0.6, ``--tp`` is nearly ``--step``, and ``src`` ``strict``."""

_NOUGHTS = re.compile(r"(?<!\d)0+(?=\d)")
"""In front of numbers: ``iter_2`` is ``iter_0000002``."""


def meant(word: str, known: Iterable[str], others: Mapping[str, str] | None = None) -> str | None:
    """The word that was meant; None where nobody can say.

    Args:
        word: What was typed.
        known: Words that are right.
        others: Such words, by what other people call them.
    """
    known = list(known)
    return same(word, known, others) or similar(word, known)


def same(word: str, known: Iterable[str], others: Mapping[str, str] | None = None) -> str | None:
    """The word that is spelled otherwise, or that other people call so; None where there is none. See :func:`meant`."""
    there, plain = {_plain(one): one for one in known}, _plain(word)
    called = (others or {}).get(plain) or (others or {}).get(plain.replace("_", "-"))
    return there.get(plain) or (called if called in there.values() else None)


def similar(word: str, known: Iterable[str]) -> str | None:
    """The word that is nearly so; None where none is."""
    import difflib  # takes milliseconds, which who is understood need not wait

    there = {_plain(one): one for one in known}
    return next((there[one] for one in difflib.get_close_matches(_plain(word), there, n=1, cutoff=_ALIKE)), None)


def did_you_mean(word: str, known: Iterable[str], others: Mapping[str, str] | None = None) -> str:
    """The end of a message on a word that is not known: ``; did you mean 'hf'?``, or nothing."""
    found = meant(word, known, others)
    return f"; did you mean {found!r}?" if found else ""


def _plain(word: str) -> str:
    return _NOUGHTS.sub("", re.sub(r"[-\s.]+", "_", word.strip().lower().lstrip("-")))


_OF_HUB = re.compile(
    r"(?:hf:/*|https?:/+(?:www\.)?(?:huggingface\.co|hf\.co)/)?([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:/|/tree/main/?)?"
)
"""A model as its page has it, and as the page's address has it."""


def hub_name(path: str, *, local: bool = False) -> str:
    """What a path that does not exist may have been meant for: a model of the Hugging Face Hub; a line of advice, or nothing.

    Args:
        path: As it was typed.
        local: Whether only a folder can be given there.
    """
    found = _OF_HUB.fullmatch(path)
    if found is None:
        return ""
    meant = f"Copy it first: hf download {found[1]} --local-dir FOLDER" if local else f"That is hf://{found[1]}."
    return f"\nIs a model of the Hugging Face Hub meant? {meant}"
