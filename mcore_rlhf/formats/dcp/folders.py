"""Where the DCP folder of a run lies: what RLinf, torchtitan and plain ``dcp.save`` make of a checkpoint."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import islice

from mcore_rlhf.errors import NotACheckpoint, UsageError
from mcore_rlhf.families.run_folders import RLINF_FOLDER, named_step
from mcore_rlhf.storage.dcp import METADATA_FILE
from mcore_rlhf.storage.paths import ReadablePath, absolute
from mcore_rlhf.storage.pieces import has_pieces

FULL_WEIGHTS = "model_state_dict/full_weights.pt"
_MISSPELLED = "model_state_dict/full_weigths.pt"
"""RLinf's documentation has both spellings."""
LOCAL_SHARDS = "local_shard_checkpoint"


@dataclass(frozen=True, slots=True)
class DcpFolders:
    """What was found.

    Args:
        root: The checkpoint's folder, to which all paths are relative.
        folder: The DCP folder, or one with pieces of the model; None where only plain weights are there.
        weights: RLinf's plain weights, relative to the root, or None.
        step: The step that folders' names say.
        shards: RLinf's rank files without offsets, relative to the root; empty where there are none.
        optimizer: The optimizer's DCP folder, where it is one of its own beside the model's.
    """

    root: ReadablePath
    folder: ReadablePath | None
    weights: str | None = None
    step: int | None = None
    shards: tuple[str, ...] = ()
    optimizer: ReadablePath | None = None


def is_dcp(folder: ReadablePath) -> bool:
    """Whether a folder holds DCP files that are not Megatron's; an unfinished save, without ``.metadata``, does too."""
    if (folder / "metadata.json").is_file() or (folder / "common.pt").is_file():
        return False
    return (folder / METADATA_FILE).is_file() or any(folder.glob("__*_*.distcp"))


def weights_file(root: ReadablePath) -> str | None:
    """RLinf's plain weights of an actor, relative to its folder."""
    return next((name for name in (FULL_WEIGHTS, _MISSPELLED) if (root / name).is_file()), None)


def _shards(root: ReadablePath) -> tuple[str, ...]:
    found = (root / LOCAL_SHARDS).glob("checkpoint_rank_*.pt")
    return tuple(path.relative_to(root).as_posix() for path in sorted(found))


def is_checkpoint(path: ReadablePath) -> bool:
    """Whether a folder is one checkpoint."""
    dcp = is_dcp(path) or is_dcp(path / RLINF_FOLDER) or _split(path) is not None
    dcp = dcp or (has_pieces(path) and optimizer_beside(path) is not None)
    return dcp or weights_file(path) is not None or bool(_shards(path))


_SPLIT = {
    "weights": "optimizer",
    "weights/model": "optimizer/optim",
    "model": "optim",
    r"pytorch_model_fsdp_(\d{1,18})": r"optimizer_\1",
}
"""Trainers that save the optimizer in a folder of its own: what the model's is called, and the optimizer's beside it.

Source: NeMo-RL ``nemo_rl/utils/native_checkpoint.py`` (``save_checkpoint``) at 00cb7b5, below ``step_N/policy``; nemo_automodel 0.4.0
``components/checkpoint/checkpointing.py`` (``save_model``, ``save_optimizer``), below the same in NeMo-RL's DTensor v2, and as it names
them in verl 0.9.1's ``workers/engine/automodel`` (``save_checkpoint``), where the model's are DCP files or, by default, safetensors in
pieces; accelerate 1.15 ``utils/fsdp_utils.py`` (``save_fsdp_model``,
``save_fsdp_optimizer``), below a ``Trainer``'s ``checkpoint-N``.
"""

_ANYBODYS = "model"
"""A name that a role may have as well: what is called so is the model of a checkpoint only where an optimizer lies beside it."""
NEMO_APART = ("weights", "optimizer")
"""As a run of :data:`NEMO_RL` has them: the model's, and that of the optimizer with its schedulers."""
NEMO_V2_APART = ("weights/model", "optimizer/optim")
"""The same of its DTensor v2, which takes the model's as safetensors or as DCP files, whichever are there, and saves as it is told.

Source: NeMo-RL 7ea279a, ``nemo_rl/models/automodel/checkpoint.py`` (``detect_checkpoint_format``, ``load_checkpoint``).
"""
NEMO_RL = "nemo-rl"
"""A trainer for whose runs the folders are not those that a source had: see :attr:`.WriteOptions.run_of`."""
APART = ("pytorch_model_fsdp_0", "optimizer_0")
"""accelerate's two, as it is told to load them: of its first model, and its first optimizer."""


def is_apart(path: ReadablePath) -> bool:
    """Whether a folder has the first of these."""
    return path.is_dir() and is_dcp(path / APART[0])


def _split(path: ReadablePath) -> ReadablePath | None:
    """The model's folder below one that has it and the optimizer's side by side; pieces are a folder of their own without one."""
    for name in ("weights", "weights/model", "pytorch_model_fsdp_0", _ANYBODYS):
        folder = path / name
        alone = name != _ANYBODYS and is_dcp(folder)
        if alone or ((is_dcp(folder) or has_pieces(folder)) and optimizer_beside(folder) is not None):
            return folder
    return None


def optimizer_beside(folder: ReadablePath) -> tuple[ReadablePath, ReadablePath] | None:
    """The folder of both, and the optimizer's DCP folder in it, where it has one of its own."""
    path = absolute(folder)
    for pattern, name in _SPLIT.items():
        above = list(islice((path, *path.parents), pattern.count("/") + 2))
        base = above[-1]
        match = re.fullmatch(pattern, path.relative_to(base).as_posix())
        if match and is_dcp(beside := base / match.expand(name)):
            return base, beside
    return None


def _steps(root: ReadablePath) -> dict[int, ReadablePath]:
    """Torchtitan's ``step-N`` folders."""
    if not root.is_dir():
        return {}
    found = [(path, re.fullmatch(r"step-(\d{1,18})", path.name)) for path in root.iterdir()]
    return {int(match[1]): path for path, match in sorted(found) if match and is_dcp(path)}


def detect(path: ReadablePath) -> bool:
    """Whether a folder is a checkpoint, or a root with torchtitan's steps."""
    return is_checkpoint(path) or bool(_steps(path))


def locate(path: ReadablePath, step: int | None) -> DcpFolders:
    """Find the checkpoint that a folder means.

    Args:
        path: A DCP folder, an actor's folder, or a root with ``step-N`` folders.
        step: Which step, where a root has several.

    Raises:
        NotACheckpoint: There is none.
        UsageError: There are several, and none was named.
    """
    if is_checkpoint(path):
        held = (found for found in (path, path / RLINF_FOLDER, _split(path)) if found)
        folder = next((found for found in held if is_dcp(found) or has_pieces(found)), None)
        if folder is not None and (beside := optimizer_beside(folder)) is not None:
            base, optimizer = beside
            root = path if absolute(path) == base else base  # as it was given, where it is that
            inside, its = absolute(folder).relative_to(base), optimizer.relative_to(base)
            return DcpFolders(root, root / inside, step=named_step(base), optimizer=root / its)
        return DcpFolders(path, folder, weights_file(path), named_step(path), () if folder else _shards(path))
    steps = _steps(path)
    if not steps:
        raise NotACheckpoint(f"{path}: holds no DCP folder: no {METADATA_FILE}, no {RLINF_FOLDER}, no step-N")
    if step is None and len(steps) > 1:
        listed = ", ".join(map(str, steps))
        raise UsageError(f"{path}: holds the steps {listed}\nName one with --step, or give its folder.")
    chosen = steps.get(step) if step is not None else next(iter(steps.values()))
    if chosen is None:
        raise NotACheckpoint(f"{path}: has no step {step}; there are {', '.join(map(str, steps))}")
    return DcpFolders(chosen, chosen, None, named_step(chosen))
