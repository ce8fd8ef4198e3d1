"""The rows of :mod:`.options` that are about how the weight files of a Hugging Face folder are cut."""

from __future__ import annotations

from dataclasses import dataclass

from mcore_rlhf.models.meaning.bounds import MOST_RANKS

from .dist_options import DistOptions
from .option_types import HUGGING_FACE, Takes, number, option


@dataclass(frozen=True, slots=True)
class FolderOptions(DistOptions):
    """What such a folder is to be, and Megatron-core's: a class with slots can have one base."""

    pieces: int | None = option(
        number(1, MOST_RANKS),
        "Cut the weights of a Hugging Face folder into pieces, a file for each of N ranks.",
        group=HUGGING_FACE,
        more="As torch's `HuggingFaceStorageWriter(save_distributed=True)` leaves them, which NeMo-RL and transformers use; "
        "`--max-shard-size` is of the files that they are put together to. `from_pretrained` loads no pieces.",
        takes=Takes.MODEL_FOLDER,
    )
