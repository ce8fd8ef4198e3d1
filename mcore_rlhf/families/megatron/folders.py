"""Which folders a legacy Megatron checkpoint has, and which rank writes each.

Source: Megatron-LM core_v0.16.1, ``megatron/training/checkpointing.py`` (``get_checkpoint_name``, ``save_checkpoint``).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from mcore_rlhf.errors import CheckpointError, LayoutMismatch, NotACheckpoint, Unsupported, UsageError
from mcore_rlhf.layouts.parallel import ParallelConfig
from mcore_rlhf.layouts.tensor import Shard
from mcore_rlhf.storage import reading
from mcore_rlhf.storage.paths import ReadablePath, beneath

TRACKER = "latest_checkpointed_iteration.txt"
MODEL_FILES = ("model_optim_rng.pt", "model_rng.pt")
OPTIMIZER_FILE = "distrib_optim.pt"
NON_PERSISTENT = "non_persistent"
"""Where a run with ``--non-persistent-ckpt-type global`` keeps its newest steps, beside those that stay; a root of its own.

Source: megatron-core 0.19.2, ``training/checkpointing.py`` (``_NON_PERSISTENT_CKPT_SUBDIR``; ``_load_base_checkpoint``, which takes
that where it is not older)."""
_LOCAL = re.compile(r"iter_(\d{7,18})_\d{1,9}_local\.pt")
"""A file of one rank. Source: NVIDIA/nvidia-resiliency-ext main,
``checkpointing/local/ckpt_managers/local_manager.py`` (``local_ckpt_dir``, ``_filename_from_template``)."""
_RANK_FOLDER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
_ITERATION = re.compile(r"[0-9]{1,18}")
_ITERATION_FOLDER = re.compile(r"iter_(\d{7,})")


@dataclass(frozen=True, slots=True)
class FileRank:
    """The rank that writes one ``mp_rank_…`` folder.

    Args:
        folder: The folder's name.
        tp_rank, pp_rank, ep_rank, etp_rank: Its coordinates.
        rank: Its global rank.
        holds_dense_optimizer: Whether it is the first data-parallel rank of the dense parameters, which writes their
            gathered optimizer state. Other expert-parallel ranks write that of their experts only.
        holds_expert_optimizer: Whether it is the first of the experts' own data-parallel ranks, which writes that of its experts.
    """

    folder: str
    tp_rank: int
    pp_rank: int
    ep_rank: int
    etp_rank: int
    rank: int
    holds_dense_optimizer: bool
    holds_expert_optimizer: bool = True

    def split(self, parallel: ParallelConfig, expert: bool) -> Shard:
        """Its place on the axis that cuts a tensor."""
        return Shard(self.etp_rank, parallel.etp) if expert else Shard(self.tp_rank, parallel.tp)

    def stack(self, parallel: ParallelConfig) -> Shard:
        """Its place on the expert axis."""
        return Shard(self.ep_rank, parallel.ep)


def file_ranks(parallel: ParallelConfig) -> tuple[FileRank, ...]:
    """The ranks that write a file: those with expert-data-parallel rank 0, and those with data-parallel rank 0, which are others where
    dense parameters are cut into more parts than experts are; in order of their global rank.

    Raises:
        Unsupported: Two ranks with other experts share a folder: Megatron itself loses shards in such a layout.
    """
    found: dict[str, FileRank] = {}
    for pp_rank in range(parallel.pp):
        for place in range(max(parallel.etp * parallel.ep, parallel.tp)):
            rank = pp_rank * parallel.stage_size + place
            at, of_experts = parallel.coordinates(rank), place < parallel.etp * parallel.ep
            folder = folder_name(at.tp_rank, pp_rank, at.ep_rank, parallel)
            if folder in found:
                raise Unsupported(_cannot_write(parallel, f"two ranks would write {folder}"))
            found[folder] = FileRank(
                folder, at.tp_rank, pp_rank, at.ep_rank, at.etp_rank, rank, place < parallel.tp, of_experts
            )
    return tuple(found.values())


def _cannot_write(parallel: ParallelConfig, why: str) -> str:
    return (
        f"Megatron's torch format cannot hold TP {parallel.tp}, ETP {parallel.etp}, EP {parallel.ep}: {why}\n"
        "Choose --etp equal to --tp, or one that divides it."
    )


def folder_name(tp_rank: int, pp_rank: int, ep_rank: int, parallel: ParallelConfig) -> str:
    """``mp_rank_TT[_PPP][_EEE]``: a part stands there only where its degree exceeds 1."""
    name = f"mp_rank_{tp_rank:02d}"
    if parallel.pp > 1:
        name += f"_{pp_rank:03d}"
    if parallel.ep > 1:
        name += f"_{ep_rank:03d}"
    return name


def rank_folders(iteration_folder: ReadablePath) -> list[str]:
    """The names of all rank folders, sorted."""
    if not iteration_folder.is_dir():
        return []
    return sorted(p.name for p in iteration_folder.iterdir() if p.is_dir() and _RANK_FOLDER.fullmatch(p.name))


def numbers_in(folder: str) -> tuple[int, ...]:
    """The one to three numbers in the name of a rank folder."""
    match = _RANK_FOLDER.fullmatch(folder)
    return tuple(int(part) for part in match.groups() if part is not None) if match else ()


def model_file(iteration_folder: ReadablePath, folder: str) -> str | None:
    """The name of the model file in a rank folder, or None."""
    return next((name for name in MODEL_FILES if (iteration_folder / folder / name).is_file()), None)


@dataclass(frozen=True, slots=True)
class FoundIteration:
    """A checkpoint found: the root that Megatron would be given, and the folder of one iteration in it.

    ``iteration`` is None for a release, and for a folder that somebody renamed.
    """

    root: ReadablePath
    folder: ReadablePath
    iteration: int | None

    @property
    def release(self) -> bool:
        """Whether it is a release: weights without an iteration of their own."""
        return self.iteration is None and self.folder.name == "release"


def iteration_folder_name(iteration: int | None) -> str:
    """``iter_0000050``, or ``release``."""
    return "release" if iteration is None else f"iter_{iteration:07d}"


def is_iteration_folder(path: ReadablePath) -> bool:
    """Whether a folder directly holds rank folders."""
    return bool(rank_folders(path))


def looks_like_root(path: ReadablePath, is_checkpoint: Callable[[ReadablePath], bool] = is_iteration_folder) -> bool:
    """Whether a folder holds iterations of a format; where the tracker names one that is there, that one decides.

    Args:
        path: The folder.
        is_checkpoint: Whether a folder directly holds a checkpoint of the format.
    """
    found = iteration_folders(path)
    meant = [n for n in tracked(path) if n in found]
    return any(is_checkpoint(found[n]) for n in meant or found)


def tracked(root: ReadablePath) -> tuple[int | None, ...]:
    """The iteration that the tracker names, None for a release; nothing where it says nothing that can be read.

    Args:
        root: The folder of iterations.
    """
    try:
        text = reading.read_line(root / TRACKER)
    except OSError:
        return ()
    if text == "release":
        return (None,)
    return (int(text),) if _ITERATION.fullmatch(text) else ()


def iteration_meant(root: ReadablePath, step: int | None) -> ReadablePath | None:
    """The folder of the iteration that a root means; None where it means none.

    Args:
        root: Any folder.
        step: The iteration that is wanted; None for what the tracker names.
    """
    wanted = tracked(root) if step is None else (step,)
    found = iteration_folders(root) if wanted else {}
    return next((found[one] for one in wanted if one in found), None)


def folder_meant(root: ReadablePath, step: int | None) -> ReadablePath | None:
    """The iteration that a root means, or DeepSpeed's tag; None where it means none.

    Source: DeepSpeed 0.19.8, ``runtime/engine.py`` (``save_checkpoint``: ``global_stepN`` where nobody names the tag, and ``latest``).

    Args:
        root: Any folder.
        step: Which is wanted; None for what the tracker names.
    """
    found = iteration_meant(root, step)
    with suppress(OSError, ValueError, CheckpointError):
        tag = reading.read_line(root / "latest").strip() if step is None else f"global_step{step}"
        folder = beneath(root, tag, "tag", parts=1)
        return found or (folder if folder.is_dir() else None)
    return found


def iteration_folders(root: ReadablePath) -> dict[int | None, ReadablePath]:
    """The ``iter_…`` and ``release`` folders of a root by iteration, None for the release; whatever is in them."""
    found: dict[int | None, ReadablePath] = {}
    for child in sorted(root.iterdir()) if root.is_dir() else []:
        match = _ITERATION_FOLDER.fullmatch(child.name)
        if child.is_dir() and match:
            found[int(match.group(1))] = child
        elif child.is_dir() and child.name == "release":
            found[None] = child
    return found


def locate(
    path: ReadablePath,
    step: int | None,
    is_checkpoint: Callable[[ReadablePath], bool] = is_iteration_folder,
    holds: str = "mp_rank_… folders",
) -> FoundIteration:
    """Find the iteration that a path means: an ``iter_`` folder itself, or a root whose tracker decides.

    Args:
        path: The folder.
        step: The iteration that is wanted, where the tracker does not decide.
        is_checkpoint: Whether a folder directly holds a checkpoint of the format.
        holds: What such a folder has in it, for the message.

    Raises:
        NotACheckpoint: There is none.
        UsageError: Several iterations, and neither a tracker nor ``step`` says which.
    """
    if is_checkpoint(path):
        match = _ITERATION_FOLDER.fullmatch(path.name)
        return FoundIteration(path.parent, path, int(match.group(1)) if match else None)
    found = {n: folder for n, folder in iteration_folders(path).items() if is_checkpoint(folder)}
    if not found:
        raise NotACheckpoint(f"{path}: no iter_XXXXXXX or release folder with {holds} in it")
    wanted = _wanted(path, step, found)
    if wanted not in found:
        name = iteration_folder_name(wanted)
        raise NotACheckpoint(
            f"{path}: {name} is wanted by {'--step' if step is not None else TRACKER}, but there is no such checkpoint; "
            f"found {', '.join(folder.name for folder in found.values())}\nName one of them with --step."
        )
    return FoundIteration(path, found[wanted], wanted)


def _wanted(path: ReadablePath, step: int | None, found: dict[int | None, ReadablePath]) -> int | None:
    if step is not None:
        return step
    tracker = path / TRACKER
    if not tracker.is_file():
        candidates = ", ".join(folder.name for folder in found.values())
        raise UsageError(
            f"{path}: there is no {TRACKER} to say which checkpoint is meant; found {candidates}\nGive --step N."
        )
    text = reading.read_line(tracker)
    if text != "release" and not _ITERATION.fullmatch(text):
        raise LayoutMismatch(f"{tracker}: expected an iteration or 'release', found {text[:40]!r}\nGive --step N.")
    return None if text == "release" else int(text)


def newer_non_persistent(root: ReadablePath, iteration: int | None) -> str:
    """A line about a non-persistent checkpoint beside others that is newer than the one that was chosen; empty where there is none.

    Args:
        root: The folder that a run would be given.
        iteration: What was chosen; None for a release, and where nothing was.
    """
    beside = root / NON_PERSISTENT
    found = max((n for n in tracked(beside) if n is not None), default=None)
    if found is None or found not in iteration_folders(beside) or (iteration is not None and found <= iteration):
        return ""
    older = "" if iteration is None else f", newer than iteration {iteration}"
    return (
        f"{NON_PERSISTENT}/ holds iteration {found}{older}: Megatron goes on from it with --non-persistent-ckpt-type global; to take it, "
        f"give {beside}"
    )


def refuse_of_ranks(path: ReadablePath) -> None:
    """Name what ranks keep each for themselves as what it is: local checkpoints, and a LoRA of miles'.

    Args:
        path: A folder in no format that is known.

    Raises:
        Unsupported: It is a folder of those.
    """
    _refuse_local(path)
    found = next(
        (file for pattern in ("", "adapter/", "iter_*/adapter/") for file in sorted(path.glob(pattern + ADAPTERS))),
        None,
    )
    if found is None:
        return
    own = (found.parent / "adapter_config.json").is_file()
    raise Unsupported(
        f"{path}: a LoRA of miles' on Megatron: adapters in {ADAPTERS} as each rank has them, training_state_rankR.pt beside them, "
        "no base: not read\nmiles itself goes on from it on the same ranks. "
        + (f"For all else give {found.parent}, which has peft's own files beside them." if own else
           "It could not export peft's own files beside them, as its log says: let it, and give the folder with those.")
    )  # fmt: skip


ADAPTERS = "adapter_megatron_*.pt"
"""In ``iter_N/adapter``, for each rank. Source: miles 31f1ca9, ``miles/backends/megatron_utils/lora_utils.py`` (``save_lora_checkpoint``;
``adapter_megatron_tpT_ppP.pt`` before)."""


def _refuse_local(path: ReadablePath) -> None:
    """Name the local checkpoints of nvidia-resiliency-ext as what they are (``--non-persistent-ckpt-type local``).

    They lie at ``[SESSION/]RANK/iter_0000010_RANK_local.pt``.

    Args:
        path: A folder in no format that is known.

    Raises:
        Unsupported: It is a folder of those, of one rank or of all.
    """
    found = []
    for pattern in ("", "*/", "*/*/"):
        found = [file for file in path.glob(f"{pattern}iter_*_local.pt") if _LOCAL.fullmatch(file.name)]
        if found:
            break
    if not found:
        return
    steps = sorted({int(match.group(1)) for file in found if (match := _LOCAL.fullmatch(file.name))})
    raise Unsupported(
        f"{path}: holds local checkpoints of nvidia-resiliency-ext (--non-persistent-ckpt-type local) of iteration "
        f"{', '.join(map(str, steps[-3:]))}, {len(found)} files such as {found[0].name}: each is what one rank had in memory, on its own "
        "node, for a restart of the same ranks, and is not read\n"
        "Let the run that wrote them load them and save a checkpoint that stays (--save), and convert that."
    )
