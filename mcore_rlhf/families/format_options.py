"""The rows of :mod:`.options` that are about one format alone: Megatron-core's ``torch_dist``, and Hugging Face's folders."""

from __future__ import annotations

from dataclasses import dataclass

from mcore_rlhf.models.meaning.bounds import MOST_RANKS

from .option_types import CONTENT, HUGGING_FACE, SAFETY, Takes, flag, number, one_of, option


@dataclass(frozen=True, slots=True)
class FormatOptions:
    """What such a checkpoint is to be."""

    optimizer_sharding: str | None = option(
        one_of("fully_reshardable", "dp_reshardable", "fully_sharded_model_space"),
        "How a distributed optimizer's states are stored.",
        group=CONTENT,
        more="Megatron loads `fully_reshardable` on any layout, and `dp_reshardable`, its own default, at the same TP, PP and EP alone. "
        "megatron-core before 0.15 knows neither: for its runs there is `fully_sharded_model_space`, which it loads on any layout.",
        takes=Takes.TORCH_DIST,
        default="fully_reshardable",
    )
    integrity: bool = flag(
        "Write integrity.json, the SHA-256 of all files.",
        "--no-integrity",
        group=SAFETY,
        more="Runs with `--verify-integrity` (megatron-core 0.17.1 and later) load no folder without it. Every file is read again for it.",
        takes=Takes.TORCH_DIST,
    )
    pieces: int | None = option(
        number(1, MOST_RANKS),
        "Cut the weights of a Hugging Face folder into pieces, a file for each of N ranks.",
        group=HUGGING_FACE,
        more="As torch's `HuggingFaceStorageWriter(save_distributed=True)` leaves them, which NeMo-RL and transformers use; "
        "`--max-shard-size` is of the files that they are put together to. `from_pretrained` loads no pieces.",
        takes=Takes.MODEL_FOLDER,
    )
